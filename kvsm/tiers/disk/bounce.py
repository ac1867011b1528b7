"""The buffer of one copying thread: headers and payloads of some slots, laid out as in the file.

Slots that are adjacent in the file are adjacent in the buffer. So one call reads or writes the headers of a
run of slots, and another call their payloads. Rows that direct I/O can write are not copied to the buffer.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvsm.copies.rank_memory import NumpyPools
from kvsm.errors import TransferFailed
from kvsm.events import Direction
from kvsm.states.disk_slot import DiskSlotTrigger
from kvsm.tiers.disk.aligned import aligned_memory, are_aligned
from kvsm.tiers.disk.formats import (
    ALIGNMENT,
    HEADER_BYTES,
    HEADER_STEP,
    HeaderState,
    SlotGeneration,
    SlotHeader,
    header_checksum,
)
from kvsm.tiers.disk.host_proof import HostProof, RowName
from kvsm.tiers.disk.slot_file import SlotFile
from kvsm.tiers.disk.slot_table import SlotProof

_LOGGER = logging.getLogger("kvsm.tiers.disk")

BOUNCE_BYTES = 4 << 20
"""Size of the payloads of a buffer, unless a single payload is larger. Longer calls are not faster."""

# One call writes the payloads of adjacent slots as separate parts, and the system limits their number.
assert os.sysconf("SC_IOV_MAX") >= BOUNCE_BYTES // ALIGNMENT


class BounceBuffer:
    """A buffer for `num_slots` slots of a file, for one thread at a time.

    host: the tensors of the host pool. `pools` copies between them and the payloads.
    """

    def __init__(self, file: SlotFile, host: Any | Sequence[Any], num_slots: int) -> None:
        self.num_slots = num_slots
        self._file, self._table = file, file.table
        step, payload_bytes = file.geometry.payload_step, file.geometry.payload_bytes
        self._headers = _rows(num_slots, HEADER_STEP)
        self._slots = _rows(num_slots, step)
        self._payloads = self._slots[:, :payload_bytes]
        self.pools = NumpyPools(host, self._payloads)
        rows = self.pools.device
        self._rows = rows[0] if len(rows) == 1 and are_aligned(rows[0]) else None
        """The blocks of the host pool, if they can be written without a copy; else None."""

    def store(
        self,
        blocks: NDArray[np.int64],
        slots: Sequence[int],
        keys: Sequence[bytes],
        generation: SlotGeneration,
        era: bytes,
        proof: HostProof | None,
        names: Sequence[RowName],
    ) -> None:
        """Check these blocks with `proof`, and write them to these slots. Raises `OSError` and
        `TransferFailed`; then no slot is sealed.

        slots: sorted.
        generation, era: written to the headers of the slots.
        proof: the checksums of the host pool; None: no check.
        names: of the blocks in the host pool, for `proof`.
        """
        payloads = self._to_write(blocks)
        checksums = [xxhash.xxh3_64_intdigest(payload) for payload in payloads]
        if proof is not None:
            self._prove_host(proof, blocks, payloads, checksums, names)
        self._file.check_there()
        headers = [
            self._header(HeaderState.SEALED, slot, generation, era, checksum, key).encode()
            for slot, checksum, key in zip(slots, checksums, keys)
        ]
        self._table.begin(slots, generation)
        try:
            self._write_headers(slots, [self._dropped(slot, generation, era) for slot in slots])
            for first, last in _runs(slots):
                parts = self._parts(payloads, first, last)
                self._file.write(parts, self._file.geometry.payload_at(slots[first]))
            self._write_headers(slots, headers)
        except BaseException:
            self._table.step(slots, DiskSlotTrigger.FAIL)
            raise
        self._table.seal(slots, checksums, list(map(header_checksum, headers)))

    def load(
        self,
        blocks: NDArray[np.int64],
        slots: Sequence[int],
        keys: Sequence[bytes],
        era: bytes,
        proof: HostProof | None,
        names: Sequence[RowName],
    ) -> None:
        """Read these slots, prove all of them, and then copy them to these blocks. Raises `OSError` and
        `TransferFailed`; then no block has changed.

        slots: sorted.
        keys, era: the expected keys and era of the slots. Without keys, only the payloads are proved.
        proof: records the checksums of the written blocks; None: there is no table.
        names: of the blocks in the host pool, for `proof`.
        """
        found: list[NDArray[np.uint64]] = []
        wanted = [self._table.proof(slot) for slot in slots]
        for first, last in _runs(slots):
            self._file.read(self._slots[first:last], self._file.geometry.payload_at(slots[first]))
        for place, (slot, expected) in enumerate(zip(slots, wanted)):
            if not self._is_payload(place, expected):
                self._table.step([slot], DiskSlotTrigger.DISPROVE)
                raise TransferFailed(
                    f"{self._file.path}: disk slot {slot} does not hold what was stored in it: its payload "
                    "is damaged"
                )
            if keys and not self._is_key(keys[place], era, slot, expected):
                raise TransferFailed(
                    f"{self._file.path}: disk slot {slot} holds another key than {keys[place].hex()}, which "
                    "is asked for, or is of another era"
                )
            if proof is not None:
                found.append(proof.of_blocks(self._payloads[place], expected.payload))
        if proof is not None:
            proof.begin(blocks)
        self.pools.copy(Direction.LOAD, blocks, np.arange(len(slots)))
        if proof is not None:
            for block, of_blocks, name in zip(blocks.tolist(), found, names):
                proof.end(block, of_blocks, name)

    def _to_write(self, blocks: NDArray[np.int64]) -> Sequence[Any]:
        """Return the payloads of these blocks: the rows themselves if they are aligned, else copies."""
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
        names: Sequence[RowName],
    ) -> None:
        for block, payload, checksum, name in zip(blocks.tolist(), payloads, checksums, names):
            wrong = proof.wrong(block, proof.of_blocks(payload, checksum), name)
            if wrong:
                _LOGGER.warning("%s: a block is not stored: %s", self._file.path, wrong)
                raise TransferFailed(f"not stored on disk: {wrong}")

    def _parts(self, payloads: Sequence[Any], first: int, last: int) -> list[Any]:
        """Return the parts of one write call for the payloads at places `first` to `last`, exclusive."""
        return [self._slots[first:last]] if self._rows is None else list(payloads[first:last])

    def _write_headers(self, slots: Sequence[int], headers: Sequence[bytes]) -> None:
        for place, header in enumerate(headers):
            self._headers[place, :HEADER_BYTES] = np.frombuffer(header, np.uint8)
        for first, last in _runs(slots):
            self._file.write([self._headers[first:last]], self._file.geometry.header_at(slots[first]))

    def _dropped(self, slot: int, generation: SlotGeneration, era: bytes) -> bytes:
        """Return the header of a slot whose payload is about to be written."""
        return self._header(HeaderState.DROPPED, slot, generation, era, 0, b"").encode()

    def _is_payload(self, place: int, expected: SlotProof) -> bool:
        return xxhash.xxh3_64_intdigest(self._payloads[place]) == expected.payload

    def _is_key(self, key: bytes, era: bytes, slot: int, expected: SlotProof) -> bool:
        """Whether the header of this slot names this key and era. Only its checksum is in memory, so it is
        compared with the checksum of a header with this key and era."""
        header = self._header(HeaderState.SEALED, slot, expected.generation, era, expected.payload, key)
        return header_checksum(header.encode()) == expected.header

    def _header(
        self, state: HeaderState, slot: int, generation: SlotGeneration, era: bytes, checksum: int, key: bytes
    ) -> SlotHeader:
        file = self._file
        length = file.geometry.payload_bytes
        return SlotHeader(state, file.file_id, file.digest, era, slot, generation, length, checksum, key)


def _rows(count: int, row_bytes: int) -> NDArray[np.uint8]:
    return aligned_memory(count * row_bytes)[: count * row_bytes].reshape(count, row_bytes)


def _runs(slots: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (first, last) for each run of consecutive slots, as places in `slots`; `last` is exclusive."""
    first = 0
    for place in range(1, len(slots) + 1):
        if place == len(slots) or slots[place] != slots[place - 1] + 1:
            yield first, place
            first = place
