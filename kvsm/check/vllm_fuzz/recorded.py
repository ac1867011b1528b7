"""Keep the events of a walked connector, so that `kvsm show` and `kvsm replay` can read a failure.

A connector with a core of kvsm's emits events; they are kept in memory. For vLLM's OffloadingConnector with
vLLM's own manager, a `ManagerRecorder` turns the calls of the manager into events, as under `RecordingSpec`.
Other connectors produce no events, so no log is written.

The times in these events are their numbers, so that a failure always has the same log.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any
from unittest.mock import patch

import msgspec
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
def recording(events: MemoryLog, *, waits: bool = True) -> Iterator[None]:
    """In this `with` block, the first core that kvsm's connector creates appends its events to `events`.

    waits: whether requests may wait for blocks in flight.
    """

    def make(
        config: OffloadConfig, event_log: Any, *, publisher: Publisher | None, **options: Any
    ) -> Offloader:
        if event_log is None and not events:
            event_log, options["clock_ns"] = events, count().__next__
        if not waits:
            config = msgspec.structs.replace(config, defer_ticks=0)
        return Offloader(config, event_log, publisher=publisher, **options)

    with patch("kvsm.vllm.engine_offloader.Offloader", make):
        yield


def record_manager(connector: Any, events: MemoryLog) -> None:
    """Append events for vLLM's own manager here, if the scheduler side of this connector has one."""
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
    """A recorder that only counts its findings. The walk reports errors by its own checks."""

    def _find(self, property: Property, message: str) -> None:  # noqa: ARG002 (the recorder's signature)
        self.found[property] += 1


def _opening(recorder: ManagerRecorder) -> MemoryLog:
    """The first events of a log of this recorder."""
    opened = MemoryLog()
    Offloader(recorder.config, opened, clock_ns=lambda: 0)
    return opened
