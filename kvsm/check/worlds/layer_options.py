"""Options of serving worlds with layers of every kind, and with every option of the scheduler side."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import msgspec

from kvsm.check.worlds.drawn_policies import draw_policy
from kvsm.check.worlds.refusing_policy import REFUSING
from kvsm.check.worlds.serving_world import Budgets, RequestSpec
from kvsm.check.worlds.small_request import HASH_TOKENS
from kvsm.check.worlds.wider_serving import WiderOptions
from kvsm.core.scheduler import GroupKind, KVCacheGroup, LastStep, StoreMode

_MOST_GROUPS = 3
_FULL = KVCacheGroup(HASH_TOKENS)


def draw_layers(random: Random) -> WiderOptions:
    """Draw options: dozens of requests with common prefixes, and an engine with room for a few of them."""
    groups = _draw_groups(random)
    has_states = any(group.kind is GroupKind.MAMBA for group in groups)
    drafts = any(group.drafter for group in groups)
    lazy = not has_states and random.random() < 0.15
    threshold = 1 if lazy else random.choice((1, 1, 1, 2))
    longest = random.randint(2, 7) * HASH_TOKENS
    asynchronous = not has_states and random.random() < 0.3
    # A lazy store, and a mamba state that is copied, need references.
    references = lazy or has_states or random.random() < 0.7
    # Without references a lost copy holds all blocks of its request for ever.
    budgets = _draw_budgets(random, may_lose=references)
    # After a crash each client sends its request again, so none may have taken its name.
    names = 0 if budgets.crashes else random.choice((0, 0, 3))
    requests = tuple(_draw_requests(random, longest, not asynchronous))
    tokens = max([_tokens_of(request) for request in requests])
    return WiderOptions(
        requests=requests,
        # Room for the longest request, its drafts, and the step that is scheduled ahead.
        device_blocks=(tokens // HASH_TOKENS + 4) * len(groups) + random.randint(0, 8),
        slots=random.randint(2, 6 * len(groups)),
        workers=random.choice((1, 1, 2)),
        groups=groups,
        store=StoreMode.LAZY if lazy else StoreMode.EAGER,
        last_step=random.choice(tuple(LastStep)),
        references=references,
        prefix_cache=random.random() < 0.6,
        asynchronous=asynchronous,
        drafts=random.randint(1, HASH_TOKENS) if drafts else 0,
        chunk_tokens=HASH_TOKENS if has_states else random.choice((3, HASH_TOKENS, 64)),
        lazy_target_blocks=random.randint(1, 4),
        policy=draw_policy(random),
        blocks_per_chunk=1 if lazy or has_states else random.choice((1, 1, 2, 3)),
        store_threshold=threshold,
        max_live_transfers=random.randint(2, 8),
        defer_ticks=random.choice((0, 1, 3)),
        transfer_ticks=random.choice((0, 0, 6)) if references else 0,
        names=names,
        # A chunk that is offered too seldom has no store, and its reason is logged only once.
        checks_stores=threshold == 1,
        budgets=budgets,
    )


def draw_admission(random: Random) -> WiderOptions:
    """Draw options of `draw_layers`, with a policy that refuses stores."""
    return msgspec.structs.replace(draw_layers(random), policy=random.choice(("auto", REFUSING)))


def _draw_groups(random: Random) -> tuple[KVCacheGroup, ...]:
    """Draw one to three groups, the first of them mostly of full attention."""
    first = _FULL if random.random() < 0.6 else _draw_group(random)
    more = random.choice((0, 0, 1, 1, 2))
    return (first, *[_draw_group(random) for _ in range(more)])[:_MOST_GROUPS]


def _draw_group(random: Random) -> KVCacheGroup:
    tokens = random.choice((1, 1, 1, 2)) * HASH_TOKENS
    kind = random.choice(("full", "drafter", "sliding", "sliding", "chunked", "mamba"))
    if kind == "sliding":
        window = random.choice((1, HASH_TOKENS, random.randint(2, 4 * HASH_TOKENS)))
        return KVCacheGroup(tokens, GroupKind.SLIDING_WINDOW, window=window)
    if kind == "chunked":
        window = random.choice((2 * HASH_TOKENS, random.randint(1, 4 * HASH_TOKENS)))
        return KVCacheGroup(tokens, GroupKind.CHUNKED_LOCAL, window=window)
    if kind == "mamba":
        return KVCacheGroup(HASH_TOKENS, GroupKind.MAMBA)
    return KVCacheGroup(tokens, drafter=kind == "drafter")


def _draw_requests(random: Random, longest: int, sessions: bool) -> list[RequestSpec]:
    """Draw requests whose prompts are prefixes of two prompts, which share some blocks.

    sessions: whether some of them are sessions. A step that is scheduled ahead could not pause them.
    """
    shared = random.randint(0, longest // HASH_TOKENS) * HASH_TOKENS
    prompts = [(*range(shared), *range(start, start + longest - shared)) for start in (100, 200)]
    return [_draw_request(random, random.choice(prompts), sessions) for _ in range(random.randint(10, 40))]


def _draw_request(random: Random, prompt: Sequence[int], sessions: bool) -> RequestSpec:
    blocks = random.randint(1, len(prompt) // HASH_TOKENS) * HASH_TOKENS
    length = random.choice((blocks, min(len(prompt), blocks + 1), random.randint(1, len(prompt))))
    wish, parameters = random.random(), dict[str, Any]()
    if wish < 0.1:
        parameters = {"do_remote_decode": True}
    elif wish < 0.25:
        parameters = {"max_load_tokens": random.randint(0, len(prompt))}
    parts = tuple([random.randint(100, 101) for _ in range(random.randint(1, 6))])
    return RequestSpec(
        tuple(prompt[:length]),
        random.randint(1, 9),
        parameters or None,
        (parts,) if sessions and random.random() < 0.1 else (),
        skip_reading=random.random() < 0.1,
    )


def _tokens_of(request: RequestSpec) -> int:
    return (
        len(request.prompt) + request.outputs + sum([len(part) + request.outputs for part in request.parts])
    )


def _draw_budgets(random: Random, *, may_lose: bool) -> Budgets:
    return Budgets(
        failures=random.choice((0, 0, 10)),
        aborts=random.choice((0, 10)),
        preemptions=random.choice((0, 10, 30)),
        resets=random.choice((0, 0, 3)),
        repeats=random.choice((0, 20)),
        partial=random.choice((0, 20)),
        waits=random.choice((0, 20)),
        crashes=random.choice((0, 0, 3)),
        losses=random.choice((0, 0, 0, 3)) if may_lose else 0,
    )
