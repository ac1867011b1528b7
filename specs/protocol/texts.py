"""Write both protocols as Murphi and TLA+, and the page about the proofs for any size.

    PYTHONPATH=specs python -m protocol.texts [FOLDER]

Murphi and TLA+ files are written to FOLDER (default: `written` beside this file, which git ignores), the page
to any_size.md beside this file.
"""

from __future__ import annotations

import sys
from pathlib import Path

from kvsm.check.protocol.offload_protocol import offload_protocol
from kvsm.check.protocol.request_protocol import request_protocol
from kvsm.check.protocol.request_scope import RequestScope
from kvsm.check.protocol.scope import ProtocolScope
from protocol.export import file_name
from protocol.murphi import murphi_text
from protocol.proof_text import proof_text
from protocol.tla import module_name, tla_configuration, tla_module

WRITTEN = Path(__file__).with_name("written")
ANY_SIZE = Path(__file__).with_name("any_size.md")
DECLARED = (
    offload_protocol(ProtocolScope(keys=2, device_blocks=2, slots=2, workers=2)),
    request_protocol(RequestScope()),
)
"""In a text, the number of keys, blocks, slots and workers is one line each, and can be changed there."""


def texts() -> dict[str, str]:
    """File name -> its text in Murphi or TLA+."""
    found = {}
    for declared in DECLARED:
        module = module_name(declared)
        found[f"{module}.tla"] = tla_module(declared)
        found[f"{module}.cfg"] = tla_configuration(declared, symmetry=True)
        found[f"{file_name(declared)}.m"] = murphi_text(declared)
    return found


def write(folder: Path) -> None:
    """Write the Murphi and TLA+ files to a folder, which is created if it is absent."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts().items():
        (folder / name).write_text(text)


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else WRITTEN)
    page = proof_text()
    if ANY_SIZE.read_text() != page:  # Others may read it meanwhile.
        ANY_SIZE.write_text(page)
