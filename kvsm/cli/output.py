"""Printing of all commands: each line for a terminal or a script passes through here.

Names, paths and messages may come from a log of an untrusted writer. So each line is made `printable` before
it is printed: nothing in it moves the cursor, colours text, forges a line or is read as markup. JSON is plain
ASCII.

A verdict is `in_green`, `in_red` or `in_yellow`. It has this colour on a terminal, unless the environment has
NO_COLOR. Its words alone also state the verdict.

Standard output that cannot be written ends the command with its own exit code, because a full disk is not a
broken property. A reader that closes the pipe early (`kvsm show ... | head`) ends the command with 0.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from itertools import islice
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

import click

from kvsm.cli.exit_codes import ExitCode
from kvsm.cli.toned import Toned, encodable
from kvsm.properties import json_with_titles

if TYPE_CHECKING:
    import msgspec


def is_terminal() -> bool:
    """Whether standard output is a terminal, and no pipe or file."""
    return sys.stdout.isatty()


def say(*lines: str) -> None:
    """Print lines for people. A line break within a line is printed as an escape."""
    with writing() as out:
        out.write("".join(f"{_shown(line, out)}\n" for line in lines))
        out.flush()


def _shown(line: str, out: TextIO) -> str:
    """Return the line, printable, and coloured if it is a verdict and `out` is a terminal."""
    text = encodable(line, out)
    if isinstance(line, Toned) and out.isatty() and not os.environ.get("NO_COLOR"):
        return click.style(text, fg=line.tone.value)
    return text


def say_text(text: str) -> None:
    """Print text of several lines. Nothing in it may come from a file, which could forge a line."""
    say(*text.removesuffix("\n").split("\n"))


def say_rows(rows: Iterable[Sequence[str]]) -> None:
    """Print rows of cells, with a tab between two cells. A tab within a cell is printed as an escape."""
    left = iter(rows)
    while some := list(islice(left, 1000)):
        with writing() as out:
            lines = ["\t".join([encodable(cell, out) for cell in row]) for row in some]
            out.write("".join(f"{line}\n" for line in lines))
            out.flush()


def say_json(answer: msgspec.Struct) -> None:
    """Print one JSON object on one line, with the title of each property beside its id.

    answer: a struct whose tag field is "schema"; `kvsm.cli.schemas` lists it by its tag.
    """
    assert answer.__struct_config__.tag_field == "schema", type(answer)
    say(json_with_titles(answer).decode())


def say_table(table: Any) -> None:
    """Print a table of `rich`. Its cells are made printable."""
    from kvsm.cli.plain_console import PlainConsole  # Only here: `kvsm --help` must not wait for it.

    with writing() as out:
        PlainConsole(file=out, highlight=False, markup=False, emoji=False, soft_wrap=True).print(table)


class Screen:
    """Redraws its lines in place on a terminal. Elsewhere, each draw appends the lines and an empty one."""

    def __init__(self) -> None:
        self._drawn = 0

    def draw(self, *lines: str) -> None:
        """Draw these lines, cut to the size of the terminal if there is one."""
        with writing() as out:
            if not out.isatty():
                out.write("".join(f"{encodable(line, out)}\n" for line in (*lines, "")))
                out.flush()
                return
            columns, rows = get_terminal_size()
            text = f"\x1b[{self._drawn}F" if self._drawn else ""
            for line in lines[: rows - 1]:
                cut = encodable(line, out)[: columns - 1]
                text += f"{_shown(Toned(cut, line.tone), out) if isinstance(line, Toned) else cut}\x1b[K\n"
            out.write(text + "\x1b[J")
            out.flush()
            self._drawn = min(len(lines), rows - 1)


def complain(text: str) -> None:
    """Print a line to standard error, with the name of the program in front."""
    err = sys.stderr
    if err is not None:
        try:
            err.write(f"kvsm: {encodable(text, err)}\n")
            err.flush()
        except OSError:  # Standard error is lost, so its loss cannot be reported.
            _discard(err)


def announce(line: str) -> None:
    """Print a line to standard error as it is: for another program that reads it, such as GitHub's runner."""
    err = sys.stderr
    if err is not None:
        try:
            err.write(f"{encodable(line, err)}\n")
            err.flush()
        except OSError:
            _discard(err)


@contextmanager
def writing() -> Iterator[TextIO]:
    """Wrap each write to standard output. Ends the command if the output cannot be written."""
    out = sys.stdout
    if out is None:
        _lose_output("it is closed")
    try:
        yield out
    except BrokenPipeError:
        # The reader has closed the pipe: nothing is wrong.
        _discard(out)
        raise SystemExit(ExitCode.GOOD) from None
    except OSError as error:
        _discard(out)
        _lose_output(error.strerror or str(error))


class Command(click.Command):
    """A command of kvsm. Help that cannot be written ends it with the exit code of lost output, too."""

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        """Parse the command line. Prints the help if that is asked for."""
        with writing():
            return super().make_context(*args, **extra)


class CommandGroup(Command, click.Group):
    """A group of commands. Suggests a command for a misspelt name."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the name, the command and its arguments. Suggests names similar to an unknown one."""
        name, known = args[0], self.list_commands(ctx)
        if name not in known and not name.startswith("-") and not ctx.resilient_parsing:
            near = get_close_matches(name, known)
            meant = f" Did you mean {' or '.join(near)}?" if near else ""
            ctx.fail(f"There is no command {name!r}.{meant}")
        return super().resolve_command(ctx, args)


def _discard(stream: TextIO) -> None:
    """Redirect a broken stream to /dev/null: its flush at exit would fail and change the exit code."""
    with suppress(OSError, ValueError):  # A stream of a test has no descriptor.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _lose_output(reason: str) -> NoReturn:
    complain(f"standard output cannot be written: {reason}; the printed result is incomplete")
    raise SystemExit(ExitCode.OUTPUT_LOST)
