"""Pictures and tables of the machines, made from the rows that declare them.

`layouts` says where each state stands, `routing` finds the way of each arrow, `drawing` writes the SVG.
"""

from __future__ import annotations

from kvsm.diagrams.diagram import mermaid, svg, table

__all__ = ["mermaid", "svg", "table"]
