"""An executor that uses forked processes of this machine.

A process with threads must not fork: its child may hang on a lock that a thread held. But lost workers must
be replaced at any time, when this process may already have a thread, such as one that draws a progress line.
So this process forks once, before it has threads: a *fork server*, which has a single thread and only forks
the workers when they are needed. Workers have the memory of that first fork.

    this process --(fork)--> fork server --(fork)--> worker, worker, ...

The fork server kills the workers when this process closes its connection, or dies.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.reduction import ForkingPickler
from types import FrameType
from typing import Any, NoReturn

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
    outcome_of,
    unheard,
)
from kvsm.system.stopping import IsOver, never


class ForkedProcesses:
    """An executor of forked processes. Call `results` before this process has threads.

    heard: called for each lost worker whose item is started again.
    """

    def __init__(self, workers: int, heard: Heard = unheard) -> None:
        if workers < 1:
            raise ConfigError(f"{workers} workers; there must be at least 1")
        self.workers, self.losses, self._heard = workers, 0, heard

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
        """As `Executor.results`. Items and results are pickled; the task is inherited by the fork."""
        server = _ForkServer(task)
        crew = _ProcessCrew(server, fresh)
        try:
            yield OrderedResults(crew, self.workers, items, name, self._lose, is_over)
        finally:
            server.close()
            crew.close()

    def _lose(self, lost: LostWorker) -> None:
        self.losses += 1
        self._heard(lost)


class _ProcessCrew:
    """The workers of one call of `results`, each with a connection. They are forked on demand."""

    def __init__(self, server: _ForkServer, fresh: bool) -> None:
        self._server, self._fresh = server, fresh
        self._idle: list[Connection] = []
        self._busy: dict[Connection, int] = {}

    def begin(self, number: int, item: Any) -> None:
        connection = self._idle.pop() if self._idle else self._server.forked()
        self._busy[connection] = number
        with suppress(OSError):  # the worker is gone; `ended` reads the end of its connection
            connection.send(item)

    def ended(self) -> list[tuple[int, Done | Raised | Lost]]:
        ready = [source for source in wait(list(self._busy), MOMENT_S) if isinstance(source, Connection)]
        return [(self._busy.pop(connection), self._outcome(connection)) for connection in ready]

    def _outcome(self, connection: Connection) -> Done | Raised | Lost:
        try:
            outcome: Done | Raised = connection.recv()
        except (EOFError, OSError):
            connection.close()
            return Lost("its process was killed")
        if self._fresh:
            connection.close()  # this ends the worker
        else:
            self._idle.append(connection)
        return outcome

    def close(self) -> None:
        for connection in (*self._idle, *self._busy):
            connection.close()


class _ForkServer:
    """A handle on the fork server, in the process that uses the workers."""

    def __init__(self, task: Callable[[Any], Any]) -> None:
        self._control, there = socket.socketpair()
        process = get_context("fork").Process(
            target=_serve_forks, args=(task, there, self._control), daemon=True
        )
        process.start()
        self._process = process
        there.close()

    def forked(self) -> Connection:
        """Have a worker forked, and return the connection to it."""
        here, there = Pipe()
        try:
            socket.send_fds(self._control, [b"w"], [there.fileno()])
        except OSError:
            here.close()
            raise ConfigError("the process that forks the workers was killed; try fewer --jobs") from None
        finally:
            there.close()
        return here

    def close(self) -> None:
        """End all workers and the fork server."""
        self._control.close()
        self._process.join()


def _serve_forks(task: Callable[[Any], Any], control: socket.socket, parents_end: socket.socket) -> None:
    """Run the fork server: fork a worker for each request on `control`, until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the consumer of the results decides when to stop
    signal.signal(signal.SIGTERM, _exit_on_signal)
    parents_end.close()  # otherwise `control` would stay open when the consumer dies
    gc.freeze()  # so that the garbage collector of a worker does not write to, and copy, inherited pages
    workers: set[int] = set()
    try:
        while True:
            wanted, handles, *_ = socket.recv_fds(control, 1, 1)
            if not wanted:
                return
            _reap(workers)
            worker = os.fork()
            if not worker:
                _work(task, control, handles[0])
            workers.add(worker)
            os.close(handles[0])
    finally:
        for worker in workers:
            os.kill(worker, signal.SIGKILL)  # not reaped yet, so no other process has its id
        for worker in workers:
            os.waitpid(worker, 0)


def _exit_on_signal(_number: int, _frame: FrameType | None) -> NoReturn:
    sys.exit()


def _reap(workers: set[int]) -> None:
    for worker in list(workers):
        if os.waitpid(worker, os.WNOHANG)[0]:
            workers.remove(worker)


def _work(task: Callable[[Any], Any], control: socket.socket, handle: int) -> NoReturn:
    """Run a worker: one item after another, until its connection is closed."""
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        control.close()
        with suppress(EOFError, ConnectionError), Connection(handle) as connection:
            while True:
                connection.send_bytes(_pickled(outcome_of(task, connection.recv())))
                sys.stdout.flush()  # `os._exit` does not flush it
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(0)


def _pickled(outcome: Done | Raised) -> bytes:
    """Pickle an outcome, or an error if it cannot be pickled."""
    try:
        return bytes(ForkingPickler.dumps(outcome))
    except Exception as error:
        return bytes(ForkingPickler.dumps(Raised(None, f"its result cannot be pickled: {error!r}")))
