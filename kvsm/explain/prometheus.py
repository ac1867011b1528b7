"""Export metrics to Prometheus: `pip install 'kvsm[prometheus]'`.

    registry.register(PrometheusCollector(metrics))

Names are those of `kvsm.explain.metric_table` with the prefix `kvsm_`; counters end in `_total`. Values are
read at each scrape, so the exporter costs nothing between scrapes.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from kvsm.explain.metric_places import HistogramValue
from kvsm.explain.metric_table import METRICS, Metric
from kvsm.explain.metrics import Metrics

try:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ImportError(
        f"kvsm.explain.prometheus needs prometheus-client, which is not installed ({error}); "
        "pip install 'kvsm[prometheus]'"
    ) from error

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily

_FAMILIES = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}


class PrometheusCollector(Collector):
    """Exports the counters and histograms of `metrics`, and the gauges of its ledger and log."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def describe(self) -> Iterator[Family]:
        """The metrics without values, so that registering reads no values."""
        return map(_family, METRICS)

    def collect(self) -> Iterator[Family]:
        """All metrics with their values."""
        values = self._metrics.values() | self._metrics.gauges()
        for metric in METRICS:
            family = _family(metric)
            for series in metric.series():
                _add(family, series[1:], _at(values, series))
            yield family


def _family(metric: Metric) -> Family:
    family: Family = _FAMILIES[metric.kind](f"kvsm_{metric.name}", metric.help, labels=tuple(metric.labels))
    return family


def _at(values: Any, series: tuple[str, ...]) -> Any:
    for label in series:
        values = values[label]
    return values


def _add(family: Family, labels: tuple[str, ...], value: int | HistogramValue) -> None:
    if isinstance(family, HistogramMetricFamily):
        assert isinstance(value, HistogramValue)
        bounds = [*[str(float(bound)) for bound in value.bounds], "+Inf"]
        family.add_metric(labels, list(zip(bounds, accumulate(value.counts))), value.sum)
    else:
        assert isinstance(value, int)
        family.add_metric(labels, value)
