"""A machine for vLLM's `kvcr` tier. It needs the packages `kvcr` and `nixl`."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any

from kvcr import ROUTER_HINT_CAPABILITIES
from vllm.v1.kv_offload.tiering.kvcr.manager import KVCRSecondaryTierManager

from kvsm.testing.secondary_tier_machine import SecondaryTierMachine

_SLOTS = 4


class KvcrTier(SecondaryTierMachine):
    """vLLM's `kvcr` tier with its local pool of four chunks, and no other engine to ask."""

    capacity = _SLOTS
    polls_forever = may_fail = True  # a store fails if all slots belong to stores in flight

    def make_tier(self, view: memoryview) -> Any:
        events = SimpleNamespace(enable_kv_cache_events=False, self_describing_kv_events=False)
        config = SimpleNamespace(parallel=SimpleNamespace(data_parallel_rank_local=None))
        spec: Any = SimpleNamespace(config=config, kv_events_config=events)
        return KVCRSecondaryTierManager(
            spec,
            view,
            "kvcr",
            router_capabilities=ROUTER_HINT_CAPABILITIES,
            control_host="127.0.0.1",
            control_advertise_host="127.0.0.1",
            control_ports=[next(_ports)],
            secondary_g2_slots=_SLOTS,
        )


_ports = count(20_000)
