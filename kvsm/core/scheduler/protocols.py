"""The interface that the scheduler side needs from an engine. vLLM's `Request` is an `EngineRequest`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from kvsm.core.offloader import PendingHit


class EngineRequest(Protocol):
    """A request of the engine. kvsm only reads it."""

    @property
    def request_id(self) -> str:
        """The engine's name of the request, unique among its unfinished requests."""
        ...

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt (tokens)."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of the output so far. The last sampled token has no KV yet."""
        ...

    @property
    def num_computed_tokens(self) -> int:
        """Tokens that have KV, or that an earlier step computes now.

        When `build_connector_meta` is called, the tokens of the step that it decides are not counted yet. The
        engine counts them after the call, as vLLM does. kvsm stores what is counted: if they were counted
        before, blocks would be stored that no step has computed. `CheckedScheduler` finds this mistake.
        """
        ...

    @property
    def num_output_placeholders(self) -> int:
        """Number of computed tokens that are not confirmed: output of steps in flight, and drafts."""
        ...

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """One hash for each `hash_tokens` tokens. Each covers the whole prefix and all that decides its
        content."""
        ...

    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None:
        """The parameters of the client; see `kvsm.core.scheduler.request_params`. None: it sent none.

        do_remote_decode: True to store everything.
        offload: False to store nothing.
        max_offload_tokens: the most tokens that are stored.
        max_load_tokens: the most tokens that are loaded.
        """
        ...

    @property
    def skip_reading_prefix_cache(self) -> bool:
        """Whether it must be computed even if it is cached. Its blocks may be stored."""
        ...


class LoRARequest(Protocol):
    """The adapter of a request."""

    @property
    def adapter_id(self) -> int:
        """Number of the adapter, as vLLM counts them."""
        ...

    @property
    def name(self) -> str:
        """Name of the adapter."""
        ...


class MultiModalPosition(Protocol):
    """The position of an item in the prompt."""

    @property
    def offset(self) -> int:
        """Number of tokens before the item."""
        ...

    @property
    def length(self) -> int:
        """Number of tokens of the item."""
        ...


class MultiModalFeature(Protocol):
    """An image or another multimodal item in a prompt."""

    @property
    def identifier(self) -> str:
        """Hash of the item's content."""
        ...

    @property
    def mm_position(self) -> MultiModalPosition:
        """Its position in the prompt."""
        ...


class DescribedRequest(EngineRequest, Protocol):
    """A request with the facts that KV events describe. Engines without KV events need none of them."""

    @property
    def all_token_ids(self) -> Sequence[int]:
        """The tokens of the prompt and of the output so far."""
        ...

    @property
    def lora_request(self) -> LoRARequest | None:
        """The adapter of the request; None if it uses none."""
        ...

    @property
    def mm_features(self) -> Sequence[MultiModalFeature]:
        """The multimodal items, in the order of their positions."""
        ...

    @property
    def cache_salt(self) -> str | None:
        """The salt that separates the prefix caches of tenants; None if there is none."""
        ...

    @property
    def prompt_embeds(self) -> object | None:
        """The prompt, or a part of it, as embeddings; None if it has only tokens. With embeddings, token ids
        do not describe the content of blocks."""
        ...


class DevicePool(Protocol):
    """The engine's device blocks, if it counts references to them.

    A block with a reference is not in the free queue, is not allocated, and keeps its content.

    A pool may also have `keys_of(blocks)`, which returns a list of `key_of` of each block. Then the lazy
    store asks for the keys of many blocks in one call.
    """

    def touch(self, blocks: Sequence[int]) -> None:
        """Add a reference to each block."""

    def free_blocks(self, blocks: Sequence[int]) -> None:
        """Drop a reference to each block. A block without references goes to the tail of the free queue."""

    def key_of(self, block: int) -> bytes | None:
        """Return the key (hash and group) of the content that the block caches; None if it caches none.

        A reset of the engine's prefix cache must remove all keys, including those of blocks with references.
        """

    def cached_block(self, key: bytes) -> int | None:
        """Return a block that caches the content of `key`; None if no block does."""

    def free_queue(self) -> Iterator[int]:
        """Iterate over the free blocks in the order in which the engine will allocate them."""


class StepOutput(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's decisions for a step, whose tokens `num_computed_tokens` does not count yet.

    scheduled: requests that compute in the step. An engine may leave out requests that have confirmed no
        block since their last step.
    new_block_ids: blocks added to the tables of running requests, by group.
    preempted: requests whose blocks were taken.
    boundary_states: mamba states that the engine has completed and holds during this step, each as (group,
        device block, tokens before the boundary).
    num_scheduled_tokens: number of tokens that each request computes in the step, as in vLLM's
        SchedulerOutput. Only `CheckedScheduler` reads it. For a request that is in `scheduled` and not here,
        the number is unknown. None: unknown for all requests.
    """

    scheduled: Collection[str] = ()
    new_block_ids: Mapping[str, Sequence[Sequence[int]]] = {}
    preempted: Collection[str] = ()
    boundary_states: Mapping[str, Sequence[tuple[int, int, int]]] = {}
    num_scheduled_tokens: Mapping[str, int] | None = None


class TierBelow(Protocol):
    """A tier below the host, which keeps blocks that the host evicts: `kvsm.tiers.DiskTier`."""

    def has(self, key: bytes) -> bool:
        """Whether it can serve this key."""
        ...

    def fetch(self, hit: PendingHit) -> int | None:
        """Copy the blocks of this hit that the host lacks, now or in turn. When all are on the host, the
        waiting request is matched.

        Returns the transfer of the host's ledger after which to call again; None if nothing is copied.
        """
        ...

    def stored(self, keys: Collection[bytes]) -> None:
        """Note that these keys were stored on the host."""
        ...
