"""The metrics of several connectors in one MultiConnector. Nothing is served; Prometheus is real."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from scenes import spec_config
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector, MultiKVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.metrics.prometheus import unregister_vllm_metrics

from kvsm.core.offloader import Offloader
from kvsm.events import OffloadConfig
from kvsm.explain.metrics import Metrics
from kvsm.vllm.connector_stats import KvsmStats, StatsSource
from kvsm.vllm.trial import connector_config

CONNECTOR = connector_config(cpu_bytes_to_use=1)
RECORDING = spec_config(cpu_bytes_to_use=1, event_log="/unused")
METRIC_TYPES = {Gauge: Gauge, Counter: Counter, Histogram: Histogram}


@pytest.fixture(autouse=True)
def _no_metric_is_left() -> Iterator[None]:
    unregister_vllm_metrics()
    yield
    unregister_vllm_metrics()


def exporter(*children: Mapping[str, Any]) -> Any:
    """vLLM's exporter for a MultiConnector with these children, in this order."""
    from vllm.config import KVTransferConfig

    extra = {"connectors": [dict(child) for child in children]}
    both = KVTransferConfig(kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config=extra)
    config = SimpleNamespace(kv_transfer_config=both)
    return MultiConnector.build_prom_metrics(config, METRIC_TYPES, ["engine"], {0: ["0"]})


def pool(slots: int) -> tuple[Offloader, StatsSource]:
    """A core with this host pool, and its statistics."""
    core = Offloader(OffloadConfig(host_blocks=slots, device_blocks=4))
    return core, StatsSource(Metrics.attached_to(core))


def exported(name: str) -> float | None:
    return REGISTRY.get_sample_value(name, {"engine": "0"})


@pytest.mark.parametrize(
    "children", [(CONNECTOR, RECORDING), (RECORDING, CONNECTOR)], ids=["connector first", "recording first"]
)
def test_a_connector_and_a_recording_export_side_by_side(children: tuple[Mapping[str, Any], ...]) -> None:
    """Both have the metrics of a log, and Prometheus refuses a name that is registered twice."""
    prom = exporter(*children)
    of_connector, of_recording = KvsmStats(), OffloadingConnectorStats()
    of_connector.grow("blocks_stored", {"": 3})
    of_connector.grow("log_events_dropped", {"": 4})
    of_recording.increase_counter("vllm:kvsm_log_events_dropped", 5)
    prom.observe({"OffloadingConnector": of_recording.data, "KvsmConnector": of_connector.data})
    assert exported("vllm:kvsm_log_events_dropped_total") == 5
    assert exported("vllm:kvsm_connector_log_events_dropped_total") == 4
    assert exported("vllm:kvsm_blocks_stored_total") == 3


def test_a_connector_alone_has_the_documented_names() -> None:
    """Also beside the exporter of another engine in this process."""
    other, prom = exporter(CONNECTOR), exporter(CONNECTOR)
    stats = KvsmStats()
    stats.grow("blocks_stored", {"": 3})
    other.observe({"KvsmConnector": stats.data})
    prom.observe({"KvsmConnector": stats.data})
    assert exported("vllm:kvsm_blocks_stored_total") == 6
    assert exported("vllm:kvsm_connector_blocks_stored_total") is None


def test_an_engine_that_follows_another_one_in_its_process_exports_too() -> None:
    """vLLM unregisters what the engine before has registered. Some names may be a `RecordingSpec`'s then."""
    stats = KvsmStats()
    stats.grow("log_events_dropped", {"": 3})
    exporter(CONNECTOR).observe({"KvsmConnector": stats.data})
    unregister_vllm_metrics()
    for times in (1, 2):
        exporter(CONNECTOR).observe({"KvsmConnector": stats.data})
        assert exported("vllm:kvsm_log_events_dropped_total") == 3 * times
    unregister_vllm_metrics()
    both = exporter(CONNECTOR, RECORDING)
    for times in (1, 2):
        both.observe({"KvsmConnector": stats.data})
        assert exported("vllm:kvsm_connector_log_events_dropped_total") == 3 * times
    assert exported("vllm:kvsm_log_events_dropped_total") is None


def test_two_connectors_add_up() -> None:
    """vLLM merges their statistics. Both pools count, also in a step in which only one has news."""
    prom = exporter(CONNECTOR, CONNECTOR)
    (first, of_first), (second, of_second) = pool(10), pool(20)
    merged = MultiKVConnectorStats()
    for core, source in ((first, of_first), (second, of_second)):
        core.arrive("r")
        stats = source.take()
        assert stats is not None
        if "KvsmConnector" in merged.data:
            merged["KvsmConnector"] = merged["KvsmConnector"].aggregate(stats)
        else:
            merged["KvsmConnector"] = stats
    assert merged.reduce()["KvsmConnector"]["kvsm_capacity_blocks"] == 30
    prom.observe(merged.to_dict())
    assert exported("vllm:kvsm_capacity_blocks") == 30
    assert exported("vllm:kvsm_known_requests") == 2
    second.finish("r")
    news = of_second.take()
    assert news is not None
    assert of_first.take() is None
    prom.observe({"KvsmConnector": news.data})
    assert exported("vllm:kvsm_known_requests") == 1
    assert exported("vllm:kvsm_capacity_blocks") == 30
