"""Lives of one vLLM engine on one disk tier, each with a version of its weights, some with a reset.

    python tests/in_vllm/disk_weights_engine.py DIRECTORY v1 v1+reset v2

Each life asks one prompt and ends without a close. It prints a line of JSON: how much was cached, and
how many blocks the disk held at the end.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from importlib import import_module
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import click  # noqa: E402 (the path comes first)
from restarted_engine import BLOCK_BYTES, IMPORTED, QUIET, Say, answer, engine, fork, read_lines  # noqa: E402

from kvsm.vllm.tiny_model import ENVIRONMENT, LLAMA, tiny_model  # noqa: E402
from kvsm.vllm.trial import connector_config  # noqa: E402


def live(model: str, directory: str, life: str, say: Say) -> None:
    """Ask, let the disk get it, and end."""
    weights, _, then = life.partition("+")
    transfer = connector_config(
        cpu_bytes_to_use=30 * BLOCK_BYTES,
        disk_dir=directory,
        disk_bytes=100 * 2 * BLOCK_BYTES,
        weights_version=weights,
    )
    llm = engine(model, kv_transfer_config=transfer)
    disk = llm.llm_engine.engine_core.engine_core.scheduler.connector._side._disk
    cached = answer(llm, 0)["cached"]
    answer(llm, 1)  # its steps bring the reports of what prompt 0 has stored
    while disk.tier.has_work():
        llm.llm_engine.step()
    held = disk.counts()["disk_blocks"]
    if then == "reset":
        llm.reset_prefix_cache(reset_connector=True)
    say({"life": life, "cached": cached, "held": held})


def main(directory: str, lives: list[str]) -> None:
    """One life after the other."""
    os.environ.update({**ENVIRONMENT, **QUIET})
    for module in IMPORTED:
        import_module(module)
    with tiny_model(LLAMA) as model:
        for life in lives:
            status = read_lines(*fork(partial(live, model, directory, life)), None, click.echo)
            assert status == 0, life


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
