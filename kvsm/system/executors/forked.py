"""Forked processes of this machine.

A process with threads must not fork: its child may hang on a lock that a thread held. But a lost worker must
be replaced at any time, and by then a thread may draw a line of progress. So the first fork is a *fork
server*: one thread, the memory as it was then, and no work but to fork the workers when they are needed.

    this process --(fork)--> fork server --(fork)--> worker, worker, ...

The fork server also ends the workers. It kills them when this process closes its connection, or is gone.
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


class ForkedProcesses:
    """An executor of forked processes. Make one, and call `results`, before this process has threads.

    heard: is told of each worker that was lost and made up for.
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
    ) -> Iterator[Iterator[Result]]:
        """As `Executor.results`. Items and results are pickled; the task is not."""
        server = _ForkServer(task)
        crew = _ProcessCrew(server, fresh)
        try:
            yield OrderedResults(crew, self.workers, items, name, self._lose)
        finally:
            server.close()
            crew.close()

    def _lose(self, lost: LostWorker) -> None:
        self.losses += 1
        self._heard(lost)


class _ProcessCrew:
    """Workers, each with a connection. They are forked when they are needed."""

    def __init__(self, server: _ForkServer, fresh: bool) -> None:
        self._server, self._fresh = server, fresh
        self._idle: list[Connection] = []
        self._busy: dict[Connection, int] = {}

    def begin(self, number: int, item: Any) -> None:
        connection = self._idle.pop() if self._idle else self._server.forked()
        self._busy[connection] = number
        with suppress(OSError):  # it is gone: `ended` finds the end of its connection
            connection.send(item)

    def ended(self) -> list[tuple[int, Done | Raised | Lost]]:
        ready = [one for one in wait(list(self._busy)) if isinstance(one, Connection)]
        return [(self._busy.pop(connection), self._outcome(connection)) for connection in ready]

    def _outcome(self, connection: Connection) -> Done | Raised | Lost:
        try:
            outcome: Done | Raised = connection.recv()
        except (EOFError, OSError):
            connection.close()
            return Lost("its process was killed")
        if self._fresh:
            connection.close()  # its process ends there
        else:
            self._idle.append(connection)
        return outcome

    def close(self) -> None:
        for connection in (*self._idle, *self._busy):
            connection.close()


class _ForkServer:
    """The process that forks the workers, seen from the one that wants them."""

    def __init__(self, task: Callable[[Any], Any]) -> None:
        self._control, there = socket.socketpair()
        process = get_context("fork").Process(
            target=_serve_forks, args=(task, there, self._control), daemon=True
        )
        process.start()
        self._process = process
        there.close()

    def forked(self) -> Connection:
        """The connection to a new worker."""
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
        """End all workers, and it."""
        self._control.close()
        self._process.join()


def _serve_forks(task: Callable[[Any], Any], control: socket.socket, not_ours: socket.socket) -> None:
    """The main function of the fork server."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who consumes the results decides when to stop
    signal.signal(signal.SIGTERM, _leave)
    not_ours.close()  # else the end of the consumer would go unnoticed
    gc.freeze()  # so that workers do not copy memory only to look for garbage in it
    workers: set[int] = set()
    try:
        while True:
            wanted, handles, *_ = socket.recv_fds(control, 1, 1)
            if not wanted:
                return
            _bury(workers)
            worker = os.fork()
            if not worker:
                _work(task, control, handles[0])
            workers.add(worker)
            os.close(handles[0])
    finally:
        for worker in workers:
            os.kill(worker, signal.SIGKILL)  # none is buried, so no other process has its number
        for worker in workers:
            os.waitpid(worker, 0)


def _leave(_number: int, _frame: FrameType | None) -> NoReturn:
    sys.exit()


def _bury(workers: set[int]) -> None:
    for worker in list(workers):
        if os.waitpid(worker, os.WNOHANG)[0]:
            workers.remove(worker)


def _work(task: Callable[[Any], Any], control: socket.socket, handle: int) -> NoReturn:
    """The main function of a worker: one item after the other, until its connection ends."""
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        control.close()
        with suppress(EOFError, ConnectionError), Connection(handle) as connection:
            while True:
                connection.send_bytes(_pickled(outcome_of(task, connection.recv())))
                sys.stdout.flush()  # nobody flushes it at `os._exit`
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(0)


def _pickled(outcome: Done | Raised) -> bytes:
    """An outcome, or the error that says why it cannot be pickled."""
    try:
        return bytes(ForkingPickler.dumps(outcome))
    except Exception as error:
        return bytes(ForkingPickler.dumps(Raised(None, f"its result cannot be pickled: {error!r}")))
