"""Real vLLM, killed with -9 again and again: it goes on with what it has stored, and its tokens are right."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from restarted_engine import KNOWN

from kvsm.core.log import LogReader
from kvsm.events import Restarted, WorkerReported
from kvsm.explain.story import verify_log
from kvsm.tiers.warm_restart import KILLED
from kvsm.vllm.scheduler_side import UNNAMED_WEIGHTS

LIVES = 12
HERE = Path(__file__).parent


class Lives(NamedTuple):
    """What the lives of an engine have said. life 0 is an engine without kvsm.

    differs: in what the disk differs from the log of the life before.
    """

    log: Path
    answers: dict[int, list[dict[str, Any]]]
    kept: dict[int, int]
    differs: dict[int, list[str]]
    statuses: list[dict[str, Any]]


def run_lives(directory: Path, blocks: int, seed: int, lives: int = LIVES, *more: str) -> Lives:
    """Let an engine live on one pool of this number of blocks; all lives but the last are killed."""
    command = [sys.executable, str(HERE / "restarted_engine.py"), "--directory", str(directory)]
    command += ["--lives", str(lives), "--blocks", str(blocks), "--seed", str(seed), *more]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr[-3000:]
    answers, kept, differs, statuses = defaultdict(list), {}, {}, []
    # vLLM's own lines are among them.
    for line in (json.loads(one) for one in ended.stdout.splitlines() if one.startswith("{")):
        if "tokens" in line:
            answers[line["life"]].append(line)
        elif "kept" in line:
            kept[line["life"]], differs[line["life"]] = line["kept"], line["differs"]
        elif "status" in line:
            statuses.append(line)
    assert [one["status"] for one in statuses] == [9] * (lives - 1) + [0], ended.stderr[-3000:]
    return Lives(directory / "engine0", answers, kept, differs, statuses)


def wrong_answers(lives: Lives) -> list[dict[str, Any]]:
    """The answers that differ from those of the engine without kvsm."""
    right = {one["prompt"]: one["tokens"] for one in lives.answers.pop(0)}
    return [one for life in lives.answers.values() for one in life if one["tokens"] != right[one["prompt"]]]


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A directory on tmpfs, which is removed."""
    directory = Path("/dev/shm") / f"kvsm-{tmp_path.parent.name}-{tmp_path.name}"
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.mark.parametrize(("blocks", "seed"), [(400, 1), (60, 2)], ids=["all fits", "evictions"])
def test_an_engine_that_is_killed_goes_on_with_what_it_stored(memory: Path, blocks: int, seed: int) -> None:
    """Correct bytes (S15) and no stale data (S14) over eleven kills, half of them in the middle of a copy.

    All tokens are those of an engine without kvsm. The log is one chain that verifies. If all fits, each life
    finds the prompts that an earlier one has answered, from its first request on.
    """
    lives = run_lives(memory, blocks, seed)
    assert wrong_answers(lives) == []
    assert {one["in_copy"] for one in lives.statuses[:-1]} == {True, False}
    assert max(lives.kept.values()) > 20
    if blocks == 400:
        answered: set[int] = set()
        for life, answers in sorted(lives.answers.items()):
            first = [one for one in answers[: len(KNOWN)] if one["prompt"] in answered]
            assert all(one["cached"] for one in first), (life, first)
            # The last answer's store may not have ended.
            answered |= {one["prompt"] for one in answers[:-1]}
    verified = verify_log(lives.log)
    assert verified.good, verified
    ends = [event.ended for event in LogReader(lives.log).events() if isinstance(event, Restarted)]
    assert set(ends) == {KILLED}
    assert len(ends) <= LIVES - 1, "a life that was killed before its first flush leaves no event"


def test_bytes_that_changed_between_two_lives_are_not_used(memory: Path) -> None:
    """Correct bytes (S15): one bit of each block is flipped after a kill. Each block's first load fails, its
    key is lost, and the request computes it."""
    lives = run_lives(memory, 400, 3, 2, "--flip")
    assert wrong_answers(lives) == []
    assert lives.kept[2] > 20
    failed = [
        event
        for event in LogReader(lives.log).events()
        if isinstance(event, WorkerReported) and not event.good
    ]
    assert failed
    assert all("does not hold what" in event.error for event in failed), failed[0]
    assert verify_log(lives.log).good


def test_weights_that_change_in_place_are_a_new_version(memory: Path) -> None:
    """No stale data (S14): `set_weight_version` forgets what other weights computed. So does a reset."""
    command = [sys.executable, str(HERE / "weights_engine.py"), str(memory)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-3000:]
    lines = [json.loads(one) for one in ended.stdout.splitlines() if one.startswith("{")]
    told = {one["after"]: (one["cached"] > 0, one["weights"]) for one in lines}
    assert told == {
        "start": (False, "v1"),
        "reset of the device": (True, "v1"),
        "reset": (False, UNNAMED_WEIGHTS),
        "new weights": (False, "v2"),
        "new weights, again": (True, "v2"),
    }


@pytest.mark.slow
def test_an_engine_whose_worker_is_killed_alone_comes_back_warm(memory: Path) -> None:
    """Two ranks, of which one is killed: vLLM ends by that. The next engine waits for the end of the other
    one, and both pools are warm."""
    lives = run_lives(memory, 400, 5, 2, "--ranks", "2")
    assert wrong_answers(lives) == []
    assert all(one["cached"] for one in lives.answers[2][: len(KNOWN)])
    assert verify_log(lives.log).good
