"""An engine for `connector_steps.py`: vLLM's real scheduler, both sides of a connector, a mock model runner.

The runner computes nothing, and returns a token for each request whose whole prompt is computed. No bytes are
copied: each copy ends `copy_steps` steps after it began. Both sides of the connector run in this thread, each
with its own clock.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple
from unittest.mock import patch

from scheduler_world import BLOCK_TOKENS, STOP, VllmWorld

from kvsm.copies.copy_engine import CopyResult
from kvsm.core.plan import TransferJob
from kvsm.events import Direction
from kvsm.ids import count
from kvsm.vllm.rank_copies import RankCopies


class CallClock:
    """Measures the CPU time of this thread in the public methods of an object (ns), by name.

    A call within another call of the object is part of the outer call. The cost of the clock itself is
    subtracted.
    """

    def __init__(self) -> None:
        self.spent: Counter[str] = Counter()
        self._inside = False
        self._own_ns = min(-time.thread_time_ns() + time.thread_time_ns() for _ in range(10_000))

    def watch(self, target: object) -> None:
        """Wrap the public methods of this object."""
        for name in dir(type(target)):
            if not name.startswith("_") and callable(getattr(type(target), name)):
                setattr(target, name, self._timed(name, getattr(target, name)))

    def take(self) -> Counter[str]:
        """Return and clear the time since the last call, by method."""
        spent, self.spent = self.spent, Counter()
        return spent

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def timed(*arguments: Any, **named: Any) -> Any:
            if self._inside:
                return call(*arguments, **named)
            self._inside, began = True, time.thread_time_ns()
            try:
                return call(*arguments, **named)
            finally:
                self.spent[name] += time.thread_time_ns() - began - self._own_ns
                self._inside = False

        return timed


class InstantCopies:
    """A `CopyEngine` that copies nothing.

    copy_steps: a transfer ends this number of steps after it began.
    step: the number of the present step.
    moved: direction -> the number of blocks in all jobs.
    """

    def __init__(self, device_blocks: int, host_blocks: int, copy_steps: int) -> None:
        self.num_device_blocks, self.num_host_blocks = device_blocks, host_blocks
        self.copy_steps, self.step = copy_steps, 0
        self.moved: Counter[Direction] = Counter()
        self._live: list[tuple[int, TransferJob]] = []
        """(step in which it ends, job), oldest first."""

    def mark(self) -> None:
        """Do nothing: there is no compute."""

    def submit(self, job: TransferJob, after: Any = None) -> None:  # noqa: ARG002 (the interface's)
        """Begin a transfer."""
        self.moved[job.direction] += count(job.host_blocks)
        self._live.append((self.step + self.copy_steps, job))

    def hold_compute(self, transfers: Iterable[int]) -> None:
        """Do nothing: there is no compute."""

    def poll(self) -> list[CopyResult]:
        """Return the results of the transfers that have ended."""
        if not self._live or self._live[0][0] > self.step:
            return []
        ended = [job for end, job in self._live if end <= self.step]
        del self._live[: len(ended)]
        return [CopyResult(job.transfer, job.direction, True) for job in ended]

    def wait(self, transfers: Iterable[int]) -> None:
        """Let these transfers end now."""
        now = set(transfers)
        ending = [(0, job) for _, job in self._live if job.transfer in now]
        self._live = ending + [(end, job) for end, job in self._live if job.transfer not in now]

    def drain(self) -> None:
        """Let all transfers end now."""
        self._live = [(0, job) for _, job in self._live]

    def close(self) -> None:
        """Let all transfers end now."""
        self.drain()


class _NoPool:
    """A stand-in for the host pool, whose memory is never accessed."""

    is_warm = False

    def close(self) -> None:
        pass


class StepCost(NamedTuple):
    """CPU time of one step of the engine (ns).

    scheduler: time in each call of the connector's scheduler side.
    worker: time in each call of the connector's worker side.
    step: time in vLLM's scheduler, including the connector's scheduler side.
    """

    scheduler: Mapping[str, int]
    worker: Mapping[str, int]
    step: int


class Engine:
    """vLLM's scheduler with a connector.

    transfer: the `KVTransferConfig` of the connector; None for an engine without one.
    costs: the cost of each step so far.
    """

    def __init__(self, world: VllmWorld, transfer: Any, device_blocks: int, copy_steps: int) -> None:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.structured_output import StructuredOutputManager

        self._world, self._copy_steps = world, copy_steps
        self._copies: InstantCopies | None = None
        self.costs: list[StepCost] = []
        self._arrived = 0
        config, kv_cache = world.config_with(transfer, device_blocks), world.kv_cache_of(device_blocks)
        self._worker: Any = None
        self._clocks = CallClock(), CallClock()
        if transfer is not None:
            make = KVConnectorFactory.get_connector_class(transfer)
            with self._without_copies(device_blocks):
                self._worker = make(config, KVConnectorRole.WORKER, kv_cache)
                self._worker.register_kv_caches({"layer": world.memory(device_blocks)})
            self._clocks[1].watch(self._worker)
        self.scheduler = Scheduler(
            config,
            kv_cache,
            StructuredOutputManager(config),
            block_size=BLOCK_TOKENS,
            hash_block_size=BLOCK_TOKENS,
            log_stats=True,
        )
        if transfer is not None:
            self._clocks[0].watch(self.scheduler.connector)

    @property
    def moved(self) -> Counter[Direction]:
        """Direction -> the number of blocks that were stored or loaded."""
        return Counter() if self._copies is None else self._copies.moved

    def arrive(self, request: Any) -> None:
        """Let a request arrive. The cost is added to the next step."""
        began = time.thread_time_ns()
        self.scheduler.add_request(request)
        self._arrived += time.thread_time_ns() - began

    def step(self, stopping: frozenset[str] = frozenset()) -> bool:
        """Make a step, if there is work.

        Returns False if there is none. stopping: requests that end with it.
        """
        began = time.thread_time_ns()
        if not self.scheduler.has_requests():
            return False
        output = self.scheduler.schedule()
        spent = time.thread_time_ns() - began
        answer = self._run(output, stopping)
        began = time.thread_time_ns()
        self.scheduler.update_from_output(output, answer)
        spent += time.thread_time_ns() - began + self._arrived
        self._arrived = 0
        of_scheduler, of_worker = [clock.take() for clock in self._clocks]
        self.costs.append(StepCost(of_scheduler, of_worker, spent))
        return True

    def forget_device_cache(self, *, preempt: bool) -> None:
        """Drop the prefix cache of the device. preempt: also preempt all running requests.

        vLLM refuses this while a copy holds a block. So all copies are ended in a step before.
        """
        if self._copies is not None and self._copies.copy_steps:
            self._copies.copy_steps = 0
            self._copies.drain()
            self.step()
            self._copies.copy_steps = self._copy_steps
        if not self.scheduler.reset_prefix_cache(reset_running_requests=preempt):
            raise AssertionError("the device's prefix cache was not dropped: something holds its blocks")

    def close(self) -> None:
        """Shut down both sides of the connector."""
        self.scheduler.shutdown()
        if self._worker is not None:
            self._worker.shutdown()

    def _run(self, output: Any, stopping: frozenset[str]) -> Any:
        """The output of the mock model runner, with the connector's worker side."""
        from vllm.v1.outputs import ModelRunnerOutput

        names, requests = list(output.num_scheduled_tokens), self.scheduler.requests
        transfer = None if self._worker is None else self._transfer(output)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[
                [] if requests[name].is_prefill_chunk else [STOP if name in stopping else 7] for name in names
            ],
            kv_connector_output=None if transfer is None or (transfer.is_empty() and not names) else transfer,
        )

    def _transfer(self, output: Any) -> Any:
        """Make the connector calls of a vLLM worker, in its order."""
        from vllm.v1.outputs import KVConnectorOutput

        connector, copies = self._worker, self._copies
        assert copies is not None
        copies.step += 1
        connector.handle_preemptions(output.kv_connector_metadata)
        connector.bind_connector_metadata(output.kv_connector_metadata)
        connector.start_load_kv(None)
        connector.wait_for_save()
        results = connector.get_transfer_results(output.finished_req_ids)
        answer = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=connector.get_block_ids_with_load_errors(),
            kv_connector_stats=connector.get_kv_connector_stats(),
            kv_cache_events=connector.get_kv_connector_kv_cache_events(),
            kv_connector_worker_meta=connector.build_connector_worker_meta(),
        )
        connector.clear_connector_metadata()
        return answer

    @contextmanager
    def _without_copies(self, device_blocks: int) -> Iterator[None]:
        """A `with` block in which workers of kvsm and `bench_peers` get a copy engine that copies nothing."""

        def make_copies(_tensors: Sequence[Any], host_blocks: int, *_: Any, **__: Any) -> RankCopies:
            self._copies = InstantCopies(device_blocks, host_blocks, self._copy_steps)
            return RankCopies(self._copies, _NoPool())  # type: ignore[arg-type]

        with (
            patch("kvsm.vllm.worker_side.make_copies", make_copies),
            patch("kvsm.vllm.host_copy_worker.make_copies", make_copies),
            patch("kvsm.vllm.bench_peers.make_copies", make_copies),
        ):
            yield
