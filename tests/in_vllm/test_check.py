"""`kvsm vllm-check`, `kvsm bench vllm` and the example, with the installed vLLM."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from kvsm.cli import main
from kvsm.core.ledger.snapshot import digest
from kvsm.explain.story import rebuild, verify_log
from kvsm.vllm import installation_check, trial
from kvsm.vllm.bench import KVSM, PEERS, PLAIN, SMALL, SMALL_AND_DISK
from kvsm.vllm.installation_check import CONNECTOR, SHORT_START, missing_names
from kvsm.vllm.tiny_model import BLOCK_TOKENS

ROOT = Path(__file__).parent.parent.parent
MOST_SECONDS = 600


def run(*arguments: str, **environment: str) -> str:
    """The standard output of a command, which must end with 0."""
    environment = {**trial.environment(), "VLLM_LOGGING_LEVEL": "ERROR", **environment}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=MOST_SECONDS, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory, plugin_site: Path) -> dict[str, Any]:
    """The JSON report of one check."""
    logs = tmp_path_factory.mktemp("logs")
    path = os.pathsep.join([str(plugin_site), os.environ.get("PYTHONPATH", "")])
    told = run("-m", "kvsm", "vllm-check", "--json", "--keep-log", str(logs), PYTHONPATH=path)
    report: dict[str, Any] = json.loads(told)
    return report


def test_an_installation_that_works_is_good(checked: dict[str, Any]) -> None:
    assert checked["good"]
    assert checked["interface"] == []
    assert checked["no_short_start"] == ""
    names = ["without kvsm", CONNECTOR, SHORT_START]
    assert [one["name"] for one in checked["engines"]] == names
    assert [one["other_tokens"] for one in checked["engines"]] == [0] * len(names)


def test_what_comes_again_is_loaded(checked: dict[str, Any]) -> None:
    """The device has lost everything, so each whole block must come from the host."""
    plain, *engines = checked["engines"]
    assert plain["cached_tokens"] == 0
    for one in engines:
        assert one["blocks_loaded"] * BLOCK_TOKENS == one["cached_tokens"]
        assert one["cached_tokens"] > one["prompt_tokens"] * 0.4


def test_kept_logs_verify_and_replay_to_the_digest_that_was_reported(checked: dict[str, Any]) -> None:
    """Events are state (S10), and so for every other property that a log shows."""
    for one in checked["engines"][1:]:
        assert verify_log(one["log"]).good
        assert digest(rebuild(one["log"]).ledger) == one["digest"]


def test_kvsm_that_vllm_cannot_call_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vLLM that renamed a method is detected without starting an engine."""
    from kvsm.vllm.connector import KvsmConnector

    monkeypatch.setattr(KvsmConnector, "on_every_step", lambda _: None, raising=False)
    missing, _, _ = installation_check._look()
    assert missing == ["vLLM does not call KvsmConnector.on_every_step, which kvsm needs"]


def test_every_name_that_kvsm_imports_is_there() -> None:
    assert missing_names(Path(installation_check.__file__).parent) == []


def benched(*arguments: str) -> dict[str, Any]:
    """The JSON report of `kvsm bench vllm`, run in this process, where engines are forks."""
    done = CliRunner().invoke(main, ["bench", "vllm", *arguments, "--rounds", "1", "--json"])
    assert done.exit_code == 0, done.output
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def test_bench_measures_kvsm_and_its_peers() -> None:
    """Every offload really loads blocks, answers as the engine without offload, and has times of its own."""
    arguments = ("--requests", "24", "--turns", "2", "--turn-tokens", "64", "--answer-tokens", "2")
    found = benched(*arguments, "--peers")
    names = [one["name"] for one in found["contestants"]]
    assert names == [PLAIN, *PEERS, KVSM]
    plain, *offloads = (one["rounds"][0] for one in found["contestants"])
    assert plain["times"]["connector_seconds"] == 0
    for one in offloads:
        times = one["times"]
        assert one["prompt_tokens"] == plain["prompt_tokens"]
        assert one["cached_tokens"] > plain["cached_tokens"]
        assert one["other_answers"] == 0
        assert 0 < times["connector_seconds"] < times["step_seconds"] < one["seconds"]
        assert 0 < times["connector_cpu_seconds"] < times["step_cpu_seconds"] < times["process_cpu_seconds"]


def test_bench_measures_a_disk_tier(tmp_path: Path) -> None:
    """A host pool that is too small finds more with a disk below it, and the answers are the same."""
    arguments = ("--requests", "40", "--turns", "2", "--turn-tokens", "64", "--answer-tokens", "2")
    found = benched(*arguments, "--disk", str(tmp_path))
    cached = {one["name"]: one["rounds"][0]["cached_tokens"] for one in found["contestants"]}
    assert [*cached] == [PLAIN, SMALL, SMALL_AND_DISK, "KvsmConnector"]
    assert cached[SMALL] < cached[SMALL_AND_DISK] <= cached["KvsmConnector"]
    assert [one["rounds"][0]["other_answers"] for one in found["contestants"]] == [0] * 4
    assert [*tmp_path.iterdir()] == []


def test_example_loads_what_it_stored(tmp_path: Path) -> None:
    told = run(str(ROOT / "examples" / "vllm_offload.py"), TMPDIR=str(tmp_path))
    assert "first turn: 0 of 6400 prompt tokens came from a cache" in told
    again = re.search(r"second turn: (\d+) of 6400", told)
    assert again is not None
    assert int(again.group(1)) > 5000
    directory = re.search(r"the event log is in (\S+);", told)
    assert directory is not None
    assert Path(directory.group(1)).parent == tmp_path
    [log] = Path(directory.group(1)).iterdir()
    assert verify_log(log).good
