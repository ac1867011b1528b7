"""The statistics that vLLM gets of a ledger: when, and what."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from random import Random

from kvsm.events import OffloadConfig
from kvsm.metrics import Metrics
from kvsm.offloader import Offloader
from kvsm.vllm.connector_stats import STATS_INTERVAL_S, KvsmStats, StatsSource


class Source:
    """Statistics of a core, and a clock that only a test moves."""

    def __init__(self) -> None:
        self.core = Offloader(OffloadConfig(host_blocks=8, device_blocks=8))
        self.metrics = Metrics.attached_to(self.core)
        self.source = StatsSource(self.metrics)
        self.now = 0.0
        self.source.clock = lambda: self.now


def test_a_busy_engine_sends_statistics_once_in_an_interval() -> None:
    """vLLM asks in every step, and each answer looks at every slot of the host pool."""
    one = Source()
    one.core.arrive("runs")
    assert one.source.take() is not None
    one.core.arrive("comes")
    one.now += STATS_INTERVAL_S * 0.9
    assert one.source.take() is None
    one.now += STATS_INTERVAL_S * 0.2
    taken = one.source.take()
    assert taken is not None
    assert taken.data["known_requests"] == {"": 2}


def test_what_is_left_is_told_when_no_request_is() -> None:
    """The engine may take no other step then."""
    one = Source()
    one.core.arrive("runs")
    one.source.take()
    one.core.finish("runs")
    taken = one.source.take()
    assert taken is not None
    assert taken.data["requests"] == {"finished": 1}
    assert one.source.take() is None


@pytest.mark.parametrize("seed", range(20))
def test_all_statistics_together_are_the_metrics(seed: int) -> None:
    """No change is left out or told twice, whenever vLLM asks."""
    one, drawn, total = Source(), Random(seed), KvsmStats()
    for number in range(100):
        one.core.arrive(f"r{number}")
        one.core.finish(f"r{drawn.randrange(number + 1)}", aborted=drawn.random() < 0.5)
        one.now += drawn.random() * STATS_INTERVAL_S
        taken = one.source.take()
        if taken is not None:
            total.aggregate(taken)
    for number in range(100):
        one.core.finish(f"r{number}")
    taken = one.source.take()
    if taken is not None:
        total.aggregate(taken)
    ended = {end: count for end, count in one.metrics.values()["requests"].items() if count}
    assert total.data["requests"] == ended
    assert sum(ended.values()) == 100
