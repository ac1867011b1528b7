"""Connectors of kvsm whose copies fail, or run when a test says so. vLLM imports this module by name.

Each connector wraps the copy engine of every rank, and changes nothing else.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from log_life import Disk
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvsm.copies import CopyEngine, CopyResult, FailingCopyEngine
from kvsm.copies.copy_engine import WrappedCopyEngine
from kvsm.copies.worker import Worker
from kvsm.core.plan import TransferJob
from kvsm.events import Direction
from kvsm.ids import listed, pack
from kvsm.vllm.connector import KvsmConnector
from kvsm.vllm.extra_config import ConnectorOptions, parse
from kvsm.vllm.recording_spec import RecordingSpec
from kvsm.vllm.worker_side import WorkerSide


class SteeredEngine(WrappedCopyEngine):
    """A `CopyEngine` that does not depend on time: a transfer is carried out when it is submitted.

    held: directions whose transfers wait for `release`, or until something waits for them.
    failing: directions whose transfers copy half of their blocks and then fail.
    """

    def __init__(self, engine: CopyEngine) -> None:
        super().__init__(engine)
        self.held: set[Direction] = set()
        self.failing: set[Direction] = set()
        self._waiting: list[TransferJob] = []
        self._doomed: set[int] = set()

    def submit(self, job: TransferJob, after: Any = None) -> None:  # noqa: ARG002 (compute is over by now)
        if job.direction in self.failing:
            self._doomed.add(job.transfer)
            job = half_of(job)
        self._waiting.append(job)
        if job.direction not in self.held:
            self.release([job.transfer])

    def release(self, transfers: Iterable[int] | None = None) -> None:
        """Carry out these transfers, or all that are held."""
        chosen = None if transfers is None else set(transfers)
        released = [job for job in self._waiting if chosen is None or job.transfer in chosen]
        self._waiting = [job for job in self._waiting if job not in released]
        for job in released:
            self._engine.submit(job)
        self._engine.wait([job.transfer for job in released])

    def poll(self) -> list[CopyResult]:
        return [
            msgspec.structs.replace(result, good=False, error="made to fail", bytes=0)
            if result.transfer in self._doomed
            else result
            for result in self._engine.poll()
        ]

    def wait(self, transfers: Iterable[int]) -> None:
        self.release(transfers)

    def drain(self) -> None:
        self.release()

    def close(self) -> None:
        self.release()
        self._engine.close()


def half_of(job: TransferJob) -> TransferJob:
    """The job of the first half of its blocks."""
    devices, hosts = listed(job.device_blocks), listed(job.host_blocks)
    half = len(hosts) // 2
    return msgspec.structs.replace(job, device_blocks=pack(devices[:half]), host_blocks=pack(hosts[:half]))


class _WrappedWorkerSide(WorkerSide):
    """owner: the connector whose `wrap` wraps the copy engine."""

    owner: SteeredConnector

    def _make(self, host_blocks: int) -> Worker:
        super()._make(host_blocks)
        assert self._copies is not None
        engine = self.owner.wrap(self._copies.engine, self._rank)
        self._copies = self._copies._replace(engine=engine)
        self._worker = Worker(self._rank, engine)
        return self._worker


class SteeredConnector(KvsmConnector):
    """Makes its copies with the engine `SteeredConnector.copies`, in the worker's process."""

    copies: SteeredEngine

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if role is KVConnectorRole.WORKER:
            options = parse(ConnectorOptions, vllm_config.kv_transfer_config.kv_connector_extra_config)
            self._side = _WrappedWorkerSide(options, vllm_config, kv_cache_config)
            self._side.owner = self

    def wrap(self, engine: CopyEngine, rank: int) -> CopyEngine:  # noqa: ARG002 (others look at the rank)
        SteeredConnector.copies = SteeredEngine(engine)
        return SteeredConnector.copies


class StuckConnector(SteeredConnector):
    """Ends no store before something waits for it."""

    def wrap(self, engine: CopyEngine, rank: int) -> CopyEngine:  # noqa: ARG002
        steered = SteeredEngine(engine)
        steered.held = {Direction.STORE}
        return steered


class OneRankFailsConnector(SteeredConnector):
    """Fails half of all transfers on the second rank, and none on the first one."""

    def wrap(self, engine: CopyEngine, rank: int) -> CopyEngine:
        return FailingCopyEngine(engine, seed=1, rate=0.5) if rank == 1 else engine


class _DeadlyEngine(SteeredEngine):
    def submit(self, job: TransferJob, after: Any = None) -> None:
        if job.direction is Direction.LOAD:
            os.kill(os.getpid(), signal.SIGKILL)
        super().submit(job, after)


class DyingConnector(SteeredConnector):
    """Kills the second rank's process at its first load."""

    def wrap(self, engine: CopyEngine, rank: int) -> CopyEngine:
        return _DeadlyEngine(engine) if rank == 1 else engine


class LosingEngine:
    """A `CopyEngine` that loses the first job of each of these directions: it neither runs nor ends."""

    def __init__(self, engine: CopyEngine, *directions: Direction) -> None:
        self._engine, self._to_lose, self._lost = engine, set(directions), set[int]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, job: TransferJob, after: Any = None) -> None:
        if job.direction in self._to_lose:
            self._to_lose.remove(job.direction)
            self._lost.add(job.transfer)
        else:
            self._engine.submit(job, after)


class LosingConnector(SteeredConnector):
    """Loses the first store and the first load of the second rank."""

    def wrap(self, engine: CopyEngine, rank: int) -> CopyEngine:
        losing: Any = LosingEngine(engine, *Direction)
        return losing if rank == 1 else engine


def fill_disk() -> None:
    """From now on the disk of this process's log is full after the first events."""
    os.pwrite = Disk(FREE_BYTES).pwrite  # type: ignore[assignment]


class FullDiskConnector(KvsmConnector):
    """Behaves as if the log's disk was full after the first events."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        if role is KVConnectorRole.SCHEDULER:
            fill_disk()
        super().__init__(vllm_config, role, kv_cache_config)


class FullDiskRecordingSpec(RecordingSpec):
    """Behaves as if the log's disk was full after the first events, for vLLM's own offload."""

    def get_manager(self) -> Any:
        fill_disk()
        return super().get_manager()


class DeletedLogConnector(KvsmConnector):
    """Deletes the directory of the log in the twentieth step, which takes two seconds."""

    steps = 0

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        self.steps += 1
        if self.steps == 20:
            options = self._vllm_config.kv_transfer_config.kv_connector_extra_config
            (log,) = Path(options["event_log"]).iterdir()
            shutil.rmtree(log)
            time.sleep(2)
        return super().build_connector_meta(scheduler_output)


class DeafConnector(KvsmConnector):
    """Lets another thread of vLLM's core receive SIGTERM, while the main thread sleeps.

    Python runs the signal's handler in the main thread, as soon as something else has woken that thread.
    """

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        return super().get_num_new_matched_tokens(request, num_computed_tokens)


class KilledConnector(KvsmConnector):
    """Kills vLLM's core while it shuts down."""

    def shutdown(self) -> None:
        if self.role is KVConnectorRole.SCHEDULER:
            os.kill(os.getpid(), signal.SIGKILL)
        super().shutdown()


FREE_BYTES = 3000
