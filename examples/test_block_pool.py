"""Your pool of device blocks under test: `pytest examples/test_block_pool.py`."""

from kvsm.serving import ServingBlockPool  # stands for yours
from kvsm.testing import OffloadMachine, configurations


class Pool(OffloadMachine):
    configurations = configurations(prefix_cache=True)

    def make_pool(self, blocks):  # noqa: ARG002
        return ServingBlockPool(self.core.ledger.leases)


TestPool = Pool.TestCase
