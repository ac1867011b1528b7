"""The events of a walked connector, so that `kvsm show` and `kvsm replay` read a failure.

A connector with a core of kvsm's has events of its own; they are kept in memory. Of vLLM's
OffloadingConnector with vLLM's own manager a `ManagerRecorder` hears each call, as under `RecordingSpec`. Of
any other connector nothing is known that would be an event, and there is no log.

Times in these events count events, so that a failure has the same log each time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any
from unittest.mock import patch

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from kvsm.core.kv_events import Publisher
from kvsm.core.log.memory import MemoryLog
from kvsm.core.offloader import Offloader
from kvsm.events import OffloadConfig
from kvsm.properties import Property
from kvsm.vllm.manager_recorder import LOADED_AT_ONCE, STORES_PER_SLOT, ManagerRecorder
from kvsm.vllm.recording_manager import RecordingManager


@contextmanager
def recording(events: MemoryLog) -> Iterator[None]:
    """In a `with` block, the first core that a connector of kvsm's makes keeps its events here."""

    def make(
        config: OffloadConfig, event_log: Any, *, publisher: Publisher | None, **options: Any
    ) -> Offloader:
        if event_log is None and not events:
            event_log, options["clock_ns"] = events, count().__next__
        return Offloader(config, event_log, publisher=publisher, **options)

    with patch("kvsm.vllm.engine_offloader.Offloader", make):
        yield


def record_manager(connector: Any, events: MemoryLog) -> None:
    """Keep events of vLLM's own manager here, if the scheduler's side of this connector has one."""
    side: Any = getattr(connector, "connector_scheduler", None)
    manager: Any = getattr(side, "manager", None)
    if not isinstance(connector, OffloadingConnector) or type(manager) is not CPUOffloadingManager:
        return
    chunks = manager._num_chunks
    config = OffloadConfig(
        host_blocks=chunks,
        device_blocks=STORES_PER_SLOT * chunks + LOADED_AT_ONCE,
        defer_ticks=0,
        transfer_ticks=0,
    )
    recorder = _QuietRecorder(config, announces=manager.events is not None, clock_ns=count().__next__)
    events += _opening(recorder)
    recorder.log = events
    side.manager = RecordingManager(manager, recorder)


class _QuietRecorder(ManagerRecorder):
    """It tells its findings to nobody: the walk has checks of its own, which need no ledger."""

    def _find(self, property: Property, message: str) -> None:  # noqa: ARG002 (the recorder's signature)
        self.found[property] += 1


def _opening(recorder: ManagerRecorder) -> MemoryLog:
    """The event with which a log of this recorder begins."""
    opened = MemoryLog()
    Offloader(recorder.config, opened, clock_ns=lambda: 0)
    return opened
