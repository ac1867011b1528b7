"""Connectors that serve less than they have. Bytes, order, events and blocks are right."""

# ruff: noqa: ARG002 (what is broken does not look at its arguments)

from __future__ import annotations

from sys import maxsize
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector import (
    SimpleCPUOffloadConnector,
)

from kvsm.check.vllm_fuzz.shape import BLOCK_TOKENS

Answer = tuple[int | None, bool]


class Shortened(SimpleCPUOffloadConnector):
    """Serves `shorter` of what it has."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._most = maxsize
        if self.scheduler_manager is not None:
            coordinator = self.scheduler_manager.cpu_coordinator
            find = coordinator.find_longest_cache_hit
            coordinator.find_longest_cache_hit = lambda hashes, most: find(hashes, min(most, self._most))

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Answer:
        tokens, later = super().get_num_new_matched_tokens(request, num_computed_tokens)
        kept = self.shorter(request, num_computed_tokens, tokens) if tokens else tokens
        if kept == tokens:
            return tokens, later
        self._most = kept
        answer = super().get_num_new_matched_tokens(request, num_computed_tokens)
        self._most = maxsize
        return answer

    def shorter(self, request: Any, computed: int, tokens: int) -> int:
        raise NotImplementedError


class ServesOneBlockLess(Shortened):
    """Serves no second block behind the device's without leaving one out."""

    def shorter(self, request: Any, computed: int, tokens: int) -> int:
        return tokens - BLOCK_TOKENS if tokens > 2 * BLOCK_TOKENS else tokens


class ServesNothingAfterAPreemption(Shortened):
    """Takes a preempted request for one that has just begun to store."""

    def shorter(self, request: Any, computed: int, tokens: int) -> int:
        return 0 if request.num_preemptions else tokens


class ServesOnlyWholePrompts(Shortened):
    """Serves nothing behind blocks that the device has."""

    def shorter(self, request: Any, computed: int, tokens: int) -> int:
        return 0 if computed else tokens


class ServesEachPromptOnce(Shortened):
    """Forgets a prompt that it has served."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._served: set[bytes] = set()

    def shorter(self, request: Any, computed: int, tokens: int) -> int:
        last = request.block_hashes[(computed + tokens) // BLOCK_TOKENS - 1]
        is_known = last in self._served
        self._served.add(last)
        return 0 if is_known else tokens


class ServesFourBlocks(Shortened):
    """Serves no block behind the fourth."""

    def shorter(self, request: Any, computed: int, tokens: int) -> int:
        return max(0, min(tokens, 4 * BLOCK_TOKENS - computed))


class NeverServesTheLastBlock(Shortened):
    """Leaves a block to compute, and not a token."""

    def shorter(self, request: Any, computed: int, tokens: int) -> int:
        last = (request.num_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        return tokens - BLOCK_TOKENS * (computed + tokens == last)


class ServesEvenEnds(Shortened):
    """Ends each hit with a pair of blocks, if the model has sliding windows."""

    def shorter(self, request: Any, computed: int, tokens: int) -> int:
        is_hybrid = len(self.scheduler_manager.cpu_kv_cache_config.kv_cache_groups) > 1
        return max(0, tokens - (computed + tokens) % (2 * BLOCK_TOKENS) * is_hybrid)


class MissesAfterAdapters(Shortened):
    """Serves no request with an adapter."""

    def shorter(self, request: Any, computed: int, tokens: int) -> int:
        return 0 if request.lora_request else tokens


class SkipsTheFirstChunk(OffloadingConnector):
    """Never stores the first chunk of a long prompt, so that all its other chunks are stored in vain."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.connector_scheduler is not None:
            self.connector_scheduler.__class__ = _SkipsTheFirst


class _SkipsTheFirst(OffloadingConnectorScheduler):
    def _calc_num_offloadable_tokens(self, req_status: Any, num_computed_tokens: int) -> int:
        for state in req_status.group_states:
            if not state.next_stored_chunk_idx and len(state.offload_keys) > 3:
                state.next_stored_chunk_idx = 1
        return super()._calc_num_offloadable_tokens(req_status, num_computed_tokens)


class AsksTheFirstChild(MultiConnector):
    """Asks only its first child."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Answer:
        tokens, later = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if self._requests_to_connector.get(request.request_id):
            del self._requests_to_connector[request.request_id]
            for child in self._connectors:
                child.get_num_new_matched_tokens(request, request.num_tokens)
            return 0, False
        return tokens, later


SHORT_SERVERS: tuple[type, ...] = (
    ServesOneBlockLess,
    ServesNothingAfterAPreemption,
    ServesOnlyWholePrompts,
    ServesEachPromptOnce,
    ServesFourBlocks,
    NeverServesTheLastBlock,
    ServesEvenEnds,
    MissesAfterAdapters,
    SkipsTheFirstChunk,
)
