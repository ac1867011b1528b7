"""A copy engine that checks bytes: a wrong byte becomes a failed transfer, never a wrong answer (S15).

After each good store, the checksum of each of its host blocks is kept. After each good load, the checksum of
each host block that it read is taken again and compared. If the host can read the device pool, the device
blocks of both are compared with their host blocks too. The result comes after that.

=====================================  =========================  =====================================
what is wrong                          is found                   where
=====================================  =========================  =====================================
a host block changed between its       yes                        at each load of it, until the next
store and the end of a load                                       store
a copy brought other bytes, or took    if `device` can be read    at that copy
another block's bytes
=====================================  =========================  =====================================

Not found: bytes that were wrong in the device block before they were stored; a wrong copy if `device` cannot
be read, because what arrives on the host then counts as what was stored; a block in another key's slot, which
is for the ledger to tell; changes after a check; one change in 2**64.

Blocks that this engine did not store are loaded unverified, and counted. Ranks that share a host pool may
share the checksums too: then each of them checks what another one has stored.

The checksum is XXH3 of 64 bits. On one core it was 2 to 3 times as fast as CRC-32C (11 against 5 GB/s in
blocks of 4 KiB, 33 against 14 in blocks of 1 MiB), and it drops the interpreter's lock for long blocks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from threading import Condition, Thread
from time import sleep
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from kvsm.copy_engines.interface import CopyEngine, CopyResult, check_accepted
from kvsm.copy_engines.layout import MemoryRows, make_layout, rows_of, tensors_of
from kvsm.copy_engines.pairs import checked_pairs
from kvsm.errors import ConfigError, TransferFailed, described
from kvsm.events import Direction
from kvsm.ids import IdArray, listed
from kvsm.plan import TransferJob

PIECE_BYTES = 4 << 20
"""Bytes that are hashed in one go, some hundred microseconds. Hashing short blocks keeps the interpreter's
lock, which the deciding thread would otherwise get back only after the switch interval of 5 ms."""

CHECKSUM_BYTES = 16
"""Of a host block in the table: its checksum, whether that is known, and room that keeps the next aligned."""


class VerifyingStatistics(msgspec.Struct, frozen=True):
    """Blocks so far.

    checked: loaded, and compared with what was stored.
    mismatched: found wrong in a store or a load.
    unverified: loaded without a checksum to compare with.
    """

    checked: int = 0
    mismatched: int = 0
    unverified: int = 0

    def __add__(self, other: VerifyingStatistics) -> VerifyingStatistics:
        return VerifyingStatistics(
            self.checked + other.checked,
            self.mismatched + other.mismatched,
            self.unverified + other.unverified,
        )


_NOTHING = VerifyingStatistics()


class VerifyingCopyEngine:
    """A `CopyEngine` over another one. Closing it closes both.

    engine: the one below.
    host: its host pool.
    device: its device pool or the tensors of that, if the host can read them.
    threads: how many threads check; 0: `poll`, `wait` and `close` check before they return.
    reads: called with the host blocks that are about to be read.
    table: where the checksums are kept, a uint8 array of `CHECKSUM_BYTES` for each host block, zeros
        at first; None: in memory of this engine.
    parts: where this rank's bytes are in a row of the host pool, (offset, bytes) of each part; None: the
        whole row. With `device` these are the parts of its tensors, in their order.

    Raises `ConfigError`.
    """

    def __init__(
        self,
        engine: CopyEngine,
        host: Any,
        device: Any | Sequence[Any] | None = None,
        threads: int = 1,
        reads: Callable[[Sequence[int]], None] | None = None,
        table: NDArray[np.uint8] | None = None,
        parts: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        if threads < 0:
            raise ConfigError(f"threads is {threads}; it must be 0 (check in the caller's thread) or more")
        self._checksums = _Checksums(host, device, reads, table, parts)
        if self._checksums.num_blocks != engine.num_host_blocks:
            raise ConfigError(
                f"the host pool to verify has {self._checksums.num_blocks} blocks, the engine's has "
                f"{engine.num_host_blocks}; give both the same"
            )
        self._engine = engine
        self._changed = Condition()
        self._live: dict[int, TransferJob] = {}
        self._unchecked: dict[int, tuple[TransferJob, CopyResult]] = {}
        """Ended by the engine and not checked yet, in the order in which they ended."""
        self._finished: list[CopyResult] = []
        self._statistics = _NOTHING
        self._broken = ""
        """Why a checking thread died."""
        self._queue: SimpleQueue[tuple[TransferJob, CopyResult] | None] = SimpleQueue()
        # Daemons: a process that ends without closing the engine must not hang behind an idle thread.
        self._threads = [Thread(target=self._run, name="kvsm-verify", daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    @property
    def num_device_blocks(self) -> int:
        return self._engine.num_device_blocks

    @property
    def num_host_blocks(self) -> int:
        return self._engine.num_host_blocks

    def mark(self) -> Any:
        return self._engine.mark()

    def submit(self, job: TransferJob, after: Any = None) -> None:
        with self._changed:
            check_accepted(job.transfer, self._live, self._broken)
            self._engine.submit(job, after)
            self._live[job.transfer] = job

    def hold_compute(self, transfers: Iterable[int]) -> None:
        # Compute may change what a check has still to read, so the host waits for the checks.
        self.wait(transfers)

    def poll(self) -> list[CopyResult]:
        self._collect()
        with self._changed:
            finished, self._finished = self._finished, []
            for result in finished:
                del self._live[result.transfer]
        return finished

    def wait(self, transfers: Iterable[int]) -> None:
        named = list(transfers)
        self._engine.wait(named)
        self._collect()
        with self._changed:
            self._changed.wait_for(lambda: not any(one in self._unchecked for one in named))

    def drain(self) -> None:
        with self._changed:
            live = list(self._live)
        self.wait(live)

    def close(self) -> None:
        self._engine.close()
        self.drain()
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def took_over(self, host_blocks: Sequence[int]) -> None:
        """Something else than a store has written these host blocks. Keeps the checksums of what is there."""
        self._checksums.keep(host_blocks)

    def statistics(self) -> VerifyingStatistics:
        """What was checked so far."""
        return self._statistics

    def _collect(self) -> None:
        """Have the checks done of what the engine has ended."""
        with self._changed:
            for result in self._engine.poll():
                ended = self._live[result.transfer], result
                self._unchecked[result.transfer] = ended
                if self._threads:
                    self._queue.put(ended)
            if self._broken:
                self._give_up()
            waiting = [] if self._threads else list(self._unchecked.values())
        for ended in waiting:
            self._check(*ended)

    def _run(self) -> None:
        """A checking thread."""
        try:
            while (ended := self._queue.get()) is not None:
                self._check(*ended)
        except BaseException as error:  # nobody else would hear of it
            with self._changed:
                self._broken = self._broken or f"a checking thread died of {described(error)}"
                self._give_up()

    def _give_up(self) -> None:
        """No byte is certain any more: unchecked transfers end as bad."""
        for _, result in list(self._unchecked.values()):
            self._end(_bad(result, self._broken), _NOTHING)

    def _check(self, job: TransferJob, result: CopyResult) -> None:
        found = _NOTHING
        try:
            if result.good:
                error, found = self._checksums.check(job)
                if error:
                    result = _bad(result, f"{job.direction.name.lower()} {job.transfer}: {error}")
        except Exception as error:
            result = _bad(result, f"its bytes could not be checked: {described(error)}")
        if job.direction is Direction.STORE and not result.good:
            self._checksums.forget(job, self.num_device_blocks)
        self._end(result, found)

    def _end(self, result: CopyResult, found: VerifyingStatistics) -> None:
        with self._changed:
            if self._unchecked.pop(result.transfer, None) is None:
                return  # given up meanwhile
            self._statistics += found
            self._finished.append(result)
            self._changed.notify_all()


def _bad(result: CopyResult, error: str) -> CopyResult:
    return msgspec.structs.replace(result, good=False, error=result.error or error, bytes=0)


class _Checksums:
    """What each host block must hold. Transfers that have no block in common may be checked at once."""

    def __init__(
        self,
        host: Any,
        device: Any | None,
        reads: Callable[[Sequence[int]], None] | None,
        table: NDArray[np.uint8] | None,
        parts: Sequence[tuple[int, int]] | None,
    ) -> None:
        # The pools are kept, because the views hold no reference to them.
        self._pools = (host, device)
        tensors = [] if device is None else tensors_of(device)
        _refuse_device_memory("host pool", host)
        for place, tensor in enumerate(tensors):
            _refuse_device_memory(f"device tensor {place}", tensor)
        whole = _view(rows_of("host pool", host))
        self._host = (
            [whole] if parts is None else [whole[:, first : first + length] for first, length in parts]
        )
        offsets = None if parts is None else [first for first, _ in parts]
        self._device = (
            [_view(rows) for rows in make_layout(tensors, host, offsets)[0].tensors] if tensors else []
        )
        self._reads = reads
        if table is None:
            table = np.zeros((self.num_blocks, CHECKSUM_BYTES), np.uint8)
        self._expected = table[:, :8].view(np.uint64)[:, 0]
        self._known = table[:, 8].view(np.bool_)

    @property
    def num_blocks(self) -> int:
        return len(self._host[0])

    def check(self, job: TransferJob) -> tuple[str, VerifyingStatistics]:
        """Check a good transfer, and keep the checksums of a store.

        Returns the error about the first wrong block, empty if there is none, and the blocks that were
        checked.
        """
        device_blocks, host_blocks = job.pairs()
        if self._reads is not None:
            self._reads(listed(host_blocks))
        hosts, found = np.asarray(host_blocks, np.int64), self._of_host(host_blocks)
        is_store = job.direction is Direction.STORE
        if is_store:
            self._expected[hosts] = found
            self._known[hosts] = True
        known = self._known[hosts]
        changed = known & (self._expected[hosts] != found)
        differs = self._of_device(device_blocks) != found if self._device else np.zeros_like(known)
        wrong, error = np.flatnonzero(changed | differs), ""
        if len(wrong):
            first = wrong[0]
            tell = self._not_stored if changed[first] else self._not_copied
            error = tell(device_blocks[first], hosts[first], found[first])
        checked = 0 if is_store else int(np.count_nonzero(known))
        unverified = 0 if is_store else len(known) - checked
        return error, VerifyingStatistics(checked, len(wrong), unverified)

    def keep(self, host_blocks: Sequence[int]) -> None:
        """Take what these host blocks hold as what was stored."""
        hosts = np.asarray(host_blocks, np.int64)
        self._expected[hosts], self._known[hosts] = self._of_host(tuple(host_blocks)), True

    def forget(self, job: TransferJob, num_device_blocks: int) -> None:
        """The host blocks of a bad store may hold anything. A job that could not be right has not run at
        all."""
        with suppress(TransferFailed):
            _, host_blocks = checked_pairs(job, num_device_blocks, self.num_blocks)
            self._known[np.asarray(host_blocks, np.int64)] = False

    def _not_stored(self, _: int, host_block: int, found: int) -> str:
        return (
            f"host block {host_block} does not hold what was stored in it: its checksum is {found:016x}, and "
            f"was {self._expected[host_block]:016x}; look for faulty memory, or for who else writes there"
        )

    def _not_copied(self, device_block: int, host_block: int, _: int) -> str:
        return (
            f"device block {device_block} and host block {host_block} do not hold the same bytes after the "
            "copy; look for a faulty copy path, or for who wrote there meanwhile"
        )

    def _of_host(self, blocks: IdArray) -> NDArray[np.uint64]:
        return self._in_pieces(self._host, blocks)

    def _of_device(self, blocks: IdArray) -> NDArray[np.uint64]:
        return self._in_pieces(self._device, blocks)

    def _in_pieces(self, parts: Sequence[NDArray[np.uint8]], blocks: IdArray) -> NDArray[np.uint64]:
        """The checksum of each block, of its parts in their order. The order is the same on both sides."""
        ids, step = listed(blocks), max(1, PIECE_BYTES // sum(rows.shape[1] for rows in parts))
        found = np.empty(len(ids), np.uint64)
        for first in range(0, len(ids), step):
            if first:
                sleep(0)  # gives up the interpreter's lock for a moment
            piece = ids[first : first + step]
            checksums = (_checksum(parts, block) for block in piece)
            found[first : first + step] = np.fromiter(checksums, np.uint64, len(piece))
        return found


def _checksum(parts: Sequence[NDArray[np.uint8]], block: int) -> int:
    if len(parts) == 1:
        return xxhash.xxh3_64_intdigest(parts[0][block])
    hasher = xxhash.xxh3_64()
    for rows in parts:
        hasher.update(rows[block])
    return hasher.intdigest()


def _refuse_device_memory(name: str, pool: Any) -> None:
    where = getattr(getattr(pool, "device", None), "type", "cpu")
    if where != "cpu":
        raise ConfigError(f"{name} is in the memory of a {where} device; give what the host can read")


def _view(rows: MemoryRows) -> NDArray[np.uint8]:
    """Host memory as an array that is only read, whatever library made it."""
    memory = (ctypes.c_uint8 * (rows.end - rows.address)).from_address(rows.address)
    flat = np.ctypeslib.as_array(memory)
    return as_strided(flat, (rows.num_rows, rows.row_bytes), (rows.stride, 1), writeable=False)
