"""The metrics of a recorded manager's event log, in the form that vLLM's OffloadingConnector exports."""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
)

from kvsm.core.log import LogWriter
from kvsm.explain.metric_table import METRICS

LOG_METRICS = ("log_events_dropped", "log_broken")


def metric_definitions() -> dict[str, OffloadingMetricMetadata]:
    """Return the metrics that `LogStats` reports, by their names in vLLM."""
    kinds = {"counter": OffloadingCounterMetadata, "gauge": OffloadingGaugeMetadata}
    return {
        _title(metric.name): kinds[metric.kind](metric.help)
        for metric in METRICS
        if metric.name in LOG_METRICS
    }


class LogStats:
    """Adds the metrics of an event log to the statistics of vLLM's manager."""

    def __init__(self, writer: LogWriter) -> None:
        self._writer = writer
        self._dropped = 0
        self._broken = False

    def added_to(self, stats: OffloadingConnectorStats | None) -> OffloadingConnectorStats | None:
        """Return these statistics, with the metrics of the log that have changed since the last call."""
        dropped, broken = self._writer.dropped, self._writer.failure is not None
        if (dropped, broken) == (self._dropped, self._broken):
            return stats
        stats = OffloadingConnectorStats() if stats is None else stats
        stats.increase_counter(_title("log_events_dropped"), dropped - self._dropped)
        stats.set_gauge(_title("log_broken"), int(broken))
        self._dropped, self._broken = dropped, broken
        return stats


def _title(name: str) -> str:
    return f"vllm:kvsm_{name}"
