"""Worlds for the museum's walks, with drawn configurations that the targets of `kvsm fuzz` do not have.

None is made for one bug: each has a kind of engine, of workload or of disturbance.
"""

from __future__ import annotations

from random import Random

import msgspec

from kvsm.check.walks.drawn_options import (
    draw_crowded_core,
    draw_disturbed_core,
    draw_diverging,
    draw_large_core,
    draw_log_ahead,
    draw_routed,
    draw_serving,
    draw_two_tier_options,
)
from kvsm.check.worlds.audited import AuditedWorld
from kvsm.check.worlds.books import AuditedOptions, WrongBooksOptions, audited, with_wrong_books
from kvsm.check.worlds.hand_over_options import draw_hand_over_options
from kvsm.check.worlds.hand_over_world import HandOverWorld
from kvsm.check.worlds.log_ahead import LogAheadWorld
from kvsm.check.worlds.serving_world import Budgets, EndingServing, RequestSpec, ServingOptions
from kvsm.check.worlds.skewed_core import SkewedCoreWorld
from kvsm.check.worlds.small_request import HASH_TOKENS
from kvsm.check.worlds.wrong_books import WrongBooksWorld
from kvsm.core.scheduler import GroupKind, KVCacheGroup, LastStep, StoreMode


def log_ahead(random: Random) -> LogAheadWorld:
    return LogAheadWorld(draw_log_ahead(random))


def large_core(random: Random) -> SkewedCoreWorld:
    return SkewedCoreWorld(draw_large_core(random))


def crowded_core(random: Random) -> SkewedCoreWorld:
    return SkewedCoreWorld(draw_crowded_core(random))


def loading_hand_over(random: Random) -> HandOverWorld:
    """Return two engines that also load for their own requests, with failing copies.

    Nothing else goes wrong, so many hand-overs complete.
    """
    drawn = draw_hand_over_options(random)
    return HandOverWorld(
        msgspec.structs.replace(drawn, loads=60, failures=40, resets=0, cuts=0, losses=0, lies=0)
    )


def audited_core(random: Random) -> AuditedWorld:
    return audited(AuditedOptions(core=draw_disturbed_core(random)))


def audited_tiers(random: Random) -> AuditedWorld:
    return audited(AuditedOptions(tiers=draw_two_tier_options(random)))


def audited_serving(random: Random) -> AuditedWorld:
    return audited(AuditedOptions(serving=draw_serving(random)))


def wrong_books_of_a_core(random: Random) -> WrongBooksWorld:
    return with_wrong_books(WrongBooksOptions(core=draw_disturbed_core(random)))


def wrong_books_of_tiers(random: Random) -> WrongBooksWorld:
    return with_wrong_books(WrongBooksOptions(tiers=draw_two_tier_options(random)))


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


def _again(random: Random, length: int, count: int) -> tuple[RequestSpec, ...]:
    """Return requests whose prompts are prefixes of two long ones, so that most of them hit.

    At least two thirds of the prompts end at a block boundary or one token after it.
    """
    longest = [draw_diverging(random, length).prompt + tuple(range(100, 100 + length)) for _ in range(2)]

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
    specs = tuple([draw_diverging(random, longest, 3) for _ in range(random.randint(5, 20))])
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
            requests=tuple([draw_diverging(random, longest) for _ in range(random.randint(10, 40))]),
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
    return EndingServing(draw_routed(random))
