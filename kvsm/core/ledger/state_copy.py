"""The state of a ledger after one event, as the bytes at the start of a log segment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class StateCopy(Protocol):
    """A snapshot of the state after one event, made in pieces while later events are folded.

    The thread that folds calls `go_on` and `drop`. Any thread may take the pieces of a complete copy.
    """

    def go_on(self) -> bool:
        """Copy the next piece, in less than a millisecond. Returns whether the copy is complete."""

    def pieces(self) -> Sequence[bytes]:
        """The snapshot (`kvsm.core.ledger.snapshot`) in pieces, in order. The copy must be complete."""

    def drop(self) -> None:
        """Release a copy that is no longer needed. Idempotent."""


class WholeState:
    """A snapshot that is complete from the start."""

    def __init__(self, snapshot: bytes = b"") -> None:
        self._snapshot = snapshot

    def go_on(self) -> bool:
        """Return True: it is complete."""
        return True

    def pieces(self) -> Sequence[bytes]:
        """As `StateCopy.pieces`: one piece."""
        return [self._snapshot]

    def drop(self) -> None:
        """Do nothing."""
