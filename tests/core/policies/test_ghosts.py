"""A queue of keys does what an `OrderedDict` of keys does, with both bodies, also while it is copied."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import AbstractContextManager, nullcontext
from itertools import islice

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsm.core import native
from kvsm.core.policies import policy_copies as copies
from kvsm.core.policies.ghosts import KeyQueue
from kvsm.core.policies.policy_copies import KeysCopy

CAPACITY = 40
KEYS = [b"key %d" % number for number in range(60)]
BODIES = ["Python", *([] if native.WHY_NOT else ["native"])]


def body(name: str) -> AbstractContextManager[None]:
    return native.without() if name == "Python" else nullcontext()


class Ghosts:
    """A queue and its model."""

    def __init__(self, name: str) -> None:
        with body(name):
            self.queue = KeyQueue(CAPACITY)
        self.model: OrderedDict[bytes, None] = OrderedDict()

    def add(self, keys: list[bytes], limit: int) -> None:
        self.queue.add(keys, limit)
        self.model.update(dict.fromkeys(keys))
        self._forget(limit)

    def trim(self, limit: int) -> None:
        self.queue.trim(limit)
        self._forget(limit)

    def remove(self, place: int) -> None:
        for key in list(islice(self.model, place, place + 1)):
            self.queue.remove(key)
            del self.model[key]

    def clear(self) -> None:
        self.queue.clear()
        self.model.clear()

    def _forget(self, limit: int) -> None:
        while len(self.model) > limit:
            self.model.popitem(last=False)

    def compare(self) -> None:
        assert list(self.queue) == list(self.model)
        assert len(self.queue) == len(self.model)
        assert self.queue.holding(KEYS) == [key in self.model for key in KEYS]
        assert all((key in self.queue) == (key in self.model) for key in KEYS)
        assert self.queue.holds_any(KEYS) == bool(self.model)


def written(copy: KeysCopy, cost: int) -> list[bytes]:
    while not copy.go_on(cost):
        pass
    return list(msgspec.msgpack.decode(b"".join(copy.pieces())))


LIMITS = st.integers(0, CAPACITY)
CALLS = st.one_of(
    st.tuples(st.just("add"), st.lists(st.sampled_from(KEYS), max_size=50), LIMITS),
    st.tuples(st.just("trim"), LIMITS),
    st.tuples(st.just("remove"), LIMITS),
    st.tuples(st.just("clear")),
)


@pytest.mark.parametrize("name", BODIES)
@given(st.lists(CALLS, max_size=20))
def test_a_queue_of_keys_is_an_ordered_dict(name: str, calls: list[tuple[str, ...]]) -> None:
    ghosts = Ghosts(name)
    for call, *arguments in calls:
        getattr(ghosts, call)(*arguments)
        ghosts.compare()


@pytest.mark.parametrize("name", BODIES)
@given(st.lists(CALLS, max_size=10), st.lists(CALLS, max_size=10), st.integers(1, 30), st.integers(1, 300))
def test_a_copy_has_the_keys_of_its_moment(
    name: str, before: list[tuple[str, ...]], after: list[tuple[str, ...]], first: int, cost: int
) -> None:
    """Keys leave, and others get their numbers, while the copy is made. So it is after a second copy."""
    ghosts = Ghosts(name)
    for _ in range(2):
        for call, *arguments in before:
            getattr(ghosts, call)(*arguments)
        expected, copy = list(ghosts.model), ghosts.queue.freeze()
        copy.go_on(first)
        for call, *arguments in after:
            getattr(ghosts, call)(*arguments)
        assert written(copy, cost) == expected
        ghosts.compare()


@pytest.mark.parametrize("name", BODIES)
def test_a_copy_that_another_one_replaced_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody keeps keys for it any more. It would be written with the keys that have got their numbers."""
    monkeypatch.setattr(copies, "_KEYS_AT_ONCE", 4)
    ghosts = Ghosts(name)
    ghosts.add(KEYS[:40], CAPACITY)
    first = ghosts.queue.freeze()
    while not first._pieces:  # its order is whole then, and most keys are not written
        first.go_on(1)
    second = ghosts.queue.freeze()
    ghosts.add(KEYS[40:], CAPACITY)
    with pytest.raises(RuntimeError, match="was dropped"):
        written(first, 1)
    assert written(second, 1) == KEYS[:40]


@pytest.mark.parametrize("name", BODIES)
def test_numbers_of_keys_that_left_are_used_again(name: str) -> None:
    """Else a queue would hold as many keys in memory as ever were in it, up to its capacity."""
    ghosts = Ghosts(name)
    for round in range(20):
        ghosts.add(KEYS[3 * round : 3 * round + 3], limit=5)
    ghosts.clear()
    ghosts.add(KEYS[:5], limit=5)
    assert len(ghosts.queue._key_of) <= 8
