"""What an eviction policy is to the ledger.

A policy orders the *idle* blocks (stored, no pin, no copy) by how soon they may be evicted. The ledger calls
it while it folds an event. It asks one question, `choose`; the answer becomes an event (`BlocksEvicted`), and
only the fold of that event (`evicted`) changes the policy. So the state of a policy follows from the log, and
a policy of another package replays as exactly as a built-in one.

A block's way through a policy:

- `admitted`: its store is published;
- `busy`: a match pins it; `idle`: its last pin or copy has gone. The two together are one use of it;
- `evicted`, `removed` or `clear`: it is gone.

A copy to another tier is no use of a block. The policy hears nothing of it, and `choose` is told to protect
the block meanwhile.

Slots arrive as the ledger's `IdArray`: a tuple up to sixteen, a numpy array above. They are in prefix order:
slots[0] holds the block nearest to the start of a prompt. A policy should evict the *last* one first, because
a prefix without its beginning is useless.

A prompt is often stored over several steps: prefill in chunks, then decode. So `admitted` and `touched` may
name a `parent`: the slot of the block before slots[0] in its prompt. A policy should evict the slots right
before their parent. Then the order is the same as if the prompt had been stored at once. `SlotQueue.insert`
does this in a queue.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

from kvsm.core.policies.policy_copies import PlainCopy, PolicyCopy
from kvsm.ids import IdArray


class Choice(NamedTuple):
    """What `choose` answers, and `evicted` carries out.

    victims: the slots to evict, in the order in which the search met them.
    moved: other slots that the search passed over and whose place in the order changes; may be in use.

    An event records both, and nothing else. All that a choice changes must follow from them and the state.
    A policy with a hand says with `moved` how far its hand went (`kvsm.core.policies.sieve`).
    """

    victims: IdArray
    moved: IdArray


class EvictionPolicy(Protocol):
    """Eviction order over `capacity` slots.

    `choose`, `recall`, `snapshot` and `freeze` must not change what the policy decides. All others are part
    of the fold: they must be deterministic, and read nothing but their arguments and the policy's own state.
    A policy may subclass this class, or just have its methods. `kvsm.testing.OffloadMachine` checks one.
    """

    def __init_subclass__(cls, **more: object) -> None:
        """A policy with a `snapshot` of its own, and the `freeze` of another one, would be copied in part."""
        super().__init_subclass__(**more)
        if "snapshot" in vars(cls) and "freeze" not in vars(cls):
            cls.freeze = EvictionPolicy.freeze  # type: ignore[method-assign]

    @abstractmethod
    def __init__(self, capacity: int) -> None: ...

    @abstractmethod
    def __len__(self) -> int:
        """How many idle blocks it orders."""

    @abstractmethod
    def __contains__(self, slot: int) -> bool:
        """Whether the slot holds an idle block."""

    @abstractmethod
    def admitted(self, slots: IdArray, keys: Sequence[bytes], parent: int | None = None) -> None:
        """Newly stored blocks enter the order; keys[i] is in slots[i].

        parent: the slot of the block before slots[0] in its prompt. It may be in use, or hold no block any
            more. If that block is not on the host, the new blocks cannot be hit: then `parent` is the slot
            that would be evicted next. None: slots[0] begins a prompt, or its parent is unknown.
        """

    @abstractmethod
    def busy(self, slots: IdArray) -> None:
        """Idle blocks leave the order; they are in use."""

    @abstractmethod
    def idle(self, slots: IdArray) -> None:
        """Used blocks come back to the order."""

    @abstractmethod
    def touched(self, slots: IdArray, parent: int | None = None) -> None:
        """Idle blocks were used in passing, without leaving the order. parent: as in `admitted`."""

    @abstractmethod
    def removed(self, slots: IdArray) -> None:
        """Blocks, idle or in use, were invalidated."""

    @abstractmethod
    def evicted(self, choice: Choice, keys: Sequence[bytes]) -> None:
        """Carry out a choice; keys[i] was in choice.victims[i]."""

    @abstractmethod
    def clear(self) -> None:
        """All blocks were invalidated. Be as at the start. Here too, nobody may wait for large memory."""

    @abstractmethod
    def choose(self, count: int, protected: Collection[int]) -> Choice | None:
        """`count` idle blocks to evict, none of them `protected`; None if there are fewer.

        All or nothing, and pure: asked again, it answers the same.
        """

    def recall(self, keys: Sequence[bytes]) -> tuple[bytes, ...]:  # noqa: ARG002
        """Which of `keys` it remembers evicting (ghosts). A policy without ghosts inherits this."""
        return ()

    def recalled(self, keys: Sequence[bytes]) -> None:
        """These ghosts are about to be stored again. `recall` found them; an event says so."""

    @abstractmethod
    def snapshot(self) -> bytes:
        """The whole state; equal bytes for equal states. Whatever is not in it is lost in a restart."""

    def freeze(self) -> PolicyCopy:
        """What `snapshot` returns now, as a copy that is made in pieces while events go on being folded.

        A policy that inherits this one is written here and now: some 3 ms for each million slots of a queue,
        in which the engine waits. The copy before it is dropped.
        """
        return PlainCopy(self.snapshot())

    @abstractmethod
    def restore(self, state: bytes) -> None:
        """Become what `snapshot` saved. Called once, on a new policy of the same capacity."""
