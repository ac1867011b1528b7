"""Replacements of `threading`, `queue` and parts of `time` and `os` for code under control.

Each operation that may wait, or whose result depends on other threads, is a step: `ThreadControl.reach` is
called before it. Releasing a lock and notifying are no steps: a switch before them would allow nothing that a
switch before the next step does not. For the calls that kvsm makes, they behave like the originals.
"""

from __future__ import annotations

import linecache
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from queue import Empty
from typing import Any, Generic, TypeVar

from kvsm.check.threads.control import TurnThread, control

T = TypeVar("T")


class TurnLock:
    """A `threading.Lock`."""

    def __init__(self) -> None:
        self.name = _name_of_new()
        self.holder: TurnThread | None = None

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Acquire the lock. False if it is held, or after a timeout."""
        return self._acquire(blocking, timeout)

    def _acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        run = control()
        limit = timeout if blocking and timeout >= 0 else None
        if not run.reach(f"takes {self.name}", self._is_free if blocking else None, limit, depth=3):
            return False
        if self.holder is not None:
            return False
        self.holder = run.current
        return True

    def release(self) -> None:
        """Release the lock."""
        self.holder = None

    def locked(self) -> bool:
        """Whether a thread holds it."""
        control().reach(f"asks whether {self.name} is held")
        return self.holder is not None

    def __enter__(self) -> bool:
        return self._acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def _is_free(self) -> bool:
        return self.holder is None


class TurnRLock:
    """A `threading.RLock`. Its holder acquires it again without a step."""

    def __init__(self, name: str = "") -> None:
        self.name = name or _name_of_new()
        self.holder: TurnThread | None = None
        self.depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        return self.take(blocking, timeout)

    def take(self, blocking: bool = True, timeout: float = -1, depth: int = 3) -> bool:
        """As `acquire`. depth: of the frame of the code under test; see `ThreadControl.reach`."""
        run = control()
        if self.holder is None or self.holder is not run.current:
            limit = timeout if blocking and timeout >= 0 else None
            if not run.reach(f"takes {self.name}", self.is_free if blocking else None, limit, depth=depth):
                return False
            if self.holder is not None:
                return False
            self.holder = run.current
        self.depth += 1
        return True

    def release(self) -> None:
        self.depth -= 1
        if self.depth <= 0:
            self.depth, self.holder = 0, None

    def __enter__(self) -> bool:
        return self.take()

    def __exit__(self, *_: object) -> None:
        self.release()

    def is_free(self) -> bool:
        """Whether another thread can take it."""
        return self.holder is None


class TurnCondition:
    """A `threading.Condition` with a reentrant lock and without spurious wakeups."""

    def __init__(self, lock: None = None) -> None:
        assert lock is None, "only conditions with a lock of their own are controlled"
        self.name = _name_of_new()
        self._lock = TurnRLock(self.name)
        self._waiting: deque[list[bool]] = deque()
        """For each waiting thread whether it was notified, oldest first."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        return self._lock.take(blocking, timeout)

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> bool:
        return self._lock.take()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until notified. False after a timeout."""
        return self._wait(timeout, 3)

    def wait_for(self, predicate: Callable[[], T], timeout: float | None = None) -> T:
        """Wait until `predicate` returns a true value, and return it; after a timeout, its last value."""
        while not (result := predicate()):
            if not self._wait(timeout, 3):
                return predicate()
        return result

    def notify(self, n: int = 1) -> None:
        """Wake `n` threads, the longest waiting first."""
        if self._lock.holder is not control().current and not control().abandoned:
            raise RuntimeError("cannot notify on un-acquired lock")
        for waiting in list(self._waiting)[:n]:
            waiting[0] = True
            self._waiting.remove(waiting)

    def notify_all(self) -> None:
        """Wake all waiting threads."""
        self.notify(len(self._waiting))

    def _wait(self, timeout: float | None, depth: int) -> bool:
        lock, run = self._lock, control()
        if lock.holder is not run.current and not run.abandoned:
            raise RuntimeError("cannot wait on un-acquired lock")
        held, lock.depth, lock.holder = lock.depth, 0, None
        notified = [False]
        self._waiting.append(notified)
        what = f"waits for {self.name} to change"
        run.reach(what, lambda: notified[0] and lock.holder is None, timeout, depth=depth)
        if not notified[0]:  # its time is up
            self._waiting.remove(notified)
            run.reach(f"takes {self.name}", lock.is_free, depth=depth)
        lock.holder, lock.depth = run.current, held
        return notified[0]


class TurnEvent:
    """A `threading.Event`."""

    def __init__(self) -> None:
        self.name = _name_of_new()
        self._is_set = False

    def is_set(self) -> bool:
        """Whether it is set."""
        control().reach(f"asks whether {self.name} is set")
        return self._is_set

    def set(self) -> None:
        """Set the event: threads that wait for it continue."""
        control().reach(f"sets {self.name}")
        self._is_set = True

    def clear(self) -> None:
        """Clear the event: later waits block."""
        control().reach(f"clears {self.name}")
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        control().reach(f"waits for {self.name}", lambda: self._is_set, timeout)
        return self._is_set


class TurnSemaphore:
    """A `threading.Semaphore`."""

    def __init__(self, value: int = 1) -> None:
        self.name = _name_of_new()
        self._value = value

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        return self._acquire(blocking, timeout)

    def _acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        ready = (lambda: self._value) if blocking else None
        control().reach(f"takes {self.name}", ready, timeout if blocking else None, depth=3)
        if not self._value:
            return False
        self._value -= 1
        return True

    def release(self, n: int = 1) -> None:
        self._value += n

    def __enter__(self) -> bool:
        return self._acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class TurnQueue(Generic[T]):
    """A `queue.SimpleQueue`, or a `queue.Queue` without a limit."""

    def __init__(self, maxsize: int = 0) -> None:
        assert maxsize <= 0, "only queues without a limit are controlled"
        self.name = _name_of_new()
        self._items: deque[T] = deque()

    def put(self, item: T, block: bool = True, timeout: float | None = None) -> None:  # noqa: ARG002
        control().reach(f"puts into {self.name}")
        self._items.append(item)

    def get(self, block: bool = True, timeout: float | None = None) -> T:
        """Remove and return the oldest item. Raises `Empty`."""
        ready = (lambda: self._items) if block else None
        control().reach(f"takes from {self.name}", ready, timeout if block else None)
        if not self._items:
            raise Empty
        return self._items.popleft()

    def empty(self) -> bool:
        """Whether the queue is empty."""
        control().reach(f"asks whether {self.name} is empty")
        return not self._items


class ControlledThread:
    """A `threading.Thread`."""

    def __init__(
        self,
        group: None = None,  # noqa: ARG002
        target: Callable[..., object] | None = None,
        name: str | None = None,
        args: Iterable[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self.name, self.daemon = name or "thread", bool(daemon)
        self.native_id = None
        self._call = target, tuple(args), dict(kwargs or {})
        self._thread: TurnThread | None = None

    def start(self) -> None:
        """Begin to run."""
        if self._thread is not None:
            raise RuntimeError("threads can only be started once")
        self._thread = control().begin(self.name, self.run)

    def run(self) -> None:
        """Call the target."""
        target, args, kwargs = self._call
        if target is not None:
            target(*args, **kwargs)

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended."""
        thread = self._thread
        if thread is None:
            raise RuntimeError("cannot join thread before it is started")
        control().reach(f"joins {thread.name}", lambda: thread.ended, timeout)

    def is_alive(self) -> bool:
        """Whether it runs."""
        control().reach(f"asks whether {self.name} is alive")
        return self._thread is not None and not self._thread.ended


# Time and files.


def sleep(seconds: float) -> None:
    """`time.sleep`."""
    control().reach("sleeps", lambda: False, seconds)


def now_ns() -> int:
    """`time.monotonic_ns` and the like. Each call advances the clock by a microsecond."""
    run = control()
    run.now_ns += 1000
    return run.now_ns


def now_s() -> float:
    """`time.monotonic` and the like."""
    return now_ns() / 1e9


def as_step(name: str, call: Callable[..., T]) -> Callable[..., T]:
    """Make a step of a system call, because other threads can see its effect."""

    def stepping(*arguments: Any, **named: Any) -> T:
        control().reach(f"calls {name}")
        return call(*arguments, **named)

    return stepping


# Names for people.

_ASSIGNED = re.compile(r"(\w+)\s*(?::[^=]+)?=(?!=)")


def _name_of_new() -> str:
    """Name the new object after the variable that its source line assigns."""
    frame = sys._getframe(2)
    return _assigned_at(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


@cache
def _assigned_at(file: str, line: int, function: str) -> str:
    found = _ASSIGNED.search(linecache.getline(file, line))
    return found[1] if found else f"what {function} has made"
