"""`--jobs` and `--cluster`: the options for parallel workers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import click

from kvsm.cli.output import complain
from kvsm.system.executors.executor import Executor, LostWorker
from kvsm.system.executors.forked import ForkedProcesses

MOST_JOBS = 256
MOST_CLUSTER_JOBS = 10_000

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


def jobs_option(command: Decorated) -> Decorated:
    """`--jobs N`, for a command with `--cluster`."""
    return _jobs("Processes.  [default: one per CPU, of the cluster with --cluster]", MOST_CLUSTER_JOBS)(
        command
    )


def local_jobs_option(text: str) -> Callable[[Decorated], Decorated]:
    """`--jobs N`, for a command that works on this machine only. text: its help."""
    return _jobs(text, MOST_JOBS)


def _jobs(text: str, most: int) -> Callable[[Decorated], Decorated]:
    return click.option("--jobs", type=click.IntRange(1, most), metavar="N", help=text)


def cluster_option(command: Decorated) -> Decorated:
    """`--cluster ADDRESS`."""
    return click.option(
        "--cluster",
        metavar="ADDRESS",
        help="Run on a Ray cluster: ray://HOST:PORT or HOST:PORT; auto, the cluster that runs on this "
        "machine; local, a new one on this machine. The results are the same as without. Needs kvsm[ray], "
        "and this version of kvsm on every machine.",
    )(command)


@contextmanager
def chosen_executor(cluster: str | None, jobs: int | None) -> Iterator[Executor | None]:
    """Yield the executor that the user chose; None: work in this process alone. Raises `ConfigError`."""
    jobs = jobs if cluster else jobs or os.cpu_count() or 1
    if jobs == 1 and cluster is None:
        yield None
        return
    with executor_of_processes(cluster, jobs) as executor:
        yield executor


@contextmanager
def executor_of_processes(cluster: str | None, jobs: int | None) -> Iterator[Executor]:
    """Like `chosen_executor`, but never this process. Without a cluster, `jobs` must be given.

    A worker that is lost is reported on standard error, and another one takes its work.
    """
    if cluster is None:
        assert jobs is not None
        if jobs > MOST_JOBS:
            raise click.UsageError(f"--jobs {jobs}: at most {MOST_JOBS} without --cluster")
        yield ForkedProcesses(jobs, tell_lost)
        return
    from kvsm.system.executors.ray_cluster import RayCluster  # Only here: most people have no Ray.

    with RayCluster(cluster, jobs, tell_lost) as executor:
        yield executor


def told_workers(executor: Executor | None) -> str:
    """Return the end of a line of progress: the number of workers, and of those that were lost."""
    if executor is None:
        return ""
    lost = f", {executor.losses} lost and made up for" if executor.losses else ""
    return f", {executor.workers:,} workers{lost}"


def tell_lost(lost: LostWorker) -> None:
    """Report on standard error that a worker was lost, and that another one takes its work."""
    complain(str(lost))
