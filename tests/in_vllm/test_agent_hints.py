"""Hints of agents under vLLM's real scheduler: what is kept, and what the client is told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from real_scheduler import Engine
from scheduler_shapes import BLOCK_TOKENS, Shape

PROMPT = [7] * (6 * BLOCK_TOKENS) + [1]
HINT = {"agent_hint": {"session_id": "worker-7", "cache_control": {"type": "ephemeral", "ttl": 60}}}


class Agents:
    """An engine with a small host pool. now: what the leases take as the time (s)."""

    def __init__(self, **extra: Any) -> None:
        self.engine = Engine(Shape(device_blocks=12, host_blocks=32, step_tokens=16, extra=extra), 1)
        self.side = self.engine.scheduler.connector._side
        self.now = 0.0
        self.side._leases.clock = lambda: self.now

    def answer(self, prompt: list[int], parameters: dict[str, Any] | None = None, outputs: int = 2) -> Any:
        """Serve a request. Returns the `kv_transfer_params` of its output, as a client reads them."""
        name = self.engine.ask(prompt, outputs, parameters)
        for _ in range(200):
            self.engine.step()
            self.engine.check()
            if name in self.engine.handed and not self.engine.ledger.transfers:
                return json.loads(json.dumps(self.engine.handed[name]))
        raise AssertionError("the request does not end")

    def flood(self) -> None:
        """Serve other requests, until the host has evicted all that it may."""
        for other in range(12):
            self.answer([100 + other] * (5 * BLOCK_TOKENS))

    @property
    def loaded(self) -> int:
        return int(self.side._core.metrics.values()["blocks_loaded"])

    def loads(self, prompt: list[int], parameters: dict[str, Any] | None = None) -> int:
        """How many blocks are loaded for a request with this prompt."""
        before = self.loaded
        self.answer(prompt, parameters)
        return self.loaded - before


@pytest.fixture
def agents() -> Iterator[Agents]:
    agents = Agents(agent_hint_share=0.5)
    yield agents
    agents.side._leases.close()
    agents.engine.drain()
    agents.engine.close()


def test_a_session_loads_its_blocks_after_a_flood_and_another_prompt_is_gone(agents: Agents) -> None:
    other = [9] * (6 * BLOCK_TOKENS) + [1]
    told = agents.answer(PROMPT, HINT)
    assert told["agent_hint"]["outcome"] == "accepted"
    assert told["agent_hint"]["leased_blocks"] == told["agent_hint"]["asked_blocks"] == 6
    assert agents.answer(other) is None, "a client without a hint is told nothing"
    agents.flood()
    assert agents.side._counts_beside_events()["leased_blocks"] == 6
    assert agents.loads(PROMPT) == 6
    assert agents.loads(other) == 0


def test_a_lease_ends_at_a_step_after_its_time(agents: Agents) -> None:
    agents.answer(PROMPT, HINT)
    agents.now = 60.0
    agents.answer([5] * BLOCK_TOKENS)
    assert agents.side._leases.held == 0
    assert agents.side._core.metrics.values()["hints"]["expired"] == 1


def test_a_reset_ends_the_leases(agents: Agents) -> None:
    agents.answer(PROMPT, HINT)
    agents.side.reset_cache()
    assert agents.side._leases.held == 0
    assert agents.side._core.metrics.values()["hints"]["revoked"] == 1


def test_a_wrong_hint_is_refused_and_the_request_is_served(agents: Agents) -> None:
    told = agents.answer(PROMPT, {"agent_hint": {"session_id": 7}})
    assert told["agent_hint"]["outcome"] == "refused"
    assert "session_id must be a name" in told["agent_hint"]["why"]


def test_an_aborted_request_takes_no_lease(agents: Agents) -> None:
    name = agents.engine.ask(PROMPT, 8, HINT)
    agents.engine.step()
    agents.engine.abort(0)
    for _ in range(20):
        agents.engine.step()
    assert name not in agents.engine.scheduler.requests
    assert agents.side._leases.held == 0
    assert not any(agents.side._core.metrics.values()["hints"].values())


def test_an_engine_that_idles_with_leases_has_written_its_log(agents: Agents) -> None:
    """A lease is a request of the ledger, but no later step is certain to flush the log for it."""
    agents.answer(PROMPT, HINT)
    core = agents.side._core.offloader
    assert core.ledger.requests
    assert core._flushed_seq == core.ledger.seq
