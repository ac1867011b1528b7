"""The messages between two engines over a unix socket, and the paths of that socket and of the host pools.

Each message is its length (4 bytes, big-endian) and MessagePack. The decode engine asks; the prefill engine
answers each question once. A connection is for one hand-over.

Both engines are configured with the same directory. The name of each file in it has a hash of the engine's
id, because an id may be any text, and a client may send any id: text of a client never becomes part of a
path.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Annotated

import msgspec

from kvsm.core.scheduler.request_params import MOST_NAME, TOKENS_END
from kvsm.errors import ConfigError
from kvsm.system.private_files import private_directory

MOST_ANSWER_BYTES = 16 << 20
"""Most bytes of one answer: room for the slots of a prompt of a million blocks."""

MOST_QUESTION_BYTES = 1 << 20
"""Most bytes of one question. Most of a question is the layout."""

IDS_END = 1 << 32
"""Upper limit for ids of host blocks, exclusive, as in `kvsm.ids`."""

MOST_PATH_BYTES = 107
"""Longest path of a unix socket that the system allows."""

_LENGTH = struct.Struct(">I")

# The decoders refuse fields of other types or sizes.
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MOST_NAME)]
NumTokens = Annotated[int, msgspec.Meta(ge=0, lt=TOKENS_END)]
Chunk = Annotated[int, msgspec.Meta(ge=0, lt=IDS_END)]
Slot = Annotated[int, msgspec.Meta(ge=0, lt=IDS_END)]


class HandOverClaim(msgspec.Struct, frozen=True, tag="claim"):
    """A decode engine claims a hand-over, or declines it.

    hand_over: the name of the lease.
    prompt: the digest of the first `num_tokens` tokens of its request, and of all else that decides their KV.
    layout: what a block means in the decode engine (`why_not_alike`).
    wanted: False: the hand-over is declined, and no other engine will claim it.
    """

    hand_over: Name
    prompt: bytes
    num_tokens: NumTokens
    layout: Mapping[str, str]
    wanted: bool = True


class GiveBack(msgspec.Struct, frozen=True, tag="give back"):
    """A decode engine ends its claim.

    read: True: it has copied the blocks, and asks whether they were held until now. False: it has the blocks
        already.
    """

    hand_over: Name
    read: bool


class OfferedGroup(msgspec.Struct, frozen=True):
    """The host slots of consecutive chunks of one KV cache group, from chunk `first` of the prompt on."""

    first: Chunk
    slots: tuple[Slot, ...]


class Offered(msgspec.Struct, frozen=True, tag="offered"):
    """Answer: the host slots of the blocks for a hit of `num_tokens` tokens, by group."""

    num_tokens: NumTokens
    groups: tuple[OfferedGroup, ...]


class Pending(msgspec.Struct, frozen=True, tag="pending"):
    """Answer: the last blocks are in flight to the host, so claim again."""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Answer: nothing is handed over to this engine. reason: text for people."""

    reason: str


class GivenBack(msgspec.Struct, frozen=True, tag="given back"):
    """Answer: the hand-over has ended. held: whether its blocks were pinned from the claim until now."""

    held: bool


Question = HandOverClaim | GiveBack
Answer = Offered | Pending | Refused | GivenBack

_QUESTIONS: msgspec.msgpack.Decoder[Question] = msgspec.msgpack.Decoder(Question)
_ANSWERS: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def packed(message: Question | Answer) -> bytes:
    """Return the bytes of a message."""
    content = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(content)) + content


class Inbox:
    """Received bytes of one connection that are not decoded yet.

    most_bytes: largest size of a message.

    The sender is not trusted. For bytes that are no valid message `question` and `answer` raise `ValueError`,
    `msgspec.DecodeError`, or, if it is nested too deep, `RecursionError`.
    """

    def __init__(self, most_bytes: int) -> None:
        self._bytes, self._most_bytes = bytearray(), most_bytes

    def add(self, received: bytes) -> None:
        """Append received bytes."""
        self._bytes += received

    def question(self) -> Question | None:
        """Take the next question; None if it is incomplete."""
        content = self._content()
        return None if content is None else _QUESTIONS.decode(content)

    def answer(self, asked: Question | None) -> Answer | None:
        """Take the answer to the question `asked`; None if it is incomplete. Raises `ValueError` for bytes
        beyond that one answer."""
        if asked is None and self._bytes:
            raise ValueError("it answers, and nothing was asked")
        content = self._content()
        if content is None:
            return None
        if self._bytes:
            raise ValueError("it answers more than it was asked")
        answer = _ANSWERS.decode(content)
        if isinstance(answer, GivenBack) is not isinstance(asked, GiveBack):
            raise ValueError(f"{type(answer).__name__} is no answer to {type(asked).__name__}")
        return answer

    def _content(self) -> bytes | None:
        if len(self._bytes) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._bytes)
        if length > self._most_bytes:
            raise ValueError(f"a message of {length:,} bytes; the most is {self._most_bytes:,}")
        end = _LENGTH.size + length
        if len(self._bytes) < end:
            return None
        content = bytes(self._bytes[_LENGTH.size : end])
        del self._bytes[:end]
        return content


def why_not_alike(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str | None:
    """Describe how the blocks of two engines differ, for people; None if their bytes mean the same."""
    for name in sorted({*ours, *theirs}):
        if ours.get(name) != theirs.get(name):
            here, there = _shown(ours.get(name)), _shown(theirs.get(name))
            return f"its blocks differ from the decode engine's: {name} is {here}, and {there} there"
    return None


def _shown(value: str | None) -> str:
    text = repr(value)
    return text if len(text) <= 160 else text[:157] + "..."


def hand_over_directory(given: str | None) -> Path | None:
    """Return the configured directory, created if missing; None if none is configured. Raises
    `ConfigError`."""
    if given is None:
        return None
    private_directory(Path(given))
    return Path(given)


def socket_path(directory: Path, engine: str) -> Path:
    """Return the socket's path for an engine id. Raises `ConfigError` if the path is too long."""
    path = directory / f"{_stem(engine)}.sock"
    if len(str(path).encode()) > MOST_PATH_BYTES:
        raise ConfigError(
            f"{directory}: is too long for the path of a socket, which has at most {MOST_PATH_BYTES} bytes; "
            "give a shorter hand_over_directory"
        )
    return path


def pool_path(directory: Path, engine: str, rank: int) -> Path:
    """Return the path of the host pool of one rank, for an engine id."""
    return directory / f"{_stem(engine)}-rank{rank}.pool"


def _stem(engine: str) -> str:
    return "kvsm-" + sha256(engine.encode(errors="surrogatepass")).hexdigest()[:24]
