"""A table with the checksum of each block of a host pool, and the comparison of blocks with it.

The table has two words for each host block: the checksum of its bytes, and a seal. The seal of a kept pool is
a hash of the checksum, the host block, the block's key and its generation. So a matching seal proves which
block is in the slot, as the header of a disk slot does, and a matching checksum proves its bytes. If the log,
the pool or the table is an older copy, the generations differ, and the blocks are refused. If the pool is not
kept, no other process reads the table, and the seal is the inverted checksum. Either seal detects a flipped
bit in the table.

`verifying.py` (device) and `kvsm.tiers.disk` (disk) decide when blocks are checked.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import suppress
from struct import Struct
from time import sleep
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from kvsm.copies.layout import MemoryRows, host_array, make_layout, rows_of, tensors_of
from kvsm.copies.pairs import checked_pairs
from kvsm.core.plan import TransferJob
from kvsm.errors import ConfigError, TransferFailed
from kvsm.events import Direction
from kvsm.ids import IdArray, listed

PIECE_BYTES = 4 << 20
"""Bytes hashed before the thread yields the interpreter's lock (GIL), some hundred microseconds. Hashing
short blocks holds the GIL; without the yield the scheduling thread would wait for the switch interval of
5 ms."""

CHECKSUM_BYTES = 16
"""Size of an entry in the table: checksum and seal of a host block, 64 bits each."""

_SEALED = Struct("<QQQ")
"""The part of a seal's input before the key: checksum, host block, generation."""

Names = tuple[Sequence[bytes], Sequence[int]]
"""The key and the generation of each of some host blocks, in their order."""

NO_NAMES: Names = ((), ())
"""For pools that are not kept."""


class VerifyingStatistics(msgspec.Struct, frozen=True):
    """Counts of blocks.

    checked: blocks of loads whose checksum was compared.
    mismatched: blocks of stores or loads whose bytes were wrong.
    unverified: blocks of loads without a checksum: loaded anyway, or refused if the pools are kept.
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


NOTHING_CHECKED = VerifyingStatistics()


class BlockChecksums:
    """The checksum table of a host pool. Transfers without a common block may be checked at the same time.

    All parameters are those of `VerifyingCopyEngine`. Raises `ConfigError`. `block_bytes` is the size of a
    host block.
    """

    def __init__(
        self,
        host: Any,
        device: Any | None = None,
        reads: Callable[[Sequence[int]], None] | None = None,
        table: NDArray[np.uint8] | None = None,
        parts: Sequence[tuple[int, int]] | None = None,
        kept: bool = False,
    ) -> None:
        # Keep a reference to the pools: the views below do not hold one.
        self._pools = (host, device)
        tensors, host = [] if device is None else tensors_of(device), host_array(host)
        _refuse_device_memory("host pool", host)
        for place, tensor in enumerate(tensors):
            _refuse_device_memory(f"device tensor {place}", tensor)
        whole = _view(rows_of("host pool", host))
        self.block_bytes, self._kept = whole.shape[1], kept
        self._parts = [(0, self.block_bytes)] if parts is None else list(parts)
        self._host = self._parts_of(whole)
        offsets = None if parts is None else [first for first, _ in parts]
        self._device = (
            [_view(rows) for rows in make_layout(tensors, host, offsets)[0].tensors] if tensors else []
        )
        self._reads = reads
        if table is None:
            table = np.zeros((self.num_blocks, CHECKSUM_BYTES), np.uint8)
        self._table = table[:, :CHECKSUM_BYTES].view(np.uint64)
        """Checksum and seal of each host block."""
        self._proved = np.zeros((self.num_blocks, 2), np.uint64)
        """The entries that this process has stored or checked. If another rank changes an entry of the table,
        the two differ, and the block is checked again."""
        self._proved_generations = np.zeros(self.num_blocks, np.int64)
        """The generations of the blocks in `_proved`, if the pools are kept."""

    @property
    def num_blocks(self) -> int:
        """Size of the host pool."""
        return len(self._host[0])

    def check(self, job: TransferJob) -> tuple[str, VerifyingStatistics]:
        """Check a good transfer after its copy; record the checksums of a store.

        Returns the error about the first wrong block, or an empty text, and the counts of this check.
        """
        device_blocks, host_blocks = job.pairs()
        if self._reads is not None:
            self._reads(listed(host_blocks))
        hosts, found = np.asarray(host_blocks, np.int64), self._of_host(host_blocks)
        is_store, names = job.direction is Direction.STORE, (job.keys, job.generations)
        if is_store:
            self.put(hosts, found, names)
        known = self._known(hosts, names)
        changed = known & (self._table[hosts, 0] != found)
        differs = self._of_device(device_blocks) != found if self._device else np.zeros_like(known)
        wrong, error = np.flatnonzero(changed | differs), ""
        if len(wrong):
            first = wrong[0]
            error = (
                self._not_stored(hosts[first], found[first], "was stored in it")
                if changed[first]
                else self._not_copied(device_blocks[first], hosts[first])
            )
        checked = 0 if is_store else int(np.count_nonzero(known))
        unverified = 0 if is_store else len(known) - checked
        return error, VerifyingStatistics(checked, len(wrong), unverified)

    def unproved(self, job: TransferJob) -> NDArray[np.bool_]:
        """For a load from a kept pool: mask of the host blocks that this process has neither stored nor
        checked."""
        hosts = np.asarray(job.pairs()[1], np.int64)
        unlike: NDArray[np.bool_] = (self._table[hosts] != self._proved[hosts]).any(axis=1)
        unlike |= self._proved_generations[hosts] != np.asarray(job.generations, np.int64)
        return unlike | ~self._table[hosts].any(axis=1)

    def prove(self, job: TransferJob) -> tuple[str, VerifyingStatistics]:
        """Check the unproved blocks of a load from a kept pool before its copy. Returns as `check` does."""
        places = np.flatnonzero(self.unproved(job))
        hosts = np.asarray(job.pairs()[1], np.int64)[places]
        names = [job.keys[place] for place in places], [job.generations[place] for place in places]
        if self._reads is not None:
            self._reads(hosts.tolist())
        entries, known = self._table[hosts], self._known(hosts, names)
        found = self._of_host(hosts)
        changed = known & (entries[:, 0] != found)
        right = known & ~changed
        self._proved[hosts[right]] = entries[right]
        self._proved_generations[hosts[right]] = np.asarray(names[1], np.int64)[right]
        wrong, error = np.flatnonzero(~right), ""
        if len(wrong):
            first = wrong[0]
            error = (
                self._not_stored(hosts[first], found[first], "an earlier run stored in it")
                if changed[first]
                else self._not_known(hosts[first])
            )
        statistics = VerifyingStatistics(*map(int, map(np.count_nonzero, (known, changed, ~known))))
        return error, statistics

    def keep(self, host_blocks: Sequence[int], names: Names = NO_NAMES) -> None:
        """Compute and record the checksums of these host blocks. names: required for a kept pool."""
        self.put(np.asarray(host_blocks, np.int64), self._of_host(tuple(host_blocks)), names)

    @property
    def is_kept(self) -> bool:
        """Whether the pools outlive their process. Then each check and each record needs the names of its
        blocks."""
        return self._kept

    @property
    def is_plain(self) -> bool:
        """Whether the checksum of a block is the XXH3 of its whole row in the host pool."""
        return self._parts == [(0, self.block_bytes)]

    def of_copies(self, copies: NDArray[np.uint8]) -> NDArray[np.uint64]:
        """Return the checksums of copies of host blocks, given as `[copies, block_bytes]`."""
        return self._in_pieces(self._parts_of(copies), np.arange(len(copies)))

    def wrong(self, hosts: NDArray[np.int64], found: NDArray[np.uint64], names: Names = NO_NAMES) -> str:
        """Compare checksums with the table. Returns the error about the first host block that differs, or an
        empty text. A block without a checksum passes, unless the pools are kept.

        found: checksums computed from the bytes.
        names: required for a kept pool.
        """
        known = self._known(hosts, names)
        changed = known & (self._table[hosts, 0] != found)
        wrong = np.flatnonzero(changed | ~known if self._kept else changed)
        if not len(wrong):
            return ""
        first = wrong[0]
        if known[first]:
            return self._not_stored(hosts[first], found[first], "was stored in it")
        return self._not_known(hosts[first])

    def clear(self, hosts: NDArray[np.int64]) -> None:
        """Delete the entries of host blocks that are about to be written: an interrupted write leaves
        unknown bytes."""
        self._table[hosts] = 0

    def put(self, hosts: NDArray[np.int64], found: NDArray[np.uint64], names: Names = NO_NAMES) -> None:
        """Record these checksums, and their seals, for these host blocks. names: required for a kept pool."""
        entries = np.stack([found, self._seals(hosts, found, names)], axis=1)
        self._table[hosts] = self._proved[hosts] = entries
        if self._kept:
            self._proved_generations[hosts] = names[1]

    def forget(self, job: TransferJob, num_device_blocks: int) -> tuple[Any, ...]:
        """Delete the entries of a store's host blocks: after a bad store they may hold anything. An invalid
        job changes no entry, because nothing of it ran. Returns the argument for `put_back`."""
        with suppress(TransferFailed):
            _, host_blocks = checked_pairs(job, num_device_blocks, self.num_blocks)
            hosts = np.asarray(host_blocks, np.int64)
            entries = self._table[hosts]
            self._table[hosts] = 0
            return hosts, entries
        return ()

    def put_back(self, forgotten: tuple[Any, ...]) -> None:
        """Restore the entries that `forget` deleted, because the store has not run."""
        if forgotten:
            hosts, entries = forgotten
            self._table[hosts] = entries

    def _known(self, hosts: NDArray[np.int64], names: Names) -> NDArray[np.bool_]:
        """Return a mask of the host blocks with a valid seal. In a kept pool, the entry of such a block is
        for the named key and generation."""
        known: NDArray[np.bool_] = self._seals(hosts, self._table[hosts, 0], names) == self._table[hosts, 1]
        return known

    def _seals(
        self, hosts: NDArray[np.int64], checksums: NDArray[np.uint64], names: Names
    ) -> NDArray[np.uint64]:
        """Compute the seals of these host blocks for these checksums and names."""
        if not self._kept:
            return ~checksums
        of_blocks = zip(checksums.tolist(), hosts.tolist(), names[1], names[0], strict=True)
        seals = (
            xxhash.xxh3_64_intdigest(_SEALED.pack(checksum, host, generation) + key)
            for checksum, host, generation, key in of_blocks
        )
        return np.fromiter(seals, np.uint64, len(hosts))

    def _not_stored(self, host_block: int, found: int, what: str) -> str:
        return (
            f"host block {host_block} does not hold what {what}: its checksum is {found:016x}, and was "
            f"{self._table[host_block, 0]:016x}; look for faulty memory, or for who else writes there"
        )

    def _not_known(self, host_block: int) -> str:
        if not self._table[host_block].any():
            return (
                f"host block {host_block} has no checksum, so it is unknown whether it holds what was "
                "stored in it; look for faulty memory, or for a store that was cut off"
            )
        return (
            f"host block {host_block} holds another block, or one of another time, than the log says: its "
            "checksum is not sealed for this key and generation; look for a log, a pool or checksums that "
            "were restored from a copy"
        )

    def _not_copied(self, device_block: int, host_block: int) -> str:
        return (
            f"device block {device_block} and host block {host_block} do not hold the same bytes after the "
            "copy; look for a faulty copy path, or for who wrote there meanwhile"
        )

    def _parts_of(self, rows: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
        return [rows[:, first : first + length] for first, length in self._parts]

    def _of_host(self, blocks: IdArray) -> NDArray[np.uint64]:
        return self._in_pieces(self._host, blocks)

    def _of_device(self, blocks: IdArray) -> NDArray[np.uint64]:
        return self._in_pieces(self._device, blocks)

    def _in_pieces(self, parts: Sequence[NDArray[np.uint8]], blocks: IdArray) -> NDArray[np.uint64]:
        """Compute the checksum of each block over its parts. The order of the parts is the same on the device
        and on the host."""
        ids, step = listed(blocks), max(1, PIECE_BYTES // sum(rows.shape[1] for rows in parts))
        found = np.empty(len(ids), np.uint64)
        for first in range(0, len(ids), step):
            if first:
                sleep(0)  # yields the GIL
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
    """View host memory as a read-only array."""
    memory = (ctypes.c_uint8 * (rows.end - rows.address)).from_address(rows.address)
    flat = np.ctypeslib.as_array(memory)
    return as_strided(flat, (rows.num_rows, rows.row_bytes), (rows.stride, 1), writeable=False)
