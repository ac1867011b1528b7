"""Rebuild a log's state, verify its properties, and explain the life of one block, key, request or transfer.

rebuild("log", seq=1200).ledger             # the state after event 1200
verify_log("log").violations                # () if no property is broken
for line in tell("log", RequestLife("r7")): ... # what happened to request r7, and why
"""

from kvsm.core.log.fold import LogCondition, Rebuilt, entries, rebuild
from kvsm.core.log.trust import Trust
from kvsm.explain.story.life_story import Story, StoryLine, tell
from kvsm.explain.story.render import render
from kvsm.explain.story.things import BlockLife, KeyLife, RequestLife, TransferLife
from kvsm.explain.verify.auditor import Auditor, Breakage, Verification, verify_log
from kvsm.explain.verify.witness import Witness

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
