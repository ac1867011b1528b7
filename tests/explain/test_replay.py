"""A replay gives the live state: at the end, at any event, at any step. Events render as lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from replay_life import (
    CONFIGS,
    OPERATIONS,
    Life,
    Operations,
    key,
    random_life,
)

from examples import examples
from kvsm import events as ev
from kvsm.core.ledger import Ledger
from kvsm.core.ledger.snapshot import digest
from kvsm.errors import ConfigError, LogError
from kvsm.explain.story import (
    Witness,
    entries,
    rebuild,
    render,
    verify_log,
)
from kvsm.ids import NO_IDS, pack

# Folding.


@settings(deadline=None, max_examples=examples(100))
@given(OPERATIONS, CONFIGS)
def test_the_fold_has_the_live_digest_at_every_event(operations: Operations, config: dict[str, Any]) -> None:
    """Events are state (S10): each prefix of a log folds to the state that was live then."""
    live: list[str] = []
    life = Life(**config)
    for operation in operations:
        life.drive([operation])
        if len(life.events) > len(live):
            live += [""] * (len(life.events) - len(live) - 1) + [digest(life.core.ledger)]
    ledger = Ledger(life.config)
    for event, expected in zip(life.events, live):
        ledger.apply(event)
        assert expected in ("", digest(ledger))


def test_a_log_rebuilds_whole_at_any_event_and_at_any_step(tmp_path: Path) -> None:
    """Events are state (S10): from disk, across segments, from a snapshot or from the first event."""
    life = random_life(1, 600, tmp_path / "log", writer={"segment_bytes": 2000})
    life.close()
    assert len(list((tmp_path / "log").iterdir())) > 3
    ledger, steps = Ledger(life.config), {}
    digests = []
    for event in life.events:
        ledger.apply(event)
        digests.append(digest(ledger))
        steps[event.step] = digests[-1]
    whole = rebuild(tmp_path / "log")
    assert (whole.events, whole.first) == (len(life.events), 1)
    assert whole.entries == entries(life.events)
    assert digest(whole.ledger) == digest(life.core.ledger) == digests[-1]
    for seq in range(1, len(digests) + 1, 7):
        assert digest(rebuild(tmp_path / "log", seq=seq).ledger) == digests[seq - 1]
    for step in range(0, max(steps), 3):
        reached = max(one for one in steps if one <= step)
        assert digest(rebuild(tmp_path / "log", step=step).ledger) == steps[reached]


def test_a_state_in_the_middle_starts_from_the_nearest_snapshot(tmp_path: Path) -> None:
    """Asking for one point does not fold the whole log."""
    life = random_life(2, 600, tmp_path / "log", writer={"segment_bytes": 2000})
    life.close()
    last = len(life.events)
    rebuilt = rebuild(tmp_path / "log", seq=last - 1)
    assert rebuilt.first > 1
    assert rebuilt.events < last / 2
    by_step = rebuild(tmp_path / "log", step=life.core.step - 1)
    assert by_step.first > 1


@pytest.mark.parametrize(
    ("point", "message"),
    [
        ({"seq": 10_000}, "there is no event 10000; the last one is"),
        ({"step": 10_000}, "there is no step 10000; the last one is"),
        ({"seq": 1, "step": 1}, "give an event number or a step, not both"),
    ],
)
def test_a_point_that_is_not_there_is_refused(tmp_path: Path, point: dict[str, int], message: str) -> None:
    """A replay never returns the state at another point than the requested one."""
    random_life(3, 50, tmp_path / "log").close()
    with pytest.raises((LogError, ConfigError), match=message):
        rebuild(tmp_path / "log", **point)


def test_what_retention_dropped_is_not_invented(tmp_path: Path) -> None:
    """A log without its first segments replays from the oldest one, and says so."""
    life = random_life(4, 800, tmp_path / "log", writer={"segment_bytes": 2000, "max_bytes": 10000})
    life.close()
    whole = rebuild(tmp_path / "log")
    assert whole.first > 1
    assert digest(whole.ledger) == digest(life.core.ledger)
    assert verify_log(tmp_path / "log").good
    with pytest.raises(LogError, match="event 1 is not kept"):
        rebuild(tmp_path / "log", seq=1)
    with pytest.raises(LogError, match="step 0 is not kept"):
        rebuild(tmp_path / "log", step=0)


def test_entries_are_the_slots_that_an_event_names() -> None:
    """Throughput is given in entries."""
    many = pack(range(40))
    assert entries([ev.HitMatched(1, 0, 0, "r", (1, 2)), ev.BlocksTouched(2, 0, 0, many)]) == 42
    assert entries([ev.BlocksEvicted(1, 0, 0, (1, 2), (3,), 2), ev.StepEnded(2, 0, 0)]) == 3


# Rendering.


def test_every_kind_of_event_renders_as_one_short_line() -> None:
    """Also an event that names thousands of blocks."""
    life = random_life(11, 2000, host_blocks=40)
    for event in life.events:
        line = render(event)
        assert line.startswith(event.kind)
        assert "\n" not in line
        assert len(line) < 200
    keys = tuple(key(number) for number in range(3000))
    big = ev.StorePlanned(1, 0, 0, (("r1", 3000),), keys, tuple(range(3000)), tuple(range(3000)))
    assert render(big) == (
        "StorePlanned request r1 keys 000000000000..0000 to 00000bb70000..0000 (3000) slots 0..2999 (3000) "
        "device blocks 0..2999 (3000)"
    )


def test_fields_that_say_nothing_are_left_out() -> None:
    assert render(ev.HitMatched(1, 0, 0, "r1", NO_IDS)) == "HitMatched request r1 no slots"
    assert render(ev.HitMatched(1, 0, 0, "r1", (4,), None, 5, 2, 1)) == (
        "HitMatched request r1 slot 4 asked 5 on device 2 on host 1"
    )
    assert render(ev.WorkerReported(1, 0, 0, 7, 1, False, "no room")) == (
        "WorkerReported transfer 7 worker 1 failed (no room)"
    )
    assert render(ev.WorkerReported(1, 0, 0, 7, 1, True)) == "WorkerReported transfer 7 worker 1 good"
    assert render(ev.RequestFinished(1, 0, 0, "r1")) == "RequestFinished request r1"
    assert render(ev.RequestFinished(1, 0, 0, "r1", True)) == "RequestFinished request r1 aborted"
    assert render(ev.BlocksEvicted(1, 0, 0, (5, 6, 9), (), 3)) == "BlocksEvicted slots 5..6, 9 (3) transfer 3"


def test_many_owners_and_offers_are_abbreviated() -> None:
    """The first four are named, and all are counted."""
    names = [f"r{number}" for number in range(9)]
    store = ev.StorePlanned(1, 0, 0, tuple((name, 1) for name in names), (key(1),), (0,), (4,))
    assert render(store).startswith("StorePlanned requests r0, r1, r2, r3, ... (9) key ")
    assert render(ev.StoreSkipped(1, 0, 0, (), (key(1),), ev.SkipReason.POOL_FULL)).startswith(
        "StoreSkipped no request key "
    )
    offers = ev.BlocksOffered(1, 0, 0, tuple((name, (3, 2), (4, 2)) for name in names[:2]))
    assert render(offers) == (
        "BlocksOffered requests r0 settled 3, 2 of 4, 2 blocks; r1 settled 3, 2 of 4, 2 blocks"
    )
    many = ev.BlocksOffered(1, 0, 0, tuple((name, (3,), (4,)) for name in names))
    assert render(many).endswith("r3 settled 3 of 4 blocks; ... (9)")
    load = ev.LoadPlanned(1, 0, 0, "r1", (7, 9), (1, 2, 3), False, (0, 1, 3))
    assert render(load) == ("LoadPlanned request r1 slots 7, 9 (2) device blocks 1..3 (3) parts 0..1, 3 (3)")


def test_a_witness_needs_no_ledger() -> None:
    """The witness follows the events alone, and agrees with the ledger at the end."""
    life = random_life(12, 500)
    witness = Witness(life.config)
    for event in life.events:
        assert witness.follow(event) == []
    assert witness.compare_all(life.core.ledger) == []
