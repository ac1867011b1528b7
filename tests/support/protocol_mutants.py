"""Protocols with one mistake each, which the proof must refute: in a table, a guard, an effect or an order.

The ids in brackets are bugs of other systems, in docs/bugs.md, that make the same mistake.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kvsm.check.proof.conditions import variables_read
from kvsm.check.proof.rewriting import conjuncts
from kvsm.check.protocol.offload_protocol import Variant, offload_protocol
from kvsm.check.protocol.scope import ProtocolScope
from kvsm.check.protocol.terms import FALSE, Action, And, Assign, Declaration, Each, Effect, Term
from kvsm.states import BLOCK, LEASE, MACHINES, TRANSFER, BlockState, BlockTrigger, Machine
from kvsm.states.lease import LeaseState, LeaseTrigger
from kvsm.states.machine import Row
from kvsm.states.transfer import TransferState, TransferTrigger

Mutant = Callable[[ProtocolScope], Declaration]


def with_rows(machine: Machine, change: Callable[[Row], Row]) -> dict[str, Machine]:
    """Return the tables with changed rows of one machine."""
    rows = tuple(map(change, machine.rows))
    assert rows != machine.rows
    changed = Machine(machine.name, machine.states, machine.triggers, machine.counters, rows)
    return {**MACHINES, machine.name: changed}


# Tables.


def pinned_can_be_evicted(row: Row) -> Row:
    return replace(row, when={}) if row.trigger is BlockTrigger.EVICT else row


def failure_is_success(row: Row) -> Row:
    late = row.target is TransferState.FAILED and row.trigger is TransferTrigger.REPORT_GOOD
    return replace(row, target=TransferState.COMPLETED) if late else row


def lost_slot_is_free(row: Row) -> Row:
    lost = row.trigger is BlockTrigger.LOSE and row.target is not None
    return replace(row, target=BlockState.EVICTED) if lost else row


def lost_device_block_is_free(row: Row) -> Row:
    return replace(row, target=LeaseState.NONE) if row.trigger is LeaseTrigger.LOSE else row


def pins_outlive_a_reset(row: Row) -> Row:
    voids = row.trigger is BlockTrigger.INVALIDATE and "pins" in row.then
    return replace(row, then={}) if voids else row


def first_end_frees_a_quarantined_slot(row: Row) -> Row:
    other_copies_go_on = row.sources == (BlockState.QUARANTINED,) and row.target is BlockState.QUARANTINED
    return replace(row, target=BlockState.EVICTED) if other_copies_go_on else row


def first_end_frees_a_slot_to_evict(row: Row) -> Row:
    others_read = row.sources == (BlockState.LOADING,) and row.target is BlockState.LOADING
    return replace(row, target=BlockState.STORED) if others_read and "copies" in row.when else row


def first_store_ends_the_lease(row: Row) -> Row:
    others_read = row.trigger is LeaseTrigger.END_READ and row.target is LeaseState.READING
    return replace(row, target=LeaseState.NONE) if others_read else row


def first_worker_ends_the_transfer(row: Row) -> Row:
    others_to_come = row.sources == (TransferState.SUBMITTED,) and row.target is TransferState.SUBMITTED
    good = row.trigger is TransferTrigger.REPORT_GOOD
    return replace(row, target=TransferState.COMPLETED) if others_to_come and good else row


# Guards and effects.


def changed(declared: Declaration, names: tuple[str, ...], change: Callable[[Action], Action]) -> Declaration:
    """Return the declaration with these actions changed."""
    actions = tuple(change(one) if one.name in names else one for one in declared.actions)
    assert sum(one not in declared.actions for one in actions) == len(names)
    return replace(declared, actions=actions)


def without_guard(*names: str, reading: set[str]) -> Mutant:
    """Drop from these actions' guards the conjuncts that read exactly these variables."""

    def weaker(action: Action) -> Action:
        parts: tuple[Term, ...] = tuple(
            one for one in conjuncts(action.guard) if variables_read(one) != reading
        )
        return replace(action, guard=And(parts))

    return lambda scope: changed(offload_protocol(scope), names, weaker)


def without_effect(*names: str, on: str) -> Mutant:
    """Drop these actions' effects on a variable."""

    def kept(effect: Effect) -> Effect | None:
        if isinstance(effect, Assign):
            return None if effect.cell.variable.name == on else effect
        inner = tuple(one for one in map(kept, effect.effects) if one is not None)
        return Each(effect.param, inner) if inner else None

    def poorer(action: Action) -> Action:
        effects = (kept(one) for one in action.effects)
        return replace(action, effects=tuple(one for one in effects if one is not None))

    return lambda scope: changed(offload_protocol(scope), names, poorer)


def with_table(machine: Machine, change: Callable[[Row], Row]) -> Mutant:
    return lambda scope: offload_protocol(scope, machines=with_rows(machine, change))


def with_variant(variant: Variant) -> Mutant:
    return lambda scope: offload_protocol(scope, variant)


def never(name: str) -> Mutant:
    """Disable an action."""
    return lambda scope: changed(offload_protocol(scope), (name,), lambda one: replace(one, guard=FALSE))


def counted_as_draining(name: str) -> Mutant:
    return lambda scope: changed(offload_protocol(scope), (name,), lambda one: replace(one, drains=True))


MUTANTS: dict[str, tuple[Mutant, str, str]] = {
    # name: (the declaration, the step and the claim of a condition that does not hold)
    "a store does not wait for its kernel (B02)": (
        with_variant(Variant.STORE_BEFORE_COMPUTE),
        "start",
        "a store finds its key",
    ),
    "a load does not wait for the old reader (B03)": (
        with_variant(Variant.LOAD_BEFORE_READER),
        "start",
        "a load waits for kernels",
    ),
    "a load lets go of its slot at once (B35)": (
        with_variant(Variant.LOAD_UNHELD),
        "submit",
        "no reuse in flight (S3)",
    ),
    "a reset frees the slot of a store (B13)": (
        with_variant(Variant.RESET_FREES),
        "reset",
        "no reuse in flight (S3)",
    ),
    "a pinned block can be evicted (B06)": (
        with_table(BLOCK, pinned_can_be_evicted),
        "evict",
        "a match holds what it counts (S7)",
    ),
    "a failure counts as success (B28)": (
        with_table(TRANSFER, failure_is_success),
        "end_good",
        "publish after commit (S2)",
    ),
    "a lost slot is free": (
        with_table(BLOCK, lost_slot_is_free),
        "lose",
        "a slot with a stray writer is retired",
    ),
    "a lost device block is free": (
        with_table(LEASE, lost_device_block_is_free),
        "lose",
        "a device block with a stray writer is retired",
    ),
    "pins outlive a reset (B14)": (with_table(BLOCK, pins_outlive_a_reset), "reset", "block counts its pins"),
    "the first end frees a quarantined slot (B12)": (
        with_table(BLOCK, first_end_frees_a_quarantined_slot),
        "end_good",
        "no reuse in flight (S3)",
    ),
    "the first of two loads ends the reading": (
        with_table(BLOCK, first_end_frees_a_slot_to_evict),
        "end_good",
        "no reuse in flight (S3)",
    ),
    "the first of two stores ends the lease": (
        with_table(LEASE, first_store_ends_the_lease),
        "end_good",
        "a store holds a lease",
    ),
    "the first worker ends the transfer": (
        with_table(TRANSFER, first_worker_ends_the_transfer),
        "end_good",
        "publish after commit (S2)",
    ),
    "a key takes two slots (B11)": (
        without_guard("plan_store", reading={"block", "slot_key", "key"}),
        "plan_store",
        "conservation (S1)",
    ),
    "two stores go to one slot (B36)": (
        without_guard("plan_store", reading={"block"}),
        "plan_store",
        "no reuse in flight (S3)",
    ),
    "kernels write a block under a copy (B04)": (
        without_guard("compute", reading={"lease"}),
        "compute",
        "a store finds its key",
    ),
    "a load lands in a block that a copy touches (B05)": (
        without_guard("plan_load", reading={"lease"}),
        "plan_load",
        "correct bytes (S15)",
    ),
    "a load without a match": (
        without_guard("plan_load", reading={"match_slot"}),
        "plan_load",
        "no reuse in flight (S3)",
    ),
    "a match of what is not stored yet (B38)": (
        without_guard("match", reading={"block"}),
        "match",
        "a match holds what it counts (S7)",
    ),
    "a worker reports before it has written": (
        without_guard("end_good", reading={"copy_transfer", "instant"}),
        "end_good",
        "publish after commit (S2)",
    ),
    "a worker reports twice (B39)": (
        without_guard("end_good", reading={"report"}),
        "end_good",
        "publish after commit (S2)",
    ),
    "a reset leaves plans behind": (
        without_guard("reset", reading={"direction", "transfer"}),
        "reset",
        "no reuse in flight (S3)",
    ),
    "a released match keeps its pin (B31)": (
        without_effect("release", on="block"),
        "release",
        "block counts its pins",
    ),
    "a cancelled plan keeps its lease (B40)": (
        without_effect("cancel", on="lease"),
        "cancel",
        "one release per hold (S4)",
    ),
    "a cancelled store keeps its key": (
        without_effect("cancel", on="block"),
        "cancel",
        "stored, so served (S19)",
    ),
    "the end of a transfer keeps its copies": (
        without_effect("end_good", on="copy_transfer"),
        "end_good",
        "copies belong to live transfers",
    ),
    "a copy never starts (B21)": (never("start"), "winding down", "progress (S9)"),
    "the last report is refused (B29)": (never("end_good"), "winding down", "progress (S9)"),
    "what is matched counts as winding down": (counted_as_draining("match"), "match", "progress (S9)"),
    "a store leaves before the log has its plan": (
        without_guard("submit", reading={"direction", "logged", "copy_transfer", "copy_slot"}),
        "submit",
        "the log is ahead of every write",
    ),
    "a reset is not in the log": (
        without_effect("reset", on="logged"),
        "reset",
        "the log promises nothing old",
    ),
}
