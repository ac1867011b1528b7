"""A walk with a corpus: rounds of runs, with the new schedules added to the corpus after each round.

The runs of a round use the corpus as it was before the round. So a run is determined by the seed, its number,
and that corpus, and not by the speed of other processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvsm.check.walks.corpus import CorpusDirectory, CorpusEntry, smallest
from kvsm.check.walks.fuzz_target import FuzzTarget
from kvsm.check.walks.walk import WalkFailure, WalkResult
from kvsm.errors import ConfigError
from kvsm.system.stopping import IsOver, never

FIRST_ROUND, MOST_ROUND = 32, 512
"""The number of runs of a shard in the first round of a walk, and its limit. Each round doubles it."""

WalkRound = Callable[..., WalkResult]
"""`kvsm.check.walks.walk.walk`, or a wrapper that shows its progress."""


class CorpusTotals(msgspec.Struct, frozen=True):
    """The size of a corpus after a walk.

    schedules: the number of its schedules.
    features: the number of features that they reach together.
    new: how many of these features were not reached before the walk.
    """

    schedules: int
    features: int
    new: int


class Corpus:
    """The corpus of one target during a walk.

    wrong: an error message for each skipped file.
    is_over: asked between two entries that are run again. The files of later entries stay as they are.
    """

    def __init__(self, target: FuzzTarget, directory: Path, is_over: IsOver = never) -> None:
        self._target, self._directory = target, CorpusDirectory(directory)
        entries, self.wrong = self._directory.read()
        self._reach: dict[str, tuple[CorpusEntry, frozenset[str]]] = {}
        self._read: list[CorpusEntry] = []
        self.broken: tuple[CorpusEntry, WalkFailure] | None = None
        """The first entry that fails with the present code, and its failure. Later entries are not read."""
        for entry in entries:
            if target.owns(entry) and self.broken is None and not is_over():
                self._load(entry, directory)
        self._before = self.features

    def _load(self, entry: CorpusEntry, directory: Path) -> None:
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
        """The entries, in the order of their names."""
        return [self._reach[name][0] for name in sorted(self._reach)]

    @property
    def features(self) -> frozenset[str]:
        """All features that the entries reach."""
        return frozenset().union(*[features for _, features in self._reach.values()])

    @property
    def totals(self) -> CorpusTotals:
        """The size of the corpus, for the report."""
        features = self.features
        return CorpusTotals(len(self._reach), len(features), len(features - self._before))

    def add(
        self, seed: int, result: WalkResult, entries: Sequence[CorpusEntry], is_over: IsOver = never
    ) -> None:
        """Add the schedules of a round that reach new features. entries: the entries at its beginning."""
        for reached in result.reached:
            if is_over():
                return
            if reached.features <= self.features or (result.failure and reached.run == result.failure.run):
                continue  # an earlier run of the round has reached the same features; or this run failed
            entry = self._target.entry(seed, reached, entries)
            features = self._target.redo(entry).features
            if not features <= self.features:
                self._reach[entry.name] = entry, features

    def reduce(self, most_actions: int, is_over: IsOver = never) -> None:
        """Reduce each entry to the features for which it is the smallest; drop redundant entries. Begin no
        reduction after `most_actions` actions were run, or when `is_over` returns True. A later walk reduces
        the rest.
        """
        for name, wanted in smallest(self._reach).items():
            entry, _ = self._reach[name]
            if not entry.reduced and most_actions > 0 and not is_over():
                shorter, done = self._target.shortened(entry, wanted)
                self._reach[shorter.name] = shorter, self._target.redo(shorter).features
                most_actions -= done
        kept = smallest(self._reach)
        self._reach = {name: self._reach[name] for name in kept}

    def save(self) -> None:
        """Write new entries, and delete the files of dropped ones. Raises `ConfigError`."""
        self._directory.write(self.entries, [entry for entry in self._read if entry.name not in self._reach])


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
    is_over: IsOver = never,
) -> tuple[WalkResult, list[CorpusEntry]]:
    """Walk as `walk` does, round by round. Returns (totals, the entries at the beginning of the last round).

    walk_round: makes the runs of one round; takes the arguments of `walk`.
    shards: the number of shards of the walk. A round has equally many runs in each shard.
    is_over: asked by `walk_round`, and while the corpus is added to.
    """
    total, began, size = WalkResult(seed=seed, next_run=first_run), time.monotonic(), FIRST_ROUND * shards
    while True:
        entries = corpus.entries
        left = None if seconds is None else max(0.0, seconds - (time.monotonic() - began))
        many = size if runs is None else min(size, runs - (total.next_run - first_run))
        maker = target.guided_runs(seed, entries, corpus.features)
        limits: dict[str, Any] = {"runs": many, "seconds": left, "is_over": is_over}
        result = walk_round(maker, seed, first_run=total.next_run, before=total, **limits)
        total = msgspec.structs.replace(
            result,
            runs=total.runs + result.runs,
            operations=total.operations + result.operations,
            most_in_flight=max(total.most_in_flight, result.most_in_flight),
            seconds=total.seconds + result.seconds,
            reached=(),
        )
        corpus.add(seed, result, entries, is_over)
        ends = (seconds is not None and time.monotonic() - began >= seconds) or (
            runs is not None and total.next_run - first_run >= runs
        )
        if ends or total.interrupted or is_over() or result.failure is not None:
            return msgspec.structs.replace(total, interrupted=total.interrupted or is_over()), entries
        size = min(2 * size, MOST_ROUND * shards)
