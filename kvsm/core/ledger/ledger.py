"""`Ledger.apply`, which folds one event into the state, and the handler of each kind of event."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from kvsm import events as ev
from kvsm.core import native
from kvsm.core.ledger import cache, loads, requests, restart, stores, times, transfers
from kvsm.core.ledger.records import TransferRecord
from kvsm.core.ledger.state import LedgerState
from kvsm.errors import InvalidEvent
from kvsm.events import KINDS, OffloadingEvent
from kvsm.ids import MalformedIds


class Ledger(LedgerState):
    """The state and its fold. Read anything; change it by `apply` alone."""

    def __new__(cls, *_: object, **__: object) -> Ledger:
        """A ledger with the body that runs (`kvsm.core.native`)."""
        return super().__new__(NativeLedger if cls is Ledger and native.runs() else cls)

    def apply(self, event: OffloadingEvent) -> TransferRecord | None:
        """Fold one event. Returns the transfer that it ended, or None.

        Raises `IllegalTransition` or `InvalidEvent`, with nothing changed, if the event cannot follow.
        """
        if event.seq != self.seq + 1:
            raise InvalidEvent(event.seq, f"expected event {self.seq + 1}")
        try:
            ended = HANDLERS[type(event)](self, event)
        except MalformedIds as error:  # Handlers unpack before they change anything.
            raise InvalidEvent(event.seq, str(error)) from None
        self.seq = event.seq
        self.step = event.step
        return ended

    def apply_all(self, events: Iterable[OffloadingEvent]) -> None:
        """Fold events in their order. Raises like `apply`; the events before the refused one stay folded."""
        for event in events:
            self.apply(event)


def log_opened(ledger: LedgerState, event: ev.LogOpened) -> None:
    """The first event of a log."""
    if ledger.seq != 0 or event.config != ledger.config:
        raise InvalidEvent(event.seq, "the log opens once, and with this ledger's configuration")
    ledger.kept, ledger.weights = event.kept, event.weights


def only_recorded(ledger: LedgerState, event: OffloadingEvent) -> None:
    """Change nothing: the event is only for readers of the log."""


report_rejected = step_ended = hint_answered = only_recorded


def _handler(kind: type[OffloadingEvent]) -> Callable[[LedgerState, Any], TransferRecord | None]:
    """Return the function of this package that is named after a kind of event."""
    name = re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()
    for functions in (globals(), *map(vars, (requests, stores, loads, transfers, cache, restart, times))):
        if name in functions:
            found: Callable[[LedgerState, Any], TransferRecord | None] = functions[name]
            return found
    raise NotImplementedError(f"no function {name} in kvsm/core/ledger/ folds {kind.__name__}")


HANDLERS = {kind: _handler(kind) for kind in KINDS}
"""What each kind of event does to a ledger. A handler checks everything before it changes anything."""


class NativeLedger(native.FoldBody, Ledger):
    """A ledger whose `apply` is the native body's. It leaves to `Ledger.apply` what it does not fold."""


native.connect()
