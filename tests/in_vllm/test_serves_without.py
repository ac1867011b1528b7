"""An engine whose disk tier or hand-overs cannot be used serves without them, with one warning, and a metric
of each."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from real_scheduler import Engine
from scheduler_shapes import BLOCK_BYTES, Shape
from test_disaggregated import PROMPT, Pair
from test_last_step import all_answers

from kvsm.errors import ConfigError, UnusableFiles
from kvsm.tiers.disk import DiskGeometry
from kvsm.vllm import engine_disk, hand_overs, worker_side

SHAPE = Shape(shards=2, host_blocks=160)
SIZE = DiskGeometry(BLOCK_BYTES, 40).file_bytes * SHAPE.ranks


@contextmanager
def heard() -> Iterator[list[str]]:
    """The warnings of the scheduler's side. Each worker has its own."""
    lines: list[str] = []
    with (
        patch.object(engine_disk, "log", _Log(lines)),
        patch.object(hand_overs, "log", _Log(lines)),
        patch.object(worker_side, "log", _Log([])),
    ):
        yield lines


class _Log:
    def __init__(self, lines: list[str]) -> None:
        self._lines = lines

    def warning(self, text: str, *values: object) -> None:
        self._lines.append(text % values)

    def info(self, *_: object) -> None:
        pass

    error = warning


def file_in_the_way(directory: Path, _: pytest.MonkeyPatch) -> None:
    directory.write_text("a file")


def no_parent(directory: Path, _: pytest.MonkeyPatch) -> None:
    directory.parent.rmdir()


def writable_for_all(directory: Path, _: pytest.MonkeyPatch) -> None:
    directory.mkdir()
    directory.chmod(0o777)


def a_link_for_one_rank(directory: Path, _: pytest.MonkeyPatch) -> None:
    directory.mkdir(mode=0o700)
    (directory / "engine0-rank1").symlink_to("elsewhere")


def full(_: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", no_room)


def read_only(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory.mkdir(mode=0o700)
    make = os.open

    def refuse(path: Any, flags: int, *more: Any, **options: Any) -> int:
        if str(path).startswith(str(directory)) and flags & (os.O_RDWR | os.O_WRONLY):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return make(path, flags, *more, **options)

    monkeypatch.setattr(os, "open", refuse)


FAULTS: list[Callable[[Path, pytest.MonkeyPatch], None]] = [
    file_in_the_way,
    no_parent,
    writable_for_all,
    a_link_for_one_rank,
    full,
    read_only,
]


def served(engine: Engine) -> None:
    """The engine answers, and the host serves what it has stored."""
    for _ in range(2):
        engine.arrive(0, 40, 3, 2)
        all_answers(engine)
    engine.drain()
    assert engine._core.metrics.values()["blocks_stored"] > 5


def missing_parts(engine: Engine) -> dict[str, int]:
    side = engine.scheduler.connector._side
    return dict(side._counts_beside_events()["serves_without"])


@pytest.mark.parametrize("fault", FAULTS)
def test_an_engine_without_a_usable_disk_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[[Path, pytest.MonkeyPatch], None]
) -> None:
    directory = tmp_path / "parent" / "tier"
    directory.parent.mkdir()
    fault(directory, monkeypatch)
    with heard() as lines:
        engine = Engine(SHAPE._replace(extra={"disk_dir": str(directory), "disk_bytes": SIZE}), seed=3)
    (line,) = lines
    assert line.startswith("kvsm: the engine serves without its disk tier (disk_dir): ")
    assert str(directory) in line
    assert "give another" in line
    assert missing_parts(engine) == {"disk": 1, "hand_over": 0}
    served(engine)
    assert "disk_blocks" not in engine.scheduler.connector._side._counts_beside_events()
    if directory.is_dir():
        engine.reset_host()
    else:
        with pytest.raises(UnusableFiles, match=r"cannot be invalidated: .* reset once more"):
            engine.reset_host()
        served(engine)
    engine.close()


def test_a_reset_without_the_disk_voids_what_is_on_it(tmp_path: Path) -> None:
    """No stale data (S14): one rank's file cannot be used for one life, in which the cache is reset."""
    directory = tmp_path / "tier"
    shape = SHAPE._replace(extra={"disk_dir": str(directory), "disk_bytes": SIZE})

    def life(*, resets: bool = False) -> int:
        engine = Engine(shape, seed=3)
        below = engine.scheduler.connector._side._disk
        found = 0 if below is None else len(below.tier.disk.ledger.index)
        for rank in engine.ranks:
            rank.connector._side.pause = lambda _: None
        served(engine)
        if resets:
            engine.reset_host()
        engine.close()
        return found

    assert life() == 0
    assert life() > 0
    rank1 = directory / "engine0-rank1"
    for resets, is_warm in ((False, True), (True, False)):
        rank1.rename(directory / "aside")
        rank1.symlink_to("elsewhere")
        life(resets=resets)
        rank1.unlink()
        (directory / "aside").rename(rank1)
        assert (life() > 0) == is_warm


def test_copies_of_a_rank_that_has_no_disk_fail(tmp_path: Path) -> None:
    """Liveness: a scheduler that does not know this plans copies. They fail, and the engine comes to rest."""
    shape = SHAPE._replace(extra={"disk_dir": str(tmp_path / "tier"), "disk_bytes": SIZE})
    engine = Engine(shape, seed=3)
    worker = engine.ranks[1].connector._side
    worker._disk.close()
    worker._disk = None
    served(engine)
    counts = engine.scheduler.connector._side._disk.counts()
    assert counts["disk_blocks_stored"] == 0
    assert counts["disk_blocks_not_stored"] > 0
    engine.close()


def test_two_engines_on_one_disk_are_refused(tmp_path: Path) -> None:
    """A mistake in the configuration, and no fault of the system."""
    shape = SHAPE._replace(extra={"disk_dir": str(tmp_path / "tier"), "disk_bytes": SIZE})
    engine = Engine(shape, seed=3)
    with pytest.raises(ConfigError, match="is in use by"):
        Engine(shape, seed=4)
    engine.close()


@pytest.mark.parametrize("fault", [file_in_the_way, no_parent, writable_for_all])
def test_engines_without_a_usable_hand_over_directory_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[[Path, pytest.MonkeyPatch], None]
) -> None:
    directory = tmp_path / "parent" / "meet"
    directory.parent.mkdir()
    fault(directory, monkeypatch)
    for role in ("kv_producer", "kv_consumer"):
        extra = {"hand_over_directory": str(directory)}
        with heard() as lines:
            engine = Engine(Shape(role=role, extra=extra), seed=3)
        (line,) = lines
        assert line.startswith("kvsm: the engine serves without hand-overs (hand_over_directory): ")
        assert str(directory) in line
        assert "give another" in line
        assert missing_parts(engine) == {"disk": 0, "hand_over": 1}
        name = engine.ask(PROMPT, 2, {"do_remote_decode": role == "kv_producer"})
        all_answers(engine)
        assert engine.handed[name] is None
        served(engine)
        engine.close()


@pytest.fixture
def meeting_place() -> Iterator[Path]:
    """Not `tmp_path`: the path of a socket must be short."""
    with TemporaryDirectory(prefix="kvsm-test-") as place:
        yield Path(place, "m")


def test_an_engine_that_cannot_bind_its_socket_serves(
    meeting_place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes hand-overs if it is a decode engine, too, and gives none."""

    class Refusing(socket.socket):
        def bind(self, _: Any) -> None:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as patched:
        patched.setattr("kvsm.tiers.hand_over.service.socket.socket", Refusing)
        with heard() as lines:
            engine = Engine(Shape(extra={"hand_over_directory": str(meeting_place)}), seed=3)
    (line,) = lines
    assert "a socket cannot be made: Permission denied; make its directory writable" in line
    side = engine.scheduler.connector._side
    assert (side._outgoing, side._service, side._incoming is None) == (None, None, False)
    assert missing_parts(engine) == {"disk": 0, "hand_over": 1}
    served(engine)
    engine.close()


def test_a_prefill_engine_whose_pool_has_no_file_serves(
    meeting_place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small /dev/shm, as in a container: its hand-overs fail, and the decode engine computes the prompt."""
    full(meeting_place, monkeypatch)
    pair = Pair(meeting_place, Shape(role="kv_producer"), Shape(role="kv_consumer"))
    assert pair.decoded(PROMPT, pair.prefilled(PROMPT)) == 0
    pair.close()
