"""A reference for the longest hit, straight from the definition: slow and obvious.

`kvsm.core.scheduler.hits.HitSearch` lowers the end of a hit group by group. Here every end is tried, the
largest first. A hit may end at a token if, for each group, all tokens that its layers read there are on the
device or in a readable chunk on the host. The two share no code. The small engine compares with this
reference each answer of the scheduler, and the device hits that it finds with `HitSearch`. A hit that is too
short breaks "stored, so served" (S19), one that is too long "a match holds what it counts" (S7).

Taken as given, not checked: the number of device tokens that the engine passes, which keys are readable, and
the rules by which a request may not load or may not wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from sys import maxsize
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from kvsm.check.worlds.small_request import SmallRequest
from kvsm.core.ledger import Ledger, RequestRecord
from kvsm.core.scheduler import GroupKind, KVCacheGroup, OffloadScheduler
from kvsm.core.scheduler.groups import group_suffix
from kvsm.core.scheduler.protocols import EngineRequest
from kvsm.errors import PropertyBroken
from kvsm.ids import to_list
from kvsm.properties import Property
from kvsm.states.request import RequestState

if TYPE_CHECKING:
    from kvsm.check.worlds.small_engine import SmallEngine

Has = Callable[[bytes], bool]
Key = bytes | None
"""None: the chunk is not full, so it has no key."""


def tokens_read(group: KVCacheGroup, end: int) -> range:
    """The tokens whose KV the layers of a group read to compute the token at `end`."""
    if group.kind is GroupKind.FULL:
        return range(end)
    if group.kind is GroupKind.SLIDING_WINDOW:
        # The window includes the token at `end` itself.
        return range(max(0, end + 1 - group.window), end)
    if group.kind is GroupKind.CHUNKED_LOCAL:
        return range(end // group.window * group.window, end)
    return range(end - 1, end)


class Prompt(NamedTuple):
    """The prompt of a request.

    cells: for each token the hash of the prefix that ends with it.
    chunk: device blocks in a chunk.
    """

    groups: tuple[KVCacheGroup, ...]
    cells: Sequence[bytes]
    chunk: int = 1

    def key(self, index: int, token: int) -> Key:
        """The key of the chunk of group `index` that holds this token."""
        tokens = self.groups[index].block_tokens * self.chunk
        end = token - token % tokens + tokens
        return self.cells[end - 1] + group_suffix(index) if end <= len(self.cells) else None

    def keys_read(self, local: int, end: int) -> Iterator[Key]:
        """The keys that a hit up to `end` reads on the host, after `local` device tokens; with repeats."""
        for index, group in enumerate(self.groups):
            for token in tokens_read(group, end):
                if token >= local:
                    yield self.key(index, token)

    def longest_hit(self, local: int, most_loaded: int, has: Has) -> int:
        """The end of the longest hit (tokens); `local` if the host adds nothing.

        most_loaded: how many tokens may be loaded at most.
        has: whether the host has a key.
        """
        for end in range(len(self.cells) - 1, local, -1):
            if end - local > most_loaded or any(end % group.block_tokens for group in self.groups):
                continue
            if all(key is not None and has(key) for key in self.keys_read(local, end)):
                return end
        return local


def check_device_hit(engine: SmallEngine, request: SmallRequest, local: int) -> None:
    """Check that the engine has found its longest device hit. local: its length. Raises `PropertyBroken`."""
    if engine.prefix_cache and not request.skip_reading_prefix_cache:
        has = engine.pool.cached.__contains__
        longest = Prompt(engine.groups, request.cells).longest_hit(0, maxsize, has)
        if local != longest:
            message = f"has {local} tokens on the device, and the longest hit {longest}"
            _broken(request, message, is_short=local < longest)


def check_answer(request: EngineRequest, local: int, found: int | None, expected: int | None) -> None:
    """Check an answer of the scheduler. Raises `PropertyBroken`.

    found, expected: tokens to load after the `local` device tokens; None for a request that must wait.
    """
    if found != expected:
        message = f"is offered {found} tokens behind {local}, and the longest hit has {expected}"
        # A request that must wait is served more later. One that waits in vain is served nothing now.
        _broken(request, message, is_short=found is None or expected is None or found < expected)


def _broken(request: EngineRequest, message: str, *, is_short: bool) -> NoReturn:
    property = Property.STORED_SO_SERVED if is_short else Property.MATCH_HOLDS
    raise PropertyBroken(property, f"request {request.request_id} {message}")


class Settled(NamedTuple):
    """An answer that does not depend on any hit.

    tokens: as `expected_answer` returns them.
    local: the prompt's tokens on the device.
    """

    tokens: int | None
    local: int


class AskedPrompt(NamedTuple):
    """A prompt whose answer depends on the longest hit.

    local: its tokens on the device.
    most: how many tokens may be loaded at most.
    may_wait: whether the request may wait for keys in flight.
    """

    prompt: Prompt
    local: int
    most: int
    may_wait: bool

    def end(self, has: Has) -> int:
        """The end of the longest hit (tokens). has: as in `Prompt.longest_hit`."""
        return self.prompt.longest_hit(self.local, self.most, has)

    def keys_read(self, end: int) -> list[bytes]:
        """The keys that a hit up to `end` reads, each once."""
        return [*dict.fromkeys([key for key in self.prompt.keys_read(self.local, end) if key is not None])]

    def offered(self, ledger: Ledger) -> int:
        """The tokens of the longest hit that the host can read now.

        A hit of which no layer reads a token loads nothing, so it is not offered.
        """
        end = self.end(lambda key: key in ledger.index and ledger.readable(ledger.index[key]))
        return end - self.local if any(self.prompt.keys_read(self.local, end)) else 0


def asked_prompt(
    scheduler: OffloadScheduler, request: EngineRequest, cells: Sequence[bytes], local: int
) -> AskedPrompt | Settled:
    """Apply the rules by which a request may not load or may not wait. Arguments as in `expected_answer`."""
    core, ledger = scheduler.offloader, scheduler.offloader.ledger
    entry = ledger.requests.get(request.request_id) or RequestRecord(request.request_id)
    tracked = scheduler.state.tracked.get(request.request_id)
    if entry.state is RequestState.DEFERRED:
        return Settled(None, local)
    if entry.state is RequestState.FINISHED:
        # An earlier request of the same name still has a load in flight.
        return Settled(0, local)
    # A request that has had blocks before was preempted, and begins to wait anew.
    begins = entry.patience < 0 or (tracked is not None and any(tracked.tables))
    may_wait = core.config.defer_ticks > 0 and (begins or entry.patience > ledger.tick)
    if entry.load:
        # The ledger keeps only one load for each request.
        return Settled(None if may_wait else 0, local)
    if request.skip_reading_prefix_cache or len(ledger.transfers) >= core.config.max_live_transfers:
        return Settled(0, local)
    prompt = Prompt(scheduler.config.groups, cells, core.config.blocks_per_chunk)
    most = (request.kv_transfer_params or {}).get("max_load_tokens", maxsize)
    return AskedPrompt(prompt, local, most, may_wait)


def expected_answer(
    scheduler: OffloadScheduler, request: EngineRequest, cells: Sequence[bytes], local: int
) -> int | None:
    """The number of tokens after `local` that the scheduler must offer to load; None if the request must
    wait.

    Call it before the scheduler's own search. There must be no tier below the host.

    cells: for each token the hash of the prefix that ends with it; any bytes for a token that ends no block.
    """
    ledger = scheduler.offloader.ledger
    asked = asked_prompt(scheduler, request, cells, local)
    if isinstance(asked, Settled):
        return asked.tokens
    keys = asked.keys_read(asked.end(ledger.index.__contains__))
    busy = {slot for transfer in ledger.transfers.values() for slot in to_list(transfer.slots)}
    if asked.may_wait and any(ledger.index[key] in busy for key in keys):
        return None
    return asked.offered(ledger)


def cells_of(scheduler: OffloadScheduler, request: EngineRequest) -> list[bytes]:
    """Return the hash of the prefix that ends with each token; empty for a token that ends no block."""
    cells = [b""] * request.num_tokens
    for number, value in enumerate(request.block_hashes, 1):
        cells[number * scheduler.config.tokens_per_hash - 1] = value
    return cells


def watch_answers(scheduler: OffloadScheduler) -> None:
    """Check each future answer of a scheduler. There must be no tier below the host."""
    ask = scheduler.get_num_new_matched_tokens

    def watched(request: EngineRequest, num_computed_tokens: int) -> tuple[int | None, bool]:
        expected = expected_answer(scheduler, request, cells_of(scheduler, request), num_computed_tokens)
        found, loads = ask(request, num_computed_tokens)
        check_answer(request, num_computed_tokens, found, expected)
        return found, loads

    scheduler.get_num_new_matched_tokens = watched  # type: ignore[method-assign]
