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
}
"""The kinds of actions, and how often each is drawn. `world.py` says what they do."""


class EngineShape(msgspec.Struct, frozen=True, kw_only=True):
    """The engine of one run. It decides, together with the actions, all that happens.

    connector: vLLM's name of a connector, or `package.module:Class`.
    extra: its `kv_connector_extra_config`.
    is_async: asynchronous scheduling: a step is scheduled while the one before is in flight.
    shards: tensor-parallel ranks.
    windows: a second KV cache group, with a sliding window.
    drafts: speculative tokens of each step.
    device_blocks, host_blocks: blocks of each rank. host_blocks is used unless `extra` gives a size.
    step_tokens: most tokens of a step.
    most_running: most requests of a step.
    kv_events: KV events are published.
    fills: at the end the host is filled, to see that no slot was lost. It costs as much as the run.
    without: kinds of actions that are not drawn.
    """

    connector: str = "KvsmConnector"
    extra: dict[str, Any] = {}
    is_async: bool = False
    shards: int = 1
    windows: bool = False
    drafts: int = 0
    device_blocks: int = 34
    host_blocks: int = 40
    step_tokens: int = 16
    most_running: int = 4
    kv_events: bool = False
    fills: bool = False
    without: tuple[str, ...] = ()

    @property
    def groups(self) -> int:
        """How many KV cache groups it has."""
        return 1 + self.windows

    @property
    def most_steps(self) -> int:
        """How many steps may be in flight at once."""
        return 1 + self.is_async


def draw_shape(random: Random) -> EngineShape:
    """A small engine. The connector is the caller's choice."""
    return EngineShape(
        is_async=random.random() < 0.6,
        shards=random.choice((1, 1, 2)),
        windows=random.random() < 0.4,
        drafts=random.choice((0, 0, 2)),
        device_blocks=random.choice((MOST_BLOCKS, 34, 48)),
        host_blocks=random.choice((6, 40, 160, 160)),
        step_tokens=random.choice((8, 16, 64)),
        most_running=random.choice((2, 4)),
        kv_events=random.random() < 0.7,
        fills=random.random() < 0.4,
    )
