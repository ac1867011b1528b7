"""Tiers below the host pool. Each tier has its own offload core; `DiskTier` couples the disk's core with the
host's.

`kvsm.tiers.disk` has the slots, the copies and the recovery. docs/disk.md explains why each tier has its own
ledger.
"""

from __future__ import annotations

from kvsm.tiers.agreement import disagreements
from kvsm.tiers.disk_tier import (
    DiskTier,
    TierCopy,
    WritePolicy,
    check_admits_all,
    check_loads_all,
    disk_config,
    host_config,
)
from kvsm.tiers.fetches import DEFER_TICKS
from kvsm.tiers.found import adopt_found
from kvsm.tiers.last_log import LastLog, LoggedBlocks, SlotDifference, compare_with_last_log, note_log

__all__ = [
    "DEFER_TICKS",
    "DiskTier",
    "LastLog",
    "LoggedBlocks",
    "SlotDifference",
    "TierCopy",
    "WritePolicy",
    "adopt_found",
    "check_admits_all",
    "check_loads_all",
    "compare_with_last_log",
    "disagreements",
    "disk_config",
    "host_config",
    "note_log",
]
