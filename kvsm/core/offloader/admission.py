"""Which new blocks of an offer the eviction policy admits, if some of them would need an eviction."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from kvsm.core.offloader.arguments import integers
from kvsm.core.policies import EvictionPolicy
from kvsm.errors import WrongArgument


class _Run(NamedTuple):
    """New blocks of one prompt in an offer.

    parent: the key of the block before the prompt's first offered block; b"" if it begins a prompt.
    places: of the new blocks, ascending. asked: how many of these there would be room for.
    """

    parent: bytes
    places: Sequence[int]
    asked: int


class Room(NamedTuple):
    """The room for new blocks.

    free: how many need no eviction. evictable: how many may be evicted. barred: slots that may not.
    """

    free: int
    evictable: int
    barred: Collection[int]


def refused_places(
    policy: EvictionPolicy,
    keys: Sequence[bytes],
    new: Sequence[int],
    parents: Mapping[int, bytes],
    has: Callable[[bytes], bool],
    room: Room,
    wanted: Collection[int] = (),
) -> Sequence[int]:
    """Return those of the new places of an offer that the policy refuses, ascending.

    parents: the place where each run of a prompt begins -> the key before it.
    has: whether the host has a key, or is storing it.
    wanted: places that may not be refused.

    A block whose parent is refused, or is not on the host, is refused with it: nothing could hit it.
    """
    free = max(0, room.free - sum([place in wanted for place in new]))
    if len(new) <= room.free or not may_refuse(policy):
        return ()
    runs, lost = _runs(keys, new, parents, has, wanted, free + room.evictable)
    asked = [(run, run.asked) for run in runs if run.asked]
    if sum(count for _, count in asked) > free:
        offered = [keys[place] for run, count in asked for place in run.places[:count]]
        counts = _admitted(policy, offered, [count for _, count in asked], free, room.barred)
        cut = [(run, count) for (run, most), count in zip(asked, counts) if count < most]
        lost += [place for run, count in cut for place in run.places[count:]]
    gone = {keys[place] for place in lost}
    for run in runs:
        if run.parent in gone:
            lost += run.places
            gone.update([keys[place] for place in run.places])
    return sorted(set(lost))


def may_refuse(policy: EvictionPolicy) -> bool:
    """Whether the policy has an admission of its own."""
    return getattr(type(policy), "admits", None) is not EvictionPolicy.admits


def _runs(
    keys: Sequence[bytes],
    new: Sequence[int],
    parents: Mapping[int, bytes],
    has: Callable[[bytes], bool],
    wanted: Collection[int],
    room: int,
) -> tuple[list[_Run], list[int]]:
    """Return the runs that the policy is asked about, and the places of those that nothing could hit.

    room: how many blocks there is room for.
    """
    begins = sorted(parents)
    places_of = dict[int, list[int]]()
    for place in new:
        if place not in wanted:
            places_of.setdefault(bisect_right(begins, place) - 1, []).append(place)
    runs, lost, offered = list[_Run](), list[int](), {keys[place] for place in new}
    for run, places in places_of.items():
        parent = parents[begins[run]] if run >= 0 else b""
        if parent and parent not in offered and not has(parent):
            lost += places
        else:
            runs.append(_Run(parent, places, min(len(places), room)))
            room -= runs[-1].asked
    return runs, lost


def _admitted(
    policy: EvictionPolicy,
    keys: Sequence[bytes],
    runs: Sequence[int],
    free: int,
    barred: Collection[int],
) -> Sequence[int]:
    """Ask the policy, and check its answer."""
    counts = integers("policy.admits", "result", policy.admits(keys, runs, free, barred))
    if len(counts) != len(runs) or not all(0 <= count <= most for count, most in zip(counts, runs)):
        problem = f"is {counts}; it must have a number from 0 to its length for each of the runs {runs}"
        raise WrongArgument("policy.admits", "result", problem)
    return counts
