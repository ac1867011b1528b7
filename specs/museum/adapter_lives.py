"""A vLLM engine with kvsm, and actions that `kvsm vllm-fuzz` lacks: new weights, restarts, hung loads.

The engine, its checks and its other actions come from `kvsm.check.vllm_fuzz`. The added actions:

=====================  ========================================================================
action                 what happens
=====================  ========================================================================
weights N              all requests are preempted, the engine computes with weights N from here
                       on, and vLLM's `set_weight_version` announces their name
restart N              the engine runs until idle and shuts down; a new engine starts with
                       weights N, on the same pool and disk
hang RANK              the next load of a rank hangs
wake RANK              the hanging loads of a rank resume
forget                 `reset_prefix_cache` of the connector, also while requests run
=====================  ========================================================================

Each named version of the weights is an epoch: KV computed under another version is wrong (stale data, S14,
shows up as wrong bytes, S15). Unnamed weights never come back. Time passes only while the engine waits for a
hanging copy. A load that was given up may hold its device blocks forever; nothing else may. While the load
hangs, it must hold them, because vLLM allocates free blocks to others (no reuse in flight, S3).

Copies to and from the disk end in the step that begins them.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import msgspec
from vllm.v1.engine.core import EngineCore

from kvsm.check.vllm_fuzz.connectors import transfer_config
from kvsm.check.vllm_fuzz.rank import SimulatedRank
from kvsm.check.vllm_fuzz.runtime import PoolDevice
from kvsm.check.vllm_fuzz.shape import BLOCK_BYTES, BLOCK_TOKENS, MOST_TOKENS, EngineShape, draw_shape
from kvsm.check.vllm_fuzz.vllm_world import VllmWorld
from kvsm.check.vllm_fuzz.word_model import ModelRunner
from kvsm.check.worlds.world import Action
from kvsm.check.worlds.world_files import world_directory
from kvsm.copies import HostPool
from kvsm.copies.streams import StreamCopyEngine
from kvsm.core.plan import TransferJob
from kvsm.errors import PropertyBroken
from kvsm.events import Direction
from kvsm.ids import listed
from kvsm.properties import Property
from kvsm.tiers.disk import DiskCopyEngine
from kvsm.vllm.rank_copies import RankCopies

WEIGHTS = 3
"""The number of named versions of the weights. An engine starts with version 0."""

TIMEOUT_S = 60.0
"""The transfer timeout: a hanging copy is given up after this time."""

WAITS = 16
"""A hanging copy times out after this number of waits."""

DISK_BYTES = 1 << 18
"""Disk space per rank."""

MOST_BLOCKS_OF_GROUP = MOST_TOKENS // BLOCK_TOKENS + 1
"""Device blocks of the largest request, per KV cache group."""

_SHARE = 0.12
"""The probability that a drawn action is an added one."""


class LivedRank(SimulatedRank):
    """A rank whose host pool can outlive the process, and whose loads can hang."""

    clock: Clock

    def __init__(self, *arguments: Any) -> None:
        self.hanging: list[HangingCopies] = []
        with patch("kvsm.vllm.rank_disk.DiskCopyEngine", DiskCopiesAtOnce):
            super().__init__(*arguments)

    def wait_with(self, clock: Clock) -> None:
        """Use `clock` in this rank's part of the connector.

        It advances when the rank waits with an idle device.
        """
        side = self.connector._side
        side.clock = clock.read
        side.pause = lambda _pause_s: self.runtime.device.step() or clock.wait()

    def hang(self) -> bool:
        """Make the next load hang. Returns whether this rank has a copy engine."""
        for engine in self.hanging:
            engine.hangs_next = True
        return bool(self.hanging)

    def wake(self) -> bool:
        """Resume the hanging loads. Returns whether there were any."""
        return bool(sum(engine.let_go() for engine in self.hanging))

    def shutdown(self) -> None:
        self.wake()
        super().shutdown()

    def _make_copies(
        self,
        tensors: Sequence[Any],
        host_blocks: int,
        _verify: bool,
        path: Path | None = None,
        _sharing: Any = None,
        _canonical: Any = None,
        kept: Any = None,
    ) -> RankCopies:
        keep = None if kept is None else kept.keep
        path = path if kept is None else kept.path
        pool = self._host = HostPool(host_blocks, BLOCK_BYTES, path=path, keep=keep)
        device = PoolDevice(self.runtime, list(tensors), pool.blocks, next(self._pools))
        engine = HangingCopies(self.faults.over(StreamCopyEngine(device)))
        self.hanging.append(engine)
        return RankCopies(engine, pool, None, kept is not None)  # type: ignore[arg-type]


class HangingCopies:
    """A `CopyEngine` that wraps another one and can hold a load back until `let_go`.

    hangs_next: whether the next load hangs. written: the device blocks of all loads that have ever hung.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._held: list[tuple[TransferJob, Any]] = []
        self.hangs_next = False
        self.written: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, job: TransferJob, after: Any = None) -> None:
        if not self.hangs_next or job.direction is not Direction.LOAD:
            self._engine.submit(job, after)
            return
        self.hangs_next = False
        self._held.append((job, after))
        self.written.update(listed(job.device_blocks))

    def wait(self, transfers: Any) -> None:
        hung = {job.transfer for job, _ in self._held}
        self._engine.wait([transfer for transfer in transfers if transfer not in hung])

    def let_go(self) -> bool:
        held, self._held = self._held, []
        for job, after in held:
            self._engine.submit(job, after)
        return bool(held)

    @property
    def hangs(self) -> bool:
        return bool(self._held)

    def loads(self) -> list[TransferJob]:
        """The loads that hang now."""
        return [job for job, _ in self._held]


class DiskCopiesAtOnce(DiskCopyEngine):
    """A disk copy engine whose copies end within `submit`, so that runs are reproducible."""

    def submit(self, job: TransferJob, after: Any = None) -> None:
        super().submit(job, after)
        self.wait([job.transfer])


class Clock:
    """A clock (s) that advances only in `wait`."""

    def __init__(self) -> None:
        self._now = 0.0

    def read(self) -> float:
        return self._now

    def wait(self) -> None:
        self._now += TIMEOUT_S / WAITS


class LivedEngine(VllmWorld):
    """A vLLM engine with the added actions above. `kinds`: which of them are drawn."""

    rank_class = LivedRank

    def __init__(self, shape: EngineShape, kinds: Sequence[str], keeps: Sequence[str] = ()) -> None:
        """keeps: the storage that outlives a process: "pool", "disk"."""
        self._kinds, self._unnamed = kinds, count(WEIGHTS)
        self._clock = Clock()
        options: dict[str, Any] = {"transfer_timeout_s": TIMEOUT_S, **shape.extra}
        if keeps:
            place = world_directory()
            weakref.finalize(self, place.cleanup)
            options |= {"weights_version": _name(0), "log_durability": "none"}
            if "pool" in keeps:
                options |= {"pool_dir": f"{place.name}/pool"}
            if "disk" in keeps:
                size = DISK_BYTES * shape.ranks
                options |= {"disk_dir": f"{place.name}/disk", "disk_bytes": size, "disk_flush": "none"}
        super().__init__(msgspec.structs.replace(shape, extra=options))

    def draw(self, random: Random) -> Action:
        drawn = super().draw(random)  # It raises when the run is over.
        if not self._kinds or random.random() >= _SHARE:
            return drawn
        kind = random.choice(self._kinds)
        if kind in ("weights", "restart"):
            return kind, random.randrange(WEIGHTS)
        if kind == "empty":
            return "reset", 1, 0
        return (kind, random.randrange(self.shape.ranks)) if kind in ("hang", "wake") else (kind,)

    # Actions.

    def _start(self) -> None:
        # vLLM derives its first block hash from this seed; processes must agree on it to share blocks.
        with patch.dict(os.environ, PYTHONHASHSEED="0"):
            super()._start()
        for rank in self.ranks:
            rank.wait_with(self._clock)
        for deadlines in _deadlines_of(self.scheduler.connector):
            deadlines.clock = self._clock.read

    def _weights(self, number: int) -> bool:
        if self._ending is None or not self._resets_device():
            return True
        with self.calling("EngineCore.set_weight_version"):
            EngineCore.set_weight_version(SimpleNamespace(scheduler=self.scheduler), _name(number))  # type: ignore[arg-type]
        self._runner.epoch = number
        return True

    def _resets_device(self) -> bool:
        with self.calling("Scheduler.reset_prefix_cache"):
            try:
                return bool(self.scheduler.reset_prefix_cache(True, False))
            except RuntimeError as error:
                if "remote KV transfer" not in str(error):
                    raise
                return False

    def _restart(self, number: int) -> bool:
        while not self._is_at_rest():
            self.wind_down()  # It raises if that takes too long.
            self._settle()
        self.check()
        assert self._ending is not None
        self._ending.shutdown()
        for name in list(self.asked):
            self._check_answer(name)
        extra = {**self.shape.extra, "weights_version": _name(number)}
        self._transfer = transfer_config(msgspec.structs.replace(self.shape, extra=extra))
        self._runner = ModelRunner(
            self.shape.drafts, Random(0), self.shape.windows_of_groups, self.shape.drafter_group
        )
        self._runner.epoch = number
        self._start()
        return True

    def _reset(self, running: int, connector: int) -> bool:
        before = self._runner.epoch
        happened = super()._reset(running, connector)
        if self._runner.epoch != before:
            self._runner.epoch = next(self._unnamed)
        return happened

    def _forget(self) -> bool:
        return super()._reset(0, 1) if self._ending is not None else False

    def _hang(self, rank: int) -> bool:
        may = self._has(rank) and not self._hangs() and self._may_lose_a_load()
        return may and self.ranks[rank].hang()

    def _may_lose_a_load(self) -> bool:
        """Whether the largest request still fits on the device after the largest load is lost."""
        largest = self.shape.groups * MOST_BLOCKS_OF_GROUP
        return len(self._lost_blocks()) + 2 * largest < self.shape.device_blocks

    def _wake(self, rank: int) -> bool:
        return self._has(rank) and self.ranks[rank].wake()

    def _settle(self) -> bool:
        if self._hangs():
            self._clock.wait()
        return super()._settle()

    def _hangs(self) -> bool:
        return any(engine.hangs for rank in self.ranks for engine in rank.hanging)

    def _lost_blocks(self) -> set[int]:
        """The device blocks of all loads that have ever hung."""
        return set().union(*(engine.written for rank in self.ranks for engine in rank.hanging))

    # Checks.

    def check(self) -> None:
        super().check()
        if self._ending is not None and not self._ending.is_over:
            self._check_hung_loads()

    def _check_hung_loads(self) -> None:
        blocks = self.scheduler.kv_cache_manager.block_pool.blocks
        for job in [job for rank in self.ranks for engine in rank.hanging for job in engine.loads()]:
            free = [block for block in listed(job.device_blocks) if block and not blocks[block].ref_cnt]
            if free:
                raise PropertyBroken(
                    Property.NO_REUSE_IN_FLIGHT,
                    f"load {job.transfer} has not ended, but its target device blocks {free} are free",
                )

    def _check_device_blocks(self) -> None:
        pool = self.scheduler.kv_cache_manager.block_pool
        held = {block.block_id for block in pool.blocks[1:] if block.ref_cnt}
        lost = self._lost_blocks()
        if held - lost or pool.get_num_free_blocks() != self.shape.device_blocks - 1 - len(held):
            raise PropertyBroken(
                Property.ONE_RELEASE_PER_HOLD,
                f"no request is left, but device blocks {sorted(held - lost)} are held, and "
                f"{pool.get_num_free_blocks()} of {self.shape.device_blocks - 1} are free",
            )


def lived(random: Random) -> LivedEngine:
    """Return an engine with restarts on kept storage, with hanging loads, or with host cache resets."""
    return _engine(random.choice(("lives", "lives", "hanging", "forgetful")), random)


def troubled(random: Random) -> LivedEngine:
    """Return an engine with hanging loads or host cache resets only.

    More loads hang until they are given up.
    """
    hung = ("hang", "hang", "hang", "hang", "wake", "empty", "empty", "empty")
    return _engine(random.choice(("hanging", "forgetful")), random, hung)


def _engine(kind: str, random: Random, hung: Sequence[str] = ("hang", "wake", "empty")) -> LivedEngine:
    shape = msgspec.structs.replace(draw_shape(random), connector="KvsmConnector")
    plain = {"fills": False, "kv_events": False, "adapters": 0}
    if kind == "lives":
        shape = msgspec.structs.replace(shape, **plain)
        keeps = random.choice((["pool"], ["disk"], ["pool", "disk"]))
        if "disk" in keeps:
            shape = msgspec.structs.replace(
                shape,
                host_blocks=random.choice((6, 12)),
                extra={"disk_write": random.choice(("through", "back"))},
            )
        return LivedEngine(shape, ("weights", "restart"), keeps)
    if kind == "hanging":
        blocks = 2 * shape.groups * MOST_BLOCKS_OF_GROUP + 8
        shape = msgspec.structs.replace(shape, shards=1, stages=1, device_blocks=blocks, **plain)
        return LivedEngine(shape, hung)
    shape = msgspec.structs.replace(shape, windows=True, **plain)
    return LivedEngine(shape, ("forget",))


def _name(number: int) -> str:
    return f"weights {number}"


def _deadlines_of(connector: Any) -> list[Any]:
    side = connector._side
    return [part.deadlines for part in (side, side._disk) if part is not None]
