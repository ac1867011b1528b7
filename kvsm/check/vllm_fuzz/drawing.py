"""Draw the next action of a run, and define the small alphabet of the search of all short schedules."""

from __future__ import annotations

from random import Random

from kvsm.check.vllm_fuzz.shape import BLOCK_TOKENS, FAULTS, KINDS, EngineShape
from kvsm.check.worlds.world import Action

_LONGEST_SHARED, _LONGEST_OWN = 40, 5

ALPHABET: dict[Action, str] = {
    ("arrive", 0, 8, 1, 2, 0): "client",
    ("arrive", 2, 8, 1, 2, 0): "client",
    ("abort", 0): "client",
    ("schedule",): "scheduler",
    ("execute",): "workers",
    ("deliver",): "workers",
    ("copies",): "device",
    ("settle",): "all",
    ("reset", 1, 0): "operator",
    ("reset", 0, 1): "operator",
}
"""The actions of short schedules, each with its actor. The prompts of the two families share no tokens. Later
prompts of a family share all tokens but the last one."""

FAULT_ALPHABET: dict[Action, str] = {
    ("fail", 0, 0): "fault",
    ("fail", 0, 1): "fault",
    ("late", 0, 2): "fault",
    ("double", 0): "fault",
    ("lose", 0, 0): "fault",
    ("lose", 0, 1): "fault",
    ("slow",): "fault",
}
"""The faults of short schedules, each with its actor. Used are those that the connector must survive."""


def draw_action(shape: EngineShape, random: Random) -> Action:
    """Draw an action for an engine of this shape."""
    kinds = [
        kind for kind in KINDS if kind not in shape.without and (kind not in FAULTS or kind in shape.faults)
    ]
    (kind,) = random.choices(kinds, [KINDS[kind] for kind in kinds])
    if kind == "arrive":
        return kind, random.randrange(8), *_prompt(random), random.randint(1, 9), *_marks(shape, random)
    if kind == "copy":
        return kind, random.randrange(shape.ranks), random.randint(1, 6)
    if kind == "abort":
        return kind, random.randrange(6)
    if kind == "reset":
        return kind, random.randrange(2), int(random.random() < 0.7)
    if kind == "fail":
        return kind, random.randrange(shape.ranks), random.randrange(3)
    if kind == "late":
        return kind, random.randrange(shape.ranks), random.randint(1, 6)
    if kind == "double":
        return kind, random.randrange(shape.ranks)
    if kind == "lose":
        return kind, random.randrange(shape.ranks), random.randrange(2)
    return (kind,)


def _prompt(random: Random) -> tuple[int, int]:
    """(tokens shared with its family, tokens of its own) of a prompt.

    A third of the prompts end at a block boundary, or one token before or after it. The same holds for the
    shared parts.
    """
    shared, own = random.randrange(_LONGEST_SHARED + 1), random.randint(1, _LONGEST_OWN)
    if random.random() < 1 / 3:
        shared = max(0, _near_block_end(shared, random))
    if random.random() < 1 / 3:
        own = max(1, _near_block_end(shared + own, random) - shared)
    return shared, own


def _near_block_end(tokens: int, random: Random) -> int:
    return tokens - tokens % BLOCK_TOKENS + random.randint(-1, 1)


def _marks(shape: EngineShape, random: Random) -> tuple[int, ...]:
    """(salt, priority, adapter) of a request."""
    salt = int(random.random() < 0.1)
    priority = random.randrange(3) if shape.priorities else 0
    return salt, priority, random.randint(0, shape.adapters)
