"""Power losses of the disk tier, by replay: what a disk may hold afterwards, and what is served from it.

A short life is recorded: each write with its place, each flush, and what was told to be good before it.
Then the file is made again as a power loss may leave it. Of what was written since the last flush, a disk
keeps any sectors of 512 bytes, in any order; of one sector it keeps any of the versions that were written. Or
it loses pages of 4 KiB in which something was written, with all that they held.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from disk_rig import DISK_IDENTITY, PAYLOAD, SLOTS, Tier, directory, name

from kvsm.tiers.disk import DiskGeometry, FlushPolicy, SlotFile, recover
from kvsm.tiers.disk.formats import ERA_ID_BYTES

SECTOR = 512
PAGE = 4096

Versions = dict[int, list[bytes]]
"""Offset of a sector -> what it may hold: as it was at the last flush, and what was written since."""


class Moment(NamedTuple):
    """A file behind a call. promised: slot -> key, of stores that were good before, and that no store has
    begun to overwrite. begun: all stores that had begun since the last reset, (slot, key). era: how many
    resets there were."""

    durable: bytes
    versions: Versions
    promised: dict[int, int]
    begun: set[tuple[int, int]]
    era: int


class DiskRecorder:
    """Records the calls on one file."""

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self.moments: list[Moment] = []
        self.promised: dict[int, int] = {}
        self.begun: set[tuple[int, int]] = set()
        self.era = 0
        self._durable, self._now = bytearray(size), bytearray(size)
        self._versions: Versions = {}

    def write(self, data: bytes, offset: int) -> None:
        for place in range(0, len(data), SECTOR):
            at, sector = offset + place, data[place : place + SECTOR]
            if self._now[at : at + SECTOR] != sector:
                old = bytes(self._durable[at : at + SECTOR])
                self._versions.setdefault(at, [old]).append(sector)
                self._now[at : at + SECTOR] = sector
        self.note()

    def flush(self) -> None:
        self._durable, self._versions = bytearray(self._now), {}
        self.note()

    def note(self) -> None:
        versions = {at: list(some) for at, some in self._versions.items()}
        self.moments.append(
            Moment(bytes(self._durable), versions, dict(self.promised), set(self.begun), self.era)
        )

    def reset(self) -> None:
        """A reset is answered: the era says so, durably. Nothing is written to the slots."""
        self.promised, self.begun, self.era = {}, set(), self.era + 1
        self.note()


def era_id(number: int) -> bytes:
    return number.to_bytes(ERA_ID_BYTES, "little")


@contextmanager
def recording(recorders: dict[Path, DiskRecorder]) -> Iterator[None]:
    pwritev, fdatasync = os.pwritev, os.fdatasync

    def recorder(descriptor: int) -> DiskRecorder | None:
        return recorders.get(Path(os.readlink(f"/proc/self/fd/{descriptor}")))

    def write(descriptor: int, buffers: list[Any], offset: int) -> int:
        done = pwritev(descriptor, buffers, offset)
        found = recorder(descriptor)
        if found is not None:
            found.write(b"".join(bytes(one) for one in buffers)[:done], offset)
        return done

    def flush(descriptor: int) -> None:
        fdatasync(descriptor)
        found = recorder(descriptor)
        if found is not None:
            found.flush()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwritev", write)
        patch.setattr(os, "fdatasync", flush)
        yield


def record(
    made: Path, seed: int, flush: FlushPolicy, stores: int, ranks: int = 1, lives: int = 2
) -> list[DiskRecorder]:
    """The recorders of the ranks' files after some lives of random stores and resets, equal on all ranks.

    A store counts as promised when it is good on all ranks, and as overwritten when the next one begins.
    """
    chance = random.Random(seed)
    shapes = [DiskGeometry(PAYLOAD, SLOTS, rank, ranks) for rank in range(ranks)]
    paths = [made / f"rank {rank}" for rank in range(ranks)]
    recorders = [DiskRecorder(path, shape.file_bytes) for path, shape in zip(paths, shapes)]
    with recording(dict(zip(paths, recorders))):
        for _ in range(lives):
            tiers = [Tier(path, flush, shape) for path, shape in zip(paths, shapes)]
            recover([tier.file for tier in tiers], era_id(recorders[0].era))
            for _ in range(stores):
                if chance.random() < 0.1:
                    for one in recorders:
                        one.reset()
                slots = chance.sample(range(SLOTS), chance.choice([1, 2]))
                keys = chance.sample(range(6), len(slots))  # A core stores a key once.
                for one in recorders:
                    # A store of a key elsewhere drops it where it was, as in a core.
                    one.promised = {
                        slot: key
                        for slot, key in one.promised.items()
                        if slot not in slots and key not in keys
                    }
                    one.begun.update(zip(slots, keys))
                for tier in tiers:
                    tier.era = era_id(recorders[0].era)
                    assert tier.store(slots, keys).good
                for one in recorders:
                    if flush is FlushPolicy.EVERY:
                        one.promised.update(zip(slots, keys))
                    one.note()
            for tier in tiers:
                tier.close()
    return recorders


def lost(moment: Moment, chance: random.Random) -> bytes:
    """A file as a power loss at this moment may leave it."""
    data = bytearray(moment.durable)
    kind, share = chance.choice(["any", "old or new", "torn", "lost pages"]), chance.random()
    versions = sorted(moment.versions.items())
    if kind == "lost pages":
        for page in {at // PAGE * PAGE for at, _ in versions if chance.random() < share}:
            data[page : page + PAGE] = chance.randbytes(PAGE)
        return bytes(data)
    if kind == "torn":
        versions = versions[: chance.randint(0, len(versions))]
    for at, some in versions:
        if kind == "torn":
            kept = some[-1]
        elif kind == "any":
            kept = chance.choice(some)
        else:
            kept = some[-1] if chance.random() < share else some[0]
        data[at : at + SECTOR] = kept
    return bytes(data)


def check(contents: list[bytes], moments: list[Moment]) -> int:
    """Open what is left of the files of all ranks. Returns how many keys are served."""
    ranks = len(contents)
    with directory() as made:
        tiers = []
        for rank, data in enumerate(contents):
            path = made / f"rank {rank}"
            path.write_bytes(data)
            path.chmod(0o600)
            tiers.append(Tier(path, geometry=DiskGeometry(PAYLOAD, SLOTS, rank, ranks)))
        era = max(one.era for one in moments)
        found = recover([tier.file for tier in tiers], era_id(era))
        begun = set.union(*(one.begun for one in moments if one.era == era))
        for tier in tiers:
            tier.era = era_id(era)
        for told in found.told:
            assert sum(told.values()) == SLOTS, "each slot is in one row"
            assert told["kept"] == len(found.slots)
        served = set()
        for key, slot in found.slots.items():
            number = int(key.split()[1])
            assert (slot, number) in begun, "no key is found where none was stored since the reset"
            held = [tier.holds(slot, number) for tier in tiers]
            if all(held):
                served.add(number)
        promised = set(moments[0].promised.values())
        for moment in moments[1:]:
            promised &= set(moment.promised.values())
        assert promised <= served, "a promised block is lost"
        for tier in tiers:
            tier.close()
        return len(served)


def is_made(data: bytes) -> bool:
    """Whether a superblock was flushed. Before that there is no file of ours, and nothing is promised."""
    return data.startswith(b"kvsmdisk")


@pytest.mark.parametrize("flush", [FlushPolicy.EVERY, FlushPolicy.NONE])
def test_power_loss_serves_no_wrong_byte_and_loses_nothing_promised(flush: FlushPolicy) -> None:
    """Correct bytes (S15), failure is not success (S6), and no stale data (S14): what a reset has given up
    stays lost. With `NONE` nothing is promised."""
    chance = random.Random(1)
    with directory() as made:
        (recorder,) = record(made, 1, flush, stores=8)
    moments = [one for one in recorder.moments if is_made(one.durable)]
    served = sum(check([lost(one, chance)], [one]) for one in moments[::2] for _ in range(3))
    assert served, "otherwise this test could not fail"


def test_power_loss_in_every_way_of_a_tiny_history() -> None:
    """All combinations of all sectors, at each moment of an overwritten slot and its neighbour."""
    with directory() as made:
        path = made / "tier"
        recorder = DiskRecorder(path, DiskGeometry(PAYLOAD, 2).file_bytes)
        with recording({path: recorder}):
            tier = Tier(path, geometry=DiskGeometry(PAYLOAD, 2))
            tier.recover()
            for slot, key in ((0, 1), (1, 2), (0, 3)):
                recorder.begun.add((slot, key))
                tier.store([slot], [key])
            tier.close()
    checked = 0
    for moment in recorder.moments:
        if not is_made(moment.durable):
            continue
        places = list(moment.versions)
        for choice in product(*moment.versions.values()):
            data = bytearray(moment.durable)
            for at, sector in zip(places, choice):
                data[at : at + SECTOR] = sector
            check_tiny(bytes(data), moment)
            checked += 1
    assert checked > 90


def check_tiny(data: bytes, moment: Moment) -> None:
    with directory() as made:
        path = made / "tier"
        path.write_bytes(data)
        path.chmod(0o600)
        with closing(Tier(path, geometry=DiskGeometry(PAYLOAD, 2))) as tier:
            for key, slot in tier.recover().slots.items():
                number = int(key.split()[1])
                assert (slot, number) in moment.begun
                tier.holds(slot, number)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("flush", [FlushPolicy.EVERY, FlushPolicy.NONE])
def test_power_loss_at_length(flush: FlushPolicy, ranks: int, seed: int) -> None:
    """Each rank's disk loses what it likes, at one moment of all."""
    chance = random.Random(seed)
    with directory() as made:
        recorders = record(made, seed, flush, stores=12, ranks=ranks, lives=3)
    for _ in range(400):
        moments = moments_of(recorders, chance)
        check([lost(one, chance) for one in moments], moments)


def moments_of(recorders: list[DiskRecorder], chance: random.Random) -> list[Moment]:
    """A moment of each rank. Ranks are not in step: their moments are about equally far."""
    share = chance.random()
    chosen = []
    for recorder in recorders:
        made = [one for one in recorder.moments if is_made(one.durable)]
        chosen.append(made[int(share * len(made))])
    return chosen


@pytest.mark.parametrize("done", range(5))
def test_power_loss_while_the_life_is_raised_keeps_the_slots(done: int) -> None:
    """One superblock is whole at any moment, and no generation is made twice."""
    chance = random.Random(done)
    with directory() as made:
        path = made / "tier"
        with closing(Tier(path)) as tier:
            tier.store([1], [5])
            geometry = tier.file.geometry
        recorder = DiskRecorder(path, geometry.file_bytes)
        recorder.write(path.read_bytes(), 0)
        recorder.flush()
        recorder.moments.clear()
        with recording({path: recorder}):
            SlotFile(path, geometry, DISK_IDENTITY).close()
        recorder.note()
        for _ in range(5):
            path.write_bytes(lost(recorder.moments[done], chance))
            with closing(Tier(path)) as tier:
                assert list(tier.recover().slots) == [name(5)]
                assert tier.file.life in (2, 3)
                assert tier.holds(1, 5)
