"""Actions compiled to functions do what the declaration says: compared with it evaluated in plain Python."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from kvsm.check.conformance.cells import MachineWords, ProtocolCells
from kvsm.check.conformance.compiled import CompiledAction, compile_action
from kvsm.check.protocol.offload_protocol import offload_protocol
from kvsm.check.protocol.plain import ProtocolModel, State
from kvsm.check.protocol.request_protocol import request_protocol
from kvsm.check.protocol.request_scope import RequestScope
from kvsm.check.protocol.scope import ProtocolScope
from kvsm.check.protocol.terms import OneOf, Words

SCOPE = ProtocolScope(keys=2, device_blocks=2, slots=2, workers=2, copies=3)
MODELS = {
    "offload": ProtocolModel(offload_protocol(SCOPE)),
    "requests": ProtocolModel(request_protocol(RequestScope(slots=2, holds=3, workers=2))),
}


def cells_of(model: ProtocolModel) -> dict[str, ProtocolCells]:
    tables: dict[str, MachineWords] = {}
    found = {}
    for one in model.declared.variables:
        table = None
        if isinstance(one.domain, Words):
            table = tables.setdefault(one.domain.machine.name, MachineWords(one.domain.machine))
        members = range(one.indices[0].size) if len(one.indices) == 1 else None
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


def load(model: ProtocolModel, cells: dict[str, ProtocolCells], state: State) -> None:
    for one in cells.values():
        one.clear()
    for cell, value in zip(model.layout.cells, state):
        one = cells[cell.variable.name]
        one.put(cell.indices[0] if len(cell.indices) == 1 else cell.indices, value_of(one, value))


def saved(cells: dict[str, ProtocolCells]) -> dict[str, dict[Any, Any]]:
    return {name: dict(one.values) for name, one in cells.items()}


def states(model: ProtocolModel, steps: int, seed: int) -> list[State]:
    """States on a random way from the initial one."""
    random, found = Random(seed), []
    state = model.layout.initial
    for _ in range(steps):
        actions = model.actions(state)
        # Each kind of action is as likely as any other one, however many parameters it has.
        kinds = sorted({str(action[0]) for action in actions})
        kind = random.choice(kinds)
        after = model.next(state, random.choice([one for one in actions if one[0] == kind]))
        assert after is not None
        state = after
        found.append(state)
    return found


def compiled(model: ProtocolModel, cells: dict[str, ProtocolCells]) -> dict[str, CompiledAction]:
    members = {one.name: range(one.size) for one in model.declared.index_sets}
    return {one.name: compile_action(model.declared, one, cells, members) for one in model.declared.actions}


def compare(name: str, steps: int, seed: int) -> int:
    """Take every action in each state, both ways. Returns how many were possible."""
    model = MODELS[name]
    cells = cells_of(model)
    actions = compiled(model, cells)
    possible = 0
    for state in states(model, steps, seed):
        for one in model.layout.instances:
            load(model, cells, state)
            refused = actions[one.action.name].take([one.values])
            after = model.next(state, one.move)
            assert (refused is None) == (after is not None), one.move
            if after is not None:
                found = saved(cells)
                load(model, cells, after)
                assert found == saved(cells), one.move
                possible += 1
    return possible


@pytest.mark.parametrize("name", MODELS)
def test_a_compiled_action_is_the_declared_one(name: str) -> None:
    """With every variable tracked, guard and effects equal the declaration's, `Forget`s included."""
    assert compare(name, 15, 3) > 60


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("seed", range(3))
def test_a_compiled_action_is_the_declared_one_on_long_ways(name: str, seed: int) -> None:
    """The same on longer random ways."""
    assert compare(name, 300, seed) > 1_200
