"""Worlds of the wider engine with drawn configurations, for the last walks of the museum.

Each has one kind of engine or workload: layers that need different blocks, sessions that pause, request ids
that are reused, lost loads, and lazy stores beside eager ones.
"""

from __future__ import annotations

from random import Random
from typing import Any

from kvsm.check.worlds.drawn_policies import draw_policy
from kvsm.check.worlds.serving_world import Budgets, RequestSpec
from kvsm.check.worlds.small_request import HASH_TOKENS
from kvsm.check.worlds.wider_serving import WiderOptions, WiderServing
from kvsm.core.scheduler import GroupKind, KVCacheGroup, LastStep, StoreMode


def _window(tokens: int) -> KVCacheGroup:
    return KVCacheGroup(HASH_TOKENS, GroupKind.SLIDING_WINDOW, window=tokens)


_FULL, _DRAFTER = KVCacheGroup(HASH_TOKENS), KVCacheGroup(HASH_TOKENS, drafter=True)


def _prompts(random: Random, longest: int, count: int) -> list[tuple[int, ...]]:
    """Return prefixes of two long prompts that diverge at a block boundary, so that most prefixes hit.

    At least two thirds of the prefixes end at a block boundary or one token after it.
    """
    shared = random.randint(0, longest // HASH_TOKENS) * HASH_TOKENS
    whole = [(*range(shared), *range(start, start + longest - shared)) for start in (100, 200)]

    def end() -> int:
        blocks = random.randint(1, longest // HASH_TOKENS) * HASH_TOKENS
        return random.choice((blocks, min(longest, blocks + 1), random.randint(1, longest)))

    return [random.choice(whole)[: end()] for _ in range(count)]


def _specs(random: Random, longest: int, count: int, outputs: int = 6) -> tuple[RequestSpec, ...]:
    prompts = _prompts(random, longest, count)
    return tuple([RequestSpec(prompt, random.randint(1, outputs)) for prompt in prompts])


def _engine(random: Random, **options: Any) -> WiderServing:
    """Return a wider engine with one worker, drawn timing and limits, and these options."""
    common = {
        "workers": 1,
        "last_step": random.choice((LastStep.FLUSH, LastStep.KEEP_STEPPING)),
        "chunk_tokens": random.choice((3, HASH_TOKENS, 64)),
        "max_live_transfers": random.randint(2, 8),
        "defer_ticks": random.choice((0, 1, 3)),
        "checks_stores": True,
    }
    return WiderServing(WiderOptions(**{**common, **options}))


_LAYERS = (
    (_FULL, _window(4)),
    (_FULL, _window(6)),
    (_window(4), _window(4)),
    (_window(4), _window(6)),
    (_window(9), _window(4)),
)


def partial_hits(random: Random) -> WiderServing:
    """Return an engine that accepts less than the offered hit, with window groups.

    Which blocks a window group needs depends on where the hit ends.
    """
    groups, longest = random.choice(_LAYERS), random.randint(3, 6) * HASH_TOKENS
    return _engine(
        random,
        requests=_specs(random, longest, random.randint(10, 40), outputs=3),
        device_blocks=(longest // HASH_TOKENS + 2) * len(groups) + random.randint(0, 8),
        slots=random.randint(2, 6 * len(groups)),
        groups=groups,
        references=random.random() < 0.7,
        prefix_cache=random.random() < 0.2,
        policy=draw_policy(random),
        budgets=Budgets(
            partial=random.choice((50, 200)),
            failures=random.choice((0, 0, 10)),
            preemptions=random.choice((0, 0, 10)),
            waits=random.choice((0, 50)),
        ),
    )


def chunks_and_drafts(random: Random) -> WiderServing:
    """Return an engine with chunks or drafts, on a small host that evicts while requests decode."""
    groups = random.choice(((_FULL,), (_FULL,), (_DRAFTER,), (_FULL, _DRAFTER)))
    longest = random.randint(2, 6) * HASH_TOKENS
    drafting = any(group.drafter for group in groups)
    return _engine(
        random,
        requests=_specs(random, longest, random.randint(10, 40), outputs=12),
        device_blocks=(longest // HASH_TOKENS + 6) * len(groups) + random.randint(0, 12),
        slots=random.randint(1, 6),
        groups=groups,
        drafts=random.randint(1, HASH_TOKENS) if drafting else 0,
        references=random.random() < 0.7,
        prefix_cache=random.random() < 0.5,
        asynchronous=random.random() < 0.3,
        blocks_per_chunk=random.choice((1, 2)),
        policy=draw_policy(random),
        budgets=Budgets(preemptions=random.choice((0, 10)), waits=random.choice((0, 50))),
    )


def names_and_sessions(random: Random) -> WiderServing:
    """Return an engine, mostly without references, of sessions that pause and share few request ids."""
    longest, count = random.randint(1, 4) * HASH_TOKENS, random.randint(10, 40)

    def part() -> tuple[int, ...]:
        return tuple([random.randint(100, 101) for _ in range(random.randint(1, 6))])

    specs = [
        RequestSpec(prompt, random.randint(1, 6), None, tuple([part() for _ in range(random.randint(0, 2))]))
        for prompt in _prompts(random, longest, count)
    ]
    return _engine(
        random,
        requests=tuple(specs),
        names=random.choice((0, 2, 4)),
        device_blocks=longest // HASH_TOKENS + 9 + random.choice((0, 2, 8)),
        slots=random.randint(1, 8),
        references=random.random() < 0.2,
        prefix_cache=random.random() < 0.3,
        blocks_per_chunk=random.choice((1, 1, 2)),
        budgets=Budgets(
            preemptions=random.choice((0, 30)), aborts=random.choice((0, 20)), resets=random.choice((0, 2))
        ),
    )


def second_thoughts(random: Random) -> WiderServing:
    """Return an engine without references that has few blocks, and preempts just admitted requests."""
    longest = random.randint(1, 4) * HASH_TOKENS
    return _engine(
        random,
        requests=_specs(random, longest, random.randint(10, 40), outputs=4),
        names=random.choice((0, 3)),
        device_blocks=longest // HASH_TOKENS + random.randint(1, 4),
        slots=random.randint(2, 8),
        references=False,
        prefix_cache=random.random() < 0.3,
        budgets=Budgets(preemptions=100, partial=random.choice((0, 20)), aborts=random.choice((0, 10))),
    )


def lost_loads(random: Random) -> WiderServing:
    """Return an engine whose loads are given up, after tokens that the device has."""
    longest = random.randint(3, 6) * HASH_TOKENS
    return _engine(
        random,
        requests=_specs(random, longest, random.randint(10, 40), outputs=3),
        names=random.choice((0, 0, 3)),
        device_blocks=longest // HASH_TOKENS + 3 + random.randint(0, 3),
        slots=random.randint(4, 12),
        budgets=Budgets(
            losses=random.choice((3, 20)),
            aborts=random.choice((0, 10)),
            preemptions=random.choice((0, 10)),
            resets=random.choice((0, 2)),
        ),
    )


def lazy_and_eager(random: Random) -> WiderServing:
    """Return an engine with a lazy store on a small host, and some requests that are stored eagerly."""
    longest = random.randint(2, 6) * HASH_TOKENS
    specs = [
        RequestSpec(prompt, random.randint(1, 6), random.choice((None, None, {"do_remote_decode": True})))
        for prompt in _prompts(random, longest, random.randint(10, 40))
    ]
    return _engine(
        random,
        requests=tuple(specs),
        device_blocks=longest // HASH_TOKENS + random.randint(4, 10),
        slots=random.randint(2, 8),
        store=StoreMode.LAZY,
        lazy_target_blocks=random.randint(1, 3),
        budgets=Budgets(resets=random.choice((0, 3)), preemptions=random.choice((0, 5))),
    )
