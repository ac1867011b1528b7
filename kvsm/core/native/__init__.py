"""Decides whether the native body runs: C for the fold, a core's most frequent calls and copy plans.

The fold has two implementations over one state. `kvsm.core.ledger`, in Python, is the reference. The C files
here do the same for the common cases, function by function under the same names, and leave all other cases to
Python (`body.h`). The methods of `kvsm.core.offloader` that an engine calls for each request have a native
body, too (`calls.h`), and so have the functions with which `kvsm.core.scheduler` collects what the requests
of a step offer (`offers.c`).

The environment variable `KVSM_NATIVE` chooses:

- `auto`, or nothing: the native body if it was built from the sources of this kvsm, else Python;
- `0`: Python. The native body is not loaded at all;
- `1`: the native body. The import fails if it cannot run.

The C code runs under the GIL, and keeps its references to Python objects in static variables: so only one
interpreter of a process can use it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from kvsm.core.native.sources import digest_of_sources
from kvsm.errors import ConfigError
from kvsm.events import KINDS
from kvsm.ids import SMALL, use_native
from kvsm.states import MACHINES, machines_digest

VARIABLE = "KVSM_NATIVE"


def _problem() -> str:
    """Return why the native body cannot run; empty if it can. Loads it without connecting it."""
    if find_spec(f"{__name__}._body") is None:
        return "it was not built: no C compiler was there, or this is the wheel for every machine"
    try:
        from kvsm.core.native import _body
    except Exception as error:  # a body of another version may fail in any way
        return f"it cannot be loaded: {error}"
    if getattr(_body, "SOURCES", None) != digest_of_sources(Path(__file__).parent):
        return "it was built from other C sources; install kvsm again"
    if machines_digest() != _body.MACHINES or SMALL != _body.SMALL:
        return "it was built for other machine tables; install kvsm again"
    if [kind.__name__ for kind in KINDS] != _body.KINDS.split():
        return "it was built for other kinds of events; install kvsm again"
    return ""


def _why_not(chosen: str) -> str:
    """Return why the native body does not run; empty if it does. Raises `ConfigError` if it cannot run
    although `chosen` is 1.

    chosen: the value of `KVSM_NATIVE`.
    """
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

# Only connect a body that runs: another one may need Python objects that this version of kvsm lacks.
if TYPE_CHECKING or not WHY_NOT:
    from kvsm.core.native._body import (
        CoreBody,
        FoldBody,
        IndexBody,
        PackerBody,
        QueueBody,
        collect_due,
        connect,
        connect_core,
        connect_offers,
        find_due,
        forget,
        pack_ids,
        plan_fragments,
        plan_rectangles,
        plan_runs,
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
        collect_due,
        connect,
        connect_core,
        connect_offers,
        find_due,
        forget,
        plan_fragments,
        plan_rectangles,
        plan_runs,
        taken,
    )

_built_for = [machine.dense for machine in MACHINES.values()]
_without = 0


def runs() -> bool:
    """Whether new ledgers, queues and cores get the native body: not inside of `without`, and not after a
    machine table was replaced, as tests do."""
    return not (WHY_NOT or _without) and all(
        machine.dense is table for machine, table in zip(MACHINES.values(), _built_for)
    )


@contextmanager
def without() -> Iterator[None]:
    """Inside of this `with`, new ledgers, queues and cores get the Python body."""
    global _without
    _without += 1
    try:
        yield
    finally:
        _without -= 1


def described() -> str:
    """Describe for people which body runs, and why."""
    return f"Python ({WHY_NOT})" if WHY_NOT else "native"


def arcs_taken() -> dict[str, list[int]]:
    """Return machine -> the arcs that the native body has taken since `forget`, as indices of its table."""
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
    "collect_due",
    "connect",
    "connect_core",
    "connect_offers",
    "described",
    "find_due",
    "forget",
    "plan_fragments",
    "plan_rectangles",
    "plan_runs",
    "runs",
    "without",
]
