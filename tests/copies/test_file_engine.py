"""The file engine: what is on the disk when a store has ended, and what a file may not be.

Its promises as a copy engine are tested in test_copy_engines.py and stateful/test_copies.py.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from copy_rigs import Bytes, finish, load, random_bytes, random_pools, store

from kvsm.copies import FileCopyEngine, VerifyingCopyEngine
from kvsm.copies import file as file_module
from kvsm.errors import ConfigError

BLOCK_BYTES = 3


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "pool"


@pytest.fixture
def device() -> list[Bytes]:
    return random_pools(40, BLOCK_BYTES)[0]


def test_a_store_is_good_only_after_its_bytes_were_synced(
    path: Path, device: list[Bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Failure is not success (S6): the bytes are in the file when `fdatasync` is called, and the result
    comes after that."""
    order: list[Any] = []
    fdatasync = os.fdatasync

    def recorded(descriptor: int) -> None:
        order.append((np.fromfile(path, np.uint8)[:BLOCK_BYTES].tolist(), engine.poll()))
        fdatasync(descriptor)

    monkeypatch.setattr(file_module.os, "fdatasync", recorded)
    with closing(FileCopyEngine(device, path, 40)) as engine:
        engine.submit(store(1, [7], [0]))
        (result,) = finish(engine, [1])
        assert order == [(device[0][7].tolist(), [])]
        assert result.good
        engine.submit(load(2, [8], [0]))
        assert finish(engine, [2])[0].good
    assert len(order) == 1


@pytest.mark.parametrize("call", ["fdatasync", "pwritev", "preadv"])
def test_an_error_of_the_disk_makes_the_transfer_bad_and_names_the_file(
    path: Path, device: list[Bytes], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Failure is not success (S6): the engine goes on, and the next transfer is good."""

    def refused(*_: Any) -> int:
        raise OSError(5, "Input/output error")

    make = load if call == "preadv" else store
    with closing(FileCopyEngine(device, path, 40)) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(file_module.os, call, refused)
            engine.submit(make(1, [7], [0]))
            (result,) = finish(engine, [1])
        assert (result.good, result.error) == (False, f"{path}: Input/output error")
        engine.submit(make(2, [7], [0]))
        assert finish(engine, [2])[0].good


@pytest.mark.parametrize(("call", "make"), [("pwritev", store), ("preadv", load)])
def test_a_call_that_copies_less_makes_the_transfer_bad(
    path: Path, device: list[Bytes], monkeypatch: pytest.MonkeyPatch, call: str, make: Any
) -> None:
    """Failure is not success (S6): a full disk, or a file that somebody cut."""
    whole = getattr(os, call)

    def partly(descriptor: int, buffers: Sequence[Any], offset: int) -> int:
        return int(whole(descriptor, buffers[:1], offset))

    monkeypatch.setattr(file_module.os, call, partly)
    with closing(FileCopyEngine(device, path, 40)) as engine:
        engine.submit(make(1, [4, 5], [0, 1]))
        (result,) = finish(engine, [1])
    assert (result.good, result.error) == (False, f"{path}: only 3 of 6 bytes were copied")


def test_a_run_of_blocks_is_one_call_up_to_what_the_system_takes(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    pwritev = os.pwritev

    def counted(descriptor: int, buffers: Sequence[Any], offset: int) -> int:
        calls.append(len(buffers))
        return pwritev(descriptor, buffers, offset)

    monkeypatch.setattr(file_module.os, "pwritev", counted)
    monkeypatch.setattr(file_module, "MOST_BUFFERS", 8)
    tensors = [random_bytes(40, width, width) for width in (3, 5)]
    with closing(FileCopyEngine(tensors, path, 40)) as engine:
        engine.submit(store(1, [*range(10, 20), 3], [*range(10), 30]))
        assert finish(engine, [1])[0].good
    assert calls == [8, 8, 4, 2]
    rows = np.fromfile(path, np.uint8).reshape(40, 8)
    assert np.array_equal(rows[:10], np.hstack([one[10:20] for one in tensors]))


def test_the_bytes_outlive_the_engine(path: Path, device: list[Bytes]) -> None:
    """Block b is row b of the file, and the next engine on it loads what this one stored."""
    with closing(FileCopyEngine(device, path, 40)) as engine:
        engine.submit(store(1, [2, 3], [38, 39]))
        assert finish(engine, [1])[0].good
    assert path.stat().st_size == 40 * BLOCK_BYTES
    target = [np.zeros_like(device[0])]
    with closing(FileCopyEngine(target, path, 40)) as engine:
        engine.submit(load(1, [0, 1], [38, 39]))
        assert finish(engine, [1])[0].good
    assert np.array_equal(target[0][:2], device[0][2:4])


def test_a_verifying_engine_finds_what_changed_in_the_file(path: Path, device: list[Bytes]) -> None:
    """Correct bytes (S15): `blocks` shows the file as it is now."""
    inner = FileCopyEngine(device, path, 40)
    with closing(VerifyingCopyEngine(inner, inner.blocks, device)) as engine:
        engine.submit(store(1, [2], [5]))
        assert finish(engine, [1])[0].good
        with path.open("r+b") as file:
            file.seek(5 * BLOCK_BYTES)
            file.write(bytes(one ^ 255 for one in device[0][2]))
        engine.submit(load(2, [2], [5]))
        (result,) = finish(engine, [2])
    assert not result.good
    assert "host block 5 does not hold what was stored" in result.error


def test_a_file_of_another_size_is_refused_and_kept(path: Path, device: list[Bytes]) -> None:
    path.write_bytes(b"somebody's letters")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=r"pool: has 18 bytes, and this host pool 120"):
        FileCopyEngine(device, path, 40)
    assert path.read_bytes() == b"somebody's letters"


def test_a_file_belongs_to_one_engine_until_that_is_closed(path: Path, device: list[Bytes]) -> None:
    """Two ranks that are given one path must not overwrite each other's blocks."""
    with (
        closing(FileCopyEngine(device, path, 40)),
        pytest.raises(ConfigError, match="pool: is in use by another copy engine"),
    ):
        FileCopyEngine(device, path, 40)
    FileCopyEngine(device, path, 40).close()


def test_a_path_that_cannot_be_opened_is_told(tmp_path: Path, device: list[Bytes]) -> None:
    with pytest.raises(ConfigError, match="none/pool: cannot be opened for a host pool: No such file"):
        FileCopyEngine(device, tmp_path / "none" / "pool", 40)


def test_a_disk_without_room_is_told(
    path: Path, device: list[Bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(file_module.os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match="pool: no room for 120 bytes: No space left"):
        FileCopyEngine(device, path, 40)
    assert not path.exists()
    path.touch(mode=0o600)
    with pytest.raises(ConfigError, match="no room"):
        FileCopyEngine(device, path, 40)
    assert path.exists(), "this engine did not make it"


def test_a_file_that_another_engine_takes_first_is_not_removed(
    path: Path, device: list[Bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the making of the file and its lock, another engine may come."""
    lock, others = fcntl.flock, []

    def late(file: Any, kind: int) -> None:
        monkeypatch.setattr(file_module.fcntl, "flock", lock)
        others.append(FileCopyEngine(device, path, 40))
        lock(file, kind)

    monkeypatch.setattr(file_module.fcntl, "flock", late)
    with pytest.raises(ConfigError, match="pool: is in use by another copy engine"):
        FileCopyEngine(device, path, 40)
    assert path.exists()
    others[0].close()


def test_a_file_that_is_replaced_while_it_is_opened_is_refused(
    path: Path, device: list[Bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the engine would store to one file, and verify another."""

    def replaced(_descriptor: int, _offset: int, size: int) -> None:
        path.unlink()
        path.write_bytes(bytes(size))

    monkeypatch.setattr(file_module.os, "posix_fallocate", replaced)
    with pytest.raises(ConfigError, match="pool: was replaced by another file"):
        FileCopyEngine(device, path, 40)
    assert path.exists()


def test_a_refused_engine_leaves_the_file_free(path: Path, device: list[Bytes]) -> None:
    with pytest.raises(ConfigError, match="threads is 0"):
        FileCopyEngine(device, path, 40, threads=0)
    FileCopyEngine(device, path, 40).close()


def test_a_crash_of_the_process_leaves_what_was_stored(path: Path) -> None:
    """A process that is killed right after a good result has its bytes in the file."""
    program = (
        "import os, sys, numpy as np\n"
        "from kvsm.copies import FileCopyEngine\n"
        "from kvsm.events import Direction\n"
        "from kvsm.core.plan import TransferJob\n"
        "engine = FileCopyEngine(np.full((2, 4), 7, np.uint8), sys.argv[1], 2)\n"
        "engine.submit(TransferJob(1, Direction.STORE, (0,), (1,)))\n"
        "engine.wait([1])\n"
        "assert engine.poll()[0].good\n"
        "os.kill(os.getpid(), 9)\n"
    )
    assert subprocess.run([sys.executable, "-c", program, str(path)], check=False).returncode == -9
    assert path.read_bytes() == bytes(4) + bytes([7] * 4)
