"""A session keeps its blocks while its tool runs, within the shares, and its client is told what it got."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from core_life import new_core
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from kvsm.check.worlds.small_request import HASH_TOKENS, SmallRequest
from kvsm.core import native
from kvsm.core.ledger import Ledger
from kvsm.core.ledger.snapshot import digest
from kvsm.core.scheduler import session_leases
from kvsm.core.scheduler.groups import KeyLayout, KVCacheGroup, SchedulerConfig
from kvsm.core.scheduler.request_params import AgentHint, read_request_params
from kvsm.core.scheduler.session_leases import SessionLeases
from kvsm.core.scheduler.tracked import TrackedRequest
from kvsm.events import HintAnswered, HintOutcome
from kvsm.testing import assert_verifies

CONFIG = SchedulerConfig(groups=(KVCacheGroup(HASH_TOKENS),), hash_tokens=HASH_TOKENS)
KEEP = {"cache_control": {"type": "ephemeral", "ttl": 60}}
EVICT = {"context_management": {"edits": [{"type": "evict"}]}}


class AgentEngine:
    """A core whose requests end with hints. Time stands until a test moves it."""

    def __init__(self, slots: int, share: float = 0.25, **options: object) -> None:
        self.core, self.log = new_core(host_blocks=slots, device_blocks=slots, **options)
        self.now = 0.0
        self.leases = SessionLeases(self.core, CONFIG, share, clock=lambda: self.now)

    def tracked(self, prompt: int, blocks: int, hint: Mapping[str, Any] | None = None) -> TrackedRequest:
        tokens = [1000 * prompt + n for n in range(blocks * HASH_TOKENS + 1)]
        request = SmallRequest(f"cmpl-{prompt}", tokens, parameters={"agent_hint": hint})
        return TrackedRequest(request, CONFIG, KeyLayout.of(CONFIG, self.core.config.blocks_per_chunk))

    def store(self, prompt: int, blocks: int, reported: bool = True) -> int:
        """Store what a request has computed. Returns the transfer."""
        keys = self.tracked(prompt, blocks).all_keys()[0]
        job = self.core.prepare_store(f"own-{prompt}", keys, range(blocks)).job
        assert job is not None
        self.core.submit([job.transfer])
        if reported:
            self.core.report(job.transfer, 0, True)
        return job.transfer

    def hits(self, prompt: int, blocks: int) -> int:
        keys = self.tracked(prompt, blocks).all_keys()[0]
        return sum(self.core.lookup(key).value == "hit" for key in keys)

    def flood(self, blocks: int) -> None:
        """Other requests store so many blocks."""
        for prompt in range(100, 100 + blocks // 2):
            self.store(prompt, 2)
            self.leases.look()

    def end(self, prompt: int, blocks: int, session: str, hint: Mapping[str, Any]) -> dict[str, Any]:
        """A request ends with a hint. Returns what its client is told."""
        tracked = self.tracked(prompt, blocks, {"session_id": session, **hint})
        answer = self.leases.take(tracked, tracked.request)
        assert answer is not None
        assert read_request_params("r", answer).agent_hint in (AgentHint(session), AgentHint(""))
        told: dict[str, Any] = json.loads(json.dumps(answer))["agent_hint"]
        return told

    def outcomes(self) -> list[str]:
        return [str(event.outcome) for event in self.log if isinstance(event, HintAnswered)]


@pytest.mark.parametrize("body", ["native", "python"])
def test_an_agent_finds_its_blocks_after_a_flood_that_evicts_those_of_others(
    body: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same pool, the same flood: with the hint the session hits, without it everything is gone."""
    if body == "python":
        monkeypatch.setattr(native, "WHY_NOT", "the Python body is tested")
    engine = AgentEngine(slots=32)
    for prompt in (1, 2):
        engine.store(prompt, 4)
    assert engine.end(1, 4, "worker-7", KEEP) == {
        "session_id": "worker-7",
        "outcome": "accepted",
        "why": "",
        "ttl": 60.0,
        "asked_blocks": 4,
        "leased_blocks": 4,
    }
    engine.flood(64)
    assert engine.hits(1, 4) == 4
    assert engine.hits(2, 4) == 0
    assert_verifies(engine.log)


def test_a_lease_ends_with_its_time_and_is_then_evicted_like_any_block() -> None:
    engine = AgentEngine(slots=32)
    engine.store(1, 4)
    engine.end(1, 4, "s", KEEP)
    engine.now = 59.9
    engine.leases.look()
    assert engine.leases.held == 4
    engine.now = 60.0
    engine.leases.look()
    assert (engine.leases.held, engine.leases.leases) == (0, {})
    engine.flood(64)
    assert engine.hits(1, 4) == 0
    assert engine.outcomes() == ["accepted", "expired"]


def test_a_session_gets_half_of_the_share_and_keeps_the_head_of_its_prompt() -> None:
    """A prefix without its end serves a shorter hit; an end without its head serves none."""
    engine = AgentEngine(slots=32, share=0.25)
    engine.store(1, 10)
    told = engine.end(1, 10, "s", KEEP)
    assert (told["outcome"], told["why"]) == ("clipped", "one session may hold no more")
    assert (told["asked_blocks"], told["leased_blocks"]) == (10, 4)
    engine.flood(64)
    assert engine.hits(1, 10) == engine.hits(1, 4) == 4


def test_sessions_that_want_everything_leave_the_others_three_quarters_of_the_pool() -> None:
    engine = AgentEngine(slots=32, share=0.25)
    for prompt in range(8):
        engine.store(prompt, 4)
        assert engine.end(prompt, 4, f"s{prompt}", KEEP)["outcome"] == "accepted"
        assert engine.leases.held <= 8
    assert list(engine.leases.leases) == ["s6", "s7"], "the newest ones are kept"
    assert engine.outcomes().count("crowded out") == 6
    engine.store(50, 24)
    assert engine.hits(50, 24) == 24


def test_many_sessions_with_one_long_prompt_do_not_pin_it_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All leases may have to end in one call, to make room for another prompt, and each pin takes time."""
    monkeypatch.setattr(session_leases, "MOST_PINS", 40)
    engine = AgentEngine(slots=32, share=0.5)
    engine.store(1, 8)
    for number in range(12):
        assert engine.end(1, 8, f"s{number}", KEEP)["outcome"] == "accepted"
    assert (len(engine.leases.leases), engine.leases.pins, engine.leases.held) == (5, 40, 8)
    assert engine.outcomes().count("crowded out") == 7
    engine.leases.reset()
    assert (engine.leases.pins, engine.leases.held) == (0, 0)


def test_a_share_of_everything_leaves_a_slot_for_stores() -> None:
    """Leases have no other holder to give way, so a pool that they fill would store nothing for an hour."""
    engine = AgentEngine(slots=8, share=1.0)
    for prompt in range(4):
        engine.store(prompt, 4)
        engine.end(prompt, 4, f"s{prompt}", KEEP)
    assert engine.leases.held <= 7
    engine.store(50, 1)
    assert engine.hits(50, 1) == 1


def test_blocks_that_are_still_being_stored_are_leased_and_pinned_once_they_are_there() -> None:
    engine = AgentEngine(slots=32)
    transfer = engine.store(1, 4, reported=False)
    assert engine.end(1, 4, "s", KEEP)["leased_blocks"] == 4
    engine.core.report(transfer, 0, True)
    engine.leases.look()
    engine.flood(64)
    assert engine.hits(1, 4) == 4


def test_a_lease_whose_store_fails_ends() -> None:
    engine = AgentEngine(slots=32)
    transfer = engine.store(1, 4, reported=False)
    engine.end(1, 4, "s", KEEP)
    engine.core.report(transfer, 0, False)
    engine.leases.look()
    assert (engine.leases.held, engine.outcomes()) == (0, ["accepted", "revoked"])


def test_a_session_that_gives_its_lease_up_holds_nothing_and_drops_nothing() -> None:
    """Other requests may share the blocks, so no client can evict them."""
    engine = AgentEngine(slots=32)
    engine.store(1, 4)
    engine.end(1, 4, "s", KEEP)
    assert engine.end(1, 4, "s", EVICT)["outcome"] == "accepted"
    assert (engine.leases.held, engine.hits(1, 4)) == (0, 4)
    told = engine.end(1, 4, "s", EVICT)
    assert (told["outcome"], told["why"]) == ("refused", "the session has no lease")


def test_a_session_has_one_lease_and_a_longer_prompt_replaces_it() -> None:
    engine = AgentEngine(slots=32, share=0.5)
    engine.store(1, 2)
    engine.end(1, 2, "s", KEEP)
    engine.store(1, 6)
    engine.end(1, 6, "s", KEEP)
    assert (engine.leases.held, engine.outcomes()) == (6, ["accepted", "replaced", "accepted"])


def test_sessions_with_a_common_prompt_share_its_blocks_in_the_share() -> None:
    engine = AgentEngine(slots=32)
    engine.store(1, 4)
    for session in range(40):
        assert engine.end(1, 4, f"s{session}", KEEP)["outcome"] == "accepted"
    assert (engine.leases.held, len(engine.leases.leases)) == (4, 40)
    engine.end(1, 4, "s3", EVICT)
    engine.flood(64)
    assert engine.hits(1, 4) == 4, "39 sessions keep it"


def test_the_number_of_leases_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of sessions cost a client nothing, and each lease takes one of a block's pins."""
    monkeypatch.setattr(session_leases, "MOST_LEASES", 5)
    engine = AgentEngine(slots=32)
    engine.store(1, 4)
    for session in range(50):
        engine.end(1, 4, f"s{session}", KEEP)
        assert len(engine.leases._ends) <= 11
    assert list(engine.leases.leases) == [f"s{session}" for session in range(45, 50)]
    engine.now = 60.0
    engine.leases.look()
    assert not engine.leases.leases


def test_a_step_does_not_wait_for_the_ends_of_many_leases() -> None:
    engine = AgentEngine(slots=32)
    engine.store(1, 4)
    for session in range(20):
        engine.end(1, 4, f"s{session}", KEEP)
    engine.now = 60.0
    left = []
    while engine.leases.leases:
        engine.leases.look()
        left.append(len(engine.leases.leases))
    assert left == [12, 4, 0]


def test_a_block_that_is_held_too_often_is_not_leased(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = AgentEngine(slots=32)
    engine.store(1, 4)

    def refuse(*_: object) -> None:
        raise session_leases.LimitReached("request r cannot pin one more")

    monkeypatch.setattr(engine.core, "pin", refuse)
    told = engine.end(1, 4, "s", KEEP)
    assert (told["outcome"], told["why"]) == ("refused", "a block is held too often")
    assert (engine.leases.held, engine.core.ledger.requests) == (0, {})


@pytest.mark.parametrize(
    ("hint", "why"),
    [
        (KEEP, "leases have no share of this host"),
        (
            {"context_management": {"edits": [{"type": "prefetch"}]}},
            "kvsm does not offload or prefetch by a hint",
        ),
        ({"cache_control": {"ttl": 0}}, "cache_control.ttl must be above 0 and at most 3600 s"),
    ],
)
def test_a_refusal_says_why(hint: Mapping[str, Any], why: str) -> None:
    engine = AgentEngine(slots=32, share=0)
    engine.store(1, 4)
    told = engine.end(1, 4, "s", hint)
    assert (told["outcome"], told["why"]) == ("refused", why)
    assert engine.outcomes() == ["refused"]


def test_what_is_not_on_the_host_is_not_leased() -> None:
    engine = AgentEngine(slots=32)
    told = engine.end(1, 4, "s", KEEP)
    assert (told["outcome"], told["why"]) == ("refused", "none of its blocks is on the host")
    engine.store(1, 2)
    told = engine.end(1, 4, "s", KEEP)
    assert (told["outcome"], told["why"]) == ("clipped", "the other blocks are not on the host")
    assert (told["asked_blocks"], told["leased_blocks"]) == (4, 2)


@pytest.mark.parametrize("hint", [None, {"session_id": "s"}, {"session_id": "s", "priority": 9}])
def test_a_request_that_asks_for_nothing_is_told_nothing(hint: Mapping[str, Any] | None) -> None:
    engine = AgentEngine(slots=32)
    engine.store(1, 4)
    tracked = engine.tracked(1, 4, hint)
    assert engine.leases.take(tracked, tracked.request) is None
    assert not engine.outcomes()


def test_a_reset_ends_all_leases() -> None:
    engine = AgentEngine(slots=32)
    engine.store(1, 4)
    engine.end(1, 4, "s", KEEP)
    engine.leases.reset()
    engine.core.reset()
    engine.leases.look()
    assert (engine.leases.held, engine.outcomes()) == (0, ["accepted", "revoked"])
    engine.leases.close()
    assert_verifies(engine.log)


def test_a_replay_has_the_same_leases_and_reads_no_clock() -> None:
    """Leases are pins of requests, so the log and a snapshot have them (S10)."""
    engine = AgentEngine(slots=32)
    for prompt in range(3):
        engine.store(prompt, 3)
        engine.end(prompt, 3, f"s{prompt}", KEEP)
        engine.now += 25.0
        engine.leases.look()
    folded = Ledger(engine.core.config)
    folded.apply_all(engine.log)
    assert digest(folded) == digest(engine.core.ledger)
    assert len(folded.requests) == 2


JSON = st.recursive(
    st.sampled_from(
        [None, True, -1, 0, 3, 1e9, float("nan"), float("inf"), "", "x", "evict", "\ud800", 2**80]
    ),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(["session_id", "cache_control", "type", "ttl", "context_management", "edits"]),
            inner,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=examples(200), deadline=None)
@given(given=JSON)
def test_no_hint_of_a_client_is_an_error(given: Any) -> None:
    """It is read and answered in the engine's step, where an exception would end the engine."""
    engine = AgentEngine(slots=8, share=1.0)
    engine.store(1, 2)
    tracked = engine.tracked(1, 2, given)
    answer = engine.leases.take(tracked, tracked.request)
    hint = tracked.agent_hint
    assert (answer is None) == (hint is None or hint == AgentHint(hint.session))
    assert hint is None or hint.ttl_s == 0 or 0 < hint.ttl_s <= 3600
    assert all(
        isinstance(one, HintOutcome) for one in [e.outcome for e in engine.log if hasattr(e, "outcome")]
    )
    assert_verifies(engine.log)
