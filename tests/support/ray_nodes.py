"""A Ray cluster of several nodes, each with its own raylet; one node is killed while it works.

Ray's own tests make clusters in this way: all nodes are on this machine, and share only its kernel.
`test_ray_nodes.py` runs this in a separate process, because a process that was in a cluster with a token
would also demand the token from the nodes of the next cluster, which would then take it for dead.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from threading import Thread
from typing import Any

import msgspec
from waiting import wait_for

from kvsm.check.explore.checked_model import ExplorationLimits
from kvsm.check.scopes.models import MODELS
from kvsm.check.walks.targets import draw_case
from kvsm.check.walks.walk import walk
from kvsm.check.worlds.world import World
from kvsm.system.executors.executor import Executor, LostWorker
from kvsm.system.executors.ray_cluster import RayCluster

STORE_BYTES = 80 << 20


class Nodes:
    """A cluster of a head with one CPU, which this process drives, and another node with two CPUs."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 1, "object_store_memory": STORE_BYTES, "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self.other: Any = None

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add(self) -> None:
        """Start the other node, or its replacement."""
        self.other = self._cluster.add_node(num_cpus=2, object_store_memory=STORE_BYTES)
        self._cluster.wait_for_nodes()

    @property
    def raylet(self) -> int:
        """Return the process that starts the other node's workers."""
        return int(self.other.all_processes["raylet"][0].process.pid)

    def kill(self) -> None:
        """Kill the other node with its workers."""
        self._cluster.remove_node(self.other, allow_graceful=False)
        self.other = None

    def close(self) -> None:
        self._cluster.shutdown()


@contextmanager
def running_nodes() -> Iterator[Nodes]:
    """Run the head of a cluster until the end of a `with` block."""
    started = Nodes()
    try:
        yield started
    finally:
        started.close()


class KillsNode:
    """An executor on these nodes that kills one node after a given number of results."""

    def __init__(self, cluster: RayCluster, nodes: Nodes, after: int) -> None:
        self._cluster, self._nodes, self._left = cluster, nodes, after

    @property
    def workers(self) -> int:
        return self._cluster.workers

    @property
    def losses(self) -> int:
        return self._cluster.losses

    @contextmanager
    def results(
        self, task: Callable[[Any], Any], items: Iterable[Any], **options: Any
    ) -> Iterator[Iterator[Any]]:
        with self._cluster.results(task, items, **options) as results:
            yield self._counted(results)

    def _counted(self, results: Iterator[Any]) -> Iterator[Any]:
        for result in results:
            self._left -= 1
            if not self._left:
                self._nodes.kill()
            yield result


def task_of_raylet(directory: Path, raylet: int, number: int) -> tuple[int, bytes]:
    """Return an item's result. From item 10 on, the other node hangs; the head waits until the other node
    hangs.

    Some results are large: they stay in their node's memory until they are fetched.
    """
    if number >= 10 and os.getppid() == raylet:
        (directory / str(number)).touch()
        time.sleep(10_000)
    if number >= 10:
        wait_for(lambda: any(directory.iterdir()), 60)
    return number, bytes(200_000 if number % 3 == 0 else 1)


def made_up_for(directory: Path) -> None:
    """Check that a killed node's running items and stored results are redone, and each loss is reported."""
    heard: list[LostWorker] = []
    with running_nodes() as nodes:
        nodes.add()

        def kill() -> None:
            wait_for(lambda: any(directory.iterdir()), 60)
            nodes.kill()

        with RayCluster(nodes.address, heard=heard.append) as cluster:
            assert cluster.workers == 3
            task, killer = partial(task_of_raylet, directory, nodes.raylet), Thread(target=kill)
            killer.start()
            with cluster.results(task, range(40), name="number {}".format) as results:
                numbers = [number for number, _ in results]
            killer.join()
    assert numbers == list(range(40))
    assert cluster.losses == len(heard)
    begun_there = {f"number {path.name}" for path in directory.iterdir()}
    assert begun_there
    assert begun_there <= {one.name for one in heard}


def same_results() -> None:
    """Return the totals of a walk, and the states of an exploration, with a node killed in each."""
    checked = MODELS["hand-over"]
    scope, limits = checked.scopes["small"], ExplorationLimits()
    alone = checked.explore(scope, limits)
    with running_nodes() as nodes:
        nodes.add()
        with RayCluster(nodes.address) as cluster:
            assert totals(KillsNode(cluster, nodes, 4)) == totals(None)
        assert nodes.other is None
        nodes.add()
        with RayCluster(nodes.address) as cluster:
            killing = msgspec.structs.replace(limits, executor=KillsNode(cluster, nodes, 20))
            found = checked.explore(scope, killing)
        assert nodes.other is None
    assert msgspec.structs.replace(found, seconds=alone.seconds) == alone


def totals(executor: Executor | None) -> tuple[object, ...]:
    def world(random: Random) -> World:
        return draw_case("core", random).make()

    result = walk(world, 3, runs=80, executor=executor)
    return result.next_run, result.runs, result.operations, result.most_in_flight, result.failure
