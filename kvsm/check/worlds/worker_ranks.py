"""The world of workers: real `Worker`s with real copy engines, on simulated devices that refuse some jobs.

The world plays the scheduler side. It starts each plan on all ranks. Each plan awaits the live transfers that
touch its blocks, as for an engine without block references. The world chooses which device makes the next
step, polls, replaces copy engines and closes. Ranks may share a host pool as replicas. Checked:

- each transfer is reported once by each rank, and at rest none is left: progress (S9);
- a refused job is reported as bad, all others as good: failure is not success (S6);
- a plan begins after the end of its awaited transfers, and accesses to the same bytes are ordered: order of
  copies (S12);
- at rest all memory holds the expected bytes: correct bytes (S15).
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from random import Random
from typing import Any

import msgspec
import numpy as np

from kvsm.check.worlds.world import Action
from kvsm.copies import ReplicaCopyEngine
from kvsm.copies.simulated import SimulatedDevice, SimulatedStep
from kvsm.copies.streams import StreamCopyEngine
from kvsm.copies.worker import Worker
from kvsm.core.plan import TransferJob, TransferPlan
from kvsm.errors import ConfigError, PropertyBroken, TransferFailed
from kvsm.events import Direction, OffloadingEvent
from kvsm.properties import Property

MOST = 16
"""The upper limit of each size."""
UNKNOWN = -1
"""The expected value of a block that a bad copy may have written."""


class WorkerRanksOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes and budgets of a world of workers.

    replicas: whether the ranks share one host pool.
    transfer_blocks: the most blocks of one copy.
    plans: how many plans are started at most.
    refusals: how many of their jobs are refused at most.
    """

    ranks: int = 1
    replicas: bool = False
    device_blocks: int = 4
    host_blocks: int = 4
    transfer_blocks: int = 3
    plans: int = 8
    refusals: int = 2

    def __post_init__(self) -> None:
        """Raises `ConfigError`: options of a saved failure are not trusted."""
        for name in ("ranks", "device_blocks", "host_blocks", "transfer_blocks"):
            if not 1 <= getattr(self, name) <= MOST:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be from 1 to {MOST}")


class RefusingStreamEngine(StreamCopyEngine):
    """A `StreamCopyEngine` that can refuse jobs, as if its device were gone."""

    refuses = False
    """Whether `submit` refuses now."""

    def submit(self, job: TransferJob, after: Any = None) -> None:
        if self.refuses:
            raise TransferFailed(f"transfer {job.transfer} is refused: the device is gone")
        super().submit(job, after)


class _Rank:
    """One rank: its device, its worker, and the expected content of its device memory.

    below: the copy engine of the device. `engine`, which the worker uses, may wrap it.
    """

    def __init__(self, number: int, options: WorkerRanksOptions, host: np.ndarray[Any, Any]) -> None:
        count = options.device_blocks
        memory = np.arange(100, 100 + count, dtype=np.uint8)[:, None].repeat(2, axis=1)
        self.memory, self.host = memory[:, :1], host
        self.device = SimulatedDevice([self.memory], host, lambda _options: 0, 2)
        self.below = RefusingStreamEngine(self.device)
        self.engine: Any = self.below
        if options.replicas:
            self.engine = ReplicaCopyEngine(self.below, options.ranks, number)
        self.worker = Worker(number, self.engine)
        self.live: dict[int, bool] = {}
        """Unreported transfer -> whether its report must be good."""
        self.expected = self.memory[:, 0].astype(int).tolist()

    @property
    def sources(self) -> list[Any]:
        """The submitters and streams of the device, each of which can make a step."""
        return [*self.device.submitters, *self.device._streams]


class WorkerRanksWorld:
    """A `World` of the workers of all ranks."""

    events: tuple[OffloadingEvent, ...] = ()
    """Empty: there is no offload core here."""

    def __init__(self, options: WorkerRanksOptions) -> None:
        self.options = options

        def host() -> np.ndarray[Any, Any]:
            pool: np.ndarray[Any, Any] = np.arange(options.host_blocks, dtype=np.uint8)[:, None].repeat(
                2, axis=1
            )
            return pool[:, :1]

        shared = host()
        self.ranks = [
            _Rank(number, options, shared if options.replicas else host()) for number in range(options.ranks)
        ]
        self._hosts = [list(range(options.host_blocks)) for _ in self.ranks]
        """The expected content of each rank's host pool."""
        self._plans, self._refusals = options.plans, options.refusals
        self._transfers = 0
        self._jobs: dict[int, TransferJob] = {}
        self._closed = False
        self._silent: set[int] = set()
        """Ranks whose last poll returned no report, with no step or new plan since."""

    # What may happen.

    def actions(self) -> list[Action]:
        return [*self._steps(), *self._calls(), *self._starts()]

    def _steps(self) -> Iterator[Action]:
        for number, rank in enumerate(self.ranks):
            for name, source in enumerate(rank.sources):
                yield from (("step", number, name, place) for place in range(source.choices()))

    def _calls(self) -> Iterator[Action]:
        for number in range(len(self.ranks)):
            yield "poll", number
            yield "use", number
        if not self._closed:
            yield ("close",)

    def _starts(self) -> Iterator[Action]:
        options = self.options
        if not self._plans or self._closed:
            return
        for store in (0, 1):
            for block in range(options.device_blocks):
                for slot in range(options.host_blocks):
                    for count in range(1, options.transfer_blocks + 1):
                        if block + count <= options.device_blocks and slot + count <= options.host_blocks:
                            yield "start", store, block, slot, count, 0
                            if self._refusals:
                                yield "start", store, block, slot, count, 1

    def draw(self, random: Random) -> Action:
        """Draw an action: mostly a step of a device."""
        steps = list(self._steps()) if random.random() < 0.6 else []
        if steps:
            return random.choice(steps)
        starts = list(self._starts()) if random.random() < 0.4 else []
        if starts:
            return random.choice(starts)
        calls = [call for call in self._calls() if call[0] != "close" or random.random() < 0.02]
        return random.choice(calls)

    def do(self, action: Action) -> bool:
        name, *numbers = action
        if action not in {"step": self._steps, "start": self._starts}.get(str(name), self._calls)():
            return False
        getattr(self, f"_do_{name}")(*numbers)
        self._watch()
        return True

    # How it happens.

    def _do_step(self, number: int, source: int, place: int) -> None:
        rank = self.ranks[number]
        self._silent.clear()
        rank.device.run(SimulatedStep(rank.sources[source], place))

    def _do_start(self, store: int, block: int, slot: int, count: int, refused: int) -> None:
        """Start a plan of one job on all ranks. The last rank refuses the job if `refused` is 1."""
        self._silent.clear()
        self._plans -= 1
        self._refusals -= refused
        self._transfers += 1
        direction = Direction.STORE if store else Direction.LOAD
        devices, hosts = tuple(range(block, block + count)), tuple(range(slot, slot + count))
        job = TransferJob(self._transfers, direction, devices, hosts)
        awaited = tuple(id for id, other in self._jobs.items() if self._live(id) and _overlap(other, job))
        self._jobs[job.transfer] = job
        plan = TransferPlan((), (job,), awaited) if store else TransferPlan((job,), (), awaited)
        for number, rank in enumerate(self.ranks):
            is_bad = bool(refused) and number == len(self.ranks) - 1
            rank.below.refuses = is_bad
            rank.live[job.transfer] = not is_bad
            rank.worker.start(plan)
            rank.below.refuses = False
            self._expect(number, job, bool(refused))

    def _live(self, transfer: int) -> bool:
        return any(transfer in rank.live for rank in self.ranks)

    def _expect(self, number: int, job: TransferJob, refused: bool) -> None:
        rank, host = self.ranks[number], self._hosts[number]
        is_bad = refused and number == len(self.ranks) - 1
        for block, slot in zip(*(map(int, ids) for ids in job.pairs())):
            if job.direction is Direction.LOAD:
                rank.expected[block] = UNKNOWN if is_bad else host[slot]
            elif not self.options.replicas:
                host[slot] = UNKNOWN if is_bad else rank.expected[block]
            elif number == 0:
                # Only one replica writes a row. All hold the same bytes, unless one has refused a load.
                values = {replica.expected[block] for replica in self.ranks}
                value = values.pop() if len(values) == 1 and not refused else UNKNOWN
                for pool in self._hosts:
                    pool[slot] = value

    def _do_poll(self, number: int) -> None:
        rank = self.ranks[number]
        reports = rank.worker.poll()
        (self._silent.discard if reports else self._silent.add)(number)
        for report in reports:
            good = rank.live.pop(report.transfer, None)
            if good is None or report.worker != number:
                raise PropertyBroken(Property.PROGRESS, f"transfer {report.transfer} is reported again")
            if report.good is not good:
                message = f"transfer {report.transfer} is reported as good={report.good}; it is {good}"
                raise PropertyBroken(Property.FAILURE_IS_NOT_SUCCESS, message)

    def _do_use(self, number: int) -> None:
        """Replace a worker's copy engine, which must succeed exactly if all its transfers are reported."""
        rank = self.ranks[number]
        try:
            rank.worker.use(rank.engine)
        except TransferFailed:
            if not rank.live:
                message = f"all transfers of rank {number} are reported, and it cannot change its copy engine"
                raise PropertyBroken(Property.PROGRESS, message) from None
        else:
            if rank.live:
                message = f"rank {number} changes its copy engine under transfers {list(rank.live)}"
                raise PropertyBroken(Property.NO_REUSE_IN_FLIGHT, message)

    def _do_close(self) -> None:
        """Close all workers: all transfers must have ended then."""
        self._closed = True
        for number, rank in enumerate(self.ranks):
            rank.worker.close()
            self._do_poll(number)
            if rank.live:
                message = f"after the close of rank {number} transfers {list(rank.live)} have not ended"
                raise PropertyBroken(Property.PROGRESS, message)

    # What must hold.

    def _watch(self) -> None:
        for number, rank in enumerate(self.ranks):
            if rank.device.races:
                raise PropertyBroken(Property.COPY_ORDER, str(rank.device.races[0]))
            if rank.worker.unreported() != rank.live.keys():
                left = sorted(rank.worker.unreported())
                message = f"rank {number} has not reported {left}, and it must be {list(rank.live)}"
                raise PropertyBroken(Property.PROGRESS, message)

    def check(self) -> None:
        """Compare memory at rest. All other checks run after each action."""
        if any(rank.live or rank.device.backlog for rank in self.ranks):
            if self.wind_down() is None:
                left = [sorted(rank.live) for rank in self.ranks]
                raise PropertyBroken(Property.PROGRESS, f"transfers {left} are never reported")
            return
        for number, (rank, host) in enumerate(zip(self.ranks, self._hosts)):
            for what, values, pool in (("device", rank.expected, rank.memory), ("host", host, rank.host)):
                for block, value in enumerate(values):
                    if value not in (UNKNOWN, int(pool[block, 0])):
                        message = f"{what} block {block} of rank {number} holds {pool[block, 0]}, not {value}"
                        raise PropertyBroken(Property.CORRECT_BYTES, message)

    def wind_down(self) -> Action | None:
        step = next(self._steps(), None)
        if step is not None:
            return step
        # After the last step of a device one poll returns all of its reports.
        for number, rank in enumerate(self.ranks):
            if rank.live and number not in self._silent:
                return "poll", number
        return None

    def describe(self) -> dict[str, str]:
        return {
            f"{what} of rank {number}": str(pool[:, 0].tolist())
            for number, rank in enumerate(self.ranks)
            for what, pool in (("device blocks", rank.memory), ("host blocks", rank.host))
        }

    def fingerprint(self) -> bytes:
        state = [(self.describe(), sorted(rank.live.items()), rank.device.backlog) for rank in self.ranks]
        return blake2b(repr((state, self._plans, self._closed)).encode(), digest_size=16).digest()


def _overlap(one: TransferJob, other: TransferJob) -> bool:
    """Whether two jobs have a device block or a host block in common."""
    return any(
        set(map(int, ours)) & set(map(int, theirs)) for ours, theirs in zip(one.pairs(), other.pairs())
    )


def draw_worker_ranks(random: Random) -> WorkerRanksOptions:
    """Draw options with one or two ranks, which may share their host pool."""
    ranks = random.choice((1, 1, 2))
    return WorkerRanksOptions(
        ranks=ranks, replicas=ranks > 1 and random.random() < 0.7, refusals=random.choice((0, 2))
    )
