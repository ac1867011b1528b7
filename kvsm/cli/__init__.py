"""The command line: one file a command, and one place where errors become exit codes.

Exit codes, everywhere: 0 good; 1 a property is broken or a log is damaged; 2 unusable input.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from kvsm.cli.diagram import diagram
from kvsm.cli.replay import replay, show, verify
from kvsm.cli.run import run
from kvsm.errors import KvsmError, LogDamaged, LogWriteFailed

BROKEN, UNUSABLE = 1, 2


class _Commands(click.Group):
    """Turns an error of kvsm into one clear line and an exit code; a bug keeps its traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (LogDamaged, LogWriteFailed) as error:
            click.echo(f"kvsm: {error}", err=True)
            ctx.exit(BROKEN)
        except KvsmError as error:
            click.echo(f"kvsm: {error}", err=True)
            ctx.exit(UNUSABLE)
        except click.UsageError as error:
            command = error.ctx.command_path if error.ctx else "kvsm"
            click.echo(f"kvsm: {error.format_message()} See {command} --help.", err=True)
            ctx.exit(UNUSABLE)
        except BrokenPipeError:
            # The reader of our output has left (`kvsm show ... | head`): nothing is wrong.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(0)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="kvsm")
def main() -> None:
    """An event-sourced state machine for KV-cache offload: run it, replay it, ask it why.

    \b
    Start with:
      kvsm run                    a multi-turn workload through the whole machine
      kvsm run --log DIR          ... and keep its event log
      kvsm verify DIR             check every property at every event
      kvsm show DIR --block 42    the life of a host slot, with causes
    """


for command in (run, replay, verify, show, diagram):
    main.add_command(command)
