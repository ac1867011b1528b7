"""Find the troubles of a log: every kind of trouble with its limit, and the order in which they are shown.

A detector (`detectors.py` and the three modules named after their subjects) judges the figures of a log
(`figures.py`), and reports nothing below its limit. `DETECTORS` lists all detectors with the reasons for
their limits. docs/troubles.md is generated from it.

Troubles are sorted by urgency, and within one urgency by impact: the share of the lookups, copies, requests
or time that they cost. Each cause is shown once: if evictions come from a burst, or from one KV cache group,
`pool too small` is not shown as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple

import msgspec

from kvsm.explain.report import cache_detectors, copy_detectors, detectors, engine_detectors
from kvsm.explain.report.confidence import confidence_in
from kvsm.explain.report.detectors import Limit, Noticed
from kvsm.explain.report.figures import LogFigures
from kvsm.tiers.disk_tier import DISK


class Urgency(IntEnum):
    """What to look at first. Each member is defined as MEMBER = rank, meaning."""

    BROKEN = 0, "The log or the state is wrong, and what is read from it may be too."
    DOWN = 1, "The engine ended, or something in it hangs."
    FAULTY = 2, "A part fails or is slow. The rest works around it."
    COSTLY = 3, "Everything works, and work is done twice or waits."

    says: str
    """The meaning, as a sentence."""

    def __new__(cls, rank: int, says: str = "") -> Urgency:
        """Make the rank alone the value, so that urgencies are ordered."""
        member = int.__new__(cls, rank)
        member._value_, member.says = rank, says
        return member


class Trouble(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is wrong or costly in a log.

    name: the name of its detector.
    urgency: the name of an `Urgency`.
    impact: the share of the lookups, copies, requests or time that it costs, 0 to 1.
    text: what is wrong, with the number that shows it.
    evidence: more numbers, one line each.
    commands: commands that show more of it, the best first.
    tier: the tier whose log has it, `host` or `disk`; null: there is only one log.
    confidence: the share of the generated logs with this finding in which it was a true cause
        (`confidence.py`); null: it was not measured, or in too few logs.
    """

    name: str
    urgency: str
    impact: float
    text: str
    evidence: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    tier: str | None = None
    confidence: float | None = None


class Detector(NamedTuple):
    """One kind of trouble.

    measures: what is compared with the limit, as text.
    why: the reason for the limit.
    detect: the function that judges the figures; it returns None below the limit.
    explains: names of troubles that are not shown besides this one, because it is their cause.
    of_disk: whether it judges the log of a disk, too.
    """

    name: str
    urgency: Urgency
    measures: str
    limit: Limit
    why: str
    detect: Callable[[LogFigures, Limit], Noticed | None]
    explains: tuple[str, ...] = ()
    of_disk: bool = True


def troubles(figures: LogFigures, tier: str | None = None) -> tuple[Trouble, ...]:
    """Find the troubles of a log, the most urgent first.

    tier: the tier whose log it is; None: there is only one log.
    """
    found = []
    explained: set[str] = set()
    for kind in DETECTORS:
        if tier == DISK and not (kind.of_disk and kind.urgency is not Urgency.COSTLY):
            continue  # Limits of costs are for lookups by an engine's requests. The disk's log has none.
        noticed = kind.detect(figures, kind.limit)
        if noticed is not None:
            found.append(
                Trouble(
                    name=kind.name,
                    urgency=kind.urgency.name,
                    tier=tier,
                    confidence=confidence_in(kind.name),
                    **noticed._asdict(),
                )
            )
            explained.update(kind.explains)
    return in_order(one for one in found if one.name not in explained)


def in_order(found: Iterable[Trouble]) -> tuple[Trouble, ...]:
    """Sort troubles by urgency, and within one urgency by impact, the largest first."""
    return tuple(sorted(found, key=lambda trouble: (Urgency[trouble.urgency], -trouble.impact)))


def of_both(found: Sequence[Trouble], others: Sequence[Trouble]) -> tuple[Trouble, ...]:
    """Merge the troubles of two tiers' logs. The end of the engine and jumps of the clock, which both logs
    have, are shown once.

    found: troubles of the requested log.
    others: troubles of the other tier's log.
    """
    both = {trouble.name for trouble in found} & {"engine stopped", "engine killed", "clock jumped"}
    return in_order([*found, *[trouble for trouble in others if trouble.name not in both]])


DETECTORS = (
    Detector(
        "property broken",
        Urgency.BROKEN,
        "events that break a property or cannot follow",
        Limit(),
        "One is too many.",
        detectors.property_broken,
    ),
    Detector(
        "log damaged",
        Urgency.BROKEN,
        "bytes that are not the ones that were written",
        Limit(),
        "One is too many.",
        detectors.damaged,
    ),
    Detector(
        "events missing",
        Urgency.BROKEN,
        "events that a failed write lost, or that were in first segments deleted by hand",
        Limit(),
        "What is missing is in no figure.",
        detectors.events_missing,
    ),
    Detector(
        "engine stopped",
        Urgency.DOWN,
        "a log that was closed with an error",
        Limit(),
        "The engine itself says so.",
        engine_detectors.engine_stopped,
    ),
    Detector(
        "engine killed",
        Urgency.DOWN,
        "a log that was not closed, and whose last event is older than a minute",
        Limit(),
        "A running engine writes more often than once a minute while it has requests. An idle one does not.",
        engine_detectors.engine_killed,
    ),
    Detector(
        "rank silent",
        Urgency.DOWN,
        "copies without a report for 5 s, and for ten times as long as 99 % of the copies took; lost copies",
        Limit(),
        "A copy that takes ten times as long as slow ones will not come. A slot or a request waits for it.",
        copy_detectors.rank_silent,
        explains=("loads slow", "waits"),
    ),
    Detector(
        "requests unfinished",
        Urgency.DOWN,
        "requests without an end that have lived for a minute, and twice as long as every request that ended",
        Limit(),
        "A request that still runs may be the longest so far. One that was forgotten grows older than all.",
        engine_detectors.requests_unfinished,
    ),
    Detector(
        "processes killed",
        Urgency.FAULTY,
        "restarts after a process that did not close the log",
        Limit(),
        "Clients lost their requests. A restart after a clean close is healthy.",
        engine_detectors.processes_killed,
    ),
    Detector(
        "rank fails",
        Urgency.FAULTY,
        "failed copies of a rank, as a part of its reports",
        Limit(0.01, 5),
        "A failed copy costs little: the block is computed again. One in a hundred on one rank is hardware.",
        copy_detectors.rank_fails,
    ),
    Detector(
        "rank slow",
        Urgency.FAULTY,
        "the median latency of a rank, as a multiple of the median rank's",
        Limit(3.0, 20),
        "Ranks copy shards of one size. Reports are seen once a step, so that small differences are chance.",
        copy_detectors.rank_slow,
        explains=("rank tail", "waits", "loads slow", "loads slower than computing"),
    ),
    Detector(
        "rank tail",
        Urgency.FAULTY,
        "copies of a rank that took at least twice as long as 99 % of the other ranks' copies in the same "
        "direction, as a part of its copies, if this is five times as frequent as on the other ranks, and "
        "happened in three episodes or more: slow copies that were in flight together are one episode",
        Limit(0.01, 5),
        "All ranks copy the same transfers, so chance gives each the same tail: less than one copy in 100. "
        "One hiccup delays all copies behind it.",
        copy_detectors.rank_tail,
        explains=("waits", "loads slow"),
    ),
    Detector(
        "pool not pinned",
        Urgency.FAULTY,
        "measured copies, if even the fastest rank copies at 1.5 to 7 GB/s (not counting the time to start a "
        "copy)",
        Limit(0, 30),
        "PCIe copies page-locked memory at 12 GB/s or more. A driver copies other memory through a buffer, "
        "at 2 to 6 GB/s.",
        copy_detectors.pool_not_pinned,
        explains=("loads slow", "loads slower than computing", "waits"),
        of_disk=False,
    ),
    Detector(
        "reports rejected",
        Urgency.FAULTY,
        "reports that changed nothing, as a part of all reports",
        Limit(0.01, 10),
        "A reset or a lost copy leaves a few late reports. A stream of them is a bug in a worker.",
        copy_detectors.reports_rejected,
    ),
    Detector(
        "clock jumped",
        Urgency.FAULTY,
        "events that are a second or more earlier than the event before, or 20 s later although the engine "
        "made only a few steps and a request was running",
        Limit(),
        "Unless it is set, a clock never goes back by a second, and no step takes 20 s.",
        engine_detectors.clock_jumped,
    ),
    Detector(
        "requests aborted",
        Urgency.FAULTY,
        "aborted requests, as a part of all requests that ended; or half of all aborts within 10 % of the "
        "time, if most requests that ended in that time were aborted",
        Limit(0.4, 10),
        "Some clients always leave early. If many leave at once, or four in ten leave, something made them.",
        engine_detectors.requests_aborted,
    ),
    Detector(
        "device blocks leak",
        Urgency.FAULTY,
        "device blocks that neither a request nor a store can hold, as a part of all device blocks, at "
        "steps in which a request is preempted",
        Limit(0.2, 5),
        "An engine preempts only when requests hold all blocks. Shared blocks count once per request, so "
        "the sum over requests is rather too large than too small.",
        engine_detectors.device_leak,
        explains=("preemptions",),
    ),
    Detector(
        "cold start",
        Urgency.COSTLY,
        "reasons, other than new weights, why the first process of the log did not take over the blocks of "
        "the process before it",
        Limit(),
        "A pool is kept so that the next process finds its blocks. With new weights they are useless.",
        engine_detectors.cold_start,
    ),
    Detector(
        "hits fell",
        Urgency.COSTLY,
        "the largest lasting fall of the hit rate, relative to the rate before it, with 20 lookups on "
        "either side; 70 % of the fall must be content that no request had asked for before, half of the "
        "prompts must first differ from earlier ones at the same block, and fewer blocks must be found per "
        "unit of time",
        Limit(0.4, 20),
        "Hit rates differ between requests, and drift with their mix. A sudden loss of two fifths is not.",
        cache_detectors.hits_fell,
    ),
    Detector(
        "eviction burst",
        Urgency.COSTLY,
        "lookups that stopped at an evicted block, if 70 % of these blocks were evicted within 20 % of the "
        "time with evictions, at twice the usual rate of evictions and 4 standard deviations above it, to "
        "make room for requests half of which store no block that is ever read",
        Limit(0.05, 10),
        "Steady pressure spreads evictions over the whole time since the pool was full. A scan or a batch "
        "job does not.",
        cache_detectors.eviction_burst,
    ),
    Detector(
        "group floods",
        Urgency.COSTLY,
        "lookups that stopped at an evicted block, if one KV cache group has 60 % of the stored blocks, and "
        "these are read a third as often as the others",
        Limit(0.1, 10),
        "A larger pool would mostly hold more of the same.",
        cache_detectors.group_floods,
    ),
    Detector(
        "tenant floods",
        Urgency.COSTLY,
        "lookups that stopped at an evicted block, if requests with a common name or first block stored a "
        "third of the blocks, these blocks are read at most a third as often as the others, and "
        "`kvsm whatif` predicts that refusing their stores gains more than its error, and at least as "
        "much as doubling the pool",
        Limit(0.05, 10),
        "Every workload stores blocks that are never read. It is a flood if other requests lose hits by it.",
        cache_detectors.tenant_floods,
    ),
    Detector(
        "pool too small",
        Urgency.COSTLY,
        "lookups that stopped at an evicted block, if `kvsm whatif` predicts that a pool of two, four or "
        "eight times the size gains more than its error, or if `whatif` cannot simulate the log",
        cache_detectors.POOL_STOPS,
        "A full pool always evicts, and most evicted blocks are never asked for again. If one lookup in ten "
        "stops at one, hits are lost.",
        cache_detectors.pool_too_small,
    ),
    Detector(
        "reset storm",
        Urgency.COSTLY,
        "lookups that stopped at a block that a reset dropped, after three resets or more",
        Limit(0.2, 3),
        "A reset is wanted when weights change, and every conversation pays for it once.",
        cache_detectors.resets,
    ),
    Detector(
        "stores behind",
        Urgency.COSTLY,
        "lookups that stopped at a block that was missed 5 s before or more, and never stored",
        Limit(0.05, 10),
        "A computed block is stored within a few steps. Requests that arrive together miss it together.",
        cache_detectors.never_stored,
    ),
    Detector(
        "blocks skipped",
        Urgency.COSTLY,
        "blocks that were offered and not stored because of a full pool or too many transfers, as a part of "
        "these and the stored ones",
        Limit(0.1, 50),
        "Skipped blocks are offered again. A few of them are a peak, and many a limit.",
        cache_detectors.skipped,
    ),
    Detector(
        "preemptions",
        Urgency.COSTLY,
        "requests that were preempted",
        Limit(0.1, 5),
        "An engine preempts when its device is full. One request in ten is more than a peak.",
        engine_detectors.preemptions,
    ),
    Detector(
        "waits",
        Urgency.COSTLY,
        "time that requests waited for copies of others, as a part of the time of all requests",
        Limit(0.03, 3),
        "A wait is shorter than computing the blocks again, or it is not worth it.",
        copy_detectors.waits,
    ),
    Detector(
        "loads slow",
        Urgency.COSTLY,
        "time that requests waited for their own loads, not for the step that noticed their end, as a part "
        "of the time of all requests",
        Limit(0.1),
        "A load takes a few steps, and a request takes hundreds.",
        copy_detectors.slow_loads,
    ),
    Detector(
        "loads slower than computing",
        Urgency.COSTLY,
        "time of the loads from the host, as a multiple of the time in which the engine computes the same "
        "number of tokens (at the speed of its slow quartile of prompts), if most loads are slower than that",
        Limit(1.0, 20),
        "A load that is slower than computing costs time instead of saving it.",
        copy_detectors.loads_slower,
        explains=("loads slow",),
    ),
    Detector(
        "disk slower than computing",
        Urgency.COSTLY,
        "time of the copies from the disk, as a multiple of the time in which the engine computes the same "
        "number of tokens (at the speed of its slow quartile of prompts), if most copies are slower than "
        "that",
        Limit(1.0, 5),
        "A request waits for the disk, and would have had its tokens sooner by computing them.",
        copy_detectors.disk_slower,
        explains=("waits",),
    ),
)
"""Every kind of trouble that a report looks for."""
