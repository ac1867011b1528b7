"""Parts of the hand-over world: an engine with its host pool, and the channel between two engines."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, TypeVar

import msgspec

from kvsm.check.worlds import parts as _declarations  # noqa: F401 (what is compared of a ledger)
from kvsm.core.ledger import Ledger
from kvsm.core.ledger.canonical import Names, compared
from kvsm.core.ledger.invariants import check_ledger
from kvsm.core.ledger.snapshot import digest
from kvsm.core.log import MemoryLog
from kvsm.core.offloader import Offloader
from kvsm.core.plan import ImportJob
from kvsm.core.scheduler.tracked import TrackedRequest
from kvsm.errors import PropertyBroken
from kvsm.events import OffloadConfig, TransfersSubmitted
from kvsm.ids import to_list
from kvsm.properties import Property
from kvsm.tiers.hand_over.leases import LeaseTable
from kvsm.tiers.hand_over.peer_messages import (
    MOST_ANSWER_BYTES,
    MOST_QUESTION_BYTES,
    Answer,
    GiveBack,
    GivenBack,
    HandOverClaim,
    Inbox,
    Offered,
    Pending,
    Refused,
    packed,
)
from kvsm.tiers.hand_over.service import answer_to

Piece = tuple[bytes, int]
"""A key, and the position of a block in the key's chunk."""

Thing = TypeVar("Thing")

LOADER = "own-load"
"""The name of the request that loads from the engine's own host."""


class HostCopy(msgspec.Struct):
    """A store or a load in flight.

    pieces: (host block, its content after a good copy).
    waiting: the ranks that have not reported.
    """

    transfer: int
    pieces: list[tuple[int, Piece]]
    waiting: list[int]


class FlushTrackingLog(MemoryLog):
    """A log that knows which events are written. written: the number of the last written event."""

    written = 0

    def flush(self) -> None:
        """Mark all events so far as written."""
        self.written = self[-1].seq if self else 0

    def check_leaving(self, engine: str) -> None:
        """Check that the submission of the jobs that leave now is written. Raises `PropertyBroken`."""
        if any(isinstance(event, TransfersSubmitted) and event.seq > self.written for event in self):
            message = f"jobs leave for the ranks of the {engine} engine before its log says so"
            raise PropertyBroken(Property.EVENTS_ARE_STATE, message)


class SmallHost:
    """An engine reduced to what hand-overs need: the real core, and the content of its host pool on each
    rank.

    It has no device memory: computed blocks always hold the right bytes.

    cells: [rank][host block], the content; None for unusable bytes.
    stores: the stores from its own device, oldest first.
    load: the load to its own device; None without one.
    """

    def __init__(self, config: OffloadConfig) -> None:
        self.log = FlushTrackingLog()
        self.core = Offloader(config, self.log, clock_ns=lambda: 0)
        self.cells: list[list[Piece | None]] = [
            [None] * (config.host_blocks * config.blocks_per_chunk) for _ in range(config.workers)
        ]
        self.stores: list[HostCopy] = []
        self.load: HostCopy | None = None

    def begin_store(self, request: str, keys: Sequence[bytes], device_blocks: Sequence[int]) -> None:
        """Store those of these computed chunks that the host lacks. The copies begin to write at once."""
        core, chunk = self.core, self.core.config.blocks_per_chunk
        prepared = core.store(((request, len(keys)),), keys, device_blocks)
        if prepared.job is None:
            return
        core.submit([prepared.job.transfer])
        pieces = [(key, part) for key in prepared.keys for part in range(chunk)]
        hosts = to_list(prepared.job.host_blocks)
        for cells in self.cells:
            for host in hosts:
                cells[host] = None
        workers = list(range(core.config.workers))
        self.stores.append(HostCopy(prepared.job.transfer, list(zip(hosts, pieces)), workers))

    def end_store(self, place: int, worker: int, good: bool) -> None:
        """A rank ends its share of a store and reports it. After a bad copy its bytes are unusable."""
        copy = self.stores[place]
        for host, piece in copy.pieces:
            self.cells[worker][host] = piece if good else None
        copy.waiting.remove(worker)
        if not copy.waiting:
            self.stores.remove(copy)
        self.core.report(copy.transfer, worker, good)

    def serves(self, key: bytes) -> bool:
        """Whether a load may read the block of this key."""
        slot = self.core.ledger.index.get(key)
        return slot is not None and self.core.ledger.readable(slot)

    def begin_load(self, keys: Sequence[bytes], first: int) -> None:
        """Load the chunks that the host has, for one request, to the device blocks from `first` on."""
        core, chunk = self.core, self.core.config.blocks_per_chunk
        core.arrive(LOADER)
        hits = core.match(LOADER, keys).hits
        job = core.prepare_load(LOADER, range(first, first + hits * chunk))
        if job is None:  # a needed chunk is still being stored: the request would wait for it
            core.finish(LOADER)
            return
        core.submit([job.transfer])
        pieces = [(key, part) for key in keys[:hits] for part in range(chunk)]
        workers = list(range(core.config.workers))
        self.load = HostCopy(job.transfer, list(zip(to_list(job.host_blocks), pieces)), workers)

    def end_load(self, worker: int, good: bool) -> None:
        """A rank ends its share of the load and reports it. Checks that no copy has overwritten it (S3)."""
        copy = self.load
        assert copy is not None
        for host, piece in copy.pieces:
            if self.cells[worker][host] != piece:
                message = f"a load reads {self.cells[worker][host]} from host block {host}, and wants {piece}"
                raise PropertyBroken(Property.NO_REUSE_IN_FLIGHT, message)
        copy.waiting.remove(worker)
        self.core.report(copy.transfer, worker, good)
        if not copy.waiting:
            self.load = None
            self.core.finish(LOADER)

    def check_bytes(self, engine: str) -> None:
        """Check that each readable key has its own bytes on every rank (S2, S15)."""
        ledger, chunk = self.core.ledger, self.core.config.blocks_per_chunk
        for key, slot in ledger.index.items():
            if not ledger.readable(slot):
                continue
            for worker, cells in enumerate(self.cells):
                held = cells[slot * chunk : (slot + 1) * chunk]
                if held != [(key, part) for part in range(chunk)]:
                    message = (
                        f"the {engine} engine serves key {key.hex()} from slot {slot}, "
                        f"which holds {held} on rank {worker}"
                    )
                    raise PropertyBroken(Property.PUBLISH_AFTER_COMMIT, message)

    def check(self) -> None:
        """Check the ledger's own properties."""
        for violation in check_ledger(self.core.ledger):
            raise PropertyBroken(violation.property, violation.message)

    def check_fold(self, engine: str) -> None:
        """Check that the log folds to the present state (S10)."""
        folded = Ledger(self.core.config)
        for event in self.log:
            folded.apply(event)
        if digest(folded) != digest(self.core.ledger):
            message = f"the log of the {engine} engine folds to another state"
            raise PropertyBroken(Property.EVENTS_ARE_STATE, message)

    def form(self, requests: Sequence[str]) -> tuple[object, ...]:
        """The state that decides the future. Transfers are named by their order, requests by their place in
        `requests`."""
        ledger = self.core.ledger
        rank = self.ranks()
        same_slots = {slot: slot for slot in range(len(ledger.key_of))}
        same_blocks = {block: block for block in range(self.core.config.device_blocks)}
        places = {name: place for place, name in enumerate((*requests, LOADER))}
        names = Names(ledger, places, rank, same_slots, same_blocks)
        under_way = (*self.stores, *([] if self.load is None else [self.load]))
        copies = [(rank.get(copy.transfer, -1), copy.pieces, copy.waiting) for copy in under_way]
        return compared(ledger, names), self.cells, copies

    def ranks(self) -> dict[int, int]:
        """Live transfer -> its position."""
        return {transfer: place for place, transfer in enumerate(self.core.ledger.transfers)}


class ModelClaim(msgspec.Struct, eq=False):
    """A connection of the decode engine to one process of a prefill engine.

    leases: the lease table of that process.
    reader: its number in the lease table.
    question: the message that the prefill engine has not answered yet; None if there is none.
    held: the keys that the decode engine held when it gave the blocks back unread.
    """

    ticket: int
    leases: LeaseTable
    reader: int
    claim: HandOverClaim
    question: HandOverClaim | GiveBack | None
    held: Set[bytes] = frozenset()

    def notice_close(self) -> None:
        """The prefill engine reads the last message of this closed connection, if any, and then the close."""
        if self.question is not None:
            answer_to(self.question, self.reader, self.leases, {})
        self.leases.leave(self.reader)


def answer_to_bytes(content: bytes, reader: int, leases: LeaseTable) -> Answer | None:
    """The prefill engine's answer to received bytes; None if it closes the connection instead."""
    inbox = Inbox(MOST_QUESTION_BYTES)
    inbox.add(content)
    try:
        question = inbox.question()
    except Exception:
        return None
    return None if question is None else answer_to(question, reader, leases, {})


class ModelChannel:
    """The channel of a decode engine, a model of `Claims` and `HandOverService` without threads and sockets.

    A question waits until it is served. So any action can happen between a question and its answer, and
    between the close of a connection and the moment at which the prefill engine notices it.

    leases_of: returns the lease table of the prefill engine with this id; None if no process has this id.
    decode: the ledger of the decode engine.
    readers_before: the highest number that any other channel has used for a connection to the same engines.
    open: the open connections, oldest first.
    left: connections that the decode engine has closed, each with its last message.
    answers: (ticket, answer) that the decode engine has not read yet.
    lied_to: the tickets that have got a wrong answer.
    """

    def __init__(
        self, leases_of: Callable[[str], LeaseTable | None], decode: Ledger, readers_before: int = 0
    ) -> None:
        self._leases_of, self._decode, self._readers_before = leases_of, decode, readers_before
        self.open: list[ModelClaim] = []
        self.left: deque[ModelClaim] = deque()
        self.answers: deque[tuple[int, Answer]] = deque()
        self.lied_to: set[int] = set()

    # The decode engine's calls (`ClaimsChannel`).

    def ask(self, ticket: int, engine: str, claim: HandOverClaim) -> None:
        """Claim a hand-over."""
        leases = self._leases_of(engine)
        if leases is None:
            self.answers.append((ticket, Refused("it is not there")))
        else:
            self.open.append(ModelClaim(ticket, leases, self._readers_before + ticket, claim, claim))

    def give_back(self, ticket: int, *, read: bool, had: bool = False) -> None:
        """Give the blocks back: they were read, or are not wanted any more.

        had: they are not wanted because the decode engine has them already.
        """
        connection = next((connection for connection in self.open if connection.ticket == ticket), None)
        if connection is None:
            if read:
                self.answers.append((ticket, GivenBack(held=False)))
        elif read:
            connection.question = GiveBack(connection.claim.hand_over, read=True)
        else:
            claim = connection.claim
            not_wanted = msgspec.structs.replace(claim, wanted=False)
            connection.question = GiveBack(claim.hand_over, read=False) if had else not_wanted
            connection.held = frozenset(self._decode.index)
            self.open.remove(connection)
            self.left.append(connection)

    def take_answers(self) -> list[tuple[int, Answer]]:
        """Return the answers since the last call."""
        taken = list(self.answers)
        self.answers.clear()
        return taken

    def close(self) -> None:
        """Close every connection."""
        for connection in list(self.open):
            self.give_back(connection.ticket, read=False)

    # The prefill engine's thread.

    def serve(self, connection: ModelClaim) -> None:
        """Answer the question of a connection. After a `Pending` the question is asked again."""
        if connection.question is not None:
            answer = answer_to_bytes(packed(connection.question), connection.reader, connection.leases)
            assert answer is not None, "the prefill engine reads every question of a decode engine"
            self.take(connection, packed(answer))

    def take(self, connection: ModelClaim, content: bytes) -> None:
        """Receive bytes in answer to a question. If they are no complete answer, the claim ends."""
        inbox = Inbox(MOST_ANSWER_BYTES)
        inbox.add(content)
        try:
            answer = inbox.answer(connection.question)
        except Exception:
            answer = None
        if answer is None:
            self.cut(connection)
        elif not isinstance(answer, Pending):
            connection.question = None
            self.answers.append((connection.ticket, answer))
            if not isinstance(answer, Offered):
                self.open.remove(connection)
                connection.leases.leave(connection.reader)

    def notice_close(self) -> None:
        """The prefill engine reads the last message of a closed connection, and then the close."""
        connection = self.left.popleft()
        assert connection.question is not None, (
            "a decode engine sends a message before it closes a connection"
        )
        connection.notice_close()

    def killed(self) -> list[ModelClaim]:
        """End with the process of the decode engine. Returns the connections whose end the prefill engines
        have yet to notice."""
        connections = [*self.open, *self.left]
        self.open.clear()
        self.left.clear()
        return connections

    def check_given_back(self, offered: Mapping[int, Set[bytes]]) -> None:
        """Check how the decode engine ended the offers that it declined. Raises `PropertyBroken`.

        It must say "has the blocks" if it held all of them when it declined, otherwise "has given up".

        offered: the keys of each offer, by ticket.
        """
        for connection in self.left:
            if connection.ticket not in offered:
                continue
            had = connection.question == GiveBack(connection.claim.hand_over, read=False)
            if had != (offered[connection.ticket] <= connection.held):
                said = "has the blocks" if had else "has given up"
                missing = len(offered[connection.ticket] - connection.held)
                message = (
                    f"the decode engine says that it {said}, and lacks {missing} blocks of the hand-over"
                )
                raise PropertyBroken(Property.EVENTS_ARE_STATE, message)

    def cut(self, connection: ModelClaim) -> None:
        """The connection breaks, and both sides notice it."""
        self.open.remove(connection)
        connection.leases.leave(connection.reader)
        if isinstance(connection.question, GiveBack):
            self.answers.append((connection.ticket, GivenBack(held=False)))
        elif connection.question is not None:
            self.answers.append(
                (connection.ticket, Refused("the connection broke, or what came is no answer"))
            )


class NotThere(Exception):
    """An action names a position at which there is nothing."""


def at(things: Sequence[Thing], place: int) -> Thing:
    """The thing at this place. Raises `NotThere`."""
    if not 0 <= place < len(things):
        raise NotThere
    return things[place]


class DecodeRequest(msgspec.Struct):
    """A request of the decode engine that names a hand-over."""

    tracked: TrackedRequest
    matched: bool = False


class Answered(msgspec.Struct):
    """The answer to a request of the prefill engine, which its client passes to the decode engine.

    lease: the name of the hand-over.
    parameters: the `kv_transfer_params` of the answer.
    readers: how many requests of the decode engine have named the hand-over.
    sees_readers: whether the prefill engine is certain to notice each reader. False after a broken connection
        or a wrong answer.
    """

    prompt: int
    lease: str
    parameters: dict[str, Any]
    readers: int = 0
    sees_readers: bool = True


class ImportCopies(msgspec.Struct):
    """An import in flight. waiting: the ranks that have not reported."""

    job: ImportJob
    waiting: list[int]
