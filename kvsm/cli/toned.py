"""Text as it leaves for a terminal: printable, and a verdict with its colour."""

from __future__ import annotations

from enum import Enum
from typing import Any

from kvsm.system.printable import printable


class Tone(Enum):
    """The colour of a verdict, in the words of click and rich."""

    GREEN = "green"
    RED = "red"
    YELLOW = "yellow"


class Toned(str):
    """A line, or a cell of a table, with a colour. What is joined to it has none."""

    tone: Tone

    def __new__(cls, text: str, tone: Tone) -> Toned:
        """The text is made printable when it is printed, as any other."""
        toned = super().__new__(cls, text)
        toned.tone = tone
        return toned


def in_green(text: str) -> Toned:
    """A good verdict."""
    return Toned(text, Tone.GREEN)


def in_red(text: str) -> Toned:
    """A bad verdict."""
    return Toned(text, Tone.RED)


def in_yellow(text: str) -> Toned:
    """A verdict that is open, or one with a reservation."""
    return Toned(text, Tone.YELLOW)


def encodable(line: str, out: Any) -> str:
    """The line, printable, and only with characters that the stream can encode."""
    encoding = getattr(out, "encoding", None) or "utf-8"
    return printable(line).encode(encoding, "backslashreplace").decode(encoding)
