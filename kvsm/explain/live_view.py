"""The current state of a running engine, from the last part of its log: `kvsm top`.

    view = LiveView(trust)
    for news in follower.poll():
        view.take(news)
    view.state(quiet_ns=0)

The ledger shows what is there: slots, copies in flight, waiting requests. The events show since when. Events
are counted by the second, over the last `WINDOW_SECONDS` of the log. An age runs from an event to the last
event of the log, plus the time for which the log has been quiet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from kvsm import events as ev
from kvsm.core.ledger import Ledger, TransferRecord, follow
from kvsm.core.log import News, Segment
from kvsm.core.log.fold import go_on, refuse_malformed
from kvsm.core.log.trust import Trust
from kvsm.events import OffloadingEvent
from kvsm.explain.tables.extract import occupancy
from kvsm.explain.tables.row_kinds import EventRow, OccupancyRow
from kvsm.explain.why.fates import kind_of
from kvsm.ids import count
from kvsm.states.block import are_readable
from kvsm.states.transfer import TransferState

WINDOW_SECONDS = 60

_S = 1_000_000_000


class RankCounts(msgspec.Struct):
    """Counts of one rank's reports over the window, without rejected reports.

    failed: the number of bad reports.
    error: the error text of the last bad report that had one; empty: none had.
    timed: reports of copies whose submission was read.
    total_ns, max_ns: time from submission to report of these copies.
    """

    worker: int
    reports: int = 0
    failed: int = 0
    error: str = ""
    timed: int = 0
    total_ns: int = 0
    max_ns: int = 0

    @property
    def mean_ns(self) -> int:
        """The mean time from submission to report (ns)."""
        return self.total_ns // self.timed if self.timed else 0

    def add(self, other: RankCounts) -> None:
        """Add the counts of a later second."""
        self.reports += other.reports
        self.failed += other.failed
        self.error = other.error or self.error
        self.timed += other.timed
        self.total_ns += other.total_ns
        self.max_ns = max(self.max_ns, other.max_ns)


class OldestCopy(msgspec.Struct, frozen=True):
    """The transfer that has been in flight for the longest time.

    age_ns: time since its submission.
    at_least: the submission lies before the part of the log that was read, so the age is a lower bound.
    silent: ranks that have not reported the transfer.
    """

    transfer: int
    direction: str
    age_ns: int
    at_least: bool
    silent: tuple[int, ...]


class LongestWait(msgspec.Struct, frozen=True):
    """The request that has waited for the longest time, and the transfer that it waits for.

    age_ns: time since the wait began.
    at_least: as in `OldestCopy`: the wait began before the part of the log that was read.
    """

    request: str
    transfer: int
    age_ns: int
    at_least: bool


class LastRestart(msgspec.Struct, frozen=True):
    """The last restart: this process resumed the log of the process before it.

    life: the number of processes that have written the log.
    ended: how the process before ended; empty: it closed the log.
    kept: blocks that were readable and still are.
    age_ns: time since the restart.
    """

    event: int
    life: int
    ended: str
    kept: int
    age_ns: int


class LiveState(msgspec.Struct, frozen=True, kw_only=True, tag_field="schema", tag="kvsm.top/1"):
    """What `kvsm top --json` prints: the state of an engine at the current end of its log.

    since_event: the first event that was read.
    end: how the log ends now: `open` while its engine lives. quiet_ns: time since the last write to the log.
    stopped_by: the signal that asked the engine to end, if the log is open; empty if none did.
    slots: the pool at the last event; its `event`, `step` and `wall_ns` belong to this event.
    capacity: slots of the pool.
    window_ns: length of the window for the counts: the last 60 s, or less if less was read.
    events, steps: numbers of events and engine steps in the window.
    admitted: requests that were admitted after a lookup, each once. asked, on_device, on_host: their device
        blocks, as `RequestAdmitted` counts them.
    evicted, skipped: blocks.
    restart: the last restart in the part that was read; null: there was none.
    ranks: the ranks that reported. worst: the rank with most failures; without failures, the slowest; null:
        no rank reported.
    """

    since_event: int
    end: str
    quiet_ns: int
    stopped_by: str
    slots: OccupancyRow
    capacity: int
    window_ns: int
    events: int
    steps: int
    admitted: int
    asked: int
    on_device: int
    on_host: int
    evicted: int
    skipped: int
    oldest_copy: OldestCopy | None
    longest_wait: LongestWait | None
    restart: LastRestart | None
    ranks: tuple[RankCounts, ...]
    worst: int | None


class _Second(msgspec.Struct):
    """What happened in one second of the log."""

    began_ns: int
    step: int
    events: int = 0
    admitted: int = 0
    asked: int = 0
    on_device: int = 0
    on_host: int = 0
    evicted: int = 0
    skipped: int = 0
    ranks: dict[int, RankCounts] = msgspec.field(default_factory=dict)


class LiveView:
    """Follows a live log: the engine's state, and counts of the last seconds. trust: what it may claim."""

    def __init__(self, trust: Trust) -> None:
        self._trust = trust
        self._ledger: Ledger | None = None
        self._segment: Segment | None = None
        self._seconds: deque[_Second] = deque()
        self._submitted: dict[int, int] = {}
        self._waits_since: dict[str, int] = {}
        self._restart: tuple[ev.Restarted, int] | None = None
        """The last restart that was read, and the number of blocks that it kept."""
        self._since = self._since_ns = 0
        self._last = EventRow(0, 0, 0, "")

    @property
    def began(self) -> bool:
        """Whether the head of a segment was read, so that `state` may be called."""
        return self._ledger is not None

    def take(self, news: News) -> None:
        """Fold newly written events.

        Raises `LogError` if the log claims more than is allowed, `LogDamaged` for a wrong snapshot, and
        `IllegalTransition` or `InvalidEvent` for an event that the ledger refuses.
        """
        if news.segment is not self._segment:
            if self._segment is None or news.segment.gap is not None:
                self._submitted.clear()
                self._waits_since.clear()
            self._ledger = go_on(self._ledger, news.segment, self._trust)
            self._segment = news.segment
            if not self._since:
                self._since, self._since_ns = self._ledger.seq + 1, 0
                self._last = EventRow(self._ledger.seq, self._ledger.step, 0, "")
        assert self._ledger is not None
        for event in news.events:
            self._follow(self._ledger, event)

    def _follow(self, ledger: Ledger, event: OffloadingEvent) -> None:
        refuse_malformed(event)
        changes = follow(ledger, event)
        now, seconds = event.wall_ns, self._seconds
        self._since_ns = self._since_ns or now
        if not seconds or now - seconds[-1].began_ns >= _S:
            seconds.append(_Second(now, event.step))
            while now - seconds[0].began_ns > WINDOW_SECONDS * _S:
                seconds.popleft()
        seconds[-1].events += 1
        take_facts = FACTS.get(type(event))
        if take_facts is not None:
            take_facts(self, event)
        for transfer in changes.submitted:
            self._submitted[transfer] = now
        for record in changes.ended:
            self._submitted.pop(record.id, None)
        for name in changes.requests:
            if name in ledger.deferred:
                self._waits_since.setdefault(name, now)
            else:
                self._waits_since.pop(name, None)
        self._last = EventRow(event.seq, event.step, now, event.kind)

    # Facts that only one kind of event has.

    def _admitted(self, event: ev.RequestAdmitted) -> None:
        second = self._seconds[-1]
        counts = event.asked, event.on_device, event.on_host
        if not event.resumed and None not in counts:
            second.admitted += 1
            second.asked += event.asked or 0
            second.on_device += event.on_device or 0
            second.on_host += event.on_host or 0

    def _evicted(self, event: ev.BlocksEvicted) -> None:
        self._seconds[-1].evicted += count(event.slots)

    def _skipped(self, event: ev.StoreSkipped) -> None:
        self._seconds[-1].skipped += len(event.keys)

    def _reported(self, event: ev.WorkerReported) -> None:
        ranks, worker = self._seconds[-1].ranks, event.worker
        rank = ranks.get(worker) or ranks.setdefault(worker, RankCounts(worker))
        rank.reports += 1
        if not event.good:
            rank.failed += 1
            rank.error = event.error or rank.error
        since = self._submitted.get(event.transfer)
        if since is not None:
            rank.timed += 1
            rank.total_ns += max(0, event.wall_ns - since)
            rank.max_ns = max(rank.max_ns, event.wall_ns - since)

    def _restarted(self, event: ev.Restarted) -> None:
        assert self._ledger is not None
        kept = int(are_readable(self._ledger.blocks.view).sum())
        self._restart = event, kept

    # The current state.

    def state(self, end: str, quiet_ns: int, stopped_by: str = "") -> LiveState:
        """Return the state after the last event. end, quiet_ns, stopped_by: as in `LiveState`."""
        ledger, seconds = self._ledger, self._seconds
        assert ledger is not None, "a log that is opened has a head"
        ranks: dict[int, RankCounts] = {}
        for second in seconds:
            for worker, counts in second.ranks.items():
                (ranks.get(worker) or ranks.setdefault(worker, RankCounts(worker))).add(counts)
        now_ns = self._last.wall_ns + quiet_ns
        return LiveState(
            since_event=self._since,
            end=end,
            quiet_ns=quiet_ns,
            stopped_by=stopped_by,
            slots=occupancy(ledger, self._last),
            capacity=ledger.config.host_blocks,
            window_ns=max(0, self._last.wall_ns - seconds[0].began_ns) if seconds else 0,
            steps=self._last.step - seconds[0].step if seconds else 0,
            **{
                name: sum(getattr(second, name) for second in seconds)
                for name in ("events", "admitted", "asked", "on_device", "on_host", "evicted", "skipped")
            },
            oldest_copy=self._oldest_copy(ledger, now_ns),
            longest_wait=self._longest_wait(ledger, now_ns),
            restart=self._last_restart(now_ns),
            ranks=tuple([ranks[worker] for worker in sorted(ranks)]),
            worst=max(ranks.values(), key=_badness).worker if ranks else None,
        )

    def _oldest_copy(self, ledger: Ledger, now_ns: int) -> OldestCopy | None:
        def since(transfer: TransferRecord) -> int:
            return self._submitted.get(transfer.id, self._since_ns - 1)

        in_flight = [one for one in ledger.transfers.values() if one.state is not TransferState.PLANNED]
        if not in_flight:
            return None
        oldest = min(in_flight, key=since)
        age_ns = max(0, now_ns - max(since(oldest), self._since_ns))
        silent = [rank for rank in range(ledger.config.workers) if not oldest.reported >> rank & 1]
        return OldestCopy(oldest.id, kind_of(oldest), age_ns, oldest.id not in self._submitted, tuple(silent))

    def _longest_wait(self, ledger: Ledger, now_ns: int) -> LongestWait | None:
        if not ledger.deferred:
            return None
        longest = min(ledger.deferred.values(), key=lambda one: self._waits_since.get(one.name, 0))
        since_ns = self._waits_since.get(longest.name, self._since_ns)
        age_ns = max(0, now_ns - since_ns)
        return LongestWait(longest.name, longest.awaits, age_ns, longest.name not in self._waits_since)

    def _last_restart(self, now_ns: int) -> LastRestart | None:
        if self._restart is None:
            return None
        event, kept = self._restart
        return LastRestart(event.seq, event.life, event.ended, kept, max(0, now_ns - event.wall_ns))


def _badness(rank: RankCounts) -> tuple[int, int]:
    return rank.failed, rank.mean_ns


FACTS: dict[type[OffloadingEvent], Callable[[LiveView, Any], None]] = {
    ev.RequestAdmitted: LiveView._admitted,
    ev.BlocksEvicted: LiveView._evicted,
    ev.StoreSkipped: LiveView._skipped,
    ev.WorkerReported: LiveView._reported,
    ev.Restarted: LiveView._restarted,
}
"""The method that counts what is specific to a kind of event. It runs after the ledger has applied it."""
