"""Puts the controlled primitives into modules under test, for the time of an exploration.

Only names of these modules are replaced: what they imported from `threading`, `queue` and `time`, and the
modules `threading`, `queue`, `time` and `os` themselves, which become stand-ins. All other code keeps the
originals.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

from kvsm.check.threads import primitives

_SYSTEM_CALLS = (
    "fdatasync",
    "fsync",
    "ftruncate",
    "open",
    "pread",
    "preadv",
    "pwrite",
    "pwritev",
    "rename",
    "scandir",
    "unlink",
)

CONTROLLED: dict[Any, Any] = {
    threading.Lock: primitives.TurnLock,
    threading.RLock: primitives.TurnRLock,
    threading.Condition: primitives.TurnCondition,
    threading.Event: primitives.TurnEvent,
    threading.Semaphore: primitives.TurnSemaphore,
    threading.BoundedSemaphore: primitives.TurnSemaphore,
    threading.Thread: primitives.ControlledThread,
    queue.SimpleQueue: primitives.TurnQueue,
    queue.Queue: primitives.TurnQueue,
    time.sleep: primitives.sleep,
    time.monotonic: primitives.now_s,
    time.monotonic_ns: primitives.now_ns,
    time.perf_counter: primitives.now_s,
    time.perf_counter_ns: primitives.now_ns,
    time.time: primitives.now_s,
    time.time_ns: primitives.now_ns,
    **{getattr(os, name): primitives.as_step(name, getattr(os, name)) for name in _SYSTEM_CALLS},
}
"""Original -> controlled replacement."""


class _StandIn(SimpleNamespace):
    """A module some of whose members are replaced."""

    def __init__(self, module: ModuleType, others: Mapping[str, Any]) -> None:
        super().__init__(**others)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _stand_in(module: ModuleType, calls: Mapping[str, Any]) -> _StandIn:
    others = {}
    for name, member in vars(module).items():
        replaced = _replacement(member)
        if replaced is not None:
            others[name] = replaced
    return _StandIn(module, {**others, **{name: calls[name] for name in calls if hasattr(module, name)}})


def _replacement(member: Any) -> Any:
    try:
        return CONTROLLED.get(member)
    except TypeError:  # not hashable
        return None


@contextmanager
def under_control(
    modules: Sequence[str],
    calls: Mapping[str, Any] | None = None,
    constants: Mapping[str, Any] | None = None,
) -> Iterator[None]:
    """Make these modules use the controlled primitives until the end of a `with` block.

    calls: the scenario's own replacements of system calls, by their name in `os`: for example a failing disk.
    constants: other values for module constants, as "kvsm.copies.threaded:SHARED_BYTES".
    """
    stand_ins = {one: _stand_in(one, calls or {}) for one in (threading, queue, time, os)}
    before: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for name in modules:
            names = vars(import_module(name))
            for key, member in list(names.items()):
                other = stand_ins.get(member) if isinstance(member, ModuleType) else _replacement(member)
                if other is not None:
                    before.append((names, key, member))
                    names[key] = other
        for place, value in (constants or {}).items():
            module, _, key = place.partition(":")
            names = vars(sys.modules[module])
            before.append((names, key, names[key]))
            names[key] = value
        yield
    finally:
        for names, key, member in reversed(before):
            names[key] = member
