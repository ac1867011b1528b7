"""Random calls on an offload core, with arguments of every type that an embedder may pass by mistake."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from kvsm.core.ledger.snapshot import digest
from kvsm.core.offloader import Offloader
from kvsm.errors import KvsmError, WrongArgument
from kvsm.events import OffloadConfig, SkipReason

DEVICE_BLOCKS = 40
KEYS = [b"key-%02d" % n + bytes(4) for n in range(24)]
NAMES = ["r", "q", "é", "p"]


class _Name(str):
    """A request name of a custom type."""


class _Hash(bytes):
    """A key of a custom type."""


Draw = Callable[[Random], Any]
"""Draws one value."""


def _one_of(*values: Any) -> Draw:
    return lambda random: random.choice(values)


_WRONG = _one_of(
    None, 1.0, float("nan"), 2**40, 2**63, 2**70, -(2**70), -1, True, "1", "\ud800", b"1", bytearray(b"key"),
    memoryview(b"key"), object(), object, Fraction(1), [], (), {}, [[]], [None], {1, 2}, {"r": 1}, range(3),
    np.int64(1), np.uint64(2**63), np.bool_(True), np.float32(1), np.str_("r"), np.bytes_(b"key"),
    np.array(1), np.array([0]), np.array([[0, 1]]), np.array([0.5]), np.array([True]), np.array(["r"]),
    SkipReason.POOL_FULL,
)  # fmt: skip
_NUMBER_LIKE: tuple[Callable[[int], Any], ...] = (
    int, int, int, float, str, bool, np.int64, np.int32, np.uint8, np.float64, np.bool_, np.array, _Name,
    lambda number: 2**64 + number, lambda number: -1 - number,
)  # fmt: skip
_KEY_LIKE: tuple[Callable[[bytes], Any], ...] = (
    bytes, bytes, bytes, bytearray, memoryview, str, len, _Hash, np.bytes_, list, hash, lambda key: key * 1000
)  # fmt: skip
_NAME_LIKE: tuple[Callable[[str], Any], ...] = (
    str, str, str, _Name, np.str_, str.encode, len, list, lambda name: name + "\udcff",
    lambda name: name * 300,
)  # fmt: skip
_LIST_LIKE: tuple[Callable[[list[Any]], Any], ...] = (
    list, list, list, tuple, set, iter, np.array, bytes, str, dict.fromkeys, len, lambda some: [some],
    lambda some: (one for one in some), lambda some: some[0], lambda some: np.array(some, dtype=np.int32),
)  # fmt: skip

_NO_PLACES = (-1, 2**70, 1.5, True, None, "1", np.int64(0), np.float64(0))


class WildCaller:
    """Calls a core with mostly right arguments, and checks the core after each call.

    tame: the number of right arguments out of ten.
    """

    def __init__(self, seed: int, directory: Path, tame: int = 8) -> None:
        self.random, self.tame = Random(seed), tame
        self.chunk = self.random.choice([1, 1, 2])
        self.core = Offloader.open(
            OffloadConfig(
                host_blocks=self.random.choice([2, 8, 20]),
                device_blocks=DEVICE_BLOCKS,
                workers=self.random.choice([1, 2]),
                blocks_per_chunk=self.chunk,
                policy=self.random.choice(["lru", "arc", "s3fifo"]),
                max_live_transfers=self.random.choice([2, 8]),
                defer_ticks=self.random.choice([0, 2]),
                transfer_ticks=self.random.choice([0, 4]),
                store_threshold=self.random.choice([1, 2]),
            ),
            directory,
            durability="none",
        )
        self.refused = self.worked = 0

    def run(self, calls: int) -> None:
        """Make this many calls."""
        for _ in range(calls):
            name, arguments = self.draw()
            self.call(name, arguments)

    def call(self, name: str, arguments: Sequence[Any]) -> None:
        """Make one call. It must work, or be refused with a `KvsmError` and without a change."""
        core = self.core
        before = digest(core.ledger)
        try:
            if name == "finish":
                core.finish(arguments[0], aborted=arguments[1])
            else:
                getattr(core, name)(*arguments)
        except KvsmError as error:
            self.refused += 1
            self._check_refusal(name, arguments, error, digest(core.ledger) == before)
        except Exception as error:
            raise AssertionError(f"{name}{arguments!r} raised {type(error).__name__}: {error}") from error
        else:
            self.worked += 1

    def _check_refusal(self, name: str, arguments: Sequence[Any], error: KvsmError, same: bool) -> None:
        refusal = f"{name}{arguments!r}: {type(error).__name__}: {error}"
        assert not isinstance(error, WrongArgument) or str(error).startswith(f"{name}(): "), refusal
        assert same, f"a refused call changed the ledger: {refusal}"
        self.core.check_thread()

    def draw(self) -> tuple[str, tuple[Any, ...]]:
        """Draw a call and its arguments."""
        name = self.random.choice((*_CALLS, *tuple(_USUAL_CALLS) * 3))
        if name in _USUAL_CALLS:
            return name, _USUAL_CALLS[name](self)
        return name, tuple([kind(self) for kind in _CALLS[name]])

    # Arguments: right ones, the same in another type, and anything else.

    def _like(self, value: Any, forms: Sequence[Callable[[Any], Any]]) -> Any:
        luck = self.random.randrange(10)
        if luck < self.tame:
            return value
        if luck == 9 and self.random.random() < 0.5:
            return _WRONG(self.random)
        try:
            return self.random.choice(forms)(value)
        except Exception:
            return _WRONG(self.random)

    def _name(self) -> Any:
        return self._like(self.random.choice(NAMES), _NAME_LIKE)

    def _key(self) -> Any:
        return self._like(self.random.choice(KEYS), _KEY_LIKE)

    def _number(self, most: int) -> Any:
        return self._like(self.random.randrange(most), _NUMBER_LIKE)

    def _transfer(self) -> Any:
        live = list(self.core.ledger.transfers) or [1]
        return self._like(self.random.choice(live), _NUMBER_LIKE)

    def _flag(self) -> Any:
        return self._like(self.random.random() < 0.7, (int, np.bool_, float, str))

    def _list(self, items: list[Any]) -> Any:
        return self._like(items, _LIST_LIKE)

    def _keys(self) -> Any:
        first = self.random.randrange(20)
        keys = KEYS[first : first + self.random.choice([0, 1, 2, 3, 20])]
        if self.random.randrange(10) >= self.tame:
            keys = [self._key() for _ in keys]
        return self._list(keys)

    def _blocks(self, count: int) -> Any:
        first = self.random.randrange(DEVICE_BLOCKS - count + 1) if count <= DEVICE_BLOCKS else 0
        blocks = list(range(first, first + count))
        if self.random.randrange(10) >= self.tame and blocks:
            blocks[self.random.randrange(count)] = self._number(DEVICE_BLOCKS)
        return self._list(blocks)

    def _some_blocks(self) -> Any:
        return self._blocks(self.random.choice([0, 1, 2, 4, 18]))

    def _transfers(self) -> Any:
        return self._list([self._transfer() for _ in range(self.random.choice([0, 1, 1, 2]))])

    def _slots(self) -> Any:
        return self._list([self._number(8) for _ in range(self.random.choice([0, 1, 2]))])

    def _offers(self) -> Any:
        offers = [
            (self._name(), self._list([self._number(3)]), self._list([self._number(6)]))
            for _ in range(self.random.choice([0, 1, 2]))
        ]
        return self._list(offers)

    # Calls whose arguments belong together.

    def _offer(self) -> tuple[Any, Any, list[bytes]]:
        """Draw an offer: keys, their device blocks, and the keys before they were changed."""
        first = self.random.randrange(20)
        keys = KEYS[first : first + self.random.choice([0, 1, 2, 3, 18])]
        wrong = self.random.randrange(10) >= self.tame
        blocks = self._blocks(len(keys) * self.chunk + (wrong and self.random.choice([-1, 0, 1])))
        return self._list([self._key() for _ in keys] if wrong else keys), blocks, keys

    def _owners(self, keys: list[bytes]) -> Any:
        count = self.random.randrange(len(keys) + 1)
        owners = [(self._name(), self._like(part, _NUMBER_LIKE)) for part in (count, len(keys) - count)]
        return self._like(
            tuple(owners), (list, tuple, lambda pairs: [list(pair) for pair in pairs], dict, len)
        )

    def _parents(self, keys: list[bytes]) -> Any:
        """Draw parents for some places: a key of the offer, another key, or none."""
        places = [*range(len(keys) + 1), *(_NO_PLACES if self.random.randrange(10) >= self.tame else ())]
        parents = {
            self.random.choice(places): self._like(self.random.choice([*keys, *KEYS, b""]), _KEY_LIKE)
            for _ in range(self.random.choice([0, 1, 3]))
        }
        return self._like(parents, (dict, list, tuple, len, lambda pairs: list(pairs.items())))

    def _prepare_store(self) -> tuple[Any, ...]:
        keys, blocks, _ = self._offer()
        return self._name(), keys, blocks, self._key()

    def _store(self) -> tuple[Any, ...]:
        keys, blocks, right = self._offer()
        again = self._like({0, 1}, (list, tuple, frozenset, iter, len, str))
        return self._owners(right), keys, blocks, again, (), self._parents(right)

    def _import_blocks(self) -> tuple[Any, ...]:
        keys, _, right = self._offer()
        return self._owners(right), keys, self._like("engine p-1", _NAME_LIKE), self._parents(right)

    def _skip(self) -> tuple[Any, ...]:
        keys, _, right = self._offer()
        return self._owners(right), keys, self._like(SkipReason.POOL_FULL, (str, len))

    def _prepare_load(self) -> tuple[Any, ...]:
        """Draw a load of a request's match; of a part of it, if a slot has several device blocks."""
        matched = [entry for entry in self.core.ledger.requests.values() if len(entry.pins)]
        if not matched:
            return self._name(), self._some_blocks(), self._list([])
        entry = self.random.choice(matched)
        count = len(entry.pins) * self.chunk
        if self.random.random() < 0.7:
            return self._like(entry.name, _NAME_LIKE), self._blocks(count), self._list([])
        parts = list(range(self.random.choice([-1, 0, 1]), count))
        return entry.name, self._blocks(len(parts)), self._list(parts)


_USUAL_CALLS: dict[str, Callable[[WildCaller], tuple[Any, ...]]] = {
    "prepare_store": WildCaller._prepare_store,
    "store": WildCaller._store,
    "import_blocks": WildCaller._import_blocks,
    "skip": WildCaller._skip,
    "prepare_load": WildCaller._prepare_load,
    "submit": lambda self: (self._transfers(),),
    "match": lambda self: (self._name(), self._keys()),
    "report": lambda self: (self._transfer(), self._number(2), self._flag()),
}
_CALLS: dict[str, tuple[Callable[[WildCaller], Any], ...]] = {
    "lookup": (WildCaller._key,),
    "waits_for": (WildCaller._name,),
    "may_match": (WildCaller._name,),
    "pin": (WildCaller._name, WildCaller._slots, WildCaller._key),
    "defer": (WildCaller._name, WildCaller._transfer),
    "release": (WildCaller._name,),
    "in_flight": (WildCaller._slots,),
    "advance": (WildCaller._offers,),
    "count_offers": (WildCaller._keys,),
    "offered_enough": (WildCaller._key,),
    "rewrite": (WildCaller._some_blocks,),
    "complete_load": (WildCaller._transfer, lambda self: self._number(2)),
    "fail_load": (WildCaller._transfer, lambda self: self._number(2)),
    "complete_store": (WildCaller._transfer, lambda self: self._number(2)),
    "fail_store": (WildCaller._transfer, lambda self: self._number(2)),
    "cancel": (WildCaller._transfer,),
    "lose": (WildCaller._transfer,),
    "lose_overdue": (),
    "flush": (WildCaller._transfers,),
    "leased": (WildCaller._some_blocks,),
    "arrive": (WildCaller._name,),
    "preempt": (WildCaller._name,),
    "finish": (WildCaller._name, WildCaller._flag),
    "touch": (WildCaller._keys,),
    "tick": (),
    "end_step": (),
    "reset": (),
}
