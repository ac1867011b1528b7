"""`kvsm find`: the language, and the search against one that looks at every pair of events."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st
from places import ROOT
from replay_life import Life, gapped, key, random_life, story_life

from kvsm import events as ev
from kvsm.cli import main
from kvsm.errors import ConfigError
from kvsm.events import KINDS, OffloadingEvent
from kvsm.explain import pattern_search
from kvsm.explain.pattern_search import search
from kvsm.explain.patterns import FIELD_TYPES, GRAMMAR, EventSpan, PatternError, Unit, parse
from kvsm.explain.story.render import FIELDS
from kvsm.ids import to_list


def kvsm(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(one) for one in arguments])


# The search.

SIDES: dict[str, Any] = {
    "StorePlanned": lambda one: isinstance(one, ev.StorePlanned),
    "StorePlanned(#slots > 1)": lambda one: isinstance(one, ev.StorePlanned) and len(to_list(one.slots)) > 1,
    "TransfersSubmitted": lambda one: isinstance(one, ev.TransfersSubmitted),
    "WorkerReported(worker = 0)": lambda one: isinstance(one, ev.WorkerReported) and one.worker == 0,
    "WorkerReported(good = false) | TransferLost": lambda one: (
        (isinstance(one, ev.WorkerReported) and not one.good) or isinstance(one, ev.TransferLost)
    ),
    "HitMatched": lambda one: isinstance(one, ev.HitMatched),
    "HitMatched(missed != none)": lambda one: isinstance(one, ev.HitMatched) and one.missed is not None,
    "RequestFinished(request = r1, aborted = true)": lambda one: (
        isinstance(one, ev.RequestFinished) and one.request == "r1" and one.aborted
    ),
    "BlocksEvicted": lambda one: isinstance(one, ev.BlocksEvicted),
    "StoreSkipped(keys contains 000003e8)": lambda one: (
        isinstance(one, ev.StoreSkipped) and any(one.hex().startswith("000003e8") for one in one.keys)
    ),
    "any": lambda _: True,
}
"""A side of a query, and what it means."""


def plain_things(event: Any, thing: str) -> list[Any]:
    """What an event names, read field by field."""
    if thing == "nothing":
        return [None]
    found: list[Any] = []
    if thing == "transfer":
        planned = isinstance(event, ev.StorePlanned | ev.LoadPlanned) and not getattr(event, "voided", False)
        found += [event.seq] if planned else []
        found += [event.transfer] if hasattr(event, "transfer") else []
        found += getattr(event, "transfers", ())
    elif thing == "request":
        found += [event.request] if hasattr(event, "request") else []
        found += [one[0] for one in (*getattr(event, "owners", ()), *getattr(event, "offers", ()))]
    elif thing == "slot":
        found += to_list(getattr(event, "slots", ()))
    return [*dict.fromkeys(found)]


def place(event: OffloadingEvent, unit: str) -> int:
    return {"events": event.seq, "steps": event.step}.get(unit, event.wall_ns)


Answer = set[tuple[int, int | None, Any]]


def plain_search(
    events: list[OffloadingEvent],
    sides: tuple[str, str],
    query: tuple[bool, str, str, tuple[int, str] | None],
) -> Answer:
    """Every pair of events is looked at. (first, second, thing); second is None with `not`."""
    negated, relation, thing, span = query
    first, second = (SIDES[one] for one in sides)

    def reaches(one: OffloadingEvent, through: list[OffloadingEvent]) -> bool:
        return span is None or all(place(two, span[1]) - place(one, span[1]) <= span[0] for two in through)

    found: Answer = set()
    for at, event in enumerate(events):
        for shared in plain_things(event, thing) if first(event) else ():
            others = range(at + 1, len(events)) if relation == "followed" else range(at - 1, -1, -1)
            partner = next(
                (two for two in others if second(events[two]) and shared in plain_things(events[two], thing)),
                None,
            )
            if partner is not None:
                early, late = min(at, partner), max(at, partner)
                if not reaches(events[early], events[early + 1 : late + 1]):
                    partner = None
            if negated and partner is None:
                found.add((event.seq, None, shared))
            elif not negated and partner is not None:
                found.add((event.seq, events[partner].seq, shared))
    return found


SPANS = st.none() | st.tuples(st.integers(0, 40), st.sampled_from(["events", "steps", "ns"]))
THINGS = {"transfer": (0, 1, 2, 3, 4, 8), "request": (0, 1, 5, 6, 7, 9), "slot": (0, 1, 5, 6, 8)}
"""Sides that name such a thing, by their place in SIDES."""


@st.composite
def queries(draw: st.DrawFn) -> tuple[tuple[str, str], tuple[bool, str, str, tuple[int, str] | None]]:
    thing = draw(st.sampled_from([*THINGS, "nothing"]))
    names = list(SIDES)
    usable = st.sampled_from([names[one] for one in THINGS.get(thing, range(len(names)))])
    relation = draw(st.sampled_from(["followed", "preceded"]))
    return (draw(usable), draw(usable)), (draw(st.booleans()), relation, thing, draw(SPANS))


def busy_life(seed: int) -> list[OffloadingEvent]:
    """Events of every kind. Many share a time, and sometimes the clock is set back."""
    clock, now = random.Random(seed), [1000]

    def tick() -> int:
        now[0] += clock.choice((0, 0, 1, 5, 20, -7))
        return now[0]

    return list(random_life(seed, 250, clock_ns=tick).events)


LIVES = [busy_life(seed) for seed in range(3)]


@settings(max_examples=80)
@given(st.sampled_from(LIVES), queries())
def test_the_search_agrees_with_a_look_at_every_pair(events: list[OffloadingEvent], drawn: Any) -> None:
    """Whatever is looked for, on either side, with and without `not`, in each unit."""
    sides, query = drawn
    negated, relation, thing, span = query
    text = f"{sides[0]} {'not ' if negated else ''}{relation} by {sides[1]} same {thing}"
    pattern = parse(text if span is None else f"{text} within {span[0]} {span[1].replace('ns', 'ms')}")
    if pattern.span is not None and span[1] == "ns":
        pattern = pattern._replace(span=EventSpan(Unit.NANOSECONDS, span[0]))
    found = {
        (one.first.seq, None if one.second is None else one.second.seq, shared)
        for one in search(pattern, events)
        for shared in (one.things if thing != "nothing" else (None,))
    }
    assert found == plain_search(events, sides, query)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A query without a span over a long log ends with advice, not with all memory."""
    monkeypatch.setattr(pattern_search, "MOST_HELD", 50)
    pattern = parse("Ticked followed by CacheReset")
    with pytest.raises(ConfigError, match=r"more than 50 events wait .*within 1000 events"):
        list(search(pattern, (ev.Ticked(one, 0, 0, one) for one in range(1, 100))))


def test_what_was_answered_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long span costs no memory for the events that have their second one."""
    monkeypatch.setattr(pattern_search, "MOST_HELD", 50)
    pattern = parse("StepEnded followed by StepEnded within 1000000 events")
    held: list[Any] = []
    original = pattern_search._OpenSpans.__init__

    def noted(self: Any, pattern: Any) -> None:
        original(self, pattern)
        held.append(self)

    monkeypatch.setattr(pattern_search._OpenSpans, "__init__", noted)
    assert len(list(search(pattern, (ev.StepEnded(one, 0, 0) for one in range(1, 5000))))) == 4998
    assert len(held[0]._deadlines) < 1100


# The language.


def test_every_field_of_an_event_has_a_type() -> None:
    assert set(FIELD_TYPES) - {"event", "step"} == set(FIELDS)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_can_be_looked_for(kind: type[OffloadingEvent]) -> None:
    one = kind(1, 0, 0, *(0 for _ in kind.__struct_fields__[3:]))
    assert parse(kind.__name__).first.fit(one)
    assert parse(f"{kind.__name__}(event = 1, step < 5)").first.fit(one)
    assert not parse(f"{kind.__name__}(event != 1)").first.fit(one)


def test_what_both_kinds_name_is_compared_unless_the_query_says_else() -> None:
    """Transfer before request before slot; and an event that plans a transfer names it."""
    for query, thing in (
        ("StorePlanned followed by WorkerReported", "transfers"),
        ("StorePlanned followed by RequestFinished", "requests"),
        ("HitMatched followed by BlocksTouched", "slots"),
        ("StorePlanned followed by RequestFinished | Ticked", None),
        ("StorePlanned followed by WorkerReported same nothing", None),
        ("StorePlanned followed by HitMatched same slot", "slots"),
    ):
        found = parse(query).thing
        assert (found and found.value) == thing, query


@pytest.mark.parametrize(
    ("query", "marked", "reason"),
    [
        ("", "", "expected a kind of event, like StorePlanned, and the query ends here"),
        ("StorPlanned", "StorPlanned", "did you mean StorePlanned"),
        ("storeplanned", "storeplanned", "did you mean StorePlanned?"),
        ("Zzz", "Zzz", "`kvsm find --help` lists the kinds"),
        ("StorePlanned folowed by any", "folowed", "did you mean followed"),
        ("StorePlanned not by any", "by", "expected 'followed by' or 'preceded by'"),
        (
            "StorePlanned followed by",
            "",
            "expected a kind of event, like StorePlanned, and the query ends here",
        ),
        ("StorePlanned(slot = 3)", "slot", "expected a field of StorePlanned"),
        ("StorePlanned(slots = 3)", "=", "expected contains (slots is a list of numbers)"),
        ("StorePlanned(#slots contains 3)", "contains", "expected = != < <= > >="),
        ("WorkerReported(#worker = 3)", "worker", "worker is a number, and # counts a list"),
        ("WorkerReported(worker = three)", "three", "expected a whole number"),
        ("WorkerReported(good = maybe)", "maybe", "good is true or false"),
        ("WorkerReported(good = true", "", "expected ',' or ')'"),
        ("WorkerReported(good = )", ")", "expected a value (good is true or false)"),
        ("HitMatched(missed = xyz)", "xyz", "is not made of hex digits"),
        ('StoreSkipped(reason = "pool ful")', '"pool ful"', "did you mean pool full?"),
        ('RequestArrived(request = "r1)', '"r1)', "this quote is not closed"),
        ("LogOpened(config = 1)", "config", "config is nothing that can be compared"),
        ("StorePlanned followed by Ticked same slot", "slot", "Ticked names no slot"),
        ("StorePlanned followed by any same block", "block", "expected what they have in common"),
        ("StorePlanned followed by any within 10 event", "event", "did you mean events?"),
        ("StorePlanned followed by any within ten events", "ten", "expected a whole number"),
        ("StorePlanned followed by any within 10 events or so", "or", "expected 'within' or the end"),
        ("StorePlanned !", "!", "this is no part of a query"),
    ],
)
def test_a_bad_query_says_where_and_what(query: str, marked: str, reason: str) -> None:
    with pytest.raises(PatternError) as raised:
        parse(query)
    error = raised.value
    assert error.text[error.column : error.column + error.width] == marked or not marked
    assert reason in error.reason


@settings(max_examples=60)
@given(st.text(alphabet="StorePlanned nofbywithiSeq(){}=<>!#|,\"'\\0123 \n", max_size=40))
def test_any_text_is_a_pattern_or_a_pattern_error(text: str) -> None:
    """And the mark is inside of the text, or right behind it."""
    try:
        parse(text)
    except PatternError as error:
        place = error.column, error.width
    else:
        return
    assert 0 <= place[0] <= len(text)
    assert place[1] >= 1


def test_the_page_for_incidents_holds_the_grammar_and_queries_that_can_be_read() -> None:
    """What the docs and the help show can be pasted."""
    page = (ROOT / "docs" / "incidents.md").read_text()
    assert GRAMMAR in page
    shown = page + kvsm("find", "--help").stdout.replace('\\"', "'")
    queries = re.findall(r"""kvsm find \S+ (?:"([^"\n]+)"|'([^'\n]+)')""", shown)
    assert len(queries) >= 8
    for double, single in queries:
        parse((double or single).replace("'", '"'))


# The command.


def test_find_shows_both_events_and_what_lies_between(tmp_path: Path) -> None:
    story_life(tmp_path / "log")
    result = kvsm("find", tmp_path / "log", "StorePlanned(keys contains 00000003) followed by WorkerReported")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "1970-01-01T00:00:00.000Z +0.000s event 15 step 2: StorePlanned request r3 keys 000000030000..0000 "
        "to 000000040000..0000 (2) slots 1, 0 (2) device blocks 13..14 (2)",
        "    1970-01-01T00:00:00.000Z +0.000s event 17 step 2: WorkerReported transfer 15 worker 0 good"
        "  [transfer 15]  (2 events, 0 steps, 2 ns later)",
        "1 found in 20 events",
    ]


def test_find_tells_a_copy_that_nobody_reported(tmp_path: Path) -> None:
    """The question of the front page. Near the end of the log it says how much of the log was left."""
    life = Life(tmp_path / "log", workers=1)
    plan = life.core.prepare_store("r1", [key(1)], [1]).job
    assert plan is not None
    life.core.submit([plan.transfer])
    for _ in range(5):
        life.core.tick()
    life.close()
    query = "StorePlanned not followed by WorkerReported within 4 events"
    (line, count) = kvsm("find", tmp_path / "log", query).stdout.splitlines()
    assert line.endswith("StorePlanned request r1 key 000000010000..0000 slot 0 device block 1  [transfer 2]")
    assert count == "1 found in 8 events"
    near = kvsm("find", tmp_path / "log", query.replace("4", "1000"))
    assert near.stdout.splitlines()[0].endswith("[transfer 2]  (LOG ends 6 events later)")
    told = json.loads(kvsm("find", tmp_path / "log", query, "--json").stdout)
    assert (told["schema"], told["thing"], told["things"], told["cut"]) == (
        "kvsm.find/1",
        "transfer",
        [2],
        False,
    )
    assert (told["first"]["event"], told["second"]) == (2, None)


def test_find_takes_a_window(tmp_path: Path) -> None:
    """Events outside of it are not looked at, and the log before it is not known."""
    story_life(tmp_path / "log")
    result = kvsm("find", tmp_path / "log", "WorkerReported", "--since", 6, "--until", 16)
    assert [line.split(" step")[0].split()[-1] for line in result.stdout.splitlines()[:-1]] == ["11"]
    cut = kvsm("find", tmp_path / "log", "HitMatched not preceded by StorePlanned same slot", "--since", 7)
    assert cut.stdout.splitlines()[0].endswith("[slot 0]  (the span reaches to outside of LOG)")


def test_a_bad_query_is_shown_with_a_mark(tmp_path: Path) -> None:
    story_life(tmp_path / "log")
    result = kvsm("find", tmp_path / "log", "StorePlanned followed by \x1b[31mWorker")
    assert (result.exit_code, result.stdout) == (2, "")
    first, query, mark = result.stderr.splitlines()
    assert first.startswith("kvsm: the query cannot be read at column 26: ")
    assert query == "kvsm:   StorePlanned followed by \\x1b[31mWorker"
    assert mark == "kvsm:                            ^^^^^^^^^^^^^^"


def test_a_log_that_lacks_events_ends_with_1(tmp_path: Path) -> None:
    """The events that are there are searched."""
    gapped(tmp_path / "log")
    result = kvsm("find", tmp_path / "log", "CacheReset")
    assert result.exit_code == 1
    assert "are not in the log" in result.stderr
    assert "found in" in result.stdout


def lines_of(directory: Path, query: str) -> Iterator[dict[str, Any]]:
    yield from map(json.loads, kvsm("find", directory, query, "--json").stdout.splitlines())


def test_find_reads_a_log_of_several_segments(tmp_path: Path) -> None:
    life = random_life(9, 300, tmp_path / "log", writer={"segment_bytes": 2000})
    life.close()
    assert len(list((tmp_path / "log").glob("*.kvsm"))) > 2
    wanted = [one.seq for one in life.events if isinstance(one, ev.HitMatched)]
    assert [one["first"]["event"] for one in lines_of(tmp_path / "log", "HitMatched")] == wanted
