"""`OffloadMachine` counts a case only if a wrong implementation could have broken the property there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from kvsm import OffloadConfig, Offloader
from kvsm.check.worlds.check_counts import taken_counts
from kvsm.core.scheduler import LastStep
from kvsm.properties import Property
from kvsm.testing import Arrival, Configuration, OffloadMachine, Recorder
from kvsm.testing.offload_cases import count_ledger, count_log

KEYS = [name.encode() + bytes(4) for name in ("first", "second", "third", "fourth")]


@pytest.fixture(autouse=True)
def _from_zero() -> Iterator[None]:
    taken_counts()
    yield
    taken_counts()


def counted(tried: Property) -> dict[str, int]:
    """The cases of this property since the last call, and their numbers."""
    return {case: times for (one, case), times in taken_counts().items() if one is tried}


class Life:
    """A core with four slots, and its log."""

    def __init__(self) -> None:
        self.log = Recorder()
        self.core = Offloader(OffloadConfig(host_blocks=4, device_blocks=12), self.log, clock_ns=lambda: 0)
        self._blocks = iter(range(12))

    def store(self, *keys: bytes) -> int:
        """Let a store of these keys begin."""
        job = self.core.prepare_store("writer", list(keys), [next(self._blocks) for _ in keys]).job
        assert job is not None
        self.core.submit([job.transfer])
        return job.transfer

    def load(self, request: str, *keys: bytes) -> int:
        """Let a load of these keys begin."""
        self.core.match(request, list(keys))
        job = self.core.prepare_load(request, [next(self._blocks) for _ in keys])
        assert job is not None
        self.core.submit([job.transfer])
        return job.transfer

    def end(self, transfer: int, good: bool = True) -> None:
        self.core.report(transfer, 0, good)

    def counted(self, tried: Property) -> dict[str, int]:
        count_log(list(self.log))
        return counted(tried)


@pytest.fixture
def life() -> Life:
    return Life()


def test_a_copy_alone_could_not_be_reused(life: Life) -> None:
    """A copy in flight is no case of S3 if nothing is allocated, evicted or released meanwhile."""
    transfer = life.store(KEYS[0])
    count_ledger(life.core.ledger)
    assert not counted(Property.NO_REUSE_IN_FLIGHT)
    life.end(transfer)
    life.end(life.store(*KEYS[1:]))
    life.end(life.load("reader", KEYS[0]))
    life.core.finish("reader")
    life.end(life.store(b"fifth"))
    life.core.reset()
    assert not life.counted(Property.NO_REUSE_IN_FLIGHT)


def test_what_is_decided_during_a_copy_could_reuse_it(life: Life) -> None:
    life.end(life.store(*KEYS[1:]))
    first = life.store(KEYS[0])
    life.store(b"fifth", b"sixth")
    loading = life.load("reader", KEYS[1])
    life.core.finish("other")
    life.core.finish("reader")
    life.end(loading)
    life.core.reset()
    life.end(first)
    assert life.counted(Property.NO_REUSE_IN_FLIGHT) == {
        "evictions during a copy": 2,
        "slots allocated during a copy": 2,
        "requests that ended or were preempted during their load": 1,
        "resets during a copy": 1,
    }


def test_a_match_could_lose_its_blocks_only_to_an_eviction(life: Life) -> None:
    life.end(life.store(*KEYS))
    life.core.match("reader", KEYS[:1])
    life.core.match("stranger", [b"fifth"])
    assert not life.counted(Property.MATCH_HOLDS)
    life.store(b"fifth")
    assert life.counted(Property.MATCH_HOLDS) == {"evictions while a match held blocks": 1}


@pytest.mark.parametrize("end", ["load", "preempt", "finish", "reset"])
def test_a_match_that_has_ended_holds_nothing(life: Life, end: str) -> None:
    life.end(life.store(*KEYS))
    life.core.match("reader", KEYS[:1])
    if end == "load":
        assert life.core.prepare_load("reader", [11]) is not None
    elif end == "reset":
        life.core.reset()
        life.end(life.store(*KEYS))
    else:
        getattr(life.core, end)("reader")
    life.store(b"fifth")
    assert not life.counted(Property.MATCH_HOLDS)


def test_only_a_reset_after_a_store_could_leave_stale_data(life: Life) -> None:
    life.core.reset()
    life.end(life.store(KEYS[0]))
    life.core.reset()
    life.core.reset()
    assert life.counted(Property.NO_STALE_DATA) == {"resets after a store": 1}


def test_an_eviction_delivers_no_bytes(life: Life) -> None:
    life.end(life.store(*KEYS))
    life.end(life.store(b"fifth"))
    assert not life.counted(Property.CORRECT_BYTES)
    life.end(life.load("reader", b"fifth"))
    assert life.counted(Property.CORRECT_BYTES) == {"loads": 1}


def asked(machine: OffloadMachine, *arrivals: Arrival) -> OffloadMachine:
    """The machine after these requests, one after the other."""
    first, *others = arrivals
    machine.open(Configuration(host_blocks=12, last_step=LastStep.KEEP_STEPPING), first)
    machine.let_all_end()
    for arrival in others:
        machine.arrive(arrival)
        machine.let_all_end()
    return machine


@pytest.mark.parametrize(
    ("arrivals", "is_held", "is_whole"),
    [
        ([Arrival(length=9)], False, False),
        ([Arrival(length=3), Arrival(length=3)], False, False),
        ([Arrival(length=9), Arrival(length=9)], True, False),
        ([Arrival(length=9), Arrival(length=8)], True, True),
        ([Arrival(length=9), Arrival(length=16)], True, False),
        ([Arrival(length=9), Arrival(length=8, parameters={"max_load_tokens": 5})], True, False),
        ([Arrival(length=9), Arrival(length=8, skip_reading=True)], False, False),
    ],
)
def test_a_match_can_be_wrong_only_if_the_host_has_a_block(
    arrivals: Sequence[Arrival], is_held: bool, is_whole: bool
) -> None:
    """And it can cover the whole prompt only if all of it was stored, in full blocks."""
    asked(OffloadMachine(), *arrivals)
    found = taken_counts()
    assert ((Property.MATCH_HOLDS, "answers to requests with a block on the host") in found) is is_held
    whole = Property.ONE_TOKEN_LEFT, "answers to requests whose whole prompt was stored"
    assert (whole in found) is is_whole


def growing(**configuration: Any) -> OffloadMachine:
    """A machine whose request has computed two blocks, and whose store is in flight."""
    machine = OffloadMachine()
    machine.open(
        Configuration(last_step=LastStep.KEEP_STEPPING, **configuration), Arrival(length=9, outputs=8)
    )
    machine.step(None, True, 2)
    assert machine.core.ledger.transfers
    counted(Property.NO_REUSE_IN_FLIGHT)
    return machine


def test_blocks_that_their_request_has_are_not_allocated() -> None:
    machine = growing()
    machine.step(None, True, 3)
    assert not counted(Property.NO_REUSE_IN_FLIGHT)


def test_blocks_under_copy_of_a_request_that_has_finished_could_be_allocated() -> None:
    machine = growing()
    [request] = machine.engine.running.values()
    machine.finish(request, False)
    machine.step(None, True, 1)
    assert not counted(Property.NO_REUSE_IN_FLIGHT)  # Nothing was allocated.
    machine.arrive(Arrival(conversation=1, length=3))
    machine.step(None, True, 1)
    assert counted(Property.NO_REUSE_IN_FLIGHT) == {
        "allocations while a copy touched a device block that no request had": 1
    }


def test_without_references_no_reuse_of_a_device_block_is_checked() -> None:
    machine = growing(references=False)
    [request] = machine.engine.running.values()
    machine.finish(request, False)
    machine.arrive(Arrival(conversation=1, length=3))
    machine.step(None, True, 1)
    assert not counted(Property.NO_REUSE_IN_FLIGHT)
