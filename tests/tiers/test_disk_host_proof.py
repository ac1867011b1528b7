"""The checksums beside the host pool and those on disk: no copy gives bad bytes a good checksum."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
from copy_rigs import finish
from disk_rig import DISK_IDENTITY, GEOMETRY, PAYLOAD, SLOTS, content, directory, job, name, read_header

from kvsm.copies.checksums import NO_NAMES, BlockChecksums, Names
from kvsm.copies.rank_memory import NumpyPools
from kvsm.errors import ConfigError
from kvsm.events import Direction
from kvsm.states.disk_slot import SEALED
from kvsm.tiers.disk import DiskCopyEngine, FlushPolicy, SlotFile
from kvsm.tiers.disk.formats import HEADER_STEP, HeaderState
from kvsm.tiers.disk.health import TierHealth

STORE, LOAD = Direction.STORE, Direction.LOAD

SHAPES = [
    pytest.param(1, None, id="a block in a slot"),
    pytest.param(4, None, id="four blocks in a slot"),
    pytest.param(1, ((256, 256), (0, 256)), id="parts in another order"),
    pytest.param(2, ((128, 128), (0, 128)), id="both"),
]
"""Host blocks in a slot of the disk, and the order in which their parts are hashed."""


class Proved:
    """A disk tier whose host pool has checksums."""

    def __init__(
        self, engine: DiskCopyEngine, host: np.ndarray[Any, Any], sums: BlockChecksums, chunk: int
    ) -> None:
        self.engine, self.host, self.sums, self.chunk = engine, host, sums, chunk
        self._transfers = 0
        self.held: dict[int, tuple[bytes, int]] = {}
        """The key and the generation of each row."""

    def blocks(self, row: int) -> list[int]:
        return list(range(row * self.chunk, (row + 1) * self.chunk))

    def names(self, row: int) -> Names:
        """Of the blocks of this row."""
        key, generation = self.held[row]
        return ([key] * self.chunk, [generation] * self.chunk) if self.sums.is_kept else NO_NAMES

    def fill(self, row: int, key: int) -> None:
        """As a store from the device does."""
        self._transfers += 1
        self.host[row], self.held[row] = content(key), (name(key), self._transfers)
        self.sums.keep(self.blocks(row), self.names(row))

    def copy(self, direction: Direction, rows: Sequence[int], keys: Sequence[int]) -> str:
        """Copy these rows to or from the slots of the same numbers. Returns the error."""
        self._transfers += 1
        wanted = {row: (name(key), self._transfers) for row, key in zip(rows, keys)}
        if direction is STORE:
            wanted |= {row: self.held[row] for row in rows if row in self.held}
        moved = job(self._transfers, direction, rows, rows, keys)
        if self.sums.is_kept:
            moved = msgspec.structs.replace(moved, generations=tuple(wanted[row][1] for row in rows))
        self.engine.submit(moved)
        (result,) = finish(self.engine, [self._transfers])
        if direction is LOAD and "payload" not in result.error:
            self.held |= wanted
        assert result.good != bool(result.error)
        return result.error


def wrong_now(tier: Proved, row: int) -> str:
    """What the table says against the bytes that this row holds now."""
    blocks = tier.blocks(row)
    rows = tier.host.reshape(SLOTS * tier.chunk, -1)[blocks]
    return tier.sums.wrong(np.array(blocks), tier.sums.of_copies(rows), tier.names(row))


@contextmanager
def proved(
    chunk: int = 1, parts: Sequence[tuple[int, int]] | None = None, kept: bool = False
) -> Iterator[Proved]:
    host = np.zeros((SLOTS, PAYLOAD), np.uint8)
    sums = BlockChecksums(host.reshape(SLOTS * chunk, -1), parts=parts, kept=kept)
    with directory() as made:
        file = SlotFile(made / "tier", GEOMETRY, DISK_IDENTITY)
        engine = DiskCopyEngine(host, file, FlushPolicy.NONE, threads=1, checksums=sums)
        with closing(engine):
            yield Proved(engine, host, sums, chunk)


@pytest.mark.parametrize(("chunk", "parts"), SHAPES)
def test_a_flipped_bit_of_the_host_gets_no_checksum_on_disk(
    chunk: int, parts: Sequence[tuple[int, int]] | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Correct bytes (S15): the store is bad and told, nothing is sealed, and the disk is not blamed."""
    caplog.set_level(logging.WARNING, "kvsm.tiers.disk")
    with proved(chunk, parts) as tier:
        for row in (1, 2):
            tier.fill(row, row)
        tier.host[2, 300] ^= 4
        assert "does not hold what was stored in it" in tier.copy(STORE, [1, 2], [1, 2])
        assert not (tier.engine.file.table.states == SEALED).any()
        with tier.engine.file.path.open("rb") as file:
            for slot in (1, 2):
                file.seek(GEOMETRY.header_at(slot))
                header = read_header(file.read(HEADER_STEP))
                assert header is None or header.state is not HeaderState.SEALED
        assert tier.engine.health == TierHealth()
        assert "tier: a block is not stored: host block" in caplog.text
        assert tier.copy(STORE, [1], [1]) == ""


@pytest.mark.parametrize(("chunk", "parts"), SHAPES)
def test_a_load_says_what_the_host_holds(
    chunk: int, parts: Sequence[tuple[int, int]] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Correct bytes (S15): the table gets what was proved on disk. Memory is not read again for it, so a bit
    that changes there after the copy is found."""
    with proved(chunk, parts) as tier:
        tier.fill(3, 5)
        assert tier.copy(STORE, [3], [5]) == ""
        tier.fill(3, 6)
        with monkeypatch.context() as patch:
            patch.setattr(BlockChecksums, "_of_host", None)
            assert tier.copy(LOAD, [3], [5]) == ""
        assert np.array_equal(tier.host[3], content(5))
        assert wrong_now(tier, 3) == ""
        tier.host[3, 300] ^= 4
        assert "does not hold what was stored in it" in wrong_now(tier, 3)


def test_a_load_that_is_cut_off_leaves_no_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a later life could take half of a block for what the table says."""
    with proved(kept=True) as tier:
        for row in (1, 2):
            tier.fill(row, row)
        assert tier.copy(STORE, [1, 2], [1, 2]) == ""
        with tier.engine.file.path.open("r+b") as file:
            file.seek(GEOMETRY.payload_at(2))
            file.write(b"other bytes")
        assert "its payload is damaged" in tier.copy(LOAD, [2], [2])
        assert wrong_now(tier, 2) == "", "nothing was written, so it holds what it held"
        monkeypatch.setattr(NumpyPools, "copy", lambda *_: 1 / 0)
        assert "ZeroDivisionError" in tier.copy(LOAD, [1], [1])
        assert "host block 1 has no checksum" in wrong_now(tier, 1)


@pytest.mark.parametrize("kept", [False, True])
def test_a_block_without_a_checksum_is_stored_only_if_the_pool_is_not_kept(kept: bool) -> None:
    """As for loads to the device: without one nobody can tell what an earlier life has left."""
    with proved(kept=kept) as tier:
        assert ("host block 4 has no checksum" in tier.copy(STORE, [4], [5])) == kept


def test_a_row_of_another_block_than_the_log_says_is_not_stored() -> None:
    """Correct bytes (S15): a log, a pool or checksums of another time. Else the disk would seal another
    block's bytes under this key."""
    with proved(kept=True) as tier:
        tier.fill(1, 1)
        for held in ((name(2), tier.held[1][1]), (name(1), tier.held[1][1] + 1)):
            tier.held[1] = held
            wanted = 2 if held[0] == name(2) else 1
            assert "host block 1 holds another block" in tier.copy(STORE, [1], [wanted])
        assert not (tier.engine.file.table.states == SEALED).any()
        tier.sums.keep([1], ((name(1),), (tier.held[1][1],)))
        assert tier.copy(STORE, [1], [1]) == ""


def test_a_kept_pool_takes_no_job_that_does_not_name_its_rows() -> None:
    with proved(kept=True) as tier:
        tier.fill(1, 1)
        tier.engine.submit(job(9, STORE, [1], [1], [1]))
        (result,) = finish(tier.engine, [9])
        assert "0 generations for 1 rows of a kept host pool" in result.error


def test_the_checksums_of_another_pool_are_refused() -> None:
    other = BlockChecksums(np.zeros((SLOTS + 1, PAYLOAD), np.uint8))
    with proved() as tier, pytest.raises(ConfigError, match="the same host pool"):
        tier.engine.prove_host(other)
