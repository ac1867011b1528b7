"""The end of every command that reads a log: its notes about the log itself, and its exit code."""

from __future__ import annotations

from kvsm.cli.exit_codes import ExitCode
from kvsm.cli.output import complain, say_table
from kvsm.explain.story import LogCondition
from kvsm.explain.story.unfinished import Unfinished, end_rows


def print_rows(*rows: tuple[str, str]) -> None:
    """Print a name and a text on each line, in two columns."""
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    say_table(table)


def end_lines(found: Unfinished) -> list[str]:
    """Format what is open at the end of a log: the lines under "at the end:"."""
    return [f"  {name:<18}{text}" for name, text in end_rows(found)]


def leave(condition: LogCondition, good: bool = True) -> None:
    """Print on standard error what is wrong with the log. Exits with 1 if events are missing.

    good: False: exit with 1 in any case, for example because a property is broken.
    """
    for note in condition.notes():
        complain(note)
    if not good or not condition.complete:
        raise SystemExit(ExitCode.BROKEN)
