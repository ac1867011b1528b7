"""A worker of the engine: the worker's side of a connector, and a device on which compute is queued."""

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
    """One rank of a small engine. What its device is and who copies, a subclass says.

    connector: the class of the connector.
    device_blocks: how many there are.
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
        # A connector that copies by itself looks at the memory, and does not wait for a device.
        self._is_simulated = is_simulated(self.connector)

    def _prepare(self) -> None:
        """What must be there before the connector is made."""

    def _acting(self) -> AbstractContextManager[object]:
        """A `with` block in which the connector is called."""
        return nullcontext()

    def _make_copies(
        self, tensors: Sequence[Any], host_blocks: int, _verify: bool, path: Path | None = None, *_: Any
    ) -> RankCopies:
        """Stands for `kvsm.vllm.rank_copies.make_copies`."""
        raise NotImplementedError

    def _device(self) -> SimulatedDevice:
        """The device that computes."""
        raise NotImplementedError

    def _told(self, told: KVConnectorOutput, _may_hold: bool) -> KVConnectorOutput:
        """What the scheduler hears of this output."""
        return told

    def execute(self, step: EngineStep, may_hold: bool = False) -> ModelRunnerOutput:
        """Queue a step's compute, as a worker of vLLM does, without waiting for it.

        may_hold: whether its reports may come later.
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
            told = KVConnectorOutput(
                finished_sending=results.finished_sending or None,
                finished_recving=results.finished_recving or None,
                failed_recving=results.failed_recving,
                invalid_block_ids=connector.get_block_ids_with_load_errors(),
                kv_connector_stats=connector.get_kv_connector_stats(),
                kv_cache_events=connector.get_kv_connector_kv_cache_events(),
                kv_connector_worker_meta=connector.build_connector_worker_meta(),
            )
            connector.clear_connector_metadata()
        told = self._told(told, may_hold)
        names = list(step.sampled)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=list(map(list, step.sampled.values())),
            # vLLM returns nothing of a step that computed nothing and has nothing to report.
            kv_connector_output=None if told.is_empty() and not names else told,
        )

    def await_compute(self) -> None:
        """Let the oldest step that was not waited for compute."""
        self._ends.pop(0).synchronize()

    def check(self) -> None:
        """Raises `PropertyBroken` if a wrong word was read, or two accesses are unordered."""
        if self._wrong:
            raise PropertyBroken(Property.CORRECT_BYTES, "; ".join(self._wrong[:3]))
        races = self._device().races
        if races and (race := next(filterfalse(self._is_harmless, races), None)) is not None:
            raise PropertyBroken(Property.COPY_ORDER, f"rank {self._number}: {race}")

    def _is_harmless(self, _race: Race) -> bool:
        """Whether nobody looks at what this race spoils."""
        return False

    def mixed(self, words: Words) -> Words:
        """These words as this rank writes them."""
        return words * np.uint64(2 * self._number + 1)

    def _compute(self, step: EngineStep) -> None:
        before, reads, writes = step.before, step.reads, step.writes

        def look(places: Places) -> None:
            right = self._words[places.blocks, places.offsets] == self.mixed(places.words)
            for place in np.flatnonzero(~right):
                self._wrong.append(
                    f"rank {self._number}, device block {places.blocks[place]} does not hold "
                    f"{places.names[place]}"
                )

        def action() -> None:
            # In each layer, all tokens of a step are written before any token looks back.
            look(before)
            self._words[writes.blocks, writes.offsets] = self.mixed(writes.words)
            look(reads)

        read = {*before.blocks.tolist(), *reads.blocks.tolist()}
        self._device().launch("step", sorted(read), sorted({*writes.blocks.tolist()}), action)


class SimulatedRank(ModelRank):
    """A rank of the fuzz: its device runs when an action says so, and its workers have faults.

    lost: what the engine may have given up.
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

    def _told(self, told: KVConnectorOutput, may_hold: bool) -> KVConnectorOutput:
        return self.faults.reported(told, may_hold, self._groups)

    def go_on(self, steps: int) -> bool:
        """Let at most this number of steps of the device happen. False if none can."""
        happened = 0
        while happened < steps and self.runtime.device.step():
            happened += 1
        return bool(happened)

    def run_all(self) -> bool:
        """Let all that is queued happen. False if nothing is."""
        happened = False
        while self.runtime.device.step():
            happened = True
        return happened

    def shutdown(self) -> None:
        """Shut down the worker's side of the connector, and let the device do what is queued."""
        with self.runtime.acting():
            self.connector.shutdown()
        self.run_all()

    def _pause(self, pause_s: float) -> None:
        """A worker pauses: its device goes on. Time passes only if it waits for what never ends."""
        if not self.runtime.device.step() and pause_s >= LONGEST_PAUSE_S:
            self._lost.wait()

    def _is_harmless(self, race: Race) -> bool:
        """Whether one side is a store that was given up: what it reads ends where nobody looks."""
        stores = tuple(
            f"kernel 'store {job.transfer}' on "
            for _, job in self.faults.at_risk()
            if job.direction is Direction.STORE
        )
        return any(one.startswith(stores) and one.endswith(" reads") for one in (race.first, race.second))

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
    """The sides of kvsm's connectors in this process, which pause."""
    parts = getattr(connector, "_connectors", None) or [connector]
    return [side for one in parts if hasattr(side := getattr(one, "_side", None), "pause")]
