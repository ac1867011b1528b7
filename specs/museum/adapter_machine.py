"""A machine of Hypothesis for kvsm's manager in vLLM's OffloadingConnector. vLLM must be there."""

from __future__ import annotations

from kvsm.core.kv_events import Publisher
from kvsm.core.offloader import Offloader
from kvsm.events import OffloadConfig
from kvsm.explain.metrics import Metrics
from kvsm.testing import ManagerMachine, Recorder
from kvsm.vllm.engine_offloader import EngineOffloader
from kvsm.vllm.spec_manager import PLACEHOLDERS_PER_HOST_BLOCK, KvsmManager


def kvsms(blocks: int) -> KvsmManager:
    """A new manager of kvsm's."""
    config = OffloadConfig(
        host_blocks=blocks,
        device_blocks=PLACEHOLDERS_PER_HOST_BLOCK * blocks,
        defer_ticks=0,
        transfer_ticks=0,
    )
    core = Offloader(config, Recorder(), publisher=Publisher(), clock_ns=lambda: 0)
    return KvsmManager(EngineOffloader(core, Metrics.attached_to(core), None))


class KvsmManagerMachine(ManagerMachine):
    """It holds its hits longer than vLLM needs, and so the end of a step comes after its stores here."""

    hits_hold = True
    schedule_end_is_last = True

    def make_manager(self, blocks: int) -> KvsmManager:
        return kvsms(blocks)
