"""The choice of a path: the fastest one in the nearest measured cell. A file is trusted only if it is
valid.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsm.cuda_io.paths import (
    FRAGMENT_BYTES,
    KERNEL_HANDICAP,
    MEASURED_BYTES,
    NEARLY_AS_FAST,
    RECTANGLE_ROWS,
    CopyPath,
    PathTable,
    TableDevice,
    ThreadBlocks,
    fewest_thread_blocks,
)
from kvsm.errors import ConfigError
from kvsm.events import Direction

ALL = tuple(CopyPath)
H200 = TableDevice("NVIDIA H200", 12080)
BLOCKS = ThreadBlocks(2, 3)


def random_seconds(path: CopyPath, direction: Direction, fragment_bytes: int, count: int) -> float:
    return Random(f"{path.name} {direction.name} {fragment_bytes} {count}").random()


RANDOM = PathTable.measured(random_seconds, ALL, H200, BLOCKS)

directions = st.sampled_from(Direction)
sizes = st.integers(0, 64 << 20)
counts = st.integers(0, 1 << 18)


def cell_below(fragment_bytes: int, count: int) -> tuple[int, int]:
    """The nearest measured cell, found by looking at all of them."""
    size = max((one for one in FRAGMENT_BYTES if one <= fragment_bytes), default=FRAGMENT_BYTES[0])
    measured = [1 << power for power in range(40) if size << power <= MEASURED_BYTES]
    return size, max((one for one in measured if one <= count), default=1)


@given(directions, sizes, counts, counts)
def test_chosen_path_is_the_fastest_of_the_cell_below(
    direction: Direction, fragment_bytes: int, count: int, rectangles: int
) -> None:
    cell = cell_below(fragment_bytes, count)
    took = {path: random_seconds(path, direction, *cell) for path in ALL}
    took[CopyPath.KERNEL] *= KERNEL_HANDICAP
    if count < rectangles * RECTANGLE_ROWS:
        del took[CopyPath.PITCHED]
    assert RANDOM.choose(direction, fragment_bytes, count, rectangles) == min(took, key=lambda one: took[one])


@given(st.sets(st.sampled_from(ALL)), directions, sizes, counts)
def test_only_the_available_paths_are_chosen(
    available: set[CopyPath], direction: Direction, fragment_bytes: int, count: int
) -> None:
    if not available - {CopyPath.PITCHED}:
        with pytest.raises(ConfigError, match=r"one of them not pitched; there are: (pitched|none)"):
            RANDOM.only(tuple(available))
        return
    assert RANDOM.only(tuple(available)).choose(direction, fragment_bytes, count, 0) in available


def test_measuring_takes_each_cell_once_for_each_available_path_and_keeps_to_its_limit() -> None:
    asked = []

    def seconds(path: CopyPath, direction: Direction, fragment_bytes: int, count: int) -> float:
        asked.append((path, direction, fragment_bytes, count))
        return 1.0

    available = (CopyPath.KERNEL, CopyPath.BATCH)
    PathTable.measured(seconds, available, H200, BLOCKS)
    powers = [1 << power for power in range(40)]
    cells = [(size, count) for size in FRAGMENT_BYTES for count in powers if size * count <= MEASURED_BYTES]
    expected = [
        (path, direction, *cell) for path, direction, cell in itertools.product(available, Direction, cells)
    ]
    assert sorted(asked, key=repr) == sorted(expected, key=repr)


@given(st.lists(st.floats(1e-3, 1.0), min_size=1, max_size=8))
def test_a_kernel_has_no_more_thread_blocks_than_its_speed_needs(took: list[float]) -> None:
    """Each one takes a multiprocessor from compute."""
    blocks = fewest_thread_blocks(lambda number: took[number - 1], len(took))
    assert took[blocks - 1] * NEARLY_AS_FAST <= min(took)
    assert all(each * NEARLY_AS_FAST > min(took) for each in took[: blocks - 1])


@pytest.mark.parametrize(
    ("kernel_seconds", "expected"), [(0.95, CopyPath.BATCH), (1.0, CopyPath.BATCH), (0.85, CopyPath.KERNEL)]
)
def test_kernel_must_be_clearly_faster(kernel_seconds: float, expected: CopyPath) -> None:
    """The kernel takes multiprocessors from compute."""
    took = {CopyPath.BATCH: 1.0, CopyPath.KERNEL: kernel_seconds}
    table = PathTable.measured(lambda path, *_: took[path], tuple(took), H200, None)
    assert table.choose(Direction.STORE, 4096, 1000, 1000) is expected


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize(
    ("fragment_bytes", "count", "rectangles", "expected"),
    [
        (4 << 10, 131_072, 131_072, CopyPath.KERNEL),
        (64 << 10, 4096, 4096, CopyPath.KERNEL),
        (256 << 10, 4096, 4096, CopyPath.BATCH),
        (2 << 20, 4096, 4096, CopyPath.BATCH),
        (4 << 10, 1, 1, CopyPath.BATCH),
        (64 << 10, 131_072, 4096, CopyPath.PITCHED),
    ],
    ids=("small and many", "64 KiB", "256 KiB", "large", "one", "layers at even distances"),
)
def test_default_follows_from_costs(
    direction: Direction, fragment_bytes: int, count: int, rectangles: int, expected: CopyPath
) -> None:
    assert PathTable.default().choose(direction, fragment_bytes, count, rectangles) is expected


def test_default_on_an_older_driver_goes_run_by_run() -> None:
    table = PathTable.default().only((CopyPath.RUNS, CopyPath.PITCHED))
    assert table.choose(Direction.LOAD, 64 << 10, 100, 100) is CopyPath.RUNS


def test_saved_table_comes_back(tmp_path: Path) -> None:
    file = tmp_path / "paths.json"
    PathTable.default().save(file)
    RANDOM.save(file)
    assert PathTable.load(file, H200) == RANDOM
    assert list(tmp_path.iterdir()) == [file]


def test_failed_save_leaves_the_table_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "paths.json"
    RANDOM.save(file)

    def fail(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="no space left"):
        PathTable.default().save(file)
    assert PathTable.load(file, H200) == RANDOM
    assert list(tmp_path.iterdir()) == [file]


def test_missing_file_is_told_from_a_wrong_one(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        PathTable.load(tmp_path / "paths.json", H200)


def changed(**changes: object) -> bytes:
    return msgspec.json.encode({**msgspec.to_builtins(RANDOM), **changes})


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (b"", "is no path table for this device: Input data was truncated; delete the file"),
        (b"\xff\x00", "JSON is malformed"),
        (changed()[:-2], "truncated"),
        (changed(version=1), "it has version 1, this release reads 2"),
        (
            changed(device=("NVIDIA H200", 12060)),
            "it is for NVIDIA H200, driver 12060, the device is NVIDIA H200, driver 12080",
        ),
        (changed(thread_blocks=(0, 1)), "the copy kernel has 0 thread blocks, it needs one"),
        (changed(stores=RANDOM.stores[:-1]), "cells are missing, or too many"),
        (changed(loads=(RANDOM.loads[0][:-1], *RANDOM.loads[1:])), "cells are missing, or too many"),
        (changed(stores=[[["teleport"]]]), "Invalid enum value 'teleport'"),
        (changed(more=1), "unknown field `more`"),
        (msgspec.json.encode(msgspec.to_builtins(PathTable.default())), "it is for not measured, driver 0"),
    ],
)
def test_file_that_is_damaged_or_foreign_is_refused(tmp_path: Path, written: bytes, message: str) -> None:
    file = tmp_path / "paths.json"
    file.write_bytes(written)
    with pytest.raises(ConfigError, match=message) as caught:
        PathTable.load(file, H200)
    assert str(file) in str(caught.value)
    assert "delete the file" in str(caught.value)


@pytest.mark.parametrize("ranking", [[], ["pitched"], ["batch", "kernel", "batch"]])
def test_file_with_a_cell_that_cannot_be_used_is_refused(tmp_path: Path, ranking: list[str]) -> None:
    file = tmp_path / "paths.json"
    stores = msgspec.json.decode(changed())["stores"]
    stores[3][2] = ranking
    file.write_bytes(changed(stores=stores))
    with pytest.raises(ConfigError, match="copies need distinct paths"):
        PathTable.load(file, H200)
