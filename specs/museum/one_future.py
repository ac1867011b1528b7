"""An exploration that checks that states with equal fingerprints have the same successors.

An explorer counts two states with equal fingerprints as one, and expands only the first. That is right only
if both states lead to the same states. Here the states of the first few ways to each fingerprint are all
expanded. They must have the same kinds of actions, with the same fingerprints after them.

Only kinds are compared, because models name objects by position: in two such states the same action may have
different numbers.
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
    """Return the first state, breadth first, whose successors depend on the way into it.

    Returns the finding and the later way into the state; None if no such state is found within `expansions`.

    ways: the number of ways into a state that are expanded.
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
            message = f"two states count as one, but lead to different states by: {', '.join(names)}"
            return Finding(Property.DETERMINISM, message), way
    return None
