"""The options of a hint world: its sizes, and how often each kind of action may happen."""

from __future__ import annotations

from random import Random

import msgspec

from kvsm.check.worlds.drawn_policies import draw_policy
from kvsm.check.worlds.hand_over_options import one_or_two_groups, tokens_of
from kvsm.core.scheduler import SchedulerConfig
from kvsm.errors import ConfigError
from kvsm.events import OffloadConfig


class HintWorldOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes and budgets of a hint world. Raises `ConfigError`.

    slots: size of the host pool.
    prompts: the number of different prompts; all share their first half.
    length: chunks of a prompt.
    window: whether there is a second KV cache group, with a sliding window.
    sessions: the number of sessions.
    share: the largest share of the pool that leases may pin.
    computes, hints, looks: how many prompts are computed, how many requests end with a hint, and how many
        steps do nothing else.
    waits: how often time passes; unlimited while no other action is possible.
    resets, failures, losses, loads: how many resets, failed copies, lost stores, and loads.
    """

    slots: int = 2
    workers: int = 1
    blocks_per_chunk: int = 1
    policy: str = "lru"
    prompts: int = 2
    length: int = 1
    window: bool = False
    sessions: int = 2
    share: float = 0.5
    computes: int = 2
    hints: int = 2
    looks: int = 0
    waits: int = 1
    resets: int = 0
    failures: int = 0
    losses: int = 0
    loads: int = 0

    def __post_init__(self) -> None:
        for name in ("slots", "workers", "blocks_per_chunk", "prompts", "length", "sessions"):
            if not 1 <= getattr(self, name) <= 64:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be from 1 to 64")
        if not 0 <= self.share <= 1:
            raise ConfigError(f"share is {self.share}; it must be from 0 to 1")
        self.core_config()

    def core_config(self) -> OffloadConfig:
        """The configuration of the core."""
        groups, blocks = 2 if self.window else 1, self.length * self.blocks_per_chunk
        return OffloadConfig(
            host_blocks=self.slots,
            # Each prompt has its own device blocks; a load writes to blocks after all of these.
            device_blocks=self.prompts * groups * blocks + blocks,
            workers=self.workers,
            blocks_per_chunk=self.blocks_per_chunk,
            policy=self.policy,
        )

    def scheduler_config(self) -> SchedulerConfig:
        """The KV cache groups."""
        return one_or_two_groups(self.window)

    def tokens(self, prompt: int) -> list[int]:
        """The tokens of the prompt with this number, and of its answer: one token."""
        return tokens_of(prompt, self.length, self.blocks_per_chunk)


def draw_hint_options(random: Random) -> HintWorldOptions:
    """Draw options: a pool of a few prompts, and a few dozen disturbances."""
    length, window = random.randint(1, 4), random.random() < 0.3
    per_prompt = length * (2 if window else 1)
    return HintWorldOptions(
        slots=random.randint(per_prompt, 5 * per_prompt + 2),
        workers=random.choice((1, 1, 2)),
        blocks_per_chunk=random.choice((1, 1, 2)),
        policy=draw_policy(random),
        prompts=random.randint(2, 10),
        length=length,
        window=window,
        sessions=random.randint(1, 8),
        share=random.choice((0.0, 0.25, 0.5, 0.5, 0.75, 1.0)),
        computes=random.randint(20, 80),
        hints=random.randint(20, 60),
        looks=random.choice((0, 20)),
        waits=random.choice((2, 10, 30)),
        resets=random.choice((0, 0, 4)),
        failures=random.choice((0, 0, 6)),
        losses=random.choice((0, 0, 1)),
        loads=random.choice((0, 30)),
    )
