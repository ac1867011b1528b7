"""The texts that lie beside this file: the declaration of `kvsm.checker.protocol` as kvsm writes it out.

PYTHONPATH=specs python -m protocol.texts       # writes them anew
"""

from __future__ import annotations

from pathlib import Path

from kvsm.checker.protocol.murphi import murphi_text
from kvsm.checker.protocol.parts import Scope
from kvsm.checker.protocol.protocol import protocol
from kvsm.checker.protocol.tla import MODULE, tla_configuration, tla_module

FOLDER = Path(__file__).parent
SCOPE = Scope(keys=2, device_blocks=2, slots=2, workers=2)
"""Whose limits stand in the texts. How many keys, blocks, slots and workers there are is said in one line of
each, and can be changed there."""


def texts() -> dict[Path, str]:
    """What each file must hold."""
    declared = protocol(SCOPE)
    return {
        FOLDER / f"{MODULE}.tla": tla_module(declared),
        FOLDER / f"{MODULE}.cfg": tla_configuration(declared, symmetry=True),
        FOLDER / "offload.m": murphi_text(declared),
    }


def main() -> None:
    for path, text in texts().items():
        path.write_text(text)


if __name__ == "__main__":
    main()
