"""A scene describes a run. A background fills it in, incidents disturb it, and then it is played.

`play` makes the log: the real core and scheduler, the serving engine, scripted copies and a dated clock
(`incidents.Rig`). A scene changes the engine, the clock, the ranks, the workload or the configuration. It
never writes an event.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
from incidents import KEPT, Copying, Outcome, Rig, Script, ScriptedCopies, merged

from kvsm.core.plan import TransferJob, WorkerReport
from kvsm.errors import KvsmError, LogWriteFailed
from kvsm.events import Direction
from kvsm.identity import KeptPools
from kvsm.ids import count
from kvsm.serving.serving_engine import STEP_MS, TOKEN_MS
from kvsm.serving.traces import TraceRequest

BLOCK_BYTES = 8 << 20
"""The shard of one rank of 512 tokens: 16 KiB a token."""

COPY_MS, BLOCK_MS = 4.0, 0.4
"""The usual time of a copy: a fixed part, and a part for each block, which is 21 GB/s."""

DISK_TIMES = 4.0
"""A copy from or to the disk takes this many times as long as one between device and host: 5 GB/s."""

PATIENCE_S = 75
"""A run ends at most this long after the last arrival: a disturbed engine may never become idle."""


class QueuedCopies(ScriptedCopies):
    """Copies of one rank in one direction that wait for each other, and are measured, as on a GPU.

    A rank copies one job at a time in each direction. Its reports say how long the copy was queued, and how
    long it took.
    """

    def __init__(self, clock: Any, workers: int, script: Script, seed: int) -> None:
        super().__init__(clock, workers, script, seed)
        self._free_ms: dict[tuple[int, Direction], float] = {}

    def _begin(self, job: TransferJob, rank: int) -> None:
        now_ms, lane = self._clock.now_ms, (rank, job.direction)
        usual_ms = (COPY_MS + BLOCK_MS * count(job.device_blocks)) * self._random.lognormvariate(0, 0.25)
        outcome = self._script(Copying(job, rank, usual_ms, now_ms, self._random))
        if outcome.ms is None:
            return
        begun_ms = max(now_ms, self._free_ms.get(lane, 0.0))
        self._free_ms[lane] = ended_ms = begun_ms + outcome.ms
        queued_us, copied_us = int((begun_ms - now_ms) * 1000), int(outcome.ms * 1000)
        report = WorkerReport(job.transfer, rank, not outcome.error, outcome.error, queued_us, copied_us)
        self._due += [(ended_ms, report)] * outcome.reports


Change = Callable[[Copying, Outcome], Outcome]
"""Changes how a copy ends."""


@dataclass
class Process:
    """One process of a scene. The next one continues its log.

    until_s: it serves the requests that arrive before this time of the workload; None: all.
    end: `close` after all its requests, `kill` or `error` at that time.
    error: what the engine ends with.
    pools: the pools that it finds and leaves.
    core, options: overrides for this process.
    """

    until_s: float | None = None
    end: str = "close"
    error: str = ""
    pools: KeptPools = KEPT
    core: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Scene:
    """A run that can still be changed.

    random: draws everything that the background and the kinds leave open.
    trace: the requests.
    core, scheduler, writer, options, jumps, disk_slots: for `Rig`.
    copies: the changes to each copy between device and host, in order.
    disk_copies: the changes to each copy between host and disk, in order.
    prepare: called with each `Rig` before it serves.
    each: called with the `Rig` before each step.
    processes: the processes that follow each other.
    bugs: plant a bug until the end of the scene.
    undo: contexts that hooks have entered; they are left at the end of the scene.
    after: called with the directory of the log after the end.
    """

    random: Random
    trace: list[TraceRequest]
    options: dict[str, Any] = field(default_factory=dict)
    core: dict[str, Any] = field(default_factory=dict)
    scheduler: dict[str, Any] = field(default_factory=dict)
    writer: dict[str, Any] = field(default_factory=dict)
    jumps: list[tuple[float, float]] = field(default_factory=list)
    disk_slots: int = 0
    copies: list[Change] = field(default_factory=list)
    disk_copies: list[Change] = field(default_factory=list)
    prepare: list[Callable[[Rig], None]] = field(default_factory=list)
    each: list[Callable[[Rig], None]] = field(default_factory=list)
    processes: list[Process] = field(default_factory=lambda: [Process()])
    bugs: list[Callable[[pytest.MonkeyPatch], None]] = field(default_factory=list)
    undo: ExitStack = field(default_factory=ExitStack)
    after: list[Callable[[Path], None]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """The time of the last arrival (s)."""
        return self.trace[-1].arrival_ms / 1000

    def moment(self, earliest: float, latest: float) -> float:
        """Draw a time between these shares of the workload (s)."""
        return self.seconds * self.random.uniform(earliest, latest)

    @property
    def blocks(self) -> int:
        """The number of different blocks in all prompts."""
        return len({block for request in self.trace for block in request.hash_ids})

    @property
    def reused(self) -> int:
        """The number of different blocks that at least two prompts have."""
        seen: set[int] = set()
        twice: set[int] = set()
        for request in self.trace:
            twice.update(seen.intersection(request.hash_ids))
            seen.update(request.hash_ids)
        return len(twice)

    @property
    def largest(self) -> int:
        """The most blocks that one request needs on the device, with its output."""
        return max((one.input_length + one.output_length) // 512 + 2 for one in self.trace)

    @property
    def running(self) -> int:
        """About the most different device blocks of the requests that run at one time."""
        most, running = 0, list[tuple[float, TraceRequest]]()
        for one in self.trace:
            ended_ms = one.arrival_ms + STEP_MS * (1 + one.output_length) + TOKEN_MS * one.input_length
            running = [(until_ms, other) for until_ms, other in running if until_ms > one.arrival_ms]
            running.append((ended_ms, one))
            prompts = {block for _, other in running for block in other.hash_ids}
            most = max(most, len(prompts) + sum(1 + other.output_length // 512 for _, other in running))
        return most

    def add(self, *traces: Sequence[TraceRequest]) -> None:
        """Add requests to the workload."""
        self.trace = merged(self.trace, *traces)

    def give_device(self, least: float, most: float) -> None:
        """Give the device between `least` and `most` times the blocks of the running requests."""
        self.options["device_blocks"] = self.largest + int(self.running * self.random.uniform(least, most))

    def once(self, at_s: float, act: Callable[[Rig], object]) -> None:
        """Act once at this time of the first process."""
        due = [at_s]

        def each(rig: Rig) -> None:
            if due and rig.clock.now_ms >= 1000 * due[0]:
                due.clear()
                act(rig)

        self.each.append(each)

    def script(self, copying: Copying) -> Outcome:
        """Decide how a copy between device and host ends."""
        return _changed(self.copies, copying, Outcome(copying.usual_ms))

    def disk_script(self, copying: Copying) -> Outcome:
        """Decide how a copy between host and disk ends."""
        return _changed(self.disk_copies, copying, Outcome(DISK_TIMES * copying.usual_ms))


def _changed(changes: Sequence[Change], copying: Copying, outcome: Outcome) -> Outcome:
    for change in changes:
        outcome = change(copying, outcome)
    return outcome


def slower(outcome: Outcome, times: float) -> Outcome:
    """Make a copy take so many times as long."""
    return outcome if outcome.ms is None else outcome._replace(ms=outcome.ms * times)


class Played(NamedTuple):
    """What the engines of a scene counted, one for each process."""

    directory: Path
    rigs: list[Rig]


def play(scene: Scene, directory: Path, seed: int) -> Played:
    """Make the log of a scene in this new directory."""
    rigs: list[Rig] = []
    with ExitStack() as stack:
        monkeypatch = stack.enter_context(pytest.MonkeyPatch.context())
        for bug in scene.bugs:
            bug(monkeypatch)
        stack.enter_context(scene.undo)
        since_s, after_s = 0.0, 0
        for life, process in enumerate(scene.processes):
            until_s = process.until_s or float("inf")
            part = [one for one in scene.trace if since_s * 1000 <= one.arrival_ms < until_s * 1000]
            moved = [_earlier(one, since_s) for one in part]
            rig = _rig(scene, process, directory, seed + life, moved, after_s)
            rigs.append(rig)
            _serve(scene, process, rig, until_s - since_s)
            since_s = until_s
            after_s += ceil(rig.clock.now_ms / 1000) + scene.random.randrange(5, 30)
    for change in scene.after:
        change(directory)
    return Played(directory, rigs)


def _earlier(request: TraceRequest, by_s: float) -> TraceRequest:
    arrival_ms = request.arrival_ms - by_s * 1000
    return TraceRequest(arrival_ms, request.input_length, request.output_length, request.hash_ids)


def _rig(
    scene: Scene, process: Process, directory: Path, seed: int, trace: list[TraceRequest], after_s: int
) -> Rig:
    options = {"block_bytes": BLOCK_BYTES, **scene.options, **process.options}
    rig = Rig(
        directory,
        seed,
        trace,
        script=scene.script,
        core={**scene.core, **process.core},
        scheduler=scene.scheduler,
        writer=scene.writer,
        after_s=after_s if len(scene.processes) > 1 else None,
        pools=process.pools,
        copies=QueuedCopies,
        jumps=scene.jumps,
        disk_slots=scene.disk_slots,
        disk_script=scene.disk_script,
        **options,
    )
    for prepare in scene.prepare:
        prepare(rig)
    return rig


def _serve(scene: Scene, process: Process, rig: Rig, seconds: float) -> None:
    """Serve one process's part of the workload, and end it."""

    def each(_step: int) -> None:
        for change in scene.each:
            change(rig)

    longest = scene.seconds + PATIENCE_S
    try:
        rig.serve(min(seconds, longest) if process.end != "close" else longest, each)
    except KvsmError as error:  # A planted bug may show while the engine runs.
        rig.close(error)
        return
    if process.end == "kill":
        rig.kill()
    else:
        with suppress(LogWriteFailed):
            rig.close(RuntimeError(process.error) if process.end == "error" else None)
