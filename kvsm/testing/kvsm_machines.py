"""Machines for kvsm's own parts: built-in targets of `kvsm conform`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from tempfile import NamedTemporaryFile
from typing import Any

from kvsm.copies import CopyEngine, FileCopyEngine, HostCopyEngine, SimulatedCopyEngine
from kvsm.copies.simulated import SimulatedDevice
from kvsm.errors import PropertyBroken
from kvsm.properties import Property
from kvsm.testing.copy_engine_machine import CopyEngineMachine
from kvsm.testing.offload_machine import OffloadMachine


class SchedulerMachine(OffloadMachine):
    """kvsm's `OffloadScheduler` with its core, its LRU policy and a small engine."""


class HostCopyMachine(CopyEngineMachine):
    """kvsm's copy engine between two pools in host memory, with threads."""

    def make_engine(self, device: Any, host: Any) -> CopyEngine:
        return HostCopyEngine(device, host)


class FileCopyMachine(CopyEngineMachine):
    """kvsm's copy engine whose host pool is a file."""

    def make_engine(self, device: Any, host: Any) -> CopyEngine:
        self.file = NamedTemporaryFile(prefix="kvsm-conform-")  # noqa: SIM115 (closed in `close`)
        self.file.write(host.tobytes())
        self.file.flush()
        engine = FileCopyEngine(device, self.file.name, len(host))
        self.host = engine.blocks
        return engine

    def close(self) -> None:
        super().close()
        self.file.close()


class StreamCopyMachine(CopyEngineMachine):
    """kvsm's copy engine for GPUs, with streams and events, on a simulated device."""

    simulated: SimulatedDevice

    def make_engine(self, device: Any, host: Any) -> CopyEngine:
        engine = SimulatedCopyEngine(device, host, self.seed)
        self.simulated = engine.simulated
        return engine

    def compute(self, action: Callable[[], None], reads: Sequence[int], writes: Sequence[int]) -> None:
        self.simulated.launch("compute", reads=reads, writes=writes, action=action)

    def synchronize(self) -> None:
        if self.started:
            self.simulated.synchronize()

    def wind_down(self) -> None:
        super().wind_down()
        if self.simulated.races:
            raise PropertyBroken(Property.COPY_ORDER, str(self.simulated.races[0]))
