"""Frequent questions about a log, as SQL over its tables, with parameters.

    query = named_query("late-reports")
    sql = query.filled({"seconds": "0.5"})

`NAMED_QUERIES` defines all of them: `kvsm query`, shell completion and docs/tables.md read it. A parameter is
written as `:name` in the SQL. `filled` replaces it by its value, so `kvsm query --list` prints complete SQL
that can be edited and passed to `kvsm query`.

The first columns of each query are `event`, `step` and `time` (UTC; empty in a log of a virtual clock): the
place in the log where the row begins. Rows are sorted by `event`. A query that compares times omits things
whose time is not in the log.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from enum import Enum

import msgspec

from kvsm.errors import ConfigError
from kvsm.events import KINDS, Direction, SkipReason
from kvsm.explain.story.times import VIRTUAL_NS
from kvsm.states.request import RequestState

ANY = "any"
"""The value of a parameter that does not restrict the query: NULL in SQL."""


class ParameterType(Enum):
    """The type of a parameter's values."""

    INTEGER = "integer"
    NUMBER = "number"
    TEXT = "text"


_FORMS = {ParameterType.INTEGER: r"\d{1,18}", ParameterType.NUMBER: r"\d{1,12}(\.\d{1,9})?"}
"""Regular expressions for values that are not text. Such values are written into the SQL unquoted."""


class QueryParameter(msgspec.Struct, frozen=True):
    """A parameter of a named query.

    name: its name; in the SQL it follows a colon.
    type: the type of its values.
    default: its value if none is given; `any` does not restrict the query.
    sentence: its meaning.
    unit: the unit of its value, such as `s`; empty: it has none.
    choices: the allowed values besides `any`; empty: every value of the type.
    """

    name: str
    type: ParameterType
    default: str
    sentence: str
    unit: str = ""
    choices: tuple[str, ...] = ()

    def literal(self, value: str) -> str:
        """Return the value as SQL. Raises `ConfigError` if this parameter cannot have the value."""
        if value == ANY == self.default:
            return "NULL"
        if self.choices and value not in self.choices:
            raise ConfigError(f"{self.name} cannot be {value!r}: give one of {', '.join(self.values())}")
        form = _FORMS.get(self.type)
        if form is None:
            return "'" + value.replace("'", "''") + "'"
        if re.fullmatch(form, value, re.ASCII) is None:
            unit = f" in {self.unit}" if self.unit else ""
            what = "a whole number" if self.type is ParameterType.INTEGER else "a number, such as 2 or 0.5,"
            raise ConfigError(f"{self.name} cannot be {value!r}: give {what}{unit} that is not negative")
        return value

    def values(self) -> tuple[str, ...]:
        """The values to choose from; empty: every value of the type is allowed."""
        return (ANY, *self.choices) if self.choices and self.default == ANY else self.choices


class NamedQuery(msgspec.Struct, frozen=True):
    """A question, and the SQL that answers it.

    question: one sentence.
    sql: a SELECT in which each parameter is written as `:name`.
    """

    name: str
    question: str
    parameters: tuple[QueryParameter, ...]
    sql: str

    def filled(self, given: Mapping[str, str] | None = None) -> str:
        """Return the SQL with a value for each parameter, from `given` or its default.

        Raises `ConfigError` for a parameter that the query does not have, or a value that does not fit.
        """
        given = given or {}
        names = [parameter.name for parameter in self.parameters]
        for name in given:
            if name not in names:
                raise ConfigError(
                    f"{self.name} has no parameter {name!r}{_near(name, names)}; it has {', '.join(names)}"
                )
        values = {
            parameter.name: parameter.literal(given.get(parameter.name, parameter.default))
            for parameter in self.parameters
        }
        return re.sub(r":([a-z]\w*)", lambda found: values[found[1]], self.sql)


def named_query(name: str) -> NamedQuery:
    """Return the query of this name. Raises `ConfigError` with all names if there is none."""
    for query in NAMED_QUERIES:
        if query.name == name:
            return query
    names = [query.name for query in NAMED_QUERIES]
    raise ConfigError(f"there is no named query {name!r}{_near(name, names)}; there are {', '.join(names)}")


def _near(name: str, known: Iterable[str]) -> str:
    near = get_close_matches(name, list(known), n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def _seconds(default: str, sentence: str) -> QueryParameter:
    return QueryParameter("seconds", ParameterType.NUMBER, default, sentence, "s")


def _kind(name: str, default: str, sentence: str) -> QueryParameter:
    kinds = tuple(kind.__name__ for kind in KINDS)
    return QueryParameter(name, ParameterType.TEXT, default, sentence, choices=kinds)


_WORKER = QueryParameter("worker", ParameterType.INTEGER, ANY, "Only copies of this rank.")
_DIRECTION = QueryParameter(
    "direction",
    ParameterType.TEXT,
    ANY,
    "Only transfers in this direction.",
    choices=tuple(direction.name.lower() for direction in Direction),
)
_REASON = QueryParameter(
    "reason",
    ParameterType.TEXT,
    ANY,
    "Only blocks that were skipped for this reason.",
    choices=tuple(reason.value for reason in SkipReason),
)


def _time(column: str) -> str:
    """Return SQL for the column `time`: a wall time (ns) in the form of `kvsm.explain.story.times.utc`.

    It is NULL for the time of a virtual clock.
    """
    utc = f"strftime('%Y-%m-%dT%H:%M:%fZ', {column} / 1000000 / 1e3, 'unixepoch')"
    return f"CASE WHEN {column} >= {VIRTUAL_NS} THEN {utc} END AS time"


_LOG_END = "log_end AS (SELECT event, step, wall_ns FROM events ORDER BY event DESC LIMIT 1)"

NAMED_QUERIES: tuple[NamedQuery, ...] = (
    NamedQuery(
        "late-reports",
        "Which copies did a rank report late, or not at all?",
        (
            _seconds("2", "The report came more than this after the submission, or has been missing longer."),
            QueryParameter(
                "events",
                ParameterType.INTEGER,
                "0",
                "Also more than this many events after the submission.",
                unit="events",
            ),
            _WORKER,
        ),
        f"""\
WITH {_LOG_END},
waits AS (
  SELECT c.transfer, c.direction, c.worker, t.requests, c.reported, t.outcome,
         t.submitted, t.submitted_step, t.submitted_ns,
         COALESCE(c.reported, t.ended, log_end.event) - t.submitted AS waited_events,
         COALESCE(c.reported_step, t.ended_step, log_end.step) - t.submitted_step AS waited_steps,
         COALESCE(c.reported_ns, t.ended_ns, log_end.wall_ns) - t.submitted_ns AS waited_ns
  FROM copies AS c JOIN transfers AS t USING (transfer) CROSS JOIN log_end
)
SELECT submitted AS event, submitted_step AS step, {_time("submitted_ns")},
       transfer, direction, worker, requests, reported, outcome,
       waited_events, waited_steps, ROUND(waited_ns / 1e6, 3) AS waited_ms
FROM waits
WHERE waited_ns > :seconds * 1000000000 AND waited_events > :events
  AND (:worker IS NULL OR worker = :worker)
ORDER BY event, transfer, worker""",
    ),
    NamedQuery(
        "silent-transfers",
        "Which submitted transfers had no report from any rank, and no other end, for this long?",
        (_seconds("10", "More than this from the submission to the first report or the end."),),
        f"""\
WITH {_LOG_END},
reports AS (
  SELECT transfer, MIN(reported) AS first_report, MIN(reported_ns) AS ns FROM copies GROUP BY transfer
)
SELECT t.submitted AS event, t.submitted_step AS step, {_time("t.submitted_ns")},
       t.transfer, t.direction, t.requests, t.workers, t.pending, reports.first_report, t.outcome,
       ROUND((COALESCE(reports.ns, t.ended_ns, log_end.wall_ns) - t.submitted_ns) / 1e6, 3) AS waited_ms
FROM transfers AS t JOIN reports USING (transfer) CROSS JOIN log_end
WHERE COALESCE(reports.ns, t.ended_ns, log_end.wall_ns) - t.submitted_ns > :seconds * 1000000000
ORDER BY event, t.transfer""",
    ),
    NamedQuery(
        "slow-transfers",
        "Which transfers took long from their plan to their end, or have not ended?",
        (_seconds("2", "They took longer than this."), _DIRECTION),
        f"""\
WITH {_LOG_END}
SELECT t.transfer AS event, t.step, {_time("t.wall_ns")},
       t.direction, t.requests, t.slots, t.pending, t.submitted, t.ended, t.outcome,
       ROUND((COALESCE(t.ended_ns, log_end.wall_ns) - t.wall_ns) / 1e6, 3) AS took_ms
FROM transfers AS t CROSS JOIN log_end
WHERE COALESCE(t.ended_ns, log_end.wall_ns) - t.wall_ns > :seconds * 1000000000
  AND (:direction IS NULL OR t.direction = :direction)
ORDER BY event""",
    ),
    NamedQuery(
        "failed-copies",
        "Which copies failed, on which rank, and with what error?",
        (_WORKER, _DIRECTION),
        f"""\
SELECT c.reported AS event, c.reported_step AS step, {_time("c.reported_ns")},
       c.transfer, c.direction, c.worker, t.requests, t.slots, c.error
FROM copies AS c JOIN transfers AS t USING (transfer)
WHERE c.good = 0
  AND (:worker IS NULL OR c.worker = :worker)
  AND (:direction IS NULL OR c.direction = :direction)
ORDER BY event""",
    ),
    NamedQuery(
        "rejected-reports",
        "Which reports were rejected, and how had their transfers ended?",
        (_WORKER,),
        f"""\
SELECT r.event, r.step, {_time("r.wall_ns")},
       r.transfer, r.worker, r.good, r.reason, t.direction, t.ended, t.outcome,
       ROUND((r.wall_ns - t.ended_ns) / 1e6, 3) AS after_end_ms
FROM rejections AS r LEFT JOIN transfers AS t ON t.transfer = r.transfer AND t.ended <= r.event
WHERE :worker IS NULL OR r.worker = :worker
ORDER BY r.event""",
    ),
    NamedQuery(
        "imported-stores",
        "Which stores copied from another engine, or from another tier, instead of the device?",
        (QueryParameter("source", ParameterType.TEXT, ANY, "Only from this source, such as `engine p-1`."),),
        f"""\
SELECT transfer AS event, step, {_time("wall_ns")},
       source, requests, slots, ended, outcome, ROUND((ended_ns - wall_ns) / 1e6, 3) AS took_ms
FROM transfers
WHERE source IS NOT NULL AND (:source IS NULL OR source = :source)
ORDER BY event""",
    ),
    NamedQuery(
        "hits-after-reset",
        "Which lookups found blocks on the host soon after a reset of the cache?",
        (
            _seconds("2", "The last reset was at most this long before the lookup."),
            QueryParameter("slots", ParameterType.INTEGER, "1", "At least this many were hit.", "host slots"),
        ),
        f"""\
SELECT l.event, l.step, {_time("l.wall_ns")},
       l.request, l.hit_slots, r.event AS reset, ROUND((l.wall_ns - r.wall_ns) / 1e6, 3) AS after_reset_ms
FROM lookups AS l JOIN resets AS r ON r.event = (SELECT MAX(event) FROM resets WHERE event < l.event)
WHERE l.hit_slots >= :slots AND l.wall_ns - r.wall_ns <= :seconds * 1000000000
ORDER BY l.event""",
    ),
    NamedQuery(
        "lookups-after-skip",
        "Which requests had blocks that were not stored, and looked up their prompt again?",
        (_REASON, _seconds(ANY, "The lookup came at most this long after the skip.")),
        f"""\
WITH skipped AS (
  SELECT s.event, s.step, s.wall_ns, s.blocks, s.reason, owner.value AS request
  FROM skips AS s, json_each(s.requests) AS owner
  WHERE :reason IS NULL OR s.reason = :reason
)
SELECT s.event, s.step, {_time("s.wall_ns")},
       s.request, s.blocks, s.reason, l.event AS lookup, l.hit_slots,
       ROUND((l.wall_ns - s.wall_ns) / 1e6, 3) AS after_ms
FROM skipped AS s JOIN lookups AS l
  ON l.event = (SELECT MIN(event) FROM lookups WHERE request = s.request AND event > s.event)
WHERE :seconds IS NULL OR l.wall_ns - s.wall_ns <= :seconds * 1000000000
ORDER BY s.event, s.request""",
    ),
    NamedQuery(
        "misses-after-skip",
        "Which lookups stopped at a key that had been offered and not stored?",
        (_REASON, _seconds(ANY, "The offer was at most this long before the lookup.")),
        f"""\
SELECT l.event, l.step, {_time("l.wall_ns")},
       l.request, l.missed, l.why, s.event AS skip, s.reason, s.requests AS skipped_for,
       ROUND((l.wall_ns - s.wall_ns) / 1e6, 3) AS after_ms
FROM lookups AS l JOIN skips AS s ON s.event = l.skipped
WHERE (:reason IS NULL OR s.reason = :reason)
  AND (:seconds IS NULL OR l.wall_ns - s.wall_ns <= :seconds * 1000000000)
ORDER BY l.event""",
    ),
    NamedQuery(
        "misses-after-eviction",
        "Which evicted blocks did a later lookup miss?",
        (_seconds(ANY, "The lookup came at most this long after the eviction."),),
        f"""\
SELECT b.gone AS event, e.step, {_time("b.gone_ns")},
       b.key, b.slot, b.requests, b.hits, b.gone_for, b.gone_for_requests, b.wanted, b.wanted_by,
       ROUND((b.wanted_ns - b.gone_ns) / 1e6, 3) AS after_ms
FROM blocks AS b LEFT JOIN events AS e ON e.event = b.gone
WHERE b.why = 'evicted' AND b.wanted IS NOT NULL
  AND (:seconds IS NULL OR b.wanted_ns - b.gone_ns <= :seconds * 1000000000)
ORDER BY b.gone, b.life""",
    ),
    NamedQuery(
        "long-waits",
        "Which requests waited long for their own load, or for another request's transfer?",
        (
            _seconds("2", "They waited longer than this, or have been waiting longer."),
            QueryParameter(
                "state",
                ParameterType.TEXT,
                ANY,
                "Only waits for another request's transfer (`DEFERRED`), or for the own load (`LOADING`).",
                choices=(RequestState.DEFERRED.name, RequestState.LOADING.name),
            ),
        ),
        f"""\
WITH {_LOG_END}
SELECT s.began AS event, s.began_step AS step, {_time("s.began_ns")},
       s.request, s.state, s.transfer, s.ended,
       ROUND((COALESCE(s.ended_ns, log_end.wall_ns) - s.began_ns) / 1e6, 3) AS waited_ms
FROM request_states AS s CROSS JOIN log_end
WHERE s.state IN ('DEFERRED', 'LOADING') AND (:state IS NULL OR s.state = :state)
  AND COALESCE(s.ended_ns, log_end.wall_ns) - s.began_ns > :seconds * 1000000000
ORDER BY event, s.request""",
    ),
    NamedQuery(
        "slow-requests",
        "Which requests took long to finish, or have not finished?",
        (_seconds("60", "They took longer than this from their arrival."),),
        f"""\
WITH {_LOG_END}
SELECT r.arrived AS event, r.arrived_step AS step, {_time("r.arrived_ns")},
       r.request, r.state, r.finished, r.aborted, r.cut_off, r.preemptions,
       ROUND((COALESCE(r.finished_ns, log_end.wall_ns) - r.arrived_ns) / 1e6, 3) AS took_ms,
       ROUND(r.deferred_ns / 1e6, 3) AS deferred_ms, ROUND(r.loading_ns / 1e6, 3) AS loading_ms
FROM requests AS r CROSS JOIN log_end
WHERE COALESCE(r.finished_ns, log_end.wall_ns) - r.arrived_ns > :seconds * 1000000000
ORDER BY event, r.request""",
    ),
    NamedQuery(
        "events-followed",
        "Which events of one kind are followed by an event of another kind?",
        (
            _kind("kind", "CacheReset", "The kind of the first event."),
            _kind("by", "BlocksEvicted", "The kind of the following event; the nearest one counts."),
            _seconds(ANY, "It follows within this time."),
        ),
        f"""\
WITH pairs AS (
  SELECT event, step, wall_ns, kind, MIN(CASE kind WHEN :by THEN event END) OVER (
    ORDER BY event DESC ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
  ) AS next
  FROM events
)
SELECT p.event, p.step, {_time("p.wall_ns")}, p.kind,
       p.next, n.kind AS next_kind, n.event - p.event AS events, n.step - p.step AS steps,
       ROUND((n.wall_ns - p.wall_ns) / 1e6, 3) AS after_ms
FROM pairs AS p JOIN events AS n ON n.event = p.next
WHERE p.kind = :kind AND (:seconds IS NULL OR n.wall_ns - p.wall_ns <= :seconds * 1000000000)
ORDER BY p.event""",
    ),
    NamedQuery(
        "events-not-followed",
        "Which events of one kind are not followed by an event of another kind?",
        (
            _kind("kind", "TransfersSubmitted", "The kind of the first event."),
            _kind("by", "WorkerReported", "The kind of the event that does not follow."),
            _seconds(ANY, "It does not follow within this time; the log must go on for longer than that."),
        ),
        f"""\
WITH {_LOG_END},
pairs AS (
  SELECT event, step, wall_ns, kind, MIN(CASE kind WHEN :by THEN event END) OVER (
    ORDER BY event DESC ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
  ) AS next
  FROM events
)
SELECT p.event, p.step, {_time("p.wall_ns")}, p.kind, p.next,
       ROUND((COALESCE(n.wall_ns, log_end.wall_ns) - p.wall_ns) / 1e6, 3) AS passed_ms
FROM pairs AS p LEFT JOIN events AS n ON n.event = p.next CROSS JOIN log_end
WHERE p.kind = :kind
  AND (CASE WHEN :seconds IS NULL THEN p.next IS NULL
       ELSE COALESCE(n.wall_ns, log_end.wall_ns) - p.wall_ns > :seconds * 1000000000 END)
ORDER BY p.event""",
    ),
    NamedQuery(
        "events-preceded",
        "Which events of one kind come after an event of another kind?",
        (
            _kind("kind", "HitMatched", "The kind of the second event."),
            _kind("by", "CacheReset", "The kind of the event before; the nearest one counts."),
            _seconds(ANY, "It comes within this time."),
        ),
        f"""\
WITH pairs AS (
  SELECT event, step, wall_ns, kind, MAX(CASE kind WHEN :by THEN event END) OVER (
    ORDER BY event ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
  ) AS before
  FROM events
)
SELECT p.event, p.step, {_time("p.wall_ns")}, p.kind,
       p.before, b.kind AS before_kind, p.event - b.event AS events, p.step - b.step AS steps,
       ROUND((p.wall_ns - b.wall_ns) / 1e6, 3) AS after_ms
FROM pairs AS p JOIN events AS b ON b.event = p.before
WHERE p.kind = :kind AND (:seconds IS NULL OR p.wall_ns - b.wall_ns <= :seconds * 1000000000)
ORDER BY p.event""",
    ),
)
"""All named queries, in the order in which they are listed."""
