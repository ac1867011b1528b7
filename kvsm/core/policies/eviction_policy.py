"""The interface of eviction policies.

A policy orders the *idle* blocks (stored, no pin, no copy) by how soon they may be evicted. The ledger calls
it while it folds an event. `choose` selects victims and changes nothing; the core makes an event of the
result (`BlocksEvicted`), and only the fold of that event (`evicted`) changes the policy. So the state of a
policy follows from the log, and a policy of another package replays as exactly as a built-in one.

A block's way through a policy:

- `admitted`: its store is published;
- `busy`: a match pins it; `idle`: its last pin or copy has ended. Together they are one use of the block;
- `evicted`, `removed` or `clear`: it is no longer stored.

A policy may also refuse new blocks that would evict better ones (`admits`). The fold calls `refused` with
their keys, so that the policy can remember them.

A copy to another tier does not count as a use. The policy is not called for it; the block is among the
`protected` ones of `choose` meanwhile.

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
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, Protocol

from kvsm.core.policies.policy_copies import PlainCopy, PolicyCopy
from kvsm.ids import IdArray


class Choice(NamedTuple):
    """The result of `choose`, which `evicted` applies.

    victims: the slots to evict, in the order in which the search found them.
    moved: other slots that the search passed over and whose place in the order changes; may be in use.

    The event has only these two. All changes of a choice must follow from them and from the policy's state. A
    policy with a hand records in `moved` how far the hand moved (`kvsm.core.policies.sieve`).
    """

    victims: IdArray
    moved: IdArray


class EvictionPolicy(Protocol):
    """Eviction order over `capacity` slots.

    `admits`, `choose`, `recall`, `snapshot` and `freeze` must not change later decisions. All other methods
    are part of the fold: they must be deterministic, and read nothing but their arguments and the policy's
    own state. A policy may subclass this class, or only have its methods. `kvsm.testing.OffloadMachine` tests
    a policy.
    """

    def __init_subclass__(cls, **more: object) -> None:
        """Give a subclass that defines only `snapshot` the default `freeze`: an inherited one would copy only
        the state of its base."""
        super().__init_subclass__(**more)
        if "snapshot" in vars(cls) and "freeze" not in vars(cls):
            cls.freeze = EvictionPolicy.freeze  # type: ignore[method-assign]

    @abstractmethod
    def __init__(self, capacity: int) -> None: ...

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of idle blocks in the order."""

    @abstractmethod
    def __contains__(self, slot: int) -> bool:
        """Whether the slot holds an idle block."""

    @abstractmethod
    def admitted(self, slots: IdArray, keys: Sequence[bytes], parent: int | None = None) -> None:
        """Add newly stored blocks to the order; keys[i] is in slots[i].

        parent: the slot of the block before slots[0] in its prompt. It may be in use, or no longer stored. If
            that block is not on the host, the new blocks cannot be hit: then `parent` is the slot that would
            be evicted next. None: slots[0] begins a prompt, or its parent is unknown.
        """

    def adopted(self, slots: IdArray, keys: Sequence[bytes]) -> None:
        """Add the blocks of the policy that this one replaces. The last block should be evicted first.

        Neighbours need not belong to one prompt, but this default treats them so.
        """
        self.admitted(slots, keys)

    @abstractmethod
    def busy(self, slots: IdArray) -> None:
        """Take idle blocks out of the order: they are in use."""

    @abstractmethod
    def idle(self, slots: IdArray) -> None:
        """Return used blocks to the order."""

    @abstractmethod
    def touched(self, slots: IdArray, parent: int | None = None) -> None:
        """Count a use of idle blocks that do not leave the order. parent: as in `admitted`."""

    @abstractmethod
    def removed(self, slots: IdArray) -> None:
        """Forget blocks, idle or in use, that were invalidated."""

    @abstractmethod
    def evicted(self, choice: Choice, keys: Sequence[bytes]) -> None:
        """Apply a choice; keys[i] was in choice.victims[i]."""

    @abstractmethod
    def clear(self) -> None:
        """Return to the initial state: all blocks were invalidated. Must not allocate or clear large memory,
        since the engine waits."""

    @abstractmethod
    def choose(self, count: int, protected: Collection[int]) -> Choice | None:
        """Choose `count` idle blocks to evict, none of them `protected`; None if there are fewer.

        Pure: a second call returns the same.
        """

    def admits(
        self,
        keys: Sequence[bytes],  # noqa: ARG002 (a policy that admits every block needs none of them)
        runs: Sequence[int],
        free: int,  # noqa: ARG002
        protected: Collection[int],  # noqa: ARG002
    ) -> Sequence[int]:
        """Return how many blocks of each run to store, from its first one on. The other blocks are refused.

        Called before `choose`, if an offer has more new blocks than there are free slots. This default admits
        every block. Pure.

        keys: the keys of the new blocks, run after run.
        runs: the number of blocks in each run. A run has consecutive new blocks of one prompt, in prefix
            order. If the block before a run is neither on the host nor in the offer, the run is refused
            without a call.
        free: how many of the blocks need no eviction.
        protected: slots that the next `choose` must not evict.
        """
        return runs

    def refused(self, keys: Sequence[bytes]) -> None:
        """Record that these keys were offered and refused. Called by the fold of an event."""

    def recall(self, keys: Sequence[bytes]) -> tuple[bytes, ...]:  # noqa: ARG002
        """Return the keys that the policy remembers evicting (ghosts). A policy without ghosts inherits
        this."""
        return ()

    def recalled(self, keys: Sequence[bytes]) -> None:
        """Record that ghosts, found by `recall`, are about to be stored again. Called by the fold of an
        event."""

    @abstractmethod
    def snapshot(self) -> bytes:
        """Return the whole state as bytes, equal for equal states. A restart loses all other state."""

    def freeze(self) -> PolicyCopy:
        """Begin a copy of what `snapshot` returns now, made in pieces while later events are folded.

        This default makes the whole snapshot at once: about 3 ms per million slots of a queue, in which the
        engine waits. An earlier copy is dropped.
        """
        return PlainCopy(self.snapshot())

    @abstractmethod
    def restore(self, state: bytes) -> None:
        """Restore the state that `snapshot` saved. Called once, on a new policy of the same capacity."""


def may_evict(policy: EvictionPolicy, protected: Collection[int]) -> Callable[[int], bool]:
    """Return a function that says whether a choice may evict a slot: it is idle and not protected."""
    return lambda slot: slot in policy and slot not in protected
