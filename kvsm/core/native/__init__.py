"""The native body of the fold, and of a core's hottest calls: which body runs, and why.

The fold has two bodies over one state. `kvsm.core.ledger` is the one that is read and proved. The C files
here do the same for what is common, function by function under the same names, and leave the rest to it
(`body.h`). The calls that an engine makes of `kvsm.core.offloader` for each request have two bodies, too
(`calls.h`).

The environment variable `KVSM_NATIVE` chooses:

- `auto`, or nothing: the native body if it was built from the sources of this kvsm, else Python;
- `0`: Python. The native body is not even loaded;
- `1`: the native body. The import fails if it cannot run.

The C code runs under the GIL, and keeps what it needs of Python in one place: so it is made for one
interpreter of a process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kvsm.core.native.sources import digest_of_sources
from kvsm.errors import ConfigError
from kvsm.events import KINDS
from kvsm.ids import SMALL, use_native
from kvsm.states import MACHINES, machines_digest

VARIABLE = "KVSM_NATIVE"


def _problem() -> str:
    """Why the native body cannot run; empty if it can. Loads it, and connects nothing."""
    try:
        from kvsm.core.native import _body
    except Exception as error:  # A body of another version may fail in any way.
        return f"it was not built, or cannot be loaded: {error}"
    if getattr(_body, "SOURCES", None) != digest_of_sources(Path(__file__).parent):
        return "it was built from other C sources; install kvsm again"
    if machines_digest() != _body.MACHINES or SMALL != _body.SMALL:
        return "it was built for other machine tables; install kvsm again"
    if [kind.__name__ for kind in KINDS] != _body.KINDS.split():
        return "it was built for other kinds of events; install kvsm again"
    return ""


def _why_not(chosen: str) -> str:
    """Why the native body does not run; empty if it does. Raises `ConfigError` if it was asked for."""
    if chosen not in ("0", "1", "auto"):
        raise ConfigError(f"{VARIABLE} is {chosen!r}; it must be 0, 1 or auto")
    if chosen == "0":
        return f"{VARIABLE} is 0"
    problem = _problem()
    if problem and chosen == "1":
        raise ConfigError(f"{VARIABLE} is 1, but the native body cannot run: {problem}")
    return problem


WHY_NOT = _why_not(os.environ.get(VARIABLE, "auto"))
"""Why Python folds; empty if the native body does."""

# A body that does not run is not connected: it may ask for what this kvsm no longer has.
if TYPE_CHECKING or not WHY_NOT:
    from kvsm.core.native._body import (
        CoreBody,
        FoldBody,
        IndexBody,
        PackerBody,
        QueueBody,
        connect,
        connect_core,
        forget,
        pack_ids,
        taken,
        unpack_ids,
    )

    use_native(pack_ids, unpack_ids)
else:
    from kvsm.core.native.absent import (
        CoreBody,
        FoldBody,
        IndexBody,
        PackerBody,
        QueueBody,
        connect,
        connect_core,
        forget,
        taken,
    )

_built_for = [machine.dense for machine in MACHINES.values()]
_without = 0


def runs() -> bool:
    """Whether what is made now has the native body. It has not if somebody has changed a table."""
    return not (WHY_NOT or _without) and all(
        machine.dense is table for machine, table in zip(MACHINES.values(), _built_for)
    )


@contextmanager
def without() -> Iterator[None]:
    """Ledgers, queues and cores that are made inside have the Python body."""
    global _without
    _without += 1
    try:
        yield
    finally:
        _without -= 1


def described() -> str:
    """For people: which body runs, and why."""
    return f"Python ({WHY_NOT})" if WHY_NOT else "native"


def arcs_taken() -> dict[str, list[int]]:
    """By machine: the arcs that the native body has taken since `forget`, by their places in its table."""
    flags = taken()
    size = len(flags) // len(MACHINES)
    return {
        name: [place for place in range(size) if flags[number * size + place]]
        for number, name in enumerate(MACHINES)
    }


__all__ = [
    "VARIABLE",
    "WHY_NOT",
    "CoreBody",
    "FoldBody",
    "IndexBody",
    "PackerBody",
    "QueueBody",
    "arcs_taken",
    "connect",
    "connect_core",
    "described",
    "forget",
    "runs",
    "without",
]
