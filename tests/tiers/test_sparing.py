"""What a store to the disk spares: blocks that are also on the host."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import example, given
from hypothesis import strategies as st

from kvsm.core.offloader import Offloader
from kvsm.core.policies import POLICIES
from kvsm.events import OffloadConfig
from kvsm.tiers.sparing import spared

BLOCKS, SLOTS = 12, 6
_POLICIES = sorted({*POLICIES} - {"auto"})
"""`auto` is refused with a disk tier."""


def pool(policy: str, slots: int, uses: Iterable[int]) -> Offloader:
    """A pool after these uses, one block each: hits and stores."""
    core = Offloader(OffloadConfig(host_blocks=slots, device_blocks=1, policy=policy))
    for number, block in enumerate(uses):
        request, key = str(number), b"%02d" % block
        if core.match(request, [key]).hits:
            load = core.prepare_load(request, [0])
            assert load is not None
            core.submit([load.transfer])
            core.complete_load(load.transfer)
        else:
            store = core.prepare_store(request, [key], [0]).job
            assert store is not None
            core.submit([store.transfer])
            core.complete_store(store.transfer)
        core.finish(request)
    return core


_BLOCK = st.integers(0, BLOCKS - 1)


@example("arc", [3, 2, 11, 2, 1, 11, 6, 8, 1, 10, 3], {2, 8}, 1)
@given(
    st.sampled_from(_POLICIES), st.lists(_BLOCK, min_size=12, max_size=24), st.sets(_BLOCK), st.integers(1, 3)
)
def test_no_block_of_the_host_is_evicted_while_others_can_go(
    policy: str, on_disk: list[int], on_host: set[int], count: int
) -> None:
    """Under every policy, although sparing a block changes which block the policy evicts next (S13)."""
    disk, host = pool(policy, SLOTS, on_disk), pool("lru", BLOCKS, sorted(on_host))
    others = [key for key in disk.ledger.index if key not in host.ledger.index]
    lacking = count - len(disk.ledger.free)
    kept = spared(host, disk, count)
    if 0 < lacking <= len(others):
        victims = disk.next_victims(lacking, spared=kept)
        assert len(victims) == lacking
        assert not [key for key in victims if key in host.ledger.index]
