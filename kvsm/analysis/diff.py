"""Two logs side by side: where they part first, and what differs at the end.

Two runs of one workload never have the same event numbers or times. So a log is read as many small stories,
one for each request and one for each key, and each is compared with the same one of the other log. A
step says what was decided: a lookup's answer, a load, a store, an eviction, a failure, an end. Waits and
reports of ranks are no steps, since they differ from run to run.

    difference = diff(good, bad)         # two `OpenedLog`s
    difference.partings[0]               # the first story that goes on differently

The stories of both logs are read in one order and compared as streams, so memory does not grow with the logs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from heapq import nsmallest
from itertools import groupby, zip_longest
from operator import itemgetter
from typing import Any, NamedTuple

import msgspec

from kvsm.analysis.opened import OpenedLog
from kvsm.analysis.rows import Gone

MOST_PARTINGS = 10
"""Partings told at most."""


class StoryStep(msgspec.Struct, frozen=True):
    """What was decided in one event of a story. text: without numbers of events, so that logs compare."""

    event: int
    wall_ns: int
    text: str


class Parting(msgspec.Struct, frozen=True):
    """Where the stories of one thing part.

    about: the thing, `request r7` or `key 00ab..`.
    common: the last step that both logs have; None: they part from the start.
    good, bad: what follows in each; None: nothing follows.
    """

    about: str
    common: StoryStep | None
    good: StoryStep | None
    bad: StoryStep | None


class Changed(msgspec.Struct, frozen=True):
    """A setting or a figure that differs."""

    name: str
    good: Any
    bad: Any


class LogDiff(msgspec.Struct, frozen=True, tag_field="schema", tag="kvsm.diff/1"):
    """What `kvsm diff --json` prints: how two logs differ.

    things: requests and keys that were compared. parted: those whose stories part.
    partings: the first of them, in the order of the logs.
    keys_by_owner: whether a key was named by the request that stored it first: the logs share no key.
    """

    settings: list[Changed]
    things: int
    parted: int
    partings: list[Parting]
    figures: list[Changed]
    keys_by_owner: bool

    @property
    def same(self) -> bool:
        """Whether every story goes the same way in both logs."""
        return not self.parted


def diff(good: OpenedLog, bad: OpenedLog) -> LogDiff:
    """Compare two logs of one workload."""
    by_owner = _share_nothing(good, bad)
    things = parted = 0
    first: list[tuple[_Place, int, Parting]] = []
    clocks = _arrivals(good), _arrivals(bad)
    for about, good_steps, bad_steps in _aligned(_stories(good, by_owner), _stories(bad, by_owner)):
        things += 1
        parting = _parting(about, good_steps, bad_steps)
        if parting is not None:
            parted += 1
            first.append((_place(parting, clocks), parted, parting))
            if len(first) > 50 * MOST_PARTINGS:
                first = nsmallest(MOST_PARTINGS, first)
    partings = [parting for _, _, parting in nsmallest(MOST_PARTINGS, first)]
    return LogDiff(_settings(good, bad), things, parted, partings, _figures(good, bad), by_owner)


_Place = tuple[int, int]
"""Requests that had arrived, and events since the last of them: a place that means the same in both logs."""


def _arrivals(log: OpenedLog) -> list[int]:
    return [event for (event,) in log.sql("SELECT arrived FROM requests ORDER BY arrived")]


def _place(parting: Parting, arrivals: tuple[list[int], list[int]]) -> _Place:
    """Where the first of the two steps stands. Event numbers of two logs do not compare; arrivals do."""
    places = []
    for step, clock in zip((parting.good, parting.bad), arrivals):
        if step is not None:
            arrived = bisect_right(clock, step.event)
            places.append((arrived, step.event - (clock[arrived - 1] if arrived else 0)))
    return min(places)


# The stories, in SQL: one SELECT for each kind of step.


_STEPS = """
WITH labels AS ({labels})
SELECT 1 AS sort, {name_request} AS thing, arrived AS event, arrived_ns AS wall_ns, 'arrives' AS text
  FROM requests
UNION ALL
SELECT 1, {name_request}, finished, finished_ns, CASE WHEN aborted THEN 'is aborted' ELSE 'finishes' END
  FROM requests WHERE finished IS NOT NULL
UNION ALL
SELECT 1, {name_request}, began, began_ns, 'is preempted'
  FROM request_states WHERE state = 'PREEMPTED'
UNION ALL
SELECT 1, {name_request}, event, wall_ns,
       printf('has %s blocks on the device and %s on the host', ifnull(on_device, 'some'),
              ifnull(on_host, hit_slots))
       || CASE WHEN missed IS NULL THEN ''
               ELSE printf('; stops at key %s: %s', ifnull(labels.label, 'that nobody stored'), why) END
  FROM lookups LEFT JOIN labels ON labels.key = missed
UNION ALL
SELECT 1, {name_owner}, transfer, transfers.wall_ns, printf('plans a load of %d slots', slots)
  FROM transfers, json_each(requests) AS owner WHERE direction = 'load'
UNION ALL
SELECT 1, {name_owner}, ended, ended_ns, printf('hears that its %s %s', direction,
       CASE outcome WHEN 'failed' THEN 'failed' WHEN 'lost' THEN 'was lost' ELSE 'was ' || outcome END)
  FROM transfers, json_each(requests) AS owner WHERE outcome <> 'completed'
UNION ALL
SELECT 1, {name_owner}, event, wall_ns, 'offers blocks that are not stored: ' || reason
  FROM skips, json_each(requests) AS owner
UNION ALL
SELECT 2, labels.label, transfer, planned_ns, 'gets a slot, to be stored'
  FROM blocks JOIN labels USING (key)
UNION ALL
SELECT 2, labels.label, gone, gone_ns, 'is gone: ' || why
  FROM blocks JOIN labels USING (key) WHERE gone IS NOT NULL AND why <> 'reset'
UNION ALL
SELECT 3, 'the cache', event, wall_ns, 'is reset' FROM resets
"""

# vLLM's server appends a hyphen and eight characters of its own to the name that a client chose.
_NAME = "CASE WHEN {0} GLOB '*-" + "[0-9a-f]" * 8 + "' THEN substr({0}, 1, length({0}) - 9) ELSE {0} END"

_SHARED_KEYS = "SELECT DISTINCT key, key AS label FROM blocks"
_KEYS_BY_OWNER = f"""
SELECT key, printf('%s, block %d', owner,
                   row_number() OVER (PARTITION BY owner ORDER BY first, slot)) AS label
  FROM (SELECT key, min(transfer) AS first, slot, {_NAME.format("json_extract(requests, '$[0]')")} AS owner
          FROM blocks GROUP BY key)
"""


def _steps_of(by_owner: bool) -> str:
    return _STEPS.format(
        labels=_KEYS_BY_OWNER if by_owner else _SHARED_KEYS,
        name_request=_NAME.format("request"),
        name_owner=_NAME.format("owner.value"),
    )


def _share_nothing(good: OpenedLog, bad: OpenedLog) -> bool:
    """Whether no key of the first hundred is in the other log: block hashes may start from a random value."""
    keys = [key for (key,) in good.sql("SELECT key FROM blocks ORDER BY transfer LIMIT 100")]
    marks = ", ".join("?" * len(keys))
    return bool(keys) and not [*bad.sql(f"SELECT 1 FROM blocks WHERE key IN ({marks}) LIMIT 1", keys)]


class _Story(NamedTuple):
    about: tuple[int, str]
    steps: list[StoryStep]


def _stories(log: OpenedLog, by_owner: bool) -> Iterator[_Story]:
    """Each thing with its steps, sorted by thing."""
    rows = log.sql(f"SELECT * FROM ({_steps_of(by_owner)}) ORDER BY sort, thing, event, text")
    for about, of_thing in groupby(rows, key=itemgetter(0, 1)):
        yield _Story(about, [StoryStep(event, ns, text) for _, _, event, ns, text in of_thing])


def _aligned(
    good: Iterator[_Story], bad: Iterator[_Story]
) -> Iterator[tuple[str, list[StoryStep], list[StoryStep]]]:
    """Both stories of each thing; an empty one if a log does not know it."""
    one, other = next(good, None), next(bad, None)
    while one is not None or other is not None:
        about = min(story.about for story in (one, other) if story is not None)
        in_good = one is not None and one.about == about
        in_bad = other is not None and other.about == about
        yield _named(about), one.steps if in_good and one else [], other.steps if in_bad and other else []
        one, other = next(good, None) if in_good else one, next(bad, None) if in_bad else other


def _named(about: tuple[int, str]) -> str:
    sort, thing = about
    return {1: f"request {thing}", 2: f"key {thing}", 3: thing}[sort]


def _parting(about: str, good: list[StoryStep], bad: list[StoryStep]) -> Parting | None:
    common = None
    for one, other in zip_longest(good, bad):
        if one is None or other is None or one.text != other.text:
            return Parting(about, common, one, other)
        common = other
    return None


# What differs besides.


def _settings(good: OpenedLog, bad: OpenedLog) -> list[Changed]:
    """The options of the core that differ."""
    pairs = zip(*(msgspec.structs.asdict(log.config).items() for log in (good, bad)))
    return [Changed(name, one, other) for (name, one), (_, other) in pairs if one != other]


_FIGURES = {
    "requests": "SELECT count(*) FROM requests",
    "requests that never ended": "SELECT count(*) FROM requests WHERE finished IS NULL",
    "preemptions": "SELECT ifnull(sum(preemptions), 0) FROM requests",
    "lookups": "SELECT count(*) FROM lookups",
    "prompt blocks looked up": "SELECT sum(asked) FROM requests",
    "prompt blocks on the device": "SELECT sum(on_device) FROM requests",
    "prompt blocks on the host": "SELECT sum(on_host) FROM requests",
    **{
        f"prefixes that stop: {cause}": f"SELECT count(*) FROM lookups WHERE why = '{cause}'"
        for cause in Gone
    },
    "blocks stored": "SELECT count(*) FROM blocks WHERE stored IS NOT NULL",
    "blocks evicted": f"SELECT count(*) FROM blocks WHERE why = '{Gone.EVICTED}'",
    "evicted blocks that were wanted again": (
        f"SELECT count(*) FROM blocks WHERE why = '{Gone.EVICTED}' AND wanted IS NOT NULL"
    ),
    "blocks loaded": "SELECT ifnull(sum(loaded), 0) FROM requests",
    "copies that failed": "SELECT count(*) FROM copies WHERE good = 0",
    "copies that no worker reported": "SELECT count(*) FROM copies WHERE reported IS NULL",
    "time that requests waited for others' copies (ms)": "SELECT sum(deferred_ns) / 1000000 FROM requests",
    "time that requests waited for their loads (ms)": "SELECT sum(loading_ns) / 1000000 FROM requests",
    "resets": "SELECT count(*) FROM resets",
}


def _figures(good: OpenedLog, bad: OpenedLog) -> list[Changed]:
    """The sums that differ."""
    found = []
    for name, query in _FIGURES.items():
        ((one,),), ((other,),) = good.sql(query), bad.sql(query)
        if one != other:
            found.append(Changed(name, one, other))
    return found
