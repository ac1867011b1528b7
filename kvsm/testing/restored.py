"""Check that a ledger restored from its snapshot behaves like the live one, especially its eviction policy.

A policy whose snapshot lacks a part of its state works until the first restart. After the restart it chooses
other blocks. Some parts of a state matter only several uses later, so a comparison right after the restore is
not enough. Therefore the restored copy folds the same events as the live ledger, and is compared again and
again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvsm.core.ledger import Ledger
from kvsm.core.ledger.snapshot import restore, snapshot
from kvsm.errors import PropertyBroken
from kvsm.events import OffloadingEvent, StorePlanned
from kvsm.ids import to_list
from kvsm.properties import Property


class RestoredCopy:
    """A copy of `ledger`, restored from its current snapshot, that follows the live ledger.

    log: the events of the ledger, from the first one on; the copy folds events that are added later.
    """

    def __init__(self, ledger: Ledger, log: Sequence[OffloadingEvent]) -> None:
        self._ledger, self._log = ledger, log
        self._copy, self._folded = restore(snapshot(ledger)), len(log)
        self.check()

    def check(self) -> None:
        """Fold the new events of the log, then compare the answers of the two policies.

        Raises `PropertyBroken` (events are state) if the copy refuses an event, or if an answer differs.
        """
        name = f"policy {self._ledger.config.policy}, restored from its snapshot,"
        try:
            for event in self._log[self._folded :]:
                self._copy.apply(event)
        except Exception as error:
            message = f"{name} cannot fold event {self._copy.seq + 1}: {error!r}"
            raise PropertyBroken(Property.EVENTS_ARE_STATE, message) from error
        self._folded = len(self._log)
        own, restored = (self._answers(ledger) for ledger in (self._ledger, self._copy))
        for question, answer in own.items():
            if restored[question] != answer:
                message = f"{name} answers {question} with {restored[question]}; the live one with {answer}"
                raise PropertyBroken(Property.EVENTS_ARE_STATE, message)

    def _answers(self, ledger: Ledger) -> dict[str, Any]:
        policy = ledger.policy
        keys = {key: None for event in self._log if isinstance(event, StorePlanned) for key in event.keys}
        answers: dict[str, Any] = {"len": len(policy), "recall": policy.recall(list(keys))}
        for count in sorted({1, 2, 3, len(self._ledger.policy)}):
            choice = policy.choose(count, frozenset())
            answers[f"choose({count})"] = choice and {
                name: to_list(slots) for name, slots in choice._asdict().items()
            }
        return answers
