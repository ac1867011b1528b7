"""Tests a prefix tree (radix tree) with a host tier with every order of calls that Hypothesis can find.

    class MyTreeMachine(PrefixTreeMachine):
        def make_tree(self, device_slots, host_slots):
            return MyTree(device_slots, host_slots)

    TestMyTree = MyTreeMachine.TestCase

`PrefixTree` says what a tree must offer. The machine calls it as a scheduler whose steps overlap. A request
is matched, and locks what it hits. What only the host has is loaded back, and the rest is allocated. Then a
step begins; up to two are in flight. A step reads what was hit, and writes what it computes. After it, a
request inserts its blocks, goes on with another block, or is over. Copies go on when the run says so. Plain
books say which blocks were inserted, and what must be in each slot. Checked:

- a step reads what was computed for its prefix (correct bytes, S15), and since the last reset (no stale data,
  S14);
- a hit was inserted (publish after commit, S2);
- what a request has locked is not evicted (a match holds what it counts, S7), and what is its own is not
  given to another one (no reuse in flight, S3);
- each slot of both tiers is free, in the tree, or one request's own (conservation, S1), and free once (one
  release per hold, S4);
- as many slots can be allocated as the tree says (conservation, S1); with no request, these are all (one
  release per hold, S4);
- KV events tell what is on the device and on the host (events are state, S10);
- no call raises (S8); with no call, all copies end (progress, S9).

Not checked: which block is evicted or backed up, statistics, threads, tiers below the host.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, MultipleResults, multiple
from hypothesis.strategies import SearchStrategy

from kvsm.errors import PropertyBroken
from kvsm.properties import Property
from kvsm.testing.machine_base import PropertyMachine, initialize, rule
from kvsm.testing.prefix_tree_books import Prefix, PrefixMatch, TreeBooks, TreeEvent

LONGEST = 5
"""Blocks of a request, at most."""

MOST_REQUESTS = 4
"""How many requests are unfinished at once, at most."""

MOST_STEPS = 2
"""How many steps are in flight, at most: a scheduler plans the next one while one runs."""

POLLS_TO_REST = 10
"""After that many polls without a copy in flight, nothing is pending."""

MOST_TOLD = 40
"""A failure tells that many calls at most, the last ones."""


class PrefixTree(Protocol):
    """A prefix tree with its allocator and both of its pools. Slots are numbered from 0 in each pool."""

    def match(self, blocks: Prefix) -> PrefixMatch:
        """The longest prefix of these blocks that the tree has."""

    def lock(self, match: PrefixMatch) -> Any:
        """Nothing that this match found is evicted until `unlock` gets the answer."""

    def unlock(self, lock: Any) -> None:
        """Give a lock back."""

    def load_back(self, match: PrefixMatch) -> PrefixMatch:
        """Plan a load of what only the host has; the match afterwards. The same match: nothing is loaded."""

    def allocatable(self) -> int:
        """How many device slots are free or can be evicted. A scheduler admits a request by this number."""

    def allocate(self, count: int) -> Sequence[int] | None:
        """That many free device slots for the caller, evicting for them; None if there are not enough."""

    def free(self, slots: Sequence[int]) -> None:
        """The caller gives back device slots of its own."""

    def insert(self, blocks: Prefix, slots: Sequence[int], held: int) -> PrefixMatch:
        """Take blocks that were computed into these device slots.

        held: the tree has this number of the slots, the first ones. Of the others it takes those whose block
        is new, and frees the rest. The answer has the slots in which the blocks are now.
        """

    def launch(self, compute: Callable[[], None]) -> Any:
        """Begin the loads that are planned, and a step after them, which calls `compute` once it runs."""

    def finish(self, step: Any) -> None:
        """Wait until a step has run. Steps run in the order of their launch."""

    def poll(self) -> None:
        """Begin the copies to the host that are planned, and take note of the copies that have ended."""

    def copy_next(self, to_host: bool) -> bool:
        """The oldest copy in this direction goes on; False if there is none that has begun."""

    def reset(self) -> None:
        """Forget all blocks. There is no request then, and copies may be in flight."""

    def free_slots(self) -> tuple[Collection[int], Collection[int]]:
        """The free slots: of the device, of the host."""

    def tree_slots(self) -> tuple[Collection[int], Collection[int]]:
        """The slots that the tree has: on the device, on the host. A slot in use twice is named twice."""

    def read(self, slot: int) -> int:
        """The word in a device slot; 0 if none was written."""

    def write(self, slot: int, word: int) -> None:
        """Write a word to a device slot."""

    def take_events(self) -> Iterable[TreeEvent]:
        """The KV events since the last call."""


_CALLED = tuple(name for name in vars(PrefixTree) if not name.startswith("_"))
"""The methods of a tree whose calls are told."""


class TreeRequest:
    """A request: its blocks, where they are, and how many of them the tree holds for it."""

    def __init__(self, name: str, blocks: Prefix) -> None:
        self.name, self.blocks = name, blocks
        self.slots: list[int] = []
        self.held = 0
        self.lock: Any = None
        self.phase = "waiting"
        """"waiting", "running" (in a step), "ready" or "over"."""

    def __repr__(self) -> str:
        return self.name


class PrefixTreeMachine(PropertyMachine):
    """Subclass it and give `make_tree`.

    Attributes: `tree`; `device_slots` and `host_slots`, the sizes of its pools.
    """

    device_pools: SearchStrategy[int] = st.integers(LONGEST, 2 * LONGEST)
    """Which sizes of the device pool are tried, in blocks. A request of `LONGEST` blocks must fit."""

    host_pools: SearchStrategy[int] = st.integers(1, 2 * LONGEST)

    publishes_events = True
    """Whether the tree that you make publishes KV events."""

    requests: Bundle[TreeRequest] = Bundle("requests")

    # What a subclass gives.

    def make_tree(self, device_slots: int, host_slots: int) -> PrefixTree:
        """A new tree with pools of that many blocks."""
        raise NotImplementedError(f"{type(self).__name__} must say which tree it is for: make_tree")

    # Rules.

    @initialize(
        target=requests,
        device_slots=st.runner().flatmap(lambda machine: machine.device_pools),
        host_slots=st.runner().flatmap(lambda machine: machine.host_pools),
    )
    def open(self, device_slots: int, host_slots: int) -> MultipleResults[TreeRequest]:
        """Make the tree, and let two requests arrive that share a prompt."""
        self.device_slots, self.host_slots = device_slots, host_slots
        self._books = TreeBooks(device_slots, host_slots)
        self._asked: list[TreeRequest] = []
        self._steps: list[tuple[Any, list[TreeRequest]]] = []
        self.tree = self.make_tree(device_slots, host_slots)
        self.under_test.watch(self.tree, "tree", _CALLED, self.make_tree)
        self.started = True
        return multiple(self._arrive((0, 0, 0)), self._arrive((0, 0, 1, 0)))

    @rule(target=requests, blocks=st.lists(st.integers(0, 1), min_size=1, max_size=LONGEST))
    def arrive(self, blocks: list[int]) -> MultipleResults[TreeRequest]:
        """A request arrives."""
        if sum(one.phase != "over" for one in self._asked) >= MOST_REQUESTS:
            return multiple()
        return multiple(self._arrive(tuple(blocks)))

    @rule(first=requests, second=st.none() | requests, block=st.integers(0, 1))
    def step(self, first: TreeRequest, second: TreeRequest | None, block: int) -> None:
        """A step begins. A waiting request is admitted; a ready one computes one block more."""
        self._step([first, *([second] if second not in (None, first) else [])], block)

    @rule()
    def end_step(self) -> None:
        """The oldest step has run."""
        self._end_step()

    @rule(request=requests)
    def publish(self, request: TreeRequest) -> None:
        """A request inserts what it has computed, and goes on."""
        if request.phase == "ready":
            self._publish(request)

    @rule(request=requests, published=st.booleans())
    def finish(self, request: TreeRequest, published: bool) -> None:
        """A request is over: done, or aborted."""
        if request.phase in ("ready", "waiting"):
            self._finish(request, published)

    @rule(to_host=st.booleans())
    def copy(self, to_host: bool) -> None:
        """A copy to the host, or back from it, goes on."""
        self.tree.copy_next(to_host)

    @rule()
    def poll(self) -> None:
        """The scheduler looks which copies have ended."""
        self.tree.poll()

    @rule(count=st.integers(1, LONGEST))
    def squeeze(self, count: int) -> None:
        """Somebody takes slots, and gives them back: whatever must be evicted for them is."""
        slots = self._allocate(count)
        if slots is not None:
            self.tree.free(slots)

    @rule(blocks=st.lists(st.integers(0, 1), min_size=1, max_size=LONGEST))
    def serve(self, blocks: list[int]) -> None:
        """A request comes and goes while nothing else runs."""
        self._serve(tuple(blocks))

    @rule()
    def rest(self) -> None:
        """All steps and copies end; then events tell what is where."""
        self._rest()

    @rule(really=st.sampled_from([False, False, True]))
    def reset(self, really: bool) -> None:
        """Reset the tree, now and then, while no request has anything. Copies may be in flight."""
        if really and all(one.phase in ("waiting", "over") for one in self._asked):
            self._reset()

    # Calls.

    def _arrive(self, blocks: Prefix) -> TreeRequest:
        request = TreeRequest(f"r{len(self._asked) + 1}", blocks)
        self._asked.append(request)
        return request

    def _step(self, requests: Sequence[TreeRequest], block: int) -> list[TreeRequest]:
        """Begin a step; the requests in it."""
        if len(self._steps) == MOST_STEPS:
            self._end_step()
        work = [(one, start) for one in requests if (start := self._admit(one, block)) is not None]
        if work:
            running = [one for one, _ in work]
            self._steps.append((self.tree.launch(lambda: self._compute(work)), running))
        return [one for one, _ in work]

    def _admit(self, request: TreeRequest, block: int) -> int | None:
        """How many of its blocks need not be computed; None: it cannot be in a step now."""
        if request.phase == "ready" and len(request.blocks) < LONGEST:
            request.blocks += (block,)
        elif request.phase == "waiting":
            self._take_prefix(request)
        else:
            return None
        start = len(request.slots)
        slots = self._allocate(len(request.blocks) - start)
        if slots is None:
            if request.phase == "waiting":
                self._give_back(request)
            else:
                request.blocks = request.blocks[:-1]
            return None
        request.slots += slots
        request.phase = "running"
        return start

    def _take_prefix(self, request: TreeRequest) -> None:
        """Match and lock. A step computes one block at least, so the last one is not matched."""
        match = self.tree.match(request.blocks[:-1])
        self._books.matched(request.blocks[:-1], match)
        request.lock = self.tree.lock(match)
        # What is loaded must be read by this step: a scheduler loads only for a request that has room.
        if match.host_blocks and len(request.blocks) - len(match.slots) <= self.tree.allocatable():
            loaded = self.tree.load_back(match)
            self._books.loaded(match, loaded)
            lock = self.tree.lock(loaded)
            self.tree.unlock(request.lock)
            request.lock, match = lock, loaded
        request.slots, request.held = list(match.slots), len(match.slots)

    def _allocate(self, count: int) -> list[int] | None:
        most = self.tree.allocatable()
        slots = self.tree.allocate(count)
        if slots is not None:
            self._must_be_new(slots, count)
            return list(slots)
        if count <= most:
            message = f"{most} device slots are free or can be evicted, and {count} cannot be allocated"
            raise PropertyBroken(Property.CONSERVATION, message)
        return None

    def _compute(self, work: Iterable[tuple[TreeRequest, int]]) -> None:
        """A step runs: all reads come before the writes."""
        work = list(work)
        for request, start in work:
            for place, slot in enumerate(request.slots[:start]):
                prefix = request.blocks[: place + 1]
                self._books.read(request, prefix, slot, self.tree.read(slot))
        for request, start in work:
            for place, slot in enumerate(request.slots[start:], start):
                self.tree.write(slot, self._books.word(request.blocks[: place + 1]))

    def _end_step(self) -> None:
        if self._steps:
            step, requests = self._steps.pop(0)
            self.tree.finish(step)
            for request in requests:
                request.phase = "ready"

    def _publish(self, request: TreeRequest) -> None:
        match = self.tree.insert(request.blocks, request.slots, request.held)
        count = len(match.slots)
        if count < request.held or list(match.slots[: request.held]) != request.slots[: request.held]:
            message = f"{request} holds {request.slots[: request.held]}; after its insert they are {match}"
            raise PropertyBroken(Property.MATCH_HOLDS, message)
        lock = self.tree.lock(match)
        self.tree.unlock(request.lock)
        request.lock, request.held = lock, count
        request.slots[:count] = match.slots
        self._books.insert(request.blocks[:count])

    def _finish(self, request: TreeRequest, published: bool) -> None:
        if request.phase == "ready":
            if published:
                self._publish(request)
            self._give_back(request)
        request.phase = "over"

    def _give_back(self, request: TreeRequest) -> None:
        own = request.slots[request.held :]
        self.tree.unlock(request.lock)
        request.slots, request.held, request.lock = [], 0, None
        if own:
            self.tree.free(own)

    def _serve(self, blocks: Prefix) -> None:
        self._end_steps()
        request = self._arrive(blocks)
        if self._step([request], 0):
            self._end_steps()
        self._finish(request, published=True)

    def _reset(self) -> None:
        self._take_events()
        self.tree.reset()
        self._books.reset()
        self._take_events()
        for prefix in sorted(self._books.before_reset):
            self._books.matched(prefix, self.tree.match(prefix))

    # What must hold.

    def _must_be_new(self, slots: Sequence[int], count: int) -> None:
        if len(slots) != count:
            message = f"{count} slots are asked for, and the answer is {list(slots)}"
            raise PropertyBroken(Property.LEGAL_CALLS, message)
        for request in self._asked:
            if taken := {*slots} & {*request.slots}:
                is_locked = taken & {*request.slots[: request.held]}
                message = f"device slots {sorted(taken)} are given away, and {request} "
                message += "has locked what is in them" if is_locked else "uses them"
                broken = Property.MATCH_HOLDS if is_locked else Property.NO_REUSE_IN_FLIGHT
                raise PropertyBroken(broken, message)

    def check(self) -> None:
        """Each slot is in one place, and nothing that is locked is gone."""
        free, tree = self.tree.free_slots(), self.tree.tree_slots()
        private = {slot: one for one in self._asked for slot in one.slots[one.held :]}
        held = {slot: one for one in self._asked for slot in one.slots[: one.held]}
        self._books.compare_slots("device", free[0], tree[0], private, held)
        self._books.compare_slots("host", free[1], tree[1], {}, {})
        self._take_events()

    def _take_events(self) -> None:
        if self.publishes_events:
            self._books.take(self.tree.take_events())

    def _end_steps(self) -> None:
        while self._steps:
            self._end_step()

    def _end_copies(self, to_host: bool) -> bool:
        """Let all copies in this direction end; whether there was one."""
        if not self.tree.copy_next(to_host):
            return False
        while self.tree.copy_next(to_host):
            pass
        return True

    def _rest(self) -> None:
        self._end_steps()
        for _ in range(POLLS_TO_REST):
            self.tree.poll()
            to_host, from_host = self._end_copies(True), self._end_copies(False)
            if not (to_host or from_host):
                break
        else:
            message = f"nothing happens, and after {POLLS_TO_REST} polls copies are still in flight"
            raise PropertyBroken(Property.PROGRESS, message)
        self._take_events()
        if self.publishes_events:
            for prefix in self._books.prefixes_to_compare():
                self._books.compare_events(prefix, self.tree.match(prefix))

    def wind_down(self) -> None:
        """Bring everything to rest, serve every prompt again, and check that nothing is left."""
        self._end_steps()
        for request in self._asked:
            self._finish(request, published=True)
        self._rest()
        for prefix in sorted(self._books.inserted, key=lambda one: (-len(one), one)):
            self._serve((*prefix, 2)[:LONGEST])
        self._rest()
        self.check()
        if (most := self.tree.allocatable()) < self.device_slots:
            message = f"there is no request, and {most} of {self.device_slots} device slots can be allocated"
            raise PropertyBroken(Property.ONE_RELEASE_PER_HOLD, f"{message}: some are still locked")
        self.tree.free(self._allocate(self.device_slots) or [])
        self._reset()
        self.check()

    def trace(self) -> Iterable[str]:
        """The calls, with their answers."""
        return map(str, self.under_test.calls[-MOST_TOLD:])
