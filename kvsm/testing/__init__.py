"""Test your own copy engine, eviction policy, block pool or connector as kvsm tests its own.

    from kvsm.testing import OffloadMachine

    class MyPolicyMachine(OffloadMachine):
        policy = MyPolicy

    TestMyPolicy = MyPolicyMachine.TestCase

A machine makes calls in every order that Hypothesis can find. It knows what must come of them, and shrinks a
failure to a few readable steps. `docs/testing.md` shows the four uses, and what a failure looks like. Needs
`pip install 'kvsm[testing]'`.

The names are imported at their first use: pytest loads `kvsm.testing.plugin` in every project of an
environment with kvsm, and must neither wait for Hypothesis there nor need it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvsm.errors import PropertyBroken
    from kvsm.testing.assertions import assert_at_rest, assert_replays, assert_sound, assert_verifies
    from kvsm.testing.copy_engine import CopyEngineMachine
    from kvsm.testing.machine import OffloadMachine
    from kvsm.testing.pool import BlockPool
    from kvsm.testing.recording import Recorder
    from kvsm.testing.strategies import (
        Arrival,
        Configuration,
        arrivals,
        block_pairs,
        configurations,
        lengths,
        report_orders,
        workloads,
    )
    from kvsm.worlds.small_engine import SmallEngine
    from kvsm.worlds.small_request import SmallRequest

_HOMES = {
    "kvsm.testing.machine": ("OffloadMachine",),
    "kvsm.testing.copy_engine": ("CopyEngineMachine",),
    "kvsm.testing.pool": ("BlockPool",),
    "kvsm.worlds.small_engine": ("SmallEngine",),
    "kvsm.worlds.small_request": ("SmallRequest",),
    "kvsm.testing.recording": ("Recorder",),
    "kvsm.testing.assertions": ("assert_sound", "assert_at_rest", "assert_replays", "assert_verifies"),
    "kvsm.errors": ("PropertyBroken",),
    "kvsm.testing.strategies": (
        "Arrival",
        "arrivals",
        "workloads",
        "lengths",
        "Configuration",
        "configurations",
        "report_orders",
        "block_pairs",
    ),
}
"""Where each name lives."""

__all__ = [
    "OffloadMachine",
    "CopyEngineMachine",
    "BlockPool",
    "SmallEngine",
    "SmallRequest",
    "Recorder",
    "assert_sound",
    "assert_at_rest",
    "assert_replays",
    "assert_verifies",
    "PropertyBroken",
    "Arrival",
    "arrivals",
    "workloads",
    "lengths",
    "Configuration",
    "configurations",
    "report_orders",
    "block_pairs",
]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            try:
                return getattr(import_module(home), name)
            except ModuleNotFoundError as error:
                if error.name != "hypothesis":
                    raise
                message = f"kvsm.testing.{name} needs hypothesis: pip install 'kvsm[testing]'"
                raise ImportError(message) from error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
