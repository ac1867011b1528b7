"""The things that have a life story in a log: a host slot, a key, a request, a transfer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol

from kvsm import events as ev
from kvsm.core.ledger import Ledger
from kvsm.core.log.fold import Moment
from kvsm.events import Owners
from kvsm.explain.story.concern import Concern, names_of
from kvsm.explain.story.names import key_pattern
from kvsm.explain.why.fates import makers_of
from kvsm.ids import to_list
from kvsm.states.block import BLOCK_WORDS
from kvsm.states.request import RequestState
from kvsm.states.transfer import LIVE

MOST_TOLD = 4
"""Most blocks whose states one line shows."""

_LIVE = frozenset(state.name for state in LIVE)

NOT_THERE, NOT_PLANNED = "not there", "not planned"
"""The state of a request, and the state of a transfer, that the ledger does not have."""


class Life(Protocol):
    """A host slot, key, request or transfer whose life story can be made."""

    def met_by(self, moment: Moment, found: Concern) -> Sequence[int] | None:
        """The thing's slots that the event concerns; None if the event does not concern the thing at all."""

    def state(self, ledger: Ledger) -> str:
        """The thing's state, as text."""

    def waits(self, state: str) -> bool:
        """Whether the thing waits for a copy while it is in this state."""

    def is_open(self, state: str) -> bool:
        """Whether, in this state, the thing has begun and not ended; False for slots and keys."""


class BlockLife(NamedTuple):
    """A host slot, through all blocks that it held."""

    slot: int

    def met_by(self, _moment: Moment, found: Concern) -> Sequence[int] | None:
        return (self.slot,) if self.slot in found.slots else None

    def state(self, ledger: Ledger) -> str:
        return BLOCK_WORDS.describe(ledger.blocks.words[self.slot])

    def waits(self, _state: str) -> bool:
        return False

    def is_open(self, _state: str) -> bool:
        return False

    def __str__(self) -> str:
        return f"slot {self.slot}"


class KeyLife:
    """All blocks whose keys match a text, as `key_pattern` parses it.

    A state covers only the matching keys that the current event concerns. Raises `ConfigError` if the text is
    no key.
    """

    def __init__(self, text: str) -> None:
        self._pattern = key_pattern(text)
        self.is_named = self._pattern.fits
        self._met: dict[bytes, None] = {}
        """The matching keys that the current event concerns."""

    def met_by(self, moment: Moment, found: Concern) -> Sequence[int] | None:
        ledger, event = moment.ledger, moment.event
        self._met = dict.fromkeys(filter(self.is_named, found.keys))
        if isinstance(event, ev.StorePlanned):
            return [slot for slot, key in zip(to_list(event.slots), event.keys) if key in self._met] or None
        slots = [slot for slot in found.slots if self._is_held(ledger, slot)]
        self._met.update(dict.fromkeys(ledger.key_of[slot] for slot in slots))
        return slots if self._met else None

    def state(self, ledger: Ledger) -> str:
        held = [ledger.index[key] for key in self._met if key in ledger.index]
        words = [
            f"slot {slot} {BLOCK_WORDS.describe(ledger.blocks.words[slot])}" for slot in held[:MOST_TOLD]
        ]
        return "; ".join(words) + ("; ..." if len(held) > MOST_TOLD else "") if held else "not on the host"

    def _is_held(self, ledger: Ledger, slot: int) -> bool:
        key = ledger.key_of[slot]
        return self.is_named(key) and ledger.index.get(key) == slot

    def waits(self, _state: str) -> bool:
        return False

    def is_open(self, _state: str) -> bool:
        return False

    def __str__(self) -> str:
        return f"key {self._pattern}"


class RequestLife(NamedTuple):
    """A request. If several requests had the same id, the story covers all of them.

    name: the full id in the log; `kvsm.explain.story.names.full_name` finds it by the id that a client sent.
    """

    name: str

    def met_by(self, moment: Moment, found: Concern) -> Sequence[int] | None:
        named = (*found.requests, *names_of(makers_of(moment) or ()))
        return () if self.name in named else None

    def state(self, ledger: Ledger) -> str:
        request = ledger.requests.get(self.name)
        return NOT_THERE if request is None else request.state.name

    def waits(self, state: str) -> bool:
        return state in (RequestState.DEFERRED.name, RequestState.LOADING.name)

    def is_open(self, state: str) -> bool:
        return state not in (NOT_THERE, RequestState.RELEASED.name)

    def share(self, owners: Owners, keys: Sequence[bytes]) -> list[bytes]:
        """The keys of a store that this request owns."""
        ends = [0, *accumulate(count for _, count in owners)]
        own = [span for (owner, _), span in zip(owners, pairwise(ends)) if owner == self.name]
        return [key for start, end in own for key in keys[start:end]]

    def __str__(self) -> str:
        return f"request {self.name}"


class TransferLife(NamedTuple):
    """A store or a load."""

    id: int

    def met_by(self, _moment: Moment, found: Concern) -> Sequence[int] | None:
        return () if self.id in found.transfers else None

    def state(self, ledger: Ledger) -> str:
        transfer = ledger.transfers.get(self.id)
        return NOT_PLANNED if transfer is None else transfer.state.name

    def waits(self, state: str) -> bool:
        return self.is_open(state)

    def is_open(self, state: str) -> bool:
        return state in _LIVE

    def __str__(self) -> str:
        return f"transfer {self.id}"
