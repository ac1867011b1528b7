"""The statistics that vLLM gets of a ledger: when, and what."""

from __future__ import annotations

import time

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import json
from itertools import accumulate
from random import Random
from types import SimpleNamespace
from typing import Any

from core_life import begin_store, keys, load
from prometheus_client import Counter, Gauge, Histogram
from random_acts import live

from kvsm.check.worlds.small_engine import SmallEngine
from kvsm.core.offloader import Offloader
from kvsm.events import OffloadConfig
from kvsm.explain.metric_table import FACTS
from kvsm.explain.metrics import Metrics
from kvsm.vllm.connector_stats import ADDED, STATS_INTERVAL_S, Growth, KvsmPromMetrics, KvsmStats, StatsSource


class Source:
    """Statistics of a core, and a clock that only a test moves."""

    def __init__(self) -> None:
        self.core = Offloader(OffloadConfig(host_blocks=8, device_blocks=8))
        self.metrics = Metrics.attached_to(self.core)
        self.source = StatsSource(self.metrics, busy=lambda: bool(self.core.ledger.requests))
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
    assert list(taken.data["known_requests"][""].values()) == [2]


def test_what_the_events_do_not_tell_is_exported_as_its_growth() -> None:
    """How many prompts this engine missed, and what the disk has."""
    one, counts = Source(), {"hand_overs_missed": 3, "disk_blocks_stored": 1}
    source = StatsSource(one.metrics, beside=lambda: counts)
    taken = source.take()
    assert taken is not None
    assert taken.data["hand_overs_missed"] == {"": 3}
    assert taken.data["disk_blocks_stored"] == {"": 1}
    counts["hand_overs_missed"] = 5
    one.core.arrive("r")
    one.core.finish("r")
    source.clock = lambda: time.monotonic() + 60
    taken = source.take()
    assert taken is not None
    assert taken.data["hand_overs_missed"] == {"": 2}
    assert "disk_blocks_stored" not in taken.data


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


def test_what_ran_in_the_last_step_is_told_while_requests_are_still_known() -> None:
    """A lease keeps a request of its own, and vLLM's connector tells the spec of an end one step late."""
    one = Source()
    source = StatsSource(one.metrics)
    one.core.arrive("leased")
    assert source.take() is not None
    one.core.arrive("another")
    assert source.take() is not None


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


@pytest.mark.parametrize("seed", range(5))
def test_the_growth_adds_up_to_every_counter_and_histogram(seed: int) -> None:
    """No number is left out or sent twice, whatever happens and however often vLLM asks."""
    drawn = Random(seed)
    engine = SmallEngine(device_blocks=40, host_blocks=6, core={"defer_ticks": 2, "block_bytes": 8})
    metrics, total = Metrics.attached_to(engine.core), KvsmStats()
    source = StatsSource(metrics)
    for _ in range(200):
        live(engine, drawn.randrange(1 << 16))
        if drawn.random() < 0.3 and (taken := source.take()) is not None:
            total.aggregate(taken)
    if (taken := source.take()) is not None:
        total.aggregate(taken)
    expected = KvsmStats()
    Growth().add(expected, metrics.values())
    for name in total.data.keys() | expected.data.keys():
        if name in ADDED:
            assert total.data[name] == pytest.approx(expected.data[name]), name


def test_statistics_that_were_added_up_leave_the_later_ones_alone() -> None:
    """The same dicts of gauges are sent again while their values do not change."""
    one, other = Source(), Source()
    one.core.arrive("r")
    other.core.arrive("r")
    total = one.source.take()
    of_other = other.source.take()
    assert total is not None
    assert of_other is not None
    pools = total.data["capacity_blocks"][""].keys() | of_other.data["capacity_blocks"][""].keys()
    total.aggregate(of_other)
    assert total.data["capacity_blocks"][""] == dict.fromkeys(pools, 8)
    one.core.finish("r")
    later = one.source.take()
    assert later is not None
    assert len(later.data["capacity_blocks"][""]) == 1


# Histograms.


def buckets(family: Histogram) -> dict[tuple[str, ...], tuple[list[float], float]]:
    """What Prometheus shows of a histogram: labels -> (values up to each bound, sum)."""
    counts: dict[tuple[str, ...], list[float]] = {}
    sums: dict[tuple[str, ...], float] = {}
    (collected,) = family.collect()
    for sample in collected.samples:
        labels = {name: value for name, value in sample.labels.items() if name not in ("engine", "le")}
        place = tuple(labels.values())
        if sample.name.endswith("_bucket"):
            counts.setdefault(place, []).append(sample.value)
        elif sample.name.endswith("_sum"):
            sums[place] = sample.value
    return {place: (counts[place], sums[place]) for place in counts}


def test_the_exported_histograms_are_those_of_the_metrics() -> None:
    """Buckets and sum, although vLLM adds up what several steps sent, and passes on plain numbers only."""
    clock, wall_ns = Random(3), 0
    core = Offloader(
        OffloadConfig(host_blocks=64, device_blocks=64, block_bytes=5000), clock_ns=lambda: wall_ns
    )
    metrics = Metrics.attached_to(core)
    source = StatsSource(metrics, dict.fromkeys(FACTS, "x"))
    types: Any = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}
    exported = KvsmPromMetrics(SimpleNamespace(kv_transfer_config=None), types, ["engine"], {0: ["0"]})
    waiting = KvsmStats()
    for number in range(40):
        names = keys(1 + number % 5, f"prompt {number % 9}")
        core.arrive(f"r{number}")
        if number < 9:
            transfer = begin_store(core, f"r{number}", names[:1])
        else:
            transfer = load(core, f"r{number}", names[:1])
        for _ in range(number % 7):
            core.end_step()
        # From 20 microseconds to beyond the last bound.
        wall_ns += int(20_000 * 10 ** (clock.random() * 6))
        (core.complete_store if number < 9 else core.complete_load)(transfer, 0)
        core.finish(f"r{number}")
        taken = source.take()
        assert taken is not None
        waiting.aggregate(KvsmStats(json.loads(json.dumps(taken.data))))
        if number % 3 == 0:
            exported.observe(waiting.data)
            waiting.reset()
    exported.observe(waiting.data)
    values = metrics.values()
    for name in ("transfer_blocks", "transfer_bytes", "transfer_seconds", "transfer_steps"):
        shown = buckets(exported._families[name])
        assert shown.pop(("copy out",))[1] == 0
        assert set(shown) == {("store",), ("load",)}
        for (direction,), (counts, total) in shown.items():
            value = values[name][direction]
            assert counts == list(accumulate(value.counts)), (name, direction)
            assert total == pytest.approx(value.sum)
    (facts,) = exported._families["config_info"].collect()
    assert [(sample.value, sample.labels["policy"]) for sample in facts.samples] == [(1.0, "x")]


def test_the_log_line_has_no_histogram() -> None:
    """A bucket says nothing to people."""
    one = Source()
    begin_store(one.core, "r", keys(2))
    one.core.complete_store(one.core.ledger.seq - 1, 0)
    taken = StatsSource(one.metrics, dict.fromkeys(FACTS, "x")).take()
    assert taken is not None
    assert "transfer_blocks" in taken.data
    assert not [name for name in taken.reduce() if "transfer_blocks" in name or "config_info" in name]
