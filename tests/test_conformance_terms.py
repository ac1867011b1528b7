"""Actions compiled to functions do what the declaration says: compared with it evaluated in plain Python."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from kvsm.checker.conformance.cells import MachineWords, ProtocolCells
from kvsm.checker.conformance.compiled import CompiledAction, compile_action
from kvsm.checker.protocol.offload import offload_protocol
from kvsm.checker.protocol.plain import ProtocolModel, State
from kvsm.checker.protocol.scope import ProtocolScope
from kvsm.checker.protocol.terms import OneOf, Words

SCOPE = ProtocolScope(keys=2, device_blocks=2, slots=2, workers=2, copies=3)
MODEL = ProtocolModel(offload_protocol(SCOPE))
DECLARED = MODEL.declared
MEMBERS = {one.name: range(one.size) for one in DECLARED.index_sets}


def cells_of(tracked: set[str]) -> dict[str, ProtocolCells]:
    tables: dict[str, MachineWords] = {}
    found = {}
    for one in DECLARED.variables:
        if one.name in tracked:
            table = None
            if isinstance(one.domain, Words):
                table = tables.setdefault(one.domain.machine.name, MachineWords(one.domain.machine))
            members = MEMBERS[one.indices[0].name] if len(one.indices) == 1 else None
            found[one.name] = ProtocolCells(one, table, members)
    return found


def value_of(cells: ProtocolCells, value: int) -> Any:
    """A value of the explorer as the compiled actions have it."""
    domain = cells.variable.domain
    if isinstance(domain, OneOf):
        return None if value == domain.members.size else value
    if isinstance(domain, Words):
        assert cells.words is not None
        word = domain.words[value]
        return cells.words.illegal if word is None else cells.words.word(*word)
    return value


def load(cells: dict[str, ProtocolCells], state: State) -> None:
    for one in cells.values():
        one.clear()
    for cell, value in zip(MODEL.layout.cells, state):
        if (one := cells.get(cell.variable.name)) is not None:
            one.put(cell.indices[0] if len(cell.indices) == 1 else cell.indices, value_of(one, value))


def saved(cells: dict[str, ProtocolCells]) -> dict[str, dict[Any, Any]]:
    return {name: dict(one.values) for name, one in cells.items()}


def states(steps: int, seed: int) -> list[State]:
    """States on random ways from the initial one."""
    random, found = Random(seed), []
    state = MODEL.layout.initial
    for _ in range(steps):
        actions = MODEL.actions(state)
        # Draining actions alone lead to rest; what opens things is taken as often as they together.
        kinds = sorted({str(action[0]) for action in actions})
        kind = random.choice(kinds)
        after = MODEL.next(state, random.choice([one for one in actions if one[0] == kind]))
        assert after is not None
        state = after
        found.append(state)
    return found


def compiled(cells: dict[str, ProtocolCells], names: set[str]) -> dict[str, CompiledAction]:
    return {
        one.name: compile_action(DECLARED, one, cells, MEMBERS)
        for one in DECLARED.actions
        if one.name in names
    }


EVERY = {one.name for one in DECLARED.variables}


def compare(steps: int, seed: int) -> int:
    """Take every action in each state, both ways. Returns how many were possible."""
    cells = cells_of(EVERY)
    actions = compiled(cells, {one.name for one in DECLARED.actions})
    possible = 0
    for state in states(steps, seed):
        for one in MODEL.layout.instances:
            load(cells, state)
            refused = actions[one.action.name].take([one.values])
            after = MODEL.next(state, one.move)
            assert (refused is None) == (after is not None), one.move
            if after is not None:
                found = saved(cells)
                load(cells, after)
                assert found == saved(cells), one.move
                possible += 1
    return possible


def test_a_compiled_action_is_the_declared_one() -> None:
    """With every variable tracked, guard and effects are those of the declaration, `Forget`s included."""
    assert compare(40, 3) > 250


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_a_compiled_action_is_the_declared_one_on_long_ways(seed: int) -> None:
    """The same on longer random ways."""
    assert compare(1000, seed) > 8_000
