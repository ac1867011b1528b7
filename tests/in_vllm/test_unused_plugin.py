"""kvsm's plugin for vLLM, installed and not used: vLLM is as it is without it.

Two processes load vLLM's general plugins: in one vLLM finds kvsm's, in the other `VLLM_PLUGINS` is empty.
Both then import what an engine imports, and describe it. Allowed differences: modules of kvsm are imported,
and vLLM's two factories know the names `KvsmConnector` and `RecordingSpec`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from scenes import search_path

PROGRAM = """
import importlib, json, logging, os, signal, sys, threading, types, warnings

def place(value):
    names = [type(value).__name__, str(value.__module__), value.__qualname__]
    if not isinstance(value, types.FunctionType):
        return names
    return [*names, value.__code__.co_filename, value.__code__.co_firstlineno, hasattr(value, "__wrapped__")]

def described(value, inside=True):
    value = value.fget if isinstance(value, property) and value.fget is not None else value
    value = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
    if isinstance(value, type):
        if not inside or not value.__module__.startswith("vllm"):
            return place(value)
        return [place(value), {name: described(one, False) for name, one in sorted(vars(value).items())}]
    if isinstance(value, types.FunctionType):
        return place(value)
    return type(value).__name__

def state():
    return {
        "finders": [getattr(one, "__name__", type(one).__name__) for one in sys.meta_path],
        "environment": sorted(os.environ),
        "signals": [str(signal.getsignal(one)) for one in sorted(signal.valid_signals())],
        "threads": sorted(one.name for one in threading.enumerate()),
        "warnings": len(warnings.filters),
        "handlers": [str(type(one)) for log in ("", "vllm") for one in logging.getLogger(log).handlers],
        "modules": sorted(sys.modules),
    }

import vllm.engine.arg_utils
from vllm.plugins import load_general_plugins

load_general_plugins()
told = {"after the plugins": state()}

def after():
    for name in %r:
        importlib.import_module(name)
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory
    told["connectors"] = sorted(KVConnectorFactory._registry)
    told["specs"] = sorted(OffloadingSpecFactory._registry)
    told["at the end"] = state()
    told["attributes"] = {
        name: {key: described(value) for key, value in sorted(vars(module).items())}
        for name, module in sorted(sys.modules.items())
        if name.partition(".")[0] == "vllm" and isinstance(module, types.ModuleType)
    }

after()
with open(sys.argv[1], "w") as file:
    json.dump(told, file)
"""

USED = (
    "vllm.config",
    "vllm.v1.engine.core",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.core.kv_cache_manager",
    "vllm.v1.core.block_pool",
    "vllm.v1.worker.worker_base",
    "vllm.v1.worker.kv_connector_model_runner_mixin",
    "vllm.distributed.kv_transfer.kv_connector.factory",
    "vllm.distributed.kv_transfer.kv_connector.v1.base",
    "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector",
    "vllm.distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector",
    "vllm.v1.kv_offload.factory",
)
"""What an engine with a connector imports: all that kvsm could patch."""

OURS = {"kvsm", "kvsm.errors", "kvsm.properties", "kvsm.vllm", "kvsm.vllm.versions", "kvsm.vllm.vllm_plugin"}

Told = dict[str, Any]


@pytest.fixture(scope="module")
def told(plugin_site: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Told, Told]:
    """What a process with the plugin tells, and one without it."""
    home = tmp_path_factory.mktemp("told")
    running = []
    for name, plugins in (("with", "kvsm"), ("without", "")):
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(plugin_site), search_path()]),
            "VLLM_PLUGINS": plugins,
        }
        environment.pop("KVSM_OFFLOAD", None)
        command = [sys.executable, "-c", PROGRAM % (USED,), str(home / name)]
        running.append(subprocess.Popen(command, env=environment))
    assert [process.wait(timeout=300) for process in running] == [0, 0]
    with_it, without = (json.loads((home / name).read_text()) for name in ("with", "without"))
    return with_it, without


def test_loading_the_plugin_imports_nothing_of_vllm(told: tuple[Told, Told]) -> None:
    """Only its own small modules; and until vLLM imports its factories, a finder waits for them."""
    with_it, without = (one["after the plugins"] for one in told)
    assert set(with_it["modules"]) - set(without["modules"]) == OURS
    assert with_it["finders"] == ["_AfterImport", *without["finders"]]
    for what in ("environment", "signals", "threads", "warnings", "handlers"):
        assert with_it[what] == without[what], what


def test_no_function_or_class_of_vllm_is_another_one(told: tuple[Told, Told]) -> None:
    """The attributes of all modules and classes of vLLM have the same types, names and places in code."""
    with_it, without = (one["attributes"] for one in told)
    assert len(without) > 200
    assert list(with_it) == list(without)
    changed = [name for name in without if with_it[name] != without[name]]
    assert changed == []


def test_an_engine_process_differs_in_two_names(told: tuple[Told, Told]) -> None:
    """The names that a user may give as `kv_connector` and `spec_name`. The finder is gone."""
    with_it, without = told
    assert set(with_it["connectors"]) - set(without["connectors"]) == {"KvsmConnector"}
    assert set(with_it["specs"]) - set(without["specs"]) == {"RecordingSpec"}
    assert set(without["connectors"]) < set(with_it["connectors"])
    assert set(without["specs"]) < set(with_it["specs"])
    assert set(with_it["at the end"]["modules"]) - set(without["at the end"]["modules"]) == OURS
    for what in ("finders", "environment", "signals", "threads", "warnings", "handlers"):
        assert with_it["at the end"][what] == without["at the end"][what], what
