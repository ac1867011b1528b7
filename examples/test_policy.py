"""Your eviction policy under test: `pytest examples/test_policy.py`."""

from kvsm.core.policies.lru import LRUPolicy
from kvsm.testing import OffloadMachine


class OnlyLoadsCount(LRUPolicy):
    """Least recently *loaded*: a use in passing does not keep a block."""

    def touched(self, slots, parent=None):
        pass


class Policy(OffloadMachine):
    policy = OnlyLoadsCount


TestPolicy = Policy.TestCase
