"""Small files beside the slots of a disk tier, with a checksum: written durably as a whole, and refused if
they are damaged."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec
import xxhash

from kvsm.errors import ConfigError
from kvsm.system.private_files import read_trusted, write_whole

T = TypeVar("T", bound=msgspec.Struct)

_CHECKSUM_BYTES = 8
_MOST_BYTES = 1 << 20


def write_sealed(path: Path, magic: bytes, what: msgspec.Struct) -> None:
    """Write the file durably: it survives a power loss once this returns. Raises `OSError`."""
    body = msgspec.msgpack.encode(what)
    write_whole(path, magic + xxhash.xxh3_64_digest(body) + body, durable=True)


def read_sealed(path: Path, magic: bytes, kind: type[T]) -> T | str:
    """Return the content of this file, or why it cannot be read."""
    try:
        data = read_trusted(path, _MOST_BYTES)
    except FileNotFoundError:
        return f"{path}: there is no such file"
    except (OSError, ConfigError) as error:
        return f"{path}: cannot be read: {error}"
    begin = len(magic) + _CHECKSUM_BYTES
    if not data.startswith(magic) or xxhash.xxh3_64_digest(data[begin:]) != data[len(magic) : begin]:
        return f"{path}: is damaged"
    try:
        return msgspec.msgpack.decode(data[begin:], type=kind)
    except msgspec.DecodeError as error:
        return f"{path}: cannot be understood: {error}"
