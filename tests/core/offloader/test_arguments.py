"""Arguments of every type: a call works, or is refused by name and leaves no trace. The log can be read."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_life import keys, new_core, store
from wild_calls import WildCaller

from examples import examples, seeds_of_today
from kvsm import HostCopyEngine, TransferJob, Worker
from kvsm.core.ledger.snapshot import digest
from kvsm.core.offloader import Offloader
from kvsm.core.scheduler import KVCacheGroup, SchedulerConfig
from kvsm.errors import ConfigError, InvalidEvent, LimitReached, WrongArgument
from kvsm.events import Direction, OffloadConfig
from kvsm.explain.story import rebuild
from kvsm.ids import SMALL


def run_wild(seed: int, directory: Path, calls: int) -> WildCaller:
    """A sequence of calls. Afterwards the log on disk replays to the state of the core."""
    caller = WildCaller(seed, directory)
    caller.run(calls)
    caller.core.close()
    assert digest(rebuild(directory).ledger) == digest(caller.core.ledger), f"seed {seed}"
    return caller


def test_random_types_leave_a_log_that_replays(tmp_path: Path) -> None:
    refused, worked, count = 0, 0, examples(150)
    for seed in range(count):
        caller = run_wild(seed, tmp_path / str(seed), 40)
        refused, worked = refused + caller.refused, worked + caller.worked
    assert min(refused, worked) > 7 * count


@pytest.mark.slow
def test_other_sequences_of_random_types_each_day(tmp_path: Path) -> None:
    for seed in seeds_of_today(3_000):
        run_wild(seed, tmp_path / str(seed), 20)


@pytest.mark.parametrize(
    ("call", "arguments", "told"),
    [
        (
            "prepare_store",
            ("r", [b"k", b"l", 3], [0, 1, 2]),
            "prepare_store(): keys[2] is an int; a key is bytes",
        ),
        ("match", ("r", "key"), "match(): keys is a str; it must be a sequence, such as a list"),
        ("match", ("r", ["key"]), "match(): keys[0] is a str; a key is bytes"),
        ("match", ("r", [b"k" * 5000]), "match(): keys[0] has 5000 bytes; a key has at most 4096"),
        (
            "import_blocks",
            ((), [b"k"], "engine \udcff"),
            "import_blocks(): source cannot be written: 'utf-8' codec can't encode character '\\udcff' in "
            "position 7: surrogates not allowed",
        ),
        (
            "import_blocks",
            ((), [b"k"], ""),
            "import_blocks(): source is ''; it must say where the bytes come from",
        ),
        ("lookup", (bytearray(b"k"),), "lookup(): key is a bytearray; a key is bytes"),
        ("report", (2, 0, 1), "report(): good is an int; it must be True or False"),
        ("report", (2**70, 0, True), "report(): transfer does not fit in 64 bits"),
        ("arrive", (5,), "arrive(): request is an int; the name of a request is a str"),
        ("arrive", ("\ud800",), "arrive(): request cannot be written: 'utf-8' codec can't encode"),
        ("submit", ([5.0],), "submit(): transfers[0] is a float; it must be an int"),
        ("submit", (iter([2]),), "submit(): transfers is a list_iterator; it must be a sequence"),
        (
            "prepare_store",
            ("r", [b"k"], b"\0"),
            "prepare_store(): device_blocks is a bytes; it must",
        ),
        ("store", ((("r", 2),), [b"k"], [0]), "store(): owners have 2 keys, and the batch has 1"),
        ("store", ((("r", -1), ("q", 2)), [b"k"], [0]), "store(): owners[0][1] is -1; it must be 0 or more"),
        ("advance", ([("r", (0,), (2**70,))],), "advance(): offers[0][2][0] does not fit in 64 bits"),
        ("skip", ((), [b"k"], "pool full"), "skip(): reason is 'pool full'; it must be a SkipReason"),
    ],
)
def test_refusal_names_the_call_and_the_argument(call: str, arguments: tuple[Any, ...], told: str) -> None:
    core, log = new_core()
    with pytest.raises(WrongArgument) as refusal:
        getattr(core, call)(*arguments)
    assert str(refusal.value).startswith(told)
    assert refusal.value.call == call
    assert len(log) == 1


def test_a_flag_that_is_a_number_is_refused() -> None:
    core, _ = new_core()
    core.arrive("r")
    with pytest.raises(WrongArgument, match="aborted is an int"):
        core.finish("r", aborted=1)  # type: ignore[arg-type]


def test_integers_and_booleans_of_numpy_are_converted(tmp_path: Path) -> None:
    """An engine may keep its block tables in arrays."""
    with Offloader.open(OffloadConfig(host_blocks=8, device_blocks=8), tmp_path / "log") as core:
        job = core.prepare_store("r", keys(2), np.array([0, 1], dtype=np.int32)).job  # type: ignore[arg-type]
        assert job is not None
        core.submit(np.array([job.transfer]))  # type: ignore[arg-type]
        core.report(np.int64(job.transfer), np.uint8(0), np.bool_(True))  # type: ignore[arg-type]
        assert core.match(np.str_("q"), keys(2)).hits == 2
    assert digest(rebuild(tmp_path / "log").ledger) == digest(core.ledger)


@pytest.mark.parametrize("count", [SMALL, SMALL + 1])
@pytest.mark.parametrize("wrong", [1.0, "1", None, 2**70, [1], np.float64(1)], ids=repr)
def test_a_wrong_block_id_is_refused_in_short_and_long_batches(count: int, wrong: object) -> None:
    """Long batches are arrays: numpy would round a float and read a text."""
    core, log = new_core(32, 32)
    blocks: list[Any] = list(range(count))
    blocks[3] = wrong
    with pytest.raises((WrongArgument, InvalidEvent)):
        core.prepare_store("r", keys(count), blocks)
    assert len(log) == 1


def test_store_that_would_be_refused_evicts_nothing() -> None:
    """A chunk that names a block twice was refused only after room had been made for it."""
    core, log = new_core(1, 8, blocks_per_chunk=2)
    store(core, "r", keys(1))
    events = len(log)
    with pytest.raises(WrongArgument, match="names a block twice"):
        core.prepare_store("q", keys(1, "q"), [4, 4])
    assert len(log) == events


def test_pins_that_are_refused_release_nothing() -> None:
    core, log = new_core()
    store(core, "r", keys(2))
    core.match("q", keys(1))
    events = len(log)
    with pytest.raises(LimitReached):
        core.pin("q", [0, 5], None)
    with pytest.raises(InvalidEvent, match="named twice"):
        core.pin("q", [0, 0], None)
    assert len(log) == events
    assert core.ledger.requests["q"].pins == (0,)


def test_policy_may_choose_by_numpy(tmp_path: Path) -> None:
    """Its victims are written as plain integers, in a short batch too."""
    config = OffloadConfig(host_blocks=2, device_blocks=8, policy="policies_for_tests:ChoosesByNumpy")
    with Offloader.open(config, tmp_path / "log") as core:
        store(core, "r", keys(2))
        store(core, "q", keys(2, "q"), 4)
    found = rebuild(tmp_path / "log", allow_policies=(config.policy,))
    assert digest(found.ledger) == digest(core.ledger)


def test_clock_that_gives_seconds_is_refused() -> None:
    """`time.time` in place of `time.time_ns`."""
    with pytest.raises(WrongArgument, match="clock_ns gives a float"):
        Offloader(OffloadConfig(host_blocks=1, device_blocks=1), clock_ns=time.time)  # type: ignore[arg-type]


def test_clock_before_1970_is_written_and_read(tmp_path: Path) -> None:
    config = OffloadConfig(host_blocks=1, device_blocks=1)
    with Offloader.open(config, tmp_path / "log", clock_ns=lambda: -5) as core:
        core.arrive("r")
    assert digest(rebuild(tmp_path / "log").ledger) == digest(core.ledger)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"host_blocks": 8.0}, "host_blocks is 8.0; it must be an int"),
        ({"host_blocks": "8"}, "host_blocks is '8'; it must be an int"),
        ({"policy": 5}, "policy is 5; it must be a str"),
        ({"workers": None}, "workers is None; it must be an int"),
    ],
)
def test_configuration_of_a_wrong_type_is_refused_by_name(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        OffloadConfig(**{"host_blocks": 8, "device_blocks": 8} | fields)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"store": "lazy"}, "store is 'lazy'; it must be a StoreMode"),
        ({"groups": KVCacheGroup(16)}, "it must be a tuple"),
        ({"groups": (16,)}, "groups[0] is 16; it must be a KVCacheGroup"),
        ({"prompt_only": 1}, "prompt_only is 1; it must be a bool"),
        ({"null_block": 0.0}, "null_block is 0.0; it must be an int"),
    ],
)
def test_configuration_of_the_scheduler_is_checked_likewise(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        SchedulerConfig(**{"groups": (KVCacheGroup(16),)} | fields)


def test_integers_of_numpy_in_a_configuration_are_converted(tmp_path: Path) -> None:
    config = OffloadConfig(host_blocks=np.int64(8), device_blocks=np.uint16(8))  # type: ignore[arg-type]
    Offloader.open(config, tmp_path / "log").close()
    assert rebuild(tmp_path / "log").ledger.config == OffloadConfig(host_blocks=8, device_blocks=8)


def test_core_that_is_refused_makes_no_directory(tmp_path: Path) -> None:
    """Another attempt, with the mistake mended, must not find a log there."""
    config = OffloadConfig(host_blocks=1, device_blocks=1, policy="no such policy")
    with pytest.raises(ConfigError):
        Offloader.open(config, tmp_path / "log")
    assert not (tmp_path / "log").exists()


def test_worker_takes_jobs_and_nothing_else() -> None:
    worker = Worker(np.int64(1), HostCopyEngine(np.zeros((2, 8), np.uint8), np.zeros((2, 8), np.uint8)))  # type: ignore[arg-type]
    assert type(worker.rank) is int
    job = TransferJob(2, Direction.STORE, (0,), (0,))
    with pytest.raises(WrongArgument, match=r"submit\(\): jobs\[1\] is of type tuple"):
        worker.submit([job, (3, 0, (0,), (0,))])  # type: ignore[list-item]
    worker.submit([job])
    worker.close()
    assert [report.transfer for report in worker.poll()] == [2]
    with pytest.raises(WrongArgument, match="rank is"):
        Worker(1.5, None)  # type: ignore[arg-type]
