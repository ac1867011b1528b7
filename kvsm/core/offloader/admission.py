"""Ask the eviction policy which new blocks of an offer to refuse, if storing all needs evictions."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from kvsm.core.offloader.arguments import integers
from kvsm.core.policies import EvictionPolicy
from kvsm.errors import WrongArgument


class _Run(NamedTuple):
    """New blocks of one prompt in an offer.

    parent: the key of the block before the prompt's first block in the offer; b"" if there is none.
    places: the places of the new blocks in the offer, ascending.
    asked: how many of them the policy is asked about: those that there would be room for.
    """

    parent: bytes
    places: Sequence[int]
    asked: int


class Room(NamedTuple):
    """The room for new blocks.

    free: the number of free slots.
    evictable: the number of blocks that may be evicted.
    protected: the slots that may not be evicted, as for `EvictionPolicy.choose`.
    """

    free: int
    evictable: int
    protected: Collection[int]


class NotStored(NamedTuple):
    """Which of the new places of an offer are not stored, each ascending.

    refused: those that the policy refuses.
    unasked: those that there would be no room for if the policy admitted all others. It is not asked about
        them, so they wait, even if it refuses others.
    """

    refused: Sequence[int] = ()
    unasked: Sequence[int] = ()


def ask(
    policy: EvictionPolicy,
    keys: Sequence[bytes],
    new: Sequence[int],
    parents: Mapping[int, bytes],
    has: Callable[[bytes], bool],
    room: Room,
    required: Collection[int] = (),
) -> NotStored:
    """Return which of the new places of an offer are refused, and which must wait.

    keys, new: the keys of the offer, and the places of those that the host does not have.
    parents: the place where each run of a prompt begins -> the key before it.
    has: whether the host has a key, or is storing it, or another place of the offer waits to store it.
    required: places that may not be refused. They get room first.

    A block whose parent is refused, or is neither on the host nor in the offer, is refused too: no request
    could hit it.
    """
    if len(new) <= room.free or not may_refuse(policy):
        return NotStored()
    needed = sum([place in required for place in new])
    free, most = max(0, room.free - needed), max(0, room.free + room.evictable - needed)
    runs, lost = _runs(keys, new, parents, has, required, most)
    asked = [(run, run.asked) for run in runs if run.asked]
    if sum(count for _, count in asked) > free:
        offered = [keys[place] for run, count in asked for place in run.places[:count]]
        counts = _admitted(policy, offered, [count for _, count in asked], free, room.protected)
        cut = [(run, count) for (run, most), count in zip(asked, counts) if count < most]
        lost += [place for run, count in cut for place in run.places[count:]]
    refused = set(lost)
    while behind := _behind(runs, {keys[place] for place in refused}) - refused:
        refused |= behind
    unasked = {place for run in runs for place in run.places[run.asked :]} - refused
    return NotStored(sorted(refused), sorted(unasked))


def may_refuse(policy: EvictionPolicy) -> bool:
    """Whether the policy may refuse a block: it has an `admits` of its own."""
    return getattr(type(policy), "admits", None) is not EvictionPolicy.admits


def _runs(
    keys: Sequence[bytes],
    new: Sequence[int],
    parents: Mapping[int, bytes],
    has: Callable[[bytes], bool],
    required: Collection[int],
    room: int,
) -> tuple[list[_Run], list[int]]:
    """Return the runs to ask the policy about, and the places of blocks that no request could hit.

    room: the number of blocks that there is room for, with evictions.
    """
    begins = sorted(parents)
    places_of = dict[int, list[int]]()
    for place in new:
        if place not in required:
            places_of.setdefault(bisect_right(begins, place) - 1, []).append(place)
    runs, unreachable, offered = list[_Run](), list[int](), {keys[place] for place in new}
    for run, places in places_of.items():
        parent = parents[begins[run]] if run >= 0 else b""
        if parent and parent not in offered and not has(parent):
            unreachable += places
        else:
            runs.append(_Run(parent, places, min(len(places), room)))
            room -= runs[-1].asked
    return runs, unreachable


def _behind(runs: Sequence[_Run], refused: Collection[bytes]) -> set[int]:
    """Return the places of the runs whose parent is one of these keys."""
    return {place for run in runs if run.parent in refused for place in run.places}


def _admitted(
    policy: EvictionPolicy,
    keys: Sequence[bytes],
    runs: Sequence[int],
    free: int,
    protected: Collection[int],
) -> Sequence[int]:
    """Call `admits` of the policy, and check its result."""
    counts = integers("policy.admits", "result", policy.admits(keys, runs, free, protected))
    if len(counts) != len(runs) or not all(0 <= count <= most for count, most in zip(counts, runs)):
        problem = f"is {counts}; it must have a number from 0 to its length for each of the runs {runs}"
        raise WrongArgument("policy.admits", "result", problem)
    return counts
