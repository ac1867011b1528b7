"""The disk tier of one rank: slots in a file that describe themselves, below the host pool.

`SlotFile` opens the file. `recover` reads what the files of all ranks hold. `DiskCopyEngine` stores blocks of
a host pool into slots and loads them, each proved before a byte of it is used. docs/disk.md says what is
promised.
"""

from __future__ import annotations

from kvsm.disk.directory import TierDirectory
from kvsm.disk.engine import DiskCopyEngine, FlushPolicy
from kvsm.disk.era import DiskEra, OpenEra, era_at_start, read_era
from kvsm.disk.formats import DiskGeometry, SlotGeneration
from kvsm.disk.health import TierHealth
from kvsm.disk.log_note import LogNote, read_log_note
from kvsm.disk.recovery import RankScan, Recovered, decide, recover, scan, take
from kvsm.disk.slot_file import SlotFile
from kvsm.disk.tier_files import Decided, TierFiles

__all__ = [
    "Decided",
    "DiskCopyEngine",
    "DiskEra",
    "DiskGeometry",
    "FlushPolicy",
    "LogNote",
    "OpenEra",
    "RankScan",
    "Recovered",
    "SlotFile",
    "SlotGeneration",
    "TierDirectory",
    "TierFiles",
    "TierHealth",
    "decide",
    "era_at_start",
    "read_era",
    "read_log_note",
    "recover",
    "scan",
    "take",
]
