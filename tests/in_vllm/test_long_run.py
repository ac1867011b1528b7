"""An engine under mixed load for 20 minutes: its tokens are right, and it needs no more at the end.

    KVSM_LONG_RUN_MINUTES=60 pytest -m slow tests/in_vllm/test_long_run.py

The variable says how long each run takes. `long_run.py` runs one without pytest, and prints what it needed.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import long_run
from long_run import LOG_BYTES, Told

from kvsm.explain.story import verify_log

MINUTES = float(os.environ.get("KVSM_LONG_RUN_MINUTES", "20"))

MOST_GROWTH = {"rss": 12 << 20, "objects": 2000, "threads": 0, "handles": 0}
"""How much each gauge may grow from the first third after the warm-up to the last third.

An hour has about 100,000 steps on a quiet machine. So a leak of 250 bytes a step, or of one object in 25
steps, is more than this.
"""

HAPPENED = (
    "aborts",
    "num_preemptions",
    "idle times",
    "resets of the device",
    "external_prefix_cache_hits",
    "kvsm_blocks_stored",
    "kvsm_blocks_evicted",
    "kvsm_transfers_ended lost",
    "reports of stores lost",
    "kvsm_transfers_ended failed",
    "kvsm_resets",
    "reports of loads lost",
    "kvsm_reports_rejected",
)
"""What each run must have met."""


@pytest.mark.slow
def test_a_long_run_is_right_to_its_end(tmp_path: Path) -> None:
    """Data (S15) and progress (S9) over many requests: each answer is right, nothing grows, and nothing is
    left.

    The log keeps its bound, verifies from the oldest segment that it has, and ends in the state of the
    engine.
    """
    told, log = long_run.run("KvsmConnector", MINUTES, tmp_path)
    assert log is not None
    (tmp_path / "page.md").write_text(long_run.page(told, "KvsmConnector", log))
    assert told.wrong == []
    assert told.left == []
    for name in HAPPENED:
        assert told.counts.get(name, 0) > 0, name
    assert growth(told) == {}
    assert told.most("log") <= LOG_BYTES
    verification = verify_log(log)
    assert verification.good, verification
    assert verification.digest == told.digest
    assert verification.events < verification.last, "the log was never full"


def growth(told: Told) -> dict[str, float]:
    """The gauges that grew by more than they may."""
    return {name: told.growth(name) for name, most in MOST_GROWTH.items() if told.growth(name) > most}
