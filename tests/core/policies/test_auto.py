"""The policy `auto`: what it learns, what it refuses, and the parts that it is made of."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from examples import examples
from kvsm.check.worlds.refusing_policy import REFUSING
from kvsm.core.offloader import Offloader
from kvsm.core.policies import make_policy
from kvsm.core.policies.auto import AutoPolicy, AutoState
from kvsm.core.policies.chains import Chains
from kvsm.core.policies.first_returns import FirstReturns
from kvsm.core.policies.policy_copies import Column
from kvsm.core.policies.reuse_ages import ReuseAges, ReuseAgesState
from kvsm.core.policies.seen_keys import SeenKeys, _hashes
from kvsm.events import OffloadConfig
from kvsm.ids import listed
from kvsm.testing import OffloadMachine

# What it serves.


class Turn(NamedTuple):
    """The blocks of a request that the host served, and those that it stored."""

    hits: int
    stored: int


def serve(core: Offloader, name: str, keys: Sequence[bytes]) -> Turn:
    """Serve one request from its match to its end."""
    core.arrive(name)
    found = core.match(name, keys).hits
    if found:
        load = core.prepare_load(name, range(found))
        assert load is not None
        core.submit([load.transfer])
        core.complete_load(load.transfer)
    store = core.prepare_store(name, keys[found:], range(found, len(keys)))
    if store.job is not None:
        core.submit([store.job.transfer])
        core.complete_store(store.job.transfer)
    core.finish(name)
    return Turn(found, len(store.keys))


def served(policy: str, slots: int, prompts: Sequence[Sequence[bytes]]) -> float:
    """The share of all blocks that the host serves, if each prompt is a request after the one before."""
    core = Offloader(OffloadConfig(host_blocks=slots, device_blocks=64, policy=policy))
    hits = sum(serve(core, f"r{number}", keys).hits for number, keys in enumerate(prompts))
    return hits / sum(map(len, prompts))


def prompt(name: int, blocks: int = 10) -> list[bytes]:
    return [b"%d.%d" % (name, block) for block in range(blocks)]


def test_sessions_that_take_turns_keep_their_part_of_the_pool() -> None:
    """LRU evicts each session right before its turn."""
    turns = [prompt(number % 8) for number in range(400)]
    assert served("lru", 40, turns) == 0
    assert served("auto", 40, turns) > 0.4


def test_prompts_that_never_return_evict_no_hot_prefix() -> None:
    random = Random(1)
    prompts = [prompt(random.randrange(6)) if random.random() < 0.5 else prompt(100 + n) for n in range(600)]
    assert served("lru", 40, prompts) < 0.15
    assert served("auto", 40, prompts) > 0.25


def test_what_comes_back_at_once_or_never_is_served_as_by_lru() -> None:
    prompts = [prompt(number // 4) for number in range(600)]
    assert served("auto", 40, prompts) == served("lru", 40, prompts) == 0.75


def test_a_working_set_that_moves_is_followed() -> None:
    random = Random(2)
    sets = [[prompt(100 * at + random.randrange(4)) for _ in range(300)] for at in range(4)]
    assert served("auto", 40, [one for part in sets for one in part]) > 0.9


def stores(policy: str, slots: int, prompts: Sequence[Sequence[bytes]]) -> list[int]:
    """The number of blocks that each prompt stores."""
    core = Offloader(OffloadConfig(host_blocks=slots, device_blocks=64, policy=policy))
    return [serve(core, f"r{number}", keys).stored for number, keys in enumerate(prompts)]


def test_prompts_that_never_return_are_not_stored() -> None:
    """LRU stores each of them. `auto` needs four new blocks per slot to see that none comes back."""
    prompts = [prompt(number) for number in range(60)]
    assert stores("lru", 40, prompts) == [10] * 60
    assert sum(stores("auto", 40, prompts)[16:]) == 0


def test_questions_that_never_return_are_not_stored_behind_a_hot_prefix() -> None:
    """The share of new blocks counts, not that of all blocks."""
    prompts = [prompt(0) + prompt(1 + number) for number in range(150)]
    assert sum(stores("auto", 40, prompts)[100:]) == 0
    assert served("auto", 40, prompts) > 0.49


@given(st.integers(30, 200), st.integers(1, 4), st.integers(0, 1 << 32))
@settings(max_examples=examples(20), deadline=None)
def test_when_prompts_return_their_blocks_are_stored_again(before: int, kept: int, seed: int) -> None:
    """However long no prompt did: at its second turn each prompt is known and stored, at its third it hits.
    After the return of one block for each eight slots, a new prompt is stored at its first turn, too."""
    core = Offloader(OffloadConfig(host_blocks=40, device_blocks=64, policy="auto"))
    random = Random(seed)
    for number in range(before):
        serve(core, f"before {number}", prompt(number))
    for turn in range(3):
        names = [1000 + name for name in range(kept)]
        random.shuffle(names)
        found = [serve(core, f"{turn} {name}", prompt(name)) for name in names]
        assert [one.hits for one in found] == [10 * (turn == 2)] * kept
        assert [one.stored for one in found] == [10 * (turn == 1)] * kept
    assert serve(core, "new", prompt(2000)).stored == 10


BATCHES = st.lists(st.tuples(st.integers(0, 400), st.integers(0, 400)), max_size=80)


@given(st.integers(1, 300), BATCHES)
def test_new_blocks_are_worth_a_store_while_one_in_64_of_them_comes_back(
    capacity: int, batches: list[tuple[int, int]]
) -> None:
    returns = FirstReturns(capacity)
    for new, more in batches:
        returns.count(new, -(-new // 64) + more)
        assert not returns.are_rare()


@given(st.integers(32, 300), BATCHES)
def test_new_blocks_are_not_worth_a_store_once_none_comes_back(
    capacity: int, batches: list[tuple[int, int]]
) -> None:
    """Whatever was counted before. It takes four new blocks per slot for each halving."""
    returns = FirstReturns(capacity)
    for new, returned in batches:
        returns.count(new, returned)
    for _ in range(returns.returned.bit_length() + 2):
        returns.count(4 * capacity, 0)
    assert returns.are_rare()


# What counts as a use.


def state_of(policy: AutoPolicy) -> tuple[int, int]:
    """The uses of the block in slot 0, and how many uses of all blocks were counted for the estimate."""
    return int(policy._uses.values[0]), policy._ages._counted


def with_block(capacity: int = 160) -> AutoPolicy:
    policy = make_policy("auto", capacity)
    assert isinstance(policy, AutoPolicy)
    policy.admitted((0,), (b"k",))
    return policy


def use(policy: AutoPolicy, slot: int = 0) -> None:
    policy.busy((slot,))
    policy.idle((slot,))


def others(policy: AutoPolicy, uses: int) -> None:
    """Let other blocks be used."""
    policy.admitted((1,), (b"other",))
    for _ in range(uses - 1):
        use(policy, 1)


def test_a_second_use_soon_after_the_first_is_the_same_use() -> None:
    policy = with_block()
    others(policy, 20)
    use(policy)
    assert state_of(policy)[0] == 1
    use(policy)
    assert state_of(policy)[0] == 1


def test_a_touch_is_a_use() -> None:
    """The device had the block, but it was asked for."""
    policy = with_block()
    others(policy, 20)
    policy.touched((0,))
    assert state_of(policy)[0] == 1


@pytest.mark.parametrize("leaves", ["evicted", "refused"])
def test_a_key_that_returns_is_known(leaves: str) -> None:
    """It counts as used once before, although it was not in the pool meanwhile."""
    policy = with_block()
    if leaves == "evicted":
        choice = policy.choose(1, ())
        assert choice is not None
        policy.evicted(choice, (b"k",))
    else:
        policy.removed((0,))
        policy.refused((b"k",))
    others(policy, 20)
    policy.admitted((0,), (b"k",))
    assert state_of(policy)[0] == 1


# The life table.

OBSERVED = st.lists(st.tuples(st.sampled_from(["hit", "lost", "waiting"]), st.integers(0, 200)), max_size=60)


@given(OBSERVED)
def test_the_worth_is_the_best_ratio_of_chance_to_time(seen: list[tuple[str, int]]) -> None:
    """Computed from its definition: of the blocks that reached a range, the share that was used there."""
    ages = ReuseAges(1, 10)
    begins = ages._begins.tolist()
    ends = [*begins[1:], begins[-1] + ages._widths[-1]]

    def all_of(kind: str) -> tuple[np.ndarray, np.ndarray]:
        found = np.array([age for one, age in seen if one == kind], dtype=np.int64)
        return np.zeros_like(found), found

    ages.hit(*all_of("hit"))
    ages.lose(*all_of("lost"))
    ages.learn(ages.waiting(*all_of("waiting"), 1))

    chances = []
    for begin, end in zip(begins, [*begins[1:], 1 << 60]):
        inside = [kind for kind, age in seen if begin <= age < end]
        hits, beyond = inside.count("hit"), sum(age >= end for _, age in seen)
        reached = beyond + hits + (len(inside) - hits) / 2
        chances.append(hits / reached if reached else 0.0)
    for first, begin in enumerate(begins):
        ratios = [0.0]
        for last in range(first, len(begins)):
            lives = [np.prod([1 - chance for chance in chances[first:at]]) for at in range(first, last + 1)]
            gained = sum(alive * chance for alive, chance in zip(lives, chances[first : last + 1]))
            widths = [end - start for start, end in zip(begins[first:], ends[first : last + 1])]
            taken = sum(
                alive * width * (1 - chance / 2)
                for alive, width, chance in zip(lives, widths, chances[first : last + 1])
            )
            ratios.append(float(gained / taken))
        worth = float(ages.worth(np.array([0]), np.array([begin]))[0])
        assert worth == pytest.approx(max(ratios), rel=1e-9)


def test_blocks_that_wait_lower_the_worth() -> None:
    """Without them only blocks that came back would count."""
    first = np.array([0])
    ages = ReuseAges(1, 100)
    ages.hit(first, np.array([50]))
    ages.learn(ages.waiting(first[:0], first[:0], 1))
    alone = ages.worth(first, first)[0]
    ages.learn(ages.waiting(np.zeros(9, np.int64), np.full(9, 900), 1))
    assert ages.worth(first, first)[0] < alone / 5


def test_old_counts_fade() -> None:
    ages = ReuseAges(1, 16)
    for _ in range(300):
        ages.hit(np.array([0]), np.array([20]))
    ages.learn(ages.waiting(np.zeros(0, np.int64), np.zeros(0, np.int64), 1))
    assert int(ages._hits.sum()) == 150


# The keys that it remembers.


class SeenModel:
    """A dict in place of each row."""

    def __init__(self, table: SeenKeys) -> None:
        self.table = table
        self.rows: dict[int, dict[bytes, tuple[int, int]]] = {}

    def row(self, key: bytes) -> dict[bytes, tuple[int, int]]:
        return self.rows.setdefault(int(self.table._rows_of(_hashes([key]))[0]), {})

    def add(self, key: bytes, uses: int, last: int) -> list[tuple[int, int]]:
        row, lost = self.row(key), []
        if key not in row and len(row) == 8:
            oldest = min(row, key=lambda one: row[one][1])
            lost.append(row.pop(oldest))
        row[key] = uses, last
        return lost


@given(
    st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=12, unique=True), max_size=30), st.randoms()
)
def test_the_table_of_seen_keys_forgets_the_oldest_of_a_row(batches: list[list[int]], random: Random) -> None:
    table = SeenKeys(24)
    model = SeenModel(table)
    for clock, batch in enumerate(batches, 1):
        keys = [b"key %d" % number for number in batch]
        if random.random() < 0.2:
            taken = table.take(keys)
            gone = [model.row(key).pop(key, (-1, 0)) for key in keys]
            assert list(zip(taken.uses.tolist(), taken.last.tolist())) == gone
            continue
        last = [100 * clock + place for place in range(len(keys))]
        uses = [random.randrange(3) for _ in keys]
        lost = table.add(keys, np.array(uses), np.array(last))
        expected = [gone for one in zip(keys, uses, last) for gone in model.add(*one)]
        assert sorted(zip(lost.uses.tolist(), lost.last.tolist())) == sorted(expected)
        every = [b"key %d" % number for number in range(100)]
        found = table.find(every)
        known = [model.row(key).get(key, (-1, 0)) for key in every]
        assert list(zip(found.uses.tolist(), found.last.tolist())) == known


CHAINED = 8
ADDED = st.tuples(st.lists(st.integers(0, CHAINED - 1), min_size=1, unique=True), st.integers(0, CHAINED - 1))
REMOVED = st.lists(st.integers(0, CHAINED - 1), unique=True)


class ChainsModel:
    """The parent of each stored block: (slot, when it was stored)."""

    def __init__(self) -> None:
        self.stored = dict[int, int]()
        self.parents = dict[int, tuple[int, int]]()

    def add(self, slots: Sequence[int], parent: int | None, now: int) -> None:
        for slot in slots:
            if parent in self.stored:
                assert parent is not None
                self.parents[slot] = (parent, self.stored[parent])
            self.stored[slot], parent = now, slot

    def remove(self, slot: int) -> None:
        self.stored.pop(slot, None)
        self.parents.pop(slot, None)

    def parent_of(self, slot: int) -> int:
        parent, since = self.parents.get(slot, (-1, 0))
        return parent if self.stored.get(parent) == since else -1


@given(st.lists(ADDED | REMOVED, max_size=30))
def test_chains_know_parents_and_children_of_the_blocks_that_are_stored(
    steps: list[list[int] | tuple[list[int], int]],
) -> None:
    """A slot that is used again has another block, without the children of the one before."""
    chains, model = Chains(CHAINED), ChainsModel()
    for now, step in enumerate(steps, 1):
        if isinstance(step, tuple):
            slots = [slot for slot in step[0] if slot not in model.stored]
            if not slots:
                continue
            parent = None if step[1] in slots else step[1]
            chains.add(np.array(slots, dtype=np.int64), parent, now)
            model.add(slots, parent, now)
        else:
            chains.remove(np.array(step, dtype=np.int64))
            for slot in step:
                model.remove(slot)
        parents = [model.parent_of(slot) for slot in range(CHAINED)]
        assert chains.parents_of(np.arange(CHAINED)).tolist() == parents
        assert chains.children_of(np.arange(CHAINED)).tolist() == [parents.count(n) for n in range(CHAINED)]


@settings(max_examples=examples(50))
@given(st.integers(0, 2**32))
def test_a_block_is_evicted_after_all_that_continue_it(seed: int) -> None:
    """A block without its parent could not be hit. Blocks in use and protected ones stay."""
    policy, random = AutoPolicy(64), Random(seed)
    stored, used = dict[int, int | None](), set[int]()
    for _ in range(60):
        free = [slot for slot in range(64) if slot not in stored]
        parent = random.choice([None, *stored]) if stored else None
        run = free[: random.randint(0, 9)]
        policy.admitted(tuple(run), [b"%d" % random.randrange(200) for _ in run], parent)
        stored |= dict(zip(run, [parent, *run]))
        for slot in random.sample(sorted(used), random.randint(0, len(used))):
            policy.idle((slot,))
            used.remove(slot)
        for slot in random.sample(sorted(stored), min(len(stored), 3)):
            if slot not in used and random.random() < 0.5:
                policy.busy((slot,))
                used.add(slot)
        protected = set(random.sample(range(64), 3))
        choice = policy.choose(random.randint(1, 12), protected)
        if choice is not None:
            check_evicted(listed(choice.victims), stored, used | protected)
            policy.evicted(choice, [b"%d" % random.randrange(200) for _ in choice.victims])


def check_evicted(victims: Sequence[int], stored: dict[int, int | None], kept: set[int]) -> None:
    """Check that each victim has no children unless nothing else is left, and take it out of `stored`."""
    for victim in victims:
        assert victim not in kept
        leaves = stored.keys() - kept - set(stored.values())
        assert victim in leaves or not leaves
        del stored[victim]
        for slot, parent in stored.items():
            if parent == victim:
                stored[slot] = None


def test_a_snapshot_of_another_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="has 200 numbers; this pool needs 100"):
        make_policy("auto", 100).restore(make_policy("auto", 200).snapshot())


@pytest.mark.parametrize(
    "wrong",
    [
        {"uses": b"\3" * 8},
        {"seen_uses": b"\3" * 32},
        {"last": (9).to_bytes(8, "little") * 8},
        {"seen_last": (-1).to_bytes(8, "little", signed=True) * 32},
        {"parent": (8).to_bytes(4, "little") * 8},
        {"clock": 0},
        {"clock": 1 << 63},
        {"since_learned": -1},
        {"new": 64},
        {"new": -1},
        {"returned": -1},
        {"hits": -1},
        {"lost": 1 << 60},
        {"worth": np.nan},
        {"counted": -1},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_an_impossible_state_is_refused(wrong: dict[str, Any]) -> None:
    """A snapshot may come from anyone. Accepted, some of these stop a later event with an error of numpy."""
    policy = AutoPolicy(8)
    policy.admitted((0, 1), [b"a", b"b"])
    state = msgspec.msgpack.decode(policy.snapshot(), type=AutoState)
    AutoPolicy(8).restore(policy.snapshot())
    ages = msgspec.msgpack.decode(state.ages, type=ReuseAgesState)
    for name in {"hits", "lost", "worth"} & wrong.keys():
        kind = np.float64 if name == "worth" else np.int64
        wrong = {name: np.full(len(ages.hits) // 8, wrong[name], kind).tobytes()}
    if wrong.keys() <= {"hits", "lost", "worth", "counted"}:
        wrong = {"ages": msgspec.msgpack.encode(msgspec.structs.replace(ages, **wrong))}
    with pytest.raises(ValueError, match="the snapshot has"):
        AutoPolicy(8).restore(msgspec.msgpack.encode(msgspec.structs.replace(state, **wrong)))


def test_a_number_grows_as_often_as_its_place_is_named() -> None:
    column = Column(3, "<i4")
    column.add(np.array([2, 0, 2]), -1)
    assert column.values.tolist() == [-1, 0, -2]


@given(st.lists(st.lists(st.integers(0, 40_000), max_size=5), max_size=8), st.integers(0, 2000))
def test_a_copy_of_a_column_in_pieces_is_the_column_of_its_moment(
    changes: list[list[int]], left: int
) -> None:
    column = Column(40_001, "<i8")
    for number, places in enumerate(changes, 1):
        column.put(np.array(places, dtype=np.int64), number)
    whole, copy = column.snapshot(), column.freeze()
    for number, places in enumerate(changes, 100):
        copy.go_on(left)
        if number % 2:
            column.put(np.array(places, dtype=np.int64), number)
        else:
            column.add(np.array(places, dtype=np.int64), number)
    assert copy.go_on(1 << 30)
    assert msgspec.msgpack.decode(b"".join(copy.pieces())) == whole


# In an engine.


@pytest.mark.parametrize("policy", ["auto", REFUSING])
def test_keeps_its_word_in_the_whole_core(policy: str) -> None:
    """Under the small engine: what it chooses is idle, and a restored one chooses the same (S3, S10)."""
    machine = type("Machine", (OffloadMachine,), {"policy": policy})
    limits = settings(machine.TestCase.settings, max_examples=8, derandomize=True, database=None)
    run_state_machine_as_test(machine, settings=limits)
