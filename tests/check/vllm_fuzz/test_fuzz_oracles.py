"""The oracles of `kvsm vllm-fuzz` that need no vLLM: known blocks, lost copies and stored bytes.

`tests/in_vllm` has the others, and shows that connectors keep what these oracles demand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvsm import OffloadConfig, Offloader
from kvsm.check.vllm_fuzz.known_blocks import KnownBlocks
from kvsm.check.vllm_fuzz.lost_copies import STEPS_UNTIL_TIMEOUT, LostCopies
from kvsm.check.vllm_fuzz.shape import BLOCK_TOKENS, STATES
from kvsm.check.vllm_fuzz.stored_bytes import StoredBytes
from kvsm.check.vllm_fuzz.word_model import Words
from kvsm.core.plan import TransferJob
from kvsm.errors import PropertyBroken
from kvsm.events import Direction
from kvsm.properties import Property
from kvsm.vllm.deadlines import TransferDeadlines

# Known blocks.


def test_an_answer_shows_the_blocks_that_it_serves() -> None:
    known = KnownBlocks([0])
    assert known.longest(0, 5) == 0
    known.answered(0, 3)
    assert [known.longest(0, most) for most in (0, 2, 3, 5)] == [0, 2, 3, 3]
    assert [known.longest(computed, 5) for computed in (1, 3, 4)] == [3, 3, 4]


def test_an_answer_shows_nothing_of_what_the_device_had() -> None:
    known = KnownBlocks([0])
    known.answered(2, 2)
    known.answered(2, 4)
    assert known.longest(0, 5) == 0
    assert known.longest(2, 5) == 4
    known.add(0, 0)
    assert known.longest(0, 5) == 1
    known.add(0, 1)
    assert known.longest(0, 5) == 4


def test_a_hit_needs_all_groups_and_of_a_window_its_last_blocks() -> None:
    """The second group reads one block back, the third the state of the last token."""
    known = KnownBlocks([0, BLOCK_TOKENS + 1, STATES])
    for block in range(4):
        known.add(0, block)
    assert known.longest(0, 4) == 0
    known.add(1, 2)
    assert known.longest(0, 4) == 0
    known.add(2, 2)
    assert known.longest(0, 4) == 3
    assert known.longest(2, 4) == 3
    assert known.longest(3, 4) == 3


def test_an_answer_ends_with_a_chunk() -> None:
    known = KnownBlocks([0], chunk=2)
    known.answered(0, 5)
    assert [known.longest(0, most) for most in (1, 2, 3, 4, 5)] == [0, 2, 2, 4, 4]
    assert [known.longest(computed, 4) for computed in (1, 2, 3)] == [4, 4, 3]


def test_of_a_drafter_the_next_chunk_may_be_required() -> None:
    known = KnownBlocks([0, 0, STATES], drops=(1, 2))
    known.answered(0, 2)
    assert known.longest(0, 5) == 0
    known.add(1, 2)
    assert known.longest(0, 5) == 2  # a state is that of its own end
    known.served(3)
    assert [known.longest(0, most) for most in (3, 4, 5)] == [2, 3, 3]


def test_what_a_served_hit_needs_is_known_of_each_group() -> None:
    known = KnownBlocks([0])
    known.served(2)
    assert known.longest(0, 5) == 2


# Lost copies.


class Jobs:
    """A rank with these jobs."""

    def __init__(self, *jobs: TransferJob) -> None:
        self.jobs, self.ticks = list(jobs), 0

    def at_risk(self) -> Iterator[tuple[int, TransferJob]]:
        yield from enumerate(self.jobs)

    def in_flight(self) -> Iterator[TransferJob]:
        yield from self.jobs

    def time_passed(self) -> None:
        self.ticks += 1


def load(transfer: int, devices: tuple[int, ...], hosts: tuple[int, ...]) -> TransferJob:
    return TransferJob(transfer, Direction.LOAD, devices, hosts)


def store(transfer: int, devices: tuple[int, ...], hosts: tuple[int, ...]) -> TransferJob:
    return TransferJob(transfer, Direction.STORE, devices, hosts)


def copies(*ranks: Jobs, spare: int = 2, chunk: int = 1) -> LostCopies:
    shape: Any = SimpleNamespace(spare_blocks=spare, extra={"blocks_per_chunk": chunk})
    one = LostCopies(shape)
    for rank in ranks:
        one.watch(rank)
    one.timeout_s = 32.0
    return one


def test_time_passes_only_after_a_loss() -> None:
    rank = Jobs()
    one = copies(rank)
    one.settle()
    assert (one.clock(), rank.ticks) == (0.0, 0)
    assert one.lose(store(1, (1,), (1,)))
    one.settle()
    assert (one.clock(), rank.ticks) == (32.0 / STEPS_UNTIL_TIMEOUT, 1)


def test_a_copy_is_overdue_when_the_limit_has_passed_and_not_without_a_limit() -> None:
    one = copies(Jobs(store(1, (1,), (1,))))
    assert not one.is_overdue(0.0)
    assert one.time_out()
    assert one.is_overdue(0.0)
    assert not one.is_overdue(0.5)
    one.timeout_s = 0.0
    assert not one.is_overdue(0.0)
    assert not one.time_out()


def test_no_limit_passes_while_a_copy_is_unknown_or_none_is_in_flight() -> None:
    assert not copies(Jobs()).time_out()
    one = copies(Jobs(store(1, (1,), (1,))))
    one.scheduled()
    assert not one.time_out()
    one.executing()
    assert one.time_out()


def test_a_copy_may_wait_since_the_step_before_was_scheduled() -> None:
    one = copies(Jobs(store(1, (1,), (1,))))
    for _ in range(2):
        one.scheduled()
        one.executing()
        one.time_out()
    assert one.began == 0.0
    one.scheduled()
    one.executing()
    assert one.began == 32.0


def test_no_more_device_blocks_are_lost_than_the_largest_request_can_spare() -> None:
    """A lost store costs none, and block 0 is no block of a request."""
    one = copies(Jobs(load(1, (4, 0), (1, 2))), spare=2)
    assert one.device_blocks() == {4}
    assert one.lose(load(2, (5,), (3,)))
    assert one.lose(load(2, (4, 5), (3, 4)))
    assert not one.lose(load(3, (5, 6), (4, 5)))
    assert one.lose(store(4, (7, 8, 9), (5, 6, 7)))
    assert one.lost == 3
    assert not copies(Jobs(load(1, (4, 5, 6), (1, 2, 3)))).time_out()
    assert copies(Jobs(load(1, (4,), (1,))), spare=0).lose(store(2, (5,), (2,)))


@pytest.mark.parametrize(("chunk", "blocks"), [(1, 3), (2, 4)])
def test_the_slots_of_copies_at_risk_may_be_retired(chunk: int, blocks: int) -> None:
    """Each once, though both ranks have the copies; of a chunk all places."""
    jobs = (store(1, (1, 2), (2, 3)), load(2, (3,), (4,)))
    assert copies(Jobs(*jobs), Jobs(*jobs), chunk=chunk).num_host_blocks() == blocks
    assert copies(Jobs(*jobs), Jobs(jobs[0]), chunk=chunk).num_host_blocks() == blocks


@pytest.mark.parametrize("several", [True, False])
def test_the_deadlines_of_a_connector_and_of_its_children_read_the_clock(several: bool) -> None:
    parts = [SimpleNamespace(_side=SimpleNamespace(deadlines=TransferDeadlines(3.0, 2)))]
    if several:
        parts = [*parts, SimpleNamespace(), *parts]
    one = copies()
    one.timeout_s = 0.0
    one.give_clock_to(SimpleNamespace(_connectors=parts) if several else parts[0])
    deadlines = parts[0]._side.deadlines
    assert deadlines.clock == one.clock
    assert one.timeout_s == deadlines.timeout_s > 0


def test_other_ranks_proceed_while_one_waits() -> None:
    rank = Jobs()
    one, seen = copies(rank), list[float]()
    one.while_waiting = lambda: seen.append(one.clock())
    one.wait()
    assert (seen, one.clock(), rank.ticks) == ([0.0], 2.0, 1)


# Stored bytes.

HASHES = [b"first" + bytes(3), b"second" + bytes(2)]
RIGHT = {0: [np.arange(4, dtype=np.uint64)], 1: [np.arange(n, n + 4, dtype=np.uint64) for n in (10, 20)]}
"""Block -> its versions."""


class Rank:
    """A rank that adds its number to each word."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.words: dict[int, Words | None] = {}

    def host_words(self, slot: int) -> Words | None:
        return self.words[slot]

    def mixed(self, words: Words) -> Words:
        return words + np.uint64(self.number)


def stored(ranks: Sequence[Rank], chunk: int = 1, connectors: int = 1) -> StoredBytes:
    """Slots 0 and 1 hold the blocks of request `r`, the second one in its other version."""
    core = Offloader(OffloadConfig(host_blocks=2, device_blocks=4, blocks_per_chunk=chunk))
    keys = [hash + bytes(4) for hash in HASHES]
    job = core.prepare_store("r", keys, list(range(2 * chunk))).job
    assert job is not None
    core.submit([job.transfer])
    core.report(job.transfer, 0, True)
    for rank in ranks:
        rank.words = {0: rank.mixed(RIGHT[0][0]), 1: rank.mixed(RIGHT[1][1])}
    part = SimpleNamespace(_side=SimpleNamespace(_core=SimpleNamespace(offloader=core)))
    several = SimpleNamespace(_connectors=[part] * connectors)
    return StoredBytes(several if connectors > 1 else part, ranks, groups=1)


def check(one: StoredBytes, hashes: Sequence[bytes] = HASHES) -> None:
    runner = SimpleNamespace(block_versions=lambda _group, block, _truth: RIGHT[block])
    request = SimpleNamespace(block_hashes=hashes)
    one.check({"r": request}, {"r": None}, runner)  # type: ignore[dict-item]


def test_each_version_of_a_block_is_right_and_no_other_words_are() -> None:
    ranks = [Rank(0), Rank(1)]
    one = stored(ranks)
    check(one)
    for slot in (0, 1):
        for rank in ranks:
            kept = rank.words[slot]
            rank.words[slot] = np.zeros(4, dtype=np.uint64)
            message = f"rank {rank.number}, host block {slot} can be read, and does not hold block {slot} of "
            with pytest.raises(PropertyBroken, match=message) as caught:
                check(one)
            assert caught.value.property is Property.CORRECT_BYTES
            rank.words[slot] = kept
    ranks[1].words[0] = None  # its pool cannot be read
    check(one)


def test_a_block_of_no_remembered_request_is_not_compared() -> None:
    rank = Rank(0)
    one = stored([rank])
    rank.words[1] = np.zeros(4, dtype=np.uint64)
    check(one, HASHES[:1])


def test_the_only_core_among_several_connectors_is_checked() -> None:
    rank = Rank(0)
    part = stored([rank])._core
    side = SimpleNamespace(_side=SimpleNamespace(_core=SimpleNamespace(offloader=part)))
    rank.words[0] = np.zeros(4, dtype=np.uint64)
    with pytest.raises(PropertyBroken):
        check(StoredBytes(SimpleNamespace(_connectors=[SimpleNamespace(), side]), [rank], groups=1))


@pytest.mark.parametrize(("chunk", "connectors"), [(2, 1), (1, 2)])
def test_engines_whose_keys_stand_for_something_else_are_not_checked(chunk: int, connectors: int) -> None:
    rank = Rank(0)
    one = stored([rank], chunk, connectors)
    rank.words = dict.fromkeys(range(2), np.zeros(4, dtype=np.uint64))
    check(one)
