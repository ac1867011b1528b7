"""The next process: what was stored is left, and nothing else."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvsm import events as ev
from kvsm.errors import ConfigError, InvalidEvent
from kvsm.events import OffloadConfig
from kvsm.ledger import index
from kvsm.ledger.records import OfferHistory, Provenance
from kvsm.ledger.state import LedgerState
from kvsm.policies import EvictionPolicy, make_policy
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
"""What the next process must have as the last one had it. Otherwise a slot is not what it was."""


def why_not_alike(config: OffloadConfig, other: OffloadConfig) -> list[str]:
    """What of `ALIKE` differs, a line each: "workers: 2, and now 4"."""
    return [
        f"{name}: {getattr(config, name)}, and now {getattr(other, name)}"
        for name in ALIKE
        if getattr(config, name) != getattr(other, name)
    ]


def restarted(ledger: LedgerState, event: ev.Restarted) -> None:
    """Everybody of the last process is dead: every copy, pin, lease and request has ended."""
    seq, config = event.seq, event.config
    if event.life <= ledger.life:
        raise InvalidEvent(seq, f"life {event.life} cannot follow life {ledger.life}")
    for difference in why_not_alike(ledger.config, config):
        raise InvalidEvent(seq, f"the next process has another pool: {difference}")
    another = _other_policy(ledger, config, seq)
    _end_all(ledger, seq)
    before, every_slot = ledger.blocks.view.copy(), np.arange(config.host_blocks)
    ledger.blocks.advance(every_slot, block_machine.RESTART, seq)
    readable = are_readable(before)
    index.remove(ledger, np.flatnonzero(are_indexed(before) & ~readable))
    given_back = np.flatnonzero((ledger.blocks.view == EVICTED_WORD) & (before != EVICTED_WORD))
    if len(given_back):
        ledger.free.append(given_back)
    if another is None:
        used = np.flatnonzero(readable & (before != IDLE))
        used = used[np.array([slot not in ledger.policy for slot in used.tolist()], np.bool_)]
        if len(used):
            ledger.policy.idle(used)
    else:
        _give_over(ledger, another, np.flatnonzero(readable))
    ledger.copied_out.clear()
    ledger.leases.advance(np.arange(ledger.config.device_blocks), lease_machine.RESTART, seq)
    if config.device_blocks != ledger.config.device_blocks:
        ledger.leases = StateWords(LEASE_WORDS, config.device_blocks)
    ledger.provenance = Provenance()
    ledger.offers = OfferHistory(config.offer_history, ledger.offers.times.items())
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


def _other_policy(ledger: LedgerState, config: OffloadConfig, seq: int) -> EvictionPolicy | None:
    """The policy of the next process, if it is another one. Raises `InvalidEvent` if it does not exist."""
    if config.policy == ledger.config.policy:
        return None
    try:
        return make_policy(config.policy, config.host_blocks)
    except ConfigError as error:
        raise InvalidEvent(seq, str(error)) from error


def _give_over(ledger: LedgerState, policy: EvictionPolicy, kept: NDArray[np.int64]) -> None:
    """Another policy begins with the order in which the blocks were stored."""
    ledger.policy = policy
    if len(kept):
        # Of one call, a policy evicts the last slot first.
        youngest_first = kept[np.argsort(-ledger.generation_view[kept], kind="stable")]
        policy.admitted(youngest_first, ledger.keys_of(youngest_first))
