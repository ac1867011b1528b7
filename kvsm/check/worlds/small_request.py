"""A request of the small engine: its tokens, their hashes, and the expected KV of each token.

The KV of a token is modelled by one cell: the hash of all tokens up to it. So a wrong copy is detected when a
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
"""The KV of one token; None if it was never written."""

NULL = -1
"""The null block, which fills a block table where a group needs no block."""

HASH_TOKENS = 4
"""Tokens that one block hash covers."""


@lru_cache(maxsize=1 << 12)
def chain(previous: bytes, *parts: bytes) -> bytes:
    """The hash of `previous` followed by these parts."""
    return blake2b(previous + b"".join(parts), digest_size=32).digest()


def decoded_token(request_id: str, place: int) -> int:
    """The token that a request decodes at this position."""
    return crc32(f"{request_id} {place}".encode())


def first_read(group: KVCacheGroup, end: int) -> int:
    """The first token whose KV the layers of a group read to compute the token at `end`."""
    if group.kind is GroupKind.FULL:
        return 0
    if group.kind is GroupKind.CHUNKED_LOCAL:
        return end // group.window * group.window
    seen = group.window if group.kind is GroupKind.SLIDING_WINDOW else 2
    return max(0, end + 1 - seen)


_WISH = "constant for a request, which is named by its place among all requests"
_FOLLOWS = "it follows from the tokens"


@declared
class SmallRequest:
    """An `EngineRequest`, and a `DescribedRequest` of text or of embeddings.

    outputs: how many tokens it decodes.
    parameters: its `kv_transfer_params`.
    skip_reading: whether it must not read the caches (`skip_reading_prefix_cache`).
    extras: what its KV depends on besides tokens, such as a LoRA adapter or a salt; hashed as in vLLM.
    parts: for a session, the tokens of the later parts of its prompt.
    embeds: whether its prompt consists of embeddings, so that token ids do not identify its blocks' content.
    """

    cache_salt = lora_request = None
    mm_features = ()

    request_id: Annotated[str, Dropped("it is the place of the request among all requests")]
    all_token_ids: Annotated[list[int], Seen(lambda request, _: request.num_tokens)]
    """Compared by their number alone: the request and this number determine the ids."""
    num_prompt_tokens: Annotated[int, Dropped(_WISH)]
    outputs: Annotated[int, Dropped(_WISH)]
    num_computed_tokens: Annotated[int, KEPT]
    num_output_placeholders: Annotated[int, KEPT]
    kv_transfer_params: Annotated[Mapping[str, Any] | None, Dropped(_WISH)]
    skip_reading_prefix_cache: Annotated[bool, Dropped(_WISH)]
    extras: Annotated[bytes, Dropped(_WISH)]
    prompt_embeds: Annotated[bytes | None, Dropped(_WISH)]
    parts: Annotated[list[tuple[int, ...]], Seen(lambda request, _: len(request.parts))]
    resumed: Annotated[bool, KEPT]
    """Whether its next part has begun, but has no blocks yet."""
    block_hashes: Annotated[list[bytes], Dropped(_FOLLOWS)]
    cells: Annotated[list[bytes], Dropped(_FOLLOWS)]
    """The expected KV of each token."""
    tables: Annotated[list[list[int]], Seen(lambda request, names: names.tables(request.tables))]
    """Its block table for each group."""
    loading: Annotated[bool, KEPT]
    admitted: Annotated[bool, Dropped("figures of a run; no decision reads it")]
    """Whether it has had blocks before."""
    aborted: Annotated[bool, Dropped("only tests read it")]
    finished: Annotated[bool, Dropped("`SmallEngine.requests` compares it, and nothing else of the request")]

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
        """Decode one token, which is determined by the request and the position."""
        self.all_token_ids.append(decoded_token(self.request_id, self.num_tokens))
        self.hash_tokens()

    def begin_next_part(self) -> bool:
        """Append the next part of a session's prompt. Returns False if there is none.

        As in vLLM, the last sampled token, which was not computed, is replaced by the part.
        """
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
        """Hash the tokens that were added since the last call."""
        for token in self.all_token_ids[len(self.cells) :]:
            previous = self.cells[-1] if self.cells else chain(b"", self.extras)
            self.cells.append(chain(previous, token.to_bytes(4, "big")))
            if len(self.cells) % HASH_TOKENS == 0:
                self.block_hashes.append(self.cells[-1])

    def cells_of(self, block: int, block_tokens: int) -> list[bytes]:
        """The expected KV of the block with this number."""
        return self.cells[block * block_tokens : (block + 1) * block_tokens]
