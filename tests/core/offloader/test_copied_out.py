"""A copy to another tier protects its block, and is no use of it for the eviction policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from examples import examples
from kvsm.core.ledger import Ledger
from kvsm.core.ledger.invariants import check_ledger
from kvsm.core.ledger.snapshot import digest, restore, snapshot
from kvsm.core.log import MemoryLog
from kvsm.core.offloader import Offloader
from kvsm.core.policies import POLICIES
from kvsm.events import OffloadConfig

BLOCKS, COPIES = 6, 3
"""The host's slots, all of them stored; and the most copies to the other tier at once."""
KEYS = [f"key {n}".encode() for n in range(BLOCKS + 1)]


class Core:
    """A full host pool, requests that load from it, and copies to another tier beside them."""

    def __init__(self, policy: str, blocks: int = BLOCKS) -> None:
        config = OffloadConfig(host_blocks=blocks, device_blocks=(2 + COPIES) * blocks, policy=policy)
        self.log = MemoryLog()
        self.core = Offloader(config, self.log)
        self.blocks = blocks
        stored = self.core.store((), [f"key {n}".encode() for n in range(blocks)], range(blocks)).job
        assert stored is not None
        self.core.submit([stored.transfer])
        self.core.report(stored.transfer, 0, True)
        self.copies: dict[int, int] = {}
        """The copies under way: which of the `COPIES` each is -> its transfer."""
        self.requests: dict[int, str] = {}
        self._names = iter(range(10**6))

    def copy_out(self, copy: int, slots: Sequence[int]) -> None:
        if copy in self.copies:
            return
        name = f"copy-{next(self._names)}"
        self.core.arrive(name, "disk")
        self.core.pin(name, slots, None, None, None, None)
        places = [(2 + copy) * self.blocks + slot for slot in slots]
        job = self.core.prepare_load(name, places, (), "disk")
        assert job is not None
        self.core.finish(name)
        self.core.submit([job.transfer])
        self.copies[copy] = job.transfer

    def end_copy(self, copy: int) -> None:
        if copy in self.copies:
            self.core.report(self.copies.pop(copy), 0, True)

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
        for copy in range(COPIES):
            self.end_copy(copy)
        for slot in range(self.blocks):
            self.leave(slot)
        return self.core.ledger.policy.snapshot()


SLOTS = st.integers(0, BLOCKS - 1)
USES = st.tuples(st.sampled_from(["match", "load", "leave", "touch"]), SLOTS)
COPYING = st.tuples(
    st.just("copy_out"), st.integers(0, COPIES - 1), st.lists(SLOTS, min_size=1, unique=True)
) | st.tuples(st.just("end_copy"), st.integers(0, COPIES - 1))
STEPS = st.lists(USES | COPYING, max_size=25)
Step = tuple[Any, ...]


@pytest.mark.parametrize("policy", POLICIES)
@example(
    steps=[("copy_out", 0, [0]), ("match", 0), ("leave", 0), ("match", 1), ("leave", 1), ("end_copy", 0)]
)
@settings(max_examples=examples(60))
@given(steps=STEPS)
def test_copies_to_another_tier_change_nothing_of_the_eviction_order(policy: str, steps: list[Step]) -> None:
    """The same uses without any copy leave the same order, whatever overlaps."""
    with_copies, without = Core(policy), Core(policy)
    for name, *what in steps:
        getattr(with_copies, name)(*what)
        if name not in ("copy_out", "end_copy"):
            getattr(without, name)(*what)
        assert check_ledger(with_copies.core.ledger) == []
    assert with_copies.rest() == without.rest()
    assert not with_copies.core.ledger.copied_out


@given(steps=STEPS)
def test_fold_and_snapshot_know_which_blocks_are_copied_out(steps: list[Step]) -> None:
    """Events are state (S10), in the middle of copies."""
    core = Core("arc")
    for name, *what in steps:
        getattr(core, name)(*what)
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
    core.copy_out(0, first.victims)
    job = core.core.store((), KEYS[-1:], [0]).job
    assert job is not None
    assert core.core.ledger.transfers[job.transfer].slots != first.victims
    assert check_ledger(core.core.ledger) == []


def test_a_pool_that_is_copied_out_has_no_room() -> None:
    core = Core("lru")
    core.copy_out(0, range(BLOCKS))
    assert core.core.ledger.evictable() == 0
    assert core.core.store((), KEYS[-1:], [0]).job is None
    core.end_copy(0)
    assert core.core.ledger.evictable() == BLOCKS
    assert core.core.store((), KEYS[-1:], [0]).job is not None


def test_large_batches_keep_their_places_too() -> None:
    """More than sixteen slots are an array, not a tuple."""
    with_copies, without = Core("lru", 40), Core("lru", 40)
    with_copies.copy_out(0, range(0, 40, 2))
    for core in (with_copies, without):
        core.core.pin("all", range(40), None, 40, 0, 40)
        core.core.finish("all")
    with_copies.copy_out(1, range(1, 40, 2))
    for core in (with_copies, without):
        core.core.touch([core.core.ledger.key_of[slot] for slot in range(20)])
    assert with_copies.rest() == without.rest()


def test_a_reset_forgets_what_is_copied_out() -> None:
    """The copies go on, and their slots are free when they end (S3)."""
    core = Core("lru")
    core.copy_out(0, [0, 1])
    core.core.reset()
    assert not core.core.ledger.copied_out
    assert len(core.core.ledger.free) == BLOCKS - 2
    core.rest()
    assert len(core.core.ledger.free) == BLOCKS
    assert check_ledger(core.core.ledger) == []


@pytest.mark.parametrize("policy", POLICIES)
def test_the_next_process_finds_the_order_without_the_copies(policy: str) -> None:
    """What was copied out when the process died keeps its place, and nothing is copied any more. A block that
    a request had in use comes back."""
    with_copies, without = Core(policy), Core(policy)
    with_copies.copy_out(0, [1, 4])
    after = []
    for one in (with_copies, without):
        one.match(2)
        one.match(4)
        core = Offloader.restarted(one.core.ledger, one.core.config)
        assert check_ledger(core.ledger) == []
        assert not core.ledger.copied_out
        after.append(core.ledger.policy.snapshot())
    assert after[0] == after[1]


def test_a_lost_copy_takes_its_blocks_out_of_the_order() -> None:
    core = Core("lru")
    core.copy_out(0, [2])
    core.core.lose(core.copies[0])
    assert not core.core.ledger.copied_out
    assert 2 not in core.core.ledger.policy
    assert check_ledger(core.core.ledger) == []
