"""The copy engine of one rank between a host pool and a file. Stores write a header for each payload, and
loads prove the payloads before they copy them.

A store writes rows without a copy if the host pool is one tensor whose rows begin at pages and fill them.
Otherwise it copies them to a buffer first. Each row is hashed before it is written; if a bit changes in
between, loads of the slot fail, and return no wrong bytes. For each slot a store writes

1. a header that says DROPPED;
2. the payload;
3. the header that says SEALED, with key, era, generation and checksum.

Each of these is one call for adjacent slots. A load reads payloads into a buffer, in one call for adjacent
slots. The expected checksums are known from the store, or from the headers that recovery has read. The load
compares the checksum of each payload. If the job has keys, the load also builds the expected header, from
key, era, generation, slot and checksum, and compares the header's checksum. Only then are bytes copied. So a
block whose proof failed is not changed, although the promises of copy engines would allow it. The copy takes
a tenth of the time of the disk.

============  =============================================  ================================================
flush policy  `fdatasync` is called                          a good store survives
============  =============================================  ================================================
`NONE`        when the file is opened                        a killed process
`INTERVAL`    after each `interval_s` in which a store       a killed process; a power loss, once the next
              ended, and when the engine is closed           flush has ended
`EVERY`       once for all stores that are waiting           a power loss
============  =============================================  ================================================

Linux reports a failed write to one flush only. So a failed flush makes every store bad that had begun before
the flush returned and that no earlier flush covers.

There is no limit for a disk that never answers. Then `wait` blocks, as with every engine, and the process
cannot be killed until the kernel gives up the call. A separate thread waits for flushes, so loads continue.

The engine uses threads, not io_uring. For blocks of 1 MiB and more, stores reach at least 0.9 of the speed of
a plain loop, on two shared cores (`benchmarks/results/disk.md`). They take 0.15 s of CPU time for a GB, and
the loop takes 0.07 s; the hash is half of the difference. Small blocks in random slots are slower because
each takes two header writes: a call of 4 KiB takes nearly as long as a call of 64 KiB. Adjacent slots share
these calls.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from enum import Enum
from queue import Empty, Queue, SimpleQueue
from threading import Thread
from typing import Any

import numpy as np

from kvsm.copies.checksums import BlockChecksums
from kvsm.copies.layout import MemoryLayout, MemoryRows, block_bytes_of, tensors_of
from kvsm.copies.threaded import ThreadedCopyEngine, ThreadedTransfer
from kvsm.core.plan import TransferJob
from kvsm.errors import ConfigError, TransferFailed
from kvsm.events import Direction
from kvsm.ids import IdArray
from kvsm.states.disk_slot import DiskSlotTrigger
from kvsm.tiers.disk.bounce import BOUNCE_BYTES, BounceBuffer
from kvsm.tiers.disk.formats import ERA_ID_BYTES, MOST_KEY_BYTES, NO_ERA, SlotGeneration
from kvsm.tiers.disk.health import HealthWatch, TierHealth
from kvsm.tiers.disk.host_proof import HostProof, RowName
from kvsm.tiers.disk.slot_file import SlotFile

_LOGGER = logging.getLogger("kvsm.tiers.disk")


class FlushPolicy(Enum):
    """When stores are flushed to the disk. The module's docstring says what each policy promises."""

    NONE = "none"
    INTERVAL = "interval"
    EVERY = "every"


class DiskCopyEngine(ThreadedCopyEngine):
    """A `CopyEngine` whose device pool is in host memory, and whose host pool is the slots of a file.

    host: the tensors of the host pool, or a single tensor; see `NumpyPools`.
    file: the slots. To serve blocks of earlier processes, call `recover` on the files before. The engine
        closes the file.
    flush: when stores are flushed.
    interval_s: time between flushes with `INTERVAL` (s).
    threads: number of copying threads. Each has a buffer of 4 MiB, or of one slot if that is larger.
    checksums: the checksum table of the host pool; None: there is none. With a table, a store of a damaged
        block fails, and a load records the checksums of its blocks. A slot holds one or more host blocks.

    A store needs `keys`; if a load has keys, the slots must have them. A job names the era in which it was
    planned (`TransferJob.era`), and a slot has the era of its store. Raises `ConfigError`.
    """

    def __init__(
        self,
        host: Any | Sequence[Any],
        file: SlotFile,
        flush: FlushPolicy = FlushPolicy.INTERVAL,
        interval_s: float = 1.0,
        threads: int = 8,
        checksums: BlockChecksums | None = None,
    ) -> None:
        geometry, block_bytes = file.geometry, block_bytes_of(tensors_of(host))
        if block_bytes != geometry.payload_bytes:
            raise ConfigError(
                f"a block has {block_bytes} bytes in memory and {geometry.payload_bytes} in {file.path}; "
                "they must be equal"
            )
        if interval_s <= 0:
            raise ConfigError(f"interval_s is {interval_s}; it must be more than 0")
        self.file = file
        self._policy, self._interval_s = flush, interval_s
        self._health = HealthWatch(str(file.path))
        self._begun: dict[int, int] = {}
        """Live store -> the value of `_failed_flushes` when the store began."""
        self._failed_flushes = 0
        self._written = 0
        """Number of good stores since the last flush."""
        self._to_flush: Queue[ThreadedTransfer | None] = Queue()
        slots = max(1, BOUNCE_BYTES // geometry.payload_step)
        self._buffers: SimpleQueue[BounceBuffer] = SimpleQueue()
        for _ in range(max(1, threads)):
            buffer = BounceBuffer(file, host, slots)
            self._buffers.put(buffer)
        device = buffer.pools.layout
        rows = MemoryRows(0, geometry.slot_bytes, geometry.num_slots, geometry.payload_bytes)
        self.layout = MemoryLayout(device.tensors, rows, device.offsets)
        self.prove_host(checksums)
        super().__init__(self.layout, threads)
        self._flusher: Thread | None = None
        if flush is not FlushPolicy.NONE:
            serve = self._serve_flushes if flush is FlushPolicy.EVERY else self._flush_now_and_then
            self._serving += 1
            self._flusher = Thread(target=self._run, args=(serve,), name="kvsm-flush", daemon=True)
            self._flusher.start()

    @property
    def health(self) -> TierHealth:
        """Whether stores are currently accepted, and the last failures."""
        return self._health.read()

    def prove_host(self, checksums: BlockChecksums | None) -> None:
        """Use this checksum table of the host pool from now on; None: none. Raises `ConfigError` if the table
        is of another pool."""
        rows = self.layout.num_device_blocks, self.layout.block_bytes
        self._proof = None if checksums is None else HostProof(checksums, *rows)

    def checked(self, job: TransferJob) -> tuple[IdArray, IdArray]:
        """Return the pairs of a job. Raises `TransferFailed` for an invalid job, and for a store while the
        disk accepts none."""
        pairs = super().checked(job)
        what, count = f"{job.direction.name.lower()} {job.transfer}", len(pairs[0])
        is_store = job.direction is Direction.STORE
        if len(job.keys) != count and (is_store or job.keys):
            raise TransferFailed(
                f"{what}: {len(job.keys)} keys for {count} disk slots; a disk slot needs the key of its block"
            )
        if job.era and len(job.era) != ERA_ID_BYTES:
            raise TransferFailed(f"{what}: the id of its era has {len(job.era)} bytes, not {ERA_ID_BYTES}")
        needs_names = self._proof is not None and self._proof.needs_names
        if needs_names and not len(job.generations) == len(job.keys) == count:
            raise TransferFailed(
                f"{what}: {len(job.generations)} generations for {count} rows of a kept host pool; give the "
                "jobs of the disk tier over a core that `kvsm.tiers.warm_restart.start` has made"
            )
        if is_store:
            longest = max(map(len, job.keys), default=0)
            if longest > MOST_KEY_BYTES:
                raise TransferFailed(
                    f"{what}: a key has {longest} bytes; a disk slot has room for {MOST_KEY_BYTES}"
                )
            refusal = self._health.refusal() if count else ""
            if refusal:
                raise TransferFailed(f"{what}: {refusal}")
            self._begun[job.transfer] = self._failed_flushes
        return pairs

    def copy_part(self, job: TransferJob, first: int, device_blocks: IdArray, host_blocks: IdArray) -> None:
        devices = np.asarray(device_blocks, np.int64)
        slots = np.asarray(host_blocks, np.int64)
        order = np.argsort(slots, kind="stable")
        keys = job.keys[first : first + len(slots)]
        names: list[RowName] = [None] * len(slots)
        if job.generations:
            names = list(zip(keys, job.generations[first : first + len(slots)]))
        buffer, proof, era = self._buffers.get(), self._proof, job.era or NO_ERA
        try:
            for start in range(0, len(order), buffer.num_slots):
                some = order[start : start + buffer.num_slots]
                some_keys = [keys[place] for place in some.tolist()] if keys else []
                rows = [names[place] for place in some.tolist()]
                if job.direction is Direction.STORE:
                    generation = SlotGeneration(self.file.life, job.transfer)
                    buffer.store(devices[some], slots[some].tolist(), some_keys, generation, era, proof, rows)
                else:
                    buffer.load(devices[some], slots[some].tolist(), some_keys, era, proof, rows)
        except OSError as error:
            text = f"{self.file.path}: {error.strerror or error}"
            if job.direction is Direction.STORE:
                self._health.failed(text)
            raise TransferFailed(text) from error
        finally:
            self._buffers.put(buffer)

    def close(self) -> None:
        super().close()
        if self._flusher is not None:
            self._flusher.join()
        self.file.close()

    def _end_piece(self, transfer: ThreadedTransfer, seconds: float, error: str) -> None:
        is_store = transfer.job.direction is Direction.STORE
        with self._changed:
            is_last = transfer.pieces_left == 1
            if not (is_store and is_last):
                super()._end_piece(transfer, seconds, error)
            elif (
                self._policy is FlushPolicy.EVERY
                and not (error or transfer.error)
                and len(transfer.host_blocks)
            ):
                transfer.seconds += seconds
                self._to_flush.put(transfer)
            else:
                lost = "" if error or transfer.error else self._lost(transfer)
                if lost:
                    self._forget(transfer)
                self._end_store(transfer, seconds, error or lost)

    def _end_store(self, transfer: ThreadedTransfer, seconds: float, error: str) -> None:
        """End the last piece of a store, after the flush if the policy is `EVERY`."""
        with self._changed:
            self._begun.pop(transfer.job.transfer, None)
            if len(transfer.host_blocks) and not (error or transfer.error):
                self._written += 1
                if self._policy is FlushPolicy.NONE:
                    self._health.succeeded()
            super()._end_piece(transfer, seconds, error)

    def _lost(self, transfer: ThreadedTransfer) -> str:
        """Return an error if a flush has failed since the store began, because its writes may be lost; else
        an empty text."""
        begun = self._begun.get(transfer.job.transfer, self._failed_flushes)
        if begun == self._failed_flushes or not len(transfer.host_blocks):
            return ""
        return f"{self.file.path}: a flush failed while it was written"

    def _serve_flushes(self) -> None:
        """Run the thread of `EVERY`: flush once for all stores that are waiting."""
        ends = False
        while not (ends or self._broken):
            waiting = [self._to_flush.get()]
            while not self._to_flush.empty():
                waiting.append(self._to_flush.get())
            ends = None in waiting
            stores = [store for store in waiting if store is not None]
            error = self._flush() if stores else ""
            for store in stores:
                lost = error or self._lost(store)
                if lost:
                    self._forget(store)
                self._end_store(store, 0.0, lost)

    def _flush_now_and_then(self) -> None:
        """Run the thread of `INTERVAL`: flush after each interval in which a store ended, and at the end."""
        ends = False
        while not (ends or self._broken):
            with suppress(Empty):
                ends = self._to_flush.get(timeout=self._interval_s) is None
            if self._written:
                self._written = 0
                self._flush()

    def _flush(self) -> str:
        """Flush the file. Returns the error, or an empty text."""
        try:
            self.file.check_there()
            self.file.flush()
        except OSError as error:
            text = f"{self.file.path}: it could not be flushed: {error.strerror or error}"
            if self._policy is FlushPolicy.INTERVAL:  # stores were reported as good before the flush
                _LOGGER.warning("%s; stores that were reported as good may not survive a power loss", text)
            with self._changed:
                self._failed_flushes += 1
            self._health.failed(text)
            return text
        self._health.succeeded()
        return ""

    def _forget(self, transfer: ThreadedTransfer) -> None:
        """Mark the slots of a store as failed, because its writes may be lost."""
        self.file.table.step(map(int, transfer.host_blocks), DiskSlotTrigger.FAIL)

    def _stop_threads(self) -> None:
        super()._stop_threads()
        self._to_flush.put(None)
