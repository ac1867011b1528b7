"""What a log can tell: a state rebuilt, every property verified, and the life of one thing with causes.

rebuild("log", seq=1200).ledger             # the state after event 1200
verify_log("log").violations                # () if no property is broken
for line in tell("log", RequestLife("r7")): ... # what happened to request r7, and why
"""

from kvsm.replay.fold import LogCondition, Rebuilt, entries, rebuild
from kvsm.replay.lives import BlockLife, KeyLife, RequestLife, TransferLife
from kvsm.replay.render import render
from kvsm.replay.story import Story, StoryLine, tell
from kvsm.replay.trust import Trust
from kvsm.replay.verify import Auditor, Breakage, Verification, verify_log
from kvsm.replay.witness import Witness

__all__ = [
    "Auditor",
    "BlockLife",
    "Breakage",
    "LogCondition",
    "KeyLife",
    "Story",
    "StoryLine",
    "Rebuilt",
    "RequestLife",
    "TransferLife",
    "Trust",
    "Verification",
    "Witness",
    "entries",
    "rebuild",
    "render",
    "tell",
    "verify_log",
]
