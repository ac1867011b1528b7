"""A corpus: schedules that each reach a feature which no other one reaches, kept in a directory between
walks.

Each schedule is a file, named by its content. So the corpora of several machines are merged by copying their
files into one directory. A file does not record which features its schedule reaches: to find out, the
schedule is run with the present code. If it fails then, that is a failure like any other.

Among the schedules that reach a feature (`kvsm.check.walks.watch`) the smallest is kept. A schedule that is
the smallest for no feature is deleted. Which schedules are kept depends on the set of schedules alone. So
corpora may be merged in any order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from kvsm.check.worlds.world import Action
from kvsm.errors import ConfigError
from kvsm.system.private_files import write_whole

MOST_BYTES = 1 << 20
"""The largest file that is read: ten times the longest run of a walk."""


class CorpusEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A schedule from which a run can begin.

    target: the name of the target to which the schedule belongs.
    seed, run: the seed of the walk and the number of the run that found it.
    options: the options of the world, as builtins.
    actions: the actions in the world.
    choices: for a Hypothesis machine, in place of options and actions: the bytes that it draws from, in
        hexadecimal.
    reduced: whether unnecessary actions were removed.
    """

    target: str
    seed: int
    run: int
    options: dict[str, Any] = {}
    actions: tuple[tuple[str | int, ...], ...] = ()
    choices: str = ""
    reduced: bool = False

    @property
    def name(self) -> str:
        """The hash of its content. Equal schedules have equal names, also on different machines."""
        content = (self.target, self.options, self.actions, self.choices)
        return blake2b(msgspec.json.encode(content), digest_size=10).hexdigest()

    @property
    def size(self) -> tuple[int, int, str]:
        """The sort key by size. Different entries have different keys."""
        return len(self.actions), len(self.choices), self.name

    def with_actions(self, actions: Iterable[Action], *, reduced: bool) -> CorpusEntry:
        """A copy of the entry with other actions."""
        return msgspec.structs.replace(self, actions=tuple(actions), reduced=reduced)


def smallest(reach: Mapping[str, tuple[CorpusEntry, frozenset[str]]]) -> dict[str, frozenset[str]]:
    """The entries to keep: name -> the features for which this entry is the smallest.

    reach: name of an entry -> (entry, all features that it reaches).
    """
    wins: dict[str, set[str]] = {}
    taken: set[str] = set()
    for entry, features in sorted(reach.values(), key=lambda one: one[0].size):
        first = features - taken
        if first:
            wins[entry.name] = set(first)
            taken |= first
    return {name: frozenset(features) for name, features in wins.items()}


class CorpusDirectory:
    """The files of a corpus. Files of other targets in the directory are not touched."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{directory}: cannot be a corpus: {error.strerror}") from error

    def read(self) -> tuple[list[CorpusEntry], list[str]]:
        """(all entries in the order of their names, an error message for each file that is not an entry)."""
        entries: dict[str, CorpusEntry] = {}
        wrong = []
        for path in sorted(self.directory.glob("*.json")):
            entry = _read(path)
            if isinstance(entry, str):
                wrong.append(f"{path}: no schedule of a corpus, and skipped: {entry}; delete it")
            else:
                entries.setdefault(entry.name, entry)
        return [entries[name] for name in sorted(entries)], wrong

    def write(self, entries: Iterable[CorpusEntry], gone: Iterable[CorpusEntry]) -> None:
        """Write the entries that have no file yet, then delete the files of `gone`. Raises `ConfigError`."""
        try:
            for entry in entries:
                path = self._path(entry)
                if not path.exists():
                    write_whole(path, msgspec.json.encode(entry))
            for entry in gone:
                self._path(entry).unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(f"{self.directory}: the corpus cannot be saved: {error.strerror}") from error

    def _path(self, entry: CorpusEntry) -> Path:
        return self.directory / f"{entry.name}.json"


def _read(path: Path) -> CorpusEntry | str:
    """The entry in this file, or the reason why there is none."""
    if not path.is_file():
        return "it is no regular file"
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        entry = msgspec.json.decode(content, type=CorpusEntry)
    except OSError as error:
        return str(error.strerror)
    except msgspec.DecodeError as error:
        return f"it has more than {MOST_BYTES:,} bytes" if len(content) > MOST_BYTES else str(error)
    return entry if entry.actions or entry.choices else "it has neither actions nor choices"
