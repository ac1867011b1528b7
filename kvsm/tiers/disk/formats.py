"""The bytes of a disk tier's file: a superblock, twice, then the headers of all slots, then their payloads.

    | superblock | superblock | header 0 | header 1 | ... | payload 0 | payload 1 | ...

Everything begins at a multiple of `ALIGNMENT`, which direct I/O needs. A superblock says whose file it is:
what its bytes mean, its sizes, its rank, and its *life*, which is raised each time the file is opened. It is
kept twice, and the copies are written one after the other with a flush between. So a power loss, or a bad
sector, leaves one of them.

A header says what its payload is: key, era, generation (life and number), length, checksum. It names the
file and its own slot too, so bytes that come from elsewhere are not believed. It is one sector of 512 bytes,
because a disk writes such a sector whole or not at all. Each header begins a page of its own: many disks
write 4 KiB again for each sector in them, and some lose all of it if the power fails meanwhile. So a header
that is written endangers no other slot.

The headers lie together. So a process that starts reads them in long calls, and not one by one.

The checksums are XXH3 of 64 bits. They are against bad luck and not against an attacker, who cannot write to
a private file. Of wrong payloads one in 2**64 would pass: a disk that returned a wrong payload each
millisecond would get one past in 600 million years. And the host tier's checksums are the same.
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
"""Of every call of direct I/O, in the file and in memory (bytes)."""

FORMAT = 3
"""Of this module. A file of another format is replaced."""

SUPERBLOCK_BYTES = 16 << 10
SUPERBLOCKS = 2
FIRST_SLOT = SUPERBLOCKS * SUPERBLOCK_BYTES
"""Where the headers of the slots begin (bytes)."""

HEADER_BYTES = 512
"""Of what a header says. The rest of its page is zeros, and nobody reads them."""

HEADER_STEP = ALIGNMENT
"""From one header to the next (bytes)."""

FILE_ID_BYTES = 16

ERA_ID_BYTES = 16

NO_ERA = bytes(ERA_ID_BYTES)
"""The era id in the header of a store without an era. No era has this id."""

_MAGIC, _SLOT_MAGIC = b"kvsmdisk", b"kvsmslot"
_SUPERBLOCK = struct.Struct("<8sQII")
"""Magic, checksum of all behind it, format, length of the body."""

_HEADER = struct.Struct("<Q8sII16s16s16sQQQQQI")
_CHECKSUM_BYTES = 8
MOST_KEY_BYTES = HEADER_BYTES - _HEADER.size
"""Of a key."""

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
"""A header and the rest of its page, as numpy reads many of them at once."""


class DiskGeometry(msgspec.Struct, frozen=True, array_like=True):
    """The sizes of one rank's file.

    payload_bytes: of a block on this rank.
    num_slots: how many blocks it holds.
    rank, ranks: which rank of how many.
    """

    payload_bytes: int
    num_slots: int
    rank: int = 0
    ranks: int = 1

    @property
    def payload_step(self) -> int:
        """From one payload to the next (bytes)."""
        return -(-self.payload_bytes // ALIGNMENT) * ALIGNMENT

    @property
    def slot_bytes(self) -> int:
        """What a slot takes of the file: its header and its payload."""
        return HEADER_STEP + self.payload_step

    @property
    def file_bytes(self) -> int:
        """Size of the file."""
        return self.payload_at(self.num_slots)

    def header_at(self, slot: int) -> int:
        """Where the header of a slot begins (bytes)."""
        return FIRST_SLOT + slot * HEADER_STEP

    def payload_at(self, slot: int) -> int:
        """Where the payload of a slot begins (bytes)."""
        return self.header_at(self.num_slots) + slot * self.payload_step

    def check(self) -> None:
        """Raises `ConfigError`."""
        if self.payload_bytes < 1 or self.num_slots < 0:
            raise ConfigError(f"{self}: slots need 1 byte or more, and their number is not negative")
        if not 0 <= self.rank < self.ranks:
            raise ConfigError(f"rank is {self.rank}; it must be from 0 to {self.ranks - 1}")

    def __str__(self) -> str:
        return f"{self.num_slots:,} slots of {self.payload_bytes:,} bytes, rank {self.rank} of {self.ranks}"


class Superblock(msgspec.Struct, frozen=True, array_like=True):
    """Whose file it is. life: how often it was opened."""

    life: int
    file_id: bytes
    geometry: DiskGeometry
    identity: PoolIdentity

    def encode(self) -> bytes:
        """`SUPERBLOCK_BYTES` bytes. Raises `ConfigError` if the identity's facts have no room."""
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
    """Whether these bytes begin as a superblock of any format, whole or not."""
    return data.startswith(_MAGIC)


def read_superblock(data: bytes) -> Superblock | str:
    """What a superblock says, or why it cannot be read."""
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
    """What a header says of its payload."""

    SEALED = 1
    DROPPED = 2


class SlotGeneration(NamedTuple):
    """When a slot was stored: in which life of the files, and by which transfer. Never repeated."""

    life: int
    number: int

    def __str__(self) -> str:
        return f"transfer {self.number} of life {self.life}"


class SlotHeader(NamedTuple):
    """What a slot says of itself.

    file_id, identity: as in the superblock; identity is the digest.
    era: the id of the era in which the store was planned, `ERA_ID_BYTES` bytes.
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
        """`HEADER_BYTES` bytes. They begin with the checksum of all others."""
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
        said = (body[_CHECKSUM_BYTES:] + self.key).ljust(HEADER_BYTES - _CHECKSUM_BYTES, b"\0")
        return struct.pack("<Q", xxhash.xxh3_64_intdigest(said)) + said


def header_checksum(header: bytes) -> int:
    """The checksum with which an encoded header begins."""
    return int.from_bytes(header[:_CHECKSUM_BYTES], "little")


def whole_headers(pages: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Which of these headers are as a store has written them. pages: `HEADER_STEP` bytes of each."""
    columns, memory, digest = pages.view(HEADER_COLUMNS), pages.data, xxhash.xxh3_64_intdigest
    begins = range(0, len(pages), HEADER_STEP)
    checksums = [digest(memory[one + _CHECKSUM_BYTES : one + HEADER_BYTES]) for one in begins]
    whole: NDArray[np.bool_] = columns["checksum"] == np.array(checksums, np.uint64)
    whole &= (columns["magic"] == np.void(_SLOT_MAGIC)) & (columns["format"] == FORMAT)
    whole &= np.isin(columns["state"], list(HeaderState)) & (columns["key_bytes"] <= MOST_KEY_BYTES)
    return whole


def header_keys(
    columns: NDArray[np.void], places: NDArray[np.intp]
) -> Iterator[tuple[NDArray[np.intp], list[bytes]]]:
    """The keys of the whole headers at these places: some places, and the keys of equal length there."""
    lengths = columns["key_bytes"][places]
    for length in np.unique(lengths).tolist():
        some = places[lengths == length]
        if length:
            yield some, columns["key"][some].astype(f"V{length}").tolist()
        else:
            yield some, [b""] * len(some)


assert HEADER_COLUMNS.itemsize == HEADER_STEP
assert DIGEST_BYTES == FILE_ID_BYTES == ERA_ID_BYTES == 16
