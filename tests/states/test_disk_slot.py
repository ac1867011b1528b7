"""The machine of a disk slot: its table means what its module says."""

from __future__ import annotations

from itertools import product

from kvsm.states import MACHINES
from kvsm.states.disk_slot import DISK_SLOT, DiskSlotState, DiskSlotTrigger
from kvsm.states.machine import UndefinedStep


def after(state: DiskSlotState, trigger: DiskSlotTrigger) -> DiskSlotState | None:
    try:
        return DiskSlotState(DISK_SLOT.step(state, (), trigger)[0])
    except UndefinedStep:
        return None


def test_a_payload_is_written_only_where_no_header_names_it() -> None:
    """Correct bytes (S15): WRITING is entered from EMPTY and DROPPED alone, and left for SEALED only by
    SEAL."""
    entered = [
        (state, trigger)
        for state, trigger in product(DiskSlotState, DiskSlotTrigger)
        if after(state, trigger) is DiskSlotState.WRITING
    ]
    assert {state for state, _ in entered} == {DiskSlotState.EMPTY, DiskSlotState.DROPPED}
    assert {trigger for _, trigger in entered} == {DiskSlotTrigger.WRITE}


def test_a_slot_is_sealed_by_a_whole_store_or_by_recovery() -> None:
    sealing = [
        (state, trigger)
        for state, trigger in product(DiskSlotState, DiskSlotTrigger)
        if after(state, trigger) is DiskSlotState.SEALED and state is not DiskSlotState.SEALED
    ]
    assert sealing == [
        (DiskSlotState.EMPTY, DiskSlotTrigger.RECOVER),
        (DiskSlotState.WRITING, DiskSlotTrigger.SEAL),
    ]


def test_every_row_has_a_reason() -> None:
    assert all(row.why for row in DISK_SLOT.rows)


def test_no_log_depends_on_the_table() -> None:
    """No event moves a disk slot: a change of the table must not make the snapshots of logs useless."""
    assert DISK_SLOT not in MACHINES.values()
