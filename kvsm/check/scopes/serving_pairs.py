"""A family of small scopes of the serving world, generated so that any two parameter values meet.

    kvsm check serving --scope pairs        all of them
    kvsm check serving --scope pairs-07     one of them

A proof within a scope says nothing about other prompts and other engines. So these scopes are not chosen by
hand: they are the rows of a covering array (`kvsm.check.scopes.covering`) over the parameters below. How the
values were found:

- **Prompts** end one token before the end of a chunk, at it, and one token beyond it.
- **A second prompt** shares no chunk with the first, or one, or is the same, or is the next turn of its
  session: prompt, answer, and more. **A third one** displaces the others, or comes again after they have.
- **Every option** of `ServingOptions` that decides about blocks has two values or three: the least, the next
  one, and enough. So does what a client may ask for.
- **Disturbances**: either of two may happen, once. Lost transfers have no such limit: they may be given
  up any number of times.

What is excluded is what an engine refuses, what would leave nothing to load, and what would make a scope
large: `EXCLUDED` has the pairs. The other pairs of values all meet.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kvsm.check.explore.live_model import WorldScope
from kvsm.check.scopes.covering import covering
from kvsm.check.worlds.serving_world import Budgets, RequestSpec, ServingOptions
from kvsm.check.worlds.small_request import HASH_TOKENS, decoded_token
from kvsm.core.scheduler import GroupKind, KVCacheGroup, LastStep, StoreMode

BLOCK = HASH_TOKENS
"""Tokens of a block."""
LONG_OUTPUT = BLOCK + 1
"""Tokens of an answer that fills a block, wherever it begins."""
LOSSES = "losses"
"""The disturbance that has no budget: a transfer that takes long is given up."""
DISTURBANCES = (
    "failures",
    LOSSES,
    "aborts",
    "preemptions",
    "resets",
    "repeats",
    "partial",
    "waits",
    "crashes",
)
_FULL = KVCacheGroup(BLOCK)


def _window(tokens: int) -> KVCacheGroup:
    return KVCacheGroup(BLOCK, GroupKind.SLIDING_WINDOW, window=tokens)


GROUPS: Mapping[str, tuple[KVCacheGroup, ...]] = {
    "full": (_FULL,),
    "window of a block": (_FULL, _window(BLOCK)),
    "window of a block and a half": (_FULL, _window(BLOCK + BLOCK // 2)),
    "drafter": (_FULL, KVCacheGroup(BLOCK, drafter=True)),
}
"""The engine's layers. A drafter drafts one token in each step that decodes."""
WISHES: Mapping[str, dict[str, Any] | None] = {
    "none": None,
    "not offloaded": {"offload": False},
    "all offloaded": {"do_remote_decode": True},
    "one block offloaded": {"max_offload_tokens": BLOCK},
    "one block loaded": {"max_load_tokens": BLOCK},
}
"""What the client of the second request may ask for (`kvsm.core.scheduler.request_params`)."""

PARAMETERS: Mapping[str, tuple[Any, ...]] = {
    "disturbance": DISTURBANCES,
    "another": DISTURBANCES,
    "prompt_end": (-1, 0, 1),
    "second": ("shares a chunk", "the same", "next turn", "its own"),
    "groups": tuple(GROUPS),
    "outputs": (1, 2, LONG_OUTPUT),
    "second_end": (-1, 0, 1),
    "slots": ("two", "one", "enough"),
    "chunk_tokens": (64, BLOCK, BLOCK - 1),
    "defer_ticks": (0, 1, 2),
    "third": ("none", "the first again", "its own"),
    "device": ("room for one", "room for all"),
    "workers": (1, 2),
    "store": (StoreMode.EAGER, StoreMode.LAZY),
    "blocks_per_chunk": (1, 2),
    "references": (True, False),
    "prefix_cache": (False, True),
    "asynchronous": (False, True),
    "last_step": (LastStep.KEEP_STEPPING, LastStep.FLUSH),
    "router": (False, True),
    "store_threshold": (1, 2),
    "max_live_transfers": (8, 1),
    "wish": tuple(WISHES),
    "lazy_target_blocks": (1, 2),
}
"""Parameter -> its values.

prompt_end: where the first prompt ends, in tokens from the end of its second chunk. A chunk has
    `blocks_per_chunk` blocks. The first request decodes `outputs` tokens; the others decode one.
second_end: where the second prompt ends, in tokens from the end of the chunk behind what it shares.
The others are fields of `ServingOptions`, or explained at their names above.
"""


class ExcludedPair(msgspec.Struct, frozen=True):
    """Values of two parameters that never meet. one, other: a parameter, and the values that are meant."""

    one: tuple[str, tuple[Any, ...]]
    other: tuple[str, tuple[Any, ...]]
    why: str

    def has(self, pair: Mapping[str, Any]) -> bool:
        """Whether these two values, each under the name of its parameter, are such a pair."""
        return all(name in pair and pair[name] in values for name, values in (self.one, self.other))


_LAZY, _FOUND = ("store", (StoreMode.LAZY,)), ("prefix_cache", (True,))
_LONG, _AHEAD, _ROUTER = ("outputs", (LONG_OUTPUT,)), ("asynchronous", (True,)), ("router", (True,))
_ROOMY, _UNSHARED = ("device", ("room for all",)), ("second", ("its own",))
_TWO, _THREE = ("third", ("none",)), ("third", ("the first again", "its own"))
_NOT_AGAIN, _COUNTED = ("third", ("none", "its own")), ("store_threshold", (2,))

_NOTHING = "nothing would be loaded"
_LARGE = "together they make a scope large, and neither changes what the other does"

EXCLUDED = (
    ExcludedPair(_LAZY, ("blocks_per_chunk", (2,)), "a lazy store takes single blocks"),
    ExcludedPair(_LAZY, ("references", (False,)), "a lazy store walks through the engine's pool"),
    ExcludedPair(_LAZY, _COUNTED, "a lazy store has no offers to count"),
    ExcludedPair(_ROUTER, ("blocks_per_chunk", (2,)), "the router does not know chunks of several blocks"),
    ExcludedPair(_LAZY, ("prefix_cache", (False,)), _NOTHING),
    ExcludedPair(_LAZY, _ROOMY, _NOTHING),
    ExcludedPair(_LAZY, _TWO, _NOTHING),
    ExcludedPair(_FOUND, _ROOMY, _NOTHING),
    ExcludedPair(_FOUND, _TWO, _NOTHING),
    ExcludedPair(_UNSHARED, _NOT_AGAIN, _NOTHING),
    ExcludedPair(_COUNTED, _NOT_AGAIN, _NOTHING),
    ExcludedPair(("slots", ("one",)), ("groups", tuple(GROUPS)[1:]), _NOTHING),
    *[
        ExcludedPair(_ROUTER, other, _LARGE)
        for other in (_AHEAD, _LONG, ("workers", (2,)), ("references", (False,)))
    ],
    *[
        ExcludedPair(one, other, _LARGE)
        for one in (_AHEAD, _LONG)
        for other in (_THREE, _UNSHARED, _COUNTED, _LAZY, _FOUND)
    ],
    ExcludedPair(_LONG, _AHEAD, _LARGE),
    ExcludedPair(_LONG, ("workers", (2,)), _LARGE),
    ExcludedPair(_LONG, ("chunk_tokens", (BLOCK - 1,)), _LARGE),
    ExcludedPair(_LONG, ("second", ("next turn",)), _LARGE),
)
"""Two requests leave three parameters out: what needs a third request cannot meet what excludes one."""


def excluded(pair: Mapping[str, Any]) -> bool:
    """Whether two values, each under the name of its parameter, never meet."""
    if {"disturbance", "another"} <= pair.keys():
        # The order of the two is irrelevant, so keep one order.
        return DISTURBANCES.index(pair["another"]) < DISTURBANCES.index(pair["disturbance"])
    return any(one.has(pair) for one in EXCLUDED)


def _requests(row: Mapping[str, Any]) -> tuple[RequestSpec, ...]:
    chunk, outputs = BLOCK * row["blocks_per_chunk"], row["outputs"]
    first = tuple(range(1, 2 * chunk + row["prompt_end"] + 1))
    answer = [decoded_token("r0", place) for place in range(len(first), len(first) + outputs)]
    shared: tuple[int, ...] = {
        "shares a chunk": first[:chunk],
        "the same": first,
        "next turn": (*first, *answer),
        "its own": (),
    }[row["second"]]
    second = shared
    if row["second"] != "the same":
        end = (len(shared) // chunk + 1) * chunk + row["second_end"]
        length = end if end > len(shared) else end + chunk
        second = (*shared, *range(101, 101 + length - len(shared)))
    third = {"none": (), "the first again": first, "its own": tuple(range(201, 201 + len(first)))}
    return (
        RequestSpec(first, outputs),
        RequestSpec(second, parameters=WISHES[row["wish"]]),
        *[RequestSpec(prompt) for prompt in (third[row["third"]],) if prompt],
    )


def options_of(row: Mapping[str, Any]) -> ServingOptions:
    """The world of a row, which has a value for each of `PARAMETERS`."""
    requests, groups = _requests(row), GROUPS[row["groups"]]
    drafts = int(row["groups"] == "drafter")
    needed = [_blocks(len(one.prompt) + one.outputs - 1 + drafts, groups) for one in requests]
    disturbances = row["disturbance"], row["another"]
    budgets = {name: disturbances.count(name) for name in disturbances if name != LOSSES}
    as_they_are = [name for name in PARAMETERS if name in ServingOptions.__struct_fields__]
    return ServingOptions(
        **{name: row[name] for name in as_they_are if name not in ("groups", "slots")},
        groups=groups,
        requests=requests,
        device_blocks=max(needed) if row["device"] == "room for one" else sum(needed),
        slots={"one": 1, "two": 2, "enough": max(3, sum(needed))}[row["slots"]],
        drafts=drafts,
        transfer_ticks=2 if LOSSES in disturbances else 0,
        budgets=Budgets(**budgets, most=1),
    )


def _blocks(tokens: int, groups: tuple[KVCacheGroup, ...]) -> int:
    return sum(-(-tokens // group.block_tokens) for group in groups)


def told(row: Mapping[str, Any]) -> str:
    """The values of a row, for people."""
    values = [f"{name} {getattr(value, 'value', value)}" for name, value in row.items()]
    return ", ".join(values).replace("_", " ")


PAIRS: Mapping[str, WorldScope] = {
    name: WorldScope(name, options_of(row), says=told(row))
    for name, row in ((f"pairs-{n:02}", row) for n, row in enumerate(covering(PARAMETERS, excluded), 1))
}
