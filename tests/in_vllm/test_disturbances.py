"""Aborts, resets, sleep and shutdown while copies are held in flight: nothing leaks, and tokens are
unchanged.

Every scene runs on a Llama with an eager store, and on a Gemma (two KV cache groups) with a lazy one. A sleep
that frees memory is not tested, because vLLM's CPU worker ignores it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from scenes import (
    DISTURBANCES,
    HOST_BYTES,
    MAX_TOKENS,
    MODELS,
    POOL,
    PROMPTS,
    Told,
    expected,
    play,
    search_path,
    steered,
)

from kvsm.explain.story import Verification, verify_log
from kvsm.vllm.trial import Trial, run_trial

Played = tuple[str, str, Told, Verification]
"""(model, store, what the scenes reported, the verification of their log)"""


@pytest.fixture(scope="module", params=[("llama", "eager"), ("gemma", "lazy")], ids="-".join)
def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Played:
    model, store = request.param
    logs = tmp_path_factory.mktemp("logs")
    told = play(
        [scene.__name__ for scene in DISTURBANCES],
        logs,
        model=model,
        store=store,
        cpu_bytes_to_use=HOST_BYTES,
    )
    (log,) = logs.iterdir()
    return model, store, told, verify_log(log)


def test_tokens_are_those_of_an_engine_without_offload(played: Played) -> None:
    """Correct bytes (S15): each request that was not aborted gets the tokens that it gets without offload."""
    model, _, told, _ = played
    right = expected(model)
    for number, tokens, why in told.answers:
        assert (tokens, why) == (right[number], "length"), f"prompt {number}"
    assert len(told.answers) > 60


def test_nothing_is_left_of_any_scene(played: Played) -> None:
    """Progress (S9): all device blocks are free again, and no request, pin, lease or transfer is left."""
    assert played[2].left == []


def test_the_log_verifies_and_replays_to_the_state_at_the_end(
    played: Played,
) -> None:
    """Events are state (S10), also after a shutdown with copies in flight."""
    _, _, told, verification = played
    assert verification.good, verification
    assert verification.digest == told.digest


def test_an_aborted_load_keeps_its_blocks_until_it_has_ended(
    played: Played,
) -> None:
    """No reuse in flight (S3): the copy still writes these blocks."""
    facts = played[2].facts
    assert facts["loading"] == [4]
    assert facts["loading after two aborts"] == [2]
    assert facts["blocks held after two aborts"][0] >= 4 * 6
    assert facts["requests while aborted loads run"] == [4]


def test_a_load_that_has_ended_may_still_be_aborted(played: Played) -> None:
    """Both requests were waiting when one was aborted, with good loads and with failed ones. A test above
    checks that nothing is left."""
    assert played[2].facts["waiting, with no copy in flight"] == [[2, 0], [2, 0]]


def test_a_reset_under_load_is_refused_until_it_has_drained(
    played: Played,
) -> None:
    """No stale data (S14), twice: nothing from before a reset is found after it."""
    _, _, told, _ = played
    assert told.facts["loading at the reset"] == [4, 4]
    assert told.facts["drained at once"] == [False, False]
    assert told.facts["drained while held"] == [False, False]
    assert told.facts["drained at last"] == [True, True]
    assert told.facts["cached after the reset"] == [[0] * 5, [0] * 5]


def test_running_requests_start_over_at_a_reset(played: Played) -> None:
    """vLLM itself refuses this while a store holds device blocks (a lazy store holds none here)."""
    _, store, told, _ = played
    assert told.facts["reset while running"] == [True]
    refusals = told.facts.get("refused", [])
    assert len(refusals) == (store == "eager")
    assert all("Failed to reset KV cache" in refusal for refusal in refusals)


def test_sleep_forgets_both_caches(played: Played) -> None:
    """No stale data (S14): nothing stored before a sleep is loaded after it, because the weights may have
    changed."""
    facts = played[2].facts
    assert facts["cached before sleep"] == [[192, 192]]
    assert (facts["asleep"], facts["asleep after waking"]) == ([True], [False])
    assert facts["cached after sleep"] == [[0, 0]]


def test_a_paused_engine_answers_when_it_goes_on(played: Played) -> None:
    """The load that ends during the pause is not lost."""
    assert played[2].facts["answers while paused"] == [0]


def test_an_engine_is_shut_down_with_copies_in_flight(played: Played) -> None:
    """The process ends with exit code 0, as `play` asserts. The tests above assert that its log verifies."""
    _, store, told, _ = played
    assert told.facts["in flight at shutdown"] == [["LOAD"] if store == "lazy" else ["LOAD", "STORE"]]


def test_failed_loads_are_computed_without_asking_twice(played: Played) -> None:
    """Failure is not success (S6), with one group and with two: failed keys are stored again, and no request
    loads them in a loop."""
    facts = played[2].facts
    assert facts["steps with failed loads"][0] <= MAX_TOKENS + 6
    assert facts["cached after failed loads"] == [[192] * 6]


def test_an_engine_process_ends_though_its_stores_never_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Requests are answered while every store hangs. Shutdown waits for the copies, but for no step."""
    monkeypatch.setenv("PYTHONPATH", search_path())
    stuck = steered(name="StuckConnector", event_log=str(tmp_path))
    trial = Trial(
        rounds=[PROMPTS[:6]],
        max_tokens=MAX_TOKENS,
        kv_transfer=stuck,
        model=dict(MODELS["llama"]),
        engine=dict(POOL),
        in_process=False,
    )
    assert run_trial(trial).tokens == expected("llama")[:6]
    (log,) = tmp_path.iterdir()
    verification = verify_log(log)
    assert verification.good, verification
    assert verification.events > 6
