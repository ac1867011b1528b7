"""Compare two logs of one workload: where they first differ, and which figures differ at the end.

Two runs of one workload never have the same event numbers or times. So each log is split into stories, one
for each request and one for each key, and each story is compared with that of the same request or key in the
other log. A step of a story is a decision: a lookup's answer, a load, a store, an eviction, a failure, an
end. Waits and reports of ranks are no steps, because they differ from run to run.

    difference = diff(good, bad)         # two `OpenedLog`s
    difference.partings[0]               # the first place where a story differs

Both logs' stories are read in the same order and compared as streams, so memory does not grow with the logs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from heapq import nsmallest
from itertools import groupby, zip_longest
from operator import itemgetter
from typing import Any, NamedTuple

import msgspec

from kvsm.explain.report.measures import ADMITTED
from kvsm.explain.tables.opened import OpenedLog
from kvsm.explain.tables.row_kinds import Gone

MOST_PARTINGS = 10
"""Most partings in one result."""


class StoryStep(msgspec.Struct, frozen=True):
    """A decision in a story. Steps of two logs are compared by `text` and `key`.

    text: the decision, without numbers of events.
    key: the key at which a lookup's prefix stops; None: this is no lookup, or no key was missing.
    cause: the reason, with event numbers of this log; None: there is no reason to show.
    """

    event: int
    wall_ns: int
    text: str
    key: str | None
    cause: str | None

    def is_like(self, other: StoryStep) -> bool:
        """Whether both steps are the same decision."""
        return (self.text, self.key) == (other.text, other.key)


class Parting(msgspec.Struct, frozen=True):
    """Where a story differs between two logs.

    about: the request or key, `request r7` or `key 00ab..`.
    others: number of other stories that differ from the same two events on.
    common: the last step that both logs have; None: the first steps differ.
    good, bad: the next step in each log; None: there is none.
    """

    about: str
    others: int
    common: StoryStep | None
    good: StoryStep | None
    bad: StoryStep | None


class Changed(msgspec.Struct, frozen=True):
    """A setting or a figure that differs between the good and the bad log."""

    name: str
    good: Any
    bad: Any


class LogDiff(msgspec.Struct, frozen=True, tag_field="schema", tag="kvsm.diff/1"):
    """What `kvsm diff --json` prints: how two logs differ.

    settings: options of the core that differ.
    things: number of requests and keys that were compared.
    parted: number of stories that differ.
    partings: the first differences, in the order of the logs.
    figures: sums that differ.
    keys_by_owner: whether keys were compared by the request that stored them first, because the logs share no
        key.
    """

    settings: list[Changed]
    things: int
    parted: int
    partings: list[Parting]
    figures: list[Changed]
    keys_by_owner: bool

    @property
    def same(self) -> bool:
        """Whether no story differs."""
        return not self.parted


def diff(good: OpenedLog, bad: OpenedLog) -> LogDiff:
    """Compare two logs of one workload."""
    by_owner = _share_nothing(good, bad)
    things = parted = 0
    clocks = _arrivals(good), _arrivals(bad)
    first = _First(clocks)
    for about, good_steps, bad_steps in _aligned(_stories(good, by_owner), _stories(bad, by_owner)):
        things += 1
        parting = _parting(about, good_steps, bad_steps)
        if parting is not None:
            parted += 1
            first.add(parting)
    partings = first.in_order()
    return LogDiff(_settings(good, bad), things, parted, partings, _figures(good, bad), by_owner)


_Place = tuple[int, int]
"""(requests that had arrived, events since the last arrival): a place that is comparable between two logs."""


def _arrivals(log: OpenedLog) -> list[int]:
    return [event for (event,) in log.sql("SELECT arrived FROM requests ORDER BY arrived")]


class _First:
    """Collects partings, and keeps the first ones. Partings with the same two events are counted as one."""

    def __init__(self, arrivals: tuple[list[int], list[int]]) -> None:
        self._arrivals = arrivals
        self._found: dict[tuple[object, ...], tuple[_Place, Parting]] = {}

    def add(self, parting: Parting) -> None:
        """Add a parting. From time to time, drop those that can no longer be among the first."""
        events = tuple([step and step.event for step in (parting.good, parting.bad)])
        place, same = self._found.get(events, (self._place(parting), parting))
        if same is not parting:
            same = msgspec.structs.replace(same, others=same.others + 1)
        self._found[events] = place, same
        if len(self._found) > 50 * MOST_PARTINGS:
            kept = nsmallest(10 * MOST_PARTINGS, self._found.items(), key=lambda item: item[1][0])
            self._found = dict(kept)

    def in_order(self) -> list[Parting]:
        """The first partings, in the order of the logs."""
        found = nsmallest(MOST_PARTINGS, self._found.values(), key=itemgetter(0))
        return [parting for _, parting in found]

    def _place(self, parting: Parting) -> _Place:
        """The place of the earlier step. Event numbers of two logs are not comparable; arrivals are."""
        places = []
        for step, clock in zip((parting.good, parting.bad), self._arrivals):
            if step is not None:
                arrived = bisect_right(clock, step.event)
                places.append((arrived, step.event - (clock[arrived - 1] if arrived else 0)))
        return min(places)


# The stories, in SQL: one SELECT for each kind of step.


_STEPS = """
SELECT 1 AS sort, {name_request} AS thing, arrived AS event, arrived_ns AS wall_ns, 'arrives' AS text,
       NULL AS key, NULL AS cause
  FROM requests
UNION ALL
SELECT 1, {name_request}, finished, finished_ns,
       CASE WHEN aborted THEN 'is aborted' WHEN cut_off THEN 'ends with its process' ELSE 'finishes' END,
       NULL, NULL
  FROM requests WHERE finished IS NOT NULL
UNION ALL
SELECT 1, {name_request}, began, began_ns, 'is preempted', NULL, NULL
  FROM request_states WHERE state = 'PREEMPTED'
UNION ALL
SELECT 1, {name_request}, event, wall_ns,
       printf('has %s blocks on the device and %s on the host', ifnull(on_device, 'some'),
              ifnull(on_host, hit_slots)) || ifnull('; its prefix stops: ' || why, ''),
       {label_missed},
       CASE WHEN cause IS NULL THEN NULL
            ELSE printf('because of event %d', cause)
                 || ifnull(printf(', transfer %d (%s)', cause_transfer, {names_cause_requests}), '') END
  FROM lookups
UNION ALL
SELECT 1, {name_owner}, transfer, transfers.wall_ns, printf('plans a load of %d slots', slots), NULL, NULL
  FROM transfers, json_each(requests) AS owner WHERE direction = 'load'
UNION ALL
SELECT 1, {name_owner}, ended, ended_ns, printf('its %s %s', direction,
       CASE outcome WHEN 'failed' THEN 'failed' WHEN 'lost' THEN 'was lost' ELSE 'was ' || outcome END),
       NULL,
       (SELECT printf('worker %d: %s', worker, ifnull(error, 'the log does not tell why')) FROM copies
         WHERE copies.transfer = transfers.transfer AND NOT good LIMIT 1)
  FROM transfers, json_each(requests) AS owner WHERE outcome <> 'completed'
UNION ALL
SELECT 1, {name_owner}, event, wall_ns, 'offers blocks that are not stored: ' || reason, NULL, NULL
  FROM skips, json_each(requests) AS owner
UNION ALL
SELECT 2, {label_key}, transfer, planned_ns, 'gets a slot, to be stored', NULL, 'for ' || {names_requests}
  FROM blocks
UNION ALL
SELECT 2, {label_key}, gone, gone_ns, 'is gone: ' || why, NULL,
       CASE WHEN gone_for IS NOT NULL THEN printf('for store %d (%s)', gone_for, {names_gone_for_requests})
            WHEN gone_by IS NOT NULL THEN printf('by transfer %d', gone_by) END
  FROM blocks WHERE gone IS NOT NULL AND why <> 'reset'
UNION ALL
SELECT 3, 'the cache', event, wall_ns, 'is reset', NULL, NULL FROM resets
UNION ALL
SELECT 3, 'the cache', event, wall_ns, printf('outlives its process, with %d blocks', kept), NULL, last_end
  FROM restarts
"""

# vLLM's server appends a hyphen and eight hex digits to the id that a client sent.
_NAME = "CASE WHEN {0} GLOB '*-" + "[0-9a-f]" * 8 + "' THEN substr({0}, 1, length({0}) - 9) ELSE {0} END"

# The first names of a JSON list.
_NAMES = (
    "ifnull((SELECT group_concat(value, ', ') FROM (SELECT value FROM json_each({}) LIMIT 4)), 'no request')"
)
_LISTS = ("requests", "cause_requests", "gone_for_requests")

_KEYS_BY_OWNER = f"""
SELECT key, printf('%s, block %d', owner, row_number() OVER (PARTITION BY owner ORDER BY first, slot))
  FROM (SELECT key, min(transfer) AS first, slot, {_NAME.format("json_extract(requests, '$[0]')")} AS owner
          FROM blocks GROUP BY key)
"""


def _steps_of(log: OpenedLog, by_owner: bool) -> str:
    """The SQL query for the steps of a log. by_owner: name each key by the request that stored it first."""
    label = "{}"
    if by_owner:
        labels = dict(log.sql(_KEYS_BY_OWNER))
        log.connection.create_function(
            "label", 1, lambda key: key and labels.get(key, "that was never stored"), deterministic=True
        )
        label = "label({})"
    return _STEPS.format(
        label_key=label.format("key"),
        label_missed=label.format("missed"),
        name_request=_NAME.format("request"),
        name_owner=_NAME.format("owner.value"),
        **{f"names_{column}": _NAMES.format(column) for column in _LISTS},
    )


def _share_nothing(good: OpenedLog, bad: OpenedLog) -> bool:
    """Whether the logs share none of the first hundred keys: block hashes may start from a random value."""
    keys = [key for (key,) in good.sql("SELECT key FROM blocks ORDER BY transfer LIMIT 100")]
    marks = ", ".join("?" * len(keys))
    return bool(keys) and not [*bad.sql(f"SELECT 1 FROM blocks WHERE key IN ({marks}) LIMIT 1", keys)]


class _Story(NamedTuple):
    about: tuple[int, str]
    steps: list[StoryStep]


def _stories(log: OpenedLog, by_owner: bool) -> Iterator[_Story]:
    """Yield the story of each request and key, sorted by name."""
    rows = log.sql(f"SELECT * FROM ({_steps_of(log, by_owner)}) ORDER BY sort, thing, event, text")
    for about, of_thing in groupby(rows, key=itemgetter(0, 1)):
        yield _Story(about, [StoryStep(*step) for _, _, *step in of_thing])


def _aligned(
    good: Iterator[_Story], bad: Iterator[_Story]
) -> Iterator[tuple[str, list[StoryStep], list[StoryStep]]]:
    """Yield (name, steps in the good log, in the bad log) of each request and key; []: the log lacks it."""
    left, right = next(good, None), next(bad, None)
    while left is not None or right is not None:
        about = min(story.about for story in (left, right) if story is not None)
        in_good = left is not None and left.about == about
        in_bad = right is not None and right.about == about
        yield _named(about), left.steps if in_good and left else [], right.steps if in_bad and right else []
        left, right = next(good, None) if in_good else left, next(bad, None) if in_bad else right


def _named(about: tuple[int, str]) -> str:
    sort, thing = about
    return {1: f"request {thing}", 2: f"key {thing}", 3: thing}[sort]


def _parting(about: str, good: list[StoryStep], bad: list[StoryStep]) -> Parting | None:
    common = None
    for good_step, bad_step in zip_longest(good, bad):
        if good_step is None or bad_step is None or not good_step.is_like(bad_step):
            return Parting(about, 0, common, good_step, bad_step)
        common = bad_step
    return None


# Settings and figures.


def _settings(good: OpenedLog, bad: OpenedLog) -> list[Changed]:
    """The options of the core that differ."""
    pairs = zip(*(msgspec.structs.asdict(log.config).items() for log in (good, bad)))
    return [Changed(name, left, right) for (name, left), (_, right) in pairs if left != right]


_FIGURES = {
    "requests": "SELECT count(*) FROM requests",
    "requests that never ended": "SELECT count(*) FROM requests WHERE finished IS NULL",
    "requests that ended with their process": "SELECT count(*) FROM requests WHERE cut_off",
    "preemptions": "SELECT ifnull(sum(preemptions), 0) FROM requests",
    "lookups": f"SELECT count(*) FROM lookups WHERE {ADMITTED}",
    "prompt blocks looked up": f"SELECT sum(asked) FROM lookups WHERE {ADMITTED}",
    "prompt blocks on the device": f"SELECT sum(on_device) FROM lookups WHERE {ADMITTED}",
    "prompt blocks on the host": f"SELECT sum(on_host) FROM lookups WHERE {ADMITTED}",
    **{
        f"prefixes that stop: {cause}": f"SELECT count(*) FROM lookups WHERE why = '{cause}' AND {ADMITTED}"
        for cause in Gone
    },
    "blocks stored": "SELECT count(*) FROM blocks WHERE stored IS NOT NULL",
    "blocks evicted": f"SELECT count(*) FROM blocks WHERE why = '{Gone.EVICTED}'",
    "evicted blocks that were wanted again": (
        f"SELECT count(*) FROM blocks WHERE why = '{Gone.EVICTED}' AND wanted IS NOT NULL"
    ),
    "blocks loaded": "SELECT ifnull(sum(loaded), 0) FROM requests",
    "copies that failed": "SELECT count(*) FROM copies WHERE good = 0",
    "copies that no worker reported": (
        "SELECT count(*) FROM copies JOIN transfers USING (transfer)"
        " WHERE reported IS NULL AND outcome IS NOT 'cut off'"
    ),
    "time that requests waited for others' copies (ms)": "SELECT sum(deferred_ns) / 1000000 FROM requests",
    "time that requests waited for their loads (ms)": "SELECT sum(loading_ns) / 1000000 FROM requests",
    "resets": "SELECT count(*) FROM resets",
    "restarts": "SELECT count(*) FROM restarts",
}


def _figures(good: OpenedLog, bad: OpenedLog) -> list[Changed]:
    """The sums that differ."""
    found = []
    for name, query in _FIGURES.items():
        ((left,),), ((right,),) = good.sql(query), bad.sql(query)
        if left != right:
            found.append(Changed(name, left, right))
    return found
