"""What is matched and loaded: bugs between a hit that was counted and the load that uses it."""

from __future__ import annotations

from kvsm.properties import Property
from museum.exhibit import Edit, Exhibit

_IN_FLIGHT = "kvsm.offloader.matching:in_flight"
_ALLOCATED = "kvsm.scheduler.scheduler:OffloadScheduler.update_state_after_alloc"

MATCHING = (
    Exhibit(
        id="B06",
        source="vllm#39702",
        title="a hit is counted and not pinned",
        story="A lookup counted its hits and held nothing. Before the load was planned, the allocation of"
        " another request evicted one of them, and the load found nothing under a key that had been"
        " promised.",
        breaks=Property.MATCH_HOLDS,
        edits=(
            Edit(
                "kvsm.ledger.requests:hit_matched",
                "new = ledger.blocks.check(slots, block_machine.PIN, event.seq)",
                "new = ledger.blocks.check(slots, block_machine.TOUCH, event.seq)",
            ),
        ),
        stop="BEGIN_LOAD is illegal in",
    ),
    Exhibit(
        id="B08",
        source="vllm#41795",
        title="a key that is being stored is a miss",
        story="A request asked for a prefix while another's store of it was in flight. The lookup knew only"
        " what could be read already and answered with a miss, so the prefix was computed again, and stored"
        " again.",
        breaks=Property.STORED_ONCE,
        edits=(
            Edit(
                "kvsm.offloader.matching:_readable_prefix",
                "return slots, ledger.generation[slot]",
                "break",
            ),
            Edit(_IN_FLIGHT, "return ledger.generation[slot]", "return None"),
        ),
    ),
    Exhibit(
        id="B09",
        source="vllm#29087",
        title="what one request loads, another loads too",
        story="A request was loading a block. Before it landed, a second request hit the same block on the"
        " host and loaded it once more into a device block of its own, where waiting for the first load would"
        " have given it a hit on the device.",
        breaks=Property.STORED_ONCE,
        edits=(
            Edit(
                _IN_FLIGHT,
                "for transfer in ledger.transfers.values() if busy else ():",
                "for transfer in ():  # loads are not waited for",
            ),
        ),
    ),
    Exhibit(
        id="B18",
        source="vllm#46014",
        title="a request may have one transfer, and has a store",
        story="A request's store was in flight when it was preempted. It was admitted again at once, hit the"
        " host and planned a load, and the books, which had one entry a request for what is in flight, fell"
        " over the second transfer.",
        breaks=Property.LEGAL_CALLS,
        edits=(
            Edit(
                _ALLOCATED,
                "tracked.trusted = tracked.local",
                """
                owners = [name for one in core.ledger.transfers.values() for name, _ in one.owners]
                assert tracked.name not in owners, "a request has one transfer at most"
                tracked.trusted = tracked.local
                """,
            ),
        ),
    ),
    Exhibit(
        id="B22",
        source="vllm#45387",
        title="who waits for the rest of a load keeps what it has",
        story="Two waiting requests each held a part of what they needed for a load and waited for more."
        " Neither could get the rest, which the other one held. Here a request that begins to wait lets go"
        " first; the bug leaves that out.",
        breaks=Property.PROGRESS,
        edits=(
            Edit(
                "kvsm.offloader.matching:defer",
                """
                if entry.word & STATE_MASK == MATCHED:
                    core.emit(ev.HitReleased, request)
                """,
            ),
        ),
        stop="DEFER is illegal in MATCHED",
    ),
    Exhibit(
        id="B27",
        source="vllm#39732",
        title="a failed load counts as loaded",
        story="A worker reported that a load had failed. The scheduler asserted that this cannot be, or,"
        " where assertions are off, went on as if the blocks were there: the request attended to whatever the"
        " device blocks held before.",
        breaks=Property.FAILURE_IS_NOT_SUCCESS,
        edits=(
            Edit(
                "kvsm.scheduler.scheduler:OffloadScheduler._note_load_end",
                "self.state.ended_loads.append(LoadEnded(name, good, after if good else kept, lost))",
                "self.state.ended_loads.append(LoadEnded(name, True, after, lost))",
            ),
        ),
    ),
    Exhibit(
        id="B31",
        source="LMCache#1034",
        title="a lookup pins, and the load that would unpin never comes",
        story="A lookup pinned its hits. The engine found then that the device had the prefix already, so it"
        " never asked for the load, and only the load gave the pins back: one slot after the other could not"
        " be evicted any more.",
        breaks=Property.ONE_RELEASE_PER_HOLD,
        edits=(
            Edit(
                "kvsm.offloader.matching:release",
                "if entry is not None and entry.word & STATE_MASK == MATCHED:",
                "if False:  # the load gives the pins back",
            ),
        ),
    ),
    Exhibit(
        id="B32",
        source="LMCache#2954",
        title="two owners give back one pin",
        story="A lookup and a retrieve both believed that they owned the pin of an object, and both gave it"
        " back. The count went to -1, was clamped to 0 with a warning, and the object was evicted under"
        " somebody else's pin.",
        breaks=Property.ONE_RELEASE_PER_HOLD,
        edits=(
            Edit(
                "kvsm.ledger.requests:unpin",
                "new = ledger.blocks.advance(slots, block_machine.UNPIN, seq)",
                """
                ledger.blocks.advance(slots, block_machine.UNPIN, seq)
                new = ledger.blocks.advance(slots, block_machine.UNPIN, seq)
                """,
            ),
        ),
        stop="UNPIN is illegal in",
    ),
    Exhibit(
        id="B33",
        source="LMCache#3022",
        title="a load that could not be made is reported as made",
        story="A batched retrieve ran out of room at its n-th key. The keys before it were returned as"
        " loaded, though no copy had begun, and their pins and the lock were kept.",
        breaks=Property.FAILURE_IS_NOT_SUCCESS,
        edits=(
            Edit(
                _ALLOCATED,
                """
                if job is None:
                    core.release(tracked.name)
                """,
                "if job is None:",
            ),
            Edit(
                _ALLOCATED,
                "self._note_load_end(tracked.name, good=False)",
                "self._note_load_end(tracked.name, good=True)",
            ),
        ),
    ),
)
