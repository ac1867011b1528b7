"""A tiny transformer with random weights. Its attention reads keys and values from a paged KV cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvsm.core.scheduler import GroupKind, KVCacheGroup

BLOCK, WINDOW = 8, 20  # tokens
GROUPS = (KVCacheGroup(BLOCK), KVCacheGroup(BLOCK, GroupKind.SLIDING_WINDOW, WINDOW))
LAYERS, HEADS, HEAD_SIZE, VOCABULARY, MAX_TOKENS = 4, 2, 8, 64, 512
SIZE = HEADS * HEAD_SIZE
torch.set_num_threads(1)  # more threads only cost time with tensors this small


class Model:
    """The weights, and the KV cache of `num_blocks` device blocks.

    Layers 0 and 2 have full attention (group 0), layers 1 and 3 a sliding window (group 1). A block belongs
    to one group at a time, so a tensor is shared by a layer of each group: layers 0 and 1, layers 2 and 3.
    """

    def __init__(self, version: str, num_blocks: int) -> None:
        shape = num_blocks, BLOCK, HEADS, HEAD_SIZE
        # float64: the tokens must not depend on how a prompt is cut into chunks.
        self.keys = [torch.zeros(shape, dtype=torch.float64) for _ in range(LAYERS // len(GROUPS))]
        self.values = [torch.zeros(shape, dtype=torch.float64) for _ in range(LAYERS // len(GROUPS))]
        self.load_weights(version)

    def load_weights(self, version: str) -> None:
        """Replace the weights. A version gives the same weights in every process."""
        self.version = version
        torch.manual_seed(int.from_bytes(version.encode(), "big") % (1 << 63))
        self.embedding = torch.randn(VOCABULARY, SIZE, dtype=torch.float64)
        self.positions = torch.randn(MAX_TOKENS, SIZE, dtype=torch.float64)
        self.projections = torch.randn(LAYERS, 4, SIZE, SIZE, dtype=torch.float64) / SIZE**0.5

    def forward(self, tokens: Sequence[int], start: int, tables: Sequence[Sequence[int]]) -> int:
        """Compute `tokens`, which follow the first `start` tokens of a request. Return the next token.

        Writes the KV of `tokens`, and reads the KV of all tokens before them. tables: the request's blocks,
        by group.
        """
        end = start + len(tokens)
        now, past = torch.arange(start, end), torch.arange(end)
        hidden = self.embedding[list(tokens)] + self.positions[start:end]
        for layer, (query, key, value, output) in enumerate(self.projections):
            group, place = layer % len(GROUPS), layer // len(GROUPS)
            keys, values, table = self.keys[place], self.values[place], torch.tensor(tables[group])
            slots = table[now // BLOCK], now % BLOCK
            keys[slots] = (hidden @ key).unflatten(1, (HEADS, HEAD_SIZE))
            values[slots] = (hidden @ value).unflatten(1, (HEADS, HEAD_SIZE))
            blocks = table.clamp(min=0)  # there is no block before the window: it is masked below
            scores = torch.einsum(
                "qhd,khd->hqk",
                (hidden @ query).unflatten(1, (HEADS, HEAD_SIZE)),
                keys[blocks].flatten(0, 1)[:end],
            )
            first = torch.tensor([GROUPS[group].first_needed_token(int(token)) for token in now])
            is_read = (past <= now[:, None]) & (past >= first[:, None])
            weights = scores.masked_fill(~is_read, -torch.inf).softmax(-1)
            read = torch.einsum("hqk,khd->qhd", weights, values[blocks].flatten(0, 1)[:end])
            hidden = hidden + torch.tanh(read.flatten(1) @ output)
        return int((hidden[-1] @ self.embedding.T).argmax())
