"""The figures of a report: one struct for each part of it.

`measures.py` and `cache_measures.py` fill them from the tables of a log. `detectors.py` and
`cache_detectors.py` judge them. A figure is None if the log lacks the data for it. A field whose name ends in
`_ns` is in nanoseconds.
"""

from __future__ import annotations

import msgspec

from kvsm.events import OffloadConfig
from kvsm.explain.story.times import duration
from kvsm.explain.tables.steady_time import ClockJump


class Spread(msgspec.Struct, frozen=True):
    """Median, 99th percentile and maximum of `count` durations (ns); None if `count` is 0."""

    count: int
    p50_ns: int | None
    p99_ns: int | None
    max_ns: int | None


class FallFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The largest lasting fall of the hit rate (the share of requested blocks that were found).

    event, at_ns: the first admission after the fall, and its Unix time (ns).
    lookups_before, lookups_after: number of lookups before and after the fall.
    before, after: the hit rates of these lookups, on the device or the host.
    rate: blocks found per unit of time after the fall, as a multiple of the same before it.
    new: the part of the fall that is due to blocks that no lookup had asked for before.
    shared_before: half of the prompts before the fall found at least this many blocks.
    part_at: the block, from 0, at which most prompts after the fall first differ from earlier ones. request:
        the first request with such a prompt.
    parted_before, parting: share of the prompts, before and after the fall, that differ from earlier ones at
        this block or earlier. deviations: by how many standard deviations the two shares differ.
    """

    event: int
    at_ns: int
    lookups_before: int
    lookups_after: int
    before: float
    after: float
    rate: float
    new: float
    shared_before: int
    part_at: int
    parted_before: float
    parting: float
    deviations: float
    request: str


class HitFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Which blocks of their prompts requests found when they were first admitted.

    Each request counts once, with the lookup that it was admitted with (`LookupRow`). Requests that read no
    cache do not count.

    lookups: number of these requests.
    stopped: how many of them missed a key that the host could not serve.
    asked: device blocks in their prompts; None: not in the log.
    on_device, on_host: how many of these blocks the device had and the host served; None: not in the log.
    block_tokens: tokens in a device block; 0: not in the log.
    over_time: hit rate of the requests admitted in each part of the window's time: share of the asked blocks
        that the device or the host had, or without counts of blocks, share of the lookups that the host
        served. None: no request was admitted in that part.
    fall: None: the log has no counts of blocks, or the hits do not fall.
    """

    lookups: int
    stopped: int
    asked: int | None
    on_device: int | None
    on_host: int | None
    block_tokens: int
    over_time: tuple[float | None, ...]
    fall: FallFigures | None

    def share(self, blocks: int | None) -> float | None:
        """The share of the asked blocks that `blocks` is; None if the log has no counts."""
        return blocks / self.asked if self.asked and blocks is not None else None

    @property
    def missed(self) -> int | None:
        """Blocks that neither the device nor the host had."""
        if self.asked is None or self.on_device is None or self.on_host is None:
            return None
        return self.asked - self.on_device - self.on_host


class StopFigures(msgspec.Struct, frozen=True):
    """Lookups that stopped at a missing key, for one reason.

    why: why the key was missing, a `kvsm.explain.tables.row_kinds.Gone`.
    missed: blocks that these lookups asked for and did not get; None: not in the log.
    """

    why: str
    lookups: int
    missed: int | None


class RecomputedFigures(msgspec.Struct, frozen=True):
    """Blocks that were computed at least twice, because they were not stored after the first time.

    lookups: lookups that missed a never stored key which an earlier lookup, at least `apart_ns` before, had
        missed too.
    keys: number of different keys among them.
    """

    lookups: int
    keys: int
    apart_ns: int


class BurstFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The shortest time in which most evictions of wanted blocks happened. Wanted: a later lookup missed it.

    began_ns, ended_ns: Unix time (ns).
    full_ns, last_ns: Unix time of the first and the last eviction (ns): between them the pool was full.
    wanted: wanted blocks that were evicted in this time.
    evicted: all blocks that were evicted in this time.
    batches: number of all evictions; each makes room for one store.
    usual: blocks that are evicted in as much time at the median rate outside of the burst.
    lowest: the same at the lower quartile of the rates within the burst.
    deviations: by how many standard deviations `evicted` exceeds `usual`, if evictions came at random times.
    requests: number of requests whose stores evicted them.
    unread: how many of these requests stored no block that was ever hit.
    names: the requests whose stores evicted most blocks.
    """

    began_ns: int
    ended_ns: int
    full_ns: int
    last_ns: int
    wanted: int
    evicted: int
    batches: int
    usual: int
    lowest: int
    deviations: float
    requests: int
    unread: int
    names: tuple[str, ...]


class EvictionFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks that were evicted.

    unread: evicted blocks that no lookup ever hit.
    wanted: evicted blocks that a later lookup missed.
    age: time from the end of a block's store to its eviction.
    until_wanted: time from the eviction of a wanted block to that lookup.
    over_time: wanted blocks evicted in each part of the window's time.
    """

    evicted: int
    unread: int
    wanted: int
    age: Spread
    until_wanted: Spread
    over_time: tuple[int, ...]
    burst: BurstFigures | None


class TrialFigures(msgspec.Struct, frozen=True):
    """A simulated configuration of the host pool.

    host_blocks, policy, store_threshold: the configuration.
    gain: the increase of the share of found blocks over that of the log's configuration.
    error: the measured error of such a prediction, as a share of the asked blocks.
    """

    host_blocks: int
    policy: str
    store_threshold: int
    gain: float
    error: float

    @property
    def gains(self) -> bool:
        """Whether the gain exceeds the error."""
        return self.gain > self.error


class FloodFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that fill the pool with blocks that are hardly read. who: what they have in common, as text
    behind "requests".
    requests: number of these requests. of: number of all requests.
    names: those that stored most.
    stored, read: blocks that they stored, and hits of these blocks. all_stored, all_read: of all requests.
    gain: the increase of the share of found blocks of the other requests if these stores were refused.
        doubled: the same if the pool were doubled instead.
    error: as in `TrialFigures`.
    """

    who: str
    requests: int
    of: int
    names: tuple[str, ...]
    stored: int
    read: int
    all_stored: int
    all_read: int
    gain: float
    doubled: float
    error: float

    @property
    def gains(self) -> bool:
        """Whether the gain of refusing their stores exceeds the error."""
        return self.gain > self.error


class RemedyFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What would have raised the hit rate, by simulation.

    why_not: why this log cannot be simulated; None: it can.
    first, last: the simulated events.
    lookups: number of simulated lookups: all, or the second half if only a part of the log is simulated.
    found: share of the asked blocks that the simulation finds with the log's configuration.
    trials: larger pools, from the smallest to the first that gains, then other policies and thresholds.
    flood: requests whose stores lower the hit rate of others; None: there are none.
    """

    why_not: str | None
    first: int
    last: int
    lookups: int = 0
    found: float = 0.0
    trials: tuple[TrialFigures, ...] = ()
    flood: FloodFigures | None = None


class GroupFigures(msgspec.Struct, frozen=True):
    """Blocks of one KV cache group. stops: lookups that stopped at an evicted key of this group."""

    group: int
    stored: int
    hits: int
    evicted: int
    unread: int
    stops: int


class DirectionFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The copies of one rank in one direction.

    direction: `store` or `load`.
    latency: time from the submission of a copy to its report.
    tail: how many of these copies took at least `TAIL_TIMES` times the 99th percentile of all other ranks'
        copies in this direction. others_tail: how many of the other ranks' copies took as long. tail_ns: the
        least time (ns) of a copy in the tail; None: no other rank has reported.
    others: number of the other ranks' copies.
    episodes: how often the rank was slow. Copies in its tail that were in flight together count once, because
        one slow copy delays all copies behind it.
    """

    direction: str
    latency: Spread
    tail: int = 0
    episodes: int = 0
    tail_ns: int | None = None
    others_tail: int = 0
    others: int = 0


class RankFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The copies of one rank: its parts of all transfers.

    copies: submitted copies.
    reported: copies that the rank reported.
    failed: copies that it reported as failed.
    missing: copies without a report that were lost, or submitted at least `CopyFigures.late_ns` before the
        end.
    missing_since_ns: when the first missing copy was submitted; None: none is missing.
    cut_off: copies without a report because the process ended.
    waiting: all other copies without a report; the rank may still report them.
    latency: time from the submission of a copy to its report.
    queued, copied, noticed: parts of the latency, if the rank measured them: until the copy began, the copy
        itself, and from then until an engine step took the report.
    errors: the rank's most frequent errors, with counts.
    last_ns: Unix time of its last report; None: there was none.
    directions: its copies by direction, the ones with most reports first.
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
    directions: tuple[DirectionFigures, ...] = ()


class CopyFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Copies of all ranks.

    late_ns: a copy without a report counts as missing after this time.
    transfers: number of ended transfers, by direction and outcome, such as `store completed`. Loads to the
        disk or another engine count only in `ElsewhereFigures`.
    measured: copies to and from the device that ranks measured.
    bytes_per_s: rate of the fastest rank's copies, without the time to start them; None: there are too few,
        all have one size, or the size of a block is not in the log.
    """

    late_ns: int
    ranks: tuple[RankFigures, ...]
    transfers: dict[str, int]
    measured: int = 0
    bytes_per_s: int | None = None


class ComputeFigures(msgspec.Struct, frozen=True, kw_only=True):
    """How fast the engine computes prompts: requests without a host hit, from their admission to the plan of
    the store of their first blocks. Only eager stores show it.

    requests: number of these requests. tokens: what they computed in this time.
    fast_ns, usual_ns, slow_ns: quartiles of the time for `RATE_TOKENS` tokens; None: too few requests.
    """

    requests: int
    tokens: int
    fast_ns: int | None
    usual_ns: int | None
    slow_ns: int | None


class FetchFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Completed copies that requests wait for instead of computing: loads to the device, or from a disk.

    place: where the bytes come from: `host`, or the name of another tier in the log.
    copies, tokens: number of these copies, and of the tokens that they bring.
    took: time from submission to end.
    spent_ns: the sum of these times, without the time until an engine step noticed the end.
    compute_ns: the time in which the engine computes as many tokens, at its slow quartile; None: unknown.
    slower: how many of these copies took longer than computing their tokens.
    """

    place: str
    copies: int
    tokens: int
    took: Spread
    spent_ns: int
    compute_ns: int | None
    slower: int


class WaitSplit(msgspec.Struct, frozen=True):
    """The time that requests waited for transfers (ns), split by what the last rank to report did meanwhile.

    queued: the rank's copy had not begun.
    copied: the rank copied.
    noticed: the copy was done, and no engine step had taken the report yet.
    unknown: the rank measured no times, or has not reported.
    """

    queued: int
    copied: int
    noticed: int
    unknown: int

    def __str__(self) -> str:
        """As text: `2 ms queued, 5 ms copied, 30 ms until a step noticed`."""
        parts = (
            (self.queued, "queued"),
            (self.copied, "copied"),
            (self.noticed, "until a step noticed"),
            (self.unknown, "of which the log does not say what they were"),
        )
        return ", ".join(f"{duration(ns)} {what}" for ns, what in parts if ns) or "nothing"


class WaitedFor(msgspec.Struct, frozen=True):
    """A transfer that requests waited for.

    requests: number of these requests.
    waited_ns: the sum of their waits.
    rank, rank_ns: the rank that reported last, and its time from submission to report (ns); None: unknown or
        not reported.
    split: the parts of `waited_ns`.
    """

    transfer: int
    direction: str
    requests: int
    waited_ns: int
    rank: int | None
    rank_ns: int | None
    split: WaitSplit


class WaitFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The time that requests waited for copies.

    lived_ns: sum over all requests of the time from arrival to end, or to the end of the window.
    deferred_ns: sum of the waits for transfers of other requests.
    loading_ns: sum of the waits for the requests' own loads.
    deferred_split, loading_split: the parts of these two sums.
    deferred: number of requests that waited for transfers of other requests.
    longest_ns: the longest of these waits.
    top: the transfers with most of this waiting time.
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
    """How the slots of the host pool were used, according to samples.

    slots: size of the pool.
    samples: number of samples.
    used, pinned, storing, quarantined, retired: the most slots in this state in any sample; used: not free.
    pinned_mean: mean number of pinned slots.
    used_over_time, pinned_over_time: largest share of the pool in each part of the window's time; None:
        before the first sample.
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
    """How requests ended, and which ones have not ended.

    finished: requests that ended, including the aborted ones.
    aborted: requests that the client aborted.
    cut_off: requests that ended because their process did.
    preemptions: number of preemptions of all requests.
    preempted: requests with at least one preemption.
    failed_loads: loads that did not bring all their blocks.
    longest_ns: the longest time from arrival to end.
    open: requests without an end.
    overdue: open requests that arrived more than `overdue_ns` before the end of the window.
    overdue_running: how many of these wait for no copy and no device block: their state is RUNNING.
    oldest: names of the oldest overdue requests.
    states: number of open requests in each state.
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
    overdue_running: int
    overdue_ns: int
    oldest: tuple[str, ...]
    states: dict[str, int]


class ResetFigures(msgspec.Struct, frozen=True):
    """Resets that dropped keys."""

    resets: int
    keys: int


class AbortFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The shortest time in which half of all aborts happened.

    began_ns, ended_ns: Unix time (ns).
    aborted, ended: number of requests that were aborted in this time, and that ended in it in any way.
    age: how long the aborted requests had lived.
    later: requests that arrived after this time.
    """

    began_ns: int
    ended_ns: int
    aborted: int
    ended: int
    age: Spread
    later: int


class DeviceFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The device blocks that the engine's requests can hold when it preempts one for lack of blocks.

    steps: number of steps with a preemption.
    held: an upper bound of the blocks that running requests and stores in flight hold at such a step: the
        median over the second half of these steps. A block that requests share counts once for each.
    """

    steps: int
    held: int


class ClockFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Where the clock of the engine was set in the window.

    jumps: number of jumps.
    largest: the largest of them; None: there is none.
    """

    jumps: int
    largest: ClockJump | None


class RestartFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Restarts: a process resumes the log of an earlier process.

    restarts: number of restarts.
    killed: earlier processes that did not close the log, and got no signal to end as far as is known.
    stopped: earlier processes that got a signal to end, and did not close the log.
    ended: how the killed and the stopped processes ended, with counts, most frequent first.
    kept: blocks that were readable at a restart, and stayed readable; summed over the restarts.
    lost: blocks that were being stored, or were planned to be.
    transfers: transfers that were cut off, submitted or not.
    """

    restarts: int
    killed: int
    stopped: int
    ended: tuple[tuple[str, int], ...]
    kept: int
    lost: int
    transfers: int


class RejectedFigures(msgspec.Struct, frozen=True):
    """Reports of one rank that were rejected for one reason."""

    rank: int
    reason: str
    reports: int


class SkipFigures(msgspec.Struct, frozen=True):
    """Blocks that were not stored when they were offered, for one reason."""

    reason: str
    blocks: int


class HandOverFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Hand-overs to other engines.

    taken: another engine took the blocks.
    not_needed: the other engine already had the blocks.
    given_up: all other ends, such as an expired or revoked hand-over.
    held: hand-overs without an end.
    """

    taken: int
    not_needed: int
    given_up: int
    held: int


class ElsewhereFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Copies whose other end is not the device: another engine, or the disk.

    place: the other end, as the log names it.
    direction: `store`: from the other end to the host. `load`: from the host to the other end.
    blocks: blocks of the completed copies.
    ended: number of copies by outcome.
    took: time from submission to end of the completed copies.
    """

    place: str
    direction: str
    blocks: int
    ended: dict[str, int]
    took: Spread


class HeldFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What a tier holds at the end of the window.

    log: directory of the tier's log.
    slots: size of the tier.
    blocks: readable blocks in it.
    evicted: blocks evicted within the window.
    """

    log: str
    slots: int
    blocks: int
    evicted: int


class TierHitFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Where the blocks of prompts were, counted in device blocks. A request counts once, as in `HitFigures`.

    asked: blocks of all prompts.
    device: blocks that were on the device.
    host: blocks on the host that had not been copied from the disk for this request.
    disk: blocks that were copied from the disk to the host for this request.
    computed: blocks that no tier had in time.
    """

    asked: int
    device: int
    host: int
    disk: int
    computed: int


class DiskFailureFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Copies to and from the disk that ranks reported as failed.

    stores, loads: failed copies to the disk, and from it.
    reports: number of all reports, good and bad.
    first_ns, last_ns: Unix time (ns) of the first and the last failure; None: there is none.
    errors: the most frequent errors, with counts.
    """

    stores: int
    loads: int
    reports: int
    first_ns: int | None
    last_ns: int | None
    errors: tuple[tuple[str, int], ...]


class TiersFigures(msgspec.Struct, frozen=True, kw_only=True):
    """A host pool and the disk below it, from the logs of both. A block is a slot of the host.

    host, disk: None: the log of this tier is not there, or cannot be read.
    why_not: why a tier's log is missing; None: both are there.
    hits: None: the log lacks the counts, or there are several KV cache groups, whose slots do not add up to
        blocks of a prompt.
    found: blocks that the disk had at its start, from earlier processes.
    to_disk: blocks that were stored on the disk.
    not_stored: blocks whose copy to the disk did not complete, or that were not copied because the disk had
        no room. Blocks that left the host before their copy began are in no log.
    from_disk: blocks that were copied from the disk to the host.
    unused: how many of these no lookup has hit.
    failures: failed copies to and from the disk.

    A figure that only the log of one tier has is None if that log is missing.
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
    error: the error with which the engine closed the log; None: there was none.
    complete: whether no event is missing before the end.
    notes: remarks about the log itself, such as missing events.
    silent_ns: time since the last event, if the log was not closed; else None.
    stopped_by: the signal that asked the engine to end, if it did not close the log; empty if none is known.
    """

    engine: str
    error: str | None
    complete: bool
    notes: tuple[str, ...]
    silent_ns: int | None
    stopped_by: str = ""


class CheckFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the log breaks a property.

    verified: whether `kvsm verify` has checked every event. If not, every event was only folded: the fold
        refuses events that cannot follow, but does not notice every broken property.
    event: the first event that breaks a property or cannot follow; None: there is none.
    broken: what this event breaks, one line for each violation.
    damage: where and why the log cannot be read further; None: it can be read to its end.
    """

    verified: bool
    event: int | None
    broken: tuple[str, ...]
    damage: str | None


class LogFigures(msgspec.Struct, frozen=True, kw_only=True):
    """All figures of a log, or of a window of it.

    first, last: numbers of the first and last event that the figures cover.
    began_ns, ended_ns: wall time of these two events.
    log_began_ns: wall time of the log's first event.
    whole: whether the figures cover the whole log.
    stored: blocks whose store completed.
    cold: why the process that began the log did not take over the blocks of the one before, a line each;
        empty: there was none, the log does not say, or its first event is not in the window.
    aborts: None: no request was aborted.
    device: None: no request was preempted, or the log does not tell what requests hold: it lacks counts of
        blocks, there are several KV cache groups, or a disk, whose copies have device blocks of their own.
    remedies: None: few lookups stopped at an evicted block, and nothing was tried.
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
    aborts: AbortFigures | None
    device: DeviceFigures | None
    clock: ClockFigures
    hits: HitFigures
    stops: tuple[StopFigures, ...]
    recomputed: RecomputedFigures
    evictions: EvictionFigures
    groups: tuple[GroupFigures, ...]
    remedies: RemedyFigures | None
    copies: CopyFigures
    computing: ComputeFigures
    fetches: tuple[FetchFigures, ...]
    waits: WaitFigures
    pool: PoolFigures
    skips: tuple[SkipFigures, ...]
    resets: ResetFigures
    restarts: RestartFigures
    cold: tuple[str, ...]
    rejected: tuple[RejectedFigures, ...]
    hand_overs: HandOverFigures
    elsewhere: tuple[ElsewhereFigures, ...]
    end: EndFigures
    check: CheckFigures

    def stops_at(self, why: str) -> int:
        """The number of lookups that stopped at a key missing for this reason."""
        return sum(stop.lookups for stop in self.stops if stop.why == why)
