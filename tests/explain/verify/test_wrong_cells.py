"""One wrong cell at a time, through the whole of `verify_log`, in logs that are written and read back.

A check that compares too little accepts such a log. Each field of a snapshot is made wrong, so a field that
is compared nowhere is found here.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from random import Random

import msgspec
import pytest
from changed_logs import PlainLog, copied, read_plain, write_plain
from replay_life import Life, key, random_life, written
from wrong_states import CHANGES, Change, put, saved

from examples import examples
from kvsm.core.kv_events import KeysChanged, Publisher
from kvsm.core.ledger import Ledger
from kvsm.core.ledger.snapshot import SavedLedger
from kvsm.errors import KvsmError
from kvsm.events import OffloadingEvent
from kvsm.explain.story import Verification, verify_log

TRIED = examples(4, least=2)
"""States in which each kind of cell is made wrong."""

SNAPSHOT = 9
"""The place of the snapshot in a head (`SegmentHead`)."""

NOT_COMPARED = {
    "requests.word": "its holds are compared; its state by the declared protocol of requests (`conform`)",
    "transfers.parents": "it decides only the order in which blocks are evicted",
}
"""Fields of which a wrong cell may pass, and why."""


def lives() -> list[Life]:
    """Lives of every kind. One pins, waits, and loads before a reset: random lives seldom do all of this."""
    made = [
        random_life(seed, 120, workers=1 + seed % 3, blocks_per_chunk=1 + odd, store_threshold=1 + odd)
        for seed, odd in zip(range(6), cycle((0, 1)))
    ]
    life = Life(host_blocks=6, workers=2, defer_ticks=3)
    life.stored("r0", [key(0), key(1)], [0, 1])
    life.core.match("r1", [key(0), key(1)])
    life.ended(life.core.prepare_load("r1", [5, 6]))
    life.core.match("r2", [key(0)])
    plan = life.core.prepare_store("r3", [key(2)], [2]).job
    assert plan is not None
    life.core.submit([plan.transfer])
    assert life.core.match("r4", [key(2)]).waits_for is not None
    reset = Life(host_blocks=6, workers=1)
    reset.core.note_times(9, 9, 0)
    reset.stored("r0", [key(0)], [0])
    reset.core.match("r1", [key(0)])
    reset.ended(reset.core.prepare_load("r1", [5]))
    reset.core.reset()
    return [*made, life, reset]


@pytest.fixture(scope="module")
def shared_lives() -> list[Life]:
    return lives()


def wrong_after(monkeypatch: pytest.MonkeyPatch, seq: int, change: Change, seed: int) -> list[bool]:
    """Let each fold make one cell wrong after this event. Returns a list that gets whether it could."""
    apply: Callable[[Ledger, OffloadingEvent], object] = Ledger.apply
    could: list[bool] = []

    def wrong(ledger: Ledger, event: OffloadingEvent) -> None:
        apply(ledger, event)
        if event.seq == seq:
            state = change(saved(ledger), Random(seed))
            could.append(state is not None)
            if state is not None:
                put(ledger, state)

    monkeypatch.setattr(Ledger, "apply", wrong)
    return could


@pytest.mark.usefixtures("_python_folds")
@pytest.mark.parametrize("name", [name for name in CHANGES if name not in NOT_COMPARED])
def test_a_cell_that_is_wrong_at_the_end_is_found_at_its_event(
    name: str, shared_lives: list[Life], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events are state (S10): the last event leaves a cell wrong that it may not even name. Only the check at
    the log's end can see it."""
    tried = 0
    for seed in range(240):
        random, life = Random(seed), shared_lives[seed % len(shared_lives)]
        count = len(life.events) if random.random() < 0.3 else random.randint(1, len(life.events))
        log = written(tmp_path / f"{seed}", life, life.events[:count])
        with monkeypatch.context() as patched:
            could = wrong_after(patched, count, CHANGES[name], seed)
            found = verify_log(log)
        if not any(could):
            continue
        tried += 1
        assert found.breakage is not None, (seed, count)
        assert found.breakage.event == count, (seed, count)
        if tried == TRIED:
            return
    assert tried, "no life has such a cell"


@pytest.fixture(scope="module")
def segments(tmp_path_factory: pytest.TempPathFactory) -> list[PlainLog]:
    """Logs of several segments, as plain values."""
    made = []
    for seed in range(3):
        directory = tmp_path_factory.mktemp("log")
        random_life(seed, 150, directory / "log", writer={"segment_bytes": 900}, workers=1 + seed).close()
        made.append(read_plain(directory / "log"))
    assert all(len(log) > 3 for log in made), list(map(len, made))
    return made


def answer(log: Path) -> Verification | str:
    try:
        return verify_log(log)
    except KvsmError as error:
        return str(error)


@pytest.mark.parametrize("name", CHANGES)
def test_a_cell_that_is_wrong_in_a_head_is_found(name: str, segments: list[PlainLog], tmp_path: Path) -> None:
    """Events are state (S10): the snapshot of a later segment equals the fold of the events before it."""
    tried = 0
    for seed in range(40):
        random, log = Random(seed), copied(segments[seed % len(segments)])
        head = log[random.randrange(1, len(log))].head
        state = msgspec.msgpack.decode(head[SNAPSHOT], type=SavedLedger)
        wrong = CHANGES[name](state, random)
        if wrong is None:
            continue
        head[SNAPSHOT] = msgspec.msgpack.encode(wrong)
        found = answer(write_plain(tmp_path / f"{seed}", log))
        assert isinstance(found, str) or not found.good, seed
        tried += 1
        if tried == TRIED:
            return


STRANGER = key(999)


def without_stored(published: list[KeysChanged]) -> list[KeysChanged]:
    return [one for one in published if one.removed]


def without_removed(published: list[KeysChanged]) -> list[KeysChanged]:
    return [one for one in published if not one.removed]


def with_another(removed: bool) -> Callable[[list[KeysChanged]], list[KeysChanged]]:
    def change(published: list[KeysChanged]) -> list[KeysChanged]:
        return [
            msgspec.structs.replace(one, keys=[*one.keys, STRANGER]) if one.removed is removed else one
            for one in published
        ]

    return change


@pytest.mark.usefixtures("_python_folds")
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (without_stored, "1 keys can be matched, but were not announced"),
        (without_removed, "1 keys cannot be matched any more, but were not announced as removed"),
        (with_another(removed=False), "1 keys are announced as stored, but cannot be matched"),
        (with_another(removed=True), "1 keys are announced as removed, but were not"),
    ],
)
def test_each_wrong_announcement_is_named(
    change: Callable[[list[KeysChanged]], list[KeysChanged]],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Events are state (S10): the published KV events are wrong in one way; the host has one slot."""
    life = Life(host_blocks=1, workers=1)
    life.stored("r0", [key(0)], [0])
    life.stored("r1", [key(1)], [1])
    take = Publisher.take_events
    monkeypatch.setattr(Publisher, "take_events", lambda self: change(take(self)))
    found = verify_log(written(tmp_path / "log", life, life.events))
    assert found.breakage is not None
    assert [violation.message.split(":")[0] for violation in found.violations] == [says]
    assert says in "\n".join(found.breakage.told())
