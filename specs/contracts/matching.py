"""Contracts of matching: the end of the longest hit of several groups, for every set of present keys.

The methods of `HitSearch` are the real ones. The request is small: four tokens in two groups.
"""

from __future__ import annotations

from typing import NamedTuple

from contracts.tokens import Group
from kvsm.core.scheduler.groups import GroupKind
from kvsm.core.scheduler.hits import HitSearch

TOKENS = 4


class Groups(NamedTuple):
    """The attributes of a `SchedulerConfig` that a lookup reads."""

    groups: tuple[Group, ...]
    alignment: int


HYBRID = Groups((Group(1, GroupKind.FULL, 0), Group(2, GroupKind.SLIDING_WINDOW, 2)), 2)
MAMBA = Groups((Group(1, GroupKind.FULL, 0), Group(2, GroupKind.MAMBA, 0)), 2)
KEYS = ((0, 1, 2, 3), (4, 5))
"""The keys of both groups. A key is its index in `Flags`, which say which keys are present."""
Flags = tuple[bool, bool, bool, bool, bool, bool]


def found(groups: Groups, local: int, limit: int, there: Flags) -> int:
    lookup = HitSearch(groups, 1, KEYS, local)  # type: ignore[arg-type]
    return lookup.longest_hit(limit, lambda key: there[key])  # type: ignore[index]


def served(groups: Groups, local: int, end: int, there: Flags) -> bool:
    """Whether every key that a hit up to `end` needs is there."""
    spans = HitSearch(groups, 1, KEYS, local).needed(end)  # type: ignore[arg-type]
    return all(there[key] for keys, span in zip(KEYS, spans) for key in keys[span.first : span.last])


def longest(groups: Groups, local: int, limit: int, there: Flags) -> int:
    """A plain search: the largest end that all groups share and that is served; `local` if there is none."""
    ends = [end for end in range(0, TOKENS + 1, groups.alignment) if local < end <= limit]
    return max([end for end in ends if served(groups, local, end, there)], default=local)


def a_hit_is_the_longest_that_is_served(local: int, limit: int, there: Flags) -> int:
    """Publish after commit (S2), a match holds what it counts (S7), one token left (S18): every key that
    the hit counts is present, and no longer hit would be served. The hit ends within the limit, so one
    token is left, and not before the device's own hit.

    pre: local in (0, 2) and local <= limit
    post: _ == longest(HYBRID, local, limit, there) and local <= _ <= limit
    """
    return found(HYBRID, local, limit, there)


def also_with_states(local: int, limit: int, there: Flags) -> int:
    """The contract of `a_hit_is_the_longest_that_is_served` for a mamba group.

    pre: local in (0, 2) and local <= limit
    post: _ == longest(MAMBA, local, limit, there) and local <= _ <= limit
    """
    return found(MAMBA, local, limit, there)
