"""The language of the protocol, and its evaluation by numpy compared with plain Python."""

from __future__ import annotations

from functools import cache
from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from kvsm.check.protocol.arrays import Transitions, columns_of, rows_of
from kvsm.check.protocol.cell_layout import CellLayout
from kvsm.check.protocol.explore import explore
from kvsm.check.protocol.nodes import Columns, StateBatch
from kvsm.check.protocol.offload_protocol import offload_protocol
from kvsm.check.protocol.packed import Packing, Visited, distinct
from kvsm.check.protocol.plain import ProtocolModel, State, evaluate, seen_in
from kvsm.check.protocol.scope import SCOPES, ProtocolScope
from kvsm.check.protocol.symmetry import Symmetry
from kvsm.check.protocol.terms import (
    TRUE,
    Action,
    Assign,
    Declaration,
    Forget,
    IndexSet,
    OneOf,
    Param,
    Read,
    UpTo,
    Variable,
    Words,
    number,
)
from kvsm.errors import ConfigError
from kvsm.states import BLOCK, LEASE, TRANSFER, Machine
from kvsm.states.machine import UndefinedStep

DECLARED = offload_protocol(ProtocolScope(keys=2, device_blocks=2, slots=2, workers=2))
LAYOUT = CellLayout(DECLARED)
MODEL = ProtocolModel(DECLARED)
TRANSITIONS = Transitions(LAYOUT)
SIZES = [cell.variable.domain.size for cell in LAYOUT.cells]


def any_states(seed: int, count: int) -> Columns:
    """Any values in any cells: most of these states are unreachable and mean nothing."""
    random = np.random.default_rng(seed)
    return np.array([random.integers(0, size, count) for size in SIZES], dtype=np.uint8)


def reachable(depth: int) -> list[State]:
    """A sample of the states that are this many actions from the start."""
    return rows_of(_level(depth))


@cache
def _level(depth: int) -> Columns:
    if depth == 0:
        return columns_of([LAYOUT.initial])
    columns = np.unique(TRANSITIONS.after(_level(depth - 1)).columns, axis=1)
    return np.ascontiguousarray(columns[:, :: 1 + columns.shape[1] // 1000])


# Words.


@pytest.mark.parametrize(
    ("machine", "start", "limits"), [(BLOCK, (0, 0), (2, 1)), (TRANSFER, (2, 0), (2, 2)), (LEASE, (0,), (1,))]
)
def test_steps_of_words_are_those_of_the_machine(
    machine: Machine, start: tuple[int, ...], limits: tuple[int, ...]
) -> None:
    words = Words(machine, start, limits, frozenset(machine.states))
    for trigger, (value, word) in product(machine.triggers, enumerate(words.words)):
        after = words.words[words.next[trigger][value]]
        try:
            expected = machine.step(*word, trigger) if word is not None else None
        except UndefinedStep:
            expected = None
        if expected is not None and any(count > limit for count, limit in zip(expected[1], limits)):
            expected = None
        assert after == expected, (word, trigger)


def test_illegal_stays_illegal() -> None:
    words = Words(BLOCK, (0, 0), (1, 1), frozenset(BLOCK.states))
    assert words.label(words.illegal) == "ILLEGAL"
    assert {words.next[trigger][words.illegal] for trigger in BLOCK.triggers} == {words.illegal}


def test_which_cell_is_read_must_not_depend_on_the_state() -> None:
    variable = DECLARED.variable("block")
    with pytest.raises(TypeError, match="is no parameter"):
        evaluate(Read(variable, (number(0),)), LAYOUT, LAYOUT.initial, {})


def test_scope_without_a_slot_is_refused() -> None:
    with pytest.raises(ConfigError, match="slots is 0"):
        ProtocolScope(slots=0)


@pytest.mark.parametrize(
    "scope",
    [
        ProtocolScope(keys=1, device_blocks=1, slots=1, live_transfers=1, workers=8, copies=10),
        ProtocolScope(keys=1, device_blocks=1, workers=64),
        ProtocolScope(keys=1, slots=2, matches=200),
    ],
    ids=("what is left to do", "words of a transfer", "matches of all slots"),
)
def test_scope_whose_numbers_do_not_fit_in_bytes_is_refused(scope: ProtocolScope) -> None:
    """They would wrap around to 0 in silence and change what a guard or a claim means."""
    with pytest.raises(ConfigError, match="choose smaller bounds"):
        explore(offload_protocol(scope), max_states=1)


# numpy against plain Python.


@given(st.integers(0, 2**32))
@settings(max_examples=4)
def test_numpy_and_plain_python_agree_on_every_guard_and_claim(seed: int) -> None:
    columns = any_states(seed, 25)
    batch, states = StateBatch(columns), rows_of(columns)
    terms = [(one.action.guard, one.binding) for one in LAYOUT.instances]
    terms += [(claim.term, {}) for claim in (*DECLARED.always, *DECLARED.sometimes)]
    terms += [(DECLARED.rest, {}), (DECLARED.rank, {})]
    for term, binding in terms:
        values = TRANSITIONS.nodes.of(term, binding).of(batch)
        assert values.tolist() == [evaluate(term, LAYOUT, state, binding) for state in states], term


@given(st.integers(0, 2**32))
@settings(max_examples=4)
def test_cells_that_a_finding_names_are_enough(seed: int) -> None:
    """A broken property stays broken, whatever the cells hold that its finding does not name."""
    state, *others = rows_of(any_states(seed, 4))
    for claim in DECLARED.always:
        if not evaluate(claim.term, LAYOUT, state, {}):
            seen = set(seen_in(claim.term, LAYOUT, state, {}))
            for other in others:
                mixed = [
                    mine if place in seen else theirs
                    for place, (mine, theirs) in enumerate(zip(state, other))
                ]
                assert not evaluate(claim.term, LAYOUT, mixed, {}), claim.id


@pytest.mark.parametrize("depth", [4, 9, 14])
def test_numpy_and_plain_python_agree_on_what_follows(depth: int) -> None:
    """The successors by each action instance, with effects and forgetting."""
    states = reachable(depth)[::200]
    successors = TRANSITIONS.after(columns_of(states))
    found = rows_of(successors.columns)
    for number_of, move in enumerate(TRANSITIONS.moves):
        places = range(successors.bounds[number_of], successors.bounds[number_of + 1])
        made = {int(successors.sources[place]): found[place] for place in places}
        expected = {place: MODEL.next(state, move.instance.move) for place, state in enumerate(states)}
        assert made == {place: after for place, after in expected.items() if after is not None}


def test_effects_read_the_state_before_and_forgets_the_one_before_them() -> None:
    """The order that the language promises, where it matters: a swap, and a forget that triggers another."""
    ones = IndexSet("thing", 1)
    x, i = Param("x", ones), UpTo(3)
    a, b = Variable("a", "One.", (ones,), i), Variable("b", "Another.", (ones,), i)
    two = b[x].equals(number(2))
    declared = Declaration(
        name="exchange",
        bounds="",
        index_sets=(ones,),
        variables=(a, b),
        actions=(
            Action("exchange", "They change places.", (x,), TRUE, (Assign(a[x], b[x]), Assign(b[x], a[x]))),
        ),
        forgets=(Forget((x,), b[x], two, "It is."), Forget((x,), a[x], two, "It is no more.")),
        always=(),
        sometimes=(),
        rest=TRUE,
        rank=number(0),
    )
    model, states = ProtocolModel(declared), [(3, 1), (2, 3)]
    expected = [(1, 3), (3, 0)]
    assert [model.next(state, ("exchange", 0)) for state in states] == expected
    assert rows_of(Transitions(CellLayout(declared)).after(columns_of(states)).columns) == expected


# Packing and the set of states.


@given(st.lists(st.integers(2, 17), min_size=1, max_size=80), st.integers(0, 2**32))
@settings(max_examples=examples(30))
def test_packing_loses_nothing(sizes: list[int], seed: int) -> None:
    random = np.random.default_rng(seed)
    columns = np.array([random.integers(0, size, 50) for size in sizes], dtype=np.uint8)
    packing = Packing(sizes)
    assert (packing.unpack(packing.pack(columns)) == columns).all()


def test_full_scope_fits_in_two_words() -> None:
    layout = CellLayout(offload_protocol(SCOPES["full"]))
    assert Packing([cell.variable.domain.size for cell in layout.cells]).width == 2


@given(st.lists(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1), max_size=8))
def test_set_of_states_tells_apart_what_is_alike_in_the_first_word(
    batches: list[list[tuple[int, int]]],
) -> None:
    visited, expected = Visited(), set()
    for batch in batches:
        states = distinct(np.array(batch, dtype=np.uint64).T)
        assert sorted(zip(*states.tolist())) == sorted(set(batch))
        unseen = visited.unseen(states)
        assert set(zip(*unseen.tolist())) == set(batch) - expected
        visited.add(unseen)
        expected |= set(batch)
    assert len(visited) == len(expected)


# Symmetry.


def renamed_anyhow(columns: Columns, order: dict[str, tuple[int, ...]]) -> Columns:
    """The states with the members of each index set renumbered."""
    after = np.empty_like(columns)
    for cell, column in zip(LAYOUT.cells, columns):
        sets, domain = cell.variable.indices, cell.variable.domain
        indices = tuple(order[one.name][index] for one, index in zip(sets, cell.indices))
        if isinstance(domain, OneOf):
            column = np.array([*order[domain.members.name], domain.members.size], dtype=np.uint8)[column]
        after[LAYOUT.place(cell.variable, indices)] = column
    return after


ORDERS = [
    dict(zip((one.name for one in DECLARED.index_sets), orders))
    for orders in product(*(permutations(range(one.size)) for one in DECLARED.index_sets))
]


def least_names(columns: Columns) -> list[State]:
    """For each state the least of all its renumberings."""
    return list(map(min, zip(*(rows_of(renamed_anyhow(columns, order)) for order in ORDERS))))


def test_renaming_is_no_more_than_a_renaming() -> None:
    """Otherwise two different states could become one, and a bug could hide."""
    columns = np.concatenate((columns_of(reachable(12)[::200]), any_states(7, 10)), axis=1)
    expected = least_names(columns)
    Symmetry(LAYOUT).rename(columns)
    assert least_names(columns) == expected


def test_states_that_differ_in_numbers_alone_get_one_name() -> None:
    """Renaming finds nearly all symmetric states, which the full scope needs. It need not find all."""
    columns = columns_of(reachable(14)[::50])
    symmetry, names, orbits = Symmetry(LAYOUT), set(), set(least_names(columns))
    for order in ORDERS:
        renamed = renamed_anyhow(columns, order)
        symmetry.rename(renamed)
        names |= set(rows_of(renamed))
    assert len(orbits) > 15
    assert len(names) <= 1.02 * len(orbits)
