"""Matches and loads: bugs between a counted hit and the load that uses it."""

from __future__ import annotations

from kvsm.properties import Property
from museum.exhibit import Edit, Exhibit

_IN_FLIGHT = "kvsm.core.offloader.matching:in_flight"
_ALLOCATED = "kvsm.core.scheduler.scheduler:OffloadScheduler.update_state_after_alloc"

MATCHING = (
    Exhibit(
        id="B06",
        source="vllm#39702",
        title="a hit is counted but not pinned",
        story="A lookup counted its hits and pinned nothing. Before the load was planned, another request's"
        " allocation evicted one of them, and the load did not find a key that had been promised.",
        breaks=Property.MATCH_HOLDS,
        edits=(
            Edit(
                "kvsm.core.ledger.requests:hit_matched",
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
        story="A request asked for a prefix while another request's store of it was in flight. The lookup"
        " knew only readable keys and answered with a miss. So the prefix was computed again, and stored"
        " again.",
        breaks=Property.STORED_ONCE,
        edits=(
            Edit(
                "kvsm.core.offloader.matching:_readable_prefix",
                "return slots, ledger.generation[slot]",
                "break",
            ),
            Edit(_IN_FLIGHT, "return ledger.generation[slot]", "return None"),
        ),
    ),
    Exhibit(
        id="B09",
        source="vllm#29087",
        title="two requests load the same block",
        story="While one request loaded a block, a second request hit the same block on the host. It loaded"
        " the block once more, into a device block of its own. Waiting for the first load would have"
        " given it a hit on the device.",
        breaks=Property.STORED_ONCE,
        edits=(
            Edit(
                _IN_FLIGHT,
                "for transfer in ledger.transfers.values():",
                "for transfer in ():  # loads are not waited for",
            ),
        ),
    ),
    Exhibit(
        id="B18",
        source="vllm#46014",
        title="books with one transfer for each request meet a second one",
        story="A request was preempted while its store was in flight. It was admitted again at once, hit the"
        " host and planned a load. The books had one entry for each request in flight and failed at the"
        " second transfer.",
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
        title="a request that waits for the rest of a load keeps what it has",
        story="Two waiting requests each held some of the blocks that they needed for a load and waited for"
        " more. Neither could get the rest, because the other held it. In kvsm a request that begins to"
        " wait releases its blocks first; the bug leaves that out.",
        breaks=Property.PROGRESS,
        edits=(
            Edit(
                "kvsm.core.offloader.matching:defer",
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
        story="A worker reported that a load had failed. The scheduler asserted that this cannot happen. With"
        " assertions disabled it went on as if the blocks were there, and the request attended to the"
        " old content of its device blocks.",
        breaks=Property.FAILURE_IS_NOT_SUCCESS,
        edits=(
            Edit(
                "kvsm.core.scheduler.scheduler:OffloadScheduler._note_load_end",
                "self.state.ended_loads.append(LoadEnded(name, good, after if good else kept, lost))",
                "self.state.ended_loads.append(LoadEnded(name, True, after, lost))",
            ),
        ),
    ),
    Exhibit(
        id="B31",
        source="LMCache#1034",
        title="a lookup pins, and the load that would unpin never comes",
        story="A lookup pinned its hits. Then the engine found the prefix already on the device and never"
        " asked for the load. Only the load would have released the pins, so ever more slots could not"
        " be evicted.",
        breaks=Property.ONE_RELEASE_PER_HOLD,
        edits=(
            Edit(
                "kvsm.core.offloader.matching:release",
                "if entry is not None and entry.word & STATE_MASK == MATCHED:",
                "if False:  # the load gives the pins back",
            ),
        ),
    ),
    Exhibit(
        id="B32",
        source="LMCache#2954",
        title="two owners release one pin",
        story="A lookup and a retrieve both assumed that they owned the pin of an object, and both released"
        " it. The count went to -1 and was clamped to 0 with a warning, and the object was evicted"
        " although another owner had pinned it.",
        breaks=Property.ONE_RELEASE_PER_HOLD,
        edits=(
            Edit(
                "kvsm.core.ledger.requests:unpin",
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
        story="A batched retrieve ran out of room at its n-th key. The keys before it were returned as loaded"
        " although no copy had begun. Their pins and the lock were kept.",
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
