"""What the commands print. Everything that leaves for a terminal or a script goes through here.

Names, paths and messages may come from a log, and anybody may have written the log. So each line is made
`printable` as it leaves: nothing in it moves the cursor, colours text, forges a line or is read as markup.
JSON is plain ASCII.

A verdict is `in_green`, `in_red` or `in_yellow`. It has this colour on a terminal, unless the environment has
NO_COLOR. The words alone tell the verdict, too.

Standard output that cannot be written ends the command with its own exit code, because a full disk is not a
broken property. A reader who leaves early (`kvsm show ... | head`) ends it with 0.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

import click

from kvsm.cli.exit_codes import ExitCode
from kvsm.cli.toned import Toned, encodable
from kvsm.properties import json_with_titles

if TYPE_CHECKING:
    import msgspec


def say(*lines: str) -> None:
    """Print lines for people. A line break inside of a line is shown, not made."""
    with writing() as out:
        out.write("".join(f"{_shown(line, out)}\n" for line in lines))
        out.flush()


def _shown(line: str, out: TextIO) -> str:
    """The line, printable, and coloured if it is a verdict and this is a terminal."""
    text = encodable(line, out)
    if isinstance(line, Toned) and out.isatty() and not os.environ.get("NO_COLOR"):
        return click.style(text, fg=line.tone.value)
    return text


def say_text(text: str) -> None:
    """Print text of several lines that holds nothing from a file."""
    say(*text.removesuffix("\n").split("\n"))


def say_json(answer: msgspec.Struct) -> None:
    """Print one JSON object on one line, with the title of each property beside its id.

    answer: its first key "schema" is its struct's tag, and `kvsm.cli.schemas` knows it by that name.
    """
    assert answer.__struct_config__.tag_field == "schema", type(answer)
    say(json_with_titles(answer).decode())


def say_table(table: Any) -> None:
    """Print a table of `rich`. Its cells are made printable."""
    from kvsm.cli.plain_console import PlainConsole  # Only here: `kvsm --help` must not wait for it.

    with writing() as out:
        PlainConsole(file=out, highlight=False, markup=False, emoji=False, soft_wrap=True).print(table)


class Screen:
    """Lines that are drawn over the ones before on a terminal. Elsewhere each draw adds them, and a line of
    its own after them."""

    def __init__(self) -> None:
        self._drawn = 0

    def draw(self, *lines: str) -> None:
        """Draw these lines. On a terminal they are cut to its size."""
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
        except OSError:  # Nobody can be told that nobody can be told.
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
    """Around each write to standard output. Ends the command if the output cannot be written."""
    out = sys.stdout
    if out is None:
        _lose_output("it is closed")
    try:
        yield out
    except BrokenPipeError:
        # The reader of our output has left: nothing is wrong.
        _discard(out)
        raise SystemExit(ExitCode.GOOD) from None
    except OSError as error:
        _discard(out)
        _lose_output(error.strerror or str(error))


class Command(click.Command):
    """A command of kvsm. Its help, too, knows when it cannot be written."""

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        """Read the command line. Prints the help if that is asked for."""
        with writing():
            return super().make_context(*args, **extra)


class CommandGroup(Command, click.Group):
    """The same for a group of commands. Suggests a command for a name that is misspelt."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that is called, with its arguments."""
        name, known = args[0], self.list_commands(ctx)
        if name not in known and not name.startswith("-") and not ctx.resilient_parsing:
            near = get_close_matches(name, known)
            meant = f" Did you mean {' or '.join(near)}?" if near else ""
            ctx.fail(f"There is no command {name!r}.{meant}")
        return super().resolve_command(ctx, args)


def _discard(stream: TextIO) -> None:
    """What is still buffered goes nowhere: the interpreter would fail on it at exit, with another code."""
    with suppress(OSError, ValueError):  # A stream of a test has no descriptor.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _lose_output(reason: str) -> NoReturn:
    complain(f"standard output cannot be written: {reason}; the result is not told in full")
    raise SystemExit(ExitCode.OUTPUT_LOST)
