"""A worker of the engine: the worker side of a connector, and a simulated device that computes."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import count, filterfalse
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from kvsm.check.vllm_fuzz.configs import changed
from kvsm.check.vllm_fuzz.faults import RankFaults
from kvsm.check.vllm_fuzz.lost_copies import LostCopies
from kvsm.check.vllm_fuzz.runtime import PoolDevice, Runtime
from kvsm.check.vllm_fuzz.shape import BLOCK_BYTES, EngineShape
from kvsm.check.vllm_fuzz.stand_ins import is_simulated
from kvsm.check.vllm_fuzz.word_model import EngineStep, Places, Words
from kvsm.copies import HostPool
from kvsm.copies.races import Race
from kvsm.copies.simulated import SimulatedDevice
from kvsm.copies.streams import StreamCopyEngine
from kvsm.errors import PropertyBroken
from kvsm.events import Direction
from kvsm.properties import Property
from kvsm.vllm.rank_copies import LONGEST_PAUSE_S, RankCopies


class ModelRank:
    """One rank of a small engine. A subclass defines its device and its copy engine.

    connector: the class of the connector.
    device_blocks: the number of device blocks.
    """

    def __init__(self, config: Any, kv_cache: Any, connector: type, device_blocks: int, number: int) -> None:
        config = changed(config, parallel_config=changed(config.parallel_config, rank=number))
        self._number = number
        self._memory = torch.zeros(device_blocks, BLOCK_BYTES, dtype=torch.int8)
        self._words: Words = self._memory.numpy().view(np.uint64)
        self._wrong: list[str] = []
        self._ends: list[Any] = []
        self._prepare()
        names = [name for group in kv_cache.kv_cache_groups for name in group.layer_names]
        with self._acting(), patch("kvsm.vllm.worker_side.make_copies", self._make_copies):
            self.connector: Any = connector(config, KVConnectorRole.WORKER, kv_cache)
            self.connector.register_kv_caches(dict.fromkeys(names, self._memory))
        # A connector that is not simulated copies memory at once, without waiting for the device.
        self._is_simulated = is_simulated(self.connector)

    def _prepare(self) -> None:
        """Prepare what the constructor of the connector needs."""

    def _acting(self) -> AbstractContextManager[object]:
        """The context in which methods of the connector are called."""
        return nullcontext()

    def _make_copies(
        self, tensors: Sequence[Any], host_blocks: int, _verify: bool, path: Path | None = None, *_: Any
    ) -> RankCopies:
        """Replaces `kvsm.vllm.rank_copies.make_copies`."""
        raise NotImplementedError

    def _device(self) -> SimulatedDevice:
        """The device that computes."""
        raise NotImplementedError

    def _told(self, output: KVConnectorOutput, _may_hold: bool) -> KVConnectorOutput:
        """The output that the scheduler gets instead of this one. A subclass may add faults."""
        return output

    def execute(self, step: EngineStep, may_hold: bool = False) -> ModelRunnerOutput:
        """Call the connector and queue a step's compute, as a worker of vLLM does, without waiting for it.

        may_hold: whether the reports of the step may be held back.
        """
        connector, metadata = self.connector, pickle.loads(step.metadata)
        with self._acting():
            connector.handle_preemptions(metadata)
            connector.bind_connector_metadata(metadata)
            loads_first = step.output.has_sync_kv_loads
            if loads_first:
                connector.start_load_kv(None)
            if step.sampled:
                self._compute(step)
            self._ends.append(self._device().compute.record())
            if not self._is_simulated:
                self._ends[-1].synchronize()
            if not loads_first:
                connector.start_load_kv(None)
            connector.wait_for_save()
            results = connector.get_transfer_results(step.finished)
            output = KVConnectorOutput(
                finished_sending=results.finished_sending or None,
                finished_recving=results.finished_recving or None,
                failed_recving=results.failed_recving,
                invalid_block_ids=connector.get_block_ids_with_load_errors(),
                kv_connector_stats=connector.get_kv_connector_stats(),
                kv_cache_events=connector.get_kv_connector_kv_cache_events(),
                kv_connector_worker_meta=connector.build_connector_worker_meta(),
            )
            connector.clear_connector_metadata()
        output = self._told(output, may_hold)
        names = list(step.sampled)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=list(map(list, step.sampled.values())),
            # vLLM returns None for a step that has computed nothing and has nothing to report.
            kv_connector_output=None if output.is_empty() and not names else output,
        )

    def await_compute(self) -> None:
        """Run the device until the oldest step that was not awaited has computed."""
        self._ends.pop(0).synchronize()

    def check(self) -> None:
        """Raises `PropertyBroken` if a step has read a wrong word, or two accesses are unordered."""
        if self._wrong:
            raise PropertyBroken(Property.CORRECT_BYTES, "; ".join(self._wrong[:3]))
        races = self._device().races
        if races and (race := next(filterfalse(self._is_harmless, races), None)) is not None:
            raise PropertyBroken(Property.COPY_ORDER, f"rank {self._number}: {race}")

    def _is_harmless(self, _race: Race) -> bool:
        """Whether the bytes that this race may corrupt are never read."""
        return False

    def mixed(self, words: Words) -> Words:
        """These words as this rank stores them: each rank has different words."""
        return words * np.uint64(2 * self._number + 1)

    def _compute(self, step: EngineStep) -> None:
        before, reads, writes = step.before, step.reads, step.writes

        def verify(places: Places) -> None:
            right = self._words[places.blocks, places.offsets] == self.mixed(places.words)
            for place in np.flatnonzero(~right):
                versions = np.array([*places.versions.get(int(place), ())], np.uint64)
                if self._words[places.blocks[place], places.offsets[place]] in self.mixed(versions):
                    continue
                self._wrong.append(
                    f"rank {self._number}, device block {places.blocks[place]} does not hold "
                    f"{places.names[place]}"
                )

        def action() -> None:
            # In each layer, attention reads only after all tokens of the step are written.
            verify(before)
            self._words[writes.blocks, writes.offsets] = self.mixed(writes.words)
            verify(reads)

        read = {*before.blocks.tolist(), *reads.blocks.tolist()}
        self._device().launch("step", sorted(read), sorted({*writes.blocks.tolist()}), action)


class SimulatedRank(ModelRank):
    """A rank of `VllmWorld`: its device runs when an action says so, and its copies can have faults.

    lost: the copies that the engine may have given up.
    """

    def __init__(
        self, config: Any, kv_cache: Any, connector: type, shape: EngineShape, number: int, lost: LostCopies
    ) -> None:
        self._lost, self._groups = lost, shape.groups
        super().__init__(config, kv_cache, connector, shape.device_blocks, number)
        for side in sides_of_kvsm(self.connector):
            side.clock, side.pause = lost.clock, self._pause

    def _prepare(self) -> None:
        self.runtime = Runtime(self._memory)
        self._pools = count()
        self._host: HostPool | None = None
        self.faults = RankFaults(self._words, self._lost)

    def _acting(self) -> AbstractContextManager[object]:
        return self.runtime.acting()

    def _device(self) -> SimulatedDevice:
        return self.runtime.device

    def _told(self, output: KVConnectorOutput, may_hold: bool) -> KVConnectorOutput:
        return self.faults.reported(output, may_hold, self._groups)

    def run_steps(self, steps: int) -> bool:
        """Run at most this number of steps of the device. Returns False if none is possible."""
        happened = 0
        while happened < steps and self.runtime.device.step():
            happened += 1
        return bool(happened)

    def run_all(self) -> bool:
        """Run all queued work of the device. Returns False if there is none."""
        happened = False
        while self.runtime.device.step():
            happened = True
        return happened

    def shutdown(self) -> None:
        """Shut down the worker side of the connector, then run all queued work of the device."""
        with self.runtime.acting():
            self.connector.shutdown()
        self.run_all()

    def _pause(self, pause_s: float) -> None:
        """A worker pauses while it waits: its device makes a step. Without one, and after long pauses, the
        worker waits for a lost copy, and time passes."""
        if not self.runtime.device.step() and pause_s >= LONGEST_PAUSE_S:
            self._lost.wait()

    def _is_harmless(self, race: Race) -> bool:
        """Whether one access is the read of a given-up store, whose bytes no request will read."""
        stores = tuple(
            f"kernel 'store {job.transfer}' on "
            for _, job in self.faults.at_risk()
            if job.direction is Direction.STORE
        )
        accesses = (race.first, race.second)
        return any(access.startswith(stores) and access.endswith(" reads") for access in accesses)

    def host_words(self, block: int) -> Words | None:
        """The words of a block of kvsm's host pool; None if this rank has no such pool."""
        if self._host is None:
            return None
        words: Words = self._host.blocks[block].view(np.uint64)
        return words

    def _make_copies(
        self, tensors: Sequence[Any], host_blocks: int, _verify: bool, path: Path | None = None, *_: Any
    ) -> RankCopies:
        pool = self._host = HostPool(host_blocks, BLOCK_BYTES, path=path)
        device = PoolDevice(self.runtime, list(tensors), pool.blocks, next(self._pools))
        return RankCopies(self.faults.over(StreamCopyEngine(device)), pool)


def sides_of_kvsm(connector: Any) -> list[Any]:
    """The worker sides of kvsm's connectors: of this connector or of its children."""
    parts = getattr(connector, "_connectors", None) or [connector]
    return [side for part in parts if hasattr(side := getattr(part, "_side", None), "pause")]
