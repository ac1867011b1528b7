"""kvsm's metrics in the form of vLLM's OffloadingConnector, beside those that this counts itself.

Bytes copied and the time for it are among the latter. Histograms are left to the event log.
"""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
)

from kvsm.metrics import METRICS
from kvsm.vllm.connector_stats import StatsSource
from kvsm.vllm.engine_offloader import EngineOffloader

_EXPORTED = {metric.name: metric for metric in METRICS if metric.kind != "histogram"}


def metric_definitions() -> dict[str, OffloadingMetricMetadata]:
    """Of all that `SpecStats` may give."""
    return {
        _title(name): (OffloadingCounterMetadata if metric.kind == "counter" else OffloadingGaugeMetadata)(
            metric.help, tuple(metric.labels)
        )
        for name, metric in _EXPORTED.items()
    }


class SpecStats:
    """What has changed since it was asked last."""

    def __init__(self, core: EngineOffloader) -> None:
        self._source = StatsSource(core.metrics, core.offloader.ledger)

    def take(self) -> OffloadingConnectorStats | None:
        """None where no event has happened."""
        taken = self._source.take()
        if taken is None:
            return None
        stats = OffloadingConnectorStats()
        for name, series in taken.data.items():
            counted = _EXPORTED[name].kind == "counter"
            for labels, value in series.items():
                note = stats.increase_counter if counted else stats.set_gauge
                note(_title(name), value, tuple(labels.split(",")) if labels else ())
        return stats


def _title(name: str) -> str:
    return f"vllm:kvsm_{name}"
