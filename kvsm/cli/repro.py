"""`kvsm repro`: write a pytest file for a broken property, with the part of the log that shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from kvsm.cli.log_options import json_option, log_argument, trust_options
from kvsm.cli.output import Command, say, say_json
from kvsm.explain.verify.reproduction import Reproduction, write_reproduction


class ReproAnswer(msgspec.Struct, frozen=True, kw_only=True, tag_field="schema", tag="kvsm.repro/1"):
    """What `kvsm repro --json` prints: what was written.

    test: the pytest file.
    log: the directory of the part of the log that it replays.
    first, last: the events of this part; `last` breaks the properties.
    property_ids: the broken properties.
    """

    test: str
    log: str
    first: int
    last: int
    property_ids: tuple[str, ...]


@click.command(cls=Command)
@log_argument()
@click.option(
    "--at",
    type=click.IntRange(min=1),
    metavar="SEQ",
    help="Expect the failure at this event or before.  [default: anywhere in LOG]",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The pytest file to write.  [default: test_repro_SEQ.py]",
)
@trust_options
@json_option
def repro(log: Path, at: int | None, output: Path | None, as_json: bool, **trust: Any) -> None:
    """Write a pytest file that reproduces the first failure in LOG.

    A short part of LOG that shows the failure is put beside the file. The test fails with what
    `kvsm verify` reports. Nothing is overwritten. Exits with 2 if no property is broken.
    """
    made = write_reproduction(log, at, output, **trust)
    if as_json:
        say_json(_answer(made))
        return
    broken = ", ".join(dict.fromkeys(str(one.property) for one in made.breakage.violations))
    say(
        f"{made.test}: a test that fails at event {made.last}: {broken}",
        f"{made.log}: events {made.first:,} to {made.last:,} of {log}",
        f"run it: pytest {made.test}",
    )


def _answer(made: Reproduction) -> ReproAnswer:
    return ReproAnswer(
        test=str(made.test),
        log=str(made.log),
        first=made.first,
        last=made.last,
        property_ids=tuple(dict.fromkeys(one.property.id for one in made.breakage.violations)),
    )
