"""KV cache groups: layers that share block tables, with their own block size and reach.

A key is the engine's hash of all tokens up to the end of a chunk, and four bytes of group index. Equal keys
mean equal content. The engine's hash covers whatever else decides the content: LoRA adapter, cache salt,
images. Decode context parallelism and the chunk size decide how many tokens a chunk has, and so which hash
its key has.
"""

from __future__ import annotations

from enum import Enum
from math import lcm
from typing import NamedTuple

import msgspec

from kvsm.core.kv_events import GROUP_INDEX_BYTES
from kvsm.errors import ConfigError
from kvsm.events import OffloadConfig
from kvsm.system.field_types import check_types


class GroupKind(Enum):
    """Which earlier tokens the layers of a group read."""

    FULL = "full"
    """All earlier tokens: a hit needs all its blocks."""
    SLIDING_WINDOW = "sliding"
    """The last `window` tokens: a hit needs the blocks of these tokens."""
    CHUNKED_LOCAL = "chunked"
    """The tokens since the last multiple of `window`: a hit needs the blocks of these tokens."""
    MAMBA = "mamba"
    """One state, after the last block. The engine passes states at block boundaries."""


FULL, SLIDING_WINDOW, CHUNKED_LOCAL, MAMBA = GroupKind
"""Where kinds are compared in each step: before Python 3.12, a name is read ten times as fast as a member."""

WINDOWED = (SLIDING_WINDOW, CHUNKED_LOCAL)
"""The kinds of attention that do not need the blocks before their window."""


class KVCacheGroup(msgspec.Struct, frozen=True):
    """One group of layers."""

    block_tokens: int
    """Tokens of one device block, on all ranks that share a sequence: vLLM's block size times its decode
    context parallel size."""
    kind: GroupKind = GroupKind.FULL
    window: int = 0
    """Tokens of the sliding window, or of a chunk of chunked local attention."""
    drafter: bool = False
    """Whether its layers draft tokens: while a request decodes, its last block may still be rewritten."""
    event_kind: str = ""
    """The kind of its layers in KV events, in vLLM's words; empty: derived from `kind`."""
    event_window: int = 0
    """The window of its layers in KV events, without tokens kept for drafts; 0: `window`."""

    def __post_init__(self) -> None:
        check_types(self)

    def first_needed_token(self, end: int) -> int:
        """Return the first token whose KV is needed to compute the token at `end`."""
        if self.kind is FULL:
            return 0
        if self.kind is CHUNKED_LOCAL:
            return self.fresh_start(end)
        reach = self.window - 1 if self.kind is GroupKind.SLIDING_WINDOW else 1
        return max(0, end - reach)

    def fresh_start(self, end: int) -> int:
        """Return the last place up to `end` at which the layers need no earlier token: the start of the
        prompt, or of a chunk of chunked local attention."""
        return end - end % self.window if self.kind is CHUNKED_LOCAL else 0


class StoreMode(Enum):
    """When a block is stored: as soon as it is confirmed computed, or only when it nears eviction."""

    EAGER = "eager"
    LAZY = "lazy"


class LastStep(Enum):
    """What happens to transfers in flight when no unfinished request is left (flush at last step, S17)."""

    FLUSH = "flush"
    """The workers wait for them in that step."""
    KEEP_STEPPING = "keep stepping"
    """The engine continues to step while `has_pending_work()` is true."""


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine's blocks are offloaded.

    groups: in the order of the engine's block tables.
    hash_tokens: tokens of one block hash. 0: the block size of the first group.
    prompt_only: whether only blocks of prompts are stored.
    lazy_target_blocks: number of device blocks at the head of the free queue that the lazy store keeps free
        of content that the host lacks.
    null_block: the id in a block table where there is no block.
    """

    groups: tuple[KVCacheGroup, ...]
    hash_tokens: int = 0
    store: StoreMode = StoreMode.EAGER
    last_step: LastStep = LastStep.FLUSH
    prompt_only: bool = False
    lazy_target_blocks: int = 1024
    null_block: int = -1

    def __post_init__(self) -> None:
        check_types(self)
        if not self.groups:
            raise ConfigError("groups is empty; an engine has at least one KV cache group")
        if self.lazy_target_blocks < 1:
            raise ConfigError(f"lazy_target_blocks is {self.lazy_target_blocks}; it must be at least 1")
        for index, group in enumerate(self.groups):
            if group.block_tokens < 1 or group.block_tokens % self.tokens_per_hash:
                raise ConfigError(
                    f"group {index} has blocks of {group.block_tokens} tokens; "
                    f"they must be whole hashes of {self.tokens_per_hash} tokens (hash_tokens)"
                )
            if group.kind in WINDOWED and group.window < 1:
                raise ConfigError(f"group {index} has a window of {group.window} tokens; at least 1")

    @property
    def tokens_per_hash(self) -> int:
        """Tokens of one block hash."""
        return self.hash_tokens or self.groups[0].block_tokens

    @property
    def alignment(self) -> int:
        """A hit ends at a multiple of this number of tokens: where a block of every group ends."""
        return lcm(*[group.block_tokens for group in self.groups])

    @property
    def resumable(self) -> bool:
        """Whether a request whose load fails can continue from the blocks that the device had.

        Only with one group of full attention does the device have all earlier blocks. Other groups have only
        the blocks that the end of the load needs.
        """
        return len(self.groups) == 1 and self.groups[0].kind is FULL

    def check(self, core: OffloadConfig) -> None:
        """Raise `ConfigError` if these two configurations do not fit together."""
        if core.block_tokens not in (0, self.alignment):
            raise ConfigError(
                f"OffloadConfig.block_tokens is {core.block_tokens}, and a block of every group ends each "
                f"{self.alignment} tokens; give {self.alignment}, or 0 for not told"
            )
        if core.blocks_per_chunk > 1:
            if any(group.kind is GroupKind.MAMBA for group in self.groups):
                raise ConfigError("blocks_per_chunk is for attention; a mamba group has one state a block")
            if self.store is StoreMode.LAZY:
                raise ConfigError("a lazy store takes single blocks; it needs blocks_per_chunk 1")
        if core.store_threshold > 1 and self.store is StoreMode.LAZY:
            raise ConfigError("store_threshold counts offers; a lazy store has none")


def group_suffix(index: int) -> bytes:
    """Return the end of a key: its group index."""
    return index.to_bytes(GROUP_INDEX_BYTES, "big")


def block_key(block_hash: bytes, group: int) -> bytes:
    """Return the key of a block of this KV cache group, for `DevicePool.key_of` and `cached_block`.

    block_hash: the engine's hash of all tokens up to the end of the block: the last one of the block in
        `EngineRequest.block_hashes`.
    """
    return block_hash + group_suffix(group)


class KeyLayout(NamedTuple):
    """How keys are made from an engine's hashes, by group. It is the same for all requests.

    suffixes: the end of each key.
    hashes_per_chunk: number of hashes of a chunk. The last one is in its key.
    """

    suffixes: tuple[bytes, ...]
    hashes_per_chunk: tuple[int, ...]

    @classmethod
    def of(cls, config: SchedulerConfig, blocks_per_chunk: int) -> KeyLayout:
        """Return the layout for this configuration."""
        tokens = [group.block_tokens * blocks_per_chunk for group in config.groups]
        return cls(
            tuple([group_suffix(index) for index in range(len(tokens))]),
            tuple([count // config.tokens_per_hash for count in tokens]),
        )
