"""vLLM's parser and kvsm accept what `deploy/kubernetes` passes; its files serve the whole group."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kubernetes_manifests import GIB, argument, container, environment, extra_config
from vllm import envs

from kvsm.system.private_files import share_with_group
from kvsm.vllm.engine_offloader import _new_directory
from kvsm.vllm.extra_config import ConnectorOptions, parse
from kvsm.vllm.vllm_plugin import SWITCH


@pytest.fixture(scope="module")
def parsed() -> Any:
    """The manifest's arguments, as `vllm serve` parses them."""
    for room in ("common", "launchers", "openai"):  # vLLM moves it
        try:
            make = import_module(f"vllm.entrypoints.{room}.cli_args").make_arg_parser
        except ImportError:
            continue
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        assert container()["command"] == ["vllm", "serve"]
        return make(FlexibleArgumentParser()).parse_args(container()["args"])
    raise AssertionError("this vLLM has its parser elsewhere")


def test_vllm_parses_the_arguments(parsed: Any) -> None:
    assert parsed.model_tag == container()["args"][0]
    assert parsed.shutdown_timeout == int(argument("--shutdown-timeout"))
    assert parsed.kv_offloading_size == float(argument("--kv-offloading-size"))
    assert parsed.kv_transfer_config is not None


def test_kvsm_takes_the_options() -> None:
    given = json.loads(argument("--kv-transfer-config"))
    assert set(given) == {"kv_load_failure_policy", "kv_connector_extra_config"}
    # The plugin adds the size.
    size = int(float(argument("--kv-offloading-size")) * GIB)
    options = parse(ConnectorOptions, {"cpu_bytes_to_use": size, **extra_config()})
    assert (options.pool_dir, options.disk_dir) == ("/dev/shm/kvsm", "/var/lib/kvsm/disk")
    assert options.file_group == 62001


def test_each_variable_is_one_that_is_read() -> None:
    names = set(environment())
    assert SWITCH in names
    assert names - {SWITCH, "HOME", "USER", "XDG_CACHE_HOME", "HF_HOME"} <= set(envs.environment_variables)


@pytest.fixture
def shared() -> Iterator[int]:
    """Files are shared with the group of this process, as the manifest's `file_group` does."""
    share_with_group(os.getegid())
    previous = os.umask(0o077)
    yield os.getegid()
    os.umask(previous)
    share_with_group(None)


def test_the_next_user_can_make_a_log_beside_the_last_ones(shared: int, tmp_path: Path) -> None:
    """The directory of all logs belongs to the group, whatever the umask is. It once did not, so a pod with
    another user id had no log."""
    _new_directory(tmp_path / "new" / "events", 0)
    for path in (tmp_path / "new", tmp_path / "new" / "events"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o770
        assert path.stat().st_gid == shared
