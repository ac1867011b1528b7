"""An eviction policy beside a copy restored from its snapshot: both must choose alike, for good.

A policy whose snapshot lacks a part of its state works until the first restart. Then it chooses otherwise
than the process that wrote the log would have. One restore does not show every such state: some matter only
some uses later. So the copy lives on: it hears every call, and each of its answers is compared. An answer
that differs breaks "events are state" (S10).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from kvsm.errors import PropertyBroken
from kvsm.ids import to_list
from kvsm.ledger import Ledger
from kvsm.policies import Choice, EvictionPolicy, make_policy
from kvsm.properties import Property


def watch_policy(ledger: Ledger) -> WatchedPolicy:
    """The ledger's policy under watch. A reset of the cache gives a ledger a new policy: call it again."""
    policy = cast(Any, ledger.policy)
    if not isinstance(policy, WatchedPolicy):
        policy = WatchedPolicy(ledger.policy, ledger.config.policy, ledger.config.host_blocks)
        ledger.policy = cast(EvictionPolicy, policy)
    return policy


class WatchedPolicy:
    """Passes every call on to a policy and to its restored copy, and compares their answers."""

    def __init__(self, policy: EvictionPolicy, name: str, capacity: int) -> None:
        self._policy, self._name, self._capacity = policy, name, capacity
        self.restart()

    def restart(self) -> None:
        """Make another copy, from the snapshot of this moment."""
        saved = self._policy.snapshot()
        self._restored = make_policy(self._name, self._capacity)
        self._restored.restore(saved)
        for question in ("__len__", "snapshot"):
            self._compare(question, getattr(self._policy, question)(), getattr(self._restored, question)())
        for count in (1, len(self)):
            self.choose(count, frozenset())

    def __len__(self) -> int:
        return len(self._policy)

    def __contains__(self, slot: int) -> bool:
        return slot in self._policy

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def both(*arguments: Any) -> Any:
            answer = getattr(self._policy, name)(*arguments)
            try:
                restored = getattr(self._restored, name)(*arguments)
            except Exception as error:
                raise PropertyBroken(
                    Property.EVENTS_ARE_STATE, f"{self._restored_one} refuses {name}: {error!r}"
                ) from error
            self._compare(name, answer, restored)
            return answer

        return both

    def _compare(self, question: str, answer: Any, restored: Any) -> None:
        if _plain(answer) != _plain(restored):
            told = f"answers {question} with {_plain(restored)}; the policy itself with {_plain(answer)}"
            raise PropertyBroken(Property.EVENTS_ARE_STATE, f"{self._restored_one} {told}")

    @property
    def _restored_one(self) -> str:
        return f"policy {self._name}, restored from its snapshot,"


def _plain(answer: Any) -> Any:
    """An answer in a form that can be compared and read."""
    if isinstance(answer, Choice):
        return {"victims": to_list(answer.victims), "moved": to_list(answer.moved)}
    return answer
