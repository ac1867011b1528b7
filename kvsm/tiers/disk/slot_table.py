"""A table in memory of the slots of one rank's file: state, generation and checksums of each slot.

Transfers in flight share no slots, except loads. So threads change entries without a lock.
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
    """The expected content of a slot.

    generation: the store that wrote the slot.
    payload: the checksum of its payload.
    header: the checksum of its header, which names its key.
    """

    generation: SlotGeneration
    payload: int
    header: int


class SlotTable:
    """The entries of `num_slots` slots, all EMPTY at first."""

    def __init__(self, num_slots: int) -> None:
        self.states = np.zeros(num_slots, np.uint8)
        self._lives = np.zeros(num_slots, np.int64)
        self._numbers = np.zeros(num_slots, np.int64)
        self._payloads = np.zeros(num_slots, np.uint64)
        self._headers = np.zeros(num_slots, np.uint64)

    def step(self, slots: Iterable[int], trigger: DiskSlotTrigger) -> None:
        """Apply a trigger to these slots. Raises `TransferFailed` if it is illegal in the state of a slot."""
        for slot in slots:
            target = _NEXT.get((int(self.states[slot]), trigger))
            if target is None:
                state = DiskSlotState(self.states[slot]).name
                raise TransferFailed(f"disk slot {slot}: {trigger.name} is illegal in {state}")
            self.states[slot] = target

    def begin(self, slots: Sequence[int], generation: SlotGeneration) -> None:
        """Note that a store of this generation begins to write these slots."""
        sealed = [slot for slot in slots if self.states[slot] == DiskSlotState.SEALED]
        self.step(sealed, DiskSlotTrigger.DROP)
        self.step(slots, DiskSlotTrigger.WRITE)
        self._lives[list(slots)], self._numbers[list(slots)] = generation

    def seal(self, slots: Sequence[int], payloads: Sequence[int], headers: Sequence[int]) -> None:
        """Note that a store has written these slots. payloads, headers: the checksums of each slot."""
        self._payloads[list(slots)], self._headers[list(slots)] = payloads, headers
        self.step(slots, DiskSlotTrigger.SEAL)

    def scanned(self, first: int, columns: NDArray[np.void]) -> None:
        """Enter generations and checksums of scanned headers, for the slots from `first` on. This does not
        make a slot readable."""
        here = slice(first, first + len(columns))
        self._lives[here], self._numbers[here] = columns["life"], columns["number"]
        self._payloads[here], self._headers[here] = columns["payload"], columns["checksum"]

    def found(self, slots: Sequence[int]) -> None:
        """Make recovered slots readable. Their headers were scanned; their payloads are not read yet. Raises
        `ConfigError` if slots were already recovered or stored."""
        self.check_unused()
        if len(slots):
            self.states[np.asarray(slots, np.int64)] = _NEXT[
                int(DiskSlotState.EMPTY), DiskSlotTrigger.RECOVER
            ]

    def check_unused(self) -> None:
        """Raise `ConfigError` if slots were already recovered or stored."""
        if self.states.any():
            raise ConfigError("a disk tier is recovered once, and before its first store")

    def proof(self, slot: int) -> SlotProof:
        """Return the expected content of a slot. Raises `TransferFailed` if the slot is not SEALED."""
        if self.states[slot] != DiskSlotState.SEALED:
            state = DiskSlotState(self.states[slot]).name
            raise TransferFailed(f"disk slot {slot} holds nothing that can be loaded: it is {state}")
        generation = SlotGeneration(int(self._lives[slot]), int(self._numbers[slot]))
        return SlotProof(generation, int(self._payloads[slot]), int(self._headers[slot]))
