"""Beside the core: a plain account of whose bytes are where, and of what the core must answer.

It is kept from the calls that were made and from nothing else. It shares no code with the ledger and never
looks at one: so what the two agree on, they have found out apart. Which blocks a policy chooses to evict it
takes from the core's answer; that they could be evicted, it knows.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvsm.errors import PropertyBroken
from kvsm.properties import Property

Content = tuple[bytes, int]
"""A key, and which device block of its chunk."""
Offered = list[tuple[bytes, tuple[int, ...]]]
"""Keys, each with the chunk of device blocks that holds it."""


class Block:
    """What a slot holds during one life. void: no match finds it any more, and a pin on it is worth nothing;
    the slot is free when the last copy has ended, and never if it was retired."""

    __slots__ = ("copies", "key", "pins", "retired", "slot", "store", "stored", "void")

    def __init__(self, key: bytes, slot: int, store: int) -> None:
        self.key, self.slot, self.store = key, slot, store
        self.stored = self.void = self.retired = False
        self.copies, self.pins = 1, 0


class Copy:
    """A transfer: what it must bring, which workers' bytes have moved, and which workers have reported."""

    __slots__ = (
        "blocks",
        "contents",
        "epoch",
        "failed",
        "id",
        "landed",
        "pairs",
        "reported",
        "request",
        "since",
        "sources",
        "store",
        "void",
    )

    def __init__(
        self, id: int, request: str | None, pairs: list[tuple[int, int]], contents: list[Content], epoch: int
    ) -> None:
        self.id, self.request, self.store = id, request or "", request is None
        self.pairs, self.contents, self.epoch = pairs, contents, epoch
        self.blocks: list[Block] = []
        self.sources: dict[bytes, tuple[int, ...]] = {}
        self.since = -1
        """Tick at which it was submitted; -1: it was not."""
        self.landed = self.reported = 0
        """A bit for each worker."""
        self.failed = self.void = False


class RequestBook:
    """A request that the core knows. waits: the copy that it is deferred for. fresh: neither told that there
    is nothing to wait for, nor under way. over: finished, and kept for its load alone."""

    __slots__ = ("cursors", "fresh", "load", "loading", "matched", "over", "patience", "waits")

    def __init__(self) -> None:
        self.matched: list[Block] = []
        self.load: Copy | None = None
        self.loading, self.fresh, self.over = False, True, False
        self.waits, self.patience = 0, -1
        self.cursors: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())


class Books:
    """All of it. The methods say what follows from a call, and raise `PropertyBroken` where an answer of the
    core contradicts what is known."""

    def __init__(self, slots: int, device_blocks: int, workers: int, chunk: int, defer_ticks: int) -> None:
        self.chunk, self.defer_ticks = chunk, defer_ticks
        self.workers = range(workers)
        self.all_workers = (1 << workers) - 1
        self.tick = self.epoch = 0
        self.where: dict[bytes, Block] = {}
        """Key -> the one block of it that is being stored or can be read."""
        self.free = set(range(slots))
        self.idle = 0
        """How many blocks can be evicted."""
        self.copies: dict[int, Copy] = {}
        self.lost: list[Copy] = []
        self.leased: dict[int, Copy] = {}
        self.retired: set[int] = set()
        """Device blocks that a lost load may still write."""
        self.requests: dict[str, RequestBook] = {}
        self.notes: dict[int, tuple[bytes, int]] = {}
        """Device block -> key and epoch of the load that brought what is in it, as far as the core knows."""
        self.offers: OrderedDict[bytes, int] = OrderedDict()
        self.device: list[list[Content | None]] = [[None] * device_blocks for _ in self.workers]
        self.host: list[list[Content | None]] = [[None] * (slots * chunk) for _ in self.workers]

    # Device blocks.

    def idle_device_blocks(self) -> list[int]:
        leased, retired = self.leased, self.retired
        return [one for one in range(len(self.device[0])) if one not in leased and one not in retired]

    def compute(self, contents: Sequence[tuple[int, Content]]) -> bool:
        """The engine computes these blocks anew. Returns whether the core must note it."""
        noted = False
        for block, content in contents:
            for cells in self.device:
                cells[block] = content
            if block in self.notes and (self.chunk > 1 or self.notes[block][1] < self.epoch):
                del self.notes[block]
                noted = True
        return noted

    def holder(self, content: Content, choice: int) -> int | None:
        """A device block that holds this and is not being written."""
        leased, retired = self.leased, self.retired
        there = [
            block
            for block, cell in enumerate(self.device[0])
            if cell == content and block not in retired and (block not in leased or leased[block].store)
        ]
        return there[choice % len(there)] if there else None

    def under_copy(self, blocks: Sequence[int]) -> bool:
        return not self.leased.keys().isdisjoint(blocks) or not self.retired.isdisjoint(blocks)

    def is_of_older_epoch(self, key: bytes, blocks: Sequence[int]) -> bool:
        """Whether a load before the last reset brought this key there."""
        for block in blocks:
            note = self.notes.get(block)
            if note is not None and note[0] == key and note[1] < self.epoch:
                return True
        return False

    # Blocks of the host pool.

    def _void(self, block: Block) -> None:
        if block.void:
            return
        if block.stored and not block.copies and not block.pins:
            self.idle -= 1
        del self.where[block.key]
        block.void, block.pins = True, 0
        if not block.copies:
            self.free.add(block.slot)

    def _retire(self, block: Block) -> None:
        self._void(block)
        block.retired = True

    def _leave(self, block: Block) -> None:
        """A copy less."""
        block.copies -= 1
        if block.copies:
            return
        if not block.void:
            self.idle += block.stored and not block.pins
        elif not block.retired:
            self.free.add(block.slot)

    def _unpin(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            if not block.void:
                block.pins -= 1
                self.idle += not (block.pins or block.copies)

    def evict(self, keys: Sequence[bytes], needed: set[bytes]) -> None:
        """The policy's choice. needed: keys of the offer that it makes room for."""
        for key in keys:
            block = self.where.get(key)
            if block is None or not block.stored:
                raise PropertyBroken(
                    Property.NO_REUSE_IN_FLIGHT, f"key {key.hex()} was evicted, and it is not stored"
                )
            if block.copies:
                raise PropertyBroken(
                    Property.NO_REUSE_IN_FLIGHT, f"slot {block.slot} was evicted while a load reads it"
                )
            if block.pins:
                raise PropertyBroken(
                    Property.MATCH_HOLDS, f"slot {block.slot} was evicted, and a match holds it"
                )
            if key in needed:
                raise PropertyBroken(
                    Property.MATCH_HOLDS, f"key {key.hex()} was evicted to make room for its own offer"
                )
            self._void(block)

    # Requests.

    def book(self, name: str) -> RequestBook:
        return self.requests.setdefault(name, RequestBook())

    def match(self, name: str, keys: Sequence[bytes]) -> tuple[int, int | None]:
        """(blocks served and pinned, the copy that the request waits for)."""
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
        book = self.requests.get(name) or RequestBook()
        if not self.defer_ticks or 0 <= book.patience <= self.tick:
            return False
        self.release(name)
        if book.patience < 0:
            book.patience = self.tick + self.defer_ticks
        book.waits = copy
        self.requests[name] = book
        return True

    def _pin(self, book: RequestBook, blocks: list[Block]) -> None:
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
        book = self.requests.get(name)
        if book is not None and book.matched:
            self._unpin(book.matched)
            book.matched, book.fresh = [], True

    def preempt(self, name: str) -> None:
        book = self.requests.get(name)
        if book is None or book.over:
            return
        runs = book.matched or book.waits or book.loading or not book.fresh
        if runs or book.cursors[1]:
            self._stop(book)

    def finish(self, name: str) -> bool:
        """Whether nothing of it is left."""
        book = self.requests.get(name)
        if book is None:
            return True
        if not book.over:
            self._stop(book)
            book.over = book.load is not None
        if not book.over:
            del self.requests[name]
        return not book.over

    def _stop(self, book: RequestBook) -> None:
        self._unpin(book.matched)
        book.matched, book.loading, book.fresh = [], False, True
        book.waits, book.patience, book.cursors = 0, -1, ((), ())

    def let_time_pass(self, transfer_ticks: int) -> bool:
        """Whether a tick is noted: only if something waits for a bound."""
        if not (transfer_ticks and self.copies) and not any(one.waits for one in self.requests.values()):
            return False
        self.tick += 1
        for book in self.requests.values():
            if book.waits and book.patience <= self.tick:
                book.waits, book.fresh = 0, True
        return True

    # Copies.

    def plan_store(self, copy: Copy, keys: Sequence[bytes]) -> None:
        """`copy.pairs` are as the core's job says; the slots must be free."""
        for place in range(0, len(copy.pairs), self.chunk):
            slot = copy.pairs[place][1] // self.chunk
            if slot not in self.free:
                raise PropertyBroken(
                    Property.NO_REUSE_IN_FLIGHT, f"slot {slot} was handed out to a store, and it is in use"
                )
            key = keys[place // self.chunk]
            if key in self.where:
                raise PropertyBroken(
                    Property.STORED_ONCE, f"key {key.hex()} is stored again, and it is on the host"
                )
            self.free.remove(slot)
            self.where[key] = block = Block(key, slot, copy.id)
            copy.blocks.append(block)
        for device_block, _ in copy.pairs:
            if device_block in self.notes and self.notes[device_block][1] < self.epoch:
                del self.notes[device_block]
        self._plan(copy)

    def plan_load(self, copy: Copy, accepted: int) -> None:
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

    def _plan(self, copy: Copy) -> None:
        leased = self.leased
        for (device_block, host), content in zip(copy.pairs, copy.contents):
            if device_block in leased:
                message = (
                    f"device block {device_block} is copied, and transfer {leased[device_block].id} has it"
                )
                raise PropertyBroken(
                    Property.STORED_ONCE if copy.store else Property.NO_REUSE_IN_FLIGHT, message
                )
            leased[device_block] = copy
            if not copy.store and not self.has_everywhere(host, content):
                raise PropertyBroken(
                    Property.MATCH_HOLDS, f"host block {host} is to be loaded, and does not hold {content}"
                )
        self.copies[copy.id] = copy

    def has_everywhere(self, host: int, content: Content) -> bool:
        return all([cells[host] == content for cells in self.host])  # noqa: C419 (a list is faster)

    def land(self, copy: Copy, worker: int) -> None:
        """The bytes of one worker's shard move now."""
        device, host = self.device[worker], self.host[worker]
        copy.landed |= 1 << worker
        if copy.store:
            for block, place in copy.pairs:
                host[place] = device[block]
        else:
            for block, place in copy.pairs:
                device[block] = host[place]

    def end(self, copy: Copy, good: bool, failed: bool = False, lost: bool = False) -> None:
        """The transfer is over. good: all of it arrived. failed: what it read or wrote is not to be trusted.
        Neither of them: it was taken back, or a reset had voided it."""
        del self.copies[copy.id]
        for device_block, _ in copy.pairs:
            del self.leased[device_block]
        for block in copy.blocks:
            if lost:
                self._retire(block)
            elif copy.store:
                if good:
                    block.stored = True
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

    def _check_published(self, copy: Copy) -> None:
        for (_, host), content in zip(copy.pairs, copy.contents):
            if not self.has_everywhere(host, content):
                message = f"transfer {copy.id} was published, and host block {host} does not hold {content}"
                raise PropertyBroken(Property.PUBLISH_AFTER_COMMIT, message)

    def _end_load(self, copy: Copy, good: bool, failed: bool, lost: bool) -> None:
        if failed:
            for block in copy.blocks:
                self._void(block)
        if lost:
            self.retired.update(block for block, _ in copy.pairs)
        for (device_block, _), content in zip(copy.pairs, copy.contents):
            for cells in self.device:
                if not good:
                    # Nobody knows what it wrote, and nobody offers these blocks before they are computed.
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
        """Whether there was anything to reset."""
        brought = any(epoch == self.epoch for _, epoch in self.notes.values())
        if not (self.where or brought or any(not one.void for one in self.copies.values())):
            return False
        for copy in list(self.copies.values()):
            if copy.since < 0:
                self.end(copy, good=False)
            else:
                copy.void = True
        for block in list(self.where.values()):
            self._void(block)
        self.epoch += 1
        for book in self.requests.values():
            book.cursors = ((), ())
        return True
