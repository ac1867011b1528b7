"""A fork runs the real core: without another choice it makes the decisions of the log."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_life import (
    CONFIGS,
    OPERATIONS,
    Life,
    Operations,
    after_reset,
    key,
    random_life,
    scene,
    written,
)

from examples import examples
from kvsm import events as ev
from kvsm.check.worlds.refusing_policy import REFUSING
from kvsm.core.log import LogReader
from kvsm.core.offloader import Offloader
from kvsm.core.plan import WorkerReport
from kvsm.errors import ConfigError, LogError
from kvsm.events import OffloadConfig, OffloadingEvent
from kvsm.explain.other_future import _CALLS, Forked, OtherChoices, fork
from kvsm.explain.story import verify_log
from kvsm.explain.verify.unavoidable import unavoidable
from kvsm.properties import Property
from kvsm.tiers import DiskTier, disk_config, host_config
from kvsm.tiers.disk_tier import WritePolicy


def events_of(log: Path) -> list[OffloadingEvent]:
    return [event for batch in LogReader(log).batches() for event in batch]


def test_a_log_with_another_kind_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its call the fork would follow another engine."""
    life = Life(tmp_path / "log")
    life.stored("r0", [key(0)], [0])
    life.close()
    monkeypatch.delitem(_CALLS, ev.StorePlanned)
    (planned,) = (event for event in life.events if isinstance(event, ev.StorePlanned))
    with pytest.raises(ConfigError, match=f"event {planned.seq}: .* which call leads to StorePlanned"):
        fork(tmp_path / "log", 1, OtherChoices(), tmp_path / "fork")


@settings(max_examples=examples(40))
@given(CONFIGS, OPERATIONS, st.integers(0, 10**6))
def test_without_another_choice_a_fork_repeats_the_log(
    config: dict[str, Any], operations: Operations, place: int
) -> None:
    """From any event on: each call that is found in the log leads to the very events that the log has."""
    with TemporaryDirectory() as scratch:
        log, other = Path(scratch) / "log", Path(scratch) / "fork"
        life = Life(log, **config)
        life.drive(operations).close()
        at = 1 + place % life.core.ledger.seq
        forked = fork(log, at, OtherChoices(), other)
        assert forked == Forked(at, None, life.core.ledger.seq, forked.not_offered, 0)
        assert events_of(other) == events_of(log)


@pytest.mark.parametrize("seed", range(8))
def test_a_fork_repeats_what_a_policy_refused(tmp_path: Path, seed: int) -> None:
    """Refused blocks, and stored ones whose parent was not on the host yet."""
    log = tmp_path / "log"
    life = random_life(seed, 400, log, policy=REFUSING)
    life.close()
    fork(log, 1, OtherChoices(), tmp_path / "fork", allow_policies=(REFUSING,))
    assert events_of(tmp_path / "fork") == events_of(log)


def test_a_fork_repeats_measured_times_and_slow_hits(tmp_path: Path) -> None:
    life = Life(tmp_path / "log", load_only_if_faster=True)
    life.stored("r0", [key(0)], [0])
    life.core.note_times(9, 9_000, 0)
    for number in range(1, 18):
        life.core.match(f"r{number}", [key(0)])
        assert life.core.declines(f"r{number}", 1, 4) == (number != 16)
        life.core.release(f"r{number}")
    life.close()
    assert fork(tmp_path / "log", 1, OtherChoices(), tmp_path / "fork").parted is None
    assert verify_log(tmp_path / "log").good


def test_an_import_touches_in_the_fork_too_what_it_found(tmp_path: Path) -> None:
    """And continues the same blocks."""
    life = Life(tmp_path / "log")
    life.stored("r0", [key(0), key(1)], [0, 1])
    job = life.core.import_blocks((("r1", 4),), [key(n) for n in range(4)], "engine p-1").job
    life.ended(job)
    life.close()
    assert any(isinstance(event, ev.BlocksTouched) for event in life.events)
    fork(tmp_path / "log", 1, OtherChoices(), tmp_path / "fork")
    assert events_of(tmp_path / "fork") == events_of(tmp_path / "log")


@pytest.mark.parametrize("is_import", [False, True])
def test_an_offer_that_lacks_room_evicts_in_the_fork_too_what_it_did_not_find(
    tmp_path: Path, is_import: bool
) -> None:
    """The offer touches blocks that it finds, skips some, and evicts others, with SIEVE also used ones."""
    life = Life(tmp_path / "log", policy="sieve", host_blocks=4)
    life.stored("r0", [key(n) for n in range(4)], range(4))
    life.core.touch([key(n) for n in range(4)])
    offered = [key(n) for n in (3, 4, 5, 6, 7)]
    if is_import:
        prepared = life.core.import_blocks((("r1", 5),), offered, "engine p-1")
    else:
        prepared = life.core.store((("r1", 5),), offered, range(5, 10))
    life.ended(prepared.job)
    life.close()
    assert [event.kind for event in life.events if event.kind in ("StoreSkipped", "BlocksEvicted")] == [
        "StoreSkipped",
        "BlocksEvicted",
    ]
    fork(tmp_path / "log", 1, OtherChoices(), tmp_path / "fork")
    assert events_of(tmp_path / "fork") == events_of(tmp_path / "log")


@pytest.mark.parametrize("policy", ["arc", "s3fifo"])
@pytest.mark.parametrize("writes", WritePolicy)
def test_a_fork_of_a_disk_repeats_its_log(tmp_path: Path, policy: str, writes: WritePolicy) -> None:
    """The tier lets the policy recall keys, then looks for victims, and touches those that it spares."""
    host_options = host_config(OffloadConfig(host_blocks=4, device_blocks=4), places=4)
    disk_options = disk_config(host_options, 5, policy)
    random = Random(7)
    with (
        Offloader.open(host_options, tmp_path / "host") as host,
        Offloader.open(disk_options, tmp_path / "disk") as disk,
    ):
        tier = DiskTier(host, disk, lambda _: None, places=4, writes=writes)
        for _ in range(200):
            keys = [key(number) for number in random.sample(range(9), 2)]
            tier.used([one for one in keys if one in host.ledger.index])
            job = host.store((("r", 2),), keys, range(2)).job
            if job is not None:
                host.submit([job.transfer])
                host.report(job.transfer, 0, True)
                tier.stored(keys)
            for copy in tier.plan():
                tier.report(WorkerReport(copy.transfer, 0, True))
    kinds = [event.kind for event in events_of(tmp_path / "disk")]
    assert ("KeysRecalled", "BlocksTouched") in pairwise(kinds)
    assert fork(tmp_path / "disk", 1, OtherChoices(), tmp_path / "fork").parted is None
    assert events_of(tmp_path / "fork") == events_of(tmp_path / "disk")


def test_a_fork_continues_the_same_blocks_of_an_offer(tmp_path: Path) -> None:
    """Two requests share blocks that are new: one continues what the same event stores, in a slot that held
    another block before."""
    life = Life(tmp_path / "log", host_blocks=4)
    life.stored("r0", [key(n) for n in range(10, 14)], range(4))
    keys, blocks = [key(n) for n in (0, 1, 2, 0, 1, 3)], [4, 5, 6, 4, 5, 7]
    life.ended(life.core.store((("r1", 3), ("r2", 3)), keys, blocks).job)
    life.close()
    slot = life.core.ledger.index[key(1)]
    assert [event.parents for event in life.events if isinstance(event, ev.StorePlanned)] == [
        (),
        ((3, slot),),
    ]
    fork(tmp_path / "log", 1, OtherChoices(), tmp_path / "fork")
    assert events_of(tmp_path / "fork") == events_of(tmp_path / "log")
    assert verify_log(tmp_path / "log").good


def test_a_fork_that_serves_more_than_the_log_asks_for_the_keys_it_names(tmp_path: Path) -> None:
    """Stored, so served (S19): otherwise the match would end without a reason."""
    random_life(107, 80, tmp_path / "log").close()
    fork(tmp_path / "log", 1, OtherChoices(late={24: 7}), tmp_path / "fork")
    assert (len(matched(tmp_path / "log")[-1].slots), len(matched(tmp_path / "fork")[-1].slots)) == (1, 2)
    assert verify_log(tmp_path / "fork").good


def matched(log: Path) -> list[ev.HitMatched]:
    return [event for event in events_of(log) if isinstance(event, ev.HitMatched)]


@settings(max_examples=examples(30))
@given(st.integers(0, 1000), st.integers(0, 1000), st.data())
def test_a_fork_with_any_choice_keeps_every_property(seed: int, place: int, data: st.DataObject) -> None:
    """Each property that a log shows holds in the fork: the real core made it."""
    with TemporaryDirectory() as scratch:
        log, other = Path(scratch) / "log", Path(scratch) / "fork"
        life = random_life(seed, 80, log)
        life.close()
        at = 1 + place % life.core.ledger.seq
        planned = [event for event in life.events if isinstance(event, ev.StorePlanned | ev.LoadPlanned)]
        transfers = [event.seq for event in planned if event.seq > at]
        some = st.lists(st.sampled_from(transfers), max_size=3).map(tuple) if transfers else st.just(())
        choices = OtherChoices(
            policy=data.draw(st.sampled_from([None, "arc", "s3fifo", "slru", "sieve"])),
            reset=data.draw(st.booleans()),
            fail=data.draw(some),
            lose=data.draw(some),
            late=dict.fromkeys(data.draw(some), 7),
        )
        fork(log, at, choices, other)
        verification = verify_log(other)
        assert verification.good, verification
        assert events_of(other)[1:at] == events_of(log)[1:at]


def _thrashed(log: Path) -> None:
    """`r1` hits two blocks in a pool of two. Then a third block evicts one of them."""
    life = Life(log, host_blocks=2, workers=1, defer_ticks=0)
    life.stored("r0", [key(0), key(1)], [0, 1])
    life.core.match("r1", [key(0), key(1)])
    life.core.finish("r1")
    life.stored("r2", [key(2)], [2])
    life.core.match("r3", [key(2)])
    life.core.finish("r3")
    life.close()


def _first(log: Path, kind: type[OffloadingEvent], number: int = 0) -> int:
    return [event.seq for event in events_of(log) if isinstance(event, kind)][number]


CHOICES: dict[str, tuple[Callable[[int], OtherChoices], str]] = {
    "failed store": (lambda transfer: OtherChoices(fail=(transfer,)), "WorkerReported"),
    "lost store": (lambda transfer: OtherChoices(lose=(transfer,)), "TransferLost"),
    "reset": (lambda _: OtherChoices(reset=True), "CacheReset"),
}


@pytest.mark.parametrize("choice", CHOICES)
def test_a_choice_parts_the_futures_where_it_is_made(choice: str, tmp_path: Path) -> None:
    """`r3` hits in the log, and misses in the fork: its block is not there."""
    log = tmp_path / "log"
    _thrashed(log)
    store = _first(log, ev.StorePlanned, 1)
    make, kind = CHOICES[choice]
    forked = fork(log, store, make(store), tmp_path / "fork")
    after = events_of(tmp_path / "fork")
    assert forked.parted is not None
    assert after[forked.parted - 1].kind == kind
    [hit] = [event for event in events_of(log) if isinstance(event, ev.HitMatched) and event.request == "r3"]
    assert len(hit.slots) == 1
    missed = [event for event in after if isinstance(event, ev.HitMatched) and event.request == "r3"]
    assert [event.missed for event in missed] == [key(2)]


def test_a_late_report_comes_that_many_events_later(tmp_path: Path) -> None:
    """`r3` asks before the report, and misses."""
    log = tmp_path / "log"
    _thrashed(log)
    store = _first(log, ev.StorePlanned, 1)
    fork(log, store, OtherChoices(late={store: 100}), tmp_path / "fork")
    after = events_of(tmp_path / "fork")
    reports = [event.seq for event in after if isinstance(event, ev.WorkerReported)]
    asked = [event for event in after if isinstance(event, ev.HitMatched) and event.request == "r3"]
    assert reports[-1] > asked[0].seq
    assert asked[0].missed == key(2)


@pytest.mark.parametrize(("on_host", "expected"), [(0, (0, None)), (2, (1, key(1)))])
def test_an_admission_that_takes_nothing_of_its_match_takes_nothing_in_the_fork(
    tmp_path: Path, on_host: int, expected: tuple[int, bytes | None]
) -> None:
    """As vLLM admits a request whose load has failed: it resumes, and computes although the host has blocks.
    The fork's host has one block less. Only an admission that takes the match takes one less, too."""
    log = tmp_path / "log"
    life = Life(log, host_blocks=4, workers=1, defer_ticks=0)
    life.stored("r0", [key(0)], [0])
    life.stored("r1", [key(1)], [1])
    life.core.match("r2", [key(0), key(1)])
    life.core.admit("r2", 2, 0, on_host, None, resumed=True)
    life.core.release("r2")
    life.core.finish("r2")
    life.close()
    store = _first(log, ev.StorePlanned, 1)
    fork(log, store, OtherChoices(fail=(store,)), tmp_path / "fork")
    [found] = [event for event in events_of(tmp_path / "fork") if isinstance(event, ev.RequestAdmitted)]
    assert (found.on_host, found.missed) == expected
    assert (found.asked, found.on_device, found.resumed) == (2, 0, True)


def test_an_aborted_request_makes_no_more_calls(tmp_path: Path) -> None:
    log = tmp_path / "log"
    _thrashed(log)
    matched = _first(log, ev.HitMatched)
    fork(log, matched, OtherChoices(abort=("r1",)), tmp_path / "fork")
    after = [event for event in events_of(tmp_path / "fork")[matched:] if "r1" in str(event)]
    assert [(event.kind, event.aborted) for event in after if isinstance(event, ev.RequestFinished)] == [
        ("RequestFinished", True)
    ]
    assert len(after) == 1


def test_another_policy_has_seen_the_log_from_its_beginning(tmp_path: Path) -> None:
    """The fork's log names the policy, and is a log like any other."""
    life = random_life(3, 400, tmp_path / "log", host_blocks=6)
    life.close()
    forked = fork(tmp_path / "log", 40, OtherChoices(policy="arc"), tmp_path / "fork")
    assert LogReader(tmp_path / "fork").head.config.policy == "arc"
    assert forked.parted is not None
    assert forked.parted > 40


def test_a_log_that_begins_with_a_snapshot_can_be_forked(tmp_path: Path) -> None:
    """Retention deletes the oldest events of a long run. Only another policy must have seen them."""
    life = random_life(5, 3000, tmp_path / "log", writer={"segment_bytes": 4000, "max_bytes": 40_000})
    life.close()
    first = LogReader(tmp_path / "log").head.seq
    assert first > 0
    fork(tmp_path / "log", first + 10, OtherChoices(), tmp_path / "fork")
    assert events_of(tmp_path / "fork") == events_of(tmp_path / "log")
    with pytest.raises(ConfigError, match="would have to see them"):
        fork(tmp_path / "log", first + 10, OtherChoices(policy="arc"), tmp_path / "policy")


@pytest.mark.parametrize(
    ("at", "choices", "says"),
    [
        (10**9, OtherChoices(), "there is no event 1000000000"),
        (5, OtherChoices(abort=("nobody",)), "request nobody is not alive after event 5"),
        (5, OtherChoices(policy="nonsense"), "policy 'nonsense'"),
        (5, OtherChoices(fail=(10**6,)), "transfer 1000000 is not alive after event 5"),
        (5, OtherChoices(late={2: 9}), "transfer 2 is not alive after event 5"),
    ],
)
def test_what_cannot_be_forked_is_refused_and_leaves_nothing(
    at: int, choices: OtherChoices, says: str, tmp_path: Path
) -> None:
    _thrashed(tmp_path / "log")
    with pytest.raises((ConfigError, LogError), match=says):
        fork(tmp_path / "log", at, choices, tmp_path / "fork")
    assert not (tmp_path / "fork").exists()


@settings(max_examples=100)
@given(st.integers(0, 10**6))
@pytest.mark.slow
def test_long_lives_are_repeated(seed: int) -> None:
    with TemporaryDirectory() as scratch:
        log, other = Path(scratch) / "log", Path(scratch) / "fork"
        life = random_life(seed, 1000, log)
        life.close()
        forked = fork(log, 1 + seed % life.core.ledger.seq, OtherChoices(), other)
        assert forked.parted is None
        assert forked.pointless == 0


# From where on a break is unavoidable.


def test_a_break_that_only_the_logs_core_made_is_avoided_to_the_last(tmp_path: Path) -> None:
    """In the log a block matches after a reset, against no stale data (S14). kvsm's core never matches it."""
    life = scene()
    life.core.reset()
    log = written(tmp_path / "log", life, [*life.events, *after_reset(life)[1:]])
    found = unavoidable(log)
    assert found.avoided_until == found.event - 1
    assert {probe.broken for probe in found.probes} == {None}


def test_a_break_that_the_engines_calls_make_is_avoided_nowhere(tmp_path: Path) -> None:
    """The engine moves a cursor back although no store failed: no doubled or lost store (S13)."""
    life = Life(tmp_path / "log", workers=1)
    life.core.arrive("r0")
    life.core.advance([("r0", (2,), (2,))])
    life.core.advance([("r0", (0,), (0,))])
    life.close()
    found = unavoidable(tmp_path / "log")
    assert found.broken is Property.STORED_ONCE
    assert found.avoided_until is None


def test_a_good_log_has_nothing_to_avoid(tmp_path: Path) -> None:
    _thrashed(tmp_path / "log")
    with pytest.raises(ConfigError, match="no property is broken"):
        unavoidable(tmp_path / "log")
