"""Compare each answer of kvsm's connector with the longest hit (`kvsm.check.worlds.longest_hit`)."""

from __future__ import annotations

from typing import Any

from kvsm.check.worlds.longest_hit import watch_answers
from kvsm.vllm.scheduler_side import SchedulerSide


def watch_hits(connector: Any) -> None:
    """Check each answer to `get_num_new_matched_tokens` from now on.

    Other connectors are not checked, nor engines with a disk tier, where a longer hit may exist.

    connector: vLLM's connector on the scheduler's side.
    """
    side = getattr(connector, "_side", None)
    if isinstance(side, SchedulerSide) and side._disk is None:
        watch_answers(side._scheduler)
