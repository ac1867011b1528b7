"""Workloads: requests as a serving engine meets them, read from a trace or generated.

Both have the form of the Mooncake traces: when a request arrives, how many tokens it brings and asks
for, and one hash id per started block of `BLOCK_TOKENS` prompt tokens. A hash id stands for the *whole*
prefix that ends with its block: equal ids mean equal prefixes, so that a cache may share them. Output
tokens have no ids; the engine gives the blocks that they fill keys of their own (`output_key`), so that
such a block is stored and evicted like any other, but found again by its own request only.
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

BLOCK_TOKENS = 512
"""Tokens of a block."""

HASH_BYTES = 32
GROUP_SUFFIX = (0).to_bytes(4, "big")
"""Last bytes of a key: the KV cache group. A trace knows one group."""
KEY_BYTES = HASH_BYTES + len(GROUP_SUFFIX)

_Milliseconds = Annotated[float, msgspec.Meta(ge=0)]
_Length = Annotated[int, msgspec.Meta(ge=1)]
_HashId = Annotated[int, msgspec.Meta(ge=0)]


class TraceRequest(msgspec.Struct, frozen=True, rename={"arrival_ms": "timestamp"}):
    """One line of a trace. arrival_ms: since the start. lengths: in tokens."""

    arrival_ms: _Milliseconds
    input_length: _Length
    output_length: _Length
    hash_ids: tuple[_HashId, ...]

    @property
    def blocks(self) -> int:
        """Blocks that its prompt and its output need together."""
        return started_blocks(self.input_length + self.output_length)


def started_blocks(tokens: int) -> int:
    """Blocks that so many tokens need; the last of them may not be full."""
    return -(-tokens // BLOCK_TOKENS)


def block_key(hash_id: int) -> bytes:
    """36 bytes, vLLM's layout of an offload key: a block hash of 32 bytes, and the group index."""
    return blake2b(b"%d" % hash_id, digest_size=HASH_BYTES).digest() + GROUP_SUFFIX


def block_keys(hash_ids: Iterable[int]) -> list[bytes]:
    """The key of each hash id."""
    return list(map(block_key, hash_ids))


def output_key(request: str, index: int) -> bytes:
    """Key of block `index` of a request, if its last token is an output token."""
    return (
        blake2b(f"{request}/{index}".encode(), digest_size=HASH_BYTES, person=b"kvsm output").digest()
        + GROUP_SUFFIX
    )


# Reading.


def read_trace(path: str | os.PathLike[str]) -> Iterator[TraceRequest]:
    """Stream a JSONL trace: `timestamp`, `input_length`, `output_length`, `hash_ids`; other fields are passed
    over.

    Raises `TraceError` at the first line that is not such a request, that comes before the line above it
    in time, or whose ids do not match its length; and for a file without requests.
    """
    name, number, latest = os.fspath(path), 0, 0.0
    decode = msgspec.json.Decoder(TraceRequest).decode
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    request = decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    raise TraceError(name, number, _why(line, error)) from error
                wrong = _inconsistency(request, latest)
                if wrong:
                    raise TraceError(name, number, wrong)
                latest = request.arrival_ms
                yield request
    except OSError as error:
        raise TraceError(name, 0, f"cannot be read: {error.strerror or error}") from error
    if not number:
        raise TraceError(name, 0, "holds no request; a trace has one JSON object a line")


def _why(line: bytes, error: Exception) -> str:
    if not line.strip():
        return "is empty; each line is one JSON object"
    what = "not a request" if isinstance(error, msgspec.ValidationError) else "not JSON"
    return f"{what}: {error}"


def _inconsistency(request: TraceRequest, latest_ms: float) -> str:
    if request.arrival_ms < latest_ms:
        return f"timestamp {request.arrival_ms:g} comes after {latest_ms:g}; a trace is sorted by time"
    expected = started_blocks(request.input_length)
    if len(request.hash_ids) != expected:
        return (
            f"{len(request.hash_ids)} hash_ids for {request.input_length} tokens; "
            f"blocks of {BLOCK_TOKENS} tokens make {expected}"
        )
    return ""


# Generating.

SYSTEM_PROMPTS = 16
CONVERSATIONS_PER_SECOND = 1.0
OUTPUT_TOKEN_MS, THINK_TIME_MS = 20, 20_000
ANOTHER_TURN_PROBABILITY = 0.8
INPUT_MOST, OUTPUT_MOST, CONTEXT_MOST = 8192, 2000, 32 * 1024


class _Conversation:
    """What is fixed of a conversation, and how far it has come."""

    __slots__ = ("context", "ids")

    def __init__(self, system_ids: list[int], system_length: int) -> None:
        self.ids = list(system_ids)
        """Of its full blocks so far."""
        self.context = system_length
        """Tokens so far."""


def multi_turn(seed: int, requests: int) -> Iterator[TraceRequest]:
    """Generate `requests` requests of conversations with several turns, in order of arrival.

    Equal seeds give equal requests. The distributions:

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
    random, fresh, numbers = Random(seed), count(), count()
    systems = []
    for _ in range(SYSTEM_PROMPTS):
        length = _lognormal(random, 2000, 0.5, INPUT_MOST)
        systems.append(([next(fresh) for _ in range(length // BLOCK_TOKENS)], length))
    weights = list(accumulate(1 / rank for rank in range(1, SYSTEM_PROMPTS + 1)))
    # One conversation (None) always waits to start; when it does, the next one enters the heap. The number
    # decides between equal times, so that no comparison ever reaches a conversation.
    turns: list[tuple[float, int, _Conversation | None]] = [(0.0, next(numbers), None)]
    for _ in range(requests):
        now_ms, _, conversation = heappop(turns)
        if conversation is None:
            gap_ms = 1000 * random.expovariate(CONVERSATIONS_PER_SECOND)
            heappush(turns, (now_ms + gap_ms, next(numbers), None))
            [(system_ids, length)] = random.choices(systems, cum_weights=weights)
            conversation = _Conversation(system_ids, length)
        request = _take_turn(conversation, int(now_ms), random, fresh)
        yield request
        goes_on = random.random() < ANOTHER_TURN_PROBABILITY
        if goes_on and conversation.context + INPUT_MOST + OUTPUT_MOST <= CONTEXT_MOST:
            wait_ms = request.output_length * OUTPUT_TOKEN_MS + random.expovariate(1 / THINK_TIME_MS)
            heappush(turns, (now_ms + wait_ms, next(numbers), conversation))


def _take_turn(
    conversation: _Conversation, arrival_ms: int, random: Random, fresh: Iterator[int]
) -> TraceRequest:
    ids = conversation.ids
    input_length = conversation.context + _lognormal(random, 1000, 1.2, INPUT_MOST)
    output_length = _lognormal(random, 250, 0.7, OUTPUT_MOST)
    ids += [next(fresh) for _ in range(input_length // BLOCK_TOKENS - len(ids))]
    # A block that is not full yet will hold other tokens in the next turn: its id is of this turn only.
    tail = [next(fresh)] if input_length % BLOCK_TOKENS else []
    conversation.context = input_length + output_length
    return TraceRequest(arrival_ms, input_length, output_length, tuple(ids + tail))


def _lognormal(random: Random, median: int, sigma: float, most: int) -> int:
    return max(1, min(most, int(random.lognormvariate(log(median), sigma))))
