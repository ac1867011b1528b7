"""`copy_cores`: choose the cores for the copying threads of a rank that computes on a CPU.

vLLM binds each worker process to the cores on which its model computes, one thread to each core, before the
worker runs any code. Every later thread inherits the binding of the thread that makes it. So by default the
copies would run on the model's first core and slow its thread down, for which all other threads of the model
wait.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from multiprocessing import parent_process


def copy_cores() -> Collection[int] | None:
    """Return the cores for copies in this process; None: leave new threads where they are.

    The parent process is not bound to cores of the model: its cores are those that the user gives the engine.
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
