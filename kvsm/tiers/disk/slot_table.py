"""What the slots of one rank's file hold, as this process knows it: a state, a generation and checksums.

No two transfers under way have a slot in common, except loads. So threads change entries without a lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvsm.errors import ConfigError, TransferFailed
from kvsm.states.disk_slot import DISK_SLOT, DiskSlotState, DiskSlotTrigger
from kvsm.tiers.disk.formats import SlotGeneration

_NEXT = {
    (int(state), trigger): arcs[0].target
    for state, trigger in product(DiskSlotState, DiskSlotTrigger)
    if (arcs := DISK_SLOT.dense[trigger][state])
}


class SlotProof(NamedTuple):
    """What a load of a slot must find.

    payload: the checksum of its payload.
    header: the checksum of its header, which names its key.
    """

    generation: SlotGeneration
    payload: int
    header: int


class SlotTable:
    """What is known of `num_slots` slots, all EMPTY at first."""

    def __init__(self, num_slots: int) -> None:
        self.states = np.zeros(num_slots, np.uint8)
        self._lives = np.zeros(num_slots, np.int64)
        self._numbers = np.zeros(num_slots, np.int64)
        self._payloads = np.zeros(num_slots, np.uint64)
        self._headers = np.zeros(num_slots, np.uint64)

    def step(self, slots: Iterable[int], trigger: DiskSlotTrigger) -> None:
        """Let this happen to these slots. Raises `TransferFailed` if it may not happen to one of them."""
        for slot in slots:
            target = _NEXT.get((int(self.states[slot]), trigger))
            if target is None:
                state = DiskSlotState(self.states[slot]).name
                raise TransferFailed(f"disk slot {slot}: {trigger.name} is illegal in {state}")
            self.states[slot] = target

    def begin(self, slots: Sequence[int], generation: SlotGeneration) -> None:
        """A store of this generation begins to write these slots."""
        self.step([one for one in slots if self.states[one] == DiskSlotState.SEALED], DiskSlotTrigger.DROP)
        self.step(slots, DiskSlotTrigger.WRITE)
        self._lives[list(slots)], self._numbers[list(slots)] = generation

    def seal(self, slots: Sequence[int], payloads: Sequence[int], headers: Sequence[int]) -> None:
        """A store has written these slots. payloads, headers: their checksums."""
        self._payloads[list(slots)], self._headers[list(slots)] = payloads, headers
        self.step(slots, DiskSlotTrigger.SEAL)

    def scanned(self, first: int, columns: NDArray[np.void]) -> None:
        """The headers of the slots from `first` on say this. No slot can be loaded for that."""
        here = slice(first, first + len(columns))
        self._lives[here], self._numbers[here] = columns["life"], columns["number"]
        self._payloads[here], self._headers[here] = columns["payload"], columns["checksum"]

    def found(self, slots: Sequence[int]) -> None:
        """Recovery has found these slots sealed, and their headers were scanned before. Their payloads are
        not read yet. Raises `ConfigError` if something was found or stored before."""
        self.check_unused()
        if len(slots):
            self.states[np.asarray(slots, np.int64)] = _NEXT[
                int(DiskSlotState.EMPTY), DiskSlotTrigger.RECOVER
            ]

    def check_unused(self) -> None:
        """Raises `ConfigError` if something was found or stored before."""
        if self.states.any():
            raise ConfigError("a disk tier is recovered once, and before its first store")

    def proof(self, slot: int) -> SlotProof:
        """What a load of this slot must find. Raises `TransferFailed` if it holds nothing."""
        if self.states[slot] != DiskSlotState.SEALED:
            state = DiskSlotState(self.states[slot]).name
            raise TransferFailed(f"disk slot {slot} holds nothing that can be loaded: it is {state}")
        generation = SlotGeneration(int(self._lives[slot]), int(self._numbers[slot]))
        return SlotProof(generation, int(self._payloads[slot]), int(self._headers[slot]))
