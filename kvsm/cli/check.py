"""`kvsm check`: explore every interleaving of the real code or of the protocol, within a scope's bounds."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import groupby
from pathlib import Path
from typing import Any

import click
import msgspec
from click.core import ParameterSource

from kvsm.check.explore.checked_model import CheckedModel, ExplorationLimits
from kvsm.check.explore.counterexample import Counterexample, CounterexampleStep, render
from kvsm.check.explore.coverage import all_edges, never_taken
from kvsm.check.explore.explorer import ExplorationProgress
from kvsm.check.explore.model import INTERRUPT, Exploration, Refutation, Verdict
from kvsm.check.proof.solvers import Solver, chosen_solvers
from kvsm.check.scopes.declared_model import DeclaredModel
from kvsm.check.scopes.untaken import UNTAKEN
from kvsm.cli.any_size import check_any_size, keep_events
from kvsm.cli.exit_codes import ExitCode
from kvsm.cli.findings import ToldFinding, told_finding
from kvsm.cli.jobs_options import cluster_option, executor_of_processes, tell_lost
from kvsm.cli.output import Command, complain, say, say_json
from kvsm.cli.toned import in_green, in_red, in_yellow
from kvsm.errors import ConfigError
from kvsm.states import MACHINES

MOST = 1_000_000
"""The largest bound that is accepted. A scope of that size could not be explored, nor always be packed."""
WORST_FIRST = (ExitCode.BROKEN, ExitCode.INTERRUPTED, ExitCode.UNDETERMINED, ExitCode.GOOD)

_CODES = {
    Verdict.REFUTED: ExitCode.BROKEN,
    Verdict.UNDETERMINED: ExitCode.UNDETERMINED,
    Verdict.PROVED: ExitCode.GOOD,
}
_COLOURS = {Verdict.REFUTED: in_red, Verdict.UNDETERMINED: in_yellow, Verdict.PROVED: in_green}


class CheckAnswer(msgspec.Struct, frozen=True, kw_only=True, tag_field="schema", tag="kvsm.check/1"):
    """What `kvsm check --json` prints: one line for each model.

    bounds: what was explored; a proof holds within these bounds.
    states: distinct states; for the model `threads`, schedules.
    transitions: actions taken; for `threads`, steps.
    depth: actions from an initial state to the farthest state; for `threads`, steps of the longest schedule.
    seconds: wall time.
    limit: the limit that ended an undetermined search.
    finding: the broken property; null if none was found.
    counterexample: a shortest path to the finding; null if there is none.
    reached, unreached: the "sometimes" properties that held in some state, and those that held in none.
    actions: how often each action was taken.
    edges: the edges of the machine tables that were taken.
    never_taken: the other edges of these tables.
    """

    model: str
    bounds: str
    verdict: Verdict
    states: int
    transitions: int
    depth: int
    seconds: float
    states_per_second: float
    limit: str
    finding: ToldFinding | None
    counterexample: ToldCounterexample | None
    reached: tuple[str, ...]
    unreached: tuple[str, ...]
    actions: dict[str, int]
    edges: tuple[str, ...]
    never_taken: tuple[str, ...]


class ToldCounterexample(msgspec.Struct, frozen=True):
    """The steps that refute a model.

    circle: the number of the step that enters an endless cycle; 0 if none does.
    because: the step to look at first.
    """

    steps: tuple[CounterexampleStep, ...]
    circle: int
    because: str


class ListedModel(msgspec.Struct, frozen=True, kw_only=True, tag_field="schema", tag="kvsm.check-list/1"):
    """What `kvsm check --list --json` prints: one line for each model.

    says: what the model covers, in a line.
    machines: the machines whose tables it covers.
    scopes: the bounds of each scope.
    """

    model: str
    says: str
    machines: tuple[str, ...]
    scopes: dict[str, dict[str, int]]


@click.command(cls=Command)
@click.argument("models", metavar="[MODEL]...", nargs=-1)
@click.option("--list", "only_list", is_flag=True, help="List models, scopes and bounds; check nothing.")
@click.option("--scope", default="small", show_default=True, help="Scope to explore; see --list.")
@click.option(
    "-b",
    "--bound",
    "bounds",
    metavar="NAME=N",
    multiple=True,
    help="Replace a bound of the scope: device_blocks=3. Repeatable.",
)
@click.option(
    "--no-symmetry", is_flag=True, help="Do not merge symmetric states: more states, the same verdict."
)
@click.option("--jobs", type=click.IntRange(1, 256), help="Processes.  [default: one per CPU]", metavar="N")
@cluster_option
@click.option("--seconds", "max_seconds", type=click.FloatRange(min=0), help="Limit for each model.")
@click.option("--states", "max_states", type=click.IntRange(min=1), help="Limit for each model.")
@click.option(
    "--depth",
    "max_depth",
    type=click.IntRange(min=1),
    help="Limit for the actions from the start; protocol, requests and threads do not support it.",
)
@click.option(
    "--log",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Write the event log of a refutation to DIR/MODEL.",
)
@click.option(
    "--any-size",
    is_flag=True,
    help="Prove the protocols by induction instead: for any number of blocks, workers, transfers, requests.",
)
@click.option(
    "--solver",
    type=click.Choice(["z3", "cvc5", "both"]),
    default="both",
    show_default=True,
    help="Solvers of --any-size.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one line per model.")
def check(
    models: tuple[str, ...],
    only_list: bool,
    scope: str,
    bounds: tuple[str, ...],
    no_symmetry: bool,
    jobs: int | None,
    cluster: str | None,
    log: Path | None,
    any_size: bool,
    solver: str,
    as_json: bool,
    **limits: Any,
) -> None:
    """Explore every interleaving of MODEL within bounds.

    Without MODEL all models are explored. Exploration is breadth first: every action in every reachable
    state. A refutation therefore shows a shortest path, with what each step changed. --log also writes this
    path as an event log (`kvsm show DIR/MODEL --block 0`). A proof holds only for the printed bounds.

    With --any-size the two protocols are proved by induction, without bounds, with the solvers z3 and cvc5.

    \b
    kvsm check                                 a small scope of each model: a few seconds
    kvsm check serving --scope full            minutes
    kvsm check serving --scope pairs           about eighty generated small scopes: minutes
    kvsm check copies -b copies=3 -b bad=1     bounds of your own
    kvsm check tiers --scope full --cluster ray://head:10001      on many machines
    kvsm check --list                          all models and scopes
    kvsm check protocol --any-size             a proof by two solvers: a minute (pip install 'kvsm[proof]')

    \b
    Exit codes: 0 proved; 1 refuted; 2 unusable input; 3 undetermined, because a limit was reached.
    Several models: refuted if any is, else undetermined if any is.
    """
    if only_list:
        _print_list(as_json)
        return
    if any_size:
        raise SystemExit(_prove(models, chosen_solvers(solver), jobs, log, as_json))
    chosen = _choose(models, scope, bounds)
    if log is not None:
        _check_free(log, [model.name for model in chosen])
    limit = ExplorationLimits(
        jobs=jobs or os.cpu_count() or 1, symmetry=not no_symmetry, heard=tell_lost, **limits
    )
    with nullcontext() if cluster is None else executor_of_processes(cluster, jobs) as executor:
        limit = msgspec.structs.replace(limit, executor=executor)
        codes = set()
        for model in chosen:
            supported = limit if models else _supported_limits(limit, model)
            if scope in model.families:
                codes.add(_check_family(model, scope, bounds, supported, log, as_json))
            else:
                found = _check_scope(model, _bounded(model, scope, bounds), supported, log, as_json)
                codes.add(_exit_code(found))
    raise SystemExit(next(code for code in WORST_FIRST if code in codes))


def _check_scope(
    model: CheckedModel,
    scope: Any,
    limit: ExplorationLimits,
    log: Path | None,
    as_json: bool,
    *,
    is_one_of_many: bool = False,
) -> Exploration:
    """Explore one scope, and print the result. is_one_of_many: print one line unless it is refuted."""
    found = _explore(model, scope, limit)
    refutation = _refutation_with_path(found)
    counterexample = None if refutation is None else model.retell(scope, refutation)
    if as_json:
        say_json(_answer(model, found, counterexample))
    elif is_one_of_many and found.verdict is not Verdict.REFUTED:
        say(_short_line(found))
    else:
        say(*_lines(model, found, counterexample))
    if log is not None and refutation is not None:
        keep_events(log / model.name, model.name, model.events(scope, refutation))
    return found


def _check_family(
    model: CheckedModel,
    family: str,
    bounds: Sequence[str],
    limit: ExplorationLimits,
    log: Path | None,
    as_json: bool,
) -> ExitCode:
    """Explore the scopes of a family one by one; stop after a refutation or an interrupt."""
    explored, codes = [], set()
    for name in model.families[family]:
        wanted = _bounded(model, name, bounds)
        found = _check_scope(model, wanted, limit, log, as_json, is_one_of_many=True)
        explored.append(found)
        codes.add(_exit_code(found))
        if codes & {ExitCode.BROKEN, ExitCode.INTERRUPTED}:
            break
    if not as_json:
        say(*_family_lines(model, family, explored))
    return next(code for code in WORST_FIRST if code in codes)


# Without bounds.


def _prove(
    names: Sequence[str], solvers: Sequence[Solver], jobs: int | None, log: Path | None, as_json: bool
) -> ExitCode:
    """Prove the named models for any size; without names, every model that supports it."""
    _refuse_bounds(click.get_current_context())
    models = _provable(names)
    if log is not None:
        _check_free(log, [model.name for model in models])
    codes = {check_any_size(model, solvers, jobs or os.cpu_count() or 1, as_json, log) for model in models}
    return next(code for code in WORST_FIRST if code in codes)


def _refuse_bounds(context: click.Context) -> None:
    """Raise `ConfigError` for an option of explorations: a proof for any size has no bounds."""
    for name, option in _OF_EXPLORATIONS.items():
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT:
            raise ConfigError(f"{option} is for an exploration; --any-size proves without bounds")


_OF_EXPLORATIONS = {
    "scope": "--scope",
    "bounds": "--bound",
    "no_symmetry": "--no-symmetry",
    "cluster": "--cluster",
    "max_seconds": "--seconds",
    "max_states": "--states",
    "max_depth": "--depth",
}


def _provable(names: Sequence[str]) -> list[DeclaredModel]:
    """Return the named models; without names, every model that can be proved for any size."""
    from kvsm.check.scopes.models import MODELS

    provable = {model.name: model for model in MODELS.values() if isinstance(model, DeclaredModel)}
    for name in names:
        if name not in provable:
            raise ConfigError(f"--any-size proves {', '.join(provable)}, not {name!r}")
    return [model for name, model in provable.items() if not names or name in names]


# What to check.


def _choose(names: Sequence[str], scope: str, bounds: Sequence[str]) -> list[CheckedModel]:
    """Return the named models in the order of `MODELS`; without names, every model with this scope."""
    from kvsm.check.scopes.models import MODELS

    for name in names:
        if name not in MODELS:
            raise ConfigError(f"there is no model {name!r}; there are {', '.join(MODELS)}")
    has_it = {name for name, model in MODELS.items() if scope in model.scopes or scope in model.families}
    chosen = [model for model in MODELS.values() if model.name in (names or has_it)]
    for model in chosen:
        if model.name not in has_it:
            raise ConfigError(f"{model.name} has no scope {scope!r}; it has {', '.join(_own_scopes(model))}")
    if not chosen:
        raise ConfigError(f"no model has a scope {scope!r}; see kvsm check --list")
    first = {model.name: model.scopes[model.families.get(scope, (scope,))[0]] for model in chosen}
    known = {name for model in chosen for name in model.bounds(first[model.name])}
    for name in _numbers(bounds):
        if name not in known:
            raise ConfigError(f"there is no bound {name!r} here; there are {', '.join(sorted(known))}")
    return chosen


def _own_scopes(model: CheckedModel) -> list[str]:
    """Return the scopes and families to list. A family stands for its numbered scopes."""
    numbered = {
        name for names in model.families.values() for name in names if name.rpartition("-")[2].isdecimal()
    }
    return [name for name in model.scopes if name not in numbered] + list(model.families)


def _bounded(model: CheckedModel, scope: str, bounds: Sequence[str]) -> Any:
    """Return the scope with the given bounds. Bounds that the model does not have are ignored."""
    wanted = model.scopes[scope]
    own = {name: number for name, number in _numbers(bounds).items() if name in model.bounds(wanted)}
    return model.bounded(wanted, own) if own else wanted


def _numbers(bounds: Sequence[str]) -> dict[str, int]:
    numbers = {}
    for bound in bounds:
        name, _, number = bound.partition("=")
        if not number.isdecimal():
            raise ConfigError(f"--bound {bound!r} is not NAME=N, as device_blocks=3")
        if int(number) > MOST:
            raise ConfigError(f"--bound {bound!r} is too large; the limit is {MOST:,}")
        numbers[name.replace("-", "_")] = int(number)
    return numbers


def _supported_limits(limit: ExplorationLimits, model: CheckedModel) -> ExplorationLimits:
    """Return the limits that this model supports. Prints a notice for each limit that is dropped."""
    if model.takes_depth:
        return limit
    for option, given in (("--depth", limit.max_depth), ("--cluster", limit.executor)):
        if given is not None:
            complain(f"{model.name} does not support {option} and is explored without it")
    return msgspec.structs.replace(limit, max_depth=None, executor=None)


def _print_list(as_json: bool) -> None:
    """Print all scopes. Text shows only bounds that differ from the model's first scope; JSON shows all."""
    from kvsm.check.scopes.models import MODELS

    if as_json:
        for model in MODELS.values():
            scopes = {name: dict(model.bounds(scope)) for name, scope in model.scopes.items()}
            listed = ListedModel(
                model=model.name, says=model.says, machines=tuple(model.machines), scopes=scopes
            )
            say_json(listed)
        return
    for model in MODELS.values():
        say(f"{model.name}: {model.says}")
        first: dict[str, int] = {}
        for name in _own_scopes(model):
            if name in model.families:
                names = model.families[name]
                say(f"  {name}: {len(names)} scopes, {names[0]} to {names[-1]}")
                continue
            bounds = model.bounds(model.scopes[name])
            other = [f"{bound}={number}" for bound, number in bounds.items() if first.get(bound) != number]
            say(f"  {name}: {' '.join(other) or 'the same bounds'}")
            first = first or bounds


# Progress.


def _explore(model: CheckedModel, scope: Any, limits: ExplorationLimits) -> Exploration:
    """Explore a scope. On a terminal, show a line of progress meanwhile."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(stderr=True)
    if not console.is_terminal:
        return model.explore(scope, limits)
    # Refreshed by hand, because a thread must not run when the explorer forks.
    with Live(console=console, auto_refresh=False, transient=True) as live:

        def show(progress: ExplorationProgress) -> None:
            live.update(Text(progress_line(model.name, progress, model.counts)), refresh=True)

        return model.explore(scope, msgspec.structs.replace(limits, progress=show))


def progress_line(name: str, progress: ExplorationProgress, counts: str = "states") -> str:
    """Format the progress of an exploration as one line."""
    return (
        f"{name}   {progress.states:,} {counts}   {progress.states_per_second:,.0f} {counts}/s   "
        f"depth {progress.depth}   queue {progress.queue:,}   {progress.seconds:.0f} s"
    )


# Results.


def _lines(model: CheckedModel, found: Exploration, counterexample: Counterexample | None) -> Iterator[str]:
    """Format the result of a model for people."""
    yield f"{found.model}: {found.bounds}"
    limit = f" (stopped at {found.limit})" if found.limit else ""
    yield _COLOURS[found.verdict](f"  verdict    {found.verdict.value}{limit}")
    yield (
        f"  seen       {found.states:,} {model.counts}, {found.transitions:,} transitions, "
        f"depth {found.depth}; {found.seconds:.1f} s, {found.states_per_second:,.0f} {model.counts}/s"
    )
    if found.reached:
        yield f"  reached    {', '.join(found.reached)}"
    if found.unreached:
        yield f"  unreached  {', '.join(found.unreached)}"
        reason = f"             all {model.counts} were seen, so they are unreachable"
        if found.verdict is Verdict.REFUTED and counterexample is None:
            yield f"{reason}: this refutes the model"
        elif found.verdict is Verdict.PROVED:
            yield f"{reason}; changed bounds require none"
    if model.machines:
        missed = never_taken(found.edges, model.machines)
        yield _edges_line(model, len(missed))
        for (machine, trigger), same in groupby(missed, lambda edge: (edge.machine, edge.trigger)):
            ways = ", ".join(f"{edge.source} -> {edge.target}" for edge in same)
            yield f"    never taken: {machine} {trigger}: {ways}"
    if counterexample is not None:
        yield from render(counterexample).split("\n")


def _edges_line(model: CheckedModel, missed: int) -> str:
    edges = sum(len(all_edges(MACHINES[name])) for name in model.machines)
    return f"  edges      {edges - missed} of {edges} in the tables of {', '.join(model.machines)}"


def _short_line(found: Exploration) -> str:
    """Format the result of one scope of a family as one line."""
    limit = f" (stopped at {found.limit})" if found.limit else ""
    return (
        _COLOURS[found.verdict](f"{found.model}: {found.verdict.value}{limit}")
        + f", {found.states:,} states, {found.transitions:,} transitions, {found.seconds:.1f} s"
    )


def _family_lines(model: CheckedModel, family: str, explored: Sequence[Exploration]) -> Iterator[str]:
    """Format the totals of a family, and for each edge that was never taken the reason."""
    states, transitions = (sum(getattr(one, name) for one in explored) for name in ("states", "transitions"))
    yield f"{model.name}, {family}: {len(explored)} of {len(model.families[family])} scopes"
    seconds = sum(one.seconds for one in explored)
    yield f"  seen       {states:,} states, {transitions:,} transitions; {seconds:.1f} s"
    missed = never_taken({edge for one in explored for edge in one.edges}, model.machines)
    yield _edges_line(model, len(missed))
    for edge in missed:
        yield f"    never taken: {edge.name}: {UNTAKEN.get(edge.name, 'no scope of this family leads there')}"


def _answer(model: CheckedModel, found: Exploration, counterexample: Counterexample | None) -> CheckAnswer:
    """Return the result of a model for `--json`."""
    return CheckAnswer(
        model=found.model,
        bounds=found.bounds,
        verdict=found.verdict,
        states=found.states,
        transitions=found.transitions,
        depth=found.depth,
        seconds=found.seconds,
        states_per_second=round(found.states_per_second, 1),
        limit=found.limit,
        finding=None if found.refutation is None else told_finding(found.refutation.finding),
        counterexample=None
        if counterexample is None
        else ToldCounterexample(counterexample.steps, counterexample.circle, counterexample.because),
        reached=found.reached,
        unreached=found.unreached,
        actions=found.actions,
        edges=tuple(map(str, found.edges)),
        never_taken=tuple(map(str, never_taken(found.edges, model.machines))),
    )


def _exit_code(found: Exploration) -> ExitCode:
    if found.verdict is Verdict.UNDETERMINED and found.limit == INTERRUPT:
        return ExitCode.INTERRUPTED
    return _CODES[found.verdict]


def _refutation_with_path(found: Exploration) -> Refutation | None:
    """Return the refutation if it has a path. A "sometimes" property that never holds has none."""
    refutation = found.refutation
    if refutation is None or str(refutation.finding.property) in found.unreached:
        return None
    return refutation


def _check_free(log: Path, names: Sequence[str]) -> None:
    """Refuse an unusable directory now, not after minutes of exploring."""
    try:
        log.mkdir(parents=True, exist_ok=True)
        taken = [log / name for name in names if (log / name).is_file() or any((log / name).glob("*"))]
    except OSError as error:
        raise ConfigError(f"{log} cannot hold logs: {error.strerror}") from error
    if taken:
        raise ConfigError(f"{taken[0]} is not empty; give a new or empty directory for the log")
