"""Resolve the name of a request or key as a user types it.

A request is named by its full id in the log, or by the id that a client sent. vLLM's server appends a hyphen
and more characters to a client's id. So a name that is not the full id of any request matches all requests
whose ids begin with that name and a hyphen.

A key is named by a prefix of its hex digits, or as kvsm prints it: `3fa90c11d2e4..0001`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from difflib import get_close_matches
from heapq import nlargest
from itertools import takewhile
from operator import eq
from pathlib import Path
from typing import NamedTuple

from kvsm.core.log import LogReader
from kvsm.errors import ConfigError, LogDamaged, LogError
from kvsm.events import KINDS
from kvsm.explain.story.concern import NAMED_BY_FIELDS

MOST_LISTED = 12
"""Most requests that a message lists."""

_MOST_COMPARED, _LONGEST_COMPARED = 2_000, 200
"""Most ids, and most characters of an id, compared with an unknown name for a suggestion: about 0.1 s."""

_REQUEST_FIELDS = {
    kind: [
        (field, how[1])
        for field in kind.__struct_fields__
        if (how := NAMED_BY_FIELDS.get(field)) is not None and how[0] == "requests"
    ]
    for kind in KINDS
}
"""For each kind of event: the fields that name requests, and the functions that read the names from them."""


class KeyPattern(NamedTuple):
    """The keys whose hex digits begin with `first` and end with `last`."""

    first: str
    last: str

    def fits(self, key: bytes) -> bool:
        """Whether this key matches the pattern."""
        digits = key.hex()
        return digits.startswith(self.first) and digits.endswith(self.last)

    def __str__(self) -> str:
        return f"{self.first}..{self.last}" if self.last else self.first


def key_pattern(text: str) -> KeyPattern:
    """Parse `3fa9` or `3fa90c11d2e4..0001`. Raises `ConfigError` if the text has another form."""
    found = re.fullmatch(r"([0-9a-f]+)(?:\.\.([0-9a-f]*))?", text.lower())
    if found is None:
        raise ConfigError(f"key {text!r} is not made of hex digits, like 3fa9 or 3fa90c11d2e4..0001")
    return KeyPattern(found[1], found[2] or "")


def full_name(reader: LogReader, asked: str) -> str:
    """The full id of the one request in a log that `asked` names.

    Raises `LogError` as `only_match` does, and `LogDamaged` if the log is damaged and the part that can be
    read does not have exactly one match.
    """
    names: dict[str, None] = {}
    damage: LogDamaged | None = None
    try:
        for name in requests_in(reader):
            names[name] = None
    except LogDamaged as error:
        damage = error
    if damage is not None and len(matching(asked, names)) != 1:
        raise damage
    return only_match(asked, names, reader.directory)


def requests_in(reader: LogReader) -> Iterator[str]:
    """Yield the requests that each event names, in the order of the log, with repetitions."""
    for segment in reader.segments():
        for event in segment.events():
            for field, read in _REQUEST_FIELDS[type(event)]:
                yield from read(getattr(event, field))


def matching(asked: str, names: Iterable[str]) -> list[str]:
    """The requests that `asked` names: the request with this id or, if there is none, all requests whose ids
    begin with `asked` and a hyphen."""
    begins = f"{asked}-"
    found = [name for name in names if name == asked or name.startswith(begins)]
    return [asked] if asked in found else found


def nearest(asked: str, names: Collection[str]) -> list[str]:
    """Up to three ids that resemble `asked`, most similar first."""
    beginning = [name for name in names if asked and name.startswith(asked)]
    if beginning:
        return sorted(beginning, key=len)[:3]
    alike = nlargest(_MOST_COMPARED, names, key=lambda name: _in_common(name, asked))
    compared = [name for name in alike if len(name) <= _LONGEST_COMPARED]
    return get_close_matches(asked[:_LONGEST_COMPARED], compared, n=3, cutoff=0.6)


def _in_common(left: str, right: str) -> int:
    """The length of the common prefix of two ids."""
    return sum(1 for _ in takewhile(bool, map(eq, left, right)))


def only_match(asked: str, names: Collection[str], log: Path) -> str:
    """The full id of the one request that `asked` names.

    names: the ids of all requests in the log.
    log: its directory, for messages.

    Raises `LogError` that suggests the nearest ids if there is no such request, or lists them if there are
    several.
    """
    found = matching(asked, names)
    if len(found) == 1:
        return found[0]
    if found:
        shown = ", ".join(found[:MOST_LISTED]) + (", ..." if len(found) > MOST_LISTED else "")
        raise LogError(f"{log}: {len(found)} requests are named {asked}: {shown}; give the full id of one")
    near = nearest(asked, names)
    hint = f"did you mean {' or '.join(near)}?" if near else _examples(names)
    raise LogError(f"{log}: there is no request {asked}; {hint}")


def _examples(names: Collection[str]) -> str:
    if not names:
        return "the log names no request"
    return f"the log names {len(names):,}, the first is {next(iter(names))}"
