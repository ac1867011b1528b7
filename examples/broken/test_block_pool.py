"""A pool that leaves a block in the free queue when it is found by its content, and gives it away."""

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
