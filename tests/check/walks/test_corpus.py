"""The corpus of `kvsm fuzz`: what is kept, what goes, and that a guided walk is still the same every time."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planted_bugs import free_slots_under_copies
from toy_worlds import Counting

from kvsm.check.explore.coverage import forget, taken
from kvsm.check.walks.corpus import CorpusDirectory, CorpusEntry, smallest
from kvsm.check.walks.fuzz_target import WorldTarget
from kvsm.check.walks.guided import GuidedRuns
from kvsm.check.walks.rounds import Corpus, walk_in_rounds
from kvsm.check.walks.targets import draw_case
from kvsm.check.walks.walk import WalkResult, random_of, rest, walk
from kvsm.check.walks.watch import watching
from kvsm.states.block import BLOCK_WORDS

CORE = WorldTarget("core")


def entry(*actions: str, **fields: Any) -> CorpusEntry:
    return CorpusEntry(target="core", seed=1, run=2, actions=tuple([(one,) for one in actions]), **fields)


# What a run reaches.


def test_a_watch_sees_the_edges_that_were_taken() -> None:
    """As `kvsm.check.explore.coverage` does, and no longer than it watches."""
    before = BLOCK_WORDS.next
    random = Random(1)
    forget()
    with watching() as watch:
        world = draw_case("core", random_of(1, 0)).make()
        for _ in range(200):
            world.do(world.draw(random))
    assert {one for one in watch.new if one.startswith("edge ")} == {f"edge {one}" for one in taken()}
    assert any(one.startswith("pair block ") for one in watch.new)
    assert BLOCK_WORDS.next is before


def test_the_length_is_that_of_the_last_new_feature() -> None:
    done: list[int] = []
    with watching(done, {"event old"}) as watch:
        done.append(1)
        watch.say(["new"])
        done.append(2)
        watch.say(["new", "old"])
    assert (watch.new, watch.length) == ({"event new"}, 1)


# Which entries stay.

ENTRIES = [entry(*"a" * size, choices=f"{size:02x}") for size in range(1, 8)]
REACHES = st.lists(st.frozensets(st.sampled_from("pqrstuvw")), min_size=len(ENTRIES), max_size=len(ENTRIES))


def kept(
    reach: dict[str, tuple[CorpusEntry, frozenset[str]]],
) -> dict[str, tuple[CorpusEntry, frozenset[str]]]:
    return {name: reach[name] for name in smallest(reach)}


@given(reaches=REACHES, split=st.integers(0, len(ENTRIES)))
def test_what_stays_of_merged_corpora_is_what_stays_of_one(reaches: list[frozenset[str]], split: int) -> None:
    """Nothing that was reached is lost, and merging before or after dropping is the same."""
    both = {one.name: (one, features) for one, features in zip(ENTRIES, reaches)}
    names = [*both]
    parts = [{name: both[name] for name in part} for part in (names[:split], names[split:])]
    assert kept({**kept(parts[0]), **kept(parts[1])}) == kept(both)
    assert kept(kept(both)) == kept(both)
    assert frozenset().union(*reaches) == frozenset().union(
        *[features for _, features in kept(both).values()]
    )


def test_the_smallest_entry_stays_for_a_feature() -> None:
    small, large = ENTRIES[0], ENTRIES[3]
    reach = {one.name: (one, frozenset("p")) for one in (small, large)}
    assert [*smallest(reach)] == [small.name]


# Files.


def test_equal_schedules_are_one_file_whoever_found_them(tmp_path: Path) -> None:
    directory = CorpusDirectory(tmp_path)
    directory.write([entry("a"), msgspec.structs.replace(entry("a"), seed=9, run=9), entry("b")], [])
    assert len([*tmp_path.iterdir()]) == 2
    assert {one.actions for one in directory.read()[0]} == {(("a",),), (("b",),)}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{", "truncated"),
        (b'{"target": "core", "seed": 1, "run": 2}', "neither actions nor choices"),
        (b'{"target": "core", "seed": 1, "run": 2, "actions": [["a"]], "more": 1}', "more"),
        (b" " * (1 << 20) + b"{}", "more than 1,048,576 bytes"),
    ],
)
def test_a_file_that_is_no_schedule_is_named_and_skipped(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "it.json").write_bytes(content)
    CorpusDirectory(tmp_path).write([entry("a")], [])
    entries, wrong = CorpusDirectory(tmp_path).read()
    assert entries == [entry("a")]
    assert len(wrong) == 1
    assert wrong[0].startswith(f"{tmp_path / 'it.json'}: no schedule of a corpus, and skipped: ")
    assert reason in wrong[0]


def test_options_of_another_version_and_foreign_policies_are_skipped(tmp_path: Path) -> None:
    """A corpus may be anybody's, so no code is run that it names."""
    options = msgspec.to_builtins(draw_case("core", random_of(1, 0)).options)
    foreign = entry("step", options={**options, "policy": "somebodys.module:Policy"})
    CorpusDirectory(tmp_path).write([foreign, entry("step", options={"host_blocks": "many"})], [])
    corpus = Corpus(CORE, tmp_path)
    assert corpus.entries == []
    assert sorted("--allow-policy" in one for one in corpus.wrong) == [False, True]


def test_files_of_other_targets_are_left_alone(tmp_path: Path) -> None:
    other = msgspec.structs.replace(entry("a"), target="my.module:World")
    CorpusDirectory(tmp_path).write([other], [])
    corpus = Corpus(CORE, tmp_path)
    corpus.reduce(10_000)
    corpus.save()
    assert (corpus.entries, corpus.wrong) == ([], [])
    assert CorpusDirectory(tmp_path).read()[0] == [other]


# Walks with a corpus.


def guided(directory: Path, seed: int, runs: int, jobs: int = 1) -> tuple[WalkResult, Corpus]:
    """A walk that leaves its corpus in the directory."""

    def walk_round(maker: GuidedRuns, seed: int, before: WalkResult, **limits: Any) -> WalkResult:  # noqa: ARG001
        return walk(maker, seed, jobs=jobs, **limits)

    corpus = Corpus(CORE, directory)
    result, _ = walk_in_rounds(CORE, corpus, seed, walk_round, first_run=0, runs=runs, seconds=None)
    corpus.reduce(10_000)
    corpus.save()
    return result, corpus


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short runs and rounds."""
    monkeypatch.setattr("kvsm.check.walks.walk.FEWEST_ACTIONS", 10)
    monkeypatch.setattr("kvsm.check.walks.walk.MOST_ACTIONS", 60)
    monkeypatch.setattr("kvsm.check.walks.rounds.FIRST_ROUND", 4)


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_equal_seeds_and_corpora_are_equal_walks_for_any_number_of_processes(tmp_path: Path) -> None:
    """Determinism (S11), with a corpus that grows from round to round."""
    alone, together = (guided(tmp_path / str(jobs), 5, 12, jobs) for jobs in (1, 2))
    assert alone[0].operations == together[0].operations
    assert alone[1].totals == together[1].totals
    assert names(tmp_path / "1") == names(tmp_path / "2")
    for path in (tmp_path / "1").iterdir():
        assert path.read_bytes() == (tmp_path / "2" / path.name).read_bytes()


def test_another_corpus_is_another_walk(tmp_path: Path) -> None:
    """Its runs begin with the schedules, so a corpus that were never used would be noticed."""
    first, _ = guided(tmp_path, 5, 8)
    again, corpus = guided(tmp_path, 5, 8)
    assert again.operations != first.operations
    assert corpus.totals.features >= corpus.totals.new


def test_what_was_reached_stays_reached(tmp_path: Path) -> None:
    """A reduction leaves out only what its schedule is not kept for, and a later walk keeps the features."""
    _, before = guided(tmp_path, 5, 8)
    _, after = guided(tmp_path, 6, 4)
    assert before.features <= after.features
    assert all(one.reduced for one in after.entries)


def test_corpora_of_two_machines_are_merged_by_copying(tmp_path: Path) -> None:
    _, one = guided(tmp_path / "a", 5, 6)
    _, other = guided(tmp_path / "b", 6, 6)
    for path in (tmp_path / "b").iterdir():
        shutil.copy(path, tmp_path / "a" / path.name)
    corpus = Corpus(CORE, tmp_path / "a")
    corpus.reduce(10_000)
    corpus.save()
    assert corpus.features == one.features | other.features
    assert names(tmp_path / "a") == {f"{one.name}.json" for one in corpus.entries}
    assert all(kept in [*one.entries, *other.entries] for kept in corpus.entries)


def test_a_schedule_that_fails_by_now_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A corpus repeats what it has, so a new bug that it reaches is found before any run."""
    guided(tmp_path, 6, 12)
    assert Corpus(CORE, tmp_path).broken is None
    free_slots_under_copies(monkeypatch)
    broken = Corpus(CORE, tmp_path).broken
    assert broken is not None
    saved = CORE.reduced(CORE.unreduced_entry(*broken))
    assert str(saved.finding()).startswith("conservation (S1): slot")
    assert CORE.again(saved) is not None


def test_a_failure_of_a_guided_run_is_reduced_in_the_world_of_its_schedule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guided(tmp_path, 5, 12)
    corpus = Corpus(CORE, tmp_path)
    free_slots_under_copies(monkeypatch)
    maker = CORE.guided_runs(8, corpus.entries, corpus.features)
    for number in range(200):
        failure = maker.run(number).failure
        case = CORE._case_of_run(8, number, corpus.entries)
        if failure is not None and case != draw_case("core", random_of(8, number)):
            break
    assert failure is not None
    saved = CORE.reduced(CORE.unreduced(8, failure, corpus.entries))
    assert saved.options == msgspec.to_builtins(case.options)
    assert len(saved.actions) < 10


class Telling(Counting):
    """Says how high it came."""

    def __init__(self) -> None:
        super().__init__(most=10**6)

    def reached(self) -> Collection[str]:
        return [f"height {self.kinds.count('up') // 20}"]


def test_a_world_says_itself_what_it_reached() -> None:
    run = GuidedRuns(lambda _: Telling(), 1, [], frozenset()).run(0)
    assert run.reached
    assert all(one.startswith("event height ") for one in run.reached[0].features)
    known = run.reached[0].features
    assert GuidedRuns(lambda _: Telling(), 1, [], known).run(0).reached == ()


def test_winding_down_is_part_of_a_schedule() -> None:
    """What is reached on the way to rest is kept, too."""
    done: list[Any] = []
    with watching(done) as watch:
        world = draw_case("core", random_of(1, 0)).make()
        world.do(("import_blocks", 0, 0, 0, 0, 0))
        reached = set(watch.new)
        rest(world, done)
    assert watch.new > reached
    assert watch.length > 0
