"""The native body of the fold does what the Python body does, and nothing else."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import tracemalloc
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import reduce
from itertools import takewhile
from operator import or_
from random import Random
from sys import getrefcount
from types import FrameType
from typing import Any

import msgspec
import native_tables
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from museum.drawn_worlds import audited_core, audited_serving, audited_tiers
from native_twins import (
    RecordingListener,
    Twins,
    is_refusal,
    reset_often,
    spoiled,
    walked,
    walked_in_arrays,
    wrong_parents,
)
from places import ROOT

from examples import examples
from kvsm import events as ev
from kvsm.check.explore.coverage import all_edges
from kvsm.check.walks.walk import walk
from kvsm.check.worlds.audited import AuditedWorld
from kvsm.check.worlds.core_options import draw_options
from kvsm.core import native
from kvsm.core.ledger import Ledger, NativeLedger
from kvsm.core.ledger.key_index import make_index
from kvsm.core.offloader import Offloader
from kvsm.core.policies import POLICIES
from kvsm.core.policies.slot_queue import NativeSlotQueue, SlotQueue
from kvsm.errors import ConfigError, InvalidEvent
from kvsm.events import (
    KINDS,
    BlocksTouched,
    CacheReset,
    OffloadConfig,
    OffloadingEvent,
    RequestArrived,
    StorePlanned,
)
from kvsm.ids import SMALL
from kvsm.states.block import BLOCK
from kvsm.states.transfer import PLANNED, TRANSFER_WORDS

if native.WHY_NOT:
    pytest.skip(f"Python folds: {native.WHY_NOT}", allow_module_level=True)


# Which body runs.


def test_the_tables_are_those_of_the_machines() -> None:
    """`python specs/native_tables.py` writes the header. No number of a machine is typed twice."""
    assert native_tables.HEADER.read_text(encoding="utf-8") == native_tables.header()


def test_a_ledger_has_the_body_that_was_chosen() -> None:
    config = OffloadConfig(host_blocks=2, device_blocks=2)
    assert isinstance(Ledger(config), NativeLedger)
    assert isinstance(SlotQueue(2), NativeSlotQueue)
    with native.without():
        assert not isinstance(Ledger(config), NativeLedger)
        assert not isinstance(SlotQueue(2), NativeSlotQueue)


def test_with_another_table_python_folds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checker that changes a table must see what the change does."""
    assert native.runs()
    monkeypatch.setattr(BLOCK, "dense", BLOCK.dense[::-1])
    assert not native.runs()


def test_with_another_kind_of_event_python_folds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build is not older than the code: it says so, and what it does not know cannot reach it."""
    assert native._why_not("auto") == ""
    monkeypatch.setattr(native, "KINDS", KINDS[:-1])
    assert native._why_not("auto") == "it was built for other kinds of events; install kvsm again"
    with pytest.raises(ConfigError, match="KVSM_NATIVE is 1, but the native body cannot run: it was built"):
        native._why_not("1")


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ("0", "body of the fold: Python (KVSM_NATIVE is 0)"),
        ("1", "body of the fold: native"),
        ("auto", "body of the fold: native"),
        ("yes", "KVSM_NATIVE is 'yes'; it must be 0, 1 or auto"),
    ],
)
def test_the_environment_chooses(chosen: str, said: str) -> None:
    command = [sys.executable, "-c", "from kvsm.cli import main; main()", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "KVSM_NATIVE": chosen})
    assert said in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert (done.returncode == 0) == (chosen != "yes")


def folded_in_c() -> set[str]:
    """The names of the kinds of events that the native body folds."""
    source = (ROOT / "kvsm" / "core" / "native" / "ledger.c").read_text(encoding="utf-8")
    table = source.split("handlers[NUM_KINDS] = {")[1].split("};")[0]
    return set(re.findall(r"\[KIND_(\w+)\]", table))


def test_the_kinds_that_are_left_to_python_are_those_of_the_docs() -> None:
    """The native body has an entry for each kind that it folds, and docs/architecture.md names all others."""
    folded = folded_in_c()
    docs = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    left = set(re.findall(r"`(\w+)`", docs.split("| always |")[1].split("\n")[0]))
    assert folded | left == {kind.__name__ for kind in KINDS}
    assert not folded & left


def may_be_left(ledger: Ledger, event: OffloadingEvent) -> bool:
    """Whether docs/architecture.md names this event as one that is left to Python."""
    if type(event).__name__ not in folded_in_c():
        return True
    if ledger.copied_out:
        return True
    match event:
        case ev.WorkerReported(transfer=transfer, good=good):
            return not good or bool(ledger.transfers[transfer].word >> TRANSFER_WORDS.shifts[1])
        case ev.HitReleased(request=request):
            return ledger.voided_at > ledger.requests[request].pinned_at
        case StorePlanned(source=source):
            return bool(source)
        case BlocksTouched(parents=parents):
            return bool(parents)
        case ev.LoadPlanned(request=request, parts=parts, target=target):
            return bool(parts or target) or ledger.voided_at > ledger.requests[request].pinned_at
        case ev.Ticked():
            return bool(ledger.deferred)
        case CacheReset():
            return any(one.state is PLANNED for one in ledger.transfers.values())
    return False


def test_what_is_usual_is_folded_in_c() -> None:
    """Else the tests below would compare Python with Python. Each kind of event that C folds is seen."""
    left, seen = list[OffloadingEvent](), set[str]()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code is Ledger.apply.__code__:
            left.append(frame.f_locals["event"])

    for seed in range(60):
        options = msgspec.structs.replace(draw_options(Random(seed)), policy="lru")
        ledger = Ledger(options.config())
        for event in walked(options, seed, 120):
            is_usual = not may_be_left(ledger, event)
            sys.setprofile(note)
            try:
                ledger.apply(event)
            finally:
                sys.setprofile(None)
            assert not (is_usual and left), event
            left.clear()
            seen |= {type(event).__name__} if is_usual else set()
    assert folded_in_c() - seen == set()


# Both bodies fold alike.


@settings(max_examples=examples(40))
@given(st.integers(0, 2**32))
def test_each_event_of_a_walk_is_folded_alike(seed: int) -> None:
    """Events are state (S10), whichever body folds: resets, losses and restarts, too, each policy."""
    random = Random(seed)
    options = draw_options(random)
    twins = Twins(options.config())
    for event in walked(options, seed, 60):
        assert twins.apply(event).error is None


@pytest.mark.parametrize("world", [audited_core, audited_serving, audited_tiers])
def test_walks_end_alike(world: Callable[[Random], AuditedWorld]) -> None:
    """The auditor beside each world folds with the Python body, and compares each field with the live ledger.
    Of two tiers: copies to another tier leave a block in the eviction order."""
    result = walk(world, seed=11, operations=examples(2_500))
    assert result.failure is None, result.failure


@settings(max_examples=examples(25))
@given(st.integers(0, 2**32))
def test_long_batches_are_folded_alike(seed: int) -> None:
    """Batches of more than 16 ids are arrays."""
    config, events = walked_in_arrays(seed)
    twins = Twins(config)
    for event in events:
        assert twins.apply(event).error is None


@pytest.mark.parametrize("examples", [examples(5, least=2), pytest.param(40, marks=pytest.mark.slow)])
def test_resets_are_folded_alike(examples: int) -> None:
    """Whatever is in flight, and to whatever tier: the words, the order of the free slots, the eviction order
    and what a listener hears. Pools end within a group of 64 slots, or with one."""
    given(st.integers(0, 2**32), st.sampled_from(tuple(POLICIES)))(
        settings(max_examples=examples)(fold_resets)
    )()


def fold_resets(seed: int, policy: str) -> None:
    random = Random(seed)
    slots = random.choice((5, 64, 70, 128, 200, 700))
    config = OffloadConfig(
        host_blocks=slots, device_blocks=4096, workers=2, policy=policy, max_live_transfers=8
    )
    twins = Twins(config)
    for event in reset_often(config, random):
        assert twins.apply(event).error is None
        if isinstance(event, CacheReset):
            assert list(twins.native.free) == sorted(twins.native.free)
            assert not len(twins.native.policy)


def test_an_index_that_is_cleared_forgets_each_key() -> None:
    """To clear it only counts. Keys of before do not come back when their places are used again."""
    key_of = [b""] * 500
    index, keys = make_index(key_of, True), [b"%d" % number for number in range(1000)]
    for round in range(4):
        known = keys[round::2][:500]
        assert index.enter(known, range(500))
        assert dict(index) == dict(zip(known, range(500)))
        del index[known[7]]
        index.clear()
        assert (len(index), dict(index), index.find(keys)) == (0, {}, [None] * 1000)


def test_an_index_takes_no_slot_beyond_its_capacity() -> None:
    """Its table has room for that many. One more key than places, and a search would not end."""
    index = make_index([b""] * 100, True, capacity=3)
    index[b"key"] = 2
    with pytest.raises(IndexError, match="slot 3 is none of the 3"):
        index[b"other"] = 3
    assert dict(index) == {b"key": 2}


class _Hash(bytes):
    """An engine's hash may be of a type below bytes."""


@given(
    lacking=st.sets(st.integers(0, 59), max_size=2),
    hashes=st.integers(0, 60),
    stride=st.integers(1, 3),
    suffix=st.sampled_from([b"", bytes(4)]),
    first=st.integers(0, 20),
    count=st.integers(-1, 60),
    odd=st.none() | st.tuples(st.integers(0, 59), st.sampled_from([_Hash(b"7"), 7, None])),
)
@settings(max_examples=examples(300))
def test_an_index_finds_the_chunks_of_a_prompt_that_come_first(
    lacking: set[int],
    hashes: int,
    stride: int,
    suffix: bytes,
    first: int,
    count: int,
    odd: tuple[int, object] | None,
) -> None:
    """Correct bytes (S15): it finds what asking for each key finds. Hashes that are no plain bytes, and
    chunks that have no hash yet, are left to Python."""
    held = sorted(set(range(60)) - lacking)
    index = make_index([b""] * 60, True)
    assert index.enter([b"%d" % place + suffix for place in held], held)
    known: list[object] = [b"%d" % place for place in range(hashes)]
    if odd is not None and odd[0] < hashes:
        known[odd[0]] = odd[1]
    ends, last = known[stride - 1 :: stride], first + count
    found = index.find_prefix(known, stride, suffix, first, last)  # type: ignore[arg-type]
    if not first <= last <= len(ends):
        assert found is None
        return
    asked = ends[first:last]
    there = list(takewhile(lambda one: type(one) is bytes and int(one) in held, asked))
    if found is None:
        # It makes some keys ahead of those that it looks for.
        assert any(type(one) is not bytes for one in asked[: len(there) + 16])
    else:
        assert len(there) == len(asked) or type(asked[len(there)]) is bytes
        assert type(found) is (tuple if len(there) <= SMALL else np.ndarray)
        assert list(found) == [int(one) for one in there]  # type: ignore[call-overload]


def test_an_index_makes_no_key_of_hashes_that_are_no_list() -> None:
    """They are read one by one, in Python."""
    index = make_index([b""], True)
    index[b"0"] = 0
    assert index.find_prefix((b"0",), 1, b"", 0, 1) is None
    assert index.find_prefix([b"0"], 1, b"", 0, 1) == (0,)


def test_a_search_for_chunks_leaves_nothing_behind() -> None:
    """The keys that it makes are gone when it has ended, whatever it found."""
    index = make_index([b""] * 64, True)
    hashes: list[Any] = [b"%d" % place for place in range(64)]
    assert index.enter([one + b"-suffix" for one in hashes], range(64))
    questions = [hashes, [*hashes[:40], b"other", *hashes[41:]], [*hashes[:60], None, *hashes[61:]]]

    def ask() -> None:
        for one in questions:
            index.find_prefix(one, 1, b"-suffix", 0, 64)

    ask()
    gc.collect()
    tracemalloc.start()
    ask()
    begun = tracemalloc.get_traced_memory()[0]
    for _ in range(50):
        ask()
    left = tracemalloc.get_traced_memory()[0] - begun
    tracemalloc.stop()
    assert left < 1000


_DECODE = msgspec.msgpack.Decoder(list[reduce(or_, KINDS)]).decode  # type: ignore[misc]


def objects_of(value: object) -> Iterator[object]:
    """The objects of a field of an event that belong to this event alone."""
    if isinstance(value, tuple):
        for item in value:
            yield from objects_of(item)
    if isinstance(value, str | bytes | tuple) and value:
        yield value


def fold_and_drop(config: OffloadConfig, events: list[OffloadingEvent], wrong: float) -> None:
    """Fold these events, and wrong ones between them, in a ledger that is then dropped."""
    ledger, random = Ledger(config, RecordingListener()), Random(1)
    for event in events:
        if random.random() < wrong:
            with suppress(Exception):
                ledger.apply(spoiled(event, random))
            if ledger.seq + 1 != event.seq:
                return
        ledger.apply(event)


def test_folding_gives_back_what_it_took() -> None:
    """Each kind of event that C folds, right and wrong. A record that is lost holds objects of its events."""
    logs = [walked_in_arrays(seed) for seed in range(0, 12, 4)]
    for seed in range(12):
        options = draw_options(Random(seed))
        logs.append((options.config(), walked(options, seed, 120)))
    assert folded_in_c() <= {type(event).__name__ for _, events in logs for event in events}
    for config, log in logs:
        events = _DECODE(msgspec.msgpack.encode([*log]))
        objects = [one for event in events for one in objects_of(msgspec.structs.astuple(event))]
        before = [*map(getrefcount, objects)]
        for wrong in (0, 0.2):
            fold_and_drop(config, events, wrong)
        gc.collect()
        after = [*map(getrefcount, objects)]
        assert [one for one, *counts in zip(objects, before, after) if counts[0] != counts[1]] == []


def test_a_reset_takes_the_arc_of_what_it_voids() -> None:
    """Coverage of the tables counts an idle block that a reset voids, and no block that is not there."""
    core = Offloader(OffloadConfig(host_blocks=64, device_blocks=4))
    arc = [edge[1:4] for edge in all_edges(BLOCK)].index(("STORED", "INVALIDATE", "EVICTED"))
    native.forget()
    core.reset(weights="others")
    assert arc not in native.arcs_taken()["block"]
    job = core.prepare_store("r", [b"key"], [0]).job
    assert job is not None
    core.submit([job.transfer])
    core.complete_store(job.transfer)
    core.reset()
    assert arc in native.arcs_taken()["block"]


# Wrong events.


def test_a_refused_store_leaves_the_keys_of_earlier_lives() -> None:
    """A key that is twice in a plan is seen when the first one is entered. All of it is taken back."""
    ledger = Ledger(OffloadConfig(host_blocks=4, device_blocks=4))
    before = [b"a", b"b", b"c", b"d"]
    ledger.key_of[:] = before
    with pytest.raises(InvalidEvent, match="twice in the plan"):
        ledger.apply(StorePlanned(1, 0, 0, (), (b"x", b"y", b"x"), (0, 1, 2), (0, 1, 2)))
    assert (ledger.key_of, len(ledger.index)) == (before, 0)


def test_a_store_whose_key_finds_no_place_fails() -> None:
    """The index already names a key for each slot, behind the ledger's back."""
    ledger = Ledger(OffloadConfig(host_blocks=2, device_blocks=2))
    ledger.index.update({b"x": 0, b"y": 1})
    with pytest.raises(RuntimeError, match="changed without the index"):
        ledger.apply(StorePlanned(1, 0, 0, (), (b"key",), (0,), (0,)))


def test_a_slot_that_is_a_bool_is_a_number_to_both() -> None:
    """A store from another tier is left to Python, which enters its keys one by one."""
    twins = Twins(OffloadConfig(host_blocks=2, device_blocks=2))
    assert twins.apply(RequestArrived(1, 0, 0, "r", "engine")).error is None
    twins.apply(StorePlanned(2, 0, 0, (("r", 1),), (b"key",), (True,), (), "engine"))


@settings(max_examples=examples(150))
@given(st.integers(0, 2**32))
def test_wrong_events_are_refused_alike(seed: int) -> None:
    """The same error with the same words, and nothing changed: illegal steps, doubled ids, absent slots,
    wrong types, random bytes."""
    random = Random(seed)
    options = draw_options(random)
    twins = Twins(options.config())
    for event in walked(options, seed, 40):
        outcome = twins.apply(spoiled(event, random))
        if outcome.error is not None and not is_refusal(outcome):
            return  # A type that no decoder lets through: both have stopped in the same place.
        if twins.native.seq + 1 == event.seq:
            twins.apply(event)
        else:
            twins.apply(msgspec.structs.replace(event, seq=twins.native.seq + 1))


@pytest.mark.parametrize("workers", [1, 2, 61, 62, 63, 64, 1000])
def test_a_worker_that_is_not_there_has_no_reports(workers: int) -> None:
    """C has a bit for each worker in an int64. Workers beyond these are left to Python."""
    config = OffloadConfig(host_blocks=2, device_blocks=2, workers=workers)
    twins = Twins(config)
    for event in (
        ev.LogOpened(1, 0, 0, config, "", 1),
        StorePlanned(2, 0, 0, (), (b"a",), (0,), (0,)),
        ev.TransfersSubmitted(3, 0, 0, (2,)),
    ):
        assert twins.apply(event).error is None
    for worker in (workers, workers + 1, 2**31, 2**40):
        assert is_refusal(twins.apply(ev.WorkerReported(4, 0, 0, 2, worker, True)))
    for worker in range(workers):
        assert twins.apply(ev.WorkerReported(4 + worker, 0, 0, 2, worker, True)).error is None
    assert twins.native.readable(0)


def test_a_request_that_has_finished_offers_no_blocks() -> None:
    """The ledger has its record until its load has ended."""
    config = OffloadConfig(host_blocks=2, device_blocks=4)
    twins = Twins(config)
    for event in (
        ev.LogOpened(1, 0, 0, config, "", 1),
        StorePlanned(2, 0, 0, (), (b"a",), (0,), (0,)),
        ev.TransfersSubmitted(3, 0, 0, (2,)),
        ev.WorkerReported(4, 0, 0, 2, 0, True),
        ev.HitMatched(5, 0, 0, "r", (0,), None, 1, 0, 1),
        ev.LoadPlanned(6, 0, 0, "r", (0,), (1,)),
        ev.TransfersSubmitted(7, 0, 0, (6,)),
        ev.RequestFinished(8, 0, 0, "r"),
    ):
        assert twins.apply(event).error is None
    assert is_refusal(twins.apply(ev.BlocksOffered(9, 0, 0, (("r", (1,), (1,)),))))


@pytest.mark.parametrize("examples", [20, pytest.param(300, marks=pytest.mark.slow)])
def test_wrong_parents_are_refused_alike(examples: int) -> None:
    """Of a store the blocks are read when it ends: what was accepted by its plan is used then."""

    @settings(max_examples=examples)
    @given(st.integers(0, 2**32))
    def check(seed: int) -> None:
        random = Random(seed)
        options = draw_options(random)
        twins = Twins(options.config())
        for event in walked(options, seed, 40):
            if isinstance(event, StorePlanned | BlocksTouched):
                wrong = msgspec.structs.replace(event, parents=wrong_parents(random))
                outcome = twins.apply(wrong)
                assert outcome.error is None or is_refusal(outcome), wrong
            if twins.native.seq < event.seq:
                assert twins.apply(event).error is None

    check()


def test_a_long_batch_that_is_not_packed_is_folded_too() -> None:
    """No log has one, but a caller in this process may make one. An eviction looks up its keys."""
    config = OffloadConfig(host_blocks=32, device_blocks=32)
    many, keys = tuple(range(SMALL + 1)), tuple([b"%d" % slot for slot in range(SMALL + 1)])
    ledger = Ledger(config)
    for event in (
        ev.LogOpened(1, 0, 0, config, "", 1),
        ev.StorePlanned(2, 0, 0, (), keys, many, many),
        ev.TransfersSubmitted(3, 0, 0, (2,)),
        ev.WorkerReported(4, 0, 0, 2, 0, True),
        ev.BlocksEvicted(5, 0, 0, many, (), 0),
    ):
        ledger.apply(event)
    assert (len(ledger.free), len(ledger.index)) == (32, 0)


@pytest.mark.parametrize(
    "replace",
    [
        lambda ledger: setattr(ledger, "generation", array("i", ledger.generation)),
        lambda ledger: setattr(ledger.blocks, "words", array("q", ledger.blocks.words)),
        lambda ledger: setattr(ledger.blocks, "words", array("h", [*ledger.blocks.words, *range(4)])),
        lambda ledger: setattr(ledger.blocks, "totals", array("i", ledger.blocks.totals)),
        lambda ledger: setattr(ledger.blocks, "totals", array("q", [*ledger.blocks.totals, 0])),
        lambda ledger: setattr(ledger, "requests", OrderedDict(ledger.requests)),
    ],
    ids=["generations", "words", "more words of half the size", "totals", "more totals", "requests"],
)
def test_memory_of_another_kind_is_left_to_python(replace: Callable[[Ledger], None]) -> None:
    """A test may have built its ledger from other containers."""
    config = OffloadConfig(host_blocks=4, device_blocks=4)
    twins = Twins(config)
    for ledger in (twins.native, twins.python):
        replace(ledger)
    for event in (
        ev.LogOpened(1, 0, 0, config, "", 1),
        RequestArrived(2, 0, 0, "r"),
        StorePlanned(3, 0, 0, (("r", 2),), (b"a", b"b"), (0, 1), (0, 1)),
        ev.TransfersSubmitted(4, 0, 0, (3,)),
        ev.WorkerReported(5, 0, 0, 3, 0, True),
        BlocksTouched(6, 0, 0, (0,)),
        CacheReset(7, 0, 0, 1),
    ):
        assert twins.apply(event).error is None


@pytest.mark.parametrize(
    "ids", [[*range(20), None], [*range(20), -1], array("d", range(20)), array("q", [-1] * 20)]
)
def test_what_is_no_batch_of_ids_is_left_to_python(ids: Any) -> None:
    """Python packs it, or refuses it. No reference to `None` leaks."""
    before = getrefcount(None)
    for _ in range(100):
        assert native.pack_ids(ids) is None
    if sys.version_info < (3, 12):  # In later ones None is immortal, and its count says nothing.
        assert getrefcount(None) < before + 50


def test_a_load_of_pins_that_were_voided_is_refused_alike() -> None:
    """Correct bytes (S15): the slots now have other blocks, which another request holds."""
    config = OffloadConfig(host_blocks=2, device_blocks=4)
    twins = Twins(config)
    for event in (
        ev.LogOpened(1, 0, 0, config, "", 1),
        StorePlanned(2, 0, 0, (), (b"a", b"b"), (0, 1), (0, 1)),
        ev.TransfersSubmitted(3, 0, 0, (2,)),
        ev.WorkerReported(4, 0, 0, 2, 0, True),
        ev.HitMatched(5, 0, 0, "p", (0, 1), None, 2, 0, 2),
        CacheReset(6, 0, 0, 1),
        StorePlanned(7, 0, 0, (), (b"c", b"d"), (0, 1), (0, 1)),
        ev.TransfersSubmitted(8, 0, 0, (7,)),
        ev.WorkerReported(9, 0, 0, 7, 0, True),
        ev.HitMatched(10, 0, 0, "q", (0, 1), None, 2, 0, 2),
    ):
        assert twins.apply(event).error is None
    assert is_refusal(twins.apply(ev.LoadPlanned(11, 0, 0, "p", (0, 1), (2, 3))))
    assert twins.apply(ev.LoadPlanned(11, 0, 0, "q", (0, 1), (2, 3))).error is None
