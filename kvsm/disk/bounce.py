"""A buffer of some slots, as they lie in the file: what a thread stores from and loads into.

Slots that are neighbours in the file are neighbours here. So a run of them is one call, headers and all. Rows
that direct I/O can take are not copied here before they are written: then only their headers lie here.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvsm.copy_engines.pools import NumpyPools
from kvsm.disk.aligned import aligned_memory, are_aligned
from kvsm.disk.formats import ALIGNMENT, HEADER_BYTES, HeaderState, SlotGeneration, SlotHeader, read_header
from kvsm.disk.host_proof import HostProof
from kvsm.disk.slot_file import SlotFile
from kvsm.errors import TransferFailed
from kvsm.events import Direction
from kvsm.states.disk_slot import DiskSlotTrigger

_LOGGER = logging.getLogger("kvsm.disk")

BOUNCE_BYTES = 4 << 20
"""Of a buffer, unless one slot is larger. Longer calls are not faster."""

# A call takes a header and a payload of each slot, and the system limits the parts of a call.
assert os.sysconf("SC_IOV_MAX") >= 2 * BOUNCE_BYTES // (HEADER_BYTES + ALIGNMENT)


class BounceBuffer:
    """Memory for `num_slots` slots of this file. One thread at a time.

    host: the tensors that are stored and loaded. `pools` copies between them and the payloads.
    """

    def __init__(self, file: SlotFile, host: Any | Sequence[Any], num_slots: int) -> None:
        self.num_slots = num_slots
        self._file, self._table = file, file.table
        size, payload_bytes = file.geometry.slot_bytes, file.geometry.payload_bytes
        whole = aligned_memory(num_slots * size)[: num_slots * size]
        self._memory = whole
        self._slots = whole.reshape(num_slots, size)
        self._payloads = self._slots[:, HEADER_BYTES : HEADER_BYTES + payload_bytes]
        self.pools = NumpyPools(host, self._payloads)
        rows = self.pools.device
        self._rows = rows[0] if len(rows) == 1 and are_aligned(rows[0]) else None
        """The blocks, if they can be written from where they are."""

    def store(
        self,
        blocks: NDArray[np.int64],
        slots: Sequence[int],
        keys: Sequence[bytes],
        generation: SlotGeneration,
        proof: HostProof | None,
    ) -> None:
        """Write these blocks to these slots, which are sorted, if they hold what they must. Raises `OSError`
        and `TransferFailed`; no slot is sealed then."""
        payloads = self._to_write(blocks)
        checksums = [xxhash.xxh3_64_intdigest(payload) for payload in payloads]
        if proof is not None:
            self._prove_host(proof, blocks, payloads, checksums)
        self._file.check_there()
        self._table.begin(slots, generation)
        try:
            self._put_headers(HeaderState.DROPPED, slots, keys, generation, checksums)
            for first, last in _runs(slots):
                self._file.write(self._parts(payloads, first, last), self._file.geometry.offset(slots[first]))
            self._put_headers(HeaderState.SEALED, slots, keys, generation, checksums)
            for place, slot in enumerate(slots):
                self._file.write([self._slots[place, :HEADER_BYTES]], self._file.geometry.offset(slot))
        except BaseException:
            self._table.step(slots, DiskSlotTrigger.FAIL)
            raise
        self._table.step(slots, DiskSlotTrigger.SEAL)

    def load(
        self,
        blocks: NDArray[np.int64],
        slots: Sequence[int],
        keys: Sequence[bytes],
        proof: HostProof | None,
    ) -> None:
        """Read these slots, which are sorted, prove all of them, and then copy them to these blocks. Raises
        `OSError` and `TransferFailed`; no block was changed then.

        keys: what they must hold; empty: whatever was stored there last.
        """
        found: list[NDArray[np.uint64]] = []
        generations = [self._table.generation(slot) for slot in slots]
        for first, last in _runs(slots):
            self._file.read(self._part(first, last), self._file.geometry.offset(slots[first]))
        for place, (slot, generation) in enumerate(zip(slots, generations)):
            header = read_header(self._slots[place, :HEADER_BYTES].tobytes())
            if proof is not None and header is not None:
                found.append(proof.of_blocks(self._payloads[place], header.checksum))
            wrong = self._wrong(place, slot, generation, header)
            if header is None or wrong:
                self._table.step([slot], DiskSlotTrigger.DISPROVE)
                raise TransferFailed(f"{self._file.path}: disk slot {slot} {wrong}")
            if keys and header.key != keys[place]:
                raise TransferFailed(
                    f"{self._file.path}: disk slot {slot} holds key {header.key.hex()}, and "
                    f"{keys[place].hex()} is asked for"
                )
        if proof is not None:
            proof.begin(blocks)
        self.pools.copy(Direction.LOAD, blocks, np.arange(len(slots)))
        if proof is not None:
            for block, of_blocks in zip(blocks.tolist(), found):
                proof.end(block, of_blocks)

    def _to_write(self, blocks: NDArray[np.int64]) -> Sequence[Any]:
        """The payloads of these blocks: the rows themselves if they are aligned, else copies."""
        if self._rows is not None:
            return [self._rows[block] for block in blocks.tolist()]
        self.pools.copy(Direction.STORE, blocks, np.arange(len(blocks)))
        return list(self._payloads[: len(blocks)])

    def _prove_host(
        self,
        proof: HostProof,
        blocks: NDArray[np.int64],
        payloads: Sequence[Any],
        checksums: Sequence[int],
    ) -> None:
        for block, payload, checksum in zip(blocks.tolist(), payloads, checksums):
            wrong = proof.wrong(block, proof.of_blocks(payload, checksum))
            if wrong:
                _LOGGER.warning("%s: a block is not stored: %s", self._file.path, wrong)
                raise TransferFailed(f"not stored on disk: {wrong}")

    def _parts(self, payloads: Sequence[Any], first: int, last: int) -> list[NDArray[np.uint8]]:
        """The parts of one call that writes these places, headers and all."""
        if self._rows is None:
            return [self._part(first, last)]
        headers = self._slots[first:last, :HEADER_BYTES]
        return [part for pair in zip(headers, payloads[first:last]) for part in pair]

    def _put_headers(
        self,
        state: HeaderState,
        slots: Sequence[int],
        keys: Sequence[bytes],
        generation: SlotGeneration,
        checksums: Sequence[int],
    ) -> None:
        for place, (slot, key, checksum) in enumerate(zip(slots, keys, checksums)):
            header = SlotHeader(
                state,
                self._file.file_id,
                self._file.digest,
                slot,
                generation,
                self._file.geometry.payload_bytes,
                checksum,
                key,
            )
            self._slots[place, :HEADER_BYTES] = np.frombuffer(header.encode(), np.uint8)

    def _wrong(self, place: int, slot: int, generation: SlotGeneration, header: SlotHeader | None) -> str:
        """What is wrong with a slot that was read; empty if it holds what was stored."""
        if header is None:
            return "has a damaged header"
        file = self._file
        ours = file.file_id, file.digest, slot, file.geometry.payload_bytes
        if (header.file_id, header.identity, header.slot, header.length) != ours:
            return "has a header of another file or place"
        if header.state is not HeaderState.SEALED or header.generation != generation:
            return f"holds {header.state.name} {header.generation}, and not {generation}"
        if xxhash.xxh3_64_intdigest(self._payloads[place]) != header.checksum:
            return "does not hold what was stored in it: its payload is damaged"
        return ""

    def _part(self, first: int, last: int) -> NDArray[np.uint8]:
        size = self._file.geometry.slot_bytes
        return self._memory[first * size : last * size]


def _runs(slots: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The places of slots that follow each other, (first, behind the last) of each run."""
    first = 0
    for place in range(1, len(slots) + 1):
        if place == len(slots) or slots[place] != slots[place - 1] + 1:
            yield first, place
            first = place
