"""Write a page of results, with the command and the machine."""

from __future__ import annotations

import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import click


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows)]


def publish(title: str, note: str, lines: Sequence[str], output: Path | None) -> None:
    """Print a page, and write it to `output` if given. note: how the results were measured."""
    page = [
        f"# {title}",
        "",
        f"    python {shlex.join(sys.argv)}",
        "",
        f"{platform.machine()}, Python {platform.python_version()}; {note}.",
        "",
        *lines,
    ]
    text = "\n".join(page).rstrip() + "\n"
    click.echo(text)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text)
