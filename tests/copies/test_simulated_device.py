"""The simulated device: everything that hardware may do can happen, nothing else can, and no race is
missed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedules import Choose, every_schedule

from kvsm.copies.simulated import LONGEST_POLLS, LONGEST_QUEUE, SimulatedCopyEngine, SimulatedDevice
from kvsm.core.plan import TransferJob
from kvsm.errors import DeviceLost, PropertyBroken
from kvsm.events import Direction

STORE, LOAD = Direction.STORE, Direction.LOAD
BLOCKS = 24

seeds = st.integers(0, 2**32)


def pools(blocks: int = BLOCKS) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Device block b holds b + 1, host block h holds 100 + h."""
    rows = np.arange(blocks, dtype=np.uint8)[:, None]
    return np.repeat(rows + 1, 2, axis=1), np.repeat(rows + 100, 2, axis=1)


def in_order(_options: int) -> int:
    """Choose the first step."""
    return 0


def new_device(choose: Choose = in_order, pieces: int = 3) -> SimulatedDevice:
    return SimulatedDevice(*pools(), choose, pieces)


def run_all(device: SimulatedDevice) -> None:
    while device.step():
        pass


def races(device: SimulatedDevice) -> list[str]:
    return [str(race) for race in device.races]


# What may happen, and in which order.


def test_streams_are_in_order_and_otherwise_in_any() -> None:
    seen = set()

    def run(choose: Choose) -> None:
        device, ran = new_device(choose), ""

        def note(name: str) -> Callable[[], None]:
            def kernel() -> None:
                nonlocal ran
                ran += name

            return kernel

        other = device.new_stream("other")
        for stream, names in ((device.compute, "abc"), (other, "xy")):
            for name in names:
                stream.launch(name, action=note(name))
        run_all(device)
        seen.add(ran)

    assert every_schedule(run) == len(seen) == 10
    assert all(
        one.replace("x", "").replace("y", "") == "abc" and one.index("x") < one.index("y") for one in seen
    )


def test_the_pieces_of_a_copy_come_in_any_order() -> None:
    seen = set()

    def run(choose: Choose) -> None:
        device, host = pools(3)
        simulated = SimulatedDevice(device, host, choose)
        kept = simulated.copy(simulated.compute, 0, STORE, ((0, 1, 2), (0, 1, 2)))
        states = []
        while simulated.step():
            states.append(tuple(host[:, 0].tolist()))
        seen.add(tuple(states))
        assert host[:, 0].tolist() == [1, 2, 3], kept

    assert every_schedule(run) == len(seen) == 6


def test_what_waits_for_an_event_runs_behind_it_in_every_schedule() -> None:
    """Behind work that was queued before the event, not behind later work."""
    orders = set()

    def run(choose: Choose) -> None:
        device, ran = new_device(choose), []
        device.launch("first", action=lambda: ran.append("first"))
        event = device.compute.record()
        device.launch("later", action=lambda: ran.append("later"))
        other = device.new_stream("other")
        other.wait(event)
        other.launch("waits", action=lambda: ran.append("waits"))
        run_all(device)
        orders.add(tuple(ran))

    assert every_schedule(run) == 2
    assert orders == {("first", "later", "waits"), ("first", "waits", "later")}


def test_what_waits_for_two_events_runs_behind_both() -> None:
    def run(choose: Choose) -> None:
        device, ran = new_device(choose), []
        first, second, third = (device.new_stream(name) for name in ("first", "second", "third"))
        for stream in (first, second):
            stream.launch("a kernel", writes=[3 if stream is first else 4], action=lambda: ran.append("one"))
            third.wait(stream.record())
        third.launch("another", reads=[3, 4], action=lambda: ran.append("behind"))
        run_all(device)
        assert ran == ["one", "one", "behind"]
        assert device.races == []

    assert every_schedule(run) == 6


@given(random=st.randoms(use_true_random=False), blocks=st.integers(0, 20), pieces=st.integers(1, 4))
def test_a_copy_copies_every_pair_whatever_its_pieces(random: Random, blocks: int, pieces: int) -> None:
    """Correct bytes (S15): for no, few and many blocks, with ids in tuples and in arrays."""
    device, host = pools()
    simulated = SimulatedDevice(device, host, random.randrange, pieces)
    ids = np.array(random.sample(range(BLOCKS), blocks), np.int64)
    targets = np.array(random.sample(range(BLOCKS), blocks), np.int64)
    expected = device.copy()
    expected[ids] = host[targets]
    kept = simulated.copy(simulated.compute, 0, LOAD, (ids, targets))
    simulated.synchronize()
    assert (device == expected).all(), kept
    assert races(simulated) == []


def test_steps_can_be_listed_and_run_by_hand() -> None:
    """So that an explorer can take them in any order without a chooser."""
    device = new_device(choose=lambda _: pytest.fail("nobody was to choose"))
    ran = []
    device.new_submitter("own", pytest.fail).put(lambda: ran.append("call"))
    device.launch("step 1", action=lambda: ran.append("kernel"))
    assert [str(step) for step in device.steps()] == [
        "the next call of submitter 'own'",
        "kernel 'step 1' on stream 'compute', choice 0 of 1",
    ]
    device.run(device.steps()[1])
    device.run(device.steps()[0])
    assert (ran, device.steps(), device.step()) == (["kernel", "call"], [], False)


def test_nothing_happens_before_somebody_lets_it() -> None:
    device, host = pools()
    simulated = SimulatedDevice(device, host, in_order)
    kept = simulated.copy(simulated.compute, 0, STORE, ((0,), (0,)))
    event = simulated.compute.record()
    assert not event.done()
    assert host[0, 0] == 100, kept
    event.synchronize()
    assert event.done()
    assert host[0, 0] == 1


def test_an_event_that_cannot_come_says_what_waits_for_what() -> None:
    """Progress (S9): an event of another device, which does nothing."""
    device, other = new_device(), new_device()
    device.compute.wait(other.compute.record())
    device.launch("step 1")
    with pytest.raises(PropertyBroken) as broken:
        device.synchronize()
    assert str(broken.value) == (
        "progress (S9): event 0 of stream 'compute' never comes: "
        "stream 'compute' waits for event 0 of stream 'compute'"
    )


def test_compute_is_never_further_behind_than_a_queue_is_long() -> None:
    """A host that never waits for a copy must not keep all of its kernels in memory."""
    device, ran = new_device(), []
    for number in range(3 * LONGEST_QUEUE):
        device.launch("a step", action=partial(ran.append, number))
        assert device.backlog == min(number + 1, LONGEST_QUEUE)
    device.synchronize()
    assert ran == list(range(3 * LONGEST_QUEUE))


def test_closing_under_a_copy_is_an_error() -> None:
    """No reuse in flight (S3): memory is given back while a copy still has to touch it."""
    device = new_device()
    kept = device.copy(device.compute, 0, STORE, ((0,), (0,)))
    with pytest.raises(PropertyBroken, match=r"^no reuse in flight \(S3\): .*: store 0 on stream 'compute'"):
        device.close()
    device.synchronize()
    device.close()
    assert kept


# What is unordered, and what orders it.


def test_a_kernel_and_a_copy_of_two_streams_race_in_every_schedule() -> None:
    """Order of copies (S12): also if the bytes came out right."""

    def run(choose: Choose) -> None:
        device = new_device(choose, pieces=1)
        device.launch("step 12", writes=[3])
        kept = device.copy(device.new_stream("own"), 0, STORE, ((3,), (0,)))
        run_all(device)
        kernel, copy = (
            "kernel 'step 12' on stream 'compute' writes it",
            "store 0 on stream 'own' reads it",
        )
        assert races(device) in (
            [f"device block 3: {kernel} and {copy}, and nothing orders the two"],
            [f"device block 3: {copy} and {kernel}, and nothing orders the two"],
        ), kept

    assert every_schedule(run) == 2


def test_two_pairs_of_one_copy_are_unordered() -> None:
    device = new_device()
    kept = device.copy(device.compute, 0, LOAD, ((4, 4), (0, 1)))
    device.synchronize()
    assert [race.location for race in device.races] == [("device block", 4)], kept


@pytest.mark.parametrize("learn", ["done", "synchronize", "not at all"])
def test_the_host_is_ordered_behind_a_copy_by_its_event_alone(learn: str) -> None:
    """Order of copies (S12): that the copy is over does not help, because the host cannot know it."""
    device = new_device()
    kept = device.copy(device.compute, 0, STORE, ((0,), (5,)))
    event = device.compute.record()
    run_all(device)
    if learn == "done":
        assert event.done()
    elif learn == "synchronize":
        event.synchronize()
    device.host_accesses("the checksum of transfer 1", [5])
    assert [race.second for race in device.races] == (
        ["the checksum of transfer 1 on the host reads"] if learn == "not at all" else []
    ), kept


def test_what_the_host_did_is_before_what_it_queues() -> None:
    """Order of copies (S12): but not before work that was queued already."""
    device = new_device()
    early = device.copy(device.compute, 0, LOAD, ((0,), (5,)))
    device.host_accesses("filling", writes=[5, 6])
    late = device.copy(device.compute, 1, LOAD, ((1,), (6,)))
    run_all(device)
    assert [race.location for race in device.races] == [("host block", 5)], (early, late)


def test_the_submitter_is_a_thread_of_its_own() -> None:
    """Order of copies (S12): a submitter knows what the host knew at `put`; the host knows what the
    submitter did only after `flush`."""
    device = new_device()
    submitter = device.new_submitter("own", pytest.fail)
    device.host_accesses("filling", writes=[1, 2])
    submitter.put(lambda: device.host_accesses("the checksum", writes=[1, 3]))
    device.host_accesses("filling", writes=[4])
    run_all(device)
    assert device.races == []
    device.host_accesses("a look", [2, 4])
    assert device.races == []
    submitter.flush()
    device.host_accesses("a look", [1, 3])
    assert device.races == []
    submitter.put(lambda: device.host_accesses("the checksum", writes=[5]))
    run_all(device)
    device.host_accesses("a look", [5])
    assert [race.first for race in device.races] == ["the checksum on submitter 'own' writes"]


def test_ids_that_are_overwritten_before_the_copy_has_read_them_are_a_race() -> None:
    """B37: the bytes are wrong if the copy came too late. A view is the same memory."""
    device, host = pools()
    simulated = SimulatedDevice(device, host, in_order)
    table, targets = np.arange(20), np.arange(20)
    first = simulated.copy(simulated.compute, 0, STORE, (table[:3], targets[:3]))
    table[:3] = 7
    second = simulated.copy(simulated.compute, 1, STORE, (table[:3], targets[3:6]))
    run_all(simulated)
    assert host[:3, 0].tolist() == [8, 8, 8], (first, second)
    text = "the host, for store 1, writes it and store 0 on stream 'compute' reads it"
    assert f"id table 0: {text}, and nothing orders the two" in races(simulated)


def test_ids_may_be_overwritten_when_the_copy_is_known_to_be_over() -> None:
    device = new_device()
    table = np.arange(20)
    for _ in range(3):
        kept = device.copy(device.compute, 0, STORE, (table, np.arange(20)))
        device.compute.record().synchronize()
        del kept
    assert races(device) == []


def test_ids_that_were_freed_and_their_memory_used_again_are_no_race() -> None:
    """A new array at the address of an old one is another table, and nothing is left of the old one."""
    device = new_device()
    for _ in range(50):
        kept = device.copy(device.compute, 0, STORE, (np.arange(20), np.arange(20)))
        run_all(device)
        del kept
    assert races(device) == []
    assert {what for what, _ in device.detector._accesses} == {"device block", "host block"}


def test_ids_that_nobody_keeps_are_a_race() -> None:
    """B37: they are freed before the copy reads them."""
    device = new_device()
    device.copy(device.compute, 0, STORE, ((0,), (0,)))
    event = device.compute.record()
    with pytest.raises(RuntimeError, match="id table of transfer 0: the owner that dropped it"):
        event.synchronize()
    assert len(device.races) == 1


# Failures.


@pytest.mark.parametrize("pieces", [0, 1, 2, 3])
def test_a_copy_fails_after_some_of_its_pieces_and_the_stream_goes_on(pieces: int) -> None:
    device, host = pools()
    simulated = SimulatedDevice(device, host, in_order)
    simulated.failing[0] = pieces
    first = simulated.copy(simulated.compute, 0, STORE, ((0, 1, 2), (0, 1, 2)))
    failed = simulated.compute.record()
    second = simulated.copy(simulated.compute, 1, STORE, ((5,), (5,)))
    good = simulated.compute.record()
    good.synchronize()
    assert host[:6, 0].tolist() == [*range(1, pieces + 1), *range(100 + pieces, 105), 6], (first, second)
    for ask in (failed.done, failed.synchronize):
        with pytest.raises(RuntimeError, match=rf"store 0 .* made to fail after {pieces} pieces"):
            ask()
    assert races(simulated) == []


def test_a_lost_device_touches_nothing_and_says_so() -> None:
    device, host = pools()
    simulated = SimulatedDevice(device, host, in_order)
    kept = simulated.copy(simulated.compute, 0, STORE, ((0, 1, 2), (0, 1, 2)))
    event = simulated.compute.record()
    simulated.step()
    simulated.lose("fell off the bus")
    before = host.copy()
    for ask in (
        event.done,
        event.synchronize,
        simulated.compute.record,
        simulated.synchronize,
        lambda: simulated.compute.wait(event),
        lambda: simulated.launch("step 1"),
        lambda: simulated.copy(simulated.compute, 0, STORE, ((0,), (0,))),
    ):
        with pytest.raises(DeviceLost, match="fell off the bus"):
            ask()
    assert not simulated.step()
    assert (host == before).all(), kept
    simulated.close()


def test_a_device_that_is_lost_while_somebody_waits_ends_the_wait() -> None:
    device = new_device()
    device.launch("step 1", action=lambda: device.lose("fell off the bus"))
    with pytest.raises(DeviceLost, match="fell off the bus"):
        device.synchronize()


def test_a_submitter_that_dies_says_why_and_runs_no_more() -> None:
    device, told, ran = new_device(), [], []

    def broken() -> None:
        raise OSError("no memory")

    submitter = device.new_submitter("own", told.append)
    for call in (lambda: ran.append(1), broken, lambda: ran.append(2)):
        submitter.put(call)
    submitter.flush()
    submitter.put(lambda: ran.append(3))
    submitter.close()
    assert (ran, told) == ([1], ["submitter 'own' died of OSError: no memory"])


# The engine that a seed drives.


def some_jobs(random: Random, number: int) -> list[TransferJob]:
    """Jobs that touch no block in common."""
    order = random.sample(range(BLOCKS), BLOCKS)
    size = BLOCKS // number
    parts = [tuple(order[size * one : size * (one + 1)]) for one in range(number)]
    return [TransferJob(one, random.choice(list(Direction)), part, part) for one, part in enumerate(parts)]


@given(seed=seeds, number=st.integers(1, BLOCKS), polls=st.integers(0, 5))
def test_every_transfer_ends_within_a_bounded_number_of_polls(seed: int, number: int, polls: int) -> None:
    """Progress (S9): polling alone ends a transfer within a known number of polls."""
    engine = SimulatedCopyEngine(*pools(), seed)
    for _ in range(polls):
        engine.poll()
    jobs = some_jobs(Random(seed), number)
    for job in jobs:
        engine.simulated.launch("a step")
        engine.submit(job)
    results = [result for _ in range(LONGEST_POLLS) for result in engine.poll()]
    assert sorted(result.transfer for result in results) == [job.transfer for job in jobs]
    assert all(result.good for result in results)


def test_transfers_end_at_different_polls_and_in_different_orders() -> None:
    """Otherwise it would simulate little. Among the seeds are all orders of three transfers, and all
    polls."""
    orders, when = set(), set()
    for seed in range(200):
        engine = SimulatedCopyEngine(*pools(), seed)
        for transfer, direction in enumerate((STORE, LOAD, STORE)):
            engine.submit(TransferJob(transfer, direction, (transfer,), (transfer,)))
        ends = [[result.transfer for result in engine.poll()] for _ in range(LONGEST_POLLS)]
        orders.add(tuple(transfer for end in ends for transfer in end))
        when.add(next(place for place, end in enumerate(ends) if 1 in end))
    assert orders == {(0, 1, 2), (0, 2, 1), (1, 0, 2)}
    assert when == set(range(LONGEST_POLLS))


@pytest.mark.parametrize("call", ["poll", "wait", "drain", "hold_compute", "close"])
def test_a_race_does_not_pass_silently(call: str) -> None:
    """Order of copies (S12): the call that lets the device go on raises, and so does each later one."""
    engine = SimulatedCopyEngine(*pools(), seed=1)
    engine.submit(TransferJob(1, STORE, (1,), (2,)))
    engine.submit(TransferJob(2, LOAD, (3,), (2,)))
    arguments = [[1, 2]] if call in ("wait", "hold_compute") else []

    def go_on() -> None:
        for _ in range(LONGEST_POLLS):
            getattr(engine, call)(*arguments)
            engine.simulated.synchronize()

    with pytest.raises(
        PropertyBroken,
        match=r"^order of copies \(S12\): host block 2: (store|load) . .*, and nothing orders the two",
    ):
        go_on()
    assert [race.location for race in engine.races] == [("host block", 2)]
    with pytest.raises(PropertyBroken, match=r"order of copies \(S12\)"):
        engine.poll()


PROGRAM = """
from random import Random
from test_simulated_device import BLOCKS, SimulatedCopyEngine, TransferJob, pools, some_jobs
device, host = pools()
engine, random = SimulatedCopyEngine(device, host, 5), Random(5)
for job in some_jobs(random, 8):
    engine.submit(job)
    engine.simulated.launch("a step")
    print(engine.poll(), bytes(host[:, 0]).hex())
engine.wait({7, 3, 5})
print(engine.poll(), engine.poll(), engine.simulated.backlog)
"""


def test_equal_calls_on_equal_seeds_are_equal_in_every_process() -> None:
    """Determinism (S11): results, their order, and what memory holds meanwhile."""
    told = set()
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        told.add(subprocess.check_output([sys.executable, "-c", PROGRAM], env=environment, text=True))
    assert len(told) == 1
    assert "CopyResult" in told.pop()
