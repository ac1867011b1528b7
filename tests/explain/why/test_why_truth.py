"""Compare the causes of every miss and wait of whole runs with a reference that watched from outside.

The runs are random walks of the core's world and of the serving world: all store modes, hybrid groups,
preemptions, resets, failures, losses, chunks. `fate_reference` keeps plain books of them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import msgspec
import pytest
from explained import explanations, life_of
from fate_reference import NEVER, OutsideBooks, Reason, Span
from msgspec.structs import replace
from planted_bugs import plant

import kvsm
from examples import seeds_of_today
from kvsm import events as ev
from kvsm.check.walks.targets import TARGETS
from kvsm.check.worlds.core_options import draw_options
from kvsm.check.worlds.core_world import CoreWorld
from kvsm.check.worlds.serving_world import ServingOptions, ServingWorld
from kvsm.core.ledger import Ledger
from kvsm.core.ledger.snapshot import snapshot
from kvsm.core.log import LogReader, LogWriter, WholeState
from kvsm.core.log.fold import Moment
from kvsm.events import OffloadConfig, OffloadingEvent
from kvsm.explain.story import tell
from kvsm.explain.story.concern import concern
from kvsm.explain.story.render import render_owners
from kvsm.explain.tables import key_history
from kvsm.explain.tables.block_lives import BlockLives
from kvsm.explain.tables.extract import Extractor
from kvsm.explain.tables.row_kinds import Gone
from kvsm.explain.why.causes import Inquiry
from kvsm.explain.why.fates import Fates

CORE_RUNS, SERVING_RUNS = range(7), range(20)
ACTIONS = 800


class Run(NamedTuple):
    """A whole run: its events, and the books that were kept of it from outside."""

    name: str
    config: OffloadConfig
    events: Sequence[OffloadingEvent]
    books: OutsideBooks


def core_run(seed: int, actions: int = ACTIONS) -> Run:
    """Any calls of the core, sensible or not."""
    random = Random(seed)
    world = CoreWorld(draw_options(random))
    books = OutsideBooks(world.core, world.events)
    for _ in range(actions):
        core = world.core
        world.do(world.draw(random))
        if world.core is not core:
            books.restarted(world.core)
    return Run(f"core {seed}", world.core.config, world.events, books)


def serving_run(seed: int, actions: int = ACTIONS) -> Run:
    """A small engine with a few dozen requests and every disturbance."""
    random = Random(seed)
    options = TARGETS["serving"].draw(random)
    assert isinstance(options, ServingOptions)
    # A crash may forget events that were not written, and the books have no way back.
    budgets = replace(options.budgets, crashes=0)
    options = replace(options, transfer_ticks=random.choice((0, 0, 4)), budgets=budgets)
    world = ServingWorld(options)
    books = OutsideBooks(world.engine.core, world.engine.log)
    for _ in range(actions):
        action = world.draw(random)
        if action == ("step",) and not world.may_step():
            break
        world.do(action)
    return Run(f"serving {seed}", world.engine.core.config, world.engine.log, books)


@cache
def runs() -> tuple[Run, ...]:
    """The runs that the fast tests look at."""
    return *map(core_run, CORE_RUNS), *map(serving_run, SERVING_RUNS)


def misses(run: Run) -> list[tuple[int, Reason]]:
    """The event of each recorded answer that names a missed key, and why that key could not be read."""
    return [(one.event, one.reason) for one in run.books.lookups if one.reason is not None]


def lookups_of(run: Run) -> set[int]:
    """The event of each recorded answer."""
    return {one.event for one in run.books.lookups}


def test_the_runs_meet_every_reason() -> None:
    """A reason that no run meets would be checked by nothing."""
    met = Counter((one.why, one.before is not None) for run in runs() for _, one in misses(run))
    every = {(why, False) for why in Gone if why is not Gone.BEFORE_LOG}
    assert every | {(Gone.SKIPPED, True)} == set(met), met


# `kvsm show`.

TOLD = {
    Gone.NEVER_STORED: "never stored",
    Gone.IN_FLIGHT: "store {transfer} of {requests} is still in flight",
    Gone.EVICTED: "evicted at event {at} to make room for store {transfer} of {requests}",
    Gone.RESET: "reset at event {at}",
    Gone.RESTART: "store {transfer} of {requests} had not ended when another process went on at event {at}",
    Gone.STORE_FAILED: "store {transfer} of {requests} failed at event {at}",
    Gone.LOAD_FAILED: "load {transfer} of {requests} failed at event {at}",
    Gone.CANCELLED: "store {transfer} of {requests} was cancelled at event {at}",
    Gone.LOST: "{transfer} of {requests} was lost at event {at}",
}
"""How the story of a request says why a key was missed."""


def told_by_fates(run: Run) -> dict[int, str]:
    """Event of each lookup that missed a key -> the reason by `Fates`."""
    ledger, fates, told = Ledger(run.config), Fates(lambda _: True), {}
    lookups = lookups_of(run)
    for event, following in zip(run.events, [*run.events[1:], None]):
        moment = Moment(ledger, event, following)
        found = concern(ledger, event)
        if (
            isinstance(event, ev.HitMatched | ev.RequestAdmitted)
            and event.missed is not None
            and event.seq in lookups
        ):
            told[event.seq] = fates.why(ledger, event.missed)
        fates.before(moment, found)
        fates.after(moment, ledger.apply(event))
    return told


def must_be_told(reason: Reason) -> tuple[str, list[str]]:
    """(why the key is gone, in words; if it was offered and skipped since, one of these must be told too)"""
    gone = (reason.before or NEVER) if reason.why is Gone.SKIPPED else reason
    requests = render_owners([(name, 1) for name in gone.requests])
    text = TOLD[gone.why].format(at=gone.at and gone.at[1], transfer=gone.transfer, requests=requests)
    if reason.why is not Gone.SKIPPED or reason.at is None:
        return text, []
    first, last = reason.at
    return text, [f"offered at event {n} and skipped ({reason.skip})" for n in range(first, last + 1)]


def wrong_stories(run: Run) -> Iterator[str]:
    """The misses for which `kvsm show` gives another reason than the books."""
    told, reasons = told_by_fates(run), dict(misses(run))
    if told.keys() != reasons.keys():
        yield f"misses {told.keys() ^ reasons.keys()}"
    for event in told.keys() & reasons.keys():
        text, skipped = must_be_told(reasons[event])
        is_skipped = any(one in told[event] for one in skipped)
        if text not in told[event] or not is_skipped == bool(skipped) == ("skipped" in told[event]):
            yield f"event {event}: {told[event]!r}, and it was {reasons[event]}"


def test_show_tells_why_each_key_was_missed() -> None:
    """For every miss of every run: the cause, its event, the transfer behind it and whose that was."""
    for run in runs():
        wrong = list(wrong_stories(run))
        assert not wrong, f"{run.name}: {len(wrong)} differ, the first: {wrong[0]}"


STORY_BUGS = {
    "a skip before the end of a life counts as after it": (
        Fates.after,
        "self._skipped.pop(key, None)",
        "pass",
    ),
    "what an event removes is not noted": (
        Fates.after,
        "not in moment.ledger.index",
        "in moment.ledger.index",
    ),
    "a skip is not noted": (Fates.before, "self._skipped[key] = ", "_ = "),
}


@pytest.mark.parametrize("bug", STORY_BUGS)
def test_bug_in_the_story_is_seen(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """This comparison can fail, too."""
    plant(monkeypatch, *STORY_BUGS[bug])
    assert any(any(wrong_stories(run)) for run in runs())


# The tables.

Tables = dict[str, list[Any]]


def written(run: Run, directory: Path, **options: Any) -> Path:
    """The run's events as a log on disk."""
    ledger = Ledger(run.config)
    with writer_of(run, directory, ledger, **options) as writer:
        for event in run.events:
            ledger.apply(event)
            writer.append(event)
            if event.kind in ("StepEnded", "TransfersSubmitted"):
                writer.flush()
    return directory


def writer_of(run: Run, directory: Path, ledger: Ledger, **options: Any) -> LogWriter:
    options = {"durability": "none", "clock": lambda: 7, **options}
    return LogWriter(directory, config=run.config, snapshot=lambda: WholeState(snapshot(ledger)), **options)


def tables_of(run: Run) -> Tables:
    """The rows that `kvsm.open` gives of the run's log."""
    with TemporaryDirectory() as directory, kvsm.open(written(run, Path(directory) / "log")) as log:
        return rows_in(log)


def rows_in(log: kvsm.OpenedLog) -> Tables:
    names = "lookups", "request_states", "blocks", "transfers", "copies"
    return {name: list(getattr(log, name)()) for name in names}


@cache
def good_tables(place: int) -> Tables:
    """The tables of one of the runs, without a planted bug."""
    return tables_of(runs()[place])


def is_within(event: int | None, span: Span | None) -> bool:
    """Whether the row's event is one of the call's events, or both are missing."""
    return event is None if span is None else event is not None and span[0] <= event <= span[1]


def requests_in(json: str | None) -> tuple[str, ...] | None:
    return None if json is None else msgspec.json.decode(json, type=tuple[str, ...])


def wrong_lookups(run: Run, tables: Tables) -> Iterator[str]:
    """Lookups that say another key, or another reason, than the books."""
    kinds = {event.seq: event.kind for event in run.events}
    rows = {row.event: row for row in tables["lookups"]}
    books = {one.event: one for one in run.books.lookups}
    if rows.keys() != books.keys():
        yield f"lookups {rows.keys() ^ books.keys()}"
    for event, book in books.items():
        row, reason = rows.get(event), book.reason
        if row is None:
            continue
        missed = None if book.missed is None else book.missed.hex()
        if (row.request, row.hit_slots, row.missed) != (book.request, len(book.slots), missed):
            yield f"{row} is {book}"
        if reason is None:
            if (row.why, row.cause, row.cause_transfer, row.cause_requests) != (None,) * 4:
                yield f"{row} has no reason"
            continue
        gone = reason.before or reason
        cause = row.why, row.cause_transfer, requests_in(row.cause_requests)
        if cause != (gone.why, gone.transfer, None if gone.transfer is None else gone.requests):
            yield f"{row} is because of {gone}"
        if not is_within(row.skipped, reason.at if reason.why is Gone.SKIPPED else None):
            yield f"{row} was skipped at {reason}"
        if not is_within(row.cause, gone.at) or kinds.get(row.cause or 0, "") != gone.kind:
            yield f"{row} happened at {gone}"


def wrong_waits(run: Run, tables: Tables) -> Iterator[str]:
    """Waits that began or ended elsewhere, or for another transfer."""
    rows = {
        (row.request, row.began): row
        for row in tables["request_states"]
        if row.state in ("DEFERRED", "LOADING")
    }
    stays = {(one.request, one.began[1]): one for one in run.books.stays}
    if rows.keys() != stays.keys():
        yield f"waits {rows.keys() ^ stays.keys()}"
    for place, stay in stays.items():
        row = rows.get(place)
        if row is not None and (
            (row.state, row.transfer) != (stay.state, stay.transfer) or not is_within(row.ended, stay.ended)
        ):
            yield f"{row} is {stay}"


def wrong_blocks(run: Run, tables: Tables) -> Iterator[str]:
    """Lives of blocks whose rows differ from the books: stored, used, gone, wanted afterwards."""
    rows = {(row.transfer, row.slot): row for row in tables["blocks"]}
    books = {(one.store, one.slot): one for one in run.books.blocks}
    if rows.keys() != books.keys():
        yield f"blocks {rows.keys() ^ books.keys()}"
    for place, book in books.items():
        row, end = rows.get(place), book.reason or NEVER
        if row is None:
            continue
        told = row.key, requests_in(row.requests), row.hits, row.last_hit, row.wanted
        if told != (book.key.hex(), book.requests, len(book.hits), max(book.hits, default=None), book.wanted):
            yield f"{row} is {book}"
        if not is_within(row.stored, book.stored) or not is_within(row.gone, book.gone):
            yield f"{row} began and ended as {book}"
        evicted, by = end.why is Gone.EVICTED, end.transfer
        why = (row.why, row.gone_for, requests_in(row.gone_for_requests), row.gone_by)
        if why != (
            None if book.reason is None else end.why,
            by if evicted else None,
            end.requests if evicted else None,
            None if evicted else by,
        ):
            yield f"{row} ended because of {end}"


def wrong_transfers(run: Run, tables: Tables) -> Iterator[str]:
    """Transfers with another end, another owner or other reports."""
    rows = {row.transfer: row for row in tables["transfers"]}
    if rows.keys() != run.books.transfers.keys():
        yield f"transfers {rows.keys() ^ run.books.transfers.keys()}"
    reports = {(row.transfer, row.worker): (row.reported, row.good) for row in tables["copies"]}
    for id, book in run.books.transfers.items():
        row = rows.get(id)
        if row is None:
            continue
        told = row.direction, requests_in(row.requests), row.slots, row.outcome, row.source
        direction = book.direction.name.lower()
        if told != (direction, book.requests, len(book.blocks), book.outcome, book.source):
            yield f"{row} is {book}"
        if not is_within(row.ended, book.ended) or row.pending != run.config.workers - len(book.reports):
            yield f"{row} ended as {book}"
        for worker in range(run.config.workers) if book.submitted else ():
            at, good = book.reports.get(worker, (None, None))
            reported, was_good = reports.get((id, worker), (0, None))
            if not is_within(reported, at) or was_good is not good:
                yield f"the copy of {id} on worker {worker}"


COMPARISONS: dict[str, Callable[[Run, Tables], Iterator[str]]] = {
    "lookups": wrong_lookups,
    "waits": wrong_waits,
    "blocks": wrong_blocks,
    "transfers": wrong_transfers,
}


@pytest.mark.parametrize("what", COMPARISONS)
def test_tables_tell_a_whole_run_as_it_was(what: str) -> None:
    """Every miss, every wait, every life of a block and every copy of every run, against the books."""
    for place, run in enumerate(runs()):
        wrong = list(COMPARISONS[what](run, good_tables(place)))
        assert not wrong, f"{run.name}: {len(wrong)} differ, the first: {wrong[0]}"


WHY_TOLD = {
    Gone.NEVER_STORED: "was never stored before",
    Gone.SKIPPED: "was offered and skipped at event {at}",
    Gone.IN_FLIGHT: "was in flight: planned at event {at}",
    Gone.EVICTED: "was evicted at event {at}",
    Gone.RESET: "was dropped by a reset of the cache at event {at}",
    Gone.RESTART: (
        "was not stored, because store {transfer} of {requests} had not ended when another process went on at"
    ),
    Gone.STORE_FAILED: "was not stored, because store {transfer} of {requests} failed at event {at}",
    Gone.LOAD_FAILED: "became void, because load {transfer} of {requests} failed at event {at}",
    Gone.CANCELLED: "was not stored, because store {transfer} of {requests} was cancelled before it left at",
    Gone.LOST: "was given up, because",
}
"""How `kvsm why` tells each reason."""

WHY_ALSO = {
    Gone.IN_FLIGHT: "by store {transfer} of {requests}",
    Gone.EVICTED: "to make room for store {transfer} of {requests}",
    Gone.LOST: "{transfer} of {requests} was lost at event {at}",
}
"""What else it must say."""


def is_told_by_why(reason: Reason, told: str) -> bool:
    first, last = reason.at or (0, 0)
    told = re.sub(r" \(from engine [^)]*\)", "", told)  # Where the bytes of an import come from.
    named = {
        "transfer": reason.transfer,
        "requests": render_owners([(name, 1) for name in reason.requests]),
    }
    texts = WHY_TOLD[reason.why], WHY_ALSO.get(reason.why, "")
    return any(
        all(text.format(at=f"{at:,}", **named) in told for text in texts) for at in range(first, last + 1)
    )


def test_why_says_why_each_key_was_missed(tmp_path: Path) -> None:
    """For every miss of a whole run: the cause, its event, the transfer behind it and whose that was."""
    met = set()
    for place, run in enumerate(runs()[:4] + runs()[len(CORE_RUNS) : len(CORE_RUNS) + 8]):
        reasons = dict(misses(run))
        with kvsm.open(written(run, tmp_path / str(place))) as log:
            for row in log.lookups("missed IS NOT NULL"):
                reason = reasons.pop(row.event)
                told, gone = Inquiry(log).missed(row), reason.before or reason
                where = f"{run.name}, event {row.event}: {told!r}, and it was {reason}"
                assert is_told_by_why(gone, told), where
                assert ("skipped" in told) == (reason.skip is not None), where
                assert reason.skip is None or f": {reason.skip}" in told, where
                met.add(gone.why)
        assert not reasons
    assert met >= set(Gone) - {Gone.BEFORE_LOG, Gone.LOST}


_WHY = "_GONE.get((record.state, record.direction))"


def _moves_no_request(kind: type[OffloadingEvent]) -> tuple[Callable[..., Any], str, str]:
    left_out = f"() if isinstance(event, ev.{kind.__name__}) else changes.requests"
    return Extractor._take_changes, "changes.requests", left_out


BUGS: dict[str, tuple[Callable[..., Any], str, str]] = {
    "an eviction forgets its last victim": (
        BlockLives.evicted,
        "_indices(event.slots)",
        "_indices(event.slots)[:-1]",
    ),
    "an eviction names the event, not the store": (BlockLives.evicted, "event.transfer", "event.seq"),
    "a store in flight is not seen": (BlockLives.missed, "ledger.index.get(key)", "None"),
    "a skip is not noted": (BlockLives.skipped, "event.seq", "0"),
    "a failed load voids nothing": (
        Extractor._end,
        "if why is not None:",
        "if why is not None and flight.store:",
    ),
    "a failed load counts as a failed store": (
        Extractor._end,
        _WHY,
        f"Gone.STORE_FAILED if record.state is TransferState.FAILED else {_WHY}",
    ),
    "an import counts as a store from the device": (
        Extractor._store_planned,
        "flight.elsewhere = event.source or None",
        "pass",
    ),
    "a cancelled load ends lives": (
        Extractor._end,
        _WHY,
        f"Gone.CANCELLED if record.state is TransferState.CANCELLED else {_WHY}",
    ),
    "a lost copy counts as cancelled": (
        Extractor._end,
        _WHY,
        f"Gone.CANCELLED if record.state is TransferState.LOST else {_WHY}",
    ),
    "a restart takes what was readable": (
        BlockLives.cut_off,
        "~are_indexed(ledger.blocks.view)",
        "(ledger.blocks.view >= 0)",
    ),
    "a restart ends no transfer": (Extractor._restarted, "list(self._flights)", "[]"),
    "a reset counts as an eviction": (Extractor._reset, "Gone.RESET", "Gone.EVICTED"),
    "a tick wakes no request": _moves_no_request(ev.Ticked),
    "the end of a copy wakes no request": _moves_no_request(ev.WorkerReported),
    "a preemption ends no wait": _moves_no_request(ev.RequestPreempted),
    "a lookup counts one hit too many": (BlockLives.matched, "+= 1", "+= 2"),
    "a life begins with the hits of the last one": (BlockLives._number, "self._hits[own] = 0", "pass"),
}
"""Ways to tell a log wrongly: a function, and what of it is replaced."""


@pytest.mark.parametrize("bug", BUGS)
def test_bug_in_the_tables_is_seen(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: it notices each of these bugs."""
    plant(monkeypatch, *BUGS[bug])
    assert any(is_told_wrongly(run) for run in runs())


def is_told_wrongly(run: Run) -> bool:
    """Whether the tables of a run differ from the books, or cannot be made."""
    try:
        tables = tables_of(run)
    except (AssertionError, LookupError):
        return True
    return any(any(wrong(run, tables)) for wrong in COMPARISONS.values())


def expected_without(first: int, reason: Reason) -> tuple[Gone, int | None, int | None]:
    """(why, the last event that may be the cause, the transfer behind it), if the log begins with `first`.

    A store in flight is in the state with which the log begins. Of other causes before it nothing is known.
    """
    gone = reason.before or reason
    kept = gone.at is not None and (gone.at[1] >= first or gone.why is Gone.IN_FLIGHT)
    if not kept and reason.why is Gone.SKIPPED and reason.at is not None and reason.at[1] >= first:
        return Gone.SKIPPED, reason.at[1], None
    if not kept or gone.at is None:
        return Gone.BEFORE_LOG, None, None
    return gone.why, gone.at[1], gone.transfer


@pytest.mark.parametrize("place", [0, 2, 4, 12])
def test_log_without_its_beginning_tells_the_same_or_that_it_cannot(place: int, tmp_path: Path) -> None:
    """The oldest segments were deleted: what happened there is not guessed."""
    run = runs()[place]
    segments = sorted(written(run, tmp_path / "log", segment_bytes=1 << 12).iterdir())
    assert len(segments) > 2
    for segment in segments[: len(segments) // 2]:
        segment.unlink()
    with kvsm.open(tmp_path / "log") as log:
        first = log.first
        rows = {row.event: row for row in log.lookups()}
    # An answer that the log has lost is known from the admission with it alone.
    lost = {one.event for one in run.books.lookups if one.event < first}
    rows = {event: row for event, row in rows.items() if row.admitted != event or event in lookups_of(run)}
    reasons = {event: reason for event, reason in misses(run) if event >= first}
    assert lost
    assert rows.keys() == {event for event in lookups_of(run) if event >= first}
    assert reasons
    for event, reason in reasons.items():
        row, (why, cause, transfer) = rows[event], expected_without(first, reason)
        assert (row.why, row.cause_transfer) == (why, transfer), f"{row} is {reason}"
        assert (row.cause is None) == (cause is None), row
        assert cause is None or first <= (row.cause or 0) <= cause or why is Gone.IN_FLIGHT, row


def test_tables_remember_keys_that_are_in_memory_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large log has more keys than fit in memory: the older ones are found again on disk."""
    monkeypatch.setattr(key_history, "RECENT_KEYS", 3)
    for run in runs()[: len(CORE_RUNS) + 6]:
        tables = tables_of(run)
        wrong = [text for compare in COMPARISONS.values() for text in compare(run, tables)]
        assert not wrong, f"{run.name}: {len(wrong)} differ, the first: {wrong[0]}"


def test_index_that_grew_with_its_log_tells_the_same(tmp_path: Path) -> None:
    """A log that is opened repeatedly while it is written is read from where its index ends."""
    for place, run in enumerate(runs()[:3] + runs()[len(CORE_RUNS) : len(CORE_RUNS) + 3]):
        directory, ledger = tmp_path / str(place), Ledger(run.config)
        with writer_of(run, directory, ledger, segment_bytes=1 << 12) as writer:
            for event in run.events:
                ledger.apply(event)
                writer.append(event)
                if event.seq % 250 == 0:
                    writer.flush()
                    kvsm.open(directory).close()
        with kvsm.open(directory) as log:
            tables = rows_in(log)
        wrong = [text for compare in COMPARISONS.values() for text in compare(run, tables)]
        assert not wrong, f"{run.name}: {len(wrong)} differ, the first: {wrong[0]}"


# Long tests.


@pytest.mark.slow
@pytest.mark.parametrize("make", [core_run, serving_run])
def test_many_more_runs_are_told_as_they_were(make: Callable[[int, int], Run]) -> None:
    """The tables and `kvsm show` again, over more configurations and longer runs."""
    for seed in seeds_of_today(10 if make is core_run else 24):
        run = make(seed, 1500)
        tables = tables_of(run)
        wrong = [text for compare in COMPARISONS.values() for text in compare(run, tables)]
        wrong += wrong_stories(run)
        assert not wrong, f"{run.name}: {len(wrong)} differ, the first: {wrong[0]}"


@pytest.mark.slow
@pytest.mark.parametrize("make", [core_run, serving_run])
def test_everything_in_a_run_can_be_explained(make: Callable[[int, int], Run], tmp_path: Path) -> None:
    """No question ends in an error, and `kvsm show` prints each line of the evidence in the named life."""
    for seed in range(2000, 2004):
        directory = written(make(seed, 400), tmp_path / str(seed))
        with kvsm.open(directory) as log:
            lines = {(line.show, line.event) for one in explanations(log) for line in one.evidence}
        for thing in {show for show, _ in lines}:
            told = {line.event for line in tell(LogReader(directory), life_of(*thing))}
            assert {event for show, event in lines if show == thing} <= told, (directory, thing)
