"""The serving world: the real `Offloader` and `OffloadScheduler`, driven by the small engine.

Each of these is an action: a request arrives, the engine steps, one worker carries out its part of one copy,
one report is passed to the scheduler. So is each disturbance, as often as the options allow: a worker fails,
a report is repeated or late, a request is aborted or preempted, the cache is reset, the engine accepts fewer
tokens than it was offered.

The small engine checks some properties itself (`kvsm.check.worlds.small_engine`). The world adds:

- after each action, flush at last step (S17): when the engine stops stepping, no copy is planned or in
  flight;
- in `check`, the ledger's own properties, and that readable host blocks hold the right bytes on every worker
  (publish after commit, S2; correct bytes, S15);
- at rest, that nothing is held or in flight (one release per hold, S4; progress, S9), that lazy stores have
  stored the device blocks that are reused next (no doubled or lost store, S13), and, if events are kept, that
  they fold to the present state (events are state, S10);
- with a router, that the published KV events name exactly the readable blocks (events are state, S10).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Annotated, Any

import msgspec
from msgspec import structs

from kvsm.check.worlds.booked_engine import BookedEngine
from kvsm.check.worlds.crash import FlushedLog
from kvsm.check.worlds.describing import describe_ledger
from kvsm.check.worlds.fingerprint import fingerprint
from kvsm.check.worlds.lost_stores import check_next_to_go
from kvsm.check.worlds.mistakes import load_over_a_copy, may_load_over_a_copy
from kvsm.check.worlds.router import Router
from kvsm.check.worlds.served_again import unserved
from kvsm.check.worlds.small_engine import SmallEngine
from kvsm.check.worlds.small_request import HASH_TOKENS, SmallRequest
from kvsm.check.worlds.world import Action
from kvsm.core.ledger import Ledger
from kvsm.core.ledger.canonical import FIXED, KEPT, PART, Fixed, Names, Remade, Seen, declared
from kvsm.core.ledger.invariants import check_ledger, check_rest
from kvsm.core.ledger.snapshot import digest, restore
from kvsm.core.plan import WorkerReport
from kvsm.core.scheduler import GroupKind, KVCacheGroup, LastStep, StoreMode
from kvsm.core.scheduler.groups import group_suffix
from kvsm.errors import ConfigError, PropertyBroken
from kvsm.events import OffloadingEvent
from kvsm.properties import Property
from kvsm.states.lease import LeaseState
from kvsm.states.transfer import TransferState
from kvsm.states.words import STATE_MASK


class RequestSpec(msgspec.Struct, frozen=True):
    """The arguments of a `SmallRequest` that will arrive."""

    prompt: tuple[int, ...]
    outputs: int = 1
    parameters: dict[str, Any] | None = None
    parts: tuple[tuple[int, ...], ...] = ()
    embeds: bool = False
    skip_reading: bool = False


class Budgets(msgspec.Struct, frozen=True, kw_only=True):
    """How often each disturbance may happen in a run."""

    failures: int = 0
    aborts: int = 0
    preemptions: int = 0
    resets: int = 0
    repeats: int = 0
    """A report is repeated, on a copy that is in flight or has ended."""
    partial: int = 0
    """The engine accepts fewer tokens than it was offered."""
    waits: int = 0
    """The engine steps without admitting a request."""
    crashes: int = 0
    """The process is killed, and another one takes over."""
    losses: int = 0
    """A copy is given up between two steps. Its workers may still carry it out."""
    mistakes: int = 0
    """The engine loads into a device block that a copy touches (`kvsm.check.worlds.mistakes`)."""
    most: int = 0
    """The limit for all disturbances together. 0: the sum of the other budgets."""


class ServingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The engine, its workload and its disturbances.

    Names are as in `OffloadConfig`, `SchedulerConfig` and `SmallEngine`.

    slots: `OffloadConfig.host_blocks`.
    router: whether a router takes the KV events.
    checks_stores: as in `SmallEngine`.
    """

    requests: tuple[RequestSpec, ...] = (RequestSpec((1, 2, 3, 4, 5)), RequestSpec((1, 2, 3, 4, 6)))
    device_blocks: int = 3
    slots: int = 2
    workers: int = 2
    groups: tuple[KVCacheGroup, ...] = (KVCacheGroup(HASH_TOKENS),)
    store: StoreMode = StoreMode.EAGER
    last_step: LastStep = LastStep.FLUSH
    references: bool = True
    prefix_cache: bool = True
    asynchronous: bool = False
    drafts: int = 0
    chunk_tokens: int = 64
    lazy_target_blocks: int = 1
    policy: str = "lru"
    blocks_per_chunk: int = 1
    store_threshold: int = 1
    max_live_transfers: int = 8
    defer_ticks: int = 1
    transfer_ticks: int = 0
    router: bool = False
    checks_stores: bool = False
    budgets: Budgets = Budgets()

    def __post_init__(self) -> None:
        """Raises `ConfigError` for a size out of range, or for a request that could never finish."""
        for name, least, most in (
            ("slots", 1, 1 << 10),
            ("device_blocks", 1, 1 << 12),
            ("workers", 1, 8),
            ("chunk_tokens", 1, 1 << 20),
            ("drafts", 0, 1 << 6),
        ):
            if not least <= getattr(self, name) <= most:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be from {least} to {most}")
        full = [group.block_tokens for group in self.groups if group.kind is GroupKind.FULL]
        for request in self.requests:
            if not 0 <= request.outputs <= 1 << 12:
                raise ConfigError(f"a request has {request.outputs} outputs; it must be from 0 to {1 << 12}")
            parts = [len(part) + request.outputs for part in request.parts]
            tokens = len(request.prompt) + request.outputs - 1 + sum(parts)
            needed = max(1, sum(-(-tokens // size) for size in full))
            if self.device_blocks < needed:
                raise ConfigError(
                    f"device_blocks is {self.device_blocks}; a request of {tokens} tokens needs {needed}"
                )


_RETIRED = LeaseState.RETIRED
_BUDGET_OF = {
    "fail": "failures",
    "abort": "aborts",
    "preempt": "preemptions",
    "reconsider": "preemptions",
    "reset": "resets",
    "repeat": "repeats",
    "accept": "partial",
    "wait": "waits",
    "crash": "crashes",
    "lose": "losses",
    "mistake": "mistakes",
}
"""Action -> the budget that it spends."""
_CORE = "policy", "blocks_per_chunk", "store_threshold", "max_live_transfers", "defer_ticks", "transfer_ticks"


def spent(left: Mapping[str, int], budget: str) -> dict[str, int]:
    """What is left of all budgets after a disturbance that spends this one. With `most` all are used up."""
    after = {**left, budget: left[budget] - 1, "most": left["most"] - 1}
    return after if after["most"] else dict.fromkeys(after, 0)


def _over(world: ServingWorld, _: Names) -> bool:
    """Whether the last report can still be repeated. Its content is irrelevant: it is rejected anyway."""
    return world.left["repeats"] > 0 and world.over is not None


@declared
class ServingWorld:
    """A `World` of one engine. keep_events: keep all events; if False, only those of the last action."""

    engine_class = SmallEngine
    budget_of = _BUDGET_OF
    options: Annotated[ServingOptions, FIXED]
    keep_events: Annotated[bool, FIXED]
    engine: Annotated[SmallEngine, PART]
    router: Annotated[Router | None, PART]
    left: Annotated[dict[str, int], KEPT]
    """The budgets that are left."""
    arrived: Annotated[int, KEPT]
    """How many requests have arrived."""
    owes_step: Annotated[bool, KEPT]
    """Whether the engine must make one more step, because since the last step a request has finished, or a
    copy has ended for which a lazy store may have waited."""
    over: Annotated[WorkerReport | None, Seen(_over)]
    """The report that ended a copy most recently."""
    first_news: Annotated[int, Remade(lambda _: 0, "a world is loaded without events")]
    """The number of events before the last action."""
    contents: Annotated[dict[bytes, list[list[bytes]]], Fixed("it follows from the requests of the options")]
    """Key -> the bytes that its blocks must hold. Computed on demand."""

    def __init__(self, options: ServingOptions, *, keep_events: bool = True) -> None:
        self.options, self.keep_events = options, keep_events
        self.router = None
        if options.router:
            self.router = Router(options.blocks_per_chunk, wants_tokens=options.store is StoreMode.EAGER)
        self.engine = self._make_engine(FlushedLog() if options.budgets.crashes else None)
        self.left = structs.asdict(options.budgets)
        self.left["most"] = self.left["most"] or sum(self.left.values())
        self.arrived, self.owes_step, self.over = 0, False, None
        self.first_news, self.contents = 0, {}
        self._begin_log()

    def _make_engine(self, log: FlushedLog | None, ledger: Ledger | None = None) -> SmallEngine:
        options = self.options
        return self.engine_class(
            options.groups,
            options.device_blocks,
            options.slots,
            options.workers,
            references=options.references,
            prefix_cache=options.prefix_cache,
            asynchronous=options.asynchronous,
            drafts=options.drafts,
            chunk_tokens=options.chunk_tokens,
            checks_stores=options.checks_stores,
            publisher=self.router.publisher if self.router else None,
            log=log,
            ledger=ledger,
            core={name: getattr(options, name) for name in _CORE},
            store=options.store,
            last_step=options.last_step,
            lazy_target_blocks=options.lazy_target_blocks,
            **self._more_arguments(),
        )

    def _more_arguments(self) -> dict[str, Any]:
        """Further arguments of the engine's class."""
        return {}

    def _begin_log(self) -> None:
        log = self.engine.log
        if isinstance(log, FlushedLog):
            log.ledger = self.engine.core.ledger
            log.flush()

    def parts(self) -> tuple[object, ...]:
        """The objects of the world, in a fixed order; None for an object that this world lacks."""
        engine, scheduler, ledger = self.engine, self.engine.scheduler, self.engine.core.ledger
        return (
            *(self, engine, engine.pool, engine.core, engine.log, ledger, ledger.listener),
            *(scheduler, scheduler.device_blocks, scheduler.offers, scheduler.walk, self.router),
        )

    @property
    def events(self) -> Sequence[OffloadingEvent]:
        return self.engine.log

    @property
    def news(self) -> Sequence[OffloadingEvent]:
        """The events of the last action."""
        return self.engine.log[self.first_news :]

    # What may happen.

    def actions(self) -> list[Action]:
        engine, left = self.engine, self.left
        actions: list[Action] = []
        if self.arrived < len(self.options.requests):
            actions.append(("arrive",))
        if self.may_step():
            actions.append(("step",))
            if engine.waiting and left["waits"]:
                actions.append(("wait",))
            if engine.waiting and left["partial"] and engine.core.ledger.index:
                actions += [("accept", blocks) for blocks in range(self._most_matched())]
        for place, copy in enumerate(engine.copies.values()):
            actions += [("copy", place, worker) for worker in sorted(copy.left)]
            if left["failures"]:
                actions += [("fail", place, worker) for worker in sorted(copy.left)]
        actions += [("report", place) for place in range(len(engine.reports))]
        if left["repeats"]:
            actions += [("repeat", place) for place in range(len(self._repeatable()))]
        if self._has_lost_memory():
            actions += [("finish", place) for place in range(len(self._unfinished()))]
        if left["aborts"]:
            actions += [("abort", place) for place in range(len(self._unfinished()))]
        if left["preemptions"]:
            actions += [("preempt", place) for place in range(len(engine.running))]
        if left["resets"]:
            actions.append(("reset",))
        if left["losses"]:
            actions += [("lose", place) for place in range(len(engine.copies))]
        if left["crashes"]:
            actions.append(("crash",))
        if left["mistakes"] and may_load_over_a_copy(engine.core):
            actions.append(("mistake",))
        if self._has_news():
            actions.append(("take",))
        return actions

    def may_step(self) -> bool:
        """Whether the engine steps again: while a request is unfinished, once after the last one has
        finished, and, with `LastStep.KEEP_STEPPING`, while work is pending."""
        if self.engine.unfinished() or self.owes_step:
            return True
        keeps_stepping = self.options.last_step is LastStep.KEEP_STEPPING
        return keeps_stepping and self.engine.scheduler.has_pending_work()

    def _has_lost_memory(self) -> bool:
        """Whether lost copies occupy device blocks for ever. The other blocks may be too few for a request,
        which must be ended then."""
        leases = self.engine.core.ledger.leases.words
        return self._may_lose() and any(word & STATE_MASK == _RETIRED for word in leases)

    def _may_lose(self) -> bool:
        return self.options.transfer_ticks > 0 or self.options.budgets.losses > 0

    def _has_news(self) -> bool:
        return self.router is not None and self.router.has_news()

    def _most_matched(self) -> int:
        """The largest number of blocks that a waiting request could match."""
        return max(one.num_tokens - 1 for one in self.engine.waiting) // self.engine.config.alignment

    def _unfinished(self) -> list[SmallRequest]:
        return [one for one in self.engine.requests.values() if not one.finished]

    def _repeatable(self) -> list[WorkerReport]:
        """Reports that were passed on already: on copies that wait for other workers, and the one that ended
        a copy most recently."""
        reports = [
            WorkerReport(one.id, worker, True)
            for one in self.engine.core.ledger.transfers.values()
            for worker in range(self.engine.workers)
            if one.reported >> worker & 1
        ]
        return reports if self.over is None else [*reports, self.over]

    def draw(self, random: Random) -> Action:
        """Draw an action: mostly of the engine, its copies and reports, sometimes a disturbance."""
        actions = self.actions()
        usual = [action for action in actions if action[0] not in self.budget_of]
        if usual and random.random() < 0.85:
            actions = usual
        return random.choice(actions) if actions else ("step",)

    # What happens.

    def do(self, action: Action) -> bool:
        name, *numbers = action
        budget = self.budget_of.get(str(name))
        if budget is not None and not self.left[budget]:
            return False
        move = getattr(self, f"_do_{name}", None)
        if move is None:
            return False
        engine = self.engine
        if self.keep_events:
            self.first_news = len(engine.log)
        else:
            engine.log.clear()
        engine.results.clear()
        engine.notes.begin_action()
        finished = len(self._unfinished())
        if not move(*numbers):
            return False
        self.engine.notes.check_action(self.news)
        if budget is not None:
            self._spend(budget)
        if name != "arrive" and len(self._unfinished()) < finished:
            self.owes_step = True
        self._check_last_step()
        return True

    def _spend(self, budget: str) -> None:
        self.left = spent(self.left, budget)
        if isinstance(self.engine.log, FlushedLog) and not self.left["crashes"]:
            self.engine.log.left = None

    def _do_arrive(self) -> bool:
        if self.arrived == len(self.options.requests):
            return False
        self.engine.arrive(self._request(self.arrived))
        self.arrived += 1
        return True

    def _request(self, place: int) -> SmallRequest:
        spec = self.options.requests[place]
        return SmallRequest(f"r{place}", **structs.asdict(spec))

    def _do_step(self, accept: int | None = None, admit: bool = True) -> bool:
        self.owes_step = False
        self.engine.step(accept=accept, admit=admit, hand_on=False)
        # An engine calls the scheduler in each step, even without a report.
        self.engine.hand_on(0)
        return True

    def _do_wait(self) -> bool:
        return bool(self.engine.waiting) and self._do_step(admit=False)

    def _do_accept(self, blocks: int) -> bool:
        """Step, and accept at most this number of blocks of each match."""
        return bool(self.engine.waiting) and self._do_step(accept=blocks * self.engine.config.alignment)

    def _do_copy(self, place: int, worker: int, good: bool = True) -> bool:
        copies = list(self.engine.copies.values())
        if place >= len(copies) or worker not in copies[place].left:
            return False
        self.engine.carry_out(copies[place].job.transfer, worker, good=good)
        return True

    def _do_fail(self, place: int, worker: int) -> bool:
        return self._do_copy(place, worker, good=False)

    def _do_report(self, place: int) -> bool:
        reports = self.engine.reports
        if place >= len(reports):
            return False
        reports.insert(0, reports.pop(place))
        report, live = reports[0], self.engine.core.ledger.transfers
        was_live = report.transfer in live
        self.engine.hand_on(1)
        if was_live and report.transfer not in live:
            self.over = report
            self.owes_step |= self.options.store is StoreMode.LAZY
        return True

    def _do_repeat(self, place: int) -> bool:
        """Pass on a report a second time. A stale report must change nothing (S5)."""
        repeatable = self._repeatable()
        if place >= len(repeatable):
            return False
        self.engine.reports.insert(0, repeatable[place])
        self.engine.hand_on(1)
        return True

    def _do_abort(self, place: int) -> bool:
        return self._end_request(place, aborted=True)

    def _do_finish(self, place: int) -> bool:
        return self._end_request(place, aborted=False)

    def _end_request(self, place: int, *, aborted: bool) -> bool:
        unfinished = self._unfinished()
        if place >= len(unfinished):
            return False
        self.engine.finish(unfinished[place], aborted=aborted)
        # Finishing twice must change nothing (every call is legal, S8), in the scheduler and in the core.
        self.engine.finish(unfinished[place], aborted=aborted)
        self.engine.core.finish(unfinished[place].request_id, aborted=aborted)
        return True

    def _do_preempt(self, place: int) -> bool:
        running = list(self.engine.running.values())
        if place >= len(running):
            return False
        self.engine.preempt(running[place])
        return True

    def _do_reset(self) -> bool:
        self.engine.reset()
        if self.engine.core.ledger.index:
            raise PropertyBroken(Property.NO_STALE_DATA, "a key outlives a reset of the cache")
        if isinstance(self.engine.log, FlushedLog):
            self.engine.log.check_forgotten()
        return True

    def _do_lose(self, place: int) -> bool:
        """The engine gives up a copy."""
        copies = list(self.engine.copies)
        return place < len(copies) and self.engine.scheduler.lose(copies[place]) is not None

    def _do_mistake(self) -> bool:
        return load_over_a_copy(self.engine.core)

    def _do_crash(self) -> bool:
        """The process and its workers are killed. Another process takes over the log and the host pool,
        clients send unfinished requests again, and a router starts empty."""
        old, log = self.engine, self.engine.log
        assert isinstance(log, FlushedLog)
        assert log.left is not None
        # Restarted requests have no decoded tokens yet, but the host may hold blocks with such tokens.
        self.contents.update(self._expected())
        log.keep_written()
        self.first_news, left = len(log), log.left
        if self.router is not None:
            self.router = Router(wants_tokens=False)
        log.ledger = restore(left.saved)
        self.engine = self._make_engine(log, log.ledger)
        self.engine.host = old.host
        self.engine.notes.crash(old.notes, left.seq)
        for place, request in enumerate(old.requests.values()):
            if request.finished:
                self.engine.requests[request.request_id] = request
            else:
                self.engine.arrive(self._request(place))
        self.owes_step, self.over = True, None
        kept = self.engine.core.ledger.index
        if kept != left.kept:
            message = f"the log has {len(left.kept)} stored blocks, and the next process finds {len(kept)}"
            raise PropertyBroken(Property.NO_STALE_DATA, message)
        return True

    def _do_take(self) -> bool:
        """Let the router take the KV events."""
        if self.router is None or not self.router.has_news():
            return False
        engine = self.engine
        self.router.take(engine.scheduler.take_events(), engine.core.ledger, engine.requests.values())
        return True

    # What must hold.

    def _check_last_step(self) -> None:
        scheduler = self.engine.scheduler
        for name, request in self.engine.running.items():
            if request.loading and not scheduler.has_pending_work():
                message = f"request {name} waits for the end of its load, and no work is pending"
                raise PropertyBroken(Property.PROGRESS, message)
        if self.may_step():
            return
        for one in self.engine.core.ledger.transfers.values():
            if one.state is TransferState.PLANNED or one.id in self.engine.copies:
                message = f"the engine steps no more, and transfer {one.id} is {one.state.name}"
                raise PropertyBroken(Property.LAST_STEP, message)

    def check(self) -> None:
        """Check every property."""
        self.check_ledger()
        self.check_bytes()
        self.is_at_rest()

    def check_ledger(self) -> None:
        """Check the ledger's own properties."""
        for violation in check_ledger(self.engine.core.ledger):
            raise PropertyBroken(violation.property, violation.message)

    def check_bytes(self) -> None:
        """Check that every readable block on the host holds the right bytes on every worker."""
        ledger, chunk = self.engine.core.ledger, self.options.blocks_per_chunk
        for key, slot in ledger.index.items():
            if not ledger.readable(slot):
                continue
            if key not in self.contents:
                self.contents.update(self._expected())
            if key not in self.contents:
                message = f"slot {slot} can be read under key {key.hex()}, which no request has"
                raise PropertyBroken(Property.CORRECT_BYTES, message)
            for place, expected in enumerate(self.contents[key], slot * chunk):
                for worker, held in enumerate(self.engine.host[place]):
                    if held != expected:
                        message = f"slot {slot} can be read, and worker {worker} has other bytes in it"
                        raise PropertyBroken(Property.CORRECT_BYTES, message)
        log = self.engine.log
        if isinstance(log, FlushedLog) and log.left is not None:
            if not log.left.kept.keys() <= self.contents.keys():
                self.contents.update(self._expected())
            log.check_bytes(self.engine.core.config, self.engine.host, self.contents)

    def _expected(self) -> dict[bytes, list[list[bytes]]]:
        """Key -> the bytes that its blocks must hold, for all requests so far."""
        contents, tag = {}, self.engine.weights_tag
        for request in self.engine.requests.values():
            for index, group in enumerate(self.options.groups):
                size = group.block_tokens
                tokens = size * self.options.blocks_per_chunk
                for end in range(tokens, len(request.cells) + 1, tokens):
                    cells = [cell + tag for cell in request.cells[end - tokens : end]]
                    blocks = [cells[n : n + size] for n in range(0, tokens, size)]
                    contents[request.cells[end - 1] + group_suffix(index)] = blocks
        return contents

    def describe(self) -> dict[str, str]:
        return describe_ledger(self.engine.core.ledger)

    def wind_down(self) -> Action | None:
        engine = self.engine
        for copy in engine.copies.values():
            return ("copy", 0, min(copy.left))
        if engine.reports:
            return ("report", 0)
        if self._has_lost_memory() and engine.unfinished():
            return ("finish", 0)
        if self.may_step():
            return ("step",)
        return ("take",) if self._has_news() else None

    def is_at_rest(self) -> bool:
        """Whether the world is at rest. Raises `PropertyBroken` if something is still held then."""
        if self.wind_down() is not None:
            return False
        engine = self.engine
        for violation in check_rest(engine.core.ledger):
            raise PropertyBroken(violation.property, violation.message)
        engine.check_nothing_is_held()
        if not (self.options.budgets.failures or self._may_lose()):
            # After failed or lost stores some blocks may stay unstored: stores are not retried without limit.
            check_next_to_go(engine, rests=True)
        if self.keep_events:
            self._check_fold()
            engine.notes.check(engine.core.config, engine.log)
        return True

    def _check_fold(self) -> None:
        replayed = Ledger(self.engine.core.config)
        for event in self.engine.log:
            replayed.apply(event)
        if digest(replayed) != digest(self.engine.core.ledger):
            raise PropertyBroken(Property.EVENTS_ARE_STATE, "the log does not fold to the present state")

    def fingerprint(self, *, renamed: bool = True) -> bytes:
        return fingerprint(self, renamed=renamed)


@declared
class EndingServing(ServingWorld):
    """A serving world whose run ends when its engine has nothing more to do: a target of random walks.

    It also checks that each request which is served fairly ends within a bound (progress, S9;
    `kvsm.check.worlds.fair_service`).

    `check` is called more often than in the core's world, because the checks after each action cover less of
    the ledger.
    """

    engine_class = BookedEngine
    check_every = 20

    engine: Annotated[BookedEngine, PART]

    def parts(self) -> tuple[object, ...]:
        return (*super().parts(), self.engine.offered, self.engine.service)

    def _spend(self, budget: str) -> None:
        super()._spend(budget)
        self.engine.service.faults += 1

    def _do_step(self, accept: int | None = None, admit: bool = True) -> bool:
        """Step, and check that the requests which it serves fairly make progress (S9)."""
        service = self.engine.service
        step = service.step(self.engine)
        done = super()._do_step(accept, admit)
        service.check(self.engine, step)
        return done

    def check(self) -> None:
        """Check every property; at rest also that a next process serves all that the host has (S19)."""
        super().check()
        if self.wind_down() is None:
            unserved(self.engine)

    def draw(self, random: Random) -> Action:
        """Draw as `ServingWorld` does. Raises `IndexError`, which ends a run, when nothing is left to do."""
        action = super().draw(random)
        if action == ("step",) and not self.may_step():
            raise IndexError("nothing is left to do")
        return action
