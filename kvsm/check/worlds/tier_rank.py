"""The memory of one rank in a world of two tiers: device blocks, host slots, and slots on disk that may lose
what was not flushed.

The disk is modelled as `kvsm.tiers.disk` writes it: a store first drops the slot, and seals it when all is
written. A load proves what it finds before a byte of it counts. What recovery sees of a slot are the columns
that `kvsm.tiers.disk.recovery` asks for, and the real `decide` judges them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from kvsm.core.plan import TransferJob
from kvsm.events import Direction
from kvsm.ids import listed
from kvsm.tiers.disk.formats import ERA_ID_BYTES, NO_ERA, SlotGeneration
from kvsm.tiers.disk.recovery import CONDITIONS, RankScan

Value = tuple[int, bytes] | None
"""What a block holds: (epoch of the world, key). None: damaged bytes."""


class DiskSlot(NamedTuple):
    """A slot on disk.

    is_sealed: whether its header says that the payload is whole.
    meaning: stands for its identity.
    era: of its store.
    """

    is_sealed: bool = False
    generation: SlotGeneration = SlotGeneration(0, 0)
    key: bytes = b""
    value: Value = None
    meaning: int = 0
    era: bytes = NO_ERA


EMPTY = DiskSlot()


class CopyInFlight(msgspec.Struct):
    """A copy that has left, and not ended. waits: ranks that have not ended it."""

    job: TransferJob
    waits: list[int]
    failed: bool = False


class RankMemory:
    """All memory of one rank. meaning: what its bytes mean in this process.

    disk: as the system holds it; a killed process leaves this.
    flushed: as the disk holds it; a power loss leaves this, or parts of what was written since.
    expected: what each slot of the disk must be to be loaded, as this process knows it.
    """

    def __init__(self, device: int, host: int, disk: Sequence[DiskSlot], meaning: int) -> None:
        self.device: list[Value] = [None] * device
        self.host: list[Value] = [None] * host
        self.disk, self.flushed = list(disk), list(disk)
        self.expected: dict[int, SlotGeneration] = {}
        self.meaning = meaning

    # Copies between device and host.

    def copy(self, job: TransferJob, good: bool) -> None:
        """Carry out a copy between device and host. A bad one leaves bytes that mean nothing."""
        blocks, slots = map(listed, job.pairs())
        for block, slot in zip(blocks, slots):
            if job.direction is Direction.STORE:
                self.host[slot] = self.device[block] if good else None
            else:
                self.device[block] = self.host[slot] if good else None

    # Copies between host and disk.

    def begin(self, job: TransferJob) -> None:
        """A copy has been submitted. A store drops its slots first."""
        if job.direction is Direction.STORE:
            for slot in listed(job.pairs()[1]):
                self.disk[slot] = self.disk[slot]._replace(is_sealed=False)
                self.expected.pop(slot, None)

    def end(self, job: TransferJob, life: int, good: bool) -> bool:
        """A copy between host and disk ends. Returns whether it is good: a load proves all that it finds."""
        blocks, slots = map(listed, job.pairs())
        if job.direction is Direction.STORE:
            generation = SlotGeneration(life, job.transfer)
            for block, slot, key in zip(blocks, slots, job.keys) if good else ():
                self.disk[slot] = DiskSlot(True, generation, key, self.host[block], self.meaning, job.era)
                self.expected[slot] = generation
            return good
        good = good and all(self._is_proved(slot, key, job.era) for slot, key in zip(slots, job.keys))
        for block, slot in zip(blocks, slots):
            self.host[block] = self.disk[slot].value if good else None
        return good

    def _is_proved(self, slot: int, key: bytes, era: bytes) -> bool:
        found = self.disk[slot]
        # Bytes that mean nothing have another checksum than the header says.
        return (
            found.is_sealed
            and found.value is not None
            and found.key == key
            and found.era == era
            and found.generation == self.expected.get(slot)
        )

    def flush(self) -> None:
        """All that was written is on disk."""
        self.flushed = list(self.disk)

    def unflushed(self) -> int:
        """How many slots a power loss may leave in another state."""
        return sum(now != before for now, before in zip(self.disk, self.flushed))

    # What a crash leaves.

    def after_power_loss(self, chosen: int) -> list[DiskSlot]:
        """What a power loss leaves. Each slot that was written since the flush has its old state, its new
        one, or the new header over bytes that mean nothing; digit n of `chosen` to the base 3 says which."""
        left = []
        for now, before in zip(self.disk, self.flushed):
            if now != before:
                chosen, which = divmod(chosen, 3)
                left.append((before, now, now._replace(value=None))[which])
            else:
                left.append(now)
        return left

    def scan(self, life: int) -> RankScan:
        """What the headers of the slots say to the next process."""
        columns = {
            "readable": [True] * len(self.disk),
            "used": [slot != EMPTY for slot in self.disk],
            "whole": [True] * len(self.disk),
            "same identity": [slot.meaning == self.meaning for slot in self.disk],
            "in place": [True] * len(self.disk),
            "of its past": [True] * len(self.disk),
            "sealed": [slot.is_sealed for slot in self.disk],
        }
        return RankScan(
            np.array([columns[name] for name in CONDITIONS], np.bool_).T,
            np.array([slot.generation.life for slot in self.disk], np.int64),
            np.array([slot.generation.number for slot in self.disk], np.int64),
            np.array([slot.era for slot in self.disk], f"V{ERA_ID_BYTES}"),
            [slot.key for slot in self.disk],
            life,
        )
