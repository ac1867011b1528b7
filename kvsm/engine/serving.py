"""The serving engine: one loop that lets time pass, requests arrive, copies end and tokens be computed.

Time is virtual. A step lasts `STEP_MS` and `TOKEN_MS` for each token it computes, which is about what a
large model takes on one node; a request arrives in the first step that begins after its timestamp; while
nothing is left to do the clock jumps to the next arrival. So a trace of an hour runs in seconds, and the
same workload runs through the same steps on every machine.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvsm.engine.content import DeviceContent
from kvsm.engine.copies import Copies
from kvsm.engine.request import Request
from kvsm.engine.scheduler import Copy, Scheduler
from kvsm.events import Direction
from kvsm.invariants import Violation, check_rest
from kvsm.offloader import Offloader
from kvsm.traces import TraceRequest
from kvsm.worker import Worker

STEP_MS = 25.0
TOKEN_MS = 0.01


class VirtualClock:
    """The time of the workload, in milliseconds since its start."""

    def __init__(self) -> None:
        self.now_ms = 0.0

    def now_ns(self) -> int:
        """As a Unix time, for records of runs whose logs are to be equal byte for byte."""
        return int(self.now_ms * 1e6)


class ServingEngine:
    """Serves `trace` through an offload core, on `workers` whose device pools are `device_pools`.

    clock: advanced by the engine alone. time_scale: real seconds to sleep for each virtual one. Call
    `step` until it returns False, then `check_rest`. Attributes: `scheduler`, `violations` (of S15, so
    far), `arrived` (requests), `stored_blocks`, `loaded_blocks` (by good transfers).
    """

    def __init__(
        self,
        scheduler: Scheduler,
        workers: Sequence[Worker],
        device_pools: Sequence[NDArray[np.uint8]],
        trace: Iterable[TraceRequest],
        *,
        clock: VirtualClock,
        time_scale: float = 0.0,
    ) -> None:
        self.scheduler, self.clock = scheduler, clock
        self.violations: list[Violation] = []
        self.arrived = self.stored_blocks = self.loaded_blocks = 0
        self._offloader: Offloader = scheduler.offloader
        self._copies = Copies(workers)
        self._content = DeviceContent(device_pools)
        self._trace = iter(trace)
        self._next = next(self._trace, None)
        self._time_scale = time_scale

    def step(self) -> bool:
        """One iteration. Returns whether anything is left to do."""
        step = self._offloader.step
        self._take_arrivals()
        for report in self._copies.collect(step):
            ended = self._offloader.report(report.transfer, report.worker, report.good)
            if ended is not None:
                self._end_copy(self.scheduler.end_copy(ended), ended.good)
        self.scheduler.update(step)
        batch = self.scheduler.schedule(step)
        self._submit(step)
        if batch.blocks:
            self._content.write(batch.blocks, batch.keys)
        self._offloader.tick()
        if not self.scheduler.unfinished:
            # The next step may be far away, or never come: what is under way ends now (S17).
            self._offloader.flush()
            self._copies.hasten(step + 1)
        self._offloader.end_step()
        self._let_time_pass(STEP_MS + TOKEN_MS * batch.tokens)
        return self._next is not None or bool(self.scheduler.unfinished or self._copies)

    def abort(self, name: str) -> None:
        """The client of this request has left. Legal at any time, also for a request that is over."""
        self.scheduler.abort(name)

    def check_rest(self) -> list[Violation]:
        """After the last step: what S9 says must be gone and is not."""
        pool = self.scheduler.pool
        held = pool.num_blocks - pool.num_free_blocks
        left = [Violation("S9", f"at rest, {held} device blocks are still held")] if held else []
        return check_rest(self._offloader.ledger) + left

    def _take_arrivals(self) -> None:
        while self._next is not None and self._next.arrival_ms <= self.clock.now_ms:
            # Named by its line in the trace.
            self.arrived += 1
            request = Request(f"r{self.arrived}", self._next)
            self._offloader.arrive(request.name)
            self.scheduler.waiting.append(request)
            self._next = next(self._trace, None)

    def _end_copy(self, copy: Copy, good: bool) -> None:
        if not good:
            return
        if copy.plan.direction is Direction.STORE:
            self.stored_blocks += len(copy.blocks)
            return
        self.loaded_blocks += len(copy.blocks)
        for rank, block in self._content.mismatches(copy.blocks, copy.keys):
            key = copy.keys[copy.blocks.index(block)].hex()
            transfer, request = copy.plan.transfer, copy.request.name
            found = f"load {transfer} of {request}: on worker {rank}, block {block} does not hold key {key}"
            self.violations.append(Violation("S15", found, (), (block,), (transfer,), (request,)))

    def _submit(self, step: int) -> None:
        plans, self.scheduler.plans = self.scheduler.plans, []
        if plans:
            self._offloader.submit([plan.transfer for plan in plans])
            self._copies.submit(plans, step)

    def _let_time_pass(self, step_ms: float) -> None:
        began_ms = self.clock.now_ms
        self.clock.now_ms += step_ms
        if self._next is not None and not self.scheduler.unfinished and not self._copies:
            self.clock.now_ms = max(self.clock.now_ms, self._next.arrival_ms)
        if self._time_scale:
            time.sleep((self.clock.now_ms - began_ms) / 1000 * self._time_scale)
