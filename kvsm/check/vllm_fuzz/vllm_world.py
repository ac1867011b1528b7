"""A world of an engine with vLLM's real scheduler and any connector.

=========================================  ======================================================
action                                     what happens
=========================================  ======================================================
arrive FAMILY LENGTH OWN OUTPUTS SALT      a request arrives. Prompts of a family begin with the same
       PRIORITY ADAPTER                    tokens; an odd family continues an earlier request
schedule                                   vLLM schedules a step
execute                                    every rank executes the oldest scheduled step: its compute
                                           is queued
deliver                                    the oldest executed step has computed; the scheduler gets
                                           its output
copy RANK STEPS                            this number of steps of a rank's device; copies end by such
                                           steps
copies                                     all queued work of all devices runs
abort N                                    the Nth unfinished request is aborted
reset RUNNING CONNECTOR                    `reset_prefix_cache` with these arguments (0 or 1)
settle                                     copies, then a step from schedule to deliver
fail RANK WHAT                             the next copy of a kind fails on this rank
late RANK STEPS                            the reports of the next STEPS steps of this rank are held
                                           back
double RANK                                the report of its next step is repeated in the step after it
lose RANK WHAT                             the next copy of a kind hangs on this rank, and is never
                                           reported
slow                                       `transfer_timeout_s` passes before the copies in flight have
                                           ended
ask, probe, fill, shutdown                 the end of a run: `ending.py` says what they check
=========================================  ======================================================

Checked: each step reads the KV that was computed for its tokens (correct bytes, S15). Readable blocks of
kvsm's host pool hold it, too (`stored_bytes.py`). No two accesses on a device are unordered (S12). No call
raises (S8). At rest every client has its tokens, and no device block is held (S4). Winding down ends (S9). A
reset of all caches changes the weights, so reading a block from before the reset is a wrong read (S14 is
reported as S15). Each end of a transfer is reported once (`completions.py`). An answer to a request
is the longest that the connector can serve (`twin_asks.py`, `longest_hits.py`, S19). At the end of a run:
each stored block is served, KV events, lost host blocks, and the shutdown (`ending.py`).

Time stands still except for lost and slow copies (`lost_copies.py`). Requests have no multimodal inputs.
`faults.py` says which connectors must survive which faults.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from random import Random
from typing import Any

import msgspec
import torch
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.lora.request import LoRARequest
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from kvsm.check.vllm_fuzz.completions import Completions
from kvsm.check.vllm_fuzz.configs import has_groups, hasher, make_config, make_kv_cache_config, make_scheduler
from kvsm.check.vllm_fuzz.connectors import transfer_config
from kvsm.check.vllm_fuzz.drawing import draw_action
from kvsm.check.vllm_fuzz.ending import Ending, filled
from kvsm.check.vllm_fuzz.longest_hits import watch_hits
from kvsm.check.vllm_fuzz.lost_copies import SETTLING_A_LOSS, LostCopies
from kvsm.check.vllm_fuzz.rank import SimulatedRank
from kvsm.check.vllm_fuzz.recorded import record_manager, recording
from kvsm.check.vllm_fuzz.shape import MOST_TOKENS, VOCABULARY, Drafter, EngineShape
from kvsm.check.vllm_fuzz.stand_ins import install, shared_memory_of
from kvsm.check.vllm_fuzz.stored_bytes import StoredBytes
from kvsm.check.vllm_fuzz.twin_asks import TwinAsks
from kvsm.check.vllm_fuzz.word_model import EngineStep, KnownTokens, ModelRunner
from kvsm.check.worlds.check_counts import count_case
from kvsm.check.worlds.failed_copies import count_failed_copies
from kvsm.check.worlds.world import Action
from kvsm.core.log.memory import MemoryLog
from kvsm.errors import KvsmError, PropertyBroken, described, raised_at
from kvsm.properties import Property

MOST_SETTLING, MOST_SETTLING_A_REQUEST = 100, 30
"""Limits of the number of `settle` actions: in total, and for each request. No engine here needs so many to
finish. A single request has at most 6 steps of prompt and 9 of output, and may be preempted."""

LONGEST_RUN = 120
"""The most actions of a run. Longer runs rarely find other failures, and take longer to reduce."""


class VllmWorld:
    """A `World` of one engine. Raises `ConfigError` if vLLM or the connector refuses its shape."""

    check_every = 25
    rank_class: type[SimulatedRank] = SimulatedRank
    """The class of the ranks, which a subclass may replace."""

    def __init__(self, shape: EngineShape) -> None:
        install()
        torch.set_num_threads(1)
        self._transfer = transfer_config(shape)
        if not has_groups(self._transfer):
            drafter: Drafter = "shared" if shape.drafter_group is not None else shape.drafter
            shape = msgspec.structs.replace(shape, full=True, windows=False, drafter=drafter)
        self.shape = shape
        self.events: MemoryLog = MemoryLog()
        """The events of the connector, as `recorded.py` keeps them."""
        self._runner = ModelRunner(shape.drafts, Random(0), shape.windows_of_groups, shape.drafter_group)
        self._truths: dict[str, KnownTokens] = {}
        self.asked: dict[str, Request] = {}
        self._answers: dict[str, list[int]] = {}
        """Request -> the tokens that its client has got."""
        self._scheduled: list[EngineStep] = []
        self._executed: list[tuple[EngineStep, list[ModelRunnerOutput]]] = []
        self._settled = self._happened = 0
        self.scheduler: Any = None
        self.ranks: list[SimulatedRank] = []
        self._ending: Ending | None = None
        self._stored: StoredBytes | None = None
        self._lost = LostCopies(shape)
        self.may_have_lost_stores = False
        """Whether stored blocks may be missing on the host: a reset or a fault has happened."""
        self.surely_stored: set[str] = set()
        """The requests whose blocks cannot have been lost by a reset or a fault."""
        self._has_had_faults = False
        self._stores_surely = True
        """Whether requests that arrive now belong to `surely_stored`."""

    # The protocol of a world.

    def actions(self) -> list[Action]:
        """The actions without numbers. A walk draws the others, too."""
        return [("schedule",), ("execute",), ("deliver",), ("copies",), ("settle",)]

    def draw(self, random: Random) -> Action:
        """Draw an action. Raises `IndexError` after `LONGEST_RUN` actions."""
        if self._happened >= LONGEST_RUN:
            raise IndexError("the run is over")
        return draw_action(self.shape, random)

    def do(self, action: Action) -> bool:
        if self._ending is None:
            self._start()
        elif self._ending.is_over:
            return False
        kind, *numbers = action
        happens = bool(getattr(self, f"_{kind}")(*numbers))
        self._happened += happens
        for rank in self.ranks:
            rank.check()
        return happens

    def check(self) -> None:
        for rank in self.ranks:
            rank.check()
        if self._stored is not None and self._ending is not None and not self._ending.is_over:
            self._stored.check(self.asked, self._truths, self._runner)
        if self.scheduler is not None and self._is_at_rest():
            self._completions.check_at_rest()
            self._check_device_blocks()
            for name in self.asked:
                self._check_answer(name)

    def wind_down(self) -> Action | None:
        if self._is_at_rest():
            return self._ending.next() if self._ending is not None else None
        most = MOST_SETTLING + MOST_SETTLING_A_REQUEST * len(self.asked) + SETTLING_A_LOSS * self._lost.lost
        if self._settled > most:
            left = [f"{name} is {request.status.name}" for name, request in self.scheduler.requests.items()]
            what = "; ".join(left) or "no request, but the connector wants more steps"
            raise PropertyBroken(Property.PROGRESS, f"all copies have ended, and after {most} steps: {what}")
        return ("settle",)

    def describe(self) -> dict[str, str]:
        """Describe requests, the pool of device blocks, and the queued work of each device."""
        if self.scheduler is None:
            return {}
        pool = self.scheduler.kv_cache_manager.block_pool
        texts = {
            f"request {name}": f"{request.status.name.lower()}, {request.num_computed_tokens} of "
            f"{request.num_tokens} tokens computed"
            for name, request in self.asked.items()
        }
        texts["device"] = f"{pool.get_num_free_blocks()} of {pool.num_gpu_blocks - 1} blocks free"
        texts["steps"] = f"{len(self._scheduled)} scheduled, {len(self._executed)} executed"
        for number, rank in enumerate(self.ranks):
            texts[f"rank {number}"] = f"{rank.runtime.device.backlog} things queued"
        return texts

    def fingerprint(self) -> bytes:
        """Different after each action: the state of a foreign connector cannot be compared."""
        return b"%d" % self._happened

    # Actions.

    def _start(self) -> None:
        """Start the engine. If the connector raises, that is a finding of the first action."""
        shape, transfer, threads = self.shape, self._transfer, set(threading.enumerate())
        connector = KVConnectorFactory.get_connector_class(transfer)
        config = make_config(
            transfer,
            stages=shape.stages,
            shards=shape.shards,
            is_async=shape.is_async,
            drafts=shape.drafts,
            drafter=shape.drafter,
            device_blocks=shape.device_blocks,
            step_tokens=shape.step_tokens,
            most_running=shape.most_running,
            priorities=shape.priorities,
            adapters=shape.adapters,
            kv_events=shape.kv_events,
            mamba=shape.mamba,
        )
        kv_cache = make_kv_cache_config(
            shape.device_blocks, shape.windows_of_groups, shape.drafter_group, shape.eagle_group
        )
        with self.calling("starting the engine"), shared_memory_of(transfer.engine_id):
            self.ranks = [
                self.rank_class(config, kv_cache, connector, shape, rank, self._lost)
                for rank in range(shape.ranks)
            ]
            with recording(self.events, waits=shape.waits):
                self.scheduler = make_scheduler(config, kv_cache, shape.most_steps, shape.runner)
            record_manager(self.scheduler.connector, self.events)
            watch_hits(self.scheduler.connector)
            self._twins = TwinAsks(self.scheduler)
            self._completions = Completions(self.scheduler.connector, shape.ranks)
            self._stored = StoredBytes(self.scheduler.connector, self.ranks, shape.groups)
            self._ending = Ending(self, threads)
            self._aggregator = KVOutputAggregator.from_connector(self.scheduler.connector, shape.ranks)
        self._lost.give_clock_to(self.scheduler.connector)
        self._lost.while_waiting = self._run_all_ranks
        for rank in self.ranks:
            rank.faults.blocks_of = self._loading

    def _arrive(
        self,
        family: int,
        length: int,
        own: int,
        outputs: int,
        salt: int,
        priority: int = 0,
        adapter: int = 0,
    ) -> bool:
        if not own or not outputs:
            return False  # vLLM refuses such requests
        asked = [truth.tokens for truth in self._truths.values()]
        shared = asked[family % len(asked)] if family % 2 and asked else [family] * MOST_TOKENS
        prompt = [*shared[:length], *[VOCABULARY + len(asked)] * own][: MOST_TOKENS - outputs]
        self.add_request(f"r{len(self.asked)}", prompt, outputs, salt, priority, adapter)
        return True

    def add_request(
        self, name: str, prompt: list[int], outputs: int, salt: int, priority: int = 0, adapter: int = 0
    ) -> None:
        """Let a request arrive. outputs: the number of output tokens. salt, adapter: 0 for none."""
        self._truths[name], self._answers[name] = KnownTokens(prompt, 2 * adapter + salt), []
        sampling = SamplingParams(max_tokens=outputs, ignore_eos=True, temperature=0)
        request = Request(
            name,
            prompt,
            sampling,
            None,
            lora_request=LoRARequest(f"adapter {adapter}", adapter, "nowhere") if adapter else None,
            priority=priority,
            block_hasher=hasher(),
            cache_salt=str(salt) if salt else None,
        )
        self.asked[name] = request
        if self._stores_surely:
            self.surely_stored.add(name)
        with self.calling(f"request {name} arrives"):
            self.scheduler.add_request(request)

    def forget_request(self, name: str) -> None:
        """Check the answer of a request that has finished, and forget it."""
        self._check_answer(name)
        for known in (self.asked, self._answers, self._truths):
            known.pop(name, None)

    def _schedule(self) -> bool:
        under_way = len(self._scheduled) + len(self._executed)
        if under_way >= self.shape.most_steps or not self.scheduler.has_requests():
            return False
        with self.calling("Scheduler.schedule"), self._twins.watching():
            output = self.scheduler.schedule()
        self._lost.scheduled()
        self._scheduled.append(self._runner.step(output, self.scheduler.requests, self._truths))
        return True

    def _execute(self) -> bool:
        if not self._scheduled:
            return False
        step = self._scheduled.pop(0)
        self._lost.executing()
        with self.calling("a worker's step"):
            # After a step without unfinished requests there may be no further step to report with.
            may_hold = self.scheduler.has_unfinished_requests()
            outputs = [rank.execute(step, may_hold) for rank in self.ranks]
        for number, output in enumerate(outputs):
            self._completions.rank_reported(number, step.finished, output.kv_connector_output)
        self._executed.append((step, outputs))
        return True

    def _deliver(self) -> bool:
        if not self._executed and not self._execute():
            return False
        step, outputs = self._executed.pop(0)
        for rank in self.ranks:
            rank.await_compute()
        output = outputs[-1]
        with self.calling("Scheduler.update_from_output"):
            if self.shape.ranks > 1:
                output = self._aggregator.aggregate(outputs, self.shape.ranks - 1)
            answers = self.scheduler.update_from_output(step.output, output)
        for answer in [answer for client in answers.values() for answer in client.outputs]:
            self._answers[answer.request_id] += answer.new_token_ids
        if step.drafted and not self.shape.is_async:
            # With asynchronous scheduling the workers keep their drafts.
            drafts = [[VOCABULARY - 1] * self.shape.drafts for _ in step.drafted]
            self.scheduler.update_draft_token_ids(DraftTokenIds(list(step.drafted), drafts))
        return True

    def _copy(self, rank: int, steps: int) -> bool:
        if not self._has(rank):
            return False
        with self.calling("a copy"):
            return self.ranks[rank].run_steps(steps)

    def _copies(self) -> bool:
        with self.calling("a copy"):
            happened = [rank.run_all() for rank in self.ranks]
        return any(happened)

    def _abort(self, number: int) -> bool:
        unfinished = [name for name, request in self.asked.items() if not request.is_finished()]
        if not unfinished:
            return False
        name = unfinished[number % len(unfinished)]
        with self.calling("Scheduler.finish_requests"):
            self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        return True

    def _reset(self, running: int, connector: int) -> bool:
        with self.calling("Scheduler.reset_prefix_cache"):
            try:
                done = self.scheduler.reset_prefix_cache(bool(running), bool(connector))
            except RuntimeError as error:
                # If a copy holds a block, vLLM raises after it has preempted all requests, and continues.
                if "remote KV transfer" not in str(error):
                    raise
                done = False
        if connector:
            self._may_lose_stores()
            # If the device was not reset, blocks from before the reset are still on it.
            self._stores_surely = done and not self._has_had_faults
        if done and connector:
            self._runner.epoch += 1
            self._completions.all_were_reset()
        return True

    def _fail(self, rank: int, what: int) -> bool:
        if not self._has(rank) or not self.ranks[rank].faults.fail(what):
            return False
        self._fault_happens()
        return True

    def _late(self, rank: int, steps: int) -> bool:
        return self._has(rank) and self.ranks[rank].faults.hold(steps)

    def _double(self, rank: int) -> bool:
        return self._has(rank) and self.ranks[rank].faults.double()

    def _lose(self, rank: int, what: int) -> bool:
        self._fault_happens()
        return self._has(rank) and self.ranks[rank].faults.lose(what)

    def _slow(self) -> bool:
        self._fault_happens()
        return self._lost.time_out()

    def _fault_happens(self) -> None:
        self._may_lose_stores()
        self._has_had_faults = True

    def _may_lose_stores(self) -> None:
        self.may_have_lost_stores, self._stores_surely = True, False
        self.surely_stored.clear()

    def _run_all_ranks(self) -> None:
        """Run all queued work, and stop holding reports back, while a rank waits for a lost copy."""
        for rank in self.ranks:
            rank.run_all()
            rank.faults.hold(0)

    @property
    def lost_host_blocks(self) -> int:
        """The number of host blocks that may be missing because copies were given up."""
        return self._lost.num_host_blocks()

    def _has(self, rank: int) -> bool:
        return rank < len(self.ranks)

    def _loading(self, name: str) -> list[int]:
        """The device blocks that a load in flight writes: vLLM sets their hashes when the load has ended."""
        request, manager = self.scheduler.requests.get(name), self.scheduler.kv_cache_manager
        if request is None or request.status is not RequestStatus.WAITING_FOR_REMOTE_KVS:
            return []
        tables = manager.get_blocks(name).blocks
        return [
            block.block_id
            for table in tables
            for block in table
            if block.block_hash is None and block.block_id
        ]

    def _settle(self) -> bool:
        self._settled += 1
        self._lost.settle()
        self._copies()
        while self._schedule():
            pass
        self._deliver()
        return True

    # The end of a run.

    def _ask(self) -> bool:
        return self._is_at_rest() and self._ending is not None and self._ending.ask()

    def _probe(self) -> bool:
        return self._is_at_rest() and self._ending is not None and self._ending.probe()

    def _fill(self) -> bool:
        return self._is_at_rest() and self._ending is not None and self._ending.fill()

    def _shutdown(self) -> bool:
        if not self._is_at_rest() or self._ending is None or not self._ending.shutdown():
            return False
        count_failed_copies(self.events)
        return True

    def to_rest(self) -> None:
        """Settle until the engine is at rest. Raises `PropertyBroken` if it does not rest (progress, S9)."""
        most = MOST_SETTLING + SETTLING_A_LOSS * self._lost.lost
        for _ in range(most):
            if self._is_at_rest():
                return
            self._settle()
        raise PropertyBroken(
            Property.PROGRESS, f"all copies have ended, and after {most} steps there is work"
        )

    def filled_by_fresh(self) -> int:
        """How many blocks of the requests of `fill` the host of a fresh engine of this shape has."""
        return _filled_by_fresh(msgspec.json.encode(self.shape))

    # Checks.

    def _is_at_rest(self) -> bool:
        if self.scheduler is None:
            return True
        return not self._scheduled and not self._executed and not self.scheduler.has_requests()

    def _check_device_blocks(self) -> None:
        count_case(Property.ONE_RELEASE_PER_HOLD, "engines at rest", bool(self.asked))
        pool = self.scheduler.kv_cache_manager.block_pool
        # The blocks of a lost load stay held, because it may still write them. The pool does not count them.
        retired = self._lost.device_blocks()
        held = [
            block.block_id for block in pool.blocks[1:] if block.ref_cnt and block.block_id not in retired
        ]
        if held or pool.get_num_free_blocks() != pool.num_gpu_blocks - 1:
            raise PropertyBroken(
                Property.ONE_RELEASE_PER_HOLD,
                f"no request is left, but device blocks {held} are held, and "
                f"{pool.get_num_free_blocks()} of {pool.num_gpu_blocks - 1} are free",
            )

    def _check_answer(self, name: str) -> None:
        request, answer, truth = self.asked[name], self._answers[name], self._truths[name]
        begin = request.num_prompt_tokens
        right = [truth.token(begin + place) for place in range(len(answer))]
        if answer != right:
            raise PropertyBroken(Property.CORRECT_BYTES, f"{name} got tokens {answer}; right are {right}")
        aborted = request.status is RequestStatus.FINISHED_ABORTED
        if not request.is_finished() or (not aborted and len(answer) != request.max_tokens):
            raise PropertyBroken(
                Property.PROGRESS,
                f"request {name} is {request.status.name} at the end, with {len(answer)} of "
                f"{request.max_tokens} tokens",
            )

    @contextmanager
    def calling(self, what: str) -> Iterator[None]:
        """A `with` block around a call of the connector or vLLM: errors are findings that name their line."""
        count_case(Property.LEGAL_CALLS, "calls of the scheduler and of workers")
        try:
            yield
        except KvsmError:
            raise
        except (Exception, SystemExit) as error:
            place, line = _place(error)
            raise PropertyBroken(
                Property.LEGAL_CALLS, f"{what} raised {described(error)}, at {place}: {line}", place
            ) from error


def _place(error: BaseException) -> tuple[str, str]:
    """("FILE:LINE", its source text) of the innermost line outside of kvsm's checking code."""
    theirs = raised_at(error, lambda file: "vllm_fuzz" in file)
    return theirs if theirs[0] else raised_at(error, lambda _: False)


@lru_cache(maxsize=256)
def _filled_by_fresh(encoded_shape: bytes) -> int:
    world = VllmWorld(msgspec.json.decode(encoded_shape, type=EngineShape))
    world._start()
    served = filled(world)
    world.do(("shutdown",))
    return served
