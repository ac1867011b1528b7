"""What the tests of replay share: a life of the core, driven by numbers, and the log of it."""

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
from kvsm.events import Direction, OffloadConfig, OffloadingEvent
from kvsm.log import LogWriter
from kvsm.offloader import Offloader
from kvsm.plan import TransferPlan
from kvsm.snapshot import snapshot
from kvsm.states.block import BlockState
from kvsm.states.transfer import TransferState
from kvsm.states.words import STATE_MASK

PROMPTS, PROMPT_BLOCKS, REQUESTS = 5, 6, 6


def key(number: int) -> bytes:
    """A key as engines make them: 32 bytes of hash, 4 of group index."""
    return number.to_bytes(4, "big") + bytes(28) + bytes(4)


def prompt(number: int) -> list[bytes]:
    """The keys of a prompt; its first two blocks are shared with the next prompt but one."""
    shared = [key(1000 + number % 2), key(1002 + number % 2)]
    return shared + [key(number * PROMPT_BLOCKS + block) for block in range(PROMPT_BLOCKS - 2)]


class Events(list[OffloadingEvent]):
    """A log in memory."""

    def flush(self) -> None: ...


class Life:
    """An offloader under an engine that does what it is told, sensible or not."""

    def __init__(self, log: Path | None = None, writer: dict[str, Any] | None = None, **config: Any) -> None:
        defaults = {"host_blocks": 10, "device_blocks": 24, "workers": 2, "defer_ticks": 3}
        self.config = OffloadConfig(**{**defaults, **config})
        self.events = Events()
        self.writer = None if log is None else self._open(log, writer or {})
        ticks = count(1)
        self.core = Offloader(self.config, self, clock_ns=lambda: next(ticks))

    def _open(self, log: Path, options: dict[str, Any]) -> LogWriter:
        options = {"durability": "none", "clock": lambda: 7, **options}
        return LogWriter(log, config=self.config, snapshot=lambda: snapshot(self.core.ledger), **options)

    def append(self, event: OffloadingEvent) -> None:
        """The core's log: what is recorded, here and on disk."""
        self.events.append(event)
        if self.writer is not None:
            self.writer.append(event)

    def flush(self) -> None:
        if self.writer is not None:
            self.writer.flush()

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()

    # What an engine does. Every operation takes two numbers, and means something for any of them.

    def store(self, one: int, other: int) -> None:
        keys = prompt(one)[: 1 + other % PROMPT_BLOCKS]
        blocks = [int.from_bytes(k[:4], "big") % self.config.device_blocks for k in keys]
        self.core.prepare_store(request(other), keys, blocks)

    def match(self, one: int, other: int) -> None:
        self.core.match(request(one), prompt(other))

    def load(self, one: int, other: int) -> None:
        entry = self.core.ledger.requests.get(request(one))
        wanted = 0 if entry is None else min(len(entry.pins), 1 + other % PROMPT_BLOCKS)
        self.core.prepare_load(request(one), self.unleased()[:wanted])

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
        self.core.end_step()

    def reset(self, _one: int, _other: int) -> None:
        self.core.reset()

    def cancel(self, one: int, _other: int) -> None:
        self._with_live(self.core.cancel, one)

    def lose(self, one: int, _other: int) -> None:
        """Once a life: what is lost is never used again."""
        if BlockState.RETIRED not in [word & STATE_MASK for word in self.core.ledger.blocks.words]:
            self._with_live(self.core.lose, one)

    def _with_live(self, act: Callable[[int], object], one: int) -> None:
        live = list(self.core.ledger.transfers)
        if live:
            act(live[one % len(live)])

    def engine_waits(self, _one: int, _other: int) -> None:
        self.core.flush()

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
        """Store these keys for a request, to the end; returns the transfer."""
        plan = self.core.prepare_store(name, keys, blocks).plan
        assert plan is not None
        return self.ended(plan)

    def ended(self, plan: TransferPlan | None, good: bool = True) -> int:
        """Submit a plan, and let every worker report it."""
        assert plan is not None
        self.core.submit([plan.transfer])
        for worker in range(self.config.workers):
            self.core.report(plan.transfer, worker, good)
        return plan.transfer


def request(number: int) -> str:
    return f"r{number % REQUESTS}"


def live(life: Life, direction: Direction) -> list[int]:
    """Ids of the live transfers in one direction."""
    return [id for id, one in life.core.ledger.transfers.items() if one.direction is direction]


OFTEN = ("store", "match", "load", "submit", "report", "report", "step", "finish")
SELDOM = ("fail", "misreport", "preempt", "release", "touch", "reset", "cancel", "lose", "engine_waits")
Operations = list[tuple[str, int, int]]
POLICIES = st.sampled_from(("lru", "arc", "s3fifo", "slru"))
NUMBERS = st.integers(0, 29)
OPERATION = st.tuples(st.sampled_from(OFTEN * 4 + SELDOM), NUMBERS, NUMBERS)
OPERATIONS = st.one_of(st.lists(OPERATION, max_size=20), st.lists(OPERATION, min_size=40, max_size=120))
"""Short lives, which shrink well, and lives long enough for a small pool to be full and to be reset."""


# Lives that tests tell about.


def random_life(seed: int, count: int, log: Path | None = None, **options: Any) -> Life:
    """A long life of every kind of operation."""
    rng = random.Random(seed)
    life = Life(log, **options)
    names = OFTEN * 4 + SELDOM
    return life.drive((rng.choice(names), rng.randrange(30), rng.randrange(30)) for _ in range(count))


def written(directory: Path, life: Life, events: Sequence[OffloadingEvent]) -> Path:
    """A log of these events, whatever they say, numbered anew."""
    writer = LogWriter(
        directory, config=life.config, snapshot=lambda: b"", durability="none", clock=lambda: 7
    )
    with writer:
        for number, event in enumerate(events, 1):
            writer.append(msgspec.structs.replace(event, seq=number))
    return directory


def scene(**config: Any) -> Life:
    """Two blocks stored for `r0`, matched by `r1`, and a store of two more in flight for `r2`."""
    life = Life(**{"host_blocks": 4, "workers": 1, "defer_ticks": 0, **config})
    life.stored("r0", [key(0), key(1)], [0, 1])
    life.core.finish("r0")
    life.core.match("r1", [key(0), key(1)])
    plan = life.core.prepare_store("r2", [key(2), key(3)], [2, 3]).plan
    assert plan is not None
    life.core.submit([plan.transfer])
    return life


def head(life: Life) -> tuple[int, int, int]:
    return life.core.ledger.seq + 1, 0, 0


def after_reset(life: Life) -> list[OffloadingEvent]:
    seq, step, wall = head(life)
    return [ev.CacheReset(seq, step, wall, 1), ev.HitMatched(seq + 1, step, wall, "r3", (0,))]


def full_life(log: Path) -> Life:
    """Stores, matches, loads, a failure, an eviction, a rejected report and a reset, one after another."""
    life = Life(log, host_blocks=3, workers=2, defer_ticks=0)
    core = life.core
    life.stored("r0", [key(0), key(1)], [0, 1])
    core.report(core.ledger.seq, 0, True)
    core.match("r1", [key(0), key(1)])
    life.ended(core.prepare_load("r1", [5]))
    plan = core.prepare_store("r1", [key(2)], [2]).plan
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


def gapped(log: Path) -> Life:
    """A log on a disk that was full for a while: events are missing, then it goes on."""
    life = Life(log, writer={"on_failure": "continue", "segment_bytes": 3000})
    rng = random.Random(8)
    names = OFTEN * 4 + SELDOM
    for room in (1 << 20, 0, 1 << 20):
        with disk(room):
            life.drive((rng.choice(names), rng.randrange(30), rng.randrange(30)) for _ in range(700))
    life.close()
    return life


def story_life(log: Path) -> Life:
    """Two slots. r1 stores keys 1 and 2; r2 loads key 1; r3 stores keys 3 and 4, for which both go; r4 asks
    for key 1, and misses."""
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
