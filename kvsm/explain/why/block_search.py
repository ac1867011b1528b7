"""Find the lives of one key, or of one host slot, among millions of blocks.

A life of a block lasts from its store until its key leaves the index. The view `blocks` computes a row for
each life, so a search of it by key or slot takes seconds. The table `_stores` has all keys and slots of a
store in one row. This module scans `_stores`, and computes the rows of the lives that it finds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec.structs import asdict

from kvsm.explain.story.names import KeyPattern
from kvsm.explain.tables.opened import OpenedLog
from kvsm.explain.tables.row_kinds import BlockRow, BlockRunRow

_RUN_COLUMNS = ", ".join(BlockRunRow.__struct_fields__)


def lives_of_keys(log: OpenedLog, pattern: KeyPattern) -> Iterator[BlockRow]:
    """The lives of all keys that `pattern` matches, oldest first."""
    first = bytes.fromhex(pattern.first[: len(pattern.first) // 2 * 2])
    rows = log.sql(
        "SELECT life, key_bytes, keys, slot_digits, slots FROM _stores WHERE instr(keys, ?) ORDER BY life",
        (first,),
    )
    for life, key_bytes, keys, slot_digits, slots in rows:
        for place in _places(keys, first, key_bytes):
            key = keys[place * key_bytes : (place + 1) * key_bytes]
            if pattern.fits(key):
                yield from _row(log, life + place, key, _slot(slots, slot_digits, place))


def lives_of_slot(log: OpenedLog, slot: int) -> Iterator[BlockRow]:
    """The lives of all blocks that a slot held, oldest first."""
    rows = log.sql(
        "SELECT life, key_bytes, keys, slot_digits, slots FROM _stores"
        " WHERE instr(slots, printf('%0*d', slot_digits, ?)) ORDER BY life",
        (slot,),
    )
    for life, key_bytes, keys, slot_digits, slots in rows:
        for place in _places(slots, f"{slot:0{slot_digits}}", slot_digits):
            yield from _row(log, life + place, keys[place * key_bytes : (place + 1) * key_bytes], slot)


def _slot(slots: str, digits: int, place: int) -> int:
    return int(slots[place * digits : (place + 1) * digits])


def _places(text: bytes | str, wanted: bytes | str, width: int) -> Iterable[int]:
    """The positions of the entries of this width in `text` that begin with `wanted`."""
    if not width:
        return
    found = text.find(wanted)  # type: ignore[arg-type]
    while 0 <= found < len(text):
        place, inside = divmod(found, width)
        if not inside:
            yield place
        found = text.find(wanted, (place + 1) * width if not wanted else found + 1)  # type: ignore[arg-type]


def _row(log: OpenedLog, life: int, key: bytes, slot: int) -> Iterator[BlockRow]:
    """Yield the row of `blocks` for the life of this number; nothing if the tables have no such row."""
    query = f"SELECT {_RUN_COLUMNS} FROM block_runs WHERE life <= ? ORDER BY life DESC LIMIT 1"
    found = log.sql(query, (life,)).fetchone()
    run = None if found is None else BlockRunRow(*found)
    if run is None or life >= run.life + run.blocks:
        return
    columns = asdict(run) | {"life": life, "key": key.hex(), "slot": slot}
    yield BlockRow(**{name: columns[name] for name in BlockRow.__struct_fields__})
