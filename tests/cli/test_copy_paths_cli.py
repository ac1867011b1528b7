"""`kvsm copy-paths`: the measured table of a GPU, as text and as JSON; without a GPU it says so."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from unittest.mock import Mock

import pytest
from click.testing import CliRunner, Result
from cuda_rig import has_gpu, usable_fake
from hypothesis import given
from hypothesis import strategies as st

from kvsm.cli import copy_paths as command
from kvsm.cli import main
from kvsm.cuda_io import copier, driver, paths
from kvsm.cuda_io.paths import CopyPath, PathTable, TableDevice
from kvsm.errors import ConfigError
from kvsm.events import Direction


def answer(*words: str) -> Result:
    return CliRunner().invoke(main, ["copy-paths", *words])


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The fake driver, measured quickly. Returns the cache file."""
    usable_fake()
    for module in (copier, paths):
        monkeypatch.setattr(module, "MEASURED_BYTES", 1 << 14)
    monkeypatch.setattr(paths, "FRAGMENT_BYTES", (1 << 10, 1 << 12))
    monkeypatch.setattr(copier, "FEW_BYTES", 1 << 10)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return copier.table_file(TableDevice("Fake GPU", 13000))


def test_it_shows_the_table_that_engines_use(quick: Path) -> None:
    told = json.loads(answer("--json").stdout)
    table = PathTable.load(quick, TableDevice("Fake GPU", 13000))
    assert (told["device"], told["driver_version"], told["file"]) == ("Fake GPU", 13000, str(quick))
    assert told["is_measured"]
    assert [told["store_thread_blocks"], told["load_thread_blocks"]] == list(table.thread_blocks or ())
    for each in told["stores"]:
        path = table.choose(Direction.STORE, each["fragment_bytes"], each["from_count"], 0)
        assert path.value == each["path"]
    text = answer().stdout
    assert "Fake GPU, driver 13000: measured" in text
    assert "thread blocks of the copy kernel: at most 1 to store, 1 to load" in text


def test_it_measures_again_only_if_asked(quick: Path) -> None:
    answer()
    first = quick.stat().st_mtime_ns
    answer()
    assert quick.stat().st_mtime_ns == first
    assert answer("--measure").exit_code == 0
    assert quick.stat().st_mtime_ns > first


def test_a_guessed_table_is_called_a_guess(quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick.parent.mkdir()
    monkeypatch.setattr(copier, "cached_path_table", lambda *_: PathTable.default())
    assert "guessed, because it could not be measured" in answer().stdout
    assert not json.loads(answer("--json").stdout)["is_measured"]


@pytest.mark.parametrize("words", [(), ("--measure",)])
def test_a_table_that_could_not_be_written_is_not_called_cached(quick: Path, words: tuple[str, ...]) -> None:
    """Both answers named a file that was not there."""
    quick.parent.symlink_to("/proc")  # where not even root can write
    text = answer(*words).stdout
    assert ("not cached" in text, "cached in" in text) == (True, False)
    told = json.loads(answer(*words, "--json").stdout)
    assert (told["is_measured"], told["file"]) == (True, None)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("device", [-1, 1])
def test_a_gpu_that_is_not_there_is_named(device: int) -> None:
    result = answer("--device", str(device))
    why = f"device {device} is asked for, and the driver shows 1 NVIDIA GPUs"
    assert (result.exit_code, why in result.output) == (2, True)


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    if has_gpu():
        pytest.skip("there is a GPU")
    why = "the CUDA copy engine needs an NVIDIA GPU"
    monkeypatch.setattr(driver, "bindings", Mock(side_effect=ConfigError(why)))
    result = answer()
    assert (result.exit_code, why in result.output) == (2, True)


rankings = st.permutations(list(CopyPath)).map(tuple)


@given(st.lists(rankings, min_size=1, max_size=8))
def test_ranges_say_what_the_cells_say(row: list[tuple[CopyPath, ...]]) -> None:
    ranges = command._ranges((tuple(row),))
    for place, count in product(range(len(row)), (0, 1)):
        amount = (1 << place) + count * ((1 << place) - 1)  # the least and the most of a cell
        (found,) = [
            one
            for one in ranges
            if one.from_count <= amount <= (amount if one.to_count is None else one.to_count)
        ]
        assert [found.path, *found.otherwise] == [path.value for path in row[place]]
    assert ranges[-1].to_count is None
