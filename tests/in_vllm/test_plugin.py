"""kvsm's plugin for vLLM: kvsm's names need no module path, and `KVSM_OFFLOAD=1` is the short start."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from scenes import HOST_BYTES, MAX_TOKENS, PROMPTS, search_path
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

from kvsm.explain.story import verify_log
from kvsm.vllm import KvsmConnector, RecordingSpec
from kvsm.vllm import vllm_plugin as plugin
from kvsm.vllm.trial import Trial, run_trial

GIB = 1 << 30


@pytest.fixture(autouse=True)
def _vllm_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the plugin changes in vLLM is undone after each test, and each test hears what it says."""
    monkeypatch.setattr(VllmConfig, plugin._CHOICE, getattr(VllmConfig, plugin._CHOICE))
    plugin._log_choice.cache_clear()
    plugin._warn_without_size.cache_clear()
    registries = (KVConnectorFactory._registry, OffloadingSpecFactory._registry)
    with patch.dict(registries[0]), patch.dict(registries[1]):
        yield


@pytest.fixture
def said() -> Iterator[list[str]]:
    """The plugin's lines in vLLM's log."""
    lines: list[str] = []

    class Log:
        def info(self, text: str, *values: Any) -> None:
            lines.append(text % values)

        warning = info

    with patch.object(plugin, "_log", Log):
        yield lines


def configured(transfer: Mapping[str, Any] | None = None, **cache: Any) -> KVTransferConfig | None:
    """What vLLM makes of these arguments."""
    config = VllmConfig(
        cache_config=CacheConfig(enable_prefix_caching=True, **cache),
        device_config=DeviceConfig(device="cpu"),
        kv_transfer_config=None if transfer is None else KVTransferConfig(**transfer),
    )
    return config.kv_transfer_config


def chosen(monkeypatch: pytest.MonkeyPatch, value: str = "1") -> None:
    monkeypatch.setenv(plugin.SWITCH, value)
    plugin.load()
    plugin.load()


def test_names_of_kvsm_need_no_module_path() -> None:
    for registry in (KVConnectorFactory._registry, OffloadingSpecFactory._registry):
        for name in [one for one in registry if one in ("KvsmConnector", "RecordingSpec")]:
            del registry[name]
    plugin.load()
    assert KVConnectorFactory.get_connector_class_by_name("KvsmConnector") is KvsmConnector
    assert OffloadingSpecFactory.get_spec_cls({"spec_name": "RecordingSpec"}) is RecordingSpec


@pytest.mark.parametrize("value", [None, "", "0", "yes"])
def test_without_the_variable_vllm_is_unchanged(
    value: str | None, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    """A value that means nothing is named in the log."""
    monkeypatch.delenv(plugin.SWITCH, raising=False)
    before = getattr(VllmConfig, plugin._CHOICE)
    if value is not None:
        monkeypatch.setenv(plugin.SWITCH, value)
    plugin.load()
    assert getattr(VllmConfig, plugin._CHOICE) is before
    assert said == (
        ["kvsm: KVSM_OFFLOAD is 'yes', which is neither 1 nor 0; it is ignored"] * (value == "yes")
    )


def test_the_offloading_size_goes_to_kvsm(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    """It is said once which connector was chosen. Failed loads are recomputed, unlike vLLM's default."""
    chosen(monkeypatch)
    for _ in range(2):
        transfer = configured(kv_offloading_size=0.3)
        assert transfer is not None
        assert (transfer.kv_connector, transfer.kv_role) == ("KvsmConnector", "kv_both")
        assert transfer.kv_connector_extra_config == {"cpu_bytes_to_use": int(0.3 * GIB)}
        assert transfer.kv_load_failure_policy == "recompute"
    (line,) = said
    assert "KvsmConnector offloads to 322122547 bytes of host memory" in line
    assert line.endswith("kv_load_failure_policy is 'recompute'")


def test_options_beside_the_size_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen(monkeypatch)
    given = {"kv_load_failure_policy": "fail", "kv_connector_extra_config": {"policy": "arc"}}
    transfer = configured(given, kv_offloading_size=1)
    assert transfer is not None
    assert transfer.kv_connector_extra_config == {"cpu_bytes_to_use": GIB, "policy": "arc"}
    assert transfer.kv_load_failure_policy == "fail"


def test_what_is_not_its_business_is_left_alone(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    """No size, another backend, another connector."""
    chosen(monkeypatch)
    assert configured() is None
    assert said == ["kvsm: KVSM_OFFLOAD is 1, but without --kv-offloading-size nothing is offloaded"]
    other = configured({"kv_connector": "OffloadingConnector", "kv_role": "kv_both"})
    assert other is not None
    assert other.kv_connector == "OffloadingConnector"
    with patch.object(KVConnectorFactory, "supports_hma_config", lambda _: True):
        lmcache = configured(kv_offloading_size=1, kv_offloading_backend="lmcache")
    assert lmcache is not None
    assert lmcache.kv_connector == "LMCacheMPConnector"


def test_a_vllm_without_the_method_starts_all_the_same(
    monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    """One line in the log says why the variable has no effect."""
    monkeypatch.delattr(VllmConfig, plugin._CHOICE)
    monkeypatch.setenv(plugin.SWITCH, "1")
    plugin.load()
    (line,) = said
    assert "do not fit together" in line
    assert f"has no VllmConfig.{plugin._CHOICE}" in line


def test_a_vllm_without_the_registry_starts_all_the_same(
    monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.delattr(KVConnectorFactory, "_registry")
    plugin.load()
    assert len(said) == 1


# The real thing: vLLM finds the plugin by the entry point that the project declares.


def test_a_real_engine_is_started_by_two_words(
    plugin_site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`KVSM_OFFLOAD=1` and `kv_offloading_size`, with options beside them. What is loaded gives the same
    answers as what is computed."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(plugin_site), search_path()]))
    monkeypatch.setenv(plugin.SWITCH, "1")
    log = tmp_path / "log"
    engine = {"num_gpu_blocks_override": 40, "kv_offloading_size": HOST_BYTES / GIB}
    beside = {"kv_connector_extra_config": {"event_log": str(log), "last_step": "flush"}}
    trial = Trial(
        rounds=[PROMPTS, PROMPTS], max_tokens=MAX_TOKENS, kv_transfer=beside, engine=engine, in_process=False
    )
    outcome = run_trial(trial)
    computed, again = outcome.tokens[: len(PROMPTS)], outcome.tokens[len(PROMPTS) :]
    assert computed == again
    assert outcome.metric("vllm:kvsm_blocks_loaded") > 3 * len(PROMPTS)
    (written,) = log.iterdir()
    assert verify_log(written).good
