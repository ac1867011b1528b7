"""What survived a kill, in the words of every command: kept blocks, lost ones, and what was cut off."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from replay_life import Life, key

import kvsm
from kvsm.cli import main
from kvsm.core.ledger import Ledger
from kvsm.core.log import LogReader
from kvsm.core.offloader import Offloader
from kvsm.explain.metrics import Metrics, gauges
from kvsm.explain.other_future import OtherChoices, fork
from kvsm.explain.story.restarts import survivors


def killed(directory: Path) -> Life:
    """Three blocks are stored and two of them loaded, two are being stored and one is planned. The process
    is killed, and another one serves a request."""
    life = Life(directory, host_blocks=8)
    core = life.core
    life.stored("r1", [key(1), key(2), key(3)], [0, 1, 2])
    core.finish("r1")
    core.match("r2", [key(1), key(2)])
    load = core.prepare_load("r2", [8, 9])
    store = core.store((("r2", 2),), [key(4), key(5)], [4, 5]).job
    assert load is not None
    assert store is not None
    core.submit([load.transfer, store.transfer])
    core.report(store.transfer, 0, True)
    core.store((("r2", 1),), [key(6)], [6])
    core.end_step()
    config = core.config
    life.core = Offloader.restarted(
        core.ledger, config, life, ended="the process was killed", clock_ns=life._clock_ns
    )
    life.core.match("r3", [key(number) for number in (1, 2, 3, 4)])
    life.ended(life.core.prepare_load("r3", [0, 1, 2]))
    life.core.finish("r3")
    life.core.end_step()
    return life


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("killed") / "log"
    killed(directory).close()
    return directory


PROCESS = "another process goes on (life 2; before it: the process was killed)"
LOST = "3 blocks kept, 3 not: 2 were being stored, 1 was planned"
GONE = "had not ended when another process went on at event"


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (("verify",), f"{PROCESS}: {LOST}"),
        (("verify", "--protocol"), "each event is an instance of the request protocol's actions"),
        (("replay",), "life 2"),
        (
            ("show", "--request", "r2"),
            f"{PROCESS}, which does not know request r2: its client gets no answer",
        ),
        (("show", "--key", "00000004"), "not kept, because store 8 of request r2 had not ended"),
        (("show", "--block", "0"), f"{PROCESS}: key 000000010000..0000 kept (of the pool: {LOST})"),
        (("show", "--request", "r3"), f"store 8 of request r2 {GONE}"),
        (("why", "r3"), f"was not stored, because store 8 of request r2 {GONE}"),
        (("why", "r2"), "It was cut off, because another process went on at event"),
        (("why", "--transfer", "8"), "it was cut off, because another process went on at event"),
        (
            ("report",),
            "3 blocks kept, 3 lost while they were being stored; 3 transfers and 1 request cut off",
        ),
        (("top", "--once"), "it found 3 blocks"),
        (("tail", "--lines", "50"), "(before it: the process was killed)"),
        (("query", "SELECT kind FROM events WHERE kind = 'Restarted'"), "Restarted"),
    ],
    ids=lambda one: "-".join(one) if isinstance(one, tuple) else "",
)
def test_command_tells_the_restart(command: tuple[str, ...], told: str, log: Path) -> None:
    """A person understands what was kept, what is gone and why, without the code."""
    name, *arguments = command
    result = CliRunner().invoke(main, [name, str(log), *arguments], env={"COLUMNS": "400"})
    assert result.exit_code == 0, result.output
    assert told in " ".join(result.output.split())


def test_the_gauges_of_the_next_process_begin_with_what_was_kept(tmp_path: Path) -> None:
    """Not at 0: the pool is full of what can be matched."""
    life = killed(tmp_path / "log")
    now = gauges(life.core.ledger)
    life.close()
    assert (now["resident_blocks"], now["live_transfers"], now["life"]) == (3, {"store": 0, "load": 0}, 2)
    counted = Metrics.of(LogReader(tmp_path / "log")).values()
    assert counted["restarts"] == 1
    assert counted["transfers_ended"]["store"]["cut off"] == 2
    assert counted["transfers_ended"]["load"]["cut off"] == 1
    assert counted["transfers_ended"]["store"]["lost"] == 0


def test_a_fork_goes_on_over_a_restart(log: Path, tmp_path: Path) -> None:
    """Without another choice it repeats the log. With another policy the next process has this policy."""
    assert fork(log, 3, OtherChoices(), tmp_path / "same").parted is None
    fork(log, 3, OtherChoices(policy="arc"), tmp_path / "other")
    assert LogReader(tmp_path / "other").head.config.policy == "arc"


def test_nothing_survives_of_an_empty_pool() -> None:
    left = survivors(Ledger(Life().config))
    assert left.told() == "0 blocks kept, 0 not"


def test_blocks_that_a_restart_ends_have_the_time_of_the_event_before_it(log: Path) -> None:
    """As transfers and requests have. No process ran in between, so no time may pass there."""
    with kvsm.open(log) as opened:
        rows = opened.sql(
            "SELECT gone_ns, wall_ns FROM blocks JOIN events ON event = gone - 1 WHERE why = 'restart'"
        ).fetchall()
    assert len(rows) == 3
    assert all(gone_ns == before_ns for gone_ns, before_ns in rows)
