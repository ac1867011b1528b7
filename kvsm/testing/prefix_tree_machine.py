"""Test a prefix tree (radix tree) with a host tier, with every order of calls that Hypothesis can find.

    class MyTreeMachine(PrefixTreeMachine):
        def make_tree(self, device_slots, host_slots):
            return MyTree(device_slots, host_slots)

    TestMyTree = MyTreeMachine.TestCase

`PrefixTree` has the methods that a tree must have. The machine calls them like a scheduler whose steps
overlap. A request is matched, and locks its hit. Blocks that only the host has are loaded back, and slots for
the other blocks are allocated. Then a step begins; up to two are in flight. A step reads the blocks of the
hit, and writes the others. After the step, the request inserts its blocks, computes another block, or
finishes. The machine also decides when copies proceed. Plain books have the inserted blocks and the expected
content of each slot. Checked:

- a step reads content that was computed for its prefix (correct bytes, S15), after the last reset (no stale
  data, S14);
- a hit was inserted (publish after commit, S2);
- at rest each block that is matched alone is matched in longer prompts, too, and each device slot of the tree
  is matched by some prompt (stored, so served, S19);
- slots that a request has locked are not evicted (a match holds what it counts, S7), and slots that are
  allocated to it are not allocated to another one (no reuse in flight, S3);
- each slot of both tiers is free, in the tree, or allocated to one request (conservation, S1), and is not
  free twice (one release per hold, S4);
- as many slots can be allocated as the tree says (conservation, S1); with no request, all can (one release
  per hold, S4);
- KV events announce the blocks on the device and on the host (events are state, S10);
- no call raises (S8); without further calls, all copies end (progress, S9).

Not checked: which block is evicted or backed up, statistics, threads, tiers below the host.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, MultipleResults, multiple
from hypothesis.strategies import SearchStrategy

from kvsm.check.worlds.check_counts import count_case
from kvsm.errors import PropertyBroken
from kvsm.properties import Property
from kvsm.testing.block_history import BlockHistory
from kvsm.testing.machine_base import PropertyMachine, initialize, rule
from kvsm.testing.prefix_tree_books import Prefix, PrefixMatch, TreeBooks, TreeEvent, slot_named
from kvsm.testing.under_test import Call

LONGEST = 5
"""Most blocks of a request."""

MOST_REQUESTS = 4
"""Most unfinished requests at once."""

MOST_STEPS = 2
"""Most steps in flight: a scheduler plans the next step while one runs."""

POLLS_TO_REST = 10
"""After this many polls, no copy may be in flight."""

MOST_TOLD = 40
"""Most calls that a failure lists; they are the last ones."""


class PrefixTree(Protocol):
    """A prefix tree with its allocator and both of its pools. Slots are numbered from 0 in each pool."""

    def match(self, blocks: Prefix) -> PrefixMatch:
        """Return the longest prefix of these blocks that the tree has."""

    def lock(self, match: PrefixMatch) -> Any:
        """Keep the blocks of this match from eviction. Returns a lock for `unlock`."""

    def unlock(self, lock: Any) -> None:
        """Release a lock."""

    def load_back(self, match: PrefixMatch) -> PrefixMatch:
        """Plan a load of the blocks that only the host has. Returns the new match; the same one: no load."""

    def allocatable(self) -> int:
        """The number of device slots that are free or can be evicted. A scheduler admits requests by it."""

    def allocate(self, count: int) -> Sequence[int] | None:
        """Allocate `count` device slots, evicting if necessary; None: there are not enough."""

    def free(self, slots: Sequence[int]) -> None:
        """Free allocated device slots."""

    def insert(self, blocks: Prefix, slots: Sequence[int], held: int) -> PrefixMatch:
        """Insert blocks that were computed into these device slots.

        The tree already has the first `held` slots. Of the others it takes those whose block is new, and
        frees the rest. Returns the slots in which the blocks are now.
        """

    def launch(self, compute: Callable[[], None]) -> Any:
        """Begin the planned loads, and then a step, which calls `compute` when it runs. Returns the step."""

    def finish(self, step: Any) -> None:
        """Wait until a step has run. Steps run in the order of their launch."""

    def poll(self) -> None:
        """Begin the planned copies to the host, and process the copies that have ended."""

    def copy_next(self, to_host: bool) -> bool:
        """Let the oldest copy in this direction proceed; False: no copy has begun."""

    def reset(self) -> None:
        """Forget all blocks. It is called without requests, but copies may be in flight."""

    def free_slots(self) -> tuple[Collection[int], Collection[int]]:
        """The free slots: (device slots, host slots)."""

    def tree_slots(self) -> tuple[Collection[int], Collection[int]]:
        """The slots that the tree has: (device slots, host slots). A slot used twice is listed twice."""

    def read(self, slot: int) -> int:
        """The word in a device slot; 0 if none was written."""

    def write(self, slot: int, word: int) -> None:
        """Write a word to a device slot."""

    def take_events(self) -> Iterable[TreeEvent]:
        """The KV events since the last call."""


_CALLED = tuple(name for name in vars(PrefixTree) if not name.startswith("_"))
"""The methods of a tree whose calls are recorded."""


class TreeRequest:
    """A request: its blocks, their device slots, and how many of the first slots it has locked."""

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
    """Tests one tree.

    Needs: a subclass with `make_tree(device_slots, host_slots)`, which returns a tree with the methods of
    `PrefixTree`, with its allocator and both pools. A fake pool of one word a slot will do: the machine calls
    `write` and `read` for the device's slots, and `copy_next` lets the tree copy words between its pools.

    `device_pools` and `host_pools` are the sizes to try. `publishes_events = False`: it has no KV events.

    Attributes: `self.device_slots` and `self.host_slots`, the sizes, in `make_tree` too; `self.tree`.
    """

    device_pools: SearchStrategy[int] = st.integers(LONGEST, 2 * LONGEST)
    """The sizes of the device pool to try, in blocks. A request of `LONGEST` blocks must fit."""

    host_pools: SearchStrategy[int] = st.integers(1, 2 * LONGEST)

    publishes_events = True
    """Whether the tree publishes KV events."""

    requests: Bundle[TreeRequest] = Bundle("requests")

    # For subclasses to override.

    def make_tree(self, device_slots: int, host_slots: int) -> PrefixTree:
        """Make the tree to test, with pools of these sizes."""
        raise NotImplementedError(f"{type(self).__name__} must say which tree it is for: make_tree")

    # Rules.

    @initialize(
        target=requests,
        device_slots=st.runner().flatmap(lambda machine: machine.device_pools),
        host_slots=st.runner().flatmap(lambda machine: machine.host_pools),
    )
    def open(self, device_slots: int, host_slots: int) -> MultipleResults[TreeRequest]:
        """Make the tree, and let two requests arrive that share a prefix."""
        self.device_slots, self.host_slots = device_slots, host_slots
        self._books = TreeBooks(device_slots, host_slots)
        self._history = BlockHistory(self.under_test)
        self._given: dict[int, Call | None] = {}
        """Device slot -> the call of the tree that gave it to a request last."""
        self._asked: list[TreeRequest] = []
        self._steps: list[tuple[Any, list[TreeRequest]]] = []
        self.tree = self.make_tree(device_slots, host_slots)
        self.under_test.watch(self.tree, "tree", _CALLED, self.make_tree)
        self.started = True
        return multiple(self._arrive((0, 0, 0)), self._arrive((0, 0, 1, 0)))

    @rule(target=requests, blocks=st.lists(st.integers(0, 1), min_size=1, max_size=LONGEST))
    def arrive(self, blocks: list[int]) -> MultipleResults[TreeRequest]:
        """Let a request arrive."""
        if sum(request.phase != "over" for request in self._asked) >= MOST_REQUESTS:
            return multiple()
        return multiple(self._arrive(tuple(blocks)))

    @rule(first=requests, second=st.none() | requests, block=st.integers(0, 1))
    def step(self, first: TreeRequest, second: TreeRequest | None, block: int) -> None:
        """Begin a step: admit waiting requests, and let ready ones compute one more block."""
        self._step([first, *([second] if second not in (None, first) else [])], block)

    @rule()
    def end_step(self) -> None:
        """Finish the oldest step."""
        self._end_step()

    @rule(request=requests)
    def publish(self, request: TreeRequest) -> None:
        """Insert the blocks that a request has computed. The request continues."""
        if request.phase == "ready":
            self._publish(request)

    @rule(request=requests, published=st.booleans())
    def finish(self, request: TreeRequest, published: bool) -> None:
        """Finish or abort a request. published: whether it inserts its blocks first."""
        if request.phase in ("ready", "waiting"):
            self._finish(request, published)

    @rule(to_host=st.booleans())
    def copy(self, to_host: bool) -> None:
        """Let a copy to the host, or from it, proceed."""
        self.tree.copy_next(to_host)

    @rule()
    def poll(self) -> None:
        """Let the tree process the copies that have ended."""
        self.tree.poll()

    @rule(count=st.integers(1, LONGEST))
    def squeeze(self, count: int) -> None:
        """Allocate slots, which may evict blocks, and free them again."""
        slots = self._allocate(count)
        if slots is not None:
            self.tree.free(slots)

    @rule(blocks=st.lists(st.integers(0, 1), min_size=1, max_size=LONGEST))
    def serve(self, blocks: list[int]) -> None:
        """Serve one request from arrival to end while no other step runs."""
        self._serve(tuple(blocks))

    @rule()
    def rest(self) -> None:
        """End all steps and copies, and compare the events with matches."""
        self._rest()

    @rule(really=st.sampled_from([False, False, True]))
    def reset(self, really: bool) -> None:
        """Reset the tree, now and then, while no request has anything. Copies may be in flight."""
        if really and all(request.phase in ("waiting", "over") for request in self._asked):
            self._reset()

    # Calls.

    def _arrive(self, blocks: Prefix) -> TreeRequest:
        request = TreeRequest(f"r{len(self._asked) + 1}", blocks)
        self._asked.append(request)
        return request

    def _step(self, requests: Sequence[TreeRequest], block: int) -> list[TreeRequest]:
        """Begin a step. Returns the requests in it."""
        if len(self._steps) == MOST_STEPS:
            self._end_step()
        work = [
            (request, start) for request in requests if (start := self._admit(request, block)) is not None
        ]
        if work:
            running = [request for request, _ in work]
            self._steps.append((self.tree.launch(lambda: self._compute(work)), running))
        return [request for request, _ in work]

    def _admit(self, request: TreeRequest, block: int) -> int | None:
        """Allocate slots for a request's next step. Returns the number of blocks that need not be computed.

        None: it cannot be in a step now.
        """
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
        """Match and lock a request's prefix, without its last block, because a step must compute one."""
        match = self.tree.match(request.blocks[:-1])
        self._books.matched(request.blocks[:-1], match)
        request.lock = self.tree.lock(match)
        # Like a scheduler, load only if the request has room, so that this step reads the loaded blocks.
        if match.host_blocks and len(request.blocks) - len(match.slots) <= self.tree.allocatable():
            loaded = self.tree.load_back(match)
            self._books.loaded(match, loaded)
            call = self._history.latest_call()
            for slot in loaded.slots[len(match.slots) :]:
                self._history.wrote(slot_named(slot), f"a load back for {request}", None, call)
            lock = self.tree.lock(loaded)
            self.tree.unlock(request.lock)
            request.lock, match = lock, loaded
        request.slots, request.held = list(match.slots), len(match.slots)

    def _allocate(self, count: int) -> list[int] | None:
        most = self.tree.allocatable()
        slots = self.tree.allocate(count)
        if slots is not None:
            self._must_be_new(slots, count)
            self._given.update(dict.fromkeys(slots, self._history.latest_call()))
            return list(slots)
        if count <= most:
            message = f"{most} device slots are free or can be evicted, and {count} cannot be allocated"
            raise PropertyBroken(Property.CONSERVATION, message)
        return None

    def _compute(self, work: Iterable[tuple[TreeRequest, int]]) -> None:
        """Run a step: first all reads, then all writes."""
        work = list(work)
        for request, start in work:
            for place, slot in enumerate(request.slots[:start]):
                prefix = request.blocks[: place + 1]
                self._history.read(slot_named(slot), f"a step of {request} reads {prefix}")
                self._books.read(request, prefix, slot, self.tree.read(slot), self._history)
        for request, start in work:
            for place, slot in enumerate(request.slots[start:], start):
                prefix = request.blocks[: place + 1]
                what = f"a step of {request} writes {prefix}"
                self._history.wrote(slot_named(slot), what, None, self._given.get(slot))
                self.tree.write(slot, self._books.word(prefix))

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
        if any(request.slots for request in self._asked):
            count_case(Property.NO_REUSE_IN_FLIGHT, "slots allocated beside a request's", count)
        for request in self._asked:
            if taken := {*slots} & {*request.slots}:
                is_locked = taken & {*request.slots[: request.held]}
                message = f"device slots {sorted(taken)} are given away, and {request} "
                message += "has locked what is in them" if is_locked else "uses them"
                broken = Property.MATCH_HOLDS if is_locked else Property.NO_REUSE_IN_FLIGHT
                raise PropertyBroken(broken, message)

    def check(self) -> None:
        """Check that each slot is in one place, and that no locked slot was evicted."""
        free, tree = self.tree.free_slots(), self.tree.tree_slots()
        private = {slot: request for request in self._asked for slot in request.slots[request.held :]}
        held = {slot: request for request in self._asked for slot in request.slots[: request.held]}
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
        """Let all copies in this direction end. Returns whether there was one."""
        if not self.tree.copy_next(to_host):
            return False
        while self.tree.copy_next(to_host):
            pass
        return True

    def _rest(self) -> None:
        self._end_steps()
        count_case(Property.PROGRESS, "times that all copies ended")
        for _ in range(POLLS_TO_REST):
            self.tree.poll()
            to_host, from_host = self._end_copies(True), self._end_copies(False)
            if not (to_host or from_host):
                break
        else:
            message = f"nothing happens, and after {POLLS_TO_REST} polls copies are still in flight"
            raise PropertyBroken(Property.PROGRESS, message)
        self._take_events()
        matches = {prefix: self.tree.match(prefix) for prefix in sorted(self._books.inserted)}
        self._books.compare_matches(matches, self.tree.tree_slots()[0])
        if self.publishes_events:
            for prefix in self._books.prefixes_to_compare():
                self._books.compare_events(prefix, matches.get(prefix) or self.tree.match(prefix))

    def wind_down(self) -> None:
        """Bring everything to rest, serve every prompt again, and check that nothing is left."""
        self._end_steps()
        for request in self._asked:
            self._finish(request, published=True)
        self._rest()
        for prefix in sorted(self._books.inserted, key=lambda prefix: (-len(prefix), prefix)):
            self._serve((*prefix, 2)[:LONGEST])
        self._rest()
        self.check()
        count_case(Property.ONE_RELEASE_PER_HOLD, "trees at rest, whose slots are all allocated")
        if (most := self.tree.allocatable()) < self.device_slots:
            message = f"there is no request, and {most} of {self.device_slots} device slots can be allocated"
            raise PropertyBroken(Property.ONE_RELEASE_PER_HOLD, f"{message}: some are still locked")
        self.tree.free(self._allocate(self.device_slots) or [])
        self._reset()
        self.check()

    def trace(self) -> Iterable[str]:
        """The last calls, with their answers."""
        return map(str, self.under_test.calls[-MOST_TOLD:])
