"""`kvsm vllm-check` and `kvsm bench vllm`: check and measure kvsm in the installed vLLM."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import msgspec

from kvsm.cli.exit_codes import ExitCode
from kvsm.cli.output import Command, CommandGroup, complain, say, say_json, say_table, say_text
from kvsm.cli.struct_options import struct_options
from kvsm.cli.toned import in_green, in_red
from kvsm.vllm.bench import Bench, compare, page
from kvsm.vllm.installation_check import SHORT_START, EngineCheck, InstallationCheck, check_installation
from kvsm.vllm.versions import TESTED


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Yield a function that prints progress to standard error: in place on a terminal, else a line each."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield complain
        return
    with console.status("") as status:
        yield lambda text: status.update(text)


@contextmanager
def _writing(path: Path, option: str) -> Iterator[None]:
    """Turn an `OSError` of the block into `click.BadParameter`: the path of this option cannot be written."""
    try:
        yield
    except OSError as error:
        raise click.BadParameter(f"cannot write {path}: {error.strerror}", param_hint=option) from error


@click.command(cls=Command)
@click.option(
    "--tensor-parallel-size",
    "ranks",
    type=click.Choice(["1", "2", "4", "8"]),
    default="1",
    show_default=True,
    help="Tensor-parallel ranks of each engine.",
)
@click.option(
    "--keep-log",
    "logs",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Keep the event logs in DIR. By default they are deleted.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def vllm_check(ranks: str, logs: Path | None, as_json: bool) -> None:
    """Test whether the installed vLLM works with kvsm. Takes about a minute.

    Checks that vLLM has the names that kvsm imports, and that its calls fit kvsm's methods. Then a tiny model
    serves the same prompts in an engine without kvsm, in one with KvsmConnector, and in one that is started
    by KVSM_OFFLOAD=1 with --kv-offloading-size. The tokens must be equal, blocks must be loaded from host
    memory, and every event log must verify. It runs on a GPU if there is one. Nothing is downloaded.

    KVSM_OFFLOAD=1 needs kvsm's plugin. If vLLM does not load it, a note says why, and the other engines
    count.

    Exit code: 0 if kvsm works; 1 if it does not, with the reasons; 2 if vLLM is missing, or does not serve
    without kvsm either.
    """
    # vLLM would log to standard output at import.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if logs is not None:
        with _writing(logs, "--keep-log"):
            logs.mkdir(parents=True, exist_ok=True)
    with _progress() as tell:
        report = check_installation(int(ranks), logs, tell)
    if as_json:
        say_json(VllmCheckAnswer(**msgspec.structs.asdict(report), good=not report.wrong))
    else:
        _print_report(report)
    if report.wrong:
        raise SystemExit(ExitCode.BROKEN)


class VllmCheckAnswer(
    InstallationCheck, frozen=True, kw_only=True, tag_field="schema", tag="kvsm.vllm-check/1"
):
    """What `kvsm vllm-check --json` prints: whether kvsm works with the installed vLLM.

    good: whether kvsm works.
    version: of vLLM.
    tested: whether kvsm's tests cover this version.
    platform: the device type that the engines run on.
    ranks: tensor-parallel ranks of each engine.
    interface: names and arguments that kvsm needs and vLLM does not have.
    news: names that vLLM has and kvsm does not know; they need not be a problem.
    engines: results of each engine; the first one has no kvsm.
    no_short_start: why `KVSM_OFFLOAD=1` has no effect here; empty if it has. Other ways may work.
    """

    good: bool


def _print_report(report: InstallationCheck) -> None:
    tested = "tested" if report.tested else f"not tested; tested: {', '.join(TESTED)}"
    ranks = "" if report.ranks == 1 else f", {report.ranks} ranks"
    say(f"vLLM {report.version} on {report.platform}{ranks} ({tested})", "")
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("", *(one.name for one in report.engines)):
        table.add_column(column, justify="left" if not column else "right")
    for name, cell in _ROWS:
        table.add_row(name, *(cell(one) for one in report.engines))
    say_table(table)
    say("", *[f"NEW: {line}" for line in report.news], *[f"WRONG: {line}" for line in report.wrong])
    if report.no_short_start:
        say(f"NOTE: {SHORT_START} has no effect: {report.no_short_start}")
    for one in report.engines:
        if one.log is not None:
            say(f"log of {one.name}: {one.log}")
    say(
        in_red("kvsm does not work with this vLLM") if report.wrong else in_green("kvsm works with this vLLM")
    )


_ROWS: tuple[tuple[str, Callable[[EngineCheck], str]], ...] = (
    ("requests served", lambda one: f"{one.requests:,}"),
    ("requests with other tokens", lambda one: _of_kvsm(one, f"{one.other_tokens:,}")),
    ("prompt tokens", lambda one: f"{one.prompt_tokens:,}"),
    ("prompt tokens from a cache", lambda one: f"{one.cached_tokens:,}"),
    ("blocks stored", lambda one: _of_kvsm(one, f"{one.blocks_stored:,}")),
    ("blocks loaded", lambda one: _of_kvsm(one, f"{one.blocks_loaded:,}")),
    ("events in the log", lambda one: _of_kvsm(one, f"{one.log_events:,}")),
    ("the log replays and verifies", lambda one: _of_kvsm(one, "yes" if one.log_verifies else "NO")),
)


def _of_kvsm(one: EngineCheck, text: str) -> str:
    return "" if one.name == "without kvsm" else text


@click.group(cls=CommandGroup)
def bench() -> None:
    """Measure what kvsm costs and gains."""


@bench.command("vllm", cls=Command)
@struct_options(Bench)
@click.option("--peers", is_flag=True, help="Also run vLLM's own offload connectors.")
@click.option(
    "--choosing",
    is_flag=True,
    help="Also run KvsmConnector with the policy auto, with load_only_if_faster, and with both.",
)
@click.option(
    "--disk",
    type=click.Path(file_okay=False, exists=True, writable=True, path_type=Path),
    metavar="DIR",
    help="Compare small host pools instead, with and without a disk tier. Its files are in DIR meanwhile.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the page to FILE, too.",
)
def bench_vllm(
    peers: bool, choosing: bool, disk: Path | None, as_json: bool, output: Path | None, **options: int
) -> None:
    """Compare requests per second of vLLM with and without kvsm.

    One engine has no offload, the other has KvsmConnector. Each turn of a conversation arrives after other
    conversations have taken its device blocks. The model is small and random; nothing is downloaded. All
    engines live at the same time and serve each round one after the other, so other load on the machine
    affects all of them. The time that the engine's thread spends in its connector is measured separately.

    With --peers, vLLM's OffloadingConnector and SimpleCPUOffloadConnector serve the same rounds. Workers of
    this benchmark copy for them, because vLLM's own workers need CUDA.

    With --choosing, three more KvsmConnectors take part: one refuses stores that do not pay (policy auto),
    one refuses such loads (load_only_if_faster), and one refuses both. With --turns 1 and --host-percent 25
    no prompt is sent twice, so offload can only cost time.

    With --disk, three KvsmConnectors are compared: with a host pool of a tenth of what the conversations
    need, with the same pool and a disk tier below it, and with a host pool for all of them. It does not go
    with --choosing.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if output is not None:  # Fail now, not after minutes.
        with _writing(output, "--output"):
            output.parent.mkdir(parents=True, exist_ok=True)
    with _progress() as tell:
        found = compare(Bench(**options), tell, peers=peers, choosing=choosing, disk=disk)
    text = page(found)
    if as_json:
        say_json(found)
    else:
        say_text(text)
    if output is not None:
        with _writing(output, "--output"):
            output.write_text(text)
