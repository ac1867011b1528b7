"""The bytes of a log: what a segment is made of, and how to judge bytes that are missing or wrong.

A segment is a preamble, a head frame, and frames of events. All integers are little endian.

=============  =======================================================================================
preamble       magic (8 bytes), schema version (4), CRC of both (4), broken mark (12)
broken mark    zeros; or the first lost event (8) and its CRC (4), written in place when a write failed
frame          header, then `length` bytes of payload
frame header   length (4), flags (2), events (2), first event (8), payload CRC (4), CRC of these 20 (4)
payload        one msgpack value, perhaps compressed, and the byte `END`
=============  =======================================================================================

A frame holds the events of one flush: to encode a list costs a third of encoding its events one by one. The
header has its own CRC, so a damaged length is never followed. This CRC covers the payload's CRC, so header
and payload belong together. `END` is not zero, so an intact frame never ends in zeros. Zeros up to the end
of the file always mean bytes that were never written: a file system may extend a file before it writes the
data.

The first row that fits says what is at the place where a frame begins:

===================================  ==================================================  ========
bytes                                and                                                 verdict
===================================  ==================================================  ========
none                                                                                     end
fewer than a header                                                                      torn
a header, its CRC wrong              zeros from inside the header to the file's end      torn
a header, its CRC wrong              anything else                                       damaged
a header, fewer than its length                                                          torn
a header and payload, CRC wrong      zeros from inside the payload to the file's end     torn
a header and payload, CRC wrong      anything else                                       damaged
a header and payload                                                                     frame
===================================  ==================================================  ========

A crash leaves a torn end. It is legal only in the last segment, and is cut there. In any other segment it is
damage, because a segment is complete before the next one is made.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import reduce
from operator import or_
from pathlib import Path
from struct import Struct
from typing import BinaryIO, NamedTuple, TypeVar
from zlib import crc32

import msgspec
import zstandard

from kvsm.errors import LogDamaged, LogError
from kvsm.events import KINDS, SCHEMA_VERSION, OffloadConfig, OffloadingEvent

MAGIC = b"kvsmlog\n"
END = b"\xc1"
"""Last byte of each payload: msgpack never uses it."""

HEAD, COMPRESSED = 1, 2
"""Flags of a frame."""

PREAMBLE = Struct("<8sII")
MARK = Struct("<QI")
MARK_OFFSET = PREAMBLE.size
PREAMBLE_BYTES = MARK_OFFSET + MARK.size
HEADER = Struct("<IHHQII")
_HEADER_COVERED = HEADER.size - 4
_CHUNK_BYTES = 1 << 20

_T = TypeVar("_T")
_ENCODER = msgspec.msgpack.Encoder()


class SegmentHead(msgspec.Struct, frozen=True, array_like=True):
    """First record of a segment: what it takes to read it without the segments before it.

    schema: version of the records.
    machines: digest of the tables that wrote them.
    seq: the last event before this segment; 0 if there is none.
    created_ns: Unix time (ns).
    snapshot: the ledger after event `seq`; empty in the first segment, whose first event is `LogOpened`.
    """

    schema: int
    machines: str
    config: OffloadConfig
    seq: int
    created_ns: int
    snapshot: bytes


_EVENTS: msgspec.msgpack.Decoder[list[OffloadingEvent]] = msgspec.msgpack.Decoder(list[reduce(or_, KINDS)])  # type: ignore[misc]
_HEAD = msgspec.msgpack.Decoder(SegmentHead)


class Frame(NamedTuple):
    """A frame that was read. `end` is the offset of the byte after it."""

    flags: int
    event_count: int
    first: int
    payload: bytes
    end: int


class Torn(NamedTuple):
    """The unfinished end of a log: from byte `offset` of `path`, `bytes_cut` bytes are not read.

    seq: the first event that is missing, if it was ever written.
    """

    path: str
    offset: int
    seq: int
    bytes_cut: int


def segment_path(directory: Path, first: int) -> Path:
    """The file of the segment whose first event is `first`. Names sort by event number."""
    return directory / f"{first:020d}.kvsm"


def segment_paths(directory: Path) -> list[Path]:
    """The segments of a directory, in order; other files are ignored. Raises `LogError`."""
    try:
        paths = sorted(path for path in directory.iterdir() if path.suffix == ".kvsm")
    except FileNotFoundError:
        raise LogError(f"{directory}: no such directory; a log is a directory of .kvsm segments") from None
    except NotADirectoryError:
        raise LogError(f"{directory}: not a directory; give the directory that holds the segments") from None
    except OSError as error:
        raise LogError(f"{directory}: cannot be listed: {error}") from error
    for path in paths:
        if not re.fullmatch(r"\d{20}", path.stem):
            raise LogError(f"{path}: not the name of a segment, which is 20 digits and .kvsm; move it away")
    return paths


def first_event(path: Path) -> int:
    """The event number in a segment's name."""
    return int(path.stem)


def encode_preamble() -> bytes:
    """The first bytes of a segment, not marked as broken."""
    covered = PREAMBLE.pack(MAGIC, SCHEMA_VERSION, 0)[:-4]
    return covered + crc32(covered).to_bytes(4, "little") + bytes(MARK.size)


def encode_mark(seq: int) -> bytes:
    """The broken mark of a log whose first lost event is `seq`."""
    return MARK.pack(seq, crc32(seq.to_bytes(8, "little")))


class FrameEncoder:
    """Turns events and heads into frames. compress: with zstd."""

    def __init__(self, compress: bool) -> None:
        self._compressor = zstandard.ZstdCompressor(level=1) if compress else None

    def events(self, events: Sequence[OffloadingEvent]) -> bytes:
        """One frame of consecutive events."""
        return self._frame(events, 0, len(events), events[0].seq)

    def head(self, head: SegmentHead) -> bytes:
        """The first frame of a segment."""
        return self._frame(head, HEAD, 0, head.seq + 1)

    def _frame(self, value: object, flags: int, count: int, first: int) -> bytes:
        payload = _ENCODER.encode(value)
        if self._compressor is not None:
            payload, flags = self._compressor.compress(payload), flags | COMPRESSED
        length = len(payload) + len(END)
        if length >= 1 << 32:
            raise LogError(f"events from {first} on take {length} bytes; one flush holds at most 4 GiB")
        covered = HEADER.pack(length, flags, count, first, crc32(END, crc32(payload)), 0)[:_HEADER_COVERED]
        return b"".join((covered, crc32(covered).to_bytes(4, "little"), payload, END))


def read_preamble(file: BinaryIO, path: str, seq: int) -> Torn | None:
    """Check a segment's first bytes. Raises `LogDamaged`, or `LogError` if the schema is unknown."""
    fixed = file.read(MARK_OFFSET)
    if len(fixed) < MARK_OFFSET or (crc32(fixed[:-4]) != int.from_bytes(fixed[-4:], "little")):
        return _torn_or_damaged(
            file, path, 0, seq, fixed, MARK_OFFSET, "these are not the first bytes of a segment"
        )
    magic, schema, _ = PREAMBLE.unpack(fixed)
    if magic != MAGIC:
        raise LogDamaged(path, 0, seq, "these are not the first bytes of a segment")
    if schema != SCHEMA_VERSION:
        raise LogError(
            f"{path}: written with log schema {schema}; this kvsm reads schema {SCHEMA_VERSION}. "
            f"Read it with the kvsm that wrote it, or start a new log in an empty directory"
        )
    return None if len(file.read(MARK.size)) == MARK.size else _torn(file, path, 0, seq)


def read_mark(file: BinaryIO, path: str, seq: int) -> int | None:
    """The first event lost after this segment; None if it is not marked as broken. Raises `LogDamaged`."""
    file.seek(MARK_OFFSET)
    data = file.read(MARK.size)
    if data.count(0) == len(data):
        return None
    lost, crc = MARK.unpack(data) if len(data) == MARK.size else (0, 0)
    if crc32(data[:8]) != crc:
        raise LogDamaged(path, MARK_OFFSET, seq, "the broken mark does not match its checksum")
    return int(lost)


def read_frame(file: BinaryIO, path: str, offset: int, seq: int) -> Frame | Torn | None:
    """Read the frame at `offset`, the file's position; None at its end. Raises `LogDamaged`.

    This is the decision table at the top of the file.

    seq: the first event that this frame must have.
    """
    header = file.read(HEADER.size)
    if not header:
        return None
    if len(header) < HEADER.size:
        return _torn(file, path, offset, seq)
    length, flags, count, first, payload_crc, header_crc = HEADER.unpack(header)
    if crc32(header[:_HEADER_COVERED]) != header_crc:
        return _torn_or_damaged(
            file, path, offset, seq, header, HEADER.size, "a frame header does not match its checksum"
        )
    payload = file.read(length)
    if len(payload) < length:
        return _torn(file, path, offset, seq)
    if crc32(payload) != payload_crc:
        return _torn_or_damaged(
            file, path, offset, seq, payload, length, "a frame does not match its checksum"
        )
    if first != seq:
        raise LogDamaged(path, offset, seq, f"a frame starts with event {first} in its place")
    return Frame(flags, count, first, payload, offset + HEADER.size + length)


def decode_head(frame: Frame, path: str, offset: int) -> SegmentHead:
    """The head in a segment's first frame. Raises `LogDamaged`."""
    if not frame.flags & HEAD:
        raise LogDamaged(path, offset, frame.first, "the segment does not open with its head")
    head = _decode(_HEAD, frame, path, offset)
    if head.seq + 1 != frame.first:
        raise LogDamaged(path, offset, frame.first, f"the head stands after event {head.seq}")
    return head


def decode_events(frame: Frame, path: str, offset: int) -> list[OffloadingEvent]:
    """The events of a frame. Raises `LogDamaged`."""
    if frame.flags & HEAD:
        raise LogDamaged(path, offset, frame.first, "a second head inside the segment")
    events = _decode(_EVENTS, frame, path, offset)
    if not events or len(events) != frame.event_count or events[0].seq != frame.first:
        raise LogDamaged(path, offset, frame.first, "the events of a frame do not match its header")
    if events[-1].seq != frame.first + frame.event_count - 1:
        raise LogDamaged(path, offset, frame.first, "event numbers of a frame have a gap")
    return events


def _decode(decoder: msgspec.msgpack.Decoder[_T], frame: Frame, path: str, offset: int) -> _T:
    payload: bytes | memoryview = memoryview(frame.payload)[: -len(END)]
    if frame.flags & COMPRESSED:
        try:
            payload = zstandard.ZstdDecompressor().decompress(payload)
        except zstandard.ZstdError as error:
            raise LogDamaged(path, offset, frame.first, f"a frame cannot be decompressed: {error}") from error
    try:
        return decoder.decode(payload)
    except msgspec.MsgspecError as error:
        reason = f"whole, but no record that this kvsm knows ({error}); a newer kvsm may have written it"
        raise LogDamaged(path, offset, frame.first, reason) from error


def _torn(file: BinaryIO, path: str, offset: int, seq: int) -> Torn:
    return Torn(path, offset, seq, file.seek(0, 2) - offset)


def _torn_or_damaged(
    file: BinaryIO, path: str, offset: int, seq: int, part: bytes, size: int, reason: str
) -> Torn:
    """Judge a `part` of `size` bytes that fails its check. The file's position is the byte after it."""
    if len(part) < size or (part[-1] == 0 and _only_zeros_left(file)):
        return _torn(file, path, offset, seq)
    raise LogDamaged(path, offset, seq, reason)


def _only_zeros_left(file: BinaryIO) -> bool:
    while chunk := file.read(_CHUNK_BYTES):
        if chunk.count(0) != len(chunk):
            return False
    return True
