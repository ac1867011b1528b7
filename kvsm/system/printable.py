"""Text of a log, made harmless for a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    r"""`text` on one line, with nothing in it that a terminal acts on: `r\x1b[31m`, `a\nb`, `\u202e`.

    Text of a log may be anything: escape sequences, line breaks, marks that turn the direction of writing.
    Whatever Python does not call printable is shown as its escape, but for the space that breaks no line.
    """
    if text.isprintable():
        return text
    return "".join([one if one.isprintable() or one == "\xa0" else ascii(one)[1:-1] for one in text])
