"""`kvsm why` follows a key from the log of one tier to the log of the other."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from two_tier_life import DISK_CONFIG, HOST_CONFIG, live

from kvsm.cli import main
from kvsm.core.log import LogReader
from kvsm.core.offloader import Offloader
from kvsm.events import OffloadConfig

KEYS = [bytes([n]) * 8 for n in range(1, 7)]
TIME, EARLIER = "20261121T171408Z", "20261121T171407Z"
HOST, DISK = f"{EARLIER}-engine0-13", f"{TIME}-engine0-disk-13"


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two logs, `host` and `below`. Four blocks go to the disk. The host loses two, and they come back."""
    made = tmp_path_factory.mktemp("tiers")
    with (
        Offloader.open(HOST_CONFIG, made / "host") as host,
        Offloader.open(DISK_CONFIG, made / "below") as disk,
    ):
        live(host, disk, KEYS)
    return made


def laid(logs: Path, place: Path, host: str | None, disk: str | None) -> Path:
    """These logs under other names."""
    for log, name in (("host", host), ("below", disk)):
        if name is not None:
            shutil.copytree(logs / log, place / name, dirs_exist_ok=True)
    return place


def why(log: Path, *command: str) -> dict[str, Any]:
    result = CliRunner().invoke(main, ["why", str(log), *command, "--json"])
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


@pytest.mark.parametrize(("host", "disk"), [("log", "log/disk"), (HOST, DISK), ("engine0", DISK)])
def test_a_key_is_followed_to_the_other_log_by_their_names(
    logs: Path, tmp_path: Path, host: str, disk: str
) -> None:
    """From host to disk and back, for all ways in which the two logs are named."""
    laid(logs, tmp_path, host, disk)
    for one, other, tier in ((host, disk, "disk"), (disk, host, "host")):
        (elsewhere,) = why(tmp_path / one, "--key", KEYS[2].hex())["elsewhere"]
        assert (elsewhere["tier"], elsewhere["log"]) == (tier, str(tmp_path / other))
        assert elsewhere["explanation"] == why(tmp_path / other, "--key", KEYS[2].hex())["explanations"][0]


def test_the_key_of_a_slot_is_followed_too(logs: Path, tmp_path: Path) -> None:
    """It is the key of the slot's last block."""
    laid(logs, tmp_path, "log", "log/disk")
    answer = why(tmp_path / "log", "--block", "1")
    assert answer["elsewhere"][0]["key"] == answer["explanations"][0]["key"]


def test_the_other_answer_is_an_indented_section(logs: Path, tmp_path: Path) -> None:
    """It names its log, and commands that look into that log."""
    laid(logs, tmp_path, "log", "log/disk")
    result = CliRunner().invoke(main, ["why", str(tmp_path / "log"), "--key", KEYS[2].hex()])
    _, below = result.stdout.split("\non the disk, by ")
    assert below.startswith(f"{tmp_path}/log/disk:\n  key ")
    assert all(line.startswith("  ") for line in below.splitlines()[1:] if line)
    assert f"      kvsm show {tmp_path}/log/disk --key " in below


def test_a_key_that_never_went_to_the_disk_is_said_not_to_be_known_there(logs: Path, tmp_path: Path) -> None:
    laid(logs, tmp_path, "log", "log/disk")
    (elsewhere,) = why(tmp_path / "log", "--key", KEYS[5].hex())["elsewhere"]
    assert elsewhere["explanation"] is None
    assert "no key" in elsewhere["why_not"]


@pytest.mark.parametrize(("host", "disk"), [("log", None), (None, DISK), (HOST, DISK.replace("-13", "-14"))])
def test_a_log_that_does_not_lie_beside_is_said_to_be_missing(
    logs: Path, tmp_path: Path, host: str | None, disk: str | None
) -> None:
    """A log of another process is not used instead."""
    asked = laid(logs, tmp_path, host, disk) / str(host or disk)
    (elsewhere,) = why(asked, "--key", KEYS[2].hex())["elsewhere"]
    told = f"no log of the {'disk' if host else 'host'} lies beside {asked}"
    assert (elsewhere["log"], elsewhere["why_not"]) == (None, told)
    assert f"{told}\n" in CliRunner().invoke(main, ["why", str(asked), "--key", KEYS[2].hex()]).stdout


def test_of_several_processes_the_last_one_has_the_disk_of_a_kept_log(logs: Path, tmp_path: Path) -> None:
    laid(logs, tmp_path, "engine0", f"{EARLIER}-engine0-disk-77")
    laid(logs, tmp_path, None, DISK)
    laid(logs, tmp_path, None, f"{TIME}-engine1-disk-99")
    (elsewhere,) = why(tmp_path / "engine0", "--key", KEYS[2].hex())["elsewhere"]
    assert elsewhere["log"] == str(tmp_path / DISK)


def test_two_processes_of_one_number_keep_their_own_logs(logs: Path, tmp_path: Path) -> None:
    """A process in a container often has the number of the one before it."""
    laid(logs, tmp_path, HOST, DISK)
    later = [name.replace("20261121", "20261122") for name in (HOST, DISK)]
    laid(logs, tmp_path, *later)
    for host, disk in ((HOST, DISK), later):
        for one, other in ((host, disk), (disk, host)):
            (elsewhere,) = why(tmp_path / one, "--key", KEYS[2].hex())["elsewhere"]
            assert elsewhere["log"] == str(tmp_path / other)
    shutil.rmtree(tmp_path / DISK)
    (elsewhere,) = why(tmp_path / HOST, "--key", KEYS[2].hex())["elsewhere"]
    assert elsewhere["log"] is None


def test_a_log_of_one_tier_asks_no_other(tmp_path: Path) -> None:
    """A log of one tier that is named like a disk's log has no other tier either."""
    with Offloader.open(OffloadConfig(host_blocks=4, device_blocks=8), tmp_path / "disk") as core:
        core.arrive("r")
        core.prepare_store("r", KEYS[:1], [0])
    assert why(tmp_path / "disk", "--key", KEYS[0].hex())["elsewhere"] == []


def test_a_damaged_log_of_the_other_tier_does_not_spoil_the_answer(logs: Path, tmp_path: Path) -> None:
    laid(logs, tmp_path, "log", "log/disk")
    (segment,) = (tmp_path / "log" / "disk").glob("*.kvsm")
    os.truncate(segment, 100)
    answer = why(tmp_path / "log", "--key", KEYS[2].hex())
    assert answer["explanations"][0]["answer"]
    assert str(segment) in answer["elsewhere"][0]["why_not"]


def test_the_names_that_are_looked_for_are_those_that_kvsm_run_gives(tmp_path: Path) -> None:
    """And both logs of a run are found from each other."""
    sizes = ("--requests", "9", "--block-bytes", "64", "--disk-blocks", "99", "--copies", "simulated")
    log = tmp_path / "log"
    command = ["run", *sizes, "--disk-dir", str(tmp_path / "disk"), "--log", str(log)]
    assert CliRunner().invoke(main, command).exit_code == 0
    key = next(event.keys[0] for event in LogReader(log).events() if hasattr(event, "keys") and event.keys)
    (below,) = why(log, "--key", key.hex())["elsewhere"]
    (above,) = why(Path(below["log"]), "--key", key.hex())["elsewhere"]
    assert above["log"] == str(log)
