"""The logs of a directory: which are listed, and which are deleted to keep the limit of all starts."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from kvsm.cli import main
from kvsm.cli.logs import LogsAnswer
from kvsm.core.log.past_logs import delete_past_logs, logs_in
from kvsm.core.offloader import Offloader
from kvsm.errors import ConfigError
from kvsm.events import OffloadConfig
from kvsm.identity import KeptPools, PoolIdentity
from kvsm.tiers.warm_restart import Start, start

CONFIG = OffloadConfig(host_blocks=4, device_blocks=4)
PAST = ("20261127T120000Z-engine0-17", "engine0-until-20261127T120000Z", "engine0-until-20261127T120000Z.2")
OTHERS = ("engine0", "engine0-until-soon", "notes")


def written(path: Path, second: int = 0) -> int:
    """Write a log that ends, as if at this second. Returns its bytes."""
    with Offloader.open(CONFIG, path) as core:
        core.arrive("r")
    files = [*path.iterdir()]
    for one in files:
        os.utime(one, (second, second))
    return sum(one.stat().st_size for one in files)


def cold_start(directory: Path, number: int, past_logs_max_bytes: int) -> Start:
    """A start whose identity differs from that of the last one."""
    pools = KeptPools(PoolIdentity.of({"start": number}), (b"pool%012d" % number,))
    return start(directory / "engine0", CONFIG, pools, marks=(), past_logs_max_bytes=past_logs_max_bytes)


def test_cold_starts_leave_as_many_logs_as_the_limit_holds(tmp_path: Path) -> None:
    """A crash loop fills no memory."""
    for number in range(8):
        started = cold_start(tmp_path, number, past_logs_max_bytes=2_000)
        assert started.why_cold
        started.offloader.arrive("r")
        started.offloader.close()
        past = [one for one in logs_in(tmp_path) if one.is_past]
        assert sum(one.bytes for one in past) <= 2_000
    assert 0 < len(past) < 7
    assert (tmp_path / "engine0").is_dir()


@pytest.mark.parametrize("name", [*PAST, *OTHERS])
def test_only_logs_that_no_engine_continues_are_deleted(tmp_path: Path, name: str) -> None:
    written(tmp_path / name)
    (found,) = logs_in(tmp_path)
    assert found.is_past is (name in PAST)
    deleted = delete_past_logs(tmp_path, 0)
    assert deleted == ([tmp_path / name] if name in PAST else [])
    assert (tmp_path / name).exists() is (name in OTHERS)


@pytest.mark.parametrize("name", ["index.sqlite", "index.sqlite-wal", "index.lock"])
def test_the_index_of_a_log_is_deleted_with_it(tmp_path: Path, name: str) -> None:
    """It names clients, too."""
    written(tmp_path / PAST[0])
    (tmp_path / PAST[0] / name).write_bytes(b"names")
    assert delete_past_logs(tmp_path, 0) == [tmp_path / PAST[0]]
    assert not (tmp_path / PAST[0]).exists()


def test_the_oldest_are_deleted_first_until_the_rest_fits(tmp_path: Path) -> None:
    names = [f"engine{number}-until-20261127T120000Z" for number in (2, 0, 1)]
    sizes = [written(tmp_path / name, second) for second, name in enumerate(names)]
    assert delete_past_logs(tmp_path, sum(sizes)) == []
    assert delete_past_logs(tmp_path, sum(sizes) - 1) == [tmp_path / names[0]]
    assert [one.path.name for one in logs_in(tmp_path)] == names[1:]


def test_a_log_that_is_written_is_left(tmp_path: Path) -> None:
    with Offloader.open(CONFIG, tmp_path / PAST[0]):
        (found,) = logs_in(tmp_path)
        assert found.is_written
        assert delete_past_logs(tmp_path, 0) == []


def test_what_is_no_log_is_left(tmp_path: Path) -> None:
    """A pool, a link to a log of another place, and a file that somebody has put into a log."""
    (tmp_path / "engine0-rank0").write_bytes(b"pool")
    (tmp_path / "elsewhere").mkdir()
    written(tmp_path / "elsewhere" / PAST[0])
    here = tmp_path / "here"
    here.mkdir()
    (here / PAST[1]).symlink_to(tmp_path / "elsewhere" / PAST[0])
    written(here / PAST[0])
    (here / PAST[0] / "findings.txt").write_text("wrong bytes")
    assert delete_past_logs(here, 0) == [here / PAST[0]]
    assert [one.name for one in (here / PAST[0]).iterdir()] == ["findings.txt"]
    assert len(logs_in(tmp_path / "elsewhere")) == 1


def told(*words: str | Path) -> str:
    result = CliRunner().invoke(main, ["logs", *map(str, words)])
    assert result.exit_code == 0, result.output
    return result.output


def test_the_command_lists_and_deletes(tmp_path: Path) -> None:
    assert told(tmp_path) == f"{tmp_path}: no event log lies here\n"
    written(tmp_path / PAST[0])
    written(tmp_path / "engine0", 5)
    answer = msgspec.json.decode(told(tmp_path, "--json"), type=LogsAnswer)
    assert [(Path(one.path).name, one.state) for one in answer.logs] == [
        (PAST[0], "past"),
        ("engine0", "kept"),
    ]
    assert "past: deleted" in told(tmp_path, "--max-bytes", "0")
    assert [path.name for path in tmp_path.iterdir()] == ["engine0"]


def test_a_directory_that_cannot_be_listed_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="absent: cannot be listed: No such file"):
        logs_in(tmp_path / "absent")
