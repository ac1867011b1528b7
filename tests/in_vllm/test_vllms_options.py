"""Every option of vLLM's own offload connectors is taken by kvsm, or refused with what to use instead."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import vllm

from kvsm.errors import ConfigError
from kvsm.vllm.extra_config import VLLMS_OPTIONS, ConnectorOptions, SpecOptions, parse
from kvsm.vllm.spec import vllms_own
from kvsm.vllm.versions import TESTED, installed

CONNECTORS = "distributed/kv_transfer/kv_connector/v1"

SOURCES = (
    f"{CONNECTORS}/offloading/*.py",
    f"{CONNECTORS}/offloading_connector.py",
    f"{CONNECTORS}/simple_cpu_offload_connector.py",
    "v1/kv_offload/*.py",
    "v1/kv_offload/cpu/**/*.py",
    "v1/kv_offload/tiering/*.py",
    "v1/simple_kv_offload/*.py",
)
"""The files of vLLM's own connectors."""


def options_in(source: str) -> Iterator[str]:
    """The names that this code reads from `extra_config`: with `get` or `pop`, in brackets, or with `in`."""
    for node in ast.walk(ast.parse(source)):
        found: list[ast.expr] = []
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in ("get", "pop") and "extra_config" in ast.unparse(node.func.value):
                found = node.args[:1]
        elif isinstance(node, ast.Subscript) and "extra_config" in ast.unparse(node.value):
            found = [node.slice]
        elif isinstance(node, ast.Compare) and "extra_config" in ast.unparse(node.comparators[0]):
            found = [node.left]
        yield from (
            one.value for one in found if isinstance(one, ast.Constant) and isinstance(one.value, str)
        )


def options_of_vllm() -> set[str]:
    root = Path(vllm.__file__).parent
    files = [file for pattern in SOURCES for file in root.glob(pattern)]
    return {name for file in files for name in options_in(file.read_text(encoding="utf-8"))}


def test_each_way_to_read_an_option_is_seen() -> None:
    code = 'extra_config.get("a", 1); self.extra_config["b"]; "c" in config.extra_config; other.get("d")'
    assert set(options_in(code)) == {"a", "b", "c"}


def test_every_option_of_vllm_is_known() -> None:
    """A new vLLM that adds an option fails here. An option that no tested vLLM has is no option."""
    found = options_of_vllm()
    assert found <= VLLMS_OPTIONS.keys()
    if installed().split("+")[0] == TESTED[-1]:
        assert found == VLLMS_OPTIONS.keys()


@pytest.mark.parametrize("name", sorted(VLLMS_OPTIONS))
def test_each_is_taken_or_refused_with_advice(name: str) -> None:
    """By the connector, and by the spec, which leaves some to vLLM."""
    for kind, others in ((ConnectorOptions, ()), (SpecOptions, vllms_own())):
        if name in kind.__struct_fields__ or name in others:
            continue
        with pytest.raises(ConfigError) as refused:
            parse(kind, {"cpu_bytes_to_use": 1, name: 1}, others)
        assert VLLMS_OPTIONS[name] in str(refused.value)


def test_bytes_per_rank_are_as_many_as_bytes_of_all_ranks() -> None:
    """With four ranks, a quarter for each is the same memory."""
    alone = parse(ConnectorOptions, {"cpu_bytes_to_use_per_rank": 25})
    together = parse(ConnectorOptions, {"cpu_bytes_to_use": 100})
    assert alone.host_bytes(4) == together.host_bytes(4) == 100
