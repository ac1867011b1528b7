"""`kvsm vllm-fuzz`: fuzz any connector of vLLM under vLLM's real scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random, SystemRandom
from socket import gethostname
from typing import Any

import click
import msgspec

from kvsm.check.vllm_fuzz.drawing import ALPHABET, FAULT_ALPHABET
from kvsm.check.vllm_fuzz.shape import FAULTS, KINDS, draw_options, draw_shape, small_shapes
from kvsm.check.walks.failures import SavedFailure, claim, reduced, save, told, unreduced
from kvsm.check.walks.repeated import RepeatedRuns
from kvsm.check.walks.short_schedules import ScheduleCounts
from kvsm.check.walks.targets import WalkCase
from kvsm.check.walks.walk import WalkFailure, WalkResult, random_of
from kvsm.check.worlds.world import Action, Finding
from kvsm.cli.ci_reports import WalkReport, ci_options, failure_report, tell_ci
from kvsm.cli.exit_codes import ExitCode
from kvsm.cli.fuzz_targets import ConnectorConfig, replay_command
from kvsm.cli.jobs_options import chosen_executor, cluster_option, jobs_option
from kvsm.cli.output import Command, say, say_json
from kvsm.cli.signals import EndRequest, ends_between_steps
from kvsm.cli.toned import in_green
from kvsm.cli.walking import reduce_budget, reduce_option, shown_search, shown_steps, shown_walk
from kvsm.errors import ConfigError
from kvsm.system.executors.executor import Executor
from kvsm.system.stopping import TimeBudget

DEFAULT_SECONDS = 60.0


class VllmFuzzFinding(msgspec.Struct, frozen=True):
    """A defect. times: the number of runs that ended in it. directory: where it is saved."""

    failure: SavedFailure
    times: int
    directory: str


class VllmFuzzAnswer(msgspec.Struct, frozen=True, kw_only=True, tag_field="schema", tag="kvsm.vllm-fuzz/1"):
    """What `kvsm vllm-fuzz --json` prints: the defects of a connector that a walk met.

    connector: its name.
    version: of vLLM.
    seconds: time of the runs, without the reductions.
    systematic: the most actions of a schedule with `--systematic`; 0 if runs were drawn.
    complete: with `systematic`, the length up to which all schedules have run in each engine.
    findings: the different defects, in the order in which they were met.
    """

    connector: str
    version: str
    seed: int
    runs: int
    operations: int
    seconds: float
    interrupted: bool
    systematic: int = 0
    complete: int = 0
    findings: tuple[VllmFuzzFinding, ...]


class Choices(msgspec.Struct, frozen=True):
    """What the runs are made of.

    extra: the connector's kv_connector_extra_config.
    without: kinds of actions that are left out.
    faults: faults of workers that may be drawn.
    mamba: whether mamba layers may be drawn.
    """

    connector: str
    extra: dict[str, Any]
    without: tuple[str, ...]
    faults: tuple[str, ...]
    mamba: bool = False

    def case(self, random: Random) -> WalkCase:
        """Draw the world of a run."""
        shape = draw_shape(random, self.faults, self.mamba, drafters=True)
        chosen: dict[str, Any] = {"connector": self.connector, "without": self.without}
        if self.connector == "KvsmConnector" and not self.extra:
            shape = draw_options(shape, random)
        else:
            chosen["extra"] = self.extra
        return WalkCase("vllm", msgspec.structs.replace(shape, **chosen))

    def small_cases(self) -> list[WalkCase]:
        """Return the worlds in which all short schedules are run."""
        chosen = {"connector": self.connector, "extra": self.extra}
        return [WalkCase("vllm", msgspec.structs.replace(shape, **chosen)) for shape in small_shapes()]

    def alphabet(self) -> dict[Action, str]:
        """Return the actions of all short schedules, each with its actor."""
        faults = {action: actor for action, actor in FAULT_ALPHABET.items() if action[0] in self.faults}
        return {one: actor for one, actor in {**ALPHABET, **faults}.items() if one[0] not in self.without}

    def fitted(self) -> Choices:
        """Add the faults that the connector must survive, and mamba layers if it serves them."""
        from kvsm.check.vllm_fuzz.connectors import faults_of, serves_mamba

        faults = dict.fromkeys((*faults_of(self.connector, self.extra), *self.faults))
        mamba = serves_mamba(self.connector, self.extra)
        return msgspec.structs.replace(self, faults=tuple(faults), mamba=mamba)


@click.command(cls=Command)
@click.option(
    "--connector",
    required=True,
    metavar="NAME",
    help="A connector that vLLM knows, KvsmConnector, or package.module:Class.",
)
@click.option(
    "--config",
    "extra",
    default="{}",
    type=ConnectorConfig(),
    metavar="JSON",
    help="The connector's kv_connector_extra_config. If cpu_bytes_to_use is not given, it is random. Without "
    "this option, the options of KvsmConnector are random.",
)
@click.option(
    "--seconds", type=click.FloatRange(min=0), help="Walk for this time (60), not counting --reduce-seconds."
)
@click.option("--runs", type=click.IntRange(min=1), metavar="N", help="Walk N runs instead.")
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=lambda: SystemRandom().getrandbits(32),
    metavar="S",
    help="Seed of all runs. Default: a random one.",
)
@click.option(
    "--systematic",
    type=click.IntRange(1, 12),
    metavar="N",
    help="In place of random runs, run every schedule of at most N actions, the shortest first.",
)
@reduce_option
@jobs_option
@cluster_option
@click.option(
    "--without",
    multiple=True,
    type=click.Choice(list(KINDS)),
    help="Leave out this kind of action, to search beyond a known defect. Repeatable.",
)
@click.option(
    "--faults",
    multiple=True,
    type=click.Choice(FAULTS),
    help="Also inject this fault of the workers, which the connector need not survive. Repeatable.",
)
@click.option("--first", is_flag=True, help="Stop at the first defect.")
@click.option(
    "--log",
    "directory",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="New or empty directory for the defects. Default: kvsm-vllm-fuzz-SEED.",
)
@ci_options
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def vllm_fuzz(
    connector: str,
    extra: dict[str, Any],
    without: tuple[str, ...],
    faults: tuple[str, ...],
    seed: int,
    systematic: int | None,
    reduce_seconds: float | None,
    jobs: int | None,
    cluster: str | None,
    directory: Path | None,
    junit: Path | None,
    github: bool,
    as_json: bool,
    **limits: Any,
) -> None:
    """Fuzz any vLLM connector under vLLM's scheduler; reduce failures.

    No model and no GPU are needed. Each run is a small engine with vLLM's real scheduler and block pool, and
    both sides of the connector. A stub of a model writes words to blocks and checks them. Copies run on a
    simulated device; the seed decides when they end. Requests share prefixes, have salts, are aborted and
    preempted; caches are reset; steps overlap. Chunks, drafters, windows, mamba layers and ranks vary.

    Checked: every block that a step reads holds the words of its tokens; no block is written during a copy;
    no call raises; what is stored is served; all work ends, and each end is reported once. Then every client
    has its tokens, no device block is held, KV events match, no host slot is lost, no thread is left, and the
    log of one run in a hundred is the same in another process.

    \b
    Examples:
      kvsm vllm-fuzz --connector OffloadingConnector
      kvsm vllm-fuzz --connector OffloadingConnector --without reset --seconds 300
      kvsm vllm-fuzz --connector SimpleCPUOffloadConnector --config '{"lazy_offload": true}'
      kvsm vllm-fuzz --connector my_package.my_module:MyConnector --seed 7 --runs 500
      kvsm vllm-fuzz --connector OffloadingConnector --systematic 4

    Workers make the faults that the connector must survive: copies fail, reports come late or twice. Copies
    of KvsmConnector also hang, or take longer than transfer_timeout_s.

    With --systematic N, each schedule of at most N actions runs in two small engines: one executes steps one
    after the other, in the other they overlap. Each increment of N takes seven to twelve times as long.

    Each different defect is printed as numbered steps, and saved with a test for pytest that fails until the
    defect is fixed. The command that repeats it, `kvsm fuzz --replay DIR`, is printed, too. Two failures
    count as one defect if they break the same property with an error at the same line. A defect is saved at
    once, then reduced and saved again. Ctrl-C and SIGTERM end the walk after the current step.

    \b
    Exit codes: 0 nothing found; 1 defects; 2 unusable input, or no vLLM; 130 (Ctrl-C) or 143 (SIGTERM) if
    interrupted before a defect was found.
    """
    name = f"systematic-{systematic}" if systematic else seed
    choices = Choices(connector, extra, tuple(without), tuple(faults))
    with chosen_executor(cluster, jobs) as executor, ends_between_steps() as ending:
        path = directory or Path(f"kvsm-vllm-fuzz-{name}")
        hunt = Hunt(choices, seed, executor, ending, reduce_budget(reduce_seconds), path, as_json)
        answer = hunt.run_all(systematic, **limits) if systematic else hunt.run(**limits)
    if junit is not None or github:
        tell_ci(_ci_report(answer), junit, github=github, quiet=as_json)
    _leave(answer, ending, as_json)


def _leave(answer: VllmFuzzAnswer, ending: EndRequest, as_json: bool) -> None:
    if as_json:
        say_json(answer)
    else:
        _print_totals(answer)
    if answer.findings:
        raise SystemExit(ExitCode.BROKEN)
    if answer.interrupted:
        raise SystemExit(ending.code or ExitCode.INTERRUPTED)


class Hunt:
    """A walk that continues after a failure, and saves each different one.

    budget: the time of all reductions. directory: where failures are saved. quiet: print nothing during the
    walk.
    """

    def __init__(
        self,
        choices: Choices,
        seed: int,
        executor: Executor | None,
        ending: EndRequest,
        budget: TimeBudget,
        directory: Path,
        quiet: bool,
    ) -> None:
        self._choices, self._seed, self._executor = choices, seed, executor
        self._ending, self._budget = ending, budget
        self._directory, self._quiet = directory, quiet
        self._found: list[tuple[Finding, VllmFuzzFinding]] = []

    def run(self, *, seconds: float | None, runs: int | None, first: bool) -> VllmFuzzAnswer:
        """Walk until a limit or, if `first`, the first defect. Raises `ConfigError` if there is no such
        connector."""
        self._choices.case(Random(0)).make()
        self._choices = self._choices.fitted()
        if not self._quiet:
            say(f"connector {self._choices.connector}, vLLM {_version()}, seed {self._seed}")
        if seconds is None and runs is None:
            seconds = DEFAULT_SECONDS
        total = WalkResult(seed=self._seed)
        while True:
            result = self._walk(
                total,
                None if seconds is None else seconds - total.seconds,
                None if runs is None else runs - total.runs,
            )
            total = msgspec.structs.replace(
                result,
                runs=total.runs + result.runs,
                operations=total.operations + result.operations,
                seconds=total.seconds + result.seconds,
            )
            if result.failure is not None:
                case = self._choices.case(random_of(self._seed, result.failure.run))
                self._note(case, result.failure)
            over = (seconds is not None and total.seconds >= seconds) or (
                runs is not None and total.runs >= runs
            )
            if over or self._ending.is_made() or (first and self._found):
                break
        return VllmFuzzAnswer(
            connector=self._choices.connector,
            version=_version(),
            seed=self._seed,
            runs=total.runs,
            operations=total.operations,
            seconds=round(total.seconds, 1),
            interrupted=self._ending.is_made(),
            findings=tuple([found for _, found in self._found]),
        )

    def _walk(self, before: WalkResult, seconds: float | None, runs: int | None) -> WalkResult:
        choices, ours = self._choices, _version()

        def draw(random: Random) -> WalkCase:
            if _version() != ours:
                raise ConfigError(f"a worker on {gethostname()} has vLLM {_version()}, and here is {ours}")
            return choices.case(random)

        def text(result: WalkResult) -> str:
            made, done = before.runs + result.runs, before.operations + result.operations
            lasted, defects = before.seconds + result.seconds, len(self._found)
            return f"{made:,} runs, {done:,} actions, {lasted:.0f} s, {defects} defects"

        return shown_walk(
            RepeatedRuns(draw, self._seed),
            self._seed,
            self._executor,
            first_run=before.next_run,
            seconds=seconds,
            runs=runs,
            text=text,
            is_over=self._ending.is_made,
        )

    def run_all(self, most: int, *, seconds: float | None, runs: int | None, first: bool) -> VllmFuzzAnswer:
        """Run every schedule of at most `most` actions, until a limit. Raises `ConfigError` like `run`."""
        cases = self._choices.small_cases()
        cases[0].make()
        self._choices = self._choices.fitted()
        actions = self._choices.alphabet()
        if not self._quiet:
            say(f"connector {self._choices.connector}, vLLM {_version()}, all schedules of {most} actions")
        done, ending = [ScheduleCounts() for _ in cases], self._ending
        for place, case in enumerate(cases):
            for counts, failure in shown_search(case.make, actions, most, self._executor, ending.is_made):
                done[place] = counts
                if failure is not None:
                    self._note(case, failure, most)
                if _is_over(done, seconds, runs) or (first and self._found):
                    break
        return VllmFuzzAnswer(
            connector=self._choices.connector,
            version=_version(),
            seed=self._seed,
            runs=sum(counts.schedules for counts in done),
            operations=sum(counts.actions for counts in done),
            seconds=round(sum(counts.seconds for counts in done), 1),
            interrupted=ending.is_made(),
            systematic=most,
            complete=min(counts.complete for counts in done),
            findings=tuple([found for _, found in self._found]),
        )

    def _note(self, case: WalkCase, failure: WalkFailure, systematic: int = 0) -> None:
        for place, (finding, known) in enumerate(self._found):
            if finding.is_like(failure.finding):
                self._found[place] = finding, msgspec.structs.replace(known, times=known.times + 1)
                return
        if not self._found:
            claim(self._directory)
        directory = self._directory / str(len(self._found) + 1)
        claim(directory)
        saved = unreduced(case, self._seed, failure, systematic)
        save(saved, directory)
        place, left = len(self._found), self._budget.left
        self._found.append((failure.finding, VllmFuzzFinding(saved, 1, str(directory))))
        with self._budget.spending() as is_spent:
            saved = reduced(saved, lambda: is_spent() or self._ending.is_made())
        save(saved, directory)
        self._found[place] = failure.finding, VllmFuzzFinding(saved, 1, str(directory))
        if not self._quiet:
            say("", *shown_steps(told(saved), directory), "")
            spent = f"{left - self._budget.left:.0f} s for reducing, {max(0.0, self._budget.left):.0f} s left"
            say(f"{spent} (--reduce-seconds); saved in {directory}", "")


def _is_over(done: Sequence[ScheduleCounts], seconds: float | None, runs: int | None) -> bool:
    lasted, made = sum(counts.seconds for counts in done), sum(counts.schedules for counts in done)
    return (seconds is not None and lasted >= seconds) or (runs is not None and made >= runs)


def _version() -> str:
    from vllm import __version__

    return str(__version__)


def _ci_report(answer: VllmFuzzAnswer) -> WalkReport:
    return WalkReport(
        command="kvsm vllm-fuzz",
        target=answer.connector,
        name=f"{_limits_of(answer)}, vLLM {answer.version}",
        seconds=answer.seconds,
        totals=f"{answer.runs:,} runs, {answer.operations:,} actions in {answer.seconds:.0f} s",
        made_by=f"kvsm vllm-fuzz --connector {answer.connector} {_limits_of(answer)}",
        failures=[
            failure_report(
                one.failure,
                told(one.failure),
                Path(one.directory),
                replay_command(one.failure, one.directory),
            )
            for one in answer.findings
        ],
    )


def _limits_of(answer: VllmFuzzAnswer) -> str:
    """Return the options that repeat the same runs."""
    if answer.systematic:
        return f"--systematic {answer.systematic}"
    return f"--seed {answer.seed} --runs {answer.runs}"


def _print_totals(answer: VllmFuzzAnswer) -> None:
    totals = f"{answer.runs:,} runs, {answer.operations:,} actions in {answer.seconds:.0f} s"
    if answer.systematic:
        totals = (
            f"{answer.runs:,} schedules in {answer.seconds:.0f} s: all of at most {answer.complete} actions"
        )
    if not answer.findings:
        say(f"{totals}{', interrupted' if answer.interrupted else ''}", in_green("no defect was found"))
        return
    say(f"{totals}; {len(answer.findings)} different defects:")
    for finding in answer.findings:
        say(f"  {finding.times} times: {finding.failure.finding()}")
        say(f"    {replay_command(finding.failure, finding.directory)}")
