"""A corpus: schedules that reached something that no other one reached, kept in a directory between walks.

Each schedule is a file of its own, named by its content. So corpora of several machines are merged by copying
their files into one directory. Files do not say what their schedules reach: that is seen by doing them again,
with the code as it is now. A schedule that fails by then is a failure like any other.

Of the schedules that reach a feature (`kvsm.check.walks.watch`) the smallest one stays, and a schedule that
is the smallest for none goes. What stays depends only on the schedules, and not on their order. So it does
not matter in which order corpora are merged.
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
"""A larger file is no schedule: the longest run of a walk has a tenth of that."""


class CorpusEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A schedule, from which a run can begin.

    target: what it is a schedule of.
    seed, run: of the run that reached it.
    options: of the world, as builtins.
    actions: in the world.
    choices: in place of both, for a machine of Hypothesis: the bytes that it draws from, in hexadecimal.
    reduced: whether all that is not needed was left out.
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
        """The name of its content. Equal schedules have equal names, also on other machines."""
        content = (self.target, self.options, self.actions, self.choices)
        return blake2b(msgspec.json.encode(content), digest_size=10).hexdigest()

    @property
    def size(self) -> tuple[int, int, str]:
        """Orders entries from small to large. No two are equal."""
        return len(self.actions), len(self.choices), self.name

    def with_actions(self, actions: Iterable[Action], *, reduced: bool) -> CorpusEntry:
        """The same with other actions."""
        return msgspec.structs.replace(self, actions=tuple(actions), reduced=reduced)


def smallest(reach: Mapping[str, tuple[CorpusEntry, frozenset[str]]]) -> dict[str, frozenset[str]]:
    """Which entries stay, by name, and for which features: each the smallest entry that reaches them.

    reach: by the names of the entries, all that they reach.
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
    """The files of a corpus. Files of other targets in it are left alone."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{directory}: cannot be a corpus: {error.strerror}") from error

    def read(self) -> tuple[list[CorpusEntry], list[str]]:
        """All entries in the order of their names, and what is wrong with the files that hold none."""
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
        """Write the entries that are not there yet, then remove those that are gone. Raises `ConfigError`."""
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
    """The entry, or why there is none."""
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
