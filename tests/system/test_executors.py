"""What every executor promises: forked processes, and a real Ray cluster on this machine (slow)."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from socket import gethostname, socket
from tempfile import TemporaryDirectory
from threading import Thread, get_ident
from unittest.mock import patch

import msgspec
import pytest
from click.testing import CliRunner
from places import search_path
from toy_models import TwoPhaseCommit
from toy_worlds import Counting
from waiting import wait_for

import kvsm
from kvsm.check.explore.checked_model import ExplorationLimits
from kvsm.check.explore.explorer import explore
from kvsm.check.scopes.models import MODELS
from kvsm.check.scopes.tier_scopes import SCOPES as TIER_SCOPES
from kvsm.check.scopes.tier_scopes import TiersModel
from kvsm.check.walks.targets import draw_case
from kvsm.check.walks.walk import walk
from kvsm.check.worlds.world import World
from kvsm.cli import main
from kvsm.cli.exit_codes import ExitCode
from kvsm.errors import ConfigError, LogError
from kvsm.system.executors.executor import AHEAD, MOST_LOSSES, Executor, LostWorker
from kvsm.system.executors.forked import ForkedProcesses
from kvsm.system.executors.ray_cluster import RayCluster
from kvsm.system.executors.ray_worker import answered, asked, code_digest

WORKERS = 3
NO_RAY = "Ray is not installed: pip install 'kvsm[ray]'"

MakeExecutor = Callable[[int], Executor]


@pytest.fixture(scope="module")
def heard() -> list[LostWorker]:
    """The workers that were lost."""
    return []


@pytest.fixture(scope="module")
def cluster(heard: list[LostWorker]) -> Iterator[RayCluster]:
    """One cluster for all tests, which takes seconds to start."""
    pytest.importorskip("ray", reason=NO_RAY)
    # Its workers import the tasks below. It is a cluster of its own, whatever the environment names.
    environment = {
        "PYTHONPATH": search_path(Path(__file__).parent),
        "RAY_ADDRESS": f"127.0.0.1:{free_port()}",
    }
    with patch.dict(os.environ, environment), RayCluster("local", WORKERS, heard.append) as started:
        yield started


@pytest.fixture(params=["processes", pytest.param("ray", marks=pytest.mark.slow)])
def make(request: pytest.FixtureRequest, heard: list[LostWorker]) -> MakeExecutor:
    """Makes an executor with so many workers."""
    heard.clear()
    if request.param == "processes":
        return lambda workers: ForkedProcesses(workers, heard.append)
    made: MakeExecutor = request.getfixturevalue("make_on_ray")
    return made


@pytest.fixture
def make_on_ray(cluster: RayCluster) -> MakeExecutor:
    """The same, with Ray only."""

    def limited(workers: int) -> RayCluster:
        cluster.workers = workers
        return cluster

    return limited


def gone(pid: int) -> bool:
    """Whether a process has ended. One that nobody has waited for has ended too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


# Tasks. A cluster imports this module.


def squared(number: int) -> int:
    return number * number


def lingering(number: int) -> int:
    """Later items end first."""
    time.sleep(0.03 * (4 - number % 5))
    return number


def counted(directory: Path, wanted: int, number: int) -> int:
    """How many do this at the same time. The first ones wait until all workers have begun."""
    mine, all_began, deadline = directory / str(number), directory / "all began", time.monotonic() + 20
    mine.touch()
    while not all_began.exists() and time.monotonic() < deadline:
        if len(list(directory.iterdir())) >= wanted:
            all_began.touch()
        time.sleep(0.01)
    time.sleep(0.05)  # One more would be here by now.
    found = len(list(directory.glob("[0-9]*")))
    mine.unlink()
    return found


def endless_from(directory: Path, first: int, number: int) -> int:
    """From one item on it never returns. It leaves the number of its process."""
    if number >= first:
        (directory / str(os.getpid())).touch()
        time.sleep(10_000)
    return number


def fatal_once(directory: Path, fatal: int, number: int) -> int:
    """The first process that does this item is killed."""
    if number == fatal:
        with suppress(FileExistsError):
            (directory / "killed").touch(exist_ok=False)
            os.kill(os.getpid(), signal.SIGKILL)
    return number


def fatal(number: int) -> int:
    if number == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def failing(number: int) -> float:
    return 1 / (number - 4)


def refusing(number: int) -> int:
    raise LogError(f"log {number} is no log")


# The promises.


def test_results_come_in_the_order_of_the_items(make: MakeExecutor) -> None:
    with make(WORKERS).results(lingering, range(20)) as results:
        assert list(results) == list(range(20))


def test_no_items_are_no_results(make: MakeExecutor) -> None:
    with make(2).results(squared, []) as results:
        assert list(results) == []


def test_a_task_may_be_a_closure(make: MakeExecutor) -> None:
    with make(2).results(lambda number: number + WORKERS, range(3)) as results:
        assert list(results) == [3, 4, 5]


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_so_many_work_at_once_and_no_more(make: MakeExecutor, workers: int, tmp_path: Path) -> None:
    with make(workers).results(partial(counted, tmp_path, workers), range(16)) as results:
        assert max(results) == workers


def test_endless_items_are_begun_as_far_as_results_are_wanted(make: MakeExecutor) -> None:
    """Else the results that nobody takes would fill the memory."""
    items = count()
    with make(2).results(squared, items) as results:
        assert [next(results) for _ in range(10)] == [number * number for number in range(10)]
        time.sleep(0.2)
    assert next(items) <= 10 + AHEAD + 1


def test_no_worker_goes_on_after_the_block(make: MakeExecutor, tmp_path: Path) -> None:
    """A walk stops at its first failure, and runs beyond it may never end."""
    with make(2).results(partial(endless_from, tmp_path, 3), count()) as results:
        assert [next(results) for _ in range(3)] == [0, 1, 2]
        wait_for(lambda: len(list(tmp_path.iterdir())) == 2)
    workers = [int(path.name) for path in tmp_path.iterdir()]
    wait_for(lambda: all(map(gone, workers)))


@pytest.mark.slow
def test_a_worker_of_a_cluster_that_heeds_an_interrupt_works_again(
    make_on_ray: MakeExecutor, tmp_path: Path
) -> None:
    """A new process would import all again."""

    def task(number: int) -> int:
        while number:
            (tmp_path / str(number)).touch()
            time.sleep(0.01)
        return os.getpid()

    with make_on_ray(1).results(task, count()) as results:
        worker = next(results)
        wait_for((tmp_path / "1").exists)
    (tmp_path / "1").unlink()
    with make_on_ray(1).results(task, [0]) as results:
        assert list(results) == [worker]
    assert not (tmp_path / "1").exists()


def test_no_worker_goes_on_after_an_exception_in_the_block(make: MakeExecutor, tmp_path: Path) -> None:
    main = get_ident()

    def consume() -> None:
        with make(2).results(partial(endless_from, tmp_path, 0), count()) as results:
            Thread(target=interrupt, daemon=True).start()
            next(results)

    def interrupt() -> None:
        wait_for(lambda: len(list(tmp_path.iterdir())) == 2)
        signal.pthread_kill(main, signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        consume()
    workers = [int(path.name) for path in tmp_path.iterdir()]
    wait_for(lambda: all(map(gone, workers)))


def test_a_worker_that_is_killed_is_made_up_for(
    make: MakeExecutor, heard: list[LostWorker], tmp_path: Path
) -> None:
    executor = make(2)
    before = executor.losses
    task, name = partial(fatal_once, tmp_path, 4), "number {}".format
    with executor.results(task, range(30), name=name) as results:
        assert list(results) == list(range(30))
    assert executor.losses == before + 1
    assert [one.name for one in heard] == ["number 4"]
    assert str(heard[0]).startswith("a worker was lost: ")
    assert str(heard[0]).endswith("; another one takes what it had: number 4")


def test_a_worker_that_is_killed_from_outside_is_made_up_for(make: MakeExecutor, tmp_path: Path) -> None:
    """While others work, and this process has a thread."""
    unhurt = tmp_path / "killed"

    def task(number: int) -> int:
        if number == 5 and not unhurt.exists():
            (tmp_path / "pid").write_text(f"{os.getpid()}\n")
            time.sleep(10_000)
        return number

    def kill() -> None:
        wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().endswith("\n"))
        unhurt.touch()
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)

    with make(2).results(task, range(40)) as results:
        killer = Thread(target=kill)
        killer.start()
        assert list(results) == list(range(40))
        killer.join()


def test_an_item_that_kills_every_worker_is_named(make: MakeExecutor, heard: list[LostWorker]) -> None:
    with make(2).results(fatal, range(9), name="number {}".format) as results:
        assert [next(results) for _ in range(4)] == [0, 1, 2, 3]
        with pytest.raises(
            ConfigError, match=rf"^number 4: {MOST_LOSSES} workers were lost at it, .* fewer --jobs"
        ):
            next(results)
    assert len(heard) == MOST_LOSSES - 1


def test_an_exception_names_the_item_and_has_the_traceback_of_the_worker(make: MakeExecutor) -> None:
    with make(2).results(failing, range(9), name="number {}".format) as results:
        assert [next(results) for _ in range(4)] == [-1 / 4, -1 / 3, -1 / 2, -1]
        with pytest.raises(
            RuntimeError, match=r"number 4 failed in a worker:\n(?s:.*)in failing\n(?s:.*)ZeroDivision"
        ):
            next(results)


def test_an_error_of_kvsm_comes_as_it_is(make: MakeExecutor) -> None:
    """The commands know it, and print it in one line."""
    with make(2).results(refusing, [7]) as results, pytest.raises(LogError, match=r"^log 7 is no log$"):
        next(results)


def test_a_result_that_cannot_be_pickled_is_named(make: MakeExecutor) -> None:
    with (
        make(2).results(lambda _: Thread(), [7], name="number {}".format) as results,
        pytest.raises(RuntimeError, match=r"number 7 failed in a worker:\n(?s:.*)pickle"),
    ):
        next(results)


def test_each_item_has_a_process_of_its_own_if_that_is_asked(make: MakeExecutor) -> None:
    """The museum changes the code in its process."""
    with make(2).results(lambda _: os.getpid(), range(5), fresh=True) as results:
        assert len(set(results)) == 5


# What they are for.


def facts(world: Callable[[Random], World], executor: Executor | None, runs: int) -> tuple[object, ...]:
    result = walk(world, 3, runs=runs, executor=executor)
    return result.next_run, result.runs, result.operations, result.most_in_flight, result.failure


@pytest.mark.slow
def test_a_walk_has_the_same_result_whoever_makes_its_runs(make: MakeExecutor) -> None:
    def world(random: Random) -> World:
        return draw_case("all", random).make()

    alone = facts(world, None, 20)
    for workers in (1, 2, 3):
        assert facts(world, make(workers), 20) == alone


def test_a_walk_ends_with_the_same_failure_whoever_makes_its_runs(make: MakeExecutor) -> None:
    def world(random: Random) -> World:
        return Counting(random.choice((9, 10**6, 10**6, 10**6, 10**6)))

    alone = facts(world, None, 99)
    assert alone[-1] is not None
    for workers in (1, 2, 3):
        assert facts(world, make(workers), 99) == alone


def test_an_exploration_has_the_same_result_whoever_expands_the_states(make: MakeExecutor) -> None:
    """A proof and a shortest counterexample."""
    for hasty in (False, True):
        alone = explore(TwoPhaseCommit(2, hasty))
        for workers in (1, 2):
            found = explore(TwoPhaseCommit(2, hasty), executor=make(workers))
            assert msgspec.structs.replace(found, seconds=alone.seconds) == alone


@pytest.mark.slow
def test_an_exploration_of_real_code_takes_the_same_edges_whoever_expands_the_states(
    make: MakeExecutor,
) -> None:
    checked = MODELS["serving"]
    model = checked.model(checked.bounded(checked.scopes["small"], {"requests": 1}))
    alone, found = explore(model), explore(model, executor=make(2))
    assert alone.edges
    assert msgspec.structs.replace(found, seconds=alone.seconds) == alone


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, one in MODELS.items() if one.takes_depth])
def test_each_model_that_a_cluster_can_explore_is_explored_there(
    make_on_ray: MakeExecutor, name: str
) -> None:
    """A model must be pickled for it. That of two tiers could not: its saver had a world with locks."""
    checked = MODELS[name]
    alone, found = (
        checked.explore(checked.scopes["small"], ExplorationLimits(max_depth=5, executor=executor))
        for executor in (None, make_on_ray(2))
    )
    assert msgspec.structs.replace(found, seconds=alone.seconds) == alone


def test_the_model_of_two_tiers_is_made_again_by_a_worker() -> None:
    """Locks cannot be pickled. `test_each_model_...` tests it with a real cluster."""
    model = TiersModel(TIER_SCOPES["small"], renamed=False)
    again = pickle.loads(pickle.dumps(model))
    assert (again.scope, again.renamed) == (model.scope, False)
    world = next(iter(model.initial()))
    assert again.fingerprint(again.load(model.save(world))) == model.fingerprint(world)


def test_a_model_of_arrays_needs_no_cluster() -> None:
    limits = ExplorationLimits(executor=ForkedProcesses(2))
    with pytest.raises(ConfigError, match="protocol is explored by arrays on one machine, without --cluster"):
        MODELS["protocol"].explore(MODELS["protocol"].scopes["small"], limits)


# Clusters that cannot work.


@pytest.mark.slow
def test_a_worker_with_another_kvsm_refuses(
    make_on_ray: MakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its results would not be ours."""
    monkeypatch.setattr("kvsm.system.executors.ray_cluster.code_digest", lambda: "another")
    with (
        make_on_ray(2).results(squared, range(3)) as results,
        pytest.raises(ConfigError, match=r"runs another kvsm, from .*; install the kvsm of this machine on"),
    ):
        next(results)


def test_a_worker_without_kvsm_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """What asks it comes from here, by value."""
    monkeypatch.setitem(sys.modules, "kvsm.system.executors.ray_worker", None)
    assert re.fullmatch(r"a worker on .+ has no such kvsm: .+", str(asked()("digest", "1", b"", b"")))


def test_another_kvsm_is_seen_by_its_code() -> None:
    assert code_digest() == code_digest()
    assert answered("another digest", "1", b"", b"") == (
        f"a worker on {gethostname()} runs another kvsm, from {Path(kvsm.__file__).parent}"
    )


@pytest.mark.slow
def test_a_cluster_that_is_not_there_is_told_at_once() -> None:
    pytest.importorskip("ray", reason=NO_RAY)
    for address in (f"ray://127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"):
        with pytest.raises(ConfigError, match=f"^--cluster {address}: .*refused"), RayCluster(address):
            pass


def test_without_ray_an_option_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    result = CliRunner().invoke(main, ["fuzz", "--cluster", "local", "--runs", "1"])
    assert result.exit_code == ExitCode.UNUSABLE
    assert "--cluster needs Ray: pip install 'kvsm[ray]'" in result.stderr


def free_port() -> int:
    with socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def test_workers_end_with_a_process_that_is_killed(tmp_path: Path) -> None:
    """Even by `kill -9`, when it can tell nobody."""
    program = (
        "import sys, test_executors as tests\n"
        "from functools import partial\n"
        "from pathlib import Path\n"
        "task = partial(tests.endless_from, Path(sys.argv[1]), 0)\n"
        "with tests.ForkedProcesses(2).results(task, range(9)) as results:\n"
        "    next(results)\n"
    )
    killed = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": search_path(Path(__file__).parent)},
    )
    wait_for(lambda: len(list(tmp_path.iterdir())) == 2)
    killed.kill()
    killed.wait()
    workers = [int(path.name) for path in tmp_path.iterdir()]
    wait_for(lambda: all(map(gone, workers)))


# The commands.


@pytest.fixture
def running_cluster() -> Iterator[tuple[str, str]]:
    """The addresses of a cluster that another program has started: for clients, and for nodes."""
    pytest.importorskip("ray", reason=NO_RAY)
    client, node = free_port(), free_port()
    with TemporaryDirectory(prefix="kvsm-", dir="/tmp") as directory:  # a socket there needs a short path
        started = subprocess.Popen(
            [
                Path(sys.executable).with_name("ray"),
                *("start", "--head", "--block", "--num-cpus=2", "--include-dashboard=false"),
                *(f"--port={node}", f"--ray-client-server-port={client}", "--node-ip-address=127.0.0.1"),
                *("--object-store-memory=80000000", f"--temp-dir={directory}"),
            ],
            env=OPEN_RAY,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            wait_for(lambda: listens(client) and listens(node))
            yield f"ray://127.0.0.1:{client}", f"127.0.0.1:{node}"
        finally:
            started.terminate()
            started.wait()


OPEN_RAY = {
    **os.environ,
    # Ray forks a server for each client, and gRPC's handlers for a fork may end that before it begins.
    "GRPC_ENABLE_FORK_SUPPORT": "false",
    "PYTHONPATH": str(Path(kvsm.__file__).parents[1]),
    "RAY_AUTH_MODE": "disabled",  # some releases of Ray ask for a token; only this machine reaches it
    "RAY_CLIENT_SERVER_CHECK_CHANNEL_TIMEOUT_S": "120",  # a busy machine starts it slowly
    "RAY_USAGE_STATS_ENABLED": "0",
}


def listens(port: int) -> bool:
    with socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.slow
def test_a_walk_has_the_same_totals_on_a_cluster_that_runs(running_cluster: tuple[str, str]) -> None:
    fuzz = [sys.executable, "-m", "kvsm", "fuzz", "--runs", "20", "--seed", "7", "--json"]
    found = []
    for where in (["--jobs", "1"], *(["--cluster", address] for address in running_cluster)):
        ended = subprocess.run([*fuzz, *where], env=OPEN_RAY, stdout=subprocess.PIPE, check=True, timeout=240)
        found.append({**json.loads(ended.stdout)["progress"], "seconds": 0})
    assert found[0]["runs"] == 20
    assert found == [found[0]] * 3
