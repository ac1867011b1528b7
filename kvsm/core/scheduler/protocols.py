"""What the scheduler side needs of an engine. vLLM's `Request` is an `EngineRequest` as it is."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from kvsm.core.offloader import PendingHit


class EngineRequest(Protocol):
    """A request as the engine knows it. It is read here, and never written."""

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
        """Prompt and output so far. The last sampled token has no KV yet."""
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
        """How many of these are not confirmed: output of steps under way, and drafts."""
        ...

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """One hash for each `hash_tokens` tokens. It covers the whole prefix and all that decides its
        content."""
        ...

    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None:
        """The client's wishes.

        do_remote_decode: True to store everything.
        offload: False to store nothing.
        max_offload_tokens: how many tokens are stored at most.
        max_load_tokens: how many tokens are loaded at most.
        """
        ...

    @property
    def skip_reading_prefix_cache(self) -> bool:
        """Whether it must be computed even if it is cached. What it computes may be stored."""
        ...


class LoRARequest(Protocol):
    """The adapter of a request."""

    @property
    def adapter_id(self) -> int:
        """Number of the adapter, as vLLM counts them."""
        ...

    @property
    def name(self) -> str:
        """Its name for people."""
        ...


class MultiModalPosition(Protocol):
    """Where an item stands in the prompt, in tokens."""

    @property
    def offset(self) -> int:
        """Where the item begins (tokens)."""
        ...

    @property
    def length(self) -> int:
        """How long it is (tokens)."""
        ...


class MultiModalFeature(Protocol):
    """An image, or the like, in a prompt."""

    @property
    def identifier(self) -> str:
        """Hash of the item's content."""
        ...

    @property
    def mm_position(self) -> MultiModalPosition:
        """Where it stands in the prompt."""
        ...


class DescribedRequest(EngineRequest, Protocol):
    """What a `Publisher` reads of a request. Engines without KV events need none of it."""

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Prompt and output so far."""
        ...

    @property
    def lora_request(self) -> LoRARequest | None:
        """The adapter, if the request uses one."""
        ...

    @property
    def mm_features(self) -> Sequence[MultiModalFeature]:
        """In the order of their positions."""
        ...

    @property
    def cache_salt(self) -> str | None:
        """Separates the prefix caches of tenants."""
        ...

    @property
    def prompt_embeds(self) -> object | None:
        """The prompt, or a part of it, as embeddings. Then token ids do not say what the blocks hold."""
        ...


class DevicePool(Protocol):
    """The engine's device blocks, if it counts references to them.

    A block that is held is not in the free queue, is not given away, and keeps its content.
    """

    def touch(self, blocks: Sequence[int]) -> None:
        """One more holder for each of these."""

    def free_blocks(self, blocks: Sequence[int]) -> None:
        """One holder fewer for each of these. A block without a holder goes to the tail of the free queue."""

    def key_of(self, block: int) -> bytes | None:
        """Key (hash and group) of what the block caches, if anything."""

    def cached_block(self, key: bytes) -> int | None:
        """A block that caches the content of `key`, if one does."""

    def free_queue(self) -> Iterator[int]:
        """The free blocks in the order in which they will be taken."""


class StepOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine has decided for a step. `num_computed_tokens` of its requests does not count it yet.

    scheduled: requests that compute in it. An engine may leave out those that have confirmed no block since.
    new_block_ids: blocks added to the tables of running requests, by group.
    preempted: requests whose blocks were taken.
    boundary_states: mamba states that the engine has completed and holds during this step, each as (group,
        device block, tokens before the boundary).
    num_scheduled_tokens: how many tokens each request computes in it, as in vLLM's SchedulerOutput. Only
        `CheckedScheduler` looks at it. Of a request that is in `scheduled` and not here,
        the number is unknown; None: of all requests.
    """

    scheduled: Collection[str] = ()
    new_block_ids: Mapping[str, Sequence[Sequence[int]]] = {}
    preempted: Collection[str] = ()
    boundary_states: Mapping[str, Sequence[tuple[int, int, int]]] = {}
    num_scheduled_tokens: Mapping[str, int] | None = None


class TierBelow(Protocol):
    """A tier below the host, which has what the host has lost: `kvsm.tiers.DiskTier`."""

    def has(self, key: bytes) -> bool:
        """Whether it serves this key."""
        ...

    def fetch(self, hit: PendingHit) -> int | None:
        """Bring what the host lacks of this hit, now or in its turn. When all of it has come, a request that
        waits for it is matched.

        Returns the transfer of the host's ledger after which to ask again; None: nothing comes.
        """
        ...

    def stored(self, keys: Collection[bytes]) -> None:
        """The host has got these keys."""
        ...
