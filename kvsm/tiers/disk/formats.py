"""The bytes of a disk tier's file: a superblock, twice, then the headers of all slots, then their payloads.

    | superblock | superblock | header 0 | header 1 | ... | payload 0 | payload 1 | ...

Each part begins at a multiple of `ALIGNMENT`, as direct I/O requires. A superblock describes the file: what
its bytes mean, its sizes, its rank, and its *life*, which is raised each time the file is opened. There are
two copies, written one after the other with a flush in between. So a power loss, or a bad sector, leaves one
whole copy.

A header describes its payload: key, era, generation (life and number), length, checksum. It also names its
file and its slot, so that a header from another place is not accepted. It is one sector of 512 bytes, because
a disk writes a sector whole or not at all. Each header has a page of its own: many disks rewrite 4 KiB for
each sector in them, and some lose all 4 KiB if the power fails meanwhile. So the write of a header endangers
no other slot.

The headers are contiguous, so that a starting process reads many of them in one call.

The checksums are XXH3 with 64 bits. They protect from random errors and not from an attacker, who cannot
write to a private file. One in 2**64 wrong payloads would pass: for a disk that returns a wrong payload every
millisecond, one in 600 million years. The host pool has the same checksums.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from kvsm.errors import ConfigError
from kvsm.identity import DIGEST_BYTES, PoolIdentity

ALIGNMENT = 4096
"""Alignment of all direct I/O, in the file and in memory (bytes)."""

FORMAT = 3
"""Version of the format in this module. A file with another version is replaced."""

SUPERBLOCK_BYTES = 16 << 10
SUPERBLOCKS = 2
FIRST_SLOT = SUPERBLOCKS * SUPERBLOCK_BYTES
"""Offset of the first header (bytes)."""

HEADER_BYTES = 512
"""Size of a header. The rest of its page is zeros, which are not used."""

HEADER_STEP = ALIGNMENT
"""Distance between headers (bytes)."""

FILE_ID_BYTES = 16

ERA_ID_BYTES = 16

NO_ERA = bytes(ERA_ID_BYTES)
"""The era id in the header of a store without an era. No era has this id."""

_MAGIC, _SLOT_MAGIC = b"kvsmdisk", b"kvsmslot"
_SUPERBLOCK = struct.Struct("<8sQII")
"""The begin of a superblock: magic, checksum of all bytes after it, format, length of the body."""

_HEADER = struct.Struct("<Q8sII16s16s16sQQQQQI")
_CHECKSUM_BYTES = 8
MOST_KEY_BYTES = HEADER_BYTES - _HEADER.size
"""Most bytes of a key."""

HEADER_COLUMNS = np.dtype(
    [
        ("checksum", "<u8"),
        ("magic", "V8"),
        ("format", "<u4"),
        ("state", "<u4"),
        ("file", "V16"),
        ("identity", "V16"),
        ("era", f"V{ERA_ID_BYTES}"),
        ("slot", "<u8"),
        ("life", "<u8"),
        ("number", "<u8"),
        ("length", "<u8"),
        ("payload", "<u8"),
        ("key_bytes", "<u4"),
        ("key", f"V{MOST_KEY_BYTES}"),
        ("unused", f"V{HEADER_STEP - HEADER_BYTES}"),
    ]
)
"""The fields of a header page, for numpy arrays of pages."""


class DiskGeometry(msgspec.Struct, frozen=True, array_like=True):
    """The sizes of one rank's file.

    payload_bytes: size of a block on this rank.
    num_slots: number of slots, each for one block.
    rank, ranks: the rank, and the number of ranks.
    """

    payload_bytes: int
    num_slots: int
    rank: int = 0
    ranks: int = 1

    @property
    def payload_step(self) -> int:
        """Distance between payloads (bytes)."""
        return -(-self.payload_bytes // ALIGNMENT) * ALIGNMENT

    @property
    def slot_bytes(self) -> int:
        """Bytes of the file for one slot: header page and payload."""
        return HEADER_STEP + self.payload_step

    @property
    def file_bytes(self) -> int:
        """Size of the file."""
        return self.payload_at(self.num_slots)

    def header_at(self, slot: int) -> int:
        """Return the offset of a slot's header (bytes)."""
        return FIRST_SLOT + slot * HEADER_STEP

    def payload_at(self, slot: int) -> int:
        """Return the offset of a slot's payload (bytes)."""
        return self.header_at(self.num_slots) + slot * self.payload_step

    def check(self) -> None:
        """Raise `ConfigError` for impossible sizes or an impossible rank."""
        if self.payload_bytes < 1 or self.num_slots < 0:
            raise ConfigError(f"{self}: slots need 1 byte or more, and their number is not negative")
        if not 0 <= self.rank < self.ranks:
            raise ConfigError(f"rank is {self.rank}; it must be from 0 to {self.ranks - 1}")

    def __str__(self) -> str:
        return f"{self.num_slots:,} slots of {self.payload_bytes:,} bytes, rank {self.rank} of {self.ranks}"


class Superblock(msgspec.Struct, frozen=True, array_like=True):
    """The description of a file at its begin.

    life: how often the file was opened.
    file_id: random, new for each file.
    """

    life: int
    file_id: bytes
    geometry: DiskGeometry
    identity: PoolIdentity

    def encode(self) -> bytes:
        """Return the superblock as `SUPERBLOCK_BYTES` bytes. Raises `ConfigError` if the identity is too
        long."""
        body = msgspec.msgpack.encode(self)
        room = SUPERBLOCK_BYTES - _SUPERBLOCK.size
        if len(body) > room:
            raise ConfigError(
                f"the identity of the disk tier takes {len(body):,} bytes, and a file has room for {room:,}; "
                "shorten its facts"
            )
        sealed = struct.pack("<II", FORMAT, len(body)) + body.ljust(room, b"\0")
        return _MAGIC + struct.pack("<Q", xxhash.xxh3_64_intdigest(sealed)) + sealed


def is_superblock(data: bytes) -> bool:
    """Whether these bytes begin with the magic of a superblock; the rest may be damaged or of another
    format."""
    return data.startswith(_MAGIC)


def read_superblock(data: bytes) -> Superblock | str:
    """Decode a superblock. Returns it, or the reason why it cannot be read."""
    if len(data) < SUPERBLOCK_BYTES or not is_superblock(data):
        return "its superblock is not whole"
    _, checksum, found, length = _SUPERBLOCK.unpack_from(data)
    if xxhash.xxh3_64_intdigest(data[len(_MAGIC) + _CHECKSUM_BYTES : SUPERBLOCK_BYTES]) != checksum:
        return "its superblock is damaged"
    if found != FORMAT:
        return f"it has format {found}, and this kvsm writes format {FORMAT}"
    try:
        return msgspec.msgpack.decode(data[_SUPERBLOCK.size : _SUPERBLOCK.size + length], type=Superblock)
    except msgspec.DecodeError as error:
        return f"its superblock cannot be read: {error}"


class HeaderState(IntEnum):
    """The state of a payload, in its header: complete, or possibly incomplete."""

    SEALED = 1
    DROPPED = 2


class SlotGeneration(NamedTuple):
    """The store that wrote a slot: the life of the files, and the number of the transfer. Never repeated."""

    life: int
    number: int

    def __str__(self) -> str:
        return f"transfer {self.number} of life {self.life}"


class SlotHeader(NamedTuple):
    """The header of a slot.

    file_id: as in the superblock.
    identity: the digest of the identity in the superblock.
    era: the id of the era in which the store was planned, `ERA_ID_BYTES` bytes.
    length, checksum: of the payload.
    """

    state: HeaderState
    file_id: bytes
    identity: bytes
    era: bytes
    slot: int
    generation: SlotGeneration
    length: int
    checksum: int
    key: bytes

    def encode(self) -> bytes:
        """Return the header as `HEADER_BYTES` bytes. The first 8 are the checksum of the rest."""
        body = _HEADER.pack(
            0,
            _SLOT_MAGIC,
            FORMAT,
            self.state,
            self.file_id,
            self.identity,
            self.era,
            self.slot,
            *self.generation,
            self.length,
            self.checksum,
            len(self.key),
        )
        content = (body[_CHECKSUM_BYTES:] + self.key).ljust(HEADER_BYTES - _CHECKSUM_BYTES, b"\0")
        return struct.pack("<Q", xxhash.xxh3_64_intdigest(content)) + content


def header_checksum(header: bytes) -> int:
    """Return the checksum at the begin of an encoded header."""
    return int.from_bytes(header[:_CHECKSUM_BYTES], "little")


def whole_headers(pages: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Return a mask of the undamaged headers of this format. pages: the header pages, `HEADER_STEP` bytes
    each."""
    columns, memory, digest = pages.view(HEADER_COLUMNS), pages.data, xxhash.xxh3_64_intdigest
    begins = range(0, len(pages), HEADER_STEP)
    checksums = [digest(memory[begin + _CHECKSUM_BYTES : begin + HEADER_BYTES]) for begin in begins]
    whole: NDArray[np.bool_] = columns["checksum"] == np.array(checksums, np.uint64)
    whole &= (columns["magic"] == np.void(_SLOT_MAGIC)) & (columns["format"] == FORMAT)
    whole &= np.isin(columns["state"], list(HeaderState)) & (columns["key_bytes"] <= MOST_KEY_BYTES)
    return whole


def header_keys(
    columns: NDArray[np.void], places: NDArray[np.intp]
) -> Iterator[tuple[NDArray[np.intp], list[bytes]]]:
    """Yield the keys of the undamaged headers at these places, grouped by key length: the places of a group,
    and their keys."""
    lengths = columns["key_bytes"][places]
    for length in np.unique(lengths).tolist():
        some = places[lengths == length]
        if length:
            yield some, columns["key"][some].astype(f"V{length}").tolist()
        else:
            yield some, [b""] * len(some)


assert HEADER_COLUMNS.itemsize == HEADER_STEP
assert DIGEST_BYTES == FILE_ID_BYTES == ERA_ID_BYTES == 16
