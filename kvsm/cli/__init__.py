"""The command line: one file a command, and one place where errors become exit codes (`ExitCode`).

`COMMANDS` lists the commands. Help and completion read only this list, so that neither imports a command.
"""

from __future__ import annotations

import sys
import traceback
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from kvsm.cli.exit_codes import ExitCode, Terminated
from kvsm.cli.output import CommandGroup, complain, say
from kvsm.errors import IllegalTransition, InvalidEvent, KvsmError, LogDamaged, LogWriteFailed

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

LOOK, RUN, CHECK = SECTIONS = ("Look into a log", "Run", "Check")
"""The sections of the help, by purpose."""


class Listed(NamedTuple):
    """A command in the help.

    room: the file of kvsm/cli that it is in.
    section: heading of the help under which it is listed.
    says: its line in the list: the first sentence of the command's own help.
    """

    room: str
    section: str
    says: str


COMMANDS = {
    "report": Listed("report", LOOK, "Summarize LOG, and list what stands out in it."),
    "why": Listed("why", LOOK, "Explain a miss, a wait or a failure in LOG."),
    "timeline": Listed("timeline", LOOK, "Draw LOG as an offline HTML page, or as a trace for Perfetto."),
    "whatif": Listed("whatif", LOOK, "Predict the hit rate of LOG with another pool size or policy."),
    "diff": Listed("diff", LOOK, "Show the first difference between two logs of one workload."),
    "query": Listed("query", LOOK, "Run a SELECT, or a named query, over the tables of LOG."),
    "export": Listed("export", LOOK, "Write the tables of each LOG as Parquet files."),
    "show": Listed("show", LOOK, "Show the history of a block, key, request or transfer in LOG."),
    "verify": Listed("verify", LOOK, "Check every property that LOG can show, at every event."),
    "replay": Listed("replay", LOOK, "Rebuild the state after any event of LOG, and print it."),
    "repro": Listed("repro", LOOK, "Write a pytest file that reproduces the first failure in LOG."),
    "fork": Listed("fork", LOOK, "Re-run LOG from event SEQ with changes; show where it diverges."),
    "tail": Listed("tail", LOOK, "Print the last events of LOG, and each new one."),
    "top": Listed("top", LOOK, "Show what a running engine does, from the LOG that it writes."),
    "run": Listed("run", RUN, "Serve a workload with KV-cache offload, and verify its log."),
    "pools": Listed("pools", RUN, "List the host pools kept in DIR, and the processes using them."),
    "logs": Listed("logs", RUN, "List the event logs in DIR, and delete old ones on request."),
    "bench": Listed("vllm", RUN, "Measure what kvsm costs and gains."),
    "check": Listed("check", CHECK, "Explore every interleaving of MODEL within bounds."),
    "fuzz": Listed("fuzz", CHECK, "Run random operations on the real code, and reduce a failure."),
    "museum": Listed("museum", CHECK, "Put known bugs into kvsm, and test whether the checkers see them."),
    "vllm-check": Listed("vllm", CHECK, "Test whether the installed vLLM works with kvsm."),
    "vllm-fuzz": Listed(
        "vllm_fuzz",
        CHECK,
        "Fuzz any vLLM connector under vLLM's scheduler; reduce failures.",
    ),
    "diagram": Listed("diagram", CHECK, "Draw a state machine from its transition table."),
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
        """List the commands by purpose."""
        width = max(map(len, COMMANDS))
        for section in SECTIONS:
            commands = [(name, listed.says) for name, listed in COMMANDS.items() if listed.section == section]
            with formatter.section(section):
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
        except KeyboardInterrupt as error:
            is_terminated = isinstance(error, Terminated)
            complain("terminated" if is_terminated else "interrupted")
            ctx.exit(ExitCode.TERMINATED if is_terminated else ExitCode.INTERRUPTED)
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
