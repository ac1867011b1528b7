"""Real vLLM with a disk tier, killed with -9 again and again: the host pool is lost each time, and the disk
brings the hits."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import numpy as np
from click.testing import CliRunner
from disk_rig import DISK_IDENTITY, GEOMETRY, PAYLOAD, SLOTS, job
from published_events import folded_kv_events, readable
from restarted_engine import KNOWN
from test_warm_restart import Lives, run_lives, wrong_answers
from workloads import TIGHT, TIMEOUT_S, Row, make_trial

import kvsm
from kvsm.cli import main
from kvsm.core.kv_events import MEDIUM_CPU, MEDIUM_STORAGE
from kvsm.core.log import LogReader
from kvsm.core.plan import WorkerReport
from kvsm.errors import UnusableFiles
from kvsm.events import Direction, LoadPlanned
from kvsm.explain.other_tier import other_tier
from kvsm.explain.story import rebuild, verify_log
from kvsm.identity import PoolIdentity
from kvsm.tiers.disk import FlushPolicy, SlotFile, TierFiles
from kvsm.vllm.rank_disk import RankDisk
from kvsm.vllm.tiny_model import LLAMA
from kvsm.vllm.trial import connector_config, run_trial

HERE = Path(__file__).parent


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """Yield a directory on a disk, and remove it afterwards."""
    made = tmp_path / "tier"
    yield made
    shutil.rmtree(made, ignore_errors=True)


def check_logs(directory: Path, lives: int) -> None:
    """Check the two logs of each life, one for each tier. All of them verify, and the two of a life agree on
    each copy between the tiers. Blocks were loaded from the disk."""
    logs = sorted((directory / "logs").iterdir())
    assert len([log for log in logs if "-disk-" in log.name]) == lives
    assert len(logs) == 2 * lives
    for log in logs:
        check_log(log)
    of_disk = [event for log in logs if "-disk-" in log.name for event in LogReader(log).events()]
    assert any(isinstance(event, LoadPlanned) for event in of_disk)


def check_log(log: Path) -> None:
    """Check that `kvsm verify` finds no problem in this log, in the other tier's log, or between them."""
    result = CliRunner().invoke(main, ["verify", str(log), "--json"])
    assert result.exit_code == 0, result.output
    other = json.loads(result.stdout)["other_tier"]
    assert other["agreement"]["steps"] > 0, (log, other["agreement"])
    assert other["agreement"]["difference"] is None


def check_hits(lives: Lives, kept: int = 20) -> None:
    """From its first requests on, a life finds prompts of the lives before it. kept: the last one finds
    more blocks than this.

    A request waits for a slow disk no longer than for any block in flight, and then computes. So on a busy
    machine not every life must do so.
    """
    assert lives.kept[max(lives.answers)] > kept
    first = [one for life, answers in lives.answers.items() if life > 1 for one in answers[: len(KNOWN)]]
    assert any(one["cached"] for one in first), first


def test_an_engine_that_is_killed_finds_on_disk_what_it_stored(directory: Path) -> None:
    """Correct bytes (S15) and no stale data (S14) on two tiers, over five kills, some in mid-copy. The slots
    that a life finds agree with the log of the life before."""
    lives = run_lives(directory, 30, 4, 6, "--disk", "400")
    assert wrong_answers(lives) == []
    assert not any(lives.differs.values())
    check_hits(lives)
    check_logs(directory, 6)


def test_a_disk_that_is_smaller_than_what_is_stored_evicts(directory: Path) -> None:
    """The same with evictions on both tiers."""
    lives = run_lives(directory, 20, 5, 3, "--disk", "60")
    assert wrong_answers(lives) == []
    assert not any(lives.differs.values())
    assert 0 < lives.kept[max(lives.kept)] <= 60
    check_logs(directory, 3)


def test_write_back_stores_what_host_memory_evicts(directory: Path) -> None:
    """Correct bytes (S15) with write-back: later lives find on disk what host memory had evicted. How
    much that is depends on how much a life has answered when it is killed."""
    lives = run_lives(directory, 30, 6, 3, "--disk", "400", "--disk-write", "back")
    assert wrong_answers(lives) == []
    check_hits(lives, kept=8)
    check_logs(directory, 3)


def test_a_pool_that_is_kept_goes_on_with_its_disk(directory: Path) -> None:
    """Pool and disk outlive each process. The log of the host's tier is one chain. Without `event_log` the
    disk has no log, and a message says so."""
    lives = run_lives(directory, 60, 7, 3, "--disk", "400", "--keep-pool")
    assert wrong_answers(lives) == []
    assert ["it kept no log" in line for line in lives.differs[3]] == [True]
    assert verify_log(directory / "engine0").good


def test_kv_events_tell_what_each_tier_has(directory: Path, tmp_path: Path) -> None:
    """Events are state (S10): a router that folds KV events has the blocks of host memory and of the disk,
    with evictions on both, and from the first event of a life also the blocks of earlier lives. The log of
    each tier leads to the other log by its name."""
    for life in (1, 2):
        notes = tmp_path / f"life{life}"
        notes.mkdir()
        transfer = connector_config(
            cpu_bytes_to_use=TIGHT, disk_dir=str(directory), disk_bytes=2 * TIGHT, event_log=str(notes)
        ) | {"kv_connector": "WatchedConnector", "kv_connector_module_path": "watched"}
        events = {"kv_events_config": {"enable_kv_cache_events": True}}
        run_trial(
            make_trial(dict(LLAMA), Row(host_bytes=TIGHT), kv_transfer=transfer, engine=events), TIMEOUT_S
        )
        logs = {"-disk-" in path.name: path for path in notes.iterdir() if path.is_dir()}
        for of_disk, log in logs.items():
            with kvsm.open(log) as opened:
                assert other_tier(opened) == ("host" if of_disk else "disk", logs[not of_disk], True)
            check_log(log)
        for of_disk, medium in ((False, MEDIUM_CPU), (True, MEDIUM_STORAGE)):
            found = readable(rebuild(logs[of_disk]).ledger, whole=False)
            assert len(found) > 20
            assert folded_kv_events(notes, medium) == found


class Place(TierFiles):
    """The files of a disk tier of one rank."""

    num_slots = SLOTS

    def open_rank(self, rank: int, identity: PoolIdentity) -> SlotFile:
        return self.open_slots(rank, GEOMETRY, identity)


def test_copies_fail_and_the_worker_goes_on_if_what_was_decided_cannot_be_read(tmp_path: Path) -> None:
    """An engine continues when its disk vanishes. When the disk is back, copies are made again."""
    place: Any = Place(tmp_path, "engine0", 1)
    rank = RankDisk(place, 0, DISK_IDENTITY, np.ones((4, PAYLOAD), np.uint8), 1, FlushPolicy.NONE, None)
    rank.start([job(1, Direction.STORE, [0], [0], [5])])
    (refused,) = rank.poll()
    assert not refused.good
    assert "No such file" in refused.error
    place.decide("v1", SLOTS)
    rank.start([job(2, Direction.STORE, [0], [0], [5])])
    reports: list[WorkerReport] = []
    while not reports:
        reports = rank.poll()
    rank.close()
    assert [(one.transfer, one.good) for one in reports] == [(2, True)]


def test_ranks_that_have_told_nothing_are_an_error_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UnusableFiles, match=r"rank 0 has no slots there; .* on another machine: then omit"):
        TierFiles(tmp_path, "engine0", 1).decide("v1", SLOTS)


def test_nothing_of_other_weights_or_of_before_a_reset_comes_back(directory: Path) -> None:
    """No stale data (S14) for later processes. Blocks of the weights v1 are not served when v1 returns,
    because v2 has begun another era."""
    lives = ["v1", "v1", "v2", "v1", "v1+reset", "v1"]
    command = [sys.executable, str(HERE / "disk_weights_engine.py"), str(directory), *lives]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr[-3000:]
    told = [json.loads(one) for one in ended.stdout.splitlines() if one.startswith("{")]
    assert [one["life"] for one in told] == lives
    assert [one["cached"] > 0 for one in told] == [False, True, False, False, True, False]
    assert all(one["held"] for one in told)


@pytest.mark.slow
def test_two_ranks_find_on_disk_what_both_have_stored(directory: Path) -> None:
    """One worker of two is killed alone in each life. A block counts only if it is on the disk of both."""
    lives = run_lives(directory, 30, 6, 3, "--disk", "400", "--ranks", "2")
    assert wrong_answers(lives) == []
    check_hits(lives)
