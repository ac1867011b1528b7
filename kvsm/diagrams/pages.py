"""What the documentation embeds of the machines: written by `python -m kvsm.diagrams docs`.

A test compares what stands there with what the tables say now.
"""

from __future__ import annotations

from pathlib import Path

from kvsm.diagrams.diagram import mermaid, svg, table
from kvsm.errors import ConfigError
from kvsm.states import MACHINES


def embedded(page: str) -> str:
    """The page `machines.md` with what it embeds of each machine written anew between its two marks."""
    for name, machine in MACHINES.items():
        first, last = f"<!-- {name}: from the table -->\n", f"<!-- {name}: end -->"
        head, found, rest = page.partition(first)
        _, ended, tail = rest.partition(last)
        if not (found and ended):
            raise ConfigError(f"machines.md has no lines {first.strip()!r} and {last!r} to write between")
        picture = f"![The {name} machine](images/{name}.svg)"
        text = (
            f"<details><summary>As Mermaid text</summary>\n\n```mermaid\n{mermaid(machine)}```\n\n</details>"
        )
        page = f"{head}{first}\n{picture}\n\n{text}\n\n{table(machine)}\n{last}{tail}"
    return page


def write_docs(docs: Path) -> None:
    """Write the pictures and the tables of every machine anew, into `docs`."""
    page = docs / "machines.md"
    text = embedded(page.read_text(encoding="utf-8"))
    (docs / "images").mkdir(exist_ok=True)
    for name, machine in MACHINES.items():
        (docs / "images" / f"{name}.svg").write_text(svg(machine), encoding="utf-8")
    page.write_text(text, encoding="utf-8")
