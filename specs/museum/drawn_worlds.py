"""Worlds for the museum's walks, with drawn configurations that the targets of `kvsm fuzz` do not have.

None is made for one bug: each has a kind of engine, of workload or of disturbance.
"""

from __future__ import annotations

from random import Random

import msgspec

from kvsm.check.walks.targets import draw_serving, draw_two_tier_options
from kvsm.check.worlds.audited import AuditedCore, AuditedWorld
from kvsm.check.worlds.core_options import draw_options
from kvsm.check.worlds.core_world import CoreWorld
from kvsm.check.worlds.log_ahead import LogAheadWorld
from kvsm.check.worlds.serving_world import Budgets, EndingServing, RequestSpec, ServingOptions, ServingWorld
from kvsm.check.worlds.small_request import HASH_TOKENS
from kvsm.check.worlds.two_tiers import TwoTierWorld
from kvsm.core.scheduler import GroupKind, KVCacheGroup, LastStep, StoreMode
from museum.wrong_books import WrongBooksWorld

_SELDOM = ("lose", "reset", "restart", "fail", "cancel", "touch", "import_blocks", "tick", "preempt")


def _core_with(random: Random) -> CoreWorld:
    """Return a core world in which some rare actions are frequent.

    It never draws "advance": random moves of a request's cursors are unlike any engine's.
    """
    options, often = draw_options(random), set(random.sample(_SELDOM, 3))
    if random.random() < 0.4:
        # Loads of parts of a chunk, and resets between them.
        options = msgspec.structs.replace(
            options,
            blocks_per_chunk=2,
            length=min(options.length, 4),
            prompts=1,
            requests=2,
            store_threshold=1,
        )
        often = {"reset", "tick", "compute"}
    world = CoreWorld(options)
    world.favour(lambda name: 0.0 if name == "advance" else 8.0 if name in often else 1.0)
    return world


def log_ahead(random: Random) -> LogAheadWorld:
    """Return a core world that checks that the log is flushed before each effect becomes visible."""
    return LogAheadWorld(draw_options(random), waits=random.random() < 0.5)


def audited_core(random: Random) -> AuditedWorld:
    world = _core_with(random)
    return AuditedWorld(world, lambda: [AuditedCore(world.core.ledger, world.events)])


def audited_tiers(random: Random) -> AuditedWorld:
    world = TwoTierWorld(draw_two_tier_options(random))
    return AuditedWorld(
        world, lambda: [AuditedCore(world.host.ledger, world.log), AuditedCore(world.disk.ledger, None)]
    )


def audited_serving(random: Random) -> AuditedWorld:
    world = ServingWorld(draw_serving(random))
    return AuditedWorld(world, lambda: [AuditedCore(world.engine.core.ledger, world.engine.log)])


def wrong_books_of_a_core(random: Random) -> WrongBooksWorld:
    world = _core_with(random)
    return WrongBooksWorld(world, lambda: AuditedCore(world.core.ledger, world.events))


def wrong_books_of_tiers(random: Random) -> WrongBooksWorld:
    world = TwoTierWorld(draw_two_tier_options(random))
    return WrongBooksWorld(world, lambda: AuditedCore(world.host.ledger, world.log), lambda: world.tier)


# Serving worlds, in which no store may be lost.


def _window(tokens: int) -> KVCacheGroup:
    return KVCacheGroup(HASH_TOKENS, GroupKind.SLIDING_WINDOW, window=tokens)


_FULL, _DRAFTER = KVCacheGroup(HASH_TOKENS), KVCacheGroup(HASH_TOKENS, drafter=True)
_LAYERS = (
    (_FULL,),
    (_FULL, _window(4)),
    (_FULL, _window(6)),
    (_window(6), _window(9)),
    (_DRAFTER,),
    (_FULL, _DRAFTER),
)


def _spec(random: Random, length: int, parts: int = 0) -> RequestSpec:
    """Return a request whose prompt diverges from others at any token, also within a block or a chunk."""

    def tokens(count: int) -> tuple[int, ...]:
        shared = random.randint(0, count)
        return (*range(shared), *[random.randint(100, 101) for _ in range(count - shared)])

    later = tuple(tokens(random.randint(1, 6)) for _ in range(random.randint(0, parts)))
    return RequestSpec(tokens(random.randint(1, length)), random.randint(1, 6), None, later)


def _again(random: Random, length: int, count: int) -> tuple[RequestSpec, ...]:
    """Return requests whose prompts are prefixes of two long ones, so that most of them hit.

    At least two thirds of the prompts end at a block boundary or one token after it.
    """
    longest = [_spec(random, length).prompt + tuple(range(100, 100 + length)) for _ in range(2)]

    def cut() -> int:
        blocks = random.randint(1, length // HASH_TOKENS) * HASH_TOKENS
        return random.choice((blocks, min(length, blocks + 1), random.randint(1, length)))

    return tuple([RequestSpec(random.choice(longest)[: cut()], random.randint(1, 6)) for _ in range(count)])


def layered_serving(random: Random) -> EndingServing:
    """Return an engine with windows, drafters or chunks of two blocks, on a host of any size."""
    groups = random.choice(_LAYERS)
    longest = random.randint(3, 6) * HASH_TOKENS
    drafts = int(any(group.drafter for group in groups))
    device_blocks = (longest // HASH_TOKENS + 4) * len(groups) + random.randint(0, 6)
    # An engine without reference counts cannot keep the target blocks of a lost load.
    references = random.random() < 0.7
    options = ServingOptions(
        requests=_again(random, longest, random.randint(10, 40)),
        device_blocks=device_blocks,
        slots=random.choice((2, 4, 8, 20)),
        workers=1,
        groups=groups,
        last_step=random.choice((LastStep.FLUSH, LastStep.KEEP_STEPPING)),
        references=references,
        prefix_cache=random.random() < 0.5,
        drafts=drafts,
        chunk_tokens=random.choice((3, HASH_TOKENS, 64)),
        blocks_per_chunk=random.choice((1, 2)),
        max_live_transfers=random.randint(2, 8),
        defer_ticks=random.choice((0, 1, 3)),
        checks_stores=True,
        budgets=Budgets(
            failures=random.choice((0, 0, 10)),
            preemptions=random.choice((0, 10)),
            resets=random.choice((0, 0, 4)),
            partial=random.choice((0, 30)),
            losses=random.choice((0, 3)) if references else 0,
        ),
    )
    return EndingServing(options)


def session_serving(random: Random) -> EndingServing:
    """Return an engine of sessions, whose prompts grow, on a host with room for some of them."""
    longest = 3 * HASH_TOKENS
    specs = tuple([_spec(random, longest, 3) for _ in range(random.randint(5, 20))])
    return EndingServing(
        ServingOptions(
            requests=specs,
            device_blocks=20,
            slots=random.choice((2, 4, 10)),
            workers=1,
            last_step=LastStep.KEEP_STEPPING,
            prefix_cache=False,
            blocks_per_chunk=random.choice((1, 1, 2)),
            checks_stores=True,
            budgets=Budgets(preemptions=random.choice((0, 5)), resets=random.choice((0, 2))),
        )
    )


def lazy_serving(random: Random) -> EndingServing:
    """Return an engine with a lazy store, large requests, and a host that loses keys."""
    longest = random.randint(2, 6) * HASH_TOKENS
    return EndingServing(
        ServingOptions(
            requests=tuple([_spec(random, longest) for _ in range(random.randint(10, 40))]),
            device_blocks=longest // HASH_TOKENS + random.randint(4, 10),
            slots=random.randint(4, 20),
            workers=1,
            store=StoreMode.LAZY,
            last_step=LastStep.KEEP_STEPPING,
            lazy_target_blocks=random.randint(1, 3),
            checks_stores=True,
            budgets=Budgets(
                failures=random.choice((0, 5)),
                resets=random.choice((0, 3)),
                preemptions=random.choice((0, 5)),
            ),
        )
    )


def routed_serving(random: Random) -> EndingServing:
    """Return an engine with a router, chunks of one or two blocks, and a small host.

    Prompts diverge within a chunk, and some are embeddings.
    """
    longest = 4 * HASH_TOKENS
    specs = [_spec(random, longest) for _ in range(random.randint(5, 20))]
    return EndingServing(
        ServingOptions(
            requests=tuple([msgspec.structs.replace(spec, embeds=random.random() < 0.3) for spec in specs]),
            device_blocks=longest // HASH_TOKENS + random.randint(4, 10),
            slots=random.randint(1, 6),
            workers=1,
            router=True,
            last_step=LastStep.KEEP_STEPPING,
            prefix_cache=False,
            blocks_per_chunk=random.choice((1, 2, 2)),
            budgets=Budgets(failures=random.choice((0, 5)), resets=random.choice((0, 2))),
        )
    )
