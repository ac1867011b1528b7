"""The language of `kvsm find`: which events of a log are looked for.

    StorePlanned not followed by WorkerReported within 1000 events
    WorkerReported(good = false, worker = 3)
    HitMatched(#slots > 100) preceded by CacheReset within 2 s
    StorePlanned not followed by WorkerReported | TransferLost | TransferCancelled

`GRAMMAR` is the whole of it. `parse` reads a text; its errors say what is wrong, and where.
`pattern_search.py` looks for the pattern in a log.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from enum import Enum
from typing import Any, NamedTuple, get_type_hints

from kvsm.errors import ConfigError, KvsmError
from kvsm.events import KINDS, REACHES, OffloadingEvent, Reach
from kvsm.explain.story.concern import NAMED_BY_FIELDS
from kvsm.explain.story.names import key_pattern
from kvsm.ids import to_list

GRAMMAR = """\
query     = events [ ["not"] ("followed" | "preceded") "by" events ["same" thing] ["within" span] ]
events    = event { "|" event }                  any of them
event     = kind [ "(" test { "," test } ")" ]   all tests hold; the kind "any" is every kind
test      = field ("=" | "!=" | "<" | "<=" | ">" | ">=" | "contains") value
          | "#" field (the same)  number         how many a list has: #slots > 100
span      = number ("events" | "steps" | "ms" | "s" | "min")
thing     = "transfer" | "request" | "key" | "slot" | "device_block" | "nothing"
value     = number | true | false | none | word | "words in quotes"
"""
"""The language, for people."""


class PatternError(KvsmError):
    """A text that is no pattern.

    text: it, on one line.
    column, width: the wrong part of it, from 0.
    reason: what is wrong, and what to write.
    """

    def __init__(self, text: str, column: int, width: int, reason: str) -> None:
        self.text, self.column, self.width, self.reason = text, column, width, reason
        super().__init__(f"the query cannot be read at column {column + 1}: {reason}")


class Thing(Enum):
    """What makes two events belong together. The value is the field of `Concern` that names it."""

    TRANSFER = "transfers"
    REQUEST = "requests"
    KEY = "keys"
    SLOT = "slots"
    DEVICE_BLOCK = "device_blocks"


class Unit(Enum):
    """In what a span is measured, and how far an event is from the beginning of time in it."""

    EVENTS = "events"
    STEPS = "steps"
    NANOSECONDS = "ns"

    def place(self, event: OffloadingEvent) -> int:
        """Where an event is."""
        if self is Unit.EVENTS:
            return event.seq
        return event.step if self is Unit.STEPS else event.wall_ns


class EventSpan(NamedTuple):
    """A distance from one event to another."""

    unit: Unit
    amount: int


class Relation(Enum):
    """On which side of the first event the second one is looked for."""

    FOLLOWED = "followed"
    PRECEDED = "preceded"


Test = Callable[[Any], bool]
"""Whether a value of a field passes."""


class OneEvent(NamedTuple):
    """Events of a kind that pass all tests. A test is a field and what its value must pass."""

    kind: type[OffloadingEvent]
    tests: tuple[tuple[str, Test], ...]


class SomeEvents:
    """Events that are one of several."""

    def __init__(self, options: Sequence[OneEvent]) -> None:
        self.kinds = {one.kind for one in options}
        self._tests: dict[type[OffloadingEvent], list[tuple[tuple[str, Test], ...]]] = {}
        for one in options:
            self._tests.setdefault(one.kind, []).append(one.tests)

    def fit(self, event: OffloadingEvent) -> bool:
        """Whether this event is meant."""
        for tests in self._tests.get(type(event), ()):
            if all(test(getattr(event, field)) for field, test in tests):
                return True
        return False

    def name(self, thing: Thing) -> bool:
        """Whether each of these kinds names things of this sort."""
        return all(_READERS[thing][kind] for kind in self.kinds)


class EventPattern(NamedTuple):
    """What is looked for.

    relation, second: None: single events are looked for.
    negated: the first event counts if there is no second one.
    thing: what both events must have in common; None: nothing.
    span: how far the second may be from the first; None: anywhere in the log.
    """

    first: SomeEvents
    relation: Relation | None = None
    second: SomeEvents | None = None
    negated: bool = False
    thing: Thing | None = None
    span: EventSpan | None = None


_Reader = Callable[[OffloadingEvent], Iterable[Any]]


def _reader_of(field: str) -> _Reader:
    meaning = NAMED_BY_FIELDS[field]
    assert meaning is not None
    return lambda event: meaning[1](getattr(event, field))


def _planned(event: Any) -> Iterable[int]:
    return () if getattr(event, "voided", False) else (event.seq,)


def _readers(thing: Thing) -> dict[type[OffloadingEvent], tuple[_Reader, ...]]:
    """How to read the things of this sort in an event of each kind. `moved` is left out: a slot that only
    changes its place in the eviction order would belong to the eviction of another."""
    found: dict[type[OffloadingEvent], tuple[_Reader, ...]] = {}
    for kind in KINDS:
        fields = [field for field in kind.__struct_fields__[3:] if field != "moved"]
        named = [field for field in fields if (NAMED_BY_FIELDS[field] or ("",))[0] == thing.value]
        plan = (_planned,) if thing is Thing.TRANSFER and Reach.PLAN in REACHES[kind] else ()
        found[kind] = (*plan, *map(_reader_of, named))
    return found


_READERS = {thing: _readers(thing) for thing in Thing}


def things_in(event: OffloadingEvent, thing: Thing) -> list[Any]:
    """The things of this sort that an event names, each once."""
    return [*dict.fromkeys(one for read in _READERS[thing][type(event)] for one in read(event))]


# Fields.


class FieldType(Enum):
    """What can be asked of a field. The value says it in an error."""

    NUMBER = "a number"
    FLAG = "true or false"
    TEXT = "text"
    KEY = "a key, or none"
    IDS = "a list of numbers"
    KEYS = "a list of keys"
    NAMES = "a list of requests"
    OPAQUE = "nothing that can be compared"


FIELD_TYPES: dict[str, FieldType] = {
    **dict.fromkeys(("event", "step", "transfer", "worker", "until", "tick", "epoch"), FieldType.NUMBER),
    **dict.fromkeys(("asked", "on_device", "on_host", "schema", "life"), FieldType.NUMBER),
    **dict.fromkeys(("queued_us", "copied_us"), FieldType.NUMBER),
    **dict.fromkeys(("aborted", "voided", "good", "resumed"), FieldType.FLAG),
    **dict.fromkeys(("request", "reason", "error", "machines", "source", "target"), FieldType.TEXT),
    **dict.fromkeys(("ended", "weights", "hand_over"), FieldType.TEXT),
    "missed": FieldType.KEY,
    **dict.fromkeys(("slots", "moved", "device_blocks", "parts", "transfers"), FieldType.IDS),
    "keys": FieldType.KEYS,
    **dict.fromkeys(("owners", "offers"), FieldType.NAMES),
    **dict.fromkeys(("config", "kept", "parents"), FieldType.OPAQUE),
}
"""The type of each field, whatever the kind of event. `event` is its number."""

_LISTS: dict[FieldType, Callable[[Any], list[Any]]] = {
    FieldType.IDS: to_list,
    FieldType.KEYS: list,
    FieldType.NAMES: lambda owners: [one[0] for one in owners],
}
_COMPARED = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_EQUAL = ("=", "!=")
_ALLOWED: dict[FieldType, tuple[str, ...]] = {
    FieldType.NUMBER: tuple(_COMPARED),
    FieldType.FLAG: _EQUAL,
    FieldType.TEXT: (*_EQUAL, "contains"),
    FieldType.KEY: _EQUAL,
    **dict.fromkeys(_LISTS, ("contains",)),
    FieldType.OPAQUE: (),
}


def _compared(compare: Callable[[Any, Any], bool], wanted: int) -> Test:
    """A number that the log does not tell passes no comparison."""
    return lambda value: value is not None and compare(value, wanted)


def _key_test(value: str, equal: bool) -> Test:
    fits = key_pattern(value).fits
    return lambda key: (key is not None and fits(key)) is equal


def _contains(type_of: FieldType, wanted: Any) -> Test:
    read = _LISTS[type_of]
    return lambda listed: wanted in read(listed)


def _contains_key(value: str) -> Test:
    fits = key_pattern(value).fits
    return lambda keys: any(map(fits, keys))


# The parser.

_TOKEN = re.compile(r'\s*(?:"((?:[^"\\]|\\.)*)"|(!=|<=|>=|[=<>(),#|])|([^\s()=<>!,#"|]+))')
_THINGS = {thing.name.lower(): thing for thing in Thing}
_UNITS = {
    "events": (Unit.EVENTS, 1),
    "steps": (Unit.STEPS, 1),
    "ms": (Unit.NANOSECONDS, 10**6),
    "s": (Unit.NANOSECONDS, 10**9),
    "min": (Unit.NANOSECONDS, 60 * 10**9),
}
_KIND_NAMES = {kind.__name__: kind for kind in KINDS}


class _Token(NamedTuple):
    text: str
    column: int
    width: int
    quoted: bool = False


def parse(text: str) -> EventPattern:
    """The pattern that a text means. Raises `PatternError` if it means none."""
    return _Parser(" ".join(text.splitlines())).pattern()


class _Parser:
    """Reads a text from left to right, one token ahead."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = self._split()
        self._at = 0

    def _split(self) -> list[_Token]:
        tokens, at, end = [], 0, len(self._text.rstrip())
        while at < end:
            found = _TOKEN.match(self._text, at)
            if found is None:
                begin = at + len(self._text[at:]) - len(self._text[at:].lstrip())
                if self._text[begin] == '"':
                    raise PatternError(self._text, begin, end - begin, "this quote is not closed")
                raise PatternError(self._text, begin, 1, "this is no part of a query")
            group = found.lastindex or 0
            begin, at = found.start(group), found.end()
            value = found[group]
            if group == 1:
                tokens.append(_Token(re.sub(r"\\(.)", r"\1", value), begin - 1, at - begin + 1, True))
            else:
                tokens.append(_Token(value, begin, at - begin))
        return tokens

    def _next(self) -> _Token:
        """The next token; an empty one at the end."""
        if self._at < len(self._tokens):
            return self._tokens[self._at]
        return _Token("", len(self._text.rstrip()), 1)

    def _take(self) -> _Token:
        token = self._next()
        self._at += 1
        return token

    def _takes(self, *words: str) -> bool:
        """Whether these words come next. Then they are taken."""
        ahead = self._tokens[self._at : self._at + len(words)]
        if [(one.text, one.quoted) for one in ahead] != [(word, False) for word in words]:
            return False
        self._at += len(words)
        return True

    def _wrong(self, token: _Token, reason: str, known: Iterable[str] = ()) -> PatternError:
        """What to raise. known: the words that could stand there."""
        near = get_close_matches(token.text, list(known), n=2, cutoff=0.6)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        return PatternError(self._text, token.column, max(1, token.width), reason + hint)

    def _expected(self, what: str, known: Iterable[str] = ()) -> PatternError:
        token = self._next()
        found = f"{token.text!r} stands" if token.text or token.quoted else "the query ends"
        return self._wrong(token, f"expected {what}, and {found} here", known)

    def pattern(self) -> EventPattern:
        first = self._events()
        if not self._next().text:
            return EventPattern(first)
        negated = self._takes("not")
        relation = next((one for one in Relation if self._takes(one.value, "by")), None)
        if relation is None:
            words = ("followed by", "preceded by")
            before = "" if negated else "'not', "
            raise self._expected(f"{before}'followed by' or 'preceded by'", (*words, "followed", "preceded"))
        second = self._events()
        thing = self._thing(first, second)
        span = self._span()
        if self._next().text or self._next().quoted:
            raise self._expected("'within' or the end of the query", ("within", "same"))
        return EventPattern(first, relation, second, negated, thing, span)

    def _events(self) -> SomeEvents:
        options = self._event()
        while self._takes("|"):
            options += self._event()
        return SomeEvents(options)

    def _event(self) -> list[OneEvent]:
        token = self._next()
        if not re.fullmatch(r"\w+", token.text) or token.quoted:
            raise self._expected("a kind of event, like StorePlanned")
        self._at += 1
        if token.text == "any":
            kinds = list(KINDS)
        elif token.text in _KIND_NAMES:
            kinds = [_KIND_NAMES[token.text]]
        else:
            lower = {name.lower(): name for name in _KIND_NAMES}
            known = [lower[token.text.lower()]] if token.text.lower() in lower else _KIND_NAMES
            near = known if isinstance(known, list) else get_close_matches(token.text, known, n=2)
            hint = f"; did you mean {' or '.join(near)}?" if near else "; `kvsm find --help` lists the kinds"
            raise self._wrong(token, f"no kind of event is named {token.text}{hint}")
        tests: list[tuple[str, Test]] = []
        if self._takes("("):
            tests.append(self._test(kinds))
            while self._takes(","):
                tests.append(self._test(kinds))
            if not self._takes(")"):
                raise self._expected("',' or ')'")
        return [OneEvent(kind, tuple(tests)) for kind in kinds]

    def _test(self, kinds: Sequence[type[OffloadingEvent]]) -> tuple[str, Test]:
        counted = self._takes("#")
        field = self._field(kinds)
        type_of = FIELD_TYPES[field.text]
        if counted and type_of not in _LISTS:
            raise self._wrong(field, f"{field.text} is {type_of.value}, and # counts a list")
        allowed = tuple(_COMPARED) if counted else _ALLOWED[type_of]
        sign = self._next()
        if sign.text not in allowed or sign.quoted:
            if not allowed:
                raise self._wrong(field, f"{field.text} is {type_of.value}")
            raise self._expected(f"{' '.join(allowed)} ({field.text} is {type_of.value})", allowed)
        self._at += 1
        name = "seq" if field.text == "event" else field.text
        if counted:
            read, test = _LISTS[type_of], _compared(_COMPARED[sign.text], self._number())
            return name, lambda value: test(len(read(value)))
        return name, self._value_test(kinds, field.text, type_of, sign.text)

    def _field(self, kinds: Sequence[type[OffloadingEvent]]) -> _Token:
        fields = [set(kind.__struct_fields__[3:]) | {"event", "step"} for kind in kinds]
        common = sorted(set.intersection(*fields))
        token = self._next()
        if token.text not in common or token.quoted:
            what = kinds[0].__name__ if len(kinds) == 1 else "every kind"
            raise self._expected(f"a field of {what} ({', '.join(common)})", common)
        return self._take()

    def _value_test(
        self, kinds: Sequence[type[OffloadingEvent]], field: str, type_of: FieldType, sign: str
    ) -> Test:
        token = self._next()
        if not (token.text or token.quoted) or (token.text in ("(", ")", ",", "|") and not token.quoted):
            raise self._expected(f"a value ({field} is {type_of.value})")
        is_none = token.text == "none" and not token.quoted
        if is_none and sign in _EQUAL and type_of in (FieldType.NUMBER, FieldType.KEY):
            self._at += 1
            return lambda value: (value is None) is (sign == "=")
        if type_of is FieldType.NUMBER:
            return _compared(_COMPARED[sign], self._number())
        if type_of is FieldType.IDS:
            return _contains(type_of, self._number())
        self._at += 1
        if type_of is FieldType.FLAG:
            if token.text not in ("true", "false"):
                raise self._wrong(token, f"{field} is true or false", ("true", "false"))
            wanted = (token.text == "true") is (sign == "=")
            return lambda value: value is wanted
        if type_of in (FieldType.KEY, FieldType.KEYS):
            try:
                return _key_test(token.text, sign == "=") if sign in _EQUAL else _contains_key(token.text)
            except ConfigError as error:
                raise self._wrong(token, str(error)) from None
        if type_of is FieldType.NAMES:
            return _contains(type_of, token.text)
        return self._text_test(kinds, field, sign, token)

    def _text_test(
        self, kinds: Sequence[type[OffloadingEvent]], field: str, sign: str, token: _Token
    ) -> Test:
        text = token.text
        if field == "reason" and sign in _EQUAL:
            reasons = [str(one) for kind in kinds for one in get_type_hints(kind)["reason"]]
            if text not in reasons:
                known = ", ".join(f'"{one}"' for one in reasons)
                raise self._wrong(token, f"{text!r} is no reason; the reasons are {known}", reasons)
        if sign == "contains":
            return lambda value: text in str(value)
        return lambda value: (str(value) == text) is (sign == "=")

    def _number(self) -> int:
        token = self._next()
        if not re.fullmatch(r"[0-9]{1,18}", token.text) or token.quoted:
            raise self._expected("a whole number")
        self._at += 1
        return int(token.text)

    def _thing(self, first: SomeEvents, second: SomeEvents) -> Thing | None:
        """What both must have in common: as the query says, or the first thing that both sides name."""
        if not self._takes("same"):
            return next((one for one in Thing if first.name(one) and second.name(one)), None)
        token = self._next()
        if token.text == "nothing" and not token.quoted:
            self._at += 1
            return None
        if token.text not in _THINGS or token.quoted:
            words = (*_THINGS, "nothing")
            raise self._expected(f"what they have in common ({', '.join(words)})", words)
        thing = _THINGS[token.text]
        for side in (first, second):
            if not side.name(thing):
                lacking = sorted(kind.__name__ for kind in side.kinds if not _READERS[thing][kind])
                raise self._wrong(token, f"{', '.join(lacking[:3])} names no {token.text}")
        self._at += 1
        return thing

    def _span(self) -> EventSpan | None:
        if not self._takes("within"):
            return None
        token = self._next()
        joined = re.fullmatch(r"([0-9]{1,18})([a-z]+)", token.text)
        if joined and not token.quoted and joined[2] in _UNITS:
            self._at += 1
            number, word = int(joined[1]), joined[2]
        else:
            number, word = self._number(), self._next().text
            if word not in _UNITS:
                raise self._expected(f"a unit ({', '.join(_UNITS)})", _UNITS)
            self._at += 1
        unit, each = _UNITS[word]
        return EventSpan(unit, number * each)
