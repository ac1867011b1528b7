"""Continue a log whose writer has ended: how its end is judged, and what the new writer does with it.

    claimed = LogDirectory("log")          # No other process writes here from now on.
    end = find_end(claimed)                # Raises `LogError` if no writer can continue it.
    ledger = rebuild("log").ledger         # The state after event `end.seq`; only if that is not 0.
    writer = LogWriter(end, config=ledger.config, snapshot=..., ...)

The new life begins with a segment of its own. Its head has the snapshot after the last whole event, and the
number of the life. That head ends the life before. The first flush changes the mark of the last older
segment, so that it names the new one; nothing else is written to older segments. If the last segment has no
events, it has the name that the new segment needs. Then the new one replaces it by an atomic
rename, and repeats in its head how the previous life ended, if the replaced segment said so.

==========================================  ======================  ==========================================
the log ends with                           the new life            because
==========================================  ======================  ==========================================
nothing, or an unpublished segment          begins a new log        no reader ever saw an event
the head of the first segment, whole or     begins a new log, and   likewise: its first event was never
torn, and no event                          replaces that segment   written
events; the log was closed, perhaps after   continues it            all of it is there
an error; its mark may be missing
events, no last record; perhaps torn: a     cuts what is torn, and  nobody acted on an event before it was
frame, a last record, pages of zeros        continues it            written whole
a segment without events; the head, which   cuts what is torn in    nobody acted on it; the state is in the
may be torn, has nothing that its           its predecessor,        new snapshot
predecessor does not have                   replaces it, and
                                            continues after the
                                            last event
a segment without events after lost         replaces it; continues  the gap is known, and the state after it
events, its head whole                      after the gap           is in the snapshot
- its head torn                             is refused              the state after the gap is unknown
lost events, and nothing after them         is refused              somebody may have acted on lost events
events, and the mark of their segment       is refused              likewise: the last segments are missing
names another one
the head of the only segment, torn, and it  is refused              the state before it is unknown
is not the first one
damage, foreign bytes, a version that this  is refused              a reader could not cross it
kvsm does not read
==========================================  ======================  ==========================================

In the first two rows `EndedLog.seq` is 0. Damage in older segments is found earlier, when they are folded.

A process that continues a log may be killed at any step. After each step the log is in a row of this table:

1. Unpublished segments are deleted. No reader sees them.
2. A torn end is cut, as a reader would cut it.
3. The last segment's bytes are written once more, older segments and their names are synced, and the new
   segment is written and synced under a temporary name.
4. The new segment is renamed. Now the log ends with a segment without events.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from kvsm.core.ledger.state_copy import StateCopy
from kvsm.core.log.frames import SegmentHead, SegmentTail, Torn, first_event, segment_paths
from kvsm.core.log.log_directory import WHAT_TO_DO, LogDirectory
from kvsm.core.log.minutes import counts_of, encode_counts
from kvsm.core.log.reader import LogEnd, LogReader, Segment
from kvsm.core.log.retention import Retention
from kvsm.core.log.segment_file import SegmentFile
from kvsm.core.log.segment_maker import SegmentMaker
from kvsm.errors import LogError, LogWriteFailed
from kvsm.system.private_files import sync_directory


class EndedLog(NamedTuple):
    """The end of a log that no process writes. A `LogWriter` continues the log from it.

    claimed: the locked directory.
    seq: the last whole event; 0 if there is none, and the writer begins a new log.
    life: the number of the next life.
    run: the id of the run; None if there is no event.
    replaces: whether the last segment has no event, so that the next one takes its name.
    torn: the unfinished end behind event `seq`, or None.
    ended: how the last life ended, if the replaced segment says so; or None.
    life_id: the id of the last life; empty if it has none.
    before: for the head of the next segment: the counts of the segment before it (`minutes.py`).
    """

    claimed: LogDirectory
    seq: int = 0
    life: int = 1
    run: bytes | None = None
    replaces: bool = False
    torn: Torn | None = None
    ended: SegmentTail | None = None
    life_id: bytes = b""
    before: bytes = b""


def new_log(directory: str | os.PathLike[str], durable: bool) -> EndedLog:
    """Claim a directory for a new log. It is made if absent, and must be empty.

    Raises `LogError`.
    """
    claimed = LogDirectory(directory, durable)
    try:
        claimed.require_empty()
    except BaseException:
        claimed.close()
        raise
    return EndedLog(claimed)


def find_end(claimed: LogDirectory) -> EndedLog:
    """Find the end of a log, by the table above. Reads the last one or two segments and changes nothing.

    Raises `LogError` if no writer can continue the log: the text says why. Then begin a log elsewhere.
    """
    paths = segment_paths(claimed.path)
    if not paths:
        claimed.require_empty(leftovers=True)
        return EndedLog(claimed)
    if claimed.why_unlocked is not None:
        raise LogError(f"{claimed.path}: this log cannot be continued: {claimed.why_unlocked}")
    reader, last, counts = _read_from(claimed.path, paths[-1])
    if last is not None and last.last > last.head.seq:
        _refuse_lost(reader)
        return _behind(claimed, last.head, last.last, torn=reader.torn, before=counts)
    if last is not None:
        _refuse_lost(reader)
    if len(paths) == 1 and first_event(paths[0]) == 1:
        return EndedLog(claimed, replaces=True)
    if len(paths) == 1 and last is None:
        raise LogError(f"{claimed.path}: this log cannot be continued: {paths[0].name} is torn in its head")
    if len(paths) == 1:
        assert last is not None
        return _behind(claimed, last.head, last.head.seq, replaces=True)
    reader, before, counts = _read_from(claimed.path, paths[-2])
    assert before is not None  # A torn head with a segment behind it raises `LogDamaged`.
    if last is None and reader.gaps:
        lost = (
            f"events {reader.gaps[0][0]} to {reader.gaps[0][1]} were lost, and the head behind them is torn"
        )
        raise LogError(f"{claimed.path}: this log cannot be continued: {lost}")
    seq = first_event(paths[-1]) - 1
    if last is None:
        return _behind(claimed, before.head, seq, replaces=True, torn=before.torn, before=counts)
    # The segment that is replaced ends the life before, or was itself the first one of a life.
    ended = last.tail if last.head.life == before.head.life else last.head.ended
    return _behind(claimed, last.head, seq, replaces=True, torn=before.torn, ended=ended, before=counts)


def _behind(claimed: LogDirectory, head: SegmentHead, seq: int, **more: Any) -> EndedLog:
    """Return the end of a log behind event `seq`. head: of a segment of its last life."""
    return EndedLog(claimed, seq, head.life + 1, head.run, life_id=head.life_id, **more)


def _read_from(directory: Path, path: Path) -> tuple[LogReader, Segment | None, bytes]:
    """Read a log from this segment to its end. Also returns that segment and its counts; None if its head is
    torn."""
    reader, begun, counts = LogReader(directory), None, b""
    for segment in reader.segments(first_event(path)):
        found = counts_of(segment)
        if begun is None:
            begun, counts = segment, encode_counts(found)
    return reader, begun, counts


def _refuse_lost(reader: LogReader) -> None:
    if reader.end is LogEnd.BROKEN:
        raise LogError(
            f"{reader.directory}: this log cannot be continued: its last events, from {reader.broken_from} "
            f"on, were lost when a write failed"
        )
    if reader.end is LogEnd.MISSING:
        raise LogError(
            f"{reader.directory}: this log cannot be continued: its last segments, from event "
            f"{reader.missing_from} on, are missing"
        )


def begin_life(
    end: EndedLog,
    segment: SegmentFile,
    maker: SegmentMaker,
    retention: Retention,
    snapshot: Callable[[], StateCopy],
    syncs: bool,
) -> None:
    """Make the first segment of a life behind `end`. syncs: whether older segments and it are synced.

    Raises `LogError`.
    """
    directory = end.claimed.path
    if end.claimed.spent:
        raise LogError(f"{directory}: a writer had this claim already; claim the directory again")
    try:
        for path in end.claimed.leftovers():
            path.unlink(missing_ok=True)
        _inherit(end, retention, syncs)
        maker.make(segment, snapshot(), end.ended, end.before)
    except BaseException as error:
        with suppress(OSError):
            segment.discard()
        if isinstance(error, FileExistsError):
            raise LogError(f"{directory}: another writer has just started a log here") from error
        cause = error if isinstance(error, OSError) else error.__cause__
        if isinstance(cause, OSError):
            raise LogWriteFailed(f"{directory}: no log can be started: {error}; {WHAT_TO_DO}") from cause
        raise
    if end.replaces:
        retention.replace_newest(segment)
    else:
        retention.add(segment)
    retention.opening_bytes = 0
    end.claimed.spent = True


def _inherit(end: EndedLog, retention: Retention, syncs: bool) -> None:
    """Add the older segments to `retention`. Cut the torn end, and sync bytes and names that may not be
    synced yet."""
    paths = segment_paths(end.claimed.path)
    for path in paths:
        older = SegmentFile(end.claimed.path, first_event(path))
        older.reopen()
        try:
            if end.torn is not None and Path(end.torn.path) == path:
                older.cut(end.torn.offset)
            if syncs:
                if path == paths[-1]:
                    # Older segments were synced before the next one began.
                    older.write_again()
                older.sync()
        finally:
            older.close()
        retention.inherit(older)
    if syncs and paths:
        sync_directory(end.claimed.path)  # Before retention deletes a segment: see `_delete_oldest`.
