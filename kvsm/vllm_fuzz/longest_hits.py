"""Compare each answer of kvsm's connector with the longest hit (`kvsm.worlds.longest_hit`)."""

from __future__ import annotations

from typing import Any

from kvsm.vllm.scheduler_side import SchedulerSide
from kvsm.worlds.longest_hit import check_answer, expected_answer


def watch_hits(connector: Any) -> None:
    """Check each answer to `get_num_new_matched_tokens` from now on.

    Nothing is checked of other connectors, nor where a disk tier may have more.

    connector: vLLM's connector on the scheduler's side.
    """
    side = getattr(connector, "_side", None)
    if not isinstance(side, SchedulerSide) or side._disk is not None:
        return
    scheduler = side._scheduler
    ask = scheduler.get_num_new_matched_tokens

    def watched(request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        cells = _cells(request, scheduler.config.tokens_per_hash)
        expected = expected_answer(scheduler, request, cells, num_computed_tokens)
        found, loads = ask(request, num_computed_tokens)
        check_answer(request, num_computed_tokens, found, expected)
        return found, loads

    scheduler.get_num_new_matched_tokens = watched  # type: ignore[method-assign]


def _cells(request: Any, hash_tokens: int) -> list[bytes]:
    """The hashes of a request at the tokens with which they end; empty in between."""
    cells = [b""] * request.num_tokens
    for number, value in enumerate(request.block_hashes, 1):
        cells[number * hash_tokens - 1] = value
    return cells
