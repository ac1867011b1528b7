"""The console of `rich` that prints kvsm's tables. It is a file of its own because `rich` loads slowly."""

from __future__ import annotations

from typing import Any, NoReturn

from rich.console import Console
from rich.text import Text

from kvsm.cli.toned import Toned, encodable


class PlainConsole(Console):
    """Makes all text of a table printable, and gives a `Toned` cell its colour."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Return the text of a cell."""
        if isinstance(text, Toned):
            options = {**options, "style": text.tone.value}
        return super().render_str(encodable(text, self.file), **options)

    def on_broken_pipe(self) -> NoReturn:
        """Raise the error again: `writing` handles it."""
        raise BrokenPipeError
