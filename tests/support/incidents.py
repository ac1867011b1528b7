"""Logs of engines in trouble, and of healthy engines, as an on-call engineer gets them.

Each log comes from the real core and the real offload scheduler, driven by the serving engine of `kvsm run`.
Two parts are scripted. Copies move no bytes; a script decides when and how they end (`ScriptedCopies`). The
clock is the workload's, and starts at a date, so latencies and times are plausible.

    directory = INCIDENTS["pool_too_small"](tmp_path / "log")

A log is made in about a second. Equal seeds give equal logs.
"""

from __future__ import annotations

import random
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from log_life import disk
from planted_bugs import plant

from kvsm.check.worlds.memory_marks import memory_marks
from kvsm.copies import PoolMark
from kvsm.core.ledger import cache
from kvsm.core.offloader import Offloader
from kvsm.core.plan import TransferJob, TransferPlan, WorkerReport
from kvsm.core.scheduler import CheckedScheduler
from kvsm.errors import KvsmError, LogWriteFailed
from kvsm.events import Direction
from kvsm.identity import KeptPools, PoolIdentity
from kvsm.ids import count
from kvsm.serving import (
    RunOptions,
    ServingEngine,
    ServingRequest,
    ServingScheduler,
    VirtualClock,
    run_disk,
    run_workload,
)
from kvsm.serving.disturbances import Disturbances
from kvsm.serving.in_flight import Latency
from kvsm.serving.offload_checks import SkipNotes
from kvsm.serving.traces import TraceRequest, multi_turn, started_blocks
from kvsm.tiers import DEFER_TICKS, DiskTier, disk_config, host_config
from kvsm.tiers.warm_restart import start

STARTED_NS = 1_763_802_000_000_000_000
"""2025-11-22T09:00:00Z."""

KEPT = KeptPools(PoolIdentity.of({"model": "m"}), (b"pool of rank 0..", b"sums of rank 0.."))
_MARKS: defaultdict[Path, list[PoolMark]] = defaultdict(memory_marks)
"""The marks of the pools, by the directory of the log."""

BLOCK_TOKENS = 512
SILENT = None
"""The time of a copy that never ends."""


class DatedClock(VirtualClock):
    """The workload's time as Unix time. Each read takes two microseconds.

    began_ns: the start time.
    jumps: when the system's clock is set, and by how much (ms).
    """

    def __init__(self, began_ns: int = STARTED_NS, jumps: Sequence[tuple[float, float]] = ()) -> None:
        super().__init__()
        self._began_ns, self._looks, self._jumps = began_ns, 0, jumps

    def now_ns(self) -> int:
        """Unix time (ns)."""
        self._looks += 1
        jumped_ms = sum(by_ms for at_ms, by_ms in self._jumps if at_ms <= self.now_ms)
        return self._began_ns + int((self.now_ms + jumped_ms) * 1e6) + 2_000 * self._looks


class Outcome(NamedTuple):
    """How one rank's part of a transfer ends.

    ms: its duration; `SILENT`: it is never reported.
    error: why it failed; empty on success.
    reports: the number of times the rank reports it.
    """

    ms: float | None
    error: str = ""
    reports: int = 1


Script = Callable[["Copying"], Outcome]


class Copying(NamedTuple):
    """The input of a script.

    usual_ms: the usual duration of such a copy.
    now_ms: the time since the start of the workload.
    """

    job: TransferJob
    rank: int
    usual_ms: float
    now_ms: float
    random: random.Random


def usual(copying: Copying) -> Outcome:
    """End each copy well, after its usual time."""
    return Outcome(copying.usual_ms)


class ScriptedCopies:
    """Stands in for the workers and the copies in flight; reports as the script decides.

    A flush need not wait: only an engine that stops stepping flushes, and these engines keep stepping.
    """

    def __init__(self, clock: VirtualClock, workers: int, script: Script, seed: int) -> None:
        self.blocks = dict.fromkeys(Direction, 0)
        self._clock, self._workers, self._script = clock, workers, script
        self._random = random.Random(f"copies {seed}")
        self._due: list[tuple[float, WorkerReport]] = []

    def __len__(self) -> int:
        return len(self._due)

    def start(self, plan: TransferPlan, _step: int) -> None:
        """Take a plan."""
        for job in (*plan.loads, *plan.stores):
            for rank in range(self._workers):
                self._begin(job, rank)

    def _begin(self, job: TransferJob, rank: int) -> None:
        now_ms, blocks = self._clock.now_ms, count(job.device_blocks)
        usual_ms = (4 + 0.4 * blocks) * self._random.uniform(0.8, 1.4)
        outcome = self._script(Copying(job, rank, usual_ms, now_ms, self._random))
        if outcome.ms is not SILENT:
            report = WorkerReport(job.transfer, rank, not outcome.error, outcome.error)
            self._due += [(now_ms + outcome.ms, report)] * outcome.reports

    def collect(self, _step: int) -> list[WorkerReport]:
        """Return the reports that are due by now."""
        now_ms = self._clock.now_ms
        come = sorted((one for one in self._due if one[0] <= now_ms), key=lambda one: one[0])
        self._due = [one for one in self._due if one[0] > now_ms]
        return [report for _, report in come]


class ScriptedDisk:
    """A disk tier whose copies are scripted. For `ServingEngine` it is a `RunDisk`.

    slots: blocks on the disk. directory: of the host's log; the disk's log is in its directory `disk`.
    """

    def __init__(
        self,
        host: Offloader,
        slots: int,
        directory: Path,
        clock: DatedClock,
        copies: ScriptedCopies,
    ) -> None:
        config = disk_config(host.config, slots)
        core = Offloader.open(config, directory / "disk", clock_ns=clock.now_ns, durability="none")
        self.tier = DiskTier(host, core, lambda _: None, clock=lambda: clock.now_ms / 1000)
        self._copies = copies

    def has_work(self) -> bool:
        """Whether a copy is in flight or may begin."""
        return self.tier.has_work()

    def take(self, step: int) -> None:
        """Take the reports that are due in this step."""
        for report in self._copies.collect(step):
            self.tier.report(report)

    def start(self, step: int) -> None:
        """Start the copies that leave in this step."""
        jobs = tuple(self.tier.plan())
        if jobs:
            self._copies.start(TransferPlan(stores=jobs), step)
        self.tier.disk.end_step()


class Rig:
    """An engine with its core, scheduler and log, ready to serve a trace.

    core, scheduler: values for fields of `OffloadConfig` and `SchedulerConfig`.
    after_s: the process starts this long after the first one (s), and continues the last log, if there is
        one. None: no state outlives the process.
    pools: the pools that outlive the process.
    cold: this process cannot take over the pools of the one before.
    copies: makes the copies in flight.
    jumps: for `DatedClock`.
    disk_slots: slots of the disk tier; 0: there is none.
    disk_script: decides how copies from and to the disk end.
    """

    def __init__(
        self,
        directory: Path,
        seed: int,
        trace: Iterable[TraceRequest],
        *,
        script: Script = usual,
        core: dict[str, Any] | None = None,
        scheduler: dict[str, Any] | None = None,
        writer: dict[str, Any] | None = None,
        after_s: int | None = None,
        pools: KeptPools = KEPT,
        cold: bool = False,
        copies: type[ScriptedCopies] = ScriptedCopies,
        jumps: Sequence[tuple[float, float]] = (),
        disk_slots: int = 0,
        disk_script: Script = usual,
        **options: Any,
    ) -> None:
        chosen = RunOptions(**{"workers": 2, "last_step": "keep-stepping", "seed": seed, **options})
        config = msgspec.structs.replace(chosen.offload_config(), **(core or {}))
        if disk_slots:
            config = host_config(msgspec.structs.replace(config, defer_ticks=DEFER_TICKS))
        self.directory, self.clock = directory, DatedClock(STARTED_NS + (after_s or 0) * 10**9, jumps)
        writer = {"durability": "none", **(writer or {})}
        if after_s is None:
            self.offloader = Offloader.open(config, directory, clock_ns=self.clock.now_ns, **writer)
        else:
            marks = _MARKS[directory]
            started = start(directory, config, pools, marks=marks, clock_ns=self.clock.now_ns, log=writer)
            assert bool(started.why_cold) != bool(after_s and pools is KEPT and not cold), started.why_cold
            self.offloader = started.offloader
        assert self.offloader.writer is not None
        self.offloader.log = notes = SkipNotes(self.offloader.writer)

        def in_flight(script: Script) -> ScriptedCopies:
            return copies(self.clock, config.workers, script, chosen.seed)

        self.disk = None
        if disk_slots:
            ends = in_flight(disk_script)
            self.disk = ScriptedDisk(self.offloader, disk_slots, directory, self.clock, ends)
        self.connector = CheckedScheduler(
            self.offloader,
            msgspec.structs.replace(chosen.scheduler_config(), **(scheduler or {})),
            None if self.disk is None else self.disk.tier,
        )
        self.engine = ServingEngine(
            ServingScheduler(
                self.connector,
                notes,
                token_budget=chosen.token_budget,
                device_blocks=chosen.device_blocks,
            ),
            [],
            [],
            trace,
            clock=self.clock,
            disturbances=Disturbances(chosen),
            block_tokens=chosen.block_tokens,
            disk=self.disk,  # type: ignore[arg-type]
        )
        self.engine.in_flight = in_flight(script)  # type: ignore[assignment]

    def serve(self, seconds: float | None = None, each: Callable[[int], object] | None = None) -> Rig:
        """Serve the trace to its end, or for `seconds` of the workload. each: called before each step."""
        while seconds is None or self.clock.now_ms < 1000 * seconds:
            if each is not None:
                each(self.engine.steps)
            if not self.engine.step():
                break
            self._let_segments_open()
        return self

    def _let_segments_open(self) -> None:
        """Wait for the thread that opens a segment. So segments end where they end on any machine."""
        assert self.offloader.writer is not None
        self.offloader.writer._opening_thread.wait()

    def close(self, error: BaseException | None = None) -> Path:
        """Close the log. Returns its directory."""
        if self.disk is not None:
            self.disk.tier.disk.close(error)
        self.offloader.close(error)
        return self.directory

    def kill(self) -> Path:
        """End like a killed process: flushed events are in the files, and the log is not closed."""
        assert self.offloader.writer is not None
        copied = self.directory.with_name(self.directory.name + "-as-killed")
        marks = [mark._memory for mark in _MARKS[self.directory]]
        marked = [bytes(memory) for memory in marks]
        shutil.copytree(self.directory, copied)
        self.close()
        for memory, content in zip(marks, marked, strict=True):
            memory[:] = content
        shutil.rmtree(self.directory)
        copied.rename(self.directory)
        return self.directory


# Workloads.


def chats(requests: int, seed: int) -> list[TraceRequest]:
    """Return conversations of several turns, as `kvsm run` generates them."""
    return list(multi_turn(seed, requests, BLOCK_TOKENS))


def prompt(arrival_ms: float, blocks: Sequence[int], more: int = 40, output: int = 80) -> TraceRequest:
    """Return a request with these full blocks, then `more` tokens in a block with its own id."""
    own = (hash((arrival_ms, tuple(blocks))) & 0xFFFFFFFF) + (1 << 40)
    ids = (*blocks, own) if more else tuple(blocks)
    tokens = BLOCK_TOKENS * len(blocks) + more
    assert started_blocks(tokens, BLOCK_TOKENS) == len(ids)
    return TraceRequest(arrival_ms, tokens, output, ids)


def merged(*traces: Iterable[TraceRequest]) -> list[TraceRequest]:
    """Return all requests of these traces, by arrival."""
    return sorted((one for trace in traces for one in trace), key=lambda one: one.arrival_ms)


def documents(
    count: int, every_ms: float, blocks: int, *, begin_ms: float = 0.0, first_id: int = 1 << 30
) -> list[TraceRequest]:
    """Return long prompts without common prefixes: a batch job that reads documents."""
    return [
        prompt(
            begin_ms + number * every_ms, range(first_id + number * blocks, first_id + (number + 1) * blocks)
        )
        for number in range(count)
    ]


# What goes wrong.


def pool_too_small(directory: Path, seed: int = 1) -> Path:
    """The host pool holds only a fraction of the blocks that conversations reuse."""
    return Rig(directory, seed, chats(500, seed), device_blocks=600, host_blocks=350).serve().close()


def tenant_floods(directory: Path, seed: int = 1) -> Path:
    """One tenant reads long documents all the time, and evicts blocks that conversations reuse."""
    trace = merged(chats(500, seed), documents(200, 800, 40, begin_ms=10_000))
    return Rig(directory, seed, trace, device_blocks=700, host_blocks=1000).serve().close()


def stamped(trace: Iterable[TraceRequest], begin_ms: float, block: int = 0) -> list[TraceRequest]:
    """From `begin_ms` on, let the system prompt have the time in this block: it and all behind it are new."""
    return [
        one
        if one.arrival_ms < begin_ms
        else msgspec.structs.replace(one, hash_ids=(*one.hash_ids[:block], *_own_ids(number, one, block)))
        for number, one in enumerate(trace)
    ]


def _own_ids(number: int, request: TraceRequest, block: int) -> range:
    first = (1 << 44) + (number << 16)
    return range(first + block, first + len(request.hash_ids))


def hits_fell(directory: Path, seed: int = 1) -> Path:
    """After 100 s, a deploy puts the time into the first block of the system prompt."""
    trace = stamped(chats(500, seed), 100_000)
    return Rig(directory, seed, trace, device_blocks=800).serve().close()


def rank_fails(directory: Path, seed: int = 1) -> Path:
    """Rank 2 of 4 fails 4 % of its copies."""

    def script(copying: Copying) -> Outcome:
        if copying.rank == 2 and copying.random.random() < 0.04:
            return Outcome(copying.usual_ms, "CUDA error: an illegal memory access was encountered")
        return usual(copying)

    return Rig(directory, seed, chats(500, seed), script=script, workers=4, device_blocks=800).serve().close()


def rank_silent(directory: Path, seed: int = 1) -> Path:
    """Rank 1 of 2 stops reporting after 40 s. The engine is closed 30 s later."""

    def script(copying: Copying) -> Outcome:
        return Outcome(SILENT) if copying.rank == 1 and copying.now_ms > 40_000 else usual(copying)

    return Rig(directory, seed, chats(500, seed), script=script, device_blocks=800).serve(seconds=70).close()


def reports_lost(directory: Path, seed: int = 1) -> Path:
    """Rank 1 of 2 never reports one copy in fifty. After 10 s of steps such a transfer is given up."""

    def script(copying: Copying) -> Outcome:
        return Outcome(SILENT) if copying.rank == 1 and copying.random.random() < 0.02 else usual(copying)

    core = {"transfer_ticks": 400}
    return Rig(directory, seed, chats(400, seed), script=script, device_blocks=800, core=core).serve().close()


def requests_unfinished(directory: Path, seed: int = 1) -> Path:
    """The engine's abort path does not notify the connector. One request in eight is left behind."""
    rig = Rig(directory, seed, chats(400, seed), device_blocks=1200, abort_rate=0.2)
    finished = rig.connector.request_finished

    def forgets_aborts(request: ServingRequest, blocks: Any, *, aborted: bool = False) -> Any:
        return (False, None) if aborted else finished(request, blocks, aborted=aborted)

    rig.connector.request_finished = forgets_aborts  # type: ignore[method-assign]
    return rig.serve().close()


def reset_storm(directory: Path, seed: int = 1) -> Path:
    """Something resets the prefix cache every few seconds."""
    return Rig(directory, seed, chats(500, seed), device_blocks=600, reset_every=200).serve().close()


def eviction_burst(directory: Path, seed: int = 1) -> Path:
    """A batch job reads long documents for 20 s, and evicts blocks that conversations reuse."""
    trace = merged(chats(500, seed), documents(70, 150, 40, begin_ms=90_000))
    return Rig(directory, seed, trace, device_blocks=560, host_blocks=1700).serve().close()


def slow_store(directory: Path, seed: int = 1) -> Path:
    """One store takes 6 s on rank 1, and all requests with the same prefix wait for it.

    The engine has no prefix cache on the device.
    """
    shared = range(1 << 35, (1 << 35) + 24)
    same = [prompt(30_800 + 60 * number, shared) for number in range(60)]
    trace = merged(chats(300, seed), [prompt(30_000, shared)], same)

    def script(copying: Copying) -> Outcome:
        large = copying.job.direction is Direction.STORE and count(copying.job.device_blocks) >= 15
        if copying.rank == 1 and large and 30_000 < copying.now_ms < 30_800:
            return Outcome(6000.0)
        return usual(copying)

    rig = Rig(directory, seed, trace, script=script, device_blocks=2400, core={"defer_ticks": 4000})
    rig.engine.scheduler.block_tables.longest_hit = lambda _request: 0  # type: ignore[method-assign]
    return rig.serve().close()


def window_thrash(directory: Path, seed: int = 1) -> Path:
    """A sliding window with small blocks fills the pool with blocks that are never read again."""
    options = {"groups": "full/512,sliding:512/64", "device_blocks": 4000, "host_blocks": 4000}
    return Rig(directory, seed, chats(300, seed), **options).serve().close()


def lazy_behind(directory: Path, seed: int = 1) -> Path:
    """A lazy store keeps two blocks ahead, but the engine allocates more per step: most are never stored."""
    rig = Rig(
        directory,
        seed,
        chats(500, seed),
        store="lazy",
        device_blocks=500,
        scheduler={"lazy_target_blocks": 2},
    )
    return rig.serve().close()


def preemption_storm(directory: Path, seed: int = 1) -> Path:
    """The device pool is too small for the outputs of the running requests: they preempt each other."""
    trace = [prompt(400 * n, range(1000 * n, 1000 * n + 2), output=4000) for n in range(150)]
    return Rig(directory, seed, trace, device_blocks=200).serve().close()


def property_broken(directory: Path, seed: int = 1) -> Path:
    """A bug in the core: stored blocks stay readable after a reset."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        plant(monkeypatch, cache.cache_reset, "index.invalidate_all(ledger, seq)", "pass")
        rig = Rig(directory, seed, chats(60, seed), device_blocks=600, reset_every=700)
        try:
            return rig.serve().close()
        except KvsmError as error:  # The bug may show while the engine runs.
            return rig.close(error)


def engine_killed(directory: Path, seed: int = 1) -> Path:
    """The process is killed in the middle of its work."""
    return Rig(directory, seed, chats(500, seed), device_blocks=800).serve(seconds=60).kill()


def processes_killed(directory: Path, seed: int = 1) -> Path:
    """Twice the process is killed in the middle of its work, and the next one continues with its pool."""
    for life in range(3):
        trace = chats(150, seed)
        rig = Rig(directory, seed + life, trace, device_blocks=800, after_s=200 * life)
        rig.serve().close() if life == 2 else rig.serve(seconds=40).kill()
    return directory


def rank_slow(directory: Path, seed: int = 1) -> Path:
    """Rank 3 of 4 takes twenty times as long as the others."""

    def script(copying: Copying) -> Outcome:
        return Outcome(copying.usual_ms * (20 if copying.rank == 3 else 1))

    return Rig(directory, seed, chats(500, seed), script=script, workers=4, device_blocks=600).serve().close()


def reports_rejected(directory: Path, seed: int = 1) -> Path:
    """Rank 0 reports every copy three times."""

    def script(copying: Copying) -> Outcome:
        return Outcome(copying.usual_ms, reports=1 if copying.rank else 3)

    return Rig(directory, seed, chats(300, seed), script=script, device_blocks=800).serve().close()


def too_few_transfers(directory: Path, seed: int = 1) -> Path:
    """Copies take seconds, and only three of them may be in flight: most blocks are offered and skipped."""

    def script(copying: Copying) -> Outcome:
        return Outcome(100 * copying.usual_ms)

    core = {"max_live_transfers": 3}
    return Rig(directory, seed, chats(500, seed), script=script, device_blocks=600, core=core).serve().close()


def disk_full(directory: Path, seed: int = 1) -> Path:
    """The disk of the log is full, and the engine is configured to continue then."""
    writer = {"on_failure": "continue", "segment_bytes": 1 << 16}
    with disk(150_000):
        rig = Rig(directory, seed, chats(300, seed), device_blocks=800, writer=writer).serve()
        with suppress(LogWriteFailed):
            rig.close()
    return directory


def engine_stopped(directory: Path, seed: int = 1) -> Path:
    """The engine ends with an error."""
    rig = Rig(directory, seed, chats(300, seed), device_blocks=800).serve(seconds=50)
    return rig.close(RuntimeError("CUDA out of memory: tried to allocate 2.00 GiB"))


def clock_back(directory: Path, seed: int = 1) -> Path:
    """NTP sets the clock back by 57 minutes."""
    options = {"device_blocks": 800, "jumps": [(90_000, -3_432_000)]}
    return Rig(directory, seed, chats(500, seed), **options).serve().close()


def clock_forward(directory: Path, seed: int = 1) -> Path:
    """The machine is suspended for five minutes, twice."""
    options = {"device_blocks": 800, "jumps": [(60_000, 300_000), (120_000, 300_000)]}
    return Rig(directory, seed, chats(500, seed), **options).serve().close()


def other_block_size(directory: Path, seed: int = 1) -> Path:
    """A deploy changes the block size, so the kept pool cannot be used."""
    Rig(directory, seed, chats(100, seed), device_blocks=600, after_s=0).serve().close()
    options = {"device_blocks": 600, "core": {"block_bytes": 8192}, "after_s": 400, "cold": True}
    return Rig(directory, seed, chats(200, seed), **options).serve().close()


def rank_tail(directory: Path, seed: int = 1) -> Path:
    """On rank 1 of 2, three copies in a hundred take 1.5 s."""

    def script(copying: Copying) -> Outcome:
        late = copying.rank == 1 and copying.random.random() < 0.03
        return Outcome(1500.0 if late else copying.usual_ms)

    return Rig(directory, seed, chats(500, seed), script=script, device_blocks=600).serve().close()


def loads_crawl(directory: Path, seed: int = 1) -> Path:
    """The host's memory is not page-locked and on another socket: each load takes thirty times as long."""

    def script(copying: Copying) -> Outcome:
        return Outcome(copying.usual_ms * (30 if copying.job.direction is Direction.LOAD else 1))

    return Rig(directory, seed, chats(500, seed), script=script, device_blocks=500).serve().close()


def gateway_restarts(directory: Path, seed: int = 1) -> Path:
    """A gateway restarts: for ten seconds all running requests are aborted."""
    rig = Rig(directory, seed, chats(500, seed), device_blocks=800)

    def each(_step: int) -> None:
        if 90_000 < rig.clock.now_ms < 100_000:
            for name in list(rig.engine.scheduler.running):
                rig.engine.abort(name)

    return rig.serve(each=each).close()


def device_leak(directory: Path, seed: int = 1) -> Path:
    """The engine loses 6 % of the device blocks that requests release, up to 400 of 700."""
    rig = Rig(directory, seed, chats(800, seed), device_blocks=700)
    pool, draw, lost = rig.engine.scheduler.pool, random.Random(f"lost {seed}"), [0]
    free = pool.free_blocks

    def loses(blocks: Sequence[int]) -> None:
        kept = []
        for block in blocks:
            if pool._references[block] == 1 and lost[0] < 400 and draw.random() < 0.06:
                lost[0] += 1
            else:
                kept.append(block)
        free(kept)

    pool.free_blocks = loses  # type: ignore[method-assign]
    return rig.serve(seconds=600).close()


def disk_crawls(directory: Path, seed: int = 1) -> Path:
    """A copy from the disk takes two seconds and more."""
    options = {"device_blocks": 64, "host_blocks": 64, "disk_blocks": 2000, "block_bytes": 64}
    with pytest.MonkeyPatch.context() as monkeypatch:
        slow = {Direction.LOAD: Latency(80, 1), Direction.STORE: Latency(2, 32)}
        monkeypatch.setattr(run_disk, "DISK_LATENCY", slow)
        files = directory.with_name(f"{directory.name}-files")
        run_workload(
            RunOptions(
                requests=150,
                copies="simulated",
                seed=seed,
                disk_dir=str(files),
                log=str(directory),
                **options,
            )
        )
        shutil.rmtree(files)
    return directory


# Healthy engines.


def healthy_eager(directory: Path, seed: int = 1) -> Path:
    """Conversations, and a host pool that holds them."""
    return Rig(directory, seed, chats(500, seed), device_blocks=800).serve().close()


def healthy_lazy(directory: Path, seed: int = 1) -> Path:
    """Conversations with a lazy store, and a host pool that holds them."""
    return Rig(directory, seed, chats(500, seed), device_blocks=800, store="lazy").serve().close()


def healthy_hybrid(directory: Path, seed: int = 1) -> Path:
    """A hybrid model with three KV cache groups."""
    return (
        Rig(directory, seed, chats(300, seed), groups="full,sliding:1024,mamba", device_blocks=3000)
        .serve()
        .close()
    )


def healthy_failures(directory: Path, seed: int = 1) -> Path:
    """One copy in 500 fails, on either of two ranks."""

    def script(copying: Copying) -> Outcome:
        failed = "copy failed: cudaErrorLaunchTimeout" if copying.random.random() < 0.002 else ""
        return Outcome(copying.usual_ms, failed)

    return (
        Rig(directory, seed, chats(500, seed), script=script, device_blocks=800, abort_rate=0.05)
        .serve()
        .close()
    )


def healthy_reuse(directory: Path, seed: int = 1) -> Path:
    """A few long prompts are requested again and again. The device holds one of them at a time."""
    shared = [range(number << 32, (number << 32) + 30) for number in range(1, 13)]
    trace = [prompt(250 * number, shared[number * 7 % 12]) for number in range(400)]
    return Rig(directory, seed, trace, device_blocks=200).serve().close()


def healthy_small(directory: Path, seed: int = 1) -> Path:
    """Twenty requests."""
    return Rig(directory, seed, chats(20, seed)).serve().close()


def healthy_restart(directory: Path, seed: int = 1) -> Path:
    """The cache is reset when weights are updated. Twenty requests in a hundred are aborted."""
    rig = Rig(directory, seed, chats(500, seed), device_blocks=800, reset_every=3000, abort_rate=0.2)
    return rig.serve().close()


def healthy_next_process(directory: Path, seed: int = 1) -> Path:
    """The engine is stopped, and started again with another version of its software."""
    for life in range(2):
        Rig(directory, seed + life, chats(150, seed), device_blocks=800, after_s=400 * life).serve().close()
    return directory


def healthy_full(directory: Path, seed: int = 1) -> Path:
    """The host pool is full for most of the time, and evicts blocks that are not reused."""
    return Rig(directory, seed, chats(500, seed), device_blocks=800, host_blocks=1700).serve().close()


Seeding = Callable[..., Path]
"""Makes a log in a new directory at this path. `seed=N` gives another log of the same kind."""

INCIDENTS: dict[str, Seeding] = {
    seed.__name__: seed
    for seed in (
        pool_too_small,
        tenant_floods,
        hits_fell,
        rank_fails,
        rank_silent,
        reports_lost,
        requests_unfinished,
        reset_storm,
        eviction_burst,
        slow_store,
        window_thrash,
        lazy_behind,
        preemption_storm,
        property_broken,
        engine_killed,
        processes_killed,
        rank_slow,
        reports_rejected,
        too_few_transfers,
        disk_full,
        engine_stopped,
        clock_back,
        clock_forward,
        other_block_size,
        rank_tail,
        loads_crawl,
        gateway_restarts,
        device_leak,
        disk_crawls,
    )
}
HEALTHY: dict[str, Seeding] = {
    seed.__name__: seed
    for seed in (
        healthy_eager,
        healthy_lazy,
        healthy_hybrid,
        healthy_failures,
        healthy_reuse,
        healthy_small,
        healthy_restart,
        healthy_next_process,
        healthy_full,
    )
}
