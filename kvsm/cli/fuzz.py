"""`kvsm fuzz`: the random walk through the real code, and the reduction of its failures."""

from __future__ import annotations

from pathlib import Path
from random import Random, SystemRandom
from typing import Any

import click
import msgspec

from kvsm.checker.failures import SavedFailure, claim, load, reduced, save, told
from kvsm.checker.reduce import rerun
from kvsm.checker.targets import TARGETS, draw_case
from kvsm.checker.walk import WalkResult
from kvsm.cli.executors import chosen_executor, cluster_option, jobs_option
from kvsm.cli.exit_codes import ExitCode
from kvsm.cli.findings import ToldFinding, told_finding
from kvsm.cli.output import Command, in_green, say, say_json
from kvsm.cli.walking import shown_walk
from kvsm.errors import ConfigError
from kvsm.executors.executor import Executor
from kvsm.private_files import write_whole
from kvsm.worlds.world import World

DEFAULT_SECONDS = 10.0
STATE_FILE = Path("kvsm-fuzz.json")
"""Where an interrupted walk is saved if no file was named."""


class FuzzProgress(msgspec.Struct, frozen=True, kw_only=True):
    """The totals of a walk so far, from which it can continue. next_run: each run before it was made once."""

    target: str
    seed: int
    next_run: int = 0
    runs: int = 0
    operations: int = 0
    seconds: float = 0.0
    most_in_flight: int = 0

    def and_(self, more: WalkResult) -> FuzzProgress:
        """The sum of these totals and the totals of further runs."""
        return FuzzProgress(
            target=self.target,
            seed=self.seed,
            next_run=more.next_run,
            runs=self.runs + more.runs,
            operations=self.operations + more.operations,
            seconds=round(self.seconds + more.seconds, 3),
            most_in_flight=max(self.most_in_flight, more.most_in_flight),
        )


class FuzzAnswer(msgspec.Struct, frozen=True, kw_only=True, tag_field="schema", tag="kvsm.fuzz/1"):
    """What `kvsm fuzz --json` prints: what a walk found.

    interrupted: Ctrl-C ended the walk.
    failure: what broke, reduced; null if nothing did.
    directory: where the failure was saved.
    """

    progress: FuzzProgress
    operations_per_second: float
    interrupted: bool
    failure: SavedFailure | None = None
    directory: str | None = None


class FuzzReplayAnswer(msgspec.Struct, frozen=True, tag_field="schema", tag="kvsm.fuzz-replay/1"):
    """What `kvsm fuzz --replay DIR --json` prints: whether a saved failure still fails."""

    fails: bool
    finding: ToldFinding | None


@click.command(cls=Command)
@click.option(
    "--target",
    type=click.Choice([*TARGETS, "all"]),
    help="What to walk through (core).",
)
@click.option("--seconds", type=click.FloatRange(min=0), help="Stop after this time (10).")
@click.option("--runs", type=click.IntRange(min=1), metavar="N", help="Stop after N runs instead.")
@click.option(
    "--seed", type=click.IntRange(min=0), metavar="S", help="Seed of all runs. Default: a random one."
)
@jobs_option
@cluster_option
@click.option(
    "--resume",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Continue the walk saved there, and save it again.",
)
@click.option(
    "--log",
    "directory",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="New or empty directory for a failure. Default: kvsm-fuzz-TARGET-SEED-RUN.",
)
@click.option(
    "--replay",
    "replayed",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Repeat the failure saved there.",
)
@click.option(
    "--allow-policy",
    "allow_policies",
    metavar="MODULE:CLASS",
    multiple=True,
    help="With --replay: run the code of this eviction policy if the failure names it. Repeatable.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def fuzz(
    replayed: Path | None,
    jobs: int | None,
    cluster: str | None,
    as_json: bool,
    allow_policies: tuple[str, ...],
    **choices: Any,
) -> None:
    """Walk at random through the real code, and reduce a failure.

    A run is a fresh, small world in which hundreds of things happen: requests come and go, copies end in any
    order, reports fail, come late or twice, the cache is reset. Each answer is compared with plain books that
    say whose bytes are where. A run draws its configuration, and which things happen in it often, seldom or
    never. The seed and the number of the run decide everything, so a failure can always be repeated.

    \b
    Targets:
      core        the offload core alone, every call in every order: the fastest
      serving     the core and the scheduler, with a small engine around them
      copies      the engine of streams and events, on a simulated device
      hand-over   a prefill engine hands the blocks of prompts to a decode engine
      tiers       a host pool with a disk below it: failures, resets, kills and power losses
      all         all of these

    \b
    Examples:
      kvsm fuzz                                   10 seconds of the core
      kvsm fuzz --target all --seconds 3600 --resume walk.json      continue a walk
      kvsm fuzz --seed 7 --runs 500               the same 500 runs, every time
      kvsm fuzz --target all --seconds 3600 --cluster ray://head:10001      on many machines
      kvsm fuzz --replay kvsm-fuzz-core-7-12      does it still fail?

    A failure is printed as numbered steps and saved in a directory: the actions, a log for `kvsm show`,
    `kvsm verify` and `kvsm replay`, and a test for pytest that fails until the bug is fixed. Ctrl-C saves the
    walk and prints how to continue.

    \b
    Exit codes: 0 nothing found; 1 a failure; 2 unusable input; 130 Ctrl-C, and nothing found.
    """
    if replayed is None:
        with chosen_executor(cluster, jobs) as executor:
            _find(_FuzzOptions(**choices), executor, as_json)
    elif cluster is not None or any(one is not None for one in choices.values()):
        raise click.UsageError("--replay repeats what was saved; only --json and --allow-policy go with it")
    else:
        _do_again(load(replayed, allow_policies), as_json)


class _FuzzOptions(msgspec.Struct, frozen=True):
    """The options that the user gave; None if not given."""

    target: str | None
    seconds: float | None
    runs: int | None
    seed: int | None
    resume: Path | None
    directory: Path | None


def _find(choices: _FuzzOptions, executor: Executor | None, as_json: bool) -> None:
    start = _begin(choices)
    if choices.directory is not None:
        claim(choices.directory)
    if not as_json:
        say(f"target {start.target}, seed {start.seed}, from run {start.next_run:,}")
    seconds = DEFAULT_SECONDS if choices.seconds is None and choices.runs is None else choices.seconds
    result = _walk(start, seconds, choices.runs, executor)
    progress = start.and_(result)
    _keep(progress, choices.resume or (STATE_FILE if result.interrupted else None))
    report = _report(progress, result, choices.directory)
    if as_json:
        say_json(report)
    else:
        _print(report, choices.resume)
    if report.failure is not None:
        raise SystemExit(ExitCode.BROKEN)
    if report.interrupted:
        raise SystemExit(ExitCode.INTERRUPTED)


def _begin(choices: _FuzzOptions) -> FuzzProgress:
    """Where the walk continues or starts."""
    resume, target, seed = choices.resume, choices.target, choices.seed
    if resume is not None and not resume.parent.is_dir():
        raise ConfigError(f"{resume}: the walk cannot be saved: there is no directory {resume.parent}")
    if resume is None or not resume.exists():
        return FuzzProgress(
            target=target or "core", seed=SystemRandom().getrandbits(32) if seed is None else seed
        )
    try:
        kept = msgspec.json.decode(resume.read_bytes(), type=FuzzProgress)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{resume}: no walk to continue: {error}") from error
    for name, given, value in (("--target", target, kept.target), ("--seed", seed, kept.seed)):
        if given not in (None, value):
            raise ConfigError(f"{resume} holds a walk with {name} {value}, not {name} {given}")
    return kept


def _walk(
    start: FuzzProgress, seconds: float | None, runs: int | None, executor: Executor | None
) -> WalkResult:
    def make_world(random: Random) -> World:
        return draw_case(start.target, random).make()

    return shown_walk(
        make_world,
        start.seed,
        executor,
        first_run=start.next_run,
        seconds=seconds,
        runs=runs,
        text=lambda result: _totals(start.and_(result), result.operations_per_second),
    )


def _keep(progress: FuzzProgress, path: Path | None) -> None:
    """Save the walk as a whole: a half-written file would lose it."""
    if path is None:
        return
    try:
        write_whole(path, msgspec.json.encode(progress))
    except OSError as error:
        raise ConfigError(f"{path}: the walk cannot be saved: {error.strerror}") from error


def _report(progress: FuzzProgress, result: WalkResult, directory: Path | None) -> FuzzAnswer:
    failure = None
    if result.failure is not None:
        failure = reduced(progress.target, progress.seed, result.failure)
        directory = directory or Path(f"kvsm-fuzz-{failure.target}-{failure.seed}-{failure.run}")
        save(failure, directory)
    return FuzzAnswer(
        progress=progress,
        operations_per_second=round(result.operations_per_second),
        interrupted=result.interrupted,
        failure=failure,
        directory=str(directory) if failure else None,
    )


def _totals(progress: FuzzProgress, rate: float) -> str:
    # Not every world counts its copies.
    peak = progress.most_in_flight
    copies = f"{peak} copies in flight at most, " if peak else ""
    done = f"{progress.operations:,} operations in {progress.runs:,} runs, {rate:,.0f}/s"
    return f"{done}, {copies}{progress.seconds:.0f} s"


def _print(report: FuzzAnswer, resume: Path | None) -> None:
    say(_totals(report.progress, report.operations_per_second))
    if report.interrupted:
        say(f"interrupted; to continue: kvsm fuzz --resume {resume or STATE_FILE}")
    if report.failure is None:
        say(in_green("no property was broken"))
        return
    say("", *told(report.failure).split("\n"), "")
    say(f"saved in {report.directory}; to repeat it: kvsm fuzz --replay {report.directory}")


def _do_again(failure: SavedFailure, as_json: bool) -> None:
    """Repeat a failure. Exit code 1 if it fails in any way."""
    outcome = rerun(failure.case().make, failure.actions, to_rest=True)
    if outcome.finding is not None:
        failure = failure.after(outcome.actions, outcome.finding)
    if as_json:
        found = outcome.finding
        say_json(FuzzReplayAnswer(found is not None, None if found is None else told_finding(found)))
    elif outcome.finding is None:
        say(f"{len(failure.actions)} actions, and no property is broken: it no longer fails")
    else:
        say(*told(failure).split("\n"))
    if outcome.finding is not None:
        raise SystemExit(ExitCode.BROKEN)
