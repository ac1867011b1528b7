"""A request of the serving engine: its block hashes, its block tables, and how far it is computed."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from kvsm.core.scheduler import SchedulerConfig
from kvsm.core.scheduler.groups import group_suffix
from kvsm.serving.traces import TraceRequest, output_hash, prompt_hashes


class ServingStatus(Enum):
    """Where a request stands in the serving scheduler."""

    WAITING = "waiting"
    LOADING = "loading"
    """It has blocks, and a copy from the host writes some of them."""
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


class ServingRequest:
    """One request, from its arrival to its end. It is an `EngineRequest` of the offload scheduler.

    Its tokens are the prompt and the output so far. The first `num_computed_tokens` of them have their KV in
    the block tables, one table for each KV cache group. While it decodes one token has no KV yet: the one
    that was sampled last. It is computed in the next step; the token of the last step is never computed.

    A decoding request computes one token in every step, so its counts need no work step by step. They are
    those at the end of step `counted_at`, and `count_to` brings them forward.
    """

    __slots__ = (
        "_hash_tokens",
        "_key_strides",
        "block_hashes",
        "counted_at",
        "keys",
        "kv_transfer_params",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_output_placeholders",
        "num_output_tokens",
        "num_prompt_tokens",
        "output_length",
        "preemptions",
        "request_id",
        "skip_reading_prefix_cache",
        "status",
        "tables",
    )

    def __init__(
        self,
        request_id: str,
        trace: TraceRequest,
        config: SchedulerConfig,
        block_tokens: int,
        *,
        kv_transfer_params: Mapping[str, Any] | None = None,
        skip_reading_prefix_cache: bool = False,
    ) -> None:
        """block_tokens: how many tokens a hash id of the trace stands for."""
        self.request_id = request_id
        self.num_prompt_tokens, self.output_length = trace.input_length, trace.output_length
        self.kv_transfer_params = kv_transfer_params
        self.skip_reading_prefix_cache = skip_reading_prefix_cache
        self.status = ServingStatus.WAITING
        self.tables: list[list[int]] = [[] for _ in config.groups]
        self.num_computed_tokens = self.num_output_tokens = self.counted_at = 0
        self.num_output_placeholders = 0
        self.num_cached_tokens = 0
        """How many tokens have their full blocks in the prefix cache of the device."""
        self.preemptions = 0
        self._hash_tokens = config.tokens_per_hash
        self._key_strides = [group.block_tokens // self._hash_tokens for group in config.groups]
        self.block_hashes = prompt_hashes(trace, block_tokens, self._hash_tokens)
        """One for every `tokens_per_hash` tokens."""
        self.keys: list[list[bytes]] = [[] for _ in config.groups]
        """For each group, one key for each full block."""
        self._update_keys()

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far. All of them are computed before the next token is sampled."""
        return self.num_prompt_tokens + self.num_output_tokens

    @property
    def is_done(self) -> bool:
        """Whether its whole output is sampled."""
        return self.num_output_tokens >= self.output_length

    def compute(self, tokens: int) -> bool:
        """Give `tokens` more tokens their KV. Returns whether all have it; then the next one is sampled."""
        self.num_computed_tokens += tokens
        if self.num_computed_tokens < self.num_tokens:
            return False
        self._sample(1)
        return True

    def count_to(self, step: int) -> None:
        """Bring the counts of a decoding request forward to the end of `step`."""
        decoded = step - self.counted_at
        self.num_computed_tokens += decoded
        self.counted_at = step
        self._sample(decoded)

    def _sample(self, tokens: int) -> None:
        self.num_output_tokens += tokens
        hashes = self.block_hashes
        if len(hashes) < self.num_tokens // self._hash_tokens:
            hashes += [
                output_hash(self.request_id, index)
                for index in range(len(hashes), self.num_tokens // self._hash_tokens)
            ]
            self._update_keys()

    def _update_keys(self) -> None:
        hashes = self.block_hashes
        for group, (keys, stride) in enumerate(zip(self.keys, self._key_strides)):
            suffix = group_suffix(group)
            keys += [hashes[n] + suffix for n in range((len(keys) + 1) * stride - 1, len(hashes), stride)]

    def restart(self) -> None:
        """Back to waiting, without blocks. It keeps its sampled tokens, and computes all tokens again."""
        self.status = ServingStatus.WAITING
        self.tables = [[] for _ in self.tables]
        self.num_computed_tokens = self.num_cached_tokens = 0
        self.preemptions += 1
