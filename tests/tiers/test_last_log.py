"""The slots of a disk tier beside the log of the last process: what differs is told, and nothing else is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from kvsm.check.worlds.two_tiers import TwoTierOptions, TwoTierWorld
from kvsm.cli import main
from kvsm.explain.story import rebuild
from kvsm.ids import render_key
from kvsm.serving import RunOptions, run_workload
from kvsm.serving.run_disk import RunFiles
from kvsm.tiers import LastLog, LoggedBlocks, SlotDifference
from kvsm.tiers.disk import (
    DiskGeometry,
    LogNote,
    Recovered,
    SlotGeneration,
    TierDirectory,
    decide,
    read_log_note,
)
from kvsm.tiers.disk.formats import HEADER_BYTES

STEPS = 60


def killed(seed: int, **options: Any) -> tuple[LoggedBlocks, Recovered, SlotGeneration]:
    """What the core of a disk has logged until its process was killed, and what the next one finds."""
    random = Random(seed)
    sizes = {"host_slots": 3, "disk_slots": random.randint(2, 6), "ranks": random.choice((1, 2))}
    world = TwoTierWorld(TwoTierOptions(**sizes, failures=2, resets=1, crashes=3, **options))
    for _ in range(STEPS):
        world.do(world.draw(random))
    logged = LoggedBlocks(world.disk.ledger, world.life)
    found = decide([rank.scan(world.life + 1) for rank in world.ranks], world.era.id)
    return logged, found, world.era.after


@settings(max_examples=examples(100))
@given(st.integers(0, 1 << 32))
def test_what_a_killed_process_leaves_is_no_difference(seed: int) -> None:
    """Copies in flight, failed and lost ones, evictions and resets: log and slots agree about all of them."""
    logged, found, after = killed(seed, losses=1)
    assert list(logged.differences(found, after)) == []
    assert logged.stored(after).items() <= {slot: key for key, slot in found.slots.items()}.items()


@settings(max_examples=examples(100))
@given(st.integers(0, 1 << 32), st.data())
def test_each_difference_is_told_with_its_slot_and_both_keys(seed: int, data: st.DataObject) -> None:
    """A block that is missing, another block, and one that nobody has logged; all at once, and no other."""
    logged, found, after = killed(seed)
    stored = logged.stored(after)
    slots = {slot: (key, found.generation(place)) for place, (key, slot) in enumerate(found.slots.items())}
    newer = SlotGeneration(logged.life, logged.ledger.seq + 1)
    wanted: list[tuple[int, bytes | None, bytes | None]] = []
    for slot in range(logged.ledger.config.host_blocks):
        key, what = stored.get(slot), data.draw(st.sampled_from(("the same", "missing", "other")))
        if what == "missing" and key is not None:
            del slots[slot]
            wanted.append((slot, key, None))
        elif what == "other":
            planned = key or (logged.ledger.key_of[slot] if slot in logged.ledger.index.values() else None)
            slots[slot] = b"other %d" % slot, newer
            wanted.append((slot, planned, slots[slot][0]))
    generations = np.array([one for _, one in slots.values()], np.int64).tobytes()
    changed = Recovered({key: slot for slot, (key, _) in slots.items()}, generations, 9, ())
    told = sorted(logged.differences(changed, after), key=lambda one: one.slot)
    assert told == [SlotDifference(slot, digits(log), digits(disk)) for slot, log, disk in wanted]


def digits(key: bytes | None) -> str | None:
    return None if key is None else key.hex()


SMALL: dict[str, Any] = {
    "requests": 12,
    "block_bytes": 64,
    "device_blocks": 64,
    "host_blocks": 64,
    "disk_blocks": 200,
    "copies": "simulated",
    "workers": 1,
    "disk_flush": "every",
}


@pytest.fixture(name="place", scope="module")
def _place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the tier of a run, and its log."""
    made = tmp_path_factory.mktemp("tier")
    run_workload(options(made))
    return made


def options(place: Path, **others: Any) -> RunOptions:
    return RunOptions(**{**SMALL, "disk_dir": str(place / "disk"), "log": str(place / "log"), **others})


def copied(place: Path, to: Path) -> Path:
    """The same tier, whose note names the copied log."""
    shutil.copytree(place, to, dirs_exist_ok=True)
    there = TierDirectory(to / "disk", "run").log_note
    note = read_log_note(there)
    assert isinstance(note, LogNote)
    msgspec.structs.replace(note, log=str(to / "log" / "disk")).write(there)
    return to


def found_by(place: Path, **others: Any) -> LastLog:
    """How the next run finds the tier."""
    files = RunFiles(options(place, **others))
    files.close()
    return files.last_log


def test_a_run_that_finds_what_the_last_one_logged_tells_nothing(place: Path, tmp_path: Path) -> None:
    found = found_by(copied(place, tmp_path))
    assert (found.why_not, found.differences, found.told()) == (None, 0, [])
    assert found.slots > 20
    assert found.log == str(tmp_path / "log" / "disk")


def test_a_block_that_is_gone_is_told_by_the_next_run(place: Path, tmp_path: Path) -> None:
    """With its slot and its key, for people and as JSON, and that each store was flushed."""
    copied(place, tmp_path)
    ledger = rebuild(tmp_path / "log" / "disk").ledger
    key, slot = next(iter(ledger.index.items()))
    with (tmp_path / "disk" / "run-rank0").open("r+b") as file:
        file.seek(DiskGeometry(64, 200).header_at(slot))
        file.write(bytes(HEADER_BYTES))
    shutil.copytree(tmp_path / "disk", tmp_path / "again")
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    command = ["run", *arguments, "--log", str(tmp_path / "next"), "--disk-dir"]
    told = json.loads(CliRunner().invoke(main, [*command, str(tmp_path / "disk"), "--json"]).stdout)
    last = told["disk"]["last_log"]
    assert (last["missing"], last["changed"], last["unknown"]) == (1, 0, 0)
    assert last["first"] == [{"slot": slot, "logged": key.hex(), "found": None}]
    command[-2] = str(tmp_path / "third")
    lines = " ".join(CliRunner().invoke(main, [*command, str(tmp_path / "again")]).stdout.split())
    assert "1 missing on disk; that process flushed each store" in lines
    assert f"slot {slot}: by the log it has key {render_key(key)}, and on disk key none" in lines


def no_log(place: Path) -> None:
    shutil.rmtree(place / "log")


def damaged_log(place: Path) -> None:
    (segment,) = (place / "log" / "disk").glob("*.kvsm")
    content = bytearray(segment.read_bytes())
    content[len(content) // 2] ^= 1
    segment.write_bytes(content)


def another_log(place: Path) -> None:
    shutil.rmtree(place / "log")
    run_workload(options(place, disk_dir=str(place / "other"), seed=2, requests=2))


def no_note(place: Path) -> None:
    TierDirectory(place / "disk", "run").log_note.unlink()


def no_log_was_kept(place: Path) -> None:
    run_workload(options(place, log=None, requests=2))


def no_era(place: Path) -> None:
    TierDirectory(place / "disk", "run").era.unlink()


def another_file(place: Path) -> None:
    (place / "disk" / "run-rank0").unlink()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (no_log, "no such directory"),
        (damaged_log, "00000000000000000001.kvsm"),
        (another_log, "is the log of another run"),
        (no_note, "run.log: there is no such file"),
        (no_log_was_kept, "it kept no log"),
        (no_era, "nothing that it has stored counts"),
        (another_file, "the files of ranks [0] are new"),
    ],
)
def test_what_cannot_be_compared_is_said(place: Path, tmp_path: Path, change: Any, why: str) -> None:
    """And the run starts as without a log."""
    copied(place, tmp_path)
    change(tmp_path)
    found = found_by(tmp_path)
    assert why in str(found.why_not)
    assert found.told() == [f"the slots are not compared with the log of the last process: {found.why_not}"]


def test_the_first_run_has_nothing_to_compare(tmp_path: Path) -> None:
    assert found_by(tmp_path).told() == []


def test_a_log_is_compared_that_ends_between_two_segments(place: Path, tmp_path: Path) -> None:
    """The power was lost when the next one had no more than its name."""
    copied(place, tmp_path)
    log = tmp_path / "log" / "disk"
    (log / f"{rebuild(log).ledger.seq + 1:020}.kvsm").touch()
    assert found_by(tmp_path).why_not is None
