"""`copy_cores`: where the threads that copy for one rank run, if the rank computes on a CPU.

vLLM binds each worker process to the cores on which its model computes, one thread to each core, before the
worker runs any code. Every later thread inherits the binding of the thread that makes it. So without more the
copies would run on the first core of the model, where they take turns with its compute. All other threads of
the model wait for that one.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from multiprocessing import parent_process


def copy_cores() -> Collection[int] | None:
    """The cores for copies in this process; None: wherever a new thread may run.

    The process that started this one is not bound. Its cores are what the user has given to the engine.
    """
    parent = parent_process()
    if parent is None or not hasattr(os, "sched_getaffinity"):
        return None
    try:
        given = os.sched_getaffinity(parent.pid or 0)
    except OSError:  # It has ended.
        return None
    computing: set[int] = set()
    for thread in map(int, os.listdir("/proc/self/task")):
        with suppress(OSError):  # It has ended.
            computing |= os.sched_getaffinity(thread)
    return given - computing or given
