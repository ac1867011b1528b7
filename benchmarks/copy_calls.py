"""Measure what the host does for one transfer of the CUDA engine, on the fake driver of the tests.

No GPU is needed, and no time here is that of a GPU: the tables have microseconds of the host, and the number
of driver calls. The contestants carry out the same stores of random blocks by turns: the CUDA engine with
batches, the CUDA engine with its copy kernel, and a plain batch. That one is planned as vLLM plans it (a
descriptor for each block and layer, none merged); the caller hands it over between two events, and waits.

    python benchmarks/copy_calls.py --output benchmarks/results/copy_calls.md

Columns:

- *caller*: CPU time of the calling thread for `submit`;
- *begin to end*: from the event before the copy to the event behind it, as the host queues them. The device's
  clock runs meanwhile, and no byte moves;
- *all*: CPU time of the process from `submit` to the result, with the threads of the engine;
- *calls*: calls of the driver meanwhile, those of events included.

A second table has the time of a plan alone, from pairs to the descriptors of a batch, by the native body and
by numpy.

The fake driver carries out the copies within the time of *all*, the kernel more slowly than batches. A real
driver takes 0.5 to 1 us for a descriptor of a batch, the fake one less.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import cache, partial
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, NamedTuple

import click
import numpy as np
from numpy.typing import NDArray
from page import markdown_table, publish

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / "tests" / "support")]

import fake_cuda  # noqa: E402

from kvsm.copies.geometry import CopyPlanner, Fragments  # noqa: E402
from kvsm.copies.layout import make_layout  # noqa: E402
from kvsm.core import native  # noqa: E402
from kvsm.core.plan import TransferJob  # noqa: E402
from kvsm.cuda_io import CudaCopyEngine, driver  # noqa: E402
from kvsm.cuda_io.driver import BatchCopy, CudaContext  # noqa: E402
from kvsm.cuda_io.paths import CopyPath  # noqa: E402
from kvsm.events import Direction  # noqa: E402
from kvsm.ids import pack  # noqa: E402

LAYERS, FRAGMENT_BYTES, BLOCKS = 32, 256, 1024
COUNTS = (1, 8, 16, 256)
"""Blocks of a transfer."""

Tensors = list[NDArray[np.uint8]]


def even_layers() -> Tensors:
    """A tensor for each layer, in one allocation."""
    return list(np.zeros((LAYERS, BLOCKS, FRAGMENT_BYTES), np.uint8))


def uneven_layers() -> Tensors:
    """A tensor for each layer, at uneven distances."""
    pool = np.zeros((2 * LAYERS * LAYERS, BLOCKS, FRAGMENT_BYTES), np.uint8)
    return [pool[layer * layer] for layer in range(LAYERS)]


def one_tensor() -> Tensors:
    """One tensor, in which all layers of a block are adjacent."""
    return [np.zeros((BLOCKS, LAYERS * FRAGMENT_BYTES), np.uint8)]


LAYOUTS: dict[str, Callable[[], Tensors]] = {
    "even layers": even_layers,
    "uneven layers": uneven_layers,
    "one tensor": one_tensor,
}


class Measured(NamedTuple):
    """One transfer: microseconds, and the number of driver calls."""

    caller: float
    queuing: float
    all: float
    calls: float


class CopyStreamEvents:
    """Notes when events are recorded on streams other than stream 0, on which the model computes."""

    def __init__(self) -> None:
        self._times: list[tuple[float, float]] = []
        """When each call began and returned (s)."""
        self._record_event = driver.record_event

    def __enter__(self) -> CopyStreamEvents:
        driver.record_event = self._record
        return self

    def __exit__(self, *_: object) -> None:
        driver.record_event = self._record_event

    def _record(self, event: int, stream: int) -> None:
        began = time.perf_counter()
        self._record_event(event, stream)
        if stream:
            self._times.append((began, time.perf_counter()))

    def begin_to_end(self) -> float:
        """Return the seconds between the two events of the last copy, and forget them."""
        (_, begun), (ended, _) = self._times
        self._times.clear()
        return ended - begun


class Contestant(NamedTuple):
    """submit: what the caller does. finish: waits for the result."""

    submit: Callable[[TransferJob], Any]
    finish: Callable[[TransferJob], Any]


def by_engine(engine: CudaCopyEngine) -> Contestant:
    """The CUDA engine."""

    def finish(job: TransferJob) -> None:
        engine.wait([job.transfer])
        (result,) = engine.poll()
        if not result.good:
            raise click.ClickException(f"a copy failed: {result.error}")

    return Contestant(engine.submit, finish)


class PlainPlan:
    """Plans a batch as vLLM does: a descriptor for each block and layer."""

    def __init__(self, tensors: Tensors, host: NDArray[np.uint8]) -> None:
        offsets = np.cumsum([0, *(tensor.shape[1] for tensor in tensors[:-1])])
        self._device = np.array([tensor.ctypes.data for tensor in tensors], np.uint64)[:, None]
        self._host = (host.ctypes.data + offsets).astype(np.uint64)[:, None]
        self._strides = np.array([tensor.strides[0] for tensor in tensors], np.uint64)[:, None]
        self._sizes = np.array([tensor.shape[1] for tensor in tensors], np.uint64)
        self._host_stride = np.uint64(host.strides[0])

    def plan(self, job: TransferJob) -> Fragments:
        """Return the descriptors of a store."""
        device_blocks, host_blocks = (np.array(ids, np.uint64) for ids in job.pairs())
        device = (self._device + device_blocks[None, :] * self._strides).ravel()
        host = (self._host + host_blocks[None, :] * self._host_stride).ravel()
        return Fragments(device, host, np.repeat(self._sizes, len(device_blocks)))


def by_plain_batch(tensors: Tensors, host: NDArray[np.uint8], context: CudaContext) -> Contestant:
    """A plain batch, handed over by the caller."""
    plain = PlainPlan(tensors, host)
    with context:
        batch, stream = BatchCopy(), driver.create_stream()
        mark, begin, end = (driver.create_event(timed=True) for _ in range(3))

    def submit(job: TransferJob) -> None:
        with context:
            driver.record_event(mark, 0)
            driver.wait_for_event(stream, mark)
            driver.record_event(begin, stream)
            batch(plain.plan(job), Direction.STORE, stream)
            driver.record_event(end, stream)

    def finish(_: TransferJob) -> None:
        with context:
            driver.call("cuEventSynchronize", end)

    return Contestant(submit, finish)


def one_round(contestant: Contestant, job: TransferJob, events: CopyStreamEvents, fake: Any) -> Measured:
    """Carry out one transfer."""
    fake.reset()
    all_before, mine_before = time.process_time(), time.thread_time()
    contestant.submit(job)
    caller = time.thread_time() - mine_before
    contestant.finish(job)
    total = time.process_time() - all_before
    own = clock_seconds()
    return Measured(
        (caller - own) * 1e6, events.begin_to_end() * 1e6, (total - 3 * own) * 1e6, len(fake.calls)
    )


@cache
def clock_seconds() -> float:
    """Return the time that reading the clock of a thread takes. It is taken off the figures."""
    return median(-(time.thread_time() - time.thread_time()) for _ in range(1000))


def store_of(number: int, blocks: int) -> TransferJob:
    """A store of random pairs."""
    chosen = Random(number)
    device, host = (chosen.sample(range(BLOCKS), blocks) for _ in range(2))
    return TransferJob(number, Direction.STORE, pack(device), pack(host))


def transfer_rows(fake: Any, rounds: int) -> list[list[str]]:
    """Measure every layout and size."""
    rows, context = [], CudaContext(0)
    for name, make in LAYOUTS.items():
        for blocks in COUNTS:
            tensors, host = make(), np.zeros((BLOCKS, LAYERS * FRAGMENT_BYTES), np.uint8)
            fake.page_lock(host)
            with ExitStack() as stack:
                events = stack.enter_context(CopyStreamEvents())
                contestants = {"plain batch": by_plain_batch(tensors, host, context)}
                for path in (CopyPath.BATCH, CopyPath.KERNEL):
                    engine = stack.enter_context(
                        closing(CudaCopyEngine(tensors, host, compute=lambda: 0, path=path))
                    )
                    contestants[f"kvsm, {path.value}"] = by_engine(engine)
                rows += _rows_of(name, blocks, contestants, rounds, events, fake)
    return rows


def _rows_of(
    name: str,
    blocks: int,
    contestants: dict[str, Contestant],
    rounds: int,
    events: CopyStreamEvents,
    fake: Any,
) -> list[list[str]]:
    found: dict[str, list[Measured]] = {one: [] for one in contestants}
    for number in range(rounds + 5):
        job = store_of(number, blocks)
        for one, contestant in contestants.items():
            taken = one_round(contestant, job, events, fake)
            if number >= 5:  # the first rounds warm up
                found[one].append(taken)
    medians = {one: Measured(*map(median, zip(*taken))) for one, taken in found.items()}
    plain = medians["plain batch"]
    return [
        [
            name,
            str(blocks),
            one,
            f"{taken.caller:.0f}",
            f"{taken.queuing:.0f}",
            f"{taken.queuing / plain.queuing:.2f}",
            f"{taken.all:.0f}",
            f"{taken.all / plain.all:.2f}",
            f"{taken.calls:.0f}",
        ]
        for one, taken in medians.items()
    ]


def plan_rows(rounds: int) -> list[list[str]]:
    """Measure the plans alone."""
    rows = []
    for name, make in LAYOUTS.items():
        tensors, host = make(), np.zeros((BLOCKS, LAYERS * FRAGMENT_BYTES), np.uint8)
        layout, _ = make_layout(tensors, host)
        native_planner, plain = CopyPlanner(layout), PlainPlan(tensors, host)
        with native.without():
            numpy_planner = CopyPlanner(layout)
        for blocks in COUNTS:
            jobs = [store_of(number, blocks) for number in range(rounds)]
            taken = [
                _plan_seconds(plain.plan, jobs),
                _plan_seconds(partial(_batch_plan, native_planner), jobs),
                _plan_seconds(partial(_batch_plan, numpy_planner), jobs),
            ]
            pieces = native_planner.plan(Direction.STORE, *jobs[0].pairs()).shape.fragments
            figures = (f"{each * 1e6:.1f}" for each in taken)
            rows.append([name, str(blocks), str(pieces), *figures])
    return rows


def _batch_plan(planner: CopyPlanner, job: TransferJob) -> Fragments:
    return planner.plan(Direction.STORE, *job.pairs()).fragments()


def _plan_seconds(plan: Callable[[TransferJob], object], jobs: Sequence[TransferJob]) -> float:
    """Return the median time of a plan."""
    seconds = []
    for job in jobs:
        started = time.perf_counter()
        plan(job)
        seconds.append(time.perf_counter() - started)
    return median(seconds)


@click.command(help=__doc__)
@click.option("--rounds", default=200, show_default=True, help="Rounds, of which the median is reported.")
@click.option("--output", type=click.Path(path_type=Path), help="Write the page to this file too.")
def main(rounds: int, output: Path | None) -> None:
    fake = fake_cuda.load_fake()
    header = [
        "layout", "blocks", "contestant", "caller, us", "begin to end, us", "of plain", "all, us", "of plain",
        "calls",
    ]  # fmt: skip
    plans = ["layout", "blocks", "pieces", "plain plan, us", "kvsm, native, us", "kvsm, numpy, us"]
    lines = ["## One transfer", "", *markdown_table(header, transfer_rows(fake, rounds))]
    lines += ["", "## The plan of a batch alone", "", *markdown_table(plans, plan_rows(rounds))]
    note = f"fake driver; {LAYERS} layers of {FRAGMENT_BYTES} bytes; medians of {rounds} rounds"
    publish("The host's part of a copy on a GPU", note, lines, output)


if __name__ == "__main__":
    main()
