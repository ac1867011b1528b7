"""What the log says about prompts and failed copies: blocks of prompts, where they were when the request was
admitted, and errors. The engine keeps its own count (`kvsm.check.worlds.run_figures`)."""

from __future__ import annotations

from typing import Any

import pytest
from extracted_tables import extracted
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_traffic import ACTS, FULL, SLIDING, WIDE, Hand, drive, of_kind

from examples import examples
from kvsm import events as ev
from kvsm.check.worlds.small_engine import SmallEngine
from kvsm.check.worlds.small_request import SmallRequest
from kvsm.check.worlds.small_workers import COPY_ERROR
from kvsm.core.log import MemoryLog
from kvsm.core.offloader import Offloader
from kvsm.core.plan import WorkerReport
from kvsm.errors import ConfigError, WrongArgument
from kvsm.events import ERROR_CHARACTERS_MAX, OffloadConfig
from kvsm.explain.metrics import Metrics


def counted(one: Any) -> tuple[int | None, int | None, int | None]:
    """The three counts of an event."""
    return one.asked, one.on_device, one.on_host


LAYOUTS = st.sampled_from(
    [
        {},
        {"prefix_cache": False},
        {"core": {"blocks_per_chunk": 2}},
        {"groups": (FULL, SLIDING)},
        {"groups": (FULL, WIDE)},
        {"core": {"defer_ticks": 0}},
        {"host_blocks": 4, "core": {"max_live_transfers": 1}},
    ]
)


@settings(max_examples=examples(60), deadline=None)
@given(ACTS, LAYOUTS)
def test_every_figure_of_a_run_is_what_the_engine_did(acts: list[int], layout: dict[str, Any]) -> None:
    """Metrics, tables and report: who read the cache, what each had when it was admitted, what was copied."""
    engine = SmallEngine(**{"device_blocks": 16, "host_blocks": 8, "workers": 2, **layout})
    drive(engine, acts)
    engine.notes.check_action(engine.log)
    engine.notes.check(engine.core.config, engine.log)


def admitted(hand: Hand) -> list[ev.RequestAdmitted]:
    """The admissions in the log."""
    return of_kind(hand, ev.RequestAdmitted)


def asked_often(hand: Hand, request: SmallRequest, locals: list[int]) -> None:
    """The engine asks with these tokens on the device, a step each, and places the request at last."""
    for local in locals:
        found, _ = hand.scheduler.get_num_new_matched_tokens(request, local)
        hand.step()
    assert found is not None
    blocks = [*range(20, 25)]
    hand.scheduler.update_state_after_alloc(request, (blocks,), found)


@pytest.mark.parametrize(
    ("locals", "had"),
    [([0] * 10, (4, 0, 2)), ([0, 4, 8, 12], (4, 3, 0)), ([0, 4], (4, 1, 1))],
    ids=["the same answer", "another request computes it meanwhile", "a part of it"],
)
def test_a_request_counts_once_with_the_answer_that_was_used(
    locals: list[int], had: tuple[int, int, int]
) -> None:
    """A request waits for room and asks in every step. Only what it is admitted with was served."""
    hand = Hand()
    metrics = Metrics.attached_to(hand.core)
    hand.store(SmallRequest("a", range(9)), [0, 1])
    before = metrics.values()["blocks_asked"]
    asked_often(hand, SmallRequest("r", [*range(8), *range(50, 59)]), locals)
    [event] = admitted(hand)[-1:]
    assert (event.request, counted(event), event.resumed) == ("r", had, False)
    grown = {place: n - before[place] for place, n in metrics.values()["blocks_asked"].items()}
    assert grown == {"on the device": had[1], "on the host": had[2], "nowhere": had[0] - had[1] - had[2]}


def test_the_key_at_which_the_used_answer_ended_is_the_one_that_is_reported() -> None:
    """The first answer misses a block that the device has by the time of the admission."""
    hand, request = Hand(), SmallRequest("r", range(17))
    asked_often(hand, request, [0, 8])
    [event] = admitted(hand)
    assert event.missed is not None
    assert event.missed.startswith(request.block_hashes[2])
    rows, _ = extracted(hand.core.config, hand.log)
    used = [row for row in rows["lookups"] if row["admitted"] is not None]
    assert [(row["missed"], row["on_device"]) for row in used] == [(event.missed.hex(), 2)]


def test_a_request_that_reads_no_cache_is_no_miss() -> None:
    """vLLM asks for it all the same (prompt_logprobs)."""
    hand = Hand()
    metrics = Metrics.attached_to(hand.core)
    hand.store(SmallRequest("a", range(17)), [0, 1, 2, 3])
    before = metrics.values()
    for n in range(10):
        asked_often(hand, SmallRequest(f"r{n}", range(17), skip_reading=True), [0, 0])
    for name in ("blocks_asked", "matches", "blocks_matched"):
        assert metrics.values()[name] == before[name]


def test_a_request_that_is_never_admitted_has_found_nothing() -> None:
    hand, request = Hand(), SmallRequest("r", range(17))
    for _ in range(3):
        hand.scheduler.get_num_new_matched_tokens(request, 0)
        hand.step()
    hand.scheduler.request_finished(request, (), aborted=True)
    rows, _ = extracted(hand.core.config, hand.log)
    assert not admitted(hand)
    assert [row["admitted"] for row in rows["lookups"]] == [None]
    assert [row["asked"] for row in rows["requests"]] == [None]


def test_a_preempted_request_counts_once() -> None:
    hand, request = Hand(), SmallRequest("r", range(17))
    asked_often(hand, request, [0])
    asked_often(hand, request, [0])
    assert [event.resumed for event in admitted(hand)] == [False, True]
    rows, _ = extracted(hand.core.config, hand.log)
    assert [row["resumed"] for row in rows["lookups"]] == [0, 1]


def test_a_request_counts_for_itself_while_an_earlier_one_of_its_name_still_loads() -> None:
    """The core hears of the later ones only that they are admitted."""
    hand = Hand()
    hand.store(SmallRequest("a", range(17)), [0, 1, 2, 3])
    first = SmallRequest("r", range(17))
    hand.admit(first, [*range(20, 25)])
    plan = hand.step()
    hand.scheduler.request_finished(first, ([*range(20, 25)],), aborted=True)
    for length in (9, 5):
        later = SmallRequest("r", range(50, 50 + length))
        hand.admit(later, [*range(30, 33)])
        if length == 9:
            hand.scheduler.request_finished(later, ([*range(30, 33)],))
    hand.scheduler.get_num_new_matched_tokens(later, 0)
    hand.scheduler.update_state_after_alloc(later, ([*range(40, 42)],), 0)
    hand.end(plan)
    hand.scheduler.get_num_new_matched_tokens(later, 0)
    hand.scheduler.update_state_after_alloc(later, ([*range(40, 42)],), 0)
    rows, _ = extracted(hand.core.config, hand.log)
    requests = [row for row in rows["requests"] if row["request"] == "r"]
    lookups = [row for row in rows["lookups"] if row["request"] == "r"]
    assert [(row["asked"], row["on_host"], row["loaded"], row["lookups"]) for row in requests] == [
        (4, 4, 4, 1),
        (2, 0, 0, 1),
        (1, 0, 0, 1),
        (None, None, 0, 1),
    ]
    assert [row["finished"] is None for row in requests] == [False, False, False, True]
    assert [(row["asked"], row["resumed"]) for row in lookups] == [(4, 0), (2, 0), (1, 0), (1, 1), (1, 1)]


@settings(max_examples=examples(30), deadline=None)
@given(ACTS)
def test_a_copy_that_failed_says_why_in_the_log(acts: list[int]) -> None:
    engine = SmallEngine(device_blocks=16, host_blocks=8, workers=2)
    drive(engine, acts)
    for event in of_kind(engine, ev.WorkerReported):
        assert event.error == ("" if event.good else COPY_ERROR)
    for row in extracted(engine.core.config, engine.log)[0]["copies"]:
        assert row["error"] == (None if row["good"] else COPY_ERROR)


def test_core_alone_counts_what_it_was_asked_and_not_what_the_device_had() -> None:
    log = MemoryLog()
    core = Offloader(OffloadConfig(host_blocks=4, device_blocks=16, blocks_per_chunk=2), log)
    job = core.prepare_store("s", [b"a"], [0, 1]).job
    assert job is not None
    core.submit([job.transfer])
    core.complete_store(job.transfer)
    core.match("r", [b"a", b"b", b"c"])
    assert isinstance(log[-1], ev.HitMatched)
    assert counted(log[-1]) == (6, None, 2)


def reported(error: Any, *, good: bool = False) -> str:
    """What the log keeps of this error."""
    log = MemoryLog()
    core = Offloader(OffloadConfig(host_blocks=4, device_blocks=16), log)
    job = core.prepare_store("s", [b"a"], [0]).job
    assert job is not None
    core.submit([job.transfer])
    core.report(job.transfer, 0, good, error)
    assert isinstance(log[-1], ev.WorkerReported)
    return log[-1].error


@given(st.text(alphabet=st.characters(exclude_categories=()), max_size=2 * ERROR_CHARACTERS_MAX))
def test_any_error_is_short_enough_and_can_be_written(error: str) -> None:
    """Messages of an operating system may hold bytes that no log can. One bad message must not end a run."""
    kept = reported(error)
    kept.encode()
    assert len(kept) <= ERROR_CHARACTERS_MAX
    if len(error) <= ERROR_CHARACTERS_MAX and error.isprintable():
        assert kept == error


def test_error_of_a_good_report_is_not_kept() -> None:
    assert reported("late, but whole", good=True) == ""


def test_error_that_is_no_text_is_refused() -> None:
    with pytest.raises(WrongArgument, match="error is"):
        reported(OSError("lost"))


@pytest.mark.parametrize("counts", [(-1, 0, 0), (1, -1, 0), (1, 0, -1)])
def test_counts_below_0_are_refused(counts: tuple[int, int, int]) -> None:
    """Such an event could be written, and not read again."""
    log = MemoryLog()
    core = Offloader(OffloadConfig(host_blocks=4, device_blocks=16), log)
    with pytest.raises(WrongArgument, match="below 0"):
        core.pin("r", (), None, *counts)
    with pytest.raises(WrongArgument, match="below 0"):
        core.admit("r", *counts)
    assert len(log) == 1


def test_block_tokens_that_contradict_the_groups_are_refused() -> None:
    with pytest.raises(ConfigError, match="block_tokens is 5, and a block of every group ends each 4 tokens"):
        Hand(core={"block_tokens": 5})


def test_an_error_reaches_the_log_through_the_scheduler() -> None:
    hand = Hand()
    request = SmallRequest("r", range(4))
    hand.admit(request, [0])
    hand.compute(request)
    (job,) = hand.step(request).stores
    hand.scheduler.update_connector_output([WorkerReport(job.transfer, 0, False, "no room on rank 0")])
    assert [event.error for event in of_kind(hand, ev.WorkerReported)] == ["no room on rank 0"]
