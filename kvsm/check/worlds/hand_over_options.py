"""The options of a hand-over world: its sizes, and how often each kind of action may happen."""

from __future__ import annotations

from random import Random

import msgspec

from kvsm.check.worlds.drawn_policies import draw_policy
from kvsm.check.worlds.small_request import HASH_TOKENS
from kvsm.core.scheduler import GroupKind, KVCacheGroup, SchedulerConfig
from kvsm.errors import ConfigError
from kvsm.events import OffloadConfig


class HandOverWorldOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes and budgets of a hand-over world. Raises `ConfigError`.

    prefill_slots, decode_slots: sizes of the host pools.
    prompts: the number of different prompts; all share their first half.
    length: chunks of a prompt.
    window: whether there is a second KV cache group, with a sliding window.
    readers: how many requests of the decode engine may name one hand-over.
    computes, decodes: how many prompts the prefill engine and the decode engine may compute.
    hand_overs: how many requests of the prefill engine end with a hand-over.
    waits: how often time passes until leases expire; unlimited while no other action is possible.
    resets: how many resets, of both engines together.
    failures: how many copies of a rank fail.
    cuts: how many connections break.
    losses: how many imports are given up at their deadline.
    loads: how many prompts the engines load from their own hosts, for requests of their own.
    lies: how many wrong answers a prefill engine gives, plus wrong questions that strangers ask it.
    share: the largest share of the prefill engine's pool that hand-overs may pin.
    """

    prefill_slots: int = 1
    decode_slots: int = 1
    workers: int = 1
    blocks_per_chunk: int = 1
    policy: str = "lru"
    prompts: int = 2
    length: int = 1
    window: bool = False
    readers: int = 1
    computes: int = 2
    decodes: int = 0
    hand_overs: int = 1
    waits: int = 1
    resets: int = 1
    failures: int = 0
    cuts: int = 0
    losses: int = 0
    loads: int = 0
    lies: int = 0
    share: float = 1.0

    def __post_init__(self) -> None:
        for name in ("prefill_slots", "decode_slots", "workers", "blocks_per_chunk", "prompts", "length"):
            if not 1 <= getattr(self, name) <= 16:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be from 1 to 16")
        if not 0 < self.share <= 1:
            raise ConfigError(f"share is {self.share}; it must be above 0 and at most 1")
        self.core_config(0)

    def core_config(self, side: int) -> OffloadConfig:
        """The configuration of the core of one side."""
        groups, blocks = 2 if self.window else 1, self.length * self.blocks_per_chunk
        return OffloadConfig(
            host_blocks=(self.prefill_slots, self.decode_slots)[side],
            # Each prompt has its own device blocks; a load writes to blocks after all of these.
            device_blocks=self.prompts * groups * blocks + (blocks if self.loads else 0),
            workers=self.workers,
            blocks_per_chunk=self.blocks_per_chunk,
            policy=self.policy,
        )

    def scheduler_config(self) -> SchedulerConfig:
        """The KV cache groups of both engines."""
        return one_or_two_groups(self.window)

    def tokens(self, prompt: int) -> list[int]:
        """The tokens of the prompt with this number. The decode engine computes the last token."""
        return tokens_of(prompt, self.length, self.blocks_per_chunk)


def one_or_two_groups(window: bool) -> SchedulerConfig:
    """A group of full attention. window: also a group with a sliding window of one block."""
    group = KVCacheGroup(HASH_TOKENS, GroupKind.SLIDING_WINDOW, window=HASH_TOKENS)
    groups = (KVCacheGroup(HASH_TOKENS), *([group] if window else []))
    return SchedulerConfig(groups=groups, hash_tokens=HASH_TOKENS)


def tokens_of(prompt: int, length: int, blocks_per_chunk: int) -> list[int]:
    """The tokens of the prompt with this number: `length` chunks, and one token after them.

    All prompts share the first half of their chunks, rounded down.
    """
    count = length * blocks_per_chunk * HASH_TOKENS
    shared = length // 2 * blocks_per_chunk * HASH_TOKENS
    return [*range(shared), *[1000 * (prompt + 1) + n for n in range(shared, count)], 7]


def draw_hand_over_options(random: Random) -> HandOverWorldOptions:
    """Draw options: small pools, and a few dozen disturbances."""
    length = random.randint(1, 3)
    window = random.random() < 0.3
    per_prompt = length * (2 if window else 1)
    return HandOverWorldOptions(
        prefill_slots=random.randint(per_prompt, per_prompt + 2),
        decode_slots=random.randint(max(1, per_prompt - 1), per_prompt + 1),
        workers=random.choice((1, 2, 2)),
        blocks_per_chunk=random.choice((1, 1, 2)),
        policy=draw_policy(random),
        prompts=random.randint(2, 12),
        length=length,
        window=window,
        readers=random.choice((1, 1, 2)),
        computes=random.randint(40, 100),
        decodes=random.choice((0, 0, 10)),
        hand_overs=random.randint(20, 60),
        waits=random.choice((5, 20)),
        resets=random.choice((0, 5)),
        failures=random.choice((0, 3)),
        cuts=random.choice((0, 5)),
        losses=random.choice((0, 1)),
        loads=random.choice((0, 40)),
        lies=random.choice((0, 0, 20)),
        share=random.choice((1.0, 1.0, 0.5)),
    )
