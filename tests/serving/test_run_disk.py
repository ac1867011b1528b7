"""`kvsm run` with a disk tier: blocks that a later run finds, checks, and messages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from disk_rig import directory as memory_directory

from kvsm.cli import main
from kvsm.cli.run_result import print_result
from kvsm.errors import ConfigError
from kvsm.events import Direction
from kvsm.explain.story import rebuild
from kvsm.serving import RunOptions, RunResult, WorkloadRun, run_workload
from kvsm.serving.run_disk import RunFiles
from kvsm.tiers.disk import DiskCopyEngine

PRESSED: dict[str, Any] = {
    "requests": 40,
    "block_bytes": 64,
    "device_blocks": 64,
    "host_blocks": 64,
    "disk_blocks": 400,
    "copies": "simulated",
}
"""Options with a host pool that is much too small."""


@pytest.fixture(name="place")
def _place() -> Iterator[Path]:
    with memory_directory() as made:
        yield made


def serve(place: Path, **options: Any) -> RunResult:
    return run_workload(RunOptions(**{**PRESSED, "disk_dir": str(place / "disk"), **options}))


def kvsm(*arguments: object) -> Result:
    options = [one for name, value in PRESSED.items() for one in (f"--{name.replace('_', '-')}", value)]
    return CliRunner().invoke(main, ["run", *map(str, (*options, *arguments))], catch_exceptions=False)


def test_the_next_run_finds_on_disk_what_this_one_stored(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It finds each block, and no other. It stores none of them again, computes less, and says so."""
    first, second = serve(place), serve(place)
    assert first.good
    assert second.good
    assert first.disk is not None
    assert second.disk is not None
    assert (first.disk.blocks_found, second.disk.blocks_found) == (0, first.disk.blocks)
    assert (first.disk.why_cold, second.disk.why_cold) == (("there was no file",), ())
    assert first.disk.blocks == first.disk.blocks_stored > 60
    assert second.disk.blocks_loaded > 0
    assert second.computed_tokens < first.computed_tokens
    assert second.disk.loads.bytes == second.disk.blocks_loaded * 64 * RunOptions().workers
    print_result(second)
    told = capsys.readouterr().out
    rows = ("found on disk", "hits from disk", "stored on disk", "on disk at the end", "disk log events")
    assert [row for row in rows if f"\n{row} " not in told] == []
    assert "loaded from host memory, or from disk through it" in told


def test_write_back_writes_less_and_the_host_loses_nothing_for_it(place: Path) -> None:
    """Runs that begin with an empty disk hit the same blocks, and the disk gets fewer."""
    sizes = {"requests": 80, "host_blocks": 256}
    through = serve(place, **sizes)
    back = serve(place, disk_dir=str(place / "other"), disk_write="back", **sizes)
    assert back.good
    assert through.disk is not None
    assert back.disk is not None
    assert 0 < back.disk.blocks_stored < through.disk.blocks_stored
    assert back.disk.blocks_not_stored == 0
    assert back.computed_tokens == through.computed_tokens


def test_both_logs_are_kept_and_verify(place: Path) -> None:
    """The disk's log is in a subdirectory of the host's log, which the result names."""
    told = json.loads(kvsm("--disk-dir", place / "disk", "--log", place / "log", "--json").stdout)
    assert told["disk"]["log"] == str(place / "log" / "disk")
    assert told["disk"]["digest"] == told["disk"]["replayed_digest"] != told["digest"]
    for log in (told["log"], told["disk"]["log"]):
        assert CliRunner().invoke(main, ["verify", log]).exit_code == 0


def test_equal_runs_have_equal_logs_with_a_disk(place: Path) -> None:
    """S11: also if copies to the disk fail, the cache is reset, and threads end copies in any order."""
    logs = []
    for name in ("one", "other"):
        trouble = {
            "failure_rate": 0.1,
            "reset_every": 100,
            "preempt_rate": 0.02,
            "verify_copies": True,
            "requests": 25,
        }
        result = serve(place, disk_dir=str(place / name), log=str(place / f"{name}.log"), **trouble)
        assert result.good
        assert result.disk is not None
        assert result.disk.blocks_not_stored > 0
        files = sorted((place / f"{name}.log").rglob("*.kvsm"))
        assert len(files) == 2
        logs.append([path.read_bytes() for path in files])
    assert logs[0] == logs[1]


def test_nothing_of_before_a_reset_comes_back(place: Path) -> None:
    """S14: the next run finds only blocks that were stored since the last reset."""
    first, second = serve(place, reset_every=800), serve(place)
    assert first.resets > 0
    assert first.disk is not None
    assert second.disk is not None
    assert second.disk.blocks_found == first.disk.blocks < first.disk.blocks_stored


def test_a_run_that_flushes_at_its_last_step_leaves_all_on_disk(place: Path) -> None:
    """Flush at last step (S17) on two tiers: what the host holds is on the disk. It goes for copies that
    fail, too."""
    log = place / "log"
    assert serve(place, last_step="flush", disk_blocks=1000, log=str(log)).good
    host, disk = rebuild(log).ledger.index, rebuild(log / "disk").ledger.index
    assert len(host) > 60
    assert host.keys() <= disk.keys()
    assert serve(place, last_step="flush", failure_rate=0.1, reset_every=200).good


def test_slots_of_several_blocks(place: Path) -> None:
    """A slot on disk holds what a slot of the host holds."""
    options = {
        "blocks_per_chunk": 2,
        "host_blocks": 40,
        "copies": "host",
        "workers": 1,
        "disk_flush": "every",
    }
    first, second = serve(place, **options), serve(place, **options)
    assert first.good
    assert second.good
    assert second.disk is not None
    assert second.disk.blocks_loaded > 0


def test_other_sizes_start_cold_and_say_why(place: Path) -> None:
    serve(place, requests=5)
    other = serve(place, requests=5, block_bytes=72)
    assert other.disk is not None
    assert other.disk.blocks_found == 0
    assert "bytes of a block: 64, and now 72" in other.disk.why_cold


def test_a_second_process_on_the_directory_is_refused(place: Path) -> None:
    """The error names the process that has the files, and nothing is written."""
    files = RunFiles(RunOptions(**{**PRESSED, "disk_dir": str(place / "disk")}))
    result = kvsm("--disk-dir", place / "disk", "--log", place / "log")
    files.close()
    assert result.exit_code == 2
    assert "run-rank0: is in use by process " in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (place / "log").exists()


def test_a_log_that_cannot_be_made_leaves_the_files_to_others(place: Path) -> None:
    """The locks of the files are released by the error."""
    (place / "log").write_text("mine")
    assert kvsm("--disk-dir", place / "disk", "--log", place / "log").exit_code == 2
    assert serve(place, requests=2).good


def test_a_reset_that_cannot_be_written_is_one_line(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the run continued, a later run could find blocks from before the reset."""

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    run = RunOptions(**{**PRESSED, "disk_dir": str(place / "disk"), "reset_every": 50})
    serve(place, requests=2)
    monkeypatch.setattr("kvsm.tiers.disk.era.write_sealed", full)
    with pytest.raises(ConfigError, match=r"a reset cannot be written: .*No space left on device"):
        run_workload(run)


def test_bytes_that_come_wrong_from_the_disk_are_found(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S15 from end to end: blocks that are mixed up when they are loaded from the disk are detected."""
    whole = DiskCopyEngine.copy_part

    def careless(self: DiskCopyEngine, job: Any, first: int, devices: Any, hosts: Any) -> None:
        mixed = np.asarray(devices)[::-1] if job.direction is Direction.LOAD else devices
        whole(self, job, first, mixed, hosts)

    monkeypatch.setattr(DiskCopyEngine, "copy_part", careless)
    result = kvsm("--disk-dir", place / "disk", "--log", place / "log")
    assert result.exit_code == 1
    assert "correct bytes (S15): request " in result.stdout


def test_a_state_of_the_disk_that_replay_does_not_give_is_exit_code_1(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S10 for the disk's core: a change without an event is reported in capitals."""
    serve = WorkloadRun.serve

    def meddling(self: WorkloadRun, progress: Any = None) -> None:
        serve(self, progress)
        assert self.disk is not None
        self.disk.tier.disk.ledger.epoch += 1

    monkeypatch.setattr(WorkloadRun, "serve", meddling)
    result = kvsm("--disk-dir", place / "disk", "--log", place / "log")
    assert result.exit_code == 1
    assert result.stdout.count("DIGEST DIFFERS") == 1
