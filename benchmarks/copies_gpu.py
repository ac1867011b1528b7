"""The GPU part of `copies.py`: the CUDA engine, relative to one contiguous copy and to the methods of other
systems.

There are four tables. *Transfers*: random pairs of blocks of 32 layers, as shares of the bandwidth of one
contiguous page-locked copy of the same bytes, with the path of each. Times are measured by the wall clock and
by the device's clock. The latter runs from right before the first copy is handed to the driver to the end of
the last one, so it includes neither `submit` nor planning. *The caller*: the duration of `submit`, with the
kernel and with a descriptor for each fragment. *Compute*: how much continuous offload slows loops of bf16
matrix products, attention and element-wise products, on either path. *Thread blocks*: the rate of the kernel
with 1 to 6 thread blocks, and how much it slows matrix products of few tokens.

In the same run two other methods are measured: that of vLLM's offload, with a descriptor for each block and
layer in one `cuMemcpyBatchAsync`, without merging; and PyTorch, with `index_select` into a staging buffer and
`copy_`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from statistics import median
from threading import Event, Thread
from typing import Any, NamedTuple

import click
import msgspec
import numpy as np
from page import markdown_table

from kvsm.copies import HostPool
from kvsm.copies.copy_engine import CopyResult
from kvsm.copies.geometry import Fragments
from kvsm.core.plan import TransferJob
from kvsm.cuda_io import CUDA_PAGE_LOCKING, CudaCopyEngine
from kvsm.cuda_io.driver import BatchCopy
from kvsm.cuda_io.paths import CopyPath, PathTable, ThreadBlocks
from kvsm.events import Direction
from kvsm.ids import pack

LAYERS = 32
FRAGMENT_BYTES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 2 << 20)
BLOCKS = (1, 16, 128, 1024, 4096)
THREAD_BLOCKS = (1, 2, 3, 4, 6)
"""Thread blocks of the copy kernel."""

DEVICE, PINNED = "cuda", True
"""Where tensors are, and whether the host's are page-locked; a dry run without a GPU changes them."""

LARGEST_BYTES = 2 << 30
"""The largest transfer. Rows with more bytes are left out."""

WANTED_BYTES = 16 << 20
"""The smallest transfer for which kvsm has a target share of the contiguous bandwidth."""


class World(NamedTuple):
    """Pools of one fragment size, and their engine."""

    torch: Any
    layers: list[Any]
    host: HostPool
    engine: CudaCopyEngine
    blocks: int
    fragment_bytes: int

    def close(self) -> None:
        self.engine.close()
        self.host.close()


def make_world(
    torch: Any, fragment_bytes: int, path: CopyPath | None = None, table: PathTable | None = None
) -> World:
    """Pools with room for two transfers at once, one each way."""
    blocks = 2 * max(count for count in BLOCKS if count * LAYERS * fragment_bytes <= LARGEST_BYTES)
    layers = [
        torch.randint(0, 256, (blocks, fragment_bytes), dtype=torch.uint8, device=DEVICE)
        for _ in range(LAYERS)
    ]
    host = HostPool(blocks, LAYERS * fragment_bytes, page_locking=CUDA_PAGE_LOCKING)
    torch.cuda.synchronize()
    return World(
        torch,
        layers,
        host,
        CudaCopyEngine(layers, host.blocks, path=path, path_table=table),
        blocks,
        fragment_bytes,
    )


def random_jobs(world: World, blocks: int, seed: int) -> tuple[TransferJob, TransferJob]:
    """A store and a load of random pairs that have no block in common."""
    chosen = random.Random(seed)
    device, host = (chosen.sample(range(world.blocks), 2 * blocks) for _ in range(2))
    return (
        TransferJob(1, Direction.STORE, pack(device[:blocks]), pack(host[:blocks])),
        TransferJob(2, Direction.LOAD, pack(device[blocks:]), pack(host[blocks:])),
    )


def seconds_of(torch: Any, work: Callable[[], None]) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def by_engine(world: World, jobs: Sequence[TransferJob], device: list[float]) -> Callable[[], None]:
    """The work of carrying out jobs with kvsm's engine.

    device: the work appends the seconds of the longest job, by the device's clock.
    """

    def work() -> None:
        for job in jobs:
            world.engine.submit(job)
        world.engine.wait([job.transfer for job in jobs])
        results = world.engine.poll()
        check(results)
        device.append(max(result.seconds for result in results))

    return work


def check(results: Sequence[CopyResult]) -> None:
    for result in results:
        if not result.good:
            raise click.ClickException(f"a copy failed: {result.error}")


def contiguous(world: World, copied_bytes: int, directions: Sequence[Direction]) -> Callable[[], None]:
    """The work of one contiguous copy in each direction between page-locked memory and the device."""
    torch = world.torch
    streams = {direction: torch.cuda.Stream() for direction in directions}
    device = {way: torch.empty(copied_bytes, dtype=torch.uint8, device=DEVICE) for way in directions}
    host = {way: torch.empty(copied_bytes, dtype=torch.uint8, pin_memory=PINNED) for way in directions}

    def work() -> None:
        for direction, stream in streams.items():
            with torch.cuda.stream(stream):
                if direction is Direction.STORE:
                    host[direction].copy_(device[direction], non_blocking=True)
                else:
                    device[direction].copy_(host[direction], non_blocking=True)
        for stream in streams.values():
            stream.synchronize()

    return work


def as_vllm(world: World, job: TransferJob, batch: BatchCopy) -> Callable[[], None]:
    """The work of a job by vLLM's method: a descriptor for each layer and block, in one unmerged call."""
    stream = world.torch.cuda.Stream()
    size = world.fragment_bytes
    bases = np.array([layer.data_ptr() for layer in world.layers], np.uint64)[:, None]
    offsets = world.host.blocks.ctypes.data + np.arange(LAYERS, dtype=np.uint64)[:, None] * np.uint64(size)

    def work() -> None:
        device_blocks, host_blocks = (np.asarray(ids, np.uint64) for ids in job.pairs())
        device = (bases + device_blocks[None, :] * np.uint64(size)).ravel()
        host = (offsets + host_blocks[None, :] * np.uint64(LAYERS * size)).ravel()
        sizes = np.full(len(device), size, np.uint64)
        ends = (device, host) if job.direction is Direction.STORE else (host, device)
        batch(Fragments(*ends, sizes), job.direction, stream.cuda_stream)
        stream.synchronize()

    return work


def by_torch(world: World, job: TransferJob) -> Callable[[], None]:
    """The work of a job by PyTorch: gather on one side, copy, scatter on the other side."""
    torch = world.torch
    stream = torch.cuda.Stream()
    device_ids, host_ids = (torch.tensor(np.asarray(ids, np.int64)) for ids in job.pairs())
    on_device = device_ids.to(DEVICE)
    rows, size = len(host_ids), world.fragment_bytes
    staging = torch.empty((LAYERS, rows, size), dtype=torch.uint8, pin_memory=PINNED)
    host = torch.from_numpy(world.host.blocks).view(world.blocks, LAYERS, size)

    def store() -> None:
        with torch.cuda.stream(stream):
            for place, layer in enumerate(world.layers):
                staging[place].copy_(layer.index_select(0, on_device), non_blocking=True)
        stream.synchronize()
        host[host_ids] = staging.transpose(0, 1)

    def load() -> None:
        staging.copy_(host.index_select(0, host_ids).transpose(0, 1))
        with torch.cuda.stream(stream):
            for place, layer in enumerate(world.layers):
                layer.index_copy_(0, on_device, staging[place].to(DEVICE, non_blocking=True))
        stream.synchronize()

    return store if job.direction is Direction.STORE else load


def transfer_rows(torch: Any, rounds: int) -> list[list[str]]:
    rows = []
    batch = BatchCopy()
    for fragment_bytes in FRAGMENT_BYTES:
        world = make_world(torch, fragment_bytes)
        for blocks in BLOCKS:
            if 2 * blocks <= world.blocks:
                rows += _rows_of(world, blocks, rounds, batch)
        world.close()
        torch.cuda.empty_cache()
    return rows


def _rows_of(world: World, blocks: int, rounds: int, batch: BatchCopy) -> list[list[str]]:
    """The rows for one size of transfer: each direction, and both directions at once."""
    copied_bytes, rows = blocks * LAYERS * world.fragment_bytes, []
    for name, directions in (
        ("store", [Direction.STORE]),
        ("load", [Direction.LOAD]),
        ("both", list(Direction)),
    ):
        taken: dict[str, list[float]] = {"contiguous": [], "kvsm": [], "device": [], "vllm": [], "torch": []}
        whole = contiguous(world, copied_bytes, directions)
        before = world.engine.statistics().transfers
        for number in range(rounds + 1):
            jobs = [job for job in random_jobs(world, blocks, number) if job.direction in directions]
            works = {"contiguous": whole, "kvsm": by_engine(world, jobs, taken["device"])}
            if len(jobs) == 1:
                works["vllm"], works["torch"] = as_vllm(world, jobs[0], batch), by_torch(world, jobs[0])
            for contestant, work in works.items():
                seconds = seconds_of(world.torch, work)
                taken[contestant].append(seconds)
        after = world.engine.statistics().transfers
        paths = "/".join(path.value for path in after if after[path] > before[path])
        taken = {contestant: times[1:] for contestant, times in taken.items()}  # the first round warms up
        rows.append(_row(world.fragment_bytes, blocks, name, copied_bytes * len(directions), paths, taken))
    return rows


def _row(
    fragment_bytes: int, blocks: int, name: str, total: int, paths: str, taken: dict[str, list[float]]
) -> list[str]:
    base = median(taken["contiguous"])
    contestants = ("kvsm", "device", "vllm", "torch")
    shares = [f"{base / median(taken[one]):.2f}" if taken[one] else "" for one in contestants]
    aimed = "yes" if total >= WANTED_BYTES else ""
    size = f"{total / (1 << 20):.3g} MiB"
    return [
        f"{fragment_bytes >> 10} KiB",
        str(blocks),
        size,
        name,
        paths,
        f"{total / base / 1e9:.1f}",
        *shares,
        aimed,
    ]


def caller_rows(torch: Any, rounds: int) -> list[list[str]]:
    """Measure the duration of `submit`, in pairs of calls.

    The driver's work for the first may delay the second.
    """
    rows = []
    for path in (CopyPath.KERNEL, CopyPath.BATCH):
        world = make_world(torch, FRAGMENT_BYTES[0], path)
        for blocks in BLOCKS:
            held = sorted(_held(world, blocks, 20 * rounds))
            most = held[int(0.99 * len(held))], held[-1]
            rows.append([path.value, str(blocks), *(f"{one * 1e6:.1f}" for one in (median(held), *most))])
        world.close()
    return rows


def _held(world: World, blocks: int, rounds: int) -> list[float]:
    """The seconds of each `submit`."""
    held = []
    for number in range(rounds):
        for job in random_jobs(world, blocks, number):
            started = time.perf_counter()
            world.engine.submit(job)
            held.append(time.perf_counter() - started)
        world.engine.drain()
        check(world.engine.poll())
    return held


def compute_rows(torch: Any, rounds: int) -> list[list[str]]:
    """Measure loops of several kinds of compute, alone and during continuous offload in both directions."""
    rows = []
    for path, fragment_bytes in ((CopyPath.BATCH, FRAGMENT_BYTES[2]), (CopyPath.KERNEL, FRAGMENT_BYTES[0])):
        world = make_world(torch, fragment_bytes, path)
        for name, compute in computes(torch).items():
            alone, beside, moved = [], [], []
            for number in range(rounds + 1):
                idle = seconds_of(torch, compute)
                seconds, rate = _beside(world, compute, number)
                if number:  # the first round warms up
                    alone.append(idle)
                    beside.append(seconds)
                    moved.append(rate / 1e9)
            slower = median(beside) / median(alone) - 1
            size = f"{fragment_bytes >> 10} KiB"
            rows.append([path.value, size, name, f"{median(moved):.1f}", f"{slower:.1%}"])
        world.close()
    return rows


def computes(torch: Any) -> dict[str, Callable[[], None]]:
    """Loops of about 100 ms, with the kernels that dominate prefill and decode."""

    def made(*shape: int) -> Any:
        return torch.randn(shape, dtype=torch.bfloat16, device=DEVICE)

    prefill, decode, weights = made(8192, 8192), made(256, 8192), [made(8192, 8192) for _ in range(8)]
    heads, flat, out = made(8, 32, 4096, 128), made(1 << 28), made(1 << 28)
    attention = torch.nn.functional.scaled_dot_product_attention
    work: dict[str, tuple[int, Callable[[], Any]]] = {
        "matrix products, 8192 tokens": (100, lambda: torch.matmul(prefill, weights[0])),
        "matrix products, 256 tokens": (200, lambda: [torch.matmul(decode, weight) for weight in weights]),
        "attention, 8 x 4096 tokens": (50, lambda: attention(heads, heads, heads, is_causal=True)),
        "products by element": (400, lambda: torch.mul(flat, 1.5, out=out)),
    }

    def loop(times: int, step: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(times):
                step()
            torch.cuda.current_stream().synchronize()  # not the device, on which copies continue

        return run

    return {name: loop(times, step) for name, (times, step) in work.items()}


def _beside(world: World, products: Callable[[], None], seed: int) -> tuple[float, float]:
    """Run products while a thread submits transfers.

    Returns (seconds of the products, bytes copied per second).
    """
    jobs = random_jobs(world, world.blocks // 4, seed)
    over, fed, rates = Event(), Event(), []
    mark = world.engine.mark()  # an old mark: after a new one, a transfer would wait for the queued products

    def feed() -> None:
        copied, started = 0, time.perf_counter()
        while not over.is_set():
            for job in jobs:
                world.engine.submit(job, mark)
            fed.set()
            world.engine.drain()
            results = world.engine.poll()
            check(results)
            copied += sum(result.bytes for result in results)
        rates.append(copied / (time.perf_counter() - started))

    feeding = Thread(target=feed)
    feeding.start()
    fed.wait()
    started = time.perf_counter()
    products()
    seconds = time.perf_counter() - started
    over.set()
    feeding.join()
    return seconds, rates[0]


def thread_block_rows(torch: Any, rounds: int) -> list[list[str]]:
    """Measure the kernel with each number of thread blocks, in either direction, and compute beside it."""
    rows, blocks = [], BLOCKS[-1]
    name, compute = list(computes(torch).items())[1]
    for number in THREAD_BLOCKS:
        table = msgspec.structs.replace(PathTable.default(), thread_blocks=ThreadBlocks(number, number))
        world = make_world(torch, FRAGMENT_BYTES[0], CopyPath.KERNEL, table)
        rates = []
        for place in range(2):
            taken: list[float] = []
            for seed in range(rounds + 1):
                by_engine(world, [random_jobs(world, blocks, seed)[place]], taken)()
            rates.append(blocks * LAYERS * world.fragment_bytes / median(taken[1:]) / 1e9)
        alone = median(seconds_of(torch, compute) for _ in range(rounds))
        slower = median(_beside(world, compute, seed)[0] for seed in range(rounds)) / alone - 1
        rows.append([str(number), *(f"{rate:.1f}" for rate in rates), name, f"{slower:.1%}"])
        world.close()
    return rows


def gpu_tables(rounds: int) -> tuple[str, list[str]]:
    """(name of the device, lines of the page). Raises `click.ClickException` without a GPU."""
    try:
        import torch
    except ImportError as error:
        raise click.ClickException(f"--gpu needs torch and cuda-bindings: {error}") from error
    if not torch.cuda.is_available():
        raise click.ClickException("--gpu needs an NVIDIA GPU, and PyTorch finds none")
    transfers = markdown_table(
        [
            "fragment",
            "blocks",
            "bytes",
            "direction",
            "path",
            "contiguous, GB/s",
            "kvsm, of that",
            "by the device's clock",
            "unmerged batch, of that",
            "index_select + copy_, of that",
            f"{WANTED_BYTES >> 20} MiB or more",
        ],
        transfer_rows(torch, rounds),
    )
    caller = markdown_table(
        ["path", "blocks", "median, us", "99 %, us", "most, us"], caller_rows(torch, rounds)
    )
    compute = markdown_table(
        ["path", "fragment", "compute", "copied beside, GB/s", "slower by"], compute_rows(torch, rounds)
    )
    lines = [f"## Transfers of {LAYERS} layers", "", *transfers, "", "## The caller of `submit`", "", *caller]
    lines += ["", "## Compute beside it", "", *compute]
    kernel = markdown_table(
        ["thread blocks", "store, GB/s", "load, GB/s", "compute", "slower by both at once"],
        thread_block_rows(torch, rounds),
    )
    lines += ["", "## Thread blocks of the kernel", "", *kernel]
    return torch.cuda.get_device_name(), lines
