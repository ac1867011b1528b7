"""Wrong versions of what saves and restores: a state that forgets something, and is equal to itself."""

from __future__ import annotations

from museum.exhibit import Edit

from kvsm.properties import Property
from mutants.mutant import Mutant

AREA = "saving and restoring"

SAVING = (
    Mutant(
        id="M73",
        area=AREA,
        title="a snapshot forgets since when a transfer is in flight",
        story="A transfer that was in flight at a snapshot counts as submitted at tick 0, so a core "
        "that goes on from it gives the transfer up at once.",
        shows_when="A log of several segments with transfer_ticks, read from a segment whose snapshot has "
        "a transfer in flight.",
        breaks=Property.EVENTS_ARE_STATE,
        edits=(
            Edit(
                "kvsm.core.ledger.snapshot:saved_record",
                "return tuple([pack(one) if isinstance(one, np.ndarray) else one"
                " for one in astuple(record)])",
                """
                values = [pack(one) if isinstance(one, np.ndarray) else one for one in astuple(record)]
                if isinstance(record, TransferRecord):
                    values[TransferRecord.__struct_fields__.index("since")] = 0
                return tuple(values)
                """,
            ),
        ),
    ),
    Mutant(
        id="M74",
        area=AREA,
        title="a restored ledger forgets who waits",
        story="The list of requests that wait is not made again, so they are never woken.",
        shows_when="A snapshot while a request waits for a block in flight, and the state goes on from it.",
        breaks=Property.PROGRESS,
        edits=(
            Edit(
                "kvsm.core.ledger.snapshot:_ledger_of",
                """
                if request.state is RequestState.DEFERRED:
                    ledger.deferred[request.name] = request
                """,
            ),
        ),
    ),
    Mutant(
        id="M75",
        area=AREA,
        title="a restored ledger forgets the copies to the disk",
        story="Blocks on their way to the disk count as evictable after a snapshot, so an eviction is "
        "planned that the ledger refuses.",
        shows_when="A snapshot of the host's ledger while a copy to the disk is in flight, and the state "
        "goes on from it.",
        breaks=Property.CONSERVATION,
        edits=(
            Edit("kvsm.core.ledger.snapshot:_ledger_of", "ledger.copied_out = ledger.count_copies_out()"),
        ),
    ),
    Mutant(
        id="M76",
        area=AREA,
        title="a snapshot saves what was loaded in place of what is old",
        story="Behind a snapshot, blocks that were loaded before a reset count as loaded after it, or "
        "not at all, so old data may be stored as new.",
        shows_when="A load, a reset, a new segment of the log, and a state that goes on from there.",
        breaks=Property.NO_STALE_DATA,
        edits=(
            Edit(
                "kvsm.core.ledger.snapshot:_state_of",
                "stale=tuple(sorted(ledger.provenance.stale.items())),",
                "stale=tuple(sorted(ledger.provenance.brought.items())),",
            ),
        ),
    ),
    Mutant(
        id="M77",
        area=AREA,
        title="a snapshot sorts the free queue",
        story="A core that goes on from a snapshot takes other slots than the one that wrote it, so "
        "the same inputs give another log.",
        shows_when="Slots are freed in another order than by number, and a fork goes on from a snapshot.",
        breaks=Property.DETERMINISM,
        edits=(
            Edit(
                "kvsm.core.ledger.snapshot:_state_of",
                'free=ledger.free.order().astype("<u4").tobytes(),',
                'free=np.sort(ledger.free.order()).astype("<u4").tobytes(),',
            ),
        ),
    ),
    Mutant(
        id="M78",
        area=AREA,
        title="ARC forgets which keys are returning",
        story="Behind a snapshot a key that was evicted and comes back enters the wrong queue, so the "
        "state differs from a fold of the whole log.",
        shows_when="A snapshot between the plan and the end of a store whose key ARC remembers.",
        breaks=Property.EVENTS_ARE_STATE,
        edits=(Edit("kvsm.core.policies.arc:ARCPolicy.snapshot", "list(self._returning),", "[],"),),
    ),
    Mutant(
        id="M79",
        area=AREA,
        title="a restored policy counts no idle block",
        story="S3-FIFO and SIEVE seem to have nothing to evict behind a snapshot, so a full host "
        "takes no more blocks.",
        shows_when="A core with SIEVE goes on from a snapshot with stored blocks.",
        breaks=Property.CONSERVATION,
        edits=(
            Edit(
                "kvsm.core.policies.use_counts:UseCounts.restore",
                "self._idle = int(np.count_nonzero(self._view <= self._most))",
            ),
        ),
    ),
    Mutant(
        id="M80",
        area=AREA,
        title="a snapshot sorts the history of offers",
        story="Behind a snapshot other keys are forgotten first than before it, so another block "
        "passes store_threshold.",
        shows_when="store_threshold is 2, the history is full, and the state goes on from a snapshot.",
        breaks=Property.EVENTS_ARE_STATE,
        edits=(
            Edit(
                "kvsm.core.ledger.snapshot:_state_of",
                "offers=tuple(ledger.offers.times.items()),",
                "offers=tuple(sorted(ledger.offers.times.items())),",
            ),
        ),
    ),
    Mutant(
        id="M81",
        area=AREA,
        title="an explorer takes two states for one",
        story="Whether a store that waits for room was tried since the last change is left out of the "
        "comparison of states, so an exploration leaves out states and calls the rest proved.",
        shows_when="Two states that differ only in whether a waiting store is tried again in the next step.",
        breaks=Property.STORED_ONCE,
        edits=(
            Edit(
                "kvsm.core.scheduler.retry:RetryStamp.seen",
                "return self.available_slots if self.ended_at == ledger.ended_at else NOBODY",
                "return NOBODY",
            ),
        ),
    ),
)
