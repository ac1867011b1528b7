"""Simulated streams and events with the part of `torch.cuda`'s interface that SGLang's cache uses.

A stream is a list of pending work. Work runs when a call waits for it, or when the machine says so
(`Stream.run_next`). Work on other streams that it must wait for runs first. The default stream has no list:
its work runs at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any


class _Record:
    """A recording of an event: the position in a stream up to which work must have run."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.done = stream, False

    def wait(self) -> None:
        while not self.done:
            self.stream.run_next()


class Stream:
    """A queue of work that runs in order."""

    current: Stream

    def __init__(self) -> None:
        self._work: deque[Callable[[], object]] = deque()

    def add(self, work: Callable[[], object]) -> None:
        """Queue work; the default stream runs it at once."""
        if self is default:
            work()
        else:
            self._work.append(work)

    def run_next(self) -> bool:
        """Run the oldest work. Returns False if there is none."""
        if self._work:
            self._work.popleft()()
            return True
        return False

    def synchronize(self) -> None:
        """Run all work."""
        while self.run_next():
            pass

    def wait_event(self, event: Event) -> None:
        """Let work that is queued from now on wait for the event."""
        if event.last is not None:
            self.add(event.last.wait)

    def wait_stream(self, other: Stream) -> None:
        """Let work that is queued from now on wait for all work that the other stream has now."""
        event = Event()
        event.record(other)
        self.wait_event(event)


class Event:
    """A position in a stream."""

    def __init__(self, enable_timing: bool = False) -> None:  # noqa: ARG002 (torch's argument)
        self.last: _Record | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Record the event after the work that the stream has now."""
        stream = stream or Stream.current
        self.last = last = _Record(stream)
        stream.add(lambda: setattr(last, "done", True))

    def wait(self, stream: Stream | None = None) -> None:
        """Let a stream wait for the event."""
        (stream or Stream.current).wait_event(self)

    def query(self) -> bool:
        """Whether the event is done, or was never recorded."""
        return self.last is None or self.last.done

    def synchronize(self) -> None:
        """Run the stream until the event is done."""
        if self.last is not None:
            self.last.wait()

    def elapsed_time(self, other: Event) -> float:  # noqa: ARG002 (torch's argument)
        """Always 0: streams have no clock."""
        return 0.0


default = Stream()
Stream.current = default


@contextmanager
def _use(stream: Stream) -> Iterator[None]:
    before, Stream.current = Stream.current, stream
    try:
        yield
    finally:
        Stream.current = before


MODULE: Any = SimpleNamespace(
    __name__="simulated_streams",
    Stream=Stream,
    Event=Event,
    stream=_use,
    current_stream=lambda: Stream.current,
)
"""Replaces `torch.cuda`."""
