"""Engines for the tests of this directory. Each runs once, when the first test needs it, and its outcome is
kept.

The modules of this directory are also importable in the processes of an engine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, NamedTuple

import pytest
from engine_forks import begin, forking
from workloads import TIMEOUT_S, Row, case_name, make_trial

from kvsm.vllm.trial import TrialOutcome, connector_config, environment, run_trial

HERE = Path(__file__).parent


SHARING = frozenset(
    {"test_event_log", "test_hybrid", "test_recording", "test_spec", "test_tokens", "test_wrong_bytes"}
)
"""Files whose tests share engines."""


LONGEST_FIRST = (
    "test_check",
    "test_disk",
    "test_serve",
    "test_warm_restart",
    "test_failures",
    "test_multi_connector",
    "test_modes",
    "test_disturbances",
    "test_kv_cache_kinds",
    "test_disaggregated_engines",
    "test_vllm_fuzz",
    "test_replicated_kv",
)
"""Files that take minutes. With several test processes, one that began last would leave the others idle."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What shares engines begins, then the longest files."""
    items.sort(key=lambda item: _turn(item.path.stem))


def _turn(file: str) -> int:
    if file in SHARING:
        return -1
    return LONGEST_FIRST.index(file) if file in LONGEST_FIRST else len(LONGEST_FIRST)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With several test processes, the tests of a file stay in one process, and no engine runs twice."""
    from xdist.scheduler import LoadScopeScheduling

    class TogetherWhatShares(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = Path(nodeid.partition("::")[0]).stem
            return "engines" if file in SHARING else file

    config.option.loadscopereorder = False  # The order is that of `pytest_collection_modifyitems`.
    return TogetherWhatShares(config, log)


@pytest.fixture(scope="session", autouse=True)
def _core_of_its_own() -> None:
    """Each test process has its own core, so that engines with one rank do not share one."""
    name, cores = os.environ.get("PYTEST_XDIST_WORKER"), sorted(os.sched_getaffinity(0))
    if name is not None:
        os.sched_setaffinity(0, {cores[int(name.removeprefix("gw")) % len(cores)]})


@pytest.fixture(scope="session", autouse=True)
def _importable() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
        yield


@pytest.fixture(scope="session", autouse=True)
def _engines_are_forks(_core_of_its_own: None) -> Iterator[None]:
    """Importing vLLM takes longer than the start of a tiny engine, so each test process does it once."""

    def begun(connection: Connection, said: IO[bytes], settings: Mapping[str, str]) -> Any:
        number = connection.fileno()
        return begin(["-m", "kvsm.vllm.trial", str(number)], settings, [number], stdout=said, stderr=said)

    with pytest.MonkeyPatch.context() as patch, forking(environment()):
        patch.setattr("kvsm.vllm.trial.begin_process", begun)
        yield


@pytest.fixture(scope="session")
def plugin_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that makes kvsm's entry points known in a process that has it in its PYTHONPATH.

    As if kvsm was installed with pip. The entry points are those that the project declares.
    """
    project = (HERE.parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    declared = project.split('[project.entry-points."vllm.general_plugins"]\n')[1].split("\n\n")[0]
    site = tmp_path_factory.mktemp("site")
    metadata = site / "kvsm-0.0.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: kvsm\nVersion: 0.0.0\n")
    points = declared.replace('"', "")
    (metadata / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{points}\n")
    return site


class Served(NamedTuple):
    """What an engine with offload has left.

    notes: the directory in which `WatchedConnector` put its files.
    """

    row: Row
    outcome: TrialOutcome
    log: Path
    notes: Path


class Engines:
    """Engines that run once each. A model has one reference for each number of ranks, whatever the row."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._references: dict[tuple[str, int], TrialOutcome] = {}
        self._served: dict[tuple[str, Row], Served] = {}

    def reference(self, model: dict[str, Any], ranks: int = 1) -> TrialOutcome:
        """The outcome without offload."""
        key = (model["model_type"], ranks)
        if key not in self._references:
            self._references[key] = run_trial(make_trial(model, Row(ranks=ranks)), TIMEOUT_S)
        return self._references[key]

    def served(self, model: dict[str, Any], row: Row) -> Served:
        """The outcome with offload, watched."""
        key = (model["model_type"], row)
        if key not in self._served:
            notes = self._directory / case_name((model, row))
            notes.mkdir()
            trial = make_trial(model, row, kv_transfer=self._transfer(row, notes), engine=_EVENTS)
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", str(int(not row.whole_hashes)))
                outcome = run_trial(trial, TIMEOUT_S)
            (log,) = [path for path in notes.iterdir() if path.is_dir()]
            self._served[key] = Served(row, outcome, log, notes)
        return self._served[key]

    def _transfer(self, row: Row, notes: Path) -> dict[str, Any]:
        transfer = connector_config(
            cpu_bytes_to_use=row.host_bytes,
            store=row.store,
            policy=row.policy,
            blocks_per_chunk=row.blocks_per_chunk,
            event_log=str(notes),
        )
        return transfer | {"kv_connector": "WatchedConnector", "kv_connector_module_path": "watched"}


_EVENTS = {"kv_events_config": {"enable_kv_cache_events": True}}


@pytest.fixture(scope="session")
def stage() -> Iterator[Any]:
    """A process for engines of many models, one after the other."""
    from model_stage import Stage

    stage = Stage()
    yield stage
    stage.close()


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    return Engines(tmp_path_factory.mktemp("engines"))
