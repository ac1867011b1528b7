"""The index: key -> slot. It has every slot from ALLOCATED to LOADING."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from operator import itemgetter
from typing import TypeAlias, cast

from kvsm.core import native
from kvsm.ids import IdArray, listed


class DictIndex(dict[bytes, int]):
    """Key -> slot, for the Python body. key_of: slot -> key, which `enter` updates too."""

    def __init__(self, key_of: list[bytes]) -> None:
        super().__init__()
        self._key_of = key_of

    def enter(self, keys: Sequence[bytes], slots: Sequence[int]) -> bool:
        """Enter keys with their slots. False, with nothing changed, if a key is not new or is twice in
        `keys`."""
        if len(set(keys)) != len(keys) or not self.keys().isdisjoint(keys):
            return False
        self.update(zip(keys, slots))
        for slot, key in zip(slots, keys):
            self._key_of[slot] = key
        return True

    def find(self, keys: Sequence[bytes]) -> list[int | None]:
        """Return the slot of each key; None for a key that is not in the index."""
        return list(map(self.get, keys))

    def find_prefix(
        self,
        hashes: Sequence[bytes],
        stride: int,
        suffix: bytes,
        first: int,
        last: int,
    ) -> None:
        """Return None: only the native body can find keys by their hashes. The caller makes keys and calls
        `find`."""

    def keys_of(self, slots: IdArray) -> Sequence[bytes]:
        """Return the key that each of these slots had last."""
        if len(slots) < 2:
            return tuple([self._key_of[slot] for slot in slots])
        return cast(Sequence[bytes], itemgetter(*listed(slots))(self._key_of))


class NativeIndex(native.IndexBody, MutableMapping[bytes, int]):
    """Key -> slot, for the native body (`native/key_index.c`). It never grows, so no call waits for a
    resize."""

    def __init__(self, key_of: list[bytes], capacity: int) -> None:  # noqa: ARG002 (for `IndexBody.__new__`)
        self._key_of = key_of

    def enter(self, keys: Sequence[bytes], slots: Sequence[int]) -> bool:
        """As `DictIndex.enter`."""
        if len(set(keys)) != len(keys) or any(key in self for key in keys):
            return False
        for slot, key in zip(slots, keys):
            self[key] = slot  # also updates `key_of`
        return True

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.keys_by_slot())

    def __reversed__(self) -> Iterator[bytes]:
        return reversed(self.keys_by_slot())

    def __repr__(self) -> str:
        return repr(dict(self))


KeyIndex: TypeAlias = DictIndex | NativeIndex


def make_index(key_of: list[bytes], is_native: bool, capacity: int | None = None) -> KeyIndex:
    """Make an empty index.

    key_of: slot -> the key that it had last; the index updates it.
    capacity: the most slots; None: the length of `key_of`.
    """
    slots = len(key_of) if capacity is None else capacity
    return NativeIndex(key_of, slots) if is_native else DictIndex(key_of)
