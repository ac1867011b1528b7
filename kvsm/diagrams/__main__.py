"""`python -m kvsm.diagrams docs`: write the pictures and tables of the documentation anew."""

from __future__ import annotations

import sys
from pathlib import Path

from kvsm.diagrams.pages import write_docs

if len(sys.argv) != 2 or not (Path(sys.argv[1]) / "machines.md").is_file():
    sys.exit("usage: python -m kvsm.diagrams DOCS, the folder that holds machines.md")
write_docs(Path(sys.argv[1]))
