"""A copy that is made in pieces is the state at which it was frozen, whatever is folded meanwhile."""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable
from random import Random
from sys import getrefcount
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from museum.drawn_worlds import audited_core, audited_serving, audited_tiers
from native_twins import reset_often, saved, spoiled, walked, walked_in_arrays

from examples import examples
from kvsm import events as ev
from kvsm.check.walks.walk import walk
from kvsm.check.worlds.audited import AuditedWorld
from kvsm.check.worlds.core_options import draw_options
from kvsm.core import native
from kvsm.core.ledger import Ledger, NativeLedger, frozen
from kvsm.core.ledger.frozen import freeze
from kvsm.core.ledger.snapshot import snapshot
from kvsm.core.ledger.state_copy import StateCopy, WholeState
from kvsm.core.log import MemoryLog
from kvsm.core.offloader import Offloader
from kvsm.core.offloader.emitter import EventEmitter
from kvsm.core.policies import POLICIES
from kvsm.errors import InvalidEvent
from kvsm.events import KINDS, OffloadConfig, OffloadingEvent
from kvsm.ids import pack
from kvsm.testing import assert_sound

needs_native = pytest.mark.skipif(bool(native.WHY_NOT), reason=f"Python folds: {native.WHY_NOT}")


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small pools, too, take many pieces."""
    monkeypatch.setattr(frozen, "_MOST", 2)


def finished(copy: StateCopy) -> bytes:
    """All that is left of it, at once."""
    while not copy.go_on():
        pass
    return b"".join(copy.pieces())


class Copying:
    """A ledger that is copied while it folds. Each copy is compared with the snapshot of its moment."""

    def __init__(self, ledger: Ledger, random: Random) -> None:
        self.ledger, self._random = ledger, random
        self._copy: StateCopy | None = None
        self._wanted: bytes | str = b""
        self.finished = 0

    def before_event(self) -> None:
        """Perhaps freeze, drop, or go on."""
        kind = self._random.random()
        if kind < (0.2 if self._copy is None else 0.02):
            self._wanted = saved(self.ledger)
            self._copy = freeze(self.ledger)
        elif kind > 0.99 and self._copy is not None:
            self._copy.drop()
            self._copy = None
        elif self._copy is not None and any(
            self._copy.go_on() for _ in range(self._random.choice((0, 1, 4)))
        ):
            self.compare()

    def compare(self) -> None:
        """Finish the copy, if there is one, and compare it."""
        if self._copy is not None:
            assert finished(self._copy) == self._wanted
            self._copy = None
            self.finished += 1


def folding(options: OffloadConfig, events: Any, random: Random) -> Copying:
    """A ledger that has folded these events, and was copied meanwhile."""
    copying = Copying(Ledger(options), random)
    for event in events:
        copying.before_event()
        copying.ledger.apply(event)
    copying.compare()
    return copying


# What is folded meanwhile.


@needs_native
@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=examples(25))
@given(st.integers(0, 2**32))
def test_a_copy_is_the_state_at_which_it_was_frozen(policy: str, seed: int) -> None:
    """Events between the pieces: resets, losses, restarts, evictions. Copies that are dropped, and a second
    one before the first is whole."""
    random = Random(seed)
    options = msgspec.structs.replace(draw_options(random), policy=policy)
    folding(options.config(), walked(options, seed, 80), random)


@needs_native
def test_each_kind_of_event_may_follow() -> None:
    """A copy is begun before each event of some walks, and goes on only after it."""
    met, seed = set[type[OffloadingEvent]](), 0
    # The core world makes none of these events.
    while seed < 30 or met != set(KINDS) - {ev.HintAnswered, ev.TimesMeasured, ev.SlowHitFound}:
        options, seed = draw_options(Random(seed)), seed + 1
        ledger = Ledger(options.config())
        for event in walked(options, seed, 60):
            wanted, copy = snapshot(ledger), freeze(ledger)
            ledger.apply(event)
            assert finished(copy) == wanted, event
            met.add(type(event))
        assert seed < 1_000, set(KINDS) - met


@needs_native
def test_measured_times_and_slow_hits_may_follow() -> None:
    """The world of the core has no such events."""
    log = MemoryLog()
    config = OffloadConfig(host_blocks=4, device_blocks=4, load_only_if_faster=True)
    core = Offloader(config, log, clock_ns=lambda: 0)
    core.note_times(9, 9, 0)
    core.arrive("r")
    assert core.declines("r", 1, 1)
    ledger = Ledger(config)
    for event in log:
        wanted, copy = snapshot(ledger), freeze(ledger)
        ledger.apply(event)
        assert finished(copy) == wanted, event


@needs_native
@settings(max_examples=examples(25))
@given(st.integers(0, 2**32))
def test_resets_between_the_pieces(seed: int) -> None:
    """A reset changes all words and the order of the free slots."""
    random = Random(seed)
    config = OffloadConfig(
        host_blocks=random.choice((5, 64, 70, 150)),
        device_blocks=4096,
        workers=2,
        policy=random.choice((*POLICIES, "lru")),
        max_live_transfers=8,
    )
    folding(config, reset_often(config, random), random)


@needs_native
@settings(max_examples=examples(25))
@given(st.integers(0, 2**32))
def test_batches_that_are_arrays(seed: int) -> None:
    """Batches of more than 16 ids, and records that have them."""
    folding(*walked_in_arrays(seed), Random(seed))


@needs_native
@settings(max_examples=examples(100))
@given(st.integers(0, 2**32))
def test_refused_events_change_no_copy(seed: int) -> None:
    """Wrong fields, wrong types, absent and doubled ids; then the right event."""
    random = Random(seed)
    options = draw_options(random)
    copying = Copying(Ledger(options.config()), random)
    for event in walked(options, seed, 40):
        for one in (spoiled(event, random), event):
            copying.before_event()
            try:
                copying.ledger.apply(msgspec.structs.replace(one, seq=copying.ledger.seq + 1))
            except InvalidEvent:
                continue
            except Exception:
                break  # a type that no decoder lets through
            if isinstance(saved(copying.ledger), str):
                return  # a state that cannot be saved
    copying.compare()


@needs_native
@pytest.mark.parametrize(
    ("world", "operations"),
    [(audited_core, 1_500), (audited_serving, examples(1_500)), (audited_tiers, examples(1_500))],
)
def test_worlds_whose_ledgers_are_copied(
    world: Callable[[Random], AuditedWorld], operations: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tiers among them: copies to another tier leave a block in the eviction order."""
    apply, random = NativeLedger.apply, Random(5)
    ledgers: dict[int, Copying] = {}

    def copied(ledger: NativeLedger, event: OffloadingEvent) -> Any:
        ledgers.setdefault(id(ledger), Copying(ledger, random)).before_event()
        return apply(ledger, event)

    monkeypatch.setattr(NativeLedger, "apply", copied)
    # A native core folds without `apply`.
    monkeypatch.setattr(Offloader, "emit", lambda *given: EventEmitter.emit(*given))
    result = walk(world, seed=17, operations=operations)
    assert result.failure is None, result.failure
    assert sum(one.finished for one in ledgers.values()) > 10


@needs_native
def test_queues_may_be_changed_by_python() -> None:
    """Policies and rare kinds of events change them by their methods."""
    ledger = stored(8)
    wanted, copy = snapshot(ledger), freeze(ledger)
    ledger.policy.touched((2, 1))
    ledger.policy.removed((0, 3))
    ledger.free.append((3,))
    ledger.free.remove((6,))
    ledger.policy.restore(pack_slots(5, 0))
    assert finished(copy) == wanted


@needs_native
def test_a_batch_may_have_a_form_that_only_python_reads() -> None:
    """No decoder lets a tuple of 17 ids through, but a caller in this process may make one."""
    ledger = stored(20)
    wanted, copy = snapshot(ledger), freeze(ledger)
    ledger.apply(ev.HitMatched(9, 0, 0, "b", tuple(range(17))))
    assert len(ledger.policy) == 3
    assert finished(copy) == wanted


@needs_native
@pytest.mark.parametrize(
    "replace",
    [
        lambda ledger: delattr(ledger, "offers"),
        lambda ledger: setattr(ledger.offers, "times", []),
        lambda ledger: setattr(ledger.provenance, "brought", OrderedDict()),
        lambda ledger: setattr(ledger.provenance, "stale", OrderedDict()),
        lambda ledger: setattr(ledger, "free", []),
    ],
    ids=["no offers", "offers", "brought", "stale", "free"],
)
def test_containers_of_another_kind_are_not_copied_in_c(replace: Callable[[Ledger], None]) -> None:
    """A test may have built its ledger from them. Then the state is copied at once, in Python."""
    ledger = stored(4)
    assert isinstance(ledger, NativeLedger)
    replace(ledger)
    assert ledger.freeze() is None


# Forms and sizes.


def stored(count: int, slots: int = 0, key_size: int = 8) -> Ledger:
    """A ledger that holds `count` blocks in a pool of `slots`. Each was loaded into a device block."""
    slots = slots or count + 1
    ledger = Ledger(OffloadConfig(host_blocks=slots, device_blocks=slots))
    keys = tuple([b"%d" % slot + bytes(key_size) for slot in range(count)])
    ids = pack(list(range(count)))
    for seq, (kind, *fields) in enumerate(
        (
            (ev.StorePlanned, (), keys, ids, ids),
            (ev.TransfersSubmitted, (1,)),
            (ev.WorkerReported, 1, 0, True),
            (ev.HitMatched, "a", ids),
            (ev.LoadPlanned, "a", ids, ids),
            (ev.TransfersSubmitted, (5,)),
            (ev.WorkerReported, 5, 0, True),
            (ev.OffersCounted, tuple([b"offered %d" % offer for offer in range(count)])),
        ),
        1,
    ):
        ledger.apply(kind(seq, 0, 0, *fields))
    return ledger


@needs_native
@pytest.mark.parametrize("policy", POLICIES)
def test_a_copy_goes_on_after_a_test_has_looked_at_the_ledger(policy: str) -> None:
    """`assert_sound` copies the policy, too. A test may call it while a segment of the log opens."""
    core = Offloader(OffloadConfig(host_blocks=40, device_blocks=40, policy=policy))
    for number in range(5):
        keys = [b"%d-%d" % (number, block) for block in range(10)]
        job = core.prepare_store("", keys, range(10)).job
        assert job is not None
        core.submit([job.transfer])
        core.complete_store(job.transfer)
    wanted, copy = snapshot(core.ledger), freeze(core.ledger)
    copy.go_on()
    assert_sound(core.ledger)
    assert finished(copy) == wanted


def pack_slots(*slots: int) -> bytes:
    """As a queue saves them."""
    return b"".join(slot.to_bytes(4, "little") for slot in slots)


@needs_native
@pytest.mark.parametrize("count", [1, 15, 16, 63, 64, 70_000])
def test_each_length_has_the_form_of_msgpack(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths of bytes and of arrays take the fewest bytes that hold them."""
    monkeypatch.undo()
    ledger = stored(count)
    assert finished(freeze(ledger)) == snapshot(ledger)
    for one in range(count // 2):
        ledger.provenance.stale[one] = b"s"
    assert finished(freeze(ledger)) == snapshot(ledger)


@needs_native
@pytest.mark.parametrize("key_size", [0, 250, 254, 255, 300, 65_534, 65_535, 70_000])
def test_each_length_of_a_key(key_size: int) -> None:
    """A key has one byte more. The limits of the forms are 255 and 65535 bytes."""
    ledger = stored(3, key_size=key_size)
    assert finished(freeze(ledger)) == snapshot(ledger)


@needs_native
@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("cost", [100, 1000])
def test_a_call_costs_no_more_than_it_may(part: int, cost: int) -> None:
    """The next event waits for the call. The last call returns what it did not use, for the next part."""
    one, calls = stored(4000).freeze()[part], 1  # type: ignore[attr-defined]
    while not (left := one.go_on(cost)):
        calls += 1
    assert left < cost
    assert calls * cost - left >= 4000


@needs_native
def test_pieces_are_small() -> None:
    """Whoever writes them need not wait for one of them."""
    ledger = stored(40_000)
    copy = freeze(ledger)
    finished(copy)
    assert max(map(len, copy.pieces())) <= 1 << 20


@needs_native
def test_one_call_copies_the_state_of_a_small_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call ends when it has cost enough, wherever that is: so a small state waits for no second one."""
    monkeypatch.undo()
    assert freeze(stored(20)).go_on()


@needs_native
def test_offers_keep_their_order() -> None:
    """A key that is offered again moves to the end; one that is stored, or offered too long ago, leaves."""
    ledger, random = Ledger(OffloadConfig(host_blocks=25, device_blocks=2)), Random(3)
    for seq in range(1, 500):
        keys = tuple([b"%d" % random.randrange(80) for _ in range(random.randint(1, 9))])
        ledger.apply(ev.OffersCounted(seq, 0, 0, keys))
        ledger.offers.forget(keys[: random.randint(0, 3)])
        if seq % 7 == 0:
            assert finished(freeze(ledger)) == snapshot(ledger)


# One copy at a time, and its end.


@needs_native
def test_a_second_copy_drops_the_first() -> None:
    ledger = stored(8)
    first = freeze(ledger)
    first.go_on()
    second = freeze(ledger)
    with pytest.raises(RuntimeError, match="dropped"):
        first.go_on()
    assert finished(second) == snapshot(ledger)


@needs_native
def test_a_whole_copy_stays() -> None:
    ledger = stored(8)
    wanted, first = snapshot(ledger), freeze(ledger)
    finished(first)
    ledger.apply(ev.BlocksEvicted(9, 0, 0, (1, 2), (), 10))
    freeze(ledger)
    assert b"".join(first.pieces()) == wanted
    assert first.go_on()


@needs_native
def test_a_dropped_copy_is_of_no_use() -> None:
    copy = freeze(stored(8))
    with pytest.raises(RuntimeError, match="not whole"):
        copy.pieces()
    copy.drop()
    copy.drop()
    with pytest.raises(RuntimeError, match="dropped"):
        copy.go_on()
    with pytest.raises(RuntimeError, match="dropped"):
        copy.pieces()


@needs_native
def test_a_copy_outlives_its_ledger() -> None:
    ledger = stored(40)
    wanted, copy = snapshot(ledger), freeze(ledger)
    ledger.apply(ev.BlocksEvicted(9, 0, 0, (1, 2), (), 10))
    del ledger
    gc.collect()
    assert finished(copy) == wanted


@needs_native
@pytest.mark.parametrize("end", ["whole", "dropped", "forgotten", "replaced", "with its ledger"])
def test_a_copy_leaves_nothing_behind(end: str) -> None:
    """However it ends, nobody holds what it kept."""
    ledger = stored(8)
    key, copy = ledger.key_of[3], [freeze(ledger)]
    ledger.apply(ev.BlocksEvicted(9, 0, 0, (3,), (), 10))
    ledger.apply(ev.StorePlanned(10, 0, 0, (), (b"new",), (3,), (0,)))
    ledger.apply(ev.BlocksRewritten(11, 0, 0, (3,)))
    assert getrefcount(key) == ONLY_HERE + 2  # of the slot, and of the device block
    if end == "whole":
        finished(copy[0])
    elif end == "dropped":
        copy[0].drop()
    elif end == "replaced":
        freeze(ledger)
    elif end == "with its ledger":
        del ledger
    if end in ("forgotten", "with its ledger"):
        copy.clear()
    assert getrefcount(key) == ONLY_HERE


def references_to_a_variable() -> int:
    one = object()
    return getrefcount(one)


ONLY_HERE = references_to_a_variable()
"""References to an object that one variable has, while somebody counts them: one less from Python 3.14 on."""


def test_python_copies_all_at_once() -> None:
    """There is no copy on write in the Python body."""
    with native.without():
        ledger = stored(4)
    copy = freeze(ledger)
    assert isinstance(copy, WholeState)
    assert copy.go_on()
    assert list(copy.pieces()) == [snapshot(ledger)]
    copy.drop()


@needs_native
def test_what_the_native_body_does_not_know_is_copied_at_once() -> None:
    """A test may give a ledger other containers."""
    ledger = stored(4)
    with native.without():
        ledger.free = type(ledger.free).__mro__[2](5)
        ledger.free.append((4,))
    assert isinstance(freeze(ledger), WholeState)
    assert finished(freeze(ledger)) == snapshot(ledger)
