"""Which offers a decode engine copies."""

from __future__ import annotations

import logging

import pytest
from core_life import new_core

from kvsm.check.worlds.small_request import SmallRequest
from kvsm.core.scheduler import GroupKind, KVCacheGroup, SchedulerConfig
from kvsm.core.scheduler.groups import KeyLayout
from kvsm.core.scheduler.request_params import HandOverParams
from kvsm.core.scheduler.tracked import TrackedRequest
from kvsm.tiers.hand_over.incoming import IncomingHandOvers
from kvsm.tiers.hand_over.peer_messages import Answer, HandOverClaim, Offered, OfferedGroup

CHUNK = 3
CONFIG = SchedulerConfig(
    groups=(KVCacheGroup(4), KVCacheGroup(8, GroupKind.SLIDING_WINDOW, window=1)), hash_tokens=4
)


class OneAnswer:
    """A channel on which the prefill engine answers each claim with the same offer."""

    def __init__(self, offer: Offered) -> None:
        self.offer = offer
        self.answers: list[tuple[int, Answer]] = []

    def ask(self, ticket: int, engine: str, claim: HandOverClaim) -> None:  # noqa: ARG002
        self.answers.append((ticket, self.offer))

    def give_back(self, ticket: int, *, read: bool, had: bool = False) -> None:
        pass

    def take_answers(self) -> list[tuple[int, Answer]]:
        answers, self.answers = self.answers, []
        return answers

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("slots", "copies"),
    [((), 1), ((3,), 0)],
    ids=["of a group that needs none", "after the last full chunk of the prompt"],
)
def test_blocks_are_copied_if_the_prompt_has_a_key_of_each(slots: tuple[int, ...], copies: int) -> None:
    """The prompt of 13 tokens has one full chunk of the first group, and none of the second."""
    offer = Offered(8, (OfferedGroup(0, (5,)), OfferedGroup(1, slots)))
    core, _ = new_core(host_blocks=4, device_blocks=12, blocks_per_chunk=CHUNK)
    incoming = IncomingHandOvers(
        core, CONFIG, OneAnswer(offer), {}, lambda *_: b"", logging.getLogger("kvsm")
    )
    request = SmallRequest("d", range(13), parameters=HandOverParams("p", "r", "lease", 8).as_answer())
    core.arrive("d")
    incoming.arrived(TrackedRequest(request, CONFIG, KeyLayout.of(CONFIG, CHUNK)), request)
    jobs, _ = incoming.look()
    assert len(jobs) == copies
