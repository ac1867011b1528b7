"""Measure the log: speed of appending, bytes per entry, speed of replay and of verification.

An *entry* is one slot named in one event. Two logs are measured: one of large batches (the trace with few
tokens per block, written as in `control_plane.py`) and one of small events (`kvsm run`). Each is also
measured compressed, with the same events in the same flushes; then keys are compressed, too.

    python benchmarks/log_replay.py --trace TRACE.jsonl --output benchmarks/results/log_replay.md
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import click
from control_plane import DEVICE_BLOCKS, serve_step
from page import markdown_table, publish
from workload import expanded

from kvsm.core.ledger import Ledger
from kvsm.core.ledger.frozen import freeze
from kvsm.core.ledger.snapshot import digest
from kvsm.core.log import LogReader, LogWriter, WholeState
from kvsm.core.offloader import Offloader
from kvsm.events import OffloadConfig, StorePlanned
from kvsm.explain.story import entries, rebuild, verify_log
from kvsm.serving import RunOptions, run_workload


def seconds_of(work: Callable[[], object], rounds: int) -> float:
    taken = []
    for _ in range(rounds):
        gc.collect()
        started = time.process_time()
        work()
        taken.append(time.process_time() - started)
    return median(taken)


def measure(name: str, directory: Path, rounds: int, compress: bool = False) -> list[str]:
    """Measure a log: append, replay, verify. Returns its row of the table."""
    reader = LogReader(directory)
    events = list(reader.events())
    config = reader.head.config
    named = entries(events)
    plans = [event for event in events if isinstance(event, StorePlanned)]
    all_keys = sum(len(key) for plan in plans for key in plan.keys)
    first_keys = sum(map(len, {key for plan in plans for key in plan.keys}))
    log_bytes = sum(path.stat().st_size for path in directory.iterdir())

    def append() -> None:
        # Only append the events, without folding them, to measure the log and not the ledger.
        with (
            tempfile.TemporaryDirectory() as target,
            LogWriter(
                Path(target) / "log", config=config, snapshot=WholeState, compress=compress, checked=True
            ) as writer,
        ):
            for event in events:
                writer.append(event)

    digests = set()

    def replay() -> None:
        digests.add(digest(rebuild(directory).ledger))

    def verify() -> None:
        verification = verify_log(directory)
        assert not verification.violations

    appending, replaying, verifying = (seconds_of(work, rounds) for work in (append, replay, verify))
    assert len(digests) == 1
    return [
        name,
        f"{len(events):,}",
        f"{named:,}",
        f"{(log_bytes - all_keys) / named:.2f}",
        f"{(log_bytes - first_keys) / named:.2f}",
        f"{named / appending / 1e6:.2f} M",
        f"{named / replaying / 1e6:.2f} M",
        f"{len(events) / replaying / 1e3:.0f} k",
        f"{len(events) / verifying / 1e3:.0f} k",
    ]


def write_batches(
    directory: Path, trace: Path | None, block_tokens: int, limit: int, host_blocks: int
) -> None:
    config = OffloadConfig(host_blocks=host_blocks, device_blocks=DEVICE_BLOCKS)
    with Offloader.open(config, directory, durability="none") as core:
        for number, keys in enumerate(expanded(trace, block_tokens, limit)):
            serve_step(core, number, [keys])


def write_compressed(source: Path, directory: Path) -> None:
    """Write the events of a log to a compressed log, with the same flushes."""
    reader = LogReader(source)
    ledger = Ledger(reader.head.config)
    with LogWriter(
        directory,
        config=ledger.config,
        snapshot=lambda: freeze(ledger),
        durability="none",
        compress=True,
        checked=True,
    ) as log:
        for batch in reader.batches():
            for event in batch:
                ledger.apply(event)
                log.append(event)
            log.flush()


@click.command()
@click.option(
    "--trace",
    type=click.Path(path_type=Path, exists=True),
    help="Mooncake-format trace (default: generated).",
)
@click.option("--limit", default=3000, show_default=True, help="Requests of the log of large batches.")
@click.option("--block-tokens", default=16, show_default=True)
@click.option("--host-blocks", default=200_000, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="Write the table here, with the command.")
def main(
    trace: Path | None, limit: int, block_tokens: int, host_blocks: int, rounds: int, output: Path | None
) -> None:
    """Measure the log."""
    with tempfile.TemporaryDirectory() as directory:
        batches, small = Path(directory) / "batches", Path(directory) / "small"
        write_batches(batches, trace, block_tokens, limit, host_blocks)
        run_workload(
            RunOptions(trace=None if trace is None else str(trace), copies="simulated", log=str(small))
        )
        rows = []
        for name, log in (
            (f"large batches ({block_tokens} tokens a block)", batches),
            ("small events (`kvsm run`, 512 tokens a block)", small),
        ):
            rows.append(measure(name, log, rounds))
            write_compressed(log, Path(directory) / "compressed" / log.name)
            rows.append(
                measure(f"{name}, compressed", Path(directory) / "compressed" / log.name, rounds, True)
            )
    header = [
        "log",
        "events",
        "entries",
        "bytes an entry, keys in plans aside",
        "bytes an entry, each key's first appearance aside",
        "entries appended a second",
        "entries replayed a second",
        "events replayed a second",
        "events verified a second",
    ]
    note = f"seconds of CPU time; medians of {rounds} rounds"
    publish("Log and replay", note, markdown_table(header, rows), output)


if __name__ == "__main__":
    main()
