"""Managers for the machine of `kvsm.testing`: vLLM's, kvsm's, and vLLM's with one fault each."""

# ruff: noqa: ARG002 (what is broken does not look at its arguments)

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.tiering.example.manager import ExampleSecondaryTierManager
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager


def vllms(blocks: int, policy: str = "lru", kind: type[Any] = CPUOffloadingManager) -> Any:
    return kind(blocks, policy, enable_events=True)


class _Memory:
    """Replaces the memory that the workers share with the tiers."""

    def __init__(self, blocks: int) -> None:
        self._bytes = np.zeros((blocks, 16), np.uint8)

    def create_kv_memoryview(self) -> memoryview:
        return memoryview(self._bytes)

    def cleanup(self) -> None:
        pass


def tiers(blocks: int, policy: str = "lru") -> TieringOffloadingManager:
    """vLLM's tiering manager over its example of a tier, whose copies end at once."""
    primary = CPUPrimaryTierOffloadingManager(blocks, _Memory(blocks), policy, enable_events=True)
    below = ExampleSecondaryTierManager(None, primary.get_kv_memoryview(), "example")
    return TieringOffloadingManager(primary, [below])


# One fault each.


class EvictsUnderALoad(CPUOffloadingManager):
    def prepare_load(self, keys: Collection[Any], req_context: Any) -> Any:
        spec = super().prepare_load(keys, req_context)
        super().complete_load(keys, req_context)
        return spec

    def complete_load(self, keys: Collection[Any], req_context: Any) -> None:
        pass


class LeaksOnAFailedStore(CPUOffloadingManager):
    def complete_store(self, keys: Collection[Any], req_context: Any, success: bool = True) -> None:
        free = list(self._free_list)
        super().complete_store(keys, req_context, success)
        if not success:
            self._free_list[:] = free


class HitsWhatIsBeingStored(CPUOffloadingManager):
    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        return LookupResult.MISS if self._policy.get(key) is None else LookupResult.HIT


class TellsAStoreTwice(CPUOffloadingManager):
    def complete_store(self, keys: Collection[Any], req_context: Any, success: bool = True) -> None:
        super().complete_store(keys, req_context, success)
        if success:
            self.events.append(self.events[-1])


class TouchPins(CPUOffloadingManager):
    """A touch counts as a reader, which nobody ends."""

    def touch(self, keys: Collection[Any], req_context: Any) -> None:
        ready = [key for key in keys if self.lookup(key, req_context) is LookupResult.HIT]
        self.prepare_load(ready, req_context)


class BelievesFailedStores(CPUOffloadingManager):
    def complete_store(self, keys: Collection[Any], req_context: Any, success: bool = True) -> None:
        super().complete_store(keys, req_context)


class KeepsWhatIsReset(CPUOffloadingManager):
    def reset_cache(self) -> None:
        pass


class LoadsTheNextBlock(CPUOffloadingManager):
    def prepare_load(self, keys: Collection[Any], req_context: Any) -> Any:
        spec = super().prepare_load(keys, req_context)
        spec.block_ids = (spec.block_ids + 1) % self._num_chunks
        return spec


class EvictsSilently(CPUOffloadingManager):
    def prepare_store(self, keys: Collection[Any], req_context: Any) -> Any:
        output = super().prepare_store(keys, req_context)
        if output is not None:
            output.evicted_keys.clear()
        return output


class MissesWhatIsTouched(CPUOffloadingManager):
    """Takes a key that was touched for one that was evicted."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.touched: set[Any] = set()

    def touch(self, keys: Collection[Any], req_context: Any) -> None:
        self.touched.update(keys)

    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        found = super().lookup(key, req_context)
        return LookupResult.MISS if found is LookupResult.HIT and key in self.touched else found


class MissesTheFourthKey(CPUOffloadingManager):
    """Looks no further than three keys for a request."""

    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        found = super().lookup(key, req_context)
        position = req_context.get_offload_key_position(key)
        return LookupResult.MISS if found is LookupResult.HIT and position == 64 else found


class WaitsForever(CPUOffloadingManager):
    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        found = super().lookup(key, req_context)
        return LookupResult.HIT_PENDING if found is LookupResult.HIT else found


class AnswersYes(CPUOffloadingManager):
    def lookup(self, key: Any, req_context: Any) -> Any:
        return self._policy.get(key) is not None


class RefusesWhatFailed(CPUOffloadingManager):
    """What a request could not store once, it is told, has no room."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.failed: set[tuple[str, Any]] = set()

    def complete_store(self, keys: Collection[Any], req_context: Any, success: bool = True) -> None:
        if not success:
            self.failed.update((req_context.req_id, key) for key in keys)
        super().complete_store(keys, req_context, success)

    def prepare_store(self, keys: Collection[Any], req_context: Any) -> Any:
        if any((req_context.req_id, key) in self.failed for key in keys):
            return None
        return super().prepare_store(keys, req_context)


class LosesRequests(CPUOffloadingManager):
    """Forgets a request when it is over, although its copies are not."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.requests: dict[str, int] = {}

    def on_new_request(self, req_context: Any) -> Any:
        self.requests[req_context.req_id] = 0
        return super().on_new_request(req_context)

    def complete_store(self, keys: Collection[Any], req_context: Any, success: bool = True) -> None:
        self.requests[req_context.req_id] += 1
        super().complete_store(keys, req_context, success)

    def on_request_finished(self, req_context: Any) -> None:
        del self.requests[req_context.req_id]
        super().on_request_finished(req_context)
