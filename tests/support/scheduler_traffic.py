"""Random traffic on the small engine, and short names for its results."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, TypeVar

from hypothesis import strategies as st

from kvsm import events as ev
from kvsm.check.worlds.small_engine import SmallEngine
from kvsm.check.worlds.small_request import HASH_TOKENS, SmallRequest
from kvsm.core.ledger.invariants import check_ledger, check_rest
from kvsm.core.log import MemoryLog
from kvsm.core.offloader import Offloader
from kvsm.core.plan import TransferPlan, WorkerReport
from kvsm.core.scheduler import GroupKind, KVCacheGroup, OffloadScheduler, SchedulerConfig, StepOutput
from kvsm.events import OffloadConfig
from kvsm.properties import Property

Event = TypeVar("Event", bound=ev.OffloadingEvent)
Check = Callable[[SmallEngine], None]

FULL = KVCacheGroup(HASH_TOKENS)
WIDE = KVCacheGroup(2 * HASH_TOKENS)
SLIDING = KVCacheGroup(HASH_TOKENS, GroupKind.SLIDING_WINDOW, window=6)
MAMBA = KVCacheGroup(HASH_TOKENS, GroupKind.MAMBA)

ACTS = st.lists(st.integers(0, 10_000), min_size=4, max_size=45)
"""The actions of a run: one number per action, which `drive` interprets."""

_KINDS = (
    "arrive",
    "arrive",
    "step",
    "step",
    "step",
    "carry out",
    "carry out",
    "carry out all",
    "fail",
    "finish",
    "preempt",
    "accept less",
    "reset",
)


def prompt_of(number: int) -> list[int]:
    """Return one of a few prompts of several lengths with common prefixes."""
    length = (3, 8, 13, 17, 24)[number % 5]
    return [*range(8), *range(100 * (number % 2), 100 * (number % 2) + 16)][:length]


def drive(
    engine: SmallEngine,
    acts: list[int],
    *,
    without: Collection[str] = (),
    check: Check | None = None,
    **request: Any,
) -> None:
    """Drive the engine through these actions, then until idle. Checks the ledger after each action."""
    kinds = [kind for kind in _KINDS if kind not in without]
    for act in acts:
        rest, choice = divmod(act, len(kinds))
        _act(engine, kinds[choice], rest, request)
        assert check_ledger(engine.core.ledger) == []
        if check is not None:
            check(engine)
    come_to_rest(engine)


def come_to_rest(engine: SmallEngine) -> None:
    """Run until idle, and check progress (S9): all copies and requests have ended, and nothing is held."""
    engine.run(400)
    ledger = engine.core.ledger
    assert check_ledger(ledger) == []
    assert check_rest(ledger) == []
    held, retired = sum(engine.pool.references), sum(word != 0 for word in ledger.leases.words)
    # If a request is preempted and its load is lost then, an engine without references has freed the blocks.
    # That is safe: `TransferPlan.flush` names the lost load before another request writes them.
    assert held == retired or (held < retired and not engine.references), Property.ONE_RELEASE_PER_HOLD
    assert not engine.sending


def _act(engine: SmallEngine, kind: str, rest: int, request: dict[str, Any]) -> None:
    unfinished = [one for one in engine.requests.values() if not one.finished]
    copies, running = list(engine.copies), list(engine.running.values())
    if kind == "arrive" and len(unfinished) < 4:
        name = f"r{len(engine.requests)}"
        engine.arrive(SmallRequest(name, prompt_of(rest), 1 + rest // 5 % 9, **request))
    elif kind == "step":
        engine.step()
    elif kind == "accept less":
        engine.step(accept=rest % 12)
    elif kind == "carry out" and copies:
        engine.carry_out(copies[rest % len(copies)], rest // 7 % engine.workers)
    elif kind == "fail" and copies:
        engine.carry_out(copies[rest % len(copies)], rest // 7 % engine.workers, good=False)
    elif kind == "carry out all":
        engine.carry_out_all()
        # Of any order.
        engine.reports.sort(key=lambda report: (report.worker * rest % 3, -report.transfer))
    elif kind == "finish" and unfinished:
        engine.finish(unfinished[rest % len(unfinished)], aborted=bool(rest & 8))
    elif kind == "preempt" and running:
        engine.preempt(running[rest % len(running)])
    elif kind == "reset":
        engine.reset()


def of_kind(engine: SmallEngine | Hand, kind: type[Event]) -> list[Event]:
    """Return the events of one kind so far."""
    return [event for event in engine.log if isinstance(event, kind)]


def stored_keys(engine: SmallEngine | Hand) -> list[bytes]:
    """Return all keys of planned stores, in order."""
    return [key for event in of_kind(engine, ev.StorePlanned) for key in event.keys]


def skipped(engine: SmallEngine | Hand, reason: str) -> list[bytes]:
    return [key for event in of_kind(engine, ev.StoreSkipped) if event.reason == reason for key in event.keys]


def keys_of(request: SmallRequest, group: int = 0, tokens: int = HASH_TOKENS) -> list[bytes]:
    """Return the keys of all full blocks, or chunks, of this number of tokens."""
    return [cell + group.to_bytes(4, "big") for cell in request.cells[tokens - 1 :: tokens]]


def finish_one(
    engine: SmallEngine, name: str, prompt: list[int], outputs: int = 1, **more: Any
) -> SmallRequest:
    """Run a request alone, until all its copies have ended."""
    request = engine.arrive(SmallRequest(name, prompt, outputs, **more))
    engine.run()
    return request


class Hand:
    """An offload scheduler that a test drives as its engine. pool: the device pool; None: none."""

    def __init__(
        self,
        *groups: KVCacheGroup,
        pool: Any = None,
        core: Any = None,
        kind: type[OffloadScheduler] = OffloadScheduler,
        **scheduler: Any,
    ) -> None:
        self.log = MemoryLog()
        config = OffloadConfig(**{"host_blocks": 16, "device_blocks": 64, **(core or {})})
        self.core = Offloader(config, self.log, clock_ns=lambda: 0)
        self.scheduler = kind(
            self.core, SchedulerConfig(groups=groups or (FULL,), hash_tokens=HASH_TOKENS, **scheduler)
        )
        if pool is not None:
            self.scheduler.bind_gpu_block_pool(pool)

    def admit(self, request: SmallRequest, *tables: list[int], local: int = 0) -> int | None:
        """Match a request, and accept the whole hit. Returns the number of hit tokens."""
        found, _ = self.scheduler.get_num_new_matched_tokens(request, local)
        if found is not None:
            self.scheduler.update_state_after_alloc(request, tables, found)
            request.tables = [list(table) for table in tables]
            request.num_computed_tokens = local + found
        return found

    def compute(self, request: SmallRequest, tokens: int | None = None) -> None:
        """Set the request's number of computed tokens (default: all)."""
        request.num_computed_tokens = request.num_tokens if tokens is None else tokens

    def step(self, *requests: SmallRequest, **output: Any) -> TransferPlan:
        scheduled = [request.request_id for request in requests]
        return self.scheduler.build_connector_meta(StepOutput(scheduled=scheduled, **output))

    def store(self, request: SmallRequest, *tables: list[int]) -> None:
        """Let this request run and finish, and store all its blocks."""
        self.admit(request, *tables)
        self.compute(request)
        self.end(self.step(request))
        self.scheduler.request_finished(request, tables)

    def end(self, plan: TransferPlan, *, good: bool = True) -> None:
        """Report all jobs of this plan from all workers."""
        for job in (*plan.loads, *plan.stores):
            for worker in range(self.core.config.workers):
                self.report(job.transfer, worker, good=good)

    def report(self, transfer: int, worker: int = 0, *, good: bool = True) -> Any:
        return self.scheduler.update_connector_output([WorkerReport(transfer, worker, good)])
