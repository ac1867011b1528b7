"""An engine for `connector_steps.py`: vLLM's real scheduler, both sides of a connector, a mock model runner.

The runner computes nothing, and answers each request that has its whole prompt with a token. Nothing is
copied: each copy ends `copy_steps` steps after it began. Both sides of the connector run in this thread, and
each has a clock of its own.
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
    """The CPU time of this thread in the public methods of an object (ns), by name.

    A call that the object makes to itself counts as part of the call that it is in. What the clock itself
    costs is not counted.
    """

    def __init__(self) -> None:
        self.spent: Counter[str] = Counter()
        self._inside = False
        self._own_ns = min(-time.thread_time_ns() + time.thread_time_ns() for _ in range(10_000))

    def watch(self, one: object) -> None:
        """Wrap the methods of this object."""
        for name in dir(type(one)):
            if not name.startswith("_") and callable(getattr(type(one), name)):
                setattr(one, name, self._timed(name, getattr(one, name)))

    def take(self) -> Counter[str]:
        """What was spent since the last call."""
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
    step: the number of the step that is under way.
    moved: how many blocks of each direction were asked for.
    """

    def __init__(self, device_blocks: int, host_blocks: int, copy_steps: int) -> None:
        self.num_device_blocks, self.num_host_blocks = device_blocks, host_blocks
        self.copy_steps, self.step = copy_steps, 0
        self.moved: Counter[Direction] = Counter()
        self._live: list[tuple[int, TransferJob]] = []
        """(the step that ends it, job), the oldest first."""

    def mark(self) -> None:
        """Nothing computes."""

    def submit(self, job: TransferJob, after: Any = None) -> None:  # noqa: ARG002 (the interface's)
        """Begin a transfer."""
        self.moved[job.direction] += count(job.host_blocks)
        self._live.append((self.step + self.copy_steps, job))

    def hold_compute(self, transfers: Iterable[int]) -> None:
        """Nothing computes."""

    def poll(self) -> list[CopyResult]:
        """The transfers that have ended."""
        if not self._live or self._live[0][0] > self.step:
            return []
        ended = [job for end, job in self._live if end <= self.step]
        del self._live[: len(ended)]
        return [CopyResult(job.transfer, job.direction, True) for job in ended]

    def wait(self, transfers: Iterable[int]) -> None:
        """Let these end now."""
        now = set(transfers)
        ending = [(0, job) for _, job in self._live if job.transfer in now]
        self._live = ending + [one for one in self._live if one[1].transfer not in now]

    def drain(self) -> None:
        """Let all end now."""
        self._live = [(0, job) for _, job in self._live]

    def close(self) -> None:
        """Let all end now."""
        self.drain()


class _NoPool:
    """Stands for host memory, which nothing touches."""

    is_warm = False

    def close(self) -> None:
        pass


class StepCost(NamedTuple):
    """CPU time of one step of the engine (ns).

    scheduler: in the calls of the connector's scheduler side, by name.
    worker: in the calls of its worker's side, by name.
    step: in vLLM's scheduler, and the connector's scheduler side in it.
    """

    scheduler: Mapping[str, int]
    worker: Mapping[str, int]
    step: int


class Engine:
    """vLLM's scheduler with the connector of `transfer`, a `KVTransferConfig`; None: without a connector.

    costs: of all steps so far.
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
        """How many blocks were stored and loaded."""
        return Counter() if self._copies is None else self._copies.moved

    def arrive(self, request: Any) -> None:
        """A request arrives. Its cost counts in the next step."""
        began = time.thread_time_ns()
        self.scheduler.add_request(request)
        self._arrived += time.thread_time_ns() - began

    def step(self, stopping: frozenset[str] = frozenset()) -> bool:
        """Take a step, if vLLM would take one. stopping: requests whose next token ends them."""
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
        """Drop the prefix cache of the device. preempt: all running requests lose their blocks.

        vLLM refuses that while a copy holds a block. So all copies end in a step before it.
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
        """What a model runner and the worker's side of the connector answer."""
        from vllm.v1.outputs import ModelRunnerOutput

        names, requests = list(output.num_scheduled_tokens), self.scheduler.requests
        told = None if self._worker is None else self._transfer(output)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[
                [] if requests[name].is_prefill_chunk else [STOP if name in stopping else 7] for name in names
            ],
            kv_connector_output=None if told is None or (told.is_empty() and not names) else told,
        )

    def _transfer(self, output: Any) -> Any:
        """The calls of a worker of vLLM, in their order."""
        from vllm.v1.outputs import KVConnectorOutput

        connector, copies = self._worker, self._copies
        assert copies is not None
        copies.step += 1
        connector.handle_preemptions(output.kv_connector_metadata)
        connector.bind_connector_metadata(output.kv_connector_metadata)
        connector.start_load_kv(None)
        connector.wait_for_save()
        results = connector.get_transfer_results(output.finished_req_ids)
        told = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=connector.get_block_ids_with_load_errors(),
            kv_connector_stats=connector.get_kv_connector_stats(),
            kv_cache_events=connector.get_kv_connector_kv_cache_events(),
            kv_connector_worker_meta=connector.build_connector_worker_meta(),
        )
        connector.clear_connector_metadata()
        return told

    @contextmanager
    def _without_copies(self, device_blocks: int) -> Iterator[None]:
        """In a `with` block, workers of kvsm and of `bench_peers` get a copy engine that copies nothing."""

        def make_copies(_tensors: Sequence[Any], host_blocks: int, *_: Any, **__: Any) -> RankCopies:
            self._copies = InstantCopies(device_blocks, host_blocks, self._copy_steps)
            return RankCopies(self._copies, _NoPool())  # type: ignore[arg-type]

        with (
            patch("kvsm.vllm.worker_side.make_copies", make_copies),
            patch("kvsm.vllm.host_copy_worker.make_copies", make_copies),
            patch("kvsm.vllm.bench_peers.make_copies", make_copies),
        ):
            yield
