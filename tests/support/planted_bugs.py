"""Bugs to plant: a function's text with one piece replaced, until the test ends."""

from __future__ import annotations

from collections.abc import Callable
from inspect import getsource, unwrap
from textwrap import dedent
from typing import Any

import pytest

from kvsm.core import native
from kvsm.core.ledger import cache, order
from kvsm.core.offloader import transferring as transfers


def plant(monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any], old: str, new: str) -> None:
    """Replace `old`, which is in the function's text once, by `new`.

    The function object gets new code, so tables and modules that hold it run the new code, too. The native
    body would not, so the Python body folds until the test ends.
    """
    monkeypatch.setattr(native, "WHY_NOT", "a bug is planted")
    function = unwrap(function)
    name, text = function.__name__, dedent(getsource(function))
    assert text.count(old) == 1, f"{name} has {text.count(old)} times: {old}"
    made: dict[str, Any] = {}
    text = "from __future__ import annotations\n" + text.replace(old, new)
    exec(compile(text, name, "exec"), function.__globals__, made)
    monkeypatch.setattr(function, "__code__", unwrap(made[name]).__code__)


def forget(monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any]) -> None:
    """Make the function do nothing."""
    monkeypatch.setattr(native, "WHY_NOT", "a bug is planted")
    monkeypatch.setattr(unwrap(function), "__code__", _nothing.__code__)


def _nothing(*_: object, **__: object) -> None:
    pass


def take_doubled_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """S5: a worker's second report counts as the report of a worker that has not reported yet."""
    plant(
        monkeypatch,
        transfers._report,
        "reason = _why_reject(core, transfer, worker, direction)",
        "reason = _why_reject(core, transfer, worker, direction)\n"
        "    if reason is RejectReason.DUPLICATE:\n"
        "        live = core.ledger.transfers[transfer]\n"
        "        worker = next(one for one in range(core.config.workers) if not live.reported >> one & 1)\n"
        "        reason = None",
    )


def evict_what_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """S7: a block stays in the eviction order while a match pins it."""
    plant(monkeypatch, order.leave, "ledger.policy.busy(used)", "pass")


def free_slots_under_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """S3: a reset frees slots that copies still write."""
    plant(
        monkeypatch,
        cache.cache_reset,
        "index.invalidate_all(ledger, seq)",
        "index.invalidate_all(ledger, seq)\n"
        "    for transfer in ledger.transfers.values():\n"
        "        ledger.free.append(transfer.slots)",
    )
