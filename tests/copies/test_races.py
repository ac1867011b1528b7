"""The race detector, compared with its definition, and what it says."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from kvsm.copies.races import Actor, ClockedOperation, RaceDetector

ACTORS, PLACES = 3, 2


class Access(NamedTuple):
    place: int
    writes: bool


class Queued(NamedTuple):
    """An operation of `actor`, queued after it learned of operation `learns_of` (if there is one)."""

    actor: int
    learns_of: int
    accesses: list[Access]
    is_batch: bool


accesses = st.lists(st.builds(Access, st.integers(0, PLACES - 1), st.booleans()), max_size=3)
programs = st.lists(
    st.builds(Queued, st.integers(0, ACTORS - 1), st.integers(-1, 8), accesses, st.booleans()), max_size=9
)


def orders(program: list[Queued]) -> list[set[int]]:
    """The definition: for each operation the operations that are over when it begins."""
    before: list[set[int]] = []
    for number, one in enumerate(program):
        direct = [other for other in range(number) if program[other].actor == one.actor]
        # To learn is for good: what an actor once learned orders all that it queues later.
        direct += [
            program[other].learns_of for other in [*direct, number] if 0 <= program[other].learns_of < other
        ]
        before.append({earlier for other in direct for earlier in (other, *before[other])})
    return before


def racing_places(program: list[Queued]) -> set[int]:
    """The definition: places with two accesses, one of them a write, of unordered operations or one batch."""
    before = orders(program)
    told = [
        (number, access, part)
        for number, one in enumerate(program)
        for part, access in enumerate(one.accesses)
    ]
    return {
        access.place
        for number, access, part in told
        for other, its_access, its_part in told
        if access.place == its_access.place and (access.writes or its_access.writes)
        if (number, part) != (other, its_part)
        if (program[number].is_batch if number == other else number not in before[other])
        if number == other or other not in before[number]
    }


@settings(max_examples=examples(400))
@given(program=programs, data=st.data())
def test_a_place_has_a_race_if_and_only_if_two_of_its_accesses_are_unordered(
    program: list[Queued], data: st.DataObject
) -> None:
    """Order of copies (S12): the accesses may be told in any order that the operations allow."""
    detector = RaceDetector()
    actors = [detector.new_actor(str(number)) for number in range(ACTORS)]
    clocks, operations = [], []
    for number, one in enumerate(program):
        if 0 <= one.learns_of < number:
            actors[one.actor].learn(clocks[one.learns_of])
        operations.append(ClockedOperation(actors[one.actor], f"operation {number}", one.is_batch))
        clocks.append(actors[one.actor].clock.copy())

    before, left = orders(program), set(range(len(program)))
    while left:
        number = data.draw(st.sampled_from(sorted(one for one in left if not before[one] & left)))
        left.discard(number)
        for place, writes in program[number].accesses:
            (detector.writes if writes else detector.reads)(operations[number], ("place", place))
    assert {race.location[1] for race in detector.races} == racing_places(program)


def two_actors() -> tuple[RaceDetector, Actor, Actor]:
    detector = RaceDetector()
    return detector, detector.new_actor("one"), detector.new_actor("other")


@pytest.mark.parametrize(
    ("first", "second"), [("writes", "reads"), ("reads", "writes"), ("writes", "writes")]
)
def test_a_race_names_both_operations_and_the_place(first: str, second: str) -> None:
    detector, one, other = two_actors()
    getattr(detector, first)(ClockedOperation(one, "kernel 'step 12'"), ("device block", 3))
    getattr(detector, second)(ClockedOperation(other, "copy 7"), ("device block", 3))
    assert [str(race) for race in detector.races] == [
        f"device block 3: kernel 'step 12' {first} it and copy 7 {second} it, and nothing orders the two"
    ]


def test_reads_do_not_race() -> None:
    detector, one, other = two_actors()
    for actor in (one, other, one):
        detector.reads(ClockedOperation(actor, "a read"), ("device block", 3))
    assert detector.races == []


def test_what_came_after_the_event_is_not_ordered_by_it() -> None:
    """A clock holds for its moment: what an actor does later is not known to actors that learned of it
    before."""
    detector, one, other = two_actors()
    detector.writes(ClockedOperation(one, "before"), ("device block", 1))
    other.learn(one.clock.copy())
    detector.writes(ClockedOperation(one, "after"), ("device block", 2))
    reads = ClockedOperation(other, "a read")
    detector.reads(reads, ("device block", 1))
    assert detector.races == []
    detector.reads(reads, ("device block", 2))
    assert [race.first for race in detector.races] == ["after writes"]


def test_a_place_that_is_forgotten_starts_anew() -> None:
    """Memory that was given back and belongs to somebody else now."""
    detector, one, other = two_actors()
    detector.writes(ClockedOperation(one, "the former owner"), ("id table", 1))
    detector.forget(("id table", 1))
    detector.writes(ClockedOperation(other, "the next"), ("id table", 1))
    assert detector.races == []
