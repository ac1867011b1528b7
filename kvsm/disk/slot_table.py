"""What the slots of one rank's file hold, as this process knows it: a state and a generation for each.

No two transfers under way have a slot in common, except loads. So threads change entries without a lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product

import numpy as np

from kvsm.disk.formats import SlotGeneration
from kvsm.errors import ConfigError, TransferFailed
from kvsm.states.disk_slot import DISK_SLOT, DiskSlotState, DiskSlotTrigger

_NEXT = {
    (int(state), trigger): arcs[0].target
    for state, trigger in product(DiskSlotState, DiskSlotTrigger)
    if (arcs := DISK_SLOT.dense[trigger][state])
}


class SlotTable:
    """The states and generations of `num_slots` slots, all EMPTY at first."""

    def __init__(self, num_slots: int) -> None:
        self.states = np.zeros(num_slots, np.uint8)
        self._lives = np.zeros(num_slots, np.int64)
        self._numbers = np.zeros(num_slots, np.int64)

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

    def found(self, slots: Sequence[int], generations: Sequence[SlotGeneration]) -> None:
        """Recovery has found these slots sealed; their payloads are not read yet. Raises `ConfigError` if
        something was found or stored before."""
        if self.states.any():
            raise ConfigError("a disk tier is recovered once, and before its first store")
        places = np.asarray(slots, np.int64)
        if len(places):
            self.states[places] = _NEXT[int(DiskSlotState.EMPTY), DiskSlotTrigger.RECOVER]
            self._lives[places], self._numbers[places] = np.asarray(generations, np.int64).T

    def generation(self, slot: int) -> SlotGeneration:
        """What a load of this slot must find. Raises `TransferFailed` if it holds nothing."""
        if self.states[slot] != DiskSlotState.SEALED:
            state = DiskSlotState(self.states[slot]).name
            raise TransferFailed(f"disk slot {slot} holds nothing that can be loaded: it is {state}")
        return SlotGeneration(int(self._lives[slot]), int(self._numbers[slot]))
