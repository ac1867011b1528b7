"""What travels between the deciding core and the workers: small, typed, picklable."""

from __future__ import annotations

import msgspec

from kvsm.events import Direction
from kvsm.ids import Id, IdArray, Ids, unpack


class TransferPlan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One copy of several blocks: device_blocks[i] and slots[i] are a pair. Fixed when planned."""

    transfer: Id
    direction: Direction
    device_blocks: Ids
    slots: Ids

    def pairs(self) -> tuple[IdArray, IdArray]:
        """(device blocks, host slots) as the ledger's arrays."""
        return unpack(self.device_blocks), unpack(self.slots)


class WorkerReport(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Worker `worker` is done with its shard of `transfer`; `good` is false if any byte may be wrong."""

    transfer: int
    worker: int
    good: bool
    error: str = ""
    """What went wrong, for people."""
