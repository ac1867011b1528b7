"""Write a copy of a log with new names, segment by segment.

The copy has the same events, snapshots, gaps and ends, so readers give the same answers. Names are replaced
without folding the events, so the log of a broken engine can be copied, too. The file `REDACTED` in the copy
keeps readers from writing an index into it (`copy_mark.py`).
"""

from __future__ import annotations

import signal
from collections.abc import Collection
from pathlib import Path

import msgspec
from msgspec.structs import replace

from kvsm.core.log import LogDirectory, LogEnd, LogReader, Segment, Torn, stopped_by
from kvsm.core.log.frames import (
    CLOSED,
    MARK,
    PREAMBLE_BYTES,
    FrameEncoder,
    encode_mark,
    encode_preamble,
    first_event,
    succeeded_by,
)
from kvsm.core.log.segment_file import SegmentFile
from kvsm.core.log.stop_mark import NAME
from kvsm.errors import KvsmError, LogDamaged, LogError
from kvsm.explain.redaction.copy_mark import mark_copy
from kvsm.explain.redaction.names import NewNames
from kvsm.explain.redaction.rules import Redactor
from kvsm.system.private_files import write_whole


class RedactedLog(msgspec.Struct, frozen=True, kw_only=True):
    """A redacted copy of a log.

    directory: the directory of the copy.
    events: the number of events that were copied.
    damage: why the copy ends before the log does; None if all of the log was copied.
    withheld: whether an eviction policy of another package, or `auto`, was replaced.
    fetches: the copies from the disk, if this is the host's log: their transfers.
    """

    directory: Path
    events: int
    damage: str | None
    withheld: bool
    fetches: frozenset[int]


def redact_log(
    log: Path,
    copy: Path,
    names: NewNames,
    max_slots: int | None = None,
    fetches: Collection[int] = (),
) -> RedactedLog:
    """Write a redacted copy of a log to a new directory.

    names: makes the new names. Use the same object for logs that belong together.
    max_slots: as in `Trust`.
    fetches: for the disk's log, those of the copy of the host's log.

    Copies all events before the damage if the log is damaged. Raises `LogError` if there is no log, if the
    log needs more memory than `max_slots` allows, or if the copy cannot be written.
    """
    reader = LogReader(log)
    redactor = Redactor(names, log, max_slots, fetches)
    claimed = LogDirectory(copy, durable=False)
    try:
        claimed.require_empty()
        writer = _Writer(copy, redactor)
        damage = None
        try:
            for segment in reader.segments():
                writer.copy_segment(segment)
        except LogDamaged as error:
            damage = str(error)
        except KvsmError as error:
            if writer.has_begun:
                raise LogError(f"{error}; {copy} has a part of the copy: remove it") from error
            raise
        if reader.torn is not None:
            writer.copy_torn_segment(reader.torn)
        if reader.end is LogEnd.OPEN and (name := stopped_by(log)):
            write_whole(copy / NAME, bytes([signal.Signals[name]]))
        mark_copy(copy)
    except OSError as error:
        raise LogError(f"{copy}: the copy cannot be written: {error.strerror or error}; remove it") from error
    finally:
        claimed.close()
    return RedactedLog(
        directory=copy,
        events=writer.events,
        damage=damage,
        withheld=redactor.withheld,
        fetches=frozenset(redactor.fetched),
    )


class _Writer:
    """Writes the segments of a copy."""

    def __init__(self, directory: Path, redactor: Redactor) -> None:
        self.events = 0
        self._directory, self._redactor = directory, redactor
        self._copied: set[str] = set()
        """File names of the segments that were copied."""

    @property
    def has_begun(self) -> bool:
        """Whether there is a part of a copy."""
        return bool(self._copied)

    def copy_segment(self, segment: Segment) -> None:
        """Copy a segment. Raises `LogDamaged` after the last event that can be read."""
        head = self._redactor.head(segment.head)
        file = self._new_file(segment.path)
        try:
            encoder = FrameEncoder(head.run, compress=True, life=head.life)
            for piece in encoder.head(replace(head, snapshot=b""), [head.snapshot]):
                file.write(piece, file.size)
            for batch in segment.batches():
                renamed = [self._redactor.redacted(event) for event in batch]
                file.write(encoder.events(renamed, 0), file.size)
                encoder.keep()
                self.events += len(batch)
            if segment.tail is not None:
                tail = self._redactor.redacted(segment.tail)
                file.write(encoder.tail(tail, segment.last + 1, 0), file.size)
            if segment.torn is not None:
                file.cut(file.size + segment.torn.bytes_cut)
            mark = _mark_of(segment)
            if mark is not None:
                file.mark(mark)
        finally:
            file.publish()
            file.close()

    def copy_torn_segment(self, torn: Torn) -> None:
        """Copy a segment whose head was never written, with zeros in place of its bytes."""
        path = Path(torn.path)
        if path.name in self._copied:
            return
        file = self._new_file(path)
        file.cut(torn.offset and PREAMBLE_BYTES)
        file.cut(torn.offset + torn.bytes_cut)
        file.publish()
        file.close()

    def _new_file(self, original: Path) -> SegmentFile:
        """Make the file of a segment, with its preamble."""
        self._copied.add(original.name)
        file = SegmentFile(self._directory, first_event(original))
        file.create()
        file.write(encode_preamble(), 0)
        return file


def _mark_of(segment: Segment) -> int | None:
    """Return the number in the mark of a segment; None if it has no mark. Raises `LogDamaged`."""
    mark = segment.mark
    if mark.lost is not None:
        return mark.lost
    if mark.successor is not None:
        return succeeded_by(mark.successor, encode_mark(CLOSED) if mark.closed else bytes(MARK.size))
    return CLOSED if mark.closed else None
