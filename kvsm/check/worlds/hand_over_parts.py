"""What the hand-over world is made of: host pools and what they hold, and the way between two engines."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence, Set
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
from kvsm.events import OffloadConfig
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
"""A key, and which block of its chunk."""

Thing = TypeVar("Thing")

LOADER = "own-load"
"""The request that loads."""


class HostCopy(msgspec.Struct):
    """A store or a load under way.

    pieces: (host block, what it holds when the copy has ended well).
    waiting: ranks that have not reported.
    """

    transfer: int
    pieces: list[tuple[int, Piece]]
    waiting: list[int]


class SmallHost:
    """An engine as far as hand-overs see it: the real core, and what its host pool holds on each rank.

    Its device is left out: what it computes is always right.

    stores: copies from its own device, by transfer.
    load: the copy to its own device, if there is one.
    """

    def __init__(self, config: OffloadConfig) -> None:
        self.log = MemoryLog()
        self.core = Offloader(config, self.log, clock_ns=lambda: 0)
        self.cells: list[list[Piece | None]] = [
            [None] * (config.host_blocks * config.blocks_per_chunk) for _ in range(config.workers)
        ]
        self.stores: list[HostCopy] = []
        self.load: HostCopy | None = None

    def begin_store(self, request: str, keys: Sequence[bytes], device_blocks: Sequence[int]) -> None:
        """The engine has computed these chunks: what the host lacks is stored. The copies begin to write."""
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
        """A rank has stored its share, and reports it. A bad copy leaves nothing that can be used."""
        copy = self.stores[place]
        for host, piece in copy.pieces:
            self.cells[worker][host] = piece if good else None
        copy.waiting.remove(worker)
        if not copy.waiting:
            self.stores.remove(copy)
        self.core.report(copy.transfer, worker, good)

    def serves(self, key: bytes) -> bool:
        """Whether a load may begin with this key."""
        slot = self.core.ledger.index.get(key)
        return slot is not None and self.core.ledger.readable(slot)

    def begin_load(self, keys: Sequence[bytes], first: int) -> None:
        """A request loads what the host has of these chunks, to the device blocks from `first` on."""
        core, chunk = self.core, self.core.config.blocks_per_chunk
        core.arrive(LOADER)
        hits = core.match(LOADER, keys).hits
        job = core.prepare_load(LOADER, range(first, first + hits * chunk))
        if job is None:  # the next chunk is on its way to the host: the request would wait for it
            core.finish(LOADER)
            return
        core.submit([job.transfer])
        pieces = [(key, part) for key in keys[:hits] for part in range(chunk)]
        workers = list(range(core.config.workers))
        self.load = HostCopy(job.transfer, list(zip(to_list(job.host_blocks), pieces)), workers)

    def end_load(self, worker: int, good: bool) -> None:
        """A rank has read its share, and reports it. No other copy has written there meanwhile (S3)."""
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
        """What can be read holds its own bytes on every rank (S2, S15)."""
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
        """The ledger's own properties."""
        for violation in check_ledger(self.core.ledger):
            raise PropertyBroken(violation.property, violation.message)

    def check_fold(self, engine: str) -> None:
        """The log folds to the present state (S10)."""
        folded = Ledger(self.core.config)
        for event in self.log:
            folded.apply(event)
        if digest(folded) != digest(self.core.ledger):
            message = f"the log of the {engine} engine folds to another state"
            raise PropertyBroken(Property.EVENTS_ARE_STATE, message)

    def form(self, requests: Sequence[str]) -> tuple[object, ...]:
        """What decides what follows. Transfers are named by their order, requests by their place here."""
        ledger = self.core.ledger
        rank = self.ranks()
        same_slots = {slot: slot for slot in range(len(ledger.key_of))}
        same_blocks = {block: block for block in range(self.core.config.device_blocks)}
        places = {name: place for place, name in enumerate((*requests, LOADER))}
        names = Names(ledger, places, rank, same_slots, same_blocks)
        under_way = (*self.stores, *([] if self.load is None else [self.load]))
        copies = [(rank.get(one.transfer, -1), one.pieces, one.waiting) for one in under_way]
        return compared(ledger, names), self.cells, copies

    def ranks(self) -> dict[int, int]:
        """The place of each live transfer."""
        return {transfer: place for place, transfer in enumerate(self.core.ledger.transfers)}


class ModelClaim(msgspec.Struct):
    """A connection of the decode engine.

    question: what the prefill engine has not answered yet.
    held: keys that the decode engine held when it gave the blocks back unread.
    """

    ticket: int
    claim: HandOverClaim
    question: HandOverClaim | GiveBack | None
    held: Set[bytes] = frozenset()


class ModelChannel:
    """The way between two engines, as `Claims` and `HandOverService` make it, without threads and sockets.

    A question waits until it is served. So anything can happen between each question and its answer, and
    between the end of a connection and when the prefill engine hears of it.

    decode: the ledger of the decode engine.
    open: the connections, by age.
    left: what the decode engine said last on connections that it has closed.
    answers: what it has not looked at yet.
    lied_to: tickets of wrong answers.
    """

    def __init__(self, leases: LeaseTable, decode: Ledger) -> None:
        self._leases, self._decode = leases, decode
        self.open: list[ModelClaim] = []
        self.left: deque[ModelClaim] = deque()
        self.answers: deque[tuple[int, Answer]] = deque()
        self.lied_to: set[int] = set()

    # The decode engine's calls (`ClaimsChannel`).

    def ask(self, ticket: int, engine: str, claim: HandOverClaim) -> None:  # noqa: ARG002 (there is one)
        """Claim a hand-over."""
        self.open.append(ModelClaim(ticket, claim, claim))

    def give_back(self, ticket: int, *, read: bool, had: bool = False) -> None:
        """The blocks were read, or are not wanted any more. had: the decode engine has them."""
        one = next((one for one in self.open if one.ticket == ticket), None)
        if one is None:
            if read:
                self.answers.append((ticket, GivenBack(held=False)))
        elif read:
            one.question = GiveBack(one.claim.hand_over, read=True)
        else:
            claim = one.claim
            not_wanted = msgspec.structs.replace(claim, wanted=False)
            one.question = GiveBack(claim.hand_over, read=False) if had else not_wanted
            one.held = frozenset(self._decode.index)
            self.open.remove(one)
            self.left.append(one)

    def take_answers(self) -> list[tuple[int, Answer]]:
        """What was answered since the last call."""
        taken = list(self.answers)
        self.answers.clear()
        return taken

    def close(self) -> None:
        """Close every connection."""
        for one in list(self.open):
            self.give_back(one.ticket, read=False)

    # The prefill engine's thread.

    def serve(self, one: ModelClaim) -> None:
        """Answer a question. Who hears that the last blocks are on their way asks again."""
        if one.question is not None:
            answer = self.answer(packed(one.question), one.ticket)
            assert answer is not None, "what a decode engine asks is understood"
            self.take(one, packed(answer))

    def answer(self, content: bytes, reader: int) -> Answer | None:
        """What the prefill engine answers to bytes that came over a connection. None: it closes this one."""
        inbox = Inbox(MOST_QUESTION_BYTES)
        inbox.add(content)
        try:
            question = inbox.question()
        except Exception:
            return None
        return None if question is None else answer_to(question, reader, self._leases, {})

    def take(self, one: ModelClaim, content: bytes) -> None:
        """Bytes come in answer to a question. What is no answer ends the claim, as what never becomes one."""
        inbox = Inbox(MOST_ANSWER_BYTES)
        inbox.add(content)
        try:
            answer = inbox.answer(one.question)
        except Exception:
            answer = None
        if answer is None:
            self.cut(one)
        elif not isinstance(answer, Pending):
            one.question = None
            self.answers.append((one.ticket, answer))
            if not isinstance(answer, Offered):
                self.open.remove(one)
                self._leases.leave(one.ticket)

    def hear_of_leaving(self) -> None:
        """The prefill engine reads the last words of a closed connection, and then its end."""
        one = self.left.popleft()
        assert one.question is not None, "it said something before it left"
        answer_to(one.question, one.ticket, self._leases, {})
        self._leases.leave(one.ticket)

    def check_given_back(self, offered: Mapping[int, Set[bytes]]) -> None:
        """Check how the decode engine ended each offer: "has the blocks" if it held them when it judged the
        offer, else "given up". offered: the keys of each offer, by ticket. Raises `PropertyBroken`."""
        for one in self.left:
            if one.ticket not in offered:
                continue
            had = one.question == GiveBack(one.claim.hand_over, read=False)
            if had != (offered[one.ticket] <= one.held):
                said = "has the blocks" if had else "has given up"
                missing = len(offered[one.ticket] - one.held)
                message = (
                    f"the decode engine says that it {said}, and lacks {missing} blocks of the hand-over"
                )
                raise PropertyBroken(Property.EVENTS_ARE_STATE, message)

    def cut(self, one: ModelClaim) -> None:
        """The connection breaks. Both sides see it."""
        self.open.remove(one)
        self._leases.leave(one.ticket)
        if isinstance(one.question, GiveBack):
            self.answers.append((one.ticket, GivenBack(held=False)))
        elif one.question is not None:
            self.answers.append((one.ticket, Refused("the connection broke, or what came is no answer")))


class NotThere(Exception):
    """An action names a thing that is not there."""


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
    """What a client passes on. heard: whether the prefill engine is sure to hear of its readers."""

    prompt: int
    lease: str
    parameters: dict[str, Any]
    readers: int = 0
    heard: bool = True


class ImportCopies(msgspec.Struct):
    """An import under way. waiting: ranks that have not reported."""

    job: ImportJob
    waiting: list[int]
