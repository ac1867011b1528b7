"""The engine of the whole world: the wider engine with the real `DiskTier` below its host core.

It joins scheduler and disk in the order of the shipped assemblies (`kvsm.serving.serving_engine`,
`kvsm.vllm.scheduler_side`): the tier plans before the scheduler does, and a reset of the host is followed by
one of the disk. Each answer of the scheduler is compared with `kvsm.check.worlds.whole_answers`.
"""

from __future__ import annotations

from typing import Any

from kvsm.check.worlds.run_figures import COPIED_OUT, IMPORTED, STORED
from kvsm.check.worlds.small_request import SmallRequest
from kvsm.check.worlds.whole_answers import BeforeAnswerWithDisk
from kvsm.check.worlds.whole_disk import WholeDisk, WholeDiskOptions
from kvsm.check.worlds.whole_process import MirroredLog, SurvivingState
from kvsm.check.worlds.wider_engine import WiderEngine
from kvsm.core.kv_events import Publisher
from kvsm.core.ledger import Ledger
from kvsm.core.offloader import Offloader
from kvsm.core.plan import TransferJob, TransferPlan
from kvsm.core.scheduler import StepOutput
from kvsm.core.scheduler.protocols import TierBelow
from kvsm.errors import LogWriteFailed, PropertyBroken
from kvsm.events import Direction, OffloadConfig
from kvsm.ids import to_list
from kvsm.properties import Property
from kvsm.states.request import RequestState
from kvsm.tiers import host_config

STEP_S = 0.25
"""The length of a step for the clock of the disk's health watch (s)."""


class WholeEngine(WiderEngine):
    """A `WiderEngine` with a disk. It takes the same other arguments.

    surviving: what outlived the last process.
    """

    def __init__(
        self, *options: Any, disk_options: WholeDiskOptions, surviving: SurvivingState, **more: Any
    ) -> None:
        self.disk_options, self.surviving = disk_options, surviving
        super().__init__(*options, **more)
        self.weights_tag = b"" if surviving.weights == 1 else surviving.weights_name.encode()

    def _core_config(self, config: OffloadConfig) -> OffloadConfig:
        return host_config(config, self.disk_options.places)

    def _make_core(
        self,
        config: OffloadConfig,
        publisher: Publisher | None,
        ledger: Ledger | None,  # noqa: ARG002 (the log has it)
    ) -> Offloader:
        core, self.log = self.surviving.open_core(config, publisher)
        return core

    def _lower_tier(self) -> TierBelow:
        self.disk = WholeDisk(self.disk_options, self.core, self, self.surviving)
        return self.disk.tier

    # Requests.

    def ask(self, request: SmallRequest) -> int | None:
        """Let a request that has no device blocks ask for its longest hit, and check the answer."""
        return self._ask(request, 0)

    def _ask(self, request: SmallRequest, local: int) -> int | None:
        before = BeforeAnswerWithDisk.of(self.scheduler, self.disk.tier, request, request.cells, local)
        found, loads = self.scheduler.get_num_new_matched_tokens(request, local)
        if found is not None:
            self._check_match(request, local, found, loads)
        before.check(found, self.core.ledger)
        return found

    # Copies.

    def _plan(self, output: StepOutput) -> TransferPlan:
        self.disk.now_s += STEP_S
        for job in self.disk.plan():
            self._check_disk_job(job)
        return super()._plan(output)

    def _check_disk_job(self, job: TransferJob) -> None:
        """Check a copy between host and disk that leaves now."""
        self._check_logged(self.disk.tier.copies[job.transfer].host)

    def _check_logged(self, transfer: int) -> None:
        """Check that the log has this event, unless its disk has failed (no stale data, S14)."""
        if not isinstance(self.log, MirroredLog) or self.surviving.has_failed:
            return
        if transfer > self.log.flushed:
            message = f"transfer {transfer} leaves, but the log on disk ends with event {self.log.flushed}"
            raise PropertyBroken(Property.NO_STALE_DATA, message)

    def _start(self) -> None:
        for job in (*self.plan.loads, *self.plan.stores):
            self._check_logged(job.transfer)
        self._check_targets(self.plan)
        super()._start()
        self.disk.flush(self.plan.flush)

    def _check_targets(self, plan: TransferPlan) -> None:
        """Check that no store writes a host slot that a copy of the disk touches."""
        chunk = self.core.config.blocks_per_chunk
        written = {place // chunk for job in plan.stores for place in to_list(job.host_blocks)}
        touched = {slot for _, slots, _ in self.disk.touched() for slot in slots} if written else set()
        if written & touched:
            message = f"a store writes host slots {sorted(written & touched)}, which a disk copy touches"
            raise PropertyBroken(Property.NO_REUSE_IN_FLIGHT, message)

    def hand_on_disk(self, place: int) -> None:
        """Pass this report on a copy of the disk to the tier."""
        report = self.disk.reports.pop(place)
        ledger, tier = self.disk.core.ledger, self.disk.tier
        record = ledger.transfers.get(report.transfer)
        if record is None:
            tier.report(report)
            return
        was_stale, job = record.epoch != ledger.epoch, record.direction
        host_transfer = tier.copies[report.transfer].host
        keys = self.core.ledger.transfers[host_transfer].keys if job is Direction.LOAD else record.keys
        slots, waiting = len(record.device_blocks), self._waiting_for(host_transfer)
        if not report.good:
            self.disk.failed.add(report.transfer)
        tier.report(report)
        if report.transfer in ledger.transfers:
            return
        good = report.transfer not in self.disk.failed
        self.disk.failed.discard(report.transfer)
        if good and job is Direction.LOAD:
            self._check_held(waiting)
        if not was_stale:
            self._note_end(job, slots, good=good)
            if not good:
                self._check_failed(job, keys)

    def _note_end(self, direction: Direction, slots: int, *, good: bool) -> None:
        if direction is Direction.STORE:
            self.notes.copy(self.core.ledger.seq, COPIED_OUT, slots)
        elif good:
            self.notes.copy(self.core.ledger.seq, IMPORTED, slots)
            self.notes.copy(self.core.ledger.seq, STORED, slots)

    def _check_failed(self, direction: Direction, keys: Any) -> None:
        """Check that after a failed copy its target lacks the keys. A failed load voids the disk's blocks."""
        is_load = direction is Direction.LOAD
        if not is_load:
            self.disk.rest.not_stored(keys)
        for key in keys:
            if self.disk.tier.has(key) or (is_load and key in self.core.ledger.index):
                message = f"a copy of the disk has failed, but its key {key.hex()} can still be found"
                raise PropertyBroken(Property.FAILURE_IS_NOT_SUCCESS, message)

    def _waiting_for(self, transfer: int) -> list[tuple[str, tuple[bytes, ...]]]:
        """The requests that wait for this copy from the disk and the keys that it brings: (name, keys)."""
        ledger, hits = self.core.ledger, self.disk.tier._fetches._hits.get(transfer, {})
        brought = set(ledger.transfers[transfer].keys)
        return [
            (name, tuple(hit.keys))
            for name, hit in hits.items()
            if name in ledger.deferred
            and ledger.deferred[name].awaits == transfer
            and brought.intersection(hit.keys)
        ]

    def _check_held(self, waiting: list[tuple[str, tuple[bytes, ...]]]) -> None:
        """Check that a request whose blocks are all on the host now holds them (a match holds what it
        counts, S7)."""
        ledger = self.core.ledger
        for name, keys in waiting:
            slots = [ledger.index.get(key, -1) for key in keys]
            request = ledger.requests[name]
            is_held = request.state is RequestState.MATCHED and to_list(request.pins) == slots
            if not is_held and all(slot >= 0 and ledger.readable(slot) for slot in slots):
                message = f"{name} waited for slots {slots}, which have arrived, but it does not hold them"
                raise PropertyBroken(Property.MATCH_HOLDS, message)

    # Resets.

    def reset(self) -> bool:
        self.surviving.epoch += 1
        try:
            done = super().reset()
            self.disk.tier.reset()
        except LogWriteFailed:
            self.surviving.epoch -= 1  # Nobody was told of the reset, and the process ends.
            raise
        self.disk.rest.reset()
        self._check_logged(self.core.ledger.seq)
        return done
