"""What an engine hands to the scheduler side: right, converted, or refused by name without a trace."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import reduce
from operator import or_
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_traffic import ACTS, FULL, SLIDING, Hand, drive

from examples import examples
from kvsm.check.worlds.small_engine import SmallEngine
from kvsm.check.worlds.small_pool import SmallPool
from kvsm.check.worlds.small_request import HASH_TOKENS, SmallRequest
from kvsm.core import native
from kvsm.core.ledger.snapshot import digest
from kvsm.core.plan import WorkerReport
from kvsm.errors import KvsmError, WrongArgument
from kvsm.events import KINDS


class _Meddler:
    """Stands between an engine and its scheduler side. It first passes a wrong argument, and when that was
    refused, the right ones in types of numpy."""

    CALLS = ("get_num_new_matched_tokens", "update_state_after_alloc", "request_finished")

    def __init__(self, engine: SmallEngine, random: Random) -> None:
        self._engine, self._scheduler, self._random = engine, engine.scheduler, random

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._scheduler, name)
        if name not in self.CALLS:
            return real

        def call(request: SmallRequest, *arguments: Any, **named: Any) -> Any:
            self._try_wrong(real, request, arguments, named)
            request.num_computed_tokens = np.int64(request.num_computed_tokens)  # type: ignore[assignment]
            return real(request, *map(_in_numpy, arguments), **named)

        return call

    def _try_wrong(
        self, real: Callable[..., Any], request: SmallRequest, arguments: tuple[Any, ...], named: Any
    ) -> None:
        wrong = list(arguments)
        place = self._random.randrange(len(wrong))
        wrong[place] = self._random.choice([None, "16", 1.5, -1, [["0"]], [[0.5]], [], ([0],) * 9, {0: [1]}])
        if wrong[place] == [] and "finish" in real.__name__:
            return  # It has no blocks.
        ledger = self._engine.core.ledger
        before = digest(ledger), dict(self._scheduler.state.tracked)
        with pytest.raises(KvsmError, match=re.escape(f"{real.__name__}(): ")):
            real(request, *wrong, **named)
        assert (digest(ledger), dict(self._scheduler.state.tracked)) == before


def _in_numpy(value: Any) -> Any:
    if isinstance(value, int):
        return np.int64(value)
    return [np.array(table, dtype=np.int32) for table in value]


@settings(max_examples=examples(20))
@given(ACTS)
def test_engine_that_counts_in_numpy_has_a_log_that_can_be_read(acts: list[int]) -> None:
    engine = SmallEngine((FULL, SLIDING), asynchronous=bool(len(acts) % 2))
    engine.scheduler = _Meddler(engine, Random(len(acts)))  # type: ignore[assignment]
    drive(engine, acts)
    written = msgspec.msgpack.encode(list(engine.log))
    assert msgspec.msgpack.decode(written, type=list[reduce(or_, KINDS)]) == list(engine.log)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("reports", "told"),
    [
        (None, "reports is None; it must be an iterable of WorkerReports"),
        ([(2, 0, True)], "reports[0] is a tuple; it must be a WorkerReport"),
        ([WorkerReport(2, 0, True), 5], "reports[1] is an int; it must be a WorkerReport"),
    ],
)
def test_no_report_is_taken_if_one_is_no_report(reports: Any, told: str) -> None:
    hand = Hand()
    events = len(hand.log)
    with pytest.raises(WrongArgument, match=re.escape(f"update_connector_output(): {told}")):
        hand.scheduler.update_connector_output(reports)
    assert len(hand.log) == events


NO_HASHES = ["hash", 5, None, bytearray(b"hash"), memoryview(b"hash")]


@pytest.mark.parametrize("value", NO_HASHES, ids=type)
def test_block_hash_that_is_not_bytes_is_refused_by_its_place(value: Any) -> None:
    hand, request = Hand(), SmallRequest("r", list(range(16)), 1)
    hand.store(SmallRequest("old", range(8)), [10, 11])
    request.block_hashes = [*request.block_hashes[:2], value, *request.block_hashes[3:]]  # type: ignore[misc]
    with pytest.raises(WrongArgument, match=r"\[2\] of request r is .*; a block hash is bytes"):
        hand.scheduler.get_num_new_matched_tokens(request, 0)


@pytest.mark.parametrize("value", NO_HASHES, ids=type)
def test_block_hash_that_a_match_did_not_look_at_is_refused_before_it_is_stored(value: Any) -> None:
    """Correct bytes (S15): a prompt that misses at once may have a wrong hash behind that."""
    hand, request = Hand(), SmallRequest("r", list(range(16)), 1)
    request.block_hashes = [*request.block_hashes[:2], value, *request.block_hashes[3:]]  # type: ignore[misc]
    hand.admit(request, [0, 1, 2, 3])
    hand.compute(request)
    events = len(hand.log)
    with pytest.raises(WrongArgument, match=r"\[2\] of request r is .*; a block hash is bytes"):
        hand.step(request)
    assert len(hand.log) == events


@given(held=st.integers(0, 25), wrong=st.integers(0, 25))
def test_both_bodies_look_at_the_same_hashes_of_a_prompt(held: int, wrong: int) -> None:
    """A wrong hash is refused by the same call, whichever body looks for the prompt."""

    def asked() -> object:
        hand, request = Hand(core={"host_blocks": 32}), SmallRequest("r", range(26 * HASH_TOKENS))
        hand.store(SmallRequest("old", range(held * HASH_TOKENS)), list(range(1, held + 1)))
        request.block_hashes[wrong] = "hash"  # type: ignore[call-overload]
        try:
            return hand.scheduler.get_num_new_matched_tokens(request, 0)
        except WrongArgument as error:
            return str(error)

    answer = asked()
    with native.without():
        assert asked() == answer


def test_load_into_more_blocks_than_the_request_has_is_refused() -> None:
    """A match holds what it counts (S7): fewer blocks would be loaded than the engine was promised."""
    hand = Hand()
    hand.store(SmallRequest("old", range(16)), [10, 11, 12, 13])
    request = SmallRequest("r", range(17))
    assert hand.scheduler.get_num_new_matched_tokens(request, 0) == (16, True)
    with pytest.raises(WrongArgument, match=re.escape("block_ids[0] has 3 blocks, and a hit of 16 tokens")):
        hand.scheduler.update_state_after_alloc(request, [[0, 1, 2]], 16)


def test_step_with_a_wrong_table_changes_nothing() -> None:
    hand, request = Hand(), SmallRequest("r", list(range(16)), 1)
    hand.admit(request, [0, 1])
    events = len(hand.log)
    for tables in ([["2"]], [[2.0]], [[2], [3]], {"r": 1}, 5):
        with pytest.raises(WrongArgument, match=r"output.new_block_ids\['r'\]"):
            hand.step(request, new_block_ids={"r": tables})
    assert len(hand.log) == events
    assert hand.scheduler.state.tracked["r"].tables == [[0, 1]]


def test_request_without_a_name_is_not_remembered() -> None:
    """It was tracked before the core had refused it."""
    hand, request = Hand(), SmallRequest("r", list(range(16)), 1)
    request.request_id = "\ud800"
    with pytest.raises(WrongArgument):
        hand.scheduler.add_request(request)
    assert hand.scheduler.state.tracked == {}


# Calls in a wrong order, which no argument shows.


def test_pool_without_a_method_is_refused_when_it_is_bound() -> None:
    """Otherwise the first copy would raise an AttributeError."""
    hand = Hand()
    with pytest.raises(WrongArgument, match=r"pool is an object without touch, free_blocks, key_of"):
        hand.scheduler.bind_gpu_block_pool(object())  # type: ignore[arg-type]
    with pytest.raises(WrongArgument, match="pool is None without"):
        hand.scheduler.bind_gpu_block_pool(None)  # type: ignore[arg-type]
    assert hand.scheduler.device_blocks.pool is None


def test_pool_is_refused_while_a_transfer_holds_no_references_in_it() -> None:
    """One release per hold (S4): when the transfer ends, kvsm would drop references that it never took in
    this pool."""
    hand = Hand()
    request = SmallRequest("r", range(8))
    hand.admit(request, [0, 1])
    hand.compute(request)
    [job] = hand.step(request).stores
    with pytest.raises(WrongArgument, match=rf"no references for the live transfers \({job.transfer}\)"):
        hand.scheduler.bind_gpu_block_pool(SmallPool(64))
    hand.report(job.transfer)
    hand.scheduler.bind_gpu_block_pool(SmallPool(64))


def test_second_request_of_a_name_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """Its blocks would not be stored, and when it finishes, kvsm would take the first request for
    finished."""
    hand = Hand()
    first = SmallRequest("r", range(8))
    hand.scheduler.add_request(first)
    hand.scheduler.add_request(first)
    assert caplog.records == []
    hand.scheduler.add_request(SmallRequest("r", range(50, 58)))
    [warning] = caplog.messages
    assert warning.startswith("request 'r' arrives, but an unfinished request has the same name")
    hand.scheduler.request_finished(first, [])
    hand.scheduler.add_request(SmallRequest("r", range(50, 58)))
    assert len(caplog.messages) == 1


def test_load_that_no_match_has_promised_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """Failure is not success (S6): it is reported as failed. A warning says which call is missing."""
    hand = Hand()
    request = SmallRequest("r", range(9))
    hand.scheduler.update_state_after_alloc(request, [[4, 5, 6]], 8)
    [warning] = caplog.messages
    assert warning.startswith("request 'r' is to load 8 tokens, but holds no match")
    [load] = hand.scheduler.update_connector_output([]).loads
    assert not load.good


def test_load_of_a_match_that_a_reset_has_voided_is_usual(caplog: pytest.LogCaptureFixture) -> None:
    hand = Hand()
    hand.store(SmallRequest("old", range(9)), [0, 1])
    request = SmallRequest("r", range(9))
    assert hand.scheduler.get_num_new_matched_tokens(request, 0) == (8, True)
    hand.scheduler.reset_cache()
    hand.scheduler.update_state_after_alloc(request, [[4, 5, 6]], 8)
    [load] = hand.scheduler.update_connector_output([]).loads
    assert not load.good
    assert caplog.records == []
