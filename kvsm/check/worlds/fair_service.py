"""Check that each request that is served fairly ends within a bound (progress, S9).

A step serves a request fairly in one of these cases:

- the request asks for its hit, and the answer is to wait;
- the step computes some of its tokens;
- the request waits for its load, and when the step begins, no copy of the load is left to do, and no report
  on it is still on its way to the scheduler.

Other steps do not count: the request stands behind another one, or has no room because other requests have
the device blocks, or it waits for a copy, which only the driver of the world can end.

These bounds are counted from the arrival of the request, or from the last preemption, fault, or start of a
part of its prompt:

- at most `defer_ticks` steps answer that it must wait, not counting waits for another engine;
- the first step that serves it fairly while it waits for its load passes on the end of the load;
- at most `most_steps` steps compute it;
- its load fails only after a bad report or another disturbance.

If a step has no room for a request, each device block in use has a reason: it belongs to an unfinished
request; or a copy under way touches it, or other blocks of the same finished request; or it is retired. A
reason may end within the step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import msgspec

from kvsm.check.worlds.small_request import NULL, SmallRequest
from kvsm.core.ledger.canonical import Dropped, declared
from kvsm.core.scheduler.scheduler_state import LoadEnded
from kvsm.errors import PropertyBroken
from kvsm.events import Direction
from kvsm.ids import listed
from kvsm.properties import Property
from kvsm.states.lease import LeaseState
from kvsm.states.words import STATE_MASK

if TYPE_CHECKING:
    from kvsm.check.worlds.booked_engine import BookedEngine

_WITHIN_A_STEP = "empty between two actions"
_A_COUNT = "only this check reads it, and its bounds are the same in equal states"


class ServiceRecord(msgspec.Struct):
    """How a request was served since it last began.

    parts: the parts of its prompt that had not begun at that time.
    faults: the disturbances of the run up to that time.
    bound: the most steps that may compute it (`most_steps`); 0: no step has computed it.
    waits: how many steps answered that it must wait.
    steps: how many steps computed it.
    loads: whether a load of it was submitted.
    """

    parts: int
    faults: int
    bound: int = 0
    waits: int = 0
    steps: int = 0
    loads: bool = False


@declared
class FairService:
    """Counts, for each unfinished request, the steps that served it fairly."""

    records: Annotated[dict[str, ServiceRecord], Dropped(_A_COUNT)]
    faults: Annotated[int, Dropped(_A_COUNT)]
    """The disturbances so far."""
    asks: Annotated[str, Dropped(_WITHIN_A_STEP)]
    """The request that asked last."""
    asked: Annotated[set[str], Dropped(_WITHIN_A_STEP)]
    """The requests that asked in this step."""
    answered: Annotated[set[str], Dropped(_WITHIN_A_STEP)]
    """The requests that got the number of tokens to load in this step."""
    computed: Annotated[set[str], Dropped(_WITHIN_A_STEP)]
    """The requests of which this step computes tokens."""
    lacks_room: Annotated[str, Dropped(_WITHIN_A_STEP)]
    """The first request for which this step had no room."""

    def __init__(self) -> None:
        self.records, self.faults, self.asks, self.lacks_room = {}, 0, "", ""
        self.asked, self.answered, self.computed = set(), set(), set()

    # What the engine notes.

    def begin(self, request: SmallRequest) -> None:
        """The request begins again, or is over."""
        self.records.pop(request.request_id, None)

    def note_question(self, request: SmallRequest) -> None:
        """The request asks how many tokens it can load."""
        self.asks = request.request_id
        self.asked.add(request.request_id)

    def note_answer(self, *, has_room: bool) -> None:
        """The request that asked last need not wait. has_room: whether it gets device blocks."""
        self.answered.add(self.asks)
        if not has_room:
            self.note_lack(self.asks)

    def note_wait_for_another_engine(self) -> None:
        """The request that asked last waits for another engine, whose steps are not bounded here."""
        self.asked.discard(self.asks)

    def note_lack(self, name: str) -> None:
        """The step has no room for this request."""
        self.lacks_room = self.lacks_room or name

    def note_computed(self, engine: BookedEngine, names: Iterable[str]) -> None:
        """The step computes tokens of these requests, which do not count as computed yet."""
        for name in names:
            request = engine.requests[name]
            record = self._record(request)
            record.bound = record.bound or most_steps(engine, request)
            self.computed.add(name)

    def note_failed(self, load: LoadEnded) -> None:
        """A load that a request waits for has failed. Raises `PropertyBroken` if there was no reason."""
        record = self.records.pop(load.request, None)
        if record is not None and record.loads and not load.lost and record.faults == self.faults:
            message = f"the load of request {load.request} fails, and nothing has gone wrong since it began"
            raise PropertyBroken(Property.PROGRESS, message)

    # Steps.

    def step(self, engine: BookedEngine) -> ServedStep:
        """Begin a step."""
        self.lacks_room = ""
        for names in (self.asked, self.answered, self.computed):
            names.clear()
        waiting = {name: one for name, one in engine.running.items() if one.loading}
        done = {name: one for name, one in waiting.items() if not _is_under_way(engine, one)}
        return ServedStep(done, _without_reason(engine))

    def check(self, engine: BookedEngine, step: ServedStep) -> None:
        """Check a step at its end. step: as it began. Raises `PropertyBroken`."""
        for name, request in step.loaded.items():
            if request.loading and engine.running.get(name) is request:
                message = f"the load of request {name} has ended, and a step later the request waits for it"
                raise PropertyBroken(Property.PROGRESS, message)
        if self.lacks_room and step.blocks:
            blocks = sorted(step.blocks & _without_reason(engine))
            if blocks:
                message = f"request {self.lacks_room} lacks room, but nothing needs device blocks {blocks}"
                raise PropertyBroken(Property.PROGRESS, message)
        for name in sorted(self.asked - self.answered):
            self._count_wait(engine, name)
        for name in self.answered.intersection(engine.running):
            admitted = engine.running[name]
            if admitted.loading:
                self._record(admitted).loads |= _is_under_way(engine, admitted)
        for name in sorted(self.computed):
            self._count_step(engine, name)

    def _record(self, request: SmallRequest) -> ServiceRecord:
        record = self.records.get(request.request_id)
        if record is None or record.parts != len(request.parts):
            record = ServiceRecord(len(request.parts), self.faults)
            self.records[request.request_id] = record
        return record

    def _count_wait(self, engine: BookedEngine, name: str) -> None:
        ticks, record = engine.core.config.defer_ticks, self._record(engine.requests[name])
        record.waits += 1
        if record.waits > ticks:
            message = (
                f"request {name} is told to wait in {record.waits} steps, and may wait for {ticks} ticks"
            )
            raise PropertyBroken(Property.PROGRESS, message)

    def _count_step(self, engine: BookedEngine, name: str) -> None:
        record = self.records.get(name)
        if record is None or name not in engine.running or record.parts != len(engine.requests[name].parts):
            self.records.pop(name, None)  # the step has ended it, or this part of its prompt
            return
        record.steps += 1
        if record.steps >= record.bound:
            message = f"{record.steps} steps have computed request {name}, and it is not over"
            raise PropertyBroken(Property.PROGRESS, message)


class ServedStep(msgspec.Struct):
    """A step that has begun.

    loaded: the requests that wait for a load of which no copy is left to do and no report is on its way.
    blocks: the device blocks in use without a reason.
    """

    loaded: dict[str, SmallRequest]
    blocks: set[int]


def most_steps(engine: BookedEngine, request: SmallRequest) -> int:
    """The most steps that compute a request from now on, until it, or this part of its prompt, is over."""
    decoded = request.num_tokens - request.num_prompt_tokens
    return (
        -(
            -(request.num_tokens - request.num_computed_tokens) // engine.chunk_tokens
        )  # the last one of these decodes the first token
        + max(0, request.outputs - decoded - 1)
        + engine.asynchronous  # one more is scheduled before the last token is known
    )


def _under_way(engine: BookedEngine) -> list[tuple[Direction, set[int]]]:
    """The direction and device blocks of each copy that is left to do, or whose report is on its way."""
    live = engine.core.ledger.transfers
    jobs = [copy.job for copy in engine.copies.values()]
    planned = engine.scheduler.state.planned
    copies = [(job.direction, set(listed(job.pairs()[0]))) for job in (*jobs, *planned)]
    reported = {report.transfer for report in engine.reports}
    return copies + [
        (live[id].direction, set(listed(live[id].device_blocks))) for id in reported if id in live
    ]


def _is_under_way(engine: BookedEngine, request: SmallRequest) -> bool:
    """Whether a copy of the load that the request waits for is under way."""
    held = {block for table in request.tables for block in table}
    return any(side is Direction.LOAD and held & blocks for side, blocks in _under_way(engine))


def _without_reason(engine: BookedEngine) -> set[int]:
    """The device blocks that are in use although nothing needs them."""
    leases = engine.core.ledger.leases.words
    used = {
        block
        for block, count in enumerate(engine.pool.references)
        if count and leases[block] & STATE_MASK != LeaseState.RETIRED
    }
    for request in engine.holders().values():
        for table in request.tables:
            used.difference_update(table)
    if not used:
        return used
    touched = {block for _, blocks in _under_way(engine) for block in blocks}
    for held in engine.sending.values():
        if touched.intersection(held):
            used.difference_update(held)
    return used - touched - {NULL}
