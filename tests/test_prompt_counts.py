"""What the log says about prompts and failed copies: blocks asked for, blocks of the device and the host, and
errors. The engine keeps its own count of what it asked and was answered."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_traffic import ACTS, FULL, SLIDING, WIDE, Hand, drive, of_kind
from test_tables import extracted

from kvsm import events as ev
from kvsm.errors import ConfigError, WrongArgument
from kvsm.events import ERROR_CHARACTERS_MAX, OffloadConfig
from kvsm.log import MemoryLog
from kvsm.metrics import Metrics
from kvsm.offloader import Offloader
from kvsm.plan import WorkerReport
from kvsm.worlds.small_engine import SmallEngine
from kvsm.worlds.small_request import SmallRequest
from kvsm.worlds.small_workers import COPY_ERROR


class Answer(NamedTuple):
    """A call of the engine that was answered: blocks of the prompt, on the device, from the host; and whether
    the request can have no match, because its load is in flight."""

    counts: tuple[int, int, int]
    loading: bool


def counted(one: Any) -> tuple[int | None, int | None, int | None]:
    """The three counts of an event."""
    return one.asked, one.on_device, one.on_host


def told(row: dict[str, Any]) -> tuple[int | None, int | None, int | None]:
    """The three counts of a row of a table."""
    return row["asked"], row["on_device"], row["on_host"]


def watch(engine: SmallEngine) -> dict[str, list[Answer | str]]:
    """What the engine itself sees, by request: each answer, and each time that it takes the blocks back."""
    seen: dict[str, list[Answer | str]] = {}
    ask, size = engine.scheduler.get_num_new_matched_tokens, engine.config.alignment
    preempt = engine.preempt

    def asks(request: Any, local: int) -> tuple[int | None, bool]:
        found, loads = ask(request, local)
        if found is not None:
            loading = not engine.core.may_match(request.request_id)
            counts = request.num_tokens // size, local // size, found // size
            seen.setdefault(request.request_id, []).append(Answer(counts, loading))
        return found, loads

    def preempts(request: SmallRequest) -> None:
        if request.request_id in engine.running:
            seen.setdefault(request.request_id, []).append("preempted")
        preempt(request)

    engine.scheduler.get_num_new_matched_tokens = asks  # type: ignore[method-assign]
    engine.preempt = preempts  # type: ignore[method-assign]
    return seen


def first_answers(answers: list[Answer | str]) -> list[tuple[int, int, int]]:
    """The first answers to a request: after its arrival, and after each preemption."""
    firsts, fresh = [], True
    for one in answers:
        if isinstance(one, str):
            fresh = True
        elif fresh and not one.loading:
            firsts.append(one.counts)
            fresh = False
    return firsts


def first_events(engine: SmallEngine) -> list[tuple[int | None, int | None, int | None]]:
    """The same, as the log tells it."""
    firsts, answered = [], set()
    for event in engine.log:
        if isinstance(event, ev.RequestPreempted):
            answered.discard(event.request)
        elif isinstance(event, ev.HitMatched) and event.request not in answered:
            answered.add(event.request)
            firsts.append(counted(event))
    return firsts


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


@settings(max_examples=60, deadline=None)
@given(ACTS, LAYOUTS)
def test_the_log_counts_prompts_as_the_engine_does(acts: list[int], layout: dict[str, Any]) -> None:
    """Hit shares of a whole run can be told from its log alone."""
    engine = SmallEngine(**{"device_blocks": 16, "host_blocks": 8, "workers": 2, **layout})
    seen, metrics = watch(engine), Metrics.attached_to(engine.core)
    drive(engine, acts)
    truth = {name: first_answers(answers) for name, answers in seen.items()}
    ours, theirs = first_events(engine), [counts for firsts in truth.values() for counts in firsts]
    assert [sum(column) for column in zip(*ours)] == [sum(column) for column in zip(*theirs)]
    assert sorted(ours) == sorted(theirs)
    matches = [event for event in of_kind(engine, ev.HitMatched) if event.asked is not None]
    asked, on_device, on_host = (sum(counted(event)[place] or 0 for event in matches) for place in range(3))
    assert metrics.values()["blocks_asked"] == {
        "on the device": on_device,
        "on the host": on_host,
        "nowhere": asked - on_device - on_host,
    }
    rows, _ = extracted(engine.core.config, engine.log)
    last = {name: firsts[-1] for name, firsts in truth.items() if firsts}
    assert {row["request"]: told(row) for row in rows["requests"] if row["asked"] is not None} == last
    assert [told(row) for row in rows["lookups"]] == [
        counted(event) for event in of_kind(engine, ev.HitMatched)
    ]


@settings(max_examples=30, deadline=None)
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
def test_pin_refuses_counts_below_0(counts: tuple[int, int, int]) -> None:
    """Such an event could be written, and not read again."""
    log = MemoryLog()
    core = Offloader(OffloadConfig(host_blocks=4, device_blocks=16), log)
    with pytest.raises(WrongArgument, match="below 0"):
        core.pin("r", (), None, *counts)
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
