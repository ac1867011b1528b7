"""Twin ledgers, one native and one in Python, that fold the same events and are compared after each.

Also generators of right and wrong events.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import count
from random import Random
from typing import Any, NamedTuple

import msgspec

from kvsm.check.worlds.audited import difference, ledger_difference
from kvsm.check.worlds.core_options import CoreOptions, draw_options
from kvsm.check.worlds.core_world import CoreWorld
from kvsm.core import native
from kvsm.core.ledger import Ledger, NativeLedger, TransferRecord
from kvsm.core.ledger.snapshot import snapshot
from kvsm.core.log import MemoryLog
from kvsm.core.offloader import Offloader
from kvsm.errors import LimitReached
from kvsm.events import KINDS, OffloadConfig, OffloadingEvent
from kvsm.ids import pack
from kvsm.states.transfer import PLANNED


class RecordingListener:
    """A ledger's listener that records all calls."""

    def __init__(self) -> None:
        self.all: list[tuple[Any, ...]] = []

    def stored(self, transfer: int, keys: Iterable[bytes]) -> None:
        self.all.append(("stored", transfer, *keys))

    def removed(self, keys: Iterable[bytes]) -> None:
        self.all.append(("removed", *keys))

    def cleared(self) -> None:
        self.all.append(("cleared",))


class Outcome(NamedTuple):
    """The transfer that `apply` returned, or the error that it raised."""

    ended: TransferRecord | None
    error: BaseException | None


class Twins:
    """Two ledgers that get the same events. Raises `AssertionError` at the first difference in any field."""

    def __init__(self, config: OffloadConfig) -> None:
        self.native = Ledger(config, RecordingListener())
        assert isinstance(self.native, NativeLedger), native.WHY_NOT
        with native.without():
            self.python = Ledger(config, RecordingListener())
        assert not isinstance(self.python, NativeLedger)

    def apply(self, event: OffloadingEvent) -> Outcome:
        """Apply the event to both ledgers, and compare outcomes and states."""
        before = saved(self.native)
        ours, theirs = _outcome(self.native, event), _outcome(self.python, event)
        assert difference(ours.ended, theirs.ended) is None, event
        assert type(ours.error) is type(theirs.error), (event, ours.error, theirs.error)
        if ours.error is not None and theirs.error is not None:
            assert str(ours.error) == str(theirs.error)
            assert vars(ours.error) == vars(theirs.error)
        assert self.difference() is None, (event, self.difference())
        after = saved(self.native)
        assert after == saved(self.python)
        if is_refusal(ours):
            assert after == before, event
        return ours

    def difference(self) -> str | None:
        """Return the first field in which the two ledgers differ."""
        listeners = (self.native.listener, self.python.listener)
        assert all(isinstance(listener, RecordingListener) for listener in listeners)
        calls = [vars(listener) for listener in listeners]
        return ledger_difference(self.native, self.python) or difference(*calls)


def saved(ledger: Ledger) -> bytes | str:
    """Return the ledger's snapshot, or the error's text: wrongly typed values may be impossible to save."""
    try:
        return snapshot(ledger)
    except Exception as error:
        return repr(error)


def is_refusal(outcome: Outcome) -> bool:
    """Whether the event was refused by a rule of the fold, and not because of a wrong type."""
    return type(outcome.error).__name__ in ("IllegalTransition", "InvalidEvent")


def _outcome(ledger: Ledger, event: OffloadingEvent) -> Outcome:
    try:
        return Outcome(ledger.apply(event), None)
    except Exception as error:
        return Outcome(None, error)


# Events.


def walked(options: CoreOptions, seed: int, actions: int) -> Sequence[OffloadingEvent]:
    """Return the log of a walk of the core."""
    world, random = CoreWorld(options), Random(seed)
    for _ in range(actions):
        world.do(world.draw(random))
    return world.events


def walked_in_arrays(seed: int) -> tuple[OffloadConfig, Sequence[OffloadingEvent]]:
    """Walk with batches of more than 16 ids, which are arrays. Returns the configuration and the log."""
    random = Random(seed)
    length = random.randint(17, 40)
    options = msgspec.structs.replace(
        draw_options(random), host_blocks=2 * length, chunks=3 * length, length=length, prompts=2
    )
    return options.config(), walked(options, seed, 50)


def reset_often(config: OffloadConfig, random: Random) -> Sequence[OffloadingEvent]:
    """Return the log of a core that is often reset, with plans, stores, loads and copies out in flight."""
    log = MemoryLog()
    core, free_block = Offloader(config, log), count()

    def key() -> bytes:
        return b"key-%03d\x00\x00\x00\x00" % random.randrange(2 * config.host_blocks)

    def store() -> None:
        keys = list({key() for _ in range(random.choice((1, 5, 20, 40)))})
        blocks = [next(free_block) for _ in keys]
        parents = {
            random.randrange(len(keys)): random.choice((b"", key(), *keys))
            for _ in range(random.choice((1, 3)))
        }
        core.store(((f"store-{len(log)}", len(keys)),), keys, blocks, parents=parents)

    def load(target: str) -> None:
        name, readable = f"load-{len(log)}", [*filter(core.ledger.readable, core.ledger.index.values())]
        slots = random.sample(readable, min(len(readable), random.choice((1, 3, 20))))
        core.arrive(name, target)
        with suppress(LimitReached):
            core.pin(name, slots, None)
            if random.random() < 0.7:
                core.prepare_load(name, [next(free_block) for _ in slots], (), target)

    def go_on(share: float) -> None:
        for id, one in list(core.ledger.transfers.items()):
            if random.random() < share:
                core.submit([id]) if one.state is PLANNED else core.report(id, random.randrange(2), True)

    for _ in range(60):
        random.choice((store, store, store, lambda: load(""), lambda: load("disk")))()
        go_on(random.choice((0.3, 0.9)))
        if random.random() < 0.15:
            core.tick()
            for _ in range(random.choice((1, 1, 3))):
                go_on(random.choice((0, 1)))
                core.reset(random.choice((None, f"weights-{len(log)}")))
    return log


ODD = (0, 1, 2, 3, 7, 99, -1, 2**31, 2**63, 2**70, None, "", "request-0", b"", b"\x02\x00\x00", True, 1.5)


def _spoiled(value: object, random: Random) -> object:
    """Return a wrong field: of another type, out of range, doubled, absent, or just another value."""
    if isinstance(value, tuple) and value and random.random() < 0.8:
        place = random.randrange(len(value))
        choice = random.randrange(4)
        if choice == 0:
            return (*value, value[place])
        if choice == 1:
            return (*value[:place], *value[place + 1 :])
        return (*value[:place], _spoiled(value[place], random), *value[place + 1 :])
    if isinstance(value, bytes) and value and random.random() < 0.7:
        place = random.randrange(len(value))
        return value[:place] + random.randbytes(random.randint(0, 2)) + value[place + 1 :]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int) and random.random() < 0.7:
        return value + random.choice((-1, 1, 2))
    if random.random() < 0.2:
        return pack([random.randrange(40) for _ in range(random.randint(0, 40))])
    return random.choice(ODD)


def spoiled(event: OffloadingEvent, random: Random) -> OffloadingEvent:
    """Return the event with a wrong field, or with another kind."""
    fields = [getattr(event, name) for name in event.__struct_fields__]
    kind = type(event)
    if random.random() < 0.1:
        kind = random.choice(KINDS)
        fields = (fields + [random.choice(ODD) for _ in range(8)])[: len(kind.__struct_fields__)]
    elif len(fields) > 3:
        place = random.randrange(3, len(fields))
        fields[place] = _spoiled(fields[place], random)
    else:
        fields[0] = _spoiled(fields[0], random)
    return kind(*fields)


def wrong_parents(random: Random) -> object:
    """Return parents (`Parents`) with a wrong number, of a wrong shape, or right by chance."""
    places = sorted(random.sample(range(4), random.randint(1, 2)))
    pairs = [(place, random.choice((0, 1, None, -1, -2, -(2**40), *ODD))) for place in places]
    if random.random() < 0.5:
        return tuple(pairs)
    shapes = ([], "", pairs, dict(pairs), tuple(map(list, pairs)), tuple(pairs[::-1]), (pairs[0], *ODD))
    return random.choice((*shapes, random.choice(ODD)))
