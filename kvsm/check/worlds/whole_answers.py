"""What the scheduler must answer a request when a disk lies below the host: stored, so served (S19).

Written from the definitions, without the code of `HitSearch`, `OffloadScheduler` or `Fetches`. The longest
hit is made of keys that the host has, or that are readable on the disk.

- While one of these keys is not readable on the host, the request waits as long as it may: for the copy that
  brings the key, or, if the host has no room now, for any copy in flight. It also waits while another request
  loads a block of the hit, as without a disk. It need not wait if no copy is in flight and the host has no
  room for the missing keys.
- It never waits if the host can read all keys of the longest hit, and no other request is loading them.
- When a request may wait no longer, it is offered the longest hit that the host can read then.
- The device may lose a prompt's blocks while the request holds what was fetched for it. The request then asks
  for the whole hit. Its own blocks must not keep it waiting.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from typing import NamedTuple

from kvsm.check.worlds.check_counts import count_case
from kvsm.check.worlds.longest_hit import AskedPrompt, Settled, asked_prompt, check_answer
from kvsm.check.worlds.small_request import SmallRequest
from kvsm.core.ledger import Ledger
from kvsm.core.scheduler import OffloadScheduler
from kvsm.core.scheduler.protocols import EngineRequest
from kvsm.errors import PropertyBroken
from kvsm.ids import to_list
from kvsm.properties import Property
from kvsm.states.request import RequestState
from kvsm.tiers import DiskTier


class BeforeAnswerWithDisk(NamedTuple):
    """The state in which a request asks.

    asked: the prompt, or an answer that does not depend on hits.
    may_wait, must_wait: whether the request may wait, and whether it must.
    """

    request: EngineRequest
    asked: AskedPrompt | Settled
    may_wait: bool = False
    must_wait: bool = False

    @classmethod
    def of(
        cls,
        scheduler: OffloadScheduler,
        tier: DiskTier,
        request: EngineRequest,
        cells: Sequence[bytes],
        local: int,
    ) -> BeforeAnswerWithDisk:
        """Look at the state before the scheduler searches. cells: as in `expected_answer`."""
        asked = asked_prompt(scheduler, request, cells, local)
        if isinstance(asked, Settled) or not asked.may_wait:
            return cls(request, asked)
        ledger = scheduler.offloader.ledger
        index = ledger.index
        keys = _keys_of_hit(asked, ledger, tier)
        lacking = [key for key in keys if key not in index]
        arriving = any(not ledger.readable(index[key]) for key in keys if key in index)
        on_host = asked.keys_read(asked.end(index.__contains__))
        loaded = _slots_of_loads(ledger, tier)
        is_loaded = any(index[key] in loaded for key in on_host)
        can_come = bool(lacking) and _can_come(ledger, request.request_id, keys)
        return cls(request, asked, bool(lacking) or arriving or is_loaded, arriving or is_loaded or can_come)

    def check(self, found: int | None, ledger: Ledger) -> None:
        """Check the answer. found: the tokens to load; None if the request waits. ledger: the host's.

        Raises `PropertyBroken`.
        """
        if isinstance(self.asked, Settled):
            check_answer(self.request, self.asked.local, found, self.asked.tokens)
            return
        local = self.asked.local
        if self.must_wait:
            count_case(Property.STORED_SO_SERVED, "requests that wait for host or disk")
        if found is None:
            if not self.may_wait:
                self._broken("waits, although the host can read the longest hit, or its time to wait is over")
        elif self.must_wait:
            self._broken(f"is offered {found} tokens after {local}, instead of waiting for the longest hit")
        else:
            check_answer(self.request, local, found, self.asked.offered(ledger))

    def _broken(self, what: str) -> None:
        raise PropertyBroken(Property.STORED_SO_SERVED, f"request {self.request.request_id} {what}")


def check_own_blocks(scheduler: OffloadScheduler, tier: DiskTier, waiting: Iterable[SmallRequest]) -> None:
    """Check that a waiting request could fetch its whole hit, if the device lost what it has of the prompt.

    It could if no copy is in flight and no other request holds blocks. Raises `PropertyBroken`.
    """
    ledger, fetches = scheduler.offloader.ledger, copy(tier._fetches)
    if ledger.transfers or not fetches._matched:
        return
    fetches._matched = dict(fetches._matched)  # `may_begin` changes it
    holders = {one.name for one in ledger.requests.values() if one.state is RequestState.MATCHED}
    for request in waiting:
        asked = asked_prompt(scheduler, request, request.cells, 0)
        if holders != {request.request_id} or isinstance(asked, Settled):
            continue
        keys = _keys_of_hit(asked, ledger, tier)
        resident = [ledger.index[key] for key in keys if key in ledger.index]
        count_case(Property.STORED_SO_SERVED, "requests that hold what was fetched and could ask for more")
        if not fetches.may_begin(request.request_id, resident, len(keys) - len(resident)):
            message = f"request {request.request_id} would be kept waiting by blocks that it holds itself"
            raise PropertyBroken(Property.STORED_SO_SERVED, message)


def _keys_of_hit(asked: AskedPrompt, ledger: Ledger, tier: DiskTier) -> list[bytes]:
    """The keys of the longest hit that host and disk serve."""
    index, below, is_readable = ledger.index, tier.disk.ledger.index, tier.disk.ledger.readable
    end = asked.end(lambda key: key in index or (key in below and is_readable(below[key])))
    return asked.keys_read(end)


def _slots_of_loads(ledger: Ledger, tier: DiskTier) -> set[int]:
    """The slots that copies between host and device touch. A copy to the disk keeps no request waiting."""
    to_disk = {copy.host for copy in tier.copies.values()}
    return {
        slot
        for transfer in ledger.transfers.values()
        if transfer.id not in to_disk
        for slot in to_list(transfer.slots)
    }


def _can_come(ledger: Ledger, name: str, keys: Sequence[bytes]) -> bool:
    """Whether missing keys are worth waiting for: a copy is in flight, or their own copy can begin."""
    if ledger.transfers:
        return True
    if any(one.state is RequestState.MATCHED for one in ledger.requests.values() if one.name != name):
        # Blocks that were fetched for another request may have to be loaded first.
        return False
    idle = sum([ledger.index[key] in ledger.policy for key in keys if key in ledger.index])
    lacking = sum(key not in ledger.index for key in keys)
    return lacking <= len(ledger.free) + ledger.evictable() - idle
