"""The command line: one file a command, and one place where errors become exit codes (`ExitCode`).

`COMMANDS` lists the commands. Help and completion read only this list, so that neither imports a command.
"""

from __future__ import annotations

import sys
import traceback
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from kvsm.cli.exit_codes import ExitCode
from kvsm.cli.output import CommandGroup, complain, say
from kvsm.errors import IllegalTransition, InvalidEvent, KvsmError, LogDamaged, LogWriteFailed

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

HAPPENED = "What happened, and why?"
OTHERWISE = "What would have happened otherwise?"
NOW = "What is an engine doing now?"
RIGHT = "Is a log right?"
RUN = "How does kvsm run here, and what does it cost?"
WRONG = "What can go wrong?"
SECTIONS = (RUN, HAPPENED, OTHERWISE, NOW, RIGHT, WRONG)
"""The questions that the help answers, in its order."""


class Listed(NamedTuple):
    """A command in the help.

    room: the file of kvsm/cli that it is in.
    section: the question under which the help lists it.
    says: its line in the list: the first sentence of the command's own help.
    """

    room: str
    section: str
    says: str


COMMANDS = {
    "run": Listed("run", RUN, "Serve a workload with KV-cache offload, and verify its log."),
    "bench": Listed("vllm", RUN, "Measure what kvsm costs and gains."),
    "vllm-check": Listed("vllm", RUN, "Test whether the installed vLLM works with kvsm."),
    "copy-paths": Listed("copy_paths", RUN, "Show which copy path is fastest on a GPU."),
    "report": Listed("report", HAPPENED, "Summarize LOG, and list what stands out in it."),
    "why": Listed("why", HAPPENED, "Explain a miss, a wait or a failure in LOG."),
    "timeline": Listed("timeline", HAPPENED, "Draw LOG as an offline HTML page, or as a trace for Perfetto."),
    "show": Listed("show", HAPPENED, "Show the history of a block, key, request or transfer in LOG."),
    "diff": Listed("diff", HAPPENED, "Show the first difference between two logs of one workload."),
    "query": Listed("query", HAPPENED, "Run a SELECT, or a named query, over the tables of LOG."),
    "spans": Listed("spans", HAPPENED, "Send the requests of LOG to an OpenTelemetry trace collector."),
    "export": Listed("export", HAPPENED, "Write LOG as Parquet tables, or as a redacted copy."),
    "whatif": Listed("whatif", OTHERWISE, "Predict the hit rate of LOG with another pool size or policy."),
    "fork": Listed("fork", OTHERWISE, "Re-run LOG from event SEQ with changes; show where it diverges."),
    "top": Listed("top", NOW, "Show what a running engine does, from the LOG that it writes."),
    "tail": Listed("tail", NOW, "Print the last events of LOG, and each new one."),
    "logs": Listed("logs", NOW, "List the event logs in DIR, and delete old ones on request."),
    "pools": Listed("pools", NOW, "List the host pools kept in DIR, and the processes using them."),
    "verify": Listed("verify", RIGHT, "Check every property that LOG can show, at every event."),
    "replay": Listed("replay", RIGHT, "Rebuild the state after any event of LOG, and print it."),
    "repro": Listed("repro", RIGHT, "Write a pytest file that reproduces the first failure in LOG."),
    "check": Listed("check", WRONG, "Explore every interleaving of MODEL within bounds."),
    "fuzz": Listed("fuzz", WRONG, "Run random operations on the real code, and reduce a failure."),
    "museum": Listed("museum", WRONG, "Put known bugs into kvsm; test whether the checkers see them."),
    "vllm-fuzz": Listed(
        "vllm_fuzz",
        WRONG,
        "Fuzz any vLLM connector under vLLM's scheduler; reduce failures.",
    ),
    "conform": Listed("conform", WRONG, "Test a connector, manager or tier; print what held."),
    "diagram": Listed("diagram", WRONG, "Draw a state machine from its transition table."),
}
"""Each command, in the order of the help. A test compares `says` with the command's own help."""


class _Commands(CommandGroup):
    """Prints an error of kvsm as one line and exits with its code; a bug is printed with its traceback."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 (click's signature)
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        room = import_module(f"kvsm.cli.{COMMANDS[cmd_name].room}")
        command: click.Command = getattr(room, cmd_name.replace("-", "_"))
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """List the commands by the questions that they answer."""
        width = max(map(len, COMMANDS))
        for section in SECTIONS:
            commands = [(name, listed.says) for name, listed in COMMANDS.items() if listed.section == section]
            formatter.write(f"\n{section}\n")
            with formatter.indentation():
                formatter.write_dl([(name.ljust(width), says) for name, says in commands])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete the name of a command; each completion shows the command's line of the help."""
        from click.shell_completion import CompletionItem

        found = [
            CompletionItem(name, help=listed.says)
            for name, listed in COMMANDS.items()
            if name.startswith(incomplete)
        ]
        return [*found, *click.Command.shell_complete(self, ctx, incomplete)]

    def invoke(self, ctx: click.Context) -> Any:
        _note_system()
        try:
            return super().invoke(ctx)
        except (IllegalTransition, InvalidEvent, LogDamaged, LogWriteFailed) as error:
            complain(str(error))
            ctx.exit(ExitCode.BROKEN)
        except KvsmError as error:
            complain(str(error))
            ctx.exit(ExitCode.UNUSABLE)
        except click.ClickException as error:
            command = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "kvsm"
            complain(f"{error.format_message()} See {command} --help.")
            ctx.exit(ExitCode.UNUSABLE)
        except KeyboardInterrupt:
            complain("interrupted")
            ctx.exit(ExitCode.INTERRUPTED)
        except (click.exceptions.Exit, click.Abort):
            raise
        except Exception:
            for line in traceback.format_exc().splitlines():
                complain(line)
            ctx.exit(ExitCode.BUG)


def _note_system() -> None:
    """Warn on a system that kvsm does not support. Ends the command on Windows, where nothing works."""
    if sys.platform == "linux":
        return
    if sys.platform == "win32":
        complain("kvsm does not run on Windows; it supports Linux (WSL, too)")
        raise SystemExit(ExitCode.UNUSABLE)
    complain(f"kvsm supports Linux, and is not tested on {sys.platform}; commands that read a log may work")


def _say_version(ctx: click.Context, _option: click.Parameter, asked: bool) -> None:
    """Print the version of kvsm, and whether the native or the Python body of the fold runs."""
    if not asked:
        return
    from importlib.metadata import version

    try:
        from kvsm.core import native
    except KvsmError as error:
        complain(str(error))
        ctx.exit(ExitCode.UNUSABLE)
    say(f"kvsm {version('kvsm')}; body of the fold: {native.described()}")
    ctx.exit()


@click.group("kvsm", cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_say_version,
    help="Show the version, and whether the fold runs in C or in Python.",
)
def main() -> None:
    """An event-sourced state machine for KV-cache offload: run it, explain its log, check it.

    \b
    Begin with:
      kvsm run                    serve a small workload; its log stays in ./kvsm-log
      kvsm report kvsm-log        summarize the log, and list what stands out in it
      kvsm COMMAND --help         what a command does, with examples and exit codes
    """
