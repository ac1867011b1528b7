"""Make new names for the names in a log. Equal names get equal new names.

A new name is a keyed hash of the old one, under a random secret that is never written. A hash without a
secret is not enough: anyone who guesses a prompt or a client's name could hash the guess and compare.
"""

from __future__ import annotations

import builtins
import os
import re
from collections import Counter
from collections.abc import Collection
from hashlib import blake2b

from kvsm import errors
from kvsm.core.kv_events import GROUP_INDEX_BYTES
from kvsm.core.log import told_stop
from kvsm.tiers.disk_tier import DISK
from kvsm.tiers.hand_over.leases import LeaseEnd
from kvsm.tiers.warm_restart import KILLED

_LEAST_BYTES, _MOST_BYTES = 16, 64
"""Limits of a new key's length (bytes, without the group index). Within these limits a key keeps its
length."""

_TEXT_BYTES = 8
"""Length of the hash in a new text (bytes). Among a million names, two are equal with a probability of 1 in
40 million."""

_NUMBER_BYTES = 8
"""Length of the hash in a new number (bytes)."""

_LEASE_DIGITS = 8
"""The number of digits of the random part in the name of a hand-over or of a session's lease."""

_NO_NUMBERS: frozenset[int] = frozenset()

_OF_A_TIER = re.compile(r"(fetch|hold)-([0-9]{1,18})-for-(.*)", re.DOTALL)
_OF_A_HOLD = re.compile(r"(hand-over|lease)-([^-]{0,8})-of-(.*)", re.DOTALL)
_STORE_OF_A_TIER = re.compile(r"disk-store-[0-9]{1,18}")
"""Names of the requests for kvsm's own copies. Readers match the logs of two tiers by the numbers in them.
A client can choose such a name too, with any number in it."""

_ENGINE = "engine "
"""The prefix of `StorePlanned.source` for a hand-over."""

_OWN_TEXTS = {KILLED, told_stop("SIGTERM"), told_stop("SIGINT")}
"""kvsm's texts about the end of a process. They name only a signal."""

_ERROR = re.compile(
    r"(?:\w+\.)*(?P<name>[A-Za-z]\w*)(?=: |$)(?:: )?(?P<number>\[Errno [0-9]{1,3}\])?", re.ASCII
)

_ERROR_NAMES = {
    name
    for module in (builtins, errors)
    for name, kind in vars(module).items()
    if isinstance(kind, type) and issubclass(kind, BaseException)
} | {"AcceleratorError", "OutOfMemoryError"}
"""Names of error classes of Python, kvsm and torch. They reveal nothing about the user, so a copy keeps
them."""

_WEIGHTS = "weights: "
"""The prefix of the reasons in `LogOpened.cold` that `kvsm report` treats differently."""


class NewNames:
    """The new names of one copy, or of several copies that belong together.

    secret: 16 to 64 bytes; None: a random secret, which exists only in this object.

    Attribute `renamed`: what was renamed -> how many times.
    """

    def __init__(self, secret: bytes | None = None) -> None:
        self._secret = os.urandom(32) if secret is None else secret
        self.renamed: Counter[str] = Counter()

    def request(self, name: str, *, is_copy: bool = False, fetches: Collection[int] = _NO_NUMBERS) -> str:
        """Rename a request. The name of one of kvsm's own copies keeps its form, and its number if kvsm is
        known to have made it: any other number may be one of the client.

        is_copy: whether the log says that the request stands for a copy between tiers.
        fetches: numbers of copies from the disk, which may stay in `fetch-NUMBER-for-...`.
        """
        if is_copy and _STORE_OF_A_TIER.fullmatch(name):
            return name
        before = ""
        while True:  # not a recursion: a crafted name may be of thousands of parts
            if found := _OF_A_TIER.fullmatch(name):
                keeps_number = found[1] == "fetch" and int(found[2]) in fetches
                before += f"{found[1]}-{found[2] if keeps_number else self._number(found[2])}-for-"
            elif found := _OF_A_HOLD.fullmatch(name):
                before += f"{found[1]}-{self._text('lease', found[2])[:_LEASE_DIGITS]}-of-"
            else:
                return f"{before}r{self._text('request', name)}"
            name, fetches = found[found.re.groups], _NO_NUMBERS

    def key(self, key: bytes) -> bytes:
        """Rename a key. The index of its KV cache group stays; keys with an equal hash keep an equal hash."""
        part = key[-GROUP_INDEX_BYTES:]
        has_group = len(part) == GROUP_INDEX_BYTES and not any(part[:-1])
        hash, group = (key[:-GROUP_INDEX_BYTES], part) if has_group else (key, b"")
        return self._bytes("key", hash) + group

    def identifier(self, value: bytes) -> bytes:
        """Rename the id of a run, a life or a pool. An empty one stays empty."""
        return self._bytes("id", value) if value else b""

    def tier(self, name: str) -> str:
        """Rename a target of copies, unless it is kvsm's own disk, or empty."""
        return name if name in ("", DISK) else f"tier-{self._text('tier', name)}"

    def source(self, name: str) -> str:
        """Rename a source of copies: the engine of a hand-over, or a tier."""
        if name.startswith(_ENGINE):
            return f"{_ENGINE}{self._text('engine', name.removeprefix(_ENGINE))}"
        return self.tier(name)

    def hand_over(self, end: str) -> str:
        """Keep a hand-over's end if it is one of kvsm's own words; rename any other text."""
        return end if end in _HAND_OVER_ENDS else f"end-{self._text('text', end)}"

    def session(self, name: str) -> str:
        """Rename a client's session, unless it is empty."""
        return f"session-{self._text('session', name)}" if name else ""

    def weights(self, version: str) -> str:
        """Rename a version of the weights. An unnamed version stays unnamed."""
        return f"weights-{self._text('weights', version)}" if version else ""

    def error(self, text: str) -> str:
        """Replace the text of an error, which may contain paths and names. Keep the class if Python, kvsm or
        torch defines it, and the number of a system error."""
        if not text or text in _OWN_TEXTS:
            return text
        found = _ERROR.match(text)
        if found is None or found["name"] not in _ERROR_NAMES:
            return f"text-{self._text('text', text)}"
        rest = text[found.end() :]
        parts = [found["number"], f"text-{self._text('text', rest)}" if rest else None]
        detail = " ".join(part for part in parts if part)
        return f"{found['name']}: {detail}" if detail else found["name"]

    def reason(self, line: str) -> str:
        """Replace a reason for a cold start. Keep the prefix which says that the weights differ."""
        is_weights = line.startswith(_WEIGHTS)
        return f"{_WEIGHTS if is_weights else ''}text-{self._text('text', line)}"

    def fact(self, text: str) -> str:
        """Replace the name or the value of a fact about a pool."""
        return f"fact-{self._text('fact', text)}"

    def _number(self, digits: str) -> str:
        """Replace a number by another one that is too long for the number of an event."""
        hashed = self._hash("number", digits.encode(), _NUMBER_BYTES)
        return f"{int.from_bytes(hashed, 'big'):020}"

    def _text(self, room: str, text: str) -> str:
        return self._hash(room, text.encode(errors="surrogatepass"), _TEXT_BYTES).hex()

    def _bytes(self, room: str, value: bytes) -> bytes:
        return self._hash(room, value, min(max(len(value), _LEAST_BYTES), _MOST_BYTES))

    def _hash(self, room: str, value: bytes, size: int) -> bytes:
        self.renamed[room] += 1
        return blake2b(value, digest_size=size, key=self._secret, person=room.encode()).digest()


_HAND_OVER_ENDS = {"", *(end.value for end in LeaseEnd)}
