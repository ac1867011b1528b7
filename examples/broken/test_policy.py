"""A policy that forgets that a block is in use, and may choose it."""

from kvsm.core.policies.lru import LRUPolicy
from kvsm.testing import OffloadMachine


class EvictsBusyBlocks(LRUPolicy):
    def busy(self, slots):
        pass


class Policy(OffloadMachine):
    policy = EvictsBusyBlocks


TestPolicy = Policy.TestCase
