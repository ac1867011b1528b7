"""The offload protocol is proved within small bounds, and each of its broken variants is refuted."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache

import pytest
from msgspec import structs
from protocol_mutants import (
    failure_is_success,
    lost_device_block_is_free,
    lost_slot_is_free,
    pinned_can_be_evicted,
    pins_outlive_a_reset,
    with_rows,
)

from kvsm.check.explore import explorer
from kvsm.check.explore.coverage import TableEdge, never_taken
from kvsm.check.explore.model import Exploration, Verdict
from kvsm.check.protocol.arrays import Transitions, columns_of, rows_of
from kvsm.check.protocol.cell_layout import CellLayout
from kvsm.check.protocol.explore import explore
from kvsm.check.protocol.nodes import NodeFactory, StateBatch
from kvsm.check.protocol.offload_protocol import Variant, offload_protocol
from kvsm.check.protocol.plain import ProtocolModel, State
from kvsm.check.protocol.scope import SCOPES, ProtocolScope
from kvsm.check.protocol.terms import FALSE, Declaration, InState, Param
from kvsm.check.worlds.requirement import Kind
from kvsm.properties import Property
from kvsm.states import BLOCK, LEASE, TRANSFER, BlockState, Machine
from kvsm.states.machine import Row

TINY = ProtocolScope(keys=1, device_blocks=1, slots=1, live_transfers=1, copies=1, queued=1)
NARROW = structs.replace(TINY, keys=2, device_blocks=2)
TWO_BLOCKS = structs.replace(NARROW, slots=2, copies=2)
TWO_STORES = structs.replace(TINY, slots=2, live_transfers=2, copies=2)
TWO_LOADS = structs.replace(TINY, device_blocks=2, live_transfers=2, copies=2)
THREE_LOADS = structs.replace(TINY, device_blocks=3, live_transfers=3, copies=3, several=False)
TWO_WORKERS = structs.replace(TINY, workers=2)
SMALL = SCOPES["small"]
SMALL_OF_ONE = SCOPES["one-block"]
ONE_SLOT = structs.replace(SMALL, slots=1, queued=1)
"""Enough for the shortest traces of the broken variants."""
CRASHES = structs.replace(NARROW, slots=2, crashes=True)

BYTES = (Property.PUBLISH_AFTER_COMMIT, Property.COPY_ORDER, Property.CORRECT_BYTES)
"""The claims about memory, not about the books."""


def of_bytes_alone(declared: Declaration) -> Declaration:
    """Without the claims about the books: refuted only if wrong bytes can be read."""
    return replace(declared, always=tuple(claim for claim in declared.always if claim.name in BYTES))


def with_invariants(declared: Declaration) -> Declaration:
    """The auxiliary invariants are checked like properties."""
    return replace(declared, always=(*declared.always, *declared.invariants))


@cache
def explored(scope: ProtocolScope, symmetry: bool) -> Exploration:
    return explore(with_invariants(offload_protocol(scope)), symmetry=symmetry)


def sometimes_of(scope: ProtocolScope) -> set[str]:
    return {claim.id for claim in offload_protocol(scope).sometimes}


def facts(found: Exploration) -> tuple[Verdict, int, int, int]:
    return found.verdict, found.states, found.transitions, found.depth


# The good protocol.


@pytest.mark.parametrize(
    ("scope", "symmetry", "expected"),
    [
        (TINY, False, (93, 408, 16)),
        (NARROW, True, (583, 3331, 20)),
        (NARROW, False, (2302, 13137, 20)),
        (TWO_BLOCKS, True, (2345, 15096, 28)),
        (TWO_STORES, True, (338, 2156, 19)),
        (TWO_STORES, False, (2332, 15126, 19)),
        (TWO_LOADS, True, (472, 2793, 22)),
        (TWO_WORKERS, True, (949, 5448, 25)),
        (TWO_WORKERS, False, (1805, 10331, 25)),
        (SMALL, True, (14858, 115471, 37)),
        (CRASHES, True, (7085, 57565, 33)),
    ],
)
def test_protocol_is_proved(scope: ProtocolScope, symmetry: bool, expected: tuple[int, int, int]) -> None:
    """Every property holds, progress (S9) included, and every auxiliary invariant of the proof for any
    size. The counts change only with the protocol."""
    found = explored(scope, symmetry)
    assert facts(found) == (Verdict.PROVED, *expected)
    assert found.unreached == ()
    assert found.bounds == str(scope)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scope", "symmetry", "expected"),
    [
        (TWO_BLOCKS, False, (34727, 223445, 28)),
        (TWO_LOADS, False, (3369, 19981, 22)),
        (SMALL_OF_ONE, True, (13919, 109766, 37)),
        (structs.replace(TWO_LOADS, workers=2), True, (17516, 139415, 35)),
        (SMALL, False, (448991, 3478855, 37)),
        (SMALL_OF_ONE, False, (420343, 3304919, 37)),
        (structs.replace(TWO_BLOCKS, workers=2), True, (52593, 398683, 44)),
        (SCOPES["crashes"], True, (51177, 483151, 38)),
        (SCOPES["three-blocks"], True, (337782, 3159943, 63)),
    ],
)
def test_larger_scope_is_proved(scope: ProtocolScope, symmetry: bool, expected: tuple[int, int, int]) -> None:
    """More states than the fast tests have time for."""
    found = explore(with_invariants(offload_protocol(scope)), symmetry=symmetry, jobs=2)
    assert facts(found) == (Verdict.PROVED, *expected)


@pytest.mark.parametrize(
    ("scope", "dangers"),
    [
        (TWO_BLOCKS, {"a store has two blocks", "a load has two blocks"}),
        (TWO_STORES, {"two stores read one device block"}),
        (TWO_LOADS, {"two loads read one slot"}),
    ],
)
def test_copies_that_share_must_be_met(scope: ProtocolScope, dangers: set[str]) -> None:
    """Without them, a proof of a scope with two copies fails. One copy cannot share."""
    assert dangers <= sometimes_of(scope)
    assert not dangers & sometimes_of(structs.replace(scope, copies=1))


def test_false_invariant_is_refuted() -> None:
    """A broken protocol breaks an auxiliary invariant before it breaks a property."""
    declared = offload_protocol(TINY, Variant.STORE_BEFORE_COMPUTE)
    refutations = [explore(one).refutation for one in (declared, with_invariants(declared))]
    late, early = (one for one in refutations if one is not None)
    assert early.finding.property == "a store finds its key"
    assert len(early.path) < len(late.path)


def test_plain_python_reaches_the_same_states() -> None:
    """The explorer of models on the plain evaluation shares only the declaration with numpy."""
    declared = offload_protocol(TINY)
    plain = explorer.explore(ProtocolModel(declared))
    assert facts(plain)[:3] == facts(explore(declared, symmetry=False))[:3]
    assert set(all_states(declared)) == _plainly_reached(ProtocolModel(declared))


def all_states(declared: Declaration) -> list[State]:
    """All reachable states, by numpy, without symmetry."""
    transitions = Transitions(CellLayout(declared))
    level = [transitions.layout.initial]
    seen = dict.fromkeys(level)
    while level:
        after = dict.fromkeys(rows_of(transitions.after(columns_of(level)).columns))
        level = [state for state in after if state not in seen]
        seen.update(dict.fromkeys(level))
    return list(seen)


def _plainly_reached(model: ProtocolModel) -> set[State]:
    waiting = list(model.initial())
    seen = set(waiting)
    while waiting:
        state = waiting.pop()
        following = {model.next(state, move) for move in model.actions(state)}
        new = {one for one in following if one is not None} - seen
        seen |= new
        waiting += new
    return seen


@pytest.mark.parametrize(
    "scope",
    [
        structs.replace(TINY, device_blocks=2),
        structs.replace(TINY, keys=2),
        structs.replace(TINY, crashes=True),
        pytest.param(TWO_STORES, marks=pytest.mark.slow),
        pytest.param(TWO_LOADS, marks=pytest.mark.slow),
    ],
    ids=("two device blocks", "two keys", "crashes", "two stores", "two loads"),
)
def test_what_is_forgotten_changes_nothing(scope: ProtocolScope) -> None:
    """Without the forgetting of bytes and names there are more states. With it applied afterwards, they are
    the same states. So forgetting hides no bug."""
    declared = offload_protocol(scope)
    structure = ("transfer", "report", "instant", "block")
    forgets = tuple(one for one in declared.forgets if one.cell.variable.name in structure)
    remembering = replace(declared, forgets=forgets)
    assert explore(remembering, symmetry=False).verdict is Verdict.PROVED
    remembered, expected = columns_of(all_states(remembering)), columns_of(all_states(declared))
    assert remembered.shape[1] > 4 * expected.shape[1]
    layout = CellLayout(declared)
    nodes = NodeFactory(layout)
    for forget, binding in layout.forgets:
        forgotten = nodes.of(forget.when, binding).of(StateBatch(remembered))
        remembered[layout.place_of(forget.cell, binding)][forgotten] = forget.cell.variable.domain.initial
    # A slot's bytes from an earlier life are forgotten for good: they are overwritten before they are read.
    block, content = declared.variable("block"), declared.variable("slot_content")
    s = Param("s", block.indices[0])
    being_stored = InState(block[s], (BlockState.ALLOCATED, BlockState.STORING))
    for columns in (remembered, expected):
        for slot in range(scope.slots):
            unread = nodes.of(being_stored, {s: slot}).of(StateBatch(columns))
            columns[layout.place(content, (slot, 0))][unread] = content.domain.initial
    assert set(rows_of(remembered)) == set(rows_of(expected))


def test_threads_change_nothing() -> None:
    """Determinism (S11): the same counts, and the same way to a bug."""
    one, two = (explore(offload_protocol(ONE_SLOT, Variant.LOAD_UNHELD), jobs=jobs) for jobs in (1, 2))
    assert facts(one) == facts(two)
    assert one.refutation == two.refutation


def test_rows_that_the_protocol_never_takes_are_named() -> None:
    """Each with its reason. Nothing checks a row that is neither taken nor named here."""
    scopes = (TWO_WORKERS, TWO_STORES, TWO_LOADS)
    taken = {edge for scope in scopes for edge in explored(scope, True).edges}
    unseen = rows(never_taken(taken, ("block", "transfer", "lease")))
    # A crash may leave an older log, so it is told by the log. The requests take these rows at a restart, and
    # `test_a_crash_of_a_whole_log_leaves_what_can_be_read_and_nothing_else` compares the two.
    assert unseen - {row for row in unseen if "--RESTART-->" in row} == {
        # The protocol forgets whether a free slot was ever used.
        "block EVICTED --ALLOCATE--> ALLOCATED",
        # A reset comes after plans were cancelled.
        "block ALLOCATED --INVALIDATE--> EVICTED",
        # What is used without a load is a matter of the policy.
        "block STORED --TOUCH--> STORED",
        "block LOADING --TOUCH--> LOADING",
        # Two loads read a slot, and a third one of it has failed before. The next test has three loads.
        THIRD_LOAD,
    }


@pytest.mark.slow
def test_row_that_needs_three_loads_of_a_slot_is_taken() -> None:
    assert THIRD_LOAD in rows(explored(THREE_LOADS, True).edges)


THIRD_LOAD = "block QUARANTINED --END_COPY_GOOD--> QUARANTINED"


def rows(edges: Iterable[TableEdge]) -> set[str]:
    return {str(edge).partition(" (")[0] for edge in edges}


# Broken protocols.


@pytest.mark.parametrize(
    ("variant", "property", "length", "states"),
    [
        (Variant.STORE_BEFORE_COMPUTE, Property.PUBLISH_AFTER_COMMIT, 7, 155),
        (Variant.LOAD_BEFORE_READER, Property.COPY_ORDER, 18, 806),
        (Variant.LOAD_UNHELD, Property.NO_REUSE_IN_FLIGHT, 11, 322),
        (Variant.RESET_FREES, Property.NO_REUSE_IN_FLIGHT, 4, 26),
    ],
)
def test_broken_variant_is_refuted(variant: Variant, property: Property, length: int, states: int) -> None:
    """By a shortest trace. It is no shorter where symmetric states are kept apart."""
    declared = offload_protocol(ONE_SLOT, variant)
    found = explore(declared)
    assert found.verdict is Verdict.REFUTED
    assert found.refutation is not None
    assert (found.refutation.finding.property, len(found.refutation.path), found.states) == (
        property,
        length,
        states,
    )
    assert_path_breaks(declared, found)
    unmerged = explore(offload_protocol(NARROW, variant), symmetry=False)
    assert unmerged.refutation is not None
    assert len(unmerged.refutation.path) == length


@pytest.mark.parametrize(
    ("variant", "property", "length"),
    [
        (Variant.LOAD_UNHELD, Property.CORRECT_BYTES, 20),
        (Variant.RESET_FREES, Property.PUBLISH_AFTER_COMMIT, 16),
    ],
)
def test_broken_books_let_wrong_bytes_be_read(variant: Variant, property: Property, length: int) -> None:
    """Books that break "no reuse in flight (S3)" let wrong bytes be read, too."""
    declared = of_bytes_alone(offload_protocol(ONE_SLOT, variant))
    found = explore(declared)
    assert found.refutation is not None
    assert (found.refutation.finding.property, len(found.refutation.path)) == (property, length)
    assert_path_breaks(declared, found)


def assert_path_breaks(declared: Declaration, found: Exploration) -> None:
    """Plain Python takes the same path. Only its end breaks a property, the one that the finding names."""
    assert found.refutation is not None
    model = ProtocolModel(declared)
    always = [one for one in model.requirements if one.kind is Kind.ALWAYS]
    (state,) = model.initial()
    for move in found.refutation.path:
        assert all(one.holds(state) for one in always)
        after = model.next(state, move)
        assert after is not None
        state = after
    broken = next(claim for claim, one in zip(declared.always, always) if not one.holds(state))
    assert found.refutation.finding == model.finding(broken, state)


def test_finding_names_the_cells_in_which_it_is_seen() -> None:
    """And no others: the second copy has no part in it."""
    found = explore(offload_protocol(SMALL, Variant.RESET_FREES))
    assert found.refutation is not None
    assert found.refutation.finding.message == (
        "The state of a slot fits each live transfer that touches it. "
        "But copy transfer of copy 0 is transfer 0, copy slot of copy 0 is slot 0, "
        "direction of transfer 0 is STORE, transfer of transfer 0 is ABANDONED(pending=1, failed=0), "
        "block of slot 0 is FREE(copies=0, pins=0)"
    )


def test_copy_that_runs_ahead_of_the_log_is_refuted() -> None:
    """A crash shows it: the log promises a slot whose bytes a store has overwritten."""
    declared, careless = (offload_protocol(structs.replace(CRASHES, crashes=one)) for one in (True, False))
    submit = next(one for one in careless.actions if one.name == "submit")
    actions = tuple(submit if one.name == "submit" else one for one in declared.actions)
    found = explore(replace(declared, actions=actions))
    assert found.refutation is not None
    assert found.refutation.finding.property == Property.PUBLISH_AFTER_COMMIT
    assert [str(move[0]) for move in found.refutation.path[-1:]] == ["crash"]


# Broken tables.


@pytest.mark.parametrize(
    ("machine", "change", "workers", "property"),
    [
        (BLOCK, pinned_can_be_evicted, 1, Property.ONE_RELEASE_PER_HOLD),
        (TRANSFER, failure_is_success, 2, Property.PUBLISH_AFTER_COMMIT),
        (BLOCK, lost_slot_is_free, 1, Property.PUBLISH_AFTER_COMMIT),
        (LEASE, lost_device_block_is_free, 1, Property.CORRECT_BYTES),
        (BLOCK, pins_outlive_a_reset, 1, Property.ONE_RELEASE_PER_HOLD),
    ],
)
def test_broken_table_is_refuted(
    machine: Machine, change: Callable[[Row], Row], workers: int, property: Property
) -> None:
    """The protocol has no rows of its own: a wrong table makes it wrong."""
    scope = structs.replace(TINY, slots=2, workers=workers)
    found = explore(offload_protocol(scope, machines=with_rows(machine, change)))
    assert found.refutation is not None
    assert found.refutation.finding.property == property


# Sometimes, eventually, limits.


def without(declared: Declaration, name: str) -> Declaration:
    return replace(
        declared,
        actions=tuple(replace(one, guard=FALSE) if one.name == name else one for one in declared.actions),
    )


def test_what_is_never_met_refutes() -> None:
    """A proof would mean little if no hit was ever loaded."""
    found = explore(without(offload_protocol(TINY), "match"))
    assert found.verdict is Verdict.REFUTED
    assert "a hit is loaded" in found.unreached


def test_copy_that_never_starts_is_no_progress() -> None:
    """Progress (S9): a transfer that was submitted must come to an end."""
    found = explore(without(offload_protocol(TINY), "start"))
    assert found.refutation is not None
    assert found.refutation.finding.property == Property.PROGRESS
    assert found.refutation.finding.message == "the state is not at rest, and no action winds it down"


def test_draining_that_goes_round_is_no_progress() -> None:
    """Progress (S9): an action that brings nothing nearer to rest must not count as draining."""
    declared = offload_protocol(TINY)
    actions = tuple(replace(one, drains=True) if one.name == "match" else one for one in declared.actions)
    found = explore(replace(declared, actions=actions))
    assert found.refutation is not None
    assert found.refutation.finding.property == Property.PROGRESS
    assert "match winds down" in found.refutation.finding.message


def test_limit_leaves_the_verdict_open() -> None:
    calls: list[explorer.ExplorationProgress] = []
    found = explore(offload_protocol(SMALL), max_states=1000, progress=calls.append)
    assert found.verdict is Verdict.UNDETERMINED
    assert found.limit == "1,000 states"
    assert calls[-1].depth == found.depth
    assert sum(found.actions.values()) == found.transitions
