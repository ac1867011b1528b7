"""Hits whose load is expected to take longer than the computation of their tokens (`load_only_if_faster`)."""

from __future__ import annotations

from typing import Any

import pytest
from planted_bugs import plant
from scheduler_traffic import Hand, of_kind

from kvsm import events as ev
from kvsm.check.worlds.declined_hits import watch_slow_answers
from kvsm.check.worlds.small_request import HASH_TOKENS, SmallRequest
from kvsm.core.ledger import Ledger
from kvsm.core.ledger.expected_times import LOADED_EVERY
from kvsm.core.ledger.snapshot import digest, restore, snapshot
from kvsm.core.offloader import Offloader
from kvsm.core.scheduler import OffloadScheduler
from kvsm.errors import InvalidEvent, PropertyBroken, WrongArgument

PROMPT = range(2 * HASH_TOKENS + 1)
SLOW, FAST = (100, 0, 1_000), (0, 1_000, 1_000)
"""A load takes 100 us at least, or 1 us for each block. A token takes 1 us, so a block takes 4 us."""


def hand(**core: Any) -> Hand:
    """A scheduler whose host has the two blocks of `PROMPT`."""
    made = Hand(core={"load_only_if_faster": True, "device_blocks": 256, **core})
    made.store(SmallRequest("stored", PROMPT), [0, 1, 2])
    return made


def ask(made: Hand, name: str, **parameters: Any) -> int | None:
    request = SmallRequest(name, PROMPT, parameters=parameters or None)
    return made.scheduler.get_num_new_matched_tokens(request, 0)[0]


def test_a_slow_hit_is_declined_with_its_figures() -> None:
    made = hand()
    made.core.note_times(*SLOW)
    assert ask(made, "r") == 0
    (event,) = of_kind(made, ev.SlowHitFound)
    assert (event.blocks, event.tokens, event.load_us, event.compute_us) == (2, 8, 100, 8)
    assert event.declined
    assert not made.core.ledger.requests["r"].pins


def test_a_fast_hit_is_loaded() -> None:
    made = hand()
    made.core.note_times(*FAST)
    assert ask(made, "r") == 2 * HASH_TOKENS
    assert not of_kind(made, ev.SlowHitFound)


def test_nothing_is_declined_before_anything_was_measured() -> None:
    assert ask(hand(), "r") == 2 * HASH_TOKENS


def test_nothing_is_declined_without_the_option() -> None:
    made = hand(load_only_if_faster=False)
    made.core.note_times(*SLOW)
    assert ask(made, "r") == 2 * HASH_TOKENS


def test_a_load_behind_other_loads_takes_longer() -> None:
    """A hit of few blocks behind a deep queue is computed."""
    made = hand()
    made.core.note_times(0, 3_000, 1_000)
    assert made.admit(SmallRequest("first", PROMPT), [10, 11, 12]) == 2 * HASH_TOKENS
    ask(made, "second")
    (event,) = of_kind(made, ev.SlowHitFound)
    assert (event.blocks_ahead, event.load_us) == (2, 12)


def test_a_hand_over_is_never_declined() -> None:
    """Its blocks were computed for this request by another engine."""
    made = hand()
    made.core.note_times(*SLOW)
    remote = {
        "do_remote_prefill": True,
        "remote_engine_id": "p",
        "remote_request_id": "r",
        "remote_hand_over": "name",
        "remote_num_tokens": len(PROMPT),
    }
    assert ask(made, "r", **remote) == 2 * HASH_TOKENS


def test_one_slow_hit_in_sixteen_is_loaded_all_the_same() -> None:
    """Else no load would be measured, and the times would never change."""
    made = hand()
    made.core.note_times(*SLOW)
    answers = [ask(made, f"r{number}") for number in range(3 * LOADED_EVERY)]
    loaded = [number for number, answer in enumerate(answers) if answer]
    assert loaded == [LOADED_EVERY - 1, 2 * LOADED_EVERY - 1, 3 * LOADED_EVERY - 1]


def test_a_waiting_request_is_decided_once() -> None:
    made = hand()
    made.core.note_times(*SLOW)
    assert [ask(made, "r") for _ in range(3)] == [0, 0, 0]
    assert len(of_kind(made, ev.SlowHitFound)) == 1
    made.core.note_times(*FAST)
    assert ask(made, "r") == 2 * HASH_TOKENS


def test_the_blocks_of_a_declined_hit_are_used_and_not_stored_again() -> None:
    made = hand()
    made.core.note_times(*SLOW)
    request = SmallRequest("r", PROMPT)
    assert made.admit(request, [10, 11, 12]) == 0
    made.compute(request)
    stores = len(of_kind(made, ev.StorePlanned))
    made.step(request)
    assert len(of_kind(made, ev.StorePlanned)) == stores
    assert of_kind(made, ev.BlocksTouched)


def test_the_decision_survives_a_snapshot_and_a_replay() -> None:
    made = hand()
    made.core.note_times(*SLOW)
    ask(made, "r")
    ledger = restore(snapshot(made.core.ledger))
    assert (ledger.times, ledger.declined_hits) == (SLOW, 1)
    replayed = Ledger(made.core.config)
    replayed.apply_all(made.log)
    assert digest(replayed) == digest(made.core.ledger)


def test_the_next_process_measures_anew() -> None:
    """It may run on another device."""
    made = hand()
    made.core.note_times(*SLOW)
    ask(made, "r")
    again = Offloader.restarted(made.core.ledger, made.core.config)
    assert (again.ledger.times, again.ledger.declined_hits) == (None, 0)


@pytest.mark.parametrize(
    "wrong",
    [{"load_us": 99}, {"compute_us": 9}, {"blocks_ahead": 1}, {"declined": False}, {"request": "unknown"}],
)
def test_an_event_with_other_figures_than_the_ledger_is_refused(wrong: dict[str, Any]) -> None:
    made = hand()
    made.core.note_times(*SLOW)
    made.core.arrive("r")
    fields = {"request": "r", "blocks": 2, "blocks_ahead": 0, "tokens": 8, "load_us": 100, "compute_us": 8}
    before = digest(made.core.ledger)
    with pytest.raises(InvalidEvent):
        made.core.emit(ev.SlowHitFound, *({**fields, "declined": True} | wrong).values())
    assert digest(made.core.ledger) == before


@pytest.mark.parametrize("wrong", [(-1, 0, 0), (0, 1 << 41, 0), (0, 0, "1"), (0.5, 0, 0)])
def test_times_that_a_log_cannot_hold_are_refused(wrong: tuple[Any, ...]) -> None:
    with pytest.raises(WrongArgument, match="note_times"):
        hand().core.note_times(*wrong)


def declines_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, OffloadScheduler._declines, "return tracked.declined is True", "return False")


def declines_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, OffloadScheduler._declines, "return tracked.declined is True", "return True")


@pytest.mark.parametrize("times", [SLOW, FAST])
def test_answers_can_be_watched(times: tuple[int, int, int]) -> None:
    """As `kvsm vllm-fuzz` watches kvsm's connector."""
    made = hand()
    watch_slow_answers(made.scheduler)
    made.core.note_times(*times)
    assert ask(made, "r") == (0 if times == SLOW else 2 * HASH_TOKENS)


def test_the_watch_knows_a_decision_although_another_request_was_admitted_since() -> None:
    made = hand()
    watch_slow_answers(made.scheduler)
    made.core.note_times(*SLOW)
    assert ask(made, "r") == 0
    assert made.admit(SmallRequest("other", PROMPT), [10, 11, 12]) == 0
    assert ask(made, "r") == 0


@pytest.mark.parametrize(("bug", "times"), [(declines_nothing, SLOW), (declines_everything, FAST)])
def test_a_wrong_answer_is_found(monkeypatch: pytest.MonkeyPatch, bug: Any, times: Any) -> None:
    made = hand()
    watch_slow_answers(made.scheduler)
    made.core.note_times(*times)
    bug(monkeypatch)
    with pytest.raises(PropertyBroken):
        ask(made, "r")


def test_a_slow_hit_makes_its_request_known() -> None:
    """As a match does. The record of a request may have ended with a load of an earlier one of its name."""
    made = hand()
    made.core.note_times(*SLOW)
    assert made.core.declines("new", 2, 8)
    assert "new" in made.core.ledger.requests
