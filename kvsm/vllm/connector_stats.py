"""kvsm's metrics in vLLM's log and at its metrics endpoint.

Counters and histograms are sent as their growth since the last time, gauges as their value. The names are
`vllm:kvsm_` and the name in `kvsm.explain.metric_table`. Two counters come from the workers: bytes copied,
and time spent in copies. vLLM passes plain numbers from the engine to the process that exports them, and adds
them up on the way. So a histogram travels as growth: of each bucket, by its index, and of the sum. A
Prometheus histogram accepts only single values, which `spread` computes.

A MultiConnector may have several connectors, but Prometheus allows each name only once:

- Two KvsmConnectors share their metrics, because vLLM merges their statistics by adding. That is right for
  counters. A gauge is sent with a value for each host pool, and the sum over pools is exported.
- A `RecordingSpec` has the metrics of its log under the same names, which vLLM registers when it starts. So
  the connector registers its own metrics later, when it exports the first numbers, under other names if these
  are taken.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import Any

from prometheus_client import REGISTRY
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvsm.explain.metric_table import EXPORTED, FACTS, Metric
from kvsm.explain.metrics import HistogramValue, Metrics, spread

ADDED = frozenset(name for name, metric in EXPORTED.items() if metric.kind != "gauge")
"""The metrics whose numbers are growth. The others are current values."""

SUM = "sum"
"""Used instead of the index of a bucket for the sum of a histogram."""

Series = tuple[str, ...]
"""(name, *values of its labels)."""


class KvsmStats(KVConnectorStats):
    """Statistics of a connector, as plain data that crosses processes.

    data: metric -> label values, joined with commas -> number; for a gauge, host pool -> number. A histogram
        has one more label: the index of a bucket, or `sum`.
    """

    data: dict[str, dict[str, Any]]

    def count(self, name: str, labels: Series, more: float) -> None:
        """Add to a counter, or to a part of a histogram."""
        if more:
            series = self.data.setdefault(name, {})
            series[",".join(labels)] = series.get(",".join(labels), 0) + more

    def gauge(self, name: str, labels: Series, pool: str, value: float) -> None:
        """Set a gauge of this host pool."""
        self.data.setdefault(name, {}).setdefault(",".join(labels), {})[pool] = value

    def aggregate(self, other: KVConnectorStats) -> KvsmStats:
        """Add the statistics of another process or step."""
        for name, series in other.data.items():
            for labels, value in series.items():
                if name in ADDED:
                    self.count(name, (labels,), value)
                else:
                    for pool, of_pool in value.items():
                        self.gauge(name, (labels,), pool, of_pool)
        return self

    def reset(self) -> None:
        """Forget everything."""
        self.data = {}

    def reduce(self) -> dict[str, int | float]:
        """Return the numbers for one line of vLLM's log: counters and gauges that are not 0."""
        totals = {
            f"kvsm_{name}{'{' + labels + '}' if labels else ''}": value
            if name in ADDED
            else sum(value.values())
            for name, series in self.data.items()
            if name != "config_info" and EXPORTED[name].kind != "histogram"
            for labels, value in series.items()
        }
        return {title: round(total, 6) for title, total in totals.items() if total}

    def is_empty(self) -> bool:
        """Whether there is nothing to report."""
        return not self.data


STATS_INTERVAL_S = 1.0
"""The shortest time between two statistics of a busy engine (s). vLLM asks for them in each step, but it logs
a line every ten seconds, and Prometheus rarely scrapes more often than once a second."""

_POOLS = count()


class StatsSource:
    """Makes the statistics of a ledger since the last ones.

    facts: the values of `config_info`, by label; None: there is no such metric.
    beside: returns the values of metrics that do not follow from the events.
    busy: whether more steps are certain to follow. Then statistics are made once in `STATS_INTERVAL_S`.
    clock: returns monotonic time (s); public, so that a test can replace it.
    """

    def __init__(
        self,
        metrics: Metrics,
        facts: Mapping[str, object] | None = None,
        beside: Callable[[], Mapping[str, Any]] = dict,
        busy: Callable[[], bool] = lambda: False,
    ) -> None:
        self._facts, self._beside, self._busy = facts, beside, busy
        self.clock: Callable[[], float] = time.monotonic
        self._due_at = 0.0
        self._pool = str(next(_POOLS))
        self._metrics, self._ledger = metrics, metrics.ledger
        self._sent: dict[Series, float] = {}
        self._values: dict[str, Any] = {}
        """All values as they were last sent. They must be immutable."""
        self._sent_at = -1, (0, 0)

    def take(self) -> KvsmStats | None:
        """Return what has changed since the last statistics.

        None if there was no event and the health of the log is the same; and None while the engine is busy
        and `STATS_INTERVAL_S` is not over. An idle engine may take no further step, so its changes are
        returned at once.
        """
        if self.clock() < self._due_at and self._busy():
            return None
        now = self._ledger.seq, self._metrics.log_health()
        if now == self._sent_at:
            return None
        self._sent_at, self._due_at = now, self.clock() + STATS_INTERVAL_S
        stats = KvsmStats()
        if self._facts is not None:
            # Not one value for each host pool: pools with the same facts share this value, which is 1.
            stats.gauge("config_info", tuple(str(self._facts[name]) for name in FACTS), "", 1)
            self._facts = None
        before, values = self._values, {**self._metrics.values(), **self._metrics.gauges(), **self._beside()}
        self._values = values
        changed = {
            name: value for name, value in values.items() if name not in ADDED or value != before.get(name)
        }
        for name, labels, value in _numbers(changed):
            if name in ADDED:
                series = (name, *labels)
                more = value - self._sent.get(series, 0)
                if more:
                    stats.count(name, labels, more)
                    self._sent[series] = value
            else:
                stats.gauge(name, labels, self._pool, value)
        return stats


_LABELS = {name: [tuple(labels) for _, *labels in metric.series()] for name, metric in EXPORTED.items()}
"""Metric -> the label values of each of its numbers."""


def _numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, Series, float]]:
    for name in EXPORTED:
        if name in values:
            for labels in _LABELS[name]:
                found = values[name]
                for label in labels:
                    found = found[label]
                if isinstance(found, HistogramValue):
                    for place, times in enumerate(found.counts):
                        yield name, (*labels, str(place)), times
                    yield name, (*labels, SUM), found.sum
                else:
                    yield name, labels, found


def histograms(name: str, series: Mapping[str, float]) -> Iterator[tuple[Series, float, int]]:
    """Yield values that reproduce a histogram from its data in `KvsmStats`: (labels, value, how often)."""
    bounds = EXPORTED[name].bounds
    counts: dict[Series, list[int]] = defaultdict(lambda: [0] * (len(bounds) + 1))
    sums: dict[Series, float] = defaultdict(float)
    for joined, number in series.items():
        *labels, place = joined.split(",")
        if place == SUM:
            sums[tuple(labels)] = number
        else:
            counts[tuple(labels)][int(place)] = int(number)
    for labels_of_series, filled in counts.items():
        for value, times in spread(bounds, filled, sums[labels_of_series]):
            yield labels_of_series, value, times


class KvsmPromMetrics(KVConnectorPromMetrics):
    """Registers the exported metrics with vLLM's registry, under vLLM's labels and their own."""

    def __init__(
        self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._families: dict[str, Any] = {}
        self._of_pools: dict[tuple[int, str, str], dict[str, float]] = {}
        """(engine, gauge, label values) -> host pool -> its last value."""

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Export the statistics that an engine has sent. transfer_stats_data: the data of a `KvsmStats`."""
        if not self._families:
            self._families = {name: self._family(metric) for name, metric in EXPORTED.items()}
        engine = self.per_engine_labelvalues[engine_idx]
        for name, series in transfer_stats_data.items():
            family, kind = self._families[name], EXPORTED[name].kind
            if kind == "histogram":
                for labels_of_series, number, times in histograms(name, series):
                    for _ in range(times):
                        family.labels(*engine, *labels_of_series).observe(number)
                continue
            for labels, value in series.items():
                child = family.labels(*engine, *(labels.split(",") if labels else ()))
                if kind == "counter":
                    child.inc(value)
                else:
                    of_pools = self._of_pools.setdefault((engine_idx, name, labels), {})
                    of_pools.update(value)
                    child.set(sum(of_pools.values()))

    def _family(self, metric: Metric) -> Any:
        """Return the metric, registered here or by another engine of this process.

        A `RecordingSpec` may have taken the name; then the metric gets another one.
        """
        for name in (f"vllm:kvsm_{metric.name}", f"vllm:kvsm_connector_{metric.name}"):
            try:
                _REGISTERED[name] = self._register(metric, name)
            except ValueError:  # The name is taken.
                # A later engine unregisters the metrics of earlier engines, so ours may be gone.
                if _REGISTERED.get(name) not in REGISTRY._collector_to_names:
                    continue
            return _REGISTERED[name]
        raise AssertionError(f"a metric that is not kvsm's has the name of {metric.name}")

    def _register(self, metric: Metric, name: str) -> Any:
        labels = [*self._labelnames, *metric.labels]
        if metric.kind == "counter":
            return self._counter_cls(name, metric.help, labelnames=labels)
        if metric.kind == "histogram":
            return self._histogram_cls(name, metric.help, labelnames=labels, buckets=metric.bounds)
        return self._gauge_cls(name, metric.help, labelnames=labels, multiprocess_mode="mostrecent")


_REGISTERED: dict[str, Any] = {}
"""The connector's metrics in this process, by name."""
