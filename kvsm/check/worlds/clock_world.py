"""The clock world: an engine, its log and its deadlines, whose clocks stand still, jump and go back.

It is the serving world (`kvsm.check.worlds.serving_world`) with a log on disk, metrics, and the real
`TransferDeadlines`, `LeaseTable` and `HealthWatch`. The clocks change only in actions of their own: time
passes ("pass"), the monotonic clock goes back or jumps ahead ("back", "ahead"), the wall clock is set
("wall"). In all other actions both stand still. Hand-overs are offered and claimed ("offer", "claim"), and
stores on a disk fail or not ("disk_store"). In each step the engine looks at its deadlines and leases, and
flushes the log.

*Seen time* is the time that passes, with jumps ahead. A clock that goes back does not change it. Checked
(progress, S9):

- a transfer is given up only after `TIMEOUT_S` of seen time in which no transfer of its direction ended, and
  then at the latest in the step after the next `MOST_STEPS` steps;
- a lease does not end before its time, and has ended after the next step;
- a disk that has failed is tried again within `LONGEST_PAUSE_S`; this time restarts when the clock goes back,
  or returns into the pause;
- a flushed event is durable after a flush that comes `SYNC_S` of seen time later;
- no counter of the metrics decreases (events are state, S10).

At rest the log is read: `kvsm why`, `report` and `spans` succeed, and no duration in the tables and spans is
negative (events are state, S10).

Assumed: between two changes of a clock, the engine reads it.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

from kvsm.check.worlds.booked_engine import BookedEngine
from kvsm.check.worlds.clock_readers import check_readers
from kvsm.check.worlds.restart_world import leave_log
from kvsm.check.worlds.serving_world import EndingServing, ServingOptions
from kvsm.check.worlds.whole_process import MirroredLog
from kvsm.check.worlds.world import Action
from kvsm.check.worlds.world_files import suppressed_warnings, world_directory
from kvsm.core.kv_events import Publisher
from kvsm.core.ledger import Ledger
from kvsm.core.log import LogReader
from kvsm.core.offloader import Offloader
from kvsm.core.scheduler import StepResults
from kvsm.errors import PropertyBroken
from kvsm.events import Direction, OffloadConfig
from kvsm.explain.metric_places import HistogramValue
from kvsm.explain.metrics import Metrics
from kvsm.properties import Property
from kvsm.tiers.disk.health import LONGEST_PAUSE_S, HealthWatch
from kvsm.tiers.hand_over.leases import LeaseEnd, LeaseTable
from kvsm.tiers.hand_over.peer_messages import HandOverClaim, Offered
from kvsm.vllm.deadlines import TransferDeadlines

TIMEOUT_S, MOST_STEPS, SYNC_S = 60.0, 1, 0.1
_PASSES_MS = (1, 50, 150, 2_000, 20_000, 61_000)
_JUMPS_S = (1, 30, 3_600, 100_000)
_SETS_MS = (5, 500, 2_000, 3_600_000, 100_000_000)
_CLOCK_SHARE, _USUAL = 0.3, 0.85
_ROUNDING_S = 1e-3
_STARTED_S = 1_000_000.0
_DATED_NS = 1_790_000_000 * 10**9
"""The wall time at which a world begins: in 2026."""
_PROMPT = b"prompt"


class FaultyClocks:
    """The clocks of one world. seen_s: seen time. steady_s: the monotonic clock; wall_ns: the wall clock."""

    def __init__(self) -> None:
        self.seen_s, self.steady_s, self.wall_ns = 0.0, _STARTED_S, _DATED_NS

    def now_s(self) -> float:
        """The monotonic clock (s)."""
        return self.steady_s

    def now_ns(self) -> int:
        """The monotonic clock (ns)."""
        return int(self.steady_s * 1e9)

    def dated_ns(self) -> int:
        """The wall clock (ns since 1970)."""
        return self.wall_ns


class ClockedEngine(BookedEngine):
    """A `BookedEngine` that writes a log, counts metrics and has deadlines. It takes the same arguments."""

    def __init__(self, *options: Any, clocks: FaultyClocks, directory: Path, **more: Any) -> None:
        self.clocks, self.directory = clocks, directory
        self.deadlines = TransferDeadlines(TIMEOUT_S, MOST_STEPS, clocks.now_s)
        self.flights = FlightBook(clocks)
        super().__init__(*options, **more)

    def _make_core(
        self,
        config: OffloadConfig,
        publisher: Publisher | None,
        ledger: Ledger | None,  # noqa: ARG002 (there is one process)
    ) -> Offloader:
        core = Offloader.open(
            config,
            self.directory,
            publisher=publisher,
            clock_ns=self.clocks.dated_ns,
            sync_interval_ms=int(SYNC_S * 1000),
        )
        weakref.finalize(self, leave_log, core)
        assert core.writer is not None
        core.writer.flush()
        self.log = core.log = MirroredLog(LogReader(self.directory).events(), core.log)
        self.metrics = Metrics.attached_to(core)
        return core

    def _start(self) -> None:
        super()._start()
        jobs = (*self.plan.loads, *self.plan.stores)
        self.deadlines.submitted(jobs)
        for job in jobs:
            self.flights.begin(job.transfer, job.direction)

    def hand_on(self, count: int | None = None) -> StepResults:
        results = super().hand_on(count)
        for transfer in sorted(self.flights.begun.keys() - self.core.ledger.transfers.keys()):
            self.deadlines.ended(transfer)
            self.flights.end(transfer)
        return results

    def give_up_overdue(self) -> None:
        """Give up the copies that are overdue, as vLLM's scheduler side does in each step."""
        overdue = self.deadlines.overdue()
        self.flights.check(overdue)
        for transfer in overdue:
            self.scheduler.lose(transfer)


class FlightBook:
    """The copies in flight, in seen time. begun: copy -> its direction, and when it was submitted."""

    def __init__(self, clocks: FaultyClocks) -> None:
        self._clocks = clocks
        self.begun: dict[int, tuple[Direction, float]] = {}
        self._ended: dict[Direction, list[tuple[int, float]]] = {direction: [] for direction in Direction}
        self._late = dict.fromkeys(Direction, 0)
        """For each direction the number of steps in a row in which its oldest copy was overdue."""

    def begin(self, transfer: int, direction: Direction) -> None:
        self.begun[transfer] = direction, self._clocks.seen_s

    def end(self, transfer: int) -> None:
        direction, _ = self.begun.pop(transfer)
        self._ended[direction].append((transfer, self._clocks.seen_s))

    def check(self, overdue: list[int]) -> None:
        """Check which copies a step gives up."""
        for transfer in overdue:
            direction, since = self.begun.pop(transfer)
            since = max([since, *[at for earlier, at in self._ended[direction] if earlier < transfer]])
            if self._clocks.seen_s - since < TIMEOUT_S - _ROUNDING_S:
                message = f"transfer {transfer} is given up after {self._clocks.seen_s - since:g} s"
                raise PropertyBroken(Property.PROGRESS, message)
        for direction in Direction:
            ends = [at for _, at in self._ended[direction][-1:]]
            since = max(
                [*[at for one, at in self.begun.values() if one is direction][:1], *ends], default=0.0
            )
            is_late = self._clocks.seen_s - since > TIMEOUT_S + _ROUNDING_S
            flies = any(one is direction for one, _ in self.begun.values())
            self._late[direction] = self._late[direction] + 1 if is_late and flies else 0
            if self._late[direction] > MOST_STEPS:
                message = f"the oldest {direction.name.lower()} is overdue for {self._late[direction]} steps"
                raise PropertyBroken(Property.PROGRESS, message)


class ClockWorld(EndingServing):
    """A `World` of a `ClockedEngine`."""

    engine_class = ClockedEngine
    check_every = 50
    engine: ClockedEngine

    def __init__(self, options: ServingOptions, *, keep_events: bool = True) -> None:
        place = world_directory()
        weakref.finalize(self, place.cleanup)
        self._directory, self._clocks = Path(place.name) / "log", FaultyClocks()
        self._history = blake2b(digest_size=16)
        self._leases = LeaseTable(TIMEOUT_S, self._clocks.now_s)
        self._until: dict[str, float] = {}
        """Open lease -> when it ends, in seen time."""
        self._offered = 0
        self._disk, self._paused_s = HealthWatch("disk", self._clocks.now_s), 0.0
        self._paused_at_s = 0.0
        """The monotonic clock when the last store on the disk was accepted."""
        self._flushed: list[tuple[int, float]] = []
        """(last event, seen time) of flushes whose events are not known to be durable."""
        self._counters: dict[str, float] = {}
        self._read_until = 0
        """The last event that the readers were asked for."""
        with self._set_clocks():
            super().__init__(options, keep_events=keep_events)

    def _more_arguments(self) -> dict[str, Any]:
        return {"clocks": self._clocks, "directory": self._directory}

    def _set_clocks(self) -> Any:
        return patch.object(time, "monotonic_ns", self._clocks.now_ns)

    def _may_lose(self) -> bool:
        return True

    # What may happen.

    def actions(self) -> list[Action]:
        return super().actions() + self._clock_actions()

    def _clock_actions(self) -> list[Action]:
        clocks: list[Action] = [("pass", ms) for ms in _PASSES_MS]
        clocks += [(name, seconds) for seconds in _JUMPS_S for name in ("back", "ahead")]
        clocks += [("wall", sign * ms) for ms in _SETS_MS for sign in (1, -1)]
        clocks += [("disk_store", good) for good in range(2)]
        return [*clocks, ("offer",), *[("claim", place) for place in range(len(self._until))]]

    def draw(self, random: Random) -> Action:
        """Draw an action. Raises `IndexError`, which ends a run, when nothing is left to do."""
        actions = super().actions()
        usual = [action for action in actions if action[0] not in self.budget_of]
        if usual and random.random() < _CLOCK_SHARE:
            kinds: dict[str, list[Action]] = {}
            for action in self._clock_actions():
                kinds.setdefault(str(action[0]), []).append(action)
            return random.choice(kinds[random.choice([*kinds, "pass", "pass"])])
        return random.choice(usual if random.random() < _USUAL else actions)

    # What happens.

    def do(self, action: Action) -> bool:
        with self._set_clocks(), suppressed_warnings():
            done = super().do(action)
        if done:
            self._history.update(repr(action).encode())
        return done

    def _do_pass(self, ms: int) -> bool:
        self._clocks.wall_ns += ms * 1_000_000
        return self._move(ms / 1000)

    def _do_ahead(self, seconds: int) -> bool:
        return self._move(seconds)

    def _move(self, seconds: float) -> bool:
        self._clocks.seen_s += seconds
        self._clocks.steady_s += seconds
        return self._read()

    def _do_back(self, seconds: int) -> bool:
        self._clocks.steady_s = max(0.0, self._clocks.steady_s - seconds)
        self._paused_s = self._clocks.seen_s
        return self._read()

    def _read(self) -> bool:
        """Read the clocks, as each step does."""
        self.engine.log.flush()
        self.engine.deadlines.clock()
        self._leases.clock()
        return True

    def _do_wall(self, ms: int) -> bool:
        self._clocks.wall_ns = max(0, self._clocks.wall_ns + ms * 1_000_000)
        return True

    def _do_offer(self) -> bool:
        name, self._offered = f"lease {self._offered}", self._offered + 1
        self._leases.offer(name, _PROMPT, 1)
        self._leases.ready(name, Offered(1, ()))
        self._until[name] = self._clocks.seen_s + TIMEOUT_S
        return True

    def _do_claim(self, place: int) -> bool:
        """Claim a hand-over, which restarts its time."""
        if place >= len(self._until):
            return False
        name = list(self._until)[place]
        answer = self._leases.claim(HandOverClaim(name, _PROMPT, 1, {}), 1 + place)
        if isinstance(answer, Offered):
            self._until[name] = self._clocks.seen_s + TIMEOUT_S
        return True

    def _do_disk_store(self, good: int) -> bool:
        """A store on the disk begins, unless it is refused, and ends."""
        refusal, health, seen_s = self._disk.refusal(), self._disk.read(), self._clocks.seen_s
        # A clock that goes back and ahead again may return into a pause.
        returned = 0 <= self._clocks.steady_s - self._paused_at_s <= LONGEST_PAUSE_S
        if refusal and not returned and seen_s - self._paused_s > LONGEST_PAUSE_S + _ROUNDING_S:
            message = f"a pause of the disk lasts {seen_s - self._paused_s:g} s: {refusal}"
            raise PropertyBroken(Property.PROGRESS, message)
        if health.probes_in_s > LONGEST_PAUSE_S:
            message = f"the disk will be tried in {health.probes_in_s:g} s"
            raise PropertyBroken(Property.PROGRESS, message)
        if not refusal:
            self._paused_s, self._paused_at_s = seen_s, self._clocks.steady_s
            if good:
                self._disk.succeeded()
            else:
                self._disk.failed("full")
        return True

    def _do_step(self, accept: int | None = None, admit: bool = True) -> bool:
        self.engine.give_up_overdue()
        self._look_at_leases()
        done = super()._do_step(accept, admit)
        self._check_log()
        self._check_counters()
        return done

    # What must hold.

    def _look_at_leases(self) -> None:
        self._leases.expire()
        now = self._clocks.seen_s
        for name, end in self._leases.take_ended():
            left_s = self._until.pop(name) - now
            if end is LeaseEnd.EXPIRED and left_s > _ROUNDING_S:
                message = f"{name} expires {left_s:g} s too early"
                raise PropertyBroken(Property.PROGRESS, message)
        for name, until in self._until.items():
            if now - until > _ROUNDING_S:
                message = f"{name} has not ended, {now - until:g} s after its time"
                raise PropertyBroken(Property.PROGRESS, message)

    def _check_log(self) -> None:
        """Flush, and check that events which were flushed long ago are durable."""
        writer: Any = self.engine.core.writer
        self.engine.log.flush()
        now, durable = self._clocks.seen_s, writer._place.segment.synced.seq
        self._flushed = [(seq, at) for seq, at in self._flushed if seq > durable]
        for seq, at in self._flushed:
            if now - at > SYNC_S + _ROUNDING_S:
                message = f"event {seq} was flushed {now - at:g} s ago, and is not durable"
                raise PropertyBroken(Property.PROGRESS, message)
        if durable < self.engine.core.ledger.seq:
            self._flushed.append((self.engine.core.ledger.seq, now))

    def _check_counters(self) -> None:
        before, self._counters = self._counters, dict(_numbers(self.engine.metrics.values()))
        for name, value in before.items():
            if self._counters[name] < value:
                message = f"the counter {name} decreases from {value} to {self._counters[name]}"
                raise PropertyBroken(Property.EVENTS_ARE_STATE, message)

    def check(self) -> None:
        super().check()
        if self.wind_down() is None and self._read_until < self.engine.core.ledger.seq:
            self._read_until = self.engine.core.ledger.seq
            with self._set_clocks():
                self.engine.log.flush()
                check_readers(self._directory)

    def fingerprint(self, *, renamed: bool = True) -> bytes:  # noqa: ARG002
        """A hash of all actions so far: this world is walked, and not explored."""
        return self._history.digest()


def _numbers(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers among the values of metrics, with their names."""
    for name, value in values.items():
        if isinstance(value, HistogramValue):
            yield f"{prefix}{name} sum", value.sum
            yield from ((f"{prefix}{name} {place}", count) for place, count in enumerate(value.counts))
        elif isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name} ")
        elif isinstance(value, int | float):
            yield f"{prefix}{name}", value
