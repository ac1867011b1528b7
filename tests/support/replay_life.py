"""Runs of a core that are driven by numbers, and their logs, for tests of replay."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import strategies as st
from log_life import disk

from kvsm import events as ev
from kvsm.core.ledger.snapshot import snapshot
from kvsm.core.log import LogWriter, MemoryLog, WholeState
from kvsm.core.offloader import Offloader
from kvsm.core.plan import TransferJob
from kvsm.core.policies import POLICIES
from kvsm.events import Direction, OffloadConfig, OffloadingEvent, SkipReason
from kvsm.ids import to_list
from kvsm.states.block import BlockState
from kvsm.states.request import RequestState
from kvsm.states.transfer import TransferState
from kvsm.states.words import STATE_MASK

PROMPTS, PROMPT_BLOCKS, REQUESTS = 5, 6, 6


def key(number: int) -> bytes:
    """Return a key in the engine's format: 32 bytes of hash, 4 bytes of group index."""
    return number.to_bytes(4, "big") + bytes(28) + bytes(4)


def prompt(number: int) -> list[bytes]:
    """Return the keys of a prompt; prompts of equal parity share their first two blocks."""
    shared = [key(1000 + number % 2), key(1002 + number % 2)]
    return shared + [key(number * PROMPT_BLOCKS + block) for block in range(PROMPT_BLOCKS - 2)]


class Life:
    """An offloader with an engine that makes any call, sensible or not."""

    def __init__(
        self,
        log: Path | None = None,
        writer: dict[str, Any] | None = None,
        clock_ns: Callable[[], int] | None = None,
        **config: Any,
    ) -> None:
        defaults = {"host_blocks": 10, "device_blocks": 24, "workers": 2, "defer_ticks": 3}
        self.config = OffloadConfig(**{**defaults, **config})
        self.events = MemoryLog()
        self.writer = None if log is None else self._open(log, writer or {})
        self.admitted = set[str]()
        ticks = count(1)
        self._clock_ns = clock_ns or (lambda: next(ticks))
        self.core = Offloader(self.config, self, clock_ns=self._clock_ns)

    def _open(self, log: Path, options: dict[str, Any]) -> LogWriter:
        options = {"durability": "none", "clock": lambda: 7, **options}
        return LogWriter(
            log, config=self.config, snapshot=lambda: WholeState(snapshot(self.core.ledger)), **options
        )

    def append(self, event: OffloadingEvent) -> None:
        """Record an event, as the core's log: in memory, and on disk if there is a log there."""
        self.events.append(event)
        if self.writer is not None:
            self.writer.append(event)

    def flush(self) -> None:
        if self.writer is not None:
            self.writer.flush()

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()

    def kill(self) -> None:
        """End like a killed process: recorded events are in the files, and the log is not closed."""
        assert self.writer is not None
        self.writer.flush()
        self.writer._place.segment.close()

    # What an engine does. Every operation takes any two numbers.

    def store(self, one: int, other: int) -> None:
        """Store blocks with one owner, two owners or none."""
        keys = prompt(one)[: 1 + other % PROMPT_BLOCKS]
        owners = [(request(other), len(keys))]
        if other % 4 == 1 and len(keys) > 1:
            owners = [(request(one), 1), (request(other), len(keys) - 1)]
        if self.config.store_threshold > 1:
            self.core.count_offers(keys)
            keys = [offered for offered in keys if self.core.offered_enough(offered)]
            owners = []
        elif other % 7 == 0:
            owners = []
        self.core.store(tuple(owners), keys, [block for k in keys for block in self.home(k)])

    def home(self, wanted: bytes) -> range:
        """Return the device blocks in which the engine always computes this key; several keys share them."""
        chunk = self.config.blocks_per_chunk
        first = int.from_bytes(wanted[:4], "big") % (self.core.config.device_blocks // chunk) * chunk
        return range(first, first + chunk)

    def offer(self, one: int, other: int) -> None:
        """Advance the request's cursors, in one or both of its KV cache groups."""
        entry = self.core.ledger.requests.get(request(one))
        if entry is None:
            self.core.arrive(request(one))
        elif entry.state is RequestState.FINISHED:
            return
        settled, offered = (
            ((0, 0), (0, 0)) if entry is None or not entry.offered else (entry.settled, entry.offered)
        )
        last = offered[0] + other % 3, offered[1] + other % 2
        end = min(last[0], settled[0] + other % 4), min(last[1], settled[1] + other % 3)
        self.core.advance([(request(one), end, last)])

    def rewrite(self, one: int, other: int) -> None:
        blocks = self.core.config.device_blocks
        self.core.rewrite(range(one % blocks, blocks)[: 1 + other])

    def match(self, one: int, other: int) -> None:
        self.core.match(request(one), prompt(other))

    def load(self, one: int, other: int) -> None:
        """Load a match, sometimes into blocks that its keys are stored from: these may be offered again."""
        ledger, chunk = self.core.ledger, self.config.blocks_per_chunk
        entry = ledger.requests.get(request(one))
        free = self.unleased()
        wanted = min(1 + other % PROMPT_BLOCKS, len(free) // chunk)
        pins = [] if entry is None else to_list(entry.pins)[:wanted]
        parts = range(other % chunk, len(pins) * chunk) if other % 2 and pins else range(0)
        blocks = free[: len(pins) * chunk]
        homes = [block for slot in pins for block in self.home(ledger.key_of[slot])]
        if other % 4 < 2 and len(set(homes)) == len(homes) and set(homes) <= set(free):
            blocks = homes
        self.core.admit(request(one), 2, 0, 2, resumed=request(one) in self.admitted)
        self.admitted.add(request(one))
        self.core.prepare_load(request(one), [blocks[part] for part in parts] if parts else blocks, parts)

    def unleased(self) -> list[int]:
        return [block for block, word in enumerate(self.core.ledger.leases.words) if word == 0]

    def submit(self, one: int, _other: int) -> None:
        planned = [id for id, t in self.core.ledger.transfers.items() if t.state is TransferState.PLANNED]
        self.core.submit(planned[: 1 + one % 3])

    def report(self, one: int, other: int) -> None:
        self._report(one, other, True)

    def fail(self, one: int, other: int) -> None:
        self._report(one, other, False)

    def _report(self, one: int, other: int, good: bool) -> None:
        live = list(self.core.ledger.transfers)
        if live:
            self.core.report(live[one % len(live)], other % self.config.workers, good)

    def misreport(self, one: int, other: int) -> None:
        self.core.report(one, other, True)

    def finish(self, one: int, other: int) -> None:
        self.core.finish(request(one), aborted=other % 2 == 1)

    def preempt(self, one: int, _other: int) -> None:
        self.core.preempt(request(one))

    def release(self, one: int, _other: int) -> None:
        self.core.release(request(one))

    def touch(self, one: int, _other: int) -> None:
        self.core.touch(prompt(one))

    def step(self, _one: int, _other: int) -> None:
        self.core.tick()
        self.core.lose_overdue()
        self.core.end_step()

    def reset(self, _one: int, _other: int) -> None:
        self.core.reset()

    def cancel(self, one: int, _other: int) -> None:
        self._with_live(self.core.cancel, one)

    def lose(self, one: int, _other: int) -> None:
        """Lose a transfer, once per life: its slots are never used again."""
        if BlockState.RETIRED not in [word & STATE_MASK for word in self.core.ledger.blocks.words]:
            self._with_live(self.core.lose, one)

    def _with_live(self, act: Callable[[int], object], one: int) -> None:
        live = list(self.core.ledger.transfers)
        if live:
            act(live[one % len(live)])

    def engine_waits(self, _one: int, _other: int) -> None:
        self.core.flush()

    def restart(self, one: int, other: int) -> None:
        """Restart the process; without a log on disk, perhaps with another device pool and policy."""
        config = self.core.config
        more: dict[str, Any] = {}
        if self.writer is None:
            if other % 4 == 1:
                more = {"device_blocks": config.device_blocks + one % 3}
            if other % 4 == 0:
                more["policy"] = sorted(POLICIES)[one % len(POLICIES)]
        self.core = Offloader.restarted(
            self.core.ledger,
            msgspec.structs.replace(config, **more),
            self,
            ended="" if other % 2 else "the process was killed",
            clock_ns=self._clock_ns,
        )

    def drive(self, operations: Iterable[tuple[str, int, int]]) -> Life:
        for name, one, other in operations:
            getattr(self, name)(one, other)
        return self

    def drain(self) -> Life:
        """Let all copies end and all requests finish."""
        core = self.core
        core.submit([id for id, t in core.ledger.transfers.items() if t.state is TransferState.PLANNED])
        for id in list(core.ledger.transfers):
            for worker in range(self.config.workers):
                core.report(id, worker, True)
        for name in list(core.ledger.requests):
            core.finish(name)
        core.end_step()
        return self

    # A life by hand.

    def stored(self, name: str, keys: Sequence[bytes], blocks: Sequence[int]) -> int:
        """Store these keys for a request, until all workers have reported. Returns the transfer."""
        plan = self.core.prepare_store(name, keys, blocks).job
        assert plan is not None
        return self.ended(plan)

    def ended(self, plan: TransferJob | None, good: bool = True) -> int:
        """Submit a plan, and report it from every worker."""
        assert plan is not None
        self.core.submit([plan.transfer])
        for worker in range(self.config.workers):
            self.core.report(plan.transfer, worker, good)
        return plan.transfer

    def lost(self, plan: TransferJob | None) -> int:
        """Submit a plan, and lose it a tick later."""
        assert plan is not None
        self.core.submit([plan.transfer])
        self.core.tick()
        self.core.lose(plan.transfer)
        return plan.transfer


def request(number: int) -> str:
    return f"r{number % REQUESTS}"


def live(life: Life, direction: Direction) -> list[int]:
    """Return the ids of the live transfers in one direction."""
    return [id for id, one in life.core.ledger.transfers.items() if one.direction is direction]


OFTEN = ("store", "match", "load", "submit", "report", "report", "step", "finish", "offer")
SELDOM = (
    "fail",
    "misreport",
    "preempt",
    "release",
    "touch",
    "reset",
    "cancel",
    "lose",
    "engine_waits",
    "rewrite",
    "restart",
)
Operations = list[tuple[str, int, int]]
POLICY_NAMES = st.sampled_from(sorted(POLICIES))
CONFIGS = st.fixed_dictionaries(
    {
        "policy": POLICY_NAMES,
        "workers": st.integers(1, 3),
        "blocks_per_chunk": st.integers(1, 3),
        "store_threshold": st.integers(1, 2),
        "transfer_ticks": st.sampled_from((0, 4, 10_000)),
    }
)
NUMBERS = st.integers(0, 29)
OPERATION = st.tuples(st.sampled_from(OFTEN * 4 + SELDOM), NUMBERS, NUMBERS)
OPERATIONS = st.one_of(st.lists(OPERATION, max_size=20), st.lists(OPERATION, min_size=40, max_size=120))
"""Short runs, which shrink well, and runs long enough to fill a small pool and reset it."""


# Lives that tests tell about.


def random_life(seed: int, count: int, log: Path | None = None, **options: Any) -> Life:
    """Run many random operations of every kind. Returns the life."""
    rng = random.Random(seed)
    life = Life(log, **options)
    names = OFTEN * 4 + SELDOM
    return life.drive((rng.choice(names), rng.randrange(30), rng.randrange(30)) for _ in range(count))


def written(directory: Path, life: Life, events: Sequence[OffloadingEvent]) -> Path:
    """Write these events, perhaps illegal ones, as a log with new numbers."""
    writer = LogWriter(
        directory, config=life.config, snapshot=lambda: WholeState(b""), durability="none", clock=lambda: 7
    )
    with writer:
        for number, event in enumerate(events, 1):
            writer.append(msgspec.structs.replace(event, seq=number))
    return directory


def scene(**config: Any) -> Life:
    """Return a core with two stored blocks of `r0`, matched by `r1`, and a store of `r2` in flight."""
    life = Life(**{"host_blocks": 4, "workers": 1, "defer_ticks": 0, **config})
    life.stored("r0", [key(0), key(1)], [0, 1])
    life.core.finish("r0")
    life.core.match("r1", [key(0), key(1)])
    plan = life.core.prepare_store("r2", [key(2), key(3)], [2, 3]).job
    assert plan is not None
    life.core.submit([plan.transfer])
    return life


def head(life: Life) -> tuple[int, int, int]:
    return life.core.ledger.seq + 1, 0, 0


def after_reset(life: Life) -> list[OffloadingEvent]:
    seq, step, wall = head(life)
    return [ev.CacheReset(seq, step, wall, 1), ev.HitMatched(seq + 1, step, wall, "r3", (0,))]


def full_life(log: Path) -> Life:
    """Run stores, matches, loads, a failure, an eviction, a rejected report and a reset, in sequence."""
    life = Life(log, host_blocks=3, workers=2, defer_ticks=0)
    core = life.core
    life.stored("r0", [key(0), key(1)], [0, 1])
    core.report(core.ledger.seq, 0, True)
    core.match("r1", [key(0), key(1)])
    life.ended(core.prepare_load("r1", [5]))
    plan = core.prepare_store("r1", [key(2)], [2]).job
    assert plan is not None
    core.report(plan.transfer, 1, True)
    core.submit([plan.transfer])
    core.report(plan.transfer, 0, True)
    core.report(plan.transfer, 1, False)
    life.stored("r2", [key(3), key(4)], [3, 4])
    core.reset()
    life.stored("r2", [key(5), key(6), key(7)], [3, 4, 5])
    life.stored("r3", [key(8)], [3])
    for name in ("r0", "r1", "r2", "r3"):
        core.finish(name)
    core.end_step()
    life.close()
    return life


def offered_life(log: Path) -> Life:
    """Run a core with two device blocks per slot that stores at the second offer.

    The log has cursors, a partial load, a reset after which blocks are offered again, rewritten device
    blocks, and lost transfers.
    """
    config = {"host_blocks": 8, "device_blocks": 16, "blocks_per_chunk": 2, "store_threshold": 2}
    life = Life(log, workers=1, defer_ticks=0, **config)
    core = life.core
    core.arrive("r0")
    core.arrive("r1")
    core.count_offers([key(0), key(1), key(9)])
    core.skip((("r0", 2), ("r1", 1)), [key(0), key(1), key(9)], SkipReason.BELOW_THRESHOLD)
    core.advance([("r0", (0, 0), (2, 1))])
    core.count_offers([key(0), key(1)])
    life.stored("r0", [key(0), key(1)], [0, 1, 2, 3])
    core.advance([("r0", (2, 1), (2, 2)), ("r1", (0,), (1,))])
    late = core.prepare_store("r0", [key(2)], [4, 5]).job
    assert late is not None
    core.submit([late.transfer])
    core.tick()
    core.report(late.transfer, 0, True)
    core.preempt("r0")
    core.match("r1", [key(0), key(1)])
    life.ended(core.prepare_load("r1", [6, 7, 8], [0, 1, 3]))
    core.reset()
    core.prepare_store("r1", [key(0)], [6, 7])
    core.rewrite([6, 8])
    life.stored("r1", [key(5)], [6, 7])
    life.lost(core.prepare_store("r2", [key(6)], [9, 10]).job)
    life.stored("r2", [key(7)], [9, 10])
    core.match("r3", [key(5)])
    life.lost(core.prepare_load("r3", [12, 13]))
    for name in ("r0", "r1", "r3"):
        core.finish(name)
    core.end_step()
    life.close()
    return life


def gapped(log: Path) -> Life:
    """Write a log on a disk that is full for a while: events are missing, then the log continues."""
    life = Life(log, writer={"on_failure": "continue", "segment_bytes": 3000})
    rng = random.Random(8)
    names = OFTEN * 4 + SELDOM
    for room in (1 << 20, 0, 1 << 20):
        with disk(room):
            life.drive((rng.choice(names), rng.randrange(30), rng.randrange(30)) for _ in range(700))
    life.close()
    return life


def story_life(log: Path) -> Life:
    """Run a pool of two slots: r1 stores keys 1 and 2; r2 loads key 1; r3 stores keys 3 and 4, which evicts
    both slots; r4 misses key 1."""
    life = Life(log, host_blocks=2, workers=1, defer_ticks=0)
    core = life.core
    core.arrive("r1")
    life.stored("r1", [key(1), key(2)], [11, 12])
    core.finish("r1")
    core.end_step()
    core.match("r2", [key(1), key(7)])
    life.ended(core.prepare_load("r2", [15]))
    core.finish("r2")
    core.end_step()
    life.stored("r3", [key(3), key(4)], [13, 14])
    core.finish("r3")
    core.match("r4", [key(1)])
    core.finish("r4", aborted=True)
    core.end_step()
    life.close()
    return life
