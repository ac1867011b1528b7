"""`kvsm verify` reads the logs of both tiers: conservation (S1) for the copies between them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import msgspec
import pytest
from click.testing import CliRunner, Result
from disk_rig import directory as memory_directory
from two_tier_life import DISK_CONFIG, HOST_CONFIG, live

from kvsm import events as ev
from kvsm.cli import main
from kvsm.core.ledger import Ledger
from kvsm.core.log import LogEnd, LogReader, LogWriter, MemoryLog, WholeState
from kvsm.core.offloader import Offloader, PendingHit
from kvsm.core.plan import WorkerReport
from kvsm.errors import IllegalTransition, InvalidEvent
from kvsm.events import Direction, OffloadConfig, OffloadingEvent
from kvsm.explain.story import Verification, verify_log
from kvsm.explain.verify.logged_copies import LogAgreement, LoggedCopies, VerifiedLog, compare_logs
from kvsm.serving import RunOptions, run_workload
from kvsm.tiers import DiskTier

KEYS = [bytes([n]) * 8 for n in range(1, 7)]


class Told(NamedTuple):
    """The events of one log, and how it ends."""

    config: OffloadConfig
    events: Sequence[OffloadingEvent]
    end: LogEnd = LogEnd.CLOSED


def heard(told: Told, named_disk: bool) -> VerifiedLog:
    """The copies that a verification of this log observes. Raises what the fold raises."""
    ledger, copies = Ledger(told.config), LoggedCopies(named_disk)
    part = copies.part(ledger)
    for event in told.events:
        ledger.apply(event)
        part.hear(ledger, event)
    copies.take(part)
    good = good_verification()
    condition = msgspec.structs.replace(good.condition, end=told.end)
    return VerifiedLog(msgspec.structs.replace(good, condition=condition), copies)


@cache
def good_verification() -> Verification:
    with TemporaryDirectory() as place:
        Offloader.open(HOST_CONFIG, Path(place) / "log").close()
        return verify_log(Path(place) / "log")


def agreement(host: Told, disk: Told) -> LogAgreement:
    return compare_logs(heard(host, False), heard(disk, True), one_process=True)


def verify(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["verify", *map(str, arguments)], catch_exceptions=False)


@pytest.fixture(scope="module", name="ran")
def _ran() -> Iterator[Path]:
    """The logs of a run with copies that fail, resets and preemptions."""
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
                preempt_rate=0.02,
                log=str(place / "log"),
            )
        )
        yield place / "log"


def read(log: Path) -> Told:
    reader = LogReader(log)
    return Told(reader.head.config, list(reader.events()))


@pytest.fixture(scope="module", name="told")
def _told(ran: Path) -> tuple[Told, Told]:
    return read(ran), read(ran / "disk")


def test_both_logs_of_a_run_are_verified_from_either(ran: Path) -> None:
    """Each tier is named, and nothing is wrong with a run whose copies fail and whose cache is reset."""
    for log, tiers in ((ran, ["host", "disk"]), (ran / "disk", ["disk", "host"])):
        result = verify(log, "--strict", "--protocol")
        assert result.exit_code == 0, result.output
        assert [line.split()[1] for line in result.stdout.splitlines() if line.startswith("tier ")] == tiers
        assert "both logs agree on" in result.stdout
        answer = json.loads(verify(log, "--json").stdout)
        below = answer["other_tier"]
        assert (below["tier"], below["good"], below["finished"]) == (tiers[1], True, True)
        assert below["agreement"]["steps"] > 100
        assert (below["agreement"]["difference"], below["agreement"]["not_compared"]) == (None, [])


def test_one_log_alone_can_be_verified(ran: Path) -> None:
    assert verify(ran, "--alone").stdout.startswith("log ")
    assert json.loads(verify(ran, "--alone", "--json").stdout)["other_tier"] is None


def test_a_log_of_one_tier_is_told_as_before(tmp_path: Path) -> None:
    with Offloader.open(HOST_CONFIG, tmp_path / "log") as core:
        core.arrive("r")
    result = verify(tmp_path / "log")
    assert result.exit_code == 0
    assert result.stdout.startswith("log ")


# What two logs must agree about.


def test_logs_that_are_cut_at_any_two_places_do_not_differ(told: tuple[Told, Told]) -> None:
    """A kill leaves of each log what was flushed."""
    random = Random(5)
    host, disk = told
    whole = agreement(host, disk)
    assert whole.difference is None
    assert whole.not_compared == ()
    for _ in range(25):
        above, below = (
            Told(one.config, one.events[: random.randrange(1, len(one.events))], LogEnd.OPEN)
            for one in (host, disk)
        )
        found = agreement(above, below)
        assert found.difference is None
        assert found.steps <= whole.steps
        assert all("was not closed" in line for line in found.not_compared)


def changed(event: OffloadingEvent) -> OffloadingEvent:
    """Another event in its place."""
    if isinstance(event, ev.WorkerReported) and event.good:
        return msgspec.structs.replace(event, good=False)
    return ev.StepEnded(event.seq, event.step, event.wall_ns)


@pytest.mark.parametrize("place", [0, 1])
def test_each_change_of_what_a_log_tells_of_a_copy_is_found(place: int, told: tuple[Told, Told]) -> None:
    """The change is found in this log, because an event cannot follow, or by the other log."""
    config, events, _ = told[place]
    # Only the disk's log tells whether a copy to the disk was good.
    steps = [
        one
        for one in heard(told[place], bool(place)).copies.steps
        if one.direction is Direction.LOAD or one.says.startswith("leaves")
    ]
    for step in Random(6).sample(steps, 20):
        before, after = events[: step.event - 1], events[step.event :]
        assert differs(told, place, Told(config, before)), step
        with suppress(InvalidEvent, IllegalTransition):
            assert differs(told, place, Told(config, [*before, changed(events[step.event - 1]), *after])), (
                step
            )


def differs(told: tuple[Told, Told], place: int, other: Told) -> bool:
    """Whether the logs differ if one of them is replaced."""
    host, disk = (other, told[1]) if place == 0 else (told[0], other)
    return agreement(host, disk).difference is not None


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_log_that_lacks_the_end_of_a_copy_is_found(tier: str, tmp_path: Path) -> None:
    """It is good alone. The line names both logs' events, and the exit code is 1."""
    logs = {"host": tmp_path / "log", "disk": tmp_path / "log" / "disk"}
    with Offloader.open(HOST_CONFIG, logs["host"]) as host, Offloader.open(DISK_CONFIG, logs["disk"]) as disk:
        live(host, disk, KEYS)
    assert verify(logs["host"]).exit_code == 0
    events, config = read(logs[tier]).events, read(logs[tier]).config
    last = max(event.seq for event in events if isinstance(event, ev.WorkerReported))
    rewrite(logs[tier], config, events[: last - 1])
    assert verify(logs[tier], "--alone").exit_code == 0
    for log in logs.values():
        result = verify(log)
        told = " ".join(result.stdout.split())
        assert result.exit_code == 1, result.output
        assert "broken: conservation (S1); the logs differ after 3 steps" in told
        assert f"by the log of the {tier}, no further step of a copy" in told
        assert f"by the log of the {'disk' if tier == 'host' else 'host'}, event " in told
        assert "is reported by worker 0 as good" in told


def rewrite(log: Path, config: OffloadConfig, events: Sequence[OffloadingEvent]) -> None:
    """A closed log of these events."""
    (segment,) = log.glob("*.kvsm")
    segment.unlink()
    for left in log.glob("index*"):
        left.unlink()
    beside = log.with_name("rewritten")
    with LogWriter(beside, config=config, snapshot=lambda: WholeState(b""), durability="none") as writer:
        for event in events:
            writer.append(event)
    (made,) = beside.glob("*.kvsm")
    made.rename(segment)
    shutil.rmtree(beside)


def test_other_blocks_in_the_other_log_are_found(told: tuple[Told, Told]) -> None:
    """The copy is the same, but not what it copies."""
    host, disk = told
    plan = next(one for one in disk.events if isinstance(one, ev.StorePlanned))
    events = list(disk.events)
    events[plan.seq - 1] = msgspec.structs.replace(plan, keys=(b"another" * 5, *plan.keys[1:]))
    index = next(n for n, one in enumerate(events) if isinstance(one, ev.TransfersSubmitted))
    found = agreement(host, Told(disk.config, events[: index + 1], LogEnd.OPEN))
    assert found.difference is not None
    assert str(found.difference.host).endswith("with other host slots or keys")


def test_a_copy_that_one_log_alone_gives_up_is_found() -> None:
    logs = {config: MemoryLog() for config in (HOST_CONFIG, DISK_CONFIG)}
    host, disk = (Offloader(config, log) for config, log in logs.items())
    tier = DiskTier(host, disk, lambda _: None, places=4)
    job = host.store((("r", 1),), KEYS[:1], [0]).job
    assert job is not None
    host.submit([job.transfer])
    host.report(job.transfer, 0, True)
    tier.stored(KEYS[:1])
    (copy,) = tier.plan()
    tier.lose(copy.transfer)
    above, below = (Told(config, list(log)) for config, log in logs.items())
    assert [step.says for step in heard(above, False).copies.steps] == ["leaves with 1 block", "is given up"]
    assert agreement(above, below).difference is None
    lost = next(place for place, event in enumerate(below.events) if isinstance(event, ev.TransferLost))
    assert agreement(above, Told(DISK_CONFIG, below.events[:lost])).difference is not None


# What is not compared.


def long_life(host: Offloader, disk: Offloader, rounds: int) -> None:
    """Blocks are stored and copied to the disk, and every other time a block comes back."""
    tier = DiskTier(host, disk, lambda _: None, places=4)
    for number in range(rounds):
        keys = [f"{number:06}-{place}".encode() for place in range(2)]
        job = host.store((("r", 2),), keys, range(2)).job
        assert job is not None
        host.submit([job.transfer])
        host.report(job.transfer, 0, True)
        host.rewrite(range(8))
        tier.stored(keys)
        before = f"{number - 3:06}-0".encode()
        if number % 2 and tier.has(before):
            tier.fetch(PendingHit("r", [before]))
        for copy in tier.plan():
            tier.report(WorkerReport(copy.transfer, 0, number % 7 > 0))


@pytest.mark.parametrize("trimmed", ["host", "disk", "both"])
def test_copies_that_no_log_has_forgotten_are_compared(trimmed: str, tmp_path: Path) -> None:
    """Retention deletes the oldest segments of a log. The output says up to which event."""
    small: dict[str, Any] = {"segment_bytes": 4000, "max_bytes": 30_000}
    host_options = small if trimmed != "disk" else {}
    disk_options = small if trimmed != "host" else {}
    with (
        Offloader.open(HOST_CONFIG, tmp_path / "log", **host_options) as host,
        Offloader.open(DISK_CONFIG, tmp_path / "log" / "disk", **disk_options) as disk,
    ):
        long_life(host, disk, 200)
    result = verify(tmp_path / "log")
    assert result.exit_code == 0, result.output
    found = json.loads(verify(tmp_path / "log", "--json").stdout)["other_tier"]["agreement"]
    assert found["difference"] is None
    assert 20 < found["steps"] < 400
    tiers = ["host", "disk"] if trimmed == "both" else [trimmed]
    assert [line.split("'s log")[0].split()[-1] for line in found["not_compared"]] == tiers
    assert all(line.startswith("copies that were planned before event ") for line in found["not_compared"])


def test_a_difference_behind_what_retention_has_left_is_found(tmp_path: Path) -> None:
    """A log that lacks its beginning is still compared in the part that is left."""
    with (
        Offloader.open(HOST_CONFIG, tmp_path / "log", segment_bytes=4000, max_bytes=30_000) as host,
        Offloader.open(DISK_CONFIG, tmp_path / "log" / "disk") as disk,
    ):
        long_life(host, disk, 200)
    told = read(tmp_path / "log" / "disk")
    last = max(event.seq for event in told.events if isinstance(event, ev.WorkerReported))
    rewrite(tmp_path / "log" / "disk", told.config, told.events[: last - 1])
    assert verify(tmp_path / "log").exit_code == 1


def test_a_missing_log_of_the_other_tier_is_told(ran: Path, tmp_path: Path) -> None:
    shutil.copytree(ran, tmp_path / "log")
    shutil.rmtree(tmp_path / "log" / "disk")
    result = verify(tmp_path / "log")
    assert result.exit_code == 0
    assert "verdict  not verified: no log of the disk lies beside" in result.stdout
    answer = json.loads(verify(tmp_path / "log", "--json").stdout)["other_tier"]
    assert answer["why_not"] == f"no log of the disk lies beside {tmp_path / 'log'}"
    assert (answer["good"], answer["agreement"]) == (None, None)


def test_damage_in_the_other_log_is_the_exit_code_and_the_copies_before_it_are_compared(
    ran: Path, tmp_path: Path
) -> None:
    shutil.copytree(ran, tmp_path / "log")
    (segment,) = (tmp_path / "log" / "disk").glob("*.kvsm")
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(data)
    result = verify(tmp_path / "log", "--json")
    found = json.loads(result.stdout)["other_tier"]
    assert result.exit_code == 1
    assert str(segment) in found["verification"]["damage"]
    assert found["agreement"]["difference"] is None
    assert found["agreement"]["steps"] > 0
    assert "the log of the disk is damaged behind event " in found["agreement"]["not_compared"][0]


def test_an_other_log_that_cannot_be_read_at_all_is_told_with_exit_code_2(ran: Path, tmp_path: Path) -> None:
    shutil.copytree(ran, tmp_path / "log")
    (segment,) = (tmp_path / "log" / "disk").glob("*.kvsm")
    os.truncate(segment, 10)
    result = verify(tmp_path / "log", "--json")
    assert result.exit_code == 2
    assert json.loads(result.stdout)["other_tier"]["why_not"]


def test_a_log_of_the_disk_that_is_older_than_the_last_process_is_not_compared(ran: Path) -> None:
    """The process that resumed a kept log may have had no disk."""
    host = heard(read(ran), False)
    disk = heard(read(ran / "disk"), True)
    host.copies.began_ns = disk.copies.began_ns + 1
    found = compare_logs(host, disk, one_process=False)
    assert found.steps == 0
    assert found.not_compared[0].startswith("all copies: ")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_the_logs_of_a_killed_run_do_not_differ(seed: int, tmp_path: Path) -> None:
    """With real copies, killed at any moment."""
    sizes = ["--requests", "4000", "--block-bytes", "256", "--host-blocks", "64", "--device-blocks", "64"]
    disk = ["--disk-blocks", "400", "--disk-dir", str(tmp_path / "files"), "--fail-rate", "0.02"]
    command = [sys.executable, "-m", "kvsm", "run", *sizes, *disk, "--log", str(tmp_path / "log")]
    with subprocess.Popen([*command, "--copies", "host"], stdout=subprocess.DEVNULL) as process:
        while not (tmp_path / "log" / "disk").exists():
            time.sleep(0.01)
        time.sleep(Random(seed).uniform(0.3, 1.5))
        process.send_signal(signal.SIGKILL)
    result = verify(tmp_path / "log", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["other_tier"]
    assert found["agreement"]["difference"] is None
    assert found["agreement"]["steps"] > 0
