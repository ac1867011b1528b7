"""Which request a person means: by its full id in the log, or as a client of vLLM's server knows it.

The server appends a hyphen and characters of its own to the id that a client sends. So a name that no request
has exactly stands for all requests whose ids begin with it and a hyphen.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from difflib import get_close_matches
from itertools import islice
from pathlib import Path

from kvsm.errors import LogError
from kvsm.events import KINDS
from kvsm.log import LogReader
from kvsm.replay.concern import NAMED_BY_FIELDS

MOST_LISTED = 12
"""Requests that a message lists."""

_MOST_COMPARED = 20_000
"""Ids that are compared with a name that no request has: about half a second."""

_REQUEST_FIELDS = {
    kind: [
        (field, how[1])
        for field in kind.__struct_fields__
        if (how := NAMED_BY_FIELDS.get(field)) is not None and how[0] == "requests"
    ]
    for kind in KINDS
}
"""The fields of each kind that name requests, and how to read them."""


def requests_in(reader: LogReader) -> dict[str, None]:
    """Every request that an event of the log names, each once, in the order of the log."""
    found: dict[str, None] = {}
    for segment in reader.segments():
        for event in segment.events():
            for field, read in _REQUEST_FIELDS[type(event)]:
                for name in read(getattr(event, field)):
                    found[name] = None
    return found


def matching(asked: str, names: Iterable[str]) -> list[str]:
    """The requests that a person means by `asked`: the one of this id or, if there is none, each one whose id
    begins with it and a hyphen."""
    begins = f"{asked}-"
    found = [name for name in names if name == asked or name.startswith(begins)]
    return [asked] if asked in found else found


def nearest(asked: str, names: Collection[str]) -> list[str]:
    """Up to three ids that resemble `asked`, nearest first."""
    beginning = [name for name in names if asked and name.startswith(asked)]
    if beginning:
        return sorted(beginning, key=len)[:3]
    return get_close_matches(asked, list(islice(names, _MOST_COMPARED)), n=3, cutoff=0.6)


def only_match(asked: str, names: Collection[str], log: Path) -> str:
    """The full id of the one request that `asked` means.

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
