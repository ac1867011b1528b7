"""Draw the block machine as SVG for the page, with an attribute on each part that the page can highlight.

`kvsm.explain.diagrams` draws the machines for the docs, and needs Graphviz for SVG. Pages are made on the
machine that has the log, where Graphviz may be missing, so the positions of boxes and arrows are fixed here.
A test compares them with the machine's table, so that no edge is missing.

Attributes: an element with `data-state` is a state or its count; one with `data-edge` is the trigger of an
edge, numbered as in `kvsm.explain.timeline.moves.EDGES`; a group with `data-arrow` is the arrow of some
triggers.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple
from xml.etree.ElementTree import Element, SubElement, tostring

from kvsm.explain.timeline.moves import EDGES
from kvsm.states import BlockState

WIDTH, HEIGHT = 520, 520
_BOX = 132
_NAME, _COUNT, _LOOP = 15, 29, 12
"""Distance from a box's top to its name and to its count, and height of a line of triggers (pixels)."""

_SHORT = 10
"""Most letters of a trigger that can share its line with another one."""

_S = BlockState

CENTRES: dict[BlockState, tuple[int, int]] = {
    _S.FREE: (66, 40),
    _S.ALLOCATED: (260, 40),
    _S.STORING: (260, 142),
    _S.STORED: (260, 262),
    _S.LOADING: (260, 396),
    _S.EVICTED: (66, 262),
    _S.QUARANTINED: (454, 396),
    _S.RETIRED: (454, 142),
}
"""The centre of each state's box (pixels)."""


class ArrowPath(NamedTuple):
    """An arrow: its SVG path data, the position of its label, and the label's text-anchor."""

    path: str
    label: tuple[int, int]
    anchor: str = "middle"


ARROWS: dict[tuple[BlockState, BlockState], ArrowPath] = {
    (_S.FREE, _S.ALLOCATED): ArrowPath("M134,40 L192,40", (163, 33)),
    (_S.EVICTED, _S.ALLOCATED): ArrowPath("M46,237 C46,120 120,58 193,54", (58, 118)),
    (_S.ALLOCATED, _S.EVICTED): ArrowPath("M214,60 C160,100 92,150 76,236", (128, 128)),
    (_S.ALLOCATED, _S.STORING): ArrowPath("M260,60 L260,122", (266, 92), "start"),
    (_S.STORING, _S.STORED): ArrowPath("M260,162 L260,230", (266, 196), "start"),
    (_S.STORING, _S.EVICTED): ArrowPath("M194,152 C165,175 130,205 108,236", (146, 190)),
    (_S.STORING, _S.RETIRED): ArrowPath("M328,134 L386,134", (357, 127)),
    (_S.STORING, _S.QUARANTINED): ArrowPath("M328,152 C390,180 430,268 438,358", (420, 256)),
    (_S.STORED, _S.EVICTED): ArrowPath("M192,262 L135,262", (163, 246)),
    (_S.STORED, _S.LOADING): ArrowPath("M240,294 L240,352", (234, 324), "end"),
    (_S.LOADING, _S.STORED): ArrowPath("M280,353 L280,295", (286, 320), "start"),
    (_S.LOADING, _S.QUARANTINED): ArrowPath("M328,396 L386,396", (357, 389)),
    (_S.LOADING, _S.RETIRED): ArrowPath("M328,364 C366,330 392,270 410,181", (356, 322)),
    (_S.QUARANTINED, _S.RETIRED): ArrowPath("M484,359 L484,181", (490, 284), "start"),
    (_S.RETIRED, _S.EVICTED): ArrowPath("M388,152 C330,205 200,215 134,250", (344, 172), "end"),
    (_S.QUARANTINED, _S.EVICTED): ArrowPath("M454,434 C454,520 66,530 66,289", (236, 494)),
}
"""The arrow between each two states that are joined by an edge."""


def block_machine_svg() -> str:
    """Draw the picture, as the text of an SVG element."""
    svg = Element(
        "svg",
        {
            "viewBox": f"0 0 {WIDTH} {HEIGHT}",
            "role": "img",
            "aria-label": "The block machine: the states of a block in a host slot, and its steps",
        },
    )
    markers = SubElement(svg, "defs")
    for name in ("arrow", "arrow-lit"):
        marker = SubElement(
            markers,
            "marker",
            {"id": name, "viewBox": "0 0 8 8", "refX": "7", "refY": "4", "markerWidth": "8",
             "markerHeight": "8", "markerUnits": "userSpaceOnUse", "orient": "auto"},
        )  # fmt: skip
        SubElement(marker, "path", {"d": "M0,0 L8,4 L0,8 Z", "class": name})
    arrows: dict[tuple[BlockState, BlockState], list[int]] = defaultdict(list)
    loops: dict[BlockState, list[int]] = defaultdict(list)
    for number, edge in enumerate(EDGES):
        if edge.source is edge.target:
            loops[edge.source].append(number)
        else:
            arrows[edge.source, edge.target].append(number)
    for ends, numbers in arrows.items():
        _draw_arrow(svg, ARROWS[ends], numbers)
    for state in BlockState:
        _draw_state(svg, state, loops[state])
    return tostring(svg, encoding="unicode")


def _draw_arrow(svg: Element, arrow: ArrowPath, numbers: list[int]) -> None:
    group = SubElement(svg, "g", {"class": "arrow", "data-arrow": " ".join(map(str, numbers))})
    SubElement(group, "path", {"d": arrow.path})
    x, y = arrow.label
    for line, number in enumerate(numbers):
        place = {"x": str(x), "y": str(y + 10 * line), "text-anchor": arrow.anchor}
        _draw_trigger(group, number, place)


def _draw_state(svg: Element, state: BlockState, loops: list[int]) -> None:
    """Draw a box with the state's name, its count of blocks, and the triggers that keep the state."""
    x, y = CENTRES[state]
    lines = _lines_of(loops)
    height = _COUNT + 6 + _LOOP * len(lines)
    left, top = x - _BOX // 2, y - height // 2
    group = SubElement(svg, "g", {"class": "state", "data-state": str(int(state))})
    box = {"x": left, "y": top, "width": _BOX, "height": height, "rx": 6}
    SubElement(group, "rect", {name: str(value) for name, value in box.items()})
    name = SubElement(group, "text", {"x": str(x), "y": str(top + _NAME), "class": "name"})
    name.text = state.name
    SubElement(group, "text", {"x": str(x), "y": str(top + _COUNT), "class": "count"})
    for line, numbers in enumerate(lines):
        for place, number in enumerate(numbers):
            offset = 0 if len(numbers) == 1 else (-30, 30)[place]
            at = {"x": str(x + offset), "y": str(top + _COUNT + _LOOP * (line + 1)), "text-anchor": "middle"}
            _draw_trigger(group, number, at)


def _lines_of(loops: list[int]) -> list[list[int]]:
    """Arrange the triggers that do not change a state in lines: two short ones share a line."""
    lines: list[list[int]] = []
    for number in sorted(loops, key=lambda number: len(EDGES[number].trigger.name)):
        short = len(EDGES[number].trigger.name) <= _SHORT
        if lines and len(lines[-1]) == 1 and short:
            lines[-1].append(number)
        else:
            lines.append([number])
    return lines


def _draw_trigger(group: Element, number: int, place: dict[str, str]) -> None:
    edge = EDGES[number]
    text = SubElement(group, "text", {"class": "trigger", "data-edge": str(number), **place})
    text.text = edge.trigger.name
    SubElement(text, "title").text = f"{edge.source.name} to {edge.target.name}: {edge.why}"
