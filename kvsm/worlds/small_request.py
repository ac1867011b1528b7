"""A request of the small engine: its tokens, their hashes, and what the KV of each token must be.

The KV of a token is modelled as one cell, which names the token and all before it. So a wrong copy is seen by
what a request reads later (S12, S15).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any
from zlib import crc32

Cell = bytes | None
"""The KV of one token; None: nothing was ever written there."""

NULL = -1
"""What stands in a block table where there is no block."""

HASH_TOKENS = 4
"""Tokens that one block hash covers."""


def chain(previous: bytes, *parts: bytes) -> bytes:
    """The hash of what comes behind `previous`."""
    return blake2b(previous + b"".join(parts), digest_size=32).digest()


class SmallRequest:
    """Satisfies `EngineRequest`, and `DescribedRequest` as one of text alone. outputs: how many tokens it
    decodes. extras: what else decides its content (a LoRA adapter, a salt, an image), in its hashes as in
    vLLM's."""

    prompt_embeds = cache_salt = None
    mm_features = ()

    def __init__(
        self,
        name: str,
        prompt: Sequence[int],
        outputs: int = 1,
        parameters: Mapping[str, Any] | None = None,
        skip_reading: bool = False,
        extras: bytes = b"",
    ) -> None:
        self.request_id = name
        self.all_token_ids = list(prompt)
        self.num_prompt_tokens, self.outputs = len(prompt), outputs
        self.num_computed_tokens = self.num_output_placeholders = 0
        self.kv_transfer_params = parameters
        self.skip_reading_prefix_cache = skip_reading
        self.lora_request = None
        self._extras = extras
        self.block_hashes: list[bytes] = []
        self.cells: list[bytes] = []
        """What the KV of each token must be."""
        self.tables: list[list[int]] = []
        """Its device blocks, by group."""
        self.loading = self.finished = self.aborted = False
        self.hash_tokens()

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def done(self) -> bool:
        return self.num_tokens - self.num_prompt_tokens >= self.outputs

    def sample(self) -> None:
        """Decode one token: another one for each request and place, and the same whenever it is decoded."""
        self.all_token_ids.append(crc32(f"{self.request_id} {self.num_tokens}".encode()))
        self.hash_tokens()

    def append(self, token: int) -> None:
        self.all_token_ids.append(token)
        self.hash_tokens()

    def hash_tokens(self) -> None:
        """Hash the tokens that have come since."""
        for token in self.all_token_ids[len(self.cells) :]:
            previous = self.cells[-1] if self.cells else chain(b"", self._extras)
            self.cells.append(chain(previous, token.to_bytes(4, "big")))
            if len(self.cells) % HASH_TOKENS == 0:
                self.block_hashes.append(self.cells[-1])

    def cells_of(self, block: int, block_tokens: int) -> list[bytes]:
        """What its block of this number must hold."""
        return self.cells[block * block_tokens : (block + 1) * block_tokens]
