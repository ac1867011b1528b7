"""Twin cores, one native and one in Python, that get the same calls and are compared after each.

Also a generator of right and wrong calls.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from random import Random
from threading import Thread
from typing import Any, NamedTuple

import numpy as np

from kvsm import events as ev
from kvsm.check.worlds.audited import difference, ledger_difference
from kvsm.core import native
from kvsm.core.kv_events import Publisher
from kvsm.core.ledger import Ledger, NativeLedger
from kvsm.core.ledger.snapshot import snapshot
from kvsm.core.offloader import Ended, LogFlush, NativeOffloader, Offloader
from kvsm.core.plan import WorkerReport
from kvsm.core.policies import POLICIES
from kvsm.events import OffloadConfig, OffloadingEvent, SkipReason
from kvsm.ids import IdArray, pack, to_list, unpack


class Times:
    """A clock that returns or raises the next value in `next`; without one, it counts its calls."""

    def __init__(self) -> None:
        self.asked = 0
        self.next: list[Any] = []

    def __call__(self) -> Any:
        self.asked += 1
        said = self.next.pop(0) if self.next else self.asked
        if isinstance(said, BaseException):
            raise type(said)(*said.args)  # one of its own: an error keeps the frames that it came through
        return said


class Log(list[OffloadingEvent]):
    """A log that records the core's `_may_change` at each event and flush, and raises an error put into
    `next` or `next_flush`."""

    core: Offloader

    def __init__(self) -> None:
        self.next: list[BaseException] = []
        self.next_flush: list[BaseException] = []
        self.who: list[int] = []
        self.flushes: list[tuple[int, int]] = []

    def append(self, event: OffloadingEvent) -> None:
        self.who.append(self.core._may_change)
        super().append(event)
        if self.next:
            raise self.next.pop()

    def flush(self) -> None:
        """Record the flush: the log buffers no events."""
        self.flushes.append((len(self), min(self.core._may_change, 1)))
        if self.next_flush:
            raise self.next_flush.pop()


class RecordingPublisher(Publisher):
    """A publisher that records each transfer's end with the core's `_may_change`.

    fails: whether the next `ended` call raises an error.
    """

    core: Offloader

    def __init__(self) -> None:
        super().__init__()
        self.over: list[tuple[int, int]] = []
        self.fails = False

    def stored(self, transfer: int, keys: Sequence[bytes]) -> None:
        self.over.append((transfer, min(self.core._may_change, 1)))
        super().stored(transfer, keys)

    def ended(self, transfer: int) -> None:
        self.over.append((transfer, min(self.core._may_change, 1)))
        super().ended(transfer)
        if self.fails:
            self.fails = False
            raise RuntimeError("the publisher broke")


class Notes:
    """The `note` of a `report_all`.

    heard: the transfers that it got.
    fails: whether the next call raises an error.
    """

    def __init__(self) -> None:
        self.heard: list[Ended] = []
        self.fails = False

    def __call__(self, ended: Ended) -> None:
        self.heard.append(ended)
        if self.fails:
            raise RuntimeError("nobody listens")


NOTES = Notes()


def make_core(
    config: OffloadConfig, log: bool = True, publisher: bool = False, flush_within_ms: int = 0
) -> Offloader:
    """Return a core with the clock, log and publisher of this module."""
    sink, recorder = Log() if log else None, RecordingPublisher() if publisher else None
    core = Offloader.__new__(Offloader)
    for watcher in (sink, recorder):
        if watcher is not None:
            watcher.core = core
    core.__init__(  # type: ignore[misc]
        config, sink, clock_ns=Times(), publisher=recorder, flush_within_ms=flush_within_ms
    )
    return core


class Outcome(NamedTuple):
    """The result of a call, or the error that it raised; and what its `NOTES` got."""

    result: Any
    error: BaseException | None
    heard: list[Ended]


class TwinCores:
    """Two cores that get the same calls. Raises `AssertionError` at the first difference."""

    def __init__(
        self,
        config: OffloadConfig,
        *,
        log: bool = True,
        publisher: bool = False,
        python_folds: bool = False,
        flush_within_ms: int = 0,
    ) -> None:
        self.native = make_core(config, log, publisher, flush_within_ms)
        assert isinstance(self.native, NativeOffloader), native.WHY_NOT
        assert isinstance(self.native.ledger, NativeLedger)
        with native.without():
            self.python = make_core(config, log, publisher, flush_within_ms)
            if python_folds:
                self.native.ledger = Ledger(config, self.native.publisher)
                for event in self.native.log if log else [ev.LogOpened(1, 0, 0, config, "", 1)]:  # type: ignore[attr-defined]
                    self.native.ledger.apply(event)
        assert not isinstance(self.python, NativeOffloader)

    @property
    def both(self) -> tuple[Offloader, Offloader]:
        return self.native, self.python

    def call(self, name: str, *arguments: Any, **named: Any) -> Outcome:
        """Call this method of both cores, and compare outcomes and states."""
        return self.each(lambda core: getattr(core, name)(*arguments, **named), (name, arguments, named))

    def each(self, do: Callable[[Offloader], Any], what: object = "") -> Outcome:
        """Apply `do` to both cores, and compare outcomes and states. what: named in failures."""
        ours, theirs = (_outcome(do, core) for core in self.both)
        assert type(ours.error) is type(theirs.error), (what, ours, theirs)
        assert str(ours.error) == str(theirs.error), (what, ours, theirs)
        assert type(ours.error.__cause__) is type(theirs.error.__cause__) if ours.error else True
        assert type(ours.result) is type(theirs.result), (what, ours, theirs)
        assert difference(ours.result, theirs.result) is None, (what, ours, theirs)
        assert difference(ours.heard, theirs.heard) is None, (what, ours, theirs)
        mine, its = (self._seen(core) for core in self.both)
        odd = [name for name in mine if mine[name] != its[name]]
        assert not odd, (what, [(name, mine[name], its[name]) for name in odd if name != "state"])
        assert ledger_difference(self.native.ledger, self.python.ledger) is None, what
        return ours

    def _seen(self, core: Offloader) -> dict[str, Any]:
        """Return the observable state of a core besides the ledger's fields."""
        log, publisher, clock = core.log, core.publisher, core._clock_ns
        poisoned = core._poisoned is not None
        return {
            "state": None if poisoned else snapshot(core.ledger),
            "events": log[-3:] if isinstance(log, Log) else [],
            "lengths": (len(log), log.who[-3:]) if isinstance(log, Log) else (),
            "flushes": log.flushes if isinstance(log, Log) else [],
            "over": publisher.over if isinstance(publisher, RecordingPublisher) else [],
            "asked": clock.asked if isinstance(clock, Times) else None,
            "may change": min(core._may_change, 1),
            "poisoned": core._poisoned,
            "step": (core.step, core._flushed_seq, core._flush_by_ns, core.until_look),
        }


def _outcome(do: Callable[[Offloader], Any], core: Offloader) -> Outcome:
    heard = NOTES.heard = []
    try:
        return Outcome(do(core), None, heard)
    except BaseException as error:
        return Outcome(None, error, heard)


def from_another_thread(do: Callable[[Offloader], Any]) -> Callable[[Offloader], Any]:
    """Return a function that does `do` in a new named thread, and raises the thread's error in the caller."""

    def made(core: Offloader) -> Any:
        outcomes: list[Outcome] = []
        thread = Thread(target=lambda: outcomes.append(_outcome(do, core)), name="other")
        thread.start()
        thread.join()
        if outcomes[0].error is not None:
            raise outcomes[0].error
        return outcomes[0].result

    return made


# Random calls.


class Name(str):
    """A subclass of `str`."""


class Key(bytes):
    """A subclass of `bytes`."""


NAMES = ["r0", "r1", "r2", "r3"]
KEYS = [b"key %d" % number for number in range(24)]
WRONG_NAMES: list[Any] = ["é", "\ud800", "", Name("r1"), b"r0", None, 5, ["r0"]]
WRONG_KEYS: list[Any] = ["key 1", None, bytearray(b"key 1"), Key(b"key 1"), b"x" * 5000, [b"key 1"], 7]
WRONG_NUMBERS: list[Any] = [-1, 1 << 62, 1 << 70, True, "1", None, 1.0, np.int64(1), np.int64(-2)]


Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""


def drawn_config(random: Random) -> OffloadConfig:
    """Draw the configuration of a small core."""
    return OffloadConfig(
        host_blocks=random.choice((2, 4, 24)),
        device_blocks=60,
        workers=random.choice((1, 1, 2)),
        blocks_per_chunk=random.choice((1, 1, 1, 2)),
        policy=random.choice(tuple(POLICIES)),
        max_live_transfers=random.choice((2, 8)),
        defer_ticks=random.choice((0, 3)),
        transfer_ticks=5,
    )


class CallMaker:
    """Draws calls for cores of this configuration, mostly calls that fit the core's state."""

    def __init__(self, config: OffloadConfig, random: Random, wrong: float = 0.06) -> None:
        self._config, self._random, self._wrong = config, random, wrong

    def draw(self, core: Offloader) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
        """Return (name, positional arguments, keyword arguments)."""
        random = self._random
        name = random.choice(_CALLS)
        arguments, named = getattr(self, f"_{name}", self._of_transfer)(core)
        if random.random() < self._wrong / 4:  # Too many, too few, or by a name.
            change = random.randrange(3)
            if change == 0:
                arguments = (*arguments, random.choice([0, "x", (), None]))
            elif change == 1:
                arguments = arguments[:-1]
            else:
                named = {**named, random.choice(["worker", "aborted", "good", "nothing", "keys"]): 1}
        return name, arguments, named

    def _or_wrong(self, right: Any, wrong: Sequence[Any]) -> Any:
        return self._random.choice(wrong) if self._random.random() < self._wrong else right

    def _name(self) -> Any:
        return self._or_wrong(self._random.choice(NAMES), WRONG_NAMES)

    def _keys(self, core: Offloader) -> Any:
        """Return a prefix of the resident keys, followed by other keys."""
        random = self._random
        known = list(core.ledger.index)
        random.shuffle(known)
        keys: list[Any] = known[: random.choice((0, 1, 1, 2, 3, 20))]
        if random.random() < 0.6:
            keys += random.sample(KEYS, random.choice((1, 2, 20)))
        if random.random() > self._wrong:
            keys = list(dict.fromkeys(keys))
        keys = [self._or_wrong(key, WRONG_KEYS) for key in keys]
        kinds: list[Callable[[list[Any]], Any]] = [list, tuple]
        return self._or_wrong(random.choice(kinds)(keys), ["key 1", None, 5, {b"key 1"}, iter(keys), {}])

    def _blocks(self, count: int) -> Any:
        random, chunk = self._random, self._config.blocks_per_chunk
        count = max(count * chunk + random.choice((0, 0, 0, 0, -1, 1)), 0)
        most = max(self._config.device_blocks - count, 1)
        first = random.randrange(most)
        kinds: list[Callable[[range], Any]] = [list, tuple, range_of, np.array, reversed_list]
        blocks = random.choice(kinds)(range(first, first + count))
        wrong = [
            [first, first],
            [first, "1"],
            [True],
            [-1],
            [1 << 40],
            [1 << 70],
            (0.0,),
            None,
            7,
            "ab",
            b"1",
        ]
        return self._or_wrong(blocks, [*wrong, np.array([[0]]), np.array([0.5]), range(-2, 3), {1: 2}, []])

    def _transfer(self, core: Offloader) -> Any:
        live = list(core.ledger.transfers)
        stale: list[Any] = [0, 1, core.ledger.seq, core.ledger.seq + 1, *WRONG_NUMBERS]
        right = self._random.choice(live) if live else self._random.choice(stale)
        return self._or_wrong(right, [*stale, np.int64(live[0] if live else 3)])

    def _worker(self) -> Any:
        return self._or_wrong(self._random.randrange(self._config.workers), [*WRONG_NUMBERS, 2, 70])

    def _of_transfer(self, core: Offloader) -> Arguments:
        # complete_load, complete_store, fail_load, fail_store
        if self._config.workers == 1 and self._random.random() < 0.5:
            return (self._transfer(core),), {}
        return (self._transfer(core), self._worker()), {}

    def _report(self, core: Offloader) -> Arguments:
        good = self._or_wrong(self._random.random() < 0.8, [1, None, np.True_, "yes"])
        error = self._random.choice(((), (), ("",), ("it broke",), (None,), (Name(""),)))
        if self._random.random() < 0.4:
            error = (*(error or ("",)), *[self._duration() for _ in range(self._random.randrange(3))])
        return (self._transfer(core), self._worker(), good, *error), {}

    def _duration(self) -> Any:
        right = self._random.choice((None, 0, 1, 70_000, (1 << 63) - 1))
        return self._or_wrong(right, [-1, 1 << 63, True, 1.5, "1", np.int64(3)])

    def _match(self, core: Offloader) -> Arguments:
        return (self._name(), self._keys(core)), {}

    def _prepare_load(self, core: Offloader) -> Arguments:
        matched = [name for name, one in core.ledger.requests.items() if len(one.pins)]
        name = self._random.choice(matched) if matched and self._random.random() < 0.9 else self._name()
        entry = core.ledger.requests.get(name) if isinstance(name, str) else None
        count = len(entry.pins) if entry else 1
        more = self._random.choice(((), (), ((),), ((0,),), ([],), ((), ""), ((), "disk"), ((1, 0),)))
        return (name, self._blocks(self._random.choice((count, count, 1, count + 1, 0))), *more), {}

    def _finish(self, _: Offloader) -> Arguments:
        named: list[dict[str, Any]] = [{}, {}, {"aborted": False}, {"aborted": True}, {"aborted": 1}]
        named += [{"hand_over": "taken"}, {"aborted": True, "hand_over": "expired"}]
        named += [{"hand_over": 5}, {"hand_over": "\ud800"}]
        return (self._name(),), self._random.choice(named)

    def _emit(self, core: Offloader) -> Arguments:
        wrong = [
            (ev.LoadPlanned, self._name(), (0,), (0,)),
            (ev.TransfersSubmitted, (self._transfer(core),)),
            (ev.WorkerReported, self._transfer(core), 0, True),
            (ev.WorkerReported, self._transfer(core), 0, True, "", "and more"),
            (ev.RequestFinished,),
            (ev.StorePlanned, (), (b"key",), (0,), (0,)),
            (ev.HitMatched, "r1", b"\x05", None),
            (list, 1),
            (),
            (ev.StepEnded,),
        ]
        return self._random.choice(wrong), {}

    def _prepare_store(self, core: Offloader) -> Arguments:
        keys = self._offered(core)
        right = self._random.choice([b"", self._random.choice(KEYS), None])
        parent = self._or_wrong(right, WRONG_KEYS)
        if self._random.random() < 0.3:
            return (self._name(), keys, self._blocks(len(keys))), {"parent": parent}
        return (self._name(), keys, self._blocks(len(keys)), *self._random.choice(((), (parent,)))), {}

    def _offered(self, core: Offloader) -> list[Any]:
        """Return keys to offer: mostly new ones, some resident or offered twice."""
        random = self._random
        keys: list[Any] = random.sample(KEYS, random.choice((1, 2, 3, 20)))
        if random.random() < 0.5:
            known = list(core.ledger.index)
            keys = [random.choice(known) if known and random.random() < 0.3 else key for key in keys]
            keys = list(dict.fromkeys(keys)) if random.random() < 0.9 else keys
        return [self._or_wrong(key, WRONG_KEYS) if random.random() < 0.1 else key for key in keys]

    def _store(self, core: Offloader) -> Arguments:
        random, keys = self._random, self._offered(core)
        owners, left = list[Any](), len(keys)
        while left:
            count = random.randint(1, left)
            owners.append((self._or_wrong(random.choice(NAMES), WRONG_NAMES), count))
            left -= count
        owners = self._or_wrong(owners, [[*owners, ("r1", 0)], [*owners, ("r1", 2)], [("r1",)], [5]])
        named: dict[str, Any] = {}
        if random.random() < 0.6:
            places = random.sample(range(len(keys) + 2), min(2, len(keys)))
            named["parents"] = {place: random.choice([b"", *KEYS, *keys]) for place in places}
        if random.random() < 0.2:
            slots = [*core.ledger.index.values()][:2]
            named["spared"] = self._or_wrong(random.choice([(), slots, set(slots)]), [5, ("x",)])
        if random.random() < 0.1:
            named["parents"] = random.choice([None, {-1: b""}, {0: "x"}, {"0": b""}, [(0, b"")]])
        again = random.choice(((), (), ({0},), ([1],), ((0, 1),)))
        named |= random.choice([{}, {}, {"required": {0}}]) if len(again) < 2 else {}
        return (random.choice((tuple(owners), ())), keys, self._blocks(len(keys)), *again), named

    def _submit(self, core: Offloader) -> Arguments:
        planned = [one.id for one in core.ledger.transfers.values() if one.state == 0]
        return (self._or_wrong(planned, [None, (1,), [1 << 70], planned * 2]),), {}

    def _of_name(self, _: Offloader) -> Arguments:
        return (self._name(),), {}

    _preempt = _waits_for = _may_match = _release = _of_name

    def _arrive(self, _: Offloader) -> Arguments:
        return (self._name(), *self._random.choice(((), (), ("",), ("disk",), (None,)))), {}

    def _report_all(self, core: Offloader) -> Arguments:
        reports = [WorkerReport(*self._report(core)[0]) for _ in range(self._random.randrange(4))]
        if self._random.random() < 0.5:  # All ranks have copied one transfer.
            transfer = self._transfer(core)
            reports += [WorkerReport(transfer, rank, True) for rank in range(self._config.workers)]
        wrong = [None, 5, [None], {}, range(2), [*reports, (1, 0, True)]]
        return (self._or_wrong(self._random.choice((list, tuple))(reports), wrong), NOTES), {}

    def _advance(self, core: Offloader) -> Arguments:
        random, known = self._random, [*core.ledger.requests, *NAMES]
        offers = list[Any]()
        for name in random.sample(known, random.choice((0, 1, 1, 3))):
            settled = [random.randrange(4) for _ in range(random.choice((1, 1, 2)))]
            ends = [end + random.choice((0, 1, -1)) for end in settled]
            offered = self._or_wrong(ends, [[True], ["1"], [1 << 62], [1 << 63], [0.5], None, 1])
            cursors = [tuple(one) if isinstance(one, list) else one for one in (settled, offered)]
            offers.append((self._or_wrong(name, WRONG_NAMES), *self._or_wrong(cursors, [[settled, ends]])))
        offers = [self._or_wrong(one, [list(one), one[:2], None, "abc"]) for one in offers]
        return (self._or_wrong(random.choice((list, tuple))(offers), [None, 5, "r", {}]),), {}

    def _rewrite(self, core: Offloader) -> Arguments:
        brought = list(core.ledger.provenance.brought) or [1]
        return (self._random.choice((brought, self._blocks(2), [], None)),), {}

    def _flush_log(self, _: Offloader) -> Arguments:
        return (self._or_wrong(self._random.choice(list(LogFlush)), [None, "jobs leave"]),), {}

    def _of_one(self, core: Offloader) -> Arguments:
        return (self._transfer(core),), {}

    _cancel = _lose = _of_one

    def _defer(self, core: Offloader) -> Arguments:
        return (self._name(), self._transfer(core)), {}

    def _none(self, _: Offloader) -> Arguments:
        return (), {}

    _tick = _end_step = _lose_overdue = _flush = _none

    def _reset(self, _: Offloader) -> Arguments:
        return self._random.choice(((), (), ("w1",), ("w2",))), {}

    def _touch(self, _: Offloader) -> Arguments:
        parents = self._random.choice(((), ({},), ({0: self._random.choice(KEYS), 2: b""},)))
        return (self._random.sample(KEYS, 3), *parents), {}

    def _skip(self, _: Offloader) -> Arguments:
        return ((), (b"key",), SkipReason.POOL_FULL), {}

    def _pin(self, core: Offloader) -> Arguments:
        random, name = self._random, self._name()
        slots = list(core.ledger.index.values())[: random.choice((0, 0, 1, 2, 20))]
        entry = core.ledger.requests.get(name) if isinstance(name, str) else None
        if entry is not None and random.random() < 0.3:
            slots = to_list(entry.pins)
        kinds: list[Callable[[list[int]], Any]] = [list, tuple, np.array, unpacked]
        right = random.choice(kinds)(slots)
        wrong = [None, 5, [True], [-1], ["1"], [1 << 40], (1 << 70,), (0, 0), {0}, b"\x02", range(2), (39,)]
        wrong += [np.array([0.5] * 17), np.arange(20).reshape(2, 10), np.arange(40)[::-2], array("q", [0])]
        return (name, self._or_wrong(right, wrong), self._missed(), *self._counts()), {}

    def _missed(self) -> Any:
        return self._or_wrong(self._random.choice((None, KEYS[0])), WRONG_KEYS)

    def _counts(self) -> list[Any]:
        right = self._random.choice((None, 0, 1, 7, 1 << 63))
        return [self._or_wrong(right, WRONG_NUMBERS) for _ in range(self._random.choice((0, 1, 3, 3)))]

    def _admit(self, _: Offloader) -> Arguments:
        more = [self._missed(), self._or_wrong(self._random.random() < 0.5, [1, None, np.True_])]
        counts = self._counts()
        if len(counts) == 3:
            counts += more[: self._random.randrange(3)]
        named = self._random.choice(({}, {}, {}, {"resumed": True}, {"missed": KEYS[0]}))
        return (self._name(), *counts), named if len(counts) < 4 else {}


def range_of(blocks: range) -> range:
    return blocks


def unpacked(ids: list[int]) -> IdArray:
    return unpack(pack(ids))


def reversed_list(blocks: range) -> list[int]:
    return list(blocks)[::-1]


_CALLS = (
    *("match",) * 10,
    *("prepare_load",) * 8,
    *("report",) * 5,
    *("complete_load",) * 4,
    *("complete_store",) * 5,
    *("finish",) * 5,
    *("submit",) * 7,
    *("prepare_store",) * 7,
    *("store",) * 5,
    *("pin", "pin", "pin", "pin", "admit", "admit", "advance", "advance", "report_all", "report_all"),
    *(
        "fail_load",
        "fail_store",
        "cancel",
        "lose",
        "emit",
        "emit",
        "reset",
        "preempt",
        "flush_log",
        "rewrite",
    ),
    *(
        "arrive",
        "waits_for",
        "may_match",
        "release",
        "defer",
        "tick",
        "end_step",
        "end_step",
        "touch",
        "skip",
    ),
    *("lose_overdue", "flush"),
)
