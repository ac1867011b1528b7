"""Hypothesis strategies for workloads, configurations, block pairs of transfers, and reports of workers.

All of them shrink towards the simplest case: the shortest prompt, the defaults, good reports in order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from kvsm.check.worlds.small_request import HASH_TOKENS
from kvsm.core.plan import WorkerReport
from kvsm.core.scheduler import GroupKind, KVCacheGroup, LastStep, StoreMode

BLOCK_TOKENS = HASH_TOKENS
"""Tokens per block in the small engine."""

SHARED_BLOCKS = 2
"""Number of blocks at the beginning that all prompts of a workload share."""

_FULL = KVCacheGroup(BLOCK_TOKENS)

GROUPS: dict[str, tuple[KVCacheGroup, ...]] = {
    "full": (_FULL,),
    "full for drafts": (KVCacheGroup(BLOCK_TOKENS, drafter=True),),
    "full, window": (_FULL, KVCacheGroup(BLOCK_TOKENS, GroupKind.SLIDING_WINDOW, window=6)),
    "wide, window, full": (
        KVCacheGroup(2 * BLOCK_TOKENS),
        KVCacheGroup(BLOCK_TOKENS, GroupKind.SLIDING_WINDOW, window=5),
        _FULL,
    ),
}
"""Sets of KV cache groups that the small engine can have."""


class Arrival(msgspec.Struct, frozen=True, repr_omit_defaults=True):
    """A request that arrives.

    conversation: of two prompts of one conversation, the shorter is a prefix of the longer; prompts of
        different conversations share their first `SHARED_BLOCKS` blocks.
    length: length of the prompt (tokens).
    outputs: length of the output (tokens).
    parameters: its `kv_transfer_params`.
    skip_reading: its `skip_reading_prefix_cache`.
    """

    conversation: int = 0
    length: int = 1
    outputs: int = 1
    parameters: Mapping[str, Any] | None = None
    skip_reading: bool = False

    def tokens(self) -> list[int]:
        """The tokens of the prompt."""
        shared = SHARED_BLOCKS * BLOCK_TOKENS
        own = (100 * (self.conversation + 1) + place for place in range(shared, self.length))
        return [*range(shared), *own][: self.length]


def lengths(block_tokens: int = BLOCK_TOKENS, most_blocks: int = 5) -> SearchStrategy[int]:
    """Lengths at the end of a block, one token shorter, and one longer, where most mistakes are."""
    ends = range(block_tokens, most_blocks * block_tokens + 1, block_tokens)
    return st.sampled_from(sorted({max(1, end + apart) for end in ends for apart in (-1, 0, 1)}))


def arrivals(conversations: int = 3, most_blocks: int = 5) -> SearchStrategy[Arrival]:
    """Requests, most of them without `kv_transfer_params`."""
    wishes: list[dict[str, Any] | None] = [
        {"do_remote_decode": True},
        {"max_offload_tokens": 9},
        {"max_load_tokens": 5},
        {"offload": False},
    ]
    return st.builds(
        Arrival,
        conversation=st.integers(0, conversations - 1),
        length=lengths(most_blocks=most_blocks),
        outputs=st.integers(1, 2 * BLOCK_TOKENS + 1),
        parameters=st.sampled_from([*[None] * 8, *wishes]),
        skip_reading=st.sampled_from([False, False, False, False, False, True]),
    )


def workloads(
    most_requests: int = 6, conversations: int = 3, most_blocks: int = 5
) -> SearchStrategy[list[Arrival]]:
    """Requests that share prefixes, in order of arrival."""
    return st.lists(arrivals(conversations, most_blocks), min_size=1, max_size=most_requests)


def report_orders(transfers: Sequence[int], workers: int = 1) -> SearchStrategy[list[WorkerReport]]:
    """The reports of these transfers from every worker: in any order, some bad, some repeated."""
    shares = [(transfer, worker) for transfer in transfers for worker in range(workers)]

    @st.composite
    def orders(draw: st.DrawFn) -> list[WorkerReport]:
        reports = [
            WorkerReport(transfer, worker, draw(st.sampled_from([True, True, False])))
            for transfer, worker in draw(st.permutations(shares))
        ]
        again = draw(st.lists(st.sampled_from(reports), max_size=len(reports))) if reports else []
        return reports + again

    return orders()


def block_pairs(device_blocks: int, host_blocks: int, most: int = 4) -> SearchStrategy[list[tuple[int, int]]]:
    """The pairs (device block, host block) of one transfer. Each block occurs once."""
    pair = st.tuples(st.integers(0, device_blocks - 1), st.integers(0, host_blocks - 1))
    return st.lists(pair, max_size=most, unique_by=(lambda pair: pair[0], lambda pair: pair[1]))


class Configuration(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """A small engine and its offload core. groups: a name in `GROUPS`.

    The other fields belong to `SmallEngine`, `OffloadConfig` and `SchedulerConfig`.
    """

    groups: str = "full"
    store: StoreMode = StoreMode.EAGER
    last_step: LastStep = LastStep.FLUSH
    references: bool = True
    prefix_cache: bool = False
    asynchronous: bool = False
    drafts: int = 0
    workers: int = 1
    blocks_per_chunk: int = 1
    host_blocks: int = 4
    device_blocks: int = 14
    store_threshold: int = 1
    defer_ticks: int = 0
    transfer_ticks: int = 0

    def legal(self) -> Configuration:
        """Return this configuration, changed as little as necessary to be valid."""
        change: dict[str, Any] = {}
        if self.store is StoreMode.LAZY:
            # A lazy store reads the pool's free queue, and stores single blocks.
            change = {"references": True, "blocks_per_chunk": 1, "store_threshold": 1}
        elif not self.references:
            # Without references a lost copy holds all blocks of its request for ever.
            change = {"transfer_ticks": 0}
        return msgspec.structs.replace(self, **change)


def configurations(**fixed: Any) -> SearchStrategy[Configuration]:
    """Small configurations: the pools have room for one long request, and seldom for two.

    fixed: values or strategies for fields of `Configuration`.
    """
    free: dict[str, SearchStrategy[Any]] = {
        "groups": st.sampled_from(["full", "full", *GROUPS]),
        "store": st.sampled_from([StoreMode.EAGER, StoreMode.EAGER, StoreMode.LAZY]),
        "last_step": st.sampled_from(LastStep),
        "references": st.sampled_from([True, True, True, True, False]),
        "prefix_cache": st.sampled_from([False, False, True]),
        "asynchronous": st.booleans(),
        "drafts": st.sampled_from([0, 0, 2]),
        "workers": st.sampled_from([1, 1, 2]),
        "blocks_per_chunk": st.sampled_from([1, 1, 2]),
        "host_blocks": st.sampled_from([4, 6, 12]),
        "device_blocks": st.sampled_from([14, 20, 40]),
        "store_threshold": st.sampled_from([1, 1, 1, 2]),
        "defer_ticks": st.sampled_from([0, 2, 6]),
        "transfer_ticks": st.sampled_from([0, 0, 9]),
    }
    given = {
        name: value if isinstance(value, SearchStrategy) else st.just(value) for name, value in fixed.items()
    }

    @st.composite
    def drawn(draw: st.DrawFn) -> Configuration:
        return Configuration(**draw(st.fixed_dictionaries({**free, **given}))).legal()

    return drawn()
