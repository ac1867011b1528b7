"""The index: which slot holds the block of a key. It names every slot from ALLOCATED to LOADING."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from operator import itemgetter
from typing import TypeAlias, cast

from kvsm.core import native
from kvsm.ids import IdArray, listed


class DictIndex(dict[bytes, int]):
    """Key -> slot, for the Python body. key_of: the list of the slots' keys, which `enter` keeps, too."""

    def __init__(self, key_of: list[bytes]) -> None:
        super().__init__()
        self._key_of = key_of

    def enter(self, keys: Sequence[bytes], slots: Sequence[int]) -> bool:
        """Name these slots by these keys. False, and nothing is changed, if one is not new, or is twice."""
        if len(set(keys)) != len(keys) or not self.keys().isdisjoint(keys):
            return False
        self.update(zip(keys, slots))
        for slot, key in zip(slots, keys):
            self._key_of[slot] = key
        return True

    def find(self, keys: Sequence[bytes]) -> list[int | None]:
        """The slot of each key; None for a key that is not there."""
        return list(map(self.get, keys))

    def find_prefix(
        self,
        hashes: Sequence[bytes],
        stride: int,
        suffix: bytes,
        first: int,
        last: int,
    ) -> None:
        """Only the native body can look for keys that are not made. None: make them, and `find` them."""

    def keys_of(self, slots: IdArray) -> Sequence[bytes]:
        """The keys of these slots' latest lives."""
        if len(slots) < 2:
            return tuple([self._key_of[slot] for slot in slots])
        return cast(Sequence[bytes], itemgetter(*listed(slots))(self._key_of))


class NativeIndex(native.IndexBody, MutableMapping[bytes, int]):
    """The same for the native body (`native/key_index.c`). It never grows, so it makes nobody wait."""

    def __init__(self, key_of: list[bytes], capacity: int) -> None:  # noqa: ARG002 (for `IndexBody.__new__`)
        self._key_of = key_of

    def enter(self, keys: Sequence[bytes], slots: Sequence[int]) -> bool:
        """As `DictIndex.enter`."""
        if len(set(keys)) != len(keys) or any(key in self for key in keys):
            return False
        for slot, key in zip(slots, keys):
            self[key] = slot  # names the slot in the list of keys, too
        return True

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.keys_by_slot())

    def __reversed__(self) -> Iterator[bytes]:
        return reversed(self.keys_by_slot())

    def __repr__(self) -> str:
        return repr(dict(self))


KeyIndex: TypeAlias = DictIndex | NativeIndex


def make_index(key_of: list[bytes], is_native: bool, capacity: int | None = None) -> KeyIndex:
    """An empty index over the slots of these keys.

    capacity: how many slots there may be; None: as many as there are.
    """
    slots = len(key_of) if capacity is None else capacity
    return NativeIndex(key_of, slots) if is_native else DictIndex(key_of)
