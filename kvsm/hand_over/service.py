"""`HandOverService`: the unix socket of a prefill engine, and the thread that answers on it.

It answers from the lease table, and never waits for the engine: a decode engine hears at once that the last
blocks are still on their way, and asks again. When a connection is closed, what its reader had claimed is
given up; the kernel closes it if the reader's process dies.

Only processes of this user are answered: the socket is in a directory that nobody else can write, has mode
0600, and the kernel says whose process connects.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from threading import Thread

import msgspec

from kvsm.errors import ConfigError, described
from kvsm.hand_over.leases import LeaseTable
from kvsm.hand_over.messages import (
    Answer,
    GiveBack,
    Inbox,
    Question,
    Refused,
    packed,
    socket_path,
    why_not_alike,
)

_LOGGER = logging.getLogger("kvsm")

MOST_CONNECTIONS = 1024
"""More are closed at once: their decode engines compute the prompts themselves."""

_PATIENCE_S = 0.2
"""How long an answer may wait for a reader that does not read (s)."""

_CREDENTIALS = struct.Struct("3i")


class HandOverService:
    """Answers decode engines of this machine. Raises `ConfigError` if it cannot have its socket.

    directory: in which the engines meet (`hand_over_directory`).
    engine: the id of this engine.
    layout: what a block means in it.
    """

    def __init__(self, directory: Path, engine: str, leases: LeaseTable, layout: Mapping[str, str]) -> None:
        self._path, self._leases, self._layout = socket_path(directory, engine), leases, layout
        _remove_dead_sockets(directory)
        self._listener = _listen(self._path)
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._readers: dict[socket.socket, tuple[int, Inbox]] = {}
        self._next_reader = 1
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = Thread(target=self._run, name="kvsm-hand-over", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answer nobody any more, and remove the socket. Every claim is given up. Idempotent."""
        with suppress(OSError):
            self._wake.send(b"x")
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._serve():
                pass
        except Exception as error:  # Nobody else would hear of it.
            _LOGGER.error("the hand-over thread has died, so nothing is handed over: %s", described(error))
        finally:
            self._path.unlink(missing_ok=True)
            for reader in list(self._readers):
                self._drop(reader)
            for one in (self._listener, self._wake, self._woken, self._selector):
                one.close()

    def _serve(self) -> bool:
        """Wait for the next events. Returns False at the end."""
        for key, _ in self._selector.select():
            if key.fileobj is self._woken:
                return False
            if key.fileobj is self._listener:
                self._accept()
            elif isinstance(key.fileobj, socket.socket):
                self._read(key.fileobj)
        return True

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        if _user_of(connection) != os.geteuid() or len(self._readers) >= MOST_CONNECTIONS:
            connection.close()
            return
        connection.settimeout(_PATIENCE_S)
        self._readers[connection] = self._next_reader, Inbox()
        self._next_reader += 1
        self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, connection: socket.socket) -> None:
        reader, inbox = self._readers[connection]
        try:
            received = connection.recv(1 << 16)
            if not received:
                self._drop(connection)
                return
            inbox.add(received)
            while (question := inbox.question()) is not None:
                answer = packed(answer_to(question, reader, self._leases, self._layout))
                # One that has closed its end may have declined before that: all that it said is read.
                with suppress(BrokenPipeError, ConnectionResetError):
                    connection.sendall(answer)
        except (OSError, ValueError, msgspec.DecodeError):
            self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        reader, _ = self._readers.pop(connection)
        self._selector.unregister(connection)
        connection.close()
        self._leases.leave(reader)


def answer_to(question: Question, reader: int, leases: LeaseTable, layout: Mapping[str, str]) -> Answer:
    """What a decode engine hears. reader: its connection. layout: what a block means in this engine."""
    if isinstance(question, GiveBack):
        return leases.give_back(question.hand_over, reader, read=question.read)
    if not question.wanted:
        leases.decline(question)
        return Refused("it was declined")
    unlike = why_not_alike(layout, question.layout)
    if unlike is not None:
        leases.decline(question)
        return Refused(unlike)
    return leases.claim(question, reader)


def _listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(128)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"{path}: cannot be made: {error.strerror}; if another engine runs with the same engine_id, give "
            "this one another"
        ) from error
    return listener


def _remove_dead_sockets(directory: Path) -> None:
    """A killed engine leaves its socket behind. Nobody listens on it any more."""
    for path in directory.glob("kvsm-*.sock"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, suppress(BlockingIOError):
            probe.setblocking(False)
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            except FileNotFoundError:
                pass


def _user_of(connection: socket.socket) -> int:
    """The user whose process connected."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(found)[1])
