"""Redact the records of a log: `EVENT_FIELDS` and `RULES` have a rule for each field of each record.

A field without a rule is an error, because a new field may hold a name. The rule `kept` is for numbers and
for words that kvsm itself defines; it is refused for a field whose type is text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from enum import Enum
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
from msgspec.structs import replace

from kvsm import events as ev
from kvsm.core.ledger import RequestRecord, TransferRecord
from kvsm.core.ledger.snapshot import SavedLedger, restore
from kvsm.core.log import SegmentHead, SegmentTail
from kvsm.core.log.minutes import CopyCounts, Minute, SegmentMinutes, encode_counts
from kvsm.core.log.trust import Trust
from kvsm.core.policies import WITHHELD
from kvsm.core.policies.arc import ARCState
from kvsm.core.policies.s3fifo import S3FIFOState
from kvsm.errors import ConfigError, KvsmError
from kvsm.explain.redaction.names import NewNames
from kvsm.identity import KeptPools, PoolIdentity
from kvsm.ids import Ids, MalformedIds, unpack
from kvsm.states.block import holders
from kvsm.tiers.disk_tier import DISK

_UNREADABLE = b"\xc1"
"""Invalid msgpack. It replaces a snapshot that cannot be decoded, so that readers refuse the copy's snapshot,
too."""

_MACHINES = re.compile("[0-9a-f]{0,32}")
"""A digest of the tables of state machines."""

_Record = TypeVar("_Record", bound=msgspec.Struct)


class Redactor:
    """Redacts the records of one log, in their order.

    names: makes the new names.
    max_slots: as in `Trust`.
    fetches: the copies from the disk, as their transfers in the host's log. The names of their requests in
        the disk's log keep these numbers.
    """

    def __init__(
        self,
        names: NewNames,
        log: Path,
        max_slots: int | None = None,
        fetches: Collection[int] = (),
    ) -> None:
        self.names, self._log, self._max_slots, self._fetches = names, log, max_slots, fetches
        self.fetched: set[int] = set()
        """The copies from the disk in this log, which is then the host's."""
        self._copies: set[str] = set()
        """Live requests that stand for copies to or from another tier."""
        self.withheld = False
        """Whether a policy was found that is not in `POLICY_STATES`. All later configurations name
        `WITHHELD`, because the order in which that policy left the blocks for the next one is unknown."""

    def redacted(self, record: _Record) -> _Record:
        """Return the record with new names. Raises `ConfigError` for a field without a rule."""
        if isinstance(record, ev.RequestArrived):
            (self._copies.add if record.target else self._copies.discard)(record.request)
        changes = {
            field: rule(self, getattr(record, field)) for field, rule in changing_rules(type(record)).items()
        }
        if isinstance(record, ev.RequestFinished):
            self._copies.discard(record.request)
        elif isinstance(record, ev.StorePlanned) and record.source == DISK:
            self.fetched.add(record.seq)
        return replace(record, **changes) if changes else record

    def request(self, name: str) -> str:
        """Return the new name of a request."""
        return self.names.request(name, is_copy=name in self._copies, fetches=self._fetches)

    def head(self, head: SegmentHead) -> SegmentHead:
        """Return the head of a segment, with its snapshot, with new names."""
        Trust((head.config.policy,), self._max_slots).check(head.config, self._log)
        return self.redacted(head)

    def policy(self, name: str) -> str:
        """Return the policy that the copy names."""
        if name not in POLICY_STATES:
            self.withheld = True
        return WITHHELD if self.withheld else name

    def saved(self, snapshot: bytes) -> bytes:
        """Return a snapshot of the ledger with new names."""
        if not snapshot:
            return b""
        try:
            state = msgspec.msgpack.decode(snapshot, type=SavedLedger)
            self._copies = {name for name, *_, target in state.requests if target}
            new = self.redacted(state)
            requests = tuple(sorted(new.requests, key=lambda saved: saved[0]))
            order = self._order(new)
        except (ValueError, KvsmError):  # msgspec's errors are `ValueError`
            return _UNREADABLE
        return msgspec.msgpack.encode(replace(new, requests=requests, policy=order))

    def _order(self, state: SavedLedger) -> bytes:
        """Return the state of the policy with new names. state: a snapshot that is redacted except for its
        policy."""
        name = state.config.policy
        if name == WITHHELD:
            return _idle_slots(state)
        kind = POLICY_STATES[name]
        if kind is None:
            return state.policy
        return msgspec.msgpack.encode(self.redacted(msgspec.msgpack.decode(state.policy, type=kind)))


def _idle_slots(state: SavedLedger) -> bytes:
    """Return the state of `WithheldPolicy`: the blocks that no request uses."""
    ledger = restore(msgspec.msgpack.encode(replace(state, policy=b"")))
    words, copied_out = ledger.blocks.words, ledger.copied_out
    idle = [
        slot
        for slot in range(ledger.config.host_blocks)
        if ledger.readable(slot) and holders(words[slot]) == copied_out.get(slot, 0)
    ]
    return np.array(idle, "<u4").tobytes()


Rule = Callable[[Redactor, Any], Any]


def kept(_: Redactor, value: Any) -> Any:
    """Keep a number, or a word that kvsm defines."""
    return value


def kept_numbers(_: Redactor, value: bytes) -> bytes:
    """Keep numbers that are packed as bytes."""
    return value


def later(_: Redactor, value: bytes) -> bytes:
    """Keep the state of a policy: `Redactor.saved` redacts it, because another field says which type it
    has."""
    return value


def ids(_: Redactor, batch: Ids) -> Ids:
    """Keep a batch of ids. Replace malformed bytes by other malformed bytes."""
    try:
        unpack(batch)
    except MalformedIds:
        return b""
    return batch


def machines(_: Redactor, digest: str) -> str:
    """Keep the digest of the tables of state machines."""
    return digest if _MACHINES.fullmatch(digest) else ""


def policy(redactor: Redactor, name: str) -> str:
    """Keep the name of a built-in policy."""
    return redactor.policy(name)


def part(redactor: Redactor, record: msgspec.Struct | None) -> msgspec.Struct | None:
    """Redact a record inside another one, by its own rules."""
    return None if record is None else redactor.redacted(record)


def records(kind: type[msgspec.Struct]) -> Rule:
    """Return the rule for records of a kind that are saved as tuples."""

    def apply(redactor: Redactor, saved: tuple[tuple[Any, ...], ...]) -> tuple[tuple[Any, ...], ...]:
        rules = list(rules_of(kind).values())
        return tuple(
            tuple(rule(redactor, value) for rule, value in zip(rules, one, strict=True)) for one in saved
        )

    return apply


def request(redactor: Redactor, name: str) -> str:
    """Rename a request."""
    return redactor.request(name)


def first_named(redactor: Redactor, pairs: tuple[tuple[Any, ...], ...]) -> tuple[tuple[Any, ...], ...]:
    """Rename the requests in `Owners` or offers, which are the first item of each."""
    return tuple((redactor.request(name), *numbers) for name, *numbers in pairs)


def key(redactor: Redactor, value: bytes | None) -> bytes | None:
    """Rename a key."""
    return None if value is None else redactor.names.key(value)


def keys(redactor: Redactor, values: Collection[bytes]) -> Collection[bytes]:
    """Rename keys, in the same order and the same kind of collection."""
    renamed = map(redactor.names.key, values)
    return list(renamed) if isinstance(values, list) else tuple(renamed)


def keys_of_blocks(redactor: Redactor, pairs: tuple[tuple[int, bytes], ...]) -> tuple[tuple[int, bytes], ...]:
    """Rename the keys of (device block, key) pairs."""
    return tuple((block, redactor.names.key(value)) for block, value in pairs)


def counted_keys(redactor: Redactor, pairs: tuple[tuple[bytes, int], ...]) -> tuple[tuple[bytes, int], ...]:
    """Rename the keys of (key, count) pairs."""
    return tuple((redactor.names.key(value), count) for value, count in pairs)


def identifier(redactor: Redactor, value: bytes) -> bytes:
    """Rename the id of a run or a life."""
    return redactor.names.identifier(value)


def identifiers(redactor: Redactor, values: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """Rename the ids of pools."""
    return tuple(map(redactor.names.identifier, values))


def facts(redactor: Redactor, pairs: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """Rename facts about a pool and their values."""
    return tuple(sorted((redactor.names.fact(name), redactor.names.fact(value)) for name, value in pairs))


def tier(redactor: Redactor, name: str) -> str:
    """Rename another tier."""
    return redactor.names.tier(name)


def source(redactor: Redactor, name: str) -> str:
    """Rename the source of a copy."""
    return redactor.names.source(name)


def lease(redactor: Redactor, name: str) -> str:
    """Rename the request that holds the lease of a session. Empty: there is none."""
    return redactor.request(name) if name else ""


def session(redactor: Redactor, name: str) -> str:
    """Rename a client's session."""
    return redactor.names.session(name)


def hand_over(redactor: Redactor, end: str) -> str:
    """Keep kvsm's word for how a hand-over ended."""
    return redactor.names.hand_over(end)


def weights(redactor: Redactor, version: str | None) -> str | None:
    """Rename a version of the weights."""
    return None if version is None else redactor.names.weights(version)


def error(redactor: Redactor, text: str | None) -> str | None:
    """Replace the text of an error."""
    return None if text is None else redactor.names.error(text)


def reasons(redactor: Redactor, lines: tuple[str, ...]) -> tuple[str, ...]:
    """Replace the reasons for a cold start."""
    return tuple(map(redactor.names.reason, lines))


def snapshot(redactor: Redactor, saved: bytes) -> bytes:
    """Redact the snapshot in a head."""
    return redactor.saved(saved)


def counts(redactor: Redactor, encoded: bytes) -> bytes:
    """Redact the counts of the previous segment. Leave out counts that cannot be decoded: readers then count
    the events."""
    try:
        found = msgspec.msgpack.decode(encoded, type=SegmentMinutes)
    except msgspec.MsgspecError:
        return b""
    return encode_counts(redactor.redacted(found))


def minutes(redactor: Redactor, parts: dict[int, Minute]) -> dict[int, Minute]:
    """Redact the counts of each period."""
    return {number: redactor.redacted(one) for number, one in parts.items()}


def skips(_: Redactor, blocks: dict[str, int]) -> dict[str, int]:
    """Keep the counts of reasons that kvsm defines."""
    return {reason: count for reason, count in blocks.items() if reason in _SKIPS}


_SKIPS = {reason.value for reason in ev.SkipReason}

EVENT_FIELDS: dict[str, Rule] = {
    "aborted": kept,
    "asked": kept,
    "block_ns": kept,
    "blocks": kept,
    "blocks_ahead": kept,
    "cold": reasons,
    "compute_us": kept,
    "config": part,
    "copied_us": kept,
    "declined": kept,
    "device_blocks": ids,
    "ended": error,
    "epoch": kept,
    "error": error,
    "good": kept,
    "hand_over": hand_over,
    "kept": part,
    "keys": keys,
    "lease": lease,
    "leased": kept,
    "life": kept,
    "load_us": kept,
    "machines": machines,
    "missed": key,
    "moved": ids,
    "offers": first_named,
    "on_device": kept,
    "on_host": kept,
    "outcome": kept,
    "owners": first_named,
    "parents": kept,
    "parts": ids,
    "queued_us": kept,
    "reason": kept,
    "request": request,
    "resumed": kept,
    "schema": kept,
    "seq": kept,
    "session": session,
    "slots": ids,
    "source": source,
    "start_us": kept,
    "step": kept,
    "target": tier,
    "tick": kept,
    "token_ns": kept,
    "tokens": kept,
    "transfer": kept,
    "transfers": kept,
    "ttl_ms": kept,
    "until": kept,
    "voided": kept,
    "wall_ns": kept,
    "weights": weights,
    "why": kept,
    "worker": kept,
}
"""The rules for the fields of events. A field has the same meaning in each kind of event."""

RULES: dict[type[msgspec.Struct], dict[str, Rule]] = {
    # Records inside events and heads.
    ev.OffloadConfig: {
        "host_blocks": kept,
        "device_blocks": kept,
        "block_bytes": kept,
        "workers": kept,
        "blocks_per_chunk": kept,
        "policy": policy,
        "max_live_transfers": kept,
        "defer_ticks": kept,
        "transfer_ticks": kept,
        "store_threshold": kept,
        "block_tokens": kept,
        "load_only_if_faster": kept,
    },
    KeptPools: {"identity": part, "ids": identifiers},
    PoolIdentity: {"facts": facts},
    # The first and the last record of a segment.
    SegmentHead: {
        "schema": kept,
        "machines": machines,
        "config": part,
        "seq": kept,
        "created_ns": kept,
        "run": identifier,
        "oldest": kept,
        "life": kept,
        "ended": part,
        "snapshot": snapshot,
        "life_id": identifier,
        "before": counts,
    },
    SegmentTail: {"error": error, "oldest": kept},
    SegmentMinutes: {
        "first": kept,
        "last": kept,
        "began_ns": kept,
        "ended_ns": kept,
        "minutes": kept,
        "parts": minutes,
    },
    Minute: {name: skips if name == "skipped" else kept for name in Minute.__struct_fields__},
    CopyCounts: {"reports": kept, "failed": kept, "durations": kept},
    # Records of the snapshot in a head.
    SavedLedger: {
        "config": part,
        "seq": kept,
        "step": kept,
        "tick": kept,
        "epoch": kept,
        "voided_at": kept,
        "ended_at": kept,
        "forgotten_at": kept,
        "blocks": kept_numbers,
        "leases": kept_numbers,
        "generations": kept_numbers,
        "keys": keys,
        "free": kept_numbers,
        "policy": later,
        "transfers": records(TransferRecord),
        "requests": records(RequestRecord),
        "brought": keys_of_blocks,
        "stale": keys_of_blocks,
        "offers": counted_keys,
        "life": kept,
        "kept": part,
        "weights": weights,
        "times": kept,
        "declined_hits": kept,
    },
    TransferRecord: {
        "id": kept,
        "direction": kept,
        "owners": first_named,
        "slots": ids,
        "device_blocks": ids,
        "keys": keys,
        "word": kept,
        "epoch": kept,
        "since": kept,
        "reported": kept,
        "flush": kept,
        "parents": kept,
    },
    RequestRecord: {
        "name": request,
        "word": kept,
        "pins": ids,
        "pinned_at": kept,
        "awaits": kept,
        "patience": kept,
        "load": kept,
        "settled": kept,
        "offered": kept,
        "target": tier,
    },
    ARCState: {
        "target": kept,
        "t1": kept_numbers,
        "t2": kept_numbers,
        "b1": keys,
        "b2": keys,
        "returning": keys,
        "tree": kept_numbers,
    },
    S3FIFOState: {
        "small": kept_numbers,
        "main": kept_numbers,
        "uses": kept_numbers,
        "ghosts": keys,
        "returning": keys,
        "tree": kept_numbers,
    },
}

POLICY_STATES: dict[str, type[msgspec.Struct] | None] = {
    "lru": None,
    "arc": ARCState,
    "s3fifo": S3FIFOState,
    "slru": None,
    "sieve": None,
}
"""Built-in policy -> the type of its saved state; None if that holds only numbers. The state of `auto` has
hashes of keys, which cannot get new names."""


def rules_of(kind: type[msgspec.Struct]) -> dict[str, Rule]:
    """Return the rules of the fields of a record, in their order.

    Raises `ConfigError` if a field has no rule, or if it holds text and would be kept.
    """
    known = EVENT_FIELDS if issubclass(kind, ev.OffloadingEvent) else RULES.get(kind, {})
    hints = get_type_hints(kind)
    for field in kind.__struct_fields__:
        if field not in known:
            raise ConfigError(f"{kind.__name__}.{field} has no rule in kvsm/explain/redaction/rules.py")
        if known[field] is kept and holds_text(hints[field]):
            raise ConfigError(f"{kind.__name__}.{field} can hold text, so its rule must not be `kept`")
    return {field: known[field] for field in kind.__struct_fields__}


def holds_text(hint: Any) -> bool:
    """Whether a value of this type can hold text or bytes that kvsm has not chosen."""
    if isinstance(hint, type) and get_origin(hint) is None:  # for Python 3.10, tuple[int, ...] is a type
        if issubclass(hint, Enum | int | float | NoneType):
            return False
        if issubclass(hint, msgspec.Struct):
            return any(map(holds_text, get_type_hints(hint).values()))
    inner = [one for one in get_args(hint) if one is not Ellipsis]
    return any(map(holds_text, inner)) if inner else True


def changing_rules(kind: type[msgspec.Struct]) -> dict[str, Rule]:
    """Return the rules for the fields that change."""
    found = _CHANGING.get(kind)
    if found is None:
        found = _CHANGING[kind] = {
            field: rule for field, rule in rules_of(kind).items() if rule not in (kept, kept_numbers, later)
        }
    return found


_CHANGING: dict[type[msgspec.Struct], dict[str, Rule]] = {}
