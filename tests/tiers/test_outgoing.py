"""What a prefill engine keeps for decode engines that never come. It is bounded, and waiting is free."""

from __future__ import annotations

import logging
import time
from types import SimpleNamespace
from typing import Any

import pytest
from core_life import new_core
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from kvsm.core.offloader import Offloader
from kvsm.core.scheduler.groups import KVCacheGroup, SchedulerConfig
from kvsm.testing import assert_verifies
from kvsm.tiers.hand_over.leases import LeaseEnd, LeaseTable
from kvsm.tiers.hand_over.outgoing import OutgoingHandOvers
from kvsm.tiers.hand_over.peer_messages import HandOverClaim, Offered

BLOCK_TOKENS = 16


def prompt_keys(prompt: int, blocks: int) -> list[bytes]:
    return [b"%08d%08d" % (prompt, block) for block in range(blocks)]


class PrefillEngine:
    """A core, and the requests of it that another engine will decode. Time stands until a test moves it."""

    def __init__(self, slots: int, share: float = 0.5, chunk: int = 1) -> None:
        self.core, self.log = new_core(host_blocks=slots, device_blocks=slots * chunk, blocks_per_chunk=chunk)
        self.now = 0.0
        self.leases = LeaseTable(60.0, clock=lambda: self.now)
        self.outgoing = OutgoingHandOvers(
            self.core,
            SchedulerConfig(groups=(KVCacheGroup(BLOCK_TOKENS),)),
            "p",
            self.leases,
            lambda request, _: request.prompt,
            logging.getLogger("kvsm"),
            share,
        )

    def store(self, prompt: int, blocks: int) -> bool:
        """Whether there was room for all of it."""
        prepared = self.core.prepare_store("own", prompt_keys(prompt, blocks), range(blocks))
        if prepared.job is not None:
            self.core.submit([prepared.job.transfer])
            self.core.report(prepared.job.transfer, 0, True)
        return self.hits(prompt, blocks) == blocks

    def hits(self, prompt: int, blocks: int) -> int:
        return sum(self.core.lookup(key).value == "hit" for key in prompt_keys(prompt, blocks))

    def offer(self, prompt: int, blocks: int) -> dict[str, Any] | None:
        """A request with this prompt has finished."""
        tracked: Any = SimpleNamespace(name=f"cmpl-{prompt}", all_keys=lambda: [prompt_keys(prompt, blocks)])
        request = SimpleNamespace(num_prompt_tokens=blocks * BLOCK_TOKENS + 1, prompt=b"%d" % prompt)
        return self.outgoing.offer(tracked, request)

    def claim(self, answer: dict[str, Any], prompt: int, reader: int) -> Offered:
        name, tokens = answer["remote_hand_over"], answer["remote_num_tokens"]
        offered = self.leases.claim(HandOverClaim(name, b"%d" % prompt, tokens, {}), reader)
        assert isinstance(offered, Offered)
        return offered

    def ended(self, how: LeaseEnd) -> int:
        """How many hand-overs have ended in this way, as the log says."""
        return [getattr(event, "hand_over", "") for event in self.log].count(how.value)

    def pinned(self) -> set[int]:
        core: Offloader = self.core
        return {slot for one in core.ledger.requests.values() for slot in core.ledger.live_pins(one)}


def test_clients_that_send_nobody_hold_half_of_the_pool_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    """The others store what they compute. What is given up first is the oldest, and the log says why."""
    engine = PrefillEngine(slots=256)
    answers = []
    for prompt in range(16):
        assert engine.store(prompt, 16), "a client that fetches nothing keeps others from storing"
        answers.append(engine.offer(prompt, 16))
    assert len(engine.pinned()) == 128
    assert engine.ended(LeaseEnd.CROWDED_OUT) == 8
    assert caplog.messages[0] == (
        "kvsm: the blocks of request cmpl-0 are given up before an engine has taken them: all hand-overs "
        "hold at most 128 host slots (hand_over_share)"
    )
    for prompt, answer in list(enumerate(answers))[8:]:
        assert answer is not None
        engine.claim(answer, prompt, reader=prompt)
    assert engine.store(99, 128)
    assert_verifies(engine.log)


def test_a_chunk_that_generated_tokens_fill_is_not_handed_over() -> None:
    """The decode engine has no key of it, and would refuse all blocks."""
    engine = PrefillEngine(slots=8, chunk=2)
    keys = prompt_keys(0, 2)
    job = engine.core.prepare_store("own", keys, range(4)).job
    assert job is not None
    engine.core.submit([job.transfer])
    engine.core.report(job.transfer, 0, True)
    tracked: Any = SimpleNamespace(name="cmpl-0", all_keys=lambda: [keys])
    answer = engine.outgoing.offer(
        tracked, SimpleNamespace(num_prompt_tokens=3 * BLOCK_TOKENS + 1, prompt=b"0")
    )
    assert answer is not None
    offered = engine.claim(answer, 0, reader=1)
    assert (offered.num_tokens, len(offered.groups[0].slots)) == (2 * BLOCK_TOKENS, 1)


def test_an_engine_that_reads_is_not_disturbed_and_a_new_one_without_room_hands_nothing_over() -> None:
    engine = PrefillEngine(slots=8)
    for prompt in range(2):
        engine.store(prompt, 2)
        answer = engine.offer(prompt, 2)
        assert answer is not None
        engine.claim(answer, prompt, reader=prompt + 1)
    engine.store(2, 2)
    assert engine.offer(2, 2) is None
    assert engine.ended(LeaseEnd.CROWDED_OUT) == 1
    assert len(engine.pinned()) == 4


def test_a_prompt_that_is_longer_than_the_share_is_handed_over_in_part() -> None:
    engine = PrefillEngine(slots=32, share=0.3)
    engine.store(0, 20)
    answer = engine.offer(0, 20)
    assert answer is not None
    offered = engine.claim(answer, 0, reader=1)
    assert (offered.num_tokens, len(offered.groups[0].slots)) == (9 * BLOCK_TOKENS, 9)
    assert engine.pinned() == set(offered.groups[0].slots)


def test_requests_with_one_prompt_share_its_blocks_and_crowd_nobody_out() -> None:
    engine = PrefillEngine(slots=64)
    engine.store(0, 32)
    for _ in range(20):
        assert engine.offer(0, 32) is not None
    assert len(engine.pinned()) == 32
    assert not engine.leases.has_ended()
    engine.now = 60.0
    engine.outgoing.look()
    assert engine.ended(LeaseEnd.EXPIRED) == 20
    assert not engine.pinned()


KINDS = ("offer", "claim", "take", "wait", "reset")


@settings(max_examples=examples(30), deadline=None)
@given(
    actions=st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 5)), max_size=30),
    share=st.sampled_from([0.1, 0.5, 1.0]),
)
def test_however_they_end_the_share_is_counted_right(actions: list[tuple[str, int]], share: float) -> None:
    """Prompts of different lengths that share blocks with nobody, taken, read, expired and reset."""
    engine, out = PrefillEngine(slots=24, share=share), []
    for what, number in actions:
        if what == "offer":
            engine.store(number, number + 1)
            if (answer := engine.offer(number, number + 1)) is not None:
                out.append((answer, number))
        elif what in ("claim", "take") and out:
            answer, prompt = out[number % len(out)]
            asked = HandOverClaim(answer["remote_hand_over"], b"%d" % prompt, answer["remote_num_tokens"], {})
            engine.leases.claim(asked, 1)
            if what == "take":
                engine.leases.give_back(asked.hand_over, 1, read=True)
        elif what == "wait":
            engine.now += 10.0 * number
        elif what == "reset":
            engine.outgoing.reset()
            engine.core.reset()
        engine.outgoing.look()
        assert engine.outgoing._held == len(engine.pinned()) <= max(1, int(24 * share))
    engine.outgoing.close()
    assert engine.outgoing._held == engine.outgoing._holders.sum() == len(engine.pinned()) == 0


def cpu_seconds_of_a_step(pending: int) -> float:
    """Of the least expensive of some steps in which nothing changes."""
    engine = PrefillEngine(slots=256)
    engine.store(0, 64)
    for _ in range(pending):
        assert engine.offer(0, 64) is not None
    found = []
    for _ in range(20):
        began = time.process_time()
        for _ in range(50):
            engine.outgoing.look()
            engine.outgoing.has_ended()
        found.append((time.process_time() - began) / 50)
    return min(found)


def test_a_step_costs_the_same_with_any_number_of_hand_overs_that_wait() -> None:
    """CPU time. A walk over all of them would take ten times as long for ten times as many."""
    few, many = cpu_seconds_of_a_step(100), cpu_seconds_of_a_step(1_000)
    assert many < 3 * few + 20e-6, (few, many)


def test_one_that_ends_costs_the_same_with_any_number_of_others() -> None:
    """The table finds it without looking at the others."""

    def cpu_seconds(pending: int) -> float:
        engine = PrefillEngine(slots=256)
        engine.store(0, 8)
        answers = [engine.offer(0, 8) for _ in range(pending)]
        began = time.process_time()
        for place, answer in enumerate(answers[-50:]):
            assert answer is not None
            engine.claim(answer, 0, reader=place + 1)
            engine.leases.leave(place + 1)
            engine.outgoing.look()
        return (time.process_time() - began) / 50

    few = min(cpu_seconds(100) for _ in range(3))
    many = min(cpu_seconds(1_000) for _ in range(3))
    assert many < 3 * few + 50e-6, (few, many)
