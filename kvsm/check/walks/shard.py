"""A shard of a walk: the runs that one of several machines makes.

The runs of a walk are numbered, and run `n` belongs to shard `n % of + 1`. So the shards of one walk make
each of its runs once, and a shard has its share of the first runs as well as of the last.
"""

from __future__ import annotations

from typing import NamedTuple

from kvsm.errors import ConfigError


class Shard(NamedTuple):
    """One of `of` equal parts of a walk. number: from 1."""

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
        """The number in the walk of the run that has this place, from 0, among the shard's own."""
        return place * self.of + self.number - 1

    def place(self, run: int) -> int:
        """How many runs before this number in the walk belong to the shard: the place of its next one."""
        return max(0, -(-(run - self.number + 1) // self.of))

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"


WHOLE = Shard()
"""All runs."""
