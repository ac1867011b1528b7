"""The figures of a report: one struct for each part of it.

`measures.py` fills them from the tables of a log. `findings.py` judges them. A figure is None if the log does
not tell it. A time that ends in `_ns` is in nanoseconds.
"""

from __future__ import annotations

import msgspec

from kvsm.events import OffloadConfig
from kvsm.explain.story.times import duration


class Spread(msgspec.Struct, frozen=True):
    """How long things took (ns). None if there was none."""

    count: int
    p50_ns: int | None
    p99_ns: int | None
    max_ns: int | None


class HitFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What requests had when they were first admitted: each counts once, with the lookup that was used then
    (`LookupRow`). Requests that read no cache do not count.

    lookups: how many requests. stopped: how many of them ended at a key that the host could not serve.
    asked, on_device, on_host: device blocks; None: the log does not say.
    block_tokens: tokens of such a block; 0: the log does not tell.
    over_time: share of the asked blocks that the device or the host had, by the time of the admission;
        None: none was admitted then. If the log does not tell blocks: share of these lookups that the host
        served.
    """

    lookups: int
    stopped: int
    asked: int | None
    on_device: int | None
    on_host: int | None
    block_tokens: int
    over_time: tuple[float | None, ...]

    def share(self, blocks: int | None) -> float | None:
        """Of the blocks that were asked for."""
        return blocks / self.asked if self.asked and blocks is not None else None

    @property
    def missed(self) -> int | None:
        """Blocks that neither the device nor the host had."""
        if self.asked is None or self.on_device is None or self.on_host is None:
            return None
        return self.asked - self.on_device - self.on_host


class StopFigures(msgspec.Struct, frozen=True):
    """Lookups whose prefix stopped for one reason.

    why: a `kvsm.explain.tables.row_kinds.Gone`.
    missed: blocks that these lookups asked for and did not get; None: the log does not tell.
    """

    why: str
    lookups: int
    missed: int | None


class RecomputedFigures(msgspec.Struct, frozen=True):
    """Lookups that stopped at a key that an earlier lookup had stopped at, `apart_ns` before or more, and
    that was never stored: its block was computed twice, at least.

    keys: how many keys these are.
    """

    lookups: int
    keys: int
    apart_ns: int


class BurstFigures(msgspec.Struct, frozen=True):
    """The shortest time in which most of the wanted blocks were evicted.

    began_ns, ended_ns: Unix time (ns).
    wanted: how many of them were evicted then.
    requests: for how many requests. unread: how many of these have no block that was ever hit.
    names: the ones for which most were evicted.
    """

    began_ns: int
    ended_ns: int
    wanted: int
    requests: int
    unread: int
    names: tuple[str, ...]


class EvictionFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks that were evicted.

    unread: how many of them no lookup ever hit.
    wanted: at how many of them a later lookup stopped.
    age: from the end of the store to the eviction.
    until_wanted: from the eviction to that lookup.
    over_time: evicted blocks that were wanted later, by the time of their eviction.
    """

    evicted: int
    unread: int
    wanted: int
    age: Spread
    until_wanted: Spread
    over_time: tuple[int, ...]
    burst: BurstFigures | None


class GroupFigures(msgspec.Struct, frozen=True):
    """Blocks of one KV cache group. stops: lookups that stopped at one of its keys, which was evicted."""

    group: int
    stored: int
    hits: int
    evicted: int
    unread: int
    stops: int


class RankFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The copies of one rank.

    copies: that were submitted. reported: that it reported. failed: how many of them badly.
    missing: that it did not report, and that were submitted `late_ns` before the end or earlier, or lost.
    missing_since_ns: when the first of these was submitted; None: none is missing.
    cut_off: other copies that it did not report, because its process ended.
    waiting: the rest. It has not reported them, and still may.
    latency: from the submission to its report. Of that, if the rank says it: queued: until its copy began;
        copied: the copy; noticed: the rest, until a step took the report.
    errors: what it said most often, with counts.
    last_ns: time of its last report.
    """

    rank: int
    copies: int
    reported: int
    failed: int
    missing: int
    missing_since_ns: int | None
    cut_off: int
    waiting: int
    latency: Spread
    queued: Spread
    copied: Spread
    noticed: Spread
    errors: tuple[tuple[str, int], ...]
    last_ns: int | None


class CopyFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Copies of all ranks.

    late_ns: after this time a copy counts as missing.
    transfers: that ended, by direction and outcome. Copies to the disk are in `ElsewhereFigures` alone.
    """

    late_ns: int
    ranks: tuple[RankFigures, ...]
    transfers: dict[str, int]


class WaitSplit(msgspec.Struct, frozen=True):
    """The parts of a time that requests waited for transfers (ns), by the rank that reported last.

    queued: until its copy began. copied: while it copied. noticed: after that, until a step took the report.
    unknown: the rank did not say, or has not reported.
    """

    queued: int
    copied: int
    noticed: int
    unknown: int

    def __str__(self) -> str:
        """In words: `2 ms queued, 5 ms copied, 30 ms until a step noticed`."""
        parts = (
            (self.queued, "queued"),
            (self.copied, "copied"),
            (self.noticed, "until a step noticed"),
            (self.unknown, "of which the log does not say what they were"),
        )
        return ", ".join(f"{duration(ns)} {what}" for ns, what in parts if ns) or "nothing"


class WaitedFor(msgspec.Struct, frozen=True):
    """A transfer that requests waited for. rank: the one that reported last, after `rank_ns`.

    split: of `waited_ns`.
    """

    transfer: int
    direction: str
    requests: int
    waited_ns: int
    rank: int | None
    rank_ns: int | None
    split: WaitSplit


class WaitFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The time that requests waited.

    lived_ns: all requests together, from their arrival to their end, or to the end of the log.
    deferred_ns: for transfers of others. loading_ns: for their own loads.
    deferred_split, loading_split: what of these was queue, copy, and the step that noticed.
    deferred: how many requests waited for transfers of others.
    longest_ns: the longest such wait.
    top: the transfers that were waited for longest.
    """

    lived_ns: int
    deferred_ns: int
    loading_ns: int
    deferred_split: WaitSplit
    loading_split: WaitSplit
    deferred: int
    longest_ns: int
    top: tuple[WaitedFor, ...]


class PoolFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Slots of the host pool, in samples.

    used: slots that are not free; pinned, storing, quarantined, retired: the most at once.
    pinned_mean: slots.
    used_over_time, pinned_over_time: share of the pool; None: no sample then.
    """

    slots: int
    samples: int
    used: int
    pinned: int
    pinned_mean: float
    storing: int
    quarantined: int
    retired: int
    used_over_time: tuple[float | None, ...]
    pinned_over_time: tuple[float | None, ...]


class RequestFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Requests.

    finished: that are over, `aborted` of them by the client. cut_off: that ended with their process.
    preemptions: of `preempted` requests.
    failed_loads: loads that did not bring all their blocks.
    longest_ns: the longest life of a request that is over.
    open: requests without an end. overdue: those that have lived longer than `overdue_ns`.
    oldest: names of the oldest of them.
    states: open requests by state.
    """

    requests: int
    finished: int
    aborted: int
    cut_off: int
    preemptions: int
    preempted: int
    failed_loads: int
    longest_ns: int
    open: int
    overdue: int
    overdue_ns: int
    oldest: tuple[str, ...]
    states: dict[str, int]


class ResetFigures(msgspec.Struct, frozen=True):
    """Resets that dropped keys."""

    resets: int
    keys: int


class RestartFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Processes that went on with the log of another one.

    restarts: how many. killed: how many of the processes before them did not close the log, and no signal is
        known that asked them to end. stopped: how many did not close it after such a signal.
    ended: how these ended, with counts, the most frequent first.
    kept: blocks that could be read at a restart and still can. lost: blocks that were being stored, or were
        planned to be.
    transfers: copies and plans that were cut off.
    """

    restarts: int
    killed: int
    stopped: int
    ended: tuple[tuple[str, int], ...]
    kept: int
    lost: int
    transfers: int


class RejectedFigures(msgspec.Struct, frozen=True):
    """Reports of one rank that changed nothing, for one reason."""

    rank: int
    reason: str
    reports: int


class SkipFigures(msgspec.Struct, frozen=True):
    """Offered blocks that were not stored when they were offered, for one reason."""

    reason: str
    blocks: int


class HandOverFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Hand-overs to other engines.

    taken: by one. not_needed: the other engine had the blocks. given_up: no engine took them in
        time, or before they were lost or needed. held: without an end.
    """

    taken: int
    not_needed: int
    given_up: int
    held: int


class ElsewhereFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Copies whose other end is not the device: another engine, or the disk.

    place: where that is, as the log names it.
    direction: `store`: they come from there. `load`: they go there.
    blocks: of copies that completed. ended: how the copies ended, by outcome. took: the completed ones.
    """

    place: str
    direction: str
    blocks: int
    ended: dict[str, int]
    took: Spread


class HeldFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What a tier holds where the figures end.

    log: its directory.
    slots: of the tier. blocks: in them that could be read.
    evicted: blocks that made room for others.
    """

    log: str
    slots: int
    blocks: int
    evicted: int


class TierHitFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Where the blocks of prompts were, in device blocks. A request counts once, as in `HitFigures`.

    asked: of all requests. device, host: that had them.
    disk: that came from the disk for the request that asked.
    computed: that no tier had in time.
    """

    asked: int
    device: int
    host: int
    disk: int
    computed: int


class DiskFailureFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Copies to and from the disk that ranks reported as bad.

    stores: to the disk. loads: from it. reports: good and bad ones, of all ranks.
    first_ns, last_ns: Unix time (ns) of the first and the last of them; None: there is none.
    errors: what the ranks said most often, with counts.
    """

    stores: int
    loads: int
    reports: int
    first_ns: int | None
    last_ns: int | None
    errors: tuple[tuple[str, int], ...]


class TiersFigures(msgspec.Struct, frozen=True, kw_only=True):
    """A host pool and the disk below it, from the logs of both. A block is a slot of the host.

    host, disk: None: the log of this tier is not there, or cannot be read. why_not: then why.
    hits: None: there are several KV cache groups, whose slots do not add up to blocks of a prompt, or the log
        does not tell.
    found: blocks that the disk had at its start, from earlier processes.
    to_disk: blocks that were stored on the disk.
    not_stored: blocks whose copy to the disk did not complete, or for which the disk had no room. Blocks that
        the host lost before their copy began are in no log.
    from_disk: blocks that came back. unused: how many of them no lookup has hit.
    failures: of the disk.

    What the log of one tier alone tells is None if that log is not there.
    """

    host: HeldFigures | None
    disk: HeldFigures | None
    why_not: str | None
    hits: TierHitFigures | None
    found: int | None
    to_disk: int | None
    not_stored: int | None
    from_disk: int
    unused: int | None
    failures: DiskFailureFigures | None


class EndFigures(msgspec.Struct, frozen=True, kw_only=True):
    """How the log ends.

    engine: a `kvsm.core.log.LogEnd`; `not reached` if the window ends before the log does.
    error: with which the engine closed it.
    complete: whether no event is missing before the end.
    notes: what a person must know of the log itself.
    silent_ns: how long ago its last event was, if the log was not closed.
    stopped_by: the signal that asked the engine to end, if it did not close the log; empty if none is known.
    """

    engine: str
    error: str | None
    complete: bool
    notes: tuple[str, ...]
    silent_ns: int | None
    stopped_by: str = ""


class CheckFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the log's properties.

    verified: whether `kvsm verify` has looked at every event. If not, every event was folded, and events that
        cannot follow were found; a broken property that the fold does not notice was not.
    event: the first event that breaks something, or None.
    broken: what it breaks, a line each.
    damage: where and why the log cannot be read further, or None.
    """

    verified: bool
    event: int | None
    broken: tuple[str, ...]
    damage: str | None


class LogFigures(msgspec.Struct, frozen=True, kw_only=True):
    """All figures of a log, or of a window of it.

    first, last: the events that they cover. events: of the whole log, its last number.
    began_ns, ended_ns: wall time of `first` and `last`. log_began_ns: of the log's first event.
    whole: whether they cover all of the log.
    stored: blocks that were stored.
    """

    log: str
    first: int
    last: int
    began_ns: int
    ended_ns: int
    log_began_ns: int
    whole: bool
    config: OffloadConfig
    stored: int
    requests: RequestFigures
    hits: HitFigures
    stops: tuple[StopFigures, ...]
    recomputed: RecomputedFigures
    evictions: EvictionFigures
    groups: tuple[GroupFigures, ...]
    copies: CopyFigures
    waits: WaitFigures
    pool: PoolFigures
    skips: tuple[SkipFigures, ...]
    resets: ResetFigures
    restarts: RestartFigures
    rejected: tuple[RejectedFigures, ...]
    hand_overs: HandOverFigures
    elsewhere: tuple[ElsewhereFigures, ...]
    end: EndFigures
    check: CheckFigures

    def stops_at(self, why: str) -> int:
        """Lookups that stopped for this reason."""
        return sum(one.lookups for one in self.stops if one.why == why)
