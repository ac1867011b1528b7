"""What two engines say to each other over a unix socket, and the names by which they meet.

Each message is its length (4 bytes, big-endian) and MessagePack. The decode engine asks, the prefill engine
answers each question once. A connection is for one hand-over.

Both engines name the same directory. Everything in it is named after an engine's id: a hash of it, because an
id may be any text, and a client may send any id. What a client sends never becomes part of a path.
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
"""Of one answer: the slots of a prompt of a million blocks."""

MOST_QUESTION_BYTES = 1 << 20
"""Of one question: most of it is the layout."""

IDS_END = 1 << 32
"""Ids of host blocks are below it, as in `kvsm.ids`."""

MOST_PATH_BYTES = 107
"""Of a unix socket's path: what the system allows."""

_LENGTH = struct.Struct(">I")

# What the other side may say, by type and size: the decoders refuse everything else.
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MOST_NAME)]
NumTokens = Annotated[int, msgspec.Meta(ge=0, lt=TOKENS_END)]
Chunk = Annotated[int, msgspec.Meta(ge=0, lt=IDS_END)]
Slot = Annotated[int, msgspec.Meta(ge=0, lt=IDS_END)]


class HandOverClaim(msgspec.Struct, frozen=True, tag="claim"):
    """The decode engine wants a hand-over.

    prompt: the digest of the first `num_tokens` tokens of its request, and of what else decides their KV.
    layout: what a block means in this engine (`why_not_alike`).
    wanted: False: it wants it no more, and nobody else will.
    """

    hand_over: Name
    prompt: bytes
    num_tokens: NumTokens
    layout: Mapping[str, str]
    wanted: bool = True


class GiveBack(msgspec.Struct, frozen=True, tag="give back"):
    """The decode engine needs the blocks no more. read: it has copied them, and asks whether they were held
    all along. False: it had them already."""

    hand_over: Name
    read: bool


class OfferedGroup(msgspec.Struct, frozen=True):
    """The chunks of one KV cache group, from chunk `first` of the prompt on, by the host slot of each."""

    first: Chunk
    slots: tuple[Slot, ...]


class Offered(msgspec.Struct, frozen=True, tag="offered"):
    """These slots hold the blocks that a hit of `num_tokens` tokens needs, by group."""

    num_tokens: NumTokens
    groups: tuple[OfferedGroup, ...]


class Pending(msgspec.Struct, frozen=True, tag="pending"):
    """The last blocks are on their way to the host: ask again."""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """There is nothing for this engine. reason: for people."""

    reason: str


class GivenBack(msgspec.Struct, frozen=True, tag="given back"):
    """The hand-over is over. held: nobody could write its blocks between the claim and now."""

    held: bool


Question = HandOverClaim | GiveBack
Answer = Offered | Pending | Refused | GivenBack

_QUESTIONS: msgspec.msgpack.Decoder[Question] = msgspec.msgpack.Decoder(Question)
_ANSWERS: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def packed(message: Question | Answer) -> bytes:
    """A message as it travels."""
    content = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(content)) + content


class Inbox:
    """Bytes that came over one connection, until they are whole messages.

    most_bytes: of one message.

    Who sent the bytes is not trusted. `question` and `answer` raise for what is no such message:
    `ValueError`, `msgspec.DecodeError`, or `RecursionError` for one that is nested too deep.
    """

    def __init__(self, most_bytes: int) -> None:
        self._bytes, self._most_bytes = bytearray(), most_bytes

    def add(self, received: bytes) -> None:
        """Take bytes."""
        self._bytes += received

    def question(self) -> Question | None:
        """The next question; None if it is not whole yet."""
        content = self._content()
        return None if content is None else _QUESTIONS.decode(content)

    def answer(self, asked: Question | None) -> Answer | None:
        """The answer to this question; None if it is not whole yet. One question has one answer."""
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
    """How the blocks of two engines differ, for people; None if their bytes mean the same."""
    for name in sorted({*ours, *theirs}):
        if ours.get(name) != theirs.get(name):
            here, there = _shown(ours.get(name)), _shown(theirs.get(name))
            return f"its blocks differ from the decode engine's: {name} is {here}, and {there} there"
    return None


def _shown(value: str | None) -> str:
    text = repr(value)
    return text if len(text) <= 160 else text[:157] + "..."


def hand_over_directory(given: str | None) -> Path | None:
    """The directory that a user names, made if it is missing. None if none is named. Raises `ConfigError`."""
    if given is None:
        return None
    private_directory(Path(given))
    return Path(given)


def socket_path(directory: Path, engine: str) -> Path:
    """The socket of the engine with this id. Raises `ConfigError` if the directory's path is too long."""
    path = directory / f"{_stem(engine)}.sock"
    if len(str(path).encode()) > MOST_PATH_BYTES:
        raise ConfigError(
            f"{directory}: is too long for the path of a socket, which has at most {MOST_PATH_BYTES} bytes; "
            "give a shorter hand_over_directory"
        )
    return path


def pool_path(directory: Path, engine: str, rank: int) -> Path:
    """The host pool of one rank of the engine with this id."""
    return directory / f"{_stem(engine)}-rank{rank}.pool"


def _stem(engine: str) -> str:
    return "kvsm-" + sha256(engine.encode(errors="surrogatepass")).hexdigest()[:24]
