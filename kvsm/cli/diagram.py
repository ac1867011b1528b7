"""`kvsm diagram`: print a state machine as a picture or a table."""

from __future__ import annotations

from pathlib import Path

import click

from kvsm.cli.output import Command, say_text
from kvsm.states import MACHINES


@click.command(cls=Command)
@click.argument("machine", type=click.Choice(list(MACHINES)))
@click.option(
    "--format",
    "form",
    type=click.Choice(["mermaid", "svg", "table"]),
    default="mermaid",
    show_default=True,
    help="Mermaid text, an SVG picture (needs Graphviz), or the decision table as Markdown.",
)
@click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write to this file.  [default: print]"
)
def diagram(machine: str, form: str, output: Path | None) -> None:
    """Draw a state machine from its transition table."""
    from kvsm.explain import diagrams  # `transitions` takes long to load, and no other command needs it

    text = getattr(diagrams, form)(MACHINES[machine])
    if output is None:
        say_text(text)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        reason = f"cannot write {output}: {error.strerror}"
        raise click.BadParameter(reason, param_hint="--output") from error
