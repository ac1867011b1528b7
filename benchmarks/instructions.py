"""Count the machine instructions of a request of one block: kvsm's core, and vLLM's offloading manager.

    python benchmarks/instructions.py --output benchmarks/results/instructions.md

A *hit* is matched, loaded and finished; a *miss* is matched, stored and finished. kvsm's count
includes a whole engine step for each request: `submit`, a report and `end_step`, and two flushes if there is
a log. Each contestant serves `FEW` and `MANY` requests under valgrind's callgrind; the difference of the two
counts is divided by `MANY - FEW`, so start-up cancels out. The kernel's instructions are not counted. Unlike
times, counts hardly depend on what else the machine does.
"""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import click
from page import markdown_table, publish
from vllm_manager import VLLM_POLICIES, VllmRequest, make_manager, which_vllm

from kvsm.core.offloader import Offloader
from kvsm.events import OffloadConfig

FEW, MANY = 300, 1300
WARM_UP, SLOTS = 200, 4096
KINDS = "hit", "miss"
LOG, NO_LOG, VLLM = "kvsm, log on disk", "kvsm, no log", "vLLM CPUOffloadingManager"

Serve = Callable[[str, list[bytes]], None]
"""Serves a request of this name with these keys."""


def kvsm_requests(kind: str, log: Path | None) -> Serve:
    core = Offloader.open(OffloadConfig(host_blocks=SLOTS, device_blocks=SLOTS), log, durability="none")
    block = [7]

    def store(name: str, keys: list[bytes]) -> None:
        core.match(name, keys)
        job = core.prepare_store(name, keys, block).job
        assert job is not None
        core.submit([job.transfer])
        core.complete_store(job.transfer)
        core.finish(name)
        core.end_step()

    def load(name: str, keys: list[bytes]) -> None:
        core.match(name, keys)
        job = core.prepare_load(name, block)
        assert job is not None
        core.submit([job.transfer])
        core.complete_load(job.transfer)
        core.finish(name)
        core.end_step()

    if kind == "miss":
        return store
    store("first", [key_of(0)])
    return load


def vllm_requests(kind: str) -> Serve:
    manager = make_manager("lru", SLOTS)

    def store(name: str, keys: list[bytes]) -> None:
        request = VllmRequest(manager, name, keys)
        request.plan_load()
        request.plan_store(keys)
        request.end_copies()
        request.finish()

    def load(name: str, keys: list[bytes]) -> None:
        request = VllmRequest(manager, name, keys)
        request.plan_load()
        request.end_copies()
        request.finish()

    if kind == "miss":
        return store
    store("first", [key_of(0)])
    return load


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "big")


def serve(contestant: str, kind: str, count: int) -> None:
    """Serve requests: in a process of its own, under callgrind."""
    with tempfile.TemporaryDirectory() as directory:
        if contestant == VLLM:
            one = vllm_requests(kind)
        else:
            one = kvsm_requests(kind, Path(directory) / "log" if contestant == LOG else None)
        keys = [[key_of(number if kind == "miss" else 0)] for number in range(1, WARM_UP + count + 1)]
        names = [f"r{number}" for number in range(len(keys))]
        gc.collect()
        gc.disable()
        for name, of_request in zip(names, keys):
            one(name, of_request)


def instructions(contestant: str, kind: str, count: int) -> int:
    """Return the instructions of a process that serves `count` requests."""
    command = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", sys.executable, __file__]
    # Numpy's threads would spin while they wait for work.
    environment = os.environ | {"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--serve", contestant, kind, str(count)], env=environment, text=True, capture_output=True
    )
    found = re.search(r"Collected : (\d+)", done.stderr)
    if done.returncode or found is None:
        raise click.ClickException(f"valgrind or {contestant} has failed:\n{done.stderr[-2000:]}")
    return int(found[1])


def of_a_request(contestant: str, kind: str) -> int:
    few, many = (instructions(contestant, kind, count) for count in (FEW, MANY))
    return (many - few) // (MANY - FEW)


@click.command()
@click.option("--serve", "served", type=(str, click.Choice(KINDS), int), hidden=True)
@click.option("--output", type=click.Path(path_type=Path), help="Write the page here too.")
def main(served: tuple[str, str, int] | None, output: Path | None) -> None:
    """Count the instructions of requests of one block. Needs valgrind; takes some minutes."""
    if served is not None:
        serve(*served)
        return
    contestants = [LOG, NO_LOG, *([VLLM] if VLLM_POLICIES else [])]
    rows, first = list[list[str]](), dict[str, int]()
    for contestant in contestants:
        cells = []
        for kind in KINDS:
            count = of_a_request(contestant, kind)
            cells.append(f"{count:,}, {count / first.setdefault(kind, count):.2f}")
        rows.append([contestant, *cells])
    header = ["contestant", *(f"{kind}: instructions, ratio to kvsm with its log" for kind in KINDS)]
    publish("Instructions of a request of one block", which_vllm(), markdown_table(header, rows), output)


if __name__ == "__main__":
    main()
