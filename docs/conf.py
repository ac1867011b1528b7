"""How Sphinx makes the site: `python -m sphinx -W docs site`. Neither it nor a reader needs a network.

Pages are the Markdown files that the repository shows, too. Two things differ. A drawing in Mermaid needs a
script from the network, so the four machines become pictures, and the other drawings stay text. And what the
reference says comes from docstrings.
"""

from __future__ import annotations

import re
from importlib.metadata import version as version_of
from typing import Any

import kvsm.testing

project = "kvsm"
author = "the authors of kvsm"
release = version = version_of("kvsm")

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["schemas"]
html_theme = "furo"
html_title = "kvsm"
html_static_path = ["static"]
html_css_files = ["site.css"]
myst_heading_anchors = 3
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88

for module in (kvsm, kvsm.testing):
    # Autodoc lists what a module has, and these import a name only when it is used.
    for name in module.__all__:
        setattr(module, name, getattr(module, name))

_MACHINE = re.compile(r"```mermaid\n---\ntitle: The (\w+) machine\n---\n.*?```", re.DOTALL)
_ELSEWHERE = re.compile(r"\[([^\]]+)\]\(\.\./([^)#]+\.md)(?:#[^)]*)?\)")
_SUFFIX = re.compile(r"(`[^`]+`)(?=\w)")  # as in "`Event`s", which reStructuredText does not know
_FIELD = re.compile(r"([a-z_]\w*(?:, [a-z_]\w*)*): (.+)")


def adapt(_app: Any, _name: str, source: list[str]) -> None:
    """Replace Mermaid in a page, and links to pages that are not part of the site."""
    text = _MACHINE.sub(r"![The \1 machine](pictures/\1.svg)", source[0])
    source[0] = _ELSEWHERE.sub(r"\1 (`\2`)", text.replace("```mermaid", "```text"))


def lay_out(_app: Any, _what: str, _name: str, _it: Any, _options: Any, lines: list[str]) -> None:
    """Make a list of the fields in a docstring, "name: what it is", and code of what is indented."""
    out: list[str] = []
    for number, line in enumerate(lines):
        last = out[-1] if out else ""
        line = _SUFFIX.sub(r"\1\ ", line)
        if number and (field := _FIELD.fullmatch(line)):
            out += ["", f"- **{field[1]}**: {field[2]}"]
        elif line.startswith("    ") and not last:
            out += ["::", "", line]
        elif line and not line.startswith(" ") and last.startswith(("- **", "  ")):
            out.append(f"  {line}")  # a field that goes on
        else:
            out.append(line)
    lines[:] = [*out, ""]


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", adapt)
    app.connect("autodoc-process-docstring", lay_out)
