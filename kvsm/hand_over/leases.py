"""`LeaseTable`: which hand-overs of a prefill engine are out, who may read them, and until when.

Two threads use it. The engine's thread offers a hand-over, says when its blocks can be read, and revokes it.
The thread of the socket lets one reader claim it. Each call is one step under one lock, so the two cannot
come between each other: this table decides what both may do.

=========  ==========================  =========  =========================================================
state      call                        to         when
=========  ==========================  =========  =========================================================
-          offer                       PREPARING  a request is over, and its last stores may be in flight
PREPARING  ready                       READY      its blocks are on the host, and pinned
READY      claim                       CLAIMED    by one reader, before the time is up
CLAIMED    give_back, read             ENDED      taken: only now "they were held all along" is true
CLAIMED    give_back, not read         ENDED      not needed: the reader had the blocks already
CLAIMED    leave                       ENDED      given up: the reader wants it no more, or is gone
any        expire                      ENDED      its time is up; for a claimed one, the time of the claim
any        revoke                      ENDED      the engine needs or loses the blocks
=========  ==========================  =========  =========================================================

The engine gives blocks up only after their lease has ended, and a lease ends once. So a reader that is told
"held all along" has read blocks that nobody else could write. A reader that was too slow is told no.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum
from hmac import compare_digest
from threading import Lock

import msgspec

from kvsm.hand_over.messages import Answer, GivenBack, HandOverClaim, Offered, Pending, Refused


class HandOverState(Enum):
    """Where a lease is. ENDED is kept until the engine has heard of it."""

    PREPARING = "preparing"
    READY = "ready"
    CLAIMED = "claimed"
    ENDED = "ended"


class LeaseEnd(Enum):
    """How a lease ended."""

    TAKEN = "taken"
    NOT_NEEDED = "not needed"
    """The decode engine had the blocks already."""
    GIVEN_UP = "given up by the decode engine"
    EXPIRED = "expired"
    REVOKED = "revoked"


class HandOverLease(msgspec.Struct):
    """One hand-over.

    prompt: the digest of the prompt. Who does not know the prompt gets no blocks.
    num_tokens: the tokens of the prompt that the digest covers.
    until: when its time is up (s, on the table's clock).
    """

    prompt: bytes
    num_tokens: int
    until: float
    state: HandOverState = HandOverState.PREPARING
    offer: Offered | None = None
    reader: int = 0
    end: LeaseEnd | None = None


class LeaseTable:
    """The leases of one engine. All calls may come from any thread.

    timeout_s: how long a lease waits for its reader, and then how long the reader may read (s).
    clock: monotonic time (s); public, so that a test can choose it.
    """

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.timeout_s, self.clock = timeout_s, clock
        self._lock = Lock()
        self._leases: dict[str, HandOverLease] = {}

    # The engine's thread.

    def offer(self, name: str, prompt: bytes, num_tokens: int) -> None:
        """A hand-over begins. name: one that nobody can guess."""
        with self._lock:
            self._leases[name] = HandOverLease(prompt, num_tokens, self.clock() + self.timeout_s)

    def ready(self, name: str, offer: Offered) -> None:
        """Its blocks can be read from now on, until it ends."""
        with self._lock:
            lease = self._leases[name]
            if lease.state is HandOverState.PREPARING:
                lease.state, lease.offer = HandOverState.READY, offer

    def revoke(self, name: str) -> None:
        """Its blocks go, even while somebody reads them. From now on no reader is told "held all along"."""
        with self._lock:
            _end(self._leases[name], LeaseEnd.REVOKED)

    def expire(self) -> None:
        """End every lease whose time is up."""
        with self._lock:
            now = self.clock()
            for lease in self._leases.values():
                if now >= lease.until:
                    _end(lease, LeaseEnd.EXPIRED)

    def has_ended(self) -> bool:
        """Whether a lease has ended, or its time is up, and the engine has not heard of it."""
        with self._lock:
            now = self.clock()
            return any(one.end is not None or now >= one.until for one in self._leases.values())

    def take_ended(self) -> list[tuple[str, LeaseEnd]]:
        """The leases that have ended since the last call. The table forgets them, and their blocks may go."""
        with self._lock:
            ended = [(name, lease.end) for name, lease in self._leases.items() if lease.end is not None]
            for name, _ in ended:
                del self._leases[name]
        return ended

    # The thread of the socket.

    def claim(self, asked: HandOverClaim, reader: int) -> Answer:
        """What a decode engine hears that asks for a hand-over. reader: its connection."""
        with self._lock:
            lease = self._leases.get(asked.hand_over)
            if lease is None or lease.state is HandOverState.ENDED:
                return Refused("there is no such hand-over: it has expired, was taken, or was reset")
            if not compare_digest(lease.prompt, asked.prompt) or lease.num_tokens != asked.num_tokens:
                return Refused("it is of another prompt, adapter, image, salt or version of the weights")
            if lease.state is HandOverState.CLAIMED:
                return Refused("another engine reads it already")
            if self.clock() >= lease.until:
                _end(lease, LeaseEnd.EXPIRED)
                return Refused(f"it was not claimed within {self.timeout_s:g} s")
            if lease.offer is None:
                return Pending()
            lease.state, lease.reader = HandOverState.CLAIMED, reader
            lease.until = self.clock() + self.timeout_s
            return lease.offer

    def give_back(self, name: str, reader: int, *, read: bool) -> GivenBack:
        """The reader has read the blocks, or has them already. Returns whether they were held all along."""
        with self._lock:
            lease = self._leases.get(name)
            if lease is None or lease.state is not HandOverState.CLAIMED or lease.reader != reader:
                return GivenBack(held=False)
            if self.clock() >= lease.until:
                _end(lease, LeaseEnd.EXPIRED)
                return GivenBack(held=False)
            _end(lease, LeaseEnd.TAKEN if read else LeaseEnd.NOT_NEEDED)
            return GivenBack(held=True)

    def decline(self, asked: HandOverClaim) -> None:
        """A decode engine that knows the prompt does not want a hand-over that nobody has claimed."""
        with self._lock:
            lease = self._leases.get(asked.hand_over)
            if lease is not None and lease.reader == 0 and compare_digest(lease.prompt, asked.prompt):
                _end(lease, LeaseEnd.GIVEN_UP)

    def leave(self, reader: int) -> None:
        """The connection of this reader is closed. What it has not given back is given up."""
        with self._lock:
            for lease in self._leases.values():
                if lease.reader == reader:
                    _end(lease, LeaseEnd.GIVEN_UP)


def _end(lease: HandOverLease, how: LeaseEnd) -> None:
    """End it, unless it has ended. A lease ends once."""
    if lease.state is not HandOverState.ENDED:
        lease.state, lease.end = HandOverState.ENDED, how
