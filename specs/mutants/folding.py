"""Wrong versions of the fold: what an event does to the ledger."""

from __future__ import annotations

from museum.exhibit import Edit

from kvsm.properties import Property
from mutants.mutant import Mutant

AREA = "the fold"

FOLDING = (
    Mutant(
        id="M48",
        area=AREA,
        title="an event whose number skips one is taken",
        story="A log that lacks an event in its middle is folded without a word, and the state that "
        "an on-call engineer sees never existed.",
        shows_when="Somebody replays a log from which one event, a rejected report for example, was cut out.",
        breaks=Property.EVENTS_ARE_STATE,
        edits=(
            Edit(
                "kvsm.core.ledger.ledger:Ledger.apply",
                "if event.seq != self.seq + 1:",
                "if event.seq <= self.seq:",
            ),
        ),
    ),
    Mutant(
        id="M49",
        area=AREA,
        title="the count of offers outlives the store",
        story="A key keeps its count of offers when it is stored, so after its eviction a single "
        "offer stores it again, whatever store_threshold says.",
        shows_when="store_threshold is 2; a key is stored, evicted, and offered once.",
        breaks=Property.EVENTS_ARE_STATE,
        edits=(Edit("kvsm.core.ledger.transfers:end_copies", "ledger.offers.forget(transfer.keys)"),),
    ),
    Mutant(
        id="M50",
        area=AREA,
        title="the end of a store wakes no waiting chunk",
        story="Only the end of a load is noted as news for chunks that wait, so a chunk that waits "
        "for the store of its key by another request is not offered again.",
        shows_when="Two requests with one prompt; the second offers while the first one's store is in "
        "flight and fails.",
        breaks=Property.STORED_ONCE,
        edits=(
            Edit(
                "kvsm.core.ledger.transfers:close",
                """
                ledger.ended_at = seq
                if transfer.direction is LOAD:
                """,
                """
                if transfer.direction is LOAD:
                    ledger.ended_at = seq
                """,
            ),
        ),
    ),
    Mutant(
        id="M51",
        area=AREA,
        title="a reset leaves the cursors where they are",
        story="Requests that run during a reset think that their blocks are stored, and never offer "
        "them again.",
        shows_when="The cache is reset while a request runs whose blocks are stored.",
        breaks=Property.STORED_ONCE,
        edits=(
            Edit(
                "kvsm.core.ledger.cache:cache_reset",
                """
                for request in ledger.requests.values():
                    request.settled = request.offered = ()
                """,
            ),
        ),
    ),
    Mutant(
        id="M52",
        area=AREA,
        title="what a failed load has read stays readable",
        story="The block that could not be read is matched again, so each request that wants it fails "
        "in turn.",
        shows_when="A worker reports that a load has failed.",
        breaks=Property.FAILURE_IS_NOT_SUCCESS,
        edits=(
            Edit(
                "kvsm.core.ledger.transfers:worker_reported",
                """
                if state == transfer_machine.FAILED and transfer.direction is LOAD:
                    index.invalidate(ledger, transfer.slots, seq)
                """,
            ),
        ),
    ),
    Mutant(
        id="M53",
        area=AREA,
        title="a loss does not void pins",
        story="A match that holds the slots of a lost load still counts as whole, and its load is "
        "refused with an error instead of being given up.",
        shows_when="Two requests match one block; the load of the first one is lost, and the second one "
        "begins its own.",
        breaks=Property.MATCH_HOLDS,
        edits=(Edit("kvsm.core.ledger.transfers:transfer_lost", "ledger.voided_at = seq"),),
    ),
    Mutant(
        id="M54",
        area=AREA,
        title="copies to the disk outlive their process",
        story="After a warm restart slots count as being copied to the disk by a process that is "
        "gone, and are never evicted.",
        shows_when="A host pool that outlives its process, with a copy to the disk in flight when the "
        "process is killed.",
        breaks=Property.CONSERVATION,
        edits=(Edit("kvsm.core.ledger.restart:restarted", "ledger.copied_out.clear()"),),
    ),
    Mutant(
        id="M55",
        area=AREA,
        title="one pin is not given back if less is loaded than matched",
        story="The first of the blocks that the engine did not accept stays pinned forever.",
        shows_when="The host serves three blocks, and the engine accepts one of them.",
        breaks=Property.ONE_RELEASE_PER_HOLD,
        edits=(
            Edit(
                "kvsm.core.ledger.loads:load_planned",
                "requests.unpin(ledger, request, live[loaded:], seq)",
                "requests.unpin(ledger, request, live[loaded + 1 :], seq)",
            ),
        ),
    ),
    Mutant(
        id="M56",
        area=AREA,
        title="a new load does not end the note of an older one",
        story="A device block that is loaded again after a reset still counts as loaded before it, so "
        "what it holds is never stored.",
        shows_when="A load, a reset, and another load into the same device block.",
        breaks=Property.NO_STALE_DATA,
        edits=(
            Edit(
                "kvsm.core.ledger.records:Provenance.bring",
                "self.rewritten(device_blocks)",
            ),
        ),
    ),
    Mutant(
        id="M57",
        area=AREA,
        title="that a key has left the host is not noted",
        story="Nobody learns that the host has lost a key, so the lazy store does not store its block "
        "once more, nor does the last offer of a request.",
        shows_when="A key is evicted whose block the device still has.",
        breaks=Property.STORED_ONCE,
        edits=(Edit("kvsm.core.ledger.index:remove", "ledger.forgotten_at = ledger.seq + 1"),),
    ),
    Mutant(
        id="M58",
        area=AREA,
        title="the router does not hear of blocks that were found bad",
        story="Blocks that a failed load or a loss invalidates stay announced, so the router sends "
        "requests to an engine that does not have them.",
        shows_when="A load fails in an engine that publishes KV events.",
        breaks=Property.EVENTS_ARE_STATE,
        edits=(
            Edit(
                "kvsm.core.ledger.index:withdraw",
                """
                if ledger.listener is not None:
                    ledger.listener.removed([ledger.key_of[slot] for slot in readable.tolist()])
                """,
            ),
        ),
    ),
    Mutant(
        id="M59",
        area=AREA,
        title="a match of a block that is copied to the disk does not protect it",
        story="The new pin is counted among the copies to the disk, so the block stays in the "
        "eviction order while a request holds it.",
        shows_when="A request matches a block that is on its way to the disk.",
        breaks=Property.CONSERVATION,
        edits=(
            Edit(
                "kvsm.core.ledger.order:_unused",
                "if slot in free or (slot in copied_out and holders(words[slot]) - pins == copied_out[slot])",
                "if slot in free or (slot in copied_out and holders(words[slot]) == copied_out[slot])",
            ),
        ),
    ),
    Mutant(
        id="M60",
        area=AREA,
        title="a preempted request keeps its cursors",
        story="A preempted request that computes its prompt once more thinks that it has offered all "
        "of it, so what the host has lost since is not stored.",
        shows_when="A request is preempted and runs again, and its first block was evicted meanwhile.",
        breaks=Property.STORED_ONCE,
        edits=(
            Edit(
                "kvsm.core.ledger.requests:_leave",
                "request.patience, request.settled, request.offered = -1, (), ()",
                "request.patience = -1",
            ),
        ),
    ),
    Mutant(
        id="M61",
        area=AREA,
        title="a device block of a lost load is free again",
        story="The lease of a lost load ends like that of a good one, so the copy may write into the "
        "block's next content.",
        shows_when="A load is lost, and a request offers or loads into one of its device blocks.",
        breaks=Property.NO_REUSE_IN_FLIGHT,
        edits=(
            Edit(
                "kvsm.core.ledger.transfers:transfer_lost",
                "transfer.device_blocks, lease_machine.END_READ if store else lease_machine.LOSE, seq",
                "transfer.device_blocks, lease_machine.END_READ if store else lease_machine.END_WRITE, seq",
            ),
        ),
    ),
)
