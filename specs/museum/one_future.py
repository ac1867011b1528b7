"""An exploration that takes each state in several ways, and asks whether it has one future in all of them.

An explorer takes two states for one if their fingerprints are equal, and goes on with the first. What it
leaves out is right only if both lead to the same states. Here the first few ways into a state are all gone on
with. Each must have the same kinds of actions, and they must lead to the same fingerprints.

Models name things by their places, so one action may have another number in another way.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable
from typing import Any

from kvsm.check.explore.model import Model
from kvsm.check.worlds.world import Action, Finding, finding_of
from kvsm.properties import Property

Way = tuple[Action, ...]


def two_futures(model: Model[Any, Any], ways: int, expansions: int) -> tuple[Finding, Way] | None:
    """The first state with two futures, and the second way into it. None if there is none in this many
    expansions, breadth first.

    ways: how many ways into a state are gone on with.
    """
    came: Counter[Hashable] = Counter()
    futures: dict[Hashable, set[tuple[Any, Hashable]]] = {}
    queue: deque[tuple[Any, Hashable, Way]] = deque()
    for state in model.initial():
        queue.append((model.save(state), model.fingerprint(state), ()))
    for _ in range(expansions):
        if not queue:
            break
        saved, fingerprint, way = queue.popleft()
        future: set[tuple[Any, Hashable]] = set()
        for action in model.actions(model.load(saved)):
            try:
                after = model.next(model.load(saved), action)
                if after is None:
                    continue
                following = model.fingerprint(after)
            except Exception as error:
                return finding_of(error), (*way, action)
            future.add((action[0], following))
            if came[following] < ways:
                came[following] += 1
                queue.append((model.save(after), following, (*way, action)))
        first = futures.setdefault(fingerprint, future)
        if first != future:
            names = sorted({str(name) for name, _ in first ^ future})
            message = f"two states count as one, and lead to different states by: {', '.join(names)}"
            return Finding(Property.DETERMINISM, message), way
    return None
