"""What the commands print. Everything that leaves for a terminal or a script goes through here.

Names, paths and messages may come from a log, and anybody may have written the log. So each line is made
`printable` as it leaves: nothing in it moves the cursor, colours text, forges a line or is read as markup.
JSON is plain ASCII.

Standard output that cannot be written ends the command with its own exit code, because a full disk is not a
broken property. A reader who leaves early (`kvsm show ... | head`) ends it with 0.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn, TextIO

import click
import msgspec
from rich.console import Console
from rich.text import Text

from kvsm.properties import json_with_titles
from kvsm.replay.render import printable

OUTPUT_LOST = 74
"""Exit code if standard output cannot be written: `EX_IOERR` of sysexits.h, and no command's verdict."""


def say(*lines: str) -> None:
    """Print lines for people. A line break inside of a line is shown, not made."""
    with writing() as out:
        out.write("".join(f"{_encodable(line, out)}\n" for line in lines))
        out.flush()


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
    with writing() as out:
        _PlainConsole(file=out, highlight=False, markup=False, emoji=False, soft_wrap=True).print(table)


def complain(text: str) -> None:
    """Print a line to standard error, with the name of the program in front."""
    err = sys.stderr
    if err is not None:
        # Nobody can be told that nobody can be told.
        with suppress(OSError):
            err.write(f"kvsm: {_encodable(text, err)}\n")
            err.flush()


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
        _discard_output()
        raise SystemExit(0) from None
    except OSError as error:
        _discard_output()
        _lose_output(error.strerror or str(error))


class Command(click.Command):
    """A command of kvsm. Its help, too, knows when it cannot be written."""

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        """Read the command line. Prints the help if that is asked for."""
        with writing():
            return super().make_context(*args, **extra)


class CommandGroup(Command, click.Group):
    """The same for a group of commands."""


class _PlainConsole(Console):
    """A console that makes all text of a table printable."""

    def render_str(self, text: str, **options: Any) -> Text:
        """The text of a cell."""
        return super().render_str(_encodable(text, self.file), **options)

    def on_broken_pipe(self) -> NoReturn:
        """Leave it to `writing`."""
        raise BrokenPipeError


def _encodable(line: str, out: Any) -> str:
    """The line, printable, and only with characters that the stream can encode."""
    encoding = getattr(out, "encoding", None) or "utf-8"
    return printable(line).encode(encoding, "backslashreplace").decode(encoding)


def _discard_output() -> None:
    """What is still buffered goes nowhere, so that the interpreter does not fail on it at exit."""
    with suppress(OSError, ValueError):  # A stream of a test has no descriptor.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _lose_output(reason: str) -> NoReturn:
    complain(f"standard output cannot be written: {reason}; the result is not told in full")
    raise SystemExit(OUTPUT_LOST)
