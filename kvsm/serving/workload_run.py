"""A whole run: build the engine, serve a workload, then verify the run by its log.

All input, including the whole trace, is checked first. So bad input leaves neither a directory nor a partial
log behind.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from kvsm.copies import VerifyingStatistics
from kvsm.copies.host_pools.available_memory import available_memory_bytes
from kvsm.copies.worker import Worker
from kvsm.core.ledger.invariants import PROPERTIES, Violation
from kvsm.core.ledger.snapshot import digest
from kvsm.core.log import RUN_BYTES, Durability, LogWriter
from kvsm.core.offloader import Offloader
from kvsm.core.scheduler import CheckedScheduler
from kvsm.errors import ConfigError
from kvsm.events import Direction, OffloadConfig
from kvsm.explain.metrics import Metrics
from kvsm.explain.story import Verification, verify_log
from kvsm.properties import Property
from kvsm.serving import offload_checks
from kvsm.serving.agent_sessions import read_recorded
from kvsm.serving.copy_totals import CopyTotals, copy_totals
from kvsm.serving.disturbances import Disturbances
from kvsm.serving.offload_checks import SkipNotes
from kvsm.serving.ranks import COPIES, make_rank
from kvsm.serving.run_disk import DiskResult, RunDisk, RunFiles
from kvsm.serving.run_options import RunOptions
from kvsm.serving.serving_engine import TOKEN_MS, ServingEngine, VirtualClock
from kvsm.serving.serving_scheduler import ServingScheduler
from kvsm.serving.stopwatch import Stopwatch
from kvsm.serving.traces import TraceRequest, multi_turn
from kvsm.tiers import disk_config

GENERATED_REQUESTS = 2000
LEDGER_BYTES_PER_BLOCK = 200
"""About how much memory the ledger and the device pool need for each block, besides its content."""

PROGRESS_STEPS = 64

_DECIDING = (
    "add_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "reset_cache",
)
"""The calls of the engine whose time is measured."""

_DISK_DECIDING = ("plan", "report", "reset")
"""The calls to the disk tier whose time is measured. Its other calls are part of measured engine calls."""


class RunProgress(msgspec.Struct, frozen=True):
    """The progress of a run.

    hit_rate: share of the prompt tokens that were found on the device or the host.
    verified_events: events of the logs verified so far; 0 while the workload runs.
    """

    requests_done: int
    requests: int
    hit_rate: float
    seconds: float
    verified_events: int = 0


class RunResult(msgspec.Struct, frozen=True, kw_only=True, tag_field="schema", tag="kvsm.run/1"):
    """What `kvsm run --json` prints: the result of a run.

    The fields up to `decoded_tokens` come from `SchedulerCounts`.

    remote_decode: finished requests for remote decode.
    fully_offloaded: the number of these requests with every full block on the host.
    blocks_stored, blocks_loaded: device blocks of copies that ended without error on every worker.
    blocks_skipped: offered blocks that were not stored, by reason.
    transfers_lost: transfers that were given up because a worker did not report.
    verified: blocks that were checked on all workers; None without `verify_copies`.
    disk: the result of the disk tier; None if there was none.
    saved_seconds: time of the workload in which the engine would have computed the tokens hit on the host.
    decision_us: time in offload scheduler, log and disk tier, for each slot named in an event (us).
    log_entries: slots named in events.
    digest, replayed_digest: digests of the state at the end, live and rebuilt from the log.
    properties: all properties that were checked.
    """

    requests: int
    finished: int
    aborted: int
    preemptions: int
    restarts: int
    deferrals: int
    failed_loads: int
    lost_loads: int
    device_hit_tokens: int
    host_hit_tokens: int
    computed_tokens: int
    decoded_tokens: int
    resets: int
    remote_decode: int
    fully_offloaded: int
    blocks_stored: int
    blocks_loaded: int
    blocks_evicted: int
    blocks_skipped: dict[str, int]
    transfers_lost: int
    stores: CopyTotals
    loads: CopyTotals
    verified: VerifyingStatistics | None
    disk: DiskResult | None
    steps: int
    workload_seconds: float
    saved_seconds: float
    run_seconds: float
    decision_us: float
    log: str | None
    log_events: int
    log_entries: int
    log_bytes: int
    log_key_bytes: int
    verify_seconds: float
    digest: str
    replayed_digest: str
    properties: tuple[Property, ...]
    violations: tuple[Violation, ...]
    damage: str | None
    metrics: dict[str, Any]

    @property
    def good(self) -> bool:
        """Whether the logs replay to the live state, and no property is broken."""
        return not self.violations and all(
            tier.digest == tier.replayed_digest and tier.damage is None
            for tier in (self, self.disk)
            if tier is not None
        )


def load_workload(options: RunOptions) -> list[TraceRequest]:
    """Return the run's requests. Raises `TraceError`, and `ConfigError` if one does not fit the pools."""
    if options.trace is None:
        generated = options.requests or GENERATED_REQUESTS
        requests = list(multi_turn(options.seed, generated, options.block_tokens))
    else:
        requests = list(
            islice(read_recorded(options.trace, options.block_tokens, options.at_once), options.requests)
        )
    number, largest = max(
        enumerate(requests, 1), key=lambda one: (one[1].input_length + one[1].output_length, -one[0])
    )
    options.check_size(number, largest)
    return requests


def run_workload(options: RunOptions, progress: Callable[[RunProgress], None] | None = None) -> RunResult:
    """Serve the workload, verify the log, and compare its state with the live one.

    Raises `ConfigError`, `TraceError` or `LogError` for input that cannot be used, before it creates a file.
    Raises `PropertyBroken` if the engine cannot continue, and `LogWriteFailed`.
    """
    requests = load_workload(options)
    _check_memory(options)
    with ExitStack() as stack:
        directory = options.log or str(Path(stack.enter_context(TemporaryDirectory(prefix="kvsm-"))) / "log")
        run = WorkloadRun(options, requests, directory)
        run.serve(progress)
        return run.prove(progress)


def _run_id(options: RunOptions, tier: str) -> bytes:
    """Return a run id that is equal for equal options, wherever logs and files are. tier: the log's tier."""
    decisive = {**msgspec.structs.asdict(options), "log": None, "disk_dir": None}
    return blake2b(msgspec.msgpack.encode((decisive, tier)), digest_size=RUN_BYTES).digest()


class WorkloadRun:
    """One run, in two parts: `serve` the workload, then `prove` it by the log.

    Public attributes, which tests also modify: `engine`, `connector`, `offloader`, `ranks` (one for each
    worker), `directory` (of the log), `disk` (None if there is no disk tier).
    """

    def __init__(self, options: RunOptions, requests: Sequence[TraceRequest], directory: str) -> None:
        self._options, self._requests, self.directory = options, requests, directory
        self._clock = VirtualClock()
        self.ranks = [make_rank(options, rank) for rank in range(options.workers)]
        with ExitStack() as undo:
            files = None
            if options.disk_dir is not None:
                files = undo.enter_context(closing(RunFiles(options)))  # before a log is created
            self.offloader = self._open_core(options.offload_config(), Path(directory), "host")
            self.disk = None if files is None else self._make_disk(files)
            undo.pop_all()
        assert isinstance(self.offloader.writer, LogWriter)
        self._writer = self.offloader.writer
        self.offloader.log = notes = SkipNotes(self._writer)
        self.metrics = Metrics.attached_to(self.offloader)
        lower_tier = None if self.disk is None else self.disk.tier
        self.connector = CheckedScheduler(self.offloader, options.scheduler_config(), lower_tier)
        self._deciding = [Stopwatch(self.connector, *_DECIDING)]
        if lower_tier is not None:
            self._deciding.append(Stopwatch(lower_tier, *_DISK_DECIDING))
        self._workers = [Worker(number, rank.engine) for number, rank in enumerate(self.ranks)]
        self.engine = ServingEngine(
            ServingScheduler(
                self.connector,
                notes,
                token_budget=options.token_budget,
                device_blocks=options.device_blocks,
            ),
            self._workers,
            self.ranks,
            requests,
            clock=self._clock,
            disturbances=Disturbances(options),
            block_tokens=options.block_tokens,
            time_scale=options.time_scale,
            disk=self.disk,
        )
        self._seconds = 0.0

    def _open_core(self, config: OffloadConfig, directory: Path, tier: str) -> Offloader:
        """Open the core of a tier, with a log in this directory."""
        # A simulated run uses no wall time: it does not sync, and its run id follows from its options. So
        # equal runs have equal logs.
        simulated = COPIES[self._options.copies].has_virtual_time
        durability: Durability = "none" if simulated else "interval"
        return Offloader.open(
            config,
            directory,
            clock_ns=self._clock.now_ns if simulated else time.time_ns,
            durability=durability,
            run=_run_id(self._options, tier) if simulated else None,
        )

    def _make_disk(self, files: RunFiles) -> RunDisk:
        options, host = self._options, self.offloader
        config = disk_config(host.config, options.disk_blocks, options.policy)
        core = self._open_core(config, self.disk_directory, "disk")
        return RunDisk(options, files, self.ranks, host, core, lambda: self._clock.now_ms / 1000)

    @property
    def disk_directory(self) -> Path:
        """The directory of the log of the disk's core, if there is a disk tier."""
        return Path(self.directory) / "disk"

    def serve(self, progress: Callable[[RunProgress], None] | None = None) -> None:
        """Run the workload to its end, and close the log.

        After an error the workers are not closed: closing a worker that never reports would never return. Its
        threads end with the process.
        """
        started = time.perf_counter()
        with ExitStack() as logs:
            logs.enter_context(self.offloader)
            if self.disk is not None:
                logs.enter_context(self.disk.tier.disk)
            while self.engine.step():
                if progress is not None and self.engine.steps % PROGRESS_STEPS == 0:
                    self._seconds = time.perf_counter() - started
                    progress(self._progress())
        if self.disk is not None:
            self.disk.close()
        for rank, worker in zip(self.ranks, self._workers):
            rank.synchronize()
            worker.close()
            rank.host.close()
        self._seconds = time.perf_counter() - started

    def prove(self, progress: Callable[[RunProgress], None] | None = None) -> RunResult:
        """Verify the logs that `serve` wrote, and return the result of the run."""
        verification = self._verify(self.offloader, self.directory, 0, progress)
        if self.disk is None:
            return self._result(verification, None, None)
        of_disk = self._verify(self.disk.tier.disk, self.disk_directory, verification.events, progress)
        log = None if self._options.log is None else str(self.disk_directory)
        return self._result(verification, of_disk, self.disk.result(log, of_disk))

    def _verify(
        self,
        core: Offloader,
        directory: str | Path,
        before: int,
        progress: Callable[[RunProgress], None] | None,
    ) -> Verification:
        """Verify a log. before: the number of events of other logs that are verified already."""

        def verified(events: int) -> None:
            if progress is not None:
                progress(self._progress(before + events))

        return verify_log(
            directory,
            progress=verified,
            allow_policies=(core.config.policy,),
            max_slots=max(core.config.host_blocks, core.config.device_blocks),
        )

    def _progress(self, verified_events: int = 0) -> RunProgress:
        counts = self.engine.scheduler.counts
        hits = counts.device_hit_tokens + counts.host_hit_tokens
        return RunProgress(
            counts.finished + counts.aborted,
            len(self._requests),
            hits / max(1, hits + counts.computed_tokens),
            self._seconds,
            verified_events,
        )

    def _properties(self) -> tuple[Property, ...]:
        """Return all properties that this run checks; the order of copies only on a simulated device."""
        order = (Property.COPY_ORDER,) if COPIES[self._options.copies].has_virtual_time else ()
        checked = {*PROPERTIES, *offload_checks.PROPERTIES, *order}
        return tuple(sorted(checked, key=lambda checked_property: checked_property.number))

    def _verified(self) -> VerifyingStatistics | None:
        if not self._options.verify_copies:
            return None
        return sum((rank.verified() for rank in self.ranks), VerifyingStatistics())

    def _result(
        self, verification: Verification, of_disk: Verification | None, disk: DiskResult | None
    ) -> RunResult:
        counts, engine, metrics = self.engine.scheduler.counts, self.engine, self.metrics.values()
        entries = verification.entries + (0 if of_disk is None else of_disk.entries)
        found = (*verification.violations, *(() if of_disk is None else of_disk.violations))
        return RunResult(
            requests=len(self._requests),
            **msgspec.structs.asdict(counts),
            resets=engine.resets,
            remote_decode=engine.scheduler.checks.remote_decode,
            fully_offloaded=engine.scheduler.checks.fully_offloaded,
            blocks_stored=engine.in_flight.blocks[Direction.STORE],
            blocks_loaded=engine.in_flight.blocks[Direction.LOAD],
            blocks_evicted=metrics["blocks_evicted"],
            blocks_skipped={why: count for why, count in metrics["blocks_skipped"].items() if count},
            transfers_lost=sum(ends["lost"] for ends in metrics["transfers_ended"].values()),
            stores=copy_totals(self._workers, Direction.STORE),
            loads=copy_totals(self._workers, Direction.LOAD),
            verified=self._verified(),
            disk=disk,
            steps=engine.steps,
            workload_seconds=engine.clock.now_ms / 1000,
            saved_seconds=counts.host_hit_tokens * TOKEN_MS / 1000,
            run_seconds=self._seconds,
            decision_us=sum(stopwatch.seconds for stopwatch in self._deciding) / max(1, entries) * 1e6,
            log=self._options.log,
            log_events=verification.events,
            log_entries=verification.entries,
            log_bytes=self._writer.bytes_written,
            log_key_bytes=metrics["key_bytes"],
            verify_seconds=verification.seconds,
            digest=digest(self.offloader.ledger),
            replayed_digest=verification.digest,
            properties=self._properties(),
            violations=(*engine.violations, *engine.check_rest(), *found),
            damage=verification.damage,
            metrics=metrics,
        )


def _check_memory(options: RunOptions) -> None:
    """Raise `ConfigError` if this machine lacks memory for the run: else the kernel may kill it midway."""
    choice = COPIES[options.copies]
    device_blocks = options.device_blocks if choice.device_in_memory else 0
    host_blocks = options.host_places if choice.host_in_memory else 0
    pools = options.workers * options.block_bytes * (device_blocks + host_blocks)
    needed = pools + LEDGER_BYTES_PER_BLOCK * (
        options.device_blocks + options.host_places + options.disk_blocks
    )
    available = available_memory_bytes()
    if available is not None and needed > available:
        raise ConfigError(
            f"the pools take {needed / 1e9:.1f} GB and this machine has {available / 1e9:.1f} left, control "
            "groups counted: lower device_blocks, host_blocks, disk_blocks, blocks_per_chunk, block_bytes or "
            "workers"
        )
