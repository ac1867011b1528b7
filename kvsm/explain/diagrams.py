"""Draw a state machine as a diagram and as a decision table, from its rows.

The library `transitions` draws Mermaid text, and SVG through Graphviz. kvsm adds the labels of the arrows:
`END_COPY_GOOD [copies = 1] / copies - 1` is a trigger, its guard and its effect. A row that does not change
the state is written inside the state's box, after a `↻`, because an arrow back to the same box would hide
labels.

`python -m kvsm.explain.diagrams docs/machines.md` writes the diagrams and tables into this page. A test
compares them with the machines.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from transitions.extensions.diagrams import HierarchicalGraphMachine

from kvsm.errors import ConfigError
from kvsm.states import MACHINES, Machine, RequestState
from kvsm.states.machine import Row
from kvsm.states.reference import Groups, library_machine

GROUPS: dict[str, Groups] = {"request": {"alive": tuple(RequestState)[: RequestState.FINISHED]}}
"""States grouped in one box, to save arrows: FINISH leaves every state in which a request is alive."""


def mermaid(machine: Machine) -> str:
    """The machine as a Mermaid `stateDiagram-v2`."""
    source: str = _graph(machine, "mermaid", "<br/>", f"title: The {machine.name} machine").source
    return "\n".join(line.rstrip() for line in source.replace(" | ", "<br/>").split("\n")) + "\n"


def svg(machine: Machine) -> str:
    """The machine as the text of an SVG file. Raises `ConfigError` if Graphviz is not installed."""
    try:
        from graphviz import ExecutableNotFound
    except ImportError as error:
        raise ConfigError("SVG needs the Python package graphviz: pip install 'kvsm[diagrams]'") from error
    graph = _graph(machine, "graphviz", r"\n", f"The {machine.name} machine")
    graph.attr(compound="true")  # an arrow may end at the border of a group
    graph.body[:] = [line.replace(" | ", r"\n").replace(r"\l", "") for line in graph.body]
    try:
        text: str = graph.pipe("svg", encoding="utf-8")
    except ExecutableNotFound as error:
        raise ConfigError(
            "SVG needs Graphviz's program dot: apt-get install graphviz, or https://graphviz.org/download"
        ) from error
    return text


def _graph(machine: Machine, engine: str, newline: str, title: str) -> Any:
    """The library's graph of a machine.

    engine: what `transitions` draws with: `mermaid` or `graphviz`.
    newline: how a label breaks its line.
    """
    chart: Any = library_machine(
        HierarchicalGraphMachine,
        machine,
        lambda row: {"label": label(machine, row)},
        groups=GROUPS.get(machine.name),
        model=None,
        graph_engine=engine,
    )
    box = chart.style_attributes["node"]["default"]
    chart.style_attributes = {"node": {"default": box}, "edge": {}, "graph": {"default": {"style": "dashed"}}}
    chart.machine_attributes = {"rankdir": "TB"}
    for state in machine.states:
        lines = [state.name]
        for trigger in machine.triggers:
            kept = chart.get_transitions(trigger.name, state, state)
            if kept:
                lines += [f"↻ {transition.label}" for transition in kept]
                chart.remove_transition(trigger.name, state, state)
        drawn = chart.get_state(state)
        drawn.label = newline.join(lines)
        drawn.final = not chart.get_transitions(source=state, delegate=True)
    return chart.graph_cls(chart).get_graph(title)


def label(machine: Machine, row: Row) -> str:
    """The label of a row's arrow. Spaces inside a guard or an effect do not break."""
    guard, effect = guard_text(machine, row), effect_text(row)
    parts = (row.trigger.name, f"[{guard}]" if guard else "", f"/ {effect}" if effect else "")
    return " ".join(part.replace(" ", "\u00a0") for part in parts if part)


def guard_text(machine: Machine, row: Row) -> str:
    """The guard of a row on its counters: `copies = 1, pins ≥ 2`; empty if there is none."""
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
    """The effect of a row on the counters: `copies + 1, pins = 0`; empty if there is none."""
    return ", ".join(
        f"{name} = 0" if isinstance(effect, str) else f"{name} {'+' if effect > 0 else '-'} {abs(effect)}"
        for name, effect in row.then.items()
    )


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


def embedded(page: str) -> str:
    """Return a page with its diagrams and tables replaced by the current ones.

    The mark `<!-- block: picture -->` begins a diagram, `<!-- block: table -->` a table, and `<!-- end -->`
    ends either. Raises `ConfigError` if the page has no mark, or if a mark has no end.
    """
    parts = re.split(r"(<!-- \w+: \w+ -->\n)", page)
    if len(parts) == 1:
        raise ConfigError("there is no mark like '<!-- block: picture -->' to write behind")
    text = parts[0]
    for mark, rest in zip(parts[1::2], parts[2::2]):
        name, what = re.findall(r"\w+", mark)
        _, end, tail = rest.partition("<!-- end -->")
        if name not in MACHINES or what not in _PARTS or not end:
            raise ConfigError(f"{mark.strip()!r} names no part of a machine, or no '<!-- end -->' follows it")
        text += f"{mark}\n{_PARTS[what](MACHINES[name])}\n{end}{tail}"
    return text


def _picture(machine: Machine) -> str:
    return f"```mermaid\n{mermaid(machine)}```\n"


_PARTS = {"picture": _picture, "table": table}


def write_pages(*paths: Path) -> None:
    """Update the diagrams and tables of these pages; write no page if one cannot be updated."""
    pages = {path: _current(path) for path in paths}
    for path, text in pages.items():
        path.write_text(text, encoding="utf-8")


def _current(path: Path) -> str:
    try:
        return embedded(path.read_text(encoding="utf-8"))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python -m kvsm.explain.diagrams PAGE..., for example docs/machines.md")
    write_pages(*map(Path, sys.argv[1:]))
