"""Your eviction policy with a state of its own: `pytest examples/test_policy_state.py`."""

from kvsm.core.policies import Choice
from kvsm.core.policies.lru import LRUPolicy
from kvsm.testing import OffloadMachine


class TakesTurns(LRUPolicy):
    """Evicts the oldest blocks, the next time the newest."""

    turns = 0

    def evicted(self, choice, keys):
        super().evicted(choice, keys)
        self.turns += 1

    def clear(self):
        super().clear()
        self.turns = 0

    def choose(self, count, protected):
        order = [slot for slot in self._queue if slot not in protected][:: -1 if self.turns % 2 else 1]
        return Choice(tuple(order[:count]), ()) if len(order) >= count else None

    def snapshot(self):
        return bytes([self.turns % 2]) + super().snapshot()

    def restore(self, state):
        self.turns = state[0]
        super().restore(state[1:])


class Policy(OffloadMachine):
    policy = TakesTurns


TestPolicy = Policy.TestCase
