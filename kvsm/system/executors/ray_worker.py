"""The code that runs in the workers of a Ray cluster.

Results must not depend on the worker, so a worker refuses items if its kvsm differs from the driver's. The
pickled function that Ray runs does not need kvsm, so a worker without kvsm can report that.
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
"""(digest of the driver's kvsm, unique id of the task, pickled task, pickled item) -> the pickled outcome, or
why there is none."""


def asked() -> Asked:
    """Return the function that Ray runs in a worker. As a local function it is pickled by value."""

    def ask(ours: str, number: str, task: bytes, item: bytes) -> bytes | str:
        try:
            from kvsm.system.executors.ray_worker import answered
        except ImportError as error:
            import socket

            return f"a worker on {socket.gethostname()} has no such kvsm: {error}"
        return answered(ours, number, task, item)

    return ask


def answered(ours: str, number: str, task: bytes, item: bytes) -> bytes | str:
    """Run the task for an item in this process, if this process has the driver's code."""
    if ours != code_digest():
        return f"a worker on {socket.gethostname()} runs another kvsm, from {_PACKAGE}"
    if number not in _loaded:
        _loaded.clear()  # the previous task is over
        _loaded[number] = pickle.loads(task)
    return pickle.dumps(outcome_of(_loaded[number], pickle.loads(item)))


_loaded: dict[str, Callable[[Any], Any]] = {}


@cache
def code_digest() -> str:
    """Return a digest of the kvsm source in this process."""
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        code = path.read_bytes()
        digest.update(f"{path.relative_to(_PACKAGE).as_posix()} {len(code)}\n".encode() + code)
    return digest.hexdigest()
