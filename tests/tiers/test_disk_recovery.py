"""Recovery over generated lives on disk: of equal keys the newest slot serves, of this era, on all ranks.

Each rank's file is what its lives left: headers of several slots with one key, of several eras, torn or
dropped ones, and stores that not every rank completed. The oracle is written from the table of
`kvsm.tiers.disk.recovery`, one slot at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest
from disk_rig import DISK_IDENTITY, PAYLOAD, SLOTS, directory, name
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from kvsm.tiers.disk import DiskGeometry, Recovered, SlotFile, SlotGeneration, recover
from kvsm.tiers.disk.formats import ERA_ID_BYTES, HeaderState, SlotHeader

ERAS = [bytes([number] * ERA_ID_BYTES) for number in range(2)]
LIVES = 3
"""How often each file is opened before its headers are written. Life 4 is the future."""


class Store(NamedTuple):
    """A store into a slot, as one rank has it. number: unique among the stores."""

    slot: int
    key: int
    era: int
    life: int
    number: int
    damage: str = ""
    """"torn", "dropped", or "missing": the rank still has what was there before."""


def differs(store: Store, how: str) -> Store:
    """Return the store as a rank has it that differs in this way."""
    other = {"key": store.key + 1, "era": 1 - store.era, "life": store.life % LIVES + 1}
    if how in other:
        return store._replace(**{how: other[how]})
    if how == "number":
        return store._replace(number=store.number + 1)
    return store._replace(damage=how)


WAYS = ("torn", "dropped", "missing", "key", "era", "life", "number")


@st.composite
def files(draw: st.DrawFn, ranks: int) -> list[list[Store]]:
    """Draw the stores of each rank, in the order in which they were written."""
    # Numbers of different lives are in no order: the newest generation need not have the largest number.
    count = draw(st.integers(1, 12))
    numbers = draw(st.permutations(range(0, 2 * count, 2)))
    stores = [
        Store(
            draw(st.integers(0, SLOTS - 1)),
            draw(st.integers(0, 1)),
            draw(st.sampled_from([0, 0, 0, 0, 1])),
            draw(st.sampled_from([1, 1, 2, 2, 3, 3, 4])),
            number,
        )
        for number in numbers
    ]
    left = [list(stores) for _ in range(ranks)]
    for place, rank, how in draw(
        st.lists(
            st.tuples(st.integers(0, count - 1), st.integers(0, ranks - 1), st.sampled_from(WAYS)), max_size=3
        )
    ):
        left[rank][place] = differs(stores[place], how)
    return left


def write(file: SlotFile, stores: Sequence[Store]) -> None:
    """Leave the headers of these stores in the file of a rank."""
    with file.path.open("r+b") as written:
        for store in stores:
            state = HeaderState.DROPPED if store.damage == "dropped" else HeaderState.SEALED
            generation = SlotGeneration(store.life, store.number)
            header = bytearray(
                SlotHeader(
                    state,
                    file.file_id,
                    file.digest,
                    ERAS[store.era],
                    store.slot,
                    generation,
                    PAYLOAD,
                    0,
                    name(store.key),
                ).encode()
            )
            if store.damage == "torn":
                header[-1] ^= 1
            if store.damage != "missing":
                written.seek(file.geometry.header_at(store.slot))
                written.write(header)


def expected(left: Sequence[Sequence[Store]]) -> dict[bytes, int]:
    """Return key -> the slot that serves it, in the order of generations."""
    found = [{store.slot: store for store in stores if store.damage != "missing"} for stores in left]
    served = []
    for slot in range(SLOTS):
        has = {one.get(slot) for one in found}
        store = has.pop()
        if not has and store is not None and not store.damage and not store.era and store.life <= LIVES:
            served.append(store)
    newest: dict[bytes, int] = {}
    for store in sorted(served, key=lambda one: (one.life, one.number)):
        newest.pop(name(store.key), None)
        newest[name(store.key)] = store.slot
    return newest


def recovered(directory: Path, left: Sequence[Sequence[Store]]) -> Recovered:
    """Open each rank's file as often as there were lives, and recover what the stores left."""
    shapes = [DiskGeometry(PAYLOAD, SLOTS, rank, len(left)) for rank in range(len(left))]

    def opened(shape: DiskGeometry) -> SlotFile:
        return SlotFile(directory / f"{shape.rank}", shape, DISK_IDENTITY)

    for shape, stores in zip(shapes, left):
        for _ in range(LIVES - 1):
            opened(shape).close()
        file = opened(shape)
        write(file, stores)
        file.close()
    with ExitStack() as stack:
        files = [opened(shape) for shape in shapes]
        for file in files:
            stack.callback(file.close)
        return recover(files, ERAS[0])


@given(left=st.integers(1, 3).flatmap(files))
@settings(max_examples=examples(300), deadline=None)
def test_of_equal_keys_the_newest_slot_serves(left: list[list[Store]]) -> None:
    """No stale data (S14), publish after commit (S2)."""
    with directory() as made:
        found = recovered(made, left)
    wanted = expected(left)
    assert found.slots == wanted
    assert list(found.slots) == list(wanted), "in the order of generations"
    assert [told["kept"] for told in found.told] == [len(wanted)] * len(left)
    assert all(sum(told.values()) == SLOTS for told in found.told), "each slot is in exactly one row"


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("how", WAYS)
def test_a_slot_of_which_one_rank_differs_serves_nothing(how: str, rank: int) -> None:
    """Publish after commit (S2): in each way in which a rank can differ."""
    store = Store(slot=3, key=0, era=0, life=1, number=0)
    left = [[store], [store]]
    left[rank] = [differs(store, how)]
    with directory() as made:
        assert recovered(made, left).slots == {}
