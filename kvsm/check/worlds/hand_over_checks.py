"""What must hold of the hand-overs of one engine after each action, in every world with hand-overs."""

from __future__ import annotations

from kvsm.check.worlds.hand_over_parts import ModelChannel
from kvsm.core.ledger import Ledger
from kvsm.core.offloader import Offloader
from kvsm.core.scheduler import SchedulerConfig
from kvsm.core.scheduler.hits import HitSearch
from kvsm.errors import PropertyBroken
from kvsm.ids import to_list
from kvsm.properties import Property
from kvsm.tiers.hand_over.incoming import IncomingHandOvers
from kvsm.tiers.hand_over.leases import HandOverState, LeaseTable
from kvsm.tiers.hand_over.outgoing import OutgoingHandOvers
from kvsm.tiers.hand_over.peer_messages import Offered


def check_share(outgoing: OutgoingHandOvers, ledger: Ledger, share: float) -> None:
    """Check that hand-overs pin at most their share of the pool. ledger: of the prefill engine."""
    names = [hand_over.name for hand_over in outgoing._out.values()]
    records = [ledger.requests[name] for name in names if name in ledger.requests]
    pinned = {slot for record in records for slot in to_list(record.pins)}
    most = max(1, int(share * ledger.config.host_blocks))
    if len(pinned) > most:
        message = f"hand-overs pin {len(pinned)} slots, and their share is {most}"
        raise PropertyBroken(Property.PROGRESS, message)


def check_waits(outgoing: OutgoingHandOvers, ledger: Ledger) -> None:
    """Check that each hand-over that waits has a store in flight."""
    for name, lease in outgoing.leases._leases.items():
        if lease.state is HandOverState.PREPARING:
            slots = [ledger.index.get(key) for keys in outgoing._out[name].keys for key in keys]
            if all(slot is None or ledger.readable(slot) for slot in slots):
                message = f"hand-over {name} waits, and no block of its prompt is on its way"
                raise PropertyBroken(Property.PROGRESS, message)


def check_none_is_overdue(leases: LeaseTable) -> None:
    """Check that no expired lease is left, right after the prefill engine has looked at its hand-overs."""
    for name, lease in leases._leases.items():
        if lease.until <= leases.clock():
            message = (
                f"hand-over {name} expired {leases.clock() - lease.until:g} s ago, but still pins blocks"
            )
            raise PropertyBroken(Property.ONE_RELEASE_PER_HOLD, message)


def offered_keys(
    incoming: IncomingHandOvers, channel: ModelChannel, core: Offloader, config: SchedulerConfig
) -> dict[int, set[bytes]]:
    """Ticket -> keys of the unread offers that the decode engine will compare with its own blocks.

    It compares neither wrong answers nor, while a reset drains, any offer.
    """
    claims, offered = incoming._by_ticket, dict[int, set[bytes]]()
    if core.ledger.draining():
        return offered
    for ticket, answer in channel.answers:
        if isinstance(answer, Offered) and ticket in claims and ticket not in channel.lied_to:
            keys = claims[ticket].tracked.chunk_keys()
            search = HitSearch(config, core.config.blocks_per_chunk, keys, 0)
            offered[ticket] = set(search.needed_keys(answer.num_tokens))
    return offered
