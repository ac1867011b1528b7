"""The calls that have a native body do what the Python functions of the same names do, and nothing else."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from inspect import unwrap
from operator import sub
from pathlib import Path
from random import Random
from sys import getrefcount
from types import CodeType, FrameType, SimpleNamespace
from typing import Any
from weakref import ref

import numpy as np
import pytest
from call_twins import (
    KEYS,
    NOTES,
    CallMaker,
    Key,
    Log,
    Name,
    RecordingPublisher,
    Times,
    TwinCores,
    drawn_config,
    from_another_thread,
    make_core,
)
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import kvsm
from examples import examples
from kvsm import events as ev
from kvsm.core import native
from kvsm.core.kv_events import Publisher
from kvsm.core.log import MemoryLog
from kvsm.core.offloader import LogFlush, Match, NativeOffloader, Offloader, expect_misuse, matching
from kvsm.core.offloader import transferring as transfers
from kvsm.core.offloader.emitter import EventEmitter
from kvsm.core.plan import WorkerReport
from kvsm.errors import IllegalTransition, InvalidEvent, Poisoned, WrongArgument, WrongThread
from kvsm.events import LOAD, STORE, OffloadConfig
from kvsm.ids import SMALL, array_of, pack, to_list, unpack

if native.WHY_NOT:
    pytest.skip(f"Python decides: {native.WHY_NOT}", allow_module_level=True)


@pytest.fixture(autouse=True)
def notes_that_do_not_fail() -> None:
    """All tests share them, and a random one may leave them failing."""
    NOTES.fails = False


CONFIG = OffloadConfig(host_blocks=40, device_blocks=100)
PACKAGE = str(Path(kvsm.__file__).parent)
TWO_BODIES = {name for name in vars(native.CoreBody) if not name.startswith("__")}


# Both bodies decide alike.


@settings(max_examples=examples(60))
@given(st.integers(0, 2**32), st.booleans(), st.booleans(), st.sampled_from((False, False, False, True)))
def test_any_calls_are_answered_alike(seed: int, log: bool, publisher: bool, python_folds: bool) -> None:
    """Results, errors and their texts, events, what the clock and the log were asked, and the state: after
    each of random calls, right and wrong ones."""
    random = Random(seed)
    config = drawn_config(random)
    twins = TwinCores(config, log=log, publisher=publisher, python_folds=python_folds)
    maker = CallMaker(config, random)
    for _ in range(70):
        name, arguments, named = maker.draw(twins.python)
        twins.call(name, *arguments, **named)


FAULTS: list[Callable[[], BaseException]] = [
    lambda: OSError("the disk is full"),
    lambda: KeyboardInterrupt(),
    lambda: InvalidEvent(3, "a log says so"),
    lambda: SystemExit(1),
]
TIMES: list[Any] = [
    -5,
    1 << 63,
    1 << 80,
    np.int64(77),
    True,
    "noon",
    None,
    ValueError("stopped"),
    KeyboardInterrupt(),
]


@settings(max_examples=examples(60))
@given(st.integers(0, 2**32), st.booleans())
def test_failures_are_told_alike(seed: int, publisher: bool) -> None:
    """Clocks that say something else, logs and publishers that fail, and calls of another thread: what the
    caller hears, which event is the last one, and whether the core goes on."""
    random = Random(seed)
    config = drawn_config(random)
    twins = TwinCores(config, publisher=publisher)
    maker = CallMaker(config, random, wrong=0.01)
    for number in range(60):
        name, arguments, named = maker.draw(twins.python)
        do = lambda core, call=(name, arguments, named): getattr(core, call[0])(*call[1], **call[2])  # noqa: E731
        fault = random.randrange(12)
        if fault == 0:
            said = random.choice(TIMES)
            for core in twins.both:
                clock_of(core).next = [said]
        elif fault == 1:
            do = from_another_thread(do)
        elif fault == 2 and publisher:
            for core in twins.both:
                told_of(core).fails = True
        elif fault == 3 and number > 40:
            made, flushes = random.choice(FAULTS), random.random() < 0.5
            for core in twins.both:
                (log_of(core).next_flush if flushes else log_of(core).next).append(made())
        NOTES.fails = fault == 4
        twins.each(do, (name, arguments, named, fault))


def clock_of(core: Offloader) -> Times:
    assert isinstance(core._clock_ns, Times)
    return core._clock_ns


def log_of(core: Offloader) -> Log:
    assert isinstance(core.log, Log)
    return core.log


def told_of(core: Offloader) -> RecordingPublisher:
    assert isinstance(core.publisher, RecordingPublisher)
    return core.publisher


def with_loads(config: OffloadConfig = CONFIG, **more: Any) -> TwinCores:
    """Two blocks are stored, and a load of them for request q is in flight; it is transfer `live`."""
    twins = TwinCores(config, **more)
    twins.call("prepare_store", "r", KEYS[:2], [0, 1])
    store = next(iter(twins.python.ledger.transfers))
    twins.call("submit", [store])
    for worker in range(config.workers):
        twins.call("complete_store", store, worker)
    assert twins.call("match", "q", KEYS[:3]).result == Match(2)
    job = twins.call("prepare_load", "q", [4, 5]).result
    assert job is not None
    twins.call("submit", [job.transfer])
    return twins


def live(twins: TwinCores) -> int:
    return next(iter(twins.python.ledger.transfers))


def floats(ids: list[int]) -> Any:
    return np.array(ids, dtype=np.float64)


@given(
    slots=st.lists(st.integers(-1, 4) | st.integers(-2, 41), max_size=24),
    form=st.sampled_from([tuple, list, np.array, floats]),
)
@example(slots=[0], form=floats)
@example(slots=[40], form=tuple)
def test_slots_in_flight_are_found_alike(slots: list[int], form: Callable[..., Any]) -> None:
    """Slots that are loaded, stored, planned and unused. What is no slot is refused alike."""
    twins = with_loads()
    twins.call("prepare_store", "s", KEYS[2:4], [6, 7])
    twins.call("in_flight", form(slots))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_log_that_fails_stops_the_core(fault: Callable[[], BaseException]) -> None:
    """An interrupt, too. A refusal that comes from the log leaves the core as one of the ledger does."""
    twins = with_loads()
    for core in twins.both:
        log_of(core).next = [fault()]
    error = twins.call("complete_load", live(twins)).error
    assert type(error) is type(fault())
    assert (twins.native._poisoned is None) == isinstance(error, InvalidEvent | IllegalTransition)
    after = [twins.call("match", "p", KEYS), twins.call("finish", "q"), twins.call("emit", list)]
    if twins.native._poisoned is not None:
        assert all(isinstance(one.error, Poisoned) for one in after)


def test_a_stop_that_fails_leaves_nobody_who_may_change_the_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt while the core notes why it stops."""
    twins = with_loads()
    for core in twins.both:
        log_of(core).next = [OSError("full")]

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Offloader, "_stop", interrupted)
    assert isinstance(twins.call("complete_load", live(twins)).error, KeyboardInterrupt)
    monkeypatch.undo()
    assert isinstance(twins.call("finish", "q").error, Poisoned)


class Full(OSError):
    """An error of a log, whose instances are counted."""


def test_a_stop_that_fails_holds_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor its traceback, which would hold the log. Another error has taken its place."""
    core = make_core(CONFIG)
    core.arrive("q")  # the first call decides which thread may make others
    log, classes = ref(log_of(core)), getrefcount(Full)
    log_of(core).next = [Full("full")]

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Offloader, "_stop", interrupted)
    with suppress(KeyboardInterrupt):
        core.arrive("r")
    assert not core.log.next  # type: ignore[union-attr]
    del core
    gc.collect()
    assert [one for one in gc.get_objects() if type(one) is Full] == []
    assert (getrefcount(Full), log()) == (classes, None)


@pytest.mark.parametrize("name", sorted(TWO_BODIES))
def test_a_call_without_arguments_is_answered_alike(name: str) -> None:
    """An iterator over a function calls it with no array of arguments at all."""
    with_loads().each(lambda core: next(iter(getattr(core, name), object())))


def test_a_core_that_is_closed_refuses_every_call() -> None:
    twins = with_loads()
    twins.each(lambda core: core.close())
    for name in TWO_BODIES - {"emit", "flush_log"}:
        assert isinstance(twins.call(name).error, Poisoned), name
    assert isinstance(twins.call("emit", list).error, Poisoned)
    assert isinstance(twins.call("flush_log", LogFlush.STEP_ENDED).error, Poisoned)


def test_another_thread_is_refused_until_the_driver_has_ended() -> None:
    twins = with_loads()
    finish = lambda core: core.finish("q")  # noqa: E731
    assert isinstance(twins.each(from_another_thread(finish)).error, WrongThread)
    assert twins.call("finish", "q").result is False


@pytest.mark.parametrize("asked", [1, 2, 3])
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("complete_load", (7,)),
        ("match", ("new", KEYS[:2])),
        ("pin", ("new", (0, 1), None)),
        ("prepare_store", ("new", KEYS[1:9], range(40, 48))),
        ("prepare_load", ("p", [8])),
        ("submit", ([20],)),
        ("finish", ("p",)),
    ],
)
@pytest.mark.parametrize("meanwhile", ["reset", "arrive", "tick"])
def test_a_clock_may_call_the_core(meanwhile: str, name: str, arguments: tuple[Any, ...], asked: int) -> None:
    """It changes the ledger in the middle of a call: what was read before must be read again."""
    twins = with_loads()
    twins.call("match", "p", KEYS[:1])
    for core in twins.both:
        core._clock_ns = ClockThatCalls(core, meanwhile, asked)  # type: ignore[assignment]
    twins.call(name, *arguments)


@pytest.mark.parametrize("call", [("prepare_load", "p", [8, 9]), ("finish", "p")])
def test_a_clock_may_replace_what_a_call_reads(call: tuple[Any, ...]) -> None:
    """The slots that the request has pinned get other blocks, which another request pins."""
    twins = TwinCores(OffloadConfig(host_blocks=2, device_blocks=10))

    def store_and_match(core: Offloader, keys: list[bytes], request: str) -> None:
        job = core.prepare_store("s", keys, [0, 1]).job
        assert job is not None
        core.submit([job.transfer])
        core.complete_store(job.transfer)
        assert core.match(request, keys) == Match(2)

    twins.each(lambda core: store_and_match(core, KEYS[:2], "p"))
    for core in twins.both:
        clock = clock_of(core)

        def replace(core: Offloader = core, clock: Times = clock) -> int:
            core._clock_ns = clock
            core.reset()
            store_and_match(core, KEYS[2:4], "q")
            return 7

        core._clock_ns = replace
    name, *arguments = call
    twins.call(name, *arguments)
    assert twins.python.ledger.epoch == 1


class ClockThatCalls(Times):
    """A clock that calls the core when it is asked for the `asked`-th time."""

    def __init__(self, core: Offloader, name: str, asked: int) -> None:
        super().__init__()
        self._core, self._name, self._when = core, name, asked

    def __call__(self) -> Any:
        said = super().__call__()
        if said == self._when:
            getattr(self._core, self._name)(*(["another"] if self._name == "arrive" else []))
        return said


WRONG_REPORTS: list[tuple[Any, ...]] = [
    *((1, worker, True) for worker in (-1, 2, 61, 62, 70, 1 << 70, True, None)),
    *((transfer, 0, True) for transfer in (0, 2, 999, -1, 1 << 70, True, "1", None)),
    *((1, 0, good) for good in (1, None, "yes", False)),
    *((1, 0, True, error) for error in (None, "it broke", Name("it broke"), 5)),
    (1, 0),
    (1, 0, True, "", ""),
]


@pytest.mark.parametrize("arguments", WRONG_REPORTS)
def test_reports_that_are_not_common_are_answered_alike(arguments: tuple[Any, ...]) -> None:
    """Of the load that is in flight where they say 1, and of its other worker."""
    config = OffloadConfig(host_blocks=4, device_blocks=100, workers=2)
    for name in ("report", "complete_load", "complete_store", "fail_load"):
        twins = with_loads(config)
        transfer = live(twins) if arguments[0] == 1 and type(arguments[0]) is int else arguments[0]
        given = (transfer, *arguments[1:]) if name == "report" else (transfer, *arguments[1:2])
        twins.call(name, *given)
        twins.call(name, *given)  # If it counted, it is a doubled one now.
        twins.call("report", live(twins), 1, True)


def test_a_transfer_that_was_not_submitted_has_no_reports() -> None:
    twins = with_loads()
    twins.call("match", "p", KEYS[:1])
    job = twins.call("prepare_load", "p", [9]).result
    assert twins.call("complete_load", job.transfer).result.rejected is not None


def test_a_block_that_is_being_stored_is_waited_for() -> None:
    twins = with_loads()
    planned = twins.call("prepare_store", "s", KEYS[5:7], [7, 8]).result.job.transfer
    for _ in range(2):  # Planned, and then submitted.
        assert twins.call("match", f"p{_}", [KEYS[0], KEYS[6]]).result == Match(0, planned)
        twins.call("submit", [planned])


def test_a_request_that_waits_loads_or_holds_a_match_is_left_to_python() -> None:
    twins = with_loads()
    assert twins.call("match", "q", KEYS[:1]).result == Match(0)  # It is loading.
    twins.call("match", "p", KEYS[:2])
    assert twins.call("match", "p", KEYS[1:2]).result == Match(1)
    assert twins.call("match", "p", KEYS[1:2]).result == Match(1)
    assert twins.call("prepare_load", "p", [9, 10]).error is not None
    assert twins.call("prepare_load", "p", []).result is None
    assert twins.call("prepare_load", "p", [9]).result is None
    assert twins.call("prepare_load", "nobody", [9]).result is None


@pytest.mark.parametrize("blocks", [SMALL - 1, SMALL, SMALL + 1])
def test_batches_have_the_form_of_their_length(blocks: int) -> None:
    """Up to `SMALL` ids are a tuple."""
    keys = [b"%d" % number for number in range(blocks)]
    twins = TwinCores(CONFIG)
    twins.call("prepare_store", "r", keys, range(blocks))
    twins.call("submit", [live(twins)])
    twins.call("complete_store", live(twins))
    for name, targets in (("a", list(range(40, 40 + blocks))), ("b", (60,)), ("c", range(70, 70 + blocks))):
        twins.call("match", name, keys)
        assert twins.call("prepare_load", name, targets).result is not None


@pytest.mark.parametrize(
    "key", [b"x" * 4096, b"x" * 4097, "key", None, [b"key"], Key(b"key 0"), bytearray(b"key 0")]
)
def test_a_key_that_is_missed_is_looked_at(key: Any) -> None:
    twins = with_loads()
    for keys in ([key], [KEYS[0], key], [KEYS[0], key, KEYS[1]]):
        twins.call("match", "p", keys)


def test_a_request_that_was_preempted_while_it_loads_waits() -> None:
    twins = with_loads()
    twins.call("preempt", "q")
    assert twins.call("match", "q", KEYS[:2]).result == Match(0, live(twins))
    twins.call("complete_load", live(twins))
    assert twins.call("match", "q", KEYS[:2]).result == Match(2)


def test_a_match_that_was_voided_is_not_loaded() -> None:
    twins = with_loads()
    twins.call("match", "p", KEYS[:2])
    twins.call("reset")
    assert twins.call("prepare_load", "p", [9, 10]).result is None


TARGETS: list[Any] = [
    *([100], [-1], [9, 9], [9, 10], [True], ["9"], [1 << 40], [1 << 70], [], (9, 10, 11)),
    *(range(9, 11), range(10, 8, -1), range(99, 101), range(-1, 1), np.arange(9, 11), np.array([[9]])),
    *({9: 1}, {9}, b"\t", "9", iter([9]), None, 9),
]


@pytest.mark.parametrize("chunk", [1, 2])
@pytest.mark.parametrize("given", TARGETS)
def test_device_blocks_are_looked_at_alike(given: Any, chunk: int) -> None:
    twins = with_loads(OffloadConfig(host_blocks=4, device_blocks=100)) if chunk == 1 else two_a_chunk()
    twins.call("match", "p", KEYS[:2])
    twins.call("prepare_load", "p", given)


def two_a_chunk() -> TwinCores:
    twins = TwinCores(OffloadConfig(host_blocks=4, device_blocks=100, blocks_per_chunk=2))
    twins.call("prepare_store", "r", KEYS[:2], [0, 1, 2, 3])
    twins.call("submit", [live(twins)])
    twins.call("complete_store", live(twins))
    return twins


def stores_of_others(keys: list[bytes]) -> TwinCores:
    """Twins that have these keys, stored from the last device blocks."""
    twins = TwinCores(OffloadConfig(host_blocks=12, device_blocks=100))
    twins.call("end_step")
    if keys:
        twins.call("store", (), keys, range(100 - len(keys), 100))
        twins.call("submit", [live(twins)])
        twins.call("complete_store", live(twins))
    return twins


FEW_KEYS = (b"", b"a", b"b", b"c", b"d")


@given(
    st.lists(st.sampled_from(FEW_KEYS), unique=True),
    st.lists(st.sampled_from(FEW_KEYS), unique=True, min_size=1),
    st.dictionaries(st.integers(0, 5), st.sampled_from(FEW_KEYS)),
    st.booleans(),
)
@example([b"a"], [b"a", b"", b"b"], {0: b"b", 1: b"b"}, False)
def test_any_parents_are_found_alike(
    resident: list[bytes], keys: list[bytes], parents: dict[int, bytes], owned: bool
) -> None:
    """Also of keys that continue each other in a circle, and of the empty key."""
    owners = (("r", len(keys)),) if owned else ()
    stores_of_others(resident).call("store", owners, keys, range(len(keys)), parents=parents)


@pytest.mark.parametrize("name", ["owners", "keys", "device_blocks", "again", "spared", "parents", "bogus"])
@pytest.mark.parametrize("count", range(3, 8))
@pytest.mark.parametrize("others", [{}, {"again": ()}])
def test_a_store_has_each_argument_once(name: str, count: int, others: dict[str, Any]) -> None:
    """A name that no argument has was ignored if its value was the value of another argument."""
    given = ((), KEYS[:1], (0,), (), (), {}, ())
    value = {} if name == "parents" else ()
    stores_of_others([]).call("store", *given[:count], **{**others, name: value})


@pytest.mark.parametrize("blocks", [[4, 60], [60, 5], [61, 60], [0, 60]])
def test_a_block_that_a_load_writes_is_not_stored(blocks: list[int]) -> None:
    """Correct bytes (S15): the load in flight writes blocks 4 and 5."""
    twins = with_loads()
    twins.call("prepare_store", "s", KEYS[10:12], blocks)
    assert not {4, 5} & {block for job in stores(twins) for block in job}


def stores(twins: TwinCores) -> list[list[int]]:
    """The device blocks of the stores in flight."""
    live = twins.native.ledger.transfers.values()
    return [to_list(one.device_blocks) for one in live if one.direction is STORE]


@pytest.mark.parametrize("new", range(1, 5))
@pytest.mark.parametrize("resident", range(3))
def test_a_store_into_a_full_pool_evicts_alike(new: int, resident: int) -> None:
    """The oldest blocks that are not offered. An eviction names the store that it makes room for."""
    twins = TwinCores(OffloadConfig(host_blocks=4, device_blocks=20))
    twins.call("prepare_store", "r", KEYS[:4], range(4))
    twins.call("submit", [live(twins)])
    twins.call("complete_store", live(twins))
    keys = KEYS[:resident] + KEYS[10 : 10 + new]
    twins.call("prepare_store", "s", keys, range(5, 5 + len(keys)))
    evicted = [event for event in log_of(twins.native) if isinstance(event, ev.BlocksEvicted)]
    assert evicted
    assert all(one.transfer in twins.native.ledger.transfers for one in evicted)


@pytest.mark.parametrize("place", range(3, 6))
@pytest.mark.parametrize("value", [5, None, (KEYS[0],), [KEYS[0]], {0: KEYS[1]}, {5: KEYS[1]}])
def test_a_store_looks_at_each_argument(place: int, value: Any) -> None:
    given = [(), KEYS[:1], (0,), (), (), {}]
    given[place] = value
    stores_of_others([]).call("store", *given)


def test_parents_may_change_while_a_store_is_planned() -> None:
    """Their keys were used after they were freed."""
    twins = stores_of_others([b"a"])

    def store(core: Offloader) -> Any:
        parents, log = {1: bytes(bytearray(b"unknown" * 9))}, log_of(core)

        class Clearing(Log):
            def append(self, event: Any) -> None:
                super().append(event)
                parents[1] = b""
                self.junk = [bytes([n]) * 63 for n in range(99)]

        core.log = Clearing()
        core.log.core = core
        try:
            return core.store((), [b"a", b"b"], [0, 1], parents=parents)
        finally:
            core.log = log
            log += core.log

    twins.each(store)


@pytest.mark.parametrize("keys", [1, 20])
@pytest.mark.parametrize("chunk", [0, 1, 1 << 60, 1 << 62])
def test_a_configuration_that_is_not_the_ledgers_is_left_to_python(keys: int, chunk: int) -> None:
    """A store read and wrote behind the device blocks that the ledger has."""
    twins = stores_of_others([])
    twins.call("match", "r", [b"%d" % n for n in range(keys)])
    for core in twins.both:
        core.config = SimpleNamespace(  # type: ignore[assignment]
            device_blocks=1 << 31, host_blocks=12, blocks_per_chunk=chunk, max_live_transfers=9
        )
    offered = [b"%d" % n for n in range(keys)]
    for blocks in ([], [10**8 + n for n in range(keys)]):
        twins.call("store", (), offered, blocks)
        twins.call("prepare_store", "r", offered, blocks)
        twins.call("prepare_load", "r", blocks)


@pytest.mark.parametrize("name", ["q", "p", "nobody", "é", "\ud800", Name("p"), b"p", None, 7])
def test_requests_finish_alike(name: Any) -> None:
    twins = with_loads()
    twins.call("match", "p", KEYS[:2])
    twins.call("match", "é", KEYS[:2])
    twins.call("finish", name)
    twins.call("finish", name)
    assert isinstance(twins.call("finish").error, TypeError)
    assert isinstance(twins.call("finish", "p", True).error, TypeError)
    twins.call("finish", "p", aborted=True)


@pytest.mark.parametrize("time", TIMES)
def test_the_clock_is_asked_once(time: Any) -> None:
    """Whatever it says."""
    for call in (("match", "p", KEYS[:1]), ("finish", "q"), ("report", 0, 0, True), ("touch", KEYS[:1])):
        twins = with_loads()
        asked = clock_of(twins.native).asked
        for core in twins.both:
            clock_of(core).next = [time]
        twins.call(*call)
        assert clock_of(twins.native).asked == asked + 1


@pytest.mark.parametrize("flush_within_ms", [0, 10])
@pytest.mark.parametrize("log", [True, False])
@settings(max_examples=examples(20), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    moments=st.lists(
        st.tuples(st.integers(-12_000_000, 12_000_000), st.sampled_from([*LogFlush, "load"])), max_size=12
    )
)
def test_flushes_wait_alike(
    flush_within_ms: int, log: bool, moments: list[tuple[int, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With copies in flight, with requests only and with neither, and with clocks that go back."""
    now = [1 << 40]
    monkeypatch.setattr(time, "monotonic_ns", lambda: now[0])
    twins = TwinCores(CONFIG, log=log, flush_within_ms=flush_within_ms)
    for later, reason in moments:
        now[0] += later
        if reason == "load":
            twins.call("prepare_store", "r", [b"%d" % now[0]], [7])
        elif reason is LogFlush.JOBS_LEAVE and twins.python.ledger.transfers:
            twins.call("submit", [live(twins)])
            twins.call("complete_store", live(twins))
            twins.call("finish", "r")
        else:
            twins.call("flush_log", reason)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_flush_that_fails_stops_the_core(fault: Callable[[], BaseException]) -> None:
    """Any error stops the core: the ledger has folded events that the log lacks."""
    twins = TwinCores(CONFIG)
    twins.call("arrive", "r")
    for core in twins.both:
        log_of(core).next_flush = [fault()]
    assert type(twins.call("flush_log", LogFlush.JOBS_LEAVE).error) is type(fault())
    assert isinstance(twins.call("arrive", "q").error, Poisoned)


class Clockwork:
    """A clock that is asked for the time of a flush."""

    def __init__(self, said: Any) -> None:
        self._said = said

    def __call__(self) -> Any:
        if isinstance(self._said, BaseException):
            raise self._said
        return self._said


@pytest.mark.parametrize("said", [-5, 1 << 63, (1 << 63) - 1, 1.5, None, "noon", ValueError("stopped")])
def test_odd_times_of_a_flush_are_left_to_python(said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    twins = TwinCores(CONFIG, flush_within_ms=10)
    twins.call("arrive", "r")
    monkeypatch.setattr(time, "monotonic_ns", Clockwork(said))
    twins.call("flush_log", LogFlush.STEP_ENDED)


def reports_of(transfer: int, workers: int) -> list[WorkerReport]:
    return [WorkerReport(transfer, worker, True, "", 3, 4) for worker in range(workers)]


def with_two_stores() -> TwinCores:
    """Two stores of two ranks are in flight: `prepare_store` planned them."""
    twins = TwinCores(OffloadConfig(host_blocks=4, device_blocks=100, workers=2), publisher=True)
    for number in range(2):
        job = twins.call("prepare_store", "r", [KEYS[number]], [number]).result.job
        twins.call("submit", [job.transfer])
    return twins


def test_all_reports_are_given_as_one_by_one() -> None:
    """Also those that change nothing, or are bad: each end is noted before the next report."""
    twins = with_two_stores()
    first, second = twins.python.ledger.transfers
    bad = WorkerReport(second, 1, False, "it broke")
    reports = [*reports_of(first, 2), WorkerReport(first, 1, True), *reports_of(second, 1), bad]
    expect_misuse(twins.native)
    expect_misuse(twins.python)
    found = twins.call("report_all", [*reports, WorkerReport(999, 0, True)], NOTES)
    assert found.result is None
    assert [(one.transfer, one.good) for one in found.heard] == [(first, True), (second, False)]
    assert twins.call("report_all", (), NOTES).result is None


def test_a_report_that_fails_leaves_those_before_it() -> None:
    twins = with_two_stores()
    first, second = twins.python.ledger.transfers
    wrong = WorkerReport("1", 0, True)  # type: ignore[arg-type]
    found = twins.call("report_all", [*reports_of(first, 2), wrong, *reports_of(second, 2)], NOTES)
    assert isinstance(found.error, WrongArgument)
    assert [one.transfer for one in found.heard] == [first]
    assert list(twins.python.ledger.transfers) == [second]
    NOTES.fails = True
    assert isinstance(twins.call("report_all", reports_of(second, 2), NOTES).error, RuntimeError)
    NOTES.fails = False
    assert not twins.python.ledger.transfers


def test_a_publisher_that_fails_stops_report_all() -> None:
    twins = with_two_stores()
    first, second = twins.python.ledger.transfers
    for core in twins.both:
        told_of(core).fails = True
    found = twins.call("report_all", [*reports_of(first, 2), *reports_of(second, 2)], NOTES)
    assert (str(found.error), found.heard) == ("the publisher broke", [])
    assert list(twins.python.ledger.transfers) == [second]


def test_the_note_of_an_end_may_use_the_core() -> None:
    """It stops the core here: the next report is refused."""
    twins = with_two_stores()
    first, second = twins.python.ledger.transfers
    reports = [*reports_of(first, 2), *reports_of(second, 2)]
    stopped = twins.each(lambda core: core.report_all(reports, lambda _: core.close()))
    assert isinstance(stopped.error, Poisoned)


def test_who_replaces_the_report_of_one_core_gets_all_reports() -> None:
    twins = with_two_stores()
    reports = reports_of(next(iter(twins.python.ledger.transfers)), 2)
    heard = list[tuple[Any, ...]]()
    for core in twins.both:

        def listen(*how: Any, report: Callable[..., Any] = core.report) -> Any:
            heard.append(how)
            return report(*how)

        core.report = listen  # type: ignore[method-assign]
    twins.call("report_all", reports, NOTES)
    assert heard == [one.arguments() for one in reports] * 2


def test_two_pins_of_one_block_are_refused_as_one_too_many() -> None:
    assert "cannot pin one more" in str(with_loads().call("match", "p", [KEYS[0], KEYS[0]]).error)


def test_a_load_is_refused_where_there_is_no_room() -> None:
    twins = with_loads(OffloadConfig(host_blocks=4, device_blocks=100, max_live_transfers=1))
    twins.call("match", "p", KEYS[:1])
    assert "max_live_transfers" in str(twins.call("prepare_load", "p", [9]).error)


# Which body decides.


def test_a_core_has_the_body_that_was_chosen(tmp_path: Path) -> None:
    core = Offloader(CONFIG)
    assert type(core) is NativeOffloader
    assert type(Offloader.resumed(core.ledger)) is NativeOffloader
    with Offloader.open(CONFIG, tmp_path / "log") as opened:
        assert type(opened) is NativeOffloader

    class Other(Offloader):
        """A core with calls of its own."""

    assert type(Other(CONFIG)) is Other
    with native.without():
        assert type(Offloader(CONFIG)) is Offloader


def test_errors_name_the_class_as_its_user_does() -> None:
    for made in (lambda: Offloader(None), lambda: Offloader(CONFIG, clock_ns=lambda: None)):  # type: ignore[arg-type,return-value]
        with pytest.raises(WrongArgument, match=r"^Offloader\(\): "):
            made()


@pytest.mark.parametrize("name", sorted(TWO_BODIES))
def test_a_function_that_was_replaced_is_called(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Offloader, name, lambda *_: "replaced")
    made = Offloader.__new__(Offloader)
    assert type(made) is Offloader
    assert getattr(made, name)() == "replaced"


@contextmanager
def python_calls() -> Iterator[list[CodeType]]:
    """The code of the functions of kvsm that are entered meanwhile."""
    entered: list[CodeType] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            entered.append(frame.f_code)

    sys.setprofile(note)
    try:
        yield entered
    finally:
        sys.setprofile(None)


def test_a_usual_life_is_decided_in_c() -> None:
    """Else the tests above would compare Python with Python."""
    core = Offloader(OffloadConfig(host_blocks=40, device_blocks=100, workers=2), MemoryLog())
    plan = core.prepare_store("s", KEYS[:20], range(20)).job
    assert plan is not None
    core.submit([plan.transfer])
    with python_calls() as entered:
        core.complete_store(plan.transfer)
        core.report(plan.transfer, 1, True, "")
        core.match("r0", KEYS[:1])
        core.match("r1", tuple(KEYS[:20]))
        core.match("r2", KEYS)
        core.match("r3", KEYS[20:])
        core.match("r3", KEYS[20:])
        core.match("r4", [])
        loads = [
            core.prepare_load("r0", [50]),
            core.prepare_load("r1", tuple(range(51, 71)), ()),
            core.prepare_load("r2", range(80, 83)),
        ]
    assert set(entered) == {array_of.__code__}  # of the 20 ids
    core.submit([load.transfer for load in loads if load is not None])
    with python_calls() as entered:
        for load in loads:
            assert load is not None
            core.complete_load(load.transfer, 0)
            ended = core.report(load.transfer, 1, True).ended
            assert ended is not None
            assert ended.good
        assert [core.finish("r0"), core.finish("r1", aborted=True), core.finish("r2")] == [True] * 3
    assert entered == []


@pytest.mark.parametrize("flush_within_ms", [0, 10_000])
def test_a_usual_step_is_decided_in_c(flush_within_ms: int) -> None:
    """The calls that a scheduler makes for a request that misses, and for one that hits."""
    config, ends = OffloadConfig(host_blocks=40, device_blocks=100, workers=2), list[Any]()
    core = Offloader(config, MemoryLog(), flush_within_ms=flush_within_ms)
    core.arrive("first")
    core.end_step()
    more = [b"more %d" % number for number in range(9)]
    for keys, slots in ((KEYS[:2], ()), (KEYS, (0, 1)), (more, unpack(pack(range(20))))):
        with python_calls() as entered:
            core.arrive("r")
            assert core.waits_for("r") is None
            assert core.may_match("r") is True
            core.pin("r", slots, keys[-1], len(keys), 0, len(slots))
            core.pin("r", slots, keys[-1], len(keys), 0, len(slots))  # the engine had no room for it
            core.rewrite([7])
            core.admit("r", len(keys), 0, 0, keys[-1], False)
            core.release("r")
            core.tick()
        assert set(entered) <= {array_of.__code__}  # of the 20 ids
        job = core.store((("r", len(keys)),), keys, range(len(keys))).job
        assert job is not None
        core.submit([job.transfer])
        with python_calls() as entered:
            core.advance([("r", (len(keys),), (len(keys),))])
            core.end_step()
            core.report_all(reports_of(job.transfer, 2), ends.append)
            core.flush_log(LogFlush.REPORTS_TAKEN)
            core.finish("r")
        assert set(entered) <= {array_of.__code__, *(flush for flush in WRITES if not flush_within_ms)}
    assert len(ends) == 3


WRITES = [MemoryLog.flush.__code__]
# Functions in Python that a flush calls.


@pytest.mark.parametrize("form", [list, tuple])
def test_plans_are_submitted_and_steps_ended_in_c(form: Callable[[list[int]], Any]) -> None:
    core = Offloader(CONFIG, MemoryLog())
    plan = core.prepare_store("s", KEYS[:20], range(20)).job
    assert plan is not None
    core.end_step()  # Python looks for plans that were never submitted, and says when to look again
    with python_calls() as entered:
        core.submit(form([plan.transfer]))
        core.end_step()
    assert not {"submit", "end_step", "emit"} & {code.co_name for code in entered}


@pytest.mark.parametrize("form", [set, iter, str, lambda ids: dict.fromkeys(ids)])
def test_transfers_that_are_no_list_are_submitted_alike(form: Callable[[list[int]], Any]) -> None:
    twins = with_loads()
    planned = twins.call("prepare_store", "s", KEYS[5:7], [7, 8]).result.job.transfer
    twins.each(lambda core: core.submit(form([planned])))


def test_a_publisher_and_a_policy_of_python_are_told() -> None:
    core = Offloader(OffloadConfig(host_blocks=4, device_blocks=9, policy="arc"), publisher=Publisher())
    plan = core.prepare_store("s", KEYS[:2], range(2)).job
    assert plan is not None
    core.submit([plan.transfer])
    with python_calls() as entered:
        core.complete_store(plan.transfer)
    assert Publisher.ended.__code__ in entered
    left_to_python = (transfers._report, transfers._ended, EventEmitter.emit)
    assert not {function.__code__ for function in left_to_python} & set(entered)


def test_what_is_not_common_is_left_to_python() -> None:
    core = Offloader(CONFIG)
    with python_calls() as entered:
        core.match(Name("r"), KEYS)
        core.finish(Name("r"))
        core.report(7, 0, True)
    assert entered.count(unwrap(matching.match).__code__) == 1
    assert entered.count(unwrap(Offloader.finish).__code__) == 1
    assert entered.count(transfers.report.__code__) == 1


# Memory.


def grown(do: Callable[[], None]) -> list[int]:
    """How much more memory, and how many more references to what lives for ever, are there after `do`.

    From Python 3.12 on, the interpreter counts no references to immortal objects, but a body that was built
    for the stable ABI of 3.11 does: their counts say nothing there.
    """
    immortal = sys.version_info >= (3, 12)
    fixed = [LOAD, STORE] if immortal else [None, True, False, (), "", 0, 1, LOAD, STORE]

    def counted() -> list[int]:
        do()
        gc.collect()
        return [sys.getallocatedblocks(), *map(sys.getrefcount, fixed)]

    do()
    before = counted()
    return list(map(sub, counted(), before))


def test_usual_calls_give_back_what_they_took() -> None:
    def serve() -> None:
        core = make_core(CONFIG, publisher=True)
        for number in range(300):
            name, block = f"r{number}", number % 40
            plan = core.prepare_store(name, [b"%d" % block], [block]).job
            if plan is not None:
                core.submit([plan.transfer])
                core.report(plan.transfer, 0, True)
            # One key is resident, so one owner of this offer has no new key.
            keys = [b"%d" % block, b"other-%d" % block, b"more-%d" % block]
            plan = core.store(((name, 1), ("other", 1), ("more", 1)), keys, [60, 61, 62]).job
            if plan is not None:
                core.submit([plan.transfer])
                core.report(plan.transfer, 0, True)
            core.match(name, [b"%d" % block, b"none"])
            job = core.prepare_load(name, range(50, 51))
            assert job is not None
            core.submit([job.transfer])
            core.complete_load(job.transfer)
            core.finish(name, aborted=False)

    assert max(grown(serve)) < 50


def test_other_calls_give_back_what_they_took() -> None:
    """Wrong ones, refusals, and failures of the clock, the log and the publisher."""
    config = OffloadConfig(host_blocks=24, device_blocks=60, workers=2, max_live_transfers=4)

    def serve(seed: int) -> None:
        random = Random(seed)
        core = make_core(config, publisher=True)
        expect_misuse(core)  # pytest keeps each warning in memory
        maker = CallMaker(config, random, wrong=0.2)
        for number in range(400):
            name, arguments, named = maker.draw(core)
            clock_of(core).next = [random.choice(TIMES)] if random.random() < 0.05 else []
            told_of(core).fails = random.random() < 0.05
            log_of(core).next = [OSError("full")] if number == 390 else []
            with suppress(BaseException):
                getattr(core, name)(*arguments, **named)
            NOTES.heard.clear()

    def serve_often() -> None:
        for seed in range(12):
            serve(seed)

    assert max(grown(serve_often)) < 100
