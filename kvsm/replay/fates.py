"""Why a key cannot be matched: what became of its last block, and of the offers to store it since.

Only wanted keys are followed, so that a log of any size can be asked. That a key is gone is seen in the
ledger (the index named it before the event, and does not after); why it is gone is the event's to say.
"""

from __future__ import annotations

from collections.abc import Callable

from kvsm import events as ev
from kvsm.events import Direction, Owners
from kvsm.ledger import Ledger, TransferRecord
from kvsm.replay.concern import Concern
from kvsm.replay.fold import Moment
from kvsm.replay.render import render_owners


class Fates:
    """Follows the keys for which `wanted` is true. Call `before` and `after` around each event."""

    def __init__(self, wanted: Callable[[bytes], bool]) -> None:
        self._wanted = wanted
        self._gone: dict[bytes, str] = {}
        self._skipped: dict[bytes, str] = {}
        self._held: list[bytes] = []
        self._begin = self._last = 0
        """Events `_begin` to `_last` were seen; what came before the log, or got lost in a gap, was not."""

    def before(self, moment: Moment, found: Concern) -> None:
        """Note the wanted keys that the event may take away."""
        ledger, event = moment.ledger, moment.event
        if event.seq != self._last + 1:
            self._begin = event.seq
            self._gone.clear()
            self._skipped.clear()
        self._last = event.seq
        self._held = [key for slot in found.slots if self._is_held(ledger, slot, key := ledger.key_of[slot])]
        if isinstance(event, ev.StoreSkipped):
            for key in filter(self._wanted, event.keys):
                self._skipped[key] = f"offered at event {event.seq} and skipped ({event.reason})"
        elif isinstance(event, ev.StorePlanned):
            for key in filter(self._wanted, event.keys):
                self._skipped.pop(key, None)

    def after(self, moment: Moment, ended: TransferRecord | None) -> None:
        """Tell those that are gone why."""
        for key in self._held:
            if key not in moment.ledger.index:
                self._gone[key] = _cause(moment, ended)
                self._skipped.pop(key, None)

    def why(self, ledger: Ledger, key: bytes) -> str:
        """Why `key` cannot be matched now."""
        slot = ledger.index.get(key)
        if slot is not None:
            return f"{describe_transfer(ledger, ledger.generation[slot])} is still in flight"
        gone, skipped = self._gone.get(key), self._skipped.get(key)
        if gone is None:
            never = (
                f"not stored since event {self._begin}, where what is known begins"
                if self._begin
                else "never stored"
            )
            return f"{never}; {skipped}" if skipped else never
        return f"{gone}; {skipped} since" if skipped else gone

    def _is_held(self, ledger: Ledger, slot: int, key: bytes) -> bool:
        return self._wanted(key) and ledger.index.get(key) == slot


def _cause(moment: Moment, ended: TransferRecord | None) -> str:
    event = moment.event
    if isinstance(event, ev.BlocksEvicted):
        return f"evicted at event {event.seq} to make room for {made_room_for(moment)}"
    if isinstance(event, ev.CacheReset):
        return f"reset at event {event.seq}"
    named = "" if ended is None else _name(ended)
    if isinstance(event, ev.TransferCancelled):
        return f"{named} was cancelled at event {event.seq}"
    if isinstance(event, ev.TransferLost):
        return f"{named} was lost at event {event.seq}"
    return f"{named} failed at event {event.seq}"


def makers_of(moment: Moment) -> Owners | None:
    """The owners of the store for which the moment's event evicts; None if it does not, or the log ends
    there."""
    event, following = moment.event, moment.following
    if isinstance(event, ev.BlocksEvicted) and isinstance(following, ev.StorePlanned):
        return following.owners if following.seq == event.transfer else None
    return None


def made_room_for(moment: Moment) -> str:
    """What the eviction of this moment is for: `store 12 of request r1`."""
    event, makers = moment.event, makers_of(moment)
    assert isinstance(event, ev.BlocksEvicted)
    if makers is None:
        return f"transfer {event.transfer}"
    return f"store {event.transfer} of {render_owners(makers)}"


def kind_of(transfer: TransferRecord) -> str:
    return "store" if transfer.direction is Direction.STORE else "load"


def describe_transfer(ledger: Ledger, id: int) -> str:
    """`store 12 of requests r1, r2`; just `transfer 12` if it is not live."""
    transfer = ledger.transfers.get(id)
    return f"transfer {id}" if transfer is None else _name(transfer)


def _name(transfer: TransferRecord) -> str:
    return f"{kind_of(transfer)} {transfer.id} of {render_owners(transfer.owners)}"
