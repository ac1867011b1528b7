"""The world of starts: real processes of one core on kept pools, with a real log, one after another.

A process stores keys, ends steps, and closes its log or is killed: with all of its log written, in the middle
of a write, or right after its jobs left. The next one begins with `kvsm.tiers.warm_restart.start`. It may
have other weights, pools that were made again, a rank whose pool is cold, or two ranks whose pools have
changed places.

- what was stored and written is found again by a process that means the same: events are state (S10);
- a slot that a copy has overwritten since does not serve its old key, and neither do other weights: no stale
  data (S14);
- bytes that are gone, or are another rank's, are not served: correct bytes (S15);
- a log that ended in any of these ways can be continued: every call is legal (S8).
"""

from __future__ import annotations

import weakref
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from kvsm.check.worlds.memory_marks import memory_marks
from kvsm.check.worlds.world import Action
from kvsm.core.ledger import readable_keys
from kvsm.core.log import LogReader
from kvsm.core.offloader import Offloader
from kvsm.errors import LogError, PropertyBroken
from kvsm.events import OffloadConfig, OffloadingEvent
from kvsm.identity import KeptPools, PoolIdentity
from kvsm.properties import Property
from kvsm.tiers.warm_restart import start

KEYS, SLOTS, RANKS = 4, 2, 2
_CONFIG = OffloadConfig(host_blocks=SLOTS, device_blocks=KEYS, workers=RANKS)
_IDENTITY, _POOLS = PoolIdentity.of({"model": "small"}), (b"pool", b"sums")
_LIKELY = ("store", "store", "report", "report", "step", "kill", "close")


def _key(number: int) -> bytes:
    return b"key %d" % number + bytes(4)


class StartedWorld:
    """A `World`. Two in which the same actions happened are equal."""

    events: tuple[OffloadingEvent, ...] = ()
    """Empty: each process has a log of its own, on disk."""
    check_every = 20

    def __init__(self) -> None:
        place = TemporaryDirectory(prefix="kvsm-museum-")
        weakref.finalize(self, place.cleanup)
        self._log = Path(place.name) / "log"
        self._weights, self._pool, self._marks = "v1", 1, memory_marks(RANKS)
        self._order = list(range(RANKS))
        """Which pool each rank has."""
        self._found: set[bytes] = set()
        """The keys that the next process must find."""
        self._may_find: set[bytes] = set()
        """The keys that it may find beside these: their events were perhaps written."""
        self.core: Offloader | None = None
        self._do_start(0, 0, 0, 0)

    # What may happen.

    def actions(self) -> list[Action]:
        if self.core is None:
            return [("start", *(int(one == which) for one in range(4))) for which in (-1, *range(4))]
        stores: list[Action] = [("store", number) for number in range(KEYS)]
        return [*stores, ("report",), ("step",), ("close",), *[("kill", how) for how in range(3)]]

    def draw(self, random: Random) -> Action:
        if self.core is None:
            return random.choice([("start", 0, 0, 0, 0), *self.actions()])
        name = random.choice(_LIKELY)
        return random.choice([one for one in self.actions() if one[0] == name])

    def do(self, action: Action) -> bool:
        if action not in self.actions():
            return False
        name, *numbers = action
        return bool(getattr(self, f"_do_{name}")(*numbers))

    # A process lives.

    def _do_store(self, number: int) -> bool:
        """Store a key, and let its copy leave. It may take the place of another one."""
        assert self.core is not None
        if self.core.ledger.leases.words[number]:
            return False
        job = self.core.store((), [_key(number)], [number]).job
        if job is not None:
            self.core.submit([job.transfer])
        return True

    def _do_report(self) -> bool:
        """The oldest copy ends on each rank."""
        assert self.core is not None
        for transfer in list(self.core.ledger.transfers)[:1]:
            for rank in range(RANKS):
                self.core.report(transfer, rank, True)
            return True
        return False

    def _do_step(self) -> bool:
        assert self.core is not None
        self.core.end_step()
        return True

    # It ends.

    def _do_close(self) -> bool:
        """It ends well: all that it has stored is kept."""
        core = self._end()
        self._found, self._may_find = set(readable_keys(core.ledger)), set()
        core.close()
        return True

    def _do_kill(self, how: int) -> bool:
        """It is killed: when all is written (0), in the middle of the next write (1), or now (2)."""
        core = self._end()
        writer = core.writer
        assert writer is not None
        readable = set(readable_keys(core.ledger))
        self._found, self._may_find = readable, set()
        if how < 2:
            writer.flush()
        else:
            # The last reports may not be written. The plans of all copies that have left are.
            self._found, self._may_find = set(), readable
        path = max(self._log.glob("*.kvsm"))
        whole = path.stat().st_size
        if how == 1:
            core.arrive("somebody")
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

    # The next one begins.

    def _do_start(self, weights: int, remade: int, cold: int, exchanged: int) -> bool:
        """weights: other ones. remade: the pools were made again. cold: a rank says that its pool is.
        exchanged: the pools of the ranks have changed places."""
        self._weights = f"v{int(self._weights[1:]) + weights}"
        self._pool += remade
        if remade:
            self._marks = memory_marks(RANKS)
        if exchanged:
            self._order.reverse()
        ids = [b"%s %d %02d" % (one, rank, self._pool) for rank in self._order for one in _POOLS]
        pools = KeptPools(_IDENTITY, tuple(one.ljust(16, b"\0") for one in ids))
        why = ("a rank has found its pool cold",) if cold else ()
        options = {"durability": "none", "segment_bytes": 4000}
        begun = start(
            self._log,
            _CONFIG,
            pools,
            weights=self._weights,
            marks=self._marks,
            why_cold=why,
            log=options,
        )
        self.core = begun.offloader
        found = set(readable_keys(self.core.ledger))
        if weights or remade or cold or exchanged:
            broken = Property.NO_STALE_DATA if weights else Property.CORRECT_BYTES
            if found:
                raise PropertyBroken(
                    broken, f"{len(found)} keys are served by a process that must start cold"
                )
        elif not self._found <= found:
            message = f"{sorted(self._found - found)} were stored and written, and are not found again"
            raise PropertyBroken(Property.EVENTS_ARE_STATE, message)
        elif not found <= self._found | self._may_find:
            message = f"{sorted(found - self._found - self._may_find)} are found, and are not in their slots"
            raise PropertyBroken(Property.NO_STALE_DATA, message)
        self._found, self._may_find = found, set()
        self._check_log()
        return True

    def _check_log(self) -> None:
        """A reader takes all of the log, over the ends of all processes that wrote it."""
        seen = 0
        try:
            for batch in LogReader(self._log).batches():
                seen += len(batch)
        except LogError as error:
            raise PropertyBroken(
                Property.EVENTS_ARE_STATE, f"the log ends after {seen} events: {error}"
            ) from error

    # What must hold.

    def check(self) -> None:
        """All is watched at each start."""

    def wind_down(self) -> Action | None:
        return ("start", 0, 0, 0, 0) if self.core is None else None

    def describe(self) -> dict[str, str]:
        kept = readable_keys(self.core.ledger) if self.core is not None else self._found
        return {"keys": ", ".join(sorted(key.decode() for key in kept))}

    def fingerprint(self) -> bytes:
        return repr((self.describe(), self._weights, self._pool, self._order)).encode()


def leave_log(core: Offloader) -> None:
    """The process of this core is killed: what of its log it has not written is lost."""
    writer = core.writer
    assert writer is not None
    writer._place.segment.close()
    writer._claimed.close()


def started(_random: Random) -> StartedWorld:
    """A new world."""
    return StartedWorld()
