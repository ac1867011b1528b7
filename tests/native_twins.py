"""Two ledgers that fold the same events, one with each body, and are compared after each of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from kvsm import native
from kvsm.events import OffloadConfig, OffloadingEvent
from kvsm.ledger import Ledger, NativeLedger, TransferRecord
from kvsm.snapshot import snapshot
from kvsm.worlds.audited import difference, ledger_difference


class Heard:
    """A listener that keeps what it hears."""

    def __init__(self) -> None:
        self.all: list[tuple[Any, ...]] = []

    def stored(self, transfer: int, keys: Iterable[bytes]) -> None:
        self.all.append(("stored", transfer, *keys))

    def removed(self, keys: Iterable[bytes]) -> None:
        self.all.append(("removed", *keys))

    def cleared(self) -> None:
        self.all.append(("cleared",))


class Outcome(NamedTuple):
    """What `apply` did: the transfer that it returned, or the error that it raised."""

    ended: TransferRecord | None
    error: BaseException | None


class Twins:
    """Applies each event to both. Raises `AssertionError` at the first difference, field by field."""

    def __init__(self, config: OffloadConfig) -> None:
        self.native = Ledger(config, Heard())
        assert isinstance(self.native, NativeLedger), native.WHY_NOT
        with native.without():
            self.python = Ledger(config, Heard())
        assert not isinstance(self.python, NativeLedger)

    def apply(self, event: OffloadingEvent) -> Outcome:
        """Apply it, and compare what both did and what both are."""
        before = saved(self.native)
        ours, theirs = _outcome(self.native, event), _outcome(self.python, event)
        assert difference(ours.ended, theirs.ended) is None, event
        assert type(ours.error) is type(theirs.error), (event, ours.error, theirs.error)
        if ours.error is not None and theirs.error is not None:
            assert str(ours.error) == str(theirs.error)
            assert vars(ours.error) == vars(theirs.error)
        assert self.difference() is None, (event, self.difference())
        after = saved(self.native)
        assert after == saved(self.python)
        if is_refusal(ours):
            assert after == before, event
        return ours

    def difference(self) -> str | None:
        """The first field in which the two differ."""
        heard = (self.native.listener, self.python.listener)
        assert all(isinstance(one, Heard) for one in heard)
        return ledger_difference(self.native, self.python) or difference(*(vars(one) for one in heard))


def saved(ledger: Ledger) -> bytes | str:
    """Its snapshot. What was folded with wrong types may be impossible to save: then the error's text."""
    try:
        return snapshot(ledger)
    except Exception as error:
        return repr(error)


def is_refusal(outcome: Outcome) -> bool:
    """Whether the event was refused by a rule, and not by a type that nobody expects."""
    return type(outcome.error).__name__ in ("IllegalTransition", "InvalidEvent")


def _outcome(ledger: Ledger, event: OffloadingEvent) -> Outcome:
    try:
        return Outcome(ledger.apply(event), None)
    except Exception as error:
        return Outcome(None, error)
