"""File operations of a start that fail: the engine starts or refuses with a complete message, and the next
start is warm or says truthfully why not."""

from __future__ import annotations

import errno
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path

import msgspec
import pytest
from disk_rig import DISK_IDENTITY, PAYLOAD
from start_faults import AWAY, SLOTS, DiskStartWorld, Plan, StartWorld, failing, try_start

from examples import SHARE
from kvsm.core.log import LateLog, LogReader
from kvsm.core.log.late import AGAIN_S
from kvsm.errors import UnusableFiles
from kvsm.explain.story import verify_log
from kvsm.tiers.disk import DiskGeometry
from kvsm.tiers.disk.formats import ERA_ID_BYTES
from kvsm.tiers.disk.recovery import CONDITIONS

ERRORS = (errno.ENOSPC, errno.EROFS, errno.EACCES, errno.ENOENT, errno.EIO)
TAKES_ROOM = ("create", "pwrite", "pwritev", "posix_fallocate", "mkdir")
WRITES = (*TAKES_ROOM, "ftruncate", "rename", "replace", "rmdir", "unlink")
ADVICE = ("make room", "name another directory", "remove it", "is now", "give another")
"""One of them is in each refusal."""


@pytest.fixture(autouse=True)
def no_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests lose no power, and syncs of a busy disk are slow."""
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, lambda _: None)


def nothing(_: int, __: str) -> None:
    """No operation fails."""


def one(number: int, error: int) -> Plan:
    """One operation fails, and no other."""
    return lambda n, _: error if n == number else None


def all_from(number: int, error: int) -> Plan:
    """Operations that write fail from this one on; on a full disk those that take room."""
    which = TAKES_ROOM if error == errno.ENOSPC else WRITES
    return lambda n, name: error if n >= number and name in which else None


STEPS = [pytest.param(5 if SHARE == 1 else 16, id="some"), pytest.param(1, id="all", marks=pytest.mark.slow)]
"""Each n-th fault is tried."""

LAST_ENDS = ("none", "killed", "closed", "other pool")
"""How the last life before the faulty start ended; `other pool`: its log is moved aside by a cold start."""


def new_world(directory: Path, on_failure: str, last_end: str) -> StartWorld:
    """A world in which a life has ended like this."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    world = StartWorld(directory, on_failure)
    if last_end != "none":
        first = world.start()
        world.live(first)
        world.end(first, killed=last_end == "killed")
    if last_end == "other pool":
        world.ids = (b"pool 1", b"checksums 1")
    return world


def lives(
    tmp_path: Path, on_failure: str, last_end: str, step: int
) -> Iterator[tuple[StartWorld, Plan, str]]:
    """A new world for each `step`-th fault of its next start."""
    _, _, tried = try_start(new_world(tmp_path / "world", on_failure, last_end), nothing)
    assert len(tried) > 10
    for plan, name in islice(faults(tried), 0, None, step):
        yield new_world(tmp_path / "world", on_failure, last_end), plan, name


def faults(tried: Sequence[str]) -> Iterator[tuple[Plan, str]]:
    """The faults of a start that does these operations, each with its name."""
    single = cycle(ERRORS)
    for number, operation in enumerate(tried, 1):
        plans = [(one, next(single))]
        if operation in WRITES:
            plans += [(all_from, errno.ENOSPC), (all_from, errno.EROFS)]
        for plan, error in plans:
            yield plan(number, error), f"{plan.__name__} {number} ({operation}): {errno.errorcode[error]}"


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("last_end", LAST_ENDS)
@pytest.mark.parametrize("on_failure", ["continue", "stop"])
def test_each_fault_of_a_start_is_survived_or_told(
    tmp_path: Path, on_failure: str, last_end: str, step: int
) -> None:
    """Liveness and no stale data (S14): `check` compares what each start serves with what the slots hold."""
    outcomes = Counter(
        outcome_of(world, plan, name, 4 if last_end in ("killed", "closed") else 0)
        for world, plan, name in lives(tmp_path, on_failure, last_end, step)
    )
    assert (outcomes["without a log"] > 0) == (on_failure == "continue")
    assert (outcomes["refused"] > 0) == (on_failure == "stop")


def outcome_of(world: StartWorld, plan: Plan, name: str, expected: int) -> str:
    """How a start with this fault ends. expected: how many blocks a start without it would keep."""
    started, refusal, _ = try_start(world, plan)
    outcome = "refused"
    if started is None:
        assert world.on_failure == "stop", f"{name}: it may continue without a log: {refusal}"
        assert str(world.directory) in refusal, name
        assert any(advice in refusal for advice in ADVICE), f"{name}: {refusal}"
    else:
        outcome = "without a log" if isinstance(started.offloader.writer, LateLog) else "with a log"
        world.live(started)
        world.end(started, killed=True)
    following = world.start()
    if started is None and "is now" not in refusal:
        assert following.kept == expected, f"{name}: the refused start has changed what the next one finds"
    world.live(following)
    world.end(following, killed=False)
    last = world.start()
    assert last.kept > 0, f"{name}: {last.why_cold}"
    world.end(last, killed=False)
    return outcome


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize("last_end", LAST_ENDS)
def test_a_log_begins_once_there_is_room(tmp_path: Path, last_end: str, error: int) -> None:
    """The start after it is warm: the log begins with a snapshot of all that is stored."""
    world = new_world(tmp_path / "world", "continue", last_end)
    with failing(world.directory, all_from(1, error)):
        started = world.start()
        assert started.kept == (4 if last_end in ("killed", "closed") else 0)
        late = started.offloader.writer
        assert isinstance(late, LateLog)
        late.clock = lambda: 0.0
        world.live(started)
        assert late.failure is not None
    now = late._again_at + 1
    late.clock = lambda: now
    dropped, last = late.dropped, started.offloader.ledger.seq
    world.live(started)
    assert (late.failure, late.dropped > dropped) == (None, True)
    world.end(started, killed=True)
    assert verify_log(world.log).good
    assert LogReader(world.log).head.seq >= last
    again = world.start()
    assert (again.why_cold, again.kept) == ((), min(6, world.stored))
    world.end(again, killed=False)


def test_a_log_that_cannot_begin_is_tried_again_in_a_while(tmp_path: Path) -> None:
    world = new_world(tmp_path / "world", "continue", "killed")
    times = [100.0]
    with failing(world.directory, all_from(1, errno.ENOSPC)) as tried:
        started = world.start()
        assert started.kept == 4
        late = started.offloader.writer
        assert isinstance(late, LateLog)
        late.clock = lambda: times[0]
        late._again_at = times[0]
        attempts = []
        for _ in range(40):
            before = len(tried)
            world.live(started, 1)
            attempts.append(len(tried) > before)
            times[0] += 1
    assert attempts.count(True) == 40 / AGAIN_S
    world.end(started, killed=True)


DISK_STARTS = ("none", "stored", "undecided", "undecided, larger")
"""What the last start has left; `undecided`: its workers have reported, and its scheduler was killed before
it read that; `larger`: it had more slots."""


def new_disk_world(directory: Path, last_end: str) -> DiskStartWorld:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    world = DiskStartWorld(directory)
    if last_end != "none":
        world.live(world.begin())
    if last_end.startswith("undecided"):
        num_slots = SLOTS
        if last_end.endswith("larger"):
            num_slots, world.valid = 2 * SLOTS, set()  # The files are replaced.
        for rank in range(world.RANKS):
            geometry = DiskGeometry(PAYLOAD, num_slots, rank, world.RANKS)
            world.tier.open_slots(rank, geometry, DISK_IDENTITY).close()
    return world


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("last_end", DISK_STARTS)
def test_an_engine_whose_disk_cannot_be_used_serves_without(
    tmp_path: Path, last_end: str, resets: bool, step: int
) -> None:
    """Liveness, correct bytes (S15) and no stale data (S14): a failed file operation costs at most the
    disk of this life; the error names the path and a remedy. The next life has the disk again. Blocks that a
    reset dropped in between stay invalid, even if that life had no disk. Only if there is no directory, the
    reset raises an error."""
    with failing(tmp_path / "world", nothing) as tried:
        world = new_disk_world(tmp_path / "world", last_end)
        del tried[:]
        world.live(world.begin())
    outcomes: Counter[str] = Counter()
    for plan, name in islice(faults(list(tried)), 0, None, step):
        world = new_disk_world(tmp_path / "world", last_end)
        with failing(world.directory, plan) as tried:
            life = world.begin()
        for refusal in life.refusals:
            assert str(world.directory) in refusal, name
            assert any(advice in refusal for advice in ADVICE), f"{name}: {refusal}"
        outcome = "with" if life.decided and len(life.files) == world.RANKS else "without"
        if outcome == "without":
            assert life.refusals, name
            assert life.decided is None or "(unlink)" in name, name
        outcomes[outcome] += 1
        world.live(life)
        if resets:
            assert not world.reset(life) or not (world.directory / "disk").exists(), name
        expected = len(world.valid)
        following = world.begin()
        assert following.refusals == [], name
        found = world.live(following)
        if "all_from" in name or resets:
            assert found == expected, f"{name}: the faulty start has changed what the next one finds"
    assert min(outcomes["with"], outcomes["without"]) > 0, outcomes


@pytest.mark.parametrize("how", AWAY)
def test_a_reset_while_the_disk_is_away_is_an_error(tmp_path: Path, how: str) -> None:
    """No stale data (S14): the directory is away in one life, and back in a later one. A reset in between
    cannot reach its blocks, so it must not succeed, and a reset after that does."""

    def refuse_mkdir(_: int, name: str) -> int | None:
        return errno.EACCES if name == "mkdir" else None

    world = new_disk_world(tmp_path / "world", "stored")
    with world.away(how):
        with failing(world.directory, refuse_mkdir):
            life = world.begin()
        assert (life.decided, world.live(life)) == (None, 0)
        refusal = world.reset(life)
    assert world.live(world.begin()) == len(world.valid) - 1
    assert str(world.tier.era) in refusal
    assert "a later engine may serve them. Mount or restore" in refusal
    assert world.reset(life) == ""
    assert world.live(world.begin()) == 0


@pytest.mark.parametrize("how", [how for how in AWAY if how != "a link is there"])
def test_a_reset_is_an_error_if_the_disk_went_away_meanwhile(tmp_path: Path, how: str) -> None:
    """The same for an engine that has the disk. No link is there: the system follows it."""
    world = new_disk_world(tmp_path / "world", "stored")
    life = world.begin()
    world.live(life)
    with world.away(how):
        assert world.reset(life)
    assert world.live(world.begin()) == len(world.valid) - 1


TRUE, GENERATIONS, ERAS = b"\1" * SLOTS * len(CONDITIONS), bytes(8 * SLOTS), bytes(ERA_ID_BYTES * SLOTS)
KEYS = [b"key %d" % number for number in range(SLOTS)]


@pytest.mark.parametrize(
    "report",
    [
        (TRUE * 2, GENERATIONS * 2, GENERATIONS * 2, ERAS * 2, KEYS * 2, 1),
        (TRUE * 2, GENERATIONS, GENERATIONS, ERAS, KEYS, 1),
        (b"\1" * SLOTS, GENERATIONS, GENERATIONS, ERAS, KEYS, 1),
        (TRUE, GENERATIONS[8:], GENERATIONS, ERAS, KEYS, 1),
        (TRUE, GENERATIONS, GENERATIONS[1:], ERAS, KEYS, 1),
        (TRUE, GENERATIONS, GENERATIONS, ERAS[1:], KEYS, 1),
        (TRUE, GENERATIONS, GENERATIONS, ERAS, KEYS[1:], 1),
        (TRUE, GENERATIONS, GENERATIONS, ERAS, KEYS, 0),
        (TRUE, GENERATIONS, GENERATIONS, ERAS, KEYS, 1 << 63),
        (b"", b"", b"", b"", [], 1),
    ],
)
@pytest.mark.parametrize("ranks", [(1,), (0, 1)])
def test_a_report_that_fits_no_start_costs_the_disk_of_this_life(
    tmp_path: Path, report: Sequence[object], ranks: Sequence[int]
) -> None:
    """Liveness: as a worker that cannot remove an old report leaves it, for one rank or for all of them."""
    world = new_disk_world(tmp_path / "world", "undecided")
    for rank in ranks:
        path = world.tier._found(rank)
        path.write_bytes(msgspec.msgpack.encode(report))
    with pytest.raises(UnusableFiles, match=r"-rank[01]\.found: cannot be understood: .*; remove it"):
        world.tier.decide("v1", SLOTS)
    assert world.live(world.begin()) == 1
