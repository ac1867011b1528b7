"""How large the engine of one run is, which connector it has, and how both are drawn."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec

BLOCK_TOKENS = 4
"""Tokens of a device block."""
WORD_BYTES = 8
"""Bytes of one token in each rank's part of the KV cache: one word."""
BLOCK_BYTES = BLOCK_TOKENS * WORD_BYTES
MOST_TOKENS = 48
"""Most tokens of a request, output included."""
MOST_BLOCKS = 26
"""As many device blocks as the largest request needs in two groups, and the null block."""
WINDOW = 6
"""Tokens of the sliding window: it spans two or three blocks."""
STATES = -1
"""In place of a window: the group has mamba states. A block holds one state, in all of its words."""
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
"""The kinds of actions, and how often each is drawn. `vllm_world.py` says what they do."""

FAULTS = ("fail", "late", "double", "lose", "slow")
"""The kinds of actions that are faults. `faults.py` says who must survive them."""


class EngineShape(msgspec.Struct, frozen=True, kw_only=True):
    """The engine of one run. It decides, together with the actions, all that happens.

    connector: vLLM's name of a connector, or `package.module:Class`.
    extra: its `kv_connector_extra_config`.
    is_async: asynchronous scheduling: a step is scheduled while the one before is in flight.
    shards: tensor-parallel ranks of each stage.
    stages: pipeline stages.
    full: a KV cache group with full attention.
    windows: one with a sliding window.
    mamba: one with mamba states at the ends of blocks (cache mode `align`). vLLM then has no drafts here.
    drafts: speculative tokens of each step.
    device_blocks, host_blocks: blocks of each rank. host_blocks is used unless `extra` gives a size.
    step_tokens: most tokens of a step.
    most_running: most requests of a step.
    priorities: requests have priorities, and a request of a better one may preempt another.
    adapters: LoRA adapters; a request has one of them or none.
    faults: kinds of actions that are faults, and are drawn.
    kv_events: KV events are published.
    fills: at the end the host is filled, to see that no slot was lost. It costs as much as the run.
    without: kinds of actions that are not drawn.
    """

    connector: str = "KvsmConnector"
    extra: dict[str, Any] = {}
    is_async: bool = False
    shards: int = 1
    stages: int = 1
    full: bool = True
    windows: bool = False
    mamba: bool = False
    drafts: int = 0
    device_blocks: int = 34
    host_blocks: int = 40
    step_tokens: int = 16
    most_running: int = 4
    priorities: bool = False
    adapters: int = 0
    faults: tuple[str, ...] = ()
    kv_events: bool = False
    fills: bool = False
    without: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        """How many workers it has."""
        return self.shards * self.stages

    @property
    def windows_of_groups(self) -> tuple[int, ...]:
        """The window of each KV cache group (tokens); 0: full attention; `STATES`: mamba states."""
        groups = (self.full, 0), (self.windows, WINDOW), (self.mamba, STATES)
        return tuple(window for is_there, window in groups if is_there)

    @property
    def groups(self) -> int:
        """How many KV cache groups it has."""
        return len(self.windows_of_groups)

    @property
    def spare_blocks(self) -> int:
        """How many device blocks it can lose, and still serve its largest request."""
        return self.device_blocks - self.groups * (MOST_TOKENS // BLOCK_TOKENS + 1)

    @property
    def most_steps(self) -> int:
        """How many steps may be in flight at once."""
        return self.stages + self.is_async

    @property
    def runner(self) -> int:
        """The version of vLLM's model runner. Only the second one overlaps the steps of pipeline stages."""
        return 2 if self.is_async and self.stages > 1 else 1


def small_shapes() -> tuple[EngineShape, ...]:
    """The engines of all short schedules: one after the other, and with steps that overlap. There is no room
    for more than two requests at once."""
    small = EngineShape(device_blocks=MOST_BLOCKS, host_blocks=12, most_running=2)
    return small, msgspec.structs.replace(small, is_async=True)


def draw_shape(random: Random, faults: tuple[str, ...] = (), mamba: bool = False) -> EngineShape:
    """A small engine. The connector is the caller's choice.

    faults: what its connector must survive; half of the engines have them.
    mamba: whether it serves models with mamba layers; a fifth of the engines has such a model.
    """
    shape = _drawn(random, faults)
    # Drawn aside, so that a seed gives the same actions with and without mamba layers.
    if not mamba or Random(repr(random.getstate())).random() >= 0.2:
        return shape
    # Three groups need more blocks than two.
    more = shape.device_blocks + MOST_BLOCKS // 2 * shape.windows
    return msgspec.structs.replace(shape, mamba=True, full=True, drafts=0, device_blocks=more)


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
        host_blocks=random.choice((6, 40, 160, 160)),
        step_tokens=random.choice((8, 16, 64)),
        most_running=random.choice((2, 4)),
        priorities=random.random() < 0.3,
        adapters=random.choice((0, 0, 0, 2)),
        faults=faults if random.random() < 0.5 else (),
        kv_events=random.random() < 0.7,
        fills=random.random() < 0.4,
    )
