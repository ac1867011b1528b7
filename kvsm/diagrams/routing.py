"""Ways for the links of a small graph: boxes stand where they are told to, links go where they read best.

The caller says where each box stands; what is searched for here is a way for each link. A link may leave
and enter at any of a few ports of its two boxes, bend little or much, and wear its label at any of a few
places along the curve. Each such candidate has a price: length, bends, boxes that it crosses, other
links that it touches, labels that it runs over. Links settle one after the other on what is cheapest
beside the others' present choice, until none wants to move. The search uses no randomness and only
arithmetic that every machine rounds alike, so that the same graph is always the same text.

What this does not do: move boxes, or promise that a graph that is too dense has no crossing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Rect = tuple[float, float, float, float]
"""Left, top, right, bottom."""

NAME_SIZE, STRONG_SIZE, QUIET_SIZE = 14.0, 11.5, 11.0
LINE_HEIGHT = 14.5


@dataclass(frozen=True)
class Line:
    """One line of a label: what happens (strong), or under which condition (quiet)."""

    text: str
    strong: bool = True


@dataclass(frozen=True)
class Node:
    """A state: its name, the lines of what it does without leaving, its tone, its centre."""

    name: str
    lines: tuple[Line, ...]
    tone: str
    x: float
    y: float
    initial: bool = False
    final: bool = False

    @property
    def rect(self) -> Rect:
        widest = max([_width(line) for line in self.lines] + [text_width(self.name, NAME_SIZE) * 1.08])
        half = max(widest / 2 + 14, 46.0)
        high = (36 + (len(self.lines) * LINE_HEIGHT + 8 if self.lines else 0)) / 2
        return (self.x - half, self.y - high, self.x + half, self.y + high)

    @property
    def extent(self) -> Rect:
        """The box, and the dot that marks where a life begins."""
        left, top, right, bottom = self.rect
        return (left - 44 if self.initial else left, top, right, bottom)


@dataclass(frozen=True)
class Frame:
    """Several nodes that share links: drawn around them, with a title and lines of its own."""

    name: str
    members: tuple[str, ...]
    lines: tuple[Line, ...] = ()

    @property
    def head(self) -> float:
        return 12 + (1 + len(self.lines)) * LINE_HEIGHT

    @property
    def head_width(self) -> float:
        return max([_width(line) for line in self.lines] + [text_width(self.name, QUIET_SIZE)]) + 12


@dataclass(frozen=True)
class Link:
    source: str
    target: str
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class Graph:
    """A picture to be. `legend` maps tones to what they mean; frames stand inner first."""

    title: str
    caption: str
    nodes: tuple[Node, ...]
    links: tuple[Link, ...]
    frames: tuple[Frame, ...] = ()
    legend: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Route:
    """A way for a link: the four points of its curve, and the centre of its label."""

    curve: Floats
    label: Floats
    width: float
    height: float

    @property
    def points(self) -> Floats:
        return _sample(self.curve)

    @property
    def rect(self) -> Rect:
        x, y = float(self.label[0]), float(self.label[1])
        return (x - self.width / 2, y - self.height / 2, x + self.width / 2, y + self.height / 2)


# Text is measured by a rough table: wide enough for the common interface fonts, in bold.
_NARROW = set(" .,:;|/()[]'")


def text_width(text: str, size: float) -> float:
    ems = sum(0.32 if c in _NARROW else 0.70 if c.isupper() else 0.58 for c in text)
    return ems * size


def _width(line: Line) -> float:
    return text_width(line.text, STRONG_SIZE if line.strong else QUIET_SIZE)


# Routes.

_SAMPLES = 25
_TIMES = np.linspace(0.0, 1.0, _SAMPLES)
_BASIS = np.stack(
    [
        (1 - _TIMES) ** 3,
        3 * _TIMES * (1 - _TIMES) ** 2,
        3 * _TIMES * _TIMES * (1 - _TIMES),
        _TIMES * _TIMES * _TIMES,
    ]
)
_BENDS = (0.25, 0.45, 0.75)
_MIDDLE = 12
_LABEL_AT = (12, 10, 14, 8, 16, 6, 18)
_KEPT = 40
_CLEARANCE = 9.0
_ROUNDS = 12


def _sample(curves: Floats) -> Floats:
    """Points along curves: (..., 4, 2) to (..., samples, 2). Summed by hand: a matrix product may round
    differently on another processor."""
    points: Floats = np.zeros((*curves.shape[:-2], _SAMPLES, 2))
    for corner in range(4):
        points = points + _BASIS[corner][:, None] * curves[..., corner, None, :]
    return points


def _inside(points: Floats, rect: Rect, margin: float = 0.0) -> NDArray[np.bool_]:
    left, top, right, bottom = rect
    x, y = points[..., 0], points[..., 1]
    across = (x > left - margin) & (x < right + margin)
    inside: NDArray[np.bool_] = across & (y > top - margin) & (y < bottom + margin)
    return inside


def _ports(rect: Rect, other: Rect) -> list[tuple[float, float, int, int]]:
    """Points on the border of a box, each with the direction that leads away from the box.

    Some lie at fixed parts of a side, some where the other box lies straight opposite: lines between
    those run level or upright.
    """
    left, top, right, bottom = rect
    ports: list[tuple[float, float, int, int]] = []
    for x in _marks(left, right, other[0], other[2], (0.14, 0.32, 0.5, 0.68, 0.86)):
        ports += [(x, top, 0, -1), (x, bottom, 0, 1)]
    for y in _marks(top, bottom, other[1], other[3], (0.25, 0.5, 0.75)):
        ports += [(left, y, -1, 0), (right, y, 1, 0)]
    return ports


def _marks(
    low: float, high: float, other_low: float, other_high: float, parts: tuple[float, ...]
) -> list[float]:
    shared_low, shared_high = max(low, other_low) + 8, min(high, other_high) - 8
    marks = [low + part * (high - low) for part in parts]
    if shared_low < shared_high:
        marks += [shared_low + part * (shared_high - shared_low) for part in (0.2, 0.5, 0.8)]
    return marks


def _curves(source: Rect, target: Rect) -> Floats:
    """Every candidate curve between two boxes, as (n, 4, 2) control points."""
    curves = []
    for ax, ay, adx, ady in _ports(source, target):
        for bx, by, bdx, bdy in _ports(target, source):
            reach = ((ax - bx) ** 2 + (ay - by) ** 2) ** 0.5
            for bend in _BENDS:
                pull = max(bend * reach, 24.0)
                first = (ax + adx * pull, ay + ady * pull)
                second = (bx + bdx * pull, by + bdy * pull)
                curves.append(((ax, ay), first, second, (bx, by)))
    return np.array(curves)


def _curve_prices(curves: Floats, obstacles: list[Rect], own: list[Rect]) -> Floats:
    """What each curve costs by itself: its length, its bends, and the boxes that it runs through."""
    points = _sample(curves)
    steps = points[:, 1:] - points[:, :-1]
    lengths = np.sqrt((steps * steps).sum(axis=2))
    straight = (steps[:, 1:] * steps[:, :-1]).sum(axis=2) / (lengths[:, 1:] * lengths[:, :-1] + 1e-9)
    slant = np.abs(curves[:, 3] - curves[:, 0]).min(axis=1)
    prices: Floats = lengths.sum(axis=1) + 900.0 * (1.0 - straight).sum(axis=1)
    prices = prices + np.where((slant > 0.5) & (slant < 24.0), 40.0, 0.0)
    for rect in obstacles:
        prices = prices + 700.0 * _inside(points, rect, 7.0).sum(axis=1)
    for rect in own:
        prices = prices + 700.0 * _inside(points[:, 2:-2], rect).sum(axis=1)
    return prices


class _Choice:
    """One link's candidates: curves, labels beside or upon them, and what each costs alone."""

    def __init__(self, link: Link, own: tuple[Rect, Rect], walls: list[Rect], borders: list[Rect]) -> None:
        self.width = max(_width(line) for line in link.lines) + 6
        self.height = len(link.lines) * LINE_HEIGHT + 2
        curves = _curves(*own)
        prices = _curve_prices(curves, walls, list(own))
        best = np.argsort(np.rint(prices), kind="stable")[:_KEPT]
        self.curves, self.points = curves[best], _sample(curves[best])
        self.owner, self.labels, label_prices = self._place_labels([*walls, *own], borders)
        self.prices = np.rint(prices[best][self.owner] + label_prices)
        self.picked = int(np.argmin(self.prices))
        self._beside: dict[tuple[int, int], Floats] = {}

    def _place_labels(
        self, walls: list[Rect], borders: list[Rect]
    ) -> tuple[NDArray[np.int64], Floats, Floats]:
        """Centres of labels for every curve, upon it or to either side of it: whose, where, what price."""
        owners, centres, prices = [], [], []
        for at in _LABEL_AT:
            here = self.points[:, at]
            along = self.points[:, at + 1] - self.points[:, at - 1]
            along = along / (np.sqrt((along * along).sum(axis=1))[:, None] + 1e-9)
            normal = np.stack([-along[:, 1], along[:, 0]], axis=1)
            away = np.abs(normal[:, 0]) * self.width / 2 + np.abs(normal[:, 1]) * self.height / 2 + 5
            for side in (0.0, -1.0, 1.0):
                centre = here + normal * (side * away)[:, None]
                price = np.full(len(centre), abs(at - _MIDDLE) * 2.0 + (26.0 if side == 0 else 0.0))
                for rect in walls:
                    price = price + 900.0 * _inside(centre, self._grown(rect), 4.0)
                for rect in borders:
                    price = price + 150.0 * _inside(centre, self._grown(rect), 2.0)
                hidden = _hits(self.points, centre, self.width, self.height)
                price = price + np.where(side == 0, np.maximum(hidden - 9, 0) * 40.0, hidden * 14.0)
                owners.append(np.arange(len(centre)))
                centres.append(centre)
                prices.append(price)
        return np.concatenate(owners), np.concatenate(centres), np.concatenate(prices)

    def _grown(self, rect: Rect) -> Rect:
        """Where the centre of the label must not be, if the label is to stay off a box."""
        across, down = self.width / 2, self.height / 2
        return rect[0] - across, rect[1] - down, rect[2] + across, rect[3] + down

    def prices_beside(self, others: list[_Choice]) -> Floats:
        """What each candidate costs, given what the others have picked."""
        total = self.prices.copy()
        for other in others:
            key = (id(other), other.picked)
            if key not in self._beside:
                self._beside[key] = self._price_beside(other)
            total = total + self._beside[key]
        return total

    def _price_beside(self, other: _Choice) -> Floats:
        """Lines apart from lines, labels apart from both: the same price seen from either side."""
        points, centre = other.points[other.owner[other.picked]], other.labels[other.picked]
        gaps = np.abs(self.points[:, :, None, :] - points[None, None, :, :]).max(axis=3)
        touching = (gaps < _CLEARANCE).sum(axis=(1, 2))
        ends = gaps[:, :: _SAMPLES - 1, :: _SAMPLES - 1].min(axis=(1, 2)) < 12.0
        price: Floats = touching * 16.0 + 200.0 * ends + 180.0 * _crossings(self.points, points)
        theirs = np.broadcast_to(centre, (len(self.points), 2))
        price = price + _hits(self.points, theirs, other.width + 14, other.height + 14) * 90.0
        price = price + _hits(self.points, theirs, other.width, other.height) * 60.0
        price = price[self.owner]
        crossing = np.broadcast_to(points, (len(self.labels), *points.shape))
        price = price + _hits(crossing, self.labels, self.width + 14, self.height + 14) * 90.0
        price = price + _hits(crossing, self.labels, self.width, self.height) * 60.0
        apart = np.abs(self.labels - centre)
        near = apart[:, 0] < (self.width + other.width) / 2 + 8
        near &= apart[:, 1] < (self.height + other.height) / 2 + 8
        total: Floats = price + 900.0 * near
        return total

    def route(self) -> Route:
        return Route(self.curves[self.owner[self.picked]], self.labels[self.picked], self.width, self.height)


def _hits(points: Floats, centres: Floats, width: float, height: float) -> Floats:
    """How many of points[i] lie within the label at centres[i]."""
    apart = np.abs(points - centres[:, None, :])
    hits: Floats = ((apart[..., 0] < width / 2) & (apart[..., 1] < height / 2)).sum(axis=1).astype(float)
    return hits


def _crossings(lines: Floats, other: Floats) -> Floats:
    """How many times each of `lines` crosses the line `other`: pieces whose ends lie on both sides."""
    a, b = lines[:, :-1, None, :], lines[:, 1:, None, :]
    c, d = other[None, None, :-1, :], other[None, None, 1:, :]
    apart = (_side(a, b, c) != _side(a, b, d)) & (_side(c, d, a) != _side(c, d, b))
    crossings: Floats = apart.sum(axis=(1, 2)).astype(float)
    return crossings


def _side(start: Floats, end: Floats, point: Floats) -> NDArray[np.bool_]:
    """On which side of the line from `start` to `end` the point lies."""
    along, aside = end - start, point - start
    left: NDArray[np.bool_] = along[..., 0] * aside[..., 1] > along[..., 1] * aside[..., 0]
    return left


def frame_rects(graph: Graph) -> dict[str, Rect]:
    """The border of each frame: its members, frames inside it, and room for its own lines."""
    nodes = {node.name: node for node in graph.nodes}
    rects: dict[str, Rect] = {}
    for frame in graph.frames:
        parts = [nodes[name].extent for name in frame.members]
        parts += [rects[inner.name] for inner in graph.frames[: len(rects)] if _contains(frame, inner)]
        left, right = min(part[0] for part in parts) - 16, max(part[2] for part in parts) + 16
        right = max(right, left + frame.head_width + 16)
        top, bottom = min(part[1] for part in parts) - frame.head - 6, max(part[3] for part in parts) + 16
        rects[frame.name] = (left, top, right, bottom)
    return rects


def _contains(frame: Frame, inner: Frame) -> bool:
    return set(inner.members) <= set(frame.members)


def routes(graph: Graph) -> list[Route]:
    """A way for every link of the graph, in the order of the links."""
    frames = frame_rects(graph)
    boxes = {node.name: node.rect for node in graph.nodes} | frames
    heads = [
        (left, top, left + frame.head_width, top + frame.head)
        for frame, (left, top, _, _) in zip(graph.frames, frames.values(), strict=True)
    ]
    borders = [border for rect in frames.values() for border in _borders(rect)]
    choices = []
    for link in graph.links:
        ends = (link.source, link.target)
        walls = [node.extent for node in graph.nodes if node.name not in ends] + heads
        choices.append(_Choice(link, (boxes[link.source], boxes[link.target]), walls, borders))
    for _ in range(_ROUNDS):
        before = [choice.picked for choice in choices]
        for choice in choices:
            others = [other for other in choices if other is not choice]
            choice.picked = int(np.argmin(choice.prices_beside(others)))
        if before == [choice.picked for choice in choices]:
            break
    return [choice.route() for choice in choices]


def _borders(rect: Rect) -> list[Rect]:
    """The four sides of a frame: lines may cross them, labels had better not."""
    left, top, right, bottom = rect
    return [
        (left, top, right, top),
        (left, bottom, right, bottom),
        (left, top, left, bottom),
        (right, top, right, bottom),
    ]
