"""A request as far as it is known here: what the engine told, and what follows from it.

What was decided about it (its pins, its cursors, its load) is in the ledger; what is here is lost with
the engine that told it, and not missed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from sys import maxsize
from typing import Any

from kvsm.scheduler.groups import GroupKind, SchedulerConfig, group_suffix
from kvsm.scheduler.protocols import EngineRequest

_LOGGER = logging.getLogger("kvsm")


class TrackedRequest:
    """local: tokens that the device had at its last match. admitted_at: the event after which it got
    its blocks. trusted: tokens that count as computed, whatever the engine says, while a load writes the
    others or after it failed; None: all."""

    __slots__ = (
        "_chunk_hashes",
        "_suffixes",
        "admitted_at",
        "keys",
        "local",
        "max_load_tokens",
        "max_store_tokens",
        "name",
        "next_offer",
        "remote_decode",
        "request",
        "tables",
        "trusted",
    )

    def __init__(self, request: EngineRequest, config: SchedulerConfig, blocks_per_chunk: int) -> None:
        self.request, self.name = request, request.request_id
        groups = range(len(config.groups))
        self.tables: list[list[int]] = [[] for _ in groups]
        self.keys: list[list[bytes]] = [[] for _ in groups]
        self._suffixes = [group_suffix(index) for index in groups]
        self._chunk_hashes = [
            group.block_tokens * blocks_per_chunk // config.tokens_per_hash for group in config.groups
        ]
        self.local = self.admitted_at = 0
        self.trusted: int | None = None
        self.next_offer = 0
        """It has something to offer when so many tokens are confirmed."""
        self._take_parameters(request.kv_transfer_params or {}, config)

    def _take_parameters(self, parameters: Mapping[str, Any], config: SchedulerConfig) -> None:
        self.remote_decode = parameters.get("do_remote_decode") is True
        self.max_load_tokens = self._limit(parameters, "max_load_tokens")
        self.max_store_tokens = self._limit(parameters, "max_offload_tokens")
        if config.prompt_only:
            self.max_store_tokens = min(self.max_store_tokens, self.request.num_prompt_tokens)
        if parameters.get("offload") is False:
            self.max_store_tokens = 0
        if self.remote_decode:
            # The decoder needs all of it (S16).
            self.max_store_tokens = maxsize

    def _limit(self, parameters: Mapping[str, Any], name: str) -> int:
        value = parameters.get(name)
        if value is None:
            return maxsize
        if type(value) is int and value >= 0:
            return value
        # It comes from a client: what it meant cannot be known, and the engine must not stop for it.
        _LOGGER.warning("request %s: %s is %r, not a number of tokens; ignored", self.name, name, value)
        return maxsize

    def update_keys(self) -> None:
        """Take in the hashes that the engine has made since. It may have taken back its last ones: in a
        request that is resumed the next part of its prompt comes in the place of what was generated last."""
        hashes = self.request.block_hashes
        for keys, stride, suffix in zip(self.keys, self._chunk_hashes, self._suffixes):
            # A hash is of all tokens up to its end: if the last one still stands, all before it do.
            last = len(keys) * stride - 1
            while keys and (last >= len(hashes) or keys[-1] != hashes[last] + suffix):
                keys.pop()
                last -= stride
            keys += [hashes[n] + suffix for n in range((len(keys) + 1) * stride - 1, len(hashes), stride)]

    def key_at(self, group: int, tokens: int, tokens_per_hash: int) -> bytes | None:
        """Key of the prefix of so many tokens, if the engine has hashed it."""
        hashes, number = self.request.block_hashes, tokens // tokens_per_hash
        if tokens % tokens_per_hash or not 0 < number <= len(hashes):
            return None
        return hashes[number - 1] + self._suffixes[group]

    def forget_blocks(self) -> None:
        """Its blocks were taken; what it offers next is everything again."""
        for table in self.tables:
            table.clear()
        self.trusted, self.next_offer = None, 0

    def confirmed_tokens(self) -> int:
        """Tokens whose KV is certain: no draft, no step under way, no last sample, no load that may fail."""
        request = self.request
        computed = request.num_computed_tokens - request.num_output_placeholders
        if self.trusted is not None:
            if computed > self.trusted:
                return self.trusted
            # The engine has taken note of the failure, and computes these tokens itself.
            self.trusted = None
        return min(computed, max(request.num_prompt_tokens, request.num_tokens - 1))

    def full_chunks(self, config: SchedulerConfig, blocks_per_chunk: int, finished: bool) -> tuple[int, ...]:
        """How many chunks of each group may be stored by now; of mamba groups none, for they are handed over.
        `next_offer` is moved to where there will be more."""
        confirmed = self.confirmed_tokens()
        storable = min(confirmed, self.max_store_tokens)
        decodes = not finished and confirmed > self.request.num_prompt_tokens
        counts, self.next_offer = [], maxsize
        for group, keys, table in zip(config.groups, self.keys, self.tables):
            if group.kind is GroupKind.MAMBA:
                counts.append(0)
                continue
            tokens = group.block_tokens * blocks_per_chunk
            chunks = storable // tokens
            if group.drafter and decodes and storable == confirmed:
                chunks -= 1
            counts.append(max(0, min(chunks, len(keys), len(table) // blocks_per_chunk)))
            if confirmed < self.max_store_tokens:
                self.next_offer = min(self.next_offer, (confirmed // tokens + 1) * tokens)
        if self.trusted is not None:
            # It is asked in every step: the engine falls back in one of them, and later it does not show.
            self.next_offer = 0
        return tuple(counts)
