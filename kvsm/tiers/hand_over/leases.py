"""`LeaseTable`: the open hand-overs of a prefill engine: which reader may read each, and until when.

Two threads use it. The engine's thread offers a hand-over, notes when its blocks can be read, and revokes it.
The socket's thread lets one reader claim it. Each call is atomic under one lock.

=========  ==========================  =========  =========================================================
state      call                        to         when
=========  ==========================  =========  =========================================================
-          offer                       PREPARING  a request has ended; its last stores may be in flight
PREPARING  ready                       READY      its blocks are on the host, and pinned
READY      claim                       CLAIMED    one reader claims it before it expires
CLAIMED    give_back, read             -          taken: the blocks were held until this moment
CLAIMED    give_back, not read         -          not needed: the reader had the blocks already
CLAIMED    leave                       -          given up: the reader declines it, or is gone
unclaimed  decline                     -          given up: a decode engine with the prompt's digest declines
unclaimed  crowd_out                   -          newer hand-overs need its share of the host pool
any        expire                      -          its time is up; a claim restarts the time
any        revoke                      -          the engine needs the blocks, or has lost them
=========  ==========================  =========  =========================================================

Leases are sorted by the time at which they expire, so no call visits leases that it does not change.

The engine releases blocks only after their lease has ended, and a lease ends once. So a reader that gets
`held=True` has read blocks that were not overwritten. A reader that was too slow gets `held=False`.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from enum import Enum
from hmac import compare_digest
from threading import Lock

import msgspec

from kvsm.system.steady_clock import SteadyClock
from kvsm.tiers.hand_over.peer_messages import Answer, GivenBack, HandOverClaim, Offered, Pending, Refused


class HandOverState(Enum):
    """The state of a lease."""

    PREPARING = "preparing"
    READY = "ready"
    CLAIMED = "claimed"


class LeaseEnd(Enum):
    """How a lease ended."""

    TAKEN = "taken"
    NOT_NEEDED = "not needed"
    """The decode engine had the blocks already."""
    GIVEN_UP = "given up by the decode engine"
    EXPIRED = "expired"
    REVOKED = "revoked"
    CROWDED_OUT = "crowded out"


class HandOverLease(msgspec.Struct):
    """One open hand-over.

    prompt: the digest of the prompt. A claim with another digest is refused.
    num_tokens: number of tokens of the prompt that the digest covers.
    until: when it expires (s, on the table's clock).
    offer: the blocks; None until they are ready.
    reader: the connection that has claimed it; 0: none.
    """

    prompt: bytes
    num_tokens: int
    until: float
    state: HandOverState = HandOverState.PREPARING
    offer: Offered | None = None
    reader: int = 0


class LeaseTable:
    """The leases of one engine. All calls may come from any thread.

    timeout_s: how long a lease waits for its reader, and then how long the reader may read (s).
    clock: monotonic time (s); a clock that goes back makes no lease last longer. Public, so that a test can
        replace it.
    """

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.timeout_s = timeout_s
        self.clock: Callable[[], float] = SteadyClock(clock)
        self._lock = Lock()
        self._leases: OrderedDict[str, HandOverLease] = OrderedDict()
        """Leases that have not ended, sorted by the time at which they expire."""
        self._claimed: dict[int, dict[str, None]] = {}
        """Reader -> the leases that it has claimed."""
        self._ended: list[tuple[str, LeaseEnd]] = []
        """Leases that have ended and that `take_ended` has not returned yet."""

    # The engine's thread.

    def offer(self, name: str, prompt: bytes, num_tokens: int) -> None:
        """Open a hand-over. name: must be unguessable."""
        with self._lock:
            self._leases[name] = HandOverLease(prompt, num_tokens, self.clock() + self.timeout_s)

    def ready(self, name: str, offer: Offered) -> None:
        """Allow a reader to claim the hand-over: its blocks are on the host and pinned."""
        with self._lock:
            lease = self._leases.get(name)
            if lease is not None and lease.state is HandOverState.PREPARING:
                lease.state, lease.offer = HandOverState.READY, offer

    def revoke(self, name: str) -> None:
        """End the lease, even if a reader is reading the blocks. That reader then gets held=False."""
        with self._lock:
            self._end(name, LeaseEnd.REVOKED)

    def crowd_out(self, name: str) -> bool:
        """End the lease for newer hand-overs, unless it is claimed. Returns whether it has ended."""
        with self._lock:
            lease = self._leases.get(name)
            if lease is not None and lease.state is not HandOverState.CLAIMED:
                self._end(name, LeaseEnd.CROWDED_OUT)
            return name not in self._leases

    def expire(self) -> None:
        """End every lease whose time is up."""
        with self._lock:
            while self._first_is_overdue():
                self._end(next(iter(self._leases)), LeaseEnd.EXPIRED)

    def has_ended(self) -> bool:
        """Whether `take_ended` has leases to return, or a lease must expire."""
        with self._lock:
            return bool(self._ended) or self._first_is_overdue()

    def take_ended(self) -> list[tuple[str, LeaseEnd]]:
        """Return the leases that have ended since the last call. Their blocks may be released."""
        with self._lock:
            ended, self._ended = self._ended, []
        return ended

    # The thread of the socket.

    def claim(self, asked: HandOverClaim, reader: int) -> Answer:
        """Answer a claim of a decode engine. reader: the number of its connection, from 1."""
        with self._lock:
            lease = self._leases.get(asked.hand_over)
            if lease is None:
                return Refused(
                    "there is no such hand-over: it has expired, was taken or given up, or was reset"
                )
            if not compare_digest(lease.prompt, asked.prompt) or lease.num_tokens != asked.num_tokens:
                return Refused("it is of another prompt, adapter, image, salt or version of the weights")
            if lease.state is HandOverState.CLAIMED:
                return Refused("another engine reads it already")
            if self.clock() >= lease.until:
                self._end(asked.hand_over, LeaseEnd.EXPIRED)
                return Refused(f"it was not claimed within {self.timeout_s:g} s")
            if lease.offer is None:
                return Pending()
            lease.state, lease.reader = HandOverState.CLAIMED, reader
            lease.until = self.clock() + self.timeout_s
            self._leases.move_to_end(asked.hand_over)
            self._claimed.setdefault(reader, {})[asked.hand_over] = None
            return lease.offer

    def give_back(self, name: str, reader: int, *, read: bool) -> GivenBack:
        """End a claim. Returns whether the blocks were held until now. read: whether the reader has copied
        them."""
        with self._lock:
            lease = self._leases.get(name)
            if lease is None or lease.state is not HandOverState.CLAIMED or lease.reader != reader:
                return GivenBack(held=False)
            if self.clock() >= lease.until:
                self._end(name, LeaseEnd.EXPIRED)
                return GivenBack(held=False)
            self._end(name, LeaseEnd.TAKEN if read else LeaseEnd.NOT_NEEDED)
            return GivenBack(held=True)

    def decline(self, asked: HandOverClaim) -> None:
        """End an unclaimed hand-over that a decode engine declines, if it has the digest of the prompt."""
        with self._lock:
            lease = self._leases.get(asked.hand_over)
            if lease is not None and lease.reader == 0 and compare_digest(lease.prompt, asked.prompt):
                self._end(asked.hand_over, LeaseEnd.GIVEN_UP)

    def has_claimed(self, reader: int) -> bool:
        """Whether this reader has claimed a lease that has not ended."""
        with self._lock:
            return reader in self._claimed

    def leave(self, reader: int) -> None:
        """End all claims of a reader whose connection is closed."""
        with self._lock:
            for name in list(self._claimed.get(reader, ())):
                self._end(name, LeaseEnd.GIVEN_UP)

    # Under the lock.

    def _first_is_overdue(self) -> bool:
        return bool(self._leases) and self.clock() >= next(iter(self._leases.values())).until

    def _end(self, name: str, how: LeaseEnd) -> None:
        """End the lease, unless it has ended already."""
        lease = self._leases.pop(name, None)
        if lease is None:
            return
        self._ended.append((name, how))
        if lease.reader:
            claimed = self._claimed[lease.reader]
            del claimed[name]
            if not claimed:
                del self._claimed[lease.reader]
