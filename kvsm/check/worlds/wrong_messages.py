"""Messages between two engines as a broken or hostile peer would send them: of wrong types, sizes or frames.

Each field of a valid message is left out, or replaced by values of every type and of sizes at the limits of
numbers, texts and lists. The message is also truncated, doubled, nested too deep, and framed with wrong
lengths. Some of these messages can be decoded all the same, with false content. They come first, because they
reach more code.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from struct import pack
from typing import Any

import msgspec

from kvsm.check.worlds.small_request import HASH_TOKENS
from kvsm.core.scheduler.hits import Span
from kvsm.core.scheduler.request_params import MOST_NAME, TOKENS_END
from kvsm.tiers.hand_over.peer_messages import (
    IDS_END,
    MOST_ANSWER_BYTES,
    Answer,
    GiveBack,
    GivenBack,
    HandOverClaim,
    Offered,
    OfferedGroup,
    Question,
    packed,
)

WRONG = {"lie": (25, 260), "stray": (20, 400)}
"""Kind of action -> (about how many wrong messages can be decoded, about how many there are). A walk draws
from the first of these, or from all."""

_NUMBERS = (-1, 0, 1, 1 << 31, IDS_END - 1, IDS_END, 1 << 33, TOKENS_END, (1 << 63) - 1, (1 << 64) - 1)
_VALUES: tuple[Any, ...] = (
    *(None, True, False, *_NUMBERS, 1.5, float("nan")),
    *("", "x", "\0\n", "x" * (MOST_NAME + 1), b"", b"x", b"\xff" * 2_000),
    *([], [1], [[]], {}, {"m": "1"}, {"first": 0, "slots": []}),
)
_DEPTH = 20_000
"""The depth of a nested list that no reader follows to its end."""


def wrong_messages(right: Question | Answer) -> list[bytes]:
    """Wrong messages in place of this one, as bytes on the wire. None equals the message."""
    content = msgspec.to_builtins(right, builtin_types=(bytes,))
    whole = _encoded(right)
    contents = [changed for changed in map(_encoded, _changed(content)) if changed != whole]
    contents.sort(key=lambda changed: not _can_be_read(changed))
    # The nested list replaces the last value, which takes one byte.
    deep = _encoded({**content, "more": 0})[:-1] + b"\x91" * _DEPTH + b"\0"
    framed = [_framed(changed) for changed in (*contents, deep, whole[:-1], whole + b"\0", b"", b"\xc1")]
    lengths = (0, 1, len(whole) + 1, MOST_ANSWER_BYTES, MOST_ANSWER_BYTES + 1, IDS_END - 1)
    return [
        *framed,
        *[pack(">I", length) + whole for length in lengths],
        _framed(whole) * 2,
        *(b"", b"\0", b"\xff" * 8),
    ]


def _changed(value: Any) -> Iterator[Any]:
    """Values to replace this one: all of `_VALUES`, and the value itself with one of its parts changed."""
    yield from _VALUES
    if isinstance(value, dict):
        for name, part in value.items():
            yield {other: kept for other, kept in value.items() if other != name}
            for changed in _changed(part):
                yield {**value, name: changed}
    elif isinstance(value, tuple) and value:
        yield value[:-1]
        yield value + value
        for changed in _changed(value[0]):
            yield [changed, *value[1:]]


STRANGER = 1 << 30
"""A reader number that differs from every ticket of the decode engine."""


@cache
def lies_about(num_tokens: int, spans: tuple[Span, ...]) -> tuple[bytes, ...]:
    """Wrong answers to a claim. Most offer slots that no pool has."""
    no_slot = 1 << 20
    groups = [
        OfferedGroup(span.first, tuple(range(no_slot, no_slot + span.last - span.first))) for span in spans
    ]
    offer = Offered(num_tokens, tuple(groups))
    return (packed(offer), packed(GivenBack(held=True)), *wrong_messages(offer))


@cache
def lies_at_the_end() -> tuple[bytes, ...]:
    """Wrong answers to `GiveBack`, except `held=True`, which a decode engine cannot recognize as wrong."""
    undetectable = packed(GivenBack(held=True))
    wrong = [message for message in wrong_messages(GivenBack(held=False)) if message != undetectable]
    return (packed(Offered(16, ())), *wrong)


@cache
def strays_for(lease: str) -> tuple[bytes, ...]:
    """Questions of a peer that has the name of a hand-over but not its prompt."""
    claim, back = HandOverClaim(lease, b"a guess", HASH_TOKENS, {}), GiveBack(lease, read=True)
    return (packed(claim), packed(back), *wrong_messages(claim), *wrong_messages(back))


def _can_be_read(content: bytes) -> bool:
    try:
        msgspec.msgpack.decode(content, type=Question | Answer)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


def _encoded(content: Any) -> bytes:
    return msgspec.msgpack.encode(content)


def _framed(content: bytes) -> bytes:
    return pack(">I", len(content)) + content
