"""The targets of `kvsm fuzz`: one interface for worlds and for Hypothesis machines.

A target makes runs, and each run is determined by its number. So shards, processes, limits, resumed walks and
the corpus work alike for all targets. `WorldTarget` is for worlds, `kvsm.testing.machine_target` for
machines.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import NamedTuple

import msgspec

from kvsm.check.walks import failures
from kvsm.check.walks.corpus import CorpusEntry
from kvsm.check.walks.failures import SavedFailure
from kvsm.check.walks.guided import GuidedRuns, Schedule, chance_of, picked, reached_by
from kvsm.check.walks.option_trust import refuse_named
from kvsm.check.walks.own_code import find_own, is_path, where
from kvsm.check.walks.reduce import reduce_pieces, rerun
from kvsm.check.walks.repeated import RepeatedRuns, differing_log
from kvsm.check.walks.targets import TARGETS, WalkCase, case_of, draw_case
from kvsm.check.walks.walk import NewlyReached, RunMaker, WalkFailure, WorldRuns, random_of
from kvsm.check.walks.watch import watching
from kvsm.check.worlds.world import Action, World
from kvsm.errors import ConfigError
from kvsm.properties import Property
from kvsm.system.stopping import IsOver, never

MOST_REDUCING = 30
"""The limit of a corpus entry's reduction, in reruns of all of its actions."""


class Shortened(NamedTuple):
    """A reduced entry. done: how many actions the reduction has run."""

    entry: CorpusEntry
    done: int


class Redone(NamedTuple):
    """The features that a schedule reaches with the present code. failure: None unless it fails."""

    features: frozenset[str]
    failure: WalkFailure | None


class FuzzTarget(ABC):
    """A target of walks. name: as the user gives it."""

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def source(self) -> tuple[str, int] | None:
        """File and line of the user's code; None for a target of kvsm."""
        return where(find_own(self.name)) if is_path(self.name) else None

    # Runs.

    @abstractmethod
    def runs(self, seed: int) -> RunMaker:
        """Return the maker of the runs of a walk."""

    @abstractmethod
    def guided_runs(self, seed: int, entries: Sequence[CorpusEntry], known: Collection[str]) -> RunMaker:
        """Return the maker of watched runs, some of which begin with an entry.

        known: the features that count as reached already.
        """

    # The corpus.

    @abstractmethod
    def check_entry(self, entry: CorpusEntry) -> None:
        """Raises `ConfigError` if this entry of the target cannot be run here."""

    def owns(self, entry: CorpusEntry) -> bool:
        """Whether the entry belongs to this target."""
        return entry.target == self.name

    @abstractmethod
    def entry(self, seed: int, reached: NewlyReached, entries: Sequence[CorpusEntry]) -> CorpusEntry:
        """The entry for a run that reached new features. entries: those passed to `guided_runs`."""

    @abstractmethod
    def redo(self, entry: CorpusEntry) -> Redone:
        """Run a schedule again."""

    @abstractmethod
    def shortened(self, entry: CorpusEntry, wanted: Collection[str]) -> Shortened:
        """Reduce the entry to the actions that are needed to reach these features."""

    # Failures.

    @abstractmethod
    def unreduced(self, seed: int, failure: WalkFailure, entries: Sequence[CorpusEntry]) -> SavedFailure:
        """Return the failure of a run, not yet reduced. entries: those passed to `guided_runs`."""

    @abstractmethod
    def unreduced_entry(self, entry: CorpusEntry, failure: WalkFailure) -> SavedFailure:
        """Return the failure of an entry, not yet reduced."""

    @abstractmethod
    def reduced(self, failure: SavedFailure, is_over: IsOver = never) -> SavedFailure:
        """Reduce an unreduced failure. is_over: asked between two steps; if true, the result so far is
        returned."""

    @abstractmethod
    def again(self, failure: SavedFailure) -> SavedFailure | None:
        """Run a failure with the present code. Returns it with its present finding; None if it passes."""

    @abstractmethod
    def told(self, failure: SavedFailure) -> str:
        """The failure as text for people."""

    @abstractmethod
    def save(self, failure: SavedFailure, directory: Path) -> None:
        """Write the failure, its text, log and test to a claimed directory, in place of older ones."""


class WorldTarget(FuzzTarget):
    """A world of kvsm, all of these worlds in turn, or a world of the user."""

    def owns(self, entry: CorpusEntry) -> bool:
        return entry.target in TARGETS if self.name == "all" else super().owns(entry)

    def check_entry(self, entry: CorpusEntry) -> None:
        if not entry.actions:
            raise ConfigError("it has no actions")
        refuse_named(_case(entry).options, {})

    def runs(self, seed: int) -> RunMaker:
        if is_path(self.name):
            return WorldRuns(self._make, seed)
        return RepeatedRuns(partial(draw_case, self.name), seed)

    def guided_runs(self, seed: int, entries: Sequence[CorpusEntry], known: Collection[str]) -> RunMaker:
        schedules = [Schedule(_case(entry).make, entry.actions) for entry in entries]
        return GuidedRuns(self._make, seed, schedules, known)

    def _make(self, random: Random) -> World:
        return draw_case(self.name, random).make()

    def _case_of_run(self, seed: int, run: int, entries: Sequence[CorpusEntry]) -> WalkCase:
        place = picked(chance_of(seed, run), len(entries))
        return draw_case(self.name, random_of(seed, run)) if place is None else _case(entries[place])

    def entry(self, seed: int, reached: NewlyReached, entries: Sequence[CorpusEntry]) -> CorpusEntry:
        case = self._case_of_run(seed, reached.run, entries)
        return CorpusEntry(
            target=case.target,
            seed=seed,
            run=reached.run,
            options=msgspec.to_builtins(case.options),
            actions=reached.actions,
        )

    def redo(self, entry: CorpusEntry) -> Redone:
        features, _, failure = _redo(entry, entry.actions)
        return Redone(features, failure)

    def shortened(self, entry: CorpusEntry, wanted: Collection[str]) -> Shortened:
        done, needed = 0, frozenset(wanted)

        def tried(actions: Sequence[Action]) -> Sequence[Action] | None:
            nonlocal done
            if done + len(actions) > MOST_REDUCING * len(entry.actions):
                raise StopIteration
            done += len(actions)
            features, happened, _ = _redo(entry, actions)
            return happened if needed <= features else None

        return Shortened(entry.with_actions(reduce_pieces(entry.actions, tried), reduced=True), done)

    def unreduced(self, seed: int, failure: WalkFailure, entries: Sequence[CorpusEntry]) -> SavedFailure:
        found = failures.unreduced(self._case_of_run(seed, failure.run, entries), seed, failure)
        return msgspec.structs.replace(found, walked="" if found.target == self.name else self.name)

    def unreduced_entry(self, entry: CorpusEntry, failure: WalkFailure) -> SavedFailure:
        return failures.unreduced(_case(entry), entry.seed, failure)

    def reduced(self, failure: SavedFailure, is_over: IsOver = never) -> SavedFailure:
        return failures.reduced(failure, is_over)

    def again(self, failure: SavedFailure) -> SavedFailure | None:
        outcome = rerun(failure.case().make, failure.actions, to_rest=True)
        found = outcome.finding
        if found is None and failure.property is Property.DETERMINISM and not is_path(failure.target):
            found = differing_log(failure.case(), failure.actions)
        return None if found is None else failure.after(outcome.actions, found)

    def told(self, failure: SavedFailure) -> str:
        return failures.told(failure)

    def save(self, failure: SavedFailure, directory: Path) -> None:
        failures.save(failure, directory)


def _case(entry: CorpusEntry) -> WalkCase:
    return case_of(entry.target, entry.options)


def _redo(
    entry: CorpusEntry, actions: Sequence[Action]
) -> tuple[frozenset[str], tuple[Action, ...], WalkFailure | None]:
    """Run actions in the entry's world. Returns (features reached, actions that happened, failure if any)."""
    with watching() as watch:
        outcome = rerun(_case(entry).make, actions)
        watch.say(reached_by(outcome.world))
    found = outcome.finding
    failure = None if found is None else WalkFailure(entry.run, outcome.actions, found)
    return frozenset(watch.new), outcome.actions, failure
