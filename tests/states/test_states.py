"""The four machines: the tables mean what the design says, and every way to run them agrees."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from enum import IntEnum
from hashlib import blake2b
from itertools import chain, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_models import reference_model

from examples import examples
from kvsm.errors import ConfigError, IllegalTransition
from kvsm.ids import SMALL
from kvsm.states import (
    BLOCK,
    LEASE,
    MACHINES,
    REQUEST,
    TRANSFER,
    BlockState,
    BlockTrigger,
    LeaseState,
    LeaseTrigger,
    RequestState,
    RequestTrigger,
    TransferState,
    TransferTrigger,
    machines_digest,
)
from kvsm.states.block import are_indexed, are_readable
from kvsm.states.machine import Counter, Machine, Row, UndefinedStep
from kvsm.states.words import STATE_BITS, Codec, StateWords, pick

CODECS = {name: Codec(machine) for name, machine in MACHINES.items()}
REFERENCES = {name: reference_model(machine) for name, machine in MACHINES.items()}
EVERY_MACHINE = pytest.mark.parametrize("machine", MACHINES.values(), ids=list(MACHINES))

Place = tuple[int, tuple[int, ...]]
"""A state and its counts."""


class Light(IntEnum):
    OFF = 0
    ON = 1


class Switch(IntEnum):
    PRESS = 0
    BREAK = 1


def a_light(*rows: Row, bits: int = 3) -> Machine:
    return Machine("light", Light, Switch, (Counter("presses", bits),), rows)


def counts_of_note(limit: int) -> list[int]:
    """The edges of guards and limits, and the values beside them."""
    return sorted({0, 1, 2, 3, limit - 1, limit} & set(range(limit + 1)))


def places(machine: Machine) -> Iterator[Place]:
    """Every state with every combination of these counts, reachable or not."""
    ranges = [counts_of_note(counter.limit) for counter in machine.counters]
    for state in machine.states:
        for counts in product(*ranges):
            yield state, counts


def after(machine: Machine, place: Place, trigger: int) -> Place | None:
    """The next place; None if the table has no row."""
    try:
        return machine.step(*place, trigger)
    except UndefinedStep:
        return None


def after_in_reference(machine: Machine, place: Place, trigger: IntEnum) -> Place | None:
    model = REFERENCES[machine.name]
    model.state = machine.states(place[0])
    for counter, count in zip(machine.counters, place[1], strict=True):
        setattr(model, counter.name, count)
    try:
        model.step(trigger)
    except UndefinedStep:
        assert (model.state, model.counts) == place, "a refused step changed the model"
        return None
    return model.state, model.counts


def reachable(machine: Machine, start: Place, most: int) -> set[Place]:
    """Every place that triggers reach from `start` while no counter exceeds `most`."""
    found, front = {start}, [start]
    while front:
        place = front.pop()
        for trigger in machine.triggers:
            then = after(machine, place, trigger)
            if then is not None and then not in found and max(then[1], default=0) <= most:
                found.add(then)
                front.append(then)
    return found


def words_in(machine: Machine, held: list[Place]) -> StateWords:
    codec = CODECS[machine.name]
    words = StateWords(codec, len(held))
    words.words[:] = type(words.words)("i", [codec.encode(*place) for place in held])
    return words


PLACES = {name: list(places(machine)) for name, machine in MACHINES.items()}
LEGAL = {
    (name, trigger): [place for place in PLACES[name] if after(machine, place, trigger) is not None]
    for name, machine in MACHINES.items()
    for trigger in machine.triggers
}
machine_names = st.sampled_from(sorted(MACHINES))


@st.composite
def batches(draw: st.DrawFn) -> tuple[Machine, list[Place], list[int], IntEnum]:
    """A machine, some things in places (often all equal), distinct ids of them, and a trigger.

    Sizes lie around the border between a tuple of ids and an array of them.
    """
    machine = MACHINES[draw(machine_names)]
    trigger = draw(st.sampled_from(list(machine.triggers)))
    kinds = draw(st.lists(st.sampled_from(LEGAL[machine.name, trigger]), min_size=1, max_size=4))
    if draw(st.booleans()):
        kinds.append(draw(st.sampled_from(PLACES[machine.name])))
    size = draw(st.sampled_from([1, 2, SMALL - 1, SMALL, SMALL + 1, 2 * SMALL, 100]))
    held = [kinds[number % len(kinds)] for number in range(size)]
    ids = list(range(size))
    draw(st.randoms(use_true_random=False)).shuffle(ids)
    ids = ids[: draw(st.integers(1, size))]
    return machine, held, ids, trigger


def run_five_ways(machine: Machine, start: int, choices: list[int]) -> None:
    """Drive one run through every implementation, and compare them at every step."""
    codec, triggers = CODECS[machine.name], list(machine.triggers)
    model = reference_model(machine, **({"pending": start} if machine is TRANSFER else {}))
    place: Place = (machine.initial, model.counts)
    words = words_in(machine, [place] * (SMALL + 4))
    forms = ((0,), np.arange(1, SMALL + 4, dtype=np.int64))
    for seq, choice in enumerate(choices, start=1):
        trigger = triggers[choice % len(triggers)]
        expected = after(machine, place, trigger)
        if expected is None:
            with pytest.raises(UndefinedStep):
                model.step(trigger)
            with pytest.raises(IllegalTransition):
                codec.step(codec.encode(*place), trigger, 0, seq)
            for ids in forms:
                with pytest.raises(IllegalTransition):
                    words.check(ids, trigger, seq)
        else:
            model.step(trigger)
            assert codec.decode(codec.step(codec.encode(*place), trigger, 0, seq)) == expected
            for ids in forms:
                words.commit(ids, words.check(ids, trigger, seq))
            place = expected
        assert (model.state, model.counts) == place
        assert [codec.decode(word) for word in words.words] == [place] * words.size


class TestReference:
    """The tables as `transitions` runs them, compared with how kvsm runs them."""

    @EVERY_MACHINE
    def test_agrees_in_every_place(self, machine: Machine) -> None:
        """At the edges of every guard and every limit, for all triggers, both give the same answer."""
        compared = 0
        for place in places(machine):
            for trigger in machine.triggers:
                assert after(machine, place, trigger) == after_in_reference(machine, place, trigger), (
                    f"{machine.name}: {trigger.name} in {machine.states(place[0]).name}{place[1]}"
                )
                compared += 1
        assert compared >= len(machine.states) * len(machine.triggers)

    @given(name=machine_names, start=st.integers(0, 5), choices=st.lists(st.integers(0, 99), max_size=40))
    def test_agrees_along_random_runs(self, name: str, start: int, choices: list[int]) -> None:
        """One run, five ways: the reference, the table, the codec, and words alone and in a batch."""
        run_five_ways(MACHINES[name], start, choices)

    @pytest.mark.slow
    @given(name=machine_names, start=st.integers(0, 5), choices=st.lists(st.integers(0, 99), max_size=200))
    @settings(max_examples=1_500, deadline=None)
    def test_agrees_along_many_random_runs(self, name: str, start: int, choices: list[int]) -> None:
        run_five_ways(MACHINES[name], start, choices)

    @EVERY_MACHINE
    def test_begins_where_the_machine_begins_with_every_count_at_zero(self, machine: Machine) -> None:
        model = reference_model(machine)
        assert (model.state, model.counts) == (machine.initial, (0,) * len(machine.counters))

    def test_refuses_an_unknown_counter(self) -> None:
        with pytest.raises(TypeError, match="block has no counter copeis"):
            reference_model(BLOCK, copeis=1)

    def test_is_not_loaded_by_the_rest(self) -> None:
        """`transitions` is for checking: a replay and an engine do not import it."""
        code = "import sys, kvsm.states, kvsm.events; sys.exit('transitions' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class TestDeclaration:
    """A table that is ambiguous, or names what does not exist, is refused when it is declared."""

    def test_refuses_two_rows_for_one_step(self) -> None:
        with pytest.raises(ConfigError, match="machine light: two rows match OFF on PRESS"):
            a_light(
                Row((Light.OFF,), Switch.PRESS, Light.ON, "on", {"presses": (0, 3)}),
                Row((Light.ON, Light.OFF), Switch.PRESS, Light.OFF, "off", {"presses": (3, 7)}),
            )

    @pytest.mark.parametrize("ranges", [((0, 3), (5, 7)), ((5, 7), (0, 3))])
    def test_takes_two_rows_that_are_apart_in_either_order(
        self, ranges: tuple[tuple[int, int], tuple[int, int]]
    ) -> None:
        first, second = ranges
        machine = a_light(
            Row((Light.OFF,), Switch.PRESS, Light.ON, "on", {"presses": first}),
            Row((Light.OFF,), Switch.PRESS, Light.OFF, "off", {"presses": second}),
        )
        assert machine.step(Light.OFF, (second[0],), Switch.PRESS)[0] == Light.OFF
        with pytest.raises(UndefinedStep):
            machine.step(Light.OFF, (4,), Switch.PRESS)

    def test_sees_an_overlap_that_is_all_in_the_second_row(self) -> None:
        with pytest.raises(ConfigError, match="two rows match"):
            a_light(
                Row((Light.OFF,), Switch.PRESS, Light.ON, "on", {"presses": (0, 7)}),
                Row((Light.OFF,), Switch.PRESS, Light.OFF, "off", {"presses": (2, 3)}),
            )

    @pytest.mark.parametrize(("states", "fits"), [(16, True), (17, False)])
    def test_refuses_more_states_than_a_word_can_tell(self, states: int, fits: bool) -> None:
        many = IntEnum("many", [f"S{number}" for number in range(states)], start=0)  # type: ignore[misc]
        machine = Machine("many", many, Switch, (), ())
        if fits:
            assert Codec(machine).decode(states - 1) == (states - 1, ())
        else:
            with pytest.raises(ValueError, match="many does not fit"):
                Codec(machine)

    def test_sees_an_overlap_that_only_effects_leave_out(self) -> None:
        """Two rows whose guards overlap are apart if their effects never fit at the same time."""
        machine = a_light(
            Row((Light.OFF,), Switch.PRESS, Light.ON, "room for one more", then={"presses": 1}),
            Row((Light.OFF,), Switch.PRESS, Light.OFF, "full", {"presses": (7, 7)}),
        )
        assert machine.step(Light.OFF, (6,), Switch.PRESS) == (Light.ON, (7,))
        assert machine.step(Light.OFF, (7,), Switch.PRESS) == (Light.OFF, (7,))

    @pytest.mark.parametrize("field", ["when", "then"])
    def test_refuses_an_unknown_counter(self, field: str) -> None:
        unknown = {"when": {"pushes": (0, 1)}} if field == "when" else {"then": {"pushes": 1}}
        with pytest.raises(ConfigError, match=r"machine light: .*unknown counter"):
            a_light(Row((Light.OFF,), Switch.PRESS, Light.ON, "on", **unknown))

    def test_refuses_an_unknown_effect(self) -> None:
        with pytest.raises(ConfigError, match=r"machine light: .*effect"):
            a_light(Row((Light.OFF,), Switch.PRESS, Light.ON, "on", then={"presses": "double"}))

    def test_refuses_counters_wider_than_a_word(self) -> None:
        with pytest.raises(ValueError, match="light does not fit in 31 bits"):
            Codec(a_light(bits=28))

    def test_the_digest_knows_every_row(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The digest changes if any row of any machine is left out or altered."""
        seen = {machines_digest()}
        changed = 0
        for machine in MACHINES.values():
            for index, row in enumerate(machine.rows):
                before, behind = machine.rows[:index], machine.rows[index + 1 :]
                elsewhere = next(state for state in machine.states if state != row.target)
                other = Row(row.sources, row.trigger, elsewhere, row.why, row.when, row.then)
                variants = [(*before, *behind)]
                if row.target is not None:
                    variants.append((*before, other, *behind))
                for rows in variants:
                    variant = Machine(machine.name, machine.states, machine.triggers, machine.counters, rows)
                    monkeypatch.setitem(MACHINES, machine.name, variant)
                    seen.add(machines_digest())
                    changed += 1
                monkeypatch.setitem(MACHINES, machine.name, machine)
        assert len(seen) == changed + 1

    def test_the_digest_is_made_of_this_text(self) -> None:
        """States, counters and arcs, one a line: another version must write the same for equal tables."""
        rows = (
            Row((Light.OFF,), Switch.PRESS, Light.ON, "pressed", then={"presses": 1}),
            Row((Light.ON,), Switch.BREAK, None, "broken", {"presses": (2, 5)}, {"presses": "void"}),
        )
        assert a_light(*rows).signature().split("\n") == [
            "machine light",
            "state 0 OFF",
            "state 1 ON",
            "counter presses 3",
            "PRESS OFF 1 ((0, 6),) (1,)",
            "BREAK ON 1 ((2, 5),) (None,)",
        ]
        text = "\n".join(machine.signature() for machine in MACHINES.values())
        assert machines_digest() == blake2b(text.encode(), digest_size=8).hexdigest()

    def test_the_digest_of_these_tables_is_known(self) -> None:
        """Logs name their tables by it. To change a row is to change what old logs mean, and this test."""
        assert machines_digest() == "d04801b8cc0cef81"

    def test_the_digest_ignores_reasons(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Other words for a reason are not another machine: old logs can still be read."""
        digest = machines_digest()
        rows = tuple(Row(row.sources, row.trigger, row.target, "", row.when, row.then) for row in LEASE.rows)
        reworded = Machine("lease", LEASE.states, LEASE.triggers, LEASE.counters, rows)
        monkeypatch.setitem(MACHINES, "lease", reworded)
        assert machines_digest() == digest


class TestStep:
    """What holds for every step of every machine."""

    @EVERY_MACHINE
    @pytest.mark.parametrize("more", [-1, 1])
    def test_a_step_of_too_few_or_too_many_counts_is_refused(self, machine: Machine, more: int) -> None:
        """Nobody reads a count that stands for another counter."""
        state, counts = machine.initial, (0,) * (len(machine.counters) + more)
        trigger = next(one for one in machine.triggers if machine.dense[one][state])
        with pytest.raises(ValueError, match="zip"):
            machine.step(state, counts, trigger)

    @EVERY_MACHINE
    def test_counters_stay_in_range(self, machine: Machine) -> None:
        """One release per hold (S4).

        From any place, limits included, no step leaves a counter negative or over its limit.
        """
        for place in places(machine):
            for trigger in machine.triggers:
                then = after(machine, place, trigger)
                if then is not None:
                    assert all(
                        0 <= count <= counter.limit
                        for count, counter in zip(then[1], machine.counters, strict=True)
                    ), f"{trigger.name} from {place} leads to {then}"

    @EVERY_MACHINE
    def test_no_guard_admits_what_no_counter_can_hold(self, machine: Machine) -> None:
        """A table must not say more than a word can hold: the hot path would say something else."""
        for arc in chain.from_iterable(chain.from_iterable(machine.dense)):
            for (_, most), counter in zip(arc.ranges, machine.counters, strict=True):
                assert most <= counter.limit, f"row {arc.row}: {counter.name}"

    @pytest.mark.parametrize(
        ("machine", "state", "counts", "trigger"),
        [
            (BLOCK, BlockState.STORED, (0, BLOCK.counters[1].limit), BlockTrigger.PIN),
            (BLOCK, BlockState.LOADING, (BLOCK.counters[0].limit, 1), BlockTrigger.BEGIN_LOAD),
            (BLOCK, BlockState.STORED, (0, 0), BlockTrigger.UNPIN),
            (BLOCK, BlockState.STORED, (0, 0), BlockTrigger.BEGIN_LOAD),
            (LEASE, LeaseState.READING, (LEASE.counters[0].limit,), LeaseTrigger.BEGIN_READ),
            (REQUEST, RequestState.MATCHED, (REQUEST.counters[0].limit,), RequestTrigger.BEGIN_LOAD),
            (REQUEST, RequestState.RUNNING, (0,), RequestTrigger.END_LOAD),
            (TRANSFER, TransferState.SUBMITTED, (0, 0), TransferTrigger.REPORT_GOOD),
        ],
        ids=lambda value: value.name if isinstance(value, (Machine, IntEnum)) else str(value),
    )
    def test_a_limit_refuses(
        self, machine: Machine, state: IntEnum, counts: tuple[int, ...], trigger: IntEnum
    ) -> None:
        """A step beyond a counter's limits is refused by name."""
        codec = CODECS[machine.name]
        with pytest.raises(IllegalTransition) as refused:
            codec.step(codec.encode(state, counts), trigger, 7, 3)
        assert refused.value.state == codec.describe(codec.encode(state, counts))

    @EVERY_MACHINE
    def test_what_the_table_does_not_say_is_illegal(self, machine: Machine) -> None:
        said = {(source, row.trigger) for row in machine.rows for source in row.sources}
        unsaid = set(product(machine.states, machine.triggers)) - said
        assert unsaid
        legal = {
            (machine.states(place[0]), trigger)
            for place in places(machine)
            for trigger in machine.triggers
            if after(machine, place, trigger) is not None
        }
        assert legal == said

    @EVERY_MACHINE
    def test_words_hold_what_was_put_in(self, machine: Machine) -> None:
        codec = CODECS[machine.name]
        seen = set()
        for place in places(machine):
            word = codec.encode(*place)
            assert codec.decode(word) == place
            assert 0 <= word < 1 << 31
            seen.add(word)
        assert len(seen) == len(list(places(machine)))

    def test_a_word_says_what_it_is(self) -> None:
        codec = CODECS["block"]
        assert codec.describe(codec.encode(BlockState.LOADING, (1, 0))) == "LOADING(copies=1, pins=0)"
        bare = Codec(Machine("light", Light, Switch, (), ()))
        assert bare.describe(bare.encode(Light.ON)) == "ON"


class TestBatch:
    """A batch is many single steps: all of them or none."""

    @given(batch=batches())
    @settings(max_examples=examples(300))
    def test_agrees_with_single_steps(self, batch: tuple[Machine, list[Place], list[int], IntEnum]) -> None:
        """In both forms of ids, at any size, for equal and mixed words; or the whole batch is refused."""
        machine, held, ids, trigger = batch
        expected = {one: after(machine, held[one], trigger) for one in ids}
        for form in (tuple(ids), np.array(ids, dtype=np.int64)):
            words = words_in(machine, held)
            wrong = tuple(one for one in ids if expected[one] is None)
            if wrong:
                with pytest.raises(IllegalTransition) as refused:
                    words.check(form, trigger, 9)
                assert refused.value.ids == wrong
                assert words.words == words_in(machine, held).words
                continue
            new = words.check(form, trigger, 9)
            assert words.words == words_in(machine, held).words, "check changed a word"
            words.commit(form, new)
            assert [words.codec.decode(word) for word in words.words] == [
                expected.get(number, place) for number, place in enumerate(held)
            ]

    @given(batch=batches(), data=st.data())
    def test_refuses_ids_that_are_doubled_or_absent(
        self, batch: tuple[Machine, list[Place], list[int], IntEnum], data: st.DataObject
    ) -> None:
        """Otherwise nothing changes, and the wrong ids are named."""
        machine, held, ids, trigger = batch
        absent = data.draw(st.sampled_from([None, len(held), len(held) + 5, -1, -len(held)]))
        bad = ids[0] if absent is None else absent
        ids.insert(data.draw(st.integers(0, len(ids))), bad)
        forms = [tuple(ids)] if bad < 0 else [tuple(ids), np.array(ids, dtype=np.int64)]
        for form in forms:
            words = words_in(machine, held)
            with pytest.raises(IllegalTransition) as refused:
                words.check(form, trigger, 9)
            if absent is not None:
                assert refused.value.ids == (bad,)
                assert refused.value.state == f"none of the {len(held)}"
            assert words.words == words_in(machine, held).words

    @pytest.mark.parametrize("size", [2, SMALL, SMALL + 1, 50_000])
    def test_a_doubled_id_is_named(self, size: int) -> None:
        """Also in a large batch, without comparing every pair."""
        words = StateWords(CODECS["block"], size)
        ids = [*range(size - 1), 0]
        form = tuple(ids) if size <= SMALL else np.array(ids, dtype=np.int64)
        with pytest.raises(IllegalTransition) as refused:
            words.check(form, BlockTrigger.ALLOCATE, 5)
        assert (refused.value.ids, refused.value.state) == ((0,), "named twice in one batch")

    @pytest.mark.parametrize("size", [SMALL, SMALL + 1])
    def test_a_refusal_tells_the_whole_story(self, size: int) -> None:
        words = StateWords(CODECS["block"], size)
        words.commit((2, 4), words.check((2, 4), BlockTrigger.ALLOCATE, 1))
        ids = tuple(range(size)) if size <= SMALL else np.arange(size)
        with pytest.raises(IllegalTransition) as refused:
            words.check(ids, BlockTrigger.ALLOCATE, 17)
        error = refused.value
        assert (error.machine, error.ids, error.trigger, error.seq) == ("block", (2, 4), "ALLOCATE", 17)
        assert str(error) == "event 17: block 2, 4: ALLOCATE is illegal in ALLOCATED(copies=0, pins=0)"

    def test_an_empty_batch_is_no_step(self) -> None:
        words = StateWords(CODECS["block"], 3)
        words.commit((), words.check((), BlockTrigger.EVICT, 1))
        assert list(words.words) == [0, 0, 0]

    @pytest.mark.parametrize("size", [1, 2, SMALL, SMALL + 1])
    @pytest.mark.parametrize("words", [(7, 7), (5, 5), (5, 7), (7, 5)])
    def test_pick_finds_the_same_in_every_form(self, size: int, words: tuple[int, int]) -> None:
        """The words of a batch are a list, one int if all are equal, or an array. The answers are equal."""
        held = [words[place % 2] for place in range(size)]
        ids = range(100, 100 + size)
        expected = [one for one, word in zip(ids, held, strict=True) if word == 7]
        assert list(pick(tuple(ids), held, 7)) == expected
        array = np.array(ids, dtype=np.int64)
        assert list(pick(array, np.array(held, dtype=np.int32), 7)) == expected
        if words[0] == words[1]:
            assert list(pick(array, words[0], 7)) == expected

    def test_everything_starts_in_the_initial_state(self) -> None:
        for name, machine in MACHINES.items():
            words = StateWords(CODECS[name], 3)
            assert [words.state(one) for one in range(3)] == [machine.initial] * 3


class TestBlock:
    """What the block's table promises in every place that it can reach with up to three of each holder."""

    REACHED = reachable(BLOCK, (BlockState.FREE, (0, 0)), most=3)
    READABLE = (BlockState.STORED, BlockState.LOADING)

    def test_every_state_is_reached(self) -> None:
        assert {state for state, _ in self.REACHED} == set(BlockState)

    def test_invalidate_is_total(self) -> None:
        """Every call is legal (S8), no stale data (S14).

        A reset is legal in every state of a block, and nothing is readable after it.
        """
        for place in places(BLOCK):
            then = after(BLOCK, place, BlockTrigger.INVALIDATE)
            assert then is not None
            assert then[0] not in self.READABLE

    def test_only_a_good_end_publishes(self) -> None:
        """Publish after commit (S2), failure is not success (S6).

        Only a block whose store ended well becomes readable.
        """
        publishing = {
            (BlockState(place[0]), trigger)
            for place in self.REACHED
            for trigger in BlockTrigger
            if place[0] not in self.READABLE
            and (then := after(BLOCK, place, trigger)) is not None
            and then[0] in self.READABLE
        }
        assert publishing == {(BlockState.STORING, BlockTrigger.END_COPY_GOOD)}

    def test_copies_are_counted_where_they_run_and_nowhere_else(self) -> None:
        """No reuse in flight (S3), one release per hold (S4).

        A block that may be allocated or evicted has no copy; a block in flight has one.
        """
        in_flight = (BlockState.STORING, BlockState.LOADING, BlockState.QUARANTINED)
        for state, (copies, _) in self.REACHED:
            assert (copies > 0) == (state in in_flight), BlockState(state).name

    def test_pins_are_held_on_readable_blocks_only(self) -> None:
        """A match holds what it counts (S7): a pin is kept or voided. It never outlives the bytes."""
        assert all(pins == 0 or state in self.READABLE for state, (_, pins) in self.REACHED)

    def test_a_held_block_is_not_evicted(self) -> None:
        """No reuse in flight (S3), a match holds what it counts (S7): eviction finds no pin and no copy."""
        evictable = {place for place in self.REACHED if after(BLOCK, place, BlockTrigger.EVICT)}
        assert evictable == {(BlockState.STORED, (0, 0))}

    def test_every_block_comes_to_rest(self) -> None:
        """Progress (S9): when copies end and pins are released, no block is held."""
        ends = (
            BlockTrigger.END_COPY_GOOD,
            BlockTrigger.UNPIN,
            BlockTrigger.CANCEL,
            BlockTrigger.SUBMIT_STORE,
        )
        for start in self.REACHED:
            place = start
            for _ in range(8):
                place = next((then for end in ends if (then := after(BLOCK, place, end))), place)
            assert place[1] == (0, 0), f"{start} ended in {place}"

    def test_a_retired_slot_stays_retired(self) -> None:
        """No reuse in flight (S3): a lost copy may still write, so nothing brings its slot back."""
        for trigger in BlockTrigger:
            then = after(BLOCK, (BlockState.RETIRED, (0, 0)), trigger)
            if trigger is not BlockTrigger.RESTART:
                assert then in (None, (BlockState.RETIRED, (0, 0)))

    def test_a_restart_is_legal_in_every_state_and_leaves_what_can_be_read(self) -> None:
        """No stale data (S14): what a copy may have written in part is not left; what it only read is."""
        for state, counts in self.REACHED:
            readable = state in (BlockState.STORED, BlockState.LOADING)
            left = BlockState.STORED if readable else BlockState.EVICTED
            if state is BlockState.FREE:
                left = BlockState.FREE
            assert after(BLOCK, (state, counts), BlockTrigger.RESTART) == (left, (0, 0))


class TestWords:
    """What a batch of words is: a list for a tuple, one number for an array of equals, else an array."""

    SIZE = 2 * SMALL

    def test_equals_stay_one_number(self) -> None:
        """A plan of eight thousand new blocks takes one look into the memo."""
        words = StateWords(CODECS["block"], self.SIZE)
        assert words.check(np.arange(self.SIZE), BlockTrigger.ALLOCATE, 1) == BlockState.ALLOCATED
        assert type(words.check(np.arange(self.SIZE), BlockTrigger.ALLOCATE, 1)) is int

    @pytest.mark.parametrize("counts", [(0, 0), (3, 2)])
    def test_block_is_indexed_from_its_plan_on_and_readable_once_it_is_stored(
        self, counts: tuple[int, int]
    ) -> None:
        """Publish after commit (S2): whatever is counted beside the state."""
        codec = CODECS["block"]
        words = np.array([codec.encode(state, counts) for state in BlockState], dtype=np.int32)
        readable = {state for state, yes in zip(BlockState, are_readable(words), strict=True) if yes}
        indexed = {state for state, yes in zip(BlockState, are_indexed(words), strict=True) if yes}
        assert readable == {BlockState.STORED, BlockState.LOADING}
        assert indexed == readable | {BlockState.ALLOCATED, BlockState.STORING}

    @EVERY_MACHINE
    def test_word_is_of_a_state_and_its_counters_and_nothing_else(self, machine: Machine) -> None:
        """A log may claim any number."""
        codec = CODECS[machine.name]
        assert all(codec.holds(codec.encode(*place)) for place in places(machine))
        assert not any(codec.holds(state) for state in range(len(machine.states), 1 << STATE_BITS))
        assert not codec.holds(1 << STATE_BITS + sum(counter.bits for counter in machine.counters))

    @pytest.mark.parametrize("size", [2, 2 * SMALL])
    def test_batch_that_names_one_thing_twice_is_told(self, size: int) -> None:
        words = StateWords(CODECS["block"], size)
        for form in (tuple, np.array):
            assert words.distinct(form(range(size)))
            assert not words.distinct(form([*range(size - 1), 0]))

    def test_different_ones_are_as_wide_as_the_words(self) -> None:
        words = StateWords(CODECS["block"], self.SIZE)
        words.words[3] = BlockState.EVICTED
        new = words.check(np.arange(self.SIZE), BlockTrigger.ALLOCATE, 1)
        assert isinstance(new, np.ndarray)
        assert new.dtype == words.view.dtype
        assert set(new.tolist()) == {BlockState.ALLOCATED}


class TestLease:
    REACHED = reachable(LEASE, (LeaseState.NONE, (0,)), most=3)

    def test_reading_and_writing_exclude_each_other(self) -> None:
        """Order of copies (S12): no copy writes a device block that another reads or writes."""
        writable = {place for place in self.REACHED if after(LEASE, place, LeaseTrigger.BEGIN_WRITE)}
        assert writable == {(LeaseState.NONE, (0,))}
        readable = {place[0] for place in self.REACHED if after(LEASE, place, LeaseTrigger.BEGIN_READ)}
        assert readable == {LeaseState.NONE, LeaseState.READING}

    def test_readers_are_counted_while_reading_only(self) -> None:
        """One release per hold (S4): READING has a reader, and no other state has one."""
        assert all((readers > 0) == (state == LeaseState.READING) for state, (readers,) in self.REACHED)


class TestTransfer:
    @given(reports=st.lists(st.booleans(), min_size=1, max_size=20), abandoned=st.integers(0, 20))
    def test_is_good_when_every_worker_was(self, reports: list[bool], abandoned: int) -> None:
        """Publish after commit (S2), failure is not success (S6).

        The last report completes it if none failed. After a reset it is drained in any case.
        """
        place = TRANSFER.step(TransferState.PLANNED, (len(reports), 0), TransferTrigger.SUBMIT)
        for number, good in enumerate(reports):
            assert place[0] in (TransferState.SUBMITTED, TransferState.ABANDONED)
            if number == abandoned:
                place = TRANSFER.step(*place, TransferTrigger.ABANDON)
            report = TransferTrigger.REPORT_GOOD if good else TransferTrigger.REPORT_BAD
            place = TRANSFER.step(*place, report)
        ended = TransferState.COMPLETED if all(reports) else TransferState.FAILED
        assert place[0] == (TransferState.DRAINED if abandoned < len(reports) else ended)
        assert place[1][0] == 0

    def test_an_end_is_an_end(self) -> None:
        """Stale reports change nothing (S5): nothing changes a transfer that has ended."""
        ends = set(TransferState) - {
            TransferState.PLANNED,
            TransferState.SUBMITTED,
            TransferState.ABANDONED,
        }
        for place in places(TRANSFER):
            if place[0] in ends:
                assert all(after(TRANSFER, place, trigger) is None for trigger in TransferTrigger)


class TestRequest:
    REACHED = reachable(REQUEST, (RequestState.NEW, (0,)), most=3)
    OVER = (RequestState.FINISHED, RequestState.RELEASED)

    def test_finish_is_legal_in_every_living_state(self) -> None:
        """Every call is legal (S8).

        An abort may come at any time. A request with a load in flight waits for it.
        """
        for state, (loads,) in self.REACHED:
            if state not in self.OVER:
                then = after(REQUEST, (state, (loads,)), RequestTrigger.FINISH)
                over = RequestState.FINISHED if loads else RequestState.RELEASED
                assert then == (over, (loads,))

    def test_is_released_only_when_its_load_has_ended(self) -> None:
        """One release per hold (S4): FINISHED has one, RELEASED has none."""
        for state, (loads,) in self.REACHED:
            if state in self.OVER:
                assert loads == (state == RequestState.FINISHED)

    def test_the_end_of_its_load_always_finds_it(self) -> None:
        """Stale reports change nothing (S5), every call is legal (S8).

        The end of its load is legal in whatever state the request is.
        """
        for state, (loads,) in self.REACHED:
            if loads:
                then = after(REQUEST, (state, (loads,)), RequestTrigger.END_LOAD)
                assert then is not None
                assert then[1] == (0,)

    def test_a_second_load_never_begins(self) -> None:
        """One release per hold (S4): in no state can a request with a load in flight begin another."""
        for state, (loads,) in self.REACHED:
            if loads:
                assert state is not RequestState.MATCHED
                for trigger in (RequestTrigger.HIT, RequestTrigger.BEGIN_LOAD):
                    assert after(REQUEST, (state, (loads,)), trigger) is None
