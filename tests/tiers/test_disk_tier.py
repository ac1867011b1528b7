"""The disk tier: what its bytes say, which files it takes, and that no wrong byte is served."""

from __future__ import annotations

import fcntl
import logging
import os
import random
import signal
import traceback
from ast import literal_eval
from contextlib import closing
from itertools import count, product
from pathlib import Path
from threading import Timer
from typing import Any

import msgspec
import numpy as np
import pytest
from copy_rigs import finish
from disk_rig import DISK_IDENTITY, GEOMETRY, PAYLOAD, SLOTS, Tier, directory, job, name, read_header
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from kvsm.errors import ConfigError
from kvsm.events import Direction
from kvsm.identity import PoolIdentity
from kvsm.tiers.disk import DiskCopyEngine, DiskGeometry, FlushPolicy, SlotFile, SlotGeneration, recover
from kvsm.tiers.disk.aligned import aligned_memory
from kvsm.tiers.disk.formats import (
    FIRST_SLOT,
    HEADER_BYTES,
    HEADER_STEP,
    MOST_KEY_BYTES,
    SUPERBLOCK_BYTES,
    HeaderState,
    SlotHeader,
    Superblock,
    read_superblock,
)
from kvsm.tiers.disk.recovery import ACROSS, CONDITIONS, ROWS

NUMBER = st.integers(0, 2**63 - 1)
ID = st.binary(min_size=16, max_size=16)
HEADERS = st.builds(
    SlotHeader,
    st.sampled_from(HeaderState),
    ID,
    ID,
    ID,
    NUMBER,
    st.builds(SlotGeneration, NUMBER, NUMBER),
    NUMBER,
    st.integers(0, 2**64 - 1),
    st.binary(max_size=MOST_KEY_BYTES),
)


@settings(max_examples=examples(50), deadline=None)
@given(header=HEADERS, bit=st.integers(0, 8 * HEADER_BYTES - 1))
def test_a_header_is_read_as_it_was_written_or_not_at_all(header: SlotHeader, bit: int) -> None:
    data = bytearray(header.encode().ljust(HEADER_STEP, b"\0"))
    assert len(header.encode()) == HEADER_BYTES == 512, "a disk writes 512 bytes whole"
    assert read_header(bytes(data)) == header
    data[bit // 8] ^= 1 << bit % 8
    assert read_header(bytes(data)) is None


@settings(max_examples=examples(30), deadline=None)
@given(life=NUMBER, file_id=ID, facts=st.dictionaries(st.text(max_size=20), st.text(max_size=20)))
def test_a_superblock_is_read_as_it_was_written(life: int, file_id: bytes, facts: dict[str, str]) -> None:
    made = Superblock(life, file_id, GEOMETRY, PoolIdentity.of(facts))
    assert len(made.encode()) == SUPERBLOCK_BYTES
    assert read_superblock(made.encode()) == made


@pytest.mark.parametrize("broken", [0, 1])
def test_one_damaged_superblock_loses_nothing(tmp_path: Path, broken: int) -> None:
    """A power loss while the life is raised leaves one of the two."""
    path = tmp_path / "tier"
    with closing(Tier(path)) as tier:
        tier.store([1], [5])
    with path.open("r+b") as file:
        file.seek(broken * SUPERBLOCK_BYTES + 100)
        file.write(b"\xff" * 512)
    with closing(Tier(path)) as tier:
        assert (tier.file.life, tier.file.cold_reason) == (2, [])
        assert list(tier.recover().slots) == [name(5)]


def changed_identity(path: Path) -> SlotFile:
    return SlotFile(path, GEOMETRY, PoolIdentity.of({"model": "another"}))


def other_geometry(path: Path) -> SlotFile:
    return SlotFile(path, DiskGeometry(PAYLOAD, SLOTS + 1), DISK_IDENTITY)


def damaged(path: Path) -> SlotFile:
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    data[SUPERBLOCK_BYTES + 100] ^= 1
    path.write_bytes(data)
    return SlotFile(path, GEOMETRY, DISK_IDENTITY)


def cut(path: Path) -> SlotFile:
    os.truncate(path, FIRST_SLOT + 4096)
    return SlotFile(path, GEOMETRY, DISK_IDENTITY)


def grown(path: Path) -> SlotFile:
    os.truncate(path, GEOMETRY.file_bytes + 4096)
    return SlotFile(path, GEOMETRY, DISK_IDENTITY)


@pytest.mark.parametrize(
    ("opened", "reason"),
    [
        (changed_identity, "model: a test, and now another"),
        (other_geometry, "8 slots of 512 bytes, rank 0 of 1, and now 9 slots"),
        (damaged, "its superblock is damaged"),
        (cut, "it has 36,864 bytes, and was made with 98,304"),
        (grown, "it has 102,400 bytes, and was made with 98,304"),
    ],
)
def test_a_file_that_cannot_be_trusted_is_replaced_and_says_why(
    tmp_path: Path, opened: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """No stale data (S14): any difference is a cold file, and one line of warning."""
    path = tmp_path / "tier"
    with closing(Tier(path)) as tier:
        tier.store([1], [5])
        old = tier.file.file_id
    caplog.set_level(logging.WARNING, "kvsm.tiers.disk")
    with closing(opened(path)) as file:
        assert reason in "; ".join(file.cold_reason)
        assert (file.life, file.file_id != old) == (1, True)
        assert recover([file]).slots == {}
    assert len([one for one in caplog.messages if "starts cold" in one]) == 1


def test_a_file_of_somebody_else_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "tier"
    path.write_bytes(b"letters" * 10_000)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="tier: is not a file of a disk tier; give another path"):
        SlotFile(path, GEOMETRY, DISK_IDENTITY)
    assert path.read_bytes() == b"letters" * 10_000
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="can be touched by other users"):
        SlotFile(path, GEOMETRY, DISK_IDENTITY)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(ConfigError, match="is a symbolic link"):
        SlotFile(tmp_path / "link", GEOMETRY, DISK_IDENTITY)


def test_a_file_whose_maker_was_killed_before_it_wrote_is_made(tmp_path: Path) -> None:
    path = tmp_path / "tier"
    path.touch(mode=0o600)
    os.truncate(path, GEOMETRY.file_bytes)
    with closing(SlotFile(path, GEOMETRY, DISK_IDENTITY)) as file:
        assert file.cold_reason == ["there was no file"]


def test_the_second_process_is_refused_by_the_name_of_the_first(tmp_path: Path) -> None:
    path = tmp_path / "tier"
    with (
        closing(SlotFile(path, GEOMETRY, DISK_IDENTITY)),
        pytest.raises(ConfigError, match=rf"tier: is in use by process {os.getpid()} \("),
    ):
        SlotFile(path, GEOMETRY, DISK_IDENTITY)
    SlotFile(path, GEOMETRY, DISK_IDENTITY).close()


def test_a_file_without_direct_io_is_used_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    control = fcntl.fcntl

    def refused(descriptor: int, call: int, flags: int = 0) -> int:
        if call == fcntl.F_SETFL and flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return control(descriptor, call, flags)

    monkeypatch.setattr(fcntl, "fcntl", refused)
    with closing(Tier(tmp_path / "tier")) as tier:
        assert not tier.file.direct
        assert tier.store([1], [5]).good
        assert tier.holds(1, 5)
    assert "grants no direct I/O" in caplog.text


def test_a_store_needs_keys_and_a_load_is_checked_against_them() -> None:
    """Correct bytes (S15): a slot of another key is not served, and stays readable under its own."""
    with directory() as made, closing(Tier(made / "tier")) as tier:
        tier.engine.submit(msgspec.structs.replace(job(90, Direction.STORE, [0], [0], [1]), keys=()))
        tier.engine.submit(
            msgspec.structs.replace(
                job(91, Direction.STORE, [0], [0], [1]), keys=(bytes(MOST_KEY_BYTES + 1),)
            )
        )
        errors = {one.transfer: one.error for one in finish(tier.engine, [90, 91])}
        assert "store 90: 0 keys for 1 disk slots" in errors[90]
        assert f"room for {MOST_KEY_BYTES}" in errors[91]
        assert tier.store([3], [5]).good
        assert "holds another key than" in tier.load([3], [6]).error
        assert tier.holds(3, 5)
        assert "disk slot 4 holds nothing that can be loaded: it is EMPTY" in tier.load([4], [5]).error


def test_aligned_rows_are_written_where_and_as_copies_of_them_would_be() -> None:
    """So what the power losses show of the one way holds for the other one."""
    geometry, chance, calls = DiskGeometry(8192, SLOTS), random.Random(2), list[list[tuple[int, bytes]]]()
    memory = aligned_memory(SLOTS * 8192 + 4096)
    memory[:] = np.frombuffer(chance.randbytes(len(memory)), np.uint8)
    jobs = [
        job(number, Direction.STORE, chance.sample(range(SLOTS), 5), chance.sample(range(SLOTS), 5), range(5))
        for number in range(1, 5)
    ]
    pwritev = os.pwritev

    def write(descriptor: int, parts: list[Any], offset: int) -> int:
        calls[-1].append((offset, b"".join(map(bytes, parts))))
        longest[-1] = max(longest[-1], len(parts))
        return pwritev(descriptor, parts, offset)

    longest = list[int]()
    for shift in (0, 64):
        host = memory[shift : shift + SLOTS * 8192].reshape(SLOTS, 8192)
        host[:] = np.random.default_rng(1).integers(0, 256, host.shape, dtype=np.uint8)
        with directory() as made, pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "urandom", bytes)
            file = SlotFile(made / "tier", geometry, DISK_IDENTITY)
            with closing(DiskCopyEngine(host, file, FlushPolicy.NONE, threads=1)) as engine:
                calls.append([])
                longest.append(0)
                patch.setattr(os, "pwritev", write)
                for one in jobs:
                    engine.submit(one)
                engine.drain()
                assert all(result.good for result in engine.poll())
    assert calls[0] == calls[1]
    assert (longest[0] >= 2, longest[1]) == (True, 1), "neighbours are one call in both"


def test_a_tier_is_recovered_once_and_before_its_first_store() -> None:
    """Otherwise what recovery has found would hide what was stored since."""
    with directory() as made:
        with closing(Tier(made / "tier")) as tier:
            tier.store([3], [5])
        with closing(Tier(made / "tier")) as tier:
            tier.store([3], [6])
            with pytest.raises(ConfigError, match="recovered once, and before its first store"):
                tier.recover()


def test_exactly_one_row_of_the_recovery_holds_in_each_case() -> None:
    """The table is total, and no two rows overlap: all 512 combinations of its conditions."""
    asked = (*CONDITIONS, *ACROSS)
    for answers in product([False, True], repeat=len(asked)):
        case = dict(zip(asked, answers))
        assert sum(all(case[one] == wanted for one, wanted in row.when.items()) for row in ROWS) == 1


def rewritten(path: Path, place: int, **changes: Any) -> None:
    """Write a whole header with these changes."""
    with path.open("r+b") as file:
        file.seek(GEOMETRY.header_at(place))
        header = read_header(file.read(HEADER_STEP))
        assert header is not None
        file.seek(GEOMETRY.header_at(place))
        file.write(header._replace(**changes).encode())


def test_each_case_of_a_slot_is_told_in_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    with directory() as made:
        path = made / "tier"
        with closing(Tier(path)) as tier:
            tier.store(range(7), [0, 1, 2, 3, 4, 6, 6])
            tier.store([6], [5])
            tier.store([7], [5])
        rewritten(path, 0, identity=bytes(16))
        rewritten(path, 1, slot=2)
        rewritten(path, 2, generation=SlotGeneration(2, 1))
        rewritten(path, 3, state=HeaderState.DROPPED)
        with path.open("r+b") as file:
            file.seek(GEOMETRY.header_at(4) + 60)
            file.write(b"?")
        tier = Tier(path)
        read, bad = tier.file.read, GEOMETRY.header_at(5)

        def faulty(memory: Any, offset: int) -> None:
            if offset <= bad < offset + memory.nbytes:
                raise OSError(5, "Input/output error")
            read(memory, offset)

        monkeypatch.setattr(tier.file, "read", faulty)
        found = tier.recover()
        tier.close()
    told = {row: count for row, count in found.told[0].items() if count}
    assert told == dict.fromkeys(
        ["unreadable", "damaged", "other meaning", "misplaced", "too late", "dropped", "older", "kept"], 1
    )
    assert found.slots == {name(5): 7}


def test_a_slot_serves_only_if_all_ranks_have_the_same_generation() -> None:
    """Publish after commit (S2), on disk: a store of which one rank's part is missing serves nothing."""
    with directory() as made:
        shapes = [DiskGeometry(PAYLOAD, SLOTS, rank, 2) for rank in range(2)]
        tiers = [Tier(made / f"{shape.rank}", geometry=shape) for shape in shapes]
        for tier in tiers:
            tier.store([0, 1], [0, 1])
        tiers[0].store([1, 2], [1, 2])
        for tier in tiers:
            tier.close()
        SlotFile(made / "1", shapes[1], DISK_IDENTITY).close()
        tiers = [Tier(made / f"{shape.rank}", geometry=shape) for shape in shapes]
        found = recover([tier.file for tier in tiers])
        assert list(found.slots) == [name(0)]
        assert [told["not on all"] for told in found.told] == [2, 1]
        assert {tier.file.life for tier in tiers} == {3}, "the ranks go on with one life"
        assert all(tier.holds(0, 0) for tier in tiers)
        for tier in tiers:
            tier.close()


def test_files_that_do_not_belong_together_are_refused() -> None:
    with directory() as made:
        file = SlotFile(made / "tier", DiskGeometry(PAYLOAD, SLOTS, 1, 2), DISK_IDENTITY)
        with closing(file), pytest.raises(ConfigError, match="must be of all ranks, in order"):
            recover([file])


def store_until_killed(path: Path, seed: int, policy: FlushPolicy) -> str:
    """Store at random in a forked process until it is killed at a random moment after some stores. Return
    what it printed: what was begun, and what was good."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            _store_until_killed(path, random.Random(seed), policy, writing)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(writing)
    with open(reading, encoding="utf-8") as printed:
        lines = printed.read()
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    return lines


def _store_until_killed(path: Path, chance: random.Random, policy: FlushPolicy, writing: int) -> None:
    tier = Tier(path, policy, threads=2)
    tier.recover()
    first = chance.randrange(4)
    for number in count():
        if number == first:
            Timer(chance.random() * 0.03, os.kill, (os.getpid(), signal.SIGKILL)).start()
        slots = chance.sample(range(SLOTS), 3)
        keys = [chance.randrange(1000) for _ in slots]
        os.write(writing, f"begin {slots} {keys}\n".encode())
        assert tier.store(slots, keys).good
        os.write(writing, f"good {slots} {keys}\n".encode())


def kill_again_and_again(rounds: int, seed: int) -> None:
    """Each life stores at random, until it is killed. After it, what it was told to be good is served."""
    with directory() as made:
        path, holds = made / "tier", dict[int, int | None]()
        for number in range(rounds):
            policy = [*FlushPolicy][number % len(FlushPolicy)]
            for line in store_until_killed(path, seed + number, policy).splitlines():
                what, slots, keys = line.replace(", ", ",").split()
                for slot, key in zip(literal_eval(slots), literal_eval(keys)):
                    holds[slot] = key if what == "good" else None
            with closing(Tier(path)) as tier:
                assert tier.file.cold_reason == [] or not holds
                where = {slot: int(key.split()[1]) for key, slot in tier.recover().slots.items()}
                for slot, key in where.items():
                    assert tier.holds(slot, key)
                    assert holds.get(slot, key) in (key, None)
                newest = set(where.values())
                assert {key for key in holds.values() if key is not None} <= newest


def test_a_killed_process_leaves_what_it_has_stored() -> None:
    """Failure is not success (S6), with `kill -9` at random moments."""
    kill_again_and_again(4, seed=0)


@pytest.mark.slow
def test_many_killed_processes_leave_what_they_have_stored() -> None:
    kill_again_and_again(200, seed=100)
