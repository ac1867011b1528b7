"""The picture of `vllm_gpu.py`: when a GPU computed and when it copied, from a trace of torch's profiler."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

Span = tuple[float, float]
"""Begin and end (us)."""

COPY_KERNEL = "kvsm_copy"
"""The kernel with which kvsm copies."""

COMPUTE, COPIES, REPORTED = "compute", "copies on the device", "copies as kvsm reports them"

COLOURS = {COMPUTE: "#4c78a8", COPIES: "#e45756", REPORTED: "#f2a900"}


def lanes_of(trace: Mapping[str, Any], beside: Mapping[str, Any]) -> dict[str, list[Span]]:
    """Return the lanes of the picture: name -> its spans, merged and in order.

    On a GPU, kernels are compute, except kvsm's; kvsm's kernel and copies between host and device are copies.
    Without a GPU the engine's steps stand for compute.

    trace: a Chrome trace with the mark `kvsm clock`.
    beside: `clock`, when the mark began; `copies`, as rows of `TimedCopy`; `steps`, as spans (s, one clock).
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    mark = next(event["ts"] for event in events if event["name"] == "kvsm clock")

    def on_trace(began: float, ended: float) -> Span:
        return (mark + 1e6 * (began - beside["clock"]), mark + 1e6 * (ended - beside["clock"]))

    compute: list[Span] = []
    copies: list[Span] = []
    for event in events:
        span = (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        kind, name = event.get("cat", ""), event["name"]
        if kind == "kernel" and COPY_KERNEL not in name:
            compute.append(span)
        elif kind == "kernel" or (kind == "gpu_memcpy" and ("HtoD" in name or "DtoH" in name)):
            copies.append(span)
    lanes = {COMPUTE: compute or [on_trace(*step) for step in beside["steps"]], COPIES: copies}
    lanes[REPORTED] = [on_trace(began, ended) for _, _, began, ended in beside["copies"]]
    return {name: merged(spans) for name, spans in lanes.items() if spans}


def merged(spans: Iterable[Span]) -> list[Span]:
    """Return the union of spans, as disjoint spans in order."""
    result: list[Span] = []
    for began, ended in sorted(spans):
        if result and began <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], ended))
        else:
            result.append((began, ended))
    return result


def shared(one: Sequence[Span], other: Sequence[Span]) -> float:
    """Return how long both run at the same time (us). Each is merged."""
    total, left, right = 0.0, 0, 0
    while left < len(one) and right < len(other):
        total += max(0.0, min(one[left][1], other[right][1]) - max(one[left][0], other[right][0]))
        if one[left][1] < other[right][1]:
            left += 1
        else:
            right += 1
    return total


def overlap(lanes: Mapping[str, Sequence[Span]]) -> float | None:
    """Return the share of the copying time during which compute ran too; None without copies.

    The copies on the device count, or those that kvsm reports if the trace has none.
    """
    copies = lanes.get(COPIES) or lanes.get(REPORTED) or []
    lasted = sum(ended - began for began, ended in copies)
    return shared(copies, lanes.get(COMPUTE, [])) / lasted if lasted else None


def picture(lanes: Mapping[str, Sequence[Span]], width: int = 1200) -> str:
    """Draw the lanes as SVG, from the first copy's begin to the last one's end.

    Spans of a lane that are less than half a pixel apart are drawn as one.
    """
    copies = [span for name, spans in lanes.items() if name != COMPUTE for span in spans]
    first = min((began for began, _ in copies), default=0.0)
    last = max((ended for _, ended in copies), default=1.0)
    scale = (width - 20) / max(last - first, 1e-9)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{50 * len(lanes) + 40}" '
        'font-family="sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for row, (name, spans) in enumerate(lanes.items()):
        top = 50 * row + 10
        lines.append(f'<text x="10" y="{top + 12}">{escape(name)}</text>')
        shown = [(max(began, first), min(ended, last)) for began, ended in spans]
        wide = [(left, right + 0.5 / scale) for left, right in shown if left <= right]
        for left, right in merged(wide):
            lines.append(
                f'<rect x="{10 + (left - first) * scale:.2f}" y="{top + 18}" height="22" '
                f'width="{(right - left) * scale:.2f}" fill="{COLOURS[name]}"/>'
            )
    lines.append(
        f'<text x="10" y="{50 * len(lanes) + 28}">{(last - first) / 1e3:.1f} ms from left to right</text>'
    )
    return "\n".join([*lines, "</svg>"]) + "\n"


def draw(trace: Path, picture_file: Path) -> dict[str, Any]:
    """Draw a trace and what is beside it. Return the share of overlap and the busy time of each lane (ms)."""
    beside = json.loads(Path(f"{trace}.kvsm").read_text())
    lanes = lanes_of(json.loads(trace.read_text()), beside)
    picture_file.write_text(picture(lanes))
    busy = {name: sum(ended - began for began, ended in spans) / 1e3 for name, spans in lanes.items()}
    return {"overlap": overlap(lanes), "busy_ms": busy}
