"""Wrong versions of the checks themselves: what they let pass, and where they cry wolf."""

from __future__ import annotations

from museum.exhibit import Edit

from kvsm.properties import Property
from mutants.mutant import Mutant

AREA = "the checks"
_BOOK = "kvsm.explain.verify.book:Book"
_INVARIANTS = "kvsm.core.ledger.invariants"

CHECKING = (
    Mutant(
        id="M93",
        area=AREA,
        title="the second book lets a pinned block be evicted",
        story="The eviction of a block that a match holds is no violation, so `kvsm verify` calls "
        "such a log good.",
        shows_when="A log in which BlocksEvicted names a slot between its match and its load.",
        breaks=Property.MATCH_HOLDS,
        edits=(
            Edit(
                f"{_BOOK}._evicts_held",
                """
                elif pins:
                    self._slot_breaks(Property.MATCH_HOLDS, slot, "is evicted while a match holds it")
                """,
            ),
        ),
    ),
    Mutant(
        id="M94",
        area=AREA,
        title="the second book lets a block be stored under its load",
        story="A store of a device block that a load is writing is no violation.",
        shows_when="A log in which StorePlanned names a device block of a load in flight.",
        breaks=Property.NO_REUSE_IN_FLIGHT,
        edits=(
            Edit(
                f"{_BOOK}._may_allocate",
                """
            elif leases[block] != UNLEASED:
                self._block_breaks(Property.NO_REUSE_IN_FLIGHT, block, "is stored while a load may write it")
                """,
            ),
        ),
    ),
    Mutant(
        id="M95",
        area=AREA,
        title="the second book asks only the last block of a chunk for its epoch",
        story="A chunk that begins with a block from before a reset is no violation.",
        shows_when="A log with chunks of two blocks, in which the first one is stored that was loaded "
        "before a reset.",
        breaks=Property.NO_STALE_DATA,
        edits=(
            Edit(
                f"{_BOOK}._must_be_of_this_epoch",
                "if brought == key or (brought is not None and number < self._chunk):",
                "if brought == key:",
            ),
        ),
    ),
    Mutant(
        id="M96",
        area=AREA,
        title="the second book forbids what follows a failed store",
        story="A cursor that goes back after a failed store is called a violation: `kvsm verify` "
        "cries wolf over a good log.",
        shows_when="A store fails, and its request offers the chunk again.",
        breaks=Property.STORED_ONCE,
        edits=(
            Edit(
                f"{_BOOK}._offered",
                "or (any(map(gt, had_settled, settled)) and not self._may_settle_less(name))",
                "or any(map(gt, had_settled, settled))",
            ),
        ),
    ),
    Mutant(
        id="M97",
        area=AREA,
        title="the second book forgets that a loss voids a match",
        story="The load of a match that was voided since is no violation.",
        shows_when="A log in which a load is planned from a slot that was voided since its match.",
        breaks=Property.MATCH_HOLDS,
        edits=(
            Edit(
                f"{_BOOK}._load_planned",
                """
        if self._last_void > match[0]:
            for slot in slots:
                if self._voided[slot] > match[0]:
                    self._slot_breaks(Property.MATCH_HOLDS, slot, "is loaded, but was voided since its match")
                """,
            ),
        ),
    ),
    Mutant(
        id="M98",
        area=AREA,
        title="the witness does not compare since when a transfer is in flight",
        story="A ledger that counts the time of a transfer wrong is called equal to the second book.",
        shows_when="A ledger with another `since` than its events say, as after a restore that forgot it.",
        breaks=Property.PROGRESS,
        edits=(
            Edit(
                "kvsm.explain.verify.witness:Witness._compare_transfer",
                """
            if transfer.since != booked.since:
                message = f"transfer {id} is in flight since tick {transfer.since}; it must be {booked.since}"
                return [Violation(Property.PROGRESS, message, transfers=(id,))]
                """,
            ),
        ),
    ),
    Mutant(
        id="M99",
        area=AREA,
        title="the check of leases lets a load share its block with a store",
        story="A device block that a load writes and a store reads is no violation.",
        shows_when="A ledger in which a store and a load in flight name one device block.",
        breaks=Property.NO_REUSE_IN_FLIGHT,
        edits=(
            Edit(
                f"{_INVARIANTS}:leases_equal_live_copies",
                "(reuse, lambda block: block.writers > 1 or block.writers > 0 < block.readers, "
                '"a load shares it"),',
                '(reuse, lambda block: block.writers > 1, "a load shares it"),',
            ),
        ),
    ),
    Mutant(
        id="M100",
        area=AREA,
        title="the check of epochs looks at abandoned transfers only",
        story="A transfer of an older epoch that is not abandoned is no violation, so what it stores "
        "is served after a reset.",
        shows_when="A ledger in which a transfer in flight was forgotten by a reset.",
        breaks=Property.NO_STALE_DATA,
        edits=(
            Edit(
                f"{_INVARIANTS}:epochs_are_current",
                "if (transfer.word & STATE_MASK == _ABANDONED) == (transfer.epoch == ledger.epoch):",
                "if transfer.word & STATE_MASK == _ABANDONED and transfer.epoch == ledger.epoch:",
            ),
        ),
    ),
    Mutant(
        id="M101",
        area=AREA,
        title="the check at rest does not look at leases",
        story="A device block that is leased forever is not seen when all is over.",
        shows_when="A ledger without requests and transfers, and with a leased device block.",
        breaks=Property.PROGRESS,
        edits=(
            Edit(
                f"{_INVARIANTS}:check_rest",
                """
                if leased.any():
                    left.append(f"{np.count_nonzero(leased)} leased device blocks")
                """,
            ),
        ),
    ),
    Mutant(
        id="M102",
        area=AREA,
        title="pins are not compared with matches",
        story="A pin that no match holds is no violation, so its block can never be evicted and "
        "nobody says so.",
        shows_when="A ledger with a stored block that counts a pin more than there are matches.",
        breaks=Property.ONE_RELEASE_PER_HOLD,
        edits=(
            Edit(
                f"{_INVARIANTS}:copies_and_pins_equal_holders",
                '(lambda slot: slot.word >> _PINS_SHIFT != slot.pins, "its pins are not its matches"),',
            ),
        ),
    ),
    Mutant(
        id="M103",
        area=AREA,
        title="the two tiers may disagree about reports",
        story="The check of a disk tier does not compare which workers have reported, so a copy that "
        "is over in one ledger and not in the other is seen too late.",
        shows_when="Two ledgers of which one has taken a report that the other lacks.",
        breaks=Property.STALE_REPORTS,
        edits=(
            Edit(
                "kvsm.tiers.agreement:_of_copy",
                '"reports": (host.reported, disk.reported),',
            ),
        ),
    ),
    Mutant(
        id="M160",
        area=AREA,
        title="the witness does not compare the generations of slots",
        story="The witness accepts a slot whose block has the number of another store. A pin that was taken "
        "before this store then counts as live.",
        shows_when="A ledger with another generation than its events say, as after a restore that forgot it.",
        breaks=Property.STALE_REPORTS,
        edits=(
            Edit(
                "kvsm.explain.verify.witness:Witness._compare_facts",
                "for slot in wrong[:MOST_NAMED]:",
                "for slot in ():",
            ),
        ),
    ),
    Mutant(
        id="M161",
        area=AREA,
        title="the witness does not compare how long a request may wait",
        story="The witness accepts a ledger that lets a request wait longer than its events say.",
        shows_when="A ledger in which the last tick of a deferred request is not the one in its events.",
        breaks=Property.PROGRESS,
        edits=(
            Edit(
                "kvsm.explain.verify.witness:Witness._compare_requests",
                """
                (Property.PROGRESS, "last tick of a wait", request.patience, self._patience.get(name, -1)),
                """,
            ),
        ),
    ),
    Mutant(
        id="M162",
        area=AREA,
        title="the witness does not notice that a request is missing",
        story="The witness accepts a ledger that has forgotten a request before its end. The request's next "
        "offers then begin at its first block again.",
        shows_when="A ledger lacks a request that has arrived, holds nothing, and is not over.",
        breaks=Property.PROGRESS,
        edits=(
            Edit(
                "kvsm.explain.verify.witness:Witness._compare_requests",
                "for name in sorted({*self._known, *ledger.requests}):",
                "for name in sorted(ledger.requests):",
            ),
        ),
    ),
)
