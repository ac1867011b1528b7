"""The properties: what kvsm promises. Every check, violation and proof names one of them.

`str(Property.NO_REUSE_IN_FLIGHT)` is "no reuse in flight (S3)": this is how a property is named to people.
`Property("S3")` is the same member. In JSON a property is its id, "S3".
"""

from __future__ import annotations

from enum import Enum
from json import JSONEncoder
from typing import Any


class Property(Enum):
    """What must hold. Defined as MEMBER = id, title, sentence."""

    CONSERVATION = (
        "S1",
        "conservation",
        "Every slot is in exactly one state and in exactly one list, and the counts add up to the capacity.",
    )
    PUBLISH_AFTER_COMMIT = (
        "S2",
        "publish after commit",
        "A key matches only after every worker has reported its store as good.",
    )
    NO_REUSE_IN_FLIGHT = (
        "S3",
        "no reuse in flight",
        "A slot or device block that a live copy touches is not evicted, reallocated, overwritten or "
        "released.",
    )
    ONE_RELEASE_PER_HOLD = (
        "S4",
        "one release per hold",
        "Pins, readers and leases equal their live holders: they are never negative, and all are zero at "
        "rest.",
    )
    STALE_REPORTS = (
        "S5",
        "stale reports change nothing",
        "A report acts only on the transfer that it names; a stale, doubled or unknown report changes "
        "nothing and is recorded.",
    )
    FAILURE_IS_NOT_SUCCESS = (
        "S6",
        "failure is not success",
        "A failed copy never makes a block readable or a request loaded, and the request learns which blocks "
        "to recompute; a store on disk counts as durable only after a flush that began after its writes.",
    )
    MATCH_HOLDS = (
        "S7",
        "a match holds what it counts",
        "Each block that a match counts is pinned until its load begins and read until the load ends, or the "
        "match is released.",
    )
    LEGAL_CALLS = (
        "S8",
        "every call is legal",
        "Every engine call is legal in every state of every request, and repeating a call changes nothing.",
    )
    PROGRESS = (
        "S9",
        "progress",
        "Once all copies end and all requests finish, no job, hold, lease or request is left, from any "
        "reachable state.",
    )
    EVENTS_ARE_STATE = (
        "S10",
        "events are state",
        "Folding the log gives the live state, and folding the published KV events gives exactly the "
        "matchable keys; an event is written to the log before anything outside acts on it, and no segment "
        "of the log is deleted before the next one is durable.",
    )
    DETERMINISM = (
        "S11",
        "determinism",
        "The same inputs give the same log, byte for byte.",
    )
    COPY_ORDER = (
        "S12",
        "order of copies",
        "A store reads a device block after compute wrote it, compute reads a block after its load, and two "
        "unordered copies never touch the same bytes if one of them writes.",
    )
    STORED_ONCE = (
        "S13",
        "no doubled or lost store",
        "A block that is stored or being stored is not stored again, a block that could not be stored yet is "
        "offered again, and at rest the disk has each idle block of the host, unless it is full of blocks "
        "used later.",
    )
    NO_STALE_DATA = (
        "S14",
        "no stale data",
        "After a reset, crash or restart a key matches only if its bytes are intact and of this epoch, and "
        "what a load of an older epoch brought is not stored again.",
    )
    CORRECT_BYTES = (
        "S15",
        "correct bytes",
        "The bytes that a load delivers are the bytes that were stored under that key.",
    )
    FULL_OFFLOAD = (
        "S16",
        "full offload",
        "One step after a request with do_remote_decode finishes, each of its full blocks is resident, in "
        "flight, or skipped with a reason; resident ones count as just used.",
    )
    LAST_STEP = (
        "S17",
        "flush at last step",
        "When no unfinished request remains, every pending transfer is flushed, or the engine is told that "
        "work is pending until none is.",
    )
    ONE_TOKEN_LEFT = (
        "S18",
        "one token left",
        "A match never covers the whole prompt: at least one token remains to compute.",
    )
    STORED_SO_SERVED = (
        "S19",
        "stored, so served",
        "Each match is as long as device, host and disk can serve at that moment, and each stored block is "
        "served to a prompt that asks for it, also after a restart or a hand-over.",
    )

    title: str
    """The name for people: "no reuse in flight"."""
    sentence: str
    """What it says, in full."""

    def __new__(cls, id: str, title: str = "", sentence: str = "") -> Property:
        """The value is the id alone, so that `Property("S3")` and msgspec find the member by it."""
        member = object.__new__(cls)
        member._value_, member.title, member.sentence = id, title, sentence
        return member

    @property
    def id(self) -> str:
        """The short id, which is stable: "S3"."""
        return str(self.value)

    @property
    def number(self) -> int:
        """The number in the id, 3 for "S3". Properties are listed in this order."""
        return int(self.id[1:])

    def __str__(self) -> str:
        return f"{self.title} ({self.id})"


_ENCODER = JSONEncoder(separators=(",", ":"))
"""From the standard library: it escapes non-ASCII characters, and accepts file names that are not UTF-8."""


def json_with_titles(value: Any) -> bytes:
    """Encode a value as ASCII JSON, and add the title of the property, "property", to each "property_id"."""
    import msgspec  # Only here: `kvsm --help` must not wait for it.

    facts = _with_titles(msgspec.to_builtins(value))
    return _ENCODER.encode(facts).encode("ascii")


def _with_titles(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_with_titles(item) for item in value]
    if not isinstance(value, dict):
        return value
    named = {key: _with_titles(item) for key, item in value.items()}
    if isinstance(id := value.get("property_id"), str):
        named["property"] = _TITLES.get(id, id)
    return named


_TITLES = {property.id: property.title for property in Property}
