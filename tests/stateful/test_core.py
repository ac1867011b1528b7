"""The core under every order of calls and reports that Hypothesis can think of.

Beside the core runs a plain reference that says whose bytes are where: contents of device blocks and of
places in the host pool per worker, changed only when a copy is carried out, at any moment between submit
and report, and of a lost copy at any moment after. It shares no code with the ledger. Checked after every
rule, for slots of one and of two device blocks:

- what can be read holds its own bytes on every worker, and a load brings them (S2, S15);
- no slot or device block of a live copy is handed out, and what a lost one writes hurts nobody (S3);
- a request has one load in flight at most, and no match meanwhile (S4);
- what a match counted stays until loaded, in whole or in parts, or the load is refused (S7);
- of an offer, for one or two requests, exactly that is stored, deferred or dropped which the contents, the
  copies in flight and the room say, and what is offered again and must wait still is no event (S13);
- what a load of an older epoch brought is not stored again, unless the block was computed since (S14);
- nothing matches after a reset, and a reset twice is as once (S14, S8);
- a transfer is overdue at its bound in ticks, and not before (S9);
- keys are due at their n-th offer; cursors stand where they were put until the request starts anew;
- consumers of the KV events hold exactly the readable keys (S10).

At the end: the log folds to the live state (S10), and everything drains to rest (S4, S9).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from kvsm.events import Direction, OffloadConfig, OffloadingEvent, SkipReason, StorePlanned, StoreSkipped
from kvsm.ids import to_list
from kvsm.kv_events import Publisher
from kvsm.ledger import Ledger
from kvsm.offloader import Ended, LookupResult, Offloader, PreparedStore
from kvsm.plan import TransferJob
from kvsm.snapshot import digest, restore, snapshot
from kvsm.states.block import BlockState
from kvsm.states.request import RequestState

SLOTS, CHUNKS, WORKERS, MOST_LIVE, HISTORY = 5, 7, 2, 6, 3
REQUESTS = ("a", "b")
PROMPTS = 2
LENGTH = 4
ANY = st.integers(0, 5)
"""Names one of the copies by its place, so that a shrunk example stays valid."""
STARTS = st.sampled_from([0, 0, 0, 1, 2])
SIZES = st.sampled_from([LENGTH, LENGTH, 2, 1, 0])
PLACES = st.sampled_from([(0, 1), (0, 1, 2, 3), (2, 3), (0,), (1, 1), (3, 0, 3)])
BLOCKS = st.lists(st.integers(0, 2 * CHUNKS - 1), min_size=8, max_size=8)
MOSTLY = st.sampled_from([True, True, True, False])
PARTS = st.sampled_from([(3, 3, 3, 3), (3, 3, 3, 3), (2, 3, 3, 1), (1, 2, 3, 1), (2, 2, 2, 2)])
"""Which places of each slot are loaded, as bits."""

Content = tuple[bytes, int]
"""A key, and which device block of its chunk."""
Offered = list[tuple[bytes, tuple[int, ...]]]
"""Keys, each with the chunk of device blocks that holds it."""


def prompt_keys(prompt: int) -> list[bytes]:
    """Keys of one prompt; all prompts share their first two blocks."""
    return [
        (b"shared" if place < 2 else b"own-%d" % prompt) + b"-%d" % place + bytes(4)
        for place in range(LENGTH)
    ]


class Recorder(list[OffloadingEvent]):
    """A log in memory."""

    def flush(self) -> None:
        """Nothing to write."""


@dataclass
class Copy:
    """A job as the reference sees it: what it must bring, and which workers did what."""

    job: TransferJob
    request: str
    """Of a load; a store needs none."""
    content: list[Content]
    """By device block of the job."""
    epoch: int
    sources: dict[bytes, tuple[int, ...]] = field(default_factory=dict)
    """Of a store: the device blocks of each key."""
    submitted_at: int | None = None
    """Tick."""
    reported_by: set[int] = field(default_factory=set)
    failed: bool = False
    void: bool = False

    @property
    def store(self) -> bool:
        return self.job.direction is Direction.STORE

    @property
    def submitted(self) -> bool:
        return self.submitted_at is not None

    def pairs(self) -> list[tuple[int, int]]:
        return list(zip(to_list(self.job.device_blocks), to_list(self.job.host_blocks), strict=True))


class CoreMachine(RuleBasedStateMachine):
    @initialize(
        policy=st.sampled_from(["lru", "arc", "s3fifo", "slru"]),
        chunk=st.sampled_from([1, 2]),
        defer_ticks=st.sampled_from([0, 2]),
        transfer_ticks=st.sampled_from([0, 2]),
        threshold=st.sampled_from([1, 1, 2]),
    )
    def open(self, policy: str, chunk: int, defer_ticks: int, transfer_ticks: int, threshold: int) -> None:
        self.chunk, self.device_blocks = chunk, CHUNKS * chunk
        config = OffloadConfig(
            host_blocks=SLOTS,
            device_blocks=self.device_blocks,
            workers=WORKERS,
            blocks_per_chunk=chunk,
            policy=policy,
            max_live_transfers=MOST_LIVE,
            defer_ticks=defer_ticks,
            transfer_ticks=transfer_ticks,
            store_threshold=threshold,
            offer_history=HISTORY,
        )
        self.log = Recorder()
        self.announced: set[bytes] = set()
        self.core = Offloader(config, self.log, publisher=Publisher(), clock_ns=lambda: 0)
        self.device: list[list[Content | None]] = [[None] * WORKERS for _ in range(self.device_blocks)]
        self.host: list[list[Content | None]] = [[None] * WORKERS for _ in range(SLOTS * chunk)]
        self.live: dict[int, Copy] = {}
        self.ended: list[Copy] = []
        self.lost: list[Copy] = []
        self.matched: dict[str, list[bytes]] = {}
        self.retired: set[int] = set()
        """Device blocks that a lost load may still write."""
        self.brought: dict[int, int] = {}
        """Device block -> epoch of the load that brought what is in it."""
        self.notes: dict[int, tuple[bytes, int]] = {}
        """Device block -> what the core knows: key and epoch of the last load into it, until it fails or the
        core is told that the block was computed since (of slots of one block: in a later epoch), or, in a
        later epoch, sees it stored."""
        self.offers: OrderedDict[bytes, int] = OrderedDict()
        self.cursors: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}

    # What the reference knows.

    def leased(self) -> set[int]:
        return {block for copy in self.live.values() for block in to_list(copy.job.device_blocks)}

    def idle_blocks(self) -> list[int]:
        return sorted(set(range(self.device_blocks)) - self.leased() - self.retired)

    def pick(self, place: int) -> Copy | None:
        """One of the live copies, if there is any."""
        copies = list(self.live.values())
        return copies[place % len(copies)] if copies else None

    def load_of(self, request: str) -> Copy | None:
        loads = [copy for copy in self.live.values() if not copy.store and copy.request == request]
        assert len(loads) <= 1, "S4: a request has two loads in flight"
        return loads[0] if loads else None

    def is_finished(self, request: str) -> bool:
        """Whether it is over, and waits for its load."""
        entry = self.core.ledger.requests.get(request)
        return entry is not None and entry.state is RequestState.FINISHED

    def planned(self, copy: Copy, submit: bool) -> None:
        touched = {host for one in self.live.values() for _, host in one.pairs()}
        if copy.store:
            assert touched.isdisjoint(to_list(copy.job.host_blocks)), (
                "S3: a slot of a live copy was handed out"
            )
        assert self.leased().isdisjoint(to_list(copy.job.device_blocks)), (
            "S3, S12, S13: a device block of a live copy is copied again"
        )
        self.live[copy.job.transfer] = copy
        if submit:
            self.submit_one(copy)

    def submit_one(self, copy: Copy) -> None:
        if not copy.submitted:
            self.core.submit([copy.job.transfer])
            copy.submitted_at = self.core.ledger.tick

    def over(self, copy: Copy, good: bool = False) -> None:
        self.ended.append(self.live.pop(copy.job.transfer))
        if not copy.store and not good:
            # What it wrote is unknown: nobody offers these blocks before they are computed.
            for block in to_list(copy.job.device_blocks):
                self.device[block] = [None] * WORKERS
                self.brought.pop(block, None)
                self.notes.pop(block, None)

    # The engine's calls.

    @rule(request=st.sampled_from(REQUESTS), prompt=st.integers(0, PROMPTS - 1), start=STARTS, size=SIZES)
    def match(self, request: str, prompt: int, start: int, size: int) -> None:
        keys = prompt_keys(prompt)[start : start + size]
        match = self.core.match(request, keys)
        if match.hits:
            assert all(self.core.lookup(key) is LookupResult.HIT for key in keys[: match.hits])
            assert self.load_of(request) is None, "S4: a match that could not be loaded"
            self.matched[request] = keys[: match.hits]
        else:
            self.matched.pop(request, None)
        events = len(self.log)
        assert self.core.match(request, keys) == match, "the same question has the same answer"
        assert len(self.log) == events, "and is no event"

    @rule(request=st.sampled_from(REQUESTS))
    def release(self, request: str) -> None:
        self.core.release(request)
        self.matched.pop(request, None)

    @rule(request=st.sampled_from(REQUESTS), accept=SIZES, wanted=PARTS, submit=MOSTLY)
    def load(self, request: str, accept: int, wanted: tuple[int, ...], submit: bool) -> None:
        keys = self.matched.get(request, [])[:accept]
        content, parts = [], []
        for place, key in enumerate(keys):
            for part in range(self.chunk):
                if self.chunk == 1 or wanted[place] >> part & 1:
                    content.append((key, part))
                    parts.append(place * self.chunk + part)
        blocks = self.idle_blocks()[: len(content)]
        if len(blocks) < len(content) or len(self.live) >= MOST_LIVE:
            return
        whole = len(parts) == len(keys) * self.chunk
        job = self.core.prepare_load(request, blocks, () if whole else parts)
        self.matched.pop(request, None)
        if job is None:
            return
        assert to_list(job.device_blocks) == blocks
        for one, host in zip(content, to_list(job.host_blocks), strict=True):
            assert self.host[host] == [one] * WORKERS, "S7: what the match counted is not there any more"
        assert self.load_of(request) is None, "S4: a second load of a request"
        self.planned(Copy(job, request, content, epoch=self.epoch()), submit)
        self.notes.update({block: (key, self.epoch()) for block, (key, _) in zip(blocks, content)})

    # Offers.

    def computed(self, keys: Sequence[bytes], on: Sequence[int]) -> Offered:
        """Compute these keys in idle device blocks; what came to share a block is not offered."""
        idle = self.idle_blocks()
        if not idle:
            return []
        places = iter(on)
        offered = [(key, tuple([idle[next(places) % len(idle)] for _ in range(self.chunk)])) for key in keys]
        self.core.rewrite([block for _, blocks in offered for block in blocks])
        for key, blocks in offered:
            for part, block in enumerate(blocks):
                self.device[block] = [(key, part)] * WORKERS
                self.brought.pop(block, None)
                if block in self.notes and (self.chunk > 1 or self.notes[block][1] < self.core.ledger.epoch):
                    del self.notes[block]
        return [(key, blocks) for key, blocks in offered if self.holds(key, blocks)]

    def held(self, keys: Sequence[bytes], on: Sequence[int]) -> Offered:
        """Where these keys are on the device already, loaded or computed, under a store or not."""
        written = {block for copy in self.live.values() if not copy.store for block, _ in copy.pairs()}
        offered: Offered = []
        for key, choice in zip(keys, on):
            blocks = []
            for part in range(self.chunk):
                there = [
                    block
                    for block in range(self.device_blocks)
                    if self.device[block] == [(key, part)] * WORKERS and block not in written | self.retired
                ]
                if there:
                    blocks.append(there[choice % len(there)])
            if len(blocks) == self.chunk:
                offered.append((key, tuple(blocks)))
        return offered

    def holds(self, key: bytes, blocks: Sequence[int]) -> bool:
        return all(self.device[block] == [(key, part)] * WORKERS for part, block in enumerate(blocks))

    def due(self, offered: Offered) -> Offered:
        """Those that `store_threshold` lets pass; the reference counts for itself."""
        threshold = self.core.config.store_threshold
        if threshold == 1:
            return offered
        keys = list(dict.fromkeys(key for key, _ in offered))
        self.core.count_offers(keys)
        for key in keys:
            if self.core.lookup(key) is LookupResult.MISS:
                self.offers[key] = self.offers.pop(key, 0) + 1
        while len(self.offers) > HISTORY:
            self.offers.popitem(last=False)
        for key in keys:
            enough = self.core.lookup(key) is not LookupResult.MISS or self.offers.get(key, 0) >= threshold
            assert self.core.offered_enough(key) == enough, "a key is due at its n-th offer"
        return [(key, blocks) for key, blocks in offered if self.core.offered_enough(key)]

    def expected(self, offered: Offered) -> tuple[list[int], list[int], set[bytes], list[int]]:
        """(places to store if there is room, places to defer, resident keys, places of an older epoch)."""
        storing = {
            key: copy.sources[key]
            for copy in self.live.values()
            if copy.store and not copy.void
            for key in copy.sources
        }
        taken, new, deferred, resident, old = self.leased(), {}, [], set(), []
        for place, (key, blocks) in enumerate(offered):
            if self.core.lookup(key) is LookupResult.HIT:
                resident.add(key)
            elif any(self.is_noted(block, key) for block in blocks) and not self.under_copy(blocks):
                old.append(place)
            elif key in storing:
                if storing[key] != blocks:
                    deferred.append(place)
            elif key in new or not taken.isdisjoint(blocks) or not self.retired.isdisjoint(blocks):
                deferred.append(place)
            else:
                new[key] = place
                taken.update(blocks)
        return list(new.values()), deferred, resident, old

    def under_copy(self, blocks: Sequence[int]) -> bool:
        return not self.leased().isdisjoint(blocks) or not self.retired.isdisjoint(blocks)

    def is_noted(self, block: int, key: bytes) -> bool:
        return block in self.notes and self.notes[block][0] == key and self.notes[block][1] < self.epoch()

    def epoch(self) -> int:
        return self.core.ledger.epoch

    def room(self, resident: set[bytes]) -> int:
        """Slots that are free, or that may be evicted; what the offer itself found is not."""
        ledger = self.core.ledger
        if len(self.live) >= MOST_LIVE:
            return 0
        kept = sum(ledger.index[key] in ledger.policy for key in resident)
        return len(ledger.free) + len(ledger.policy) - kept

    def offer(self, owners: tuple[tuple[str, int], ...], offered: Offered, submit: bool) -> None:
        """Offer, compare with what the reference expects, and offer all of it once more."""
        new, deferred, resident, old = self.expected(offered)
        room = self.room(resident)
        keys = [key for key, _ in offered]
        blocks = [block for _, chunk in offered for block in chunk]
        since = len(self.log)
        outcome = self.core.store(owners, keys, blocks)
        assert list(outcome.stored) == new[:room], "S13: what is new is stored, from the first on"
        assert list(outcome.deferred) == sorted(deferred + new[room:]), "S13: the rest is deferred"
        assert outcome.keys == tuple(keys[place] for place in new[:room])
        assert outcome.resident == len(resident)
        touched = [event.kind for event in self.log[since:]].count("BlocksTouched")
        assert touched == bool(resident), "S16: what is resident is touched"
        assert not set(outcome.evicted) & set(keys), "S7: an offered key was evicted to make room"
        dropped = [
            key for event in self.skips(since) if event.reason == SkipReason.OLDER_EPOCH for key in event.keys
        ]
        assert dropped == [keys[place] for place in old], "S14"
        said = [key for event in self.skips(since) for key in event.keys]
        assert sorted(said) == sorted(keys[place] for place in [*outcome.deferred, *old]), "each is said once"
        self.check_owners(owners, since, len(offered))
        self.take(outcome, offered, submit)
        self.offer_again(owners, keys, blocks, outcome, old)

    def skips(self, since: int) -> list[StoreSkipped]:
        return [event for event in self.log[since:] if isinstance(event, StoreSkipped)]

    def check_owners(self, owners: tuple[tuple[str, int], ...], since: int, offered: int) -> None:
        for event in self.log[since:]:
            if isinstance(event, (StorePlanned, StoreSkipped)):
                counts = [count for _, count in event.owners]
                assert sum(counts) == (len(event.keys) if owners else 0)
                assert all(0 <= count <= dict(owners)[name] for name, count in event.owners)
        assert sum(count for _, count in owners) in (0, offered)

    def take(self, outcome: PreparedStore, offered: Offered, submit: bool) -> None:
        """What is being stored from here on."""
        for key in outcome.keys:
            self.offers.pop(key, None)
        if outcome.job is None:
            assert not outcome.keys
            return
        sources = dict(offered[place] for place in outcome.stored)
        content = [(key, part) for key in outcome.keys for part in range(self.chunk)]
        assert to_list(outcome.job.device_blocks) == [block for key in outcome.keys for block in sources[key]]
        for block in to_list(outcome.job.device_blocks):
            assert self.brought.get(block, self.epoch()) == self.epoch(), (
                "S14: what a load of an older epoch brought is stored again"
            )
            if block in self.notes and self.notes[block][1] < self.epoch():
                del self.notes[block]
        self.planned(Copy(outcome.job, "", content, self.epoch(), sources), submit)

    def offer_again(
        self,
        owners: tuple[tuple[str, int], ...],
        keys: list[bytes],
        blocks: list[int],
        outcome: PreparedStore,
        old: list[int],
    ) -> None:
        since = len(self.log)
        again = self.core.store(owners, keys, blocks, range(len(keys)))
        assert again.job is None, "S13: what was offered a moment ago is stored again"
        # What was dropped may wait now for the store of its key from another block.
        assert set(again.deferred) <= {*outcome.deferred, *old}, "S13: under its own store, none need wait"
        kinds = {event.kind for event in self.log[since:]}
        assert kinds <= {"BlocksTouched"}, "it waits still: no event"

    @rule(
        request=st.sampled_from(REQUESTS),
        prompt=st.integers(0, PROMPTS - 1),
        places=PLACES,
        on=BLOCKS,
        fresh=MOSTLY,
        submit=MOSTLY,
    )
    def store(
        self, request: str, prompt: int, places: tuple[int, ...], on: list[int], fresh: bool, submit: bool
    ) -> None:
        keys = [prompt_keys(prompt)[place] for place in places]
        offered = self.due(self.computed(keys, on) if fresh else self.held(keys, on))
        self.offer(((request, len(offered)),), offered, submit)

    @rule(places=PLACES, others=PLACES, on=BLOCKS, owned=MOSTLY, fresh=st.booleans(), submit=MOSTLY)
    def store_of_two(
        self,
        places: tuple[int, ...],
        others: tuple[int, ...],
        on: list[int],
        owned: bool,
        fresh: bool,
        submit: bool,
    ) -> None:
        """Two requests at once, whose prompts share a prefix; the second's blocks are on the device already,
        or were computed beside the first's."""
        keys = [prompt_keys(0)[place] for place in places]
        further = [prompt_keys(1)[place] for place in others]
        first = self.computed(keys, on)
        second = self.computed(further, on[::-1]) if fresh else self.held(further, on)
        first = self.due([one for one in first if self.holds(*one)])
        second = self.due(second)
        owners = (("a", len(first)), ("b", len(second))) if owned else ()
        self.offer(owners, [*first, *second], submit)

    @rule(request=st.sampled_from(REQUESTS), prompt=st.integers(0, PROMPTS - 1), places=PLACES)
    def store_whole(self, request: str, prompt: int, places: tuple[int, ...]) -> None:
        """Store and report, as if no time had passed: most orders worth testing start from a full pool."""
        live = set(self.live)
        self.store(request, prompt, places, list(range(8)), True, True)
        self.end_all_but(live)

    def end_all_but(self, live: set[int]) -> None:
        for copy in [copy for id, copy in self.live.items() if id not in live]:
            for worker in range(WORKERS):
                self.carry_out_now(copy, worker)
                self.hear(copy, worker, True)

    @rule(
        request=st.sampled_from(REQUESTS),
        prompt=st.integers(0, PROMPTS - 1),
        wanted=PARTS,
        reset=st.sampled_from([False, False, True]),
    )
    def round_trip(self, request: str, prompt: int, wanted: tuple[int, ...], reset: bool) -> None:
        """Store, load, and offer what was loaded; a reset in between is what makes it old."""
        live = set(self.live)
        self.store_whole(request, prompt, (0, 1))
        self.match_and_load(request, prompt, wanted, True)
        self.end_all_but(live)
        if reset:
            self.reset_now()
        self.offer((), self.held(prompt_keys(prompt), [CHUNKS] * LENGTH), True)

    @rule(request=st.sampled_from(REQUESTS), prompt=st.integers(0, PROMPTS - 1), wanted=PARTS, submit=MOSTLY)
    def match_and_load(self, request: str, prompt: int, wanted: tuple[int, ...], submit: bool) -> None:
        self.match(request, prompt, 0, LENGTH)
        self.load(request, LENGTH, wanted, submit)

    @rule(request=st.sampled_from(REQUESTS), settled=st.integers(0, 3), ahead=st.integers(0, 2))
    def advance(self, request: str, settled: int, ahead: int) -> None:
        if self.is_finished(request):
            return
        self.core.arrive(request)
        self.cursors[request] = (settled, 0), (settled + ahead, ahead)
        self.core.advance([(request, *self.cursors[request])])

    @rule(place=ANY)
    def submit(self, place: int) -> None:
        copy = self.pick(place)
        if copy is not None:
            self.submit_one(copy)

    @rule(place=ANY)
    def cancel(self, place: int) -> None:
        copy = self.pick(place)
        if copy is not None:
            ended = self.core.cancel(copy.job.transfer)
            assert (ended is None) == copy.submitted, "only what was not submitted can be taken back"
            if ended is not None:
                self.over(copy)

    @rule(request=st.sampled_from(REQUESTS))
    def preempt(self, request: str) -> None:
        self.core.preempt(request)
        self.matched.pop(request, None)
        self.cursors.pop(request, None)

    @rule(request=st.sampled_from(REQUESTS), aborted=st.booleans(), times=st.integers(1, 2))
    def finish(self, request: str, aborted: bool, times: int) -> None:
        for _ in range(times):
            released = self.core.finish(request, aborted=aborted)
            assert released == (self.load_of(request) is None), "S4: only its load holds it"
        self.matched.pop(request, None)
        self.cursors.pop(request, None)

    @rule(prompt=st.integers(0, PROMPTS - 1))
    def touch(self, prompt: int) -> None:
        self.core.touch(prompt_keys(prompt))

    @rule()
    def tick(self) -> None:
        self.core.tick()

    @rule()
    def end_step(self) -> None:
        self.core.end_step()

    @rule()
    def flush(self) -> None:
        assert set(self.core.flush()) == {id for id, copy in self.live.items() if copy.submitted}

    @rule(really=st.integers(0, 3), prompt=st.integers(0, PROMPTS - 1), on=BLOCKS, offer=st.booleans())
    def reset(self, really: int, prompt: int, on: list[int], offer: bool) -> None:
        if really == 3:
            self.reset_now()
            if offer:
                self.offer((), self.held(prompt_keys(prompt), on), True)

    def reset_now(self) -> None:
        epoch, at_rest = self.epoch(), self.core.reset()
        for copy in list(self.live.values()):
            if copy.submitted:
                copy.void = True
            else:
                self.over(copy)
        assert at_rest == (not self.live)
        assert not self.core.ledger.index, "S14: a key survived the reset"
        events = len(self.log)
        assert self.core.reset() == at_rest
        assert len(self.log) == events, "S8: twice is as once"
        if self.epoch() > epoch:
            self.cursors.clear()

    # The hardware's side.

    @rule(place=ANY, worker=st.integers(0, WORKERS - 1))
    def carry_out(self, place: int, worker: int) -> None:
        copy = self.pick(place)
        if copy is not None and copy.submitted and worker not in copy.reported_by:
            self.carry_out_now(copy, worker)

    @rule(place=ANY, worker=st.integers(0, WORKERS - 1), good=st.booleans())
    def report(self, place: int, worker: int, good: bool) -> None:
        copy = self.pick(place)
        if copy is None or not copy.submitted:
            return
        if good and worker not in copy.reported_by:
            self.carry_out_now(copy, worker)
        self.hear(copy, worker, good)

    @rule(place=ANY, good=MOSTLY)
    def report_all(self, place: int, good: bool) -> None:
        for worker in range(WORKERS):
            self.report(place, worker, good)

    @rule(place=ANY, worker=st.integers(0, WORKERS - 1), good=st.booleans())
    def report_too_late(self, place: int, worker: int, good: bool) -> None:
        if self.ended:
            self.hear(self.ended[place % len(self.ended)], worker, good)

    def hear(self, copy: Copy, worker: int, good: bool) -> None:
        live = copy.job.transfer in self.live and worker not in copy.reported_by
        before = digest_without_log(self.core.ledger)
        ended = self.core.report(copy.job.transfer, worker, good)
        if not live:
            assert ended is None
            assert digest_without_log(self.core.ledger) == before, (
                "S5: a stale or doubled report changed something"
            )
            return
        copy.reported_by.add(worker)
        copy.failed |= not good
        if len(copy.reported_by) < WORKERS:
            assert ended is None
            return
        assert ended is not None
        self.over(copy, not copy.failed and not copy.void)
        self.check_end(copy, ended)

    def check_end(self, copy: Copy, ended: Ended) -> None:
        assert (ended.request, ended.lost) == (copy.request, False)
        assert ended.good == (not copy.failed and not copy.void), "S6: a failure is not a success"
        if copy.store:
            return
        if copy.failed:
            # By slot: its keys may have been stored again meanwhile, from good bytes.
            slots = {host // self.chunk for _, host in copy.pairs()}
            assert not any(self.core.ledger.readable(slot) for slot in slots), (
                "S6: what could not be loaded is still offered"
            )
        if ended.good:
            for one, (block, _) in zip(copy.content, copy.pairs(), strict=True):
                assert self.device[block] == [one] * WORKERS, "S15: a load brought other bytes"

    @rule(transfer=st.integers(-2, 60), worker=st.integers(-1, WORKERS + 1), good=st.booleans())
    def stray_report(self, transfer: int, worker: int, good: bool) -> None:
        copy = self.live.get(transfer)
        if copy is not None and copy.submitted and 0 <= worker < WORKERS:
            return
        before = digest_without_log(self.core.ledger)
        assert self.core.report(transfer, worker, good) is None
        assert digest_without_log(self.core.ledger) == before, "S5"

    @rule(place=ANY)
    def lose(self, place: int) -> None:
        copy = self.pick(place)
        if copy is None or not copy.submitted or not self.may_lose():
            return
        ended = self.core.lose(copy.job.transfer)
        assert ended is not None
        self.gone(copy, ended)

    @rule()
    def lose_overdue(self) -> None:
        ticks, tick = self.core.config.transfer_ticks, self.core.ledger.tick
        overdue = [
            copy
            for copy in self.live.values()
            if ticks and copy.submitted_at is not None and tick - copy.submitted_at >= ticks
        ]
        if overdue and not self.may_lose():
            return
        lost = {ended.transfer: ended for ended in self.core.lose_overdue()}
        assert set(lost) == {copy.job.transfer for copy in overdue}, "S9: lost at its bound, and not before"
        for copy in overdue:
            self.gone(copy, lost[copy.job.transfer])

    def may_lose(self) -> bool:
        """Whether enough is left to go on with."""
        ledger = self.core.ledger
        return len(ledger.free) + len(ledger.policy) >= 3 and len(self.retired) <= self.chunk

    def gone(self, copy: Copy, ended: Ended) -> None:
        assert (ended.good, ended.lost, ended.request) == (False, True, copy.request)
        self.over(copy)
        self.lost.append(copy)
        if not copy.store:
            self.retired |= set(to_list(copy.job.device_blocks))
        for block in to_list(copy.job.device_blocks):
            assert self.core.leased([block]) == (not copy.store), (
                "S3: a lost load may still write; a lost store only reads"
            )

    @rule(place=ANY, worker=st.integers(0, WORKERS - 1))
    def carry_out_what_was_lost(self, place: int, worker: int) -> None:
        """S3: nobody knows when a worker that was given up stops writing."""
        if self.lost:
            self.carry_out_now(self.lost[place % len(self.lost)], worker)

    # What must hold. (Not an @invariant: those print a line a step.)

    def check_invariants(self, *args: object, **kwargs: object) -> None:
        super().check_invariants(*args, **kwargs)  # type: ignore[no-untyped-call]
        if hasattr(self, "core"):
            self.check()

    def check(self) -> None:
        ledger = self.core.ledger
        readable = {key: slot for key, slot in ledger.index.items() if ledger.readable(slot)}
        for key, slot in readable.items():
            for part in range(self.chunk):
                assert self.host[slot * self.chunk + part] == [(key, part)] * WORKERS, (
                    "S2/S15: a readable key has other bytes"
                )
        for event in self.core.take_events():
            self.announced = (
                self.announced - set(event.keys) if event.removed else self.announced | set(event.keys)
            )
        assert self.announced == set(readable), "S10: the KV events tell another story"
        assert set(ledger.transfers) == set(self.live)
        leased = set(to_list(ledger.leases.view.nonzero()[0]))
        assert leased == self.leased() | self.retired, "S4: leases are not those of the live copies"
        for request, entry in ledger.requests.items():
            assert (entry.settled, entry.offered) == self.cursors.get(request, ((), ())), request
            load = self.load_of(request)
            assert entry.load == (load.job.transfer if load else 0), "S4: a request does not know its load"
        assert list(ledger.offers.times.items()) == list(self.offers.items())
        self.cursors = {name: one for name, one in self.cursors.items() if name in ledger.requests}

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        for event in self.log:
            note(str(event))
        self.drain()
        ledger = self.core.ledger
        replayed = Ledger(self.core.config)
        for event in self.log:
            replayed.apply(event)
        assert digest(replayed) == digest(ledger), "S10: the log folds to another state"
        assert digest(restore(snapshot(ledger))) == digest(ledger)

    def drain(self) -> None:
        middle = digest(restore(snapshot(self.core.ledger)))
        assert middle == digest(self.core.ledger), "S10: a snapshot of a busy ledger gives another one"
        for copy in list(self.live.values()):
            if not copy.submitted:
                self.core.cancel(copy.job.transfer)
                self.over(copy)
                continue
            for worker in range(WORKERS):
                if worker not in copy.reported_by:
                    self.carry_out_now(copy, worker)
                    self.hear(copy, worker, True)
        for request in REQUESTS:
            assert self.core.finish(request), "S9: a request that nothing holds is not released"
        self.check()
        ledger = self.core.ledger
        assert not ledger.transfers
        assert not ledger.requests
        assert not ledger.deferred
        resting = (BlockState.FREE, BlockState.EVICTED, BlockState.STORED, BlockState.RETIRED)
        assert all(ledger.blocks.state(slot) in resting for slot in range(SLOTS)), "S4: something is held"
        lost = sum(ledger.blocks.state(slot) is BlockState.RETIRED for slot in range(SLOTS))
        assert len(ledger.free) + len(ledger.policy) + lost == SLOTS, "S1: a slot is in no list"

    def carry_out_now(self, copy: Copy, worker: int) -> None:
        for block, host in copy.pairs():
            if copy.store:
                self.host[host][worker] = self.device[block][worker]
            else:
                self.device[block][worker] = self.host[host][worker]
                self.brought[block] = copy.epoch


def digest_without_log(ledger: Ledger) -> str:
    """The digest as if no event had been recorded since: a rejected report moves only these two numbers."""
    seq, step = ledger.seq, ledger.step
    ledger.seq = ledger.step = 0
    try:
        return digest(ledger)
    finally:
        ledger.seq, ledger.step = seq, step


def test_core_keeps_its_promises() -> None:
    run_state_machine_as_test(CoreMachine, settings=settings(max_examples=150, stateful_step_count=60))


@pytest.mark.slow
def test_core_keeps_its_promises_long() -> None:
    run_state_machine_as_test(CoreMachine, settings=settings(max_examples=10_000, stateful_step_count=60))
