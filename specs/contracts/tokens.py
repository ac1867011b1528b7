"""Contracts of token and block arithmetic: blocks for tokens, windows, caps, and computed tokens.

The methods are the real ones. They are called on stand-ins with the attributes that the method reads, because
CrossHair can create ints and enums but no msgspec structs.
"""

from __future__ import annotations

from sys import maxsize
from typing import NamedTuple

from kvsm.core.scheduler.groups import GroupKind, KeyLayout, KVCacheGroup
from kvsm.core.scheduler.hits import hit_limit
from kvsm.core.scheduler.tracked import TrackedRequest
from kvsm.serving.block_tables import peak_blocks
from kvsm.serving.traces import started_blocks


class Group(NamedTuple):
    """The attributes of a `KVCacheGroup` that the arithmetic reads."""

    block_tokens: int
    kind: GroupKind
    window: int
    drafter: bool = False

    def first_needed_token(self, end: int) -> int:
        return KVCacheGroup.first_needed_token(self, end)  # type: ignore[arg-type]

    def fresh_start(self, end: int) -> int:
        return KVCacheGroup.fresh_start(self, end)  # type: ignore[arg-type]


class Groups(NamedTuple):
    """The attributes of a `SchedulerConfig` that the arithmetic reads."""

    groups: tuple[Group, ...]


class EngineRequest:
    """The attributes of an engine's request that the arithmetic reads."""

    def __init__(self, prompt: int, tokens: int, computed: int, placeholders: int) -> None:
        self.num_prompt_tokens, self.num_tokens = prompt, tokens
        self.num_computed_tokens, self.num_output_placeholders = computed, placeholders
        self.block_hashes = range(maxsize)


class Tracked:
    """The attributes of a `TrackedRequest` that the arithmetic reads, with as many hashes as needed."""

    _layout = KeyLayout((b"",), (1,))

    def __init__(
        self,
        request: EngineRequest,
        trusted: int | None,
        max_store_tokens: int = maxsize,
        prompt_only: bool = False,
    ) -> None:
        self.request, self.trusted = request, trusted
        self.max_store_tokens, self.prompt_only = max_store_tokens, prompt_only
        self.next_offer = 0
        self.tables = (range(maxsize),)

    def confirmed_tokens(self) -> int:
        return TrackedRequest.confirmed_tokens(self)  # type: ignore[arg-type]

    def store_limit(self) -> int:
        return TrackedRequest.store_limit(self)  # type: ignore[arg-type]


def started_blocks_hold_all_tokens(tokens: int, block_tokens: int) -> int:
    """Ceiling division: enough blocks for all tokens, and not one more.

    pre: tokens >= 0 and block_tokens >= 1
    post: (_ - 1) * block_tokens < tokens <= _ * block_tokens
    """
    return started_blocks(tokens, block_tokens)


def a_window_is_what_its_layers_see(kind: GroupKind, window: int, end: int) -> int:
    """The first token that is needed to compute the token at `end`: token 0, the state directly before it, or
    the start of the window that ends with it.

    pre: window >= 1 and end >= 0
    post: 0 <= _ <= end
    post: kind is not GroupKind.FULL or _ == 0
    post: kind is not GroupKind.SLIDING_WINDOW or end - _ + 1 == min(window, end + 1)
    post: kind is not GroupKind.MAMBA or end - _ == min(1, end)
    """
    return KVCacheGroup.first_needed_token(Group(1, kind, window), end)  # type: ignore[arg-type]


def a_window_never_moves_back(kind: GroupKind, window: int, end: int, later: int) -> tuple[int, int]:
    """No reuse in flight (S3): a block that has left the window and was freed is never needed again.

    pre: window >= 1 and 0 <= end <= later
    post: _[0] <= _[1]
    """
    group = Group(1, kind, window)
    return group.first_needed_token(end), group.first_needed_token(later)


def a_request_fits_its_peak(
    kind: GroupKind, size: int, window: int, tokens: int, step: int, before: int, computed: int, end: int
) -> tuple[int, int]:
    """Every call is legal (S8): a request that was admitted with room for its peak never needs more blocks.
    It holds the blocks from the first needed one (for mamba: needed before the last step, while states are
    handed over) to the last one that this step computes. Returns (number of held blocks, peak).

    pre: size in (1, 16)
    pre: window >= 1 and step >= 1
    pre: 0 <= before <= computed <= end <= tokens
    pre: computed - before <= step and end - computed <= step
    post: _[0] <= _[1]
    """
    group = Group(size, kind, window)
    return held(group, before, computed, end), peak_blocks(group, tokens, step)  # type: ignore[arg-type]


def held(group: Group, before: int, computed: int, end: int) -> int:
    """The number of blocks in a table. A mamba group needs them from `before` on, others from `computed`."""
    last = before if group.kind is GroupKind.MAMBA else computed
    first = group.first_needed_token(last) // group.block_tokens
    return max(0, started_blocks(end, group.block_tokens) - first)


def one_token_is_left(num_tokens: int, local: int, max_load_tokens: int) -> int:
    """One token left (S18): a match leaves the last token to compute, and loads no more than the request
    allows.

    pre: num_tokens >= 1 and local >= 0 and max_load_tokens >= 0
    post: _ <= num_tokens - 1 and _ - local <= max_load_tokens
    post: _ == num_tokens - 1 or _ - local == max_load_tokens
    """
    return hit_limit(num_tokens, local, max_load_tokens)


def only_what_is_certain_is_confirmed(
    prompt: int, tokens: int, computed: int, placeholders: int, trusted: int | None
) -> int:
    """Publish after commit (S2), order of copies (S12): drafts, tokens of a step in progress, samples whose
    KV is not written and tokens of a load in flight do not count as computed. The count is not negative.
    (trusted: the device's hit at the match, which left a token to compute.)

    pre: 1 <= prompt <= tokens and 0 <= placeholders <= computed
    pre: trusted is None or 0 <= trusted <= tokens - 1
    post: 0 <= _ <= computed - placeholders
    post: _ <= prompt or _ <= tokens - 1
    post: trusted is None or _ <= trusted
    """
    request = EngineRequest(prompt, tokens, computed, placeholders)
    return Tracked(request, trusted).confirmed_tokens()


def only_full_confirmed_chunks_are_stored(
    size: int, drafter: bool, prompt: int, computed: int, max_store_tokens: int, finished: bool
) -> tuple[int, int]:
    """Publish after commit (S2), order of copies (S12): a chunk is stored when all its tokens are
    confirmed and within the cap. While a drafter decodes, the last block may be rewritten, so it waits.

    pre: size in (1, 16)
    pre: 1 <= prompt and 0 <= computed < 1 << 40 and 0 <= max_store_tokens
    post: 0 <= _[0] * size <= storable(size, drafter and not finished, prompt, computed, max_store_tokens)
    """
    tracked = Tracked(EngineRequest(prompt, maxsize, computed, 0), None, max_store_tokens)
    return chunks_and_next_offer(tracked, size, drafter, finished)


def no_full_chunk_is_forgotten(
    size: int, prompt: int, computed: int, max_store_tokens: int, finished: bool
) -> tuple[int, int]:
    """No doubled or lost store (S13), full offload (S16): every full chunk is stored, and the next one is
    offered as soon as it is full, unless the cap is reached.

    pre: size in (1, 16)
    pre: 1 <= prompt and 0 <= computed < 1 << 40 and 0 <= max_store_tokens
    post: (_[0] + 1) * size > min(computed, max_store_tokens)
    post: _[1] == next_boundary(size, computed) if computed < max_store_tokens else _[1] == maxsize
    """
    tracked = Tracked(EngineRequest(prompt, maxsize, computed, 0), None, max_store_tokens)
    return chunks_and_next_offer(tracked, size, False, finished)


def only_the_prompt_is_stored_if_asked(prompt: int, computed: int, max_store_tokens: int) -> int:
    """With `prompt_only` a request stores no generated token. Its own cap still applies.

    pre: 1 <= prompt and 0 <= computed < 1 << 40 and 0 <= max_store_tokens
    post: _ == min(prompt, computed, max_store_tokens)
    """
    tracked = Tracked(EngineRequest(prompt, maxsize, computed, 0), None, max_store_tokens, prompt_only=True)
    return chunks_and_next_offer(tracked, 1, False, True)[0]


def chunks_and_next_offer(tracked: Tracked, size: int, drafter: bool, finished: bool) -> tuple[int, int]:
    config = Groups((Group(size, GroupKind.FULL, 0, drafter),))
    (chunks,) = TrackedRequest.full_chunks(tracked, config, 1, finished)  # type: ignore[arg-type]
    return chunks, tracked.next_offer


def storable(size: int, drafts: bool, prompt: int, computed: int, max_store_tokens: int) -> int:
    """The token up to which chunks may be stored. Drafts matter only below the cap."""
    if drafts and prompt < computed <= max_store_tokens:
        return max(0, computed - size)
    return min(computed, max_store_tokens)


def next_boundary(size: int, computed: int) -> int:
    """The first end of a chunk after `computed`."""
    return computed + size - computed % size
