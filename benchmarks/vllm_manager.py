"""Call vLLM's `CPUOffloadingManager` for each request as vLLM 0.33's connector does."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

VLLM_POLICIES = ("lru", "arc") if find_spec("vllm") is not None else ()
"""The manager's own policies; none if vLLM is not installed."""


def make_manager(policy: str, host_blocks: int) -> Any:
    """Create vLLM's manager of a host pool with `host_blocks` slots. policy: one of `VLLM_POLICIES`."""
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

    return CPUOffloadingManager(host_blocks, cache_policy=policy)


def which_vllm() -> str:
    """Return the version of vLLM in words, or that it is missing."""
    return f"vLLM {version('vllm')}" if VLLM_POLICIES else "vLLM is not installed, so its rows are missing"


class VllmRequest:
    """A request of vLLM's manager.

    The connector of vLLM 0.33 never calls `touch`. The manager learns of uses from `prepare_load` and
    `prepare_store`, and `on_request_finished` makes all blocks of the request the latest used.
    """

    def __init__(self, manager: Any, name: str, keys: Sequence[bytes]) -> None:
        from vllm.v1.kv_offload.base import LookupResult, ReqContext

        self._manager, self._keys, self._hit = manager, keys, LookupResult.HIT
        self._context = ReqContext(req_id=name)
        self._loading: Sequence[bytes] = ()
        self._storing: Sequence[bytes] = ()
        manager.on_new_request(self._context)
        for end, key in enumerate(keys, 1):
            self._context.set_offload_key_position(key, end)

    def plan_load(self) -> int:
        """Begin the load of the leading blocks that the host has. Returns their number."""
        manager, context, keys, hits = self._manager, self._context, self._keys, 0
        while hits < len(keys) and manager.lookup(keys[hits], context) is self._hit:
            hits += 1
        if hits:
            self._loading = keys[:hits]
            manager.prepare_load(self._loading, context)
        return hits

    def plan_store(self, keys: Sequence[bytes]) -> int:
        """Begin the store of these blocks. Returns how many are stored: all that are new, or none if they do
        not all find room."""
        output = self._manager.prepare_store(keys, self._context)
        self._storing = output.keys_to_store if output is not None else ()
        return len(self._storing)

    def end_copies(self) -> None:
        """End the copies that were begun."""
        if self._loading:
            self._manager.complete_load(self._loading, self._context)
        if self._storing:
            self._manager.complete_store(self._storing, self._context)
        self._loading = self._storing = ()

    def finish(self) -> None:
        """Finish the request."""
        self._manager.on_request_finished(self._context)
