"""A graph and its routes as SVG text: one file, no script, no outside font, light and dark.

The picture paints its own background, so that it reads on any page. Colours follow the reader's scheme
through a media query; a reader that knows none sees the light ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from kvsm.diagrams.routing import (
    LINE_HEIGHT,
    Graph,
    Line,
    Link,
    Node,
    Rect,
    Route,
    frame_rects,
    routes,
    text_width,
)

MARGIN = 28.0
HEADER = 58.0
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"

# tone: (fill, border) on light, (fill, border) on dark.
TONES = {
    "rest": (("#f1f3f5", "#868e96"), ("#262b31", "#8b949e")),
    "waiting": (("#f0edff", "#7048e8"), ("#2a2447", "#9775fa")),
    "copying": (("#fff3e0", "#e8750a"), ("#3a2a14", "#f59f3b")),
    "good": (("#e9f8ee", "#2b8a3e"), ("#16301f", "#51cf66")),
    "held": (("#fdeef6", "#c2327c"), ("#3a1c2d", "#f06fb0")),
    "lost": (("#fdecec", "#c92a2a"), ("#3b1b1c", "#ff7b72")),
}
# What is drawn in one colour each: (light, dark).
_PLAIN = {
    ".card": ("fill:#ffffff;stroke:#d8dee4", "fill:#0d1117;stroke:#30363d"),
    ".frame": ("stroke:#adb5bd", "stroke:#484f58"),
    ".way": ("stroke:#57606a", "stroke:#8b949e"),
    ".tip,.dot": ("fill:#57606a", "fill:#8b949e"),
    ".name,.title": ("fill:#1f2328", "fill:#f0f6fc"),
    ".strong": ("fill:#24292f", "fill:#e6edf3"),
    ".quiet,.caption": ("fill:#57606a", "fill:#9ea7b3"),
    ".halo": ("stroke:#ffffff", "stroke:#0d1117"),
}
_SHAPES = (
    f"text{{font-family:{FONT};text-anchor:middle}}"
    ".title{font-size:19px;font-weight:700;text-anchor:start}"
    ".caption{font-size:13px;font-weight:400;text-anchor:start}"
    ".name{font-size:14px;font-weight:700}"
    ".strong{font-size:11.5px;font-weight:600}"
    ".quiet{font-size:11px}"
    ".start{text-anchor:start}"
    ".halo{stroke-width:5px;stroke-linejoin:round;paint-order:stroke}"
    ".way{fill:none;stroke-width:1.5px}"
    ".box{stroke-width:1.6px}"
    ".ring{fill:none;stroke-width:1.2px}"
    ".frame{fill:none;stroke-width:1.2px;stroke-dasharray:5 4}"
)


def draw(graph: Graph) -> str:
    """The whole picture, as the text of an SVG file."""
    ways = routes(graph)
    frames = frame_rects(graph)
    left, top, right, bottom = _bounds(graph, ways, frames.values())
    legend_top = bottom + MARGIN
    width, height = right - left + 2 * MARGIN, legend_top + 22 + MARGIN / 2 - top + HEADER
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="{left - MARGIN:.1f} {top - HEADER:.1f} {width:.1f} {height:.1f}">',
        f"<title>{escape(graph.title)}</title>",
        f"<desc>{escape(graph.caption)}</desc>",
        f"<style>{_style()}</style>",
        '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
        'orient="auto"><path class="tip" d="M0 1L10 5L0 9z"/></marker></defs>',
        f'<rect class="card" x="{left - MARGIN + 0.5:.1f}" y="{top - HEADER + 0.5:.1f}" '
        f'width="{width - 1:.1f}" height="{height - 1:.1f}" rx="12"/>',
        f'<text class="title" x="{left:.1f}" y="{top - HEADER + 32:.1f}">{escape(graph.title)}'
        f'<tspan class="caption" dx="12">{escape(graph.caption)}</tspan></text>',
    ]
    for frame in graph.frames:
        rect = frames[frame.name]
        parts.append(f'<rect class="frame" {_box(rect)} rx="12"/>')
        lines = (Line(frame.name, strong=False), *frame.lines)
        parts += _text(lines, rect[0] + 12, rect[1] + 10, "start")
    parts += [_way(way) for way in ways]
    for node in graph.nodes:
        parts += _node(node)
    for link, way in zip(graph.links, ways, strict=True):
        parts += _label(link, way)
    parts += _legend(graph, left, legend_top)
    return "\n".join([*parts, "</svg>", ""])


def _style() -> str:
    light = "".join(f"{name}{{{one}}}" for name, (one, _) in _PLAIN.items())
    dark = "".join(f"{name}{{{one}}}" for name, (_, one) in _PLAIN.items())
    for tone, ((fill, border), (dark_fill, dark_border)) in TONES.items():
        light += f".{tone}{{fill:{fill};stroke:{border}}}"
        dark += f".{tone}{{fill:{dark_fill};stroke:{dark_border}}}"
    return f"{light}{_SHAPES}@media(prefers-color-scheme:dark){{{dark}}}.ring{{fill:none}}"


def _bounds(graph: Graph, ways: list[Route], frames: Iterable[Rect]) -> Rect:
    """The least rectangle around everything that is drawn between header and legend."""
    rects = [node.extent for node in graph.nodes] + [way.rect for way in ways] + list(frames)
    for way in ways:
        xs, ys = way.points[:, 0], way.points[:, 1]
        rects.append((float(xs.min()), float(ys.min()), float(xs.max()), float(ys.max())))
    legend = sum(_chip_width(meaning) for meaning in graph.legend.values())
    left, right = min(rect[0] for rect in rects), max(rect[2] for rect in rects)
    return left, min(rect[1] for rect in rects), max(right, left + legend), max(rect[3] for rect in rects)


def _box(rect: Rect) -> str:
    left, top, right, bottom = rect
    return f'x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" height="{bottom - top:.1f}"'


def _way(way: Route) -> str:
    (ax, ay), (bx, by), (cx, cy), (dx, dy) = way.curve.tolist()
    path = f"M{ax:.1f} {ay:.1f}C{bx:.1f} {by:.1f} {cx:.1f} {cy:.1f} {dx:.1f} {dy:.1f}"
    return f'<path class="way" d="{path}" marker-end="url(#tip)"/>'


def _node(node: Node) -> list[str]:
    left, top, right, bottom = node.rect
    parts = [f'<rect class="box {node.tone}" {_box(node.rect)} rx="10"/>']
    if node.final:
        ring = _box((left + 3.5, top + 3.5, right - 3.5, bottom - 3.5))
        parts.append(f'<rect class="ring {node.tone}" {ring} rx="7"/>')
    if node.initial:
        path = f"M{left - 30:.1f} {node.y:.1f}H{left:.1f}"
        parts.append(f'<circle class="dot" cx="{left - 35:.1f}" cy="{node.y:.1f}" r="6"/>')
        parts.append(f'<path class="way" d="{path}" marker-end="url(#tip)"/>')
    parts.append(f'<text class="name" x="{node.x:.1f}" y="{top + 23:.1f}">{escape(node.name)}</text>')
    return parts + _text(node.lines, node.x, top + 32)


def _label(link: Link, way: Route) -> list[str]:
    left, top, right, _ = way.rect
    return _text(link.lines, (left + right) / 2, top + 1, "halo")


def _text(lines: Iterable[Line], x: float, top: float, extra: str = "") -> list[str]:
    parts = []
    for number, line in enumerate(lines):
        kind = " ".join(filter(None, ("strong" if line.strong else "quiet", extra)))
        y = top + (number + 0.75) * LINE_HEIGHT
        parts.append(f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(line.text)}</text>')
    return parts


def _legend(graph: Graph, left: float, top: float) -> list[str]:
    parts = []
    for tone, meaning in graph.legend.items():
        parts.append(f'<rect class="box {tone}" {_box((left, top, left + 20, top + 14))} rx="4"/>')
        parts.append(
            f'<text class="quiet start" x="{left + 27:.1f}" y="{top + 11:.1f}">{escape(meaning)}</text>'
        )
        left += _chip_width(meaning)
    return parts


def _chip_width(meaning: str) -> float:
    return 27 + text_width(meaning, 11.0) + 20
