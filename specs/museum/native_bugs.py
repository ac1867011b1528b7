"""Bugs of the museum and of `specs/mutants` as they would be written in C.

A bug in Python text needs the Python body. A bug here has the same id, but is in the C text, so a run with
`KVSM_NATIVE=1` executes it. `native_house.Bench` builds the body with the changed text in a copy of
the checkout.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class NativeEdit(NamedTuple):
    """A text that occurs once in a C file, and its replacement."""

    file: str
    old: str
    new: str

    def applied(self, folder: Path) -> bytes:
        """Return the changed text of the file in `folder`. Raises `ValueError` unless it has `old` once."""
        text = (folder / self.file).read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file} says {text.count(self.old)} times, not once: {self.old}")
        return text.replace(self.old, self.new).encode()


NATIVE_BUGS: dict[str, NativeEdit] = {
    "B06": NativeEdit(
        "requests.c",
        "next_words(folding, blocks, &BLOCK, BLOCK_PIN, &slots)",
        "next_words(folding, blocks, &BLOCK, BLOCK_TOUCH, &slots)",
    ),
    "B35": NativeEdit("order.c", "if (pinned[one] == PINNED_ONCE)", "if (false)"),
    "B69": NativeEdit("cache.c", "(tell_removed(folding) != FOLDED || ", "("),
    "M51": NativeEdit(
        "cache.c", "aged == NULL || restart_cursors(folding) != FOLDED || ", "aged == NULL || "
    ),
    "M55": NativeEdit(
        "loads.c",
        "load->rest.count = load->pins.count - loaded;",
        "load->rest.count = load->pins.count - loaded - (load->pins.count > loaded);",
    ),
    "M57": NativeEdit(
        "index.c", "if (!set_field(folding, N_forgotten_at, folding->seq_object))", "if (false)"
    ),
}
"""Bug -> its edit of the C text."""
