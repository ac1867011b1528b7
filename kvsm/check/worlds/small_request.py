"""A request of the small engine: its tokens, their hashes, and what the KV of each token must be.

The KV of a token is one cell, which names the token and all tokens before it. So a wrong copy shows when a
request reads it (correct bytes, S15).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Annotated, Any
from zlib import crc32

from kvsm.core.ledger.canonical import KEPT, Dropped, Seen, declared
from kvsm.core.scheduler import GroupKind, KVCacheGroup

Cell = bytes | None
"""The KV of one token. None if nothing was ever written there."""

NULL = -1
"""The null block: what a block table holds where there is no block."""

HASH_TOKENS = 4
"""Tokens that one block hash covers."""


@lru_cache(maxsize=1 << 12)
def chain(previous: bytes, *parts: bytes) -> bytes:
    """The hash of these parts behind `previous`."""
    return blake2b(previous + b"".join(parts), digest_size=32).digest()


def decoded_token(request_id: str, place: int) -> int:
    """The token that a request decodes at this place."""
    return crc32(f"{request_id} {place}".encode())


def first_read(group: KVCacheGroup, end: int) -> int:
    """The first token that the layers of a group look at to compute the token at `end`."""
    if group.kind is GroupKind.FULL:
        return 0
    if group.kind is GroupKind.CHUNKED_LOCAL:
        return end // group.window * group.window
    seen = group.window if group.kind is GroupKind.SLIDING_WINDOW else 2
    return max(0, end + 1 - seen)


_WISH = "a wish of the request, which never changes; the place of the request says which wish"
_FOLLOWS = "it follows from the tokens"


@declared
class SmallRequest:
    """An `EngineRequest`, and a `DescribedRequest` of text or of embeddings.

    outputs: how many tokens it decodes.
    parameters: its `kv_transfer_params`.
    skip_reading: whether it reads no cache (`skip_reading_prefix_cache`).
    extras: what else decides its content, such as a LoRA adapter or a salt. It is in the hashes, as in vLLM.
    parts: of a session, the tokens of the later parts of its prompt.
    embeds: its prompt is given as embeddings, so its tokens do not say what its blocks hold.
    """

    cache_salt = lora_request = None
    mm_features = ()

    request_id: Annotated[str, Dropped("it is the place of the request among all requests")]
    all_token_ids: Annotated[list[int], Seen(lambda one, _: one.num_tokens)]
    """Which tokens these are follows from the request and their number."""
    num_prompt_tokens: Annotated[int, Dropped(_WISH)]
    outputs: Annotated[int, Dropped(_WISH)]
    num_computed_tokens: Annotated[int, KEPT]
    num_output_placeholders: Annotated[int, KEPT]
    kv_transfer_params: Annotated[Mapping[str, Any] | None, Dropped(_WISH)]
    skip_reading_prefix_cache: Annotated[bool, Dropped(_WISH)]
    extras: Annotated[bytes, Dropped(_WISH)]
    prompt_embeds: Annotated[bytes | None, Dropped(_WISH)]
    parts: Annotated[list[tuple[int, ...]], Seen(lambda one, _: len(one.parts))]
    resumed: Annotated[bool, KEPT]
    """Its next part has come, and it got no blocks for it yet."""
    block_hashes: Annotated[list[bytes], Dropped(_FOLLOWS)]
    cells: Annotated[list[bytes], Dropped(_FOLLOWS)]
    """What the KV of each token must be."""
    tables: Annotated[list[list[int]], Seen(lambda one, names: names.tables(one.tables))]
    """Its device blocks, by group."""
    loading: Annotated[bool, KEPT]
    admitted: Annotated[bool, Dropped("figures of a run; nothing is decided by it")]
    """Whether it has had blocks before."""
    aborted: Annotated[bool, Dropped("it is there for tests")]
    finished: Annotated[bool, Dropped("a request that is finished is compared as finished, and no further")]

    def __init__(
        self,
        name: str,
        prompt: Sequence[int],
        outputs: int = 1,
        parameters: Mapping[str, Any] | None = None,
        skip_reading: bool = False,
        extras: bytes = b"",
        parts: Sequence[tuple[int, ...]] = (),
        embeds: bool = False,
    ) -> None:
        self.request_id = name
        self.all_token_ids = list(prompt)
        self.num_prompt_tokens, self.outputs = len(prompt), outputs
        self.num_computed_tokens = self.num_output_placeholders = 0
        self.kv_transfer_params = parameters
        self.skip_reading_prefix_cache = skip_reading
        self.prompt_embeds = b"embeddings" if embeds else None
        self.extras = extras + (self.prompt_embeds or b"")
        self.parts, self.resumed = list(parts), False
        self.block_hashes, self.cells, self.tables = [], [], []
        self.loading = self.finished = self.aborted = self.admitted = False
        self.hash_tokens()

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def done(self) -> bool:
        """Whether it has decoded all its tokens."""
        return self.num_tokens - self.num_prompt_tokens >= self.outputs

    def sample(self) -> None:
        """Decode one token. The request and the place decide which one."""
        self.all_token_ids.append(decoded_token(self.request_id, self.num_tokens))
        self.hash_tokens()

    def go_on(self) -> bool:
        """Take the next part of a session. Returns whether there is one. As in vLLM, what was sampled last
        and not computed goes: the part takes its place."""
        if not self.parts:
            return False
        computed = self.num_computed_tokens
        del self.all_token_ids[computed:], self.cells[computed:]
        del self.block_hashes[computed // HASH_TOKENS :]
        self.all_token_ids += self.parts.pop(0)
        self.num_prompt_tokens, self.resumed = self.num_tokens, True
        self.hash_tokens()
        return True

    def append(self, token: int) -> None:
        """Add this token to its output."""
        self.all_token_ids.append(token)
        self.hash_tokens()

    def hash_tokens(self) -> None:
        """Hash the tokens that came since the last call."""
        for token in self.all_token_ids[len(self.cells) :]:
            previous = self.cells[-1] if self.cells else chain(b"", self.extras)
            self.cells.append(chain(previous, token.to_bytes(4, "big")))
            if len(self.cells) % HASH_TOKENS == 0:
                self.block_hashes.append(self.cells[-1])

    def cells_of(self, block: int, block_tokens: int) -> list[bytes]:
        """What the block of this number must hold."""
        return self.cells[block * block_tokens : (block + 1) * block_tokens]
