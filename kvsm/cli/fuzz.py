"""`kvsm fuzz`: random walks through the real code, and the reduction of their failures."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from random import SystemRandom
from typing import Any

import click
import msgspec

from kvsm.check.walks.corpus import CorpusEntry
from kvsm.check.walks.failures import SavedFailure, claim, read, slug_of
from kvsm.check.walks.fuzz_target import FuzzTarget
from kvsm.check.walks.own_code import is_path
from kvsm.check.walks.rounds import Corpus, CorpusTotals, walk_in_rounds
from kvsm.check.walks.shard import WHOLE, Shard
from kvsm.check.walks.walk import RunMaker, WalkResult
from kvsm.cli.ci_reports import WalkReport, ci_options, failure_report, tell_ci
from kvsm.cli.exit_codes import ExitCode
from kvsm.cli.findings import ToldFinding, told_finding
from kvsm.cli.fuzz_targets import (
    ConnectorConfig,
    TargetName,
    check_name,
    names_targets,
    replay_command,
    saved_target,
    target_of,
)
from kvsm.cli.jobs_options import chosen_executor, cluster_option, jobs_option
from kvsm.cli.output import Command, complain, say, say_json
from kvsm.cli.signals import EndRequest, ends_between_steps
from kvsm.cli.toned import in_green
from kvsm.cli.walking import reduce_budget, reduce_option, shown_steps, shown_walk
from kvsm.errors import ConfigError
from kvsm.system.executors.executor import Executor
from kvsm.system.private_files import write_whole

DEFAULT_SECONDS = 10.0
STATE_FILE = Path("kvsm-fuzz.json")
"""File of an interrupted walk if `--resume` is not given."""


class FuzzProgress(msgspec.Struct, frozen=True, kw_only=True):
    """The totals of a walk so far, from which it can continue.

    next_run: number of the next run; all earlier runs of the shard are done.
    shard: "3/8"; "1/1" is the whole walk.
    """

    target: str
    seed: int
    shard: str = str(WHOLE)
    next_run: int = 0
    runs: int = 0
    operations: int = 0
    seconds: float = 0.0
    most_in_flight: int = 0

    def and_(self, more: WalkResult) -> FuzzProgress:
        """Return these totals plus those of further runs."""
        return msgspec.structs.replace(
            self,
            next_run=more.next_run,
            runs=self.runs + more.runs,
            operations=self.operations + more.operations,
            seconds=round(self.seconds + more.seconds, 3),
            most_in_flight=max(self.most_in_flight, more.most_in_flight),
        )


class FuzzAnswer(msgspec.Struct, frozen=True, kw_only=True, tag_field="schema", tag="kvsm.fuzz/1"):
    """What `kvsm fuzz --json` prints: what a walk found.

    interrupted: Ctrl-C or SIGTERM ended the walk.
    failure: the failure, reduced as far as --reduce-seconds allows; null if nothing broke. Actions of a
        Hypothesis machine are program lines.
    directory: where the failure was saved.
    corpus: size of the corpus after the walk; null without --corpus.
    """

    progress: FuzzProgress
    operations_per_second: float
    interrupted: bool
    failure: SavedFailure | None = None
    directory: str | None = None
    corpus: CorpusTotals | None = None


class FuzzReplayAnswer(msgspec.Struct, frozen=True, tag_field="schema", tag="kvsm.fuzz-replay/1"):
    """What `kvsm fuzz --replay DIR --json` prints: whether a saved failure still fails."""

    fails: bool
    finding: ToldFinding | None


def _shard(context: click.Context, option: click.Parameter, value: str | None) -> Shard | None:
    try:
        return None if value is None else Shard.parse(value)
    except ConfigError as error:
        raise click.BadParameter(f"{error}.", context, option) from error


@click.command(cls=Command)
@click.option(
    "--target",
    type=TargetName(),
    metavar="TARGET",
    help="The code to test (core): one of the targets above, or package.module:name of your own.",
)
@click.option("--seconds", type=click.FloatRange(min=0), help="Stop the runs after this time (10).")
@click.option("--runs", type=click.IntRange(min=1), metavar="N", help="Stop after N runs instead.")
@click.option(
    "--seed", type=click.IntRange(min=0), metavar="S", help="Seed of all runs. Default: a random one."
)
@reduce_option
@jobs_option
@cluster_option
@click.option(
    "--shard",
    callback=_shard,
    metavar="K/N",
    help="Run only every N-th run, as machine K of N. Give all machines the same seed.",
)
@click.option(
    "--corpus",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Begin runs with the schedules in DIR, and add schedules that cover something new.",
)
@click.option(
    "--resume",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Continue the walk saved in FILE, and save it again.",
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
    help="Repeat the failure saved in DIR. A failure of your own code needs its --target, too.",
)
@click.option(
    "--allow-policy",
    "allow_policies",
    metavar="MODULE:CLASS",
    multiple=True,
    help="With --replay: run the code of this eviction policy if the failure names it. Repeatable.",
)
@click.option(
    "--connector",
    metavar="NAME",
    help="With --replay: run the code of this connector of vLLM if the failure names it.",
)
@click.option(
    "--config",
    type=ConnectorConfig(),
    metavar="JSON",
    help="With --replay: the kv_connector_extra_config of the failure, which may name code and paths.",
)
@ci_options
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@names_targets
def fuzz(
    replayed: Path | None,
    jobs: int | None,
    cluster: str | None,
    as_json: bool,
    allow_policies: tuple[str, ...],
    connector: str | None,
    config: dict[str, Any] | None,
    **choices: Any,
) -> None:
    """Run random operations on the real code, and reduce a failure.

    A run is a fresh, small world with hundreds of operations: requests come and go, copies end in any order,
    reports fail, come late or twice, and the cache is reset. Each answer is compared with a simple model of
    which bytes are where. The seed and the number of a run decide everything, also its configuration.

    \b
    Targets:
      TARGETS
      all            all of these
      package.module:name
                     your own: a machine of kvsm.testing or of Hypothesis, or a callable that
                     makes a World from a Random (docs/testing.md)

    \b
    Examples:
      kvsm fuzz                                   10 seconds of the core
      kvsm fuzz --target all --seconds 3600 --resume walk.json      continue a walk
      kvsm fuzz --seed 7 --runs 500               the same 500 runs, every time
      kvsm fuzz --target all --seconds 3600 --cluster ray://head:10001      on many machines
      kvsm fuzz --target test_policy:Policy --corpus corpus --seconds 300
      kvsm fuzz --seed 7 --shard 3/8 --seconds 600 --junit fuzz.xml --github
      kvsm fuzz --replay kvsm-fuzz-core-7-12      does it still fail?

    A failure is printed as numbered steps and saved in a directory: the actions, a log for `kvsm show`,
    `kvsm verify` and `kvsm replay`, and a test for pytest that fails until the bug is fixed. It is saved at
    once, then reduced for at most --reduce-seconds and saved again. Ctrl-C and SIGTERM end the walk or the
    reduction after the current step: the walk, the corpus and the failure are saved, and the command to
    continue is printed. A second Ctrl-C ends at once.

    To merge two corpora, copy their files into one directory. The next walk drops redundant ones.

    \b
    Exit codes: 0 nothing found; 1 a failure; 2 unusable input; 130 (Ctrl-C) or 143 (SIGTERM) if interrupted
    before a failure.
    """
    allowed = {"policy": allow_policies, "connector": _given(connector), "extra": _given(config)}
    if replayed is not None:
        _repeat(replayed, allowed, as_json, cluster, **choices)
        return
    if any(allowed.values()):
        raise click.UsageError("--allow-policy, --connector and --config go with --replay alone")
    with chosen_executor(cluster, jobs) as executor:
        _find(_FuzzOptions(**choices), executor, as_json)


def _given(value: Any) -> tuple[Any, ...]:
    return () if value is None else (value,)


def _repeat(
    replayed: Path,
    allowed: Mapping[str, Collection[Any]],
    as_json: bool,
    cluster: str | None,
    target: str | None,
    **choices: Any,
) -> None:
    if cluster is not None or any(one not in (None, False) for one in choices.values()):
        raise click.UsageError(
            "--replay repeats what was saved; only --json, and what it allows, go with it: --target, "
            "--allow-policy, --connector, --config"
        )
    failure = read(replayed)
    _do_again(saved_target(failure, replayed, target, allowed), failure, replayed, as_json)


class _FuzzOptions(msgspec.Struct, frozen=True):
    """The options that the user gave; None if not given."""

    target: str | None
    seconds: float | None
    reduce_seconds: float | None
    runs: int | None
    seed: int | None
    shard: Shard | None
    corpus: Path | None
    resume: Path | None
    directory: Path | None
    junit: Path | None
    github: bool


def _find(choices: _FuzzOptions, executor: Executor | None, as_json: bool) -> None:
    start = _begin(choices)
    target = target_of(start.target)
    if choices.directory is not None:
        claim(choices.directory)
    if not as_json:
        shard = "" if start.shard == str(WHOLE) else f", shard {start.shard}"
        say(f"target {start.target}, seed {start.seed}{shard}, from run {start.next_run:,}")
    with ends_between_steps() as ending:
        walked = _Walk(target, start, choices, executor, ending)
        result = walked.walk()
        progress = start.and_(result)
        walked.save_failure(progress.seed, result)
        _keep(progress, choices.resume)
        if walked.saved is not None and not as_json:
            most = f"{walked.budget.left:g} s (--reduce-seconds)"
            say(f"a failure, saved in {walked.directory}; reducing it for at most {most}")
        walked.reduce(result)
        if ending.is_made() and choices.resume is None:
            _keep(progress, STATE_FILE)
    report = walked.report(progress, result)
    if as_json:
        say_json(report)
    else:
        _print(report, target, choices.resume)
    _tell_ci(report, target, choices, as_json)
    if report.failure is not None:
        raise SystemExit(ExitCode.BROKEN)
    if report.interrupted:
        raise SystemExit(ending.code or ExitCode.INTERRUPTED)


def _begin(choices: _FuzzOptions) -> FuzzProgress:
    """Return the saved progress that the walk continues from, or that of a new walk."""
    resume, target, seed = choices.resume, choices.target, choices.seed
    shard = None if choices.shard is None else str(choices.shard)
    if resume is not None and not resume.parent.is_dir():
        raise ConfigError(f"{resume}: the walk cannot be saved: there is no directory {resume.parent}")
    if resume is None or not resume.exists():
        return FuzzProgress(
            target=target or "core",
            seed=SystemRandom().getrandbits(32) if seed is None else seed,
            shard=shard or str(WHOLE),
        )
    try:
        kept = msgspec.json.decode(resume.read_bytes(), type=FuzzProgress)
        Shard.parse(kept.shard)
    except (OSError, msgspec.DecodeError, ConfigError) as error:
        raise ConfigError(f"{resume}: no walk to continue: {error}") from error
    if is_path(kept.target) and target is None:
        raise ConfigError(
            f"{resume} holds a walk through code of its own: {kept.target}; if you trust it, allow that: "
            f"--target {kept.target}"
        )
    check_name(kept.target)
    for name, given, value in (
        ("--target", target, kept.target),
        ("--seed", seed, kept.seed),
        ("--shard", shard, kept.shard),
    ):
        if given not in (None, value):
            raise ConfigError(f"{resume} holds a walk with {name} {value}, not {name} {given}")
    return kept


class _Walk:
    """One walk, with or without a corpus."""

    def __init__(
        self,
        target: FuzzTarget,
        start: FuzzProgress,
        choices: _FuzzOptions,
        executor: Executor | None,
        ending: EndRequest,
    ) -> None:
        self._target, self._start, self._choices = target, start, choices
        self._executor, self._ending = executor, ending
        self.budget = reduce_budget(choices.reduce_seconds)
        self._shard = Shard.parse(start.shard)
        self._entries: list[CorpusEntry] = []
        """Corpus entries with which the last runs could begin."""
        corpus = choices.corpus
        self._corpus = None if corpus is None else Corpus(target, corpus, ending.is_made)
        for message in [] if self._corpus is None else self._corpus.wrong:
            complain(message)
        self.saved: SavedFailure | None = None
        self.directory: Path | None = None

    def walk(self) -> WalkResult:
        """Walk until a limit, a failure or a signal."""
        start, choices, corpus = self._start, self._choices, self._corpus
        seconds = DEFAULT_SECONDS if choices.seconds is None and choices.runs is None else choices.seconds
        limits: dict[str, Any] = {
            "first_run": start.next_run,
            "seconds": seconds,
            "runs": choices.runs,
            "is_over": self._ending.is_made,
        }
        if corpus is None:
            return self._round(self._target.runs(start.seed), start.seed, **limits)
        if corpus.broken is not None:
            return WalkResult(seed=start.seed, next_run=start.next_run)
        result, self._entries = walk_in_rounds(
            self._target, corpus, start.seed, self._round, shards=self._shard.of, **limits
        )
        return result

    def save_failure(self, seed: int, result: WalkResult) -> None:
        """Save the failure, if there is one, before it is reduced."""
        broken = None if self._corpus is None else self._corpus.broken
        if result.failure is not None:
            self.saved = self._target.unreduced(seed, result.failure, self._entries)
        elif broken is not None:
            self.saved = self._target.unreduced_entry(*broken)
        if self.saved is not None:
            failure = self.saved
            default = Path(f"kvsm-fuzz-{slug_of(failure)}-{failure.seed}-{failure.run}")
            self.directory = self._choices.directory or default
            claim(self.directory)
            self._target.save(failure, self.directory)

    def reduce(self, result: WalkResult) -> None:
        """Reduce the failure and the corpus until the time is spent or a signal comes, and save both."""
        ending, corpus = self._ending, self._corpus
        with self.budget.spending() as is_spent:

            def is_over() -> bool:
                return ending.is_made() or is_spent()

            if self.saved is not None and self.directory is not None:
                reduced = self._target.reduced(self.saved, is_over)
                if reduced != self.saved:
                    self.saved = reduced
                    self._target.save(reduced, self.directory)
            if corpus is not None and corpus.broken is None:
                corpus.reduce(result.operations, is_over)
                corpus.save()

    def _round(
        self, maker: RunMaker, seed: int, before: WalkResult | None = None, **limits: Any
    ) -> WalkResult:
        start = self._start if before is None else self._start.and_(before)
        return shown_walk(
            maker,
            seed,
            self._executor,
            shard=self._shard,
            text=lambda result: _totals(start.and_(result), result.operations_per_second),
            **limits,
        )

    def report(self, progress: FuzzProgress, result: WalkResult) -> FuzzAnswer:
        """Return what the walk found."""
        return FuzzAnswer(
            progress=progress,
            operations_per_second=round(result.operations_per_second),
            interrupted=self._ending.is_made(),
            failure=self.saved,
            directory=None if self.directory is None else str(self.directory),
            corpus=None if self._corpus is None else self._corpus.totals,
        )


def _keep(progress: FuzzProgress, path: Path | None) -> None:
    """Save the walk atomically, if there is a path: a half-written file would lose it."""
    if path is None:
        return
    try:
        write_whole(path, msgspec.json.encode(progress))
    except OSError as error:
        raise ConfigError(f"{path}: the walk cannot be saved: {error.strerror}") from error


def _totals(progress: FuzzProgress, rate: float) -> str:
    # Some worlds do not count their copies.
    peak = progress.most_in_flight
    copies = f"{peak} copies in flight at most, " if peak else ""
    done = f"{progress.operations:,} operations in {progress.runs:,} runs, {rate:,.0f}/s"
    return f"{done}, {copies}{progress.seconds:.0f} s"


def _print(report: FuzzAnswer, target: FuzzTarget, resume: Path | None) -> None:
    say(_totals(report.progress, report.operations_per_second))
    if report.corpus is not None:
        kept = report.corpus
        say(
            f"corpus: {kept.schedules:,} schedules reach {kept.features:,} features, {kept.new:,} of them new"
        )
    if report.interrupted:
        say(f"interrupted; to continue: kvsm fuzz --resume {resume or STATE_FILE}{_own(target)}")
    if report.failure is None:
        say(in_green("no property was broken"))
        return
    say("", *shown_steps(target.told(report.failure), report.directory), "")
    say(f"saved in {report.directory}; to repeat it: {replay_command(report.failure, report.directory)}")


def _own(target: FuzzTarget) -> str:
    """Return the option that allows the user's code to run."""
    return f" --target {target.name}" if is_path(target.name) else ""


def _tell_ci(report: FuzzAnswer, target: FuzzTarget, choices: _FuzzOptions, as_json: bool) -> None:
    if choices.junit is None and not choices.github:
        return
    progress, found = report.progress, []
    if report.failure is not None:
        told, directory = target.told(report.failure), Path(str(report.directory))
        repeats = replay_command(report.failure, directory)
        found = [failure_report(report.failure, told, directory, repeats, target.source)]
    shard = "" if progress.shard == str(WHOLE) else f" --shard {progress.shard}"
    corpus = "" if choices.corpus is None else f" --corpus {choices.corpus}"
    walk = f"kvsm fuzz --target {progress.target} --seed {progress.seed}{shard}{corpus}"
    made = WalkReport(
        command="kvsm fuzz",
        target=progress.target,
        name=f"seed {progress.seed}" + shard.replace(" --", ", "),
        seconds=progress.seconds,
        totals=_totals(progress, report.operations_per_second),
        made_by=f"{walk} --runs {progress.next_run}",
        failures=found,
    )
    tell_ci(made, choices.junit, github=choices.github, quiet=as_json)


def _do_again(target: FuzzTarget, failure: SavedFailure, directory: Path, as_json: bool) -> None:
    """Repeat a saved failure. Exits with 1 if the run fails, even with another finding."""
    again = target.again(failure)
    if as_json:
        say_json(
            FuzzReplayAnswer(again is not None, None if again is None else told_finding(again.finding()))
        )
    elif again is None:
        many = len(failure.actions)
        say(f"{many} {'action' if many == 1 else 'actions'}, and no property is broken: it no longer fails")
    else:
        say(*shown_steps(target.told(again), directory))
    if again is not None:
        raise SystemExit(ExitCode.BROKEN)
