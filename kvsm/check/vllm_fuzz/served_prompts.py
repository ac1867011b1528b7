"""Check at rest that a connector serves what it has stored (stored, so served, S19), by its answers alone.

For each prompt of the run, the connector is asked with each number of computed blocks. An answer is too short
if the connector must have more blocks, and `KnownBlocks` says which answer they allow. It must have

- the blocks that its own answers to this prompt contain;
- the blocks that its KV events announce, unless blocks may have been evicted or lost;
- the blocks of each prompt that was served, under the same condition, if it stores at once.

The same question must have the same answer twice. An answer "ask later" says nothing, and its prompt is not
compared. What tiers below the host move there may evict other blocks, so with tiers nothing is compared
unless the host has room for all blocks of the run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Protocol

from vllm.v1.request import Request, RequestStatus

from kvsm.check.vllm_fuzz.host_probe import is_all_there_is, repeated
from kvsm.check.vllm_fuzz.known_blocks import KnownBlocks
from kvsm.check.vllm_fuzz.kv_event_check import EventName, event_name
from kvsm.check.vllm_fuzz.shape import BLOCK_TOKENS, STATES, EngineShape
from kvsm.check.vllm_fuzz.twin_asks import is_kvsm, parts_of
from kvsm.check.worlds.check_counts import count_case
from kvsm.errors import PropertyBroken
from kvsm.properties import Property

_STORE_AT_ONCE = {
    "spec_name",
    "spec_module_path",
    "secondary_tiers",
    "connectors",
    "blocks_per_chunk",
    "transfer_timeout_s",
}
"""Options with which a connector still stores each full block of a prompt as soon as it is computed."""


class AskedEngine(Protocol):
    """The parts of a world that the check uses."""

    shape: EngineShape
    scheduler: Any
    ranks: list[Any]
    asked: dict[str, Request]
    may_have_lost_stores: bool
    surely_stored: set[str]

    def calling(self, what: str) -> Any: ...


class ServedPrompts:
    """The prompts of one engine's run. announced: the blocks that its KV events say are on the host."""

    def __init__(self, engine: AskedEngine, announced: Collection[EventName]) -> None:
        self._engine, self._shape = engine, engine.shape
        self._chunk = int(self._shape.extra.get("blocks_per_chunk", 1))
        has_room = "cpu_bytes_to_use" not in self._shape.extra and self._fits(self._shape.host_blocks)
        self._has_all = has_room and not engine.may_have_lost_stores
        # A block may leave its window, and be reused, before it can be stored.
        keeps_windows = not any(self._shape.windows_of_groups) or self._fits(self._shape.device_blocks)
        self._stores_at_once = (
            has_room
            and keeps_windows
            and STATES not in self._shape.windows_of_groups
            and _stores_at_once(self._shape.extra)
        )
        self._has_stored = any(rank.runtime.has_stored for rank in engine.ranks)
        self._announced = announced if self._has_all and is_all_there_is(self._shape) else ()

    def check(self) -> None:
        """Ask for each prompt of the run. Raises `PropertyBroken`."""
        if "secondary_tiers" in self._shape.extra and not self._has_all:
            return
        scheduler = self._engine.scheduler
        for number, (name, like) in enumerate(self._prompts()):
            request = repeated(f"repeated{number}", like)
            with self._engine.calling(f"a request like {name} waits, and is aborted"):
                scheduler.add_request(request)
                for part in parts_of(scheduler.connector):
                    self._check(part, request, name, like)
                self._check_children(request, name)
                scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)

    def _prompts(self) -> Iterator[tuple[str, Request]]:
        """Yield (name, request) of each different prompt; of two, the one that was surely stored."""
        known = dict[bytes, tuple[str, Request]]()
        for name, request in self._engine.asked.items():
            hashes = request.block_hashes[: (request.num_tokens - 1) // BLOCK_TOKENS]
            if hashes and (hashes[-1] not in known or self._is_stored(request)):
                known[hashes[-1]] = name, request
        yield from known.values()

    def _check(self, part: Any, request: Request, name: str, like: Request) -> None:
        blocks = (request.num_tokens - 1) // BLOCK_TOKENS
        answers = [_ask(part, request, computed) for computed in range(blocks)]
        ends = [end for end in answers if end is not None]
        if len(ends) < blocks:
            return
        count_case(Property.STORED_SO_SERVED, "prompts of a run that were asked for at rest")
        drops = () if is_kvsm(part) else self._shape.dropping_groups
        known = KnownBlocks(self._shape.windows_of_groups, self._chunk, drops)
        for computed, end in enumerate(ends):
            known.answered(computed, min(end, blocks))
        self._compare(known, ends, name, "its answers to this prompt contain them")
        if self._announced:
            for group in range(self._shape.groups):
                for block in range(blocks):
                    if event_name(group, request.block_hashes[block]) in self._announced:
                        known.add(group, block)
            self._compare(known, ends, name, "its KV events announce them, and nothing was evicted")
        # A connector that has stored nothing has nothing to serve.
        has_stored = self._has_stored or any(end > computed for computed, end in enumerate(ends))
        if self._stores_at_once and has_stored and self._is_stored(like):
            count_case(Property.STORED_SO_SERVED, "served prompts that the host has room for")
            # With sliding windows, vLLM keeps only the blocks that the same prompt would read again.
            tokens = like.num_prompt_tokens - any(self._shape.windows_of_groups)
            chunks = tokens // (BLOCK_TOKENS * self._chunk) - bool(drops)
            # A request might not store window blocks that another request has computed.
            if not (drops and any(self._shape.windows_of_groups)) or self._is_alone(like):
                known.served(max(0, chunks) * self._chunk)
            self._compare(known, ends, name, f"request {name} was served, and nothing was evicted")
        again = [_ask(part, request, computed) for computed in range(blocks)]
        for computed, (first, second) in enumerate(zip(ends, again)):
            if first != second:
                raise _broken(
                    f"a prompt like that of {name} is served up to block {first} behind {computed} blocks, "
                    f"and up to block {second} when it is asked for again"
                )

    def _check_children(self, request: Request, name: str) -> None:
        """Check that a MultiConnector answers what its first child with a hit answers."""
        connector = self._engine.scheduler.connector
        children = parts_of(connector)
        for computed in range((request.num_tokens - 1) // BLOCK_TOKENS if len(children) > 1 else 0):
            answers = [_ask(child, request, computed) for child in children]
            first = next((end for end in answers if end != computed), computed)
            if None not in answers and (end := _ask(connector, request, computed)) != first:
                raise _broken(
                    f"a prompt like that of {name} is served up to block {end} behind {computed} blocks, and "
                    f"the first child with a hit serves it up to block {first}"
                )

    def _compare(self, known: KnownBlocks, ends: list[int], name: str, why: str) -> None:
        for computed, end in enumerate(ends):
            longest = known.longest(computed, len(ends))
            if end < longest:
                raise _broken(
                    f"a prompt like that of {name} is served up to block {end} behind {computed} blocks, and "
                    f"the connector has what it needs up to block {longest}: {why}"
                )

    def _is_alone(self, request: Request) -> bool:
        """Whether no other request begins with its first block."""
        first = request.block_hashes[:1]
        same = [other for other in self._engine.asked.values() if other.block_hashes[:1] == first]
        return len(same) == 1

    def _is_stored(self, request: Request) -> bool:
        """Whether the request was served, and its blocks cannot have been lost by a reset or a fault."""
        is_served = bool(request.is_finished()) and request.status is not RequestStatus.FINISHED_ABORTED
        return is_served and request.request_id in self._engine.surely_stored

    def _fits(self, blocks: int) -> bool:
        """Whether a pool of this size never had to reuse a block in the run."""
        used = [
            int((1 + request.num_preemptions) * (request.num_tokens // BLOCK_TOKENS + 1))
            for request in self._engine.asked.values()
        ]
        return sum(used) * self._shape.groups < blocks


def _ask(part: Any, request: Request, computed: int) -> int | None:
    """The end of the answer behind `computed` blocks (blocks); None for "ask later"."""
    tokens, _ = part.get_num_new_matched_tokens(request, computed * BLOCK_TOKENS)
    return None if tokens is None else computed + int(tokens) // BLOCK_TOKENS


def _stores_at_once(extra: Mapping[str, Any]) -> bool:
    children = [child.get("kv_connector_extra_config") or {} for child in extra.get("connectors") or ()]
    return set(extra) <= _STORE_AT_ONCE and all(map(_stores_at_once, children))


def _broken(message: str) -> PropertyBroken:
    return PropertyBroken(Property.STORED_SO_SERVED, message)
