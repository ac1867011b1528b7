"""The proof of the request protocol can fail: mistakes and missing invariants open conditions."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from request_mutants import MISTAKES, Mistake

from kvsm.check.explore.model import Verdict
from kvsm.check.proof.any_size_proof import conditions_of, prove
from kvsm.check.proof.conditions import Induction
from kvsm.check.proof.finite import sizes_of
from kvsm.check.proof.smt import SmtWriter
from kvsm.check.proof.solvers import SOLVERS, Solver
from kvsm.check.protocol.request_protocol import request_protocol
from kvsm.check.protocol.request_scope import RequestScope
from kvsm.check.protocol.terms import After, Declaration, Param
from kvsm.properties import Property
from kvsm.states import REQUEST, RequestTrigger
from kvsm.states.machine import UndefinedStep

pytestmark = pytest.mark.slow
z3 = pytest.importorskip("z3")

TWO = request_protocol(RequestScope(workers=2, restarts=True))
"""Two of everything but the slot: enough for an example of each open condition."""


NEEDED = [
    ("a released request has no record", "hit", str(Property.ONE_RELEASE_PER_HOLD)),
    ("a loading request has a load", "hit", str(Property.ONE_RELEASE_PER_HOLD)),
    ("a hold has one holder", "hit", str(Property.NO_REUSE_IN_FLIGHT)),
    ("transfers that hold slots are live", "begin_load", "a slot is held once"),
    ("a store has its slot to itself", "submit", str(Property.NO_REUSE_IN_FLIGHT)),
    ("a slot is held once", "unmatch", "block counts its pins"),
    ("a live transfer is on its way", "reset", str(Property.LEGAL_CALLS)),
    ("a transfer under way waits for a worker", "winding down", str(Property.PROGRESS)),
    ("a refused load is planned", "plan_store", "transfers that hold slots are live"),
]
"""Each invariant, and a condition that is open without it: a step and a claim."""


def satisfiable(text: str) -> bool:
    solver = z3.Solver(ctx=z3.Context())
    solver.from_string(text)
    found = solver.check()
    assert found != z3.unknown
    return bool(found == z3.sat)


def is_open(declared: Declaration, step: str, claim: str) -> bool:
    """Whether a condition has an example with as few members as the declaration."""
    asked = [one for one in conditions_of(declared, sizes_of(declared), step) if one.claim == claim]
    assert asked
    return any(satisfiable(one.texts[-1]) for one in asked)


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_mistake_opens_a_condition(mistake: Mistake) -> None:
    """The proof fails at the step and the claim that the mistake is about, with an example of one of each."""
    assert is_open(mistake.declared, mistake.step, mistake.claim)


@pytest.mark.parametrize(("name", "step", "claim"), NEEDED, ids=str)
def test_invariant_is_needed(name: str, step: str, claim: str) -> None:
    """Without it some condition is open, and with it that condition holds."""
    others = tuple(one for one in TWO.invariants if one.name != name)
    assert len(others) == len(TWO.invariants) - 1
    assert is_open(replace(TWO, invariants=others), step, claim)
    assert not is_open(TWO, step, claim)


def test_every_invariant_is_shown_to_be_needed() -> None:
    assert [name for name, _, _ in NEEDED] == [one.name for one in TWO.invariants]


@pytest.mark.parametrize("trigger", REQUEST.triggers, ids=lambda trigger: trigger.name)
def test_solvers_are_told_the_rows_of_a_counter_of_one_bit(trigger: RequestTrigger) -> None:
    """A row may ask for the one load that there can be, or for none."""
    writer = SmtWriter(TWO, sizes_of(TWO))
    request = TWO.variable("request")
    r = Param("r", request.indices[0])
    after = writer.say(After(trigger, request[r]), given={r: "request_0"})
    for state, loads in product(REQUEST.states, (0, 1)):
        try:
            target = REQUEST.states(REQUEST.step(state, (loads,), trigger)[0]).name
        except UndefinedStep:
            target = "ILLEGAL"
        word = f"(assert (= (request request_0) request_{state.name}))"
        load = f"(assert (= (load request_0) {'transfer_0' if loads else 'no_transfer'}))"
        told = f"(assert (not (= {after} request_{target})))"
        assert not satisfiable(writer.prelude() + word + load + told), (state, loads)


@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
def test_request_protocol_is_proved_for_any_size(solver: Solver) -> None:
    proof = prove({"requests": TWO}, (solver,))
    assert (proof.verdict, proof.open) == (Verdict.PROVED, ())
    assert proof.conditions > 600


def test_claims_alone_are_not_inductive() -> None:
    assert is_open(replace(TWO, invariants=()), "hit", str(Property.NO_REUSE_IN_FLIGHT))


def test_every_step_can_be_taken() -> None:
    """The claims and invariants exclude no step: a proof about steps that never come would mean little."""
    induction = Induction(TWO, sizes_of(TWO))
    hypotheses = "".join(
        f"(assert {induction.writer.say(one)})" for parts in induction.claims.values() for one in parts
    )
    for step in induction.steps:
        assert satisfiable(induction.prelude + hypotheses + induction.taken(step).text), step.name
