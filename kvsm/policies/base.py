"""What an eviction policy is to the ledger.

A policy orders the *idle* blocks (stored, no pin, no copy) by how soon they may go. It learns of them
through the calls below, which the ledger makes while it folds an event, and it answers one question,
`choose`, without changing. So a policy's state is a function of the log like everything else, and an
out-of-tree policy replays as exactly as a built-in one. `policy="package.module:Class"` plugs one in.

A block's way through a policy: `admitted` when its store is published; `busy` when a match pins it,
`idle` when the last pin or copy of it has gone (that is its use: order matters); `evicted` or `removed`.
Slots arrive as the ledger's `IdArray`: a tuple up to sixteen, a numpy array above. Prefix order is kept:
slots[0] holds the block nearest to the start of a prompt. A policy should let the *last* one go first,
since a prefix without its beginning serves nobody.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

from kvsm.ids import IdArray


class Choice(NamedTuple):
    """`victims` are evicted; `moved` are blocks that the search passed over and that change place."""

    victims: IdArray
    moved: IdArray


class EvictionPolicy(Protocol):
    """Eviction order over `capacity` slots. All methods but `choose`, `recall` and `snapshot` are part
    of the fold: they must be deterministic, and read nothing but their arguments and own state."""

    def __init__(self, capacity: int) -> None: ...

    def __len__(self) -> int:
        """How many idle blocks it orders."""

    def __contains__(self, slot: int) -> bool: ...

    def admitted(self, slots: IdArray, keys: Sequence[bytes]) -> None:
        """Newly stored blocks enter the order."""

    def busy(self, slots: IdArray) -> None:
        """Idle blocks leave the order; they are in use."""

    def idle(self, slots: IdArray) -> None:
        """Used blocks come back to the order."""

    def touched(self, slots: IdArray) -> None:
        """Idle blocks were used in passing, without leaving the order."""

    def removed(self, slots: IdArray) -> None:
        """Blocks, idle or busy, were invalidated."""

    def evicted(self, choice: Choice, keys: Sequence[bytes]) -> None:
        """Carry out a choice; keys[i] was in choice.victims[i]."""

    def choose(self, count: int, protected: Collection[int]) -> Choice | None:
        """`count` idle blocks to evict, none of them `protected`; None if there are not so many.

        All or nothing, and pure: asked again, it answers the same.
        """

    def recall(self, keys: Sequence[bytes]) -> tuple[bytes, ...]:
        """Those of `keys` that it remembers evicting (ghosts); pure."""

    def recalled(self, keys: Sequence[bytes]) -> None:
        """Ghosts that are about to be stored again: what `recall` answered, as an event."""

    def snapshot(self) -> bytes:
        """Its whole state, equal for equal states."""

    def restore(self, state: bytes) -> None:
        """Become what `snapshot` saved; called on a new policy of the same capacity."""
