"""Measure the cost of a block life in the scheduler's thread: kvsm, with its log on disk, and vLLM's manager.

A *block life* is one block reference of the workload: it is looked up, and then either loaded and touched (a
hit) or stored (a miss), evictions included. All contestants serve the same requests in one run, in turns;
medians and ratios are reported. vLLM's `CPUOffloadingManager` is measured if vLLM can be imported, with LRU
and without events.

    python benchmarks/control_plane.py --trace TRACE.jsonl --output benchmarks/results/control_plane.md
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import click
from page import markdown_table, publish
from workload import Requests, expanded, single_blocks

from kvsm.core.log import Durability, LogWriter
from kvsm.core.offloader import Offloader
from kvsm.events import OffloadConfig

DEVICE_BLOCKS = 1 << 14

KVSM: dict[str, Durability | None] = {
    "kvsm, log on disk": "none",
    "kvsm, log synced every 100 ms": "interval",
    "kvsm, no log": None,
}
"""Contestant -> durability of its log, None without a log.

`none`: the kernel decides when pages reach the disk.
"""


@dataclass
class Measured:
    """The result of one pass.

    life_us: microseconds per block life.
    hits: matched blocks. Equal hits show that two contestants did the same work.
    """

    life_us: float
    hits: int
    log_bytes: int = 0


def run_kvsm(requests: Requests, host_blocks: int, durability: Durability | None, per_step: int) -> Measured:
    """Measure one pass of kvsm. durability: that of its log; None for no log."""
    config = OffloadConfig(host_blocks=host_blocks, device_blocks=DEVICE_BLOCKS)
    with tempfile.TemporaryDirectory() as directory:
        core: Offloader
        log = None
        if durability is not None:
            log = LogWriter(
                Path(directory) / "log",
                config=config,
                snapshot=lambda: core.state_for_log(),
                durability=durability,
            )
        core = Offloader(config, log)
        hits = 0
        started = time.perf_counter()
        for first in range(0, len(requests), per_step):
            hits += serve_step(core, first, requests[first : first + per_step])
        if log is not None:
            log.close()
        seconds = time.perf_counter() - started
        return Measured(seconds / lives(requests) * 1e6, hits, log.bytes_written if log else 0)


def serve_step(core: Offloader, first: int, requests: Requests) -> int:
    """Serve requests in one engine step: each is matched and its copies are planned; all copies are submitted
    together and end before the next step. Returns the number of hits."""
    total = 0
    loads: list[int] = []
    stores: list[int] = []
    block = 0
    for number, keys in enumerate(requests, first):
        request = str(number)
        hits = core.match(request, keys).hits
        total += hits
        if hits:
            job = core.prepare_load(request, range(block, block + hits))
            assert job is not None
            loads.append(job.transfer)
        if hits < len(keys):
            blocks, parent = range(block + hits, block + len(keys)), keys[hits - 1] if hits else b""
            store = core.prepare_store(request, keys[hits:], blocks, parent).job
            if store is not None:
                stores.append(store.transfer)
        block += len(keys)
    core.submit(loads + stores)
    for transfer in loads:
        core.complete_load(transfer)
    for transfer in stores:
        core.complete_store(transfer)
    for number in range(first, first + len(requests)):
        core.finish(str(number))
    core.end_step()
    return total


def run_vllm(requests: Requests, host_blocks: int) -> Measured:
    from vllm.v1.kv_offload.base import LookupResult, ReqContext
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

    manager = CPUOffloadingManager(host_blocks, cache_policy="lru")
    total = 0
    started = time.perf_counter()
    for number, keys in enumerate(requests):
        context = ReqContext(str(number))
        hits = 0
        for key in keys:
            if manager.lookup(key, context) is not LookupResult.HIT:
                break
            hits += 1
        if hits:
            found = keys[:hits]
            manager.prepare_load(found, context)
            manager.touch(found, context)
            manager.complete_load(found, context)
        if hits < len(keys):
            output = manager.prepare_store(keys[hits:], context)
            if output is not None:
                manager.complete_store(output.keys_to_store, context)
        total += hits
    seconds = time.perf_counter() - started
    return Measured(seconds / lives(requests) * 1e6, total)


def lives(requests: Requests) -> int:
    return sum(map(len, requests))


def by_turns(contestants: dict[str, Callable[[], Measured]], rounds: int) -> dict[str, list[Measured]]:
    """Run all contestants `rounds` times, in turns.

    The workload is frozen, so that the garbage collector does not scan it. Objects of contestants are
    collected as usual.
    """
    results: dict[str, list[Measured]] = {name: [] for name in contestants}
    gc.collect()
    gc.freeze()
    for number in range(rounds):
        for name, contestant in contestants.items():
            measured = contestant()
            gc.collect()
            results[name].append(measured)
            click.echo(f"  round {number + 1}: {name}: {measured.life_us:.3f} us a life", err=True)
    return results


def vllm_version() -> str | None:
    try:
        import vllm
    except ImportError:
        return None
    return str(vllm.__version__)


def table(title: str, requests: Requests, host_blocks: int, results: dict[str, list[Measured]]) -> list[str]:
    best = median(one.life_us for one in results["kvsm, log on disk"])
    rows = []
    for name, passes in results.items():
        costs = [one.life_us for one in passes]
        spread = f"{median(costs):.3f} ({min(costs):.3f} .. {max(costs):.3f})"
        rows.append([name, spread, f"{median(costs) / best:.2f}", f"{passes[0].hits:,}"])
    header = ["contestant", "us a life: median (least .. most)", "times kvsm with its log", "hits"]
    size = f"{len(requests):,} requests, {lives(requests):,} lives, {host_blocks:,} host slots."
    return [f"### {title}", "", size, "", *markdown_table(header, rows), ""]


@click.command()
@click.option(
    "--trace",
    type=click.Path(path_type=Path, exists=True),
    help="Mooncake-format trace (default: generated).",
)
@click.option("--limit", type=int, help="Take only the first N requests.")
@click.option("--block-tokens", default=16, show_default=True, help="Tokens a block; divides 512.")
@click.option("--host-blocks", default=200_000, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="Write the tables here, with the command.")
def main(
    trace: Path | None,
    limit: int | None,
    block_tokens: int,
    host_blocks: int,
    rounds: int,
    output: Path | None,
) -> None:
    """Measure the cost of a block life."""
    peer = vllm_version()
    note = f"vLLM {peer}, `CPUOffloadingManager`, LRU" if peer else "vLLM is absent, and so is its column"
    lines: list[str] = []
    for title, requests, slots, per_step in (
        (f"Trace at {block_tokens} tokens a block", expanded(trace, block_tokens, limit), host_blocks, 1),
        ("Requests of one block", single_blocks(1600, 64, 40_000), 10_000, 64),
    ):
        contestants: dict[str, Callable[[], Measured]] = {
            name: lambda d=durability, r=requests, h=slots, p=per_step: run_kvsm(r, h, d, p)  # type: ignore[misc]
            for name, durability in KVSM.items()
        }
        if peer:
            contestants["vLLM CPUOffloadingManager"] = lambda r=requests, s=slots: run_vllm(r, s)  # type: ignore[misc]
        lines += table(title, requests, slots, by_turns(contestants, rounds))
    publish("Control plane", note, lines, output)


if __name__ == "__main__":
    main()
