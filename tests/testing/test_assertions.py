"""The assertions of `kvsm.testing` on ledgers that are wrong in one way."""

from __future__ import annotations

from typing import Any

import pytest

from kvsm import OffloadConfig, Offloader
from kvsm import events as ev
from kvsm.check.worlds.check_counts import taken_counts
from kvsm.core.ledger import HANDLERS, Ledger
from kvsm.core.ledger.invariants import Violation
from kvsm.errors import PropertyBroken
from kvsm.properties import Property
from kvsm.testing import Recorder, assert_replays, assert_sound, assert_verifies, assertions
from kvsm.testing.prefix_tree_books import PrefixMatch, TreeBooks


def matched() -> tuple[Offloader, Recorder]:
    """A block is stored, and a request has matched it."""
    log = Recorder()
    config = OffloadConfig(host_blocks=4, device_blocks=8, workers=1)
    core = Offloader(config, log, clock_ns=lambda: 0)
    job = core.prepare_store("r1", [b"key"], [0]).job
    assert job is not None
    core.submit([job.transfer])
    core.report(job.transfer, 0, True)
    core.match("r2", [b"key"])
    return core, log


@pytest.mark.usefixtures("_python_folds")
def test_verifying_checks_everything_after_each_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fold of a match changes a slot that the event does not name."""
    handler = HANDLERS[ev.HitMatched]

    def meddling(ledger: Any, event: Any) -> None:
        handler(ledger, event)
        ledger.blocks.words[3] ^= 1 << 20

    _, log = matched()
    monkeypatch.setitem(HANDLERS, ev.HitMatched, meddling)
    with pytest.raises(PropertyBroken, match=r"what led there:\n  event 1: ") as caught:
        assert_verifies(log)
    assert f"event {len(log)}: " in caught.value.message


def test_a_snapshot_that_restores_another_state_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    core, log = matched()
    monkeypatch.setattr(assertions, "restore", lambda _: Ledger(core.config))
    with pytest.raises(PropertyBroken, match="a snapshot of the ledger gives another state"):
        assert_replays(log, core.ledger)


def test_each_violation_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    core, _ = matched()
    found = [Violation(Property.CONSERVATION, text) for text in ("first", "second", "third")]
    monkeypatch.setattr(assertions, "check_ledger", lambda _: found)
    with pytest.raises(PropertyBroken, match=r"(?s): first\n.*also .*: second\n.*also .*: third"):
        assert_sound(core.ledger)


def test_ledgers_of_different_configurations_differ() -> None:
    """The configuration is the first field of a snapshot."""
    one, other = (Ledger(OffloadConfig(host_blocks=4, device_blocks=8, workers=n)) for n in (1, 2))
    assert assertions.differences(one, one) == []
    assert len(assertions.differences(one, other)) == 1


def test_a_prompt_from_before_a_reset_counts_if_it_is_no_hit() -> None:
    books = TreeBooks(2, 2)
    books.insert((1,))
    books.before_reset, books.inserted = books.inserted, set()
    taken_counts()
    books.matched((1,), PrefixMatch([]))
    books.matched((2,), PrefixMatch([]))
    case = Property.NO_STALE_DATA, "matches of prompts from before a reset"
    assert taken_counts()[case] == 1
