"""Compare each answer of kvsm's connector with the longest hit (`kvsm.check.worlds.longest_hit`)."""

from __future__ import annotations

from typing import Any

from kvsm.check.vllm_fuzz.twin_asks import parts_of
from kvsm.check.worlds.declined_hits import watch_slow_answers
from kvsm.check.worlds.longest_hit import watch_answers
from kvsm.vllm.scheduler_side import SchedulerSide


def watch_hits(connector: Any) -> None:
    """Check each future answer of kvsm's connector to `get_num_new_matched_tokens`.

    Other connectors are not checked, nor engines with a disk tier, where a longer hit may exist.

    connector: the scheduler side of a connector of vLLM, or a MultiConnector with kvsm's as a child.
    """
    for part in parts_of(connector):
        side = getattr(part, "_side", None)
        if isinstance(side, SchedulerSide) and side._disk is None:
            declines = side._core.offloader.config.load_only_if_faster
            (watch_slow_answers if declines else watch_answers)(side._scheduler)
