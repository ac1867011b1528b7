"""Escapes text of a log, so that it cannot control a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    r"""Escape characters that are not printable, as Python does: `r\x1b[31m`, `a\nb`, `\u202e`.

    Text of a log may hold terminal escape sequences, line breaks, or marks that reverse the direction of
    writing. The no-break space is kept, although Python does not call it printable.
    """
    if text.isprintable():
        return text
    return "".join([char if char.isprintable() or char == "\xa0" else ascii(char)[1:-1] for char in text])
