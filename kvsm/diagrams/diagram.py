"""What a person reads of a machine, made from its rows: Mermaid text, an SVG picture, a decision table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from kvsm.diagrams.drawing import draw
from kvsm.diagrams.layouts import LAYOUTS
from kvsm.diagrams.routing import Frame, Graph, Line, Link, Node
from kvsm.states import Machine
from kvsm.states.machine import Row


@dataclass(frozen=True)
class Edge:
    """Rows of one source and one target that differ in their trigger alone. A source may be a frame."""

    source: str
    target: str
    triggers: tuple[str, ...]
    guard: str
    effect: str

    @property
    def condition(self) -> str:
        """`[copies = 1] / copies - 1`, or what there is of it."""
        return " ".join(
            filter(None, (f"[{self.guard}]" if self.guard else "", f"/ {self.effect}" if self.effect else ""))
        )


def guard_text(machine: Machine, row: Row) -> str:
    """`copies = 1, pins ≥ 2`: what a row demands beyond its state."""
    parts = []
    for counter in machine.counters:
        low, high = row.when.get(counter.name, (0, counter.limit))
        if low == high:
            parts.append(f"{counter.name} = {low}")
        elif low > 0 and high < counter.limit:
            parts.append(f"{low} ≤ {counter.name} ≤ {high}")
        elif low > 0:
            parts.append(f"{counter.name} ≥ {low}")
        elif high < counter.limit:
            parts.append(f"{counter.name} ≤ {high}")
    return ", ".join(parts)


def effect_text(row: Row) -> str:
    """`copies + 1, pins = 0`: what a row does to the counters."""
    return ", ".join(
        f"{name} = 0" if isinstance(effect, str) else f"{name} {'+' if effect > 0 else '-'} {abs(effect)}"
        for name, effect in row.then.items()
    )


def edges(machine: Machine, frames: Mapping[str, tuple[str, ...]] | None = None) -> list[Edge]:
    """All that the rows say, by source and target. Rows that hold in a whole frame start at the frame."""
    found: dict[tuple[str, str, str, str], list[str]] = {}
    for row in machine.rows:
        condition = guard_text(machine, row), effect_text(row)
        for source in _sources(row.sources, frames or {}):
            target = source if row.target is None else row.target.name
            triggers = found.setdefault((source, target, *condition), [])
            triggers.append(row.trigger.name)
    return [Edge(source, target, tuple(names), *rest) for (source, target, *rest), names in found.items()]


def _sources(sources: tuple[IntEnum, ...], frames: Mapping[str, tuple[str, ...]]) -> list[str]:
    names = [source.name for source in sources]
    for frame, members in sorted(frames.items(), key=lambda item: -len(item[1])):
        if set(members) <= set(names):
            names = [frame, *(name for name in names if name not in members)]
    return names


def finals(machine: Machine) -> set[str]:
    """States that no row leaves."""
    left = {edge.source for edge in edges(machine) if edge.target != edge.source}
    return {state.name for state in machine.states} - left


def mermaid(machine: Machine) -> str:
    """The machine as a Mermaid `stateDiagram-v2`: one arrow for each pair of states that rows connect."""
    lines = ["stateDiagram-v2", "    direction LR", f"    [*] --> {machine.initial.name}"]
    labels: dict[tuple[str, str], list[str]] = {}
    for edge in edges(machine):
        text = " ".join(filter(None, (", ".join(edge.triggers), edge.condition)))
        labels.setdefault((edge.source, edge.target), []).append(text)
    lines += [
        f"    {source} --> {target}: {'<br/>'.join(texts)}" for (source, target), texts in labels.items()
    ]
    lines += [f"    {state.name} --> [*]" for state in machine.states if state.name in finals(machine)]
    return "\n".join(lines) + "\n"


def svg(machine: Machine) -> str:
    """The machine as the text of a self-contained SVG file. What leaves a state as it is stands inside it."""
    return draw(graph(machine))


def graph(machine: Machine) -> Graph:
    """The picture of a machine, before links have found their ways."""
    layout = LAYOUTS[machine.name]
    links: dict[tuple[str, str], tuple[Line, ...]] = {}
    inside: dict[str, tuple[Line, ...]] = {}
    for edge in edges(machine, layout.frames):
        members = layout.frames.get(edge.source, (edge.source,))
        if edge.target == edge.source:
            inside[edge.source] = inside.get(edge.source, ()) + _one_line(edge)
        elif edge.target in members:
            inside[edge.source] = inside.get(edge.source, ()) + _one_line(edge, f" → {edge.target}")
        else:
            links[edge.source, edge.target] = links.get((edge.source, edge.target), ()) + _stacked(edge)
    nodes = tuple(
        Node(
            state.name,
            inside.get(state.name, ()),
            layout.tones[state.name],
            *layout.places[state.name],
            initial=state is machine.initial,
            final=state.name in finals(machine),
        )
        for state in machine.states
    )
    frames = tuple(Frame(name, members, inside.get(name, ())) for name, members in layout.frames.items())
    ways = tuple(Link(source, target, lines) for (source, target), lines in links.items())
    title = f"The {machine.name} machine"
    return Graph(title, layout.caption, nodes, ways, frames, dict(layout.meanings))


def _one_line(edge: Edge, goes: str = "") -> tuple[Line, ...]:
    """For the inside of a box: triggers, and what they do, each set apart."""
    rest = _minus(edge.condition)
    return tuple(Line(" ".join(filter(None, (name + goes, rest))), strong=False) for name in edge.triggers)


def _stacked(edge: Edge) -> tuple[Line, ...]:
    """For a label: a line for each trigger, and one for guard and effect."""
    names = tuple(Line(name) for name in edge.triggers)
    return (*names, Line(_minus(edge.condition), strong=False)) if edge.condition else names


def _minus(text: str) -> str:
    return text.replace(" - ", " − ")  # noqa: RUF001 (a minus as wide as its plus)


def table(machine: Machine) -> str:
    """The decision table as Markdown: one line for each row, in the order of the declaration."""
    lines = ["| state | trigger | target | when | effect | why |", "| --- | --- | --- | --- | --- | --- |"]
    for row in machine.rows:
        cells = (
            ", ".join(source.name for source in row.sources),
            row.trigger.name,
            "stays" if row.target is None else row.target.name,
            guard_text(machine, row),
            effect_text(row),
            row.why,
        )
        lines.append("|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|")
    return "\n".join(lines) + "\n"
