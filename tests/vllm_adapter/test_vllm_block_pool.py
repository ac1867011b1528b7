"""vLLM's pool as kvsm sees it."""

from __future__ import annotations

from types import SimpleNamespace

from kvsm.vllm.vllm_block_pool import VllmBlockPool


def test_keys_of_many_blocks_are_those_of_each_block() -> None:
    """Also while a step computes some of them: these count as not cached."""
    blocks = [SimpleNamespace(block_id=number, block_hash=b"%d" % number) for number in range(5)]
    blocks[2].block_hash = None
    unused = dict.fromkeys(("touch", "free_blocks", "cached_block_hash_to_block", "free_block_queue"))
    pool = VllmBlockPool(SimpleNamespace(blocks=blocks, num_gpu_blocks=5, **unused))
    assert pool.keys_of([4, 2, 0]) == [b"4", None, b"0"]
    pool.computing = {0}
    assert pool.keys_of([4, 2, 0]) == [pool.key_of(block) for block in (4, 2, 0)] == [b"4", None, None]
