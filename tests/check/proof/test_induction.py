"""The proof for any size can be trusted: solvers are told the protocol, and mistakes open conditions."""

from __future__ import annotations

import random
import re
from collections.abc import Collection
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as with_bounds
from places import ROOT
from protocol_mutants import MUTANTS

from examples import examples
from kvsm.check.proof.any_size_proof import conditions_of
from kvsm.check.proof.conditions import AFTER, TAKEN, Condition, Induction
from kvsm.check.proof.counting_lemma import ALL, known_counts
from kvsm.check.proof.finite import Example, ExampleSearch, reached, sizes_of
from kvsm.check.proof.progress_proof import WINDING_DOWN
from kvsm.check.proof.smt import member_name, value_name
from kvsm.check.proof.solvers import SOLVERS, Answer, Attempt, Solver
from kvsm.check.protocol.cell_layout import ActionInstance, CellLayout, assignments
from kvsm.check.protocol.offload_protocol import Variant, offload_protocol
from kvsm.check.protocol.plain import ProtocolModel, State, evaluate
from kvsm.check.protocol.scope import EXAMPLE_SCOPES, ProtocolScope
from kvsm.check.protocol.terms import (
    FALSE,
    TRUE,
    Action,
    Assign,
    Claim,
    Declaration,
    Each,
    Effect,
    ForAll,
    OneOf,
    Param,
    Truth,
    Variable,
    Words,
)
from kvsm.check.scopes.declared_model import DeclaredModel
from kvsm.check.scopes.models import MODELS
from kvsm.errors import ConfigError
from kvsm.properties import Property
from kvsm.states import MACHINES, Machine
from kvsm.states.machine import UndefinedStep

z3 = pytest.importorskip("z3")

CRASHES = tuple(with_bounds(scope, crashes=True) for scope in EXAMPLE_SCOPES)
"""The richest version of the protocol, with few members."""


@cache
def declared(place: int) -> Declaration:
    return offload_protocol(CRASHES[place])


def satisfiable(text: str) -> bool:
    solver = z3.Solver(ctx=z3.Context())
    solver.from_string(text)
    found = solver.check()
    assert found != z3.unknown
    return bool(found == z3.sat)


# What solvers are told is the protocol.


@cache
def met_states(seed: int) -> list[State]:
    """States on a random way through the protocol, with two workers."""
    model, chosen = ProtocolModel(declared(2)), random.Random(seed)
    (state,) = model.initial()
    met = [state]
    for _ in range(40):
        # Crashes and resets end what is interesting, so they are rare.
        moves = [move for move in model.actions(state) if move[0] not in ("crash", "reset")]
        after = model.next(state, chosen.choice(moves))
        assert after is not None
        state = after
        met.append(state)
    return met


def cell_lines(state: State, ending: str = "") -> list[str]:
    """One equation for each cell, in SMT-LIB."""
    lines = []
    for cell, value in zip(CellLayout(declared(2)).cells, state):
        domain = cell.variable.domain
        is_member = isinstance(domain, OneOf) and value != domain.initial
        name = member_name(domain.members, value) if is_member else value_name(domain, value)
        indices = " ".join(member_name(one, at) for one, at in zip(cell.variable.indices, cell.indices))
        lines.append(f"(= ({cell.variable.name}{ending} {indices}) {name})")
    return lines


def plainly_after(instance: ActionInstance, state: State) -> State:
    """The state right after the action, before anything is forgotten."""
    layout, after = CellLayout(declared(2)), list(state)
    for assign, binding in assignments(instance.action.effects, instance.binding):
        after[layout.place_of(assign.cell, binding)] = evaluate(assign.value, layout, state, binding)
    return tuple(after)


@given(seed=st.integers(0, 3), place=st.integers(0, 40), pick=st.integers(0, 10_000))
@settings(max_examples=examples(25))
def test_solvers_are_told_what_actions_do(seed: int, place: int, pick: int) -> None:
    """An action as SMT-LIB is possible where it is possible in plain Python, and leads to the same state."""
    protocol, state = declared(2), met_states(seed)[place]
    layout = CellLayout(protocol)
    possible = ProtocolModel(protocol).actions(state)
    # Half of the time an action that is possible, otherwise any.
    instances = [one for one in layout.instances if pick % 2 or one.move in possible]
    instance = instances[pick // 2 % len(instances)]
    induction = Induction(protocol, sizes_of(protocol))
    step = next(one for one in induction.steps if one.name == instance.action.name)
    taken = induction.taken(step)
    before = [f"(assert {line})" for line in cell_lines(state)]
    members = [
        f"(assert (= {param.name}{TAKEN} {member_name(param.members, value)}))"
        for param, value in instance.binding.items()
    ]
    text = "\n".join((induction.prelude, taken.text, *before, *members))
    assert satisfiable(text) is (instance.move in possible)
    if instance.move in possible:
        changed = {f"{name}{AFTER}" for name in step.assigned}
        wanted = [
            same
            for same, plain in zip(cell_lines(plainly_after(instance, state), AFTER), cell_lines(state))
            if same.split()[1].lstrip("(") in changed
        ]
        assert not satisfiable(f"{text}\n(assert (not (and {' '.join(wanted)} true)))")
        untouched = {one.name for one in protocol.variables} - set(step.assigned)
        assert all(taken.names[name] == name for name in untouched)


@pytest.mark.parametrize("step", [one.name for one in Induction(offload_protocol(CRASHES[0])).steps])
def test_no_step_is_ruled_out(step: str) -> None:
    """Each guard can be met where all claims and invariants hold. Its conditions mean something."""
    assert any(satisfiable(condition_under_hypotheses(declared(place), step)) for place in (0, 1, 2))


def condition_under_hypotheses(protocol: Declaration, step: str) -> str:
    induction = Induction(protocol, sizes_of(protocol))
    texts = (
        induction.condition(one.name, "", induction.taken(one).text)
        for one in induction.steps
        if one.name == step
    )
    return next(texts).texts[-1]


def test_variable_that_no_action_assigns_is_an_error() -> None:
    """A step leaves what it does not assign. A variable that no step assigns was forgotten."""
    loose = Variable("forgotten", "No action knows it.", (declared(0).index_sets[0],), Truth())
    wider = replace(declared(0), variables=(*declared(0).variables, loose))
    with pytest.raises(ConfigError, match="no action of offload protocol assigns 'forgotten'"):
        Induction(wider)


def test_effect_on_no_variable_is_an_error() -> None:
    narrower = replace(declared(0), variables=declared(0).variables[1:])
    with pytest.raises(ConfigError, match="assigns 'key', which is not among its variables"):
        Induction(narrower)


def with_action(effects: tuple[Effect, ...], *params: Param) -> Declaration:
    """The protocol with one more action, which is always possible."""
    extra = Action("extra", "Something more.", params, TRUE, effects)
    return replace(declared(0), actions=(*declared(0).actions, extra))


def test_effect_that_binds_a_parameter_again_is_an_error() -> None:
    """Two meanings of one parameter would be mixed up."""
    s, old = Param("s", declared(0).variable("old").indices[0]), declared(0).variable("old")
    protocol = with_action((Each(s, (Assign(old[s], TRUE),)),), s)
    with pytest.raises(ConfigError, match="binds the parameter 's', which is bound already"):
        Induction(protocol)


def test_last_effect_on_a_cell_counts() -> None:
    """As in the explorer."""
    s, old = Param("s", declared(0).variable("old").indices[0]), declared(0).variable("old")
    protocol = with_action((Assign(old[s], FALSE), Assign(old[s], TRUE)), s)
    induction = Induction(protocol, sizes_of(protocol))
    taken = induction.taken(next(one for one in induction.steps if one.name == "extra"))
    assert satisfiable(f"{induction.prelude}{taken.text}(assert (old{AFTER} slot_0))")
    assert not satisfiable(f"{induction.prelude}{taken.text}(assert (not (old{AFTER} slot_0)))")


def test_all_claims_of_a_property_are_proved() -> None:
    """Two claims may bear one name."""
    s, old = Param("s", declared(0).variable("old").indices[0]), declared(0).variable("old")
    never_old = Claim(Property.NO_STALE_DATA, "No slot is old.", ForAll(s, old[s].equals(FALSE)))
    stricter = replace(declared(0), always=(never_old, *declared(0).always))
    assert ExampleSearch([stricter]).example("reset", str(Property.NO_STALE_DATA)) is not None


# It is no more than what is needed, and no less.

NEEDED = {
    "copies belong to live transfers": ("plan_store", "no reuse in flight (S3)"),
    "a copy has two ends": (WINDING_DOWN, "progress (S9)"),
    "a store has its slots to itself": ("submit", "no reuse in flight (S3)"),
    "a load has its device blocks to itself": ("write_device", "a load writes its key"),
    "a transfer touches a block once": ("end_good", "block counts its copies"),
    "a store holds a lease": ("compute", "a store finds its key"),
    "what is being stored is new": ("end_good", "no stale data (S14)"),
    "a live transfer is on its way": (WINDING_DOWN, "progress (S9)"),
    "no copy of a plan has started": ("store_more", "a transfer touches a block once"),
    "no worker reports a plan": ("submit", "a transfer under way waits for a worker"),
    "a transfer under way waits for a worker": (WINDING_DOWN, "progress (S9)"),
    "what is reported good is written": ("end_good", "publish after commit (S2)"),
    "a kernel writes the block's key": ("run", "correct bytes (S15)"),
    "a store finds its key": ("read_device", "a store carries its key"),
    "a store carries its key": ("write_slot", "a store writes its key"),
    "a store writes its key": ("end_good", "publish after commit (S2)"),
    "a load finds its key": ("read_slot", "a load carries its key"),
    "a load carries its key": ("write_device", "a load writes its key"),
    "a load writes its key": ("end_good", "correct bytes (S15)"),
    "a load waits for kernels": ("write_device", "order of copies (S12)"),
    "a slot with a stray writer is retired": ("stray_slot_write", "publish after commit (S2)"),
    "nobody reads what a stray copy writes": ("stray_slot_write", "a load finds its key"),
    "a device block with a stray writer is retired": ("stray_device_write", "correct bytes (S15)"),
    "a retired device block is free": ("stray_device_write", "correct bytes (S15)"),
    "the log names a key once": ("crash", "conservation (S1)"),
    "a slot keeps what the log promises": ("crash", "publish after commit (S2)"),
    "the log promises nothing old": ("crash", "no stale data (S14)"),
    "the log is ahead of every write": ("write_slot", "a slot keeps what the log promises"),
}
"""Each invariant, and a condition that is open without it: a step and a claim."""


def test_each_invariant_says_what_needs_it() -> None:
    assert list(NEEDED) == [str(one.name) for one in declared(0).invariants]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "condition"), NEEDED.items())
def test_invariant_is_needed(name: str, condition: tuple[str, str]) -> None:
    """Without it a condition fails, with an example in which just this invariant does not hold."""
    step, claim = condition
    poorer = [without_invariant(declared(place), name) for place in range(len(CRASHES))]
    example = ExampleSearch(poorer).example(step, claim)
    assert example is not None
    invariant = next(one for one in declared(0).invariants if one.name == name)
    assert example.state is None or not holds(invariant, example)


def without_invariant(protocol: Declaration, name: str) -> Declaration:
    return replace(protocol, invariants=tuple(one for one in protocol.invariants if one.name != name))


def holds(claim: Claim, example: Example) -> bool:
    """Whether an invariant of the same name holds in the state of an example."""
    assert example.state is not None
    own = next(place for place in range(len(CRASHES)) if declared(place).bounds == example.declared.bounds)
    same = next(one for one in declared(own).invariants if one.name == claim.name)
    return bool(evaluate(same.term, CellLayout(example.declared), example.state, {}))


def test_claims_alone_are_not_inductive() -> None:
    """The proof needs the invariants: a slot could be read though its store wrote something else."""
    alone = [replace(declared(place), invariants=()) for place in range(2)]
    example = ExampleSearch(alone).example("end_good", "publish after commit (S2)")
    assert example is not None
    assert example.move[0] == "end_good"


@pytest.mark.slow
def test_example_that_cannot_be_reached_proposes_an_invariant() -> None:
    """The facts that no reachable state has together are those that the missing invariant speaks of."""
    poorer = [
        without_invariant(offload_protocol(scope), "a store has its slots to itself")
        for scope in EXAMPLE_SCOPES
    ]
    example = ExampleSearch(poorer).example("submit", "no reuse in flight (S3)")
    assert example is not None
    found = reached(example)
    assert found.refutation is None
    assert found.complete
    assert found.excluding == (
        "copy slot of copy 0 is slot 1",
        "copy slot of copy 1 is slot 1",
        "block of slot 1 is ALLOCATED(copies=0, pins=0)",
    )


# It can fail.


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_refuted(name: str) -> None:
    """The condition that the mistake breaks does not hold, and an example with few members shows it."""
    make, step, claim = MUTANTS[name]
    example = ExampleSearch([make(scope) for scope in CRASHES]).example(step, claim)
    assert example is not None, f"{step} keeps {claim}"
    assert ExampleSearch([declared(place) for place in range(len(CRASHES))]).example(step, claim) is None


def test_there_are_mutants_enough() -> None:
    """At least fifteen, and the explorer's broken variants are among them."""
    assert len(MUTANTS) >= 15
    assert len({(step, claim) for _, step, claim in MUTANTS.values()}) >= 15
    assert len(list(Variant)) == 4


def test_mistake_that_can_happen_is_a_refutation() -> None:
    """Where the explorer reaches a broken state of the example's size, it tells the way."""
    broken = [offload_protocol(scope, Variant.RESET_FREES) for scope in EXAMPLE_SCOPES]
    example = ExampleSearch(broken).example("reset", "no reuse in flight (S3)")
    assert example is not None
    found = reached(example)
    assert found.refutation is not None
    assert found.refutation.path[-1] == ("reset",)
    assert str(found.refutation.finding.property) == "no reuse in flight (S3)"


# Counters.


@pytest.mark.parametrize("machine", MACHINES.values(), ids=lambda one: one.name)
@given(data=st.data())
@settings(max_examples=examples(20))
def test_known_counts_are_the_tables(machine: Machine, data: st.DataObject) -> None:
    """Where the table leaves a counter one value, every way through the table gives it this value."""
    full = data.draw(st.booleans(), label="starts full")
    start = 5 if full else 0
    state, counts = int(machine.initial), (start,) * len(machine.counters)
    known = [known_counts(machine, place, full) for place in range(len(machine.counters))]
    for _ in range(12):
        for values, count in zip(known, counts):
            expected = values.get(state, count)
            assert count == (start if expected == ALL else expected)
        steps = (after(machine, state, counts, trigger) for trigger in machine.triggers)
        possible = [one for one in steps if one is not None]
        if not possible:
            return
        state, counts = data.draw(st.sampled_from(possible))


def after(
    machine: Machine, state: int, counts: tuple[int, ...], trigger: int
) -> tuple[int, tuple[int, ...]] | None:
    try:
        return machine.step(state, counts, trigger)
    except UndefinedStep:
        return None


def refused_at_a_limit(
    machine: Machine, counter: int, triggers: Collection[int], starts_full: bool
) -> list[str]:
    """Rows of these triggers that are refused when a counter is at its limit.

    A row counts up without a limit if the table leaves the counter one value before it, or if the row
    counts down a counter that started with all members: together they never count more.
    """
    known, refused = known_counts(machine, counter, starts_full), []
    for trigger in triggers:
        for state in machine.states:
            for arc in machine.dense[trigger][state]:
                delta, others = arc.deltas[counter], arc.deltas[:counter]
                if delta is not None and delta > 0 and state not in known and -delta not in others:
                    refused.append(f"{state.name} on {machine.triggers(trigger).name}")
    return refused


def test_only_what_may_be_refused_is_refused_at_a_limit() -> None:
    """Limits of counters refuse a new pin, reader or lease, but no report, end, reset, loss or release."""
    refused = {
        counter.name: refused_at_a_limit(
            machine, place, tuple(map(int, machine.triggers)), counter.name == "pending"
        )
        for machine in MACHINES.values()
        for place, counter in enumerate(machine.counters)
    }
    assert refused == {
        "copies": ["LOADING on BEGIN_LOAD"],
        "pins": ["STORED on PIN", "LOADING on PIN"],
        "pending": [],
        "failed": [],
        "readers": ["READING on BEGIN_READ"],
        "loads": [],
    }


@given(data=st.data())
@settings(max_examples=examples(30))
def test_a_limit_only_takes_steps_away(data: st.DataObject) -> None:
    """With smaller limits a word takes the same step or none: what holds without limits holds with them."""
    words = [one.domain for one in declared(2).variables if isinstance(one.domain, Words)]
    domain = data.draw(st.sampled_from(words))
    tight = Words(domain.machine, domain.start, domain.limits, domain.kept)
    wide = Words(domain.machine, domain.start, tuple(limit + 2 for limit in domain.limits), domain.kept)
    word = data.draw(st.sampled_from([one for one in tight.words if one is not None]))
    trigger = data.draw(st.sampled_from(list(domain.machine.triggers)))
    narrow_after = tight.words[tight.next[trigger][tight.words.index(word)]]
    wide_after = wide.words[wide.next[trigger][wide.words.index(word)]]
    assert narrow_after in (wide_after, None)


# Solvers.


@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("(declare-const x Bool) (assert x) (assert (not x))", Answer.HOLDS),
        ("(declare-const x Bool) (assert x)", Answer.FAILS),
    ],
)
def test_solver_answers(name: str, text: str, answer: Answer) -> None:
    pytest.importorskip(SOLVERS[name].package)
    assert SOLVERS[name].answer(Condition("step", "claim", (text,))) is answer


@pytest.mark.parametrize("name", SOLVERS)
def test_model_of_few_hypotheses_is_no_answer(name: str) -> None:
    """A model that breaks a hypothesis which was left out shows nothing."""
    pytest.importorskip(SOLVERS[name].package)
    few, every = "(declare-const x Bool) (assert x)", "(declare-const x Bool) (assert x) (assert (not x))"
    assert SOLVERS[name].answer(Condition("step", "claim", (few, every))) is Answer.HOLDS


def test_solver_without_an_answer_leaves_it_open() -> None:
    """A timeout is no proof."""
    slow = Solver("slow", "z3", lambda *_: Answer.OPEN, (Attempt(0, {}, 1), Attempt(-1, {}, 1)))
    assert slow.answer(Condition("step", "claim", ("", ""))) is Answer.OPEN


def test_bounds_change_no_question() -> None:
    """What is proved is the same text for all bounds: no number of a scope is in it."""
    small, large = (
        {condition.texts for condition in conditions_of(offload_protocol(scope), None, "submit")}
        for scope in (
            EXAMPLE_SCOPES[0],
            ProtocolScope(5, 4, 3, workers=6, live_transfers=5, copies=7, queued=9),
        )
    )
    assert small == large


def test_change_of_the_protocol_changes_the_question() -> None:
    make, _, _ = MUTANTS["a load lets go of its slot at once (B35)"]
    good, bad = (
        {one.texts for one in conditions_of(protocol, None, "end_good")}
        for protocol in (declared(0), make(CRASHES[0]))
    )
    assert good != bad


def test_parameter_of_a_term_keeps_its_meaning() -> None:
    """A parameter that is bound twice, one inside the other, is two parameters."""
    protocol = declared(0)
    s = Param("s", protocol.variable("block").indices[0])
    old = protocol.variable("old")
    term = ForAll(s, old[s].equals(old[s]) & ForAll(s, old[s].equals(old[s])))
    text = Induction(protocol).writer.say(term)
    assert text.count("forall") == 2
    assert "s!0" in text
    assert "s!1" in text


def test_the_page_says_any_size_exactly_where_it_holds() -> None:
    """A property is proved for any size if a protocol claims it. Progress (S9) always is."""
    page = (ROOT / "docs" / "verification.md").read_text()
    rows = re.findall(r"^\| [^|]*\((S\d+)\) \|([^|]*)\|(?:[^|]*\|){5}$", page, re.MULTILINE)
    assert len(rows) == len(Property)
    declared = [model for model in MODELS.values() if isinstance(model, DeclaredModel)]
    versions = [sized[0] for model in declared for sized in model.versions().values()]
    claimed = {claim.id for one in versions for claim in one.always} | {Property.PROGRESS.id}
    assert {property for property, proved in rows if proved.strip()} == claimed
