"""The shape of the engine of one run: its sizes, its connector, and how it is drawn."""

from __future__ import annotations

from random import Random
from typing import Any, Literal

import msgspec

BLOCK_TOKENS = 4
"""Tokens of a device block."""
WORD_BYTES = 8
"""Bytes of one token in each rank's part of the KV cache: one word."""
BLOCK_BYTES = BLOCK_TOKENS * WORD_BYTES
MOST_TOKENS = 48
"""The most tokens of a request, output included."""
MOST_BLOCKS = 26
"""The device blocks that the largest request needs in two groups, plus the null block."""
ROOMY = 1000
"""Blocks of a pool that a run never fills."""
WINDOW = 6
"""Tokens of the sliding window, which spans two or three blocks."""
WINDOWS = (5, WINDOW, 8, 9)
"""The windows that are drawn. Besides the token to compute, the first one spans one whole block."""
STATES = -1
"""In place of a window: the group has mamba states. All words of a block hold one state."""
Drafter = Literal["", "full", "window", "shared", "unmarked"]
"""Which layers draft tokens. "": none, vLLM's n-gram lookup does. "full", "window": layers in a KV cache
group of their own, with this attention. "shared": layers in the model's first group. vLLM marks the group
with these layers (`is_eagle_group`), but not for every model: "unmarked" is "shared" without the mark."""
DRAFTERS: tuple[Drafter, ...] = ("", "full", "full", "window", "shared", "unmarked")
"""The drafters that are drawn."""
OPTIONS: tuple[dict[str, Any], ...] = ({}, {}, {}, {"blocks_per_chunk": 2}, {"store": "lazy"})
"""The options of kvsm's connector that are drawn."""
VOCABULARY = 1024

KINDS = {
    "arrive": 16,
    "schedule": 26,
    "execute": 12,
    "deliver": 26,
    "copy": 10,
    "copies": 4,
    "abort": 3,
    "reset": 2,
    "settle": 4,
    "fail": 6,
    "late": 2,
    "double": 3,
    "lose": 2,
    "slow": 2,
}
"""The kinds of actions, with their weights in the draw. `vllm_world.py` says what they do."""

FAULTS = ("fail", "late", "double", "lose", "slow")
"""The kinds of actions that are faults. `faults.py` says which connectors must survive them."""


class EngineShape(msgspec.Struct, frozen=True, kw_only=True):
    """The engine of one run. Together with the actions it determines the run.

    connector: vLLM's name of a connector, or `package.module:Class`.
    extra: its `kv_connector_extra_config`.
    is_async: whether vLLM schedules asynchronously: a step is scheduled while the previous one is in flight.
    shards: tensor-parallel ranks of each stage.
    stages: pipeline stages.
    full: whether there is a KV cache group with full attention.
    windows: whether there is a group with a sliding window, of `window` tokens.
    mamba: whether there is a group with mamba states at the ends of blocks (cache mode `align`). Shapes with
        it have no drafts.
    drafts: speculative tokens of each step.
    drafter: whose layers draft them; see `Drafter`. vLLM treats these layers as an EAGLE drafter.
    device_blocks, host_blocks: blocks of each rank. host_blocks is used unless `extra` gives a size.
    step_tokens: the most tokens of a step.
    most_running: the most requests of a step.
    priorities: whether requests have priorities, so that a request may preempt others.
    adapters: the number of LoRA adapters; a request has one of them or none.
    faults: the kinds of faults that are drawn.
    kv_events: whether KV events are published.
    fills: whether the host is filled at the end, to detect lost slots. It takes as long as the run.
    waits: whether kvsm's connector lets requests wait for blocks in flight. Otherwise it answers as it does
        after the longest wait.
    without: the kinds of actions that are not drawn.
    """

    connector: str = "KvsmConnector"
    extra: dict[str, Any] = {}
    is_async: bool = False
    shards: int = 1
    stages: int = 1
    full: bool = True
    windows: bool = False
    window: int = WINDOW
    mamba: bool = False
    drafts: int = 0
    drafter: Drafter = ""
    device_blocks: int = 34
    host_blocks: int = 40
    step_tokens: int = 16
    most_running: int = 4
    priorities: bool = False
    adapters: int = 0
    faults: tuple[str, ...] = ()
    kv_events: bool = False
    fills: bool = False
    waits: bool = True
    without: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        """The number of workers."""
        return self.shards * self.stages

    @property
    def windows_of_groups(self) -> tuple[int, ...]:
        """The window of each KV cache group (tokens); 0 for full attention, `STATES` for mamba states."""
        groups = (
            (self.full, 0),
            (self.windows, self.window),
            (self.mamba, STATES),
            (self.drafter == "full", 0),
            (self.drafter == "window", self.window),
        )
        return tuple(window for is_there, window in groups if is_there)

    @property
    def drafter_group(self) -> int | None:
        """The KV cache group that has only layers of the drafter."""
        return self.groups - 1 if self.drafter in ("full", "window") else None

    @property
    def eagle_group(self) -> int | None:
        """The KV cache group that vLLM marks as the drafter's (`is_eagle_group`)."""
        return 0 if self.drafter == "shared" else self.drafter_group

    @property
    def dropping_groups(self) -> tuple[int, ...]:
        """The groups in which vLLM's connectors may require the block after a hit. If no group is marked,
        they may treat each as the drafter's."""
        if not self.drafter:
            return ()
        return tuple(range(self.groups)) if self.eagle_group is None else (self.eagle_group,)

    @property
    def groups(self) -> int:
        """The number of KV cache groups."""
        return len(self.windows_of_groups)

    @property
    def spare_blocks(self) -> int:
        """How many device blocks may be lost before the largest request can no longer be served."""
        return self.device_blocks - self.groups * (MOST_TOKENS // BLOCK_TOKENS + 1)

    @property
    def most_steps(self) -> int:
        """How many steps may be in flight at once."""
        return self.stages + self.is_async

    @property
    def runner(self) -> int:
        """The version of vLLM's model runner. Only version 2 overlaps the steps of pipeline stages."""
        return 2 if self.is_async and self.stages > 1 else 1


def small_shapes() -> tuple[EngineShape, ...]:
    """The engines for all short schedules: with synchronous and with asynchronous scheduling, and room for at
    most two running requests."""
    small = EngineShape(device_blocks=MOST_BLOCKS, host_blocks=12, most_running=2)
    return small, msgspec.structs.replace(small, is_async=True)


def draw_shape(
    random: Random, faults: tuple[str, ...] = (), mamba: bool = False, drafters: bool = False
) -> EngineShape:
    """Draw a small engine. The caller sets the connector.

    faults: the faults that the connector must survive; half of the engines have them.
    mamba: whether the connector supports models with mamba layers; a fifth of the engines have such a model.
    drafters: whether most engines with drafts get a drafter with KV cache.
    """
    shape = _drawn(random, faults)
    # Drawn from other random numbers, so that a seed gives the same actions with each window, and with and
    # without mamba layers and drafters.
    others = Random(repr(random.getstate()))
    has_mamba = others.random() < 0.2
    shape = msgspec.structs.replace(shape, window=others.choice(WINDOWS))
    if shape.windows and shape.host_blocks == ROOMY and others.random() < 0.5:
        # What left its window is stored for sure only if the device does not reuse it.
        shape = msgspec.structs.replace(shape, device_blocks=ROOMY)
    if mamba and has_mamba:
        shape = msgspec.structs.replace(shape, mamba=True, full=True, drafts=0)
    elif drafters and shape.drafts:
        shape = msgspec.structs.replace(shape, drafter=others.choice(DRAFTERS))
    # Each group beyond two needs more blocks.
    more = MOST_BLOCKS // 2 * max(0, shape.groups - 2)
    return msgspec.structs.replace(shape, device_blocks=shape.device_blocks + more)


def draw_options(shape: EngineShape, random: Random) -> EngineShape:
    """Draw what only kvsm's connector has: its options, and whether requests may wait."""
    others = Random(f"options {random.getstate()}")
    extra, waits = others.choice(OPTIONS), others.random() < 0.8
    if shape.mamba and "blocks_per_chunk" in extra:
        extra = {}  # kvsm refuses chunks of states
    return msgspec.structs.replace(shape, extra=extra, waits=waits)


def _drawn(random: Random, faults: tuple[str, ...]) -> EngineShape:
    windows, stages = random.random() < 0.4, random.choice((1, 1, 1, 2))
    return EngineShape(
        is_async=random.random() < 0.6,
        shards=random.choice((1, 1, 2)),
        stages=stages,
        full=not windows or random.random() < 0.75,
        windows=windows,
        # vLLM refuses drafts together with pipeline stages.
        drafts=random.choice((0, 0, 2)) if stages == 1 else 0,
        device_blocks=random.choice((MOST_BLOCKS, 34, 48)),
        host_blocks=random.choice((6, 40, ROOMY, ROOMY)),
        step_tokens=random.choice((8, 16, 64)),
        most_running=random.choice((2, 4)),
        priorities=random.random() < 0.3,
        adapters=random.choice((0, 0, 0, 2)),
        faults=faults if random.random() < 0.5 else (),
        kv_events=random.random() < 0.7,
        fills=random.random() < 0.4,
    )
