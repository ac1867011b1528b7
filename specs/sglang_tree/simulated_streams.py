"""Streams and events under the names of `torch.cuda`, as far as SGLang's cache uses them.

A stream is a list of work that has not run. Work runs when somebody waits for it, or when the machine says so
(`Stream.run_next`). What a stream must wait for runs first. The default stream has no list: its work runs at
once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any


class _Record:
    """One recording of an event: the place in a stream up to which work must have run."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.done = stream, False

    def wait(self) -> None:
        while not self.done:
            self.stream.run_next()


class Stream:
    """Work that runs in the order in which it was given."""

    current: Stream

    def __init__(self) -> None:
        self._work: deque[Callable[[], object]] = deque()

    def add(self, work: Callable[[], object]) -> None:
        """Give work to the stream."""
        if self is default:
            work()
        else:
            self._work.append(work)

    def run_next(self) -> bool:
        """Run the oldest work; False if there is none."""
        if self._work:
            self._work.popleft()()
            return True
        return False

    def synchronize(self) -> None:
        """Run all work."""
        while self.run_next():
            pass

    def wait_event(self, event: Event) -> None:
        """What is given from now on runs after what the event has recorded."""
        if event.last is not None:
            self.add(event.last.wait)

    def wait_stream(self, other: Stream) -> None:
        """What is given from now on runs after all that the other stream has now."""
        event = Event()
        event.record(other)
        self.wait_event(event)


class Event:
    """A place in a stream."""

    def __init__(self, enable_timing: bool = False) -> None:  # noqa: ARG002 (torch's argument)
        self.last: _Record | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Mark the end of what the stream has now."""
        stream = stream or Stream.current
        self.last = last = _Record(stream)
        stream.add(lambda: setattr(last, "done", True))

    def wait(self, stream: Stream | None = None) -> None:
        """Let a stream wait for the event."""
        (stream or Stream.current).wait_event(self)

    def query(self) -> bool:
        """Whether it has been reached."""
        return self.last is None or self.last.done

    def synchronize(self) -> None:
        """Run what it waits for."""
        if self.last is not None:
            self.last.wait()

    def elapsed_time(self, other: Event) -> float:  # noqa: ARG002 (torch's argument)
        """No time passes here."""
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
"""In place of `torch.cuda`."""
