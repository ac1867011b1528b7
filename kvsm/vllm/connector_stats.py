"""kvsm's metrics in vLLM's log and at its metrics endpoint.

Counters and histograms are sent as their growth since the last time, gauges as their value. The names are
`vllm:kvsm_` and the name in `kvsm.explain.metric_table`; some values are exported once more, under the names
of vLLM's own offload (`kvsm.explain.vllm_metric_names`). The workers count bytes and times of copies. vLLM
passes plain numbers from the engine to the process that exports them, and adds them up on the way. So a
histogram travels as growth: of each bucket, by its index, and of the sum. A Prometheus histogram accepts only
single values, which `spread` computes.

A MultiConnector may have several connectors, but Prometheus allows each name only once:

- Two KvsmConnectors share their metrics, because vLLM merges their statistics by adding. That is right for
  counters. A gauge is sent with a value for each host pool, and the sum over pools is exported.
- A `RecordingSpec` has the metrics of its log under the same names, which vLLM registers when it starts. So
  the connector registers its own metrics later, when it exports the first numbers, under other names if these
  are taken.
- The names of vLLM's own offload are left to an OffloadingConnector, if the engine has one. It registers some
  of them only with certain options; the others are left out, so that no panel mixes the two.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from itertools import count, repeat
from typing import Any

from prometheus_client import REGISTRY
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvsm.explain.metric_places import NAMES, SUM, HistogramValue, Series
from kvsm.explain.metric_table import EXPORTED, FACTS, Metric
from kvsm.explain.metrics import Metrics, SecondsHistogram, spread
from kvsm.explain.vllm_metric_names import NAMES_IN_VLLM, SHARED, USAGES, SharedMetric, Usage
from kvsm.system.steady_clock import SteadyClock

ADDED = frozenset(name for name, metric in EXPORTED.items() if metric.kind != "gauge")
"""The metrics whose numbers are growth. The others are current values."""

_COUNTS = [(name, ",".join(labels)) for name, *labels in NAMES]
"""For each place of `metric_places`: (metric, its label values, joined with commas)."""


class KvsmStats(KVConnectorStats):
    """Statistics of a connector, as plain data that crosses processes.

    data: metric -> label values, joined with commas -> number; for a gauge, host pool -> number. A histogram
        has one more label: the index of a bucket, or `sum`. Several statistics may share the dict of a gauge,
        so it is replaced, and never changed.
    """

    data: dict[str, dict[str, Any]]

    def grow(self, name: str, grown: dict[str, float]) -> None:
        """Add to a counter or a histogram. grown: label values, joined with commas -> growth."""
        series = self.data.setdefault(name, {})
        for labels, more in grown.items():
            series[labels] = series.get(labels, 0) + more

    def aggregate(self, other: KVConnectorStats) -> KvsmStats:
        """Add the statistics of another process or step."""
        for name, series in other.data.items():
            if name in ADDED:
                self.grow(name, series)
            elif name in self.data:
                before = self.data[name]
                newer = {labels: before.get(labels, {}) | value for labels, value in series.items()}
                self.data[name] = before | newer
            else:
                self.data[name] = series
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


class Growth:
    """Adds to statistics how much counters and histograms have grown since they were sent."""

    def __init__(self) -> None:
        self._sent: Mapping[str, Any] = {}

    def add(self, stats: KvsmStats, values: Mapping[str, Any]) -> None:
        """Add the growth of these metrics. Gauges are ignored.

        values: as in `Metrics.values`: immutable, and all metrics in each call.
        """
        sent, self._sent = self._sent, values
        for name, value in values.items():
            if name in ADDED and value != (before := sent.get(name)):
                grown = _grown(before, value)
                if grown:
                    stats.grow(name, grown)


def _grown(before: Any, value: Any) -> dict[str, float]:
    """Return the growth of each number that has changed, by its label values, joined with commas.

    before: the value that was sent before; None: 0.
    """
    if isinstance(value, HistogramValue):
        counts = repeat(0) if before is None else before.counts
        numbers = enumerate(zip(value.counts, counts))
        grown: dict[str, float] = {
            str(place): now - earlier for place, (now, earlier) in numbers if now != earlier
        }
        if more := value.sum - (0 if before is None else before.sum):
            grown[SUM] = more
        return grown
    if not isinstance(value, dict):
        return {"": more} if (more := value - (before or 0)) else {}
    grown = {}
    for label, of_label in value.items():
        earlier = None if before is None else before.get(label)
        if of_label != earlier:
            for labels, more in _grown(earlier, of_label).items():
                grown[f"{label},{labels}" if labels else label] = more
    return grown


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
    lookups: the durations of lookups, which the scheduler's side counts here.
    """

    def __init__(
        self,
        metrics: Metrics,
        facts: Mapping[str, object] | None = None,
        beside: Callable[[], Mapping[str, Any]] = dict,
        busy: Callable[[], bool] = lambda: False,
    ) -> None:
        self._facts, self._beside, self._busy = facts, beside, busy
        self.lookups = SecondsHistogram("lookup_seconds")
        self.clock: Callable[[], float] = SteadyClock()
        self._due_at = 0.0
        self._pool = str(next(_POOLS))
        self._metrics, self._ledger = metrics, metrics.ledger
        self._sent_at = -1, (0, 0)
        self._growth = Growth()
        self._values: dict[str, Any] = {}
        self._gauges: dict[str, dict[str, dict[str, float]]] = {}
        """Gauge -> its value when it was sent, and what was sent for it."""

    def take(self) -> KvsmStats | None:
        """Return what has changed since the last statistics, and all gauges.

        None if there was no event and the health of the log is the same; and None while the engine is busy
        and `STATS_INTERVAL_S` is not over. An idle engine may take no further step, so its changes are
        returned at once.
        """
        clock_s = self.clock()
        if clock_s < self._due_at and self._busy():
            return None
        now = self._ledger.seq, self._metrics.log_health()
        if now == self._sent_at:
            return None
        self._sent_at, self._due_at = now, clock_s + STATS_INTERVAL_S
        stats = KvsmStats()
        if self._facts is not None:
            # Not one value for each host pool: pools with the same facts share this value, which is 1.
            stats.data["config_info"] = {",".join(str(self._facts[name]) for name in FACTS): {"": 1}}
            self._facts = None
        beside = {**self._beside()}
        self._add_counts(stats.data)
        if grown := self.lookups.take_growth():
            stats.data["lookup_seconds"] = grown
        self._growth.add(stats, beside)
        self._add_gauges(stats.data, {**self._metrics.gauges(), **beside})
        return stats

    def _add_counts(self, data: dict[str, dict[str, Any]]) -> None:
        """Add the growth of what the events count."""
        grown = self._metrics.take_growth()
        for place in sorted(grown):
            if more := grown[place]:
                name, labels = _COUNTS[place]
                series = data.get(name)
                if series is None:
                    series = data[name] = {}
                series[labels] = more

    def _add_gauges(self, data: dict[str, dict[str, Any]], values: dict[str, Any]) -> None:
        """Add all gauges. Those that have not changed are the ones that were sent before."""
        before, gauges = self._values, self._gauges
        self._values = values
        for name, value in values.items():
            if value != before.get(name) and name in _GAUGES:
                gauges[name] = self._gauge(name, value)
        data.update(gauges)

    def _gauge(self, name: str, value: Any) -> dict[str, dict[str, float]]:
        """Return what to send of a gauge of this host pool."""
        series = {}
        for labels, joined in _GAUGES[name]:
            number = value
            for label in labels:
                number = number[label]
            series[joined] = {self._pool: number}
        return series


_GAUGES = {
    name: [(labels, ",".join(labels)) for _, *labels in metric.series()]
    for name, metric in EXPORTED.items()
    if name not in ADDED and name != "config_info"
}
"""Gauge -> its series: (label values, the same values joined with commas)."""


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
        """Metric in `EXPORTED` -> what is registered for it."""
        self._shared: dict[str, list[tuple[SharedMetric, Any]]] = defaultdict(list)
        """The same metric -> the metrics with its values under the names of vLLM's own offload."""
        self._usages: list[tuple[Usage, Any]] = []
        self._of_pools: dict[tuple[int, str, str], dict[str, float]] = {}
        """(engine, gauge, label values) -> host pool -> its last value."""

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Export the statistics that an engine has sent. transfer_stats_data: the data of a `KvsmStats`."""
        if not self._families:
            self._register_all()
        for name, series in transfer_stats_data.items():
            values = [*self._values(engine_idx, name, series)]
            self._export(engine_idx, self._families[name], EXPORTED[name], values)
            for shared, family in self._shared[name]:
                under = [(shared.labels(labels), value, times) for labels, value, times in values]
                named = [(labels, value, times) for labels, value, times in under if labels is not None]
                self._export(engine_idx, family, shared.metric, named)
        if "capacity_blocks" in transfer_stats_data:
            for usage, family in self._usages:
                used = sum(self._total(engine_idx, "blocks", state.name) for state in usage.states)
                share = used / self._total(engine_idx, "capacity_blocks", "")
                self._export(engine_idx, family, usage.metric, [((), share, 1)])

    def _values(
        self, engine_idx: int, name: str, series: Mapping[str, Any]
    ) -> Iterator[tuple[Series, float, int]]:
        """Yield what to export of a metric: (label values, value, how often to observe it)."""
        kind = EXPORTED[name].kind
        if kind == "histogram":
            yield from histograms(name, series)
            return
        for labels, value in series.items():
            if kind == "gauge":
                self._of_pools.setdefault((engine_idx, name, labels), {}).update(value)
                value = self._total(engine_idx, name, labels)
            yield tuple(labels.split(",")) if labels else (), value, 1

    def _total(self, engine_idx: int, name: str, labels: str) -> float:
        """Return the sum of a gauge over the engine's host pools."""
        return sum(self._of_pools.get((engine_idx, name, labels), {}).values())

    def _export(
        self, engine_idx: int, family: Any, metric: Metric, values: list[tuple[Series, float, int]]
    ) -> None:
        engine = self.per_engine_labelvalues[engine_idx]
        for labels, value, times in values:
            child = family.labels(*engine, *labels)
            if metric.kind == "counter":
                child.inc(value)
            elif metric.kind == "gauge":
                child.set(value)
            else:
                for _ in range(times):
                    child.observe(value)

    def _register_all(self) -> None:
        """Register every metric. Counters and histograms begin at 0: a series that appears with its first
        event would hide this event from a rate."""
        for name, metric in EXPORTED.items():
            # A `RecordingSpec` may have taken the first name.
            family = self._family(metric, f"vllm:kvsm_{name}", f"vllm:kvsm_connector_{name}")
            if family is None:
                raise AssertionError(f"a metric that is not kvsm's has the name of {name}")
            self._families[name] = family
        if not all(map(_is_free, NAMES_IN_VLLM.values())):
            return
        for shared in SHARED:
            if (family := self._family(shared.metric, f"vllm:{shared.metric.name}")) is not None:
                self._shared[shared.own].append((shared, family))
        for usage in USAGES:
            if (family := self._family(usage.metric, f"vllm:{usage.metric.name}")) is not None:
                self._usages.append((usage, family))

    def _family(self, metric: Metric, *names: str) -> Any:
        """Return the metric, registered here or by another engine of this process, under the first of these
        names that is free; None if another connector has taken all of them."""
        for name in names:
            try:
                _REGISTERED[name] = self._register(metric, name)
            except ValueError:  # The name is taken.
                # A later engine unregisters the metrics of earlier engines, so ours may be gone.
                if _REGISTERED.get(name) not in REGISTRY._collector_to_names:
                    continue
            family = _REGISTERED[name]
            if metric.kind != "gauge":
                for engine in self.per_engine_labelvalues.values():
                    for _, *labels in metric.series():
                        family.labels(*engine, *labels)
            return family
        return None

    def _register(self, metric: Metric, name: str) -> Any:
        labels = [*self._labelnames, *metric.labels]
        if metric.kind == "counter":
            return self._counter_cls(name, metric.help, labelnames=labels)
        if metric.kind == "histogram":
            return self._histogram_cls(name, metric.help, labelnames=labels, buckets=metric.bounds)
        return self._gauge_cls(name, metric.help, labelnames=labels, multiprocess_mode="mostrecent")


def _is_free(metric: Metric) -> bool:
    """Whether the name of the metric is free: no other connector has registered it."""
    name, taken = f"vllm:{metric.name}", REGISTRY._names_to_collectors
    holders = [taken[f"{name}{ending}"] for ending in ("", "_total", "_count") if f"{name}{ending}" in taken]
    return all(holder is _REGISTERED.get(name) for holder in holders)


_REGISTERED: dict[str, Any] = {}
"""The connector's metrics in this process, by name."""
