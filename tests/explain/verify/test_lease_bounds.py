"""`kvsm verify` checks the leases of agents' sessions: one for each session, within what it was granted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from replay_life import Life, head, key, scene, written
from verified_parts import cut, in_one_pass, in_parts

from kvsm import events as ev
from kvsm.events import HintOutcome, OffloadingEvent
from kvsm.explain.story import Verification, verify_log
from kvsm.explain.verify import auditor
from kvsm.properties import Property
from kvsm.states import machines_digest

Story = Callable[[Life], list[OffloadingEvent]]


def answered(
    life: Life, place: int, lease: str, outcome: HintOutcome, asked: int = 2, leased: int = 2
) -> ev.HintAnswered:
    """The answer to a hint of session `s`, as the event `place` events after those of the scene.

    In the scene, request `r1` pins two of five slots.
    """
    seq, step, wall = head(life)
    return ev.HintAnswered(seq + place, step, wall, "r0", "s", lease, outcome, asked, leased, 1000)


def granted_less_than_it_pins(life: Life) -> list[OffloadingEvent]:
    return [answered(life, 0, "r1", HintOutcome.CLIPPED, leased=1)]


def granted_more_than_it_asked_for(life: Life) -> list[OffloadingEvent]:
    return [answered(life, 0, "r1", HintOutcome.ACCEPTED, asked=1)]


def granted_more_than_half_of_the_pool(life: Life) -> list[OffloadingEvent]:
    return [answered(life, 0, "r1", HintOutcome.ACCEPTED, asked=3, leased=3)]


def granted_a_second_lease(life: Life) -> list[OffloadingEvent]:
    return [
        answered(life, 0, "r1", HintOutcome.ACCEPTED),
        answered(life, 1, "another", HintOutcome.ACCEPTED),
    ]


def ends_a_lease_of_another_session(life: Life) -> list[OffloadingEvent]:
    return [answered(life, 0, "r1", HintOutcome.ACCEPTED), answered(life, 1, "another", HintOutcome.EXPIRED)]


@pytest.mark.parametrize(
    ("property", "story"),
    [
        (Property.MATCH_HOLDS, granted_less_than_it_pins),
        (Property.MATCH_HOLDS, granted_more_than_it_asked_for),
        (Property.MATCH_HOLDS, granted_more_than_half_of_the_pool),
        (Property.ONE_RELEASE_PER_HOLD, granted_a_second_lease),
        (Property.ONE_RELEASE_PER_HOLD, ends_a_lease_of_another_session),
    ],
)
def test_a_lease_out_of_its_bounds_is_found(tmp_path: Path, property: Property, story: Story) -> None:
    life = scene(host_blocks=5)
    wrong = story(life)
    found = verify_log(written(tmp_path / "log", life, [*life.events, *wrong]))
    assert found.breakage is not None
    assert {violation.property for violation in found.violations} == {property}
    assert found.breakage.event == len(life.events) + len(wrong)


def replaced(life: Life) -> list[OffloadingEvent]:
    """A lease ends, and another one begins, some of whose blocks are still being stored."""
    seq, step, wall = head(life)
    return [
        answered(life, 0, "r1", HintOutcome.ACCEPTED),
        answered(life, 1, "r1", HintOutcome.REPLACED),
        ev.RequestFinished(seq + 2, step, wall, "r1"),
        ev.RequestArrived(seq + 3, step, wall, "next"),
        ev.HitMatched(seq + 4, step, wall, "next", (0,), key(2), 2, 0, 1),
        answered(life, 5, "next", HintOutcome.ACCEPTED),
    ]


def restarted(life: Life) -> list[OffloadingEvent]:
    """No lease outlives its process: the next one grants its own."""
    seq, step, wall = head(life)
    opened = ev.Restarted(seq + 1, step, wall, 2, life.config, machines_digest(), "killed")
    return [
        answered(life, 0, "r1", HintOutcome.ACCEPTED),
        opened,
        answered(life, 2, "another", HintOutcome.ACCEPTED),
    ]


def refused(life: Life) -> list[OffloadingEvent]:
    """A hint that gets no lease holds nothing, whatever it asked for."""
    return [answered(life, place, "", HintOutcome.REFUSED, 9, 0) for place in (0, 1)]


@pytest.mark.parametrize("story", [replaced, restarted, refused])
def test_a_lease_within_its_bounds_is_good(tmp_path: Path, story: Story) -> None:
    life = scene(host_blocks=5)
    found = verify_log(written(tmp_path / "log", life, [*life.events, *story(life)]))
    assert found.violations == ()


@pytest.mark.parametrize(
    "story", [granted_a_second_lease, ends_a_lease_of_another_session, replaced, restarted, refused]
)
def test_parts_of_a_log_agree_with_one_pass(tmp_path: Path, story: Story) -> None:
    """No snapshot holds leases, so each part tells what it knows of them."""
    life = scene(host_blocks=5)
    events = [*life.events, *story(life)]
    whole, last = written(tmp_path / "whole", life, events), len(events)
    for lasts in ({last - 1}, {last - 2}, {last - 1, last - 2}, {*range(len(life.events), last)}):
        log = cut(whole, tmp_path / f"{sorted(lasts)}", lasts)
        assert in_parts(log) == in_one_pass(log)


def test_good_leases_need_no_second_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    life = scene(host_blocks=5)
    events = [*life.events, *replaced(life)]
    whole = written(tmp_path / "whole", life, events)
    log = cut(whole, tmp_path / "log", {*range(len(life.events), len(events))})
    monkeypatch.setattr(auditor, "_verify", lambda *_: pytest.fail("one pass was needed"))
    found, _ = in_parts(log)
    assert isinstance(found, Verification)
    assert found.good
