"""Logs of a release, kept for ever, and what its readers said about them.

    PYTHONPATH=tests/support python -m kept_log tests/data/log-0.1.0            # make logs and results
    PYTHONPATH=tests/support python -m kept_log --results tests/data/log-0.1.0  # read the logs there again

The logs are made once, by the release that they are named after. Before that release they may be made again:
delete the directory first. Afterwards nothing may change them: `tests/explain/test_kept_log.py` proves with
them that later releases read the logs of this one. Results may be written again only to add what was not
kept.

===========  =====================================================================================
`served`     a served workload: two KV cache groups, two ranks, preemptions, aborts, failed copies, a
             reset; its disk tier's log is in `served/disk`
`lives`      calls in random order; the process was killed, and another one continued the log with
             compression; several segments, so most begin with a snapshot
`gap`        a disk was full for a while: events are missing, and the log continues behind them
`warm`       kept host pools, versions of weights, hand-overs to and from another engine, and an end that
             a crash has torn
===========  =====================================================================================
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
from click.testing import CliRunner
from log_life import disk
from replay_life import OFTEN, SELDOM, Life, key

from kvsm.cli import main as kvsm_main
from kvsm.core.ledger import Ledger, indexed_slots
from kvsm.core.ledger.snapshot import snapshot
from kvsm.core.log import LogReader, LogWriter, WholeState, find_end
from kvsm.core.log.frames import segment_paths
from kvsm.core.log.log_directory import LogDirectory
from kvsm.core.offloader import Offloader
from kvsm.events import OffloadConfig
from kvsm.explain.metrics import Metrics
from kvsm.explain.story import rebuild
from kvsm.explain.tables.opened import OpenedLog, open
from kvsm.explain.tables.row_kinds import TABLES
from kvsm.identity import KeptPools, PoolIdentity
from kvsm.serving import RunOptions, WorkloadRun, load_workload
from kvsm.states.block import BlockState
from kvsm.states.words import STATE_MASK

LOGS = ("served", "served/disk", "lives", "gap", "warm")

Fields = dict[str, Any]
"""Names of JSON fields, each with the names inside it; None: the whole value."""


def _named(*names: str, **inner: Fields) -> Fields:
    return {**dict.fromkeys(names), **inner}


_CONDITION = _named("torn", "broken_from", "gaps", "end", "error", "missing", "stopped_by", "missing_from")
_CONDITION["torn"] = _named("offset", "seq", "bytes_cut")
_CHECKED = _named("first", "last", "events", "entries", "violations", "damage", condition=_CONDITION)
_OPEN = _named("event", "engine", "read_blocks", "written_blocks", "retired_blocks", "retired_slots")

ANSWERS: dict[str, Fields] = {
    "verify": {
        **_CHECKED,
        **_named("good", "finished", unfinished=_OPEN),
        "other_tier": _named(
            "tier", "good", "finished", verification=_CHECKED, agreement=_named("difference")
        ),
    },
    "replay": _named(
        "first",
        "events",
        "entries",
        state=_named("seq", "step", "tick", "epoch", "life", "blocks", "free", "idle", "held", "index"),
        condition=_CONDITION,
    ),
    "report": _named(
        "first",
        "last",
        "began_ns",
        "ended_ns",
        "config",
        "stored",
        "stops",
        "groups",
        "skips",
        "resets",
        "restarts",
        "rejected",
        requests=_named("requests", "finished", "aborted", "cut_off", "preemptions", "failed_loads"),
        hits=_named("lookups", "stopped", "asked", "on_device", "on_host", "block_tokens"),
        evictions=_named("evicted", "unread", "wanted"),
    ),
    "tail --no-follow": _named("event", "step", "wall_ns", "kind", "requests", "transfers", "worker"),
    "top --once": _named("since_event", "end", "slots", "capacity"),
    "timeline --output OUT/page.html --perfetto OUT/trace": _named("first", "last", "events"),
}
"""The fields of commands' answers that are kept: no times of the reading, paths, digests and sentences."""

THINGS = {
    "served": ("r3", "r11", "--block 7"),
    "served/disk": ("--block 7",),
    "lives": ("r1", "r4", "--block 2"),
    "gap": ("r2", "--block 1"),
    "warm": ("r1", "--block 0"),
}
"""What `why` and `show` are asked about in each log."""


RESULTS = "results.json.gz"


# The logs.


def make_logs(directory: Path) -> None:
    """Make the logs in this directory, which must not have them."""
    directory.mkdir(parents=True, exist_ok=True)
    _make_served(directory / "served")
    _make_lives(directory / "lives")
    _make_gap(directory / "gap")
    _make_warm(directory / "warm")


def _make_served(log: Path) -> None:
    with TemporaryDirectory() as slots:
        options = RunOptions(
            log=str(log),
            copies="simulated",
            requests=14,
            groups="full,sliding:1024",
            device_blocks=100,
            host_blocks=40,
            disk_blocks=120,
            disk_dir=slots,
            block_bytes=8,
            preempt_rate=0.02,
            failure_rate=0.05,
            abort_rate=0.2,
            reset_every=500,
        )
        WorkloadRun(options, load_workload(options), str(log)).serve()


def _make_lives(log: Path) -> None:
    config = {"blocks_per_chunk": 2, "store_threshold": 2, "policy": "arc", "transfer_ticks": 8, "workers": 1}
    life = Life(log, {"segment_bytes": 9000}, **config)
    rng = random.Random(1)
    names = [name for name in OFTEN * 4 + SELDOM if name != "restart"]
    _drive(life, rng, names, 450)
    life.kill()
    assert life.writer is not None
    life.writer._claimed.close()
    life.writer = LogWriter(
        find_end(LogDirectory(log, durable=False)),
        config=life.config,
        snapshot=lambda: WholeState(snapshot(life.core.ledger)),
        durability="none",
        compress=True,
        segment_bytes=9000,
    )
    life.restart(0, 0)
    _drive(life, rng, names, 250)
    life.close()


def _make_gap(log: Path) -> None:
    life = Life(log, {"on_failure": "continue", "segment_bytes": 3000}, policy="s3fifo")
    rng = random.Random(8)
    for room, count in ((1 << 20, 150), (0, 60), (1 << 20, 720)):
        with disk(room):
            _drive(life, rng, OFTEN, count)
    life.close()


def _drive(life: Life, rng: random.Random, names: Sequence[str], count: int) -> None:
    life.drive((rng.choice(names), rng.randrange(30), rng.randrange(30)) for _ in range(count))


def _make_warm(log: Path) -> None:
    config = OffloadConfig(host_blocks=6, device_blocks=12, workers=1, block_bytes=8, block_tokens=16)
    kept = KeptPools(PoolIdentity.of({"model": "a test"}), (bytes(range(16)),))
    ticks = iter(range(1_000_000_000, 1 << 62, 1_000_000))
    core = Offloader.open(
        config,
        log,
        durability="none",
        clock_ns=lambda: next(ticks),
        kept=kept,
        weights="w1",
        cold=("the pool that was here was not kept",),
    )
    imported = core.import_blocks((), [key(1), key(2)], "engine p-1").job
    assert imported is not None
    core.submit([imported.transfer])
    core.report(imported.transfer, 0, True, "", 20, 300)
    core.arrive("taken", "engine d-1")
    core.match("taken", [key(1), key(2)])
    core.finish("taken", hand_over="taken")
    core.match("r1", [key(1), key(2), key(3)])
    core.admit("r1", 3, 0, 2)
    job = core.prepare_load("r1", [0, 1])
    assert job is not None
    core.submit([job.transfer])
    core.report(job.transfer, 0, False, "copy failed: cudaErrorLaunchTimeout")
    core.finish("r1", aborted=True)
    core.end_step()
    core.reset("w2")
    core.arrive("r2")
    core.end_step()
    assert core.writer is not None
    core.writer._place.segment.close()
    core.writer._claimed.close()
    (path,) = segment_paths(log)
    path.write_bytes(path.read_bytes()[:-3])


# What is read in them.


def results(directory: Path, log: str) -> dict[str, Any]:
    """Return what the readers say about a log. Later releases may add to it, and must not change it."""
    path = directory / log
    return {
        "events": dict(sorted(Counter(_kinds(path)).items())),
        "state": _state(rebuild(path).ledger),
        "metrics": _plain(Metrics.of(LogReader(path)).values()),
        "tables": _tables(path),
        "commands": {command: _answer(command, path, fields) for command, fields in ANSWERS.items()},
        "why": {thing: _evidence("why", path, thing) for thing in THINGS[log]},
        "show": {thing: _evidence("show", path, thing) for thing in THINGS[log]},
    }


def _kinds(log: Path) -> Iterator[str]:
    for segment in LogReader(log).segments():
        for event in segment.events():
            yield event.kind


def _state(ledger: Ledger) -> dict[str, Any]:
    """The state that the fold of the log ends with: what each slot holds, and who uses it."""
    slots = indexed_slots(ledger).tolist()
    return {
        "seq": ledger.seq,
        "step": ledger.step,
        "tick": ledger.tick,
        "epoch": ledger.epoch,
        "life": ledger.life,
        "weights": ledger.weights,
        "slots": [BlockState(word & STATE_MASK).name for word in ledger.blocks.words],
        "generations": list(ledger.generation),
        "keys": {str(slot): ledger.key_of[slot].hex() for slot in slots},
        "free": ledger.free.order().tolist(),
        "requests": {name: one.state.name for name, one in sorted(ledger.requests.items())},
        "transfers": {str(id): one.state.name for id, one in sorted(ledger.transfers.items())},
        "offers": {key.hex(): times for key, times in ledger.offers.times.items()},
    }


def _plain(value: Any) -> Any:
    return json.loads(msgspec.json.encode(value))


def _tables(log: Path) -> dict[str, dict[str, list[Any]]]:
    with open(str(log)) as opened:
        return columns(opened)


def columns(opened: OpenedLog) -> dict[str, dict[str, list[Any]]]:
    """Return the columns of all tables."""
    found = {}
    for table in TABLES:
        cursor = opened.connection.execute(f"SELECT * FROM {table}")
        names = [column[0] for column in cursor.description]
        rows = cursor.fetchall()
        found[table] = {name: [row[place] for row in rows] for place, name in enumerate(names)}
    return found


def _answer(command: str, log: Path, fields: Fields) -> dict[str, Any]:
    """What a command answers: its exit code, and fields of its JSON."""
    with TemporaryDirectory() as out:
        arguments = [one.replace("OUT", out) for one in command.split()]
        ran = CliRunner().invoke(kvsm_main, [arguments[0], str(log), *arguments[1:], "--json"])
    lines = ran.stdout.splitlines()
    return {"exit_code": ran.exit_code, "answer": _part(json.loads(lines[0]), fields) if lines else None}


def _part(value: Any, fields: Fields | None) -> Any:
    """Return these fields of an object, or of each object in a list; None: all of it."""
    if fields is None or value is None:
        return value
    if isinstance(value, list):
        return [_part(one, fields) for one in value]
    return {name: _part(value[name], inner) for name, inner in fields.items()}


def _evidence(command: str, log: Path, thing: str) -> dict[str, str]:
    """The events that a command names when it tells about a thing."""
    which = [thing] if command == "why" else ["--request", thing]
    arguments = thing.split() if thing.startswith("--") else which
    ran = CliRunner().invoke(kvsm_main, [command, str(log), *arguments, "--json"])
    assert ran.exit_code in (0, 1), ran.stderr  # 1: the log lacks events.
    answers = [json.loads(line) for line in ran.stdout.splitlines()]
    if command == "why":
        answers = [one for answer in answers for part in answer["explanations"] for one in part["evidence"]]
    return {str(one["event"]): f"step {one['step']}" for one in answers}


def write_results(directory: Path) -> None:
    """Read the logs, and write down the results."""
    found = {log: results(directory, log) for log in LOGS}
    text = json.dumps(found, separators=(",", ":")).encode()
    (directory / RESULTS).write_bytes(gzip.compress(text, mtime=0))


def read_results(directory: Path) -> dict[str, dict[str, Any]]:
    """Return the results that were written down, by log."""
    kept: dict[str, dict[str, Any]] = json.loads(gzip.decompress((directory / RESULTS).read_bytes()))
    return kept


def differences(kept: Any, now: Any, place: str = "") -> list[str]:
    """Return where results lack what was kept, or contradict it. More fields, columns and tables are fine."""
    if isinstance(kept, dict) and isinstance(now, dict):
        gone = [f"{place}/{name}: gone" for name in kept if name not in now]
        both = [name for name in kept if name in now]
        return gone + [
            line for name in both for line in differences(kept[name], now[name], f"{place}/{name}")
        ]
    if isinstance(kept, list) and isinstance(now, list) and len(kept) == len(now):
        pairs = enumerate(zip(kept, now))
        return [
            line for number, (one, other) in pairs for line in differences(one, other, f"{place}/{number}")
        ]
    return [] if kept == now else [f"{place}: was {kept!r:.200}, is {now!r:.200}"]


def main() -> None:
    """Make or read the logs, as the arguments say."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--results", action="store_true", help="write the results only")
    parser.add_argument("directory", type=Path)
    chosen = parser.parse_args()
    if not chosen.results:
        make_logs(chosen.directory)
    write_results(chosen.directory)


if __name__ == "__main__":
    main()
