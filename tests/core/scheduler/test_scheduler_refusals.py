"""What requests do after the eviction policy has refused to store some of their blocks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from scheduler_traffic import FULL, Hand, keys_of, of_kind

from kvsm import events as ev
from kvsm.check.worlds.small_request import HASH_TOKENS, SmallRequest
from kvsm.core.policies.lru import LRUPolicy
from kvsm.events import SkipReason
from kvsm.ids import to_list
from kvsm.testing import assert_verifies


class AtMost(LRUPolicy):
    """Admits at most `most` blocks of a run, if room is needed."""

    most = 0

    def admits(
        self,
        keys: Sequence[bytes],  # noqa: ARG002
        runs: Sequence[int],
        free: int,  # noqa: ARG002
        protected: Collection[int],  # noqa: ARG002
    ) -> Sequence[int]:
        return [min(count, self.most) for count in runs]


def full_host(**core: Any) -> Hand:
    """A host with one free slot, whose policy admits nothing that needs another one."""
    AtMost.most = 0
    hand = Hand(FULL, core={"host_blocks": 4, "policy": f"{__name__}:AtMost", **core})
    hand.store(SmallRequest("others", range(1000, 1000 + 3 * HASH_TOKENS + 1), 9), [0, 1, 2, 3])
    assert len(hand.core.ledger.free) == 1
    return hand


def refused(hand: Hand, name: str) -> list[bytes]:
    skips = of_kind(hand, ev.StoreSkipped)
    mine = [skip for skip in skips if skip.reason is SkipReason.NOT_ADMITTED and skip.owners[0][0] == name]
    return [key for skip in mine for key in skip.keys]


def behind_a_waiting_block(hand: Hand) -> tuple[SmallRequest, int]:
    """A request with the first block of another one, whose store is in flight, and two new blocks.

    Returns it, and the transfer of that store.
    """
    first, second = SmallRequest("first", range(5), 9), SmallRequest("second", [*range(4), *range(50, 59)], 9)
    hand.admit(first, [10, 11])
    hand.admit(second, [20, 21, 22, 23])
    hand.compute(first)
    (job,) = hand.step(first).stores
    hand.compute(second)
    assert hand.step(second).stores == ()
    return second, job.transfer


def test_a_refused_block_behind_a_waiting_one_is_offered_once() -> None:
    """Offered in each step, it would fill the log and look to the policy like a block in demand."""
    hand = full_host()
    request, transfer = behind_a_waiting_block(hand)
    for _ in range(5):
        hand.step(request)
    hand.report(transfer)
    hand.step(request)
    hand.scheduler.request_finished(request, [[20, 21, 22, 23]])
    assert refused(hand, "second") == keys_of(request)[1:]
    assert_verifies(hand.log)


def test_a_block_behind_a_refused_one_is_refused_unasked() -> None:
    """It is offered with the waiting block, and does not follow that one: nothing could hit it."""
    hand = full_host()
    request, _ = behind_a_waiting_block(hand)
    AtMost.most = 9
    for token in range(4):
        request.append(token)
    request.tables[0].append(24)
    hand.compute(request)
    assert hand.step(request, new_block_ids={"second": [[24]]}).stores == ()
    assert refused(hand, "second") == keys_of(request)[1:]


def test_a_preempted_request_asks_again() -> None:
    """It computes its blocks anew, and the policy may have learned since."""
    hand = full_host()
    request, transfer = behind_a_waiting_block(hand)
    hand.step(request, preempted=["second"])
    hand.report(transfer)
    AtMost.most = 9
    assert hand.admit(request, [30, 31, 32, 33]) == 4
    hand.end(hand.step(request))
    hand.compute(request)
    (job,) = hand.step(request).stores
    assert to_list(job.device_blocks) == [31, 32]
    assert refused(hand, "second") == keys_of(request)[1:]
