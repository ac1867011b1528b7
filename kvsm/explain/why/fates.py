"""Explain why a key cannot be matched: how its last block ended, and why later offers were skipped.

Only wanted keys are followed, so memory does not grow with the log. A key is gone if the ledger's index has
it before an event and not after it. The event's kind gives the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvsm import events as ev
from kvsm.core.ledger import Ledger, TransferRecord
from kvsm.core.log.fold import Moment
from kvsm.events import OffloadingEvent, Owners
from kvsm.explain.story.concern import Concern
from kvsm.explain.story.render import render, render_owners


class Fates:
    """Follows the keys for which `wanted` is true. Call `before` and `after` around each event."""

    def __init__(self, wanted: Callable[[bytes], bool]) -> None:
        self._wanted = wanted
        self._gone: dict[bytes, str] = {}
        self._skipped: dict[bytes, str] = {}
        self._held: list[bytes] = []
        self._makers: dict[bytes, str] = {}
        """At a restart: held key -> the name of its store. The event names none of its stores."""
        self._begin = self._last = 0
        """First and last event seen since the log began or its last gap ended."""

    def before(self, moment: Moment, found: Concern) -> None:
        """Note the wanted keys that the event may remove from the index."""
        ledger, event = moment.ledger, moment.event
        if event.seq != self._last + 1:
            self._begin = event.seq
            self._gone.clear()
            self._skipped.clear()
        self._last = event.seq
        named = [(slot, ledger.key_of[slot]) for slot in found.slots]
        self._held = [key for slot, key in named if self._wanted(key) and ledger.index.get(key) == slot]
        self._makers = {}
        if isinstance(event, ev.Restarted):
            for key in self._held:
                self._makers[key] = describe_transfer(ledger, ledger.generation[ledger.index[key]])
        elif isinstance(event, ev.StoreSkipped):
            for key in filter(self._wanted, event.keys):
                self._skipped[key] = f"offered at event {event.seq} and skipped ({event.reason})"
        elif isinstance(event, ev.StorePlanned):
            for key in filter(self._wanted, event.keys):
                self._skipped.pop(key, None)

    def after(self, moment: Moment, ended: TransferRecord | None) -> None:
        """Note why the removed keys are gone. ended: the transfer that the event ended; None if none."""
        for key in self._held:
            if key not in moment.ledger.index:
                cause = _CAUSES.get(type(moment.event), _other_cause)
                reason = cause(moment, moment.event, ended)
                self._gone[key] = f"{self._makers[key]} {reason}" if key in self._makers else reason
                self._skipped.pop(key, None)

    def why(self, ledger: Ledger, key: bytes) -> str:
        """Why `key` cannot be matched now."""
        slot = ledger.index.get(key)
        if slot is not None:
            return f"{describe_transfer(ledger, ledger.generation[slot])} is still in flight"
        gone, skipped = self._gone.get(key), self._skipped.get(key)
        if gone is not None:
            return f"{gone}; {skipped} since" if skipped else gone
        never = f"not stored since event {self._begin}, where what is known begins"
        if not self._begin:
            never = "never stored"
        return f"{never}; {skipped}" if skipped else never


def _ended_transfer(how: str) -> Callable[[Moment, Any, TransferRecord | None], str]:
    def cause(moment: Moment, event: Any, ended: TransferRecord | None) -> str:
        named = describe_transfer(moment.ledger, event.transfer) if ended is None else _name(ended)
        return f"{named} {how} at event {event.seq}"

    return cause


def _other_cause(_moment: Moment, event: OffloadingEvent, _ended: TransferRecord | None) -> str:
    return f"removed at event {event.seq}: {render(event)}"


_CAUSES: dict[type[OffloadingEvent], Callable[[Moment, Any, TransferRecord | None], str]] = {
    ev.BlocksEvicted: lambda moment, event, _: (
        f"evicted at event {event.seq} to make room for {made_room_for(moment)}"
    ),
    ev.CacheReset: lambda _moment, event, _: f"reset at event {event.seq}",
    ev.Restarted: lambda _moment, event, _: (
        f"had not ended when another process went on at event {event.seq} "
        f"(before it: {event.ended or 'the log was closed'})"
    ),
    ev.TransferCancelled: _ended_transfer("was cancelled"),
    ev.TransferLost: _ended_transfer("was lost"),
    ev.WorkerReported: _ended_transfer("failed"),
}
"""The text for why an event removed a key. Other kinds of events are rendered by `_other_cause`."""


def makers_of(moment: Moment) -> Owners | None:
    """The owners of the store that the moment's event makes room for.

    None if the event is no eviction, or if the log lacks the store's event.
    """
    event, following = moment.event, moment.following
    if isinstance(event, ev.BlocksEvicted) and isinstance(following, ev.StorePlanned):
        return following.owners if following.seq == event.transfer else None
    return None


def made_room_for(moment: Moment) -> str:
    """The store that this eviction makes room for: `store 12 of request r1`."""
    event, makers = moment.event, makers_of(moment)
    assert isinstance(event, ev.BlocksEvicted)
    if makers is None:
        return f"transfer {event.transfer}"
    return f"store {event.transfer} of {render_owners(makers)}"


def kind_of(transfer: TransferRecord) -> str:
    """`store` or `load`."""
    return transfer.direction.name.lower()


def describe_transfer(ledger: Ledger, id: int) -> str:
    """`store 12 of requests r1, r2`; `transfer 12` if the ledger has no such transfer."""
    transfer = ledger.transfers.get(id)
    return f"transfer {id}" if transfer is None else _name(transfer)


def _name(transfer: TransferRecord) -> str:
    return f"{kind_of(transfer)} {transfer.id} of {render_owners(transfer.owners)}"
