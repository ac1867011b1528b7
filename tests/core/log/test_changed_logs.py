"""Logs whose records were changed, with right checksums: each command ends in a verdict, not a traceback.

Whoever can write a log can write any record into it. A reader answers with what the log holds, with the event
that cannot follow, or with the record that is damaged. It neither fails, nor hangs, nor fills the memory.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from contextlib import suppress
from functools import reduce
from operator import or_
from pathlib import Path
from shutil import rmtree
from typing import Any

import msgspec
import pytest
from changed_logs import (
    PlainLog,
    bounded,
    changed,
    copied,
    ended_well,
    folded,
    lives,
    other_value,
    peak_megabytes,
    plain,
    verified_good,
    write_plain,
)
from click.testing import CliRunner, Result
from replay_life import random_life

from examples import seeds_of_today
from kvsm.check.walks.targets import TARGETS, draw_case
from kvsm.cli import main
from kvsm.core.ledger import Ledger
from kvsm.core.ledger.snapshot import restore, snapshot
from kvsm.core.log import LogReader
from kvsm.core.policies import POLICIES
from kvsm.errors import IllegalTransition, InvalidEvent, KvsmError
from kvsm.events import KINDS, OffloadingEvent
from kvsm.explain.metrics import Metrics, gauges
from kvsm.explain.story import BlockLife, KeyLife, RequestLife, TransferLife, rebuild, tell

DECODER: msgspec.msgpack.Decoder[OffloadingEvent] = msgspec.msgpack.Decoder(reduce(or_, KINDS))
COMMANDS = (
    ("replay", "LOG", "--json"),
    ("verify", "LOG", "--json"),
    ("show", "LOG", "--block", "0"),
    ("show", "LOG", "--key", "0"),
    ("show", "LOG", "--request", "r0"),
    ("show", "LOG", "--transfer", "9"),
)
MEGABYTES = 300
"""What the memory of one command may grow by."""


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> list[PlainLog]:
    return lives(tmp_path_factory.mktemp("lives"))


def kvsm(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def check_commands(log: Path, seed: int) -> int:
    """Run every command on a log; they agree about it. Returns the exit code of `replay`."""
    results = {}
    for command in COMMANDS:
        what = f"seed {seed}: {' '.join(command)}"
        with bounded(what):
            results[command] = kvsm(*[str(log) if one == "LOG" else one for one in command])
        ended_well(results[command], what)
    replayed, verified, *shown = [one.exit_code for one in results.values()]
    assert (verified == 2) == (replayed == 2), seed
    if verified == 0:
        assert replayed == 0, seed
    elif replayed == 0:
        # What only `verify` sees: a property that the second book finds broken.
        facts = json.loads(results[COMMANDS[1]].stdout)
        assert facts["damage"] is None, seed
        assert facts["violations"], seed
        assert not any(one["message"].startswith("the fold stops") for one in facts["violations"]), seed
    for result, code in zip(list(results.values())[2:], shown):
        # A thing that the log does not know is unusable input.
        unknown = replayed == 0 and "nothing in this log concerns" in result.stderr
        assert code == replayed or unknown or "there is no request" in result.stderr, seed
    return replayed


def test_every_command_ends_in_a_verdict(tmp_path: Path, logs: list[PlainLog]) -> None:
    """40 changed logs through the command line. `replay`, `show` and `verify` agree about each."""
    found, before = Counter[int](), peak_megabytes()
    for seed in range(40):
        log = changed(logs[seed % len(logs)], random.Random(seed))
        found[check_commands(write_plain(tmp_path / str(seed), log), seed)] += 1
    assert min(found[0], found[1]) > 7
    assert peak_megabytes() - before < MEGABYTES


@pytest.mark.slow
def test_every_reader_ends_in_a_verdict(tmp_path: Path, logs: list[PlainLog]) -> None:
    """1,500 other changed logs each day, through the functions behind the commands, and the metrics."""
    before = peak_megabytes()
    for seed in seeds_of_today(1_500):
        log = write_plain(tmp_path / "log", changed(logs[seed % len(logs)], random.Random(seed)))
        with bounded(f"seed {seed}"):
            folds, good = folded(log), verified_good(log)
            assert folds or not good, seed
            for life in (BlockLife(0), KeyLife("0"), RequestLife("r0"), TransferLife(9)):
                assert told(log, life) == folds, seed
            assert counted(log) == folds, seed
        rmtree(log)
    assert peak_megabytes() - before < MEGABYTES


def told(log: Path, life: BlockLife | KeyLife | RequestLife | TransferLife) -> bool:
    try:
        list(tell(log, life))
    except KvsmError:
        return False
    return True


def counted(log: Path) -> bool:
    try:
        metrics = Metrics.of(LogReader(log))
    except KvsmError:
        return False
    metrics.values()
    gauges(metrics.ledger)
    return True


@pytest.mark.parametrize(
    ("lives", "tries"),
    [pytest.param(5, 2, id="fast"), pytest.param(25, 20, id="slow", marks=pytest.mark.slow)],
)
def test_the_fold_refuses_an_event_whole_or_applies_it(lives: int, tries: int) -> None:
    """Whatever event: `Ledger.apply` raises `IllegalTransition` or `InvalidEvent` with nothing changed, or
    applies it."""
    applied = refused = 0
    for seed in range(lives):
        rng = random.Random(seed)
        config = ({}, {"blocks_per_chunk": 2}, {"host_blocks": 40, "device_blocks": 60})[seed % 3]
        life = random_life(seed, 60, policy=tuple(POLICIES)[seed % len(POLICIES)], **config)
        events, ledger = [plain(event) for event in life.events], Ledger(life.config)
        for event in life.events:
            saved = snapshot(ledger)
            for _ in range(tries):
                wrong = other_event(rng.choice(events), ledger.seq + 1, rng)
                if wrong is None:
                    continue
                trial = restore(saved)
                try:
                    trial.apply(wrong)
                    applied += 1
                except (IllegalTransition, InvalidEvent):
                    assert snapshot(trial) == saved, (seed, wrong)
                    refused += 1
            ledger.apply(event)
    assert min(applied, refused) > 100


def other_event(record: list[object], seq: int, rng: random.Random) -> OffloadingEvent | None:
    """The event of this record with one or two fields changed, if a log could hold it."""
    record = plain(record)
    for _ in range(rng.randint(1, 2) if len(record) > 4 else 0):
        place = rng.randrange(4, len(record))
        record[place] = other_value(record[place], rng)
    record[1] = seq
    try:
        return DECODER.decode(msgspec.msgpack.encode(record))
    except (msgspec.MsgspecError, OverflowError):
        return None


def test_the_snapshot_in_a_head_is_checked_against_its_configuration(
    tmp_path: Path, logs: list[PlainLog]
) -> None:
    """Each field of a snapshot is replaced by that of a larger and of a smaller pool, one at a time. No
    reader believes it."""
    log = next(one for one in logs if len(one) > 1)
    state = msgspec.msgpack.decode(log[1].head[9])
    for place, value in enumerate(state):
        if not isinstance(value, bytes):
            continue
        for other in (value[: len(value) // 2], value + value, value[:4], b""):
            if other == value:
                continue
            wrong = copied(log)[1:]
            wrong[0].head[9] = msgspec.msgpack.encode([*state[:place], other, *state[place + 1 :]])
            directory = write_plain(tmp_path / f"{place}-{len(other)}", wrong)
            with pytest.raises(KvsmError, match="snapshot in its head"):
                rebuild(directory)
            assert not verified_good(directory)


# Saved failures.


def saved_failure(target: str, seed: int) -> dict[str, Any]:
    """A failure as `kvsm fuzz` saves one, with actions that can happen."""
    case, rng, actions = draw_case(target, random.Random(seed)), random.Random(seed), []
    world = case.make()
    with suppress(IndexError):  # Nothing is left to do.
        for _ in range(15):
            actions.append(world.draw(rng))
            world.do(actions[-1])
    failure = {"target": target, "options": msgspec.to_builtins(case.options), "actions": actions}
    return failure | {"property_id": "S1", "message": "m", "seed": 0, "run": 0, "found": 0, "reruns": 0}


@pytest.mark.parametrize(
    "count", [pytest.param(20, id="fast"), pytest.param(150, id="slow", marks=pytest.mark.slow)]
)
def test_a_changed_failure_ends_in_a_verdict(tmp_path: Path, count: int) -> None:
    """`kvsm fuzz --replay` of a saved failure with other options, other actions, or other fields."""
    failures = [saved_failure(target, seed) for target in TARGETS for seed in range(2)]
    found, before = Counter[int](), peak_megabytes()
    for seed in range(count):
        rng = random.Random(seed)
        failure = json.loads(json.dumps(failures[seed % len(failures)]))
        where = rng.choice((failure["options"], failure["options"], *failure["actions"], failure))
        place = rng.choice(list(where) if isinstance(where, dict) else range(len(where)))
        value = other_value(where[place], rng)
        where[place] = value if json_can_hold(value) else 2**62
        (tmp_path / "actions.json").write_text(json.dumps(failure))
        what = f"seed {seed}: {place}={value!r}"
        with bounded(what):
            found[ended_well(kvsm("fuzz", "--replay", str(tmp_path)), what)] += 1
    assert found[0]
    assert found[2]
    assert peak_megabytes() - before < MEGABYTES


def json_can_hold(value: object) -> bool:
    try:
        json.dumps(value)
    except TypeError:
        return False
    return True
