"""Connectors for `vllm_gpu.py`: kvsm's own, with a copy engine that compares bytes or fails.

vLLM imports this module by name.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from kvsm.copies import CopyEngine, CopyResult, FailingCopyEngine
from kvsm.copies.copy_engine import WrappedCopyEngine
from kvsm.core.plan import TransferJob
from kvsm.events import Direction
from kvsm.vllm.connector import KvsmConnector
from kvsm.vllm.worker_side import WorkerSide


class CopyFacts(msgspec.Struct, kw_only=True):
    """What the copies of one engine did.

    stored, loaded: blocks of good transfers, both ends of which were compared.
    moved: loaded blocks that came to another device block than the one they were stored from.
    wrong: one line for each block whose bytes differ.
    failed: bad transfers by direction.
    """

    stored: int = 0
    loaded: int = 0
    moved: int = 0
    wrong: list[str] = []
    failed: dict[str, int] = {}


class TimedCopy(NamedTuple):
    """A copy as the engine reports it: its direction, bytes, and begin and end (s, `time.perf_counter`).

    A GPU reports the length alone; then the end is when the result was polled.
    """

    direction: str
    copied_bytes: int
    began: float
    ended: float


class ObservedEngine(WrappedCopyEngine):
    """A `CopyEngine` that keeps facts about the copies of another one.

    device: the layers, [device blocks, bytes of a block in this layer]; None: nothing is compared.
    host: the host pool, [host blocks, bytes of all layers].
    """

    made: ObservedEngine
    """The engine of this process."""

    def __init__(self, engine: CopyEngine, device: list[Any] | None, host: NDArray[np.uint8]) -> None:
        super().__init__(engine)
        self._device, self._host = device, host
        self._jobs: dict[int, TransferJob] = {}
        self._stored: dict[int, tuple[int, str]] = {}
        """Host block -> the device block it was stored from, and the digest of its bytes."""
        self.facts = CopyFacts()
        self.timed: list[TimedCopy] = []
        ObservedEngine.made = self

    def submit(self, job: TransferJob, after: Any = None) -> None:
        self._jobs[job.transfer] = job
        self._engine.submit(job, after)

    def poll(self) -> list[CopyResult]:
        results = self._engine.poll()
        for result in results:
            job, now = self._jobs.pop(result.transfer), time.perf_counter()
            if not result.good:
                failed = self.facts.failed
                failed[job.direction.name] = failed.get(job.direction.name, 0) + 1
                continue
            lasted = result.lasted or 0.0
            began = now - lasted if result.began is None else result.began
            self.timed.append(TimedCopy(job.direction.name, result.bytes, began, began + lasted))
            if self._device is not None:
                self._compare(job)
        return results

    def _compare(self, job: TransferJob) -> None:
        """Compare both ends of a copy. Its blocks are leased until the result is reported."""
        assert self._device is not None
        devices, hosts = (np.asarray(ids, np.int64) for ids in job.pairs())
        chosen = torch.from_numpy(devices)
        rows = [layer.view(torch.uint8)[chosen.to(layer.device)].cpu() for layer in self._device]
        on_device, on_host = torch.cat(rows, 1).numpy(), self._host[hosts]
        for device, host, mine, its in zip(devices.tolist(), hosts.tolist(), on_device, on_host):
            digest = xxhash.xxh3_128_hexdigest(its.tobytes())
            if job.direction is Direction.STORE:
                self._stored[host] = (device, digest)
                self.facts.stored += 1
            else:
                origin, stored = self._stored[host]
                self.facts.loaded += 1
                self.facts.moved += origin != device
                if stored != digest:
                    self.facts.wrong.append(f"host block {host} changed after it was stored")
            if not np.array_equal(mine, its):
                self.facts.wrong.append(
                    f"{job.direction.name} {job.transfer}: device block {device} and host block {host} "
                    f"differ in {int((mine != its).sum())} bytes"
                )


class ObservedConnector(KvsmConnector):
    """Keeps facts about its copies."""

    compares = False
    """Whether both ends of each copy are compared."""

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        side = self._side
        assert isinstance(side, WorkerSide)
        side.register_kv_caches(kv_caches)
        copies, worker = side._copies, side._worker
        assert copies is not None
        assert worker is not None
        device = side._tensors if self.compares else None
        engine = ObservedEngine(self.wrap(copies.engine), device, copies.pool.blocks)
        side._copies = copies._replace(engine=engine)
        worker.use(engine)

    def wrap(self, engine: CopyEngine) -> CopyEngine:
        """Return the engine to observe."""
        return engine


class ComparingConnector(ObservedConnector):
    """Compares both ends of each copy bit by bit, and each load with its store."""

    compares = True


class FailingConnector(ObservedConnector):
    """A quarter of its transfers copy a part of their blocks and then fail."""

    def wrap(self, engine: CopyEngine) -> CopyEngine:
        return FailingCopyEngine(engine, seed=1, rate=0.25)
