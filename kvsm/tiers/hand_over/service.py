"""`HandOverService`: the unix socket of a prefill engine, and the thread that answers on it.

The thread answers from the lease table, and never waits for the engine: while the last blocks are in flight,
it answers `Pending` at once, and the decode engine asks again. When a connection is closed, its claims are
given up; the kernel closes the connection if the reader's process dies.

No peer can block the others. The thread never waits for a peer: if a socket does not accept a whole answer,
the rest stays in the outbox, and the connection's next question is not read until the rest is sent. A
connection that is silent, or does not read, is closed after `SILENCE_S`, or earlier if another connection
needs its place or its descriptor. A connection with a claimed hand-over stays open: its lease expires.

Only processes of this user are answered: the socket has mode 0600, is in a directory that only this user can
write, and the kernel reports the user of a connecting process. With `file_group` (mode 0660) its members can
connect, so that they can recognize and remove a dead socket, but they are not answered.
"""

from __future__ import annotations

import errno
import logging
import os
import selectors
import socket
import struct
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from threading import Thread

from kvsm.errors import ConfigError, UnusableFiles, described
from kvsm.system.private_files import HOW_TO_SHARE, give_to_group
from kvsm.system.steady_clock import SteadyClock
from kvsm.tiers.hand_over.leases import LeaseTable
from kvsm.tiers.hand_over.peer_messages import (
    MOST_QUESTION_BYTES,
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
"""Most connections. For a further one, the connection that has been silent longest is closed."""

MOST_AHEAD = 2
"""Most questions that a connection may send before its first answer: a claim, and its decline."""

SILENCE_S = 5.0
"""How long a connection may take for a question, or to read its answer (s). A decode engine that waits asks
again within milliseconds."""

ACCEPT_PAUSE_S = 0.1
"""Pause between two tries to accept a connection while the process has no descriptor left (s)."""

_CREDENTIALS = struct.Struct("3i")


class _Connection:
    """A decode engine's connection.

    reader: its number in the lease table, from 1.
    outbox: bytes of answers that are not sent yet. Until they are sent, no question is read.
    active_at: when it connected, or when its last answer was sent completely (s).
    """

    __slots__ = ("active_at", "inbox", "outbox", "reader", "socket")

    def __init__(self, connected: socket.socket, reader: int, now: float) -> None:
        self.socket, self.reader = connected, reader
        self.inbox, self.outbox = Inbox(MOST_QUESTION_BYTES), bytearray()
        self.active_at = now

    def send(self) -> None:
        """Send as much of the outbox as the socket takes."""
        try:
            while self.outbox:
                del self.outbox[: self.socket.send(self.outbox)]
        except BlockingIOError:
            return
        except (BrokenPipeError, ConnectionResetError):
            # The peer closed its end. It may have sent a decline before, so its input is still read.
            self.outbox.clear()


class HandOverService:
    """Answers decode engines of this machine.

    Raises `UnusableFiles` if the system refuses the socket or a file is in its way, and `ConfigError` if its
    path is too long or another engine listens on it.

    directory: the common directory of the engines (`hand_over_directory`).
    engine: the id of this engine.
    leases: the lease table.
    layout: what a block means in this engine.
    """

    def __init__(self, directory: Path, engine: str, leases: LeaseTable, layout: Mapping[str, str]) -> None:
        self._path, self._leases, self._layout = socket_path(directory, engine), leases, layout
        _remove_dead_sockets(directory)
        self._listener = _listen(self._path)
        self._selector, self._clock = selectors.DefaultSelector(), SteadyClock()
        self._wake, self._woken = socket.socketpair()
        self._readers: OrderedDict[int, _Connection] = OrderedDict()
        """Reader -> its connection; the longest silent first."""
        self._next_reader = 1
        self._accept_at: float | None = None
        """When to accept connections again after a pause (s); None: there is no pause."""
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = Thread(target=self._run, name="kvsm-hand-over", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering, and remove the socket. Every claim is given up. Idempotent."""
        with suppress(OSError):
            self._wake.send(b"x")
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._serve():
                pass
        except Exception as error:  # The thread has no caller that would see it.
            _LOGGER.error("the hand-over thread has died, so nothing is handed over: %s", described(error))
        finally:
            self._path.unlink(missing_ok=True)
            for connection in list(self._readers.values()):
                self._drop(connection)
            for one in (self._listener, self._wake, self._woken, self._selector):
                one.close()

    def _serve(self) -> bool:
        """Wait for the next events and handle them. Returns False after `close`."""
        for key, _ in self._selector.select(self._time_left()):
            if key.fileobj is self._woken:
                return False
            if key.fileobj is self._listener:
                self._accept()
            elif key.data.reader in self._readers:
                self._receive_or_send(key.data)
        self._drop_silent()
        if self._accept_at is not None and self._clock() >= self._accept_at:
            self._accept_at = None
            self._selector.register(self._listener, selectors.EVENT_READ)
        return True

    def _time_left(self) -> float | None:
        """Time until a timer is due (s); None: there is no timer."""
        due = [] if self._accept_at is None else [self._accept_at]
        if self._readers:
            due.append(next(iter(self._readers.values())).active_at + SILENCE_S)
        return max(0.0, min(due) - self._clock()) if due else None

    def _accept(self) -> None:
        try:
            connected, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # the peer has closed already
            return
        except OSError:  # no descriptor is left, or no memory
            if not self._make_room():
                self._selector.unregister(self._listener)
                self._accept_at = self._clock() + ACCEPT_PAUSE_S
            return
        has_room = len(self._readers) < MOST_CONNECTIONS or self._make_room()
        if not has_room or _user_of(connected) != os.geteuid():
            connected.close()
            return
        connected.setblocking(False)
        connection = _Connection(connected, self._next_reader, self._clock())
        try:
            self._selector.register(connected, selectors.EVENT_READ, connection)
        except OSError:  # the system watches no more descriptors
            connected.close()
            return
        self._next_reader += 1
        self._readers[connection.reader] = connection

    def _make_room(self) -> bool:
        """Close the connection without a claim that was silent longest. Returns False if all have claims."""
        for connection in self._readers.values():
            if not self._leases.has_claimed(connection.reader):
                self._drop(connection)
                return True
        return False

    def _drop_silent(self) -> None:
        """Close each connection that was silent for `SILENCE_S`, unless it has a claimed lease."""
        now = self._clock()
        while self._readers:
            connection = next(iter(self._readers.values()))
            if now < connection.active_at + SILENCE_S:
                return
            if self._leases.has_claimed(connection.reader):
                connection.active_at = now
                self._readers.move_to_end(connection.reader)
            else:
                self._drop(connection)

    def _receive_or_send(self, connection: _Connection) -> None:
        """Send the rest of the outbox, or receive and answer questions. An error closes only this
        connection."""
        try:
            if connection.outbox:
                connection.send()
                self._note_activity(connection)
            else:
                received = connection.socket.recv(1 << 16)
                if not received:
                    self._drop(connection)
                    return
                connection.inbox.add(received)
            self._answer(connection)
        except BlockingIOError:
            return
        except Exception as error:
            _LOGGER.debug("the connection of a decode engine is closed: %s", described(error))
            self._drop(connection)

    def _answer(self, connection: _Connection) -> None:
        """Answer received questions until an answer cannot be sent completely."""
        answered = 0
        while not connection.outbox and (question := connection.inbox.question()) is not None:
            answered += 1
            if answered > MOST_AHEAD:
                raise ValueError(f"more than {MOST_AHEAD} questions at once")
            connection.outbox += packed(answer_to(question, connection.reader, self._leases, self._layout))
            connection.send()
            self._note_activity(connection)
        wanted = selectors.EVENT_WRITE if connection.outbox else selectors.EVENT_READ
        self._selector.modify(connection.socket, wanted, connection)

    def _note_activity(self, connection: _Connection) -> None:
        """Restart the silence timer of the connection if all of its answers are sent."""
        if not connection.outbox:
            connection.active_at = self._clock()
            self._readers.move_to_end(connection.reader)

    def _drop(self, connection: _Connection) -> None:
        del self._readers[connection.reader]
        self._selector.unregister(connection.socket)
        connection.socket.close()
        self._leases.leave(connection.reader)


def answer_to(question: Question, reader: int, leases: LeaseTable, layout: Mapping[str, str]) -> Answer:
    """Return the answer to a decode engine's question.

    reader: the number of its connection.
    layout: what a block means in this engine.
    """
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
        give_to_group(path)
        listener.listen(128)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise _why_in_use(path) from error
        raise UnusableFiles(
            f"{path}: a socket cannot be made: {error.strerror}; make its directory writable for this "
            "process, or give another directory"
        ) from error
    return listener


def _why_in_use(path: Path) -> ConfigError:
    """Return the error for a socket path that is taken, although dead sockets were removed."""
    refusal = _refusal_of(path)
    if refusal is None or isinstance(refusal, BlockingIOError):  # Its queue is full.
        return ConfigError(
            f"{path}: another engine with this engine_id listens there; give this engine another engine_id"
        )
    return UnusableFiles(
        f"{path}: is in the way, and kvsm cannot find out whether an engine listens there: "
        f"{refusal.strerror}; if none does, remove the file; or give another directory, {HOW_TO_SHARE}"
    )


def _remove_dead_sockets(directory: Path) -> None:
    """Remove the sockets of engines that were killed: no process listens on them."""
    for path in directory.glob("kvsm-*.sock"):
        if isinstance(_refusal_of(path), ConnectionRefusedError):
            with suppress(OSError):
                path.unlink()


def _refusal_of(path: Path) -> OSError | None:
    """Return why no connection to this socket is possible; None if a process listens on it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except OSError as error:
            return error
    return None


def _user_of(connection: socket.socket) -> int:
    """Return the user id of the connected process."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(found)[1])
