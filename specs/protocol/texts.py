"""Writes the three texts beside this file from the declaration in `kvsm.checker.protocol`.

PYTHONPATH=specs python -m protocol.texts
"""

from __future__ import annotations

from pathlib import Path

from kvsm.checker.protocol.offload import offload_protocol
from kvsm.checker.protocol.scope import ProtocolScope
from protocol.murphi import murphi_text
from protocol.tla import MODULE, tla_configuration, tla_module

FOLDER = Path(__file__).parent
SCOPE = ProtocolScope(keys=2, device_blocks=2, slots=2, workers=2)
"""The limits in the texts. The numbers of keys, blocks, slots and workers stand on one line each and can be
changed there."""


def texts() -> dict[Path, str]:
    """What each file must hold."""
    declared = offload_protocol(SCOPE)
    return {
        FOLDER / f"{MODULE}.tla": tla_module(declared),
        FOLDER / f"{MODULE}.cfg": tla_configuration(declared, symmetry=True),
        FOLDER / "offload.m": murphi_text(declared),
    }


def main() -> None:
    """Write the texts."""
    for path, text in texts().items():
        path.write_text(text)


if __name__ == "__main__":
    main()
