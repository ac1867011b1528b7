"""Models with every kind of KV cache in real vLLM engines: `KvsmConnector` beside vLLM's own prefix cache.

A hit that kvsm loads and a hit that the device still has lead to the same steps. So whatever an engine
computes from them must be equal to the bit: the probabilities of its tokens, and all that it caches.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from block_contents import group_of
from model_stage import ModelOutcome, Stage, conversations, refusal, serve_model
from model_zoo import MLA, MODELS
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from kvsm.core.log import LogReader
from kvsm.events import LoadPlanned, StorePlanned
from kvsm.explain.story import verify_log
from kvsm.ids import listed, unpack
from kvsm.vllm.tiny_model import BLOCK_TOKENS


def models(*, change_answers: bool = True) -> Any:
    """Return all models as parameters. change_answers: also those whose answers vLLM's hits may change."""
    return pytest.mark.parametrize(
        "name",
        [
            pytest.param(name, marks=[pytest.mark.slow] * model.is_slow)
            for name, model in MODELS.items()
            if change_answers or not model.hits_change_answers
        ],
    )


@pytest.fixture(scope="session")
def served(stage: Stage, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function from a model's name to its outcome. Each model is served once."""

    @cache
    def outcome(name: str) -> ModelOutcome:
        kind = MODELS[name].engine.get("kv_cache_dtype", "auto")
        if not AttentionBackendEnum.CPU_ATTN.get_class().supports_kv_cache_dtype(kind):
            pytest.skip(f"vLLM keeps no KV cache of {kind} on this CPU")
        directory: Path = tmp_path_factory.mktemp(name.replace(" ", "-"))
        found: ModelOutcome = stage.play(serve_model, MODELS[name], directory)
        return found

    return outcome


@models()
def test_hits_are_those_of_the_device(served: Any, name: str) -> None:
    """Every prompt after the first of a conversation hits the stored blocks."""
    outcome = served(name)
    cached = [answer.cached for answer in outcome.device_hits]
    assert cached[:2] == [0, 0]
    assert all(cached[2:])
    assert [answer.cached for answer in outcome.host_hits] == cached


@models()
def test_answers_are_to_the_bit_those_of_vllms_own_prefix_cache(served: Any, name: str) -> None:
    outcome = served(name)
    assert outcome.host_hits == outcome.device_hits


@models(change_answers=False)
def test_tokens_are_those_without_any_hit(served: Any, name: str) -> None:
    """Prompts are served one by one, and all at once on a device with few blocks."""
    outcome = served(name)
    expected = [answer.tokens for answer in outcome.without_hits]
    assert [answer.tokens for answer in outcome.host_hits] == expected
    assert [answer.tokens for answer in outcome.crowd] == expected
    assert all(answer.cached for answer in outcome.crowd)


@models()
def test_blocks_have_to_the_bit_what_vllm_computes_without_kvsm(served: Any, name: str) -> None:
    """Correct bytes (S15), also of blocks that were computed from a loaded state."""
    outcome = served(name)
    last_turns = conversations()[-2:]
    assert outcome.compared >= sum(len(prompt) // BLOCK_TOKENS for prompt in last_turns)
    assert outcome.strange == []


@models()
def test_blocks_of_every_group_come_back(served: Any, name: str) -> None:
    """Each group must load blocks: otherwise a layer whose blocks are never loaded could look correct."""
    outcome = served(name)
    key_of: dict[int, bytes] = {}
    loaded: Counter[int] = Counter()
    for event in LogReader(outcome.log).events():
        if isinstance(event, StorePlanned):
            key_of.update(zip(listed(unpack(event.slots)), event.keys))
        elif isinstance(event, LoadPlanned):
            loaded.update(group_of(key_of[slot]) for slot in listed(unpack(event.slots)))
    assert [*sorted(loaded)] == [*range(len(outcome.groups))]
    assert min(loaded.values()) >= len(conversations()) - 2


@models()
def test_the_log_verifies(served: Any, name: str) -> None:
    assert verify_log(served(name).log).good


def test_vllms_own_prefix_cache_changes_tokens_of_mla_on_a_cpu(served: Any) -> None:
    """If this fails, vLLM has mended it: the tokens can be compared with those without any hit."""
    outcome = served("deepseek v3")
    tokens = [[answer.tokens for answer in one] for one in (outcome.device_hits, outcome.without_hits)]
    assert tokens[0] != tokens[1]


def test_rounding_is_no_state_of_another_step(served: Any) -> None:
    """In bfloat16 a loaded state differs from the state that a run without hits computes.

    Without kvsm it differs as well: a prefill from a hit rounds otherwise than a prefill of the whole prompt.
    Blocks that kvsm loads have the same bits as vLLM's own hits. And the states of two prefixes
    are far from each other, so the state of another step would be seen.
    """
    rounding, nearest = served("qwen3-next").distances
    assert 0.01 < max(rounding.values()) < 0.5
    for part, distance in nearest.items():
        assert rounding[part] < distance / 10


def test_a_model_without_a_prefix_cache_is_refused(stage: Stage) -> None:
    """vLLM turns the prefix cache of MLA off on a CPU without AMX, where hits change tokens."""
    refused = stage.play(refusal, MLA._replace(lifts_ban=False))
    assert "offloads what the prefix cache holds" in refused
