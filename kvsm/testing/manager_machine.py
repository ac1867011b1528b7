"""Test a manager of vLLM's OffloadingConnector with every order of calls that Hypothesis can find.

    class MyManagerMachine(ManagerMachine):
        def make_manager(self, blocks):
            return MyManager(blocks)

    TestMyManager = MyManagerMachine.TestCase

The machine calls the manager as the scheduler's side of OffloadingConnector does. A request arrives
(`on_new_request`). In a step, lookups follow its prefix up to the first miss; the hits may be loaded
(`get_load_source`, `prepare_load`). Then requests offer blocks (`prepare_store`), and some finish
(`on_request_finished`). `on_schedule_end` comes before the offers or at the end, as in the installed vLLM.
Copies end between steps, in any order; then events are taken. There are no lookups for a request with a copy
in flight. A reset drops all copies in flight: none of them is completed. Plain books have the keys that are
stored, being stored and being loaded. Checked:

- a hit is a key that is stored (publish after commit, S2): its store did not fail (S6), it was not evicted
  (correct bytes, S15), and it is not from before a reset (S14); a load reads the block of its key (S15);
- a block that a load reads or a store writes is neither evicted nor allocated (no reuse in flight, S3);
- there are never more keys than blocks; once all copies have ended, each block can be filled again, and an
  offer that fits is accepted, also after failed stores (conservation, S1);
- a stored key is a hit until an answer or a KV event says that it is evicted (stored, so served, S19);
- the KV events announce exactly the stored keys, and each change once (events are state, S10);
- no call raises (S8); once all copies have ended, no request waits and no work is pending (progress, S9).

Not checked: which block is evicted, statistics, several KV cache groups, `store_threshold`, and threads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, MultipleResults, consumes, multiple
from hypothesis.strategies import SearchStrategy
from vllm.v1.kv_offload.base import (
    LookupResult,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    make_offload_key,
)

from kvsm.check.worlds.check_counts import count_case
from kvsm.errors import PropertyBroken
from kvsm.properties import Property
from kvsm.testing.block_history import BlockHistory
from kvsm.testing.machine_base import PropertyMachine, initialize, rule
from kvsm.testing.manager_books import ManagerBooks, Told
from kvsm.vllm.versions import features

LONGEST = 4
"""Most blocks of a request."""

CONVERSATIONS = "ab"

MOST_REQUESTS = 4
"""Most unfinished requests at once."""

STEPS_TO_REST = 20
"""After this many steps without a copy in flight, no request may wait."""

_CALLED = (
    "on_new_request",
    "lookup",
    "get_load_source",
    "prepare_load",
    "touch",
    "complete_load",
    "prepare_store",
    "complete_store",
    "on_request_finished",
    "on_schedule_end",
    "take_events",
    "has_pending_work",
    "reset_cache",
    "shutdown",
)
"""The methods of `OffloadingManager` whose calls are recorded."""

MOST_TOLD = 40
"""Most calls that a failure lists; they are the last ones."""


class Key(bytes):
    """A key whose `repr` is its name: conversation and position in the prompt."""

    def __repr__(self) -> str:
        return self[:-4].decode()


def _keys(conversation: str, length: int) -> list[Key]:
    return [Key(make_offload_key(f"{conversation}{place}".encode(), 0)) for place in range(length)]


class OffloadRequest:
    """A request: its context, the keys of its blocks, and how many of them it has offered."""

    def __init__(self, name: str, keys: Sequence[Key]) -> None:
        self.name, self.keys, self.offered = name, list(keys), 0
        self.context = ReqContext(name)
        for place, key in enumerate(keys):
            self.context.set_offload_key_position(key, 16 * (place + 1))
        self.copies: set[Copy] = set()
        self.over = self.was_scheduled = False

    def __repr__(self) -> str:
        return self.name


class Copy:
    """A load or a store in flight. dropped: whether a reset has dropped it."""

    def __init__(self, request: OffloadRequest, keys: Sequence[Any], is_store: bool) -> None:
        self.request, self.keys, self.is_store, self.dropped = request, keys, is_store, False

    def __repr__(self) -> str:
        return f"{'store' if self.is_store else 'load'} of {list(self.keys)}"


class ManagerMachine(PropertyMachine):
    """Tests one manager.

    Needs: vLLM, and a subclass with `make_manager(blocks)`, which returns an `OffloadingManager` with a pool
    of `blocks` blocks. A manager only numbers blocks: no memory is allocated, and nothing is copied. If yours
    needs a pool object, `make_manager` gives it a fake one of `blocks` blocks.

    `pools` are the sizes to try. `publishes_events = False`: it has no KV events. `tiers_below = True`: a key
    may hit again after an eviction or a reset. `hits_hold = True`: a hit holds until `on_schedule_end`.
    `schedule_end_is_last`: the order of calls in the installed vLLM; leave it.

    Attributes: `self.blocks`, the size of the pool, in `make_manager` too; `self.manager`.
    """

    pools: SearchStrategy[int] = st.integers(1, 2 * LONGEST)
    """The pool sizes to try, in blocks."""

    publishes_events = True
    """Whether the manager publishes KV events."""

    tiers_below = False
    """Whether there are tiers below the host pool. Then a key may hit again after an eviction or reset."""

    hits_hold = False
    """Whether a hit holds until `on_schedule_end`: no store of its step evicts it. vLLM does not need it."""

    schedule_end_is_last = features().schedule_end_is_last
    """Whether `on_schedule_end` comes after the offers of a step, as in this vLLM, or before them."""

    requests: Bundle[OffloadRequest] = Bundle("requests")
    copies: Bundle[Copy] = Bundle("copies")

    # For subclasses to override.

    def make_manager(self, blocks: int) -> Any:
        """Make the `OffloadingManager` to test, with a pool of `blocks` blocks (chunks, if it has chunks)."""
        raise NotImplementedError(f"{type(self).__name__} must say which manager it is for: make_manager")

    # Rules.

    @initialize(
        target=requests,
        blocks=st.runner().flatmap(lambda machine: machine.pools),
        asks=st.booleans(),
    )
    def open(self, blocks: int, asks: bool) -> MultipleResults[OffloadRequest]:
        """Make the manager, and let two requests of one conversation arrive.

        asks: whether at the end all requests are looked up before new keys fill the pool.
        """
        self._asks = asks
        self.blocks = blocks
        self._books = ManagerBooks(blocks, self.tiers_below, BlockHistory(self.under_test))
        self._asked: list[OffloadRequest] = []
        self._live: list[Copy] = []
        self._dropped: list[Copy] = []
        self._fills = 0
        self._new: list[str] = []
        self._promised: dict[OffloadRequest, dict[Key, None]] = {}
        """The hits of this step's lookups whose load has not begun, by request."""
        self._phase = "between steps"
        self.manager = self.make_manager(blocks)
        self.under_test.watch(self.manager, "manager", _CALLED, self.make_manager)
        self.started = True
        with self._locked():
            return multiple(*(self._arrive(_keys(CONVERSATIONS[0], LONGEST)) for _ in range(2)))

    @rule(target=requests, conversation=st.sampled_from(CONVERSATIONS), length=st.integers(1, LONGEST))
    def arrive(self, conversation: str, length: int) -> MultipleResults[OffloadRequest]:
        """Let a request arrive. Of two prompts of one conversation, the shorter is a prefix of the longer."""
        if sum(not request.over for request in self._asked) >= MOST_REQUESTS:
            return multiple()
        with self._locked():
            return multiple(self._arrive(_keys(conversation, length)))

    @rule(
        target=copies,
        request=requests,
        computed=st.sampled_from([0, 0, 0, 1, 2]),
        load=st.sampled_from([True, True, True, False]),
    )
    def look_up(self, request: OffloadRequest, computed: int, load: bool) -> MultipleResults[Copy]:
        """Look up a waiting request, and load its hits.

        computed: number of its blocks that the device has.
        load: whether the device has room for the load.
        """
        if request.over or request.copies:
            return multiple()
        with self._locked():
            hits = self._hits(request, computed)
            return multiple(*self._load(request, hits) if hits and load else ())

    @rule(target=copies, request=requests, most=st.integers(1, LONGEST))
    def offer(self, request: OffloadRequest, most: int) -> MultipleResults[Copy]:
        """Let a request offer its next blocks, at most `most`."""
        loads = any(not copy.is_store for copy in request.copies)
        keys = request.keys[request.offered : request.offered + most]
        if request.over or not keys or (loads and not features().loads_within_steps):
            return multiple()
        with self._locked():
            return multiple(*self._offer(request, keys))

    @rule(
        target=copies,
        asking=st.lists(requests, max_size=3),
        load=st.booleans(),
        offering=st.lists(requests, max_size=2),
        new=st.sampled_from([0, 0, 1, LONGEST]),
    )
    def step(
        self, asking: list[OffloadRequest], load: bool, offering: list[OffloadRequest], new: int
    ) -> MultipleResults[Copy]:
        """Run a whole step: look up some requests, and let others offer blocks.

        load: whether the device has room for the loads.
        new: number of blocks with new keys that a new request offers before it finishes.
        """
        with self._locked():
            self._end_step()
            began = list[Copy]()
            for request in dict.fromkeys(asking):
                if not request.over and not request.copies:
                    hits = self._hits(request, 0)
                    began += self._load(request, hits) if hits and load else []
            for request in dict.fromkeys(offering):
                if not request.over and not request.copies:
                    began += self._offer_next(request)
            if new:
                self._fills += 1
                stranger = self._arrive(_keys(f"new{self._fills}-", new))
                began += self._offer_next(stranger)
                self._finish(stranger)
            self._end_step()
            self._take_events()
            return multiple(*began)

    @rule(copy=consumes(copies), good=st.sampled_from([True, True, True, False]))
    def end(self, copy: Copy, good: bool) -> None:
        """Report that a copy has ended on all ranks. good: whether it succeeded, if it is a store."""
        with self._locked():
            self._end_step()
            self._end(copy, good)
            self._take_events()

    @rule(request=requests)
    def finish(self, request: OffloadRequest) -> None:
        """Finish a request. Its copies in flight continue."""
        if not request.over:
            with self._locked():
                self._finish(request)

    @rule(request=requests)
    def touch(self, request: OffloadRequest) -> None:
        """Touch all blocks of a request, stored or not."""
        if not request.over:
            with self._locked():
                self._begin("lookups")
                self.manager.touch(request.keys, request.context)

    @rule(preempted=st.none() | requests)
    def end_step(self, preempted: OffloadRequest | None) -> None:
        """End the step. preempted: a request that it preempted; None: there is none."""
        names = [preempted.name] if preempted is not None and not preempted.over else []
        with self._locked():
            self._begin("lookups")
            self._end_step(names)
            self._take_events()

    @rule(good=st.sampled_from([True, True, False]))
    def let_all_end(self, good: bool) -> None:
        """Let all copies end, and run steps until the manager has no pending work. good: as in `end`."""
        with self._locked():
            self._let_all_end(good)

    @rule(conversation=st.sampled_from(CONVERSATIONS), length=st.integers(1, LONGEST))
    def serve(self, conversation: str, length: int) -> None:
        """Serve one request, with nothing else in flight, and then another one with this prompt. The first
        offers its blocks one by one."""
        with self._locked():
            self._let_all_end()
            request = self._arrive(_keys(conversation, length))
            self._answer(request)
            for key in request.keys:
                for copy in self._offer(request, [key]):
                    self._end_step()
                    self._end(copy, good=True)
            self._finish(request)
            self._let_all_end()
            again = self._arrive(request.keys)
            self._answer(again)
            self._finish(again)
            self._let_all_end()

    @rule()
    def crowd(self) -> None:
        """Store new keys one by one as long as there is room, while other copies stay in flight."""
        with self._locked():
            self._fills += 1
            request = self._arrive(_keys(f"new{self._fills}-", self.blocks))
            for key in request.keys:
                for copy in self._offer(request, [key]):
                    self._end_step()
                    self._end(copy, good=True)
            self._finish(request)

    @rule(request=requests)
    def offer_at_rest(self, request: OffloadRequest) -> None:
        """Bring all to rest, and offer a request's remaining blocks. Offers that fit must be accepted."""
        if not request.over:
            with self._locked():
                self._let_all_end()
                self._offer_at_rest(request)

    @rule()
    def fill(self) -> None:
        """Bring all to rest, and fill the whole pool with new keys, to check that no block is lost."""
        with self._locked():
            self._let_all_end()
            self._fill()

    @rule(really=st.sampled_from([False, False, True]))
    def reset(self, really: bool) -> None:
        """Reset the cache, now and then. Copies in flight are dropped: vLLM completes none of them."""
        if really:
            with self._locked():
                self._reset()

    # The calls of a step.

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the manager's lock, if it has one, as vLLM does."""
        with getattr(self.manager, "lock", nullcontext()):
            yield

    def _begin(self, phase: str) -> None:
        """Enter this phase of a step: "lookups", then "stores"."""
        if (self._phase, phase) == ("stores", "lookups"):
            self._end_step()
        if phase == "stores" and self._phase != "stores" and not self.schedule_end_is_last:
            self._tell_schedule_end()
        self._phase = phase

    def _end_step(self, preempted: Collection[str] = ()) -> None:
        if self._phase == "between steps":
            return
        if self.schedule_end_is_last or self._phase == "lookups":
            self._tell_schedule_end(preempted)
        self._phase = "between steps"
        self.manager.get_stats()

    def _tell_schedule_end(self, preempted: Collection[str] = ()) -> None:
        new, self._new = self._new, []
        self._promised.clear()
        self.manager.on_schedule_end(ScheduleEndContext(new, preempted))

    def _arrive(self, keys: Sequence[Key]) -> OffloadRequest:
        request = OffloadRequest(f"r{len(self._asked) + 1}", keys)
        self._asked.append(request)
        answer = self.manager.on_new_request(request.context)
        self._must_be(answer, RequestOffloadingContext, f"on_new_request({request})")
        return request

    def _hits(self, request: OffloadRequest, computed: int) -> list[Key] | None:
        """Look up a request's keys in order, and return the hits up to the first miss; None: it must wait.

        computed: number of its first blocks that the device has; they are not looked up.
        """
        self._begin("lookups")
        hits, waits = [], False
        for key in request.keys[computed:]:
            answer = self.manager.lookup(key, request.context)
            self._must_be(answer, LookupResult, f"lookup({key!r}, {request})")
            if answer is LookupResult.HIT:
                self._compare(self._books.hit, key)
                self._promised.setdefault(request, {})[key] = None
                hits.append(key)
            elif answer is LookupResult.MISS:
                self._compare(self._books.missed, key)
                break
            else:
                self._compare(self._books.waits, key)
                waits = True
        return None if waits else hits

    def _compare(self, compare: Any, key: Key) -> None:
        """Compare a lookup with the books. With lower tiers, take events if it differs, and try again."""
        try:
            compare(key)
        except PropertyBroken:
            if not self.tiers_below:
                raise
            self._take_events()
            compare(key)

    def _load(self, request: OffloadRequest, keys: Sequence[Key]) -> list[Copy]:
        for key in keys:
            self.manager.get_load_source(key, request.context)
        self._take_events_of_tiers()
        spec = self.manager.prepare_load(keys, request.context)
        self._promised.pop(request, None)
        self._books.load_begins(keys, self._blocks_of(spec, f"prepare_load({keys}, {request})"))
        if not request.was_scheduled:
            request.was_scheduled = True
            self._new.append(request.name)
        return [self._began(Copy(request, keys, is_store=False))]

    def _offer(self, request: OffloadRequest, keys: Sequence[Key]) -> list[Copy]:
        self._begin("stores")
        call = f"prepare_store({keys}, {request})"
        self._take_events_of_tiers()
        answer = self.manager.prepare_store(keys, request.context)
        if answer is None:
            return []
        self._must_be(answer, PrepareStoreOutput, call)
        stored, evicted = list(answer.keys_to_store), list(answer.evicted_keys)
        self._check_promises(evicted)
        self._books.store_begins(keys, stored, evicted, self._blocks_of(answer.store_spec, call))
        request.offered += len(keys)
        return [self._began(Copy(request, stored, is_store=True))] if stored else []

    def _offer_next(self, request: OffloadRequest) -> list[Copy]:
        """Offer the request's next blocks, as many as the pool has blocks."""
        keys = request.keys[request.offered : request.offered + self.blocks]
        return self._offer(request, keys) if keys else []

    def _offer_at_rest(self, request: OffloadRequest) -> None:
        """Offer all remaining blocks of a request, in parts that fit the pool. Each part must be accepted."""
        while request.offered < len(request.keys):
            offered = request.offered
            copies = self._offer_next(request)
            if request.offered == offered:
                keys = request.keys[offered : offered + self.blocks]
                message = f"at rest request {request} offers {keys} for {self.blocks} blocks"
                raise PropertyBroken(Property.CONSERVATION, f"{message}, and is told that there is no room")
            self._end_step()
            for copy in copies:
                self._end(copy, good=True)
            self._take_events()

    def _check_promises(self, evicted: Collection[Key]) -> None:
        """Check that no hit of this step is evicted, if hits hold."""
        if self.hits_hold and self._promised:
            count_case(Property.MATCH_HOLDS, "evictions in a step with hits", len(evicted))
        for request, keys in self._promised.items():
            if self.hits_hold and (gone := [key for key in keys if key in evicted]):
                message = f"{gone} are evicted, but request {request} was told in this step that it hits them"
                raise PropertyBroken(Property.MATCH_HOLDS, message)

    def _began(self, copy: Copy) -> Copy:
        self._live.append(copy)
        copy.request.copies.add(copy)
        return copy

    def _end(self, copy: Copy, good: bool) -> None:
        """Report the end of a copy to the manager, as vLLM does between steps."""
        if copy.dropped:
            if copy in self._dropped:
                self._dropped.remove(copy)
                self._tell_flushed()
            return
        if copy not in self._live:
            return  # `let_all_end` has ended it.
        self._live.remove(copy)
        request, keys = copy.request, set(copy.keys)
        request.copies.discard(copy)
        if not copy.is_store:
            self.manager.complete_load(keys, request.context)
            self._books.load_ends(copy.keys)
            return
        # vLLM leaves the argument out: its workers report no failure.
        self.manager.complete_store(keys, request.context, **({} if good else {"success": False}))
        self._books.store_ends(copy.keys, good)
        if not good:
            request.offered = min(request.keys.index(key) for key in copy.keys if key in request.keys)

    def _finish(self, request: OffloadRequest) -> None:
        self._begin("stores")
        request.over = True
        self._promised.pop(request, None)
        self.manager.on_request_finished(request.context)

    def _reset(self) -> None:
        self._end_step()
        self._take_events()
        self.manager.reset_cache()
        self._promised.clear()
        self._books.reset()
        self._take_events()
        self._books.nothing_is_announced()
        for copy in self._live:
            copy.dropped = True
        for request in self._asked:
            request.copies.clear()
            request.offered = 0
        self._dropped, self._live = self._dropped + self._live, []
        self._tell_flushed()

    def _tell_flushed(self) -> None:
        if not self._dropped and features().tells_of_flushed_resets:
            self.manager.on_reset_flushed()

    def _take_events(self) -> None:
        events = [
            Told(list(one.keys), one.removed, getattr(one, "metadata_only", False))
            for one in list(self.manager.take_events())
            if one.ownership is None
        ]
        self._books.take(events)
        if self.publishes_events and not self.tiers_below:
            self._books.compare_events()

    def _take_events_of_tiers(self) -> None:
        """Take the events if there are lower tiers: only events show what moves between tiers."""
        if self.tiers_below:
            self._take_events()

    # What must hold.

    def _must_be(self, answer: Any, kind: type, call: str) -> None:
        if not isinstance(answer, kind):
            message = f"your manager answered {call} with {answer!r}, which is no {kind.__name__}"
            raise PropertyBroken(Property.LEGAL_CALLS, f"{message}; see {self.under_test.calls[-1].place}")

    def _blocks_of(self, spec: Any, call: str) -> list[int] | None:
        """The blocks that a LoadStoreSpec names; None: it is of a kind without `block_ids`."""
        if spec is None:
            message = f"your manager answered {call} without a LoadStoreSpec"
            raise PropertyBroken(Property.LEGAL_CALLS, f"{message}; see {self.under_test.calls[-1].place}")
        blocks: Iterable[Any] | None = getattr(spec, "block_ids", None)
        return None if blocks is None else [int(block) for block in blocks]

    def _let_all_end(self, good: bool = True) -> None:
        self._end_step()
        for copy in [*self._live, *self._dropped]:
            self._end(copy, good)
        count_case(Property.PROGRESS, "times that all copies ended")
        for _ in range(STEPS_TO_REST):
            self._begin("lookups")
            self._end_step()
            self._take_events()
            if not self.manager.has_pending_work():
                return
        message = f"all copies have ended, and after {STEPS_TO_REST} steps the manager says that"
        raise PropertyBroken(Property.PROGRESS, f"{message} work is pending")

    def _fill(self) -> None:
        """Store as many new keys as there are blocks."""
        self._fills += 1
        request = self._arrive(_keys(f"new{self._fills}-", self.blocks))
        stores = self._offer(request, request.keys)
        taken = [key for copy in stores for key in copy.keys]
        count_case(Property.CONSERVATION, "pools that new keys filled at rest")
        if len(taken) < self.blocks:
            message = f"at rest {self.blocks} new keys are offered for {self.blocks} blocks"
            lost = f"{message}, and {taken or 'none'} can be stored: blocks are lost"
            raise PropertyBroken(Property.CONSERVATION, lost)
        self._finish(request)
        self._let_all_end()

    def _answer(self, request: OffloadRequest) -> None:
        """At rest, look up a request until it need not wait, and load its hits."""
        count_case(Property.PROGRESS, "requests that were looked up at rest")
        for _ in range(STEPS_TO_REST):
            hits = self._hits(request, 0)
            copies = self._load(request, hits) if hits else []
            self._end_step()
            if hits is not None:
                for copy in copies:
                    self._end(copy, good=True)
                return
        message = f"no copy is in flight, and request {request} is told to wait for {STEPS_TO_REST} steps"
        raise PropertyBroken(Property.PROGRESS, f"{message}: it asks for {request.keys}")

    def wind_down(self) -> None:
        """Bring everything to rest, and check that nothing is left."""
        with self._locked():
            self._let_all_end()
            for conversation in CONVERSATIONS:
                self._arrive(_keys(conversation, LONGEST))
            waiting = [request for request in self._asked if not request.over]
            for request in waiting if self._asks else ():
                self._answer(request)
            self._let_all_end()
            # Waiting requests must not keep blocks from being filled.
            self._fill()
            for request in waiting:
                self._offer_at_rest(request)
                self._answer(request)
                self._finish(request)
            self._let_all_end()
            self._fill()

    def trace(self) -> Iterable[str]:
        """The last calls, with their answers."""
        return map(str, self.under_test.calls[-MOST_TOLD:])

    def close(self) -> None:
        """Shut the manager down."""
        self.manager.shutdown()
