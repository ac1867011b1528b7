"""A failed copy is a case of "failure is not success" (S6) only if a request could be served from it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvsm import OffloadConfig, Offloader
from kvsm.check.worlds.check_counts import taken_counts
from kvsm.check.worlds.failed_copies import count_failed_copies
from kvsm.core.log import MemoryLog
from kvsm.properties import Property

LOADS = "failed loads that a request waited for"
STORES = "requests whose match ended at a block whose store failed"
KEY, OTHER = b"key" + bytes(4), b"other" + bytes(4)


class Life:
    """A core with two slots and two workers, and its log."""

    def __init__(self) -> None:
        self.log = MemoryLog()
        self.core = Offloader(
            OffloadConfig(host_blocks=2, device_blocks=4, workers=2), self.log, clock_ns=lambda: 0
        )

    def store(self, good: bool, key: bytes = KEY) -> None:
        job = self.core.prepare_store("writer", [key], [0]).job
        assert job is not None
        self.core.submit([job.transfer])
        for worker in (0, 1):
            self.core.report(job.transfer, worker, good)

    def begin_load(self, request: str = "reader", block: int = 1, target: str = "") -> int:
        self.core.match(request, [KEY])
        job = self.core.prepare_load(request, [block], target=target)
        assert job is not None
        self.core.submit([job.transfer])
        return job.transfer

    def ask(self, key: bytes = KEY, *, is_admitted: bool = True) -> None:
        """Let a request ask for this block. It is admitted, or goes on waiting."""
        hits = self.core.match("reader", [key]).hits
        if is_admitted:
            self.core.admit("reader", 1, 0, hits, None if hits else key)

    def counted(self) -> dict[str, int]:
        count_failed_copies(self.log)
        return {
            case: times
            for (tried, case), times in taken_counts().items()
            if tried is Property.FAILURE_IS_NOT_SUCCESS
        }


@pytest.fixture
def life() -> Iterator[Life]:
    taken_counts()
    yield Life()
    taken_counts()


def test_a_failed_store_counts_when_its_block_is_asked_for(life: Life) -> None:
    life.store(good=False)
    life.ask(OTHER)
    life.ask(is_admitted=False)
    assert not life.counted()
    life.ask()
    assert life.counted() == {STORES: 1}


def test_a_block_that_was_stored_again_may_be_served(life: Life) -> None:
    life.store(good=False)
    life.store(good=True)
    life.ask()
    assert not life.counted()


def test_after_a_reset_no_store_is_left(life: Life) -> None:
    life.store(good=False)
    life.store(good=True, key=OTHER)
    life.core.reset()
    life.ask()
    assert not life.counted()


def test_a_failed_load_counts_once_for_the_request_that_waits(life: Life) -> None:
    life.store(good=True)
    load = life.begin_load()
    life.core.report(load, 0, False)
    life.core.report(load, 1, False)
    assert life.counted() == {LOADS: 1}


@pytest.mark.parametrize("end", ["finish", "preempt"])
def test_a_failed_load_that_no_request_waits_for_does_not_count(life: Life, end: str) -> None:
    life.store(good=True)
    load = life.begin_load()
    getattr(life.core, end)("reader")
    life.core.report(load, 0, False)
    life.core.report(load, 1, True)
    assert not life.counted()


@pytest.mark.parametrize("ends", [0, 1])
def test_the_end_of_another_request_does_not_matter(life: Life, ends: int) -> None:
    life.store(good=True)
    readers = "reader", "other"
    loads = [life.begin_load(request, block) for block, request in enumerate(readers, 1)]
    life.core.finish(readers[ends])
    load = loads[1 - ends]
    life.core.report(load, 0, False)
    life.core.report(load, 1, True)
    assert life.counted() == {LOADS: 1}


def test_a_failed_copy_to_another_tier_does_not_count(life: Life) -> None:
    """No request computes with what it brings."""
    life.store(good=True)
    load = life.begin_load(target="disk")
    life.core.report(load, 0, False)
    life.core.report(load, 1, True)
    assert not life.counted()


def test_a_lost_copy_has_failed(life: Life) -> None:
    life.store(good=True)
    life.core.lose(life.begin_load())
    assert life.counted() == {LOADS: 1}
