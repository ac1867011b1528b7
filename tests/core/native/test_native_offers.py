"""Both bodies offer the same batches. If a program replaces a Python function, the replacement is called."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_traffic import ACTS, FULL, MAMBA, SLIDING, WIDE, Hand, drive

import kvsm
from examples import examples
from kvsm.check.worlds.small_engine import SmallEngine
from kvsm.check.worlds.small_request import HASH_TOKENS, SmallRequest
from kvsm.core import native
from kvsm.core.offloader import PreparedStore
from kvsm.core.scheduler import KVCacheGroup, SchedulerConfig
from kvsm.core.scheduler.offer_batch import OfferBatch
from kvsm.core.scheduler.offers import _TWINS_OF_COLLECT, _TWINS_OF_DUE, NativeStoreOffers, StoreOffers
from kvsm.core.scheduler.tracked import TrackedRequest

if native.WHY_NOT:
    pytest.skip(f"Python offers: {native.WHY_NOT}", allow_module_level=True)

GROUPS: list[tuple[KVCacheGroup, ...]] = [
    (FULL,),
    (FULL,),
    (FULL,),
    (WIDE,),
    (KVCacheGroup(HASH_TOKENS, drafter=True),),
    (SLIDING,),
    (FULL, SLIDING),
    (FULL, MAMBA),
]


# Both bodies offer alike.


def batch_of(batch: OfferBatch) -> tuple[Any, ...]:
    """Everything in a batch."""
    return (
        list(batch.keys),
        list(batch.blocks),
        [(run.tracked.name, run.group, run.chunks, run.start) for run in batch._runs],
        list(batch._starts),
        dict(batch._parents),
        set(batch._offered_before),
        [(name, one.known.name, one.settled, one.offered) for name, one in batch._reached.items()],
        [tracked.name for tracked in batch._begun],
        batch._owners(),
    )


def in_python(offers: StoreOffers) -> StoreOffers:
    """The same offers without the native body."""
    assert type(offers) is NativeStoreOffers
    with native.without():
        made = StoreOffers(offers._offloader, offers._config, offers._device_blocks)
    assert type(made) is StoreOffers
    return made


def traced(
    options: dict[str, Any], request: dict[str, Any], acts: list[int], *, is_native: bool
) -> list[Any]:
    """All batches of a run, and after each action the plan, the number of events and each `next_offer`."""
    engine, trace = SmallEngine(**options), list[Any]()
    scheduler = engine.scheduler
    if not is_native:
        scheduler.offers = in_python(scheduler.offers)
    offer = scheduler.offers._offer

    def noted(batch: OfferBatch, add_to_plan: Any) -> PreparedStore:
        trace.append(batch_of(batch))
        return offer(batch, add_to_plan)

    def look(_: SmallEngine) -> None:
        waiting = [(one.name, one.next_offer, one.loaded) for one in scheduler.state.tracked.values()]
        trace.append((repr(engine.plan), len(engine.log), waiting))

    scheduler.offers._offer = noted  # type: ignore[method-assign]
    drive(engine, acts, check=look, **request)
    return [*trace, *engine.log]


@settings(max_examples=examples(100))
@given(st.data(), ACTS)
def test_any_run_is_offered_alike(data: st.DataObject, acts: list[int]) -> None:
    """Batches, plans, events and what each request waits for: with preemptions, failures, resets, loads, full
    hosts and prompts that share blocks."""
    groups = data.draw(st.sampled_from(GROUPS))
    chunk = 1 if MAMBA in groups else data.draw(st.sampled_from((1, 1, 2, 3)))
    draw = lambda *of: data.draw(st.sampled_from(of))  # noqa: E731
    options: dict[str, Any] = {
        "groups": groups,
        "host_blocks": draw(32, 8, 3),
        "workers": draw(1, 2),
        "references": draw(True, False),
        "asynchronous": draw(False, True),
        "drafts": draw(0, 2),
        "chunk_tokens": draw(64, 5),
        "prompt_only": draw(False, False, True),
        "core": {
            "blocks_per_chunk": chunk,
            "store_threshold": draw(1, 1, 1, 2),
            "policy": draw("lru", "lru", "s3fifo"),
        },
    }
    parameters = draw(None, None, {"do_remote_decode": True}, {"offload": False}, {"max_offload_tokens": 9})
    request = {"parameters": parameters}
    ours, theirs = (traced(options, request, acts, is_native=one) for one in (True, False))
    assert ours == theirs


@contextmanager
def entered() -> Iterator[list[str]]:
    """The names of the functions of kvsm that are entered in this `with` block."""
    names, place = list[str](), str(Path(kvsm.__file__).parent)

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(place):
            names.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        yield names
    finally:
        sys.setprofile(None)


def test_a_usual_step_enters_no_function_for_a_request() -> None:
    hand, requests = decoding(5)
    with entered() as names:
        plan = hand.step(*requests)
    assert [len(job.device_blocks) for job in plan.stores] == [5 * 2]
    assert {"collect", "_add", "_open", "full_chunks", "confirmed_tokens", "make_keys"}.isdisjoint(names)
    assert names.count("collect_due") == 1


def decoding(
    count: int, request: Callable[..., Any] = SmallRequest, chunk: int = 1
) -> tuple[Hand, list[Any]]:
    """Requests whose first block is stored, and whose next two are computed and not offered."""
    hand = Hand(core={"blocks_per_chunk": chunk, "host_blocks": 40})
    requests = [request(f"r{number}", range(100 * number, 100 * number + 13)) for number in range(count)]
    for number, one in enumerate(requests):
        hand.admit(one, [*range(4 * number, 4 * number + 4)])
        hand.compute(one, HASH_TOKENS * chunk)
    hand.end(hand.step(*requests))
    for one in requests:
        hand.compute(one, 3 * HASH_TOKENS)
    return hand, requests


# Whatever an engine's attributes are.


class _Hash(bytes):
    """An engine's hash may be of a type below bytes."""


class _Hashes(list[Any]):
    """An engine's hashes may be any sequence."""


def _raising() -> object:
    raise KeyboardInterrupt("in the engine")


ODD_TOKENS: list[Any] = [0, 4, -3, 1 << 62, 1 << 63, 1 << 80, True, 8.0, np.int64(12), "12", None, _raising]
ODD_HASHES: list[Any] = [
    lambda hashes: tuple(hashes),
    lambda hashes: _Hashes(hashes),
    lambda hashes: [_Hash(one) for one in hashes],
    lambda hashes: [hashes[0], None, *hashes[2:]],
    lambda hashes: hashes[:1],
    lambda _: [],
    lambda _: None,
]
ODD_FIELDS: list[tuple[str, Any]] = [
    ("trusted", 4),
    ("trusted", 100),
    ("loaded", (0, 8)),
    ("loaded", (8, 12)),
    ("loaded", None),
    ("refused", {b"key"}),
    ("tables", [[7]]),
    ("tables", [[], []]),
    ("tables", [(1, 2, 3)]),
    ("tables", ()),
    ("max_store_tokens", 1 << 80),
    ("max_store_tokens", 9),
    ("max_store_tokens", 0),
    ("prompt_only", True),
    ("name", "none"),
    ("next_offer", 1 << 70),
    ("next_offer", "soon"),
    ("remote_decode", True),
]


def collected(change: Callable[[Hand, Any], object], *, is_native: bool, chunk: int = 1) -> tuple[Any, ...]:
    """What a step collects after a change, or the error that it raises, and what it leaves."""
    hand, requests = decoding(3, OddRequest, chunk)
    offers = hand.scheduler.offers if is_native else in_python(hand.scheduler.offers)
    change(hand, requests[1])
    batch, tracked = offers._batch(), hand.scheduler.state.tracked
    error = due = None
    try:
        due = offers.due(tracked, [*tracked, "none"])
        offers.collect_due(batch, due)
    except BaseException as raised:
        error = type(raised), str(raised)
    left = [(one.next_offer, one.loaded, one.trusted) for one in tracked.values()]
    return error, None if due is None else list(due), batch_of(batch), left, len(hand.log)


class OddRequest(SmallRequest):
    """Its attributes may be anything, or what a function returns that is called when they are read."""

    num_prompt_tokens: Any
    num_computed_tokens: Any
    num_output_placeholders: Any

    def __init__(self, *how: Any) -> None:
        self.odd: dict[str, Any] = {}
        super().__init__(*how)

    def __getattribute__(self, name: str) -> Any:
        odd = super().__getattribute__("__dict__").get("odd", {})
        if name not in odd:
            return super().__getattribute__(name)
        return odd[name]() if callable(odd[name]) else odd[name]


def alike(change: Callable[[Hand, Any], object]) -> tuple[Any, ...]:
    for chunk in (2, 1):
        ours, theirs = (collected(change, is_native=one, chunk=chunk) for one in (True, False))
        assert ours == theirs
    return ours


@pytest.mark.parametrize("value", ODD_TOKENS, ids=lambda value: "raising" if callable(value) else repr(value))
@pytest.mark.parametrize(
    "name", ["num_computed_tokens", "num_output_placeholders", "num_prompt_tokens", "num_tokens"]
)
def test_odd_numbers_of_an_engine_are_taken_alike(name: str, value: Any) -> None:
    """Or refused, with the same words, and with the same requests collected before."""
    alike(lambda _, request: request.odd.update({name: value}))


@pytest.mark.parametrize("number", range(len(ODD_HASHES)))
def test_odd_hashes_of_an_engine_are_taken_alike(number: int) -> None:
    alike(lambda _, request: request.odd.update(block_hashes=ODD_HASHES[number](request.block_hashes)))


@pytest.mark.parametrize("prompt_only", [False, True])
@pytest.mark.parametrize(
    "numbers", [(12, 0, 5, 12), (12, 0, 5, 20), (12, 1, 5, 13), (8, 0, 12, 13), (4, 8, 13, 13)]
)
def test_the_counts_of_an_engine_confirm_alike(numbers: tuple[int, ...], prompt_only: bool) -> None:
    """Computed, placeholders, prompt and all tokens. The token that was sampled last has no KV yet."""
    names = "num_computed_tokens", "num_output_placeholders", "num_prompt_tokens", "num_tokens"

    def change(hand: Hand, request: Any) -> None:
        request.odd.update(zip(names, numbers))
        tracked = hand.scheduler.state.tracked[request.request_id]
        tracked.prompt_only, tracked.next_offer = prompt_only, -100

    alike(change)


def test_no_reference_is_lost_or_kept() -> None:
    """Neither of what is read nor of what is made, and not if Python has to begin again."""
    hand, _ = decoding(3)
    offers, tracked = hand.scheduler.offers, hand.scheduler.state.tracked
    one, records = tracked["r1"], hand.core.ledger.requests
    read = [tracked, records, one, one.name, one.request, one.tables[0], one._layout, records["r1"]]
    read += [one.request.block_hashes, None, True, False, "due"]
    immortal = sys.version_info >= (3, 12)

    def counts(is_native: bool) -> tuple[list[int], list[int]]:
        for _ in range(50):
            batch = offers._batch()
            for each in tracked.values():
                each.next_offer = 0
            due = dict(tracked)
            if is_native:
                assert native.find_due(tracked, [*tracked, 7], True) is None  # type: ignore[list-item]
                native.collect_due(batch, due)
            else:
                StoreOffers.collect_due(offers, batch, due)
        made = [
            reached
            for name in due
            for reached in (batch._reached[name].settled, batch._reached[name].offered)
        ]
        made_counts = [*map(sys.getrefcount, made), *map(sys.getrefcount, batch.keys)]
        del batch, due, made
        return [*map(sys.getrefcount, read[:9] if immortal else read)], made_counts

    reference, in_c = counts(False), counts(True)
    assert in_c[1] == reference[1]
    assert max(abs(ours - theirs) for ours, theirs in zip(in_c[0], reference[0])) < 10


@pytest.mark.parametrize(("field", "value"), ODD_FIELDS)
def test_odd_states_of_a_request_are_taken_alike(field: str, value: Any) -> None:
    alike(lambda hand, request: setattr(hand.scheduler.state.tracked[request.request_id], field, value))


@pytest.mark.parametrize("settled", [(), (0,), (1,), (2,), (9,)])
@pytest.mark.parametrize("offered", [(), (0,), (1,), (2,), (9,)])
def test_any_cursors_are_taken_alike(settled: tuple[int, ...], offered: tuple[int, ...]) -> None:
    """Each of them is longer in the ledger than the chunks that are full now, or shorter."""

    def change(hand: Hand, request: Any) -> None:
        entry = hand.core.ledger.requests[request.request_id]
        entry.settled, entry.offered = settled, offered

    alike(change)


def test_a_request_that_the_ledger_does_not_know_arrives_in_its_turn() -> None:
    """Python makes its record. The batch has its chunks between those of the other requests."""

    def change(hand: Hand, request: Any) -> None:
        hand.core.finish(request.request_id)
        assert request.request_id not in hand.core.ledger.requests

    _, due, batch, *_ = alike(change)
    assert due == ["r0", "r1", "r2"]
    assert [run[0] for run in batch[2]] == due


@pytest.mark.parametrize(("trusted", "name"), [(4, "num_tokens"), (100, "num_prompt_tokens")])
def test_a_request_whose_load_may_fail_is_left_to_python_at_once(trusted: int, name: str) -> None:
    """Python reads this attribute later, or not at all."""

    def change(hand: Hand, request: Any) -> None:
        hand.scheduler.state.tracked[request.request_id].trusted = trusted
        request.odd[name] = _raising

    alike(change)


@pytest.mark.parametrize("name", ["num_computed_tokens", "num_tokens", "block_hashes"])
@pytest.mark.parametrize(
    "harm",
    [
        lambda hand, _: hand.scheduler.state.tracked.clear(),
        lambda hand, _: hand.core.ledger.requests.clear(),
        lambda _, tracked: tracked.tables[0].clear(),
        lambda _, tracked: tracked.tables.clear(),
        lambda _, tracked: tracked.refused.add(tracked.make_keys(0, 1, 2)[0]),
    ],
)
def test_attributes_that_change_the_scheduler_while_they_are_read(name: str, harm: Any) -> None:
    """Both bodies read them before they read these parts of the scheduler."""

    def change(hand: Hand, request: Any) -> None:
        tracked, value = hand.scheduler.state.tracked[request.request_id], getattr(request, name)

        def read() -> Any:
            request.odd.clear()
            harm(hand, tracked)
            return value

        request.odd[name] = read

    alike(change)


class _Names:
    """Names that an engine gives in a container of its own."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def __iter__(self) -> Any:
        return iter(self._names)


@pytest.mark.parametrize("form", [list, tuple, set, dict.fromkeys, iter, _Names])
def test_names_come_in_any_form(form: Callable[[list[str]], Any]) -> None:
    """Those that may be gone once they were read are left to Python."""
    assert (native.find_due({}, form(["r0"]), True) is None) == (form in (iter, _Names))
    hand, _ = decoding(3)
    names: list[Any] = ["r0", "none", "r2", "r1"]
    ours, theirs = (
        one.due(hand.scheduler.state.tracked, form(names))
        for one in (hand.scheduler.offers, in_python(hand.scheduler.offers))
    )
    assert sorted(ours) == ["r0", "r1", "r2"]
    assert ours == theirs
    if form is not set:
        assert list(ours) == list(theirs) == ["r0", "r2", "r1"]


# Functions that were replaced.


TWINS = [*_TWINS_OF_DUE, *_TWINS_OF_COLLECT]
each_twin = pytest.mark.parametrize("place", range(len(TWINS)), ids=[twin.name for twin in TWINS])


@each_twin
def test_a_replacement_is_called_instead_of_c(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the function is replaced after the scheduler was made."""
    owner, name, function, _ = TWINS[place]
    hand, requests = decoding(2)
    ran = list[str]()

    def noted(*how: Any, **named: Any) -> Any:
        ran.append(name)
        return function(*how, **named)

    monkeypatch.setattr(owner, name, noted)
    (store,) = hand.step(*requests).stores
    assert len(store.device_blocks) == 4
    assert ran


@each_twin
def test_changed_code_is_called_instead_of_c(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exhibits of the museum and planted bugs change functions like this."""
    hand, requests = decoding(2)
    monkeypatch.setattr(TWINS[place].function, "__code__", _broken.__code__)
    with pytest.raises(RuntimeError, match="the planted code runs"):
        hand.step(*requests)


def _broken(*_: object, **__: object) -> None:
    raise RuntimeError("the planted code runs")


def test_a_derived_class_runs_in_python() -> None:
    class Derived(StoreOffers):
        """Offers of a program."""

    hand = Hand()
    offers = hand.scheduler.offers
    made = Derived(offers._offloader, offers._config, offers._device_blocks)
    assert not isinstance(made, NativeStoreOffers)


class _OtherBatch(OfferBatch):
    """A batch of a program."""


class _OtherRequest(TrackedRequest):
    """A request of a program."""

    __slots__ = ()


def test_batches_and_requests_of_other_classes_are_left_to_python() -> None:
    """They may have methods of their own."""
    hand, requests = decoding(2)
    offers, config = hand.scheduler.offers, SchedulerConfig(groups=(FULL,), hash_tokens=HASH_TOKENS)
    tracked = hand.scheduler.state.tracked
    batch, wanted = _OtherBatch(hand.core, config, None), OfferBatch(hand.core, config, None)
    before = tracked["r1"]
    other = tracked["r1"] = _OtherRequest(requests[1], config, before._layout)
    other.tables = before.tables
    due = offers.due(tracked, ["r0", "r1"])
    assert [*due.values()] == [tracked["r0"], other]
    offers.collect_due(batch, due)
    StoreOffers.collect_due(offers, wanted, due)
    assert batch_of(batch) == batch_of(wanted)


@pytest.mark.parametrize(
    "options",
    [
        {"groups": (SLIDING,)},
        {"groups": (FULL, WIDE)},
        {"groups": (KVCacheGroup(HASH_TOKENS, drafter=True),)},
        {"core": {"store_threshold": 2}},
    ],
)
def test_rules_for_other_groups_and_a_threshold_are_in_python(options: dict[str, Any]) -> None:
    groups, core = options.get("groups", (FULL,)), options.get("core")
    hand = Hand(*groups, core=core)
    request = SmallRequest("r", range(13))
    hand.admit(request, *[[4 * group + one for one in range(1, 5)] for group in range(len(groups))])
    hand.compute(request)
    with entered() as names:
        hand.step(request)
    assert "collect" in names
