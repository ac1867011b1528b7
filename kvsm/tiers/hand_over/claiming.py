"""`Claims`: a thread of a decode engine that claims hand-overs from prefill engines and gives them back.

The engine's thread never waits for another process: it queues requests (`ask`, `give_back`), and takes
the answers in each step (`take_answers`). Each request gets exactly one answer, whatever the prefill engine
does: if that is gone, silent or sends invalid data, the answer is `Refused`, or `GivenBack` with held=False.
An error of one claim ends only this claim.
"""

from __future__ import annotations

import logging
import selectors
import socket
from collections import deque
from contextlib import suppress
from pathlib import Path
from threading import Thread

import msgspec

from kvsm.errors import described
from kvsm.system.steady_clock import SteadyClock
from kvsm.tiers.hand_over.peer_messages import (
    MOST_ANSWER_BYTES,
    Answer,
    GiveBack,
    GivenBack,
    HandOverClaim,
    Inbox,
    Offered,
    Pending,
    Question,
    Refused,
    packed,
    socket_path,
)

_LOGGER = logging.getLogger("kvsm")

AGAIN_S = 0.002
"""Pause between two claims of a hand-over whose last blocks have not arrived (s)."""

LONGEST_SLEEP_S = 60.0

ANSWER_S = 5.0
"""How long a prefill engine may take for one answer (s). Its thread answers in a millisecond or two."""

MOST_CONNECTIONS = 1024
"""Most open claims. Further claims are refused, so that silent prefill engines cannot use up the descriptors
of this process."""


class _OpenClaim(msgspec.Struct, eq=False):
    """One hand-over in this thread. Times are of a `SteadyClock` (s).

    ticket: the engine's number for it.
    engine: the id of the prefill engine.
    until: when to stop repeating the claim.
    next: the next question to send; None: none.
    due: when to send the next question, or to give up waiting for the answer.
    asked: the sent question without an answer; None: none.
    """

    ticket: int
    engine: str
    claim: HandOverClaim
    until: float
    next: Question | None
    due: float = 0.0
    asked: Question | None = None
    connection: socket.socket | None = None
    inbox: Inbox = msgspec.field(default_factory=lambda: Inbox(MOST_ANSWER_BYTES))


class Claims:
    """The claims of one decode engine.

    directory: the common directory of the engines (`hand_over_directory`).
    timeout_s: how long to wait until the last blocks have arrived on the prefill engine's host (s).
    """

    def __init__(self, directory: Path, timeout_s: float) -> None:
        self._directory, self._timeout_s = directory, timeout_s
        self._commands: deque[_OpenClaim | tuple[int, bool, bool]] = deque()
        self._answers: deque[tuple[int, Answer]] = deque()
        self._open: dict[int, _OpenClaim] = {}
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._clock = SteadyClock()
        self._closing = self._ended = False
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = Thread(target=self._run, name="kvsm-claims", daemon=True)
        self._thread.start()

    # The engine's thread.

    def ask(self, ticket: int, engine: str, claim: HandOverClaim) -> None:
        """Claim a hand-over of prefill engine `engine`. The answer is `Offered` or `Refused`."""
        until = self._clock() + self._timeout_s
        self._queue(_OpenClaim(ticket, engine, claim, until, claim))

    def give_back(self, ticket: int, *, read: bool, had: bool = False) -> None:
        """End a claim; legal at any time.

        read: whether the blocks were copied. Only then the answer `GivenBack` follows.
        had: whether an `Offered` claim ends because this engine has the blocks already.
        """
        self._queue((ticket, read, had))

    def take_answers(self) -> list[tuple[int, Answer]]:
        """Return (ticket, answer) for each answer since the last call."""
        answers = []
        while self._answers:
            answers.append(self._answers.popleft())
        return answers

    def close(self) -> None:
        """Close every connection, which gives up all claims. Idempotent."""
        self._closing = True
        self._wake_up()
        self._thread.join()

    def _queue(self, command: _OpenClaim | tuple[int, bool, bool]) -> None:
        self._commands.append(command)
        if self._ended:
            self._refuse_commands()
        self._wake_up()

    def _wake_up(self) -> None:
        with suppress(OSError):  # the thread is awake, or has ended
            self._wake.send(b"x")

    # This thread.

    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
        except Exception as error:  # a thread has no caller that would see it
            _LOGGER.error("the thread that claims hand-overs has died: %s", described(error))
        finally:
            self._ended = True
            for one in list(self._open.values()):
                self._finish(one, "this engine claims nothing any more")
            self._refuse_commands()
            for closed in (self._wake, self._woken, self._selector):
                closed.close()

    def _refuse_commands(self) -> None:
        """Answer all queued commands once the thread has ended. Two threads may run this at a time."""
        with suppress(IndexError):
            while True:
                command = self._commands.popleft()
                if isinstance(command, _OpenClaim):
                    self._answers.append((command.ticket, Refused("this engine claims nothing any more")))
                elif command[1]:
                    self._answers.append((command[0], GivenBack(held=False)))

    def _turn(self) -> None:
        now = self._clock()
        soonest = min([now + LONGEST_SLEEP_S, *[one.due for one in self._open.values()]])
        ready = self._selector.select(max(0.0, soonest - now))
        for key, _ in ready:
            if key.fileobj is self._woken:
                self._woken.recv(4096)
        while self._commands:
            self._run_command(self._commands.popleft())
        for key, _ in ready:
            if isinstance(key.data, _OpenClaim) and key.data.ticket in self._open:
                self._receive(key.data)
        now = self._clock()
        for one in [one for one in self._open.values() if one.due <= now]:
            if one.asked is not None:
                self._finish(one, f"it does not answer within {ANSWER_S:g} s")
            elif one.next is not None:
                self._send(one)

    def _run_command(self, command: _OpenClaim | tuple[int, bool, bool]) -> None:
        if isinstance(command, _OpenClaim):
            self._open[command.ticket] = command
            if len(self._open) > MOST_CONNECTIONS:
                self._finish(command, f"this engine claims {MOST_CONNECTIONS} hand-overs already")
            else:
                self._send(command)
            return
        ticket, read, had = command
        one = self._open.get(ticket)
        if one is None:
            if read:
                self._answers.append((ticket, GivenBack(held=False)))
        elif read:
            one.next = GiveBack(one.claim.hand_over, read=True)
            if one.asked is None:
                self._send(one)
        else:
            self._decline(one, had)

    def _decline(self, one: _OpenClaim, had: bool) -> None:
        """Send that the hand-over is not wanted, and close the connection, which gives up a claimed one.

        had: whether this engine has the blocks already.
        """
        if one.connection is not None:
            not_wanted = msgspec.structs.replace(one.claim, wanted=False)
            last = GiveBack(one.claim.hand_over, read=False) if had else not_wanted
            with suppress(OSError):
                one.connection.send(packed(last))
        self._close(one)

    def _send(self, one: _OpenClaim) -> None:
        """Send the next question, and connect first if necessary."""
        question = one.next
        if question is None:
            return
        try:
            content = packed(question)
            if one.connection is None and not self._connect(one):
                self._ask_again(one)
                return
            assert one.connection is not None
            one.connection.sendall(content)
        except BlockingIOError:
            self._finish(one, "it does not read what it is asked")
        except OSError as error:
            self._finish(one, f"it is not there: {described(error)}")
        except Exception as error:
            self._finish(one, f"it cannot be asked: {described(error)}")
        else:
            one.asked, one.next, one.due = question, None, self._clock() + ANSWER_S

    def _connect(self, one: _OpenClaim) -> bool:
        """Connect to the engine of the claim. Returns False if its queue of new connections is full."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.setblocking(False)
            connection.connect(str(socket_path(self._directory, one.engine)))
            self._selector.register(connection, selectors.EVENT_READ, one)
        except BlockingIOError:
            connection.close()
            return False
        except BaseException:
            connection.close()
            raise
        one.connection = connection
        return True

    def _receive(self, one: _OpenClaim) -> None:
        """Receive bytes, and take the answer if it is complete."""
        assert one.connection is not None
        try:
            received = one.connection.recv(1 << 20)
            if not received:
                self._finish(one, "it has closed the connection")
                return
            one.inbox.add(received)
            answer = one.inbox.answer(one.asked)
        except BlockingIOError:
            return
        except Exception as error:
            self._finish(one, f"what it says is not understood: {described(error)}")
            return
        if answer is not None:
            self._take(one, answer)

    def _take(self, one: _OpenClaim, answer: Answer) -> None:
        """Apply the answer to the last question."""
        if isinstance(answer, GivenBack):
            self._answers.append((one.ticket, answer))
            self._close(one)
        elif isinstance(answer, Pending):
            self._ask_again(one)
        elif isinstance(answer, Offered):
            self._answers.append((one.ticket, answer))
            one.asked, one.due = None, float("inf")
            if one.next is not None:
                self._send(one)
        else:
            self._finish(one, answer.reason)

    def _ask_again(self, one: _OpenClaim) -> None:
        now = self._clock()
        one.asked, one.next, one.due = None, one.next or one.claim, now + AGAIN_S
        if now >= one.until:
            self._finish(one, f"its last blocks have not arrived within {self._timeout_s:g} s")

    def _finish(self, one: _OpenClaim, reason: str) -> None:
        """End a claim without success: answer `Refused`, or `GivenBack` with held=False."""
        last = one.asked or one.next
        if isinstance(last, GiveBack):
            self._answers.append((one.ticket, GivenBack(held=False)))
        elif isinstance(last, HandOverClaim):
            self._answers.append((one.ticket, Refused(reason)))
        self._close(one)

    def _close(self, one: _OpenClaim) -> None:
        del self._open[one.ticket]
        if one.connection is not None:
            self._selector.unregister(one.connection)
            one.connection.close()
