"""Requests whose tokens do not tell all: LoRA adapters, pictures and prompt embeddings in real vLLM engines.

Their keys cover the adapter, the picture and the embeddings. So equal tokens lead to a hit only with the same
of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from model_stage import Answer, Stage
from model_zoo import LLAMA_MODEL, PICTURES, WINDOW
from other_inputs import KVSM, PLAIN, serve_adapters, serve_embeddings, serve_pictures

from kvsm.explain.story import verify_log

Rounds = dict[str, list[list[Answer]]]


def play(stage: Stage, scene: Any, model: Any, directory: Path) -> Rounds:
    """What a function of `other_inputs` returns. Its log must verify."""
    rounds: Rounds = stage.play(scene, model, directory)
    (log,) = (directory / "log").iterdir()
    assert verify_log(log).good
    return rounds


def tokens(rounds: list[list[Answer]]) -> list[list[list[int]]]:
    return [[answer.tokens for answer in answers] for answers in rounds]


def cached(rounds: list[list[Answer]]) -> list[int]:
    return [answer.cached for answers in rounds for answer in answers]


def test_no_hit_crosses_an_adapter(stage: Stage, tmp_path: Path) -> None:
    """Two prompts are served without an adapter and with each of two. In the second round each finds its
    own."""
    rounds = play(stage, serve_adapters, LLAMA_MODEL, tmp_path)
    assert tokens(rounds[KVSM]) == tokens(rounds[PLAIN])
    without, first, second = tokens(rounds[KVSM])[:3]
    assert without != first != second != without
    half = len(cached(rounds[KVSM])) // 2
    assert not any(cached(rounds[KVSM])[:half])
    assert all(cached(rounds[KVSM])[half:])
    assert not any(cached(rounds[PLAIN]))


def test_no_hit_crosses_a_picture(stage: Stage, tmp_path: Path) -> None:
    """The same text with each of three pictures. In the second round each finds its own picture and its
    text."""
    rounds = play(stage, serve_pictures, PICTURES, tmp_path)
    assert tokens(rounds[KVSM]) == tokens(rounds[PLAIN])
    assert len({tuple(answer.logprobs) for answer in rounds[PLAIN][0]}) == 3
    assert not any(cached(rounds[KVSM][:1]))
    assert min(cached(rounds[KVSM][1:])) > WINDOW
    assert not any(cached(rounds[PLAIN]))


def test_embeddings_are_found_again(stage: Stage, tmp_path: Path) -> None:
    """Prompts without tokens."""
    rounds = play(stage, serve_embeddings, LLAMA_MODEL, tmp_path)
    assert tokens(rounds[KVSM]) == tokens(rounds[PLAIN])
    assert not any(cached(rounds[KVSM][:1]))
    assert all(cached(rounds[KVSM][1:]))
    assert not any(cached(rounds[PLAIN]))
