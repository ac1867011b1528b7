"""A request of the serving engine: its block hashes, its block tables, and its token counts."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from kvsm.core.scheduler import SchedulerConfig
from kvsm.core.scheduler.groups import group_suffix
from kvsm.serving.traces import TraceRequest, output_hash, prompt_hashes


class ServingStatus(Enum):
    """The status of a request in the serving scheduler."""

    WAITING = "waiting"
    LOADING = "loading"
    """It has blocks, and a copy from the host writes some of them."""
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


class ServingRequest:
    """One request, from its arrival to its end. It is an `EngineRequest` of the offload scheduler.

    Its tokens are the prompt and the output so far. The first `num_computed_tokens` of them have their KV in
    the block tables, one table for each KV cache group. While it decodes, the token that was sampled last has
    no KV yet: it is computed in the next step. The token of the last step is never computed.

    A decoding request computes one token in every step, so its counts are not updated step by step. They hold
    for the end of step `counted_at`, and `count_to` updates them.
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
        """Make a request. block_tokens: the number of tokens of a hash id in the trace."""
        self.request_id = request_id
        self.num_prompt_tokens, self.output_length = trace.input_length, trace.output_length
        self.kv_transfer_params = kv_transfer_params
        self.skip_reading_prefix_cache = skip_reading_prefix_cache
        self.status = ServingStatus.WAITING
        self.tables: list[list[int]] = [[] for _ in config.groups]
        self.num_computed_tokens = self.num_output_tokens = self.counted_at = 0
        self.num_output_placeholders = 0
        self.num_cached_tokens = 0
        """The number of tokens whose full blocks are in the prefix cache of the device."""
        self.preemptions = 0
        self._hash_tokens = config.tokens_per_hash
        self._key_strides = [group.block_tokens // self._hash_tokens for group in config.groups]
        self.block_hashes = prompt_hashes(trace, block_tokens, self._hash_tokens)
        """One hash for every `tokens_per_hash` tokens."""
        self.keys: list[list[bytes]] = [[] for _ in config.groups]
        """For each group, one key for each full block."""
        self._update_keys()

    @property
    def num_tokens(self) -> int:
        """The number of tokens of prompt and output so far. All must be computed to sample the next one."""
        return self.num_prompt_tokens + self.num_output_tokens

    @property
    def is_done(self) -> bool:
        """Whether the whole output has been sampled."""
        return self.num_output_tokens >= self.output_length

    def compute(self, tokens: int) -> bool:
        """Count `tokens` more tokens as computed. If all tokens are, sample the next one and return True."""
        self.num_computed_tokens += tokens
        if self.num_computed_tokens < self.num_tokens:
            return False
        self._sample(1)
        return True

    def count_to(self, step: int) -> None:
        """Update the counts of a decoding request to the end of `step`."""
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
        """Make the request wait again, without blocks. Sampled tokens are kept, but all KV is recomputed."""
        self.status = ServingStatus.WAITING
        self.tables = [[] for _ in self.tables]
        self.num_computed_tokens = self.num_cached_tokens = 0
        self.preemptions += 1
