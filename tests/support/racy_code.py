"""Threaded code for tests of controlled threads. Some of it has deliberate bugs."""

from __future__ import annotations

from queue import Empty, Queue
from threading import Condition, Lock, Thread
from time import monotonic


class Counter:
    """A counter, with or without a lock."""

    def __init__(self, locks: bool) -> None:
        self.count, self._lock = 0, Lock() if locks else None

    def add(self) -> None:
        if self._lock is None:
            self.count += 1
            return
        with self._lock:
            self.count += 1


def count_in_threads(counter: Counter, threads: int) -> int:
    """Let each thread add one. Returns the count."""
    started = [Thread(target=counter.add, name="adder") for _ in range(threads)]
    for one in started:
        one.start()
    for one in started:
        one.join()
    return counter.count


def take_both(first: Lock, second: Lock) -> None:
    with first, second:
        pass


def take_in_two_orders() -> None:
    """Let two threads take two locks in opposite orders."""
    left = Lock()
    right = Lock()
    other = Thread(target=take_both, args=(right, left), name="other")
    other.start()
    take_both(left, right)
    other.join()


def poll_with_a_limit(seconds: float) -> tuple[int, float]:
    """Wait for a message with a time limit. Returns the number of timeouts, and the total time."""
    messages: Queue[str] = Queue()
    sender = Thread(target=messages.put, args=("hello",), name="sender")
    began, misses = monotonic(), 0
    sender.start()
    while not _got(messages, seconds):
        misses += 1
    sender.join()
    return misses, monotonic() - began


def _got(messages: Queue[str], seconds: float) -> bool:
    try:
        messages.get(timeout=seconds)
    except Empty:
        return False
    return True


def wake_one_of_two() -> list[str]:
    """Let two threads wait that hold the condition's lock twice, and wake each once."""
    changed, woken = Condition(), list[str]()
    ready: list[str] = []

    def wait(name: str) -> None:
        with changed, changed:
            ready.append(name)
            changed.notify_all()
            changed.wait_for(lambda: "go" in ready)
            woken.append(name)

    threads = [Thread(target=wait, args=(name,), name=name) for name in ("a", "b")]
    for one in threads:
        one.start()
    with changed:
        changed.wait_for(lambda: len(ready) == 2)
        ready.append("go")
        changed.notify_all()
    for one in threads:
        one.join()
    return woken
