"""kvsm's metrics under the names of vLLM's own offload, in a real Prometheus registry. Nothing is served."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from core_life import begin_store, keys, load
from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from scenes import spec_config
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import metrics as vllm_metrics
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.metrics.prometheus import unregister_vllm_metrics

from kvsm.core.offloader import Offloader
from kvsm.core.scheduler import GroupKind, KVCacheGroup
from kvsm.events import OffloadConfig, SkipReason
from kvsm.explain.metric_table import EXPORTED, FACTS, VLLM_FACTS
from kvsm.explain.metrics import Metrics, histogram
from kvsm.explain.vllm_metric_names import NAMES_IN_VLLM, SHARED
from kvsm.vllm.connector_stats import Growth, KvsmPromMetrics, KvsmStats, StatsSource
from kvsm.vllm.scheduler_side import tokens_on_host
from kvsm.vllm.trial import connector_config

METRIC_TYPES: Any = {Gauge: Gauge, Counter: Counter, Histogram: Histogram}


@pytest.fixture(autouse=True)
def _no_metric_is_left() -> Iterator[None]:
    unregister_vllm_metrics()
    yield
    unregister_vllm_metrics()


class Registered(NamedTuple):
    """What Prometheus knows of a metric."""

    kind: str
    labels: tuple[str, ...]
    bounds: tuple[float, ...]


def registered() -> dict[str, Registered]:
    """The metrics of an offload that are registered now, by name."""
    return {
        metric._name: Registered(
            metric._type, tuple(metric._labelnames), tuple(metric._kwargs.get("buckets", ()))
        )
        for metric in set(REGISTRY._collector_to_names)
        if isinstance(metric, Counter | Gauge | Histogram) and metric._name.startswith("vllm:kv_offload_")
    }


def vllm_config(**transfer: Any) -> Any:
    return SimpleNamespace(kv_transfer_config=KVTransferConfig(**transfer))


def kvsm_exporter() -> KvsmPromMetrics:
    return KvsmPromMetrics(SimpleNamespace(kv_transfer_config=None), METRIC_TYPES, ["engine"], {0: ["0"]})


def test_names_kinds_labels_and_bounds_are_those_of_vllm() -> None:
    """A panel made for vLLM's OffloadingConnector shows kvsm. vLLM 0.32 has no config_info."""
    of_vllm = spec_config(cpu_bytes_to_use=1, store_threshold=2)
    of_vllm["kv_connector_extra_config"].pop("spec_name")
    of_vllm["kv_connector_extra_config"].pop("spec_module_path", None)
    OffloadingConnector.build_prom_metrics(vllm_config(**of_vllm), METRIC_TYPES, ["engine"], {0: ["0"]})
    expected = registered()
    unregister_vllm_metrics()
    kvsm_exporter().observe({})
    found = registered()
    if not hasattr(vllm_metrics, "KV_OFFLOAD_CONFIG_INFO"):
        found.pop("vllm:kv_offload_config_info")
    assert len(expected) >= 17
    assert found == expected
    assert {f"vllm:{name}" for name in NAMES_IN_VLLM} >= set(found)


def test_the_values_of_vllms_transfer_type_are_known() -> None:
    types = {labels[0] for one in SHARED if one.metric.labels for labels in (one.series or {}).values()}
    assert types == set(vllm_metrics._TransferType.ALL)


def sample(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(name, {"engine": "0", **labels})


def worker_stats(growth: Growth, store_sizes: dict[int, int], load_sizes: dict[int, int]) -> KvsmStats:
    """The statistics of a worker that has made copies of these sizes, a millisecond each."""
    stats, sizes = KvsmStats(), {"store": store_sizes, "load": load_sizes}
    copied = {way: sum(size * times for size, times in found.items()) for way, found in sizes.items()}
    seconds = {way: sum(found.values()) / 1000 for way, found in sizes.items()}
    values = {
        "copied_bytes": copied,
        "copy_seconds": seconds,
        "copy_bytes": {way: histogram("copy_bytes", found) for way, found in sizes.items()},
    }
    growth.add(stats, values)
    return stats


def test_copies_add_up_with_kvsms_own_counters() -> None:
    exporter, growth = kvsm_exporter(), Growth()
    exporter.observe(worker_stats(growth, {1 << 20: 2}, {1 << 19: 1}).data)
    exporter.observe(worker_stats(growth, {1 << 20: 3, 1 << 26: 1}, {1 << 19: 1, 1 << 21: 4}).data)
    for way, stored, title in (
        ("store", 3 * 2**20 + 2**26, "GPU_to_CPU"),
        ("load", 2**19 + 4 * 2**21, "CPU_to_GPU"),
    ):
        copies = 4 if way == "store" else 5
        assert sample("vllm:kvsm_copied_bytes_total", direction=way) == stored
        assert sample(f"vllm:kv_offload_{way}_bytes_total") == stored
        assert sample("vllm:kv_offload_total_bytes_total", transfer_type=title) == stored
        assert sample(f"vllm:kv_offload_{way}_size_sum") == stored
        assert sample("vllm:kv_offload_size_sum", transfer_type=title) == stored
        assert sample(f"vllm:kv_offload_{way}_size_count") == copies
        assert sample(f"vllm:kv_offload_{way}_time_total") == pytest.approx(copies / 1000)
        assert sample("vllm:kv_offload_total_time_total", transfer_type=title) == pytest.approx(copies / 1000)
    # A store of a MiB is above vLLM's first bound, 1e6; a load of half of it is not.
    assert sample("vllm:kv_offload_store_size_bucket", le="1e+06") == 0
    assert sample("vllm:kv_offload_load_size_bucket", le="1e+06") == 1


def test_the_scheduler_s_values_add_up_with_kvsms_own() -> None:
    """Waits, stores without room, skips by the threshold, and the use of the pool."""
    now = 0
    core = Offloader(OffloadConfig(host_blocks=4, device_blocks=32), clock_ns=lambda: now)
    metrics, exporter = Metrics.attached_to(core), kvsm_exporter()
    source = StatsSource(metrics, dict.fromkeys(FACTS, "7"))
    core.skip((("a", 3),), keys(3, "rare"), SkipReason.BELOW_THRESHOLD)
    transfer = begin_store(core, "a", keys(3))
    core.arrive("b")
    core.defer("b", transfer)
    now += 20_000_000
    source.lookups.observe(0.002)
    taken = source.take()
    assert taken is not None
    exporter.observe(taken.data)
    assert sample("vllm:kv_offload_cpu_cache_usage_perc") == 3 / 4
    assert sample("vllm:kv_offload_cpu_cache_write_usage_perc") == 3 / 4
    assert sample("vllm:kv_offload_cpu_cache_read_usage_perc") == 0
    assert sample("vllm:kv_offload_stores_skipped_total") == 3
    assert sample("vllm:kv_offload_config_info", **dict.fromkeys(VLLM_FACTS, "7")) == 1
    core.complete_store(transfer, 0)
    load(core, "c", keys(2))
    core.prepare_store("a", keys(4, "more"), [8, 9, 10, 11])
    core.skip((("a", 4),), keys(4, "rarer"), SkipReason.BELOW_THRESHOLD)
    taken = source.take()
    assert taken is not None
    exporter.observe(taken.data)
    values = metrics.values()
    assert sample("vllm:kv_offload_cpu_cache_read_usage_perc") == 2 / 4
    assert sample("vllm:kv_offload_allocation_failure_total") == values["allocation_failures"] == 1
    assert sample("vllm:kv_offload_stores_skipped_total") == 7
    assert values["blocks_skipped"]["offered too seldom"] == 7
    assert values["deferral_seconds"].sum == pytest.approx(0.02)
    assert values["allocation_blocks"].sum == 5
    for name, times, total in (
        ("lookup_async_delay_seconds", values["deferral_seconds"].count, 0.02),
        ("cpu_allocation_size", values["allocation_blocks"].count, 5),
        ("lookup_sync_delay_seconds", 1, 0.002),
    ):
        assert sample(f"vllm:kv_offload_{name}_sum") == pytest.approx(total), name
        assert sample(f"vllm:kv_offload_{name}_count") == times, name


@pytest.mark.parametrize("chunk", [1, 3])
def test_the_tokens_on_the_host_are_counted_as_in_vllm(chunk: int) -> None:
    """For a model with all kinds of layers. vLLM 0.32 does not count them."""
    common = pytest.importorskip("vllm.v1.kv_offload.cpu.common")
    if not hasattr(common, "_kv_cache_size_tokens"):
        pytest.skip("this version of vLLM has no config_info")
    groups = (
        KVCacheGroup(16),
        KVCacheGroup(16, GroupKind.SLIDING_WINDOW, window=100),
        KVCacheGroup(16, GroupKind.CHUNKED_LOCAL, window=64),
        KVCacheGroup(16, GroupKind.MAMBA),
    )
    windows = (None, -(-100 // (16 * chunk)), -(-64 // (16 * chunk)), 1)
    of_vllm = SimpleNamespace(
        model=SimpleNamespace(max_model_len=1000),
        cache=SimpleNamespace(blocks_per_chunk=chunk),
        groups=[
            SimpleNamespace(tokens_per_block=16, sliding_window_size_in_chunks=window) for window in windows
        ],
    )
    config = OffloadConfig(host_blocks=777, device_blocks=8, blocks_per_chunk=chunk)
    assert tokens_on_host(config, groups, 1000) == common._kv_cache_size_tokens(of_vllm, 777)


def test_every_counter_is_exported_before_its_first_event() -> None:
    """A series that appears with its first event hides this event from `increase`."""
    kvsm_exporter().observe({})
    for metric, prefix in (
        *((metric, "vllm:kvsm_") for metric in EXPORTED.values()),
        *((metric, "vllm:") for metric in NAMES_IN_VLLM.values()),
    ):
        ending = {"counter": "_total", "histogram": "_count", "gauge": ""}[metric.kind]
        for _, *values in metric.series():
            found = sample(f"{prefix}{metric.name}{ending}", **dict(zip(metric.labels, values)))
            assert found == (None if metric.kind == "gauge" else 0), metric.name


@pytest.mark.parametrize("first", ["kvsm", "vllm"])
def test_beside_vllms_own_offload_the_names_are_left_to_it(first: str) -> None:
    """Prometheus refuses a name that is registered twice."""
    of_vllm = spec_config(cpu_bytes_to_use=1)
    of_vllm["kv_connector_extra_config"].pop("spec_name")
    of_vllm["kv_connector_extra_config"].pop("spec_module_path", None)
    children = [connector_config(cpu_bytes_to_use=1), of_vllm]
    both = vllm_config(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": children if first == "kvsm" else children[::-1]},
    )
    exporter = MultiConnector.build_prom_metrics(both, METRIC_TYPES, ["engine"], {0: ["0"]})
    stats = worker_stats(Growth(), {100: 1}, {})
    exporter.observe({"KvsmConnector": stats.data})
    assert sample("vllm:kvsm_copied_bytes_total", direction="store") == 100
    assert not sample("vllm:kv_offload_store_bytes_total")
    # vLLM has this one only with a `store_threshold`. kvsm's value would be taken for vLLM's.
    assert sample("vllm:kv_offload_stores_skipped_total") is None
