"""A copy engine with copies that hang until long after they are given up, and a clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random
from typing import Any

from kvsm.copies import CopyEngine, CopyResult
from kvsm.copies.copy_engine import WrappedCopyEngine
from kvsm.core.plan import TransferJob
from kvsm.events import Direction

TIMEOUT_S = 20.0
"""The `transfer_timeout_s` of engines whose copies hang. A step takes one second."""

LONGEST_COPY_S = 4.0
"""The longest time of a copy that does not hang."""

NEVER = float("inf")

SPOILED = 0x55
"""The bytes that a hanging copy writes at last. No word has such bytes."""


class Clock:
    """A clock that a test advances (s)."""

    def __init__(self) -> None:
        self.now = 0.0

    def read(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class HangingCopyEngine(WrappedCopyEngine):
    """A `CopyEngine` that lets a share of its transfers hang.

    A hanging transfer ends three to six timeouts later, or never. Then it writes wrong bytes to all its
    targets, and reports that it was good: a later use of this memory finds wrong words.

    pools: the tensors of the device, and those of the host; a row of each is a block.
    never: whether a transfer that hangs ends only with `let_go`.
    spare_blocks: how many device blocks the engine can lose and still serve its largest request.
    """

    def __init__(
        self,
        engine: CopyEngine,
        pools: tuple[Sequence[Any], Sequence[Any]],
        clock: Clock,
        random: Random,
        share: float,
        spare_blocks: int,
        never: bool = False,
    ) -> None:
        super().__init__(engine)
        self._clock, self._random = clock, random
        self._devices, self._hosts = pools
        self._share, self._never = share, never
        self._spare_blocks = spare_blocks
        self.hanging: dict[int, tuple[float, TransferJob, Any]] = {}
        """Transfer -> (when it ends, its job, its mark)."""
        self._polled_at = clock.now

    def submit(self, job: TransferJob, after: Any = None) -> None:
        lost_blocks = len(job.pairs()[0]) if job.direction is Direction.LOAD else 0
        if self._random.random() >= self._share or lost_blocks > self._spare_blocks:
            self._engine.submit(job, after)
            return
        self._spare_blocks -= lost_blocks
        ends = self._clock.now + TIMEOUT_S * (3 + 3 * self._random.random())
        if self._never or self._random.random() < 0.3:
            ends = NEVER
        self.hanging[job.transfer] = (ends, job, after)

    def poll(self) -> list[CopyResult]:
        if self._clock.now - self._polled_at > LONGEST_COPY_S:
            # Another rank has waited for a hanging copy meanwhile.
            self._engine.drain()
        self._polled_at = self._clock.now
        late = [job for ends, job, _ in self.hanging.values() if ends <= self._clock.now]
        results = []
        for job in late:
            del self.hanging[job.transfer]
            self._spoil(job)
            results.append(CopyResult(job.transfer, job.direction, True))
        return results + self._engine.poll()

    def let_go(self) -> None:
        """Carry out the hanging copies, with the right bytes."""
        for _, job, after in self.hanging.values():
            self._engine.submit(job, after)
        self.hanging.clear()

    def _spoil(self, job: TransferJob) -> None:
        is_load = job.direction is Direction.LOAD
        devices, hosts = job.pairs()
        for blocks in self._devices if is_load else self._hosts:
            blocks[list(devices if is_load else hosts)] = SPOILED

    def wait(self, transfers: Iterable[int]) -> None:
        self._engine.wait([transfer for transfer in transfers if transfer not in self.hanging])
