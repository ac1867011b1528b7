"""The files of the disk tier: slots with headers that describe their blocks, below the host pool.

`SlotFile` opens the file of one rank. `recover` finds the valid blocks in the files of all ranks.
`DiskCopyEngine` stores blocks of a host pool into slots and loads them; each block is proved before its bytes
are used. docs/disk.md lists the promises.
"""

from __future__ import annotations

from kvsm.tiers.disk.directory import TierDirectory
from kvsm.tiers.disk.disk_engine import DiskCopyEngine, FlushPolicy
from kvsm.tiers.disk.era import DiskEra, OpenEra, era_at_start, read_era
from kvsm.tiers.disk.formats import DiskGeometry, SlotGeneration
from kvsm.tiers.disk.health import TierHealth
from kvsm.tiers.disk.log_note import LogNote, read_log_note
from kvsm.tiers.disk.recovery import RankScan, Recovered, decide, recover, scan, take
from kvsm.tiers.disk.slot_file import SlotFile
from kvsm.tiers.disk.tier_files import Decided, TierFiles

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
