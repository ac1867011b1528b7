"""Parts of kvsm whose copies fail, end late or are never reported. vLLM imports this module by name.

They are for an engine in one process that runs for a long time. So the faults are rare, and their number is
bounded where each of them costs memory for good.
"""

from __future__ import annotations

import time
from random import Random
from typing import Any

import msgspec
from faulty_connectors import SteeredConnector, half_of

from kvsm.copies import CopyEngine, CopyResult
from kvsm.copies.copy_engine import WrappedCopyEngine
from kvsm.core.plan import TransferJob
from kvsm.events import Direction
from kvsm.vllm.rank_copies import RankCopies

TIMEOUT_S = 2.0
"""The `transfer_timeout_s` of these engines."""

LATE_AFTER_S = 3 * TIMEOUT_S
"""A report that is lost may still come after this time. It is rejected then."""

MOST_POLLS = 6
"""How many polls a late report waits."""


class Faults(msgspec.Struct, kw_only=True):
    """What goes wrong.

    failing: share of transfers that copy half of their blocks, and fail.
    late: share of transfers whose report waits for some polls.
    lost: direction -> how many reports are lost, spread over the run.
    over_s: length of the run (s).
    most_blocks: a transfer with more blocks is not lost.
    """

    failing: float = 0.0
    late: float = 0.0
    lost: dict[str, int] = {}
    over_s: float = 1.0
    most_blocks: int = 8


class UnreliableEngine(WrappedCopyEngine):
    """A `CopyEngine` over another one, with faults. Their kinds follow from a seed, and losses from time."""

    faults = Faults()
    """Of every engine of this process. A run sets them before it makes its engine."""

    made: UnreliableEngine | None = None
    """The engine that was made last."""

    def __init__(self, engine: CopyEngine, seed: int = 0) -> None:
        super().__init__(engine)
        self._random = Random(seed)
        self._began = time.monotonic()
        self._jobs: dict[int, TransferJob] = {}
        self._doomed: set[int] = set()
        self._late: list[tuple[int, CopyResult]] = []
        """Reports that wait for some more polls."""
        self._silent: list[tuple[float, CopyResult]] = []
        """Reports that were lost, and when they come after all. Every second one never comes."""
        self.lost = dict.fromkeys(Direction, 0)
        UnreliableEngine.made = self

    def submit(self, job: TransferJob, after: Any = None) -> None:
        self._jobs[job.transfer] = job
        if self._random.random() < self.faults.failing:
            self._doomed.add(job.transfer)
            job = half_of(job)
        self._engine.submit(job, after)

    def poll(self) -> list[CopyResult]:
        now = time.monotonic()
        told = [result for due, result in self._silent if due <= now]
        self._silent = [(due, result) for due, result in self._silent if due > now]
        told += [result for polls, result in self._late if polls <= 1]
        self._late = [(polls - 1, result) for polls, result in self._late if polls > 1]
        for result in self._engine.poll():
            job = self._jobs.pop(result.transfer)
            if result.transfer in self._doomed:
                self._doomed.remove(result.transfer)
                result = msgspec.structs.replace(result, good=False, error="made to fail", bytes=0)
            if self._is_lost(job, now):
                self.lost[job.direction] += 1
                if sum(self.lost.values()) % 2:
                    self._silent.append((now + LATE_AFTER_S, result))
            elif self._random.random() < self.faults.late:
                self._late.append((self._random.randint(1, MOST_POLLS), result))
            else:
                told.append(result)
        return told

    def _is_lost(self, job: TransferJob, now: float) -> bool:
        """Losses are spread over the run, so that the first ones come early and none comes at its end."""
        number = self.faults.lost.get(job.direction.name, 0)
        due = number * (now - self._began) / (0.9 * self.faults.over_s)
        few_blocks = len(job.pairs()[0]) <= self.faults.most_blocks
        return few_blocks and self.lost[job.direction] < min(number, int(due + 0.5))


def use_all_of(copies: RankCopies) -> None:
    """Touch the whole host pool: else the process would grow until each slot has been used."""
    copies.pool.blocks[:] = 0


class UnreliableConnector(SteeredConnector):
    """Its copies are an `UnreliableEngine`'s."""

    def wrap(self, engine: CopyEngine, rank: int) -> CopyEngine:
        use_all_of(self._side._copies)
        return UnreliableEngine(engine, rank)


FAULTS = Faults(failing=0.03, late=0.2, lost={"STORE": 40, "LOAD": 4})
"""What goes wrong in a long run."""
