"""The identity of a pool: the facts that must be equal before an engine reads bytes of another engine.

A key names tokens. Which bytes stand for these tokens follows from the model, its layout and much more. Two
engines that differ in any of these facts may use the same key for different bytes, even of the same size. So
a pool that outlives its engine carries its identity, and the next engine compares all facts before it serves
a block.

The weights are not part of the identity. They may change while an engine runs, and the pool is kept; the
event log records the weights of each block (`CacheReset`).
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b

import msgspec

FORMAT = 2
"""Version of the data that kvsm itself writes into a pool. A pool of another version is not read."""

DIGEST_BYTES = 16

_ABSENT = "unset"


class PoolIdentity(msgspec.Struct, frozen=True, array_like=True):
    """What the bytes of a pool mean, as facts that a person can read. Identities are equal if all facts are.

    facts: (name, value), sorted by name; each name once. `of` makes them.
    """

    facts: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, facts: Mapping[str, object]) -> PoolIdentity:
        """Make an identity of these facts and of `FORMAT`."""
        named = {**facts, "kvsm pool format": FORMAT}
        return cls(tuple(sorted((name, str(value)) for name, value in named.items())))

    def digest(self) -> bytes:
        """`DIGEST_BYTES` bytes; equal for equal identities."""
        return blake2b(msgspec.msgpack.encode(self), digest_size=DIGEST_BYTES).digest()

    def differences(self, other: PoolIdentity) -> list[str]:
        """Return a line for each fact that `other` has changed: "dtype: bfloat16, and now float16"."""
        ours, theirs = dict(self.facts), dict(other.facts)
        return [
            f"{name}: {ours.get(name, _ABSENT)}, and now {theirs.get(name, _ABSENT)}"
            for name in sorted(ours.keys() | theirs.keys())
            if ours.get(name) != theirs.get(name)
        ]


class KeptPools(msgspec.Struct, frozen=True, array_like=True):
    """The host pools that a log describes. They outlive the process that writes the log.

    identity: what their bytes mean.
    ids: the id of each rank's pool. A pool that is made anew gets a new id.
    """

    identity: PoolIdentity
    ids: tuple[bytes, ...]
