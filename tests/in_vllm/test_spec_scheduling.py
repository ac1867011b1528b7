"""vLLM's real schedulers and its own OffloadingConnector over `KvsmSpec`, with copies that end by a seed.

These are the engines of `real_scheduler` with the other connector. Their content is checked word by word,
copies and compute are checked for races, and caches are reset under load. No copy fails here, because this
interface has no failed copies.
"""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import real_scheduler
from scheduler_shapes import BLOCK_TOKENS, WORD_BYTES, Shape
from spec_engine import SpecEngine

from kvsm.vllm.versions import features

SHAPES = {
    "small": Shape(device_blocks=26, host_blocks=12),
    "chunks": Shape(device_blocks=26, host_blocks=80, extra={"blocks_per_chunk": 2}),
    "sliding window": Shape(groups=2, device_blocks=40, host_blocks=160),
    "asynchronous": Shape(is_async=True, device_blocks=26, host_blocks=40, extra={"policy": "arc"}),
    "ranks in a pipeline": Shape(stages=2, shards=2, device_blocks=26, host_blocks=160),
    "small loads within their step": Shape(
        device_blocks=26, host_blocks=80, extra={"sync_load_budget_bytes": 8 * BLOCK_TOKENS * WORD_BYTES}
    ),
    "seldom offered": Shape(is_async=True, device_blocks=26, host_blocks=80, extra={"store_threshold": 2}),
}


@pytest.mark.parametrize("name", SHAPES)
def test_whatever_happens_the_words_are_right(name: str) -> None:
    """Content, order and leases are right with every act that vLLM allows. Then all work ends, and the log
    agrees."""
    within_steps = "sync_load_budget_bytes" in SHAPES[name].extra
    if within_steps and not features().loads_within_steps:
        pytest.skip("this vLLM loads nothing within a step")
    happened: Counter[str] = Counter()
    for seed in range(WALKS):
        happened += live(seed, SHAPES[name])
    for what in ("loads", "stores", "preemptions", "aborts", "whole resets", "host resets"):
        assert happened[what], what
    assert bool(happened["loads in a step"]) == within_steps


WALKS, ACTS = 6, 300


def live(seed: int, shape: Shape) -> Counter[str]:
    """Run one engine until its end."""
    random, engine = Random(f"spec {seed}"), SpecEngine(shape, seed)
    try:
        for _ in range(ACTS):
            if random.random() < 0.005:
                engine.reset(running=True, connector=True)
            real_scheduler.act(engine, random)
            engine.check()
        engine.drain()
        engine.close()
    except BaseException as error:
        engine.discard()
        error.args = (f"live({seed}, {shape}): {error}", *error.args[1:])
        raise
    return engine.counts
