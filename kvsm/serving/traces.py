"""Workloads: the requests of a serving engine, read from a trace or generated.

Both have the form of the Mooncake traces: a request has an arrival time, the lengths of its prompt and its
output, and one hash id for each started block of `block_tokens` prompt tokens (Mooncake: 512). A hash id
identifies the *whole* prefix that ends with its block. Equal ids mean equal prefixes, so a cache may share
them. An engine with smaller blocks has several hashes for one id. Output tokens have no ids. The blocks that
they fill get hashes that belong to one request (`output_hash`): these blocks are stored and evicted like
others, but no other request hits them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from heapq import heappop, heappush
from itertools import accumulate, count
from math import log
from random import Random
from typing import Annotated

import msgspec

from kvsm.errors import TraceError
from kvsm.serving.trace_files import NOT_DECODED, Text, not_json, texts_of

BLOCK_TOKENS = 512
"""The number of tokens of a hash id in a Mooncake trace."""

HASH_BYTES = 32

_Milliseconds = Annotated[float, msgspec.Meta(ge=0)]
_Length = Annotated[int, msgspec.Meta(ge=1)]
_HashId = Annotated[int, msgspec.Meta(ge=0)]


class TraceRequest(msgspec.Struct, frozen=True, rename={"arrival_ms": "timestamp"}):
    """One line of a trace.

    arrival_ms: time since the start of the trace (ms).
    input_length: length of the prompt (tokens).
    output_length: length of the output (tokens).
    hash_ids: one id for each started block of the prompt.
    """

    arrival_ms: _Milliseconds
    input_length: _Length
    output_length: _Length
    hash_ids: tuple[_HashId, ...]


def started_blocks(tokens: int, block_tokens: int) -> int:
    """Return the number of blocks that hold `tokens` tokens. The last block may not be full."""
    return -(-tokens // block_tokens)


def prompt_hashes(request: TraceRequest, block_tokens: int, hash_tokens: int) -> list[bytes]:
    """Return a block hash for every `hash_tokens` tokens of the prompt. `hash_tokens` divides `block_tokens`.

    The last part of a block has the hash of the block's id, for every `hash_tokens`. The hashes of the
    earlier parts also depend on their index in the block.
    """
    ids, parts, full = request.hash_ids, block_tokens // hash_tokens, request.input_length // hash_tokens
    return [
        _hash(b"%d" % ids[number // parts])
        if (number + 1) % parts == 0
        else _hash(b"%d/%d" % (ids[number // parts], number % parts))
        for number in range(full)
    ]


def output_hash(request: str, index: int) -> bytes:
    """Return block hash number `index` of a request, for a block that ends with an output token."""
    return blake2b(f"{request}/{index}".encode(), digest_size=HASH_BYTES, person=b"kvsm output").digest()


def _hash(name: bytes) -> bytes:
    return blake2b(name, digest_size=HASH_BYTES).digest()


# Reading.


def read_trace(path: str | os.PathLike[str], block_tokens: int = BLOCK_TOKENS) -> Iterator[TraceRequest]:
    """Stream a JSONL trace with `timestamp`, `input_length`, `output_length` and `hash_ids`, maybe in gzip.

    Other fields are ignored. block_tokens: the number of tokens of a hash id.

    Raises `TraceError` at the first line that is not such a request, arrives before the line above it, or has
    another number of ids than its length needs; and for a file without requests.
    """
    return parse_requests(os.fspath(path), texts_of(path), block_tokens)


def parse_requests(name: str, lines: Iterable[Text], block_tokens: int) -> Iterator[TraceRequest]:
    """Decode and check the lines of a trace. name: of the file, for errors. See `read_trace`."""
    number, latest = 0, 0.0
    decode = msgspec.json.Decoder(TraceRequest).decode
    for number, line in lines:
        try:
            request = decode(line)
        except NOT_DECODED as error:
            raise TraceError(name, number, not_json(line, error, "a request")) from error
        wrong = _inconsistency(request, latest, block_tokens)
        if wrong:
            raise TraceError(name, number, wrong)
        latest = request.arrival_ms
        yield request
    if not number:
        raise TraceError(name, 0, "holds no request; a trace has one JSON object a line")


def _inconsistency(request: TraceRequest, latest_ms: float, block_tokens: int) -> str:
    if request.arrival_ms < latest_ms:
        return f"timestamp {request.arrival_ms:g} comes after {latest_ms:g}; a trace is sorted by time"
    expected = started_blocks(request.input_length, block_tokens)
    if len(request.hash_ids) != expected:
        return (
            f"{len(request.hash_ids)} hash_ids for {request.input_length} tokens; "
            f"blocks of {block_tokens} tokens make {expected}"
        )
    return ""


# Generating.

SYSTEM_PROMPTS = 16
CONVERSATIONS_PER_SECOND = 1.0
OUTPUT_TOKEN_MS, THINK_TIME_MS = 20, 20_000
ANOTHER_TURN_PROBABILITY = 0.8
INPUT_MOST, OUTPUT_MOST, CONTEXT_MOST = 8192, 2000, 32 * 1024


class _Conversation:
    """The state of a conversation."""

    __slots__ = ("context", "ids")

    def __init__(self, system_ids: list[int], system_length: int) -> None:
        self.ids = list(system_ids)
        """The hash ids of its full blocks."""
        self.context = system_length
        """Its length (tokens)."""


def multi_turn(seed: int, requests: int, block_tokens: int = BLOCK_TOKENS) -> Iterator[TraceRequest]:
    """Generate `requests` requests of conversations with several turns, in order of arrival.

    Equal seeds give equal requests. The lengths below are for blocks of 512 tokens. For other blocks they are
    scaled, so that the workload has about the same number of blocks.

    =====================  ===================================================================
    conversations start    as a Poisson process, one a second
    system prompt          one of 16, chosen by Zipf's law (exponent 1); its length is lognormal,
                           median 2,000 tokens, sigma 0.5; its full blocks are shared by all users
    new input of a turn    lognormal, median 1,000 tokens, sigma 1.2, at most 8,192
    output of a turn       lognormal, median 250 tokens, sigma 0.7, at most 2,000
    another turn follows   with probability 0.8, so that 5 turns are usual
    time between turns     20 ms a token of output, and an exponential think time of 20 s
    context                all turns before, their outputs included; a conversation ends before it
                           would grow beyond 32,768 tokens
    =====================  ===================================================================
    """
    lengths = _Lengths(Random(seed), block_tokens)
    random, fresh, numbers = lengths.random, count(), count()
    systems = []
    for _ in range(SYSTEM_PROMPTS):
        length = lengths.draw(2000, 0.5, INPUT_MOST)
        systems.append(([next(fresh) for _ in range(length // block_tokens)], length))
    weights = list(accumulate(1 / rank for rank in range(1, SYSTEM_PROMPTS + 1)))
    # The heap always has one entry (None) for the next conversation to start. When it starts, the entry of
    # the one after it is pushed. The number decides between equal times, so conversations are never compared.
    turns: list[tuple[float, int, _Conversation | None]] = [(0.0, next(numbers), None)]
    for _ in range(requests):
        now_ms, _, conversation = heappop(turns)
        if conversation is None:
            gap_ms = 1000 * random.expovariate(CONVERSATIONS_PER_SECOND)
            heappush(turns, (now_ms + gap_ms, next(numbers), None))
            [(system_ids, length)] = random.choices(systems, cum_weights=weights)
            conversation = _Conversation(system_ids, length)
        request = _take_turn(conversation, int(now_ms), lengths, fresh)
        yield request
        has_another_turn = random.random() < ANOTHER_TURN_PROBABILITY
        longest = conversation.context + lengths.of(INPUT_MOST + OUTPUT_MOST)
        if has_another_turn and longest <= lengths.of(CONTEXT_MOST):
            wait_ms = request.output_length * OUTPUT_TOKEN_MS + random.expovariate(1 / THINK_TIME_MS)
            heappush(turns, (now_ms + wait_ms, next(numbers), conversation))


class _Lengths:
    """Draws lengths in tokens, scaled to the size of the blocks."""

    def __init__(self, random: Random, block_tokens: int) -> None:
        self.random, self.block_tokens = random, block_tokens

    def of(self, tokens: int) -> int:
        """Scale a length for blocks of 512 tokens to these blocks."""
        return tokens * self.block_tokens // BLOCK_TOKENS

    def draw(self, median: int, sigma: float, most: int) -> int:
        """Draw a lognormal length, at least 1 and at most `most` (scaled)."""
        return max(1, self.of(min(most, int(self.random.lognormvariate(log(median), sigma)))))


def _take_turn(
    conversation: _Conversation, arrival_ms: int, lengths: _Lengths, fresh: Iterator[int]
) -> TraceRequest:
    ids, block_tokens = conversation.ids, lengths.block_tokens
    input_length = conversation.context + lengths.draw(1000, 1.2, INPUT_MOST)
    output_length = lengths.draw(250, 0.7, OUTPUT_MOST)
    ids += [next(fresh) for _ in range(input_length // block_tokens - len(ids))]
    # A block that is not full gets more tokens in the next turn, so its id is used in this turn only.
    tail = [next(fresh)] if input_length % block_tokens else []
    conversation.context = input_length + output_length
    return TraceRequest(arrival_ms, input_length, output_length, tuple(ids + tail))
