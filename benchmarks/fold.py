"""Measure the fold with its native body and with its Python body.

New requests arrive, are stored and end; the pool is full, so each store evicts. The events are created
beforehand, so only `Ledger.apply` is measured, in CPU time.

    python benchmarks/fold.py --output benchmarks/results/fold.md
"""

from __future__ import annotations

import gc
import time
from contextlib import nullcontext
from pathlib import Path
from statistics import median

import click
from page import markdown_table, publish

from kvsm import events as ev
from kvsm.core import native
from kvsm.core.ledger import Ledger
from kvsm.events import OffloadConfig, OffloadingEvent
from kvsm.ids import pack

EVENTS_OF_A_REQUEST = 7
SIZES = ((1, 20_000, 10_000), (16, 3_000, 20_000), (64, 1_000, 30_000), (512, 200, 60_000))
"""(blocks of a request, requests, slots of the pool)."""


def requests(blocks: int, count: int, slots: int) -> list[OffloadingEvent]:
    """The events of `count` requests."""
    made: list[OffloadingEvent] = []
    free, order = list(range(slots)), list[int]()

    def add(kind: type[OffloadingEvent], *fields: object) -> int:
        made.append(kind(len(made) + 1, len(made) + 1, 0, *fields))
        return len(made)

    for number in range(count):
        name, keys = str(number), tuple([b"%032d" % (number * blocks + block) for block in range(blocks)])
        add(ev.RequestArrived, name)
        add(ev.HitMatched, name, (), keys[0])
        if len(free) < blocks:
            victims, order = order[:blocks], order[blocks:]
            add(ev.BlocksEvicted, pack(victims), (), len(made) + 2)
            free += victims
        taken, free = free[:blocks], free[blocks:]
        transfer = add(ev.StorePlanned, ((name, blocks),), keys, pack(taken), pack(list(range(blocks))))
        add(ev.TransfersSubmitted, (transfer,))
        add(ev.WorkerReported, transfer, 0, True)
        add(ev.RequestFinished, name)
        order += taken[::-1]
    return made


def folded_in(config: OffloadConfig, events: list[OffloadingEvent], is_native: bool) -> float:
    """Fold these events into a new ledger. Returns the CPU seconds."""
    with nullcontext() if is_native else native.without():
        ledger = Ledger(config)
    gc.collect()
    started = time.thread_time()
    for event in events:
        ledger.apply(event)
    return time.thread_time() - started


@click.command()
@click.option("--rounds", default=7, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="Write the table here, with the command.")
def main(rounds: int, output: Path | None) -> None:
    """Measure the fold with both bodies."""
    if native.WHY_NOT:
        raise click.UsageError(f"there is nothing to compare: {native.WHY_NOT}")
    rows = []
    for blocks, count, slots in SIZES:
        events = requests(blocks, count, slots)
        config = OffloadConfig(host_blocks=slots, device_blocks=1024)
        gc.freeze()
        times: dict[bool, list[float]] = {True: [], False: []}
        for number in range(rounds):
            for is_native, taken in times.items():
                taken.append(folded_in(config, events, is_native))
            click.echo(f"  {blocks} blocks, round {number + 1}", err=True)
        best = median(times[True])
        for is_native, taken in times.items():
            us = [1e6 * one / count for one in taken]
            rows.append(
                [
                    str(blocks),
                    "native" if is_native else "Python",
                    f"{median(us):.2f} ({min(us):.2f} .. {max(us):.2f})",
                    f"{median(us) / blocks:.3f}",
                    f"{median(taken) / best:.2f}",
                ]
            )
    header = ["blocks of a request", "body", "us of CPU a request", "us a block", "times native"]
    note = f"about {EVENTS_OF_A_REQUEST} events a request; medians of {rounds} rounds"
    publish("The fold", note, markdown_table(header, rows), output)


if __name__ == "__main__":
    main()
