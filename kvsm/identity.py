"""What the bytes in a pool mean: what must be equal before an engine reads what another one has stored.

A key names tokens. Which bytes stand for these tokens follows from the model, its layout and much more. Two
engines that differ in any of it may use one key for different bytes, even of one size. So a pool that
outlives its engine carries its identity, and the next engine compares all of it before it serves a block.

The weights are not part of it. They may change while an engine runs, and then no pool is made again; the
event log knows the weights of each block (`CacheReset`).
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b

import msgspec

FORMAT = 2
"""Of what kvsm itself writes into a pool. A newer one reads no older pool."""

DIGEST_BYTES = 16

_ABSENT = "unset"


class PoolIdentity(msgspec.Struct, frozen=True, array_like=True):
    """What the bytes of a pool mean, as facts that a person can read. Equal only if every fact is.

    facts: (name, value), sorted by name; each name once. `of` makes them.
    """

    facts: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, facts: Mapping[str, object]) -> PoolIdentity:
        """The identity that these facts make, with the format of kvsm among them."""
        named = {**facts, "kvsm pool format": FORMAT}
        return cls(tuple(sorted((name, str(value)) for name, value in named.items())))

    def digest(self) -> bytes:
        """`DIGEST_BYTES` bytes; equal for equal identities."""
        return blake2b(msgspec.msgpack.encode(self), digest_size=DIGEST_BYTES).digest()

    def differences(self, other: PoolIdentity) -> list[str]:
        """What `other` has otherwise, a line each: "dtype: bfloat16, and now float16"."""
        ours, theirs = dict(self.facts), dict(other.facts)
        return [
            f"{name}: {ours.get(name, _ABSENT)}, and now {theirs.get(name, _ABSENT)}"
            for name in sorted(ours.keys() | theirs.keys())
            if ours.get(name) != theirs.get(name)
        ]


class KeptPools(msgspec.Struct, frozen=True, array_like=True):
    """The pools that a log speaks of. They outlive the process that writes it.

    identity: what their bytes mean.
    ids: the id of each rank's pool, which is new whenever a pool is made.
    """

    identity: PoolIdentity
    ids: tuple[bytes, ...]
