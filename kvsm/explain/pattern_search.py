"""Looking for a pattern of events (`patterns.py`) in a stream, with bounded memory.

`A followed by B`: from each A on, the next B that names the same thing, before the first event that is
farther away than the span. `A preceded by B`: the same from each B on; only the last B before an A counts.
With `not`, an A counts if there is no such B. An event that names several things is looked at for each of
them. An event that names no such thing is left out.

Memory holds the events whose span is not over, and at most `MOST_HELD` of them.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from kvsm.errors import ConfigError
from kvsm.events import OffloadingEvent
from kvsm.explain.patterns import EventPattern, Relation, things_in

MOST_HELD = 200_000
"""Things whose span may be open at once."""


class Found(NamedTuple):
    """An event that fits.

    second: the event that follows or precedes it; None if single events are looked for, or with `not`.
    things: what they have in common; what is missing, with `not`. Empty if nothing is compared.
    cut: with `not`: the log begins or ends inside of the span, so nobody knows what was there.
    """

    first: OffloadingEvent
    second: OffloadingEvent | None
    things: tuple[Any, ...]
    cut: bool


class _Held:
    """An event whose span is open, for some of its things."""

    __slots__ = ("event", "things")

    def __init__(self, event: OffloadingEvent, things: dict[Any, None]) -> None:
        self.event, self.things = event, things


class _OpenSpans:
    """The events whose span is open, by thing."""

    def __init__(self, pattern: EventPattern) -> None:
        self._thing, self._span = pattern.thing, pattern.span
        self._by_thing: dict[Any, dict[int, _Held]] = {}
        """thing -> number of an event -> the event."""
        self._deadlines: list[tuple[int, int, _Held]] = []
        self._held = 0

    def things_in(self, event: OffloadingEvent) -> list[Any]:
        """The things by which this event is found."""
        return [None] if self._thing is None else things_in(event, self._thing)

    def add(self, event: OffloadingEvent, things: list[Any]) -> None:
        """The span of this event begins. Raises `ConfigError` if too many are open."""
        held = _Held(event, dict.fromkeys(things))
        for one in things:
            self._by_thing.setdefault(one, {})[event.seq] = held
        self._held += len(things)
        if self._held > MOST_HELD:
            raise ConfigError(
                f"at event {event.seq} more than {MOST_HELD:,} events wait for their second one; "
                "end the query with a smaller span, like 'within 1000 events'"
            )
        if self._span is not None and things:
            deadline = self._span.unit.place(event) + self._span.amount
            heapq.heappush(self._deadlines, (deadline, event.seq, held))
            if len(self._deadlines) > 2 * self._held + 1000:
                self._deadlines = [one for one in self._deadlines if one[2].things]
                heapq.heapify(self._deadlines)

    def expire(self, event: OffloadingEvent) -> Iterator[_Held]:
        """End the spans that this event is behind, and return those that had things left."""
        if self._span is None:
            return
        now = self._span.unit.place(event)
        while self._deadlines and self._deadlines[0][0] < now:
            held = heapq.heappop(self._deadlines)[2]
            if held.things:
                for one in held.things:
                    self._drop(one, held)
                yield held

    def take(self, things: Iterable[Any]) -> dict[int, tuple[_Held, list[Any]]]:
        """Close the spans of these things. Returns what was open, by the number of its event."""
        taken: dict[int, tuple[_Held, list[Any]]] = {}
        for one in things:
            for held in self._by_thing.pop(one, {}).values():
                del held.things[one]
                self._held -= 1
                taken.setdefault(held.event.seq, (held, []))[1].append(one)
        return taken

    def last(self, thing: Any) -> OffloadingEvent | None:
        """The last event whose span is open for this thing."""
        held = self._by_thing.get(thing)
        return next(reversed(held.values())).event if held else None

    def left(self) -> list[_Held]:
        """What is still open, in the order of the events."""
        unique = {seq: one for held in self._by_thing.values() for seq, one in held.items()}
        return [unique[seq] for seq in sorted(unique)]

    def _drop(self, thing: Any, held: _Held) -> None:
        left = self._by_thing[thing]
        del left[held.event.seq]
        self._held -= 1
        if not left:
            del self._by_thing[thing]


def search(pattern: EventPattern, events: Iterable[OffloadingEvent], whole: bool = True) -> Iterator[Found]:
    """The events that fit, in the order in which they are known.

    events: consecutive ones of a log, oldest first.
    whole: whether the log has none before them.

    Raises `ConfigError` if more than `MOST_HELD` events wait for their second one.
    """
    if pattern.relation is None:
        yield from (Found(event, None, (), False) for event in events if pattern.first.fit(event))
    elif pattern.relation is Relation.FOLLOWED:
        yield from _followed(pattern, events)
    else:
        yield from _preceded(pattern, events, whole)


def _followed(pattern: EventPattern, events: Iterable[OffloadingEvent]) -> Iterator[Found]:
    spans, second = _OpenSpans(pattern), pattern.second
    assert second is not None
    for event in events:
        for held in spans.expire(event):
            if pattern.negated:
                yield Found(held.event, None, _named(held.things), False)
        if second.fit(event):
            for held, things in spans.take(spans.things_in(event)).values():
                if not pattern.negated:
                    yield Found(held.event, event, _named(things), False)
        if pattern.first.fit(event):
            spans.add(event, spans.things_in(event))
    if pattern.negated:
        yield from (Found(held.event, None, _named(held.things), True) for held in spans.left())


def _preceded(pattern: EventPattern, events: Iterable[OffloadingEvent], whole: bool) -> Iterator[Found]:
    spans, second = _OpenSpans(pattern), pattern.second
    assert second is not None
    begin: OffloadingEvent | None = None
    for event in events:
        begin = begin or event
        for _ in spans.expire(event):
            pass
        if pattern.first.fit(event):
            things = spans.things_in(event)
            before: dict[int, tuple[OffloadingEvent, list[Any]]] = {}
            missing = []
            for one in things:
                last = spans.last(one)
                if last is None:
                    missing.append(one)
                else:
                    before.setdefault(last.seq, (last, []))[1].append(one)
            if not pattern.negated:
                yield from (Found(event, last, _named(shared), False) for last, shared in before.values())
            elif missing:
                yield Found(event, None, _named(missing), not whole and _reaches(pattern, begin, event))
        if second.fit(event):
            things = spans.things_in(event)
            spans.take(things)  # Only the last one before an event counts.
            spans.add(event, things)


def _reaches(pattern: EventPattern, begin: OffloadingEvent, event: OffloadingEvent) -> bool:
    """Whether the span before `event` reaches to before the first event that was seen."""
    span = pattern.span
    return span is None or span.unit.place(event) - span.amount < span.unit.place(begin)


def _named(things: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(one for one in things if one is not None)
