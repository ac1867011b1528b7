"""The canonical layout: bytes on the host that do not depend on the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
)

from kvsm.core.plan import TransferJob
from kvsm.errors import ConfigError
from kvsm.events import Direction
from kvsm.ids import pack
from kvsm.vllm.canonical_layout import CanonicalRows, Layer, canonical_rows, layers_of_connector
from kvsm.vllm.host_sharing import check_canonical
from kvsm.vllm.rank_copies import HostSharing, RankCopies, make_copies

BLOCKS, BLOCK_TOKENS, HEAD_SIZE, LAYERS = 6, 4, 8, ("first", "second")

LATENT = 0
"""In place of a number of heads: latent attention."""

HOST_BLOCKS = [4, 1, 0, 5]
"""Where device blocks 0 to 3 are stored."""


def whole(heads: int) -> dict[str, torch.Tensor]:
    """The KV cache that an engine with one rank would have."""
    drawn = torch.Generator().manual_seed(heads)
    shape = (
        (BLOCKS, BLOCK_TOKENS, HEAD_SIZE) if heads == LATENT else (BLOCKS, heads, BLOCK_TOKENS, 2 * HEAD_SIZE)
    )
    return {name: torch.rand(shape, generator=drawn) for name in LAYERS}


def replicas_of(heads: int, ranks: int) -> int:
    return ranks if heads == LATENT else max(1, ranks // heads)


def part(cache: torch.Tensor, heads: int, ranks: int, rank: int) -> torch.Tensor:
    """What this rank has of it."""
    if heads == LATENT:
        return cache.clone()
    of_rank = max(1, heads // ranks)
    first = rank // replicas_of(heads, ranks) * of_rank
    return cache[:, first : first + of_rank].clone()


def layers(caches: dict[str, torch.Tensor], heads: int, ranks: int, rank: int) -> list[Layer]:
    """The layers of this rank, with vLLM's own mappings."""
    sizes = {"block_size": BLOCK_TOKENS, "head_size": HEAD_SIZE, "dtype": torch.float32}
    if heads == LATENT:
        spec: Any = MLAAttentionSpec(num_kv_heads=1, **sizes)
    else:
        spec = FullAttentionSpec(num_kv_heads=max(1, heads // ranks), **sizes)
    parallel = SimpleNamespace(
        tensor_parallel_size=ranks,
        prefill_context_parallel_size=1,
        decode_context_parallel_size=1,
        cp_kv_cache_interleave_size=1,
        world_size=ranks,
        rank=rank,
    )
    config = SimpleNamespace(
        parallel_config=parallel, model_config=SimpleNamespace(get_total_num_kv_heads=lambda: heads)
    )
    groups = [KVCacheGroupSpec(list(LAYERS), spec)]
    kv_cache = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)
    return layers_of_connector(config, kv_cache, caches)


class Engine:
    """All ranks of an engine, in one process."""

    def __init__(self, path: Path, heads: int, ranks: int) -> None:
        replicas = replicas_of(heads, ranks)
        self.caches = [
            {name: part(cache, heads, ranks, rank) for name, cache in whole(heads).items()}
            for rank in range(ranks)
        ]
        self.rows: list[CanonicalRows] = []
        self.copies: list[RankCopies] = []
        self._transfers = 0
        for rank, caches in enumerate(self.caches):
            of_rank = layers(caches, heads, ranks, rank)
            self.rows.append(canonical_rows(of_rank, replicas))
            sharing = HostSharing(path, ranks, rank, replicas) if ranks > 1 else None
            tensors = [layer.rows for layer in of_rank]
            self.copies.append(make_copies(tensors, BLOCKS, True, sharing=sharing, canonical=self.rows[-1]))

    def carry_out(self, direction: Direction) -> list[bool]:
        """Copy device blocks 0 to 3 on every rank. Returns whether each rank's copy was good."""
        self._transfers += 1
        results = []
        for copies in self.copies:
            job = TransferJob(self._transfers, direction, pack(range(4)), pack(HOST_BLOCKS))
            copies.engine.submit(job)
            copies.engine.wait([job.transfer])
            results += [result.good for result in copies.engine.poll()]
        return results

    def close(self) -> None:
        for copies in self.copies:
            copies.close()


@contextmanager
def engine(directory: Path, heads: int, ranks: int) -> Iterator[Engine]:
    made = Engine(directory / f"{heads} {ranks}", heads, ranks)
    try:
        yield made
    finally:
        made.close()


SHAPES = [(heads, ranks) for heads in (LATENT, 1, 2, 4) for ranks in (1, 2, 4)]


@pytest.mark.parametrize(("heads", "ranks"), SHAPES)
def test_the_bytes_on_the_host_are_those_of_one_rank(heads: int, ranks: int, tmp_path: Path) -> None:
    """Layer after layer with all heads, however many ranks have written them, and each byte is kept once."""
    with engine(tmp_path, heads, ranks) as made:
        assert made.carry_out(Direction.STORE) == [True] * ranks
        expected = np.concatenate(
            [cache.numpy().reshape(BLOCKS, -1) for cache in whole(heads).values()], axis=1
        )
        expected = expected[:4].view(np.uint8)
        for copies in made.copies:
            assert np.array_equal(copies.pool.blocks[HOST_BLOCKS], expected)
        assert made.rows[0].row_bytes == expected.shape[1]


@pytest.mark.parametrize("heads", [LATENT, 1, 2, 4])
@pytest.mark.parametrize(("writers", "readers"), [(2, 1), (1, 2), (4, 2), (2, 4)])
def test_other_ranks_can_load_what_was_stored(heads: int, writers: int, readers: int, tmp_path: Path) -> None:
    """What an engine with another number of ranks gets from these bytes is its own part of the KV cache."""
    with engine(tmp_path, heads, writers) as wrote, engine(tmp_path, heads, readers) as reads:
        assert all(wrote.carry_out(Direction.STORE))
        reads.copies[0].pool.blocks[:] = wrote.copies[0].pool.blocks
        for caches in reads.caches:
            for cache in caches.values():
                cache.zero_()
        assert all(reads.carry_out(Direction.LOAD))
        for rank, caches in enumerate(reads.caches):
            for name, cache in caches.items():
                expected = part(whole(heads)[name], heads, readers, rank)
                assert torch.equal(cache[:4], expected[:4]), (rank, name)
                assert not cache[4:].any()


def test_a_wrong_byte_fails_only_the_rank_whose_byte_it_is(tmp_path: Path) -> None:
    """Data (S15): each rank has checksums of its own part of a row, and all replicas have the same."""
    with engine(tmp_path, 2, 4) as made:
        assert all(made.carry_out(Direction.STORE))
        assert made.carry_out(Direction.LOAD) == [True] * 4
        made.copies[0].pool.blocks[1, 0] ^= 1  # layer 0, head 0: ranks 0 and 1
        assert made.carry_out(Direction.LOAD) == [False, False, True, True]


# What has no such layout.


def refused(found: list[Layer], replicas: int = 1) -> str:
    with pytest.raises(ConfigError) as error:
        canonical_rows(found, replicas)
    return str(error.value)


def test_a_layer_that_depends_on_the_ranks_is_refused() -> None:
    """States of mamba layers, and layouts that vLLM does not know, are other bytes for other ranks."""
    of_rank = layers(whole(2), 2, 1, 0)
    problem = (
        "canonical_layout: layer first has no form that is the same for any number of ranks; omit the option"
    )
    assert refused([of_rank[0]._replace(mapping=None)]) == problem
    opaque = replace(of_rank[0].mapping, parallelism_agnostic=False)
    assert refused([of_rank[0]._replace(mapping=opaque)]) == problem


def test_layers_that_are_replicated_differently_are_refused() -> None:
    """Each rank writes an equal part of each store, which is right for all layers or for none."""
    found = layers({name: part(cache, 1, 2, 0) for name, cache in whole(1).items()}, 1, 2, 0)
    assert "layer first is the same on 2 ranks, and not on 1 in all layers" in refused(found, 1)


def test_layers_that_share_their_bytes_are_kept_once() -> None:
    """Groups of layers overlay each other: a block belongs to one of them."""
    first, second = layers(whole(2), 2, 1, 0)
    shared = second._replace(rows=first.rows)
    assert canonical_rows([first, shared], 1).row_bytes == canonical_rows([first], 1).row_bytes
    other = shared._replace(mapping=replace(shared.mapping, canonical_page_size_bytes=1))
    assert "layer second shares its bytes with a layer of another shape" in refused([first, other])


def test_ranks_that_cannot_share_are_refused() -> None:
    """Without the layout each rank keeps its own pool; with it that would be another layout."""
    with pytest.raises(ConfigError, match="canonical_layout: all ranks share one host pool, but they are on"):
        check_canonical(True, "they are on several machines")
    check_canonical(True, "")
    check_canonical(False, "they are on several machines")
