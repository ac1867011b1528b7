"""A digest of the C sources, which identifies the sources that a native body was built from.

`setup.py` runs this file before anything is installed, so it may only use the standard library.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path


def digest_of_sources(folder: Path) -> str:
    """Return a digest of the C files in `folder`: their names and their contents."""
    whole = sha256()
    for source in sorted([*folder.glob("*.c"), *folder.glob("*.h")]):
        whole.update(f"{source.name}\n{source.stat().st_size}\n".encode())
        whole.update(source.read_bytes())
    return whole.hexdigest()[:32]
