"""kvsm's metrics in the form of vLLM's OffloadingConnector, which counts copied bytes and their time
itself."""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
)

from kvsm.metrics import METRICS
from kvsm.vllm.connector_stats import KvsmStats

_EXPORTED = {metric.name: metric for metric in METRICS if metric.kind != "histogram"}


def metric_definitions() -> dict[str, OffloadingMetricMetadata]:
    """Every metric that `to_offloading_stats` may give, by its name in vLLM."""
    kinds = {"counter": OffloadingCounterMetadata, "gauge": OffloadingGaugeMetadata}
    return {
        _title(name): kinds[metric.kind](metric.help, tuple(metric.labels))
        for name, metric in _EXPORTED.items()
    }


def to_offloading_stats(taken: KvsmStats | None) -> OffloadingConnectorStats | None:
    """The same numbers for vLLM's OffloadingConnector."""
    if taken is None:
        return None
    stats = OffloadingConnectorStats()
    notes = {"counter": stats.increase_counter, "gauge": stats.set_gauge}
    for name, series in taken.data.items():
        for labels, value in series.items():
            notes[_EXPORTED[name].kind](_title(name), value, tuple(labels.split(",")) if labels else ())
    return stats


def _title(name: str) -> str:
    return f"vllm:kvsm_{name}"
