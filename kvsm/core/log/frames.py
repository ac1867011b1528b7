"""The byte format of a log: the parts of a segment, and how missing or wrong bytes are judged.

A segment is a preamble, a head frame, event frames and, if the writer closed the log here, a tail frame.
All integers are little endian.

=============  =======================================================================================
preamble       magic (8 bytes), version of the format (4), CRC of both (4), mark (12)
mark           zeros; or a number (8) and its CRC (4), written in place: the first lost event when a
               write failed, `CLOSED` when the log was closed, or the first event of the next segment
               once that has its name (`SUCCEEDED`)
frame          header, then `length` bytes of payload
frame header   run mark (4), length (4), flags (2), events (2), first event (8), synced (8),
               payload CRC (4), CRC of these 32 (4)
payload        one msgpack value, perhaps compressed, and the byte `END`. Events are compressed as a
               stream (`event_stream.py`)
=============  =======================================================================================

A frame holds the events of one flush: encoding a list costs a third of encoding its events one by one. The
header has its own CRC, so a damaged length is never followed. This CRC covers the payload's CRC, so header
and payload belong together. `END` is not zero, so an intact frame never ends in zeros.

The run mark is the CRC of the run id and the life in the segment's head. So a frame of another run or
life is refused, and a search for frames behind damage has a pattern to look for. `synced` is the number of
bytes at the start of the segment that had been synced when the frame was written.

The tail frame holds the error that ended the life, or none. Its header has the number of the next event.

A segment is named after its first event, and ends where the next segment begins. Opening a segment with a
large snapshot takes time, and meanwhile events go to the segment before it. They are also written to the new
segment before it gets its name. So both segments may hold the same events; readers take them from the later
one.

A segment is complete if another segment follows, or if it has a mark. Then every byte must be there, up to
the first event of the next segment. If the mark names a segment that is not there, the log lacks its last
segments. The last segment of a log that was not closed may end anywhere. Its bytes
are intact up to the last sync; after a power loss, the bytes behind that may be anything.

A log may have several lives: each process that continues the log begins a new life. A segment whose head
names a later life begins that life and ends the life before, with or without a tail frame. Event numbers
have no gap there, so no event can be missing between two lives. `continued.py` says how a log is continued.

The first row that matches gives the verdict on the bytes where a frame should begin:

==================================================  ==================================================
bytes                                               verdict
==================================================  ==================================================
none                                                end; damaged if the segment is complete and its
                                                    tail is missing
a header and payload, both with the right CRC       frame
anything else, in a complete segment                damaged
anything else, in the head of a segment             torn if the file ends in it, or only zeros follow;
                                                    otherwise damaged: it was synced before it had a name
anything else, and a later frame was written when   damaged
this place had been synced
anything else                                       torn: no sync covered these bytes
==================================================  ==================================================

A torn end is cut. So after a power loss all events up to the last sync are read. With durability `none`
nothing is promised then: the log may be torn anywhere, because no frame proves anything, or read as damaged.

Sizes that a file claims are limited by the size of the file. A payload must fit into the file. Decompressed,
it has at most 1 MiB plus 32 times its compressed size (`content_limit`); the writer stores content that would
shrink more uncompressed. A reader holds one frame, whose Python objects take at most 30 times its size, and
the last `WINDOW_BYTES` of a compressed segment.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import reduce
from operator import or_
from pathlib import Path
from struct import Struct
from typing import BinaryIO, NamedTuple, TypeVar, cast
from zlib import crc32

import msgspec
import zstandard
from msgspec.structs import replace

from kvsm.core.log.event_stream import EventCompressor, EventDecompressor
from kvsm.core.log.records import Part, upgraded, why_unreadable
from kvsm.errors import ConfigError, LogDamaged, LogError
from kvsm.events import KINDS, SCHEMA_VERSION, OffloadConfig, OffloadingEvent

MAGIC = b"kvsmlog\n"
END = b"\xc1"
"""Last byte of each payload: msgpack never uses it."""

HEAD, COMPRESSED, TAIL, FRESH = 1, 2, 4, 8
"""Flags of a frame."""

CLOSED = (1 << 64) - 1
"""The mark of the last segment of a log that was closed."""

SUCCEEDED, _WAS_CLOSED = 1 << 63, 1 << 62
"""Flags in the mark of a segment that has a successor. The other bits are the successor's first event. The
second flag says that the log was closed before another process continued it."""

RUN_BYTES = 16
"""Length of the id of a run."""

PREAMBLE = Struct("<8sII")
MARK = Struct("<QI")
MARK_OFFSET = PREAMBLE.size
PREAMBLE_BYTES = MARK_OFFSET + MARK.size
HEADER = Struct("<IIHHQQII")
_COVERED = Struct("<IIHHQQI")
"""A frame header without its own CRC."""
_CLAIMS, _CLAIMS_OFFSET = Struct("<QQ"), 12
"""The fields first event and `synced` of a frame header."""

_NO_BYTES, _BYTES = b"\xc4\x00", Struct(">BI")
"""An empty bytes field in msgpack, and the header of a bytes field of up to 4 GiB."""

_CHUNK_BYTES = 1 << 18
_HOLES_BYTES = 256 << 20
"""The most bytes of a payload that may lie in holes of the file (pages of zeros that take no disk space)."""

_T = TypeVar("_T")
_ENCODER = msgspec.msgpack.Encoder()


class SegmentTail(msgspec.Struct, frozen=True, array_like=True):
    """Last record of a life.

    error: the error that ended the life; None if the log was closed without one.
    oldest: the oldest event that retention still kept when the life ended.
    """

    error: str | None = None
    oldest: int = 1


class SegmentHead(msgspec.Struct, frozen=True, array_like=True):
    """First record of a segment. With it, the segment can be read without the segments before it.

    schema: version of the log format (`records.py`), as in the preamble.
    machines: digest of the state machine tables of the kvsm that wrote the records.
    seq: the last event before this segment; 0 if there is none.
    created_ns: Unix time (ns).
    run: id of the run that wrote the log (16 bytes): the same in all its segments.
    oldest: the oldest event that the log keeps while this segment is written. Retention deletes older ones.
    life: number of the process that writes the log, from 1 on. A process that continues the log has a
        larger number.
    ended: the tail of the previous life, if it was in a segment without events that this segment has
        replaced; otherwise None.
    snapshot: the ledger after event `seq`; empty in the first segment, whose first event is `LogOpened`.
        `FrameEncoder.head` takes it in pieces.
    life_id: random id of the life (16 bytes), which distinguishes lives with the same number. Empty if the
        log is bound to no persistent pool.
    before: the counts of the segment before this one (`minutes.py`); empty if the writer has none.
    """

    schema: int
    machines: str
    config: OffloadConfig
    seq: int
    created_ns: int
    run: bytes = bytes(RUN_BYTES)
    oldest: int = 1
    life: int = 1
    ended: SegmentTail | None = None
    snapshot: bytes = b""
    life_id: bytes = b""
    before: bytes = b""


_EVENT: msgspec.msgpack.Decoder[OffloadingEvent] = msgspec.msgpack.Decoder(reduce(or_, KINDS))
_EVENTS: msgspec.msgpack.Decoder[list[OffloadingEvent]] = msgspec.msgpack.Decoder(list[reduce(or_, KINDS)])  # type: ignore[misc]
_NEWEST_TAG = max(cast(int, kind.__struct_config__.tag) for kind in KINDS)
_HEAD = msgspec.msgpack.Decoder(SegmentHead)
_TAIL = msgspec.msgpack.Decoder(SegmentTail)


class Frame(NamedTuple):
    """A frame that was read. `end` is the offset of the byte after it, `header` the bytes of its header."""

    run_mark: int
    flags: int
    event_count: int
    first: int
    payload: bytes
    end: int
    header: bytes


class Mark(NamedTuple):
    """The mark of a segment.

    lost: the first event that a failed write lost, or None.
    successor: the first event of the next segment, or None.
    closed: whether the log was closed here.
    """

    lost: int | None = None
    successor: int | None = None
    closed: bool = False


class Torn(msgspec.Struct, frozen=True):
    """The unfinished end of a log: from byte `offset` of `path`, `bytes_cut` bytes are not read.

    seq: number of the first event that may have been lost there.
    """

    path: str
    offset: int
    seq: int
    bytes_cut: int


def segment_path(directory: Path, first: int) -> Path:
    """Return the path of the segment whose first event is `first`. Names sort by event number."""
    return directory / f"{first:020d}.kvsm"


def segment_paths(directory: Path) -> list[Path]:
    """Return the segments of a directory, in order. Other files are ignored. Raises `LogError`."""
    try:
        paths = sorted(path for path in directory.iterdir() if path.suffix == ".kvsm")
    except FileNotFoundError as error:
        raise LogError(f"{directory}: no such directory; a log is a directory of .kvsm segments") from error
    except NotADirectoryError:
        raise LogError(f"{directory}: not a directory; give the directory that holds the segments") from None
    except OSError as error:
        raise LogError(f"{directory}: cannot be listed: {error}") from error
    for path in paths:
        if not re.fullmatch("[0-9]{20}", path.stem):
            raise LogError(f"{path}: not the name of a segment, which is 20 digits and .kvsm; move it away")
    return paths


def segment_bytes(paths: Iterable[Path]) -> int:
    """Return the size of these segments. Those that retention has deleted meanwhile have none."""
    size = 0
    for path in paths:
        with suppress(FileNotFoundError):
            size += path.stat().st_size
    return size


def first_event(path: Path) -> int:
    """Return the number of a segment's first event, from its name."""
    return int(path.stem)


def encode_preamble() -> bytes:
    """Return the preamble of a segment, with no mark."""
    covered = PREAMBLE.pack(MAGIC, SCHEMA_VERSION, 0)[:-4]
    return covered + crc32(covered).to_bytes(4, "little") + bytes(MARK.size)


def encode_mark(number: int) -> bytes:
    """Encode the mark of a segment. number: the first lost event, `CLOSED` or `succeeded_by`."""
    return MARK.pack(number, crc32(number.to_bytes(8, "little")))


def succeeded_by(first: int, data: bytes) -> int | None:
    """Return the number to write into the mark of a segment once another segment follows; None: leave the
    mark. first: the first event of the next segment. data: the present mark, which is kept if it names a
    loss.
    """
    mark = decode_mark(data)
    if mark is None or mark.lost is not None:
        return None
    return SUCCEEDED | (_WAS_CLOSED if mark.closed else 0) | first


def run_mark(run: bytes, life: int = 1) -> int:
    """Return the run mark: each frame header of a life begins with it. It differs between lives of a run."""
    return crc32(run, life - 1)


def read_back(event: OffloadingEvent) -> OffloadingEvent:
    """Return this event as a reader will decode it. Raises `ValueError`, with the reason, if the decoded
    event would differ. The result shares no mutable object with the event, so later changes of the event do
    not reach the log.
    """
    try:
        read = _EVENT.decode(_ENCODER.encode(event))
        is_equal = bool(read == event)
    except (msgspec.MsgspecError, ConfigError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from error
    if not is_equal:
        raise ValueError(f"a reader gets {read!r:.200}")
    return read


def content_limit(length: int) -> int:
    """Return the most bytes that a compressed payload of `length` bytes may decompress to."""
    return (1 << 20) + 32 * length


class FrameEncoder:
    """Turns events, heads and tails into frames.

    run: id of the run (16 bytes).
    compress: whether to compress with zstd.
    life: the number of the life.

    synced (a parameter of `events` and `tail`): the number of bytes of the segment that have been synced.
    """

    def __init__(self, run: bytes, compress: bool, life: int = 1) -> None:
        self._run_mark = run_mark(run, life)
        self._compressor = zstandard.ZstdCompressor(level=1) if compress else None
        self._stream = EventCompressor() if compress else None

    def begin_stream(self) -> None:
        """Make the next event frame decompressible without the frames before it."""
        if self._stream is not None:
            self._stream.restart()

    def events(self, events: Sequence[OffloadingEvent], synced: int) -> bytes:
        """Encode consecutive events as one frame. The next frame may refer to it only if `keep` is called."""
        content, flags = _ENCODER.encode(events), 0
        if self._stream is not None:
            packed, is_fresh = self._stream.compress(content)
            if len(content) <= content_limit(len(packed)):
                content, flags = packed, COMPRESSED | FRESH * is_fresh
            else:
                self._stream.restart()
        payload = content + END
        count, first = len(events), events[0].seq
        return self._header(len(payload), flags, count, first, synced, crc32(payload)) + payload

    def keep(self) -> None:
        """Note that the last frame returned by `events` will be written. Call this once for a frame."""
        if self._stream is not None:
            self._stream.keep()

    def head(self, head: SegmentHead, snapshot: Sequence[bytes] = ()) -> list[bytes]:
        """Encode the first frame of a segment, in pieces.

        head: with an empty `snapshot`.
        snapshot: its encoded bytes, in pieces.
        """
        size = sum(map(len, snapshot))
        _check_length(size, head.seq + 1)
        rest = _ENCODER.encode(head.life_id) + _ENCODER.encode(head.before)
        fields = _ENCODER.encode(head).removesuffix(_NO_BYTES + rest) + _BYTES.pack(0xC6, size)
        return self._frame([fields, *snapshot, rest], HEAD, 0, head.seq + 1, 0)

    def most_head_bytes(self, head: SegmentHead) -> int:
        """Return the most bytes that `head` returns, without the snapshot. Compression is ignored: its effect
        depends on the snapshot."""
        return HEADER.size + len(_ENCODER.encode(head)) - len(_NO_BYTES) + _BYTES.size + len(END)

    def tail(self, tail: SegmentTail, following: int, synced: int) -> bytes:
        """Encode the last frame of a life. following: the number of the next event."""
        return b"".join(self._frame([_ENCODER.encode(tail)], TAIL, 0, following, synced))

    def _frame(self, payload: list[bytes], flags: int, count: int, first: int, synced: int) -> list[bytes]:
        """Return a frame in pieces, compressed if that makes it smaller."""
        if self._compressor is not None:
            compressed = _compressed(self._compressor, payload)
            if _size_of(compressed) < _size_of(payload) <= content_limit(_size_of(compressed)):
                payload, flags = compressed, flags | COMPRESSED
        payload_crc = crc32(END, reduce(lambda crc, piece: crc32(piece, crc), payload, 0))
        header = self._header(_size_of(payload) + len(END), flags, count, first, synced, payload_crc)
        return [header, *payload, END]

    def _header(
        self, length: int, flags: int, count: int, first: int, synced: int, payload_crc: int
    ) -> bytes:
        _check_length(length, first)
        return _with_crc(_COVERED.pack(self._run_mark, length, flags, count, first, synced, payload_crc))


def _compressed(compressor: zstandard.ZstdCompressor, payload: Sequence[bytes]) -> list[bytes]:
    packing = compressor.compressobj(size=_size_of(payload))
    return [*map(packing.compress, payload), packing.flush()]


def _size_of(pieces: Sequence[bytes]) -> int:
    return sum(map(len, pieces))


def _check_length(length: int, first: int) -> None:
    if length >= 1 << 32:
        raise LogError(f"events from {first} on take {length} bytes; one frame holds at most 4 GiB")


def _with_crc(covered: bytes) -> bytes:
    return covered + crc32(covered).to_bytes(4, "little")


def copied(frames: bytes) -> bytes:
    """Copy the whole frames at the beginning of these bytes, for another segment of the same life.

    The copies have `synced` 0, because no byte of that segment has been synced yet.
    """
    copy, begin = bytearray(frames), 0
    while begin + HEADER.size <= len(copy):
        mark, length, flags, count, first, _, payload_crc, _ = HEADER.unpack_from(copy, begin)
        end = begin + HEADER.size + length
        if end > len(copy):
            break
        header = _with_crc(_COVERED.pack(mark, length, flags, count, first, 0, payload_crc))
        copy[begin : begin + HEADER.size] = header
        begin = end
    return bytes(copy[:begin])


def read_preamble(file: BinaryIO, path: str, seq: int) -> Torn | int:
    """Return the version of a segment's format; `Torn` if its preamble was never written completely.

    Raises `LogDamaged`, or `LogError` if this kvsm cannot read the version.
    """
    fixed = file.read(MARK_OFFSET)
    if len(fixed) < MARK_OFFSET or (crc32(fixed[:-4]) != int.from_bytes(fixed[-4:], "little")):
        return _never_written(
            file, path, 0, seq, fixed, MARK_OFFSET, "these are not the first bytes of a segment"
        )
    magic, version, _ = PREAMBLE.unpack(fixed)
    if magic != MAGIC:
        raise LogDamaged(path, 0, seq, "these are not the first bytes of a segment")
    if (problem := why_unreadable(version)) is not None:
        raise LogError(f"{path}: {problem}")
    return version if len(file.read(MARK.size)) == MARK.size else _torn(file, path, 0, seq)


def has_mark(file: BinaryIO) -> bool:
    """Whether a segment has a mark; then every byte of it must be there. Moves the file's position."""
    file.seek(MARK_OFFSET)
    return any(file.read(MARK.size))


def read_mark(file: BinaryIO, path: str, seq: int) -> Mark:
    """Return the mark of a segment. Moves the file's position. Raises `LogDamaged`."""
    file.seek(MARK_OFFSET)
    return required_mark(file.read(MARK.size), path, seq)


def required_mark(data: bytes, path: str, seq: int) -> Mark:
    """Decode the mark of a segment. Raises `LogDamaged` if its checksum differs."""
    mark = decode_mark(data)
    if mark is None:
        raise LogDamaged(path, MARK_OFFSET, seq, "the mark of the segment does not match its checksum")
    return mark


def decode_mark(data: bytes) -> Mark | None:
    """Decode the mark of a segment. Returns None if its checksum differs."""
    if not any(data):
        return Mark()
    number, crc = MARK.unpack(data) if len(data) == MARK.size else (0, 0)
    if crc32(data[:8]) != crc:
        return None
    if number == CLOSED:
        return Mark(closed=True)
    if number & SUCCEEDED:
        return Mark(successor=number & (_WAS_CLOSED - 1), closed=bool(number & _WAS_CLOSED))
    return Mark(lost=number)


class FrameReader:
    """Reads the frames of a segment. Judges other bytes by the table at the top of the file.

    run_mark: the mark with which each frame header must begin; None to read the head frame, which names the
        run and life.
    complete: whether every byte of the segment must be there.
    """

    def __init__(self, file: BinaryIO, path: str, run_mark: int | None, complete: bool) -> None:
        self._file, self._path, self._run_mark, self._complete = file, path, run_mark, complete
        self._size = _size(file)

    def read(self, offset: int, seq: int) -> Frame | Torn | None:
        """Read the frame at `offset`, which must be the file's position.

        Returns None at the end of the file, and `Torn` for an unfinished end or a missing head.

        seq: number of the frame's first event.

        Raises `LogDamaged`.
        """
        file = self._file
        header = file.read(HEADER.size)
        if not header and self._run_mark is not None:
            return None
        if len(header) < HEADER.size:
            return self._unreadable(
                offset, seq, header, HEADER.size, "the segment ends inside a frame header"
            )
        mark, length, flags, count, first, _, payload_crc, header_crc = HEADER.unpack(header)
        if crc32(header[: _COVERED.size]) != header_crc:
            reason = "a frame header does not match its checksum"
            return self._unreadable(offset, seq, header, HEADER.size, reason)
        end = offset + HEADER.size + length
        if end > self._size or length > _HOLES_BYTES:
            status = os.fstat(file.fileno())  # A writer may have appended since `_size` was read.
            self._size = status.st_size
            if end > self._size:
                return self._unreadable(offset, seq, b"", length, "the segment ends inside a frame")
            if length > _HOLES_BYTES + content_limit(512 * status.st_blocks):
                raise LogDamaged(self._path, offset, seq, f"most of a frame of {length} bytes is a hole")
        payload = file.read(length)
        if len(payload) < length or crc32(payload) != payload_crc:
            return self._unreadable(offset, seq, payload, length, "a frame does not match its checksum")
        if self._run_mark is not None and mark != self._run_mark:
            raise LogDamaged(self._path, offset, seq, "a frame of another run or life stands here")
        if first != seq:
            raise LogDamaged(self._path, offset, seq, f"a frame starts with event {first} in its place")
        return Frame(mark, flags, count, first, payload, end, header)

    def end(self, offset: int, seq: int) -> Torn | None:
        """Return None if the file ends at `offset`, its position, as after a tail. Raises `LogDamaged`."""
        more = self._file.read(1)
        return self._unreadable(offset, seq, more, 1, "more bytes follow the last record") if more else None

    def _unreadable(self, offset: int, seq: int, part: bytes, size: int, reason: str) -> Torn:
        """Return `Torn` or raise `LogDamaged` for unreadable bytes at `offset`.

        part: the bytes that were read, of `size` bytes that should be there.
        """
        if self._complete:
            raise LogDamaged(self._path, offset, seq, reason)
        if self._run_mark is None:
            return _never_written(self._file, self._path, offset, seq, part, size, reason)
        if self._was_synced(offset, seq, self._run_mark):
            raise LogDamaged(self._path, offset, seq, reason)
        return _torn(self._file, self._path, offset, seq)

    def _was_synced(self, offset: int, seq: int, mark: int) -> bool:
        """Whether the header of a later frame of this segment says that the byte at `offset` had been synced.

        A header with the right CRC is enough; its payload may be damaged.
        """
        pattern = mark.to_bytes(4, "little")
        for start, data in _written(self._file, offset):
            at = data.find(pattern)
            while 0 <= at <= len(data) - HEADER.size:
                first, synced = _CLAIMS.unpack_from(data, at + _CLAIMS_OFFSET)
                # The disk may show a block of an older segment here. Its events are older than `seq`.
                if first >= seq and offset < synced <= start + at:
                    header = data[at : at + HEADER.size]
                    if crc32(header[: _COVERED.size]) == int.from_bytes(header[_COVERED.size :], "little"):
                        return True
                at = data.find(pattern, at + 1)
        return False


def decode_head(frame: Frame, path: str, offset: int, version: int) -> SegmentHead:
    """Decode the head in a segment's first frame. version: in the preamble. Raises `LogDamaged`."""
    if not frame.flags & HEAD:
        raise LogDamaged(path, offset, frame.first, "the segment does not open with its head")
    head = _decode(_HEAD, frame, path, offset, version, "head")
    if head.schema != version:
        reason = f"the head names version {head.schema} of the format, and the preamble version {version}"
        raise LogDamaged(path, offset, frame.first, reason)
    if head.seq + 1 != frame.first:
        raise LogDamaged(path, offset, frame.first, f"the head stands after event {head.seq}")
    if not 1 <= head.life < 1 << 32:
        raise LogDamaged(path, offset, frame.first, f"the head names {head.life} as its life")
    if len(head.run) != RUN_BYTES or run_mark(head.run, head.life) != frame.run_mark:
        raise LogDamaged(path, offset, frame.first, "the head names another run or life than its frame")
    if len(head.life_id) not in (0, RUN_BYTES):
        raise LogDamaged(path, offset, frame.first, f"the id of its life has {len(head.life_id)} bytes")
    if not 1 <= head.oldest <= frame.first:
        raise LogDamaged(path, offset, frame.first, f"the head names {head.oldest} as the oldest event")
    if not head.snapshot:
        return head
    snapshot = _upgraded(head.snapshot, frame, path, offset, version, "snapshot")
    return head if snapshot is head.snapshot else replace(head, snapshot=bytes(snapshot))


def decode_tail(frame: Frame, path: str, offset: int, version: int) -> SegmentTail:
    """Decode the tail in a segment's last frame. Raises `LogDamaged`."""
    return _decode(_TAIL, frame, path, offset, version, "tail")


class EventDecoder:
    """Decodes the event frames of a segment of this version. Give it each frame once, in order."""

    def __init__(self, version: int) -> None:
        self._stream, self._version = EventDecompressor(), version

    def decode(self, frame: Frame, path: str, offset: int) -> list[OffloadingEvent]:
        """Decode the events of the next frame. Raises `LogDamaged`."""
        if frame.flags & HEAD:
            raise LogDamaged(path, offset, frame.first, "a second head inside the segment")
        content = _upgraded(self._content(frame, path, offset), frame, path, offset, self._version, "events")
        events = _decoded(_EVENTS, content, frame, path, offset)
        if not events or len(events) != frame.event_count or events[0].seq != frame.first:
            raise LogDamaged(path, offset, frame.first, "the events of a frame do not match its header")
        if events[-1].seq != frame.first + frame.event_count - 1:
            raise LogDamaged(path, offset, frame.first, "event numbers of a frame have a gap")
        return events

    def _content(self, frame: Frame, path: str, offset: int) -> bytes | memoryview:
        payload = memoryview(frame.payload)[: -len(END)]
        if not frame.flags & COMPRESSED:
            return payload
        try:
            return self._stream.decompress(payload, bool(frame.flags & FRESH), content_limit(len(payload)))
        except ValueError as error:
            reason = f"a frame cannot be decompressed: {error}"
            raise LogDamaged(path, offset, frame.first, reason) from error


def _decode(
    decoder: msgspec.msgpack.Decoder[_T], frame: Frame, path: str, offset: int, version: int, part: Part
) -> _T:
    """Decode the record of a head or tail frame."""
    content: bytes | memoryview = memoryview(frame.payload)[: -len(END)]
    if frame.flags & COMPRESSED:
        content = _decompressed(content, frame, path, offset)
    return _decoded(decoder, _upgraded(content, frame, path, offset, version, part), frame, path, offset)


def _upgraded(
    content: bytes | memoryview, frame: Frame, path: str, offset: int, version: int, part: Part
) -> bytes | memoryview:
    """Return the records of a frame, or its snapshot, in today's version."""
    try:
        return upgraded(content, version, part)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise LogDamaged(path, offset, frame.first, f"whole, but {error}") from error


def _decoded(
    decoder: msgspec.msgpack.Decoder[_T], content: bytes | memoryview, frame: Frame, path: str, offset: int
) -> _T:
    try:
        return decoder.decode(content)
    except (msgspec.MsgspecError, RecursionError) as error:
        hint = "; a newer kvsm may have written it" if _may_be_newer(content, str(error)) else ""
        reason = f"whole, but no record that this kvsm knows ({error}){hint}"
        raise LogDamaged(path, offset, frame.first, reason) from error


def _may_be_newer(content: bytes | memoryview, problem: str) -> bool:
    """Whether a later kvsm wrote this record, which cannot be decoded: it has a schema, a kind of event or a
    reason that this kvsm does not know. problem: the decoder's message."""
    if "Invalid enum value" in problem:
        return True
    try:
        record = msgspec.msgpack.decode(content)
    except (msgspec.MsgspecError, RecursionError):
        return False
    if not isinstance(record, list) or not record:
        return False
    if isinstance(record[0], list):
        tags = [one[0] for one in record if isinstance(one, list) and one]
        return any(type(tag) is int and tag > _NEWEST_TAG for tag in tags)
    return type(record[0]) is int and record[0] > SCHEMA_VERSION


def _decompressed(payload: bytes | memoryview, frame: Frame, path: str, offset: int) -> bytes:
    """Decompress a payload. Allocates no more than `content_limit`."""
    try:
        size = zstandard.frame_content_size(payload)
        if 0 <= size <= content_limit(len(payload)):
            return zstandard.ZstdDecompressor().decompress(payload, allow_extra_data=False)
        claim = f"{size} bytes" if size >= 0 else "an unknown size"
        reason = f"it claims {claim}, and {len(payload)} bytes may stand for {content_limit(len(payload))}"
    except zstandard.ZstdError as error:
        reason = str(error)
    raise LogDamaged(path, offset, frame.first, f"a frame cannot be decompressed: {reason}")


def _torn(file: BinaryIO, path: str, offset: int, seq: int) -> Torn:
    return Torn(path, offset, seq, _size(file) - offset)


def _never_written(
    file: BinaryIO, path: str, offset: int, seq: int, part: bytes, size: int, reason: str
) -> Torn:
    """Return `Torn` if a segment's preamble or head was never written completely; else raise `LogDamaged`.

    part: the bytes that were read, of `size` bytes that should be there. The file's position is behind it.

    That is so if the file ends inside it, or if `part` ends in a zero and only zeros follow.
    """
    if len(part) < size or (part[-1] == 0 and _only_zeros_left(file)):
        return _torn(file, path, offset, seq)
    raise LogDamaged(path, offset, seq, reason)


def _only_zeros_left(file: BinaryIO) -> bool:
    return not any(data.count(0) != len(data) for _, data in _written(file, file.tell()))


def _size(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_size


def _written(file: BinaryIO, offset: int) -> Iterator[tuple[int, bytes]]:
    """Yield the bytes from `offset` on in pieces, each with its offset. Holes of the file are skipped.

    Consecutive pieces overlap by the size of a header, so each header is whole in one piece.
    """
    descriptor = file.fileno()
    while True:
        try:
            offset = os.lseek(descriptor, offset, os.SEEK_DATA)
            end = os.lseek(descriptor, offset, os.SEEK_HOLE)
        except OSError as error:
            if error.errno == errno.ENXIO:  # No data from here on.
                return
            end = _size(file)  # This file system does not report holes.
        if offset >= end:
            return
        while offset < end:
            data = os.pread(descriptor, _CHUNK_BYTES + HEADER.size, offset)
            if not data:
                return
            yield offset, data
            offset += _CHUNK_BYTES
