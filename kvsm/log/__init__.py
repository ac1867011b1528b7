"""The append-only log of events: written by `LogWriter`, read by `LogReader`.

    with Offloader.open(config, "log") as core:  # It makes a `LogWriter`, and closes it.
        core.arrive("r")

    for batch in LogReader("log").batches():
        ...

`frames.py` says what the bytes are, and how to judge bytes that are missing or wrong.
"""

from kvsm.log.continued import EndedLog, find_end
from kvsm.log.flush_mark import LogBinding
from kvsm.log.follower import LogFollower, News
from kvsm.log.frames import RUN_BYTES, SegmentHead, SegmentTail, Torn
from kvsm.log.late import LateLog, is_refused_by_system
from kvsm.log.log_directory import WHAT_TO_DO, LogDirectory
from kvsm.log.memory import MemoryLog
from kvsm.log.options import Durability, OnFailure
from kvsm.log.reader import EventsTakenBack, LogEnd, LogGap, LogLife, LogReader, Segment
from kvsm.log.state_copy import StateCopy, WholeState
from kvsm.log.stop_mark import StopMark, is_stop, stop_notice, stopped_by, told_stop
from kvsm.log.writer import LogWriter

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
