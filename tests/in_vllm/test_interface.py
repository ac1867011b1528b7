"""The installed vLLM has the interface of kvsm's tables, and kvsm's classes do what the tables say."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.v1.kv_offload.base import OffloadingManager

from kvsm.errors import ConfigError
from kvsm.vllm.extra_config import ConnectorOptions, parse
from kvsm.vllm.installation_check import CALLED, misfits
from kvsm.vllm.interface import changed_methods, changes, fields_of, methods_of, options_read
from kvsm.vllm.interface_table import INTERFACES, Interface, Method
from kvsm.vllm.versions import installed
from kvsm.vllm.vllm_options import OPTION_READERS, OPTIONS, Option

VALUES: dict[str, Any] = {
    "spec_name": "RecordingSpec",
    "spec_module_path": "kvsm.vllm",
    "secondary_tiers": [{"type": "fs"}],
    "disk_path": "/tmp",
    "eviction_policy": "arc",
    "kv_offload_backend": "disk",
    "cpu_bytes_to_use": 1 << 20,
}
"""A value that vLLM takes; 1 for all other options."""


def test_vllm_has_nothing_that_kvsm_does_not_know() -> None:
    """After a new version of vLLM: decide what kvsm does with each line, and give it its row in
    kvsm/vllm/interface_table/."""
    assert changes() == []


@pytest.mark.parametrize(("module", "title"), CALLED)
def test_vllm_can_call_our_classes(module: str, title: str) -> None:
    """`kvsm vllm-check` says so before it starts an engine. What only kvsm calls is no fault of vLLM's."""
    assert misfits(getattr(importlib.import_module(module), title)) == []


METHODS = [(name, one) for name, interface in INTERFACES.items() for one in interface.methods]


@pytest.mark.parametrize(("name", "method"), METHODS, ids=[f"{name}.{one.name}" for name, one in METHODS])
def test_methods_are_implemented_or_inherited_as_the_table_says(name: str, method: Method) -> None:
    """A method counts as inherited if kvsm's classes leave it to vLLM's."""
    module, title = INTERFACES[name].ours
    ours = getattr(importlib.import_module(module), title)
    defined = any(method.name in vars(one) for one in ours.__mro__ if one.__module__.startswith("kvsm"))
    assert defined != method.inherited


@pytest.mark.parametrize("option", OPTIONS, ids=[one.name for one in OPTIONS])
def test_options_are_taken_or_refused_as_the_table_says(option: Option) -> None:
    value = VALUES.get(option.name, 1)
    size = {} if option.name.startswith("cpu_bytes_to_use") else {"cpu_bytes_to_use": 1 << 20}
    if option.connector:
        parse(ConnectorOptions, {**size, option.name: value})
    else:
        with pytest.raises(ConfigError, match=f"{option.name}.*{re.escape(option.why)}"):
            parse(ConnectorOptions, {**size, option.name: value})


# That a difference is seen.


def told(theirs: type, table: Interface) -> list[str]:
    return changed_methods("KVConnectorStats", table, theirs, installed())


def test_an_added_a_removed_and_a_changed_method_are_told() -> None:
    class Later(KVConnectorStats):
        def prefetch(self, keys: list[bytes], urgent: bool = False) -> None: ...

        def aggregate(self, other: Any, weight: float = 1.0) -> Any: ...

        @property
        def room(self) -> int:
            return 0

    table = INTERFACES["KVConnectorStats"]
    two = table._replace(methods=tuple(one for one in table.methods if one.name in ("aggregate", "reset")))
    assert told(Later, two) == [
        "vLLM has a new method of KVConnectorStats, which kvsm does not know: prefetch",
        "vLLM has a new method of KVConnectorStats, which kvsm does not know: room",
        "vLLM has no method of KVConnectorStats any more: reset",
        "vLLM has changed KVConnectorStats.aggregate: it was (other), and is (other, weight=1.0)",
    ]


def test_the_check_of_the_installation_tells_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM itself is changed here, as a new version would be."""
    for theirs in (KVConnectorStats, OffloadingManager):
        monkeypatch.setattr(theirs, "prefetch", lambda self, keys: None, raising=False)  # noqa: ARG005
    assert changes() == [
        "vLLM has a new method of KVConnectorStats, which kvsm does not know: prefetch",
        "vLLM has a new method of OffloadingManager, which RecordingSpec does not record: prefetch",
    ]


@pytest.mark.parametrize(
    "line",
    [
        "self.extra_config.get('prefetch_depth', 3)",
        "int(spec.extra_config['prefetch_depth'])",
        "transfer.get_from_extra_config('prefetch_depth', 3)",
        "'prefetch_depth' in config.kv_connector_extra_config",
        "(transfer.kv_connector_extra_config or {}).get('prefetch_depth')",
    ],
)
def test_an_option_is_seen_however_it_is_read(line: str, tmp_path: Path) -> None:
    (tmp_path / "spec.py").write_text(f"depth = {line}\nother = self.settings.get('width')\n")
    assert options_read([tmp_path / "spec.py"]) == {"prefetch_depth"}


def test_what_is_looked_through_is_there() -> None:
    """A renamed directory would hide all options in it."""
    root = Path(vllm.__path__[0])
    assert [reader for reader in OPTION_READERS if not (root / reader).exists()] == []


def test_parameters_are_those_that_a_caller_sees() -> None:
    class Theirs:
        def __init__(self, config: str) -> None: ...

        @classmethod
        def make(cls, *names: str, deep: bool = True) -> None: ...

        @staticmethod
        def of(one: int) -> None: ...

        def _hidden(self) -> None: ...

    assert methods_of(Theirs) == {"__init__": "config", "make": "*names, deep=True", "of": "one"}


def test_fields_are_those_of_records() -> None:
    class Pair(NamedTuple):
        first: int
        second: int

    assert fields_of(Pair) == ["first", "second"]
