"""The loop of the serving engine: requests arrive, copies end, tokens are computed, time passes.

Time is virtual. A step lasts `STEP_MS`, plus `TOKEN_MS` for each token that it computes: about the times of a
large model on one node. A request arrives in the first step that begins after its timestamp. When no work is
left, the clock jumps to the next arrival. So a trace of an hour runs in seconds, and the same workload takes
the same steps on every machine.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from kvsm.copies.worker import Worker
from kvsm.core.ledger.invariants import Violation, check_rest
from kvsm.core.scheduler import LastStep
from kvsm.properties import Property
from kvsm.serving.content import DeviceContent, Mismatch
from kvsm.serving.disturbances import Disturbances
from kvsm.serving.in_flight import TransfersInFlight
from kvsm.serving.ranks import Rank
from kvsm.serving.run_disk import RunDisk
from kvsm.serving.serving_request import ServingRequest, ServingStatus
from kvsm.serving.serving_scheduler import ServingScheduler
from kvsm.serving.traces import BLOCK_TOKENS, TraceRequest

STEP_MS = 25.0
TOKEN_MS = 0.01


class VirtualClock:
    """The time of the workload, in milliseconds since its start."""

    def __init__(self) -> None:
        self.now_ms = 0.0

    def now_ns(self) -> int:
        """Return the time as Unix time (ns), for logs that must be equal byte for byte."""
        return int(self.now_ms * 1e6)


class ServingEngine:
    """Serves a trace. Call `step` until it returns False, then `check_rest`.

    scheduler: decides which requests run, and calls the offload scheduler.
    workers, ranks: one of each for every rank.
    trace: the requests, in order of arrival.
    clock: the virtual time, which only the engine advances.
    disturbances: draws aborts, preemptions and resets.
    block_tokens: the number of tokens of a hash id in the trace.
    time_scale: real seconds to sleep for each virtual second.
    disk: drives the disk tier; None: there is none.

    Attributes: `scheduler`, `in_flight`; counts so far: `arrived` (requests), `steps`, `resets`.
    """

    def __init__(
        self,
        scheduler: ServingScheduler,
        workers: Sequence[Worker],
        ranks: Sequence[Rank],
        trace: Iterable[TraceRequest],
        *,
        clock: VirtualClock,
        disturbances: Disturbances,
        block_tokens: int = BLOCK_TOKENS,
        time_scale: float = 0.0,
        disk: RunDisk | None = None,
    ) -> None:
        self.scheduler, self.clock, self._disk = scheduler, clock, disk
        self.in_flight = TransfersInFlight(workers)
        self.arrived = self.steps = self.resets = 0
        self._connector = scheduler.connector
        self._content = DeviceContent(ranks)
        self._trace = iter(trace)
        self._next = next(self._trace, None)
        self._disturbances, self._block_tokens, self._time_scale = disturbances, block_tokens, time_scale
        self._aborts: dict[int, list[str]] = {}
        """Step -> the requests whose clients leave in it."""

    @property
    def violations(self) -> list[Violation]:
        """All violations so far. Waits for all compute of the ranks."""
        wrong = [_wrong_content(mismatch) for mismatch in self._content.mismatches()]
        return [*wrong, *self.scheduler.checks.violations]

    def step(self) -> bool:
        """Run one step, with the connector's calls in vLLM's order. Returns whether work is left."""
        scheduler, step = self.scheduler, self.steps
        self._take_arrivals(step)
        if self._disk is not None:
            self._disk.take(step)
        scheduler.take(self._connector.update_connector_output(self.in_flight.collect(step)), step)
        scheduler.update()
        self._disturb(step)
        output = scheduler.schedule(step)
        if self._disk is not None:
            self._disk.start(step)
        plan = self._connector.build_connector_meta(output)
        if not scheduler.unfinished:
            scheduler.checks.last_step(plan)
        self.in_flight.start(plan, step)
        if self._disk is not None and plan.flush:
            self._disk.flush(plan.flush, step)
        self._check_begun()
        batch = scheduler.compute(step)
        if batch.blocks:
            self._content.write(batch.blocks, batch.keys)
        self.steps += 1
        self._let_time_pass(STEP_MS + TOKEN_MS * batch.tokens)
        return self._next is not None or self._has_work()

    def _has_work(self) -> bool:
        return bool(self.scheduler.unfinished) or self._is_copying()

    def _is_copying(self) -> bool:
        """Whether copies need further steps, even without requests."""
        return self._connector.has_pending_work() or self._disk_has_work()

    def _disk_has_work(self) -> bool:
        return self._disk is not None and self._disk.has_work()

    def abort(self, name: str) -> None:
        """Abort a request, because its client has left. Does nothing if the request is over."""
        self.scheduler.abort(name, self.steps)

    def reset_cache(self) -> bool:
        """Reset the prefix cache of the device, of the host and of the disk.

        Returns False if earlier copies of the host are still in flight.
        """
        self.resets += 1
        self.scheduler.pool.reset_prefix_cache()
        done = self._connector.reset_cache()
        if self._disk is not None:
            self._disk.tier.reset()
        return done

    def check_rest(self) -> list[Violation]:
        """Return the violations after the last step: whatever must have ended by now (progress, S9)."""
        left = check_rest(self._connector.offloader.ledger)
        held = self.scheduler.pool.held_blocks()
        if held:
            message = f"at rest, {len(held)} device blocks are still held"
            left.append(Violation(Property.PROGRESS, message, (), tuple(held[:8])))
        if self._connector.has_pending_work():
            left.append(Violation(Property.PROGRESS, "at rest, the connector has work pending"))
        return left if self._disk is None else [*left, *self._disk.check_rest()]

    def _take_arrivals(self, step: int) -> None:
        while self._next is not None and self._next.arrival_ms <= self.clock.now_ms:
            # The name is its line number in the trace.
            self.arrived += 1
            name = f"r{self.arrived}"
            for_remote = self._disturbances.is_for_remote_decode(name)
            request = ServingRequest(
                name,
                self._next,
                self._connector.config,
                self._block_tokens,
                kv_transfer_params={"do_remote_decode": True} if for_remote else None,
            )
            self.scheduler.checks.arrived(request)
            self.scheduler.add_request(request)
            patience = self._disturbances.patience_steps(name)
            if patience is not None:
                self._aborts.setdefault(step + patience, []).append(name)
            self._next = next(self._trace, None)

    def _disturb(self, step: int) -> None:
        for name in self._aborts.pop(step, ()):
            self.abort(name)
        victim = self._disturbances.preempts(len(self.scheduler.running))
        if victim is not None:
            self.scheduler.preempt(list(self.scheduler.running.values())[victim], step)
        if self._disturbances.resets(step):
            self.reset_cache()

    def _check_begun(self) -> None:
        """Check correct bytes (S15): the blocks that a starting request reads hold their content."""
        blocks: list[int] = []
        keys: list[bytes] = []
        readers: list[str] = []
        for request in self.scheduler.begun:
            if request.status is ServingStatus.PREFILL and request.num_computed_tokens:
                own_blocks, own_keys = self.scheduler.block_tables.needed_blocks(request)
                blocks += own_blocks
                keys += own_keys
                readers += [request.request_id] * len(own_blocks)
        if blocks:
            self._content.check(blocks, keys, readers)

    def _let_time_pass(self, step_ms: float) -> None:
        began_ms = self.clock.now_ms
        self.clock.now_ms += step_ms
        # An engine that flushes at its last step runs no further one until a request arrives, and takes the
        # reports then. A disk needs further steps: blocks go to the disk only after their store to the host.
        flushes = self._connector.config.last_step is LastStep.FLUSH and not self._disk_has_work()
        stops = flushes or not self._is_copying()
        if self._next is not None and not self.scheduler.unfinished and stops:
            self.clock.now_ms = max(self.clock.now_ms, self._next.arrival_ms)
        if self._time_scale:
            time.sleep((self.clock.now_ms - began_ms) / 1000 * self._time_scale)


def _wrong_content(wrong: Mismatch) -> Violation:
    message = (
        f"request {wrong.reader}: on worker {wrong.rank}, block {wrong.block} does not hold key "
        f"{wrong.key.hex()}"
    )
    return Violation(Property.CORRECT_BYTES, message, (), (wrong.block,), (), (wrong.reader,))
