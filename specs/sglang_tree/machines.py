"""Machines for SGLang's prefix tree with its host tier (HiCache), based on `kvsm.testing.PrefixTreeMachine`.

A block of the machine is a page of 16 tokens. Each class has one write policy and one core of the tree.
"""

from __future__ import annotations

import atexit
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from sglang.srt.disaggregation.kv_events import AllBlocksCleared, BlockStored, StorageMedium
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    InitLoadBackParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from kvsm.testing import PrefixMatch, PrefixTreeMachine, TreeEvent
from sglang_tree.simulated_streams import Event, Stream

PAGE = 16
"""Tokens of a block. SGLang loads back at least 10 tokens, so pages of one token would never be loaded."""

LAYERS = 2


class _Nodes(NamedTuple):
    """The two nodes of a match."""

    last_device_node: Any
    best_match_node: Any


class SglangTree:
    """`UnifiedRadixCache` with a host pool, called as SGLang's scheduler calls it."""

    def __init__(self, device_slots: int, host_slots: int, policy: str, core: str) -> None:
        tokens, self.host_slots, self.core = device_slots * PAGE, host_slots, core
        # SGLang makes the host pool one page larger than the ratio says.
        arguments = ServerArgs(
            model_path="dummy",
            device="cpu",
            page_size=PAGE,
            enable_hierarchical_cache=True,
            hicache_ratio=((host_slots - 1) * PAGE + 0.5) / tokens,
            hicache_write_policy=policy,
            hicache_io_backend="direct",
            hicache_mem_layout="layer_first",
        )
        set_global_server_args_for_scheduler(arguments)
        self.pool = MHATokenToKVPool(
            size=tokens,
            page_size=PAGE,
            dtype=torch.float32,
            head_num=1,
            head_dim=1,
            layer_num=LAYERS,
            device="cpu",
            enable_memory_saver=False,
        )
        self.allocator = PagedTokenToKVPoolAllocator(
            tokens, page_size=PAGE, dtype=torch.float32, device="cpu", kvcache=self.pool, need_sort=False
        )
        parameters = CacheInitParams(
            req_to_token_pool=ReqToTokenPool(
                size=1, max_context_len=PAGE, device="cpu", enable_memory_saver=False
            ),
            token_to_kv_pool_allocator=self.allocator,
            page_size=PAGE,
            disable=False,
            tree_components=(ComponentType.FULL,),
            enable_kv_cache_events=True,
            tree_core_backend=core,
        )
        self.cache = UnifiedRadixCache(parameters)
        self.cache.init_hicache(arguments, parameters)
        atexit.unregister(self.cache.shutdown)
        self.controller = self.cache.cache_controller
        self.host = self.cache.host_pool_group
        self.forward = Stream()
        self.controller.load_fence_stream = self.controller.write_fence_stream = self.forward
        self._prefixes: dict[int, tuple[int, ...]] = {}

    # Calls for a request.

    def match(self, blocks: Sequence[int]) -> PrefixMatch:
        """`match_prefix`."""
        found = self.cache.match_prefix(MatchPrefixParams(key=_key(blocks)))
        return self._at(found.last_device_node, found.best_match_node, found.host_hit_length)

    def lock(self, match: PrefixMatch) -> Any:
        """`lock`, of the last node on the device."""
        return self.cache.lock(match.node.last_device_node)

    def unlock(self, lock: Any) -> None:
        """`unlock`."""
        self.cache.unlock(lock)

    def load_back(self, match: PrefixMatch) -> PrefixMatch:
        """`init_load_back`, as for a request that is admitted."""
        found = match.node
        request = SimpleNamespace(
            rid="r",
            last_node=found.last_device_node,
            swa_host_hit_length=0,
            mamba_host_hit_length=0,
            kv=SimpleNamespace(mamba_pool_idx=None),
        )
        tokens, node = self.cache.init_load_back(
            InitLoadBackParams(found.best_match_node, match.host_blocks * PAGE, req=request)
        )
        return self._at(node) if tokens else match

    def allocatable(self) -> int:
        """The number of pages that the scheduler counts on: free and evictable ones."""
        return (self.allocator.available_size() + self.cache.full_evictable_size()) // PAGE

    def allocate(self, count: int) -> Sequence[int] | None:
        """Allocate pages, after evicting as many as are missing. None if there are too few."""
        missing = count * PAGE - self.allocator.available_size()
        if missing > 0:
            self.cache.evict_for_alloc(EvictParams(num_tokens=missing))
        indices = self.allocator.alloc(count * PAGE)
        return None if indices is None else self._slots(indices)

    def free(self, slots: Sequence[int]) -> None:
        """`free` of the allocator."""
        self.allocator.free(_indices(slots))

    def insert(self, blocks: Sequence[int], slots: Sequence[int], held: int) -> PrefixMatch:
        """`insert`, as `checkpoint_into_tree` calls it."""
        done = self.cache.insert(
            InsertParams(
                key=_key(blocks),
                value=_indices(slots),
                prev_prefix_len=held * PAGE,
                inserted_len=held * PAGE,
            )
        )
        return self._at(done.last_device_node)

    # Calls of the scheduler.

    def launch(self, compute: Callable[[], None]) -> Any:
        """Start loads, and queue `compute` on the forward stream, which waits for them."""
        producer = self.cache.ready_to_load_host_cache()
        if producer >= 0:
            self.forward.wait_event(self.controller.layer_done_counter.events[producer].finish_event)
        self.forward.add(compute)
        end = Event()
        end.record(self.forward)
        return end

    def finish(self, step: Any) -> None:
        """Wait for the forward stream."""
        step.synchronize()

    def poll(self) -> None:
        """`check_hicache_events`."""
        self.cache.check_hicache_events()

    def copy_next(self, to_host: bool) -> bool:
        """Run the next work of one of the two copy streams."""
        engine = self.controller.l2_transfer_engine
        return (engine.device_to_host_stream if to_host else engine.host_to_device_stream).run_next()

    def reset(self) -> None:
        """`flush_cache` of the scheduler."""
        self.cache.reset()
        self.allocator.clear()

    # State that the machine checks.

    def free_slots(self) -> tuple[Collection[int], Collection[int]]:
        """The free lists of the allocator and of the host pool."""
        pool = self.host.get_pool(PoolName.KV)
        pages = [int(page) - 1 for page in self.allocator.get_all_free_pages()]
        rows = torch.cat([pool.free_slots, *pool.release_slots])
        return pages, [int(row) // PAGE for row in rows[::PAGE]]

    def tree_slots(self) -> tuple[Collection[int], Collection[int]]:
        """The slots of all nodes, on (device, host). The core in Rust does not expose the host's slots: for
        it, all slots that are not free are returned."""
        device = self._slots(self.cache.all_values_flatten())
        if self.core == "rust":
            free = {*self.free_slots()[1]}
            return device, [slot for slot in range(self.host_slots) if slot not in free]
        return device, [row // PAGE for row in _host_rows(self.cache.tree_core.root_node)[::PAGE]]

    def read(self, slot: int) -> int:
        """The word in all tokens of a page, in keys and values of all layers; -1 if they differ."""
        words = {int(word) for rows in self._rows(slot) for word in rows.flatten()}
        return words.pop() if len(words) == 1 else -1

    def write(self, slot: int, word: int) -> None:
        """Write a word to all tokens of a page."""
        for rows in self._rows(slot):
            rows.fill_(word)

    def take_events(self) -> Iterable[TreeEvent]:
        """`take_events`, with prefixes in place of hashes."""
        return list(self._events())

    def _events(self) -> Iterator[TreeEvent]:
        for event in self.cache.take_events():
            if isinstance(event, AllBlocksCleared):
                yield TreeEvent("cleared")
                continue
            on_host = event.medium == StorageMedium.CPU
            if isinstance(event, BlockStored):
                self._learn(event)
            kind = "stored" if isinstance(event, BlockStored) else "removed"
            for block_hash in event.block_hashes:
                yield TreeEvent(kind, on_host, self._prefixes[block_hash])

    def _learn(self, event: Any) -> None:
        """Record the prefix of each block hash of a stored event."""
        prefix = self._prefixes.get(event.parent_block_hash, ())
        for block_hash, block in zip(event.block_hashes, event.token_ids[::PAGE]):
            prefix += (block,)
            self._prefixes[block_hash] = prefix

    def _rows(self, slot: int) -> list[Any]:
        first = (slot + 1) * PAGE
        buffers = (*self.pool.k_buffer, *self.pool.v_buffer)
        return [buffer[first : first + PAGE] for buffer in buffers]

    def _at(self, last_device_node: Any, best_match_node: Any = None, host_tokens: int = 0) -> PrefixMatch:
        slots = self._slots(self.cache.path_device_indices(last_device_node))
        return PrefixMatch(slots, host_tokens // PAGE, _Nodes(last_device_node, best_match_node))

    def _slots(self, indices: Any) -> list[int]:
        return [int(index) // PAGE - 1 for index in indices[::PAGE]]


def _key(blocks: Sequence[int]) -> RadixKey:
    return RadixKey(array("q", [block for block in blocks for _ in range(PAGE)]))


def _indices(slots: Sequence[int]) -> Any:
    rows = [(slot + 1) * PAGE + token for slot in slots for token in range(PAGE)]
    return torch.tensor(rows, dtype=torch.int64)


def _host_rows(node: Any) -> list[int]:
    own = node.component_data[ComponentType.FULL].host_value
    rows = [] if own is None else own.tolist()
    return [*rows, *(row for child in node.children.values() for row in _host_rows(child))]


class _Sglang(PrefixTreeMachine):
    policy, core = "", "python"

    def make_tree(self, device_slots: int, host_slots: int) -> Any:
        return SglangTree(device_slots, host_slots, self.policy, self.core)


class WriteThrough(_Sglang):
    """Policy: each block is backed up when it is inserted."""

    policy = "write_through"


class WriteThroughSelective(_Sglang):
    """Policy: a block is backed up when it is hit again."""

    policy = "write_through_selective"


class WriteBack(_Sglang):
    """Policy: a block is backed up when the device evicts it."""

    policy = "write_back"


class WriteThroughRust(WriteThrough):
    """`WriteThrough` with the Rust core, SGLang's default."""

    core = "rust"


class WriteThroughSelectiveRust(WriteThroughSelective):
    """`WriteThroughSelective` with the Rust core, SGLang's default."""

    core = "rust"


class WriteBackRust(WriteBack):
    """`WriteBack` with the Rust core, SGLang's default."""

    core = "rust"
