"""The KV events that a watched engine published, and the state to which they fold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from workloads import KV_EVENTS

from kvsm.core.kv_events import GROUP_INDEX_BYTES
from kvsm.core.ledger import Ledger

Named = tuple[int, "bytes | int"]
"""A block as events name it: its group and its hash."""


def published(notes: Path, medium: str) -> Iterator[dict[str, Any]]:
    """Return the events of one medium, in order."""
    recorded = (notes / KV_EVENTS).read_bytes()
    at = 0
    while at < len(recorded):
        begin = at + 4
        at = begin + int.from_bytes(recorded[at:begin], "big")
        _time, events, *_rank = msgspec.msgpack.decode(recorded[begin:at])
        yield from (event for event in events if event.get("medium") == medium)


def folded_kv_events(notes: Path, medium: str) -> set[Named]:
    """Return the keys that a router holds at the end, each named like its last block.

    No key is stored twice, and none is removed that is not stored. An event with tokens stores one key, and
    names all blocks of its chunk. Two chunks may have their first blocks in common, and never the last one.
    """
    blocks: set[Named] = set()
    keys: set[Named] = set()
    for event in published(notes, medium):
        named = [(event["group_idx"], block_hash) for block_hash in event["block_hashes"]]
        if event["type"] == "BlockStored":
            new = set(named[-1:] if event["token_ids"] else named)
            assert not new & blocks
            keys |= new
            blocks.update(named)
        else:
            assert set(named) <= blocks
            blocks.difference_update(named)
    return keys & blocks


def readable(ledger: Ledger, whole: bool) -> set[Named]:
    """Return the matchable keys in the form of events. whole: whether events contain whole hashes."""
    return {named_in_events(key, whole) for key, slot in ledger.index.items() if ledger.readable(slot)}


def named_in_events(key: bytes, whole: bool) -> Named:
    """(group, block hash); an integer has the last eight bytes."""
    block_hash, group = key[:-GROUP_INDEX_BYTES], int.from_bytes(key[-GROUP_INDEX_BYTES:], "big")
    return group, block_hash if whole else int.from_bytes(block_hash[-8:], "big")
