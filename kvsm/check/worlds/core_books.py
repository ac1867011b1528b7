"""The reference books of the core world: which bytes are where, and what the core must answer.

The books follow from the calls alone. They share no code with the ledger and never read it, so both compute
the same answer independently. Only the victims of an eviction are taken from the core's answer; the books
check that these blocks could be evicted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvsm.errors import PropertyBroken
from kvsm.properties import Property

Content = tuple[bytes, int]
"""A key, and the position of a block in the key's chunk."""
Offered = list[tuple[bytes, tuple[int, ...]]]
"""Keys, each with the device blocks of its chunk."""


@dataclass(slots=True, eq=False)
class BookedBlock:
    """The content of a slot, from the plan of its store to the end of its last copy.

    store: the transfer that stores it.
    stored: the store has ended well, so the block is readable.
    void: no match finds the block any more, and pins on it do not hold. The slot becomes free when the last
        copy has ended, or never if it was retired.
    retired: a lost copy may still touch the slot.
    copies, pins: how many live copies touch the block, and how many matches pin it.
    """

    key: bytes
    slot: int
    store: int
    stored: bool = False
    void: bool = False
    retired: bool = False
    copies: int = 1
    pins: int = 0


@dataclass(slots=True, eq=False)
class BookedCopy:
    """A transfer in the books.

    request_name: the request of a load; None for a store.
    pairs: (device block, host block) of each copied block; empty for an import.
    contents: the content that is copied, block by block.
    blocks: the host pool's blocks that the copy reads or writes.
    sources: for a store, the device blocks of each key.
    imports: for a store from another engine, the host blocks that it writes.
    since: the tick at which it was submitted; -1 before.
    landed, reported: a bit for each worker whose bytes have moved, or that has reported.
    failed: a worker has reported failure.
    void: a reset has abandoned it.
    """

    id: int
    request_name: str | None
    pairs: list[tuple[int, int]]
    contents: list[Content]
    epoch: int
    blocks: list[BookedBlock] = field(default_factory=list)
    sources: dict[bytes, tuple[int, ...]] = field(default_factory=dict)
    imports: list[int] = field(default_factory=list)
    since: int = -1
    landed: int = 0
    reported: int = 0
    failed: bool = False
    void: bool = False

    @property
    def store(self) -> bool:
        """Whether it copies to the host."""
        return self.request_name is None

    @property
    def hosts(self) -> list[int]:
        """The host block of each entry of `contents`."""
        return self.imports or [host for _, host in self.pairs]

    @property
    def request(self) -> str:
        """The request of a load; empty for a store."""
        return self.request_name or ""

    @property
    def submitted(self) -> bool:
        """Whether the workers have it."""
        return self.since >= 0


@dataclass(slots=True, eq=False)
class BookedRequest:
    """A request of which the core has a record.

    matched: the blocks that its match pins.
    load: its load in flight; None without one.
    loading: the request waits for its load. False after a preemption, although `load` is still in flight.
    fresh: it has no match and no answered miss. If it has never waited either, preempting it is no event.
    over: it is finished, and kept only because its load is in flight.
    waits: the transfer that it is deferred for; 0 for none.
    patience: the tick at which it stops waiting; -1 until it first waits.
    cursors: (settled, offered), each by group.
    """

    matched: list[BookedBlock] = field(default_factory=list)
    load: BookedCopy | None = None
    loading: bool = False
    fresh: bool = True
    over: bool = False
    waits: int = 0
    patience: int = -1
    cursors: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())


class ReferenceBooks:
    """Blocks, copies, requests and bytes. Each method books the effects of one call of the core.

    It raises `PropertyBroken` if an answer of the core contradicts the books.
    """

    def __init__(self, slots: int, device_blocks: int, workers: int, chunk: int, defer_ticks: int) -> None:
        self._slots, self.chunk, self.defer_ticks = slots, chunk, defer_ticks
        self.workers = range(workers)
        self.all_workers = (1 << workers) - 1
        self.tick = self.epoch = 0
        self.where: dict[bytes, BookedBlock] = {}
        """Key -> its only block that is being stored or is readable."""
        self.free = set(range(slots))
        self.idle = 0
        """How many blocks can be evicted."""
        self.copies: dict[int, BookedCopy] = {}
        self.lost: list[BookedCopy] = []
        self.leased: dict[int, BookedCopy] = {}
        self.retired: set[int] = set()
        """Device blocks that a lost load may still write."""
        self.requests: dict[str, BookedRequest] = {}
        self.notes: dict[int, tuple[bytes, int]] = {}
        """Device block -> key and epoch of the last load into it, of which the core keeps a note."""
        self.offers: OrderedDict[bytes, int] = OrderedDict()
        self.device: list[list[Content | None]] = [[None] * device_blocks for _ in self.workers]
        self.host: list[list[Content | None]] = [[None] * (slots * chunk) for _ in self.workers]

    # Device blocks.

    def idle_device_blocks(self) -> list[int]:
        """Device blocks that no copy touches, by number."""
        leased, retired = self.leased, self.retired
        return [block for block in range(len(self.device[0])) if block not in leased and block not in retired]

    def compute(self, contents: Sequence[tuple[int, Content]]) -> bool:
        """The engine writes these (device block, content). Returns whether the core must emit an event."""
        noted = False
        for block, content in contents:
            for cells in self.device:
                cells[block] = content
            if block in self.notes and (self.chunk > 1 or self.notes[block][1] < self.epoch):
                del self.notes[block]
                noted = True
        return noted

    def holder(self, content: Content, choice: int) -> int | None:
        """Choose a device block that holds this content and that no load writes; None if there is none."""
        leased, retired = self.leased, self.retired
        there = [
            block
            for block, cell in enumerate(self.device[0])
            if cell == content and block not in retired and (block not in leased or leased[block].store)
        ]
        return there[choice % len(there)] if there else None

    def under_copy(self, blocks: Sequence[int]) -> bool:
        """Whether a live copy touches one of these device blocks, or a lost one may still write it."""
        return not self.leased.keys().isdisjoint(blocks) or not self.retired.isdisjoint(blocks)

    def is_of_older_epoch(self, key: bytes, blocks: Sequence[int]) -> bool:
        """Whether a load before the last reset brought this key into one of these device blocks."""
        for block in blocks:
            note = self.notes.get(block)
            if note is not None and note[0] == key and note[1] < self.epoch:
                return True
        return False

    # Blocks of the host pool.

    def _void(self, block: BookedBlock) -> None:
        if block.void:
            return
        if block.stored and not block.copies and not block.pins:
            self.idle -= 1
        del self.where[block.key]
        block.void, block.pins = True, 0
        if not block.copies:
            self.free.add(block.slot)

    def _retire(self, block: BookedBlock) -> None:
        self._void(block)
        block.retired = True

    def _leave(self, block: BookedBlock) -> None:
        """Book that a copy of the block has ended."""
        block.copies -= 1
        if block.copies:
            return
        if not block.void:
            self.idle += block.stored and not block.pins
        elif not block.retired:
            self.free.add(block.slot)

    def _unpin(self, blocks: Sequence[BookedBlock]) -> None:
        for block in blocks:
            if not block.void:
                block.pins -= 1
                self.idle += not (block.pins or block.copies)

    def evict(self, keys: Sequence[bytes], needed: set[bytes]) -> None:
        """Book the eviction of `keys` for an offer. needed: keys of the offer, which must not be evicted."""
        for key in keys:
            block = self.where.get(key)
            if block is None or not block.stored:
                message = f"key {key.hex()} was evicted, but it is not stored"
                raise PropertyBroken(Property.NO_REUSE_IN_FLIGHT, message)
            if block.copies:
                message = f"slot {block.slot} was evicted while a load reads it"
                raise PropertyBroken(Property.NO_REUSE_IN_FLIGHT, message)
            if block.pins:
                message = f"slot {block.slot} was evicted while a match holds it"
                raise PropertyBroken(Property.MATCH_HOLDS, message)
            if key in needed:
                message = f"key {key.hex()} was evicted to make room for its own offer"
                raise PropertyBroken(Property.MATCH_HOLDS, message)
            self._void(block)

    # Requests.

    def book(self, name: str) -> BookedRequest:
        """The book of this request; made if there is none."""
        return self.requests.setdefault(name, BookedRequest())

    def match(self, name: str, keys: Sequence[bytes]) -> tuple[int, int | None]:
        """Book a match. Returns (number of pinned blocks, the transfer that the request waits for)."""
        book = self.requests.get(name)
        if book is not None and (book.load is not None or book.over or book.waits):
            return 0, self.waits_for(name)
        blocks = []
        for key in keys:
            block = self.where.get(key)
            if block is None:
                break
            if not block.stored:
                if self._defer(name, block.store):
                    return 0, block.store
                break
            blocks.append(block)
        self._pin(self.book(name), blocks)
        return len(blocks), None

    def waits_for(self, name: str) -> int | None:
        """The transfer that the request waits for. The call may let a preempted request wait for its load."""
        book = self.requests.get(name)
        if book is None:
            return None
        if book.waits:
            return book.waits
        load = book.load
        if load is not None and not book.loading and not book.over and self._defer(name, load.id):
            return load.id
        return None

    def _defer(self, name: str, copy: int) -> bool:
        book = self.requests.get(name) or BookedRequest()
        if not self.defer_ticks or 0 <= book.patience <= self.tick:
            return False
        self.release(name)
        if book.patience < 0:
            book.patience = self.tick + self.defer_ticks
        book.waits = copy
        self.requests[name] = book
        return True

    def _pin(self, book: BookedRequest, blocks: list[BookedBlock]) -> None:
        if book.matched:
            if book.matched == blocks:
                return
            self._unpin(book.matched)
            book.fresh = True
        book.matched = blocks
        for block in blocks:
            if not block.pins and not block.copies:
                self.idle -= 1
            block.pins += 1
        if not blocks:
            book.fresh = False

    def release(self, name: str) -> None:
        """The request gives back its match."""
        book = self.requests.get(name)
        if book is not None and book.matched:
            self._unpin(book.matched)
            book.matched, book.fresh = [], True

    def preempt(self, name: str) -> None:
        """The request loses its match, its wait and its cursors."""
        book = self.requests.get(name)
        if book is None or book.over:
            return
        runs = book.matched or book.patience >= 0 or book.loading or not book.fresh
        if runs or book.cursors[1]:
            self._stop(book)

    def finish(self, name: str) -> bool:
        """The request is over. Returns whether it is released: no load of it is in flight."""
        book = self.requests.get(name)
        if book is None:
            return True
        if not book.over:
            self._stop(book)
            book.over = book.load is not None
        if not book.over:
            del self.requests[name]
        return not book.over

    def _stop(self, book: BookedRequest) -> None:
        self._unpin(book.matched)
        book.matched, book.loading, book.fresh = [], False, True
        book.waits, book.patience, book.cursors = 0, -1, ((), ())

    def let_time_pass(self, transfer_ticks: int) -> bool:
        """Count a tick. Returns False, and counts none, if no transfer and no request waits for a bound."""
        if not (transfer_ticks and self.copies) and not any(book.waits for book in self.requests.values()):
            return False
        self.tick += 1
        for book in self.requests.values():
            if book.waits and book.patience <= self.tick:
                book.waits, book.fresh = 0, True
        return True

    # Copies.

    def plan_store(self, copy: BookedCopy, keys: Sequence[bytes]) -> None:
        """Book the plan of a store: its slots must be free, its device blocks are leased."""
        for key, host in zip(keys, copy.hosts[:: self.chunk]):
            slot = host // self.chunk
            if slot not in self.free:
                message = f"slot {slot} was handed out to a store while it is in use"
                raise PropertyBroken(Property.NO_REUSE_IN_FLIGHT, message)
            if key in self.where:
                message = f"key {key.hex()} is stored again, but it is on the host already"
                raise PropertyBroken(Property.STORED_ONCE, message)
            self.free.remove(slot)
            self.where[key] = block = BookedBlock(key, slot, copy.id)
            copy.blocks.append(block)
        for device_block, _ in copy.pairs:
            if device_block in self.notes and self.notes[device_block][1] < self.epoch:
                del self.notes[device_block]
        self._plan(copy)

    def plan_load(self, copy: BookedCopy, accepted: int) -> None:
        """Book the plan of a load of the first `accepted` matched blocks. The other pins are released."""
        book = self.requests[copy.request]
        matched, book.matched = book.matched, []
        copy.blocks = matched[:accepted]
        for block in copy.blocks:
            block.pins -= 1
            block.copies += 1
        self._unpin(matched[accepted:])
        for (device_block, _), (key, _) in zip(copy.pairs, copy.contents):
            self.notes[device_block] = key, self.epoch
        book.load, book.loading = copy, True
        self._plan(copy)

    def _plan(self, copy: BookedCopy) -> None:
        leased = self.leased
        for (device_block, host), content in zip(copy.pairs, copy.contents):
            if device_block in leased:
                holder = leased[device_block].id
                message = f"device block {device_block} is copied again while transfer {holder} has it"
                broken = Property.STORED_ONCE if copy.store else Property.NO_REUSE_IN_FLIGHT
                raise PropertyBroken(broken, message)
            leased[device_block] = copy
            if not copy.store and not self.has_everywhere(host, content):
                message = f"host block {host} is to be loaded, but it does not hold {content}"
                raise PropertyBroken(Property.MATCH_HOLDS, message)
        self.copies[copy.id] = copy

    def has_everywhere(self, host: int, content: Content) -> bool:
        """Whether this host block holds this content on every worker."""
        return all([cells[host] == content for cells in self.host])  # noqa: C419 (a list is faster)

    def land(self, copy: BookedCopy, worker: int) -> None:
        """Move the bytes of one worker's shard."""
        device, host = self.device[worker], self.host[worker]
        copy.landed |= 1 << worker
        if copy.store:
            for block, place in copy.pairs:
                host[place] = device[block]
            for place, content in zip(copy.imports, copy.contents):
                host[place] = content
        else:
            for block, place in copy.pairs:
                device[block] = host[place]

    def end(self, copy: BookedCopy, good: bool, failed: bool = False, lost: bool = False) -> None:
        """Book the end of a transfer.

        good: all its bytes arrived.
        failed: a worker failed, so the blocks that it read or wrote are not trusted.
        lost: a worker will never report.
        All False: it was cancelled, or a reset had abandoned it.
        """
        del self.copies[copy.id]
        for device_block, _ in copy.pairs:
            del self.leased[device_block]
        for block in copy.blocks:
            if lost:
                self._retire(block)
            elif copy.store:
                if good:
                    block.stored = True
                    self.offers.pop(block.key, None)
                else:
                    self._void(block)
            self._leave(block)
        if copy.store and good:
            self._check_published(copy)
        if not copy.store:
            self._end_load(copy, good, failed, lost)
        for book in self.requests.values():
            if book.waits == copy.id:
                book.waits, book.fresh = 0, True

    def _check_published(self, copy: BookedCopy) -> None:
        for host, content in zip(copy.hosts, copy.contents):
            if not self.has_everywhere(host, content):
                message = f"transfer {copy.id} was published, but host block {host} does not hold {content}"
                raise PropertyBroken(Property.PUBLISH_AFTER_COMMIT, message)

    def _end_load(self, copy: BookedCopy, good: bool, failed: bool, lost: bool) -> None:
        if failed:
            for block in copy.blocks:
                self._void(block)
        if lost:
            self.retired.update(block for block, _ in copy.pairs)
        for (device_block, _), content in zip(copy.pairs, copy.contents):
            for cells in self.device:
                if not good:
                    # The block's content is unknown. The engine offers it only after it has computed it.
                    cells[device_block] = None
                elif cells[device_block] != content:
                    message = f"transfer {copy.id} did not bring {content} to device block {device_block}"
                    raise PropertyBroken(Property.CORRECT_BYTES, message)
            if not good:
                self.notes.pop(device_block, None)
        book = self.requests[copy.request]
        book.load = None
        if book.over:
            del self.requests[copy.request]
        elif book.loading:
            book.loading = book.fresh = False

    def reset(self) -> bool:
        """Void everything that is stored or in flight. Returns whether there was anything."""
        brought = any(epoch == self.epoch for _, epoch in self.notes.values())
        if not (self.where or brought or any(not copy.void for copy in self.copies.values())):
            return False
        for copy in list(self.copies.values()):
            if copy.submitted:
                copy.void = True
            else:
                self.end(copy, good=False)
        for block in list(self.where.values()):
            self._void(block)
        self.epoch += 1
        for book in self.requests.values():
            book.cursors = ((), ())
        return True

    def restart(self) -> None:
        """Another process takes over: stored blocks survive, and no copy of the killed process still runs."""
        stores = [copy for copy in self.copies.values() if copy.store]
        for cells in self.host:
            for host in (host for copy in (*stores, *self.lost) for host in copy.hosts):
                # The worker may have written a part of the block before it was killed.
                cells[host] = None
        self.where = {key: block for key, block in self.where.items() if block.stored}
        for block in self.where.values():
            block.copies = block.pins = 0
        self.idle = len(self.where)
        self.free = set(range(self._slots)) - {block.slot for block in self.where.values()}
        self.copies, self.lost, self.leased, self.retired = {}, [], {}, set()
        self.requests, self.notes = {}, {}
        self.device = [[None] * len(cells) for cells in self.device]
