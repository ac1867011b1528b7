"""What runs in a worker of a Ray cluster, and whether it runs the same code as the process that asks.

Results must not depend on who makes them, so a worker with another kvsm must refuse. What it is asked by is
pickled, and does not need kvsm: a worker without it can say so.
"""

from __future__ import annotations

import hashlib
import pickle
import socket
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from kvsm.system.executors.executor import outcome_of

_PACKAGE = Path(__file__).parents[2]

Asked = Callable[[str, str, bytes, bytes], "bytes | str"]
"""(digest of the asking kvsm, number of the task, task, item) -> a pickled outcome, or why there is none."""


def asked() -> Asked:
    """A function that Ray pickles by value, because it is local to this one."""

    def ask(ours: str, number: str, task: bytes, item: bytes) -> bytes | str:
        try:
            from kvsm.system.executors.ray_worker import answered
        except ImportError as error:
            import socket

            return f"a worker on {socket.gethostname()} has no such kvsm: {error}"
        return answered(ours, number, task, item)

    return ask


def answered(ours: str, number: str, task: bytes, item: bytes) -> bytes | str:
    """Do the task in this process, if it runs the same code."""
    if ours != code_digest():
        return f"a worker on {socket.gethostname()} runs another kvsm, from {_PACKAGE}"
    if number not in _loaded:
        _loaded.clear()  # the task before is over
        _loaded[number] = pickle.loads(task)
    return pickle.dumps(outcome_of(_loaded[number], pickle.loads(item)))


_loaded: dict[str, Callable[[Any], Any]] = {}


@cache
def code_digest() -> str:
    """A digest of the source of kvsm in this process."""
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        code = path.read_bytes()
        digest.update(f"{path.relative_to(_PACKAGE).as_posix()} {len(code)}\n".encode() + code)
    return digest.hexdigest()
