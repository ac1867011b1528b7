"""Bugs to plant: one piece of a function's text replaced by another, for as long as a test lasts."""

from __future__ import annotations

from inspect import getsource
from textwrap import dedent
from typing import Any

import pytest

from kvsm.ledger import Ledger
from kvsm.offloader import Offloader


def plant(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, old: str, new: str) -> None:
    """Replace `old`, which stands once in the function, by `new`."""
    owner = next(one for one in owner.__mro__ if name in vars(one))
    function = vars(owner)[name]
    text = dedent(getsource(function))
    assert text.count(old) == 1, f"{name} has {text.count(old)} times: {old}"
    names: dict[str, Any] = {}
    exec(
        compile("from __future__ import annotations\n" + text.replace(old, new), name, "exec"),
        function.__globals__,
        names,
    )
    monkeypatch.setattr(owner, name, names[name])


def take_doubled_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """S5: a worker's second report is taken for that of the worker which has not reported yet."""
    plant(
        monkeypatch,
        Offloader,
        "_report",
        "reason = self._why_reject(transfer, worker, direction)",
        "reason = self._why_reject(transfer, worker, direction)\n"
        "    if reason == RejectReason.DUPLICATE:\n"
        "        live = self.ledger.transfers[transfer]\n"
        "        worker = next(one for one in range(self.config.workers) if not live.reported >> one & 1)\n"
        "        reason = ''",
    )


def evict_what_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """S7: a block stays in the eviction order when a match pins it."""
    plant(monkeypatch, Ledger, "_matched", "self.policy.busy(busy)", "pass")


def free_slots_under_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """S3: a reset frees the slots that copies still write."""
    plant(
        monkeypatch,
        Ledger,
        "_reset",
        "transfer.word = TRANSFER_WORDS.step(transfer.word, _TRANSFER_ABANDON, transfer.id, seq)",
        "transfer.word = TRANSFER_WORDS.step(transfer.word, _TRANSFER_ABANDON, transfer.id, seq)\n"
        "            self.free.append(transfer.slots)",
    )
