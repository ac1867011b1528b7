"""Directed scenarios of restarts: a core that continues from the ledger of an earlier process."""

from __future__ import annotations

from collections.abc import Callable

from core_life import begin_store, keys, new_core, store
from scheduler_traffic import finish_one

from kvsm.check.worlds.small_engine import SmallEngine
from kvsm.core.kv_events import Publisher
from kvsm.core.log import MemoryLog
from kvsm.core.offloader import LookupResult, Offloader
from kvsm.events import OffloadConfig
from kvsm.properties import Property
from museum.scenarios import expect, sound


class _FlushedLog(MemoryLog):
    """A log in memory that records how many events were flushed."""

    written = 0

    def flush(self) -> None:
        self.written = len(self)


def _next(core: Offloader, publisher: Publisher | None = None) -> Offloader:
    """Return the core of the next process."""
    return Offloader.restarted(core.ledger, core.config, publisher=publisher, clock_ns=lambda: 0)


def next_process_serves_what_was_stored() -> None:
    core, _ = new_core()
    store(core, "a", keys(1))
    found = _next(core).lookup(keys(1)[0])
    expect(found is LookupResult.HIT, Property.STORED_ONCE, "a stored block is unknown, and is stored again")


def next_process_is_sound() -> None:
    """Restart after a store that has ended and a store that has not."""
    core, _ = new_core()
    store(core, "a", keys(1))
    begin_store(core, "b", keys(1, "q"), 1)
    sound(_next(core).ledger)


def store_leaves_behind_its_plan() -> None:
    log = _FlushedLog()
    core = Offloader(OffloadConfig(host_blocks=4, device_blocks=8), log, clock_ns=lambda: 0)
    transfer = begin_store(core, "a", keys(1))
    expect(log.written >= transfer, Property.NO_STALE_DATA, "a store leaves, and its plan is not written")


def router_hears_of_what_was_kept() -> None:
    core, _ = new_core()
    store(core, "a", keys(2))
    published = [key for change in _next(core, Publisher()).take_events() for key in change.keys]
    message = f"of two readable blocks, {len(published)} are published"
    expect(published == keys(2), Property.EVENTS_ARE_STATE, message)


def request_has_waited_long_enough() -> None:
    core, _ = new_core(defer_ticks=2)
    begin_store(core, "a", keys(1))
    assert core.match("r", keys(1)).waits_for is not None
    for _ in range(2):
        core.tick()
    expect(
        core.match("r", keys(1)).waits_for is None,
        Property.PROGRESS,
        "a request waits longer than it may for a store in flight",
    )


def host_is_reset_too() -> None:
    engine = SmallEngine()
    finish_one(engine, "first", [*range(9)])
    assert engine.reset()
    expect(not engine.core.ledger.index, Property.NO_STALE_DATA, "a reset succeeds, and the host serves")


RESTART_SCENARIOS: dict[str, Callable[[], None]] = {
    "B41": next_process_serves_what_was_stored,
    "B42": next_process_is_sound,
    "B43": next_process_is_sound,
    "B44": next_process_is_sound,
    "B45": store_leaves_behind_its_plan,
    "B46": router_hears_of_what_was_kept,
    "B47": request_has_waited_long_enough,
    "B48": host_is_reset_too,
}
