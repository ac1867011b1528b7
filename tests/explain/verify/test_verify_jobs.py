"""Segments that are verified side by side: the same answer as one pass, whatever is wrong, and wherever."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from changed_logs import changed, copied, read_plain, write_plain
from click.testing import CliRunner
from disk_rig import directory as memory_directory
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_life import (
    CONFIGS,
    OPERATIONS,
    Life,
    Operations,
    gapped,
    head,
    random_life,
    scene,
    written,
)
from verified_parts import OneAfterTheOther, cut, in_one_pass, in_parts

from examples import examples, seeds_of_today
from kvsm import events as ev
from kvsm.cli import main
from kvsm.core.ledger import Ledger
from kvsm.core.ledger.snapshot import digest, restore, snapshot
from kvsm.core.log import LogDirectory, LogReader, LogWriter, WholeState, find_end
from kvsm.core.log.frames import SegmentHead
from kvsm.core.policies import POLICIES
from kvsm.events import OffloadingEvent
from kvsm.explain.story import Verification, verify_log
from kvsm.explain.verify import auditor
from kvsm.explain.verify.auditor import default_jobs
from kvsm.explain.verify.logged_copies import LoggedCopies
from kvsm.properties import Property
from kvsm.serving.run_options import RunOptions
from kvsm.serving.workload_run import run_workload
from kvsm.system.executors.forked import ForkedProcesses


def segments(log: Path) -> list[Path]:
    return sorted(log.glob("*.kvsm"))


@pytest.fixture(name="no_pass")
def _no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pass over the whole log may answer for the parts."""

    def fail(*_: object) -> None:
        pytest.fail("one pass over the whole log was needed")

    monkeypatch.setattr(auditor, "_verify", fail)


# Good logs.


@settings(deadline=None, max_examples=examples(60))
@given(OPERATIONS, CONFIGS, st.data())
def test_a_good_log_is_good_in_parts_wherever_they_begin(
    operations: Operations, config: dict[str, Any], data: st.DataObject
) -> None:
    """What each part says, put together, is what one pass says: no part calls wrong what is right."""
    life = Life(**config).drive(operations)
    lasts = data.draw(st.sets(st.integers(1, max(1, len(life.events) - 1)), max_size=5))
    with memory_directory() as place:
        whole = written(place / "whole", life, life.events)
        log = cut(whole, place / "log", lasts if len(life.events) > 1 else ())
        executor = OneAfterTheOther()
        assert in_parts(log) == in_one_pass(log)
        assert verify_log(log, executor=executor).good
        parts = len(segments(log))
        assert len(executor.done) == (parts if parts > 1 else 0)
        assert None not in executor.done


@pytest.mark.usefixtures("no_pass")
@pytest.mark.parametrize("policy", POLICIES)
def test_processes_verify_a_log_that_begins_late_in_parts(tmp_path: Path, policy: str) -> None:
    """With restarts, resets, failed and lost copies. Retention has deleted the oldest segments."""
    log = tmp_path / "log"
    writer = {"segment_bytes": 1500, "max_bytes": 20_000}
    life = random_life(5, 700, log, writer=writer, policy=policy)
    life.drain()
    life.close()
    assert any(isinstance(event, ev.Restarted) for event in life.events)
    found = verify_log(log, executor=ForkedProcesses(2))
    assert found.good
    assert (found.last, found.digest) == (len(life.events), digest(life.core.ledger))
    assert found.first > 1
    assert found.events == found.last - found.first + 1


@pytest.mark.usefixtures("no_pass")
def test_a_log_of_two_lives_is_verified_in_parts(tmp_path: Path) -> None:
    """The second process goes on behind the first, and nothing that it kept is told twice."""
    log = tmp_path / "log"
    life = Life(log, writer={"segment_bytes": 1500})
    operations = [
        (name, n, n + 1) for n in range(60) for name in ("store", "submit", "report", "report", "step")
    ]
    life.drive(operations).close()
    life.writer = LogWriter(
        find_end(LogDirectory(log)),
        config=life.config,
        snapshot=lambda: WholeState(snapshot(life.core.ledger)),
        durability="none",
        segment_bytes=1500,
    )
    life.restart(0, 0)
    life.drive(operations).drain().close()
    assert len(segments(log)) > 4
    found = verify_log(log, executor=ForkedProcesses(2))
    assert found.good
    assert len(found.restarts) == 1
    assert found.digest == digest(life.core.ledger)


@pytest.mark.usefixtures("no_pass")
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_copies_between_tiers_are_heard_in_parts(ran: Path, tier: str) -> None:
    """Each copy's steps stand in the order of the log, though its plan and its report may be in two parts."""
    log = ran / tier
    found, heard = in_parts(log)
    assert isinstance(found, Verification)
    assert found.good
    assert len(segments(log)) > 3
    part = LoggedCopies(named_disk=tier == "disk").part(Ledger(LogReader(log).head.config))
    whole, ledger = LoggedCopies(named_disk=tier == "disk"), Ledger(LogReader(log).head.config)
    for event in LogReader(log).events():
        ledger.apply(event)
        part.hear(ledger, event)
    whole.take(part)
    assert heard == [tier, whole.steps, whole.first, whole.began, whole.began_ns, False]
    assert len(whole.steps) > 20


@pytest.fixture(scope="module", name="ran")
def _ran() -> Iterator[Path]:
    """The logs of a run with two tiers, cut into segments."""
    with memory_directory() as place:
        run_workload(
            RunOptions(
                requests=40,
                block_bytes=64,
                device_blocks=64,
                host_blocks=64,
                disk_blocks=400,
                copies="simulated",
                disk_dir=str(place / "files"),
                failure_rate=0.03,
                reset_every=400,
                log=str(place / "log"),
            )
        )
        for tier, log in (("host", place / "log"), ("disk", place / "log" / "disk")):
            last = sum(1 for _ in LogReader(log).events())
            cut(log, place / tier, range(last // 7, last, last // 7))
        yield place


# What no snapshot holds: whether a store has failed since a request's cursors moved.


def failed_and_back(life: Life, failed: bool) -> list[OffloadingEvent]:
    """Request r1 settles fewer blocks than before, which only a store that failed in between allows."""
    seq, step, wall = head(life)
    # A key was taken away once. So a snapshot does not tell whether a store has failed.
    events: list[OffloadingEvent] = [
        ev.HitReleased(seq, step, wall, "r1"),
        ev.BlocksEvicted(seq + 1, step, wall, (0,), (), seq + 2),
        ev.BlocksOffered(seq + 2, step, wall, (("r1", (1, 2), (3, 2)),)),
        ev.WorkerReported(seq + 3, step, wall, seq - 2, 0, not failed),
        ev.StepEnded(seq + 4, step, wall),
    ]
    return [*events, ev.BlocksOffered(seq + 5, step, wall, (("r1", (2, 1), (3, 2)),))]


@pytest.mark.parametrize("failed", [True, False])
def test_a_store_that_failed_parts_ago_lets_cursors_go_back_and_another_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failed: bool
) -> None:
    """Stored once: a part that begins behind the store takes it on trust, and the parts before decide."""
    life = scene(host_blocks=5)
    events = [*life.events, *failed_and_back(life, failed)]
    whole = written(tmp_path / "whole", life, events)
    last = len(events)
    for lasts in ((last - 1,), (last - 2, last - 1), (last - 3, last - 1), (last - 4, last - 2, last - 1)):
        log = cut(whole, tmp_path / f"{lasts}", lasts)
        assert in_parts(log) == in_one_pass(log)
        found = in_parts(log)[0]
        assert isinstance(found, Verification)
        assert bool(found.violations) is not failed, lasts
        if failed:
            with monkeypatch.context() as patch:
                patch.setattr(auditor, "_verify", lambda *_: pytest.fail("one pass was needed"))
                assert in_parts(log)[0] == found
        # Without its beginning nobody knows, in one pass or in parts.
        segments(log)[0].unlink()
        assert in_parts(log) == in_one_pass(log)


# What is wrong.


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(range(examples(40, least=20)), id="fast"),
        pytest.param(seeds_of_today(1_000), id="slow", marks=pytest.mark.slow),
    ],
)
def test_changed_logs_are_answered_alike_in_one_pass_and_in_parts(tmp_path: Path, seeds: range) -> None:
    """The same first event, properties, words and damage, whatever was changed in whatever segment."""
    logs = []
    for number, policy in enumerate(POLICIES):
        writer = {"segment_bytes": 1500, "max_bytes": 40_000 if number % 2 else None}
        random_life(number, 250, tmp_path / policy, writer=writer, policy=policy).close()
        logs.append(read_plain(tmp_path / policy))
        assert len(logs[-1]) > 3
    broken = damaged = 0
    for seed in seeds:
        rng = random.Random(seed)
        log = write_plain(tmp_path / f"{seed}", changed(logs[seed % len(logs)], rng))
        if rng.random() < 0.2:
            flip(rng.choice(segments(log)), rng)
        found = in_one_pass(log)
        assert in_parts(log, workers=rng.choice((1, 100))) == found, seed
        broken += isinstance(found[0], Verification) and bool(found[0].violations)
        damaged += isinstance(found[0], Verification) and found[0].damage is not None
        shutil.rmtree(log)
    assert broken > len(seeds) / 8
    assert damaged > len(seeds) / 16


def flip(path: Path, rng: random.Random) -> None:
    """Damage a byte."""
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def test_a_head_with_another_state_is_found_in_whatever_segment(tmp_path: Path) -> None:
    """Events are state (S10): the part before ends in another state, though no event after it is wrong."""
    life = random_life(4, 500, tmp_path / "log", writer={"segment_bytes": 1500})
    life.drain().close()
    log = read_plain(tmp_path / "log")
    assert len(log) > 5
    for number in range(1, len(log)):
        false = copied(log)
        segment = next(LogReader(tmp_path / "log").segments(false[number].head[3] + 1))
        ledger = restore(segment.head.snapshot)
        ledger.weights = "others"
        place = SegmentHead.__struct_fields__.index("snapshot")
        false[number].head[place] = snapshot(ledger)
        path = write_plain(tmp_path / f"{number}", false)
        found = in_parts(path)
        assert found == in_one_pass(path)
        assert isinstance(found[0], Verification)
        assert found[0].breakage is not None
        assert found[0].breakage.text == f"the snapshot in the head of {segment.path.name}"
        assert [one.property for one in found[0].violations] == [Property.EVENTS_ARE_STATE]


def test_gaps_missing_segments_and_torn_ends_are_answered_alike(tmp_path: Path) -> None:
    """Whatever is missing in a log of several segments."""
    gapped(tmp_path / "gapped")
    random_life(8, 250, tmp_path / "killed", writer={"segment_bytes": 1500}).kill()
    for log in (tmp_path / "gapped", tmp_path / "killed"):
        whole = segments(log)
        assert in_parts(log) == in_one_pass(log)
        for number, path in enumerate(whole):
            part = shutil.copytree(log, tmp_path / f"{log.name}-{number}")
            (part / path.name).unlink()
            assert in_parts(part) == in_one_pass(part)
            (part / path.name).write_bytes(path.read_bytes()[:-3])
            assert in_parts(part) == in_one_pass(part)
    shutil.rmtree(tmp_path / "killed")
    assert in_parts(tmp_path / "killed") == in_one_pass(tmp_path / "killed")
    (tmp_path / "killed").mkdir()
    assert in_parts(tmp_path / "killed") == in_one_pass(tmp_path / "killed")


# The command.


def test_the_command_says_the_same_with_any_number_of_jobs(tmp_path: Path) -> None:
    """The text, the JSON and the exit code, of a good log and of one that is not."""
    random_life(6, 400, tmp_path / "good", writer={"segment_bytes": 1500}).drain().close()
    false = read_plain(tmp_path / "good")
    del false[len(false) // 2].frames[0][0]
    write_plain(tmp_path / "false", false)
    for name, code in (("good", 0), ("false", 1)):
        answers = set()
        for jobs in (1, 2, 5):
            one = CliRunner().invoke(main, ["verify", str(tmp_path / name), "--jobs", str(jobs)])
            other = CliRunner().invoke(main, ["verify", str(tmp_path / name), f"--jobs={jobs}", "--json"])
            assert (one.exit_code, other.exit_code) == (code, code)
            text = "".join(line for line in one.output.splitlines() if not line.startswith("time"))
            answers.add((text, re.sub(r'"seconds":[0-9.e-]+', "", other.stdout)))
        assert len(answers) == 1


def test_jobs_are_as_many_as_the_log_and_the_memory_allow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One for each CPU; fewer for few segments, a small log, or large pools."""
    log = tmp_path / "log"
    random_life(6, 400, log, writer={"segment_bytes": 1500}).close()
    count = len(segments(log))
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    assert default_jobs(log) == 1
    monkeypatch.setattr(auditor, "JOB_BYTES", 1)
    assert default_jobs(log) == count
    monkeypatch.setattr(auditor, "SLOTS_OF_JOBS", 3 * (10 + 24))
    assert default_jobs(log) == 3
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert default_jobs(log) == 2
    monkeypatch.setattr(auditor, "SLOTS_OF_JOBS", 1)
    assert default_jobs(log) == 1
    assert default_jobs(tmp_path / "none") == 1
