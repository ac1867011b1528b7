"""A policy that does not save whose turn it is: after a restart it chooses other blocks."""

from kvsm.core.policies import Choice
from kvsm.core.policies.lru import LRUPolicy
from kvsm.testing import OffloadMachine


class ForgetsTheTurn(LRUPolicy):
    turns = 0

    def evicted(self, choice, keys):
        super().evicted(choice, keys)
        self.turns += 1

    def choose(self, count, protected):
        order = [slot for slot in self._queue if slot not in protected][:: -1 if self.turns % 2 else 1]
        return Choice(tuple(order[:count]), ()) if len(order) >= count else None


class Policy(OffloadMachine):
    policy = ForgetsTheTurn


TestPolicy = Policy.TestCase
