"""Draw the options of a run, for the worlds that do not draw their own."""

from __future__ import annotations

from random import Random

import msgspec

from kvsm.check.worlds.books import AuditedOptions, WrongBooksOptions
from kvsm.check.worlds.copy_world import CopyEngineWorldOptions
from kvsm.check.worlds.core_options import CoreOptions, draw_options
from kvsm.check.worlds.drawn_policies import draw_policy
from kvsm.check.worlds.log_ahead import LogAheadOptions
from kvsm.check.worlds.serving_world import Budgets, RequestSpec, ServingOptions
from kvsm.check.worlds.skewed_core import SkewedCoreOptions
from kvsm.check.worlds.small_request import HASH_TOKENS
from kvsm.check.worlds.two_tiers import TwoTierOptions
from kvsm.core.scheduler import GroupKind, KVCacheGroup, LastStep, StoreMode
from kvsm.tiers import WritePolicy

_GROUPS = (
    (KVCacheGroup(HASH_TOKENS),),
    (KVCacheGroup(HASH_TOKENS),),
    (KVCacheGroup(HASH_TOKENS), KVCacheGroup(HASH_TOKENS, GroupKind.SLIDING_WINDOW, window=HASH_TOKENS)),
)


def draw_serving(random: Random) -> ServingOptions:
    """Draw options: dozens of requests with common prefixes, and an engine with room for a few of them."""
    groups = random.choice(_GROUPS)
    store = random.choice((StoreMode.EAGER, StoreMode.EAGER, StoreMode.LAZY))
    # A lazy store needs chunks of one block and references to the pool, and counts no offers.
    lazy = store is StoreMode.LAZY
    longest = random.randint(2, 4) * HASH_TOKENS
    return ServingOptions(
        requests=tuple([_draw_request(random, longest) for _ in range(random.randint(20, 100))]),
        # Room for the longest request, what it decodes, and the step that is scheduled ahead.
        device_blocks=(longest // HASH_TOKENS + 3) * len(groups) + random.randint(0, 4),
        slots=random.randint(2, 6),
        workers=random.choice((1, 2, 2)),
        groups=groups,
        store=store,
        last_step=random.choice((LastStep.FLUSH, LastStep.KEEP_STEPPING)),
        references=lazy or random.random() < 0.7,
        prefix_cache=random.random() < 0.7,
        asynchronous=random.random() < 0.3,
        chunk_tokens=random.choice((3, HASH_TOKENS, 64)),
        lazy_target_blocks=random.randint(1, 4),
        policy=draw_policy(random),
        blocks_per_chunk=1 if lazy else random.choice((1, 1, 2)),
        store_threshold=(threshold := 1 if lazy else random.choice((1, 1, 2))),
        # A chunk that is offered too seldom has no store, and its reason is logged only once.
        checks_stores=threshold == 1,
        max_live_transfers=random.randint(2, 8),
        defer_ticks=random.choice((0, 1, 3)),
        budgets=Budgets(
            failures=random.choice((0, 20)),
            aborts=random.choice((0, 10)),
            preemptions=random.choice((0, 20)),
            resets=random.choice((0, 5)),
            repeats=random.choice((0, 50)),
            partial=random.choice((0, 20)),
            waits=random.choice((0, 50)),
            crashes=random.choice((0, 0, 5)),
        ),
    )


def draw_clocks(random: Random) -> ServingOptions:
    """Draw options of `draw_serving` with fewer requests, and without crashes."""
    drawn = draw_serving(random)
    budgets = msgspec.structs.replace(drawn.budgets, crashes=0)
    # Without references a lost copy holds all blocks of its request for ever.
    requests = drawn.requests[: random.randint(10, 30)]
    return msgspec.structs.replace(drawn, requests=requests, references=True, budgets=budgets)


def _draw_request(random: Random, longest: int) -> RequestSpec:
    """Draw a request that may share up to two first blocks with others."""
    length = random.randint(1, longest)
    shared = min(length, random.choice((0, HASH_TOKENS, 2 * HASH_TOKENS)))
    prompt = [*range(shared), *[random.randint(100, 102) for _ in range(length - shared)]]
    wish = random.random()
    parameters = {"do_remote_decode": True} if wish < 0.1 else None
    return RequestSpec(tuple(prompt), random.randint(1, 4), parameters, skip_reading=wish > 0.9)


def draw_two_tier_options(random: Random) -> TwoTierOptions:
    """Draw options of a small world of two tiers, with a few disturbances of each kind."""
    return TwoTierOptions(
        host_slots=random.randint(2, 6),
        disk_slots=random.randint(2, 6),
        device_blocks=random.randint(2, 4),
        places=random.randint(1, 3),
        writes=random.choice(list(WritePolicy)).value,
        waiting=random.choice((0, 1, 4)),
        defer_ticks=random.choice((1, 3)),
        ranks=random.choice((1, 2)),
        failures=random.choice((0, 3)),
        losses=random.choice((0, 0, 1)),
        resets=random.choice((0, 3)),
        crashes=random.choice((0, 3)),
        damages=random.choice((0, 2)),
    )


def draw_copies(random: Random) -> CopyEngineWorldOptions:
    """Draw a small device with a few copies and kernels."""
    return CopyEngineWorldOptions(
        device_blocks=random.randint(2, 4),
        host_blocks=random.randint(1, 3),
        transfer_blocks=random.randint(1, 2),
        copies=8,
        kernels=8,
        marks=random.randint(0, 4),
        bad=random.choice((0, 2)),
        holds=random.choice((0, 3)),
        closes=random.random() < 0.2,
    )


# Cores in which the kinds of actions have other weights.

_SELDOM = ("lose", "reset", "restart", "fail", "cancel", "touch", "import_blocks", "tick", "preempt")
_OFTEN = 8.0


def draw_disturbed_core(random: Random) -> SkewedCoreOptions:
    """Draw a core in which some rare kinds of action are frequent.

    The kind "advance" never happens: random moves of a request's cursors are unlike those of any engine.
    """
    core, often = draw_options(random), random.sample(_SELDOM, 3)
    if random.random() < 0.4:
        # Loads of parts of a chunk, and resets between them.
        core = msgspec.structs.replace(
            core,
            blocks_per_chunk=2,
            length=min(core.length, 4),
            prompts=1,
            requests=2,
            store_threshold=1,
        )
        often = ["reset", "tick", "compute"]
    return SkewedCoreOptions(core=core, factors={"advance": 0.0, **dict.fromkeys(often, _OFTEN)})


_OFFERS = {
    "store": 5,
    "store_two": 2,
    "submit_all": 3,
    "touch": 2,
    "import_blocks": 3,
    "match": 0.3,
    "reset": 0.1,
    "restart": 0.1,
    "lose": 0.2,
    "cancel": 0.5,
    "fail": 0.5,
    "lose_overdue": 0,
    "advance": 0,
}
"""Mostly offers: a large pool must fill, and stay full."""


def draw_large_core(random: Random) -> SkewedCoreOptions:
    """Draw a core with a large pool (60 slots or more), and offers that need most of it.

    So victim searches reach blocks that the same offer has found resident, and all batches are arrays.
    """
    length = random.randint(60, 160)
    core = CoreOptions(
        host_blocks=random.randint(length, 3 * length // 2),
        chunks=random.randint(2 * length, 3 * length),
        workers=1,
        policy=draw_policy(random),
        max_live_transfers=random.randint(3, 6),
        defer_ticks=0,
        transfer_ticks=0,
        prompts=random.randint(2, 6),
        length=length,
        folds_log=False,
    )
    return SkewedCoreOptions(core=core, factors=_OFFERS)


_DISTURBED = {
    "lose": 4,
    "reset": 4,
    "fail": 4,
    "store": 2,
    "submit_all": 2,
    "restart": 0,
    "advance": 0,
}


def draw_crowded_core(random: Random) -> SkewedCoreOptions:
    """Draw a core with one or two keys that several requests want, and many losses, failures and resets.

    So two requests often match one block, and the host is often empty while the device is not.
    """
    length = random.randint(1, 2)
    core = CoreOptions(
        host_blocks=random.randint(length, 3),
        chunks=random.randint(3, 5),
        workers=1,
        blocks_per_chunk=random.choice((1, 2)),
        policy=draw_policy(random),
        max_live_transfers=random.randint(2, 6),
        defer_ticks=random.choice((0, 1)),
        transfer_ticks=random.choice((0, 2)),
        requests=random.randint(2, 3),
        prompts=1,
        length=length,
        folds_log=random.random() < 0.1,
    )
    return SkewedCoreOptions(core=core, factors=_DISTURBED)


def draw_skewed_core(random: Random) -> SkewedCoreOptions:
    """Draw a large, a crowded or a disturbed core."""
    draws = (draw_large_core, draw_crowded_core, draw_crowded_core, draw_disturbed_core)
    return random.choice(draws)(random)


def draw_log_ahead(random: Random) -> LogAheadOptions:
    """Draw a core whose log is watched."""
    return LogAheadOptions(core=draw_options(random), waits=random.random() < 0.5)


# Worlds whose books are audited or made wrong.


def draw_audited(random: Random) -> AuditedOptions:
    """Draw a world whose books are audited."""
    kind = random.choice(("core", "core", "tiers", "serving"))
    if kind == "core":
        return AuditedOptions(core=draw_disturbed_core(random))
    if kind == "tiers":
        return AuditedOptions(tiers=draw_two_tier_options(random))
    return AuditedOptions(serving=draw_serving(random))


def draw_wrong_books(random: Random) -> WrongBooksOptions:
    """Draw a world whose books are made wrong."""
    if random.random() < 0.8:
        return WrongBooksOptions(core=draw_disturbed_core(random))
    return WrongBooksOptions(tiers=draw_two_tier_options(random))


# A serving world with a router.


def draw_diverging(random: Random, length: int, parts: int = 0) -> RequestSpec:
    """Draw a request whose prompt diverges from others at any token, also within a block or a chunk.

    parts: the maximum number of further parts of its prompt, as in a session.
    """

    def tokens(count: int) -> tuple[int, ...]:
        shared = random.randint(0, count)
        return (*range(shared), *[random.randint(100, 101) for _ in range(count - shared)])

    later = tuple(tokens(random.randint(1, 6)) for _ in range(random.randint(0, parts)))
    return RequestSpec(tokens(random.randint(1, length)), random.randint(1, 6), None, later)


def draw_routed(random: Random) -> ServingOptions:
    """Draw an engine with a router, chunks of one or two blocks, and a small host.

    Prompts diverge within a chunk, and some are embeddings.
    """
    longest = 4 * HASH_TOKENS
    specs = [draw_diverging(random, longest) for _ in range(random.randint(5, 20))]
    return ServingOptions(
        requests=tuple([msgspec.structs.replace(spec, embeds=random.random() < 0.3) for spec in specs]),
        device_blocks=longest // HASH_TOKENS + random.randint(4, 10),
        slots=random.randint(1, 6),
        workers=1,
        router=True,
        checks_stores=True,
        last_step=LastStep.KEEP_STEPPING,
        prefix_cache=False,
        blocks_per_chunk=random.choice((1, 2, 2)),
        budgets=Budgets(failures=random.choice((0, 5)), resets=random.choice((0, 2))),
    )
