"""What the tests of replay share: a life of the core, driven by numbers, and the log of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

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
NUMBERS = st.integers(0, 29)
OPERATION = st.tuples(st.sampled_from(OFTEN * 4 + SELDOM), NUMBERS, NUMBERS)
OPERATIONS = st.one_of(st.lists(OPERATION, max_size=20), st.lists(OPERATION, min_size=40, max_size=120))
"""Short lives, which shrink well, and lives long enough for a small pool to be full and to be reset."""
