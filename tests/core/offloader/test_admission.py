"""Which new blocks of an offer a policy admits, and what becomes of the others."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from random import Random
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsm.core.log import MemoryLog
from kvsm.core.offloader import Offloader
from kvsm.core.offloader.admission import NotStored, Room, ask
from kvsm.core.policies.lru import LRUPolicy
from kvsm.core.scheduler.retry import RetryStamp
from kvsm.errors import WrongArgument
from kvsm.events import OffloadConfig, SkipReason, StoreSkipped


class Stingy(LRUPolicy):
    """Admits as many blocks of each run as `answer` says, at most."""

    answer: Sequence[int] = ()
    asked: ClassVar[list[tuple[tuple[bytes, ...], tuple[int, ...], int]]] = []
    told: ClassVar[list[bytes]] = []

    def admits(
        self,
        keys: Sequence[bytes],
        runs: Sequence[int],
        free: int,
        protected: Collection[int],  # noqa: ARG002
    ) -> Sequence[int]:
        self.asked.append((tuple(keys), tuple(runs), free))
        return self.answer

    def refused(self, keys: Sequence[bytes]) -> None:
        self.told.extend(keys)


def places(
    keys: Sequence[bytes], runs: dict[int, bytes], answer: Sequence[int], *, room: int = 100, **more: set[int]
) -> list[int]:
    """The refused places of an offer of new keys to a full pool."""
    return [*answers(keys, runs, answer, Room(0, room, ()), **more).refused]


def answers(
    keys: Sequence[bytes], runs: dict[int, bytes], answer: Sequence[int], room: Room, **more: set[int]
) -> NotStored:
    policy = Stingy(1)
    policy.answer = answer
    has = {b"here"}.__contains__
    return ask(policy, keys, range(len(keys)), runs, has, room, **more)


KEYS = [b"a", b"b", b"c", b"d"]


def test_the_rest_of_a_run_is_refused() -> None:
    assert places(KEYS, {0: b""}, [1]) == [1, 2, 3]


def test_each_run_is_asked_for_itself() -> None:
    assert places(KEYS, {0: b"", 2: b"here"}, [1, 1]) == [1, 3]


def test_a_run_behind_a_refused_block_is_refused() -> None:
    assert places(KEYS, {0: b"", 2: b"b"}, [1, 2]) == [1, 2, 3]


def test_runs_at_earlier_places_than_their_refused_parents_are_refused() -> None:
    """Requests that share new blocks may offer them in any order: `a` continues `b`, which continues `c`."""
    assert places(KEYS, {0: b"b", 1: b"c", 2: b""}, [1, 1, 0]) == [0, 1, 2, 3]


def test_a_run_whose_parent_is_not_on_the_host_is_refused_without_asking() -> None:
    assert places(KEYS, {0: b"gone", 2: b"here"}, [2]) == [0, 1]


def test_what_another_engine_waits_for_is_not_asked_about() -> None:
    assert places(KEYS, {0: b"", 2: b""}, [0], required={0, 1}) == [2, 3]


def test_blocks_without_room_are_not_asked_about() -> None:
    """They are skipped because the pool is full, and offered again."""
    assert places(KEYS, {0: b""}, [2], room=2) == []
    assert Stingy.asked[-1][0] == (b"a", b"b")


def test_blocks_that_were_not_asked_about_wait() -> None:
    """The policy refuses the run that would have filled the room; the other run has not its leave yet."""
    assert answers(KEYS, {0: b"", 2: b""}, [0], Room(0, 2, ())) == ([0, 1], [2, 3])


def test_what_another_engine_waits_for_gets_room_first() -> None:
    assert answers(KEYS, {0: b""}, [1], Room(1, 2, ()), required={2, 3}) == ([], [1])
    assert Stingy.asked[-1][1:] == ((1,), 0)


@pytest.mark.parametrize("answer", [[], [5], [-1], [1, 1]])
def test_a_wrong_answer_is_refused(answer: list[int]) -> None:
    with pytest.raises(WrongArgument, match="a number from 0 to its length"):
        places(KEYS, {0: b""}, answer)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.randoms())
def test_no_admitted_block_follows_a_refused_one(lengths: list[int], random: Random) -> None:
    """Nothing could hit it. The block before a run may be at an earlier or a later place of the offer."""
    keys = [b"%d" % place for place in range(sum(lengths))]
    firsts = [sum(lengths[:number]) for number in range(len(lengths))]
    parents = {
        first: random.choice([b"", b"here", b"gone", *keys[:first], *keys[first + length :]])
        for first, length in zip(firsts, lengths)
    }
    policy = Stingy(1)

    def admits(_keys: object, runs: Sequence[int], *_: object) -> list[int]:
        return [random.randint(0, most) for most in runs]

    policy.admits = admits  # type: ignore[method-assign, assignment]
    has = {b"here"}.__contains__
    refused = {*ask(policy, keys, range(len(keys)), parents, has, Room(0, 100, ())).refused}
    for place, key in enumerate(keys):
        parent = parents.get(place, keys[place - 1])
        is_lost = parent == b"gone" or (parent in keys and keys.index(parent) in refused)
        assert not is_lost or place in refused, (place, key)


# In the core.


def full_core(answer: Sequence[int]) -> tuple[Offloader, MemoryLog]:
    """A core whose two slots are taken."""
    log = MemoryLog()
    policy = f"{__name__}:Stingy"
    core = Offloader(OffloadConfig(host_blocks=2, device_blocks=8, policy=policy), log)
    Stingy.answer, Stingy.asked, Stingy.told = answer, [], []
    core.arrive("first")
    store = core.prepare_store("first", [b"x", b"y"], [0, 1])
    assert store.job is not None
    core.submit([store.job.transfer])
    core.complete_store(store.job.transfer)
    core.arrive("r")
    return core, log


def skips(log: MemoryLog) -> list[tuple[tuple[bytes, ...], SkipReason]]:
    return [(event.keys, event.reason) for event in log if isinstance(event, StoreSkipped)]


def test_a_pool_with_free_slots_asks_nobody() -> None:
    full_core([])
    assert Stingy.asked == []


def test_refused_blocks_are_in_the_log_and_the_policy_hears_of_them() -> None:
    core, log = full_core([1])
    prepared = core.prepare_store("r", [b"a", b"b"], [2, 3])
    assert (prepared.keys, [*prepared.refused], [*prepared.deferred]) == ((b"a",), [1], [])
    assert skips(log) == [((b"b",), SkipReason.NOT_ADMITTED)]
    assert Stingy.told == [b"b"]


def test_the_same_key_of_another_request_waits_for_the_next_offer() -> None:
    """Then the policy is asked about it again: there is no store to wait for."""
    core, _ = full_core([0])
    core.arrive("s")
    prepared = core.store((("r", 1), ("s", 1)), [b"a", b"a"], [2, 3])
    assert ([*prepared.refused], [*prepared.deferred]) == ([0], [1])
    assert RetryStamp.after(core.ledger, prepared) != RetryStamp.of(core.ledger)
    prepared = core.store((("s", 1),), [b"a"], [3])
    assert ([*prepared.refused], [*prepared.deferred]) == ([0], [])
    assert RetryStamp.after(core.ledger, prepared) == RetryStamp.of(core.ledger)


def test_a_block_that_waits_for_a_copy_waits_for_its_end() -> None:
    """To try again at once would offer it in each step of a long copy."""
    core, _ = full_core([1])
    core.arrive("s")
    assert core.store((("s", 1),), [b"a"], [2]).keys == (b"a",)
    Stingy.answer = [0]
    prepared = core.store((("r", 2),), [b"a", b"b"], [3, 4])
    assert ([*prepared.refused], prepared.deferred) == ([1], (0,))
    assert RetryStamp.after(core.ledger, prepared) == RetryStamp.of(core.ledger)


def test_a_run_that_was_not_asked_about_evicts_nothing() -> None:
    """It waits, and the next step asks about it."""
    core, log = full_core([0])
    core.arrive("s")
    prepared = core.store((("r", 2), ("s", 2)), [b"a", b"b", b"c", b"d"], [2, 3, 4, 5])
    assert ([*prepared.refused], prepared.deferred, prepared.job) == ([0, 1], (2, 3), None)
    assert skips(log) == [((b"c", b"d"), SkipReason.POOL_FULL), ((b"a", b"b"), SkipReason.NOT_ADMITTED)]
    assert RetryStamp.after(core.ledger, prepared) != RetryStamp.of(core.ledger)


def test_a_run_behind_a_block_that_waits_is_asked_about() -> None:
    """Block 2 is still read by another store, so `a` waits. It is stored later, and `b` is then of use."""
    core, _ = full_core([1])
    core.arrive("s")
    assert core.store((("s", 1),), [b"z"], [2]).keys == (b"z",)
    prepared = core.store((("r", 2),), [b"a", b"b"], [2, 3], parents={1: b"a"})
    assert (prepared.keys, prepared.deferred, [*prepared.refused]) == ((b"b",), (0,), [])


def test_blocks_that_another_engine_waits_for_are_stored() -> None:
    core, _ = full_core([])
    assert core.store((("r", 1),), [b"a"], [2], required=(0,)).keys == (b"a",)


def test_blocks_of_no_request_are_asked_about_one_by_one() -> None:
    """A lazy store offers blocks of many prompts."""
    core, _ = full_core([0, 1])
    assert core.store((), [b"a", b"b"], [2, 3]).keys == (b"b",)
