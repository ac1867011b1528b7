"""What comes from the disk: who holds it until its load, who waits for its turn, and that the wait ends."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from disk_rig import directory as memory_directory
from test_tiers import KEYS, Tiers

from examples import examples
from kvsm.core.ledger import Ledger
from kvsm.core.log import LogReader
from kvsm.core.offloader import LookupResult, PendingHit
from kvsm.core.plan import TransferJob
from kvsm.events import Direction, HitMatched, LoadPlanned, RequestDeferred, StorePlanned, WorkerReported
from kvsm.explain.story import Auditor
from kvsm.ids import to_list
from kvsm.serving import RunOptions, RunResult, load_workload, run_workload
from kvsm.tiers.fetches import SHARE

ROOM = 8
"""Slots of the host. Half of them may wait for a load."""


def fetching(disk_only: int, **sizes: int) -> Tiers:
    """The disk has this number of the first keys, and the host has lost them."""
    tiers = Tiers(**{"host_blocks": ROOM, "disk": 2 * ROOM, **sizes})
    for key in KEYS[:disk_only]:
        tiers.write_through([key])
    tiers.host.reset()  # alone: the disk keeps what it has
    assert all(map(tiers.tier.has, KEYS[:disk_only]))
    return tiers


def ask(tiers: Tiers, request: str, keys: list[bytes]) -> int | None:
    """The request asks as an engine does. Returns the transfer that it waits for."""
    awaited = tiers.tier.fetch(PendingHit(request, keys))
    assert awaited is None or tiers.host.defer(request, awaited)
    return awaited


def load(tiers: Tiers, request: str, keys: list[bytes]) -> None:
    """The request is placed, and loads these."""
    assert tiers.host.match(request, keys).hits == len(keys)
    job = tiers.host.prepare_load(request, list(range(len(keys))))
    assert job is not None
    tiers.host.submit([job.transfer])
    tiers.host.report(job.transfer, 0, True)


def loads(tiers: Tiers) -> list[TransferJob]:
    return [job for job in tiers.tier.plan() if job.direction is Direction.LOAD]


def fill(tiers: Tiers) -> None:
    """The engine stores as much as the host has room for, twice."""
    for number in range(2 * ROOM):
        job = tiers.host.store((), [b"other %d" % number], [0]).job
        if job is not None:
            tiers.host.submit([job.transfer])
            tiers.host.report(job.transfer, 0, True)


def test_what_comes_is_evicted_before_what_it_continues() -> None:
    """Also if a fetch begins behind blocks that came earlier: the host evicts the later fetch first."""
    tiers = fetching(4)
    for first, last in ((0, 2), (2, 4)):
        parents = ((0, KEYS[first - 1] if first else b""),)
        assert tiers.tier.fetch(PendingHit(f"r{first}", KEYS[first:last], parents=parents)) is not None
        (job,) = loads(tiers)
        tiers.end(job)
    assert tiers.host.next_victims(4) == tuple(KEYS[:4][::-1])
    tiers.check()


def test_what_has_come_is_still_there_when_its_request_loads_it() -> None:
    """A match holds what it counts (S7): it is matched when the copy ends, not when the engine asks again."""
    tiers = fetching(3)
    ask(tiers, "r", KEYS[:3])
    (job,) = loads(tiers)
    tiers.end(job)
    fill(tiers)
    load(tiers, "r", KEYS[:3])
    tiers.check()


@pytest.mark.parametrize("stored", [False, True])
def test_the_match_at_the_end_of_a_copy_names_only_a_key_that_is_missing_then(stored: bool) -> None:
    """Stored, so served (S19): another request may store the missing key while the copy is in flight."""
    tiers = fetching(2)
    awaited = tiers.tier.fetch(PendingHit("r", KEYS[:2], KEYS[2], 3, None, 2))
    assert awaited is not None
    assert tiers.host.defer("r", awaited)
    if stored:
        tiers.store(KEYS[2:3])
    tiers.end(loads(tiers)[0])
    (match,) = [event for event in tiers.log if isinstance(event, HitMatched) and event.request == "r"]
    assert (match.missed, match.on_host) == ((None, None) if stored else (KEYS[2], 2))
    auditor = Auditor(Ledger(tiers.host.config))
    assert auditor.apply_all(list(tiers.log))[1] == []
    tiers.check()


def test_what_the_host_has_of_a_hit_is_held_while_the_rest_comes() -> None:
    tiers = fetching(3)
    ask(tiers, "one", KEYS[:1])
    tiers.end(loads(tiers)[0])
    tiers.host.finish("one")
    ask(tiers, "r", KEYS[:3])
    (job,) = loads(tiers)
    assert len(job.keys) == 2
    fill(tiers)
    tiers.end(job)
    load(tiers, "r", KEYS[:3])
    assert list(tiers.host.ledger.requests) == ["r"], "nothing else holds it then"
    tiers.check()


def test_at_most_half_of_the_host_waits_for_its_load_and_others_get_their_turn() -> None:
    """A part of a copy never begins. Progress (S9): with the first load the next one has room."""
    tiers = fetching(6)
    first = ask(tiers, "r1", KEYS[:3])
    assert ask(tiers, "r2", KEYS[3:5]) == first
    (job,) = loads(tiers)
    tiers.end(job)
    assert tiers.host.waits_for("r2") is None, "it asks again"
    load(tiers, "r1", KEYS[:3])
    second = ask(tiers, "r2", KEYS[3:5])
    assert second is not None
    assert second != first
    tiers.end(loads(tiers)[0])
    load(tiers, "r2", KEYS[3:5])
    tiers.check()


def test_as_many_come_at_once_as_fit() -> None:
    tiers = fetching(6)
    ask(tiers, "r1", KEYS[:2])
    ask(tiers, "r2", KEYS[2:4])
    ask(tiers, "r3", KEYS[4:6])
    assert [job.keys for job in loads(tiers)] == [tuple(KEYS[:2]), tuple(KEYS[2:4])]


def test_a_prompt_longer_than_half_of_the_host_comes_alone() -> None:
    tiers = fetching(7)
    ask(tiers, "long", KEYS[:6])
    assert ask(tiers, "short", KEYS[6:7]) is not None
    (job,) = loads(tiers)
    assert job.keys == tuple(KEYS[:6])
    tiers.end(job)
    load(tiers, "long", KEYS[:6])


def test_a_request_that_needs_more_than_half_is_not_kept_waiting_by_what_it_holds() -> None:
    """Stored, so served (S19). The device has lost the beginning of the request's prompt."""
    tiers = fetching(6)
    ask(tiers, "r", KEYS[3:6])
    tiers.end(loads(tiers)[0])
    assert ask(tiers, "r", KEYS[:6]) is not None
    (job,) = loads(tiers)
    tiers.end(job)
    load(tiers, "r", KEYS[:6])
    tiers.check()


@pytest.mark.parametrize("leaves", ["finish", "preempt"])
def test_a_request_that_leaves_gives_its_turn_to_the_next(leaves: str) -> None:
    """Before its blocks have come, or after that."""
    for early in (True, False):
        tiers = fetching(6)
        ask(tiers, "r1", KEYS[:3])
        (job,) = loads(tiers)
        if early:
            getattr(tiers.host, leaves)("r1")
        tiers.end(job)
        if not early:
            getattr(tiers.host, leaves)("r1")
        ask(tiers, "r2", KEYS[3:6])
        assert [one.keys for one in loads(tiers)] == [tuple(KEYS[3:6])]
        tiers.check()


def test_a_request_that_has_waited_long_enough_computes() -> None:
    """Progress (S9): the wait for a turn and the wait for a copy are one wait, with one bound."""
    tiers = fetching(6)
    first = ask(tiers, "r1", KEYS[:3])
    assert ask(tiers, "r2", KEYS[3:6]) == first
    for _ in range(tiers.host.config.defer_ticks):
        assert tiers.host.waits_for("r2") == first
        tiers.host.tick()
    assert tiers.host.waits_for("r2") is None
    assert tiers.tier.fetch(PendingHit("r2", KEYS[3:6])) is None, "nothing is brought in vain"
    assert not tiers.host.defer("r2", first or 0)
    assert tiers.host.match("r2", KEYS[3:6]).hits == 0
    assert len(loads(tiers)) == 1


def test_nobody_waits_if_nothing_is_in_flight() -> None:
    """What holds the room is matched, and its load may be long in coming."""
    tiers = fetching(6)
    ask(tiers, "r1", KEYS[:3])
    tiers.end(loads(tiers)[0])
    assert ask(tiers, "r2", KEYS[3:6]) is None


def test_all_that_wait_for_a_copy_hold_what_it_brings() -> None:
    """Also those that did not begin it. What only began and does not wait for it holds nothing."""
    tiers = fetching(3)
    first = ask(tiers, "r1", KEYS[:3])
    assert ask(tiers, "r2", KEYS[:2]) == first
    tiers.host.finish("r1")
    tiers.end(loads(tiers)[0])
    fill(tiers)
    load(tiers, "r2", KEYS[:2])
    assert tiers.host.lookup(KEYS[2]) is LookupResult.MISS


def test_a_part_that_is_in_flight_is_awaited_before_the_rest_is_brought() -> None:
    tiers = fetching(3)
    first = ask(tiers, "r1", KEYS[:1])
    assert ask(tiers, "r2", KEYS[:3]) == first
    (job,) = loads(tiers)
    tiers.end(job)
    ask(tiers, "r2", KEYS[:3])
    (job,) = loads(tiers)
    assert job.keys == tuple(KEYS[1:3])


def test_a_copy_that_fails_leaves_no_holder() -> None:
    """Failure is not success (S6): the request computes."""
    tiers = fetching(3)
    ask(tiers, "one", KEYS[:1])
    tiers.end(loads(tiers)[0])
    ask(tiers, "r", KEYS[:3])
    (job,) = loads(tiers)
    tiers.end(job, good=False)
    assert tiers.host.match("r", KEYS[:3]).hits == 1
    tiers.host.finish("r")
    tiers.host.finish("one")
    assert not tiers.host.ledger.requests
    tiers.check()


# In the serving engine.


@pytest.fixture(name="place", scope="module")
def _place() -> Iterator[Path]:
    with memory_directory() as made:
        yield made


class Pressed(msgspec.Struct, frozen=True):
    """A run on a disk that an earlier one has filled, with a host pool of a tenth of all blocks."""

    result: RunResult
    log: str
    host_blocks: int


@pytest.fixture(
    name="pressed",
    scope="module",
    params=["full", pytest.param("full,sliding:4096/1024", marks=pytest.mark.slow)],
)
def _pressed(place: Path, request: pytest.FixtureRequest) -> Pressed:
    groups = request.param
    options = RunOptions(
        requests=250 if groups != "full" else 150,
        groups=groups,
        block_bytes=64,
        device_blocks=192 if groups == "full" else 512,
        workers=1,
        copies="simulated",
        disk_dir=str(place / f"disk {len(groups)}"),
        disk_blocks=8000,
    )
    working_set = len({one for line in load_workload(options) for one in line.hash_ids})
    small = working_set // 10 if groups == "full" else working_set // 4
    options = msgspec.structs.replace(options, host_blocks=small)
    assert run_workload(options).good
    log = str(place / f"log {len(groups)}")
    return Pressed(run_workload(msgspec.structs.replace(options, log=log)), log, small)


def test_nearly_all_that_is_fetched_is_loaded(pressed: Pressed) -> None:
    """Of 3,906 blocks that came, 2,294 were evicted before, and 18 % of the prompt tokens were computed."""
    fetched: dict[int, bool] = {}
    lost = brought = 0
    for event in LogReader(pressed.log).events():
        if isinstance(event, StorePlanned):
            gone = [fetched.pop(slot) for slot in to_list(event.slots) if slot in fetched]
            lost += gone.count(False)
            if event.source:
                fetched |= dict.fromkeys(to_list(event.slots), False)
                brought += len(event.keys)
        elif isinstance(event, LoadPlanned) and not event.target:
            fetched |= {slot: True for slot in to_list(event.slots) if slot in fetched}
    result = pressed.result
    assert result.good, result.violations
    assert brought > 500
    assert lost <= brought // 50
    tokens = result.device_hit_tokens + result.host_hit_tokens + result.computed_tokens
    assert result.computed_tokens < 0.1 * tokens


def test_each_request_that_waits_for_its_blocks_holds_them_at_once(pressed: Pressed) -> None:
    """And what has come or comes, and is not loaded, takes half of the host pool at most, or is of one
    request."""
    bringing: dict[int, tuple[str, set[int]]] = {}
    waits: dict[str, int] = {}
    held: dict[str, set[int]] = {}
    events = list(LogReader(pressed.log).events())
    matched = 0
    for event, following in pairwise(events):
        if isinstance(event, StorePlanned) and event.source:
            bringing[event.seq] = event.owners[0][0], set(to_list(event.slots))
            all_held = [slots for _, slots in bringing.values()] + list(held.values())
            assert len(set().union(*all_held)) <= pressed.host_blocks // SHARE or len(all_held) == 1
        elif isinstance(event, RequestDeferred):
            waits[event.request] = event.transfer
            held.pop(event.request, None)
        elif isinstance(event, WorkerReported) and event.transfer in bringing:
            request, slots = bringing.pop(event.transfer)
            if event.good and waits.get(request) == event.transfer:
                assert isinstance(following, HitMatched), following
                matched += following.request == request
                held[following.request] = set(to_list(following.slots))
                assert slots <= held[following.request]
        elif isinstance(event, HitMatched | LoadPlanned):
            waits.pop(event.request, None)
            held.pop(event.request, None)
    assert matched > 100


def test_requests_that_fail_leave_and_lose_their_blocks_come_to_an_end(place: Path) -> None:
    """Progress (S9), with all that goes wrong: every run checks at its end that nothing is left."""
    for seed in range(examples(3, least=2)):
        options: dict[str, Any] = {
            "abort_rate": 0.1,
            "preempt_rate": 0.02,
            "failure_rate": 0.05,
            "seed": seed,
        }
        result = run_workload(
            RunOptions(
                requests=60,
                block_bytes=64,
                device_blocks=96,
                host_blocks=40,
                copies="simulated",
                disk_dir=str(place / "rough"),
                disk_blocks=2000,
                reset_every=400 if seed else 0,
                **options,
            )
        )
        assert result.good, result.violations
        assert result.finished + result.aborted == 60
