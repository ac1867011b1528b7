"""Scenarios of the engine of streams with the real submitting threads of the CUDA engine.

The device is simulated: each stream is a thread that runs its work in order, and takes a step for each
beginning and end of a copy. So the order of streams, submitters and callers is explored with real threads.
The ordering logic alone, with copies in pieces and races found by vector clocks, is `kvsm check copies`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np

from kvsm.check.threads.control import control
from kvsm.check.threads.copy_scenarios import BLOCK_BYTES, content, fail_for_reuse, job
from kvsm.check.threads.primitives import ControlledThread, TurnEvent, TurnQueue
from kvsm.check.threads.scenario import ThreadScenario
from kvsm.copies.copy_engine import CopyResult
from kvsm.copies.layout import MemoryLayout
from kvsm.copies.rank_memory import NumpyPools
from kvsm.copies.streams import StreamCopyEngine
from kvsm.core.plan import TransferJob
from kvsm.cuda_io.cuda_engine import ThreadSubmitter
from kvsm.errors import PropertyBroken, TransferFailed
from kvsm.events import Direction
from kvsm.ids import IdArray
from kvsm.properties import Property


class StreamThreadEvent:
    """A `StreamEvent`. error: the error of the copy right before it; None if that succeeded."""

    def __init__(self) -> None:
        self.reached = TurnEvent()
        self.error: Exception | None = None

    def done(self) -> bool:
        is_done = self.reached.is_set()
        if is_done and self.error is not None:
            raise self.error
        return is_done

    def synchronize(self) -> None:
        self.reached.wait()
        if self.error is not None:
            raise self.error

    def seconds_after(self, _earlier: Any) -> float:
        return 0.0


class StreamThread:
    """A `DeviceStream`: a thread that does what is queued, in order."""

    def __init__(self, name: str, refusals: list[int]) -> None:
        self._work: TurnQueue[Callable[[], Any] | None] = TurnQueue()
        self._error: Exception | None = None
        self._refusals = refusals
        """[how many more events can be recorded before one fails]; empty: none fails."""
        self.thread = ControlledThread(target=self._serve, name=name)
        self.thread.start()

    def record(self) -> StreamThreadEvent:
        if self._refusals:
            self._refusals[0] -= 1
            if self._refusals[0] < 0:
                self._refusals.clear()
                raise MemoryError("no memory for an event")
        event = StreamThreadEvent()

        def reach() -> None:
            event.error, self._error = self._error, None
            event.reached.set()

        self._work.put(reach)
        return event

    def wait(self, event: StreamThreadEvent) -> None:
        self._work.put(event.reached.wait)

    def put(self, work: Callable[[], object]) -> None:
        """Queue work that may fail."""

        def run() -> None:
            try:
                work()
            except OSError as error:
                self._error = error

        self._work.put(run)

    def close(self) -> None:
        """Do what is queued, and end."""
        self._work.put(None)
        self.thread.join()

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            work()


class StreamThreads:
    """A `StreamDevice` of such streams. bad: the transfers whose copies fail."""

    def __init__(self, blocks: int) -> None:
        self.device = np.zeros((blocks, BLOCK_BYTES), np.uint8)
        self.host = np.zeros((blocks, BLOCK_BYTES), np.uint8)
        self.bad: set[int] = set()
        self.copying: set[int] = set()
        """Transfers that are queued for a stream, or in progress."""
        self.refusals: list[int] = []
        self.submitters: list[ThreadSubmitter] = []
        self._pools = NumpyPools([self.device], self.host)
        self._streams: list[StreamThread] = []
        self.compute = StreamThread("compute", [])

    @property
    def layout(self) -> MemoryLayout:
        return self._pools.layout

    def new_stream(self, name: str) -> StreamThread:
        self._streams.append(StreamThread(name.replace("kvsm", "stream"), self.refusals))
        return self._streams[-1]

    def new_submitter(self, name: str, died: Callable[[str], None]) -> ThreadSubmitter:
        self.submitters.append(ThreadSubmitter(name, died, lambda: None, nullcontext(), self._settle))
        return self.submitters[-1]

    def prepare(
        self,
        direction: Direction,  # noqa: ARG002 (numpy copies need no descriptors)
        device_blocks: IdArray,
        host_blocks: IdArray,
    ) -> tuple[IdArray, IdArray]:
        return device_blocks, host_blocks

    def copy(
        self, stream: StreamThread, transfer: int, direction: Direction, prepared: tuple[IdArray, IdArray]
    ) -> None:
        self.copying.add(transfer)

        def move() -> None:
            control().reach(f"transfer {transfer} begins to copy")
            if transfer in self.bad:
                self.copying.discard(transfer)
                raise OSError(f"transfer {transfer} fails")
            self._pools.copy(direction, *prepared)
            control().reach(f"transfer {transfer} has copied")
            self.copying.discard(transfer)

        stream.put(move)

    def close(self) -> None:
        if self.copying:
            fail_for_reuse(min(self.copying), "is still copied when the device is closed")
        for stream in (*self._streams, self.compute):
            stream.close()

    def _settle(self) -> None:
        """Wait for all that is queued."""
        for stream in self._streams:
            event = StreamThreadEvent()
            stream.put(event.reached.set)
            event.synchronize()


class ChosenWays(StreamCopyEngine):
    """Each copy may be small, so that its caller may queue it, or large, so that its submitter does."""

    def _is_small(self, job: TransferJob) -> bool:
        return bool(control().choose(f"transfer {job.transfer} is small", 2))


class SubmittedCopies(ThreadScenario):
    """A store behind the kernel that writes its block, and a load before the kernel that reads its own."""

    says = "callers and submitting threads queue copies on the engine's streams, and any copy may fail"
    sizes: Mapping[str, int] = {"stores": 1, "deaths": 0}
    modules = ("kvsm.copies.streams", "kvsm.cuda_io.cuda_engine")
    line_modules = ("kvsm.copies.streams", "kvsm.cuda_io.cuda_engine")
    notable = ("a copy fails", "all copies are good", "the caller waits")

    def body(self) -> None:
        run, stores = control(), self.size["stores"]
        device = StreamThreads(stores + 1)
        load = stores + 1
        device.host[stores] = content(stores)
        failing = run.choose("the copy that fails, or none", 1 if self.size["deaths"] else load + 1)
        if not self.size["deaths"] and failing:
            device.bad.add(failing)
        engine = ChosenWays(device)
        if self.size["deaths"]:
            device.refusals.append(run.choose("events before one cannot be recorded", 2 * stores + 3))
        results: dict[int, CopyResult] = {}
        for block in range(stores):
            device.compute.put(partial(_write, device, block))
            self._submit(engine, 1 + block, Direction.STORE, block)
        is_accepted = self._submit(engine, load, Direction.LOAD, stores)
        self._poll(engine, device, results)
        read: list[Any] = []
        if run.choose("whether compute is held", 2):
            engine.hold_compute([load])
            device.compute.put(lambda: read.append(device.device[stores].copy()))
            device.compute.record().synchronize()
        else:
            engine.wait([load])
            run.note_reached("the caller waits")
            read.append(device.device[stores].copy())
        self._poll(engine, device, results)
        engine.drain()
        self._poll(engine, device, results)
        engine.close()
        self._poll(engine, device, results)
        if is_accepted and load in results and results[load].good and not (read[0] == content(stores)).all():
            raise PropertyBroken(
                Property.COPY_ORDER, "compute read a block before its load, for which it was held"
            )
        self._check(device, results, self._accepted)
        run.note_reached(
            "all copies are good" if all(one.good for one in results.values()) else "a copy fails"
        )

    def _submit(self, engine: StreamCopyEngine, transfer: int, direction: Direction, block: int) -> bool:
        self._accepted = set() if transfer == 1 else self._accepted
        try:
            engine.submit(job(transfer, direction, [block]))
        except TransferFailed:
            if not self.size["deaths"]:
                raise
            return False
        self._accepted.add(transfer)
        return True

    _accepted: set[int]

    def _poll(self, engine: StreamCopyEngine, device: StreamThreads, results: dict[int, CopyResult]) -> None:
        for result in engine.poll():
            transfer = result.transfer
            if transfer in results:
                raise PropertyBroken(Property.PROGRESS, f"transfer {transfer} ends twice")
            if transfer in device.copying:
                fail_for_reuse(transfer, "is still copied when its result comes")
            results[transfer] = result

    def _check(self, device: StreamThreads, results: dict[int, CopyResult], accepted: set[int]) -> None:
        if set(results) != accepted:
            raise PropertyBroken(
                Property.PROGRESS, f"{sorted(accepted)} were taken, {sorted(results)} have ended"
            )
        for transfer, result in sorted(results.items()):
            block, is_store = transfer - 1, result.direction is Direction.STORE
            target = device.host if is_store else device.device
            if result.good and transfer in device.bad:
                raise PropertyBroken(
                    Property.FAILURE_IS_NOT_SUCCESS, f"transfer {transfer} failed, and is good"
                )
            if result.good and not (target[block] == content(block)).all():
                kind = Property.COPY_ORDER if is_store else Property.CORRECT_BYTES
                raise PropertyBroken(kind, f"transfer {transfer} is good, and brought other bytes")
            if not result.good and transfer not in device.bad and not self.size["deaths"]:
                raise PropertyBroken(Property.PROGRESS, f"a good copy is bad: {result.error}")


class ClosedTwice(ThreadScenario):
    """Two threads close the engine while a copy is under way."""

    says = "two callers close the engine of streams while a copy is under way"
    modules = SubmittedCopies.modules
    line_modules = SubmittedCopies.line_modules
    notable = ("the other one closes first", "the main thread closes first")

    def body(self) -> None:
        device, closed = StreamThreads(1), list[str]()
        device.device[0] = content(0)
        engine = ChosenWays(device)
        engine.submit(job(1, Direction.STORE, [0]))

        def close(who: str) -> None:
            engine.close()
            if device.copying:
                fail_for_reuse(1, "is still copied after a close")
            closed.append(who)

        other = ControlledThread(target=close, name="closer", args=("the other one",))
        other.start()
        close("the main thread")
        other.join()
        control().note_reached(f"{closed[0]} closes first")
        ended = [(result.transfer, result.good) for result in engine.poll()]
        if ended != [(1, True)]:
            raise PropertyBroken(Property.PROGRESS, f"after both closes the copy ended as {ended}")
        if not (device.host[0] == content(0)).all():
            raise PropertyBroken(Property.CORRECT_BYTES, "the copy is good, and brought other bytes")


def _write(device: StreamThreads, block: int) -> None:
    """A kernel."""
    control().reach(f"the kernel of block {block} begins")
    device.device[block] = content(block)
