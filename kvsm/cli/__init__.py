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
    section: where the help lists it.
    says: its line there, which is the first sentence of its own help.
    """

    room: str
    section: str
    says: str


COMMANDS = {
    "report": Listed("report", LOOK, "Say what LOG tells as a whole, and what stands out in it."),
    "why": Listed("why", LOOK, "Tell why a request, key, transfer or slot fared as it did."),
    "timeline": Listed("timeline", LOOK, "Draw LOG as an offline HTML page, or as a trace for Perfetto."),
    "whatif": Listed("whatif", LOOK, "Tell what LOG would have been with another host pool."),
    "diff": Listed("diff", LOOK, "Say where two logs of one workload part first."),
    "query": Listed("query", LOOK, "Answer a SELECT, or a named query, over the tables of LOG."),
    "export": Listed("export", LOOK, "Write the tables of each LOG as Parquet files."),
    "show": Listed("show", LOOK, "Tell the life of one thing in LOG, with causes."),
    "verify": Listed("verify", LOOK, "Check every property that LOG can show, at every event."),
    "replay": Listed("replay", LOOK, "Rebuild the state after any event of LOG, and print it."),
    "repro": Listed("repro", LOOK, "Write a pytest file that replays LOG to its first failure."),
    "fork": Listed("fork", LOOK, "Go on from event SEQ of LOG with other choices."),
    "tail": Listed("tail", LOOK, "Print the last events of LOG, and each new one."),
    "top": Listed("top", LOOK, "Show what an engine does now, from the LOG that it writes."),
    "run": Listed("run", RUN, "Serve a workload with KV-cache offload, and verify its log."),
    "pools": Listed("pools", RUN, "List the host pools that DIR keeps, and who uses them."),
    "logs": Listed("logs", RUN, "List the event logs in DIR, and delete old ones on request."),
    "bench": Listed("vllm", RUN, "Measure what kvsm costs and gains."),
    "check": Listed("check", CHECK, "Explore every interleaving of MODEL within bounds."),
    "fuzz": Listed("fuzz", CHECK, "Walk at random through the real code, and reduce a failure."),
    "museum": Listed("museum", CHECK, "Put real bugs back into kvsm, and let the checkers find them."),
    "vllm-check": Listed("vllm", CHECK, "Test whether the installed vLLM works with kvsm."),
    "vllm-fuzz": Listed(
        "vllm_fuzz",
        CHECK,
        "Drive any vLLM connector by vLLM's scheduler, and reduce failures.",
    ),
    "diagram": Listed("diagram", CHECK, "Draw MACHINE as its table declares it."),
}
"""Each command, in the order of the help. A test compares `says` with the command's own help."""


class _Commands(CommandGroup):
    """Turns an error of kvsm into one clear line and an exit code; a bug keeps its traceback."""

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
            listed = [(name, one.says) for name, one in COMMANDS.items() if one.section == section]
            with formatter.section(section):
                formatter.write_dl([(name.ljust(width), says) for name, says in listed])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The commands that begin so, with their lines."""
        from click.shell_completion import CompletionItem

        found = [
            CompletionItem(name, help=one.says)
            for name, one in COMMANDS.items()
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
    """Say on a system that kvsm does not support what may work there. Ends the command if nothing does."""
    if sys.platform == "linux":
        return
    if sys.platform == "win32":
        complain("kvsm does not run on Windows; it supports Linux (WSL, too)")
        raise SystemExit(ExitCode.UNUSABLE)
    complain(f"kvsm supports Linux, and is not tested on {sys.platform}; commands that read a log may work")


def _say_version(ctx: click.Context, _option: click.Parameter, asked: bool) -> None:
    """Say which kvsm this is, and which body its fold has."""
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
    help="Show the version, and which body of the fold runs.",
)
def main() -> None:
    """An event-sourced state machine for KV-cache offload: run it, ask its log why, check it.

    \b
    Begin with:
      kvsm run                    a workload through the whole machine; its log stays in ./kvsm-log
      kvsm report kvsm-log        what the log says as a whole, and what stands out in it
      kvsm COMMAND --help         what a command does, with examples and exit codes
    """
