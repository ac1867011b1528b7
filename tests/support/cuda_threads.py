"""Scenarios of `CudaCopyEngine` on the fake driver, for every schedule of its threads.

The engine, its submitting threads, cuda-bindings and the driver's protocol are real. Each driver call whose
effect other threads can see is a step. The device runs in threads, too: one per stream, with a step for each
operation. The fake driver needs a compiler, so these scopes are here and not in `kvsm check threads`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
from cuda_rig import usable_fake
from fake_cuda import INVALID_VALUE, FakeDriver

from kvsm.check.threads.control import control
from kvsm.check.threads.copy_scenarios import BLOCK_BYTES, content, fail_for_reuse, job
from kvsm.check.threads.primitives import ControlledThread
from kvsm.check.threads.scenario import ThreadScenario, ThreadScope
from kvsm.copies.copy_engine import CopyResult
from kvsm.core.plan import TransferJob
from kvsm.cuda_io import driver
from kvsm.cuda_io.cuda_engine import CudaCopyEngine
from kvsm.cuda_io.driver import CudaError
from kvsm.cuda_io.paths import CopyPath
from kvsm.errors import PropertyBroken, TransferFailed
from kvsm.events import Direction
from kvsm.properties import Property

COMPUTE = 0
"""The handle of the stream that plays the model's compute stream."""
OLD, REUSED = 1, 2
"""The byte of a block before a load, and the byte that the next owner of a block writes."""

_SEEN = ("cuEvent", "cuLaunch", "cuMem", "cuStream")
"""Name prefixes of the calls whose order other threads can see."""
_real_call, _real_entry = driver.call, driver._entry


class SteppedStreams:
    """The streams of the fake driver, each a thread that runs its operations in order."""

    def __init__(self, fake: FakeDriver) -> None:
        self.fake = fake
        self._threads: dict[int, ControlledThread] = {}
        self._ended: set[int] = set()
        fake.choose_steps()

    def begin(self, handle: int, name: str) -> None:
        """Start a thread that runs the operations of this stream."""
        self._threads[handle] = ControlledThread(target=self._serve, name=name, args=(handle,))
        self._threads[handle].start()

    def begin_own(self, handle: int) -> None:
        """Start the thread of a new stream of the engine."""
        self.begin(handle, f"stream {len(self._threads) + 1}")

    def end(self, handle: int) -> None:
        """End the thread of a destroyed stream."""
        if self.fake.left(handle):
            control().fail(
                PropertyBroken(Property.NO_REUSE_IN_FLIGHT, "a stream is destroyed that has work to do")
            )
        self._ended.add(handle)
        self._threads[handle].join()

    def close(self) -> None:
        """End all threads, because the streams of a lost device are never destroyed."""
        for handle in [one for one in self._threads if one not in self._ended]:
            self.end(handle)

    def finish(self, handle: int) -> None:
        """Wait for all queued operations of this stream."""
        if handle in self._threads:  # else the driver itself does what is queued
            control().reach("waits for a stream", lambda: not self.fake.left(handle))

    def _serve(self, handle: int) -> None:
        def ready() -> bool:
            return handle in self._ended or self.fake.can_step(handle)

        while True:
            control().reach("does what is queued", ready)
            if handle in self._ended:
                return
            self.fake.step(handle)


_streams: SteppedStreams
"""The streams of the current run."""


def _stepping_call(name: str, *arguments: Any) -> Any:
    """Replace `driver.call`: a caller that waits for the device yields to other threads until it is done."""
    if name == "cuEventSynchronize":
        control().reach("waits for an event", lambda: _streams.fake.is_reached(int(arguments[0])))
    elif name == "cuStreamSynchronize":
        _streams.finish(int(arguments[0]))
    elif name == "cuStreamDestroy":
        _streams.end(int(arguments[0]))
    elif name.startswith(_SEEN):
        control().reach(f"calls {name}")
    value = _real_call(name, *arguments)
    if name == "cuStreamCreateWithPriority":
        _streams.begin_own(int(value))
    return value


def _stepping_entry(name: str, version: int, prototype: Any) -> Callable[..., Any]:
    """Replace `driver._entry`."""
    function = _real_entry(name, version, prototype)
    if not name.startswith(_SEEN):
        return function  # type: ignore[no-any-return]

    def stepping(*arguments: Any) -> Any:
        control().reach(f"calls {name}")
        return function(*arguments)

    return stepping


@cache
def _stepping_quick() -> driver._LockKeepingCalls:
    """Replace `driver._quick`."""
    return driver._LockKeepingCalls()


FAILING_COPIES = (("cuMemcpyBatchAsync", 1), ("cuMemcpyBatchAsync", 2))
FAILING_RECORDS = (
    *(("cuEventRecord", nth) for nth in range(1, 7)),
    *(("cuStreamWaitEvent", nth) for nth in range(1, 4)),
    *(("cuEventCreate", nth) for nth in range(1, 5)),
)


class _ChosenWays(CudaCopyEngine):
    """Any copy may be large, so that its submitter queues it, or small, so that its caller may."""

    def _is_small(self, job: TransferJob) -> bool:
        return bool(control().choose(f"transfer {job.transfer} is small", 2))


class DrivenCopies(ThreadScenario):
    """A store after the kernel that writes its block, and a load between two kernels that read its block.

    As soon as a transfer's result is returned, its memory gets a new owner.
    """

    says = "the CUDA engine hands copies to a driver, any call may fail, and streams work at any moment"
    sizes: Mapping[str, int] = {"stores": 1, "kernel": 0, "records": 0, "losses": 0}
    modules = ("kvsm.copies.streams", "kvsm.cuda_io.cuda_engine")
    line_modules = modules
    constants: Mapping[str, Any] = {
        "kvsm.cuda_io.driver:call": _stepping_call,
        "kvsm.cuda_io.driver:_entry": _stepping_entry,
        "kvsm.cuda_io.driver:_quick": _stepping_quick,
        "kvsm.cuda_io.cuda_engine:SPINS": 1,
    }
    notable = ("a copy fails", "all copies are good", "the caller waits", "compute is held")

    def body(self) -> None:
        global _streams
        fake = usable_fake()
        _streams = SteppedStreams(fake)
        retained, stores = fake.retained, self.size["stores"]
        self._device = np.full((stores + 1, BLOCK_BYTES), OLD, np.uint8)
        self._host = np.zeros((stores + 1, BLOCK_BYTES), np.uint8)
        self._host[stores] = content(stores)
        fake.page_lock(self._host)
        path = CopyPath.KERNEL if self.size["kernel"] else CopyPath.BATCH
        engine = _ChosenWays([self._device], self._host, lambda: COMPUTE, path)
        _streams.begin(COMPUTE, "compute")  # the last one, so that one delay lets copies overtake it
        self._results: dict[int, CopyResult] = {}
        self._fail_something(fake)
        self._copy(engine, fake)
        self._check_end(retained)

    def _fail_something(self, fake: FakeDriver) -> None:
        """Let the device be lost at some moment, or choose a call that fails, or neither."""
        self._is_hurt = bool(self.size["losses"])
        if self.size["losses"]:
            ControlledThread(target=_lose, name="accident", args=(fake,)).start()
            return
        calls = FAILING_RECORDS if self.size["records"] else FAILING_COPIES
        if self.size["kernel"]:
            calls = (("cuLaunchKernel", 1), ("cuLaunchKernel", 2))
        chosen = control().choose("the call that fails, or none", len(calls) + 1)
        if chosen:
            self._is_hurt = True
            fake.fail(*calls[chosen - 1], INVALID_VALUE)

    def _copy(self, engine: CudaCopyEngine, fake: FakeDriver) -> None:
        stores = self.size["stores"]
        load, block = stores + 1, stores
        read_before, read = np.zeros(BLOCK_BYTES, np.uint8), np.zeros(BLOCK_BYTES, np.uint8)
        self._accepted: set[int] = set()
        for number in range(stores):
            fake.compute(self._device[number], 100 + number, COMPUTE)
            self._submit(engine, 1 + number, Direction.STORE, number)
        fake.compute_reads(self._device[block], read_before, COMPUTE)
        self._submit(engine, load, Direction.LOAD, block)
        self._poll(engine)
        if control().choose("whether compute is held", 2) and self._holds(engine, load):
            control().note_reached("compute is held")
            fake.compute_reads(self._device[block], read, COMPUTE)
        else:
            control().note_reached("the caller waits")
            engine.wait([load])
            fake.compute_reads(self._device[block], read, COMPUTE)
        _streams.finish(COMPUTE)
        engine.drain()
        self._poll(engine)
        engine.close()
        self._poll(engine)
        is_good = load in self._results and self._results[load].good
        if not self.size["losses"] and (read_before != OLD).any():
            raise PropertyBroken(Property.COPY_ORDER, "a load overwrote what its block's former owner read")
        if not self.size["losses"] and is_good and (read != content(block)).any():
            raise PropertyBroken(Property.COPY_ORDER, "compute read a block before its load")

    def _holds(self, engine: CudaCopyEngine, load: int) -> bool:
        try:
            engine.hold_compute([load])
        except CudaError:
            return False
        return True

    def _submit(self, engine: CudaCopyEngine, transfer: int, direction: Direction, block: int) -> None:
        try:
            engine.submit(job(transfer, direction, [block]))
        except TransferFailed:
            if not self._is_hurt:
                raise
        else:
            self._accepted.add(transfer)

    def _poll(self, engine: CudaCopyEngine) -> None:
        """Take new results. The blocks of an ended store are reused at once."""
        for result in engine.poll():
            transfer, block = result.transfer, result.transfer - 1
            if transfer in self._results:
                raise PropertyBroken(Property.PROGRESS, f"transfer {transfer} ends twice")
            self._results[transfer] = result
            if not result.good and not self._is_hurt:
                raise PropertyBroken(Property.PROGRESS, f"a good copy is bad: {result.error}")
            target = self._host if result.direction is Direction.STORE else self._device
            if result.good and (target[block] != content(block)).any():
                raise PropertyBroken(
                    Property.CORRECT_BYTES, f"transfer {transfer} is good, and brought other bytes"
                )
            if result.direction is Direction.STORE or not result.good:
                target[block] = REUSED

    def _check_end(self, retained: int) -> None:
        results, ended = self._results, set(self._results)
        if ended != self._accepted:
            raise PropertyBroken(
                Property.PROGRESS, f"{sorted(self._accepted)} were taken, {sorted(ended)} have ended"
            )
        for transfer, result in results.items():
            target = self._host if result.direction is Direction.STORE else self._device
            is_load = result.good and result.direction is Direction.LOAD
            if (target[transfer - 1] != (content(transfer - 1) if is_load else REUSED)).any():
                fail_for_reuse(transfer, "was still copied after its result")
        bad = sum(not result.good for result in results.values())
        if bad != self._is_hurt and not self.size["records"] and not self.size["losses"]:
            raise PropertyBroken(
                Property.FAILURE_IS_NOT_SUCCESS, f"{int(self._is_hurt)} copies fail, and {bad} are bad"
            )
        if _streams.fake.retained != retained and not self.size["losses"]:
            raise PropertyBroken(Property.ONE_RELEASE_PER_HOLD, "the engine is closed and holds its context")
        _streams.close()
        control().note_reached("a copy fails" if bad else "all copies are good")


def _lose(fake: FakeDriver) -> None:
    control().reach("the device is lost")
    fake.lose()


CUDA_SCOPES = {
    "small": ThreadScope(scenario=DrivenCopies, preemptions=1, delays=True),
    "stores": ThreadScope(scenario=DrivenCopies, preemptions=1, delays=True, sizes={"stores": 2}),
    "kernel": ThreadScope(
        scenario=DrivenCopies, preemptions=1, delays=True, sizes={"stores": 2, "kernel": 1}
    ),
    "records": ThreadScope(scenario=DrivenCopies, preemptions=1, delays=True, sizes={"records": 1}),
    "lost": ThreadScope(scenario=DrivenCopies, preemptions=2, delays=True, sizes={"losses": 1}),
    "lines": ThreadScope(scenario=DrivenCopies, preemptions=1, delays=True, lines=True),
}
