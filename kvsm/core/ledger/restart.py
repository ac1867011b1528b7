"""The restart: the next process keeps the stored blocks and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

import numpy as np

from kvsm import events as ev
from kvsm.core.ledger import index
from kvsm.core.ledger.records import OfferHistory, Provenance
from kvsm.core.ledger.state import LedgerState
from kvsm.core.policies import EvictionPolicy, make_policy
from kvsm.errors import ConfigError, InvalidEvent
from kvsm.events import LOAD, OffloadConfig
from kvsm.ids import IdArray, listed, pack, unpack
from kvsm.states import block as block_machine
from kvsm.states import lease as lease_machine
from kvsm.states import request as request_machine
from kvsm.states import transfer as transfer_machine
from kvsm.states.block import EVICTED_WORD, IDLE, are_indexed, are_readable
from kvsm.states.lease import LEASE_WORDS
from kvsm.states.request import REQUEST_WORDS
from kvsm.states.transfer import TRANSFER_WORDS
from kvsm.states.words import StateWords

ALIKE = ("host_blocks", "blocks_per_chunk", "block_bytes", "workers")
"""Fields that must be the same in the next process. Otherwise the slots would have other bytes."""


def why_not_alike(config: OffloadConfig, other: OffloadConfig) -> list[str]:
    """Return a line for each field of `ALIKE` that differs: "workers: 2, and now 4"."""
    return [
        f"{name}: {getattr(config, name)}, and now {getattr(other, name)}"
        for name in ALIKE
        if getattr(config, name) != getattr(other, name)
    ]


def restarted(ledger: LedgerState, event: ev.Restarted) -> None:
    """End every copy, pin, lease and request: the last process and its workers are dead."""
    seq, config = event.seq, event.config
    if event.life <= ledger.life:
        raise InvalidEvent(seq, f"life {event.life} cannot follow life {ledger.life}")
    for difference in why_not_alike(ledger.config, config):
        raise InvalidEvent(seq, f"the next process has another pool: {difference}")
    another, held = _other_policy(ledger, config, seq), _held(ledger)
    _end_all(ledger, seq)
    before, every_slot = ledger.blocks.view.copy(), np.arange(config.host_blocks)
    ledger.blocks.advance(every_slot, block_machine.RESTART, seq)
    readable = are_readable(before)
    index.remove(ledger, np.flatnonzero(are_indexed(before) & ~readable))
    given_back = np.flatnonzero((ledger.blocks.view == EVICTED_WORD) & (before != EVICTED_WORD))
    if len(given_back):
        ledger.free.append(given_back)
    used = np.flatnonzero(readable & (before != IDLE)).tolist()
    _let_go(ledger.policy, [slot for slot in used if slot not in ledger.policy], held)
    if another is not None:
        _give_over(ledger, another)
    ledger.copied_out.clear()
    ledger.leases.advance(np.arange(ledger.config.device_blocks), lease_machine.RESTART, seq)
    if config.device_blocks != ledger.config.device_blocks:
        ledger.leases = StateWords(LEASE_WORDS, config.device_blocks)
    ledger.provenance = Provenance()
    ledger.offers = OfferHistory(config.counted_keys, ledger.offers.times.items())
    ledger.times, ledger.declined_hits = None, 0
    ledger.config, ledger.life = config, event.life
    ledger.voided_at = ledger.ended_at = ledger.forgotten_at = seq


def _end_all(ledger: LedgerState, seq: int) -> None:
    """End every transfer and every request, as their tables say."""
    for transfer in ledger.transfers.values():
        planned = transfer.state is transfer_machine.PLANNED
        trigger = transfer_machine.CANCEL if planned else transfer_machine.LOSE
        transfer.word = TRANSFER_WORDS.step(transfer.word, trigger, transfer.id, seq)
    for request in ledger.requests.values():
        request.word = REQUEST_WORDS.step(request.word, request_machine.RESTART, request.name, seq)
    ledger.transfers.clear()
    ledger.requests.clear()
    ledger.deferred.clear()


def _held(ledger: LedgerState) -> list[IdArray]:
    """Return the slots of each match and load, in prefix order; the most recent match or load is last."""
    held = [(one.pinned_at, one.pins) for one in ledger.requests.values()]
    held += [(one.id, one.slots) for one in ledger.transfers.values() if one.direction is LOAD]
    return [slots for _, slots in sorted(held, key=itemgetter(0))]


def _let_go(policy: EvictionPolicy, used: Sequence[int], held: Sequence[IdArray]) -> None:
    """Return the used slots to the order, as if their matches and loads had ended one after another."""
    left, runs = dict.fromkeys(used), list[list[int]]()
    for slots in reversed(held):
        runs.append([slot for slot in listed(slots) if slot in left])
        for slot in runs[-1]:
            left.pop(slot, None)
    for run in ([*left], *reversed(runs)):
        if run:
            policy.idle(unpack(pack(run)))


def _other_policy(ledger: LedgerState, config: OffloadConfig, seq: int) -> EvictionPolicy | None:
    """Make the policy of the next process; None if it is the same. Raises `InvalidEvent` if there is none."""
    if config.policy == ledger.config.policy:
        return None
    try:
        return make_policy(config.policy, config.host_blocks)
    except ConfigError as error:
        raise InvalidEvent(seq, str(error)) from error


def _give_over(ledger: LedgerState, policy: EvictionPolicy) -> None:
    """Replace the policy. The new one begins with the eviction order of the old one."""
    choice = ledger.policy.choose(len(ledger.policy), ())
    ledger.policy = policy
    if choice is not None and len(choice.victims):
        # Of the slots that it adopts, a policy evicts the last one first.
        kept = unpack(pack(listed(choice.victims)[::-1]))
        policy.adopted(kept, ledger.keys_of(kept))
