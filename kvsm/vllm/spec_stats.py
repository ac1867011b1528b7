"""kvsm's metrics in the form of vLLM's OffloadingConnector, which counts copied bytes and their time
itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
)

from kvsm.core.log import LogWriter
from kvsm.explain.metrics import METRICS, Metric
from kvsm.vllm.connector_stats import KvsmStats, histograms

_EXPORTED = {metric.name: metric for metric in METRICS}

LOG_METRICS = ("log_events_dropped", "log_broken")
"""The metrics of a log, which a recorder has too."""


def metric_definitions(names: Iterable[str] = tuple(_EXPORTED)) -> dict[str, OffloadingMetricMetadata]:
    """These metrics by their names in vLLM. All are what `to_offloading_stats` may give."""
    return {_title(name): _definition(_EXPORTED[name]) for name in names}


def _definition(metric: Metric) -> OffloadingMetricMetadata:
    if metric.kind == "histogram":
        return OffloadingHistogramMetadata(metric.help, tuple(metric.labels), metric.bounds)
    kind = OffloadingCounterMetadata if metric.kind == "counter" else OffloadingGaugeMetadata
    return kind(metric.help, tuple(metric.labels))


def to_offloading_stats(taken: KvsmStats | None) -> OffloadingConnectorStats | None:
    """The same numbers for vLLM's OffloadingConnector."""
    if taken is None:
        return None
    stats = OffloadingConnectorStats()
    for name, series in taken.data.items():
        if _EXPORTED[name].kind == "histogram":
            for of_one, number, times in histograms(name, series):
                for _ in range(times):
                    stats.observe_histogram(_title(name), number, of_one)
            continue
        for labels, value in series.items():
            values = tuple(labels.split(",")) if labels else ()
            if _EXPORTED[name].kind == "counter":
                stats.increase_counter(_title(name), value, values)
            else:
                (of_the_only_pool,) = value.values()
                stats.set_gauge(_title(name), of_the_only_pool, values)
    return stats


CONFIG_LABELS = (
    "cpu_num_chunks",
    "cpu_blocks_per_chunk",
    "cpu_kv_cache_size_bytes",
    "cpu_kv_cache_size_tokens",
)
"""What vLLM's own spec says of its host memory, so that the same dashboards show kvsm's."""


def config_info(config: Any, num_slots: int) -> dict[str, int | str]:
    """The value of each of `CONFIG_LABELS`.

    config: vLLM's `OffloadingConfig`. num_slots: the size of the host pool (slots).
    """
    chunk = config.cache.blocks_per_chunk
    slot_bytes = config.worker_kv_bytes_per_block * chunk * config.parallel.world_size
    tokens = _longest_requests_tokens(config, num_slots)
    return dict(zip(CONFIG_LABELS, (num_slots, chunk, num_slots * slot_bytes, tokens)))


def _longest_requests_tokens(config: Any, num_slots: int) -> int | str:
    """Tokens of all requests of the greatest length that fit into the slots; "None" if that is not known."""
    longest = getattr(config.model, "max_model_len", 0)
    if not longest:
        return "None"
    slots_each = 0
    for group in config.groups:
        slots = -(-longest // (group.tokens_per_block * config.cache.blocks_per_chunk))
        window = group.sliding_window_size_in_chunks
        slots_each += slots if window is None else min(slots, window)
    return int(num_slots * longest // slots_each)


class LogStats:
    """Adds the metrics of a log to the statistics of a manager that knows nothing of the log."""

    def __init__(self, writer: LogWriter) -> None:
        self._writer = writer
        self._dropped = 0
        self._broken = False

    def added_to(self, stats: OffloadingConnectorStats | None) -> OffloadingConnectorStats | None:
        """These statistics, with what has changed of the log since the last call."""
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
