"""`BlockTree` beside a model of dictionaries, and what policies keep reachable with it."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
from block_order import post_order
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from kvsm.core.ledger.snapshot import restore, snapshot
from kvsm.core.offloader import Offloader
from kvsm.core.policies import POLICIES
from kvsm.core.policies.block_tree import BlockTree
from kvsm.events import OffloadConfig
from kvsm.ids import SMALL, pack, unpack

SLOTS = 48


@given(st.integers(0, 1 << 32), st.integers(1, 60))
@settings(max_examples=examples(100), deadline=None)
def test_the_tree_is_that_of_the_model(seed: int, steps: int) -> None:
    random, tree, parent_of = Random(seed), BlockTree(SLOTS), dict[int, int | None]()
    for _ in range(steps):
        absent = [slot for slot in range(SLOTS) if slot not in parent_of]
        if absent and random.random() < 0.6:
            run = random.sample(absent, min(len(absent), random.choice((1, 2, 5, SMALL + 4))))
            parent = random.choice([None, *range(SLOTS)])
            tree.add(unpack(pack(run)), parent)
            known = parent if parent in parent_of else None
            parent_of |= dict(zip(run, [known, *run]))
        elif parent_of:
            gone = random.sample([*parent_of], random.randint(1, len(parent_of)))
            tree.remove(unpack(pack(gone)))
            for slot in gone:
                del parent_of[slot]
            parent_of = {slot: at if at in parent_of else None for slot, at in parent_of.items()}
        kept = set(random.sample([*parent_of], random.randint(0, len(parent_of) // 4)))
        free = [slot for slot in parent_of if slot not in kept]
        victims = random.sample(free, random.randint(0, len(free)))
        expected = post_order(parent_of, victims, kept)
        copy = BlockTree(SLOTS)
        copy.restore(tree.column.snapshot())
        for one in (tree, copy):
            found = one.children_first(unpack(pack(victims)), lambda slot, kept=kept: slot not in kept)
            assert [*found] == expected
        assert copy.column.snapshot() == tree.column.snapshot()


@pytest.mark.parametrize("entries", [[2, 0, 0], [9, 1, 1], [3, 2, 0], [4, 2, 3], [3, 0, 1]], ids=str)
def test_a_state_that_is_no_forest_is_refused(entries: list[int]) -> None:
    """A block that is its own parent, an impossible slot, rings, a parent that is not stored."""
    with pytest.raises(
        ValueError, match=r"the snapshot has blocks (whose parent is not stored|that are their own)"
    ):
        BlockTree(3).restore(np.array(entries, "<u4").tobytes())


# In the core.


def chain(name: str) -> list[bytes]:
    """The keys of a prompt: each names the whole prefix that it ends."""
    return [name[:end].encode() for end in range(1, len(name) + 1)]


def serve(core: Offloader, request: str, keys: Sequence[bytes], piece: int, apart: set[bytes]) -> None:
    """Serve one request, which stores pieces of this many blocks. For a piece, no block is evicted before a
    block that continues it and was stored before.

    apart: stored blocks that were once on the host without their parent; updated.
    """
    core.arrive(request)
    hits = core.match(request, keys).hits
    load = core.prepare_load(request, range(hits)) if hits else None
    if load is not None:
        core.submit([load.transfer])
        core.complete_load(load.transfer)
    for start in range(hits, len(keys), piece):
        some = keys[start : start + piece]
        before = {key for key in core.ledger.key_of if key in core.ledger.index}
        store = core.prepare_store(request, some, range(start, start + len(some)), some[0][:-1])
        left = before - {*store.evicted, *some} - apart
        assert not {key[:-1] for key in left} & {*store.evicted}
        if store.job is not None:
            core.submit([store.job.transfer])
            core.complete_store(store.job.transfer)
        stored = {key for key in core.ledger.key_of if key in core.ledger.index}
        apart &= stored
        apart |= {key for key in stored if len(key) > 1 and key[:-1] not in stored}
    core.finish(request)


@pytest.mark.parametrize("policy", sorted({*POLICIES} - {"sieve", "auto"}))
def test_no_block_goes_before_what_continues_it(policy: str) -> None:
    """Prompts that branch, one request after the other, whatever the history of each block is. Not under
    SIEVE: its hand may stop between a block and its parent. Not under `auto`: it looks at few blocks for each
    victim, and if too few of them are leaves, some victims are none."""

    @settings(max_examples=examples(40), deadline=None)
    @given(st.integers(0, 1 << 32), st.sampled_from([1, 3, SMALL + 8]), st.sampled_from([24, 64]))
    def check(seed: int, piece: int, slots: int) -> None:
        random = Random(seed)
        core, apart = (
            Offloader(OffloadConfig(host_blocks=slots, device_blocks=64, policy=policy)),
            set[bytes](),
        )
        for number in range(80):
            name = "".join(random.choice("ab") if place % 5 == 0 else "c" for place in range(20))
            serve(core, f"r{number}", chain(name)[: random.randint(1, 20)], piece, apart)

    check()


@pytest.mark.parametrize("policy", sorted({*POLICIES} - {"lru"}))
def test_blocks_of_another_policy_are_not_taken_for_one_prompt(policy: str) -> None:
    """A restart gives the order of the old policy to the new one. A prompt that is used stays, although other
    prompts were next to it in that order."""
    core = Offloader(OffloadConfig(host_blocks=12, device_blocks=64))
    for name in "abc":
        serve(core, name, chain(name * 4), 4, set())
    config = OffloadConfig(host_blocks=12, device_blocks=64, policy=policy)
    core = Offloader.restarted(restore(snapshot(core.ledger)), config)
    for turn in range(3):
        serve(core, f"again {turn}", chain("aaaa"), 4, set())
    serve(core, "new", chain("dddd"), 4, set())
    assert all(key in core.ledger.index for key in chain("aaaa"))
