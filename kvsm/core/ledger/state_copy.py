"""The state of a ledger at one moment, as the bytes with which a segment opens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class StateCopy(Protocol):
    """A snapshot of the state after one event, made in pieces while later events are folded.

    The thread that folds calls `go_on` and `drop`. Any thread may take the pieces of a copy that is whole.
    """

    def go_on(self) -> bool:
        """Copy the next piece: less than a millisecond. Returns whether the copy is whole."""

    def pieces(self) -> Sequence[bytes]:
        """The snapshot (`kvsm.core.ledger.snapshot`) in pieces, in order. The copy must be whole."""

    def drop(self) -> None:
        """Nobody needs the copy any more. Idempotent."""


class WholeState:
    """A snapshot that somebody else has made."""

    def __init__(self, snapshot: bytes = b"") -> None:
        self._snapshot = snapshot

    def go_on(self) -> bool:
        """It is whole."""
        return True

    def pieces(self) -> Sequence[bytes]:
        """As `StateCopy.pieces`: one."""
        return [self._snapshot]

    def drop(self) -> None:
        """Nothing to do."""
