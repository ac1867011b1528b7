"""What is open where a log ends: compared with a plain second count, and in the output of `kvsm verify`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from replay_life import (
    CONFIGS,
    OPERATIONS,
    Life,
    Operations,
    after_reset,
    key,
    scene,
    story_life,
    written,
)

from examples import examples
from kvsm import events as ev
from kvsm.cli import main
from kvsm.core.log import LogEnd, LogReader
from kvsm.events import OffloadingEvent
from kvsm.explain.story import LogCondition, rebuild
from kvsm.explain.story.unfinished import (
    ENGINE_ENDS,
    Beginnings,
    Unfinished,
    beginnings,
    end_rows,
    unfinished_at_end,
    unfinished_in,
)


def kvsm(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(one) for one in arguments])


class PlainCount:
    """Counts what is open, from the events alone, with sets and dicts."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.requests: dict[str, int] = {}
        self.finishing: set[str] = set()
        self.loads: dict[int, str] = {}
        self.planned: dict[int, int] = {}
        self.copies: dict[int, tuple[int, set[int]]] = {}
        self.waits: dict[str, tuple[int, int, int]] = {}

    def note(self, event: OffloadingEvent) -> None:
        if isinstance(event, ev.RequestArrived | ev.HitMatched | ev.RequestDeferred):
            self.requests.setdefault(event.request, event.seq)
        if isinstance(event, ev.RequestDeferred):
            self.waits[event.request] = event.transfer, event.until, event.seq
        elif isinstance(event, ev.RequestFinished | ev.RequestPreempted):
            self.waits.pop(event.request, None)
            if isinstance(event, ev.RequestFinished):
                self.finishing.add(event.request)
                self.forget_over()
        elif isinstance(event, ev.StorePlanned | ev.LoadPlanned) and not getattr(event, "voided", False):
            self.planned[event.seq] = event.seq
            if isinstance(event, ev.LoadPlanned):
                self.loads[event.seq] = event.request
        elif isinstance(event, ev.TransfersSubmitted):
            for id in event.transfers:
                del self.planned[id]
                self.copies[id] = event.seq, set(range(self.workers))
        elif isinstance(event, ev.WorkerReported):
            self.copies[event.transfer][1].discard(event.worker)
            if not self.copies[event.transfer][1]:
                self.end(event.transfer)
        elif isinstance(event, ev.TransferCancelled | ev.TransferLost):
            self.end(event.transfer)
        elif isinstance(event, ev.CacheReset):
            # It cancels plans. A copy that it abandons goes on, and so does a wait for it.
            for id in [*self.planned]:
                self.end(id)
        elif isinstance(event, ev.Restarted):
            self.__init__(self.workers)  # type: ignore[misc]
        elif isinstance(event, ev.Ticked):
            self.waits = {name: wait for name, wait in self.waits.items() if wait[1] > event.tick}

    def end(self, id: int) -> None:
        self.planned.pop(id, None)
        self.copies.pop(id, None)
        self.loads.pop(id, None)
        self.waits = {name: wait for name, wait in self.waits.items() if wait[0] != id}
        self.forget_over()

    def forget_over(self) -> None:
        for name in [one for one in self.finishing if one not in self.loads.values()]:
            self.finishing.discard(name)
            self.requests.pop(name, None)


def seen_in(life: Life) -> Unfinished:
    """What is open according to kvsm after these events of a life, as if a log ended there."""
    ledger, condition = life.core.ledger, LogCondition(None, None, (), False, LogEnd.OPEN)
    return unfinished_in(ledger, condition, beginnings(EventsOf(life), ledger))  # type: ignore[arg-type]


class EventsOf:
    """As much of a `LogReader` as `beginnings` needs."""

    def __init__(self, life: Life) -> None:
        self._events = life.events

    def segments(self) -> list[EventsOf]:
        return [self]

    def events(self) -> list[OffloadingEvent]:
        return list(self._events)


@settings(max_examples=examples(30))
@given(OPERATIONS, CONFIGS)
def test_what_is_open_agrees_with_a_plain_count(operations: Operations, config: dict[str, Any]) -> None:
    """Which requests, copies by rank, waits and plans are open, and since which event."""
    life = Life(**config).drive(operations)
    plain = PlainCount(life.config.workers)
    for event in life.events:
        plain.note(event)
    found = seen_in(life)
    assert {one.request: one.since and one.since.event for one in found.requests} == plain.requests
    assert {one.transfer: (one.since and one.since.event, set(one.missing)) for one in found.copies} == (
        plain.copies
    )
    assert {one.transfer: one.since and one.since.event for one in found.plans} == plain.planned
    waits = {
        one.request: (one.transfer, one.until, one.since and one.since.event)
        for one in found.waits
        if one.until is not None
    }
    assert waits == plain.waits


@settings(max_examples=examples(30))
@given(OPERATIONS, CONFIGS)
def test_nothing_is_open_once_all_has_ended(operations: Operations, config: dict[str, Any]) -> None:
    """No false alarm: if every copy and request has ended, nothing is reported as open."""
    assert seen_in(Life(**config).drive(operations).drain()).nothing_open


def test_every_end_of_a_log_is_worded() -> None:
    assert set(ENGINE_ENDS) == set(LogEnd)


# As verify tells it.


def silent_rank(log: Path) -> Life:
    """r1's store was submitted, and worker 1 never reports. r2 waits for it. r3's plan is not submitted."""
    ticks = iter(range(10**9, 10**12, 10**8))
    life = Life(log, clock_ns=lambda: next(ticks), workers=2, defer_ticks=30)
    core = life.core
    core.arrive("r1")
    plan = core.prepare_store("r1", [key(1)], [1]).job
    assert plan is not None
    core.submit([plan.transfer])
    core.report(plan.transfer, 0, True)
    core.match("r2", [key(1)])
    core.prepare_store("r3", [key(3)], [3])
    core.end_step()
    return life


def test_verify_names_the_rank_that_is_silent_and_who_waits_for_it(tmp_path: Path) -> None:
    """The on-call question: which rank, since when, and who stands still because of it."""
    silent_rank(tmp_path / "log").kill()
    result = kvsm("verify", tmp_path / "log")
    assert result.exit_code == 0
    assert "no violation; not finished (see the end)" in result.stdout
    assert result.stdout.split("at the end:\n")[1].splitlines() == [
        "  engine            it was killed or still runs, or the end of the log is missing",
        "  requests          2 never ended",
        "                    request r1: NEW, arrived at event 2 (+0.100s, 0.60 s before the end)",
        "                    request r2: DEFERRED, arrived at event 6 (+0.500s, 0.20 s before the end)",
        "  copies            1 not reported (worker 1: 1)",
        "                    store 3 of request r1: worker 1, submitted at event 4 "
        "(+0.300s, 0.40 s before the end)",
        "  waits             1 still open",
        "                    request r2 waits for transfer 3, until tick 30 at most (it is 0), "
        "begun at event 6 (+0.500s, 0.20 s before the end)",
        "  plans             1 never submitted",
        "                    store 7 of request r3: planned at event 7 (+0.600s, 0.10 s before the end)",
        "  device blocks     2 still held: 2 read by stores, 0 written by loads",
    ]


@pytest.mark.parametrize(("life", "code"), [("open", 1), ("killed idle", 1), ("closed open", 1), ("over", 0)])
def test_strict_makes_unfinished_business_an_error(tmp_path: Path, life: str, code: int) -> None:
    """Something is open, or the engine did not close the log. Only `--strict` minds."""
    log = tmp_path / "log"
    if life == "open":
        silent_rank(log).kill()
    elif life == "killed idle":
        Life(log).kill()
    elif life == "closed open":
        silent_rank(log).close()
    else:
        story_life(log)
    assert kvsm("verify", log).exit_code == 0
    assert kvsm("verify", log, "--strict").exit_code == code
    found = json.loads(kvsm("verify", log, "--strict", "--json").stdout)
    assert found["finished"] is (code == 0)
    assert found["unfinished"]["engine"] == ("closed" if life in ("closed open", "over") else "open")


def test_a_log_that_breaks_a_property_has_no_end_to_tell(tmp_path: Path) -> None:
    """The fold stopped before the end, so nothing is claimed about it."""
    life = scene()
    log = written(tmp_path / "log", life, [*life.events, *after_reset(life)])
    result = kvsm("verify", log)
    assert "at the end:" not in result.stdout
    assert json.loads(kvsm("verify", log, "--json").stdout)["unfinished"] is None


def test_what_began_before_the_log_is_not_dated(tmp_path: Path) -> None:
    """Retention deleted the first segments. The snapshot has what is open, but no event shows since when."""
    log = tmp_path / "log"
    life = silent_rank(log)
    assert life.writer is not None
    life.writer.close()
    rebuilt = rebuild(log)
    found = unfinished_in(rebuilt.ledger, rebuilt.condition, Beginnings(1, 2))
    told = dict(row for row in end_rows(found) if row[0])
    assert told["copies"] == "1 not reported (worker 1: 1)"
    assert ("", "store 3 of request r1: worker 1, submitted before the log begins") in end_rows(found)


def test_many_open_requests_are_counted_and_some_are_named(tmp_path: Path) -> None:
    """A killed engine had hundreds in work."""
    life = Life(tmp_path / "log")
    for number in range(100):
        life.core.arrive(f"r{number}")
    life.kill()
    rebuilt = rebuild(tmp_path / "log")
    found = unfinished_at_end(LogReader(tmp_path / "log"), rebuilt.ledger, rebuilt.condition)
    told = [text for _, text in end_rows(found)]
    assert "100 never ended" in told
    assert "... and 95 more" in told
    assert len([one for one in told if one.startswith("request ")]) == 5
