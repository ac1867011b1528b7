"""vLLM's real `Scheduler` and `AsyncScheduler` with kvsm's connector, and words instead of a model.

There is no model and no GPU. `Engine` does what vLLM's engine core does with its scheduler, one act at a
time: it schedules a step, lets the workers run it, and returns its output. In between requests arrive, are
aborted, and caches are reset. With asynchronous scheduling and with pipeline stages, several steps are in
flight.

A rank is vLLM's worker-side connector over a `SimulatedCopyEngine`: its copies end in any later step and in
any order, as a seed decides. A step computes as a kernel of that device: it writes the words of its tokens
(`kvsm.check.vllm_fuzz.word_model`), and all words that its layers attend to must be correct. This detects a
wrong match, a step that does not wait for a load, and a block that was freed too early; the race detector
does, too. Rejected drafts leave garbage in the blocks.

Not simulated: mamba groups, images, requests that arrive in parts.
"""

from __future__ import annotations

import pickle
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any
from zlib import crc32

import numpy as np
from hanging_copies import Clock, HangingCopyEngine
from scheduler_shapes import (
    BLOCK_TOKENS,
    CHOICES,
    MOST_BLOCKS,
    MOST_TOKENS,
    VOCABULARY,
    WORD_BYTES,
    Shape,
    hasher,
    make_configs,
    make_scheduler,
    valid,
)
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.lora.request import LoRARequest
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from kvsm.check.vllm_fuzz.longest_hits import watch_hits
from kvsm.check.vllm_fuzz.rank import ModelRank, sides_of_kvsm
from kvsm.check.vllm_fuzz.word_model import EngineStep, KnownTokens, ModelRunner
from kvsm.copies import HostPool, SimulatedCopyEngine
from kvsm.copies.failing import FailingCopyEngine
from kvsm.copies.simulated import SimulatedDevice
from kvsm.core.ledger import Ledger
from kvsm.core.ledger.invariants import check_ledger
from kvsm.core.ledger.snapshot import digest
from kvsm.core.plan import TransferPlan, WorkerReport
from kvsm.errors import PropertyBroken
from kvsm.explain.metrics import gauges
from kvsm.explain.story import verify_log
from kvsm.properties import Property
from kvsm.states.lease import LeaseState
from kvsm.states.words import STATE_MASK
from kvsm.testing import assert_at_rest
from kvsm.vllm.connector import KvsmConnector
from kvsm.vllm.rank_copies import LONGEST_PAUSE_S, RankCopies
from kvsm.vllm.step_messages import StepReports

DRAIN_STEPS = 2000
"""More steps than any of these engines needs to finish all its work."""


class Rank(ModelRank):
    """A rank whose copies end in any later step and in any order, as a seed decides."""

    device: SimulatedDevice
    copies: HangingCopyEngine

    def __init__(
        self, config: Any, kv_cache: Any, shape: Shape, number: int, seed: int, clock: Clock
    ) -> None:
        self._shape, self._seed, self._clock = shape, seed + number, clock
        self._hangs = Random(f"hangs {seed} {number}")
        self.silent: set[int] = set()
        """Transfers that this rank never reports."""
        self.belated: list[WorkerReport] = []
        """Delayed reports, which are sent with the next step."""
        self._kept_back: list[WorkerReport] = []
        super().__init__(config, kv_cache, KvsmConnector, shape.device_blocks, number)
        # A step that waits for copies takes seconds; the short pauses of one that computes nothing take none.
        for side in sides_of_kvsm(self.connector):
            side.clock = clock.read
            side.pause = lambda pause_s: clock.advance(1 if pause_s == LONGEST_PAUSE_S else 0)
            if shape.disk_blocks:
                side.pause = time.sleep  # The copies of the disk are real.

    def _make_copies(
        self, tensors: Sequence[Any], host_blocks: int, _verify: bool, path: Path | None = None, *_: Any
    ) -> RankCopies:
        pool, shape = HostPool(host_blocks, BLOCK_TOKENS * WORD_BYTES, path=path), self._shape
        engine = SimulatedCopyEngine(list(tensors), pool.blocks, self._seed)
        self.device = engine.simulated
        self.copies = HangingCopyEngine(
            FailingCopyEngine(engine, self._seed, shape.failing),
            (tensors, [pool.blocks]),
            self._clock,
            self._hangs,
            shape.hanging,
            spare_blocks=(shape.device_blocks - MOST_BLOCKS) // shape.ranks,
        )
        return RankCopies(self.copies, pool)

    def _device(self) -> SimulatedDevice:
        return self.device

    def _told(self, told: KVConnectorOutput, _may_hold: bool) -> KVConnectorOutput:
        return replace(told, kv_connector_worker_meta=self._heard(told.kv_connector_worker_meta))

    def _heard(self, reports: Any) -> Any:
        """Drop the reports of silent transfers, and add the delayed ones."""
        if not self.silent:
            return reports
        ended = reports.reports if reports is not None else ()
        self._kept_back += [report for report in ended if report.transfer in self.silent]
        told = (*self.belated, *[report for report in ended if report.transfer not in self.silent])
        self.belated = []
        if not told:
            return None
        if reports is not None:
            return replace(reports, reports=told)
        return StepReports(told)

    def speak(self) -> None:
        """Send the delayed reports with the next step."""
        self.belated, self._kept_back = self._kept_back, []


class Engine:
    """vLLM's engine core, driven one act at a time, with checks after each act.

    counts: the number of acts and events of each kind.
    scheduler: vLLM's scheduler.
    ledger: kvsm's ledger.
    plan: the plan of the last scheduled step.
    latest: the last scheduled step.
    told: the tokens that each client got.
    """

    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape, self.counts = shape, Counter[str]()
        self._random = Random(seed)
        self._directory = TemporaryDirectory(prefix="kvsm-real-scheduler-")
        config, kv_cache = make_configs(shape, self._directory.name)
        self.clock = Clock()
        # As in vLLM: what the ranks have found on disk is there when the scheduler begins.
        self.ranks = [Rank(config, kv_cache, shape, rank, seed, self.clock) for rank in range(shape.ranks)]
        self.scheduler: Any = make_scheduler(shape, config, kv_cache)
        self._side = self.scheduler.connector._side
        self._core = self._side._core
        self.ledger: Ledger = self._core.offloader.ledger
        self._side.deadlines.clock = self.clock.read
        watch_hits(self.scheduler.connector)
        self._aggregator = KVOutputAggregator.from_connector(self.scheduler.connector, shape.ranks)
        self._runner = ModelRunner(shape.drafts, self._random)
        self._truths: dict[str, KnownTokens] = {}
        self._asked: dict[str, Request] = {}
        self.told: dict[str, list[int]] = {}
        self.handed: dict[str, dict[str, Any] | None] = {}
        """What the clients of finished requests got as `kv_transfer_params`."""
        self.plan = TransferPlan()
        self._scheduled: list[EngineStep] = []
        self._executed: list[tuple[EngineStep, list[ModelRunnerOutput]]] = []

    # Acts.

    def arrive(self, family: int, length: int, own: int, outputs: int) -> None:
        """Add a request.

        family: all prompts of a family begin with the same tokens. An odd family continues the request of its
            number.
        length: the number of these tokens in the prompt.
        own: the number of further tokens that only this prompt has.
        outputs: the number of tokens to generate.
        """
        asked = [truth.tokens for truth in self._truths.values()]
        shared = asked[family % len(asked)] if family % 2 and asked else [family] * MOST_TOKENS
        self.ask([*shared[:length], *[VOCABULARY + len(asked)] * own][: MOST_TOKENS - outputs], outputs)

    def ask(
        self, prompt: list[int], outputs: int, parameters: dict[str, Any] | None = None, adapter: str = ""
    ) -> str:
        """Add a request with this prompt, and return its name.

        parameters: its `kv_transfer_params`.
        adapter: the path of its adapter; none if empty. All adapters have one name, but different weights.
        """
        name = f"r{len(self._asked)}"
        self._truths[name] = KnownTokens(prompt, crc32(adapter.encode()))
        self.told[name] = []
        extra = None if parameters is None else {"kv_transfer_params": parameters}
        sampling = SamplingParams(max_tokens=outputs, ignore_eos=True, temperature=0, extra_args=extra)
        lora = LoRARequest("tenant", 1, adapter) if adapter else None
        self._asked[name] = request = Request(
            name, prompt, sampling, None, lora_request=lora, block_hasher=hasher()
        )
        self.scheduler.add_request(request)
        return name

    def schedule(self) -> bool:
        """Schedule a step. Returns False if vLLM would not schedule one now."""
        if self.steps_under_way >= self.shape.most_steps or not self.scheduler.has_requests():
            return False
        output = self.scheduler.schedule()
        step = self._runner.step(output, self.scheduler.requests, self._truths)
        self._scheduled.append(step)
        self.latest, self.plan = step, output.kv_connector_metadata.plan
        self._check_flush()
        self._count(output)
        self._check_scheduled(step)
        return True

    def execute(self) -> bool:
        """Let every rank run the oldest step that it has not run."""
        if not self._scheduled:
            return False
        step = self._scheduled.pop(0)
        outputs = [rank.execute(step) for rank in self.ranks]
        self._executed.append((step, outputs))
        return True

    def deliver(self) -> bool:
        """Return the output of the oldest step in flight, when all ranks have computed it."""
        if not self._executed and not self.execute():
            return False
        step, outputs = self._executed.pop(0)
        self.clock.advance(1)
        for rank in self.ranks:
            rank.await_compute()
            rank.check()
        output = outputs[-1]
        if self.shape.ranks > 1:
            output = self._aggregator.aggregate(outputs, self.shape.ranks - 1)
        for answers in self.scheduler.update_from_output(step.output, output).values():
            for answer in answers.outputs:
                self._take_answer(answer)
        if step.drafted and not self.shape.is_async:
            # With asynchronous scheduling the workers keep their drafts.
            drafts = [[VOCABULARY - 1] * self.shape.drafts for _ in step.drafted]
            self.scheduler.update_draft_token_ids(DraftTokenIds(list(step.drafted), drafts))
        self._check_flushed(pickle.loads(step.metadata))
        return True

    def step(self) -> None:
        """Run a step like vLLM: fill the queue of batches, then wait for the oldest output."""
        while self.schedule():
            pass
        self.deliver()

    def starve(self) -> None:
        """Refuse blocks once when a running request needs some, so that vLLM preempts another request."""
        manager, connector = self.scheduler.kv_cache_manager, self.scheduler.connector
        allocate = manager.allocate_slots

        def allocate_nothing(request: Request, *arguments: Any, **named: Any) -> Any:
            if request.status is not RequestStatus.RUNNING or connector.has_pending_block_frees():
                return allocate(request, *arguments, **named)
            manager.allocate_slots = allocate
            self.counts["starved"] += 1
            return None

        manager.allocate_slots = allocate_nothing

    def abort(self, number: int) -> None:
        """Abort a request, as if its client had disconnected."""
        waiting = [name for name, one in self._asked.items() if not one.is_finished()]
        if waiting:
            name = waiting[number % len(waiting)]
            self.counts["aborts"] += 1
            if self._asked[name].status is RequestStatus.WAITING_FOR_REMOTE_KVS:
                self.counts["aborts in mid-load"] += 1
            self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def reset(self, running: bool, connector: bool) -> None:
        """Reset the caches. If all of them were reset, the weights change, so old content is wrong."""
        self.counts["resets"] += 1
        try:
            done = self.scheduler.reset_prefix_cache(
                reset_running_requests=running, reset_connector=connector
            )
        except RuntimeError as error:
            # If a copy holds a block, vLLM refuses after it has preempted all requests, and goes on.
            if "remote KV transfer" not in str(error):
                raise
            done = False
        if done and connector:
            self.counts["whole resets"] += 1
            self._runner.epoch += 1

    def reset_host(self) -> None:
        """Reset host memory only."""
        self.counts["host resets"] += 1
        self.scheduler.reset_connector_cache()
        if any(self.ledger.readable(slot) for slot in self.ledger.index.values()):
            raise PropertyBroken(Property.NO_STALE_DATA, "a key can be matched right after a reset")

    # Checks.

    def _ledgers(self) -> list[Ledger]:
        """Return the ledger of each tier."""
        below = self._side._disk
        return [self.ledger] if below is None else [self.ledger, below.tier.disk.ledger]

    @property
    def steps_under_way(self) -> int:
        return len(self._scheduled) + len(self._executed)

    def check(self) -> None:
        """Check what must hold after every act."""
        for ledger in self._ledgers():
            broken = check_ledger(ledger)
            if broken:
                raise PropertyBroken(broken[0].property, broken[0].message)
        for rank in self.ranks:
            rank.check()

    def drain(self) -> None:
        """Finish all work, and check that nothing is left and every client has all its tokens."""
        for _ in range(DRAIN_STEPS):
            if not self.steps_under_way and not self.scheduler.has_requests():
                break
            self.step()
        else:
            raise PropertyBroken(Property.PROGRESS, f"after {DRAIN_STEPS} steps this is left: {self._left()}")
        self.check()
        for ledger in self._ledgers():
            assert_at_rest(ledger)
        self._check_free_blocks()
        for name in self._asked:
            self._check_answer(name)

    def close(self) -> None:
        """End the engine. The log of each tier must fold to the same state."""
        live = {digest(one) for one in self._ledgers()}
        self.scheduler.shutdown()
        for rank in self.ranks:
            rank.connector.shutdown()
        with self._directory:
            for log in Path(self._directory.name, "events").iterdir():
                verified = verify_log(log)
                if not verified.good:
                    found = verified.breakage or verified.damage or verified.condition
                    raise PropertyBroken(Property.EVENTS_ARE_STATE, f"the log does not verify: {found}")
                if verified.digest not in live:
                    raise PropertyBroken(
                        Property.EVENTS_ARE_STATE, "the log folds to another state than the live one"
                    )

    def discard(self) -> None:
        """End an engine that has failed."""
        self._directory.cleanup()

    def _check_scheduled(self, step: EngineStep) -> None:
        if self._core.offloader.leased(sorted(set(step.writes.blocks.tolist()))):
            where = f"step {self.counts['steps']}"
            raise PropertyBroken(
                Property.NO_REUSE_IN_FLIGHT, f"{where} computes into a block that a copy touches"
            )
        self._check_queue()

    def _check_queue(self) -> None:
        for request in self.scheduler.kv_holding_waiting:
            # The request would wait for blocks that the requests behind it hold.
            if request.status is not RequestStatus.WAITING_FOR_REMOTE_KVS and not request.num_computed_tokens:
                raise PropertyBroken(
                    Property.PROGRESS, f"request {request.request_id} has no blocks, and is in the way"
                )

    def _check_flush(self) -> None:
        """Check that a step waits for copies only if it is the last one and must flush, and then for all."""
        is_last = self.shape.flushes and not self.scheduler.has_unfinished_requests()
        expected = set(self.ledger.transfers) if is_last else set()
        if set(self.plan.flush) != expected:
            raise PropertyBroken(
                Property.LAST_STEP, f"a step waits for {self.plan.flush}, and should for {expected}"
            )
        self.counts["flushes"] += bool(expected)

    def _check_flushed(self, metadata: Any) -> None:
        """Check that all copies are reported after a step that waited for them, unless they hang."""
        left = self.ledger.transfers.keys() & metadata.plan.flush
        if left and not self.shape.hanging and not any(rank.silent for rank in self.ranks):
            raise PropertyBroken(Property.LAST_STEP, f"{sorted(left)} are still in flight after a flush")

    def _check_free_blocks(self) -> None:
        """Check that at rest all device blocks are free, except those that a lost copy may still write.
        Losses need a reason."""
        pool, now = self.scheduler.kv_cache_manager.block_pool, gauges(self.ledger)
        self.counts["retired slots"] = now["retired_blocks"]
        self.counts["retired device blocks"] = self.shape.device_blocks - pool.num_gpu_blocks
        held = [block.block_id for block in pool.blocks[1:] if block.ref_cnt]
        retired = [block for block in self._retired_device_blocks() if block]
        if held != retired or pool.get_num_free_blocks() != pool.num_gpu_blocks - 1:
            raise PropertyBroken(
                Property.ONE_RELEASE_PER_HOLD,
                f"device blocks {held} are held, but no request is left, and {retired} are retired",
            )
        if now["retired_blocks"] and not self.shape.hanging and not any(rank.silent for rank in self.ranks):
            raise PropertyBroken(Property.PROGRESS, "a transfer was given up, but every copy is reported")

    def _retired_device_blocks(self) -> list[int]:
        """Return the device blocks that a lost copy may still write."""
        return [
            int(one) for one in np.flatnonzero(self.ledger.leases.view & STATE_MASK == LeaseState.RETIRED)
        ]

    def _check_answer(self, name: str) -> None:
        request, told, truth = self._asked[name], self.told[name], self._truths[name]
        begin = request.num_prompt_tokens
        right = [truth.token(begin + n) for n in range(len(told))]
        if told != right:
            raise PropertyBroken(
                Property.CORRECT_BYTES, f"request {name} was told tokens {told}, right is {right}"
            )
        if not request.is_finished():
            raise PropertyBroken(Property.PROGRESS, f"request {name} is {request.status.name} at the end")
        if request.status is RequestStatus.FINISHED_LENGTH_CAPPED and len(told) != request.max_tokens:
            raise PropertyBroken(
                Property.PROGRESS, f"request {name} has {len(told)} tokens of {request.max_tokens}"
            )
        if request.status is RequestStatus.FINISHED_ERROR and self.shape.on_failed_load != "fail":
            raise PropertyBroken(
                Property.FAILURE_IS_NOT_SUCCESS,
                f"request {name} ended with an error, and loads are to be recomputed",
            )

    def _take_answer(self, answer: Any) -> None:
        self.told[answer.request_id] += answer.new_token_ids
        self.counts["tokens"] += len(answer.new_token_ids)
        if answer.finish_reason is not None:
            self.handed[answer.request_id] = answer.kv_transfer_params
            self.counts["finished"] += 1
            self.counts["errors"] += self._asked[answer.request_id].status is RequestStatus.FINISHED_ERROR

    def _count(self, output: Any) -> None:
        self.counts.update(
            {
                "steps": 1,
                "loads": len(self.plan.loads),
                "stores": len(self.plan.stores),
                "failed loads": len(output.kv_connector_metadata.failed_loads),
                "preemptions": len(output.preempted_req_ids or ()),
                "scheduled": len(output.num_scheduled_tokens),
                "overlapping steps": self.steps_under_way > 1,
            }
        )

    def _left(self) -> str:
        left = [f"{name} {one.status.name}" for name, one in self.scheduler.requests.items()]
        return f"requests {left}, transfers {list(self.ledger.transfers)}"


def walk(seed: int, acts: int, shape: Shape | None = None) -> Counter[str]:
    """Run an engine by a seed until its end. Returns what happened."""
    random = Random(f"walk {seed}")
    if shape is None:
        shape = valid(Shape(**{name: random.choice(values) for name, values in CHOICES.items()}))
    engine = Engine(shape, seed)
    try:
        for _ in range(acts):
            act(engine, random)
            engine.check()
        engine.drain()
        engine.close()
    except BaseException as error:
        engine.discard()
        error.args = (f"walk({seed}, {acts}), {shape}: {error}", *error.args[1:])
        raise
    return engine.counts


def act(engine: Engine, random: Random) -> None:
    """Do one of the possible acts."""
    kind = random.random()
    if kind < 0.14:
        engine.arrive(
            random.randrange(16), random.randrange(8, 41), random.randint(1, 5), random.randint(1, 12)
        )
    elif kind < 0.50:
        engine.schedule()
    elif kind < 0.62:
        engine.execute()
    elif kind < 0.95:
        engine.deliver()
    elif kind < 0.98:
        engine.abort(random.randrange(8))
    elif kind < 0.99:
        engine.reset(running=random.random() < 0.5, connector=random.random() < 0.7)
    elif kind < 0.992:
        engine.reset_host()
    else:
        for _ in range(10):
            engine.step()
