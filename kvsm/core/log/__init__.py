"""The append-only log of events: written by `LogWriter`, read by `LogReader`.

    with Offloader.open(config, "log") as core:  # It makes a `LogWriter`, and closes it.
        core.arrive("r")

    for batch in LogReader("log").batches():
        ...

`frames.py` describes the format, and how missing or wrong bytes are judged.
"""

from kvsm.core.ledger.state_copy import StateCopy, WholeState
from kvsm.core.log.continued import EndedLog, find_end
from kvsm.core.log.flush_mark import LogBinding
from kvsm.core.log.follower import LogFollower, News
from kvsm.core.log.frames import RUN_BYTES, SegmentHead, SegmentTail, Torn
from kvsm.core.log.late import LateLog, is_refused_by_system
from kvsm.core.log.log_directory import WHAT_TO_DO, LogDirectory
from kvsm.core.log.memory import MemoryLog
from kvsm.core.log.reader import EventsTakenBack, LogEnd, LogGap, LogLife, LogReader, Segment
from kvsm.core.log.stop_mark import StopMark, is_stop, stop_notice, stopped_by, told_stop
from kvsm.core.log.syncing import Durability
from kvsm.core.log.writer import LogWriter, OnFailure

__all__ = [
    "RUN_BYTES",
    "WHAT_TO_DO",
    "Durability",
    "EndedLog",
    "EventsTakenBack",
    "LateLog",
    "LogDirectory",
    "LogEnd",
    "LogFollower",
    "LogGap",
    "LogLife",
    "LogReader",
    "LogWriter",
    "LogBinding",
    "MemoryLog",
    "News",
    "OnFailure",
    "Segment",
    "SegmentHead",
    "SegmentTail",
    "StateCopy",
    "StopMark",
    "Torn",
    "WholeState",
    "find_end",
    "is_refused_by_system",
    "is_stop",
    "stopped_by",
    "stop_notice",
    "told_stop",
]
