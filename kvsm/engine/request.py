"""A request as the engine sees it: its blocks by key and by id, and how far its computation has come."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from kvsm.traces import BLOCK_TOKENS, TraceRequest, block_keys, output_key


class RequestStatus(Enum):
    """Where a request stands in the engine's scheduler."""

    WAITING = "waiting"
    LOADING = "loading"
    """Its blocks are allocated, and a copy from the host writes the first of them."""
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


class Request:
    """One request, from its arrival to its end.

    Its tokens are the prompt and the output so far. Of these, the first `num_computed` have their KV in
    the block table. While it decodes there is exactly one more: the token that was sampled last is
    computed in the next step, and that of the last step never.

    Every running request decodes one token in every step, so that nothing needs to be counted for it step
    by step: its counts are those at the end of step `counted_at`, and `count_to` brings them forward.
    """

    __slots__ = (
        "block_table",
        "counted_at",
        "deferred",
        "deferred_at",
        "full_blocks",
        "input_length",
        "name",
        "num_computed",
        "num_output",
        "output_length",
        "preemptions",
        "prompt_keys",
        "status",
    )

    def __init__(self, name: str, trace: TraceRequest) -> None:
        self.name = name
        self.input_length, self.output_length = trace.input_length, trace.output_length
        self.prompt_keys = block_keys(trace.hash_ids[: trace.input_length // BLOCK_TOKENS])
        """Of the full blocks of the prompt. The last block, if not full, is filled by output."""
        self.status = RequestStatus.WAITING
        self.block_table: list[int] = []
        self.num_computed = self.num_output = self.counted_at = 0
        self.full_blocks = 0
        """Its first blocks that are full and have been cached and offered for a store."""
        self.deferred: dict[bytes, int] = {}
        """Keys to offer again, and the device blocks that hold them."""
        self.deferred_at = 0
        """How many stores had ended when these were deferred."""
        self.preemptions = 0

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far: what must be computed before the next token is sampled."""
        return self.input_length + self.num_output

    @property
    def is_done(self) -> bool:
        return self.num_output >= self.output_length

    def keys(self, first: int, last: int) -> list[bytes]:
        """Keys of its blocks from `first` up to `last`, which are full or will be."""
        prompt = self.prompt_keys
        from_output = range(max(first, len(prompt)), last)
        return prompt[first:last] + [output_key(self.name, index) for index in from_output]

    def matchable_keys(self) -> list[bytes]:
        """Keys that a match may cover: at least one token is left to compute (S18)."""
        return self.keys(0, (self.num_tokens - 1) // BLOCK_TOKENS)

    def count_to(self, step: int) -> None:
        """Bring the counts of a request that decodes to the end of `step`."""
        decoded = step - self.counted_at
        self.num_computed += decoded
        self.num_output += decoded
        self.counted_at = step

    def next_event(self) -> int:
        """The next step, for a request that decodes, at whose end a block is full or the output ends."""
        to_full_block = BLOCK_TOKENS - self.num_computed % BLOCK_TOKENS
        return self.counted_at + min(to_full_block, self.output_length - self.num_output)

    def take_deferred(self) -> tuple[Sequence[bytes], Sequence[int]]:
        """(keys, device blocks) to offer again; they are forgotten here."""
        deferred, self.deferred = self.deferred, {}
        return tuple(deferred), tuple(deferred.values())

    def restart(self) -> None:
        """Back to waiting, without a block: what it has sampled stays, what it computed is gone."""
        self.status = RequestStatus.WAITING
        self.block_table = []
        self.num_computed = self.full_blocks = 0
        self.deferred = {}
        self.preemptions += 1
