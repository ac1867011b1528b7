"""A shard of a walk: the runs that one of several machines makes.

The runs of a walk are numbered, and run `n` belongs to shard `n % of + 1`. So together the shards make each
run once, and each shard has its share of the early runs as well as of the late ones.
"""

from __future__ import annotations

from typing import NamedTuple

from kvsm.errors import ConfigError


class Shard(NamedTuple):
    """Part `number` (counted from 1) of the `of` equal parts of a walk."""

    number: int = 1
    of: int = 1

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Read "3/8". Raises `ConfigError`."""
        number, slash, of = text.partition("/")
        if not (slash and number.isdecimal() and of.isdecimal()):
            raise ConfigError(f"shard {text!r}: give NUMBER/OF, such as 3/8 for the third of eight")
        shard = cls(int(number), int(of))
        if not 1 <= shard.number <= shard.of:
            if not shard.of:
                raise ConfigError(f"shard {text}: a walk has at least one shard; 1/1 is the whole walk")
            raise ConfigError(f"shard {text}: {shard.of} shards are numbered from 1 to {shard.of}")
        return shard

    def run(self, place: int) -> int:
        """The number in the walk of the shard's run number `place` (counted from 0)."""
        return place * self.of + self.number - 1

    def place(self, run: int) -> int:
        """How many runs before this number belong to the shard, which is the place of its next run."""
        return max(0, -(-(run - self.number + 1) // self.of))

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"


WHOLE = Shard()
"""The shard with all runs."""
