"""The world of restarts: real processes of one core on kept pools, with a real log, one after another.

A process stores keys, ends steps, and closes its log or is killed: with its whole log written, in the middle
of a write, or right after submitting jobs. The next process begins with `kvsm.tiers.warm_restart.start`. It
may have other weights, new pools, a rank whose pool is cold, or two ranks with exchanged pools.

- a process with the same weights and pools finds all stored keys whose events were written: events are state
  (S10);
- a slot that a copy has overwritten does not serve its old key, and no key of other weights is served: no
  stale data (S14);
- bytes that are gone, or belong to another rank, are not served: correct bytes (S15);
- a log that ended in any of these ways can be continued: every call is legal (S8).
"""

from __future__ import annotations

import weakref
from pathlib import Path
from random import Random

import msgspec

from kvsm.check.worlds.memory_marks import memory_marks
from kvsm.check.worlds.world import Action
from kvsm.check.worlds.world_files import suppressed_warnings, without_directory, world_directory
from kvsm.core.ledger import readable_keys
from kvsm.core.log import LogReader, LogWriter
from kvsm.core.offloader import Offloader
from kvsm.errors import ConfigError, LogError, PropertyBroken
from kvsm.events import OffloadConfig, OffloadingEvent
from kvsm.identity import KeptPools, PoolIdentity
from kvsm.properties import Property
from kvsm.tiers.warm_restart import start

KEYS, MOST = 4, 4
"""The number of keys, and the upper limit of each size."""
_FEWEST_BYTES, _MOST_BYTES = 700, 1 << 20
"""The range of a segment's size."""
_IDENTITY, _POOLS = PoolIdentity.of({"model": "small"}), (b"pool", b"sums")
_LIKELY = ("store", "store", "report", "report", "step", "kill", "close")


def _key(number: int) -> bytes:
    return b"key %d" % number + bytes(4)


class RestartOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a world of restarts. Raises `ConfigError`.

    slots: the number of host blocks. segment_bytes, compress: as for the log.
    """

    ranks: int = 2
    slots: int = 2
    segment_bytes: int = 4_000
    compress: bool = False

    def __post_init__(self) -> None:
        sizes = {"ranks": (1, MOST), "slots": (1, MOST), "segment_bytes": (_FEWEST_BYTES, _MOST_BYTES)}
        for name, (fewest, most) in sizes.items():
            if not fewest <= getattr(self, name) <= most:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be from {fewest} to {most:,}")


def draw_restart_options(random: Random) -> RestartOptions:
    """Draw a small configuration."""
    return RestartOptions(
        ranks=random.choice((1, 2, 2)),
        slots=random.randint(1, 3),
        segment_bytes=random.choice((_FEWEST_BYTES, 4_000, _MOST_BYTES)),
        compress=random.random() < 0.3,
    )


class RestartWorld:
    """A `World`; worlds with the same options and actions are equal."""

    events: tuple[OffloadingEvent, ...] = ()
    """Empty: each process has its own log, on disk."""
    check_every = 20

    def __init__(self, options: RestartOptions) -> None:
        self.options = options
        self._config = OffloadConfig(host_blocks=options.slots, device_blocks=KEYS, workers=options.ranks)
        place = world_directory()
        self.core: Offloader | None = None
        weakref.finalize(self, place.cleanup)
        self._log = Path(place.name) / "log"
        self._weights, self._pool, self._marks = "v1", 1, memory_marks(options.ranks)
        self._order = list(range(options.ranks))
        """Rank -> the number of its pool."""
        self._found: set[bytes] = set()
        """The keys that the next process must find."""
        self._may_find: set[bytes] = set()
        """Further keys that it may find: their events were perhaps written."""
        self._do_start(0, 0, 0, 0)

    def __del__(self) -> None:
        if getattr(self, "core", None) is not None:
            leave_log(self._end())

    # What may happen.

    def actions(self) -> list[Action]:
        if self.core is None:
            return [("start", *(int(place == which) for place in range(4))) for which in (-1, *range(4))]
        stores: list[Action] = [("store", number) for number in range(KEYS)]
        return [*stores, ("report",), ("step",), ("close",), *[("kill", how) for how in range(3)]]

    def draw(self, random: Random) -> Action:
        if self.core is None:
            return random.choice([("start", 0, 0, 0, 0), *self.actions()])
        name = random.choice(_LIKELY)
        return random.choice([action for action in self.actions() if action[0] == name])

    def do(self, action: Action) -> bool:
        if action not in self.actions():
            return False
        name, *numbers = action
        with suppressed_warnings():
            return bool(getattr(self, f"_do_{name}")(*numbers))

    # A process runs.

    def _do_store(self, number: int) -> bool:
        """Store a key, and submit its copy. It may evict another key."""
        assert self.core is not None
        if self.core.ledger.leases.words[number]:
            return False
        job = self.core.store((), [_key(number)], [number]).job
        if job is not None:
            self.core.submit([job.transfer])
        return True

    def _do_report(self) -> bool:
        """Report the oldest copy as done on each rank."""
        assert self.core is not None
        for transfer in list(self.core.ledger.transfers)[:1]:
            for rank in range(self.options.ranks):
                self.core.report(transfer, rank, True)
            return True
        return False

    def _do_step(self) -> bool:
        assert self.core is not None
        self.core.end_step()
        return True

    # A process ends.

    def _do_close(self) -> bool:
        """Close the log normally: the next process must find all readable keys."""
        core = self._end()
        self._found, self._may_find = set(readable_keys(core.ledger)), set()
        core.close()
        return True

    def _do_kill(self, how: int) -> bool:
        """Kill the process: with a completely written log (0), in the middle of a write (1), or now (2)."""
        core = self._end()
        writer = core.writer
        assert isinstance(writer, LogWriter)
        readable = set(readable_keys(core.ledger))
        self._found, self._may_find = readable, set()
        if how < 2:
            writer.flush()
        else:
            # The last reports may be unwritten. The plans of all submitted copies are written.
            self._found, self._may_find = set(), readable
        path = max(self._log.glob("*.kvsm"))
        whole = path.stat().st_size
        if how == 1:
            core.arrive("arriving")
            writer._marks = ()  # The marks are set only after a write.
            writer.flush()
        leave_log(core)
        torn = max(self._log.glob("*.kvsm"))
        if how == 1 and torn == path:
            with path.open("r+b") as file:
                file.truncate((whole + path.stat().st_size) // 2)
        return True

    def _end(self) -> Offloader:
        core, self.core = self.core, None
        assert core is not None
        return core

    # The next process begins.

    def _do_start(self, weights: int, remade: int, cold: int, exchanged: int) -> bool:
        """Start the next process. Each argument is 0 or 1:

        weights: it has other weights. remade: its pools are new. cold: a rank reports that its pool is cold.
        exchanged: the ranks have exchanged their pools.
        """
        self._weights = f"v{int(self._weights[1:]) + weights}"
        self._pool += remade
        if remade:
            self._marks = memory_marks(self.options.ranks)
        if exchanged:
            self._order.reverse()
        ids = [b"%s %d %02d" % (pool, rank, self._pool) for rank in self._order for pool in _POOLS]
        pools = KeptPools(_IDENTITY, tuple(id.ljust(16, b"\0") for id in ids))
        why = ("a rank has found its pool cold",) if cold else ()
        options = self.options
        log = {"durability": "none", "segment_bytes": options.segment_bytes, "compress": options.compress}
        begun = start(
            self._log,
            self._config,
            pools,
            weights=self._weights,
            marks=self._marks,
            why_cold=why,
            log=log,
            past_logs_max_bytes=0,
        )
        self.core = begun.offloader
        found = set(readable_keys(self.core.ledger))
        if weights or remade or cold or (exchanged and len(self._order) > 1):
            broken = Property.NO_STALE_DATA if weights else Property.CORRECT_BYTES
            if found:
                raise PropertyBroken(
                    broken, f"{len(found)} keys are served by a process that must start cold"
                )
        elif not self._found <= found:
            message = f"{sorted(self._found - found)} were stored and written, but are not found again"
            raise PropertyBroken(Property.EVENTS_ARE_STATE, message)
        elif not found <= self._found | self._may_find:
            message = f"{sorted(found - self._found - self._may_find)} are found, but are not in their slots"
            raise PropertyBroken(Property.NO_STALE_DATA, message)
        self._found, self._may_find = found, set()
        self._check_log()
        return True

    def _check_log(self) -> None:
        """Check that a reader can read the whole log, across all processes that wrote it."""
        seen = 0
        try:
            for batch in LogReader(self._log).batches():
                seen += len(batch)
        except LogError as error:
            what = without_directory(error, self._log.parent)
            raise PropertyBroken(
                Property.EVENTS_ARE_STATE, f"the log ends after {seen} events: {what}"
            ) from error

    # What must hold.

    def check(self) -> None:
        """Do nothing: each start checks all keys."""

    def wind_down(self) -> Action | None:
        return ("start", 0, 0, 0, 0) if self.core is None else None

    def describe(self) -> dict[str, str]:
        kept = readable_keys(self.core.ledger) if self.core is not None else self._found
        return {"keys": ", ".join(sorted(key.decode() for key in kept))}

    def fingerprint(self) -> bytes:
        return repr((self.describe(), self._weights, self._pool, self._order)).encode()


def leave_log(core: Offloader) -> None:
    """Close a killed core's log files without a flush: unwritten events are lost."""
    writer = core.writer
    assert isinstance(writer, LogWriter)
    writer._place.segment.close()
    writer._claimed.close()
