"""Options of a fleet: engines with the same layers, and with different pools, disks, requests and faults."""

from __future__ import annotations

from random import Random

import msgspec

from kvsm.check.worlds.fleet_world import FleetBudgets, FleetMemberOptions, FleetOptions
from kvsm.check.worlds.serving_world import RequestSpec
from kvsm.check.worlds.whole_options import draw_whole
from kvsm.check.worlds.whole_world import TroubleLevel, WholeOptions

_MOST_REQUESTS = 16
"""The most requests of one engine: more would leave few actions for hand-overs."""
_PROMPTS = 1_000
"""The number of tokens that the prompts of `draw_whole` use."""


def draw_fleet(random: Random) -> FleetOptions:
    """Draw options: two or three engines with the same layers and ranks."""
    first = draw_whole(random)
    drawn = [first, *[draw_whole(random) for _ in range(random.choice((1, 1, 2)))]]
    return FleetOptions(members=tuple([_draw_member(random, first, one) for one in drawn]))


def _draw_member(random: Random, first: WholeOptions, drawn: WholeOptions) -> FleetMemberOptions:
    """Draw one engine: the workload and the layers of `first`, pools and troubles of `drawn`."""
    fields = msgspec.structs.asdict(first)
    # Prefer long prompts: they have more full blocks to hand over.
    longest = sorted(first.requests, key=lambda one: -len(one.prompt))[: 2 * _MOST_REQUESTS]
    requests = random.sample(longest, min(len(longest), random.randint(2, _MOST_REQUESTS)))
    is_calm = drawn.trouble is TroubleLevel.CALM
    budgets = FleetBudgets(
        **msgspec.structs.asdict(drawn.budgets)
        | {"cuts": 0 if is_calm else random.choice((0, 5)), "expiries": random.choice((0, 5, 20))}
        # Without references a lost copy holds all blocks of its request for ever.
        | {"losses": drawn.budgets.losses if first.references else 0}
    )
    return FleetMemberOptions(
        **fields
        | {
            "names": 0,
            "requests": tuple([_for_another_engine(random, one) for one in requests]),
            "slots": random.choice((first.slots, first.slots + random.randint(1, 12))),
            "policy": drawn.policy,
            "defer_ticks": drawn.defer_ticks,
            "disk": drawn.disk,
            "trouble": drawn.trouble,
            "budgets": budgets,
            "share": random.choice((1.0, 1.0, 0.5)),
            "readers": random.choice((1, 1, 2)),
        }
    )


def _for_another_engine(random: Random, request: RequestSpec) -> RequestSpec:
    """Mostly let the prompt's blocks be handed over, and make the prompt new to other engines."""
    if request.parameters is None and random.random() < 0.8:
        other = _PROMPTS * random.randint(0, 5)
        prompt = tuple([token + other for token in request.prompt])
        return msgspec.structs.replace(request, prompt=prompt, parameters={"do_remote_decode": True})
    return request
