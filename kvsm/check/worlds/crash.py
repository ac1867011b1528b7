"""A crash of the serving world: the engine, its device and its workers are gone, and another process takes
over.

The bytes in the host pool survive, and the events that were written to the log, which `FlushedLog` tracks. A
crash may come between any two actions, and loses all events after the last flush. Within an action nothing
changes between a flush and the moment at which jobs are sent to the workers. So two checks cover a crash
within an action:

- no stale data (S14): when a job is sent, its plan is in the written log. Otherwise a process killed now
  could leave bytes of one key in a slot that the log gives to another key;
- correct bytes (S15): in every state, the blocks that would survive a crash hold the right bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from kvsm.check.worlds.parts import lru_order
from kvsm.core.ledger import Ledger
from kvsm.core.ledger.canonical import PART, Names, Seen, declared
from kvsm.core.ledger.snapshot import restore, snapshot
from kvsm.core.log import MemoryLog
from kvsm.core.plan import TransferPlan
from kvsm.errors import PropertyBroken
from kvsm.events import OffloadConfig, Restarted, TransfersSubmitted
from kvsm.properties import Property
from kvsm.tiers.warm_restart import KILLED


class Left(msgspec.Struct, frozen=True):
    """The part of a ledger that would survive a crash.

    seq: the last event that was written.
    saved: a snapshot of the ledger after this event.
    kept: key -> slot, for all blocks that are readable then.
    order: the eviction order of the next process; under other policies than LRU, the policy's snapshot.
    free: the free queue of the next process.
    """

    seq: int
    saved: bytes
    kept: dict[bytes, int]
    order: tuple[int, ...] | bytes
    free: tuple[int, ...]


def restarted(saved: bytes) -> Ledger:
    """The ledger of the process that restarts from the snapshot `saved`."""
    ledger = restore(saved)
    ledger.apply(Restarted(ledger.seq + 1, ledger.step, 0, ledger.life + 1, ledger.config, "", KILLED))
    return ledger


def left_of(ledger: Ledger) -> Left:
    """What survives a crash if the events up to now are written."""
    saved = snapshot(ledger)
    after = restarted(saved)
    order = lru_order(after)
    return Left(
        ledger.seq,
        saved,
        {key: slot for key, slot in ledger.index.items() if ledger.readable(slot)},
        after.policy.snapshot() if order is None else tuple(order),
        tuple(after.free),
    )


def _left(log: FlushedLog, names: Names) -> Any:
    left = log.left
    if left is None:
        return None
    order = left.order if isinstance(left.order, bytes) else [names.slots[slot] for slot in left.order]
    kept = sorted((names.slots[slot], key) for key, slot in left.kept.items())
    return kept, order, [names.slots[slot] for slot in left.free]


@declared
class FlushedLog(MemoryLog):
    """A log that tracks what would survive a crash. ledger: the fold of its events; set before a flush."""

    ledger: Annotated[Ledger, PART]
    left: Annotated[Left | None, Seen(_left)]
    """What would survive a crash now; None if no crash can happen any more."""

    def __init__(self) -> None:
        super().__init__()
        self.left = Left(0, b"", {}, (), ())

    def flush(self) -> None:
        """Count all events so far as written."""
        if self.left is not None and self.left.seq != self.ledger.seq:
            self.left = left_of(self.ledger)

    def keep_written(self) -> None:
        """Drop the events that were not written."""
        assert self.left is not None
        while self and self[-1].seq > self.left.seq:
            self.pop()

    def check_leaving(self, plan: TransferPlan) -> None:
        """Check that the written log contains the plans of all jobs of `plan`, and their submission."""
        for job in (*plan.loads, *plan.stores):
            if self.left is not None and job.transfer > self.left.seq:
                message = (
                    f"transfer {job.transfer} leaves for the workers, and only the events until "
                    f"{self.left.seq} are written"
                )
                raise PropertyBroken(Property.NO_STALE_DATA, message)
        written = self[-1].seq if self and self.left is None else self.left.seq if self.left else 0
        if any(isinstance(event, TransfersSubmitted) and event.seq > written for event in self):
            message = "jobs leave for the workers, and what is written does not say so"
            raise PropertyBroken(Property.EVENTS_ARE_STATE, message)

    def check_forgotten(self) -> None:
        """Check after a reset that a crash would bring no block back, because the reset has returned."""
        if self.left is not None and self.left.kept:
            message = f"a crash would bring back {len(self.left.kept)} blocks that a reset has forgotten"
            raise PropertyBroken(Property.NO_STALE_DATA, message)

    def check_bytes(
        self, config: OffloadConfig, host: Sequence[Sequence[object]], contents: dict[bytes, Any]
    ) -> None:
        """Check that each block that would survive a crash holds the right bytes on every worker.

        host: [host block][worker], the bytes held.
        contents: key -> the bytes of each block of its chunk.
        """
        chunk = config.blocks_per_chunk
        for key, slot in self.left.kept.items() if self.left is not None else ():
            for place, expected in enumerate(contents[key], slot * chunk):
                if any(held != expected for held in host[place]):
                    message = f"a crash would leave slot {slot} with other bytes than those of its key"
                    raise PropertyBroken(Property.CORRECT_BYTES, message)
