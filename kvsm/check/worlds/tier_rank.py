"""The memory of one rank in a world of two tiers: device blocks, host slots, and a disk that loses unflushed
data.

The disk is modelled as `kvsm.tiers.disk` writes it: a store first marks the slot as not sealed, and seals it
after its payload is written. A load checks header and payload before it counts as good. Recovery gets the
slot headers as the columns of `kvsm.tiers.disk.recovery`, and the real `decide` judges them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from kvsm.core.plan import TransferJob
from kvsm.events import Direction
from kvsm.ids import listed
from kvsm.tiers.disk.formats import ERA_ID_BYTES, NO_ERA, SlotGeneration
from kvsm.tiers.disk.recovery import CONDITIONS, RankScan

Value = tuple[int, Any] | None
"""The content of a block: (epoch of the world, its key or its bytes); None for damaged or unknown bytes."""


class DiskSlot(NamedTuple):
    """A slot on disk.

    is_sealed: whether its header says that the payload is complete.
    meaning: models the identity in its header, which says how bytes are to be interpreted.
    era: the era in which it was stored.
    """

    is_sealed: bool = False
    generation: SlotGeneration = SlotGeneration(0, 0)
    key: bytes = b""
    value: Value = None
    meaning: int = 0
    era: bytes = NO_ERA


EMPTY = DiskSlot()


class CopyInFlight(msgspec.Struct):
    """A submitted copy that has not ended. waits: ranks that have not ended it. failed: on some rank."""

    job: TransferJob
    waits: list[int]
    failed: bool = False


class SlotValues(Protocol):
    """The host slots of one rank."""

    def __getitem__(self, slot: int, /) -> Value: ...

    def __setitem__(self, slot: int, value: Value, /) -> None: ...


class RankSlots:
    """The disk of one rank.

    host: the host slots that are copied to the disk and back.
    disk: the disk as the operating system sees it; it survives the end of the process.
    flushed: the content that survives a power loss; any later write may be lost or torn.
    expected: disk slot -> the generation that this process has stored or recovered there. A load of another
        generation fails.
    meaning: the identity of this process, to compare with `DiskSlot.meaning`.
    """

    def __init__(self, host: SlotValues, disk: Sequence[DiskSlot], meaning: int) -> None:
        self.host = host
        self.disk, self.flushed = list(disk), list(disk)
        self.expected: dict[int, SlotGeneration] = {}
        self.meaning = meaning

    def begin(self, job: TransferJob) -> None:
        """A copy between host and disk is submitted. A store first marks its slots as not sealed."""
        if job.direction is Direction.STORE:
            for slot in listed(job.pairs()[1]):
                self.disk[slot] = self.disk[slot]._replace(is_sealed=False)
                self.expected.pop(slot, None)

    def end(self, job: TransferJob, life: int, good: bool) -> bool:
        """End a copy between host and disk. Returns whether it is good. A load checks each slot."""
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
        # Damaged bytes (None) do not match the checksum in the header.
        return (
            found.is_sealed
            and found.value is not None
            and found.key == key
            and found.era == era
            and found.generation == self.expected.get(slot)
        )

    def flush(self) -> None:
        """Flush all writes to the disk."""
        self.flushed = list(self.disk)

    def unflushed(self) -> int:
        """The number of slots that a power loss may change."""
        return sum(now != before for now, before in zip(self.disk, self.flushed))

    # What a crash leaves.

    def after_power_loss(self, chosen: int) -> list[DiskSlot]:
        """The disk after a power loss.

        A slot that was written since the flush has its old state, its new state, or the new header with a
        damaged payload. Digit n of `chosen` in base 3 chooses for the n-th such slot.
        """
        left = []
        for now, before in zip(self.disk, self.flushed):
            if now != before:
                chosen, which = divmod(chosen, 3)
                left.append((before, now, now._replace(value=None))[which])
            else:
                left.append(now)
        return left

    def scan(self, life: int) -> RankScan:
        """The headers of all slots, as the next process (number `life`) scans them."""
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


class RankMemory(RankSlots):
    """All memory of one rank."""

    def __init__(self, device: int, host: int, disk: Sequence[DiskSlot], meaning: int) -> None:
        self.device: list[Value] = [None] * device
        self.host: list[Value] = [None] * host
        super().__init__(self.host, disk, meaning)

    def copy(self, job: TransferJob, good: bool) -> None:
        """Carry out a copy between device and host. A bad one leaves unknown bytes."""
        blocks, slots = map(listed, job.pairs())
        for block, slot in zip(blocks, slots):
            if job.direction is Direction.STORE:
                self.host[slot] = self.device[block] if good else None
            else:
                self.device[block] = self.host[slot] if good else None
