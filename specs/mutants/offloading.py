"""Wrong versions of the core: what the host serves, what it stores, how transfers end; and of policies."""

from __future__ import annotations

from museum.exhibit import Edit

from kvsm.properties import Property
from mutants.mutant import Mutant

AREA = "the core and its policies"
_TRANSFERS = "kvsm.core.offloader.transferring"
_STORING = "kvsm.core.offloader.storing"
_MATCHING = "kvsm.core.offloader.matching"

OFFLOADING = (
    Mutant(
        id="M31",
        area=AREA,
        title="a match steps over a block that the host lacks",
        story="The blocks behind a hole count as part of the prefix, so they are loaded in the wrong places.",
        shows_when="The host has the first and the third block of a prompt.",
        breaks=Property.CORRECT_BYTES,
        edits=(
            Edit(
                f"{_MATCHING}:_readable_prefix",
                """
                if slot is None:
                    break
                """,
                """
                if slot is None:
                    continue
                """,
            ),
        ),
    ),
    Mutant(
        id="M32",
        area=AREA,
        title="a voided match is loaded",
        story="Whether all pins still hold is not asked before the load is planned, so the call "
        "raises into the engine instead of answering that nothing is loaded.",
        shows_when="A reset between a match and its load.",
        breaks=Property.LEGAL_CALLS,
        edits=(
            Edit(
                f"{_TRANSFERS}:prepare_load",
                """
                if len(core.ledger.live_pins(entry)) < len(entry.pins):
                    core.emit(ev.LoadPlanned, request, NO_IDS, NO_IDS, True)
                    return None
                """,
            ),
        ),
    ),
    Mutant(
        id="M33",
        area=AREA,
        title="a slot that is being loaded names its store as the transfer to wait for",
        story="A request is told to wait for a transfer that ended long ago, and the call raises.",
        shows_when="Two requests with one prompt: the second asks while the first one loads.",
        breaks=Property.LEGAL_CALLS,
        edits=(
            Edit(
                f"{_MATCHING}:in_flight",
                """
                if not ledger.readable(slot):
                    return ledger.generation[slot]
                """,
                "return ledger.generation[slot]",
            ),
        ),
    ),
    Mutant(
        id="M34",
        area=AREA,
        title="a transfer that was flushed before is not named again",
        story="The workers do not wait in the second step that needs the end of a copy, and a block "
        "is rewritten under it.",
        shows_when="An engine flushes one transfer, and then all of them, before its workers have the plan.",
        breaks=Property.NO_REUSE_IN_FLIGHT,
        edits=(Edit(f"{_TRANSFERS}:flush", "return named", "return fresh"),),
    ),
    Mutant(
        id="M35",
        area=AREA,
        title="only loads are given up",
        story="A store that a dead worker never reports holds its slots and device blocks forever.",
        shows_when="A worker never reports a store, and transfer_ticks is set.",
        breaks=Property.PROGRESS,
        edits=(
            Edit(
                f"{_TRANSFERS}:lose_overdue",
                "overdue = [entry.id for entry in ledger.transfers.values() "
                "if ledger.tick - entry.since >= ticks]",
                """
                overdue = [
                    one.id
                    for one in ledger.transfers.values()
                    if one.direction is LOAD and ledger.tick - one.since >= ticks
                ]
                """,
            ),
        ),
    ),
    Mutant(
        id="M36",
        area=AREA,
        title="time stands still while no request waits",
        story="Ticks are counted only for requests that wait, so a transfer that hangs is never overdue.",
        shows_when="A worker never reports a store, transfer_ticks is set, and no request waits for it.",
        breaks=Property.PROGRESS,
        edits=(
            Edit(
                "kvsm.core.offloader.offloader:Offloader.tick",
                "if self.ledger.deferred or (self.ledger.transfers and self.config.transfer_ticks):",
                "if self.ledger.deferred:",
            ),
        ),
    ),
    Mutant(
        id="M37",
        area=AREA,
        title="only the last block of a chunk is asked whether it is of an older epoch",
        story="A chunk that begins with a block loaded before a reset is stored as new.",
        shows_when="Chunks of two blocks: a load before a reset brought the first block, and the request "
        "computes the second one after it.",
        breaks=Property.NO_STALE_DATA,
        edits=(
            Edit(
                f"{_STORING}:_admit",
                """
                *begins, last = sources
                if stale.get(last) == key or not stale.keys().isdisjoint(begins):
                """,
                "if stale.get(sources[-1]) == key:",
            ),
        ),
    ),
    Mutant(
        id="M38",
        area=AREA,
        title="a reset of an empty host does nothing",
        story="If the host holds nothing, a reset is no event, so blocks that the device loaded "
        "before are stored as new after it.",
        shows_when="A request has loaded, all else is evicted or voided, the cache is reset, and the "
        "request's blocks are offered.",
        breaks=Property.NO_STALE_DATA,
        edits=(
            Edit(
                "kvsm.core.offloader.offloader:Offloader.reset",
                "if live or ledger.index or ledger.provenance.brought or changed:",
                "if live or ledger.index or changed:",
            ),
        ),
    ),
    Mutant(
        id="M39",
        area=AREA,
        title="a block that was computed anew still counts as loaded",
        story="In chunks of several blocks a device block that the engine computed into keeps its "
        "note of a load, so after a reset its chunk is refused as old, and never stored.",
        shows_when="Chunks of two blocks: a loaded block is given to another request, the cache is reset, "
        "and the new chunk is offered.",
        breaks=Property.STORED_ONCE,
        edits=(Edit(f"{_STORING}:rewrite", "if not stale and not partly:", "if not stale:"),),
    ),
    Mutant(
        id="M40",
        area=AREA,
        title="the fast way of a store does not ask for older epochs",
        story="An offer of new keys on blocks that no copy touches is stored whole, even blocks that "
        "a load brought before a reset.",
        shows_when="A load ends well, the cache is reset, and the request's blocks are offered.",
        breaks=Property.NO_STALE_DATA,
        edits=(
            Edit(
                f"{_STORING}:_all_new",
                """
                if core.ledger.provenance.stale:
                    return False
                """,
            ),
        ),
    ),
    Mutant(
        id="M41",
        area=AREA,
        title="a block under a copy to the disk may be chosen for eviction",
        story="A store that needs room asks the policy for a block that is being copied to the disk, "
        "and the call raises.",
        shows_when="The oldest block of a full host is on its way to the disk, and a new block is offered.",
        breaks=Property.LEGAL_CALLS,
        edits=(
            Edit(
                f"{_STORING}:_room_for",
                "barred = frozenset(protected).union(ledger.copied_out)",
                "barred = frozenset(protected)",
            ),
        ),
    ),
    Mutant(
        id="M42",
        area=AREA,
        title="large searches do not protect",
        story="S3-FIFO and SIEVE evict blocks that an offer of more than sixteen found resident, or "
        "that are on their way to the disk.",
        shows_when="A prompt of 40 blocks, 20 of them resident, is offered to a full host with SIEVE.",
        breaks=Property.STORED_ONCE,
        edits=(
            Edit(
                "kvsm.core.policies.use_counts:UseCounts._search_arrays",
                """
                if barred is not None:
                    held |= np.isin(window, barred)
                """,
            ),
        ),
    ),
    Mutant(
        id="M43",
        area=AREA,
        title="ARC's second search does not protect",
        story="If its second queue is too short, ARC takes victims that are protected, among them "
        "blocks of the offer itself.",
        shows_when="All idle blocks are in the first queue, its target is high, and one of them is "
        "protected.",
        breaks=Property.STORED_ONCE,
        edits=(
            Edit(
                "kvsm.core.policies.arc:ARCPolicy.choose",
                "t1 = self._t1.first(count - len(t2), protected)",
                "t1 = self._t1.first(count - len(t2), ())",
            ),
        ),
    ),
    Mutant(
        id="M44",
        area=AREA,
        title="a large batch that moves in a queue is counted twice",
        story="A queue of slots counts the slots of a large batch as new although they only move, so "
        "the pool seems to have more to evict than it has.",
        shows_when="More than sixteen resident blocks are offered again under LRU.",
        breaks=Property.CONSERVATION,
        edits=(
            Edit(
                "kvsm.core.policies.slot_queue:SlotQueue.append",
                "self._size += int(np.count_nonzero(self._place_view[slots] == _ABSENT))",
                "self._size += len(slots)",
            ),
        ),
    ),
    Mutant(
        id="M45",
        area=AREA,
        title="a touched block stays on probation",
        story="SLRU puts a block that was used in passing into its second queue and leaves it in the "
        "first one, so it counts twice and may be evicted at once.",
        shows_when="A resident block that was not used yet is offered again under SLRU.",
        breaks=Property.CONSERVATION,
        edits=(
            Edit(
                "kvsm.core.policies.slru:SLRUPolicy.touched",
                "self._probation.remove(slots)",
            ),
        ),
    ),
    Mutant(
        id="M46",
        area=AREA,
        title="blocks that are taken over are reported by one worker",
        story="What recovery finds on a disk of several ranks is a store that never ends, so none of "
        "it is served.",
        shows_when="An engine with two ranks starts on a disk tier that holds blocks.",
        breaks=Property.PROGRESS,
        edits=(
            Edit(
                f"{_STORING}:adopt_blocks",
                "for worker in range(core.config.workers):",
                "for worker in range(1):",
            ),
        ),
    ),
    Mutant(
        id="M47",
        area=AREA,
        title="a new match is made before the old one is given back",
        story="A request that asks again is refused by its own match.",
        shows_when="A request asks twice, and the host has got one more of its blocks in between.",
        breaks=Property.LEGAL_CALLS,
        edits=(
            Edit(
                f"{_MATCHING}:_pin",
                "core.emit(ev.HitReleased, request)",
                "pass",
            ),
        ),
    ),
)
