"""`kvsm vllm-fuzz`: any connector of vLLM under vLLM's real scheduler, at random."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from random import Random, SystemRandom
from typing import Any

import click
import msgspec

from kvsm.checker.failures import SavedFailure, claim, reduced_case, save, told
from kvsm.checker.targets import WalkCase
from kvsm.checker.walk import WalkResult, random_of
from kvsm.cli.exit_codes import ExitCode
from kvsm.cli.output import Command, in_green, say, say_json
from kvsm.cli.walking import shown_walk
from kvsm.vllm_fuzz.shape import KINDS, draw_shape
from kvsm.worlds.world import Finding, World

DEFAULT_SECONDS = 60.0


class VllmFuzzFinding(msgspec.Struct, frozen=True):
    """A defect. times: how many runs ended in it. directory: where it is saved."""

    failure: SavedFailure
    times: int
    directory: str


class VllmFuzzAnswer(msgspec.Struct, frozen=True, kw_only=True, tag_field="schema", tag="kvsm.vllm-fuzz/1"):
    """What `kvsm vllm-fuzz --json` prints: the defects of a connector that a walk met.

    connector: its name.
    version: of vLLM.
    seconds: of walking, without the reductions.
    findings: the different defects, in the order in which they were met.
    """

    connector: str
    version: str
    seed: int
    runs: int
    operations: int
    seconds: float
    interrupted: bool
    findings: tuple[VllmFuzzFinding, ...]


class Choices(msgspec.Struct, frozen=True):
    """What is walked."""

    connector: str
    extra: dict[str, Any]
    without: tuple[str, ...]

    def case(self, random: Random) -> WalkCase:
        """A run's world."""
        shape = draw_shape(random)
        return WalkCase(
            "vllm",
            msgspec.structs.replace(shape, connector=self.connector, extra=self.extra, without=self.without),
        )


def _extra(_context: click.Context, _option: click.Parameter, value: str) -> dict[str, Any]:
    try:
        extra = json.loads(value)
    except json.JSONDecodeError as error:
        raise click.BadParameter(f"not JSON: {error}") from error
    if not isinstance(extra, dict):
        raise click.BadParameter(f'give an object, as {{"store_threshold": 2}}, and not {value}')
    return extra


@click.command(cls=Command)
@click.option(
    "--connector",
    required=True,
    metavar="NAME",
    help="A connector that vLLM knows, KvsmConnector, KvsmOffloadingConnector, or package.module:Class.",
)
@click.option(
    "--config",
    "extra",
    default="{}",
    callback=_extra,
    metavar="JSON",
    help="Its kv_connector_extra_config. cpu_bytes_to_use is drawn unless it is given.",
)
@click.option(
    "--seconds", type=click.FloatRange(min=0), help="Walk for this time (60); reducing comes on top."
)
@click.option("--runs", type=click.IntRange(min=1), metavar="N", help="Walk N runs instead.")
@click.option(
    "--seed", type=click.IntRange(min=0), metavar="S", help="Seed of all runs. Default: a random one."
)
@click.option("--jobs", type=click.IntRange(1, 256), help="Processes.  [default: one per CPU]", metavar="N")
@click.option(
    "--without",
    multiple=True,
    type=click.Choice(list(KINDS)),
    help="Leave out this kind of action, to look behind a defect that is known. Repeatable.",
)
@click.option("--first", is_flag=True, help="Stop at the first defect.")
@click.option(
    "--log",
    "directory",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="New or empty directory for the defects. Default: kvsm-vllm-fuzz-SEED.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def vllm_fuzz(
    connector: str,
    extra: dict[str, Any],
    without: tuple[str, ...],
    seed: int | None,
    jobs: int | None,
    directory: Path | None,
    as_json: bool,
    **limits: Any,
) -> None:
    """Drive any vLLM connector by vLLM's scheduler, and reduce failures.

    No model and no GPU are needed. Each run is a small engine of its own. vLLM's scheduler, its block pool
    and both sides of the connector are real. The model only writes and checks words. Copies are steps of a
    simulated device, and end when the seed says so. Requests share prefixes, and are preempted, aborted and
    salted; caches are reset; steps overlap; prompts come in chunks; there are drafts, sliding windows and
    two ranks.

    Checked: every block that a step reads holds what its tokens say; no block is written under a copy; no
    call raises; all work ends, and each end is told once; and then every client has its tokens, and no device
    block is held. At the end of a run the published KV events must say what the device and the host have, the
    host must have lost no slot, and the shutdown must leave no thread.

    \b
    Examples:
      kvsm vllm-fuzz --connector OffloadingConnector
      kvsm vllm-fuzz --connector OffloadingConnector --without reset --seconds 300
      kvsm vllm-fuzz --connector SimpleCPUOffloadConnector --config '{"lazy_offload": true}'
      kvsm vllm-fuzz --connector my_package.my_module:MyConnector --seed 7 --runs 500

    Each different defect is printed as numbered steps, and saved with a test for pytest that fails until it
    is mended. `kvsm fuzz --replay DIR` repeats it. Two failures count as one defect if they break the same
    property, by an error at the same line.

    \b
    Exit codes: 0 nothing found; 1 defects; 2 unusable input, or no vLLM; 130 Ctrl-C, and nothing found.
    """
    seed = SystemRandom().getrandbits(32) if seed is None else seed
    hunt = Hunt(
        Choices(connector, extra, tuple(without)),
        seed,
        jobs or os.cpu_count() or 1,
        directory or Path(f"kvsm-vllm-fuzz-{seed}"),
        as_json,
    )
    answer = hunt.run(**limits)
    if as_json:
        say_json(answer)
    else:
        _print_totals(answer)
    if answer.findings:
        raise SystemExit(ExitCode.BROKEN)
    if answer.interrupted:
        raise SystemExit(ExitCode.INTERRUPTED)


class Hunt:
    """A walk that goes on after a failure, and keeps each different one.

    directory: where they are saved. quiet: print nothing meanwhile.
    """

    def __init__(self, choices: Choices, seed: int, jobs: int, directory: Path, quiet: bool) -> None:
        self._choices, self._seed, self._jobs = choices, seed, jobs
        self._directory, self._quiet = directory, quiet
        self._found: list[tuple[Finding, VllmFuzzFinding]] = []

    def run(self, *, seconds: float | None, runs: int | None, first: bool) -> VllmFuzzAnswer:
        """Walk until a limit. first: or until the first defect. Raises `ConfigError` for a connector that is
        not there."""
        self._choices.case(Random(0)).make()
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
                self._note(result)
            over = (seconds is not None and total.seconds >= seconds) or (
                runs is not None and total.runs >= runs
            )
            if over or result.interrupted or (first and self._found):
                break
        return VllmFuzzAnswer(
            connector=self._choices.connector,
            version=_version(),
            seed=self._seed,
            runs=total.runs,
            operations=total.operations,
            seconds=round(total.seconds, 1),
            interrupted=total.interrupted,
            findings=tuple([found for _, found in self._found]),
        )

    def _walk(self, before: WalkResult, seconds: float | None, runs: int | None) -> WalkResult:
        def make_world(random: Random) -> World:
            return self._choices.case(random).make()

        def text(result: WalkResult) -> str:
            made, done = before.runs + result.runs, before.operations + result.operations
            lasted, defects = before.seconds + result.seconds, len(self._found)
            return f"{made:,} runs, {done:,} actions, {lasted:.0f} s, {defects} defects"

        return shown_walk(
            make_world,
            self._seed,
            first_run=before.next_run,
            seconds=seconds,
            runs=runs,
            jobs=self._jobs,
            text=text,
        )

    def _note(self, result: WalkResult) -> None:
        failure = result.failure
        assert failure is not None
        for place, (finding, known) in enumerate(self._found):
            if finding.is_like(failure.finding):
                self._found[place] = finding, msgspec.structs.replace(known, times=known.times + 1)
                return
        began = time.monotonic()
        case = self._choices.case(random_of(self._seed, failure.run))
        saved = reduced_case(case, self._seed, failure)
        if not self._found:
            claim(self._directory)
        directory = self._directory / str(len(self._found) + 1)
        save(saved, directory)
        self._found.append((failure.finding, VllmFuzzFinding(saved, 1, str(directory))))
        if not self._quiet:
            say("", *told(saved).split("\n"), "")
            say(f"reduced in {time.monotonic() - began:.0f} s; saved in {directory}", "")


def _version() -> str:
    from vllm import __version__

    return str(__version__)


def _print_totals(answer: VllmFuzzAnswer) -> None:
    totals = f"{answer.runs:,} runs, {answer.operations:,} actions in {answer.seconds:.0f} s"
    if not answer.findings:
        say(f"{totals}{', interrupted' if answer.interrupted else ''}", in_green("no defect was found"))
        return
    say(f"{totals}; {len(answer.findings)} different defects:")
    for finding in answer.findings:
        say(f"  {finding.times} times: {finding.failure.finding()}")
        say(f"    kvsm fuzz --replay {finding.directory}")
