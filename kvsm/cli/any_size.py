"""`kvsm check --any-size`: the proof by induction, without bounds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvsm.check.explore.counterexample import action_text, render, retell, save_log
from kvsm.check.explore.model import INTERRUPT, Verdict
from kvsm.check.proof.any_size_proof import OpenCondition, Proof, ProofProgress, prove
from kvsm.check.proof.finite import Example, ExampleSearch, Reached, never_met, never_taken, reached
from kvsm.check.proof.progress_proof import WINDING_DOWN
from kvsm.check.proof.solvers import Answer, Solver
from kvsm.check.protocol.plain import ProtocolModel
from kvsm.check.protocol.terms import Claim, Declaration
from kvsm.check.scopes.declared_model import DeclaredModel
from kvsm.cli.exit_codes import ExitCode
from kvsm.cli.output import complain, say, say_json
from kvsm.cli.toned import Toned, in_green, in_red, in_yellow
from kvsm.events import OffloadingEvent
from kvsm.properties import Property


class ToldExample(msgspec.Struct, frozen=True):
    """A state in which all hypotheses hold, and the step that breaks the claim.

    state: the cells that differ from the initial state.
    reachable: whether the explorer reaches a broken state of this size; null if it ran out of time.
    path: a shortest path to the broken state; empty if none was reached.
    excluding: facts of `state` that never hold together in a reachable state of this size.
    """

    bounds: str
    state: dict[str, str]
    step: str
    reachable: bool | None
    path: tuple[str, ...]
    excluding: tuple[str, ...]


class ToldOpenCondition(msgspec.Struct, frozen=True):
    """A condition that is not proved.

    step: the action or forget after which the claim may not hold.
    answers: the answer of each solver that did not prove it.
    """

    version: str
    step: str
    claim: str
    answers: dict[str, Answer]
    example: ToldExample | None


class AnySizeAnswer(msgspec.Struct, frozen=True, kw_only=True, tag_field="schema", tag="kvsm.any-size/1"):
    """What `kvsm check --any-size --json` prints: one line for each model.

    versions: the versions of the model that one proof covers.
    claims, invariants: the properties to prove, and the invariants that the induction needs besides.
    conditions: the number of distinct conditions.
    proved: the number of conditions that each solver proved.
    cpu_seconds: the CPU time of each solver.
    open: the conditions that are not proved.
    limit: what ended the proof early; empty if nothing did.
    never_taken: steps that are possible in no state with few members: their proofs are vacuous.
    never_met: conditions A of claims "if A, then B" that hold in no such state: likewise.
    """

    model: str
    verdict: Verdict
    versions: tuple[str, ...]
    claims: tuple[str, ...]
    invariants: tuple[str, ...]
    conditions: int
    proved: dict[str, int]
    cpu_seconds: dict[str, float]
    open: tuple[ToldOpenCondition, ...]
    seconds: float
    limit: str
    never_taken: tuple[str, ...] = ()
    never_met: tuple[str, ...] = ()


def check_any_size(
    model: DeclaredModel, solvers: Sequence[Solver], jobs: int, as_json: bool, log: Path | None
) -> ExitCode:
    """Prove one model for any size, and print the result. log: directory for the events of a refutation."""
    versions = model.versions()
    proof = _prove(model.name, {name: sized[0] for name, sized in versions.items()}, solvers, jobs)
    # After an interrupt the command must end, so no examples are searched.
    opened = [] if proof.limit else _examples(versions, proof.open)
    vacuous = _vacuous(versions.values()) if not proof.limit and find_spec("z3") else _Vacuous()
    answer = _answer(model, proof, opened, vacuous)
    if as_json:
        say_json(answer)
    else:
        say(*_lines(model, answer))
        for condition, example, found in opened:
            say(*_open_lines(condition, example, found))
    refuted = [(example, found) for _, example, found in opened if found is not None and found.refutation]
    if log is not None and refuted:
        example, found = refuted[0]
        assert example is not None
        assert found.refutation is not None
        events = model.events_of(example.declared, found.refutation.path)
        keep_events(log / model.name, model.name, events)
    if proof.limit == INTERRUPT:
        return ExitCode.INTERRUPTED
    return _CODES[answer.verdict]


_CODES = {
    Verdict.REFUTED: ExitCode.BROKEN,
    Verdict.UNDETERMINED: ExitCode.UNDETERMINED,
    Verdict.PROVED: ExitCode.GOOD,
}
_COLOURS = {Verdict.REFUTED: in_red, Verdict.UNDETERMINED: in_yellow, Verdict.PROVED: in_green}
_NO_EXAMPLE = "no example with few members was found"
_NO_Z3 = "z3 is not installed, which looks for an example: pip install 'kvsm[proof]'"
_Opened = tuple[ToldOpenCondition, "Example | None", "Reached | None"]


def _prove(name: str, versions: dict[str, Declaration], solvers: Sequence[Solver], jobs: int) -> Proof:
    """Prove a model. On a terminal, show a line of progress meanwhile."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(stderr=True)
    if not console.is_terminal:
        return prove(versions, solvers, jobs)
    with Live(console=console, auto_refresh=False, transient=True) as live:

        def show(progress: ProofProgress) -> None:
            live.update(Text(progress_line(name, progress)), refresh=True)

        return prove(versions, solvers, jobs, show)


def progress_line(name: str, progress: ProofProgress) -> str:
    """Format the progress of a proof as one line."""
    return (
        f"{name}   {progress.answered:,} of {progress.questions:,} answers   {progress.open} open   "
        f"{progress.seconds:.0f} s"
    )


# Open conditions.


def _examples(versions: dict[str, tuple[Declaration, ...]], opened: Sequence[OpenCondition]) -> list[_Opened]:
    """For each open condition, search an example and whether the example's state can be reached."""
    answers: dict[tuple[str, str, str], dict[str, Answer]] = defaultdict(dict)
    for one in opened:
        answers[one.version, one.step, one.claim][one.solver] = one.answer
    searches = {name: ExampleSearch(sized) for name, sized in versions.items()}
    found: list[_Opened] = []
    for (version, step, claim), said in answers.items():
        example = searches[version].example(step, claim) if find_spec("z3") else None
        known = None if example is None else reached(example)
        told = ToldOpenCondition(version, step, claim, said, _told(example, known))
        found.append((told, example, known))
    return found


def _told(example: Example | None, known: Reached | None) -> ToldExample | None:
    if example is None or known is None:
        return None
    reachable = True if known.refutation else False if known.complete else None
    path = tuple(map(action_text, known.refutation.path)) if known.refutation else ()
    step = action_text(example.move)
    return ToldExample(example.declared.bounds, example.values, step, reachable, path, known.excluding)


def _open_lines(one: ToldOpenCondition, example: Example | None, known: Reached | None) -> Iterator[str]:
    """Format an open condition for people: the claim, the step that may break it, and an example state."""
    said = ", ".join(f"{solver}: {answer.value}" for solver, answer in one.answers.items())
    yield ""
    yield in_yellow(f"open: {one.step} may not keep {one.claim!r}, with {one.version} ({said})")
    if example is None or known is None or one.example is None:
        yield f"  {_NO_EXAMPLE if find_spec('z3') else _NO_Z3}"
        return
    if known.refutation is not None:
        yield "  the explorer reaches a broken state:"
        told = retell(ProtocolModel(example.declared), known.refutation)
        yield from (f"  {line}" for line in render(told).split("\n"))
        return
    yield f"  in this state ({one.example.bounds}):"
    yield from (f"    {cell}: {value}" for cell, value in example.values.items())
    stuck = one.step == WINDING_DOWN
    yield "  no draining action is possible there" if stuck else f"  the step {one.example.step} breaks it"
    if not known.complete:
        yield "  whether this state can be reached was not found out in time"
        return
    yield "  this state cannot be reached, so an invariant is missing that excludes it"
    if known.excluding:
        yield "  no reachable state of this size has all of:"
        yield from (f"    {fact}" for fact in known.excluding)


# Results.


class _Vacuous(NamedTuple):
    """Steps and conditions whose proofs are vacuous; see `AnySizeAnswer`."""

    never_taken: tuple[str, ...] = ()
    never_met: tuple[str, ...] = ()


def _vacuous(versions: Collection[Sequence[Declaration]]) -> _Vacuous:
    return _Vacuous(never_taken(versions), never_met(versions))


def _answer(
    model: DeclaredModel, proof: Proof, opened: Sequence[_Opened], vacuous: _Vacuous
) -> AnySizeAnswer:
    declared = [sized[0] for sized in model.versions().values()]
    broken = any(known is not None and known.refutation is not None for _, _, known in opened)
    return AnySizeAnswer(
        model=model.name,
        verdict=Verdict.REFUTED if broken else Verdict.UNDETERMINED if any(vacuous) else proof.verdict,
        versions=proof.versions,
        claims=tuple(dict.fromkeys((*_named(one.always for one in declared), str(Property.PROGRESS)))),
        invariants=_named(one.invariants for one in declared),
        conditions=proof.conditions,
        proved=proof.proved,
        cpu_seconds={solver: round(seconds, 1) for solver, seconds in proof.cpu_seconds.items()},
        open=tuple(one for one, _, _ in opened),
        seconds=round(proof.seconds, 1),
        limit=proof.limit,
        never_taken=vacuous.never_taken,
        never_met=vacuous.never_met,
    )


def _named(claims: Iterable[tuple[Claim, ...]]) -> tuple[str, ...]:
    """Return the names of all claims, each once."""
    return tuple(dict.fromkeys(str(claim.name) for some in claims for claim in some))


def _lines(model: DeclaredModel, answer: AnySizeAnswer) -> Iterator[str | Toned]:
    """Format the result of a model for people."""
    sets = ", ".join(one.plural for one in next(iter(model.versions().values()))[0].index_sets)
    limit = f" (stopped at {answer.limit})" if answer.limit else ""
    yield f"{model.name}, for any number of {sets}"
    yield _COLOURS[answer.verdict](f"  verdict     {answer.verdict.value}{limit}")
    yield f"  versions    {'; '.join(answer.versions)}"
    yield f"  properties  {', '.join(answer.claims)}"
    yield f"  invariants  {len(answer.invariants)}: {'; '.join(answer.invariants)}"
    yield f"  conditions  {answer.conditions:,}, {len(answer.open)} open; {answer.seconds:.1f} s"
    for step in answer.never_taken:
        yield in_yellow(f"  {step} is never taken: its guard holds in no state, so nothing is proved of it")
    for condition in answer.never_met:
        yield in_yellow(f"  {condition} holds in no state, so what it implies is proved vacuously")
    for solver, proved in answer.proved.items():
        yield f"    {solver} proved {proved:,} in {answer.cpu_seconds[solver]:.1f} s of CPU time"


def keep_events(place: Path, name: str, events: Sequence[OffloadingEvent]) -> None:
    """Save the events of a refutation as an event log, and print where."""
    if not events:
        complain(f"{name} runs no offload core, so it has no event log")
        return
    save_log(events, place)
    complain(f"its {len(events):,} events are in {place}; try kvsm show {place} --block 0")
