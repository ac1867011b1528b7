"""Which metrics kvsm gives to vLLM, and how a histogram crosses vLLM's processes. It needs no vLLM.

vLLM passes plain numbers from the engine to the process that exports them, and adds them up on the way. So a
histogram travels as growth: of each bucket, by its place, and of the sum. A Prometheus histogram takes single
values only, and `spread` gives such values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvsm.explain.metrics import METRICS, Metric

_DIRECTIONS = {"direction": ("store", "load")}

COPIES = (
    Metric("copied_bytes", "counter", "Bytes that copies moved, on all workers.", _DIRECTIONS),
    Metric("copy_seconds", "counter", "Time spent in copies, on all workers.", _DIRECTIONS),
)
"""What the workers of the connector count themselves."""

HAND_OVERS = (
    Metric(
        "hand_overs_missed",
        "counter",
        "Requests that compute a prompt which another engine was to hand over. vLLM's log says why.",
    ),
)
"""What the connector counts itself: a decode engine's event log has no refused hand-over."""

DISK = (
    Metric("disk_blocks", "gauge", "Blocks that the disk tier holds, or is storing."),
    Metric("disk_blocks_stored", "counter", "Blocks whose copy to the disk completed on every worker."),
    Metric("disk_blocks_loaded", "counter", "Blocks whose copy from the disk completed on every worker."),
    Metric(
        "disk_blocks_not_stored",
        "counter",
        "Blocks whose copy to the disk failed, found no room, or was overtaken by a reset. They stay on the "
        "host.",
    ),
)
"""What the connector counts of its disk tier, if it has one."""

SERVES_WITHOUT = Metric(
    "serves_without",
    "gauge",
    "1 if a part is configured and its files cannot be used: the engine serves without it until it restarts, "
    "and vLLM's log says why. Otherwise 0.",
    {"part": ("disk", "hand_over")},
)

FACTS = ("cpu_num_chunks", "cpu_blocks_per_chunk", "cpu_kv_cache_size_bytes", "policy", "store", "last_step")
"""The labels of `config_info`. The first three have the names that vLLM's own offload uses."""

CONFIG_INFO = Metric(
    "config_info",
    "gauge",
    "Always 1. Its labels say how the connector is configured: host slots, device blocks in each, bytes of "
    "host memory on all ranks, and the options of these names.",
    dict.fromkeys(FACTS, ()),
)

_OF_CONNECTOR = (*COPIES, *HAND_OVERS, *DISK, SERVES_WITHOUT, CONFIG_INFO)

EXPORTED: Mapping[str, Metric] = {metric.name: metric for metric in (*METRICS, *_OF_CONNECTOR)}
"""All metrics of the connector by name."""

ADDED = frozenset(name for name, metric in EXPORTED.items() if metric.kind != "gauge")
"""The metrics whose numbers are growth. The others say what is there now."""

SUM = "sum"
"""Stands for the place of a bucket, where a histogram's sum is sent."""

_INSIDE = 1e-9
"""How far within a bucket a value lies at least, as a share of the bucket."""


def spread(bounds: Sequence[float], counts: Sequence[int], total: float) -> list[tuple[float, int]]:
    """Values that fill these buckets and have this sum: (value, how often).

    bounds: the largest value in each bucket; the last bucket has none.
    counts: values in each bucket.
    total: the sum of the real values, which were all at least 0.
    """
    lowest = [min(0.0, bounds[0]), *bounds]
    widths = [high - low for low, high in zip(lowest, bounds)]
    least = sum(low * times for low, times in zip(lowest, counts))
    room = sum(width * times for width, times in zip(widths, counts))
    more, beyond = total - least, counts[len(bounds)]
    # A value above all bounds has no upper limit, so what is left of the sum goes there.
    share = _INSIDE if beyond or not room else min(1.0, max(_INSIDE, more / room))
    values = [
        (min(low + share * width, high), times)
        for low, width, high, times in zip(lowest, widths, bounds, counts)
        if times
    ]
    if beyond:
        rest = total - sum(value * times for value, times in values)
        values.append((max(rest / beyond, bounds[-1] * (1 + _INSIDE)), beyond))
    return values
