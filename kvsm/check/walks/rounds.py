"""A walk with a corpus: rounds of runs, and after each one the corpus has what the round has found.

The runs of a round begin with what the corpus held before it. So what a run does depends on the seed, its
number, and the corpus at the beginning of its round, and never on how fast other processes are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from kvsm.check.walks.corpus import CorpusDirectory, CorpusEntry, smallest
from kvsm.check.walks.fuzz_target import FuzzTarget
from kvsm.check.walks.walk import WalkFailure, WalkResult
from kvsm.errors import ConfigError

FIRST_ROUND, MOST_ROUND = 32, 512
"""Runs of a shard in the first round of a walk, and in the longest one. Each is twice the one before."""

WalkRound = Callable[..., WalkResult]
"""`kvsm.check.walks.walk.walk`, or what shows it."""


class CorpusTotals(msgspec.Struct, frozen=True):
    """What a corpus holds after a walk.

    schedules: how many it has. features: how many they reach together. new: how many this walk added.
    """

    schedules: int
    features: int
    new: int


class Corpus:
    """The corpus of one target during a walk.

    wrong: what is wrong with files that were skipped.
    """

    def __init__(self, target: FuzzTarget, directory: Path) -> None:
        self._target, self._directory = target, CorpusDirectory(directory)
        entries, self.wrong = self._directory.read()
        self._reach: dict[str, tuple[CorpusEntry, frozenset[str]]] = {}
        self._read: list[CorpusEntry] = []
        self.broken: tuple[CorpusEntry, WalkFailure] | None = None
        """The first entry that fails by now, if any. The entries behind it are not read."""
        for entry in entries:
            if target.owns(entry) and self.broken is None:
                self._take(entry, directory)
        self._before = self.features

    def _take(self, entry: CorpusEntry, directory: Path) -> None:
        try:
            self._target.check_entry(entry)
        except ConfigError as error:
            self.wrong.append(f"{directory / entry.name}.json: skipped: {error}; delete it")
            return
        self._read.append(entry)
        redone = self._target.redo(entry)
        if redone.failure is not None and self.broken is None:
            self.broken = entry, redone.failure
        self._reach[entry.name] = entry, redone.features

    @property
    def entries(self) -> list[CorpusEntry]:
        """In the order of their names."""
        return [self._reach[name][0] for name in sorted(self._reach)]

    @property
    def features(self) -> frozenset[str]:
        """All that the entries reach."""
        return frozenset().union(*[features for _, features in self._reach.values()])

    @property
    def totals(self) -> CorpusTotals:
        """For the report."""
        features = self.features
        return CorpusTotals(len(self._reach), len(features), len(features - self._before))

    def add(self, seed: int, result: WalkResult, entries: Sequence[CorpusEntry]) -> None:
        """Keep the schedules of a round that reach what no other one does. entries: those it began with."""
        for reached in result.reached:
            if reached.features <= self.features or (result.failure and reached.run == result.failure.run):
                continue  # an earlier run of the round was first; or the schedule fails
            entry = self._target.entry(seed, reached, entries)
            features = self._target.redo(entry).features
            if not features <= self.features:
                self._reach[entry.name] = entry, features

    def reduce(self, most_actions: int) -> None:
        """Reduce entries to what they alone are kept for, and drop those that nothing needs.

        most_actions: begin no further reduction after this number of actions. A later walk goes on there.
        """
        for name, wanted in smallest(self._reach).items():
            entry, _ = self._reach[name]
            if not entry.reduced and most_actions > 0:
                shorter, done = self._target.shortened(entry, wanted)
                self._reach[shorter.name] = shorter, self._target.redo(shorter).features
                most_actions -= done
        kept = smallest(self._reach)
        self._reach = {name: self._reach[name] for name in kept}

    def save(self) -> None:
        """Write what is new, and remove what is no longer there. Raises `ConfigError`."""
        self._directory.write(self.entries, [one for one in self._read if one.name not in self._reach])


def walk_in_rounds(
    target: FuzzTarget,
    corpus: Corpus,
    seed: int,
    walk_round: WalkRound,
    *,
    first_run: int,
    runs: int | None,
    seconds: float | None,
    shards: int = 1,
) -> tuple[WalkResult, list[CorpusEntry]]:
    """Walk as `walk` does, round by round. Returns the totals, and the entries that the last round had.

    walk_round: makes one round; takes what `walk` takes.
    shards: how many share the walk. A round has as many runs in each of them.
    """
    total, began, size = WalkResult(seed=seed, next_run=first_run), time.monotonic(), FIRST_ROUND * shards
    while True:
        entries = corpus.entries
        left = None if seconds is None else max(0.0, seconds - (time.monotonic() - began))
        many = size if runs is None else min(size, runs - (total.next_run - first_run))
        maker = target.guided_runs(seed, entries, corpus.features)
        result = walk_round(maker, seed, first_run=total.next_run, runs=many, seconds=left, before=total)
        total = msgspec.structs.replace(
            result,
            runs=total.runs + result.runs,
            operations=total.operations + result.operations,
            most_in_flight=max(total.most_in_flight, result.most_in_flight),
            seconds=total.seconds + result.seconds,
            reached=(),
        )
        try:
            corpus.add(seed, result, entries)
        except KeyboardInterrupt:
            total = msgspec.structs.replace(total, interrupted=True)
        is_over = (seconds is not None and time.monotonic() - began >= seconds) or (
            runs is not None and total.next_run - first_run >= runs
        )
        if is_over or total.interrupted or result.failure is not None:
            return total, entries
        size = min(2 * size, MOST_ROUND * shards)
