"""Metrics: each event is counted once, under its reason. A log gives the counts of the live process."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from core_life import begin_store, keys, kinds, load, new_core, store
from hypothesis import given, settings
from hypothesis import strategies as st
from native_twins import reset_often
from places import ROOT
from random_acts import ACTS, live
from replay_life import gapped, random_life

from examples import examples
from kvsm import LogReader, LogWriter, Offloader
from kvsm.check.worlds.small_engine import SmallEngine
from kvsm.core import native
from kvsm.core.ledger import Ledger
from kvsm.core.ledger.snapshot import restore, snapshot
from kvsm.core.log import MemoryLog, WholeState
from kvsm.errors import LogWriteFailed
from kvsm.events import OffloadConfig, OffloadingEvent, RejectReason, Restarted, SkipReason
from kvsm.explain.metric_places import NAMES, PLACES, HistogramValue, sum_place, values_of
from kvsm.explain.metric_table import EXPORTED, METRICS, Metric
from kvsm.explain.metrics import Metrics, gauges, spread
from kvsm.explain.vllm_metric_names import SHARED, USAGES

PAGE = ROOT / "docs" / "metrics.md"


def metered(**options: Any) -> tuple[Offloader, Metrics]:
    core, _ = new_core(**options)
    return core, Metrics.attached_to(core)


def counted(config: OffloadConfig, events: Iterable[OffloadingEvent]) -> Metrics:
    """What these events come to, from a core's first one on."""
    metrics = Metrics(Ledger(config))
    for event in events:
        metrics.ledger.apply(event)
        metrics.append(event)
    return metrics


@given(
    st.sampled_from([1, 2]),
    st.sampled_from([3, 6, 20]),
    st.sampled_from([1, 2]),
    st.sampled_from([0, 2]),
    ACTS,
)
@settings(max_examples=examples(80))
def test_log_gives_what_the_live_process_counted(
    workers: int, host_blocks: int, chunk: int, defer_ticks: int, acts: list[int]
) -> None:
    """Events are state (S10), for metrics too. After every act the counts agree with the ledger."""
    core = {"blocks_per_chunk": chunk, "transfer_ticks": 3, "defer_ticks": defer_ticks, "block_bytes": 8}
    engine = SmallEngine(device_blocks=40, host_blocks=host_blocks, workers=workers, core=core)
    metrics = Metrics.attached_to(engine.core)
    for act in acts:
        live(engine, act)
        agrees(metrics.values(), gauges(engine.core.ledger), engine)
    engine.run(400)
    values = metrics.values()
    agrees(values, gauges(engine.core.ledger), engine)
    assert counted(engine.core.config, engine.log).values() == values


def agrees(values: dict[str, Any], now: dict[str, Any], engine: SmallEngine) -> None:
    for direction in ("store", "load"):
        live_transfers = values["transfers_planned"][direction] - sum(
            values["transfers_ended"][direction].values()
        )
        assert live_transfers == now["live_transfers"][direction]
        assert values["transfer_blocks"][direction].count == values["transfers_ended"][direction]["completed"]
    assert values["transfer_blocks"]["store"].sum == values["blocks_stored"]
    assert values["transfer_blocks"]["load"].sum == values["blocks_loaded"]
    waiting = values["deferrals"] - sum(values["deferrals_ended"].values())
    assert waiting == now["deferred_requests"] == len(engine.core.ledger.deferred)
    assert values["deferral_ticks"].count == sum(values["deferrals_ended"].values())
    assert sum(now["blocks"].values()) == now["capacity_blocks"]
    assert now["free_blocks"] == len(engine.core.ledger.free)
    if not values["resets"] and not now["retired_blocks"]:
        failed = values["transfers_ended"]["load"]["failed"]
        lost = values["transfers_ended"]["load"]["lost"]
        if not failed and not lost:
            assert now["resident_blocks"] == values["blocks_stored"] - values["blocks_evicted"]


def test_log_on_disk_gives_the_same(tmp_path: Path) -> None:
    config = OffloadConfig(host_blocks=4, device_blocks=16)
    with LogWriter(
        tmp_path / "log", config=config, snapshot=lambda: WholeState(snapshot(core.ledger))
    ) as writer:
        core = Offloader(config, writer)
        metrics = Metrics.attached_to(core)
        store(core, "r", keys(3))
        core.fail_load(load(core, "q", keys(2), 8))
        core.reset()
    assert Metrics.of(LogReader(tmp_path / "log")).values() == metrics.values()


def test_every_counted_number_has_a_place_of_its_own() -> None:
    """A place that two series share would count both."""
    places = [*range(len(NAMES))]

    def numbers(value: Any) -> list[float]:
        if isinstance(value, HistogramValue):
            return [*value.counts, value.sum]
        return (
            [one for inner in value.values() for one in numbers(inner)]
            if isinstance(value, dict)
            else [value]
        )

    assert sorted(numbers(values_of(places))) == places
    assert len(set(NAMES)) == len(NAMES)


def test_taking_the_growth_leaves_the_values() -> None:
    """The exporter of Prometheus reads values beside the statistics that vLLM asks for."""
    core, metrics = metered()
    store(core, "r", keys(3))
    before, place = metrics.values(), PLACES["blocks_stored",]
    assert metrics.take_growth()[place] == 3
    assert metrics.values() == before
    assert not any(metrics.take_growth().values())
    store(core, "q", keys(2, "other"), 8)
    assert metrics.take_growth()[place] == 2
    assert metrics.values()["blocks_stored"] == 5


def test_the_growth_of_a_time_is_in_seconds() -> None:
    """Inside, the times of transfers are added up in nanoseconds."""
    wall = iter(range(0, 1 << 40, 250_000_000))
    core = Offloader(OffloadConfig(host_blocks=8, device_blocks=8), clock_ns=lambda: next(wall))
    metrics = Metrics.attached_to(core)
    store(core, "r", keys(3))
    seconds = metrics.values()["transfer_seconds"]["store"].sum
    assert 0 < seconds < 10
    assert metrics.take_growth()[sum_place(("transfer_seconds", "store"))] == pytest.approx(seconds)


def test_every_metric_has_a_value_for_every_label() -> None:
    """From the start: a series that appears with its first event hides that event from a rate."""
    _, metrics = metered()
    values = metrics.values() | metrics.gauges()
    assert set(values) == {metric.name for metric in METRICS}

    def series(value: Any, labels: tuple[str, ...]) -> list[tuple[str, ...]]:
        if not isinstance(value, dict):
            return [labels]
        return [one for label, inner in value.items() for one in series(inner, (*labels, label))]

    for metric in METRICS:
        assert set(series(values[metric.name], (metric.name,))) == set(metric.series()), metric.name


def test_store_is_counted_when_its_last_worker_has_reported() -> None:
    core, metrics = metered(workers=2)
    transfer = begin_store(core, "r", keys(3))
    core.complete_store(transfer, 0)
    assert metrics.values()["blocks_stored"] == 0
    core.complete_store(transfer, 1)
    assert metrics.values()["blocks_stored"] == 3
    assert metrics.values()["transfers_ended"]["store"]["completed"] == 1


def test_one_bad_worker_fails_the_transfer() -> None:
    core, metrics = metered(workers=2)
    transfer = begin_store(core, "r", keys(3))
    core.fail_store(transfer, 0)
    core.complete_store(transfer, 1)
    values = metrics.values()
    assert values["transfers_ended"]["store"]["failed"] == 1
    assert values["blocks_stored"] == values["transfer_blocks"]["store"].count == 0


@pytest.mark.parametrize("outcome", ["completed", "failed", "cancelled", "lost", "drained"])
@pytest.mark.parametrize("direction", ["store", "load"])
def test_transfer_ends_once_under_its_direction_and_outcome(direction: str, outcome: str) -> None:
    core, metrics = metered()
    if direction == "load":
        store(core, "other", keys(2))
        assert core.match("r", keys(2)).hits == 2
        job = core.prepare_load("r", [4, 5])
    else:
        job = core.prepare_store("r", keys(2), [0, 1]).job
    assert job is not None
    before = metrics.values()["transfers_ended"]
    if outcome == "cancelled":
        core.cancel(job.transfer)
    else:
        core.submit([job.transfer])
        if outcome == "drained":
            core.reset()
            assert metrics.values()["transfers_abandoned"][direction] == 1
        if outcome == "lost":
            core.lose(job.transfer)
        else:
            core.report(job.transfer, 0, outcome != "failed")
    before[direction][outcome] += 1
    assert metrics.values()["transfers_ended"] == before


def test_reset_cancels_plans_and_abandons_copies_once() -> None:
    core, metrics = metered()
    begin_store(core, "r", keys(1))
    core.prepare_store("r", keys(1, "q"), [1])
    core.reset()
    core.prepare_store("r", keys(1, "s"), [2])
    core.reset()
    values = metrics.values()
    assert values["resets"] == 2
    assert values["transfers_abandoned"] == {"store": 1, "load": 0, "copy out": 0}
    assert values["transfers_ended"]["store"]["cancelled"] == 2


def test_skipped_blocks_are_counted_by_reason() -> None:
    core, metrics = metered(host_blocks=3)
    begin_store(core, "r", keys(2))
    core.prepare_store("q", keys(2), [4, 5])
    core.prepare_store("q", keys(4, "q"), [6, 7, 8, 9])
    skipped = {reason: n for reason, n in metrics.values()["blocks_skipped"].items() if n}
    assert skipped == {SkipReason.KEY_IN_FLIGHT: 2, SkipReason.POOL_FULL: 3}


def test_rejected_reports_are_counted_by_reason() -> None:
    core, metrics = metered(workers=2)
    transfer = begin_store(core, "r", keys(1))
    core.report(transfer, 0, True)
    core.report(transfer, 0, True)
    core.report(transfer, 7, True)
    core.report(10_000, 0, True)
    rejected = {reason: n for reason, n in metrics.values()["reports_rejected"].items() if n}
    assert rejected == {RejectReason.DUPLICATE: 1, RejectReason.WORKER: 1, RejectReason.UNKNOWN: 1}


def test_hits_misses_and_evictions() -> None:
    core, metrics = metered(host_blocks=3)
    core.match("r", keys(2))
    core.admit("r", 2, 0, 0, keys(1)[0])
    store(core, "r", keys(3))
    for _ in range(3):
        core.match("q", keys(2))
    core.admit("q", 2, 0, 2)
    core.preempt("q")
    core.match("q", keys(2))
    core.admit("q", 2, 0, 2, resumed=True)
    core.match("waits", keys(2))
    core.finish("q", aborted=True)
    core.finish("waits")
    core.finish("r")
    store(core, "s", keys(2, "s"))
    values = metrics.values()
    assert values["matches"] == {"hit": 1, "miss": 1}
    assert (values["blocks_matched"], values["blocks_evicted"]) == (2, 2)
    assert values["blocks_asked"] == {"on the device": 0, "on the host": 2, "nowhere": 2}
    assert values["requests"] == {"finished": 2, "aborted": 1}


@pytest.mark.parametrize("how", ["woken", "timed out", "finished", "preempted"])
def test_wait_ends_once_and_is_told_in_ticks(how: str) -> None:
    core, metrics = metered(defer_ticks=2)
    transfer = begin_store(core, "r", keys(1))
    assert core.match("q", keys(1)).waits_for == transfer
    core.tick()
    if how == "woken":
        core.fail_store(transfer)
    elif how == "timed out":
        core.tick()
    elif how == "finished":
        core.finish("q")
    else:
        core.preempt("q")
    values = metrics.values()
    assert {one: n for one, n in values["deferrals_ended"].items() if n} == {how: 1}
    assert values["deferral_ticks"].sum == (2 if how == "timed out" else 1)


def test_voided_promise_is_no_transfer() -> None:
    core, metrics = metered()
    store(core, "r", keys(1))
    core.match("q", keys(1))
    core.reset()
    assert core.prepare_load("q", [4]) is None
    values = metrics.values()
    assert (values["loads_voided"], values["transfers_planned"]["load"]) == (1, 0)


def test_histograms_of_a_transfer() -> None:
    """Blocks, bytes on all workers, seconds and steps from its submission to its last report."""
    wall = iter(range(0, 1 << 40, 250_000_000))
    config = OffloadConfig(host_blocks=8, device_blocks=16, block_bytes=4096, workers=2, blocks_per_chunk=2)
    core = Offloader(config, clock_ns=lambda: next(wall))
    metrics = Metrics.attached_to(core)
    transfer = begin_store(core, "r", keys(3))
    core.end_step()
    core.complete_store(transfer, 0)
    core.complete_store(transfer, 1)
    values = {name: metrics.values()[f"transfer_{name}"]["store"] for name in ("blocks", "bytes", "steps")}
    assert {name: value.sum for name, value in values.items()} == {
        "blocks": 3,
        "bytes": 6 * 4096 * 2,
        "steps": 1,
    }
    # Submitted, the end of the step, two reports: a quarter of a second each.
    assert metrics.values()["transfer_seconds"]["store"].sum == 0.75
    for name, bound in (("blocks", 4), ("bytes", 65_536), ("steps", 1)):
        assert values[name].counts[values[name].bounds.index(bound)] == values[name].count == 1


def test_bucket_takes_its_bound_and_the_last_one_takes_the_rest() -> None:
    core = Offloader(OffloadConfig(host_blocks=10_000, device_blocks=10_000))
    metrics = Metrics.attached_to(core)
    for number, blocks in enumerate((1, 2, 3, 5000)):
        store(core, "r", keys(blocks, f"p{number}"))
    value: HistogramValue = metrics.values()["transfer_blocks"]["store"]
    assert (value.counts[:4], value.counts[-1], value.sum) == ((1, 1, 1, 0), 1, 5006)


def test_gauges_tell_states_apart() -> None:
    """Resident, pinned, in flight and lost blocks have different gauges."""
    core, _ = metered(host_blocks=12)
    store(core, "r", keys(5))
    core.match("q", keys(2))
    lost = load(core, "s", keys(5)[2:3], 5)
    core.lose(lost)
    load(core, "t", keys(5)[3:4], 6)
    begin_store(core, "r", keys(2, "new"), 8)
    now = gauges(core.ledger)
    assert now["blocks"]["LOADING"] == 1
    assert (now["resident_blocks"], now["pinned_blocks"], now["in_flight_blocks"]) == (4, 2, 3)
    assert (now["retired_blocks"], now["retired_device_blocks"], now["free_blocks"]) == (1, 1, 5)
    assert (now["live_transfers"], now["draining_transfers"]) == ({"store": 1, "load": 1}, 0)
    core.reset()
    now = gauges(core.ledger)
    assert (now["resident_blocks"], now["quarantined_blocks"], now["draining_transfers"]) == (0, 3, 2)


def test_no_gauge_looks_at_a_slot() -> None:
    """A scheduler reads them between two steps, so the cost must not grow with its pool."""
    core, _ = metered(host_blocks=12)
    store(core, "r", keys(5))
    core.match("q", keys(2))
    now = gauges(core.ledger)
    for name in ("blocks", "leases"):
        setattr(core.ledger, name, SimpleNamespace(totals=getattr(core.ledger, name).totals))
    assert gauges(core.ledger) == now
    assert (now["pinned_blocks"], now["blocks"]["FREE"], sum(now["blocks"].values())) == (2, 7, 12)


@pytest.mark.parametrize("seed", range(8))
def test_the_counts_of_the_fold_are_those_of_a_scan(seed: int) -> None:
    """Conservation (S1): after each event, a reset, a restart and a restored snapshot, in both bodies.
    Batches of up to 40 blocks are arrays."""
    random = Random(seed)
    config = OffloadConfig(host_blocks=random.choice((70, 128, 200)), device_blocks=4096, workers=2)
    with native.without() if seed % 2 else nullcontext():
        ledger = Ledger(config)
        for event in reset_often(config, random):
            ledger.apply(event)
            for words in (ledger.blocks, ledger.leases):
                assert words.totals.tolist() == words.counted()
        ledger.apply(Restarted(ledger.seq + 1, 0, 0, 2, config, ""))
        assert ledger.blocks.totals.tolist() == ledger.blocks.counted()
        again = restore(snapshot(ledger))
        assert again.blocks.totals == ledger.blocks.totals
        assert again.leases.totals == ledger.leases.totals


def test_events_are_passed_on_and_what_the_log_refuses_is_not_counted() -> None:
    class Full(MemoryLog):
        def append(self, event: OffloadingEvent) -> None:
            if len(self) == 3:
                raise LogWriteFailed("disk full")
            super().append(event)

    config = OffloadConfig(host_blocks=4, device_blocks=4)
    log = Full()
    core = Offloader(config, log)
    metrics = Metrics.attached_to(core)
    core.match("r", keys(1))
    core.preempt("r")
    with pytest.raises(LogWriteFailed):
        core.finish("r")
    assert kinds(log) == ["LogOpened", "HitMatched", "RequestPreempted"]
    values = metrics.values()
    assert (values["preemptions"], values["requests"]["finished"]) == (1, 0)


def test_a_transfer_from_before_the_counting_is_not_counted() -> None:
    core, _ = new_core()
    transfer = begin_store(core, "r", keys(2))
    metrics = Metrics.attached_to(core)
    core.complete_store(transfer)
    store(core, "r", keys(1, "q"), 4)
    assert metrics.values()["blocks_stored"] == 1


def test_log_that_lacks_events_counts_what_it_has(tmp_path: Path) -> None:
    """Its first segments were dropped, or a write failed: no more transfers end than were planned."""
    options = {"segment_bytes": 2000, "max_bytes": 16_000}
    random_life(47, 800, tmp_path / "kept", writer=options).close()
    gapped(tmp_path / "gapped")
    for name in ("kept", "gapped"):
        values = Metrics.of(LogReader(tmp_path / name)).values()
        for direction in ("store", "load"):
            ended = sum(values["transfers_ended"][direction].values())
            assert ended <= values["transfers_planned"][direction]
        assert values["transfers_ended"]["store"]["completed"] > 0
        assert sum(values["deferrals_ended"].values()) <= values["deferrals"]


def test_every_event_is_counted_under_its_kind() -> None:
    """Except the first one, which every log has."""
    life = random_life(9, 800)
    seen = Counter(event.kind for event in life.events[1:])
    values = counted(life.config, life.events).values()["events"]
    assert {kind: times for kind, times in values.items() if times} == seen


def test_key_bytes_are_those_of_the_keys_in_the_log() -> None:
    core, log = new_core(host_blocks=2, store_threshold=2, policy="arc")
    core.count_offers(keys(3))
    for name in "abca":
        core.match("r", keys(2, name))
        store(core, "r", keys(2, name))
    core.prepare_store("r", keys(3, "more"), [8, 9, 10])
    expected = sum(
        len(key)
        for event in log
        for key in (*getattr(event, "keys", ()), *filter(None, [getattr(event, "missed", None)]))
    )
    assert counted(core.config, log).values()["key_bytes"] == expected > 0


def test_page_shows_every_metric() -> None:
    """The tables in docs/metrics.md: copy a row from the failure."""
    page = PAGE.read_text().partition("## Under the names of vLLM's own offload")[0]
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    in_vllm = [metric for name, metric in EXPORTED.items() if name not in {one.name for one in METRICS}]
    assert rows == [
        "| `{}` | {} | {} | {} |".format(
            metric.name,
            metric.kind,
            "; ".join(
                f"{label}: {', '.join(values)}" if values else label
                for label, values in metric.labels.items()
            ),
            metric.help,
        )
        for metric in (*METRICS, *in_vllm)
    ]


def test_page_shows_every_name_of_vllms_offload() -> None:
    """The third table in docs/metrics.md: copy a row from the failure."""
    page = PAGE.read_text().partition("## Under the names of vLLM's own offload")[2]
    rows = [line for line in page.splitlines() if line.startswith("| `kv_offload_")]
    found = [(one.metric, one.own) for one in SHARED] + [(one.metric, "blocks") for one in USAGES]
    assert rows == [
        f"| `{metric.name}` | {metric.kind} | {', '.join(metric.labels)} | `{own}` | {metric.help} |"
        for metric, own in found
    ]


def test_a_wait_is_measured_in_seconds_of_the_log() -> None:
    now = 0
    core = Offloader(OffloadConfig(host_blocks=8, device_blocks=8), clock_ns=lambda: now)
    metrics = Metrics.attached_to(core)
    transfer = begin_store(core, "a", keys(1))
    core.arrive("b")
    core.defer("b", transfer)
    now += 300_000_000
    core.complete_store(transfer, 0)
    waited = metrics.values()["deferral_seconds"]
    assert (waited.count, waited.sum) == (1, pytest.approx(0.3))


def test_an_offer_without_room_is_an_allocation_failure_for_each_request() -> None:
    core, metrics = metered(host_blocks=2)
    core.store((("a", 2), ("b", 2)), keys(4), [0, 1, 2, 3])
    values = metrics.values()
    assert values["allocation_failures"] == 1
    assert values["blocks_skipped"]["pool full"] == 2
    assert (values["allocation_blocks"].count, values["allocation_blocks"].sum) == (1, 2)


@settings(max_examples=examples(60))
@given(st.sampled_from([one for one in METRICS if one.bounds]), st.data())
def test_spread_values_fill_the_buckets_and_keep_the_sum(metric: Metric, data: st.DataObject) -> None:
    """What vLLM's exporter observes instead of the real values."""
    bounds, most = metric.bounds, metric.bounds[-1]
    place = st.integers(0, len(bounds))
    inside = st.builds(
        lambda place, share: most * (1 + share) if place == len(bounds) else bounds[place] * share,
        place,
        st.floats(0.01, 1),
    )
    real = data.draw(st.lists(inside, max_size=30))
    counts = [0] * (len(bounds) + 1)
    for value in real:
        counts[bisect_left(bounds, value)] += 1
    chosen = spread(bounds, counts, sum(real))
    again = [0] * (len(bounds) + 1)
    for value, times in chosen:
        again[bisect_left(bounds, value)] += times
    assert again == counts
    assert sum(value * times for value, times in chosen) == pytest.approx(sum(real))
