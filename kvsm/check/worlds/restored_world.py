"""The world of restored copies: processes run one after another on a kept pool, its checksums and its log,
and each of these files may be restored from any earlier moment.

A moment is the state after an action. It may have a partly written copy or unflushed events, and it may
belong to a branch that began when an older log was continued. After each action, every combination of moments
of the three files that contains the newest moment is tried. A process starts on the combination with
`kvsm.tiers.warm_restart.start`, and loads all blocks that its log calls readable, with the verifying copy
engine. So

- no combination serves a byte of another key, or of other weights: correct bytes (S15);
- files of one moment serve all stored blocks, if they were never restored from different moments: events are
  state (S10);
- a log whose end was cut off or zeroed serves no wrong byte.

Not covered: files that are changed while a process has them open, and a log with retention.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from hashlib import blake2b
from itertools import count, product
from pathlib import Path
from random import Random
from shutil import rmtree
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvsm.check.worlds.restart_world import leave_log
from kvsm.check.worlds.world import Action
from kvsm.check.worlds.world_files import suppressed_warnings, world_directory
from kvsm.copies import CopyResult, PoolMark, VerifyingCopyEngine
from kvsm.copies.checksums import CHECKSUM_BYTES
from kvsm.copies.host_pools.pool_mark import MARK_BYTES
from kvsm.copies.host_pools.pool_sizes import PoolSizes
from kvsm.core.ledger import readable_keys
from kvsm.core.plan import TransferJob
from kvsm.errors import ConfigError, PropertyBroken
from kvsm.events import Direction, OffloadConfig, OffloadingEvent
from kvsm.identity import KeptPools, PoolIdentity
from kvsm.ids import unpack
from kvsm.properties import Property
from kvsm.tiers.warm_restart import FIRST, Start, start

KEYS, SLOTS, BLOCK_BYTES = 3, 2, 32
CONFIG = OffloadConfig(host_blocks=SLOTS, device_blocks=KEYS)
_POOLS = KeptPools(PoolIdentity.of({"model": "small"}), (b"pool of rank 0..", b"sums of rank 0.."))
_WRITER = {"durability": "none", "segment_bytes": 700}
_LIKELY = {"store": 8, "copy": 14, "report": 8, "step": 1, "reset": 1, "end": 1, "restore": 1}
_CUTS = (0.3, 0.6, 0.9)
"""Where the last segment of a log is cut off, or zeros begin, as fractions of its length."""

FILES = ("log", "pool", "checksums")
MOST_MOMENTS = 24
"""The upper limit of the moments of a world."""


def _stored(number: int) -> list[Action]:
    return [("store", number), ("copy",), ("copy",), ("report",)]


LIVES: dict[str, list[Action]] = {
    "three keys in two slots": [*_stored(0), *_stored(1), *_stored(2)],
    "other weights in another branch": [
        ("step",),
        ("reset",),
        *_stored(0),
        ("restore", 1, 1, 1),
        *_stored(0),
    ],
    "a kill in a copy": [*_stored(0), ("store", 1), ("copy",), ("end", 1), *_stored(2)],
}
"""Short sequences of actions, by name. In "other weights in another branch", events with equal numbers store
the same key in two branches, under different weights."""


def key_of(number: int) -> bytes:
    """Return the key with this number."""
    return b"key %d" % number + bytes(4)


def content(key: bytes, weights: str) -> NDArray[np.uint8]:
    """Return the bytes of this key under these weights."""
    return np.frombuffer(blake2b(key + weights.encode(), digest_size=BLOCK_BYTES).digest(), np.uint8)


class PoolContent(NamedTuple):
    """The content of a pool file."""

    rows: bytes
    mark: bytes


class FilesMoment(NamedTuple):
    """The contents of the files after an action.

    weights: the weights that the log names.
    is_one_life: whether they were never restored from different moments. Otherwise the log may call blocks
        readable that the pool lacks, until a load is refused.
    """

    log: dict[str, bytes]
    weights: str
    pool: PoolContent
    checksums: PoolContent
    is_one_life: bool = True


class Tried(NamedTuple):
    """The outcome of a start on restored files.

    good, refused: numbers of loads. wrong: the key whose load gave wrong bytes, or None.
    """

    started: Start
    good: int
    refused: int
    wrong: bytes | None

    @property
    def outcome(self) -> str:
        """The row of the outcome table."""
        if self.started.why_cold:
            return "cold"
        if self.refused:
            return "partly warm" if self.good else "all refused"
        return "warm" if self.good else "warm, nothing stored"


OUTCOMES = ("cold", "all refused", "partly warm", "warm", "warm, nothing stored")


class _Copies:
    """A copy engine whose copies take two steps each; the world calls `step`."""

    num_device_blocks, num_host_blocks = KEYS, SLOTS

    def __init__(self, device: NDArray[np.uint8], host: NDArray[np.uint8]) -> None:
        self._device, self._host = device, host
        self._jobs: list[TransferJob] = []
        self._is_half = False
        self._ended: list[CopyResult] = []

    def submit(self, job: TransferJob, after: Any = None) -> None:  # noqa: ARG002 (it has no compute)
        self._jobs.append(job)

    def step(self) -> bool:
        """Copy the next half of the oldest job. Returns whether there was a job."""
        if not self._jobs:
            return False
        job, half = self._jobs[0], BLOCK_BYTES // 2
        part = slice(half, None) if self._is_half else slice(0, half)
        devices, hosts = unpack(job.device_blocks), unpack(job.host_blocks)
        for device, host in zip(devices, hosts):
            if job.direction is Direction.STORE:
                self._host[host, part] = self._device[device, part]
            else:
                self._device[device, part] = self._host[host, part]
        if self._is_half:
            self._ended.append(CopyResult(job.transfer, job.direction, good=True))
            del self._jobs[0]
        self._is_half = not self._is_half
        return True

    def poll(self) -> list[CopyResult]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, _: Iterable[int]) -> None:
        while self.step():
            pass

    def hold_compute(self, _: Iterable[int]) -> None:
        pass

    def drain(self) -> None:
        self.wait(())

    def close(self) -> None:
        self.drain()

    def mark(self) -> None:
        return None


class RestoredProcess:
    """A process that was started on copies of these files. log: a directory, which the process changes."""

    config = CONFIG

    def __init__(
        self, log: Path, pool: tuple[bytes, bytes], checksums: tuple[bytes, bytes], weights: str
    ) -> None:
        self._files = []
        for (rows, mark), row_bytes in ((pool, BLOCK_BYTES), (checksums, CHECKSUM_BYTES)):
            memory = bytearray(mark)
            sizes = PoolSizes(SLOTS, 1, row_bytes)
            held = np.frombuffer(bytearray(rows), np.uint8).reshape(SLOTS, row_bytes)
            sealed = held if row_bytes == CHECKSUM_BYTES else None
            self._files.append((held, memory, PoolMark(memory, sizes, sealed)))
        (self.host, _, _), (table, _, _) = self._files
        self.device = np.zeros((KEYS, BLOCK_BYTES), np.uint8)
        self.copies = _Copies(self.device, self.host)
        self.engine = VerifyingCopyEngine(
            self.copies, self.host, threads=0, table=table, kept=True, every_load=False
        )
        marks = [mark for _, _, mark in self._files]
        self._log, self.weights = log, weights
        self.started = start(log, self.config, _POOLS, weights=weights, marks=marks, log=_WRITER)
        self.core = self.started.offloader

    def store(self, number: int) -> bool:
        """Compute the block of this key, and submit its store. Returns whether a store was needed."""
        if self.core.ledger.leases.words[number]:
            return False
        self.core.rewrite([number])
        self.device[number] = content(key_of(number), self.weights)
        job = self.core.store((), [key_of(number)], [number]).job
        if job is not None:
            self.core.submit([job.transfer])
            self.engine.submit(job)
        return job is not None

    def report(self) -> bool:
        """Report the ended copies, and end the step. Returns whether there were any."""
        results = self.engine.poll()
        for result in results:
            self.core.report(result.transfer, 0, result.good, result.error)
        self.core.end_step()
        return bool(results)

    def serve_all(self) -> Tried:
        """Load all readable blocks; stop at the first with wrong bytes."""
        good, refused = 0, 0
        for key in readable_keys(self.core.ledger):
            request = f"load {key!r}"
            assert self.core.match(request, [key]).hits == 1
            job = self.core.prepare_load(request, [0])
            assert job is not None
            self.core.submit([job.transfer])
            self.engine.submit(job)
            self.engine.wait([job.transfer])
            (result,) = self.engine.poll()
            if result.good and not np.array_equal(self.device[0], content(key, self.weights)):
                return Tried(self.started, good, refused, key)
            good, refused = good + result.good, refused + (not result.good)
            self.core.report(job.transfer, 0, result.good, result.error)
            self.core.finish(request)
        return Tried(self.started, good, refused, None)

    def moment(self) -> FilesMoment:
        """Return the present contents of its files."""
        pool, checksums = (PoolContent(held.tobytes(), bytes(memory)) for held, memory, _ in self._files)
        log = {path.name: path.read_bytes() for path in sorted(self._log.glob("*.kvsm"))}
        return FilesMoment(log, self.core.ledger.weights, pool, checksums)


class RestoredOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a world of restored files. Raises `ConfigError`.

    moments: the number of moments after which no action is left. The number of starts grows with its cube.
    """

    moments: int = 10

    def __post_init__(self) -> None:
        if not 1 <= self.moments <= MOST_MOMENTS:
            raise ConfigError(f"moments is {self.moments}; it must be from 1 to {MOST_MOMENTS}")


def draw_restored_options(random: Random) -> RestoredOptions:
    """Draw the length of a life."""
    return RestoredOptions(moments=random.randint(4, 8))


class RestoredWorld:
    """A `World`; worlds with the same options and actions are equal.

    `counts`: (the older files, or the damage to the log; the outcome) -> number of starts.
    """

    events: tuple[OffloadingEvent, ...] = ()
    """Empty: each process has its own log, on disk."""
    check_every = 1

    def __init__(self, options: RestoredOptions) -> None:
        self.options = options
        place = world_directory()
        weakref.finalize(self, place.cleanup)
        self._place, self._names = Path(place.name), count()
        self.counts: Counter[tuple[str, str]] = Counter()
        self._weights, self._is_one_life = 1, True
        blank = (
            (bytes(SLOTS * BLOCK_BYTES), bytes(MARK_BYTES)),
            (bytes(SLOTS * CHECKSUM_BYTES), bytes(MARK_BYTES)),
        )
        self.process = RestoredProcess(self._new_log({}), *blank, "v1")
        self.moments = [self.process.moment()]
        self._tried: set[tuple[int, int, int, str]] = set()

    # What may happen.

    def __del__(self) -> None:
        process: RestoredProcess | None = getattr(self, "process", None)
        if process is not None:
            leave_log(process.core)

    def actions(self) -> list[Action]:
        return [
            (name, *numbers)
            for name, bounds in self._numbers().items()
            for numbers in product(*map(range, bounds))
        ]

    def draw(self, random: Random) -> Action:
        """Draw an action. Raises `IndexError` if none is left."""
        if len(self.moments) >= self.options.moments:
            raise IndexError("no action is left")
        (name,) = random.choices([*_LIKELY], [*_LIKELY.values()])
        if name == "restore":
            return (name, *(random.randrange(len(self.moments)) for _ in FILES))
        return random.choice([(name, *numbers) for numbers in product(*map(range, self._numbers()[name]))])

    def do(self, action: Action) -> bool:
        name, *numbers = action
        bounds = self._numbers().get(str(name))
        if bounds is None or len(numbers) != len(bounds):
            return False
        if not all(0 <= int(number) < bound for number, bound in zip(numbers, bounds)):
            return False
        with suppressed_warnings():
            done = bool(getattr(self, f"_do_{name}")(*numbers))
            if done:
                self._try_all()
        return done

    def _numbers(self) -> dict[str, tuple[int, ...]]:
        """Kind of action -> the exclusive upper bound of each of its numbers; empty if no action is left."""
        count = len(self.moments)
        if count >= self.options.moments:
            return {}
        alone = dict.fromkeys(("copy", "report", "step", "reset"), ())
        return {"store": (KEYS,), "end": (2,), "restore": (count,) * len(FILES), **alone}

    def live(self, actions: Iterable[Action]) -> None:
        """Do these actions, each of which must be possible."""
        for action in actions:
            assert self.do(action), action

    def walk(self, seed: int) -> None:
        """Take random actions until none is left."""
        random = Random(seed)
        while len(self.moments) < self.options.moments:
            self.do(self.draw(random))

    def _do_store(self, number: int) -> bool:
        return self.process.store(number)

    def _do_copy(self) -> bool:
        return self.process.copies.step()

    def _do_report(self) -> bool:
        return self.process.report()

    def _do_step(self) -> bool:
        self.process.core.end_step()
        return True

    def _do_reset(self) -> bool:
        """The model gets other weights."""
        self._weights += 1
        self.process.weights = f"v{self._weights}"
        return self.process.core.reset(self.process.weights) or True

    def _do_end(self, killed: int) -> bool:
        """The process ends, and another one begins on what it has left."""
        if killed:
            leave_log(self.process.core)
        else:
            self.process.engine.drain()
            self.process.report()
            self.process.core.close()
        left = self.process.moment()
        self._begin(left, left, left)
        return True

    def _do_restore(self, log: int, pool: int, checksums: int) -> bool:
        """The process is killed, and its files are put back."""
        leave_log(self.process.core)
        self._is_one_life = log == pool == checksums and self.moments[log].is_one_life
        self._begin(self.moments[log], self.moments[pool], self.moments[checksums])
        return True

    def _begin(self, log: FilesMoment, pool: FilesMoment, checksums: FilesMoment) -> None:
        directory = self._new_log(log.log)
        self.process = RestoredProcess(directory, pool.pool, checksums.checksums, log.weights)

    def _new_log(self, log: dict[str, bytes]) -> Path:
        directory = self._place / f"{next(self._names)}" / "log"
        directory.mkdir(parents=True, mode=0o700)
        for name, written in log.items():
            (directory / name).write_bytes(written)
        return directory

    # What must hold.

    def _try_all(self) -> None:
        """Try every combination with the newest moment in it, and damaged ends of its log."""
        newest = self.process.moment()._replace(is_one_life=self._is_one_life)
        if newest == self.moments[-1]:
            return
        self.moments.append(newest)
        last = len(self.moments) - 1
        for chosen in product(range(last + 1), repeat=len(FILES)):
            if last in chosen and self._is_new(chosen):
                older = [name for name, moment in zip(FILES, chosen) if moment < last]
                tried = self._try(*(self.moments[moment] for moment in chosen))
                self.counts[" and ".join(older) or "none", tried.outcome] += 1
                is_cold = tried.started.why_cold not in ((), (FIRST,))
                if newest.is_one_life and not older and (tried.refused or is_cold):
                    message = (
                        f"files of one moment: {tried.refused} blocks are refused, {tried.started.why_cold}"
                    )
                    raise PropertyBroken(Property.EVENTS_ARE_STATE, message)
        for what, log in _damaged(newest.log):
            tried = self._try(newest._replace(log=log), newest, newest)
            self.counts[what, tried.outcome] += 1

    def _is_new(self, chosen: Sequence[int]) -> bool:
        """Whether this combination of files is new. Most actions change only one file."""
        log, pool, checksums = (self.moments[number] for number in chosen)
        files = hash(tuple(sorted(log.log.items()))), hash(pool.pool), hash(checksums.checksums)
        before = len(self._tried)
        self._tried.add((*files, log.weights))
        return len(self._tried) > before

    def reached(self) -> list[str]:
        """The outcomes of starts, for the corpus."""
        return sorted(f"{older}: {outcome}" for older, outcome in self.counts)

    def _try(self, log: FilesMoment, pool: FilesMoment, checksums: FilesMoment) -> Tried:
        directory = self._new_log(log.log)
        process = RestoredProcess(directory, pool.pool, checksums.checksums, log.weights)
        with closing(process.core):
            tried = process.serve_all()
        rmtree(directory.parent)
        if tried.wrong is not None:
            message = f"{tried.wrong.decode()!r} is served with the bytes of another block"
            raise PropertyBroken(Property.CORRECT_BYTES, message)
        return tried

    def check(self) -> None:
        """Do nothing: `do` tries every combination after each action."""

    def wind_down(self) -> Action | None:
        return None

    def describe(self) -> dict[str, str]:
        return {"keys": ", ".join(sorted(key.decode() for key in readable_keys(self.process.core.ledger)))}

    def fingerprint(self) -> bytes:
        return repr((self.describe(), len(self.moments))).encode()


def _damaged(log: dict[str, bytes]) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yield copies of the log with a damaged end: (the damage, the files)."""
    name, written = max(log.items())
    yield "the log's last segment is missing", {one: log[one] for one in log if one != name}
    damages: dict[str, Callable[[int], bytes]] = {
        "the log's last segment is cut": lambda at: written[:at],
        "the log ends with zeros": lambda at: written[:at].ljust(len(written), b"\0"),
    }
    for part, (what, damage) in product(_CUTS, damages.items()):
        yield what, {**log, name: damage(int(part * len(written)))}
