"""`load_only_if_faster` in a real vLLM engine: it measures, decides, and changes no token."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from workloads import ROOMY, Row, make_trial

from kvsm import events as ev
from kvsm.core.log import LogReader
from kvsm.explain.story import verify_log
from kvsm.vllm.tiny_model import LLAMA
from kvsm.vllm.trial import connector_config, run_trial

TIMEOUT_S = 300.0


def test_tokens_are_those_without_offload(engines: Any, tmp_path: Path) -> None:
    """Whether a load is slow depends on the machine. Its times are in the log in any case."""
    plain = make_trial(LLAMA, Row())
    options = {"cpu_bytes_to_use": ROOMY, "event_log": str(tmp_path), "load_only_if_faster": True}
    outcome = run_trial(msgspec.structs.replace(plain, kv_transfer=connector_config(**options)), TIMEOUT_S)
    assert outcome.tokens == engines.reference(LLAMA).tokens
    (log,) = tmp_path.iterdir()
    found = verify_log(log)
    assert found.violations == ()
    events = list(LogReader(log).events())
    kinds = Counter(map(type, events))
    assert kinds[ev.TimesMeasured]
    assert outcome.metric("vllm:kvsm_slow_hits") == kinds[ev.SlowHitFound]
    measured = [event for event in events if isinstance(event, ev.TimesMeasured)]
    # A tiny model on a CPU: between a nanosecond and a second, whatever the machine.
    assert all(0 < event.token_ns < 10**9 for event in measured)
