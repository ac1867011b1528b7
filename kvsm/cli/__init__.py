"""The command line: one file a command, and one place where errors become exit codes.

Exit codes: 0 good; 1 a property is broken or a log is damaged; 2 unusable input; 74 the output cannot be
written; 130 interrupted. `check` has its own for the first three, which its help tells.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click

from kvsm.cli.output import CommandGroup, complain
from kvsm.errors import IllegalTransition, InvalidEvent, KvsmError, LogDamaged, LogWriteFailed

BROKEN, UNUSABLE, INTERRUPTED = 1, 2, 130


COMMANDS = {
    "run": "run",
    "replay": "replay",
    "verify": "verify",
    "show": "show",
    "check": "check",
    "fuzz": "fuzz",
    "museum": "museum",
    "diagram": "diagram",
    "vllm-check": "vllm",
    "bench": "vllm",
}
"""Each command, and the file that it is in; imported only if it is called, so that none waits for another."""


class _Commands(CommandGroup):
    """Turns an error of kvsm into one clear line and an exit code; a bug keeps its traceback."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 (click's signature)
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        room = import_module(f"kvsm.cli.{COMMANDS[cmd_name]}")
        command: click.Command = getattr(room, cmd_name.replace("-", "_"))
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (IllegalTransition, InvalidEvent, LogDamaged, LogWriteFailed) as error:
            complain(str(error))
            ctx.exit(BROKEN)
        except KvsmError as error:
            complain(str(error))
            ctx.exit(UNUSABLE)
        except click.ClickException as error:
            command = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "kvsm"
            complain(f"{error.format_message()} See {command} --help.")
            ctx.exit(UNUSABLE)
        except KeyboardInterrupt:
            complain("interrupted")
            ctx.exit(INTERRUPTED)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="kvsm")
def main() -> None:
    """An event-sourced state machine for KV-cache offload: run it, replay it, ask it why, check it.

    \b
    Start with:
      kvsm run                    a multi-turn workload through the whole machine
      kvsm run --log DIR          ... and keep its event log
      kvsm verify DIR             check at every event what a log can show
      kvsm show DIR --block 42    the life of a host slot, with causes
      kvsm check                  explore every interleaving within bounds
      kvsm fuzz                   walk at random, for as long as you like
      kvsm vllm-check             does the vLLM that is installed here work with kvsm
    """
