"""Writes the texts beside this file from the declarations in `kvsm.check.protocol`.

PYTHONPATH=specs python -m protocol.texts
"""

from __future__ import annotations

from pathlib import Path

from kvsm.check.protocol.offload_protocol import offload_protocol
from kvsm.check.protocol.request_protocol import request_protocol
from kvsm.check.protocol.request_scope import RequestScope
from kvsm.check.protocol.scope import ProtocolScope
from protocol.export import file_name
from protocol.murphi import murphi_text
from protocol.proof_text import proof_text
from protocol.tla import module_name, tla_configuration, tla_module

FOLDER = Path(__file__).parent
DECLARED = (
    offload_protocol(ProtocolScope(keys=2, device_blocks=2, slots=2, workers=2)),
    request_protocol(RequestScope()),
)
"""The numbers of keys, blocks, slots and workers stand on one line each in a text: change them there."""


def texts() -> dict[Path, str]:
    """What each file must hold."""
    found = {}
    for declared in DECLARED:
        module = module_name(declared)
        found[FOLDER / f"{module}.tla"] = tla_module(declared)
        found[FOLDER / f"{module}.cfg"] = tla_configuration(declared, symmetry=True)
        found[FOLDER / f"{file_name(declared)}.m"] = murphi_text(declared)
    found[FOLDER / "any_size.md"] = proof_text()
    return found


def main() -> None:
    """Write the texts."""
    for path, text in texts().items():
        path.write_text(text)


if __name__ == "__main__":
    main()
