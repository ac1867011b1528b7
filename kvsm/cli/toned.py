"""Text for a terminal: printable, and coloured if it is a verdict."""

from __future__ import annotations

from enum import Enum
from typing import Any

from kvsm.system.printable import printable


class Tone(Enum):
    """The colour of a verdict, by its name in click and rich."""

    GREEN = "green"
    RED = "red"
    YELLOW = "yellow"


class Toned(str):
    """A line, or a cell of a table, with a colour. Joined to other text it is a plain `str`, without one."""

    tone: Tone

    def __new__(cls, text: str, tone: Tone) -> Toned:
        """Make a text with a colour. Like any other text, it is made printable when it is printed."""
        toned = super().__new__(cls, text)
        toned.tone = tone
        return toned


def in_green(text: str) -> Toned:
    """Mark a good verdict."""
    return Toned(text, Tone.GREEN)


def in_red(text: str) -> Toned:
    """Mark a bad verdict."""
    return Toned(text, Tone.RED)


def in_yellow(text: str) -> Toned:
    """Mark a verdict that is open, or that has a reservation."""
    return Toned(text, Tone.YELLOW)


def encodable(line: str, out: Any) -> str:
    """Return the line, printable, with escapes for characters that the stream cannot encode."""
    encoding = getattr(out, "encoding", None) or "utf-8"
    return printable(line).encode(encoding, "backslashreplace").decode(encoding)
