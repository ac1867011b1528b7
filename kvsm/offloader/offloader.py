"""The whole core: requests, time, reset, and what leaves for schedulers and routers."""

from __future__ import annotations

from collections.abc import Sequence

from kvsm import events as ev
from kvsm.ids import pack
from kvsm.kv_events import KeysChanged, KVCacheEvent
from kvsm.offloader.matching import Matching
from kvsm.offloader.storing import Storing
from kvsm.states.request import RequestState
from kvsm.states.transfer import TransferState
from kvsm.states.words import STATE_MASK

_FINISHED = RequestState.FINISHED
_NOT_RUNNING = (RequestState.NEW, RequestState.PREEMPTED)


class Offloader(Matching, Storing):
    """One offload core over one host pool. Not thread safe: one scheduler drives it."""

    def arrive(self, request: str) -> None:
        """Make the request known. A match does so by itself; its cursors need it."""
        if request not in self.ledger.requests:
            self._emit(ev.RequestArrived, request)

    def preempt(self, request: str) -> None:
        """The engine took the request's device blocks. Copies in flight keep what they touch."""
        entry = self.ledger.requests.get(request)
        if entry is None or entry.word & STATE_MASK == _FINISHED:
            return
        if entry.offered or entry.state not in _NOT_RUNNING:
            self._emit(ev.RequestPreempted, request)

    def finish(self, request: str, *, aborted: bool = False) -> bool:
        """The request is over, at any time. Returns whether no load of it is left in flight."""
        entry = self.ledger.requests.get(request)
        if entry is not None and entry.word & STATE_MASK != _FINISHED:
            self._emit(ev.RequestFinished, request, aborted)
        return request not in self.ledger.requests

    def touch(self, keys: Sequence[bytes]) -> None:
        """These keys were used without a load: the device had them too. Unknown ones are passed over."""
        ledger = self.ledger
        slots = [slot for slot in map(ledger.index.get, keys) if slot is not None and ledger.readable(slot)]
        if slots:
            self._emit(ev.BlocksTouched, pack(list(dict.fromkeys(slots))))

    def tick(self) -> None:
        """Let the waits grow older; the host calls it once a step. No event if nothing waits for a bound."""
        if self.ledger.deferred or (self.ledger.transfers and self.config.transfer_ticks):
            self._emit(ev.Ticked, self.ledger.tick + 1)

    def end_step(self) -> None:
        """The engine's step is over. Flushes the log, unless `submit` did so in this step and copies are
        still under way: they bring another step, and what came after `submit` can wait for it."""
        if self.ledger.step == self.step:
            self._emit(ev.StepEnded)
            if self._flushed_at != self.step or not self.ledger.transfers:
                self._flush()
        self.step += 1

    def reset(self) -> bool:
        """Make every stored block unmatchable, at once. Returns whether nothing is left to drain.

        Copies in flight go on; their memory stays quarantined until every worker has reported, and
        `draining()` of the ledger says whether any is left. A load that was under way fails. Without
        anything stored or brought since the last reset, twice is as once, and no event.
        """
        ledger = self.ledger
        live = any(one.state is not TransferState.ABANDONED for one in ledger.transfers.values())
        if live or ledger.index or ledger.provenance.brought:
            self._emit(ev.CacheReset, ledger.epoch + 1)
        return not ledger.draining()

    def take_events(self) -> list[KeysChanged]:
        """What came to the host and left it since the last take, as vLLM's `OffloadingEvent`s."""
        return [] if self.publisher is None else self.publisher.take_events()

    def take_kv_events(self) -> list[KVCacheEvent]:
        """The same changes as KV events of the wire. One queue feeds both: choose a form, and keep to it."""
        return [] if self.publisher is None else self.publisher.take_kv_events()
