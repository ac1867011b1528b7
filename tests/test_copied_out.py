"""A copy to another tier protects its block, and is no use of it for the eviction policy."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvsm.events import OffloadConfig
from kvsm.invariants import check_ledger
from kvsm.ledger import Ledger
from kvsm.log import MemoryLog
from kvsm.offloader import Offloader
from kvsm.policies import POLICIES
from kvsm.snapshot import digest, restore, snapshot

BLOCKS = 6
"""The host's slots, all of them stored; and device blocks for stores, loads of requests and copies."""
KEYS = [f"key {n}".encode() for n in range(BLOCKS + 1)]


class Core:
    """A full host pool, requests that load from it, and copies to another tier beside them."""

    def __init__(self, policy: str, blocks: int = BLOCKS) -> None:
        config = OffloadConfig(host_blocks=blocks, device_blocks=3 * blocks, policy=policy)
        self.log = MemoryLog()
        self.core = Offloader(config, self.log)
        self.blocks = blocks
        stored = self.core.store((), [f"key {n}".encode() for n in range(blocks)], range(blocks)).job
        assert stored is not None
        self.core.submit([stored.transfer])
        self.core.report(stored.transfer, 0, True)
        self.copies: dict[int, int] = {}
        """The copy of each slot that is copied out, one at most."""
        self.requests: dict[int, str] = {}
        self._names = iter(range(10**6))

    def copy_out(self, slots: Sequence[int]) -> None:
        slots = [slot for slot in slots if slot not in self.copies]
        if not slots:
            return
        name = f"copy-{next(self._names)}"
        self.core.arrive(name, "disk")
        self.core.pin(name, slots, None, None, None, None)
        job = self.core.prepare_load(name, [2 * self.blocks + slot for slot in slots], (), "disk")
        assert job is not None
        self.core.finish(name)
        self.core.submit([job.transfer])
        self.copies.update(dict.fromkeys(slots, job.transfer))

    def end_copy(self, slot: int, good: bool = True) -> None:
        transfer = self.copies.get(slot)
        if transfer is not None:
            self.copies = {one: copy for one, copy in self.copies.items() if copy != transfer}
            self.core.report(transfer, 0, good)

    def match(self, slot: int) -> None:
        if slot not in self.requests:
            self.requests[slot] = f"request-{next(self._names)}"
            self.core.pin(self.requests[slot], [slot], None, 1, 0, 1)

    def load(self, slot: int) -> None:
        """The request that has matched this slot loads it, from begin to end."""
        if slot in self.requests:
            job = self.core.prepare_load(self.requests[slot], [self.blocks + slot])
            assert job is not None
            self.core.submit([job.transfer])
            self.core.report(job.transfer, 0, True)
            self.leave(slot)

    def leave(self, slot: int) -> None:
        if slot in self.requests:
            self.core.finish(self.requests.pop(slot))

    def touch(self, slot: int) -> None:
        self.core.touch([self.core.ledger.key_of[slot]])

    def rest(self) -> bytes:
        """The state of the policy when all is over."""
        for slot in range(self.blocks):
            self.end_copy(slot)
            self.leave(slot)
        return self.core.ledger.policy.snapshot()


SLOTS = st.integers(0, BLOCKS - 1)
USES = st.tuples(st.sampled_from(["match", "load", "leave", "touch"]), SLOTS)
COPIES = st.tuples(st.just("copy_out"), st.lists(SLOTS, min_size=1, unique=True)) | st.tuples(
    st.just("end_copy"), SLOTS
)


@pytest.mark.parametrize("policy", POLICIES)
@example(steps=[("copy_out", [0]), ("match", 0), ("leave", 0), ("match", 1), ("leave", 1), ("end_copy", 0)])
@given(steps=st.lists(USES | COPIES, max_size=25))
def test_copies_to_another_tier_change_nothing_of_the_eviction_order(
    policy: str, steps: list[tuple[str, object]]
) -> None:
    """The same uses without any copy leave the same order, whatever overlaps."""
    with_copies, without = Core(policy), Core(policy)
    for name, what in steps:
        getattr(with_copies, name)(what)
        if name not in ("copy_out", "end_copy"):
            getattr(without, name)(what)
        assert check_ledger(with_copies.core.ledger) == []
    assert with_copies.rest() == without.rest()
    assert not with_copies.core.ledger.copied_out


@given(steps=st.lists(USES | COPIES, max_size=25))
def test_fold_and_snapshot_know_which_blocks_are_copied_out(steps: list[tuple[str, object]]) -> None:
    """Events are state (S10), in the middle of copies."""
    core = Core("arc")
    for name, what in steps:
        getattr(core, name)(what)
    ledger = core.core.ledger
    folded = Ledger(ledger.config)
    for event in core.log:
        folded.apply(event)
    restored = restore(snapshot(ledger))
    assert folded.copied_out == restored.copied_out == ledger.copied_out
    assert digest(folded) == digest(restored) == digest(ledger)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_block_that_is_copied_out_is_no_victim(policy: str) -> None:
    """No reuse in flight (S3): not even the one that would be evicted next."""
    core = Core(policy)
    first = core.core.ledger.policy.choose(1, frozenset())
    assert first is not None
    core.copy_out(first.victims)
    job = core.core.store((), KEYS[-1:], [0]).job
    assert job is not None
    assert core.core.ledger.transfers[job.transfer].slots != first.victims
    assert check_ledger(core.core.ledger) == []


def test_a_pool_that_is_copied_out_has_no_room() -> None:
    core = Core("lru")
    core.copy_out(range(BLOCKS))
    assert core.core.ledger.evictable() == 0
    assert core.core.store((), KEYS[-1:], [0]).job is None
    core.end_copy(0)
    assert core.core.ledger.evictable() == BLOCKS
    assert core.core.store((), KEYS[-1:], [0]).job is not None


def test_large_batches_keep_their_places_too() -> None:
    """More than sixteen slots are an array, not a tuple."""
    with_copies, without = Core("lru", 40), Core("lru", 40)
    with_copies.copy_out(range(0, 40, 2))
    for core in (with_copies, without):
        core.core.pin("all", range(40), None, 40, 0, 40)
        core.core.finish("all")
    with_copies.copy_out(range(1, 40, 2))
    for core in (with_copies, without):
        core.core.touch([core.core.ledger.key_of[slot] for slot in range(20)])
    assert with_copies.rest() == without.rest()


def test_a_reset_forgets_what_is_copied_out() -> None:
    """The copies go on, and their slots are free when they end (S3)."""
    core = Core("lru")
    core.copy_out([0, 1])
    core.core.reset()
    assert not core.core.ledger.copied_out
    assert len(core.core.ledger.free) == BLOCKS - 2
    core.rest()
    assert len(core.core.ledger.free) == BLOCKS
    assert check_ledger(core.core.ledger) == []


def test_a_lost_copy_takes_its_blocks_out_of_the_order() -> None:
    core = Core("lru")
    core.copy_out([2])
    core.core.lose(core.copies[2])
    assert not core.core.ledger.copied_out
    assert 2 not in core.core.ledger.policy
    assert check_ledger(core.core.ledger) == []
