"""A pool that lets a block that is found by its content stay in the free queue, and gives it away."""

from kvsm.serving import ServingBlockPool
from kvsm.testing import OffloadMachine, configurations


class HandsOutHeldBlocks(ServingBlockPool):
    def touch(self, blocks):
        free = dict.fromkeys(block for block in blocks if self.is_free(block))
        super().touch(blocks)
        self._free.update(free)


class Pool(OffloadMachine):
    configurations = configurations(prefix_cache=True)

    def make_pool(self, blocks):  # noqa: ARG002
        return HandsOutHeldBlocks(self.core.ledger.leases)


TestPool = Pool.TestCase
