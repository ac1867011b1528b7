"""Every exported metric is checked in the worlds, or has a reason why not: events are state (S10)."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import pytest
from planted_bugs import plant

from kvsm.check.walks.walk import walk
from kvsm.check.worlds.core_options import draw_options
from kvsm.check.worlds.core_world import CoreWorld
from kvsm.check.worlds.metric_oracles import BY_ENGINE, ORACLES, UNJUDGED
from kvsm.check.worlds.past_metrics import PAST_ORACLES, agrees
from kvsm.check.worlds.world import World
from kvsm.explain import metrics
from kvsm.explain.metric_places import HistogramValue
from kvsm.explain.metric_table import EXPORTED
from kvsm.explain.metrics import Metrics
from kvsm.properties import Property


def core(random: Random) -> World:
    """A core whose log is folded at rest; one in eight of those that `kvsm fuzz` draws."""
    return CoreWorld(msgspec.structs.replace(draw_options(random), folds_log=True))


def test_every_exported_metric_has_an_oracle_or_a_reason_once() -> None:
    """Add an oracle for a new metric; a reason in `UNJUDGED` if no world can count it."""
    assert sorted([*ORACLES, *PAST_ORACLES, *BY_ENGINE, *UNJUDGED]) == sorted(EXPORTED)


def one_more(value: Any) -> Any:
    """The value, with each number in it one larger. A histogram has one more value in its first bucket."""
    if isinstance(value, HistogramValue):
        return msgspec.structs.replace(value, counts=(value.counts[0] + 1, *value.counts[1:]))
    return {name: one_more(one) for name, one in value.items()} if isinstance(value, dict) else value + 1


@pytest.mark.parametrize("name", [*ORACLES, *PAST_ORACLES])
def test_a_metric_that_counts_one_too_many_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values, gauges = Metrics.values, Metrics.gauges

    def changed(all_values: dict[str, Any]) -> dict[str, Any]:
        return {one: one_more(value) if one == name else value for one, value in all_values.items()}

    monkeypatch.setattr(Metrics, "values", lambda of: changed(values(of)))
    monkeypatch.setattr(Metrics, "gauges", lambda of: changed(gauges(of)))
    failure = walk(core, 3, runs=2).failure
    assert failure is not None
    assert failure.finding.property is Property.EVENTS_ARE_STATE
    assert f"the metric {name} says" in failure.finding.message


@pytest.mark.parametrize(
    ("function", "right", "wrong"),
    [
        (Metrics._evicted, "+= len(slots) if type(slots) is tuple else count(slots)", "+= 1"),
        (Metrics._skipped, "+= len(event.keys)", "+= 1"),
        (Metrics._load_planned, "if event.voided:", "if False:"),
        (Metrics._flushed, "+= len(event.transfers)", "+= 1"),
        (Metrics._deferred, "self.ledger.tick, event.wall_ns", "0, event.wall_ns"),
        (Metrics._end_waits, "max(0, event.wall_ns - wall_ns)", "event.wall_ns"),
        (Metrics._reset, "flight.record.epoch == event.epoch - 1", "True"),
        (Metrics._restarted, "self._count_end(flight, CUT_OFF)", "pass"),
        (Metrics._store_planned, "* self.ledger.config.blocks_per_chunk", "* 1"),
        (Metrics._submitted, "event.step, event.wall_ns", "0, event.wall_ns"),
        (Metrics._complete, "event.wall_ns - flight.wall_ns", "event.wall_ns"),
        (metrics.gauges, "blocks[BlockState.FREE] + blocks[BlockState.EVICTED]", "blocks[BlockState.FREE]"),
    ],
)
def test_a_wrong_count_is_found(
    function: Any, right: str, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, function, right, wrong)
    assert walk(core, 3, runs=12).failure is not None


def test_each_part_of_a_histogram_is_compared() -> None:
    """The number of values in each bucket, and their sum. A value at a bound is in the bucket below it."""
    value = HistogramValue((1, 4), (2, 1, 1), 14)
    assert agrees([0, 1, 4, 9], value)
    assert not agrees([0, 1, 3, 10], HistogramValue((1, 4), (2, 1, 1), 13))
    assert not agrees([0, 1, 5, 8], value)
    assert not agrees({"a": [0, 1, 4, 9], "b": []}, {"a": value})
