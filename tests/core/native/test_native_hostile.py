"""The native types refuse what they cannot do, and never crash. `hostile_native.py` draws such uses of them.

The slow suite plays more of them under sanitizers (`test_native_build.py`).
"""

from __future__ import annotations

import os
import subprocess
import sys
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from native_twins import Twins
from places import ROOT

from kvsm.core import native
from kvsm.core.ledger import Ledger
from kvsm.core.ledger.key_index import DictIndex, NativeIndex
from kvsm.core.offloader import Offloader
from kvsm.core.policies.slot_queue import NativeSlotQueue
from kvsm.events import OffloadConfig, RequestArrived, StorePlanned

if native.WHY_NOT:
    pytest.skip(f"Python folds: {native.WHY_NOT}", allow_module_level=True)


def played(first: int, count: int, **environment: str) -> str:
    """The end of what a process prints that plays these seeds; the last seed is in it if it crashed."""
    done = subprocess.run(
        [sys.executable, "tests/support/hostile_native.py", str(first), str(count)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/tests/support:{ROOT}/specs", **environment},
        text=True,
        stdout=-1,
        stderr=subprocess.STDOUT,
    )
    return done.stdout[-4000:]


def test_hostile_uses_are_refused() -> None:
    """In a process of its own: a crash of it is a failure with a seed."""
    assert played(0, 60).endswith("all were refused\n")


def test_each_native_type_is_used() -> None:
    """A new type, or a new method, is used as soon as it exists."""
    import hostile_native  # which needs the native body

    scene = hostile_native.Scene(0)
    used = {hostile_native._native_type(type(one)) for one in (*scene.objects(), *scene.parts)}
    assert used == {*hostile_native.native_types(), hostile_native._FROZEN}
    assert {"append", "first", "__contains__"} <= {*hostile_native.methods_of(native.QueueBody)}


# An index.


def test_a_slot_has_one_key() -> None:
    """Two keys that name one slot left a hole in the list of keys."""
    index = NativeIndex([b""] * 4, 4)
    index[b"a"] = 0
    with pytest.raises(ValueError, match="slot 0 has another key; delete that first"):
        index[b"b"] = 0
    index[b"a"] = 0
    assert dict(index) == {b"a": 0}
    del index[b"a"]
    index[b"b"] = 0
    assert (list(index), index._key_of) == ([b"b"], [b"b", b"", b"", b""])


@pytest.mark.parametrize("change", [lambda keys: keys.clear(), lambda keys: keys.__delitem__(slice(1, None))])
def test_an_index_whose_list_of_keys_was_made_shorter_refuses(change: Callable[[list[bytes]], None]) -> None:
    """It read and wrote behind the end of the list."""
    key_of = [b""] * 64
    index = NativeIndex(key_of, 64)
    for slot in range(64):
        index[b"%d" % slot] = slot
    change(key_of)
    for use in (index.keys_by_slot, lambda: index.get(b"63"), lambda: index.find([b"63"])):
        with pytest.raises(RuntimeError, match="the list of an index's keys was changed without the index"):
            use()
    with pytest.raises(IndexError, match="slot 63 is none of the"):
        index[b"63"] = 63


def test_an_index_with_keys_that_were_changed_has_a_last_free_place() -> None:
    """Once there was none, and a search never ended."""
    key_of: list[Any] = [b""] * 4
    index = NativeIndex(key_of, 4)
    for number in range(4):
        index[b"%d" % number] = 0
        key_of[0] = None
    with pytest.raises(RuntimeError, match="was changed without the index"):
        index[b"4"] = 0
    assert len(index) == 4
    with pytest.raises(RuntimeError, match="was changed without the index"):
        list(index)


class _Evil(bytes):
    """A key whose comparison empties the index that compares it."""

    index: Any

    def __eq__(self, other: object) -> bool:
        raise AssertionError("an index compares bytes, and runs no code of its keys")

    __hash__ = bytes.__hash__


def test_an_index_runs_no_code_of_its_keys() -> None:
    """A key of a class below bytes is its bytes. What is no bytes is not there, and is never put there."""
    index = NativeIndex([b""] * 4, 4)
    index[_Evil(b"key")] = 2
    assert type(index._key_of[2]) is bytes
    assert (index.get(_Evil(b"key")), _Evil(b"key") in index, index.find([_Evil(b"key")])) == (2, True, [2])
    for other in ("key", None, 1.5, [], bytearray(b"key")):
        assert index.get(other) is None  # type: ignore[call-overload]
        with pytest.raises(TypeError, match="a key is bytes"):
            index[other] = 1  # type: ignore[index]
        with pytest.raises(KeyError):
            del index[other]  # type: ignore[arg-type]
    del index[_Evil(b"key")]
    assert len(index) == 0


@pytest.mark.parametrize("size", [-1, 2**31 - 1, 2**32, 2**62, 2**62 + 1, 2**63 - 1])
def test_an_index_and_a_queue_have_a_most_size(size: int) -> None:
    """2**62 slots made an endless loop of the search for the size of a table."""
    for make in (lambda: NativeIndex([], size), lambda: NativeSlotQueue(size)):
        with pytest.raises(ValueError, match=r"it must be from 0 to 2\*\*31 - 2"):
            make()


@pytest.mark.parametrize("key", ["text", None, 1.5, bytearray(b"key"), ()])
def test_a_plan_of_keys_that_are_no_bytes_is_refused(key: object) -> None:
    """By both bodies, with the same words."""
    twins = Twins(OffloadConfig(host_blocks=2, device_blocks=2))
    assert twins.apply(RequestArrived(1, 0, 0, "r")).error is None
    refused = twins.apply(StorePlanned(2, 0, 0, (("r", 1),), (key,), (0,), (0,)))  # type: ignore[arg-type]
    assert str(refused.error).endswith("a planned key is not of bytes")
    assert isinstance(twins.python.index, DictIndex)


# A queue.


def misaligned() -> Any:
    """Three numbers, each a byte behind a place where a number may be read."""
    return np.zeros(3, [("a", "i1"), ("slot", "i8")])["slot"]


@pytest.mark.parametrize(
    "batch",
    [
        (3, 100),
        (3, -1),
        (3, 2**63),
        (3, 1.5),
        (3, None),
        np.array([3, 100]),
        np.array([3, 2**40]),
        np.array([0.0]),
        np.array([0], np.uint64),
        np.array([[0]]),
        misaligned(),
        memoryview(bytes(16)).cast("d"),
        b"12345678",
        5,
        None,
        [1],
    ],
    ids=lambda batch: "doubles" if isinstance(batch, memoryview) else repr(batch),
)
def test_a_queue_refuses_a_batch_whole(batch: Any) -> None:
    """What is refused changes nothing: no slot that stands before the wrong one, and no refill."""
    queue = NativeSlotQueue(100)
    queue.append((7, 5))
    for use in (queue.append, queue.remove, queue.refill, queue.which):
        with pytest.raises((IndexError, TypeError, OverflowError, BufferError)):
            use(batch)
        assert list(queue) == [7, 5]


def test_a_queue_reads_an_array_of_any_stride() -> None:
    queue = NativeSlotQueue(100)
    queue.append(np.arange(10)[::-3])  # type: ignore[arg-type]
    assert list(queue) == [9, 6, 3, 0]


def test_a_number_that_changes_the_queue_is_read_before_the_queue_changes() -> None:
    """All of a batch is read, and then all of it is used."""
    queue = NativeSlotQueue(10)

    class Index:
        def __index__(self) -> int:
            queue.refill((1, 2))
            return 4

    queue.append((3, Index(), 5))  # type: ignore[arg-type]
    assert list(queue) == [1, 2, 3, 4, 5]


def test_what_is_protected_may_not_make_a_walk_endless() -> None:
    """Each look appends the slot again, which is behind the walk then."""
    queue = NativeSlotQueue(10)
    queue.append((1, 2, 3))

    class Protected:
        def __len__(self) -> int:
            return 1

        def __contains__(self, slot: int) -> bool:
            queue.append((slot,))
            return True

    assert queue.first(5, Protected()) == ()  # type: ignore[arg-type]


# A ledger.


def test_a_ledger_with_shorter_memory_leaves_events_to_python() -> None:
    """The second event once wrote generations behind the end of a shorter array."""
    ledger = Ledger(OffloadConfig(host_blocks=64, device_blocks=64))
    ledger.generation = array("q", [0])
    for number in range(3):
        plan = StorePlanned(ledger.seq + 1, 0, 0, (), (b"%d" % number,), (40 + number,), (number,))
        with pytest.raises(IndexError):
            ledger.apply(plan)
    assert ledger.generation.tolist() == [0]


def test_a_listener_that_uses_its_ledger_is_refused() -> None:
    """The words of the event that is being folded were those of another event then."""
    refusals = []

    class Listener:
        def stored(self, *_: object) -> None:
            for use in (lambda: ledger.apply(RequestArrived(9, 0, 0, "r")), lambda: ledger.not_stored((0,))):
                with pytest.raises(
                    RuntimeError, match="the ledger folds an event; use it when the event is folded"
                ):
                    use()
                refusals.append(use)

        def removed(self, *_: object) -> None: ...

        def cleared(self) -> None: ...

    core = Offloader(OffloadConfig(host_blocks=4, device_blocks=4))
    ledger = core.ledger
    ledger.listener = Listener()
    job = core.prepare_store("r", [b"a"], [0]).job
    assert job is not None
    core.submit([job.transfer])
    core.complete_store(job.transfer)
    assert len(refusals) == 2
    assert ledger.readable(0)


# A packer of worlds.


class _Part:
    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)


class _Slotted:
    """Its `__dict__` is no dict."""

    __dict__ = property(lambda _: 5)  # type: ignore[assignment]


class _Taken:
    """A class whose `take` is Python code."""


def packer(take: Callable[[Any], Any] = lambda _: (), part: type = _Part, make: Any = _Taken) -> Any:
    return native.PackerBody(((part, {}, ("value",)),), ((_Taken, take, make),), ())


def test_a_part_without_its_field_is_not_saved() -> None:
    with pytest.raises(AttributeError, match="value"):
        packer().pack((_Part(other=1),))


def test_a_part_whose_fields_are_no_dict_is_not_saved() -> None:
    with pytest.raises(TypeError, match="the fields of a part are a dict"):
        packer(part=_Slotted).pack((_Slotted(),))


def test_a_dict_that_changes_while_it_is_saved_is_refused() -> None:
    changed: dict[int, Any] = {1: _Taken()}
    with pytest.raises(RuntimeError, match="a dict was changed while it was saved"):
        packer(lambda _: changed.update({2: 2}) or ()).pack((_Part(value=changed),))
    with pytest.raises(RuntimeError, match="a dict was changed while it was saved"):
        packer(lambda _: changed.clear() or ()).pack((_Part(value=changed),))


def test_a_packer_saves_one_world_at_a_time() -> None:
    made: list[Any] = []
    made.append(packer(lambda _: made[0].pack((_Part(value=1),))))
    with pytest.raises(RuntimeError, match="this packer saves or loads another world"):
        made[0].pack((_Part(value=_Taken()),))
    assert made[0].unpack(made[0].pack((_Part(value=7),)))[0].value == 7


def test_a_failure_in_a_key_leaves_its_value() -> None:
    """The value was held while the key was saved."""
    value = [1]
    before = sys.getrefcount(value)

    def take(_: Any) -> Any:
        raise KeyError("no")

    for _ in range(3):
        with pytest.raises(KeyError):
            packer(take).pack((_Part(value={_Taken(): value}),))
    assert sys.getrefcount(value) == before


def test_what_makes_no_objects_is_not_loaded() -> None:
    frozen = type(NativeSlotQueue(1).frozen_part())
    with pytest.raises(TypeError, match="makes no objects"):
        packer(part=frozen).unpack(bytes(2))


def test_fields_without_values_are_not_loaded() -> None:
    """`make` names more fields than `take` has given."""
    lacking = packer(lambda _: (1,), make=("first", "second"))
    with pytest.raises(IndexError):
        lacking.unpack(lacking.pack((_Part(value=_Taken()),)))


class _Sealed:
    """It takes no field but `one`."""

    __slots__ = ("one",)


def test_a_field_that_a_class_refuses_is_not_loaded() -> None:
    refusing = native.PackerBody(
        ((_Part, {}, ("value",)),), ((_Sealed, lambda _: (1, 2), ("one", "other")),), ()
    )
    with pytest.raises(AttributeError, match="other"):
        refusing.unpack(refusing.pack((_Part(value=_Sealed()),)))


@pytest.mark.parametrize("rows", [(((1, {}, ()),), ()), (((_Part, {}),), ()), ((), ((_Part, None),))])
def test_a_packer_of_other_rows_is_not_made(rows: Any) -> None:
    with pytest.raises(TypeError, match=r"a part is \(class|a kind is \(class"):
        native.PackerBody(*rows, ())
