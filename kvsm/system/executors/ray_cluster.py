"""An executor on a Ray cluster: a new `local` one on this machine, or a running cluster.

Each item is a Ray task, and Ray decides where it runs. Ray's own retries are off, because
`kvsm.system.executors.executor` starts the items of lost workers again and reports them.
"""

from __future__ import annotations

import os
import pickle
import socket
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from kvsm.errors import ConfigError
from kvsm.system.executors.executor import (
    MOMENT_S,
    Done,
    Heard,
    Item,
    Lost,
    LostWorker,
    OrderedResults,
    Raised,
    Result,
    Task,
    unheard,
)
from kvsm.system.executors.ray_worker import asked, code_digest
from kvsm.system.stopping import IsOver, never

LOCAL = "local"
_STORE_BYTES = 80 << 20
"""Object store of a local cluster (bytes). Ray refuses less than 75 MiB."""
_CONNECT_TIMEOUT_S = 10
_INTERRUPT_TIMEOUT_S = 1.0
"""How long an interrupted worker process may take to stop its item (s). If it does, the next `results` reuses
it; a new process would have to import everything."""
_TOKEN_HINT = (
    "a cluster that asks for a token needs RAY_AUTH_MODE=token here too (see the documentation of Ray)"
)


class RayCluster:
    """An executor on a Ray cluster. Use `with` to connect; it disconnects on exit.

    address: `local` starts a cluster on this machine that ends with the executor. Others are Ray's:
        `ray://HOST:PORT` or `HOST:PORT`; `auto` is the cluster that runs on this machine.
    workers: most items that run at a time. None: one for each CPU of the cluster.
    heard: called for each lost worker whose item is started again.

    Raises `ConfigError` if Ray is not installed, if there is no such cluster, or if it has no CPUs.
    """

    def __init__(self, address: str, workers: int | None = None, heard: Heard = unheard) -> None:
        self._ray = _import_ray()
        self._address, self._wanted, self._heard = address, workers, heard
        self.workers, self.losses, self._cpus = workers or 0, 0, 0

    def __enter__(self) -> RayCluster:
        ray, named = self._ray, f"--cluster {self._address}"
        try:
            self._connect()
            self._cpus = int(ray.cluster_resources().get("CPU", 0))
        except (OSError, ValueError, RuntimeError, ImportError, ray.exceptions.RayError) as error:
            ray.shutdown()
            hint = "" if self._address == LOCAL else f"; {_TOKEN_HINT}"
            raise ConfigError(f"{named}: {error}{hint}") from error
        if not self._cpus:
            ray.shutdown()
            raise ConfigError(f"{named}: this cluster has no CPUs")
        self.workers = self._wanted or self._cpus
        return self

    def __exit__(self, *_: object) -> None:
        self._ray.shutdown()

    def _connect(self) -> None:
        quiet = {"log_to_driver": False, "logging_level": "ERROR"}
        if self._address != LOCAL:
            _check_reachable(self._address)
            self._ray.init(self._address, **quiet)
            return
        self._ray.init(
            "local",  # not the cluster that RAY_ADDRESS or an earlier `ray start` names
            num_cpus=self._wanted or os.cpu_count() or 1,
            num_gpus=0,
            include_dashboard=False,
            object_store_memory=_STORE_BYTES,
            **quiet,
        )

    @contextmanager
    def results(
        self,
        task: Task[Item, Result],
        items: Iterable[Item],
        *,
        name: Callable[[Item], str] = str,
        fresh: bool = False,
        is_over: IsOver = never,
    ) -> Iterator[Iterator[Result]]:
        """As `Executor.results`. The task, items and results are pickled."""
        try:
            crew = _RayCrew(self._ray, task, fresh)
            try:
                yield OrderedResults(crew, self._submitted(), items, name, self._lose, is_over)
            finally:
                crew.close()
        except ConnectionError as error:
            raise ConfigError(f"--cluster {self._address}: the connection was lost: {error}") from error

    def _submitted(self) -> int:
        """The number of items submitted to Ray at a time.

        If `workers` takes all CPUs, twice as many items are submitted. A worker without a waiting item is
        returned to Ray and leased again, which doubles the driver's work.
        """
        return self.workers if self.workers < self._cpus else 2 * self.workers

    def _lose(self, lost: LostWorker) -> None:
        self.losses += 1
        self._heard(lost)


class _RayCrew:
    """The items of one call of `results` that Ray runs."""

    def __init__(self, ray: Any, task: Callable[[Any], Any], fresh: bool) -> None:
        self._fresh = fresh
        self._ray, self._ours, self._number = ray, code_digest(), uuid.uuid4().hex
        self._task = ray.put(ray.cloudpickle.dumps(task))
        self._ask = ray.remote(max_retries=0, max_calls=1 if fresh else 0)(asked())
        self._busy: dict[Any, int] = {}

    def begin(self, number: int, item: Any) -> None:
        pickled = self._ray.cloudpickle.dumps(item)
        self._busy[self._ask.remote(self._ours, self._number, self._task, pickled)] = number

    def ended(self) -> list[tuple[int, Done | Raised | Lost]]:
        wait, busy = self._ray.wait, list(self._busy)
        ready, rest = wait(busy, timeout=MOMENT_S)
        if ready and rest:
            ready += wait(rest, num_returns=len(rest), timeout=0)[0]
        return [(self._busy.pop(reference), self._outcome(reference)) for reference in ready]

    def _outcome(self, reference: Any) -> Done | Raised | Lost:
        exceptions = self._ray.exceptions
        try:
            answer: bytes | str = self._ray.get(reference)
        except exceptions.RayTaskError as error:  # for example, the worker cannot unpickle the task
            return Raised(None, str(error))
        except exceptions.RayError as error:
            return Lost(str(error).partition("\n")[0].partition(". ")[0])
        if isinstance(answer, str):
            raise ConfigError(f"{answer}; install the kvsm of this machine on every machine of the cluster")
        outcome: Done | Raised = pickle.loads(answer)
        return outcome

    def close(self) -> None:
        """Interrupt running items. A process that does not stop in time is killed."""
        ray, busy = self._ray, list(self._busy)
        if not self._fresh:
            for reference in busy:
                ray.cancel(reference)
            busy = ray.wait(busy, num_returns=len(busy), timeout=_INTERRUPT_TIMEOUT_S)[1] if busy else []
        for reference in busy:
            ray.cancel(reference, force=True)


def _check_reachable(address: str) -> None:
    """Raise `OSError` at once if no process listens at this address. Ray would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT_S).close()


def _import_ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # avoids a warning of Ray
    try:
        import ray
    except ImportError as error:
        raise ConfigError(f"{error}; --cluster needs Ray: pip install 'kvsm[ray]'") from error
    return ray
