"""Stored, so served (S19): what went down to the disk can come up.

After a kill at rest, a process that begins with an empty host serves each prompt as far as the disk has it.
`kvsm.check.worlds.tier_answers` checks each answer of the process that runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from itertools import takewhile

from kvsm.check.worlds.check_counts import count_case
from kvsm.check.worlds.two_tiers import PROMPTS, TwoTierOptions, TwoTierWorld
from kvsm.core.ledger.canonical import Dropped, declare_alike
from kvsm.errors import PropertyBroken
from kvsm.properties import Property
from kvsm.tiers.disk.recovery import decide

_MOST_STEPS = 100


class ServedTwoTiers(TwoTierWorld):
    """A world of two tiers that also asks, at rest, for all that a kill would leave on the disk."""

    def __init__(self, options: TwoTierOptions) -> None:
        super().__init__(options)
        self._asked: tuple[object, ...] = ()
        """All that the next process would have found when it was asked last."""

    def check(self) -> None:
        super().check()
        left = (self.era, *[tuple(rank.disk) for rank in self.ranks])
        if self._asked != left and self.wind_down() is None:
            self._asked = left
            check_served_from_disk(self)


declare_alike(
    ServedTwoTiers, TwoTierWorld, _asked=Dropped("it only saves a check that would give the same result")
)


def check_served_from_disk(world: TwoTierWorld) -> None:
    """Check that a process after a kill serves each prompt as far as the disk has it.

    The world is not changed. Prompts with a damaged block are excepted: their copies fail as a whole.
    """
    after = _after_a_kill(world)
    for number in range(world.options.prompts):
        keys = PROMPTS[number][: world.options.length]
        expected = list(takewhile(after.disk.ledger.index.__contains__, keys))
        if not expected or _is_damaged(after, expected):
            continue
        count_case(Property.STORED_SO_SERVED, "prompts that the disk has after a kill")
        after.rest.used.clear()
        # A request that may not wait asks a second time.
        for _ in range(2):
            after.do(("ask", number))
            _come_to_rest(after)
        lacking = [key for key in expected if key not in after.rest.used]
        if lacking:
            message = f"the disk has {expected} of a prompt after a kill, and {lacking[0]!r} is not served"
            raise PropertyBroken(Property.STORED_SO_SERVED, message)


def _come_to_rest(world: TwoTierWorld) -> None:
    for _ in range(_MOST_STEPS):
        if (action := world.wind_down()) is None:
            return
        world.do(action)
    message = f"the next process is not at rest {_MOST_STEPS} steps after it was asked for a prompt"
    raise PropertyBroken(Property.PROGRESS, message)


def _is_damaged(world: TwoTierWorld, keys: Sequence[bytes]) -> bool:
    index = world.disk.ledger.index
    return any(rank.disk[index[key]].value is None for rank in world.ranks for key in keys)


def _after_a_kill(world: TwoTierWorld) -> TwoTierWorld:
    """Return the world of the next process, without disturbances."""
    after = copy(world)
    after._left, after.life = dict.fromkeys(world._left, 0), world.life + 1
    after.ranks = [after._rank(rank.disk) for rank in world.ranks]
    found = decide([rank.scan(after.life) for rank in after.ranks], after.era.id)
    for rank in after.ranks:
        rank.expected = {slot: rank.disk[slot].generation for slot in found.slots.values()}
    after._start(found.slots)
    return after
