"""Try the remedies that a report may propose: simulate the log with them.

A finding proposes a larger pool, another policy or a store threshold only if `kvsm.explain.whatif` says that
it would have gained more than the error of its predictions. The same simulation shows which requests flood
the pool: without their stores, more blocks are found.

Of a longer log, only the `SAMPLE_EVENTS` events with most lookups that stopped at an evicted block are
simulated. The simulated pools begin with the host's content at that event, whatever their size, so only the
lookups of the second half count.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from kvsm.core.log import LogReader
from kvsm.core.log.trust import Trust
from kvsm.errors import KvsmError
from kvsm.explain.report.cache_measures import names_of
from kvsm.explain.report.figures import FloodFigures, RemedyFigures, TrialFigures
from kvsm.explain.report.measures import ADMITTED, SHOWN, Tables
from kvsm.explain.story.window import Window
from kvsm.explain.tables.row_kinds import Gone
from kvsm.explain.whatif.accuracy import error_points, refuse_failing, refuse_unlike
from kvsm.explain.whatif.demand import UNKNOWN, Demand, Lookup, read_demand, without_stores
from kvsm.explain.whatif.simulate import Scenario, counted_lookups, recorded, simulate

SAMPLE_EVENTS = 16_000
"""Most events that are simulated: about 0.2 s for each remedy."""

POOL_TIMES = (2, 4, 8)
"""Larger pools to try, as multiples of the log's, until one gains. whatif is validated up to 8 times."""

POLICIES_TRIED = ("arc", "s3fifo", "sieve", "auto")
"""Policies that keep a scan from evicting blocks that are read again."""

FLOOD_STORED, FLOOD_READ, FLOOD_LEAST = 1 / 3, 1 / 3, 5
"""A group of at least `FLOOD_LEAST` requests may be a flood if it stored at least the share `FLOOD_STORED` of
the blocks, and these are read at most `FLOOD_READ` times as often as the other blocks. A simulation without
their stores decides."""

COMMON_SHARE = 0.9
"""Prompts are grouped by the first block at which fewer than this share of them have the same content."""


def tried_remedies(tables: Tables, trust: Trust, *, other_policies: bool) -> RemedyFigures:
    """Simulate remedies that may have kept the evicted blocks that lookups stopped at.

    other_policies: try other policies and a store threshold too.
    """
    log = tables.log
    sample, name = _sample(tables), str(log.directory)
    try:
        demand = read_demand(LogReader(log.directory), trust, window=Window(*sample))
        refuse_failing(name, demand)
        trials = _Trials(demand, tables, sample)
        refuse_unlike(name, trials.itself, recorded(trials.lookups))
        return trials.figures(other_policies)
    except KvsmError as error:
        why_not = str(error).removeprefix(f"{name}: ")
        return RemedyFigures(why_not=why_not, first=sample.first, last=sample.last)


class _Sample(NamedTuple):
    """The simulated events: `first` to `last`, both included."""

    first: int
    last: int


def _sample(tables: Tables) -> _Sample:
    """Choose at most `SAMPLE_EVENTS` events: those with most lookups that stop at an evicted block."""
    if tables.last - tables.first < SAMPLE_EVENTS:
        return _Sample(tables.first, tables.last)
    stops = tables.numbers(
        "admitted",
        f"FROM lookups WHERE why = '{Gone.EVICTED}' AND {ADMITTED} AND {tables.within('admitted')}"
        " ORDER BY admitted",
    )[:, 0]
    if not len(stops):
        return _Sample(tables.last - SAMPLE_EVENTS + 1, tables.last)
    inside = np.searchsorted(stops, stops + 1) - np.searchsorted(stops, stops - SAMPLE_EVENTS // 2)
    last = min(tables.last, max(int(stops[np.argmax(inside)]), tables.first + SAMPLE_EVENTS - 1))
    return _Sample(last - SAMPLE_EVENTS + 1, last)


class _Trials:
    """Simulations of the demand of a sample."""

    def __init__(self, demand: Demand, tables: Tables, sample: _Sample) -> None:
        self._demand, self._sample = demand, sample
        whole = sample == (tables.log.first, tables.log.last)
        counted = sample.first if whole else (sample.first + sample.last) // 2
        self.lookups: Sequence[Lookup] = counted_lookups(demand, Window(counted, sample.last))
        self._own = Scenario.of(demand.config)
        self.itself = simulate(demand, self._own, self.lookups)
        self._by_request = _blocks_by_request(tables, sample)
        self._stored = sum(stored for stored, _ in self._by_request.values())
        self._read = sum(read for _, read in self._by_request.values())

    def figures(self, other_policies: bool) -> RemedyFigures:
        """Try all remedies."""
        trials = [*self._larger_pools()]
        if other_policies:
            own = self._own
            others = [
                msgspec.structs.replace(own, policy=name) for name in POLICIES_TRIED if name != own.policy
            ]
            others += [msgspec.structs.replace(own, store_threshold=2)] if own.store_threshold < 2 else []
            trials += [self._trial(scenario) for scenario in others]
        return RemedyFigures(
            why_not=None,
            first=self._sample.first,
            last=self._sample.last,
            lookups=len(self.lookups),
            found=self.itself.found_share,
            trials=tuple(trials),
            flood=self._flood(),
        )

    def _larger_pools(self) -> Iterator[TrialFigures]:
        for times in POOL_TIMES:
            trial = self._trial(msgspec.structs.replace(self._own, host_blocks=times * self._own.host_blocks))
            yield trial
            if trial.gains:
                return

    def _trial(self, scenario: Scenario) -> TrialFigures:
        gain = simulate(self._demand, scenario, self.lookups).found_share - self.itself.found_share
        error = error_points(self._demand, scenario) / 100
        return TrialFigures(scenario.host_blocks, scenario.policy, scenario.store_threshold, gain, error)

    def _flood(self) -> FloodFigures | None:
        """Return the requests without whose stores the hit rate rises most; None: it never rises."""
        floods = [
            flood
            for groups in (_by_name(self._demand), _by_prefix(self._demand))
            if (suspect := self._suspect(groups)) is not None and (flood := self._without(suspect)).gains
        ]
        return max(floods, key=lambda flood: flood.gain, default=None)

    def _suspect(self, groups: Sequence[_Group]) -> _Group | None:
        """Return the group that stored most blocks, if these are many and hardly read; None: no group did."""
        found = [group for group in groups if self._may_flood(group)]
        return max(found, key=lambda group: self._blocks_of(group.lives)[0], default=None)

    def _may_flood(self, group: _Group) -> bool:
        stored, read = self._blocks_of(group.lives)
        rest, rest_read = self._stored - stored, self._read - read
        many = len(group.lives) >= FLOOD_LEAST and stored >= FLOOD_STORED * self._stored
        return many and rest > 0 and read * rest <= FLOOD_READ * rest_read * stored

    def _without(self, group: _Group) -> FloodFigures:
        demand, (stored, read) = self._demand, self._blocks_of(group.lives)
        lives, doubled = (
            {*group.lives},
            msgspec.structs.replace(self._own, host_blocks=2 * self._own.host_blocks),
        )
        others = [lookup for lookup in self.lookups if lookup.life not in lives]
        found, without, in_doubled = (
            simulate(tried, scenario, others).found_share
            for tried, scenario in (
                (demand, self._own),
                (without_stores(demand, lives), self._own),
                (demand, doubled),
            )
        )
        names = Counter({demand.requests[life]: self._blocks_of([life])[0] for life in group.lives})
        return FloodFigures(
            who=group.who,
            requests=len(group.lives),
            of=len(demand.requests),
            names=tuple([name for name, _ in names.most_common(SHOWN)]),
            stored=stored,
            read=read,
            all_stored=self._stored,
            all_read=self._read,
            gain=without - found,
            doubled=in_doubled - found,
            error=error_points(demand, msgspec.structs.replace(self._own, host_blocks=0)) / 100,
        )

    def _blocks_of(self, lives: Iterable[int]) -> tuple[int, int]:
        """(blocks that these requests stored, hits of these blocks)."""
        found = [self._by_request.get(self._demand.requests[life], (0, 0)) for life in lives]
        return sum(stored for stored, _ in found), sum(read for _, read in found)


def _blocks_by_request(tables: Tables, sample: _Sample) -> dict[str, tuple[int, int]]:
    """Request -> (blocks that it stored in the sample, their hits)."""
    found: dict[str, tuple[int, int]] = {}
    for requests, stored, read in tables.all(
        "SELECT requests, sum(blocks), sum(blocks * hits) FROM block_runs WHERE stored IS NOT NULL"
        f" AND transfer BETWEEN {sample.first} AND {sample.last} GROUP BY requests"
    ):
        for name in names_of(requests)[:1]:
            before = found.get(name, (0, 0))
            found[name] = before[0] + stored, before[1] + read
    return found


class _Group(NamedTuple):
    """Requests that have something in common. who: what they have in common, as text behind `requests`."""

    who: str
    lives: Sequence[int]


_LONG_HEX = re.compile(r"[0-9a-f]{8}(-?[0-9a-f]{4}){0,6}[0-9a-f]*")
_NUMBER = re.compile(r"[-_:./#]*\d*[-_:./#]*$")


def name_stem(request: str) -> str:
    """Return a request's name without the parts that identify it: ids in hex, and one number at the end."""
    return _NUMBER.sub("", _LONG_HEX.sub("", request))


def _by_name(demand: Demand) -> list[_Group]:
    """Group the requests by their names."""
    lives = defaultdict[str, list[int]](list)
    for life, request in enumerate(demand.requests):
        lives[name_stem(request)].append(life)
    return [_Group(f"named {stem}..", group) for stem, group in lives.items()] if len(lives) > 1 else []


def _by_prefix(demand: Demand) -> list[_Group]:
    """Group the requests by the first block at which prompts differ; all that share it with no other form one
    group."""
    chains = [(life, chain) for life, chain in enumerate(demand.chains) if len(chain) and chain[0] != UNKNOWN]
    place = 0
    while True:
        keys = Counter(chain[place] for _, chain in chains if len(chain) > place)
        if not keys or keys.most_common(1)[0][1] < COMMON_SHARE * keys.total():
            break
        place += 1
    lives = defaultdict[int, list[int]](list)
    for life, chain in chains:
        if len(chain) > place and chain[place] != UNKNOWN:
            lives[chain[place]].append(life)
    alone = [group[0] for group in lives.values() if len(group) == 1]
    groups = [
        _Group(f"whose prompts begin like that of {demand.requests[group[0]]}", group)
        for group in lives.values()
        if len(group) > 1
    ]
    return [*groups, _Group("whose prompts begin like no other", alone)]
