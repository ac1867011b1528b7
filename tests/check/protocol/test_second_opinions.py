"""Rumur and TLC agree with kvsm about the protocol: the same states, the same bugs.

Where they are not installed these tests are skipped, with what to do; the rest of the file needs no tool.
"""

from __future__ import annotations

import dataclasses
import runpy
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest
from msgspec import structs
from protocol.export import table_rows, words_in
from protocol.murphi import murphi_text
from protocol.opinions import (
    BROKEN,
    GOOD,
    SYMMETRIC,
    Case,
    differences,
    disagreements,
    of_kvsm,
    of_rumur,
    of_tlc,
)
from protocol.proof_text import proof_text
from protocol.texts import ANY_SIZE, DECLARED
from protocol.tla import module_name, tla_configuration, tla_module
from protocol.tools import Opinion, ToolFailed, ask_rumur, ask_tlc, rumur_missing, tlc_missing

from kvsm.check.protocol.offload_protocol import offload_protocol
from kvsm.check.protocol.terms import (
    FALSE,
    TRUE,
    Action,
    Assign,
    Claim,
    Const,
    Declaration,
    ForAll,
    Words,
    number,
)
from kvsm.states import BLOCK, MACHINES, BlockTrigger, Machine
from kvsm.states.machine import VOID

NO_RUMUR = pytest.mark.skipif(bool(rumur_missing()), reason=rumur_missing() or "Rumur is here")
NO_TLC = pytest.mark.skipif(bool(tlc_missing()), reason=tlc_missing() or "TLC is here")
TOOLS = [
    pytest.param(of_rumur, marks=NO_RUMUR, id="rumur"),
    pytest.param(of_tlc, marks=NO_TLC, id="tlc"),
]
POOL = ThreadPoolExecutor(2)


@cache
def being_asked(ask: Callable[..., Opinion], case: Case) -> Future[Opinion]:
    return POOL.submit(ask, case.declared(), symmetry=case.symmetry)


def asked(ask: Callable[..., Opinion], case: Case) -> Opinion:
    """A tool's answer. The other tool starts meanwhile, because its test comes next."""
    for one, missing in ((of_rumur, rumur_missing()), (of_tlc, tlc_missing())):
        if not missing:
            being_asked(one, case)
    return being_asked(ask, case).result()


def test_the_page_of_what_is_proved_is_what_the_declaration_says_now() -> None:
    """Run `PYTHONPATH=specs python -m protocol.texts` if it is not."""
    assert ANY_SIZE.read_text() == proof_text()


def test_the_command_of_the_readme_writes_the_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file holds what the tools are given; the page is written again as it is."""
    monkeypatch.setattr(sys, "argv", ["protocol.texts", str(tmp_path / "new" / "folder")])
    runpy.run_path(str(ANY_SIZE.with_name("texts.py")), run_name="__main__")
    written = {path.name: path.read_text() for path in (tmp_path / "new" / "folder").iterdir()}
    assert sorted(written) == [
        "Offload.cfg",
        "Offload.tla",
        "Request.cfg",
        "Request.tla",
        "offload.m",
        "request.m",
    ]
    for declared in DECLARED:
        module = module_name(declared)
        assert written[f"{module}.tla"] == tla_module(declared)
        assert written[f"{module.lower()}.m"] == murphi_text(declared)


@pytest.mark.slow
@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("case", GOOD.values(), ids=GOOD)
def test_same_states_of_the_good_protocol(case: Case, tool: Callable[..., Opinion]) -> None:
    """No property and no auxiliary invariant is refuted, and the numbers of states are exactly equal."""
    ours, theirs = of_kvsm(case.declared()), asked(tool, case)
    assert ours.verdict == "proved"
    assert differences(ours, theirs) == []


@pytest.mark.slow
@NO_RUMUR
@NO_TLC
def test_same_states_when_symmetric_ones_are_merged() -> None:
    theirs = [asked(of_rumur, SYMMETRIC), asked(of_tlc, SYMMETRIC)]
    assert disagreements(SYMMETRIC, of_kvsm(SYMMETRIC.declared(), symmetry=True), theirs) == []


@pytest.mark.slow
@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("case", BROKEN, ids=lambda case: case.variant.name)
def test_same_bug_of_a_broken_protocol(case: Case, tool: Callable[..., Opinion]) -> None:
    """The same property is refuted, by a trace of the same length, which is the shortest."""
    ours, theirs = of_kvsm(case.declared()), asked(tool, case)
    assert ours.broken
    assert differences(ours, theirs) == []


# What the tools are given can be refuted in other respects, too.

TINY = BROKEN[0].scope


@pytest.mark.slow
@pytest.mark.parametrize("ask", TOOLS)
def test_tables_are_those_of_the_machines(ask: Callable[..., Opinion]) -> None:
    """The texts contain the rows: a table that evicts a block that a match holds is refuted."""
    rows = [
        dataclasses.replace(row, when={}, then={"pins": VOID}) if row.trigger == BlockTrigger.EVICT else row
        for row in BLOCK.rows
    ]
    evicts_held = Machine(BLOCK.name, BLOCK.states, BLOCK.triggers, BLOCK.counters, tuple(rows))
    declared = offload_protocol(TINY, machines={**MACHINES, "block": evicts_held})
    ours = of_kvsm(declared)
    assert ours.trace[-1] == "evict"
    assert differences(ours, ask(declared)) == []


@pytest.mark.slow
@pytest.mark.parametrize("ask", TOOLS)
def test_same_bug_of_a_log_that_is_behind(ask: Callable[..., Opinion]) -> None:
    """A crash shows it: a store was submitted while the written log still promised its slot's old block."""
    scope = structs.replace(TINY, keys=2, crashes=True)
    declared, careless = (offload_protocol(structs.replace(scope, crashes=one)) for one in (True, False))
    submit = next(one for one in careless.actions if one.name == "submit")
    actions = tuple(submit if one.name == "submit" else one for one in declared.actions)
    broken = dataclasses.replace(declared, actions=actions, invariants=())
    ours = of_kvsm(broken)
    assert (ours.broken, ours.trace[-1]) == ("S2", "crash")
    assert differences(ours, ask(broken)) == []


@pytest.mark.slow
@pytest.mark.parametrize("ask", TOOLS)
def test_auxiliary_invariants_are_checked(ask: Callable[..., Opinion]) -> None:
    """The texts contain the invariants: a false one is refuted by its name."""
    declared = offload_protocol(TINY)
    d = declared.actions[0].params[0]
    no_key = declared.variable("key")[d].equals(Const(declared.variable("key").domain, 1))
    invariants = (*declared.invariants, Claim("no request's block", "It is false.", ForAll(d, no_key)))
    found = ask(dataclasses.replace(declared, invariants=invariants))
    assert (found.broken, len(found.trace)) == ("NoRequestsBlock", 1)


@pytest.mark.slow
@pytest.mark.parametrize("ask", TOOLS)
def test_winding_down_that_leads_nowhere_is_refuted(ask: Callable[..., Opinion]) -> None:
    """Progress (S9): the first draining action shows a rank that does not fall."""
    found = ask(dataclasses.replace(offload_protocol(TINY), rank=number(1)))
    assert (found.broken, len(found.trace)) == ("S9", 2)


@pytest.mark.slow
@pytest.mark.parametrize("ask", TOOLS)
def test_rest_that_is_not_reached_is_refuted(ask: Callable[..., Opinion]) -> None:
    """Progress (S9): every state must come to rest."""
    never = dataclasses.replace(offload_protocol(TINY), rest=FALSE)
    assert ask(never).broken == "S9"


@NO_RUMUR
def test_text_that_rumur_cannot_read_is_no_verdict() -> None:
    with pytest.raises(ToolFailed, match="unknown symbol"):
        ask_rumur("var here: nonsense")


@NO_TLC
def test_text_that_tlc_cannot_read_is_no_verdict() -> None:
    declared = offload_protocol(TINY)
    unreadable = tla_module(declared).replace("Init ==", "Init")
    with pytest.raises(ToolFailed, match="no verdict"):
        ask_tlc(module_name(declared), unreadable, tla_configuration(declared))


# What needs no tool.


@pytest.mark.parametrize(
    "words",
    [words for declared in DECLARED for words in words_in(declared)],
    ids=lambda words: words.machine.name,
)
def test_exported_rows_are_the_machine(words: Words) -> None:
    """For each word and trigger, the exported rows lead to the same word as kvsm's own table."""
    names = [counter.name for counter in words.machine.counters]
    for trigger in words.machine.triggers:
        for place, word in enumerate(words.words):
            after = words.words[words.next[trigger][place]]
            assert by_rows(words, names, trigger.name, word) == after


def by_rows(
    words: Words, names: list[str], trigger: str, word: tuple[int, tuple[int, ...]] | None
) -> tuple[int, tuple[int, ...]] | None:
    """The word after a trigger, by the rows of an export; None for ILLEGAL."""
    if word is None:
        return None
    states = words.machine.states
    state, counts = states(word[0]).name, dict(zip(names, word[1]))
    fitting = [
        row
        for row in table_rows(words)
        if row.trigger == trigger
        and state in row.sources
        and all(low <= counts[name] <= high for name, (low, high) in row.ranges.items())
    ]
    assert len(fitting) <= 1
    for row in fitting:
        changed = {name: 0 if by is None else counts[name] + by for name, by in row.changes.items()}
        return int(states[row.target or state]), tuple((counts | changed).values())
    return None


@pytest.mark.parametrize("declared", DECLARED, ids=lambda declared: declared.name)
def test_tla_module_says_what_everything_means(declared: Declaration) -> None:
    """The text alone explains each variable, action, property and invariant in a sentence."""
    said = " ".join(tla_module(declared).replace("\\*", "").split())
    claims = (*declared.always, *declared.invariants, *declared.sometimes)
    for one in (*declared.variables, *declared.acting, *claims):
        assert one.says in said
    assert declared.about in said
    for forget in declared.forgets:
        assert forget.why in said


def test_murphi_refuses_effects_that_overwrite_what_each_other_reads() -> None:
    """Murphi's statements happen one after the other, so a swap would be a different action."""
    declared = offload_protocol(TINY)
    one, other = declared.variable("key"), declared.variable("kernel_key")
    d = declared.actions[0].params[0]
    swap = Action(
        "swap", "Two keys change places.", (d,), TRUE, (Assign(one[d], other[d]), Assign(other[d], one[d]))
    )
    with pytest.raises(TypeError, match="need"):
        murphi_text(dataclasses.replace(declared, actions=(*declared.actions, swap)))


def opinion(tool: str, states: int, broken: str = "", steps: int = 0, **covered: int) -> Opinion:
    return Opinion(
        tool=tool, states=states, seconds=0.0, broken=broken, trace=("step",) * steps, covered=covered
    )


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (opinion("a", 5), opinion("b", 5), []),
        (opinion("a", 5), opinion("b", 6), ["a counts 5 states, b 6"]),
        (opinion("a", 5, "S2", 3), opinion("b", 9, "S2", 3), []),
        (
            opinion("a", 5, "S2", 3),
            opinion("b", 5, "S2", 4),
            ["a: S2 refuted in 3 steps, b: S2 refuted in 4 steps"],
        ),
        (opinion("a", 5, "S2", 3), opinion("b", 5), ["a: S2 refuted in 3 steps, b: proved"]),
        (opinion("a", 5, hit=4), opinion("b", 5, hit=0), ["only a has seen that hit"]),
    ],
)
def test_differences_are_told(one: Opinion, other: Opinion, said: list[str]) -> None:
    assert differences(one, other) == said


def test_kvsm_may_merge_less_but_never_more() -> None:
    both = [opinion("a", 5), opinion("b", 5)]
    assert disagreements(SYMMETRIC, opinion("kvsm", 6), both) == []
    assert disagreements(SYMMETRIC, opinion("kvsm", 4), both) == ["kvsm counts 4 states, fewer than a's 5"]
