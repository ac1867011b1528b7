"""The engine of streams on the simulated device: right in every interleaving, and wrong without each of its
orders.

Mutants are engines and planners with one order taken out; three of them are exhibits of `specs/museum/` (B02,
B03, B37). Each is reported in every schedule of its scenario, also in those in which the bytes came out right
by luck.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from random import Random
from typing import Any
from weakref import ref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from museum import EXHIBITS
from schedules import Choose, every_schedule

from examples import examples
from kvsm.copies.copy_engine import CopyResult
from kvsm.copies.simulated import SimulatedDevice, SimulatedEvent
from kvsm.copies.streams import StreamCopyEngine
from kvsm.core.plan import TransferJob
from kvsm.errors import DeviceLost, TransferFailed
from kvsm.events import Direction
from kvsm.ids import pack

STORE, LOAD = Direction.STORE, Direction.LOAD
BLOCKS = 24
OUT_OF_RANGE = BLOCKS


def job(transfer: int, direction: Direction, device_blocks: list[int], host_blocks: list[int]) -> TransferJob:
    return TransferJob(transfer, direction, pack(device_blocks), pack(host_blocks))


class Rank:
    """An engine and its memory. Device block b holds b + 1 at first, host block h holds 100 + h."""

    def __init__(
        self,
        choose: Choose = lambda _options: 0,
        *,
        blocks: int = BLOCKS,
        pieces: int = 3,
        make_device: type[SimulatedDevice] = SimulatedDevice,
        make_engine: type[StreamCopyEngine] = StreamCopyEngine,
    ) -> None:
        self.device_pool = np.arange(1, blocks + 1, dtype=np.uint8)[:, None].repeat(2, axis=1)
        self.host_pool = np.arange(100, 100 + blocks, dtype=np.uint8)[:, None].repeat(2, axis=1)
        self.device = make_device(self.device_pool, self.host_pool, choose, pieces)
        self.engine = make_engine(self.device)
        self.seen: list[tuple[str, int]] = []
        """What kernels have read, with their names."""

    def submit(self, transfer: int, direction: Direction, device: list[int], host: list[int]) -> None:
        self.engine.submit(job(transfer, direction, device, host))

    def compute_writes(self, name: str, block: int, value: int) -> None:
        self.device.launch(name, writes=[block], action=lambda: self.device_pool[block].fill(value))

    def compute_reads(self, name: str, block: int) -> None:
        def note() -> None:
            self.seen.append((name, int(self.device_pool[block, 0])))

        self.device.launch(name, reads=[block], action=note)

    def finish(self) -> list[CopyResult]:
        """Let everything end."""
        self.engine.drain()
        self.device.synchronize()
        return self.engine.poll()

    def races(self) -> set[tuple[str, str]]:
        """The two operations of each race, in alphabetical order."""
        return {tuple(sorted((race.first, race.second))) for race in self.device.races}  # type: ignore[misc]


# Any jobs, any kernels, any interleaving.


class Planner(Rank):
    """Plans randomly what the promises allow, and knows what memory must hold when all is done.

    A block is touched again only when its transfer was polled, or held before later compute.
    """

    def __init__(self, random: Random) -> None:
        super().__init__(random.randrange)
        self.random = random
        self.values: dict[tuple[str, int], int | None] = {}
        """What a place will hold when all queued work is done; None if unknown."""
        for block in range(BLOCKS):
            self.values["device", block], self.values["host", block] = block + 1, 100 + block
        self.live: dict[int, tuple[Direction, list[int], list[int]]] = {}
        self.reading: Counter[tuple[str, int]] = Counter()
        self.writing: set[tuple[str, int]] = set()
        self.results: list[CopyResult] = []
        self.submitted = self.launched = 0
        self.is_lost = self.is_over = False
        """Whether the device is gone, and whether the engine refuses transfers, for that or another
        reason."""
        self.expected: list[tuple[str, int]] = []

    def submit(self, transfer: int, direction: Direction, device: list[int], host: list[int]) -> None:
        """Let the caller or the submitter queue the copy."""
        self.device.claims = self.random.random() < 0.5
        super().submit(transfer, direction, device, host)

    def places(self, what: str, to_write: bool) -> list[int]:
        blocks = [block for block in range(BLOCKS) if (what, block) not in self.writing]
        return [block for block in blocks if not (to_write and self.reading[what, block])]

    def transfer(self) -> None:
        """Plan one, unless the engine refuses transfers."""
        direction = self.random.choice([STORE, LOAD])
        device = self.places("device", direction is LOAD)
        host = self.places("host", direction is STORE)
        number = self.random.randint(0, min(len(device), len(host)))
        device, host = self.random.sample(device, number), self.random.sample(host, number)
        try:
            self.submit(self.submitted, direction, device, host)
        except TransferFailed:
            assert self.is_over
            return
        sources, targets = [("device", one) for one in device], [("host", one) for one in host]
        if direction is LOAD:
            sources, targets = targets, sources
        for source, target in zip(sources, targets):
            self.values[target] = self.values[source]
        self.reading.update(sources)
        self.writing.update(targets)
        self.live[self.submitted] = direction, device, host
        self.submitted += 1

    def kernel(self) -> None:
        name, writes = f"step {self.launched}", self.random.random() < 0.5
        self.launched += 1
        blocks = self.places("device", writes)
        if not blocks or self.is_lost:
            return
        block = self.random.choice(blocks)
        if writes:
            self.values["device", block] = self.launched % 256
            self.compute_writes(name, block, self.launched % 256)
        elif (value := self.values["device", block]) is not None:
            self.compute_reads(name, block)
            self.expected.append((name, value))

    def hold(self) -> None:
        held = [transfer for transfer in self.live if self.random.random() < 0.5]
        self.engine.hold_compute(held)
        for transfer in held:
            self.release(transfer, good=True)

    def poll(self) -> None:
        for result in self.engine.poll():
            self.results.append(result)
            self.release(result.transfer, result.good)

    def wait(self) -> None:
        self.engine.wait(
            self.random.sample(range(self.submitted + 1), self.random.randint(0, self.submitted))
        )

    def let_go_on(self) -> None:
        for _ in range(self.random.randint(0, 8)):
            self.device.step()

    def release(self, transfer: int, good: bool) -> None:
        if transfer not in self.live:
            return
        direction, device, host = self.live.pop(transfer)
        sources, targets = [("device", one) for one in device], [("host", one) for one in host]
        if direction is LOAD:
            sources, targets = targets, sources
        self.reading.subtract(sources)
        self.writing.difference_update(targets)
        if not good:
            self.values.update(dict.fromkeys(targets))

    def check(self) -> None:
        """Order of copies (S12), correct bytes (S15): no race, and kernels and memory have the right
        bytes."""
        assert self.races() == set()
        assert self.seen == self.expected
        for (what, block), value in self.values.items():
            pool = self.device_pool if what == "device" else self.host_pool
            assert value is None or pool[block].tolist() == [value, value], (what, block)

    def check_ends(self) -> None:
        """Progress (S9): each transfer has ended exactly once."""
        assert sorted(result.transfer for result in self.results) == list(range(self.submitted))


commands = st.lists(
    st.sampled_from(["transfer", "kernel", "kernel", "hold", "poll", "wait", "let_go_on"]), max_size=30
)


@settings(max_examples=examples(250))
@given(commands=commands, random=st.randoms(use_true_random=False))
def test_no_interleaving_has_a_race_or_a_wrong_byte(commands: list[str], random: Random) -> None:
    """Order of copies (S12), correct bytes (S15), progress (S9)."""
    planner = Planner(random)
    for command in commands:
        getattr(planner, command)()
    planner.engine.close()
    planner.device.synchronize()
    planner.poll()
    planner.check()
    planner.check_ends()
    assert all(result.good for result in planner.results)


class Chaos(Planner):
    """A planner whose copies, submitters and device may fail."""

    def __init__(self, random: Random) -> None:
        super().__init__(random)
        self.device.failing.update(
            {copy: random.randint(0, 3) for copy in range(30) if random.random() < 0.3}
        )
        self.refused: set[int] = set()

    def impossible(self) -> None:
        """An impossible job, on blocks that live transfers may use."""
        device, host = self.random.choice([([0], [OUT_OF_RANGE]), ([0, 1], [2]), ([3, 3], [4, 4])])
        try:
            self.submit(self.submitted, self.random.choice([STORE, LOAD]), device, host)
        except TransferFailed:
            assert self.is_over
            return
        self.refused.add(self.submitted)
        self.submitted += 1

    def lose(self) -> None:
        self.device.lose("fell off the bus")
        self.is_lost = self.is_over = True

    def die(self) -> None:
        self.random.choice(self.device.submitters).die("no memory")
        self.is_over = True

    def close(self) -> None:
        self.engine.close()
        self.is_over = True


disasters = st.lists(
    st.sampled_from(["transfer", "transfer", "impossible", "kernel", "poll", "wait", "let_go_on"]),
    max_size=30,
)


@settings(max_examples=examples(80))
@given(
    before=disasters,
    disaster=st.sampled_from(["lose", "die", "close", "poll"]),
    after=disasters,
    random=st.randoms(use_true_random=False),
)
def test_every_transfer_ends_exactly_once_whatever_fails(
    before: list[str], disaster: str, after: list[str], random: Random
) -> None:
    """Progress (S9), failure is not success (S6), order of copies (S12): good transfers copied the right
    bytes, and bad ones write nothing after their results."""
    chaos = Chaos(random)
    for command in [*before, disaster, *after]:
        getattr(chaos, command)()
    chaos.engine.close()
    chaos.poll()
    chaos.check_ends()
    ends = {result.transfer: result for result in chaos.results}
    assert not any(ends[transfer].good for transfer in chaos.refused)
    assert all(result.good is (result.error == "") for result in chaos.results)
    assert chaos.races() == set()
    if not chaos.is_lost:
        chaos.device.synchronize()
        chaos.check()


# Every schedule of a few calls.


def store_and_load(rank: Rank) -> None:
    """A store behind the step that writes its block; a load behind the step that reads its target."""
    rank.compute_writes("step 1", 0, 50)
    rank.submit(1, STORE, [0], [0])
    rank.compute_reads("step 2", 1)
    rank.submit(2, LOAD, [1], [1])


def right(rank: Rank) -> bool:
    """Whether the result of `store_and_load` is right."""
    memory = int(rank.host_pool[0, 0]), int(rank.device_pool[1, 0])
    return (memory, rank.seen) == ((50, 101), [("step 2", 2)])


@pytest.mark.parametrize(("claims", "schedules"), [(False, 1722), (True, 56)])
def test_no_schedule_of_a_store_and_a_load_has_a_race(claims: bool, schedules: int) -> None:
    """Order of copies (S12), correct bytes (S15), progress (S9). claims: the caller queues both copies."""

    def run(choose: Choose) -> None:
        rank = Rank(choose, blocks=2)
        rank.device.claims = claims
        store_and_load(rank)
        assert {(end.transfer, end.good, end.bytes) for end in rank.finish()} == {(1, True, 2), (2, True, 2)}
        assert right(rank)
        assert rank.races() == set()

    assert every_schedule(run) == schedules


@pytest.mark.slow
def test_no_schedule_of_two_copies_of_two_pieces_and_two_kernels_has_a_race() -> None:
    """Order of copies (S12), correct bytes (S15): kernels between the copies touch other blocks of the same
    pools."""

    def run(choose: Choose) -> None:
        rank = Rank(choose, blocks=4, pieces=2)
        rank.compute_writes("step 1", 0, 50)
        rank.submit(1, STORE, [0, 3], [0, 2])
        rank.compute_reads("step 2", 1)
        rank.submit(2, LOAD, [1], [1])
        rank.finish()
        assert right(rank)
        assert rank.host_pool[2, 0] == 4
        assert rank.races() == set()

    assert every_schedule(run) == 7812


def test_no_schedule_of_a_round_trip_has_a_race() -> None:
    """Correct bytes (S15), order of copies (S12): a block is stored, reported, loaded elsewhere, held and
    read; then its slot is stored into again."""

    def run(choose: Choose) -> None:
        rank = Rank(choose, blocks=2)
        rank.compute_writes("step 1", 0, 50)
        rank.submit(1, STORE, [0], [0])
        rank.engine.wait([1])
        rank.submit(2, LOAD, [1], [0])
        rank.engine.hold_compute([2])
        rank.compute_writes("step 2", 0, 60)
        rank.compute_reads("step 3", 1)
        rank.engine.wait([2])
        rank.submit(3, STORE, [0], [0])
        assert {end.transfer: end.good for end in rank.finish()} == {1: True, 2: True, 3: True}
        assert rank.seen == [("step 3", 50)]
        assert rank.host_pool[0, 0] == 60
        assert rank.races() == set()

    assert every_schedule(run) == 24


# With one order taken out.


STEP_1_WRITES = "kernel 'step 1' on stream 'compute' writes"
STEP_2_READS = "kernel 'step 2' on stream 'compute' reads"


def store_behind_compute(choose: Choose) -> Rank:
    rank = Rank(choose, blocks=2)
    rank.compute_writes("step 1", 0, 50)
    rank.submit(1, STORE, [0], [0])
    return rank


def load_behind_compute(choose: Choose) -> Rank:
    rank = Rank(choose, blocks=2)
    rank.compute_reads("step 2", 1)
    rank.submit(2, LOAD, [1], [1])
    return rank


class ReusesItsTable(SimulatedDevice):
    """B37: one table of ids for all copies, filled again for each."""

    table = None

    def copy(self, stream: Any, transfer: int, direction: Direction, pairs: Any) -> object:
        device_blocks, host_blocks = pairs
        if self.table is None:
            self.table = np.zeros((2, 4), np.int64)
        ids = self.table[:, : len(host_blocks)]
        ids[0], ids[1] = device_blocks, host_blocks
        return super().copy(stream, transfer, direction, (ids[0], ids[1]))


def store_and_load_by_one_table(choose: Choose) -> Rank:
    rank = Rank(choose, blocks=2, make_device=ReusesItsTable)
    store_and_load(rank)
    return rank


def loads_before_the_report(choose: Choose) -> Rank:
    """A planner that counts a store as done when it has planned it."""
    rank = Rank(choose, blocks=2)
    rank.submit(1, STORE, [0], [1])
    rank.compute_reads("step 2", 1)
    rank.submit(2, LOAD, [1], [1])
    return rank


def computes_before_the_report(choose: Choose) -> Rank:
    """A planner that gives a block away while its store still reads it."""
    rank = Rank(choose, blocks=2)
    rank.submit(1, STORE, [0], [0])
    rank.compute_writes("step 1", 0, 50)
    return rank


STORE_READS, STORE_WRITES = (f"store 1 on stream 'kvsm store' {does}" for does in ("reads", "writes"))


@pytest.mark.parametrize(
    ("run_calls", "bug", "race"),
    [
        (store_behind_compute, "B02", (STORE_READS, STEP_1_WRITES)),
        (load_behind_compute, "B03", ("load 2 on stream 'kvsm load' writes", STEP_2_READS)),
        (store_behind_compute, "B37", (STORE_READS, "the owner that dropped it frees it")),
        (
            store_and_load_by_one_table,
            "",
            (
                "submitter 'kvsm load', for load 2, writes",
                "submitter 'kvsm store', for store 1, writes",
            ),
        ),
        (loads_before_the_report, "", (STORE_WRITES, "load 2 on stream 'kvsm load' reads")),
        (computes_before_the_report, "", (STORE_READS, STEP_1_WRITES)),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_every_schedule_without_one_of_the_orders_is_found_out(
    run_calls: Callable[[Choose], Rank], bug: str, race: tuple[str, str]
) -> None:
    """Order of copies (S12): both operations are named, and memory differs between schedules, which is the
    harm. bug: an exhibit that removes the order; other scenarios never had one."""
    memories = set()

    def run(choose: Choose) -> None:
        rank = run_calls(choose)
        rank.finish()
        assert tuple(sorted(race)) in rank.races()
        memories.add((rank.device_pool.tobytes(), rank.host_pool.tobytes(), tuple(rank.seen)))

    with EXHIBITS[bug].put_back() if bug else nullcontext():
        assert every_schedule(run) > len(memories)
    # A table that is given back too early is wrong only when somebody else has written to it.
    assert len(memories) > 1 or bug == "B37", "no schedule went wrong"


@pytest.mark.parametrize("held", [True, False])
def test_compute_that_is_held_sees_what_was_loaded(held: bool) -> None:
    """Order of copies (S12): without it every schedule has a race, and some read old bytes."""
    seen = set()

    def run(choose: Choose) -> None:
        rank = Rank(choose, blocks=2)
        rank.submit(1, LOAD, [1], [0])
        if held:
            rank.engine.hold_compute([1])
        rank.compute_reads("step 1", 1)
        rank.finish()
        seen.update(rank.seen)
        race = ("kernel 'step 1' on stream 'compute' reads", "load 1 on stream 'kvsm load' writes")
        assert rank.races() == (set() if held else {race})

    every_schedule(run)
    assert seen == ({("step 1", 100)} if held else {("step 1", 100), ("step 1", 2)})


def test_a_load_does_not_stand_behind_a_store_that_is_still_handed_over() -> None:
    """A request waits for a load, and handing over a large store takes many milliseconds."""
    rank = Rank()
    rank.submit(1, STORE, [0], [0])
    rank.submit(2, LOAD, [1], [1])
    stores, loads = rank.device.submitters
    while loads.backlog or len(rank.engine.poll()) == 0:
        rank.device.run(next(one for one in rank.device.steps() if one.source is not stores))
    assert stores.backlog == 1


def test_compute_is_held_by_named_live_transfers_alone() -> None:
    """Unknown, ended and refused transfers are ignored, and compute goes on after a failed copy."""
    rank = Rank()
    rank.device.failing[2] = 0
    rank.submit(1, STORE, [0], [0])
    rank.engine.drain()
    rank.submit(2, LOAD, [1], [1])
    rank.submit(3, LOAD, [OUT_OF_RANGE], [2])
    rank.engine.hold_compute([1, 2, 3, 77])
    rank.compute_reads("step 1", 1)
    assert {end.transfer: end.good for end in rank.finish()} == {1: True, 2: False, 3: False}
    assert rank.seen == [("step 1", 2)]


def test_a_store_starts_behind_the_mark_that_it_was_given_and_not_behind_later_compute() -> None:
    """Order of copies (S12): a planner marks the step that wrote the blocks, and the next step goes on."""
    rank = Rank()
    rank.compute_writes("step 1", 0, 50)
    mark = rank.engine.mark()
    rank.compute_writes("step 2", 1, 60)
    rank.engine.submit(job(1, STORE, [0], [0]), mark)
    rank.engine.drain()
    assert [end.good for end in rank.engine.poll()] == [True]
    assert (rank.host_pool[0, 0], rank.races()) == (50, set())


def test_a_mark_costs_no_wait_for_later_compute() -> None:
    """The next step never ends, because it waits for a device that does nothing."""
    rank, other = Rank(), Rank()
    mark = rank.engine.mark()
    rank.device.compute.wait(other.device.compute.record())
    rank.compute_writes("step 2", 1, 60)
    rank.engine.submit(job(1, STORE, [0], [0]), mark)
    rank.engine.drain()
    assert [end.good for end in rank.engine.poll()] == [True]


# Ends.


def test_a_copy_error_is_the_end_of_its_transfer_alone() -> None:
    """Progress (S9), failure is not success (S6): later transfers of the same stream are good."""
    rank = Rank()
    rank.device.failing[1] = 1
    rank.submit(1, STORE, [0, 1, 2], [0, 1, 2])
    rank.submit(2, STORE, [3], [3])
    bad, good = rank.finish()
    assert bad == CopyResult(
        1, STORE, False, "RuntimeError: store 1 on stream 'kvsm store' was made to fail after 1 pieces"
    )
    assert good == CopyResult(2, STORE, True, bytes=2)
    assert rank.host_pool[:4, 0].tolist() == [1, 101, 102, 4]


@pytest.mark.parametrize(
    ("device", "host", "error"),
    [
        ([0, OUT_OF_RANGE], [0, 1], "load 1: device block 24 is not in its pool of 24"),
        ([0, 0], [0, 1], "load 1: device block 0 is the target of two copies"),
        ([0, 1], [0], "load 1: 2 device blocks for 1 host blocks"),
    ],
)
def test_a_job_that_cannot_be_right_ends_as_bad_and_nothing_of_it_runs(
    device: list[int], host: list[int], error: str
) -> None:
    """Failure is not success (S6), progress (S9): `submit` looks at no blocks; the result says what was
    wrong."""
    rank = Rank()
    before = rank.device_pool.copy()
    rank.submit(1, LOAD, device, host)
    rank.submit(2, STORE, [0], [0])
    ends = sorted(rank.finish(), key=lambda end: end.transfer)
    assert ends == [CopyResult(1, LOAD, False, error), CopyResult(2, STORE, True, bytes=2)]
    assert (rank.device_pool == before).all()


class RefusesTheSecondHalf(SimulatedDevice):
    """Queues half of a copy, then has no room, as may happen to a driver. It keeps what the queued half
    reads."""

    def copy(self, stream: Any, transfer: int, direction: Direction, pairs: Any) -> object:
        half = len(pairs[0]) // 2
        self.kept = super().copy(stream, transfer, direction, tuple(ids[:half] for ids in pairs))
        raise MemoryError("no room for descriptors")


def test_a_copy_that_was_refused_halfway_ends_only_when_its_half_is_over() -> None:
    """Promise 4: nothing of a bad transfer is written after its result."""

    def run(choose: Choose) -> None:
        rank = Rank(choose, blocks=4, pieces=2, make_device=RefusesTheSecondHalf)
        rank.submit(1, LOAD, [0, 1, 2, 3], [0, 1, 2, 3])
        rank.engine.wait([1])
        assert rank.engine.poll() == [CopyResult(1, LOAD, False, "MemoryError: no room for descriptors")]
        rank.compute_writes("step 1", 0, 50)
        rank.device.synchronize()
        assert rank.device_pool[:, 0].tolist() == [50, 101, 3, 4]
        assert rank.races() == set()

    assert every_schedule(run) == 4


def steps_before_disaster(rank: Rank, steps: int) -> None:
    for transfer in range(4):
        rank.submit(transfer, (STORE, LOAD)[transfer % 2], [transfer], [transfer])
    for _ in range(steps):
        rank.device.step()


@pytest.mark.parametrize("steps", range(0, 24, 3))
def test_a_lost_device_ends_every_transfer_as_bad_and_refuses_new_ones(steps: int) -> None:
    """Progress (S9): transfers in flight, and transfers that the submitter still has."""
    rank = Rank(Random(steps).randrange)
    steps_before_disaster(rank, steps)
    ends = rank.engine.poll()
    rank.device.lose("fell off the bus")
    rank.engine.hold_compute([0, 1, 2, 3])
    with pytest.raises(TransferFailed, match="transfer 9: fell off the bus; make a new engine"):
        rank.submit(9, STORE, [9], [9])
    memory = rank.host_pool.copy()
    late = rank.engine.poll()
    rank.engine.close()
    assert sorted(end.transfer for end in (*ends, *late)) == [0, 1, 2, 3]
    assert all(end.good for end in ends)
    assert {(end.good, end.error) for end in late} <= {(False, "fell off the bus")}
    assert rank.engine.poll() == []
    assert (rank.host_pool == memory).all()


@pytest.mark.parametrize("steps", range(0, 24, 3))
def test_without_its_submitter_an_engine_ends_what_the_device_has_and_refuses_new_ones(steps: int) -> None:
    """Progress (S9): issued transfers, and transfers of the other direction, end as good; the rest ends as
    bad."""
    rank = Rank(Random(steps).randrange)
    steps_before_disaster(rank, steps)
    stores, loads = rank.device.submitters
    good = {1, 3, *[(0, 2)[number] for number in range(2 - stores.backlog)]}
    stores.die("no memory")
    with pytest.raises(TransferFailed, match="transfer 9: no memory; make a new engine"):
        rank.submit(9, STORE, [9], [9])
    rank.engine.close()
    ends = sorted(rank.engine.poll(), key=lambda end: end.transfer)
    assert loads.backlog == 0
    assert [(end.transfer, end.good) for end in ends] == [(one, one in good) for one in range(4)]
    assert {end.error for end in ends} <= {"", "no memory"}


class LosesItsSubmitter(SimulatedDevice):
    """Its submitter dies while it hands a copy over."""

    def copy(self, stream: Any, *arguments: Any) -> object:
        self.kept = super().copy(stream, *arguments)
        self.submitters[0].die("no memory")
        return self.kept


def test_a_transfer_that_was_given_up_while_it_was_issued_ends_once() -> None:
    """Progress (S9), stale reports change nothing (S5)."""
    rank = Rank(make_device=LosesItsSubmitter)
    rank.submit(1, STORE, [0], [0])
    assert rank.finish() == [CopyResult(1, STORE, False, "no memory")]
    while rank.device.step():
        pass
    assert rank.engine.poll() == []


class NotesTables(SimulatedDevice):
    """Records what it gives to the engine to keep, without keeping it."""

    def copy(self, stream: Any, *arguments: Any) -> object:
        kept = super().copy(stream, *arguments)
        self.noted = ref(kept)
        return kept


def test_what_the_device_reads_is_kept_until_the_copy_is_over_and_no_longer() -> None:
    """B37, and results that nobody has polled hold no tables."""
    rank = Rank(make_device=NotesTables)
    rank.submit(1, STORE, [0], [0])
    rank.device.step()
    rank.device.step()
    assert rank.device.noted() is not None
    rank.engine.drain()
    assert rank.device.noted() is None
    assert [end.good for end in rank.engine.poll()] == [True]


def test_closing_lets_every_transfer_end_and_takes_no_more() -> None:
    rank = Rank(Random(1).randrange)
    steps_before_disaster(rank, 5)
    rank.engine.close()
    rank.engine.close()
    with pytest.raises(TransferFailed, match="transfer 9: the engine is closed"):
        rank.submit(9, STORE, [9], [9])
    ends = rank.engine.poll()
    assert sorted((end.transfer, end.good) for end in ends) == [(one, True) for one in range(4)]
    assert rank.host_pool[[0, 2], 0].tolist() == [1, 3]
    assert rank.device_pool[[1, 3], 0].tolist() == [101, 103]


class NotesItsClose(SimulatedDevice):
    """Its close waits until the test lets it. closes: how often it was called."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.closes = 0
        self.is_closed = False

    def close(self) -> None:
        self.closes += 1
        self.begun.set()
        assert self.go_on.wait(30)
        super().close()
        self.is_closed = True


def test_who_closes_second_waits_until_the_first_has_closed_the_device() -> None:
    """Otherwise it would give back memory that is still registered with the device."""
    rank = Rank(make_device=NotesItsClose)
    at_return: list[bool] = []

    def close() -> None:
        rank.engine.close()
        at_return.append(rank.device.is_closed)

    closers = [threading.Thread(target=close, daemon=True) for _ in range(2)]
    closers[0].start()
    assert rank.device.begun.wait(30)
    closers[1].start()
    closers[1].join(0.05)
    rank.device.go_on.set()
    for closer in closers:
        closer.join(30)
    assert (at_return, rank.device.closes) == ([True, True], 1)


def test_a_close_that_was_interrupted_is_finished_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress (S9): after a Ctrl-C while it waited for copies."""

    def interrupted() -> None:
        raise KeyboardInterrupt

    rank = Rank(make_device=NotesItsClose)
    rank.device.go_on.set()
    rank.submit(1, STORE, [0], [0])
    with monkeypatch.context() as patch:
        patch.setattr(rank.engine, "drain", interrupted)
        with pytest.raises(KeyboardInterrupt):
            rank.engine.close()
    rank.engine.close()
    assert [end.good for end in rank.engine.poll()] == [True]
    assert (rank.device.is_closed, rank.device.closes) == (True, 1)


def test_a_transfer_is_live_until_its_result_was_polled() -> None:
    """Stale reports change nothing (S5): an id is not used again while its result could be taken for
    another transfer's."""
    rank = Rank()
    rank.submit(1, STORE, [0], [0])
    for meanwhile in (lambda: None, rank.engine.drain):
        meanwhile()
        with pytest.raises(TransferFailed, match="transfer 1 is live"):
            rank.submit(1, STORE, [1], [1])
    rank.engine.poll()
    rank.submit(1, STORE, [1], [1])
    assert [end.transfer for end in rank.finish()] == [1]


def test_a_time_that_cannot_be_told_costs_no_transfer_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress (S9): a device may be lost after a copy ended and before its time is read."""

    def lost(*_: object) -> float:
        raise DeviceLost("fell off the bus")

    monkeypatch.setattr(SimulatedEvent, "seconds_after", lost)
    rank = Rank()
    rank.submit(1, STORE, [0], [0])
    rank.engine.drain()
    assert rank.engine.poll() == [CopyResult(1, STORE, True, bytes=2)]
