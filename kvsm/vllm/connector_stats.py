"""What vLLM logs and exports of kvsm: counters as they grew since the last step, and gauges as they stand.

Names are those of `kvsm.metrics`, behind `vllm:kvsm_`, without its histograms: vLLM hands on numbers, and a
log gives the histograms at any time. Two are of the workers: bytes copied, and seconds spent in copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvsm.ledger import Ledger
from kvsm.metrics import METRICS, Metric, Metrics, gauges

_DIRECTIONS = {"direction": ("store", "load")}

EXPORTED = (
    *[metric for metric in METRICS if metric.kind != "histogram"],
    Metric("copied_bytes", "counter", "Bytes that copies moved, on all workers.", _DIRECTIONS),
    Metric("copy_seconds", "counter", "Time spent in copies, on all workers.", _DIRECTIONS),
)

_COUNTERS = {metric.name for metric in EXPORTED if metric.kind == "counter"}

Series = tuple[str, ...]
"""(name, *values of its labels)."""


class KvsmStats(KVConnectorStats):
    """`data`: name -> values of the labels, joined with commas -> number. Plain, for it crosses processes."""

    data: dict[str, dict[str, float]]

    def count(self, name: str, labels: Series, more: float) -> None:
        if more:
            series = self.data.setdefault(name, {})
            series[",".join(labels)] = series.get(",".join(labels), 0) + more

    def gauge(self, name: str, labels: Series, value: float) -> None:
        self.data.setdefault(name, {})[",".join(labels)] = value

    def aggregate(self, other: KVConnectorStats) -> KvsmStats:
        for name, series in other.data.items():
            for labels, value in series.items():
                if name in _COUNTERS:
                    self.count(name, (labels,), value)
                else:
                    self.gauge(name, (labels,), value)
        return self

    def reset(self) -> None:
        self.data = {}

    def reduce(self) -> dict[str, int | float]:
        """One line of vLLM's log: what happened, and how full it is."""
        return {
            f"kvsm_{name}{'{' + labels + '}' if labels else ''}": round(value, 6)
            for name, series in self.data.items()
            for labels, value in series.items()
            if value
        }

    def is_empty(self) -> bool:
        return not self.data


class StatsSource:
    """What has changed since it was asked last."""

    def __init__(self, metrics: Metrics, ledger: Ledger) -> None:
        self._metrics, self._ledger = metrics, ledger
        self._told: dict[Series, float] = {}
        self._told_at = -1

    def take(self) -> KvsmStats | None:
        """None where no event has happened."""
        if self._ledger.seq == self._told_at:
            return None
        self._told_at = self._ledger.seq
        stats = KvsmStats()
        values = self._metrics.values() | gauges(self._ledger)
        for name, labels, value in _numbers(values):
            if name in _COUNTERS:
                series = (name, *labels)
                stats.count(name, labels, value - self._told.get(series, 0))
                self._told[series] = value
            else:
                stats.gauge(name, labels, value)
        return stats


def _numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, Series, float]]:
    for metric in EXPORTED:
        if metric.name in values:
            for _, *labels in metric.series():
                found = values[metric.name]
                for label in labels:
                    found = found[label]
                yield metric.name, tuple(labels), found


class KvsmPromMetrics(KVConnectorPromMetrics):
    """Registers every exported metric with vLLM's registry, labelled as vLLM labels its own."""

    def __init__(
        self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._families = {metric.name: self._family(metric) for metric in EXPORTED}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        engine = self.per_engine_labelvalues[engine_idx]
        for name, series in transfer_stats_data.items():
            for labels, value in series.items():
                child = self._families[name].labels(*engine, *(labels.split(",") if labels else ()))
                if name in _COUNTERS:
                    child.inc(value)
                else:
                    child.set(value)

    def _family(self, metric: Metric) -> Any:
        names = list(self._labelnames) + list(metric.labels)
        if metric.kind == "counter":
            return self._counter_cls(f"vllm:kvsm_{metric.name}", metric.help, labelnames=names)
        return self._gauge_cls(
            f"vllm:kvsm_{metric.name}", metric.help, labelnames=names, multiprocess_mode="mostrecent"
        )
