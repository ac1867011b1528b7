"""Export kvsm's metrics under the names of vLLM's own offload metrics, so that existing panels show kvsm.

vLLM's OffloadingConnector exports them as `vllm:kv_offload_*`. Each has vLLM's name, kind, labels and bounds
here, and takes its value from one of kvsm's own metrics: nothing is counted twice. docs/metrics.md says which
values are measured differently from vLLM's, and which of vLLM's metrics kvsm lacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvsm.explain.metric_table import EXPORTED, OF_LOADS, OF_STORES, VLLM_FACTS, Metric
from kvsm.states.block import BlockState

Labels = tuple[str, ...]

_DIRECTIONS = {OF_LOADS: "CPU_to_GPU", OF_STORES: "GPU_to_CPU"}
"""vLLM's values of `transfer_type`, a label of its deprecated metrics."""


class SharedMetric(NamedTuple):
    """A metric of kvsm under another name.

    metric: its definition. Its name is the one in vLLM, without `vllm:`.
    own: the name of kvsm's metric.
    series: values of the labels of kvsm's metric -> values of the labels here. Other series are left out.
        None: the first labels are the same, and kvsm's metric has more of them.
    """

    metric: Metric
    own: str
    series: Mapping[Labels, Labels] | None = None

    def labels(self, own: Labels) -> Labels | None:
        """Return the values of the labels of a series; None: it is left out. own: those of kvsm's series."""
        return own[: len(self.metric.labels)] if self.series is None else self.series.get(own)


class Usage(NamedTuple):
    """A gauge of the share of host slots in some states.

    metric: as in `SharedMetric`.
    """

    metric: Metric
    states: tuple[BlockState, ...]


def _shared(
    name: str,
    own: str,
    help: str,
    series: Mapping[Labels, Labels] | None = None,
    labels: Mapping[str, Labels] | None = None,
) -> SharedMetric:
    of = EXPORTED[own]
    return SharedMetric(Metric(f"kv_offload_{name}", of.kind, help, labels or {}, of.bounds), own, series)


def _direction(name: str, own: str, direction: str, help: str) -> SharedMetric:
    return _shared(name, own, help, {(direction,): ()})


def _both(name: str, own: str, help: str) -> SharedMetric:
    """Return a metric that vLLM has deprecated, but that panels made for older versions show."""
    labels = {"transfer_type": tuple(_DIRECTIONS.values())}
    return _shared(name, own, help, {(one,): (title,) for one, title in _DIRECTIONS.items()}, labels)


SHARED = (
    _direction("load_bytes", "copied_bytes", OF_LOADS, "Bytes loaded from host to device, on all workers."),
    _direction("load_time", "copy_seconds", OF_LOADS, "Seconds spent in loads, on all workers."),
    _direction("load_size", "copy_bytes", OF_LOADS, "Bytes of one good load on one worker."),
    _direction("store_bytes", "copied_bytes", OF_STORES, "Bytes stored from device to host, on all workers."),
    _direction("store_time", "copy_seconds", OF_STORES, "Seconds spent in stores, on all workers."),
    _direction("store_size", "copy_bytes", OF_STORES, "Bytes of one good store on one worker."),
    _shared(
        "lookup_sync_delay_seconds",
        "lookup_seconds",
        "Seconds of one lookup of a prompt on the host.",
    ),
    _shared(
        "lookup_async_delay_seconds",
        "deferral_seconds",
        "Seconds that a request waited for a copy in flight, until the copy or the request ended.",
    ),
    _shared(
        "allocation_failure",
        "allocation_failures",
        "Offers for which the host had no room for some or all of the blocks.",
    ),
    _shared("cpu_allocation_size", "allocation_blocks", "Host slots of a planned store from the device."),
    _shared(
        "stores_skipped",
        "blocks_skipped",
        "Blocks not stored because they were offered too seldom (store_threshold).",
        {("offered too seldom",): ()},
    ),
    _shared(
        "config_info",
        "config_info",
        "Always 1. The configuration of the host pool.",
        labels=dict.fromkeys(VLLM_FACTS, ()),
    ),
    _both("total_bytes", "copied_bytes", "Bytes of copies (deprecated by vLLM)."),
    _both("total_time", "copy_seconds", "Seconds spent in copies (deprecated by vLLM)."),
    _both("size", "copy_bytes", "Bytes of one good copy on one worker (deprecated by vLLM)."),
)
"""The metrics whose values are those of one metric of kvsm."""


def _usage(name: str, help: str, *states: BlockState) -> Usage:
    return Usage(Metric(f"kv_offload_cpu_cache_{name}", "gauge", help), states)


_STORING = (BlockState.ALLOCATED, BlockState.STORING)

USAGES = (
    _usage("usage_perc", "Share of host slots that a store or a load uses.", *_STORING, BlockState.LOADING),
    _usage("write_usage_perc", "Share of host slots that a store uses.", *_STORING),
    _usage("read_usage_perc", "Share of host slots that a load uses.", BlockState.LOADING),
)
"""Gauges that follow from `blocks` and `capacity_blocks`. Their names say percent, and the values are shares,
as in vLLM."""

NAMES_IN_VLLM: Mapping[str, Metric] = {one.metric.name: one.metric for one in (*SHARED, *USAGES)}
"""All these metrics by name, without `vllm:`."""
