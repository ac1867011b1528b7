"""`FirstReturns`: the share of new blocks that come back.

A *new* block is one whose key the policy does not remember: neither stored, nor recently evicted or refused.
It *comes back* when it is used or offered for the second time. If almost no new block comes back, storing one
is a wasted copy. The policy remembers the keys of refused blocks and counts their returns too, so it need not
store a block to learn whether it comes back.
"""

from __future__ import annotations

_RARE = 64
"""New blocks are not worth a store while fewer than one in this many comes back."""
_EVIDENCE = 4
"""At least this many new blocks per slot must have been counted."""
_MOST = 1 << 48
"""No count reaches this."""


class FirstReturns:
    """Counts new blocks, and those that came back, for a pool of `capacity` slots.

    Both counts are halved when twice the needed evidence is reached, so they follow a changing workload. Even
    if no block came back before, one return for every eight slots is enough to store new blocks again.
    """

    def __init__(self, capacity: int) -> None:
        self._enough = _EVIDENCE * capacity
        self.clear()

    def clear(self) -> None:
        """Forget all counts."""
        self.new = self.returned = 0

    def count(self, new: int, returned: int) -> None:
        """Count this many new blocks, and this many that came back."""
        self.new += new
        self.returned += returned
        while self.new >= 2 * self._enough:
            self.new //= 2
            self.returned = -(-self.returned // 2)  # rounded up: in doubt they are worth a store

    def are_rare(self) -> bool:
        """Whether so few new blocks come back that none is worth a store."""
        return self.new >= self._enough and _RARE * self.returned < self.new

    def restore(self, new: int, returned: int) -> None:
        """Restore the two counts. Raises `ValueError` for impossible ones."""
        if not 0 <= new < 2 * self._enough or not 0 <= returned <= _MOST:
            raise ValueError(f"the snapshot has {new} new blocks, of which {returned} came back")
        self.new, self.returned = new, returned
