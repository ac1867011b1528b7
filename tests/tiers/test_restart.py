"""Going on with the log and the pools of a process that is gone: warm if that is safe, else cold, and why."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvsm.check.worlds.memory_marks import memory_marks
from kvsm.core.kv_events import Publisher
from kvsm.core.ledger import readable_keys
from kvsm.core.log import LogReader
from kvsm.core.offloader import Offloader
from kvsm.errors import LogError
from kvsm.events import OffloadConfig, Restarted
from kvsm.explain.story import verify_log
from kvsm.identity import KeptPools, PoolIdentity
from kvsm.tiers.warm_restart import FIRST, KILLED, Start, start

CONFIG = OffloadConfig(host_blocks=6, device_blocks=12)
POOLS = KeptPools(
    PoolIdentity.of({"model": "m", "dtype": "bfloat16"}), (b"pool of rank 0..", b"sums of rank 0..")
)
STORED, IN_FLIGHT = (b"a", b"b", b"c"), (b"d", b"e")


MARKS = memory_marks()
"""Of the pools, for each test anew."""


@pytest.fixture(autouse=True)
def new_marks() -> None:
    MARKS[:] = memory_marks()


def begin(directory: Path, config: OffloadConfig = CONFIG, pools: KeptPools = POOLS, **more: Any) -> Start:
    """Start a process."""
    return start(directory, config, pools, **{"weights": "v1", "marks": MARKS[:], **more})


def live(core: Offloader) -> None:
    """Store three blocks, and begin to store two more."""
    done = core.prepare_store("r", STORED, range(3)).job
    assert done is not None
    core.submit([done.transfer])
    core.complete_store(done.transfer)
    left = core.prepare_store("r", IN_FLIGHT, range(3, 5)).job
    assert left is not None
    core.submit([left.transfer])
    core.end_step()


def ended(act: Callable[[], object]) -> None:
    """Let a process of its own do this, and be killed."""
    child = os.fork()
    if not child:
        try:
            act()
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """The log of a process that was killed."""
    ended(lambda: live(begin(tmp_path / "log").offloader))
    return tmp_path / "log"


def again(directory: Path, config: OffloadConfig = CONFIG, pools: KeptPools = POOLS, **more: Any) -> Start:
    """How the next process starts."""
    started = begin(directory, config, pools, **more)
    started.offloader.close()
    return started


def test_what_was_stored_is_served_and_what_was_in_flight_is_not(left: Path) -> None:
    """No stale data (S14): a store that had not ended may have written a part."""
    started = begin(left)
    core = started.offloader
    assert (started.kept, started.why_cold) == (3, ())
    assert core.match("s", [*STORED, *IN_FLIGHT]).hits == 3
    assert core.prepare_store("s", IN_FLIGHT, range(2)).job is not None
    core.close()


def test_the_chain_of_lives_is_one_log(left: Path) -> None:
    """Events are state (S10), over a kill, a good end and an end with an error."""
    begin(left).offloader.close(ValueError("out of memory"))
    again(left)
    again(left)
    verified = verify_log(left)
    assert verified.good, verified
    lives = [event for event in LogReader(left).events() if isinstance(event, Restarted)]
    assert [(event.life, event.ended) for event in lives] == [
        (2, KILLED),
        (3, "ValueError: out of memory"),
        (4, ""),
    ]


def test_a_first_start_is_cold_and_says_so(tmp_path: Path) -> None:
    assert again(tmp_path / "log").why_cold == (FIRST,)


COLD: dict[str, tuple[dict[str, Any], str]] = {
    "identity": (
        {"pools": KeptPools(PoolIdentity.of({"model": "m", "dtype": "float16"}), POOLS.ids)},
        "dtype: bfloat16, and now float16",
    ),
    "pool": (
        {"pools": KeptPools(POOLS.identity, (b"another pool....", b"its checksums..."))},
        "the log speaks of other pools than those that are there",
    ),
    "weights": ({"weights": "v2"}, "weights: v1, and now v2"),
    "slots": (
        {"config": msgspec.structs.replace(CONFIG, host_blocks=7)},
        "host_blocks: 6, and now 7",
    ),
    "ranks": ({"config": msgspec.structs.replace(CONFIG, workers=2)}, "workers: 1, and now 2"),
    "the caller": ({"why_cold": ("the machine was booted",)}, "the machine was booted"),
}


@pytest.mark.parametrize("what", COLD)
def test_what_differs_is_told_and_nothing_is_served(what: str, left: Path) -> None:
    """No stale data (S14): one key names other bytes under another identity. The old log is kept."""
    more, line = COLD[what]
    started = again(left, **more)
    assert (started.kept, started.why_cold) == (0, (line,))
    assert started.moved is not None
    assert verify_log(started.moved).good
    assert again(left, **{**more, "why_cold": ()}).why_cold == ()


def test_another_device_pool_and_policy_keep_the_start_warm(left: Path) -> None:
    """A profile may find room for other numbers of device blocks at each start."""
    other = msgspec.structs.replace(CONFIG, device_blocks=9, policy="arc", max_live_transfers=3)
    started = begin(left, other)
    assert started.kept == 3
    assert len(started.offloader.ledger.policy) == 3
    live_more = started.offloader.prepare_store("s", [b"x"], [8]).job
    assert live_more is not None
    started.offloader.close()
    assert again(left, other).kept == 3
    assert verify_log(left).good


def test_weights_that_changed_in_place_are_another_version(tmp_path: Path) -> None:
    """No stale data (S14): the next process starts with the weights of the first, and finds blocks of
    others."""

    def change(core: Offloader) -> None:
        live(core)
        core.complete_store(next(iter(core.ledger.transfers)))
        assert core.reset(weights="v2")
        live(core)

    ended(lambda: change(begin(tmp_path / "log").offloader))
    assert again(tmp_path / "log", weights="v2").kept == 3
    assert again(tmp_path / "log").why_cold == ("weights: v2, and now v1",)


def test_a_router_hears_of_all_that_was_kept(left: Path) -> None:
    """Events are state (S10): the KV events of the new process name exactly what can be read."""
    publisher = Publisher()
    started = begin(left, publisher=publisher)
    (change,) = started.offloader.take_events()
    assert (change.keys, change.removed) == (list(STORED), False)
    assert readable_keys(started.offloader.ledger) == change.keys
    started.offloader.close()


def test_a_second_process_is_refused_by_the_name_of_the_first(tmp_path: Path) -> None:
    first = begin(tmp_path / "log", weights="")
    with pytest.raises(LogError, match=rf"process {os.getpid()} \("):
        begin(tmp_path / "log", weights="")
    first.offloader.close()
    again(tmp_path / "log", weights="")


def test_a_log_of_which_only_the_last_snapshot_is_kept_is_enough(tmp_path: Path) -> None:
    """Retention may leave one segment, which no event has followed yet."""
    options = {"segment_bytes": 1}
    ended(lambda: live(begin(tmp_path / "log", log=options).offloader))
    *older, last = sorted((tmp_path / "log").iterdir())
    for path in older:
        path.unlink()
    assert LogReader(tmp_path / "log").head.seq == int(last.stem) - 1
    assert again(tmp_path / "log").kept == 3
