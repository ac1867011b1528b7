"""Where each counter and histogram of an engine is counted: all of them are one list of numbers.

With one list, a reader that keeps the numbers of its last look finds at once which of them have changed. A
counter has one place for each combination of its label values. A histogram has places for its buckets, and
after them one for the sum of its values.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvsm.explain.metric_table import METRICS, Metric

Series = tuple[str, ...]
"""(name of a metric, *values of its labels)."""

SUM = "sum"
"""In `NAMES`, the last item for the sum of a histogram, where a bucket has its index."""


class HistogramValue(msgspec.Struct, frozen=True):
    """A histogram so far.

    bounds: the largest value in each bucket but the last, which has no bound.
    counts: the number of values in each bucket; one more than bounds.
    sum: the sum of all values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float

    @property
    def count(self) -> int:
        """Number of values."""
        return sum(self.counts)


COUNTED = tuple(metric for metric in METRICS if metric.kind != "gauge")
"""The metrics that have places."""


def _names(metric: Metric, series: Series) -> list[Series]:
    if metric.kind == "counter":
        return [series]
    return [(*series, bucket) for bucket in [*map(str, range(len(metric.bounds) + 1)), SUM]]


def _places() -> tuple[list[Series], dict[Series, int]]:
    names: list[Series] = []
    places: dict[Series, int] = {}
    for metric in COUNTED:
        for series in metric.series():
            places[series] = len(names)
            names += _names(metric, series)
    return names, places


NAMES: Sequence[Series]
"""For each place: its series, and in a histogram also the index of the bucket, or `SUM`."""

PLACES: Mapping[Series, int]
"""Series -> its place; of a histogram, the place of its first bucket."""

NAMES, PLACES = _places()


def sum_place(series: Series) -> int:
    """Return the place of the sum of a histogram."""
    return PLACES[series] + len(_BOUNDS[series[0]]) + 1


_BOUNDS = {metric.name: metric.bounds for metric in COUNTED}


class Buckets(msgspec.Struct, frozen=True, gc=False):
    """The bounds of a histogram, and the places of its first bucket and of its sum."""

    bounds: tuple[float, ...]
    first: int
    sum: int

    @classmethod
    def of(cls, *series: str) -> Buckets:
        """series: the name of a histogram, and the values of its labels."""
        return cls(_BOUNDS[series[0]], PLACES[series], sum_place(series))

    def observe(self, grown: dict[int, float], value: float) -> None:
        """Count a value."""
        grown[self.first + bisect_left(self.bounds, value)] += 1
        grown[self.sum] += value


def _form(metric: Metric, series: Series) -> Any:
    labels = [*metric.labels.values()]
    if len(series) <= len(labels):
        return {label: _form(metric, (*series, label)) for label in labels[len(series) - 1]}
    if metric.kind == "counter":
        return PLACES[series]
    return Buckets.of(*series)


_FORMS = {metric.name: _form(metric, (metric.name,)) for metric in COUNTED}
"""Metric -> its place. A metric with labels has a dict instead: value of the first label -> (value of the
second ->) place."""


def values_of(counts: Sequence[float]) -> dict[str, Any]:
    """Return name -> value, an int or a `HistogramValue`. A metric with labels has a dict instead: value of
    the first label -> (value of the second ->) number or `HistogramValue`.

    counts: the number of each place.
    """
    return {name: _read(form, counts) for name, form in _FORMS.items()}


def _read(form: Any, counts: Sequence[float]) -> Any:
    if type(form) is int:
        return counts[form]
    if type(form) is dict:
        return {label: _read(inner, counts) for label, inner in form.items()}
    buckets: Any = tuple(counts[form.first : form.sum])
    return HistogramValue(form.bounds, buckets, counts[form.sum])
