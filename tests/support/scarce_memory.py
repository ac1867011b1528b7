"""Calls of the native body in which one allocation fails: the first, the second, and so on.

Two allocators can fail: that of Python's objects, which CPython's own test module replaces, and that of C
(`malloc`), which is replaced if the body was built with `counted_memory.c`.
"""

from __future__ import annotations

import _testcapi
import ctypes
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from kvsm.core.native import _body

CALM = 12
"""After this many failures in a row that change nothing, the call has no more allocations."""


_WITHOUT_MEMORY = """
import _testcapi

class Keys:
    def __contains__(self, key):
        return False

keys = Keys()
for number in range(30):
    _testcapi.set_nomemory(number, number + 1)
    try:
        any(key in keys for key in (1, 2))
    except MemoryError:
        pass
    finally:
        _testcapi.remove_mem_hooks()
"""


def python_survives() -> bool:
    """Whether this Python raises `MemoryError` where memory lacks. 3.12.1 and 3.13.0 crash if there is none
    for the frame of a function."""
    return subprocess.run([sys.executable, "-c", _WITHOUT_MEMORY], check=False).returncode == 0


class Allocator(Protocol):
    """An allocator that can fail once."""

    def failing(self, number: int) -> Any:
        """In this `with` block, allocation `number` fails, counted from 0."""


class OfPython:
    """The allocators of Python's objects, buffers and raw memory."""

    @contextmanager
    def failing(self, number: int) -> Iterator[None]:
        _testcapi.set_nomemory(number, number + 1)
        try:
            yield
        finally:
            _testcapi.remove_mem_hooks()


class OfC:
    """`malloc`, `calloc` and `realloc`, as the C text of the body calls them."""

    def __init__(self) -> None:
        self._body = ctypes.CDLL(_body.__file__)
        self._to_fail = ctypes.c_long.in_dll(self._body, "allocations_until_failure")
        self._live = ctypes.c_long.in_dll(self._body, "allocations_that_live")

    @contextmanager
    def failing(self, number: int) -> Iterator[None]:
        self._to_fail.value = number + 1
        try:
            yield
        finally:
            self._to_fail.value = 0

    def live(self) -> int:
        """The number of allocations of the body that were not freed."""
        return self._live.value


def is_counted() -> bool:
    """Whether this body was built with `counted_memory.c`."""
    return hasattr(ctypes.CDLL(_body.__file__), "allocations_until_failure")


class Scene(NamedTuple):
    """A call, and what there is to see of it.

    do: the call. It returns what can be compared.
    state: what it may change. Compared, too.
    is_given_up: whether the object refuses all further use, as after a change that was half done.
    """

    do: Callable[[], Any]
    state: Callable[[], Any]
    is_given_up: Callable[[], bool] = lambda: False


def fail_each(make: Callable[[], Scene], allocator: Allocator) -> int:
    """Fail each allocation of a call in turn, in a scene of its own.

    Returns how often `MemoryError` was raised. The call either raises it, or has the same effect as with
    enough memory. After a `MemoryError`

    - nothing has changed, and the same call then succeeds;
    - or the call has happened, and only its answer is lost;
    - or the object is given up.
    """
    wanted = make()
    result, end = wanted.do(), wanted.state()
    number = calm = raised = 0
    while calm < CALM:
        scene = make()
        before = scene.state()
        if _fails(scene, allocator, number, result):
            raised, calm = raised + 1, 0
            after = scene.state()
            assert scene.is_given_up() or after in (before, end), f"allocation {number} has left a trace"
            if after == before and not scene.is_given_up():
                assert scene.do() == result, f"allocation {number}"
                assert scene.state() == end, f"allocation {number}"
        else:
            assert scene.state() == end, f"allocation {number}"
            calm += 1
        number += 1
    return raised


def _fails(scene: Scene, allocator: Allocator, number: int, result: Any) -> bool:
    do = scene.do
    try:
        with allocator.failing(number):
            made = do()
    except MemoryError:
        return True
    assert made == result, f"allocation {number}"
    return False
