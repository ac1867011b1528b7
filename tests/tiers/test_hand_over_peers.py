"""Hand-overs among peers that are broken or hostile, over the real socket: none of them stops the others.

Each test ends with an honest engine that is served. `kvsm.check.worlds.wrong_messages` makes what the others
say.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec
import pytest

from kvsm.check.worlds.wrong_messages import wrong_messages
from kvsm.tiers.hand_over import claiming as claims_module
from kvsm.tiers.hand_over import service as service_module
from kvsm.tiers.hand_over.claiming import Claims
from kvsm.tiers.hand_over.leases import LeaseEnd, LeaseTable
from kvsm.tiers.hand_over.peer_messages import (
    MOST_QUESTION_BYTES,
    Answer,
    GiveBack,
    GivenBack,
    HandOverClaim,
    Inbox,
    Offered,
    OfferedGroup,
    Pending,
    Question,
    Refused,
    hand_over_directory,
    packed,
    socket_path,
)
from kvsm.tiers.hand_over.service import HandOverService

PROMPT, LAYOUT = b"digest of a prompt", {"dtype": "bfloat16"}
OFFER = Offered(32, (OfferedGroup(0, (4, 7)),))
CLAIM = HandOverClaim("a", PROMPT, 32, LAYOUT)


@pytest.fixture
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = hand_over_directory(str(tmp_path_factory.mktemp("h") / "m"))
    assert found is not None
    return found


@pytest.fixture
def table() -> LeaseTable:
    leases = LeaseTable(30.0)
    leases.offer("a", PROMPT, 32)
    leases.ready("a", OFFER)
    return leases


@pytest.fixture
def serving(directory: Path, table: LeaseTable) -> Iterator[HandOverService]:
    with closing(HandOverService(directory, "p", table, LAYOUT)) as service:
        yield service


def next_answers(claims: Claims, count: int) -> list[tuple[int, Answer]]:
    found: list[tuple[int, Answer]] = []
    until = time.monotonic() + 20
    while len(found) < count and time.monotonic() < until:
        found += claims.take_answers()
        time.sleep(0.001)
    return found


def hand_over_works(directory: Path, claims: Claims | None = None) -> bool:
    """Whether an honest engine gets the blocks of "a", with `held=True`."""
    with closing(claims or Claims(directory, 5.0)) as own:
        own.ask(1_000_000, "p", CLAIM)
        [(_, offered)] = next_answers(own, 1)
        own.give_back(1_000_000, read=True)
        [(_, held)] = next_answers(own, 1)
    return (offered, held) == (OFFER, GivenBack(held=True))


def connected(directory: Path, engine: str = "p") -> socket.socket:
    one = socket.socket(socket.AF_UNIX)
    one.settimeout(20)
    one.connect(str(socket_path(directory, engine)))
    return one


def is_closed(one: socket.socket, seconds: float = 20.0) -> bool:
    """Whether the other side closes the connection within this time."""
    one.settimeout(seconds)
    try:
        while one.recv(1 << 16):
            pass
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False
    return True


# Wrong messages.


@pytest.mark.usefixtures("serving")
@pytest.mark.parametrize("right", [HandOverClaim("a", b"a guess", 32, LAYOUT), GiveBack("a", read=True)])
def test_no_wrong_question_stops_a_prefill_engine_or_takes_a_hand_over(
    directory: Path, table: LeaseTable, right: Question
) -> None:
    """From a peer that does not know the prompt. A question that is understood is refused; any other closes
    its own connection."""
    refused = 0
    for question in [packed(right), *wrong_messages(right)]:
        with connected(directory) as peer:
            with suppress(BrokenPipeError):
                peer.sendall(question)
                peer.shutdown(socket.SHUT_WR)
            for answer in answers_to_the_end(peer):
                refused += 1
                assert answer["type"] == "refused" or answer == {"type": "given back", "held": False}
    assert refused >= 5
    assert not table.has_ended()
    assert hand_over_works(directory)


def answers_to_the_end(peer: socket.socket) -> Iterator[dict[str, Any]]:
    """What comes until the other side closes the connection."""
    received = bytearray()
    with suppress(ConnectionResetError):
        while piece := peer.recv(1 << 16):
            received += piece
    while received:
        end = 4 + int.from_bytes(received[:4], "big")
        yield msgspec.msgpack.decode(received[4:end])
        del received[:end]


class FakePrefillEngine:
    """Answers each question with the bytes of `answers`, in turn, and then in silence."""

    def __init__(self, directory: Path, answers: Callable[[Question], bytes]) -> None:
        self._answers = answers
        self._listener = service_module._listen(socket_path(directory, "q"))
        self._listener.settimeout(0.05)
        self._open = True
        self._peers: list[socket.socket] = []
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while self._open:
            with suppress(TimeoutError):
                peer, _ = self._listener.accept()
                self._peers.append(peer)
                Thread(target=self._serve, args=(peer,), daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        inbox = Inbox(MOST_QUESTION_BYTES)
        with suppress(OSError):
            while received := peer.recv(1 << 16):
                inbox.add(received)
                while (question := inbox.question()) is not None:
                    peer.sendall(self._answers(question))

    def close(self) -> None:
        self._open = False
        self._thread.join()
        for one in (self._listener, *self._peers):
            one.close()


def slowly(*answers: Answer) -> list[Any]:
    """These answers, for slow tests."""
    return [pytest.param(answer, marks=pytest.mark.slow) for answer in answers]


@pytest.mark.usefixtures("serving")
@pytest.mark.parametrize("right", [OFFER, GivenBack(held=True), *slowly(Pending(), Refused("x"))])
def test_no_wrong_answer_to_a_claim_stops_the_other_claims(
    directory: Path, right: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each claim gets one answer; one that is not understood, or never whole, is a refusal."""
    monkeypatch.setattr(claims_module, "ANSWER_S", 1.0)
    wrong = [*wrong_messages(right), *([packed(right)] if isinstance(right, GivenBack) else [])]
    asked = iter(wrong)
    with (
        closing(FakePrefillEngine(directory, lambda _: next(asked, b""))),
        closing(Claims(directory, 0.2)) as claims,
    ):
        for ticket in range(len(wrong)):
            claims.ask(ticket, "q", CLAIM)
        answers = next_answers(claims, len(wrong))
        assert sorted(ticket for ticket, _ in answers) == list(range(len(wrong)))
        assert all(isinstance(answer, (Offered, Refused)) for _, answer in answers)
        assert hand_over_works(directory, claims)


@pytest.mark.usefixtures("serving")
@pytest.mark.parametrize("right", [GivenBack(held=False), *slowly(OFFER, Refused("x"))])
def test_no_wrong_answer_says_that_blocks_were_held(
    directory: Path, right: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims_module, "ANSWER_S", 1.0)
    wrong = [one for one in wrong_messages(right) if one != packed(GivenBack(held=True))]
    asked = iter(wrong)
    with (
        closing(
            FakePrefillEngine(
                directory,
                lambda question: packed(OFFER) if isinstance(question, HandOverClaim) else next(asked, b""),
            )
        ),
        closing(Claims(directory, 5.0)) as claims,
    ):
        for ticket in range(len(wrong)):
            claims.ask(ticket, "q", CLAIM)
        assert {answer for _, answer in next_answers(claims, len(wrong))} == {OFFER}
        for ticket in range(len(wrong)):
            claims.give_back(ticket, read=True)
        answers = next_answers(claims, len(wrong))
        assert sorted(ticket for ticket, _ in answers) == list(range(len(wrong)))
        assert {answer for _, answer in answers} == {GivenBack(held=False)}
        assert hand_over_works(directory, claims)


@pytest.mark.usefixtures("serving")
def test_a_claim_that_cannot_be_sent_ends_alone(directory: Path) -> None:
    """A name that a client made up, or a layout, that no message can hold."""
    with closing(Claims(directory, 5.0)) as claims:
        unsendable = [
            HandOverClaim("\ud800", PROMPT, 32, LAYOUT),
            HandOverClaim("a", PROMPT, 1 << 70, LAYOUT),
            HandOverClaim("a", PROMPT, 32, {"model": "/models/\udcff"}),
        ]
        for ticket, claim in enumerate(unsendable):
            claims.ask(ticket, "p", claim)
            claims.give_back(ticket, read=False)
        claims.ask(7, "p", unsendable[0])
        found = dict(next_answers(claims, 4))
        assert sorted(found) == [0, 1, 2, 7]
        for answer in found.values():
            assert isinstance(answer, Refused)
            assert answer.reason.startswith("it cannot be asked: ")
        assert hand_over_works(directory, claims)


# Peers that are silent, or do not read.


@pytest.mark.usefixtures("serving")
def test_silent_connections_keep_nobody_out(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To make room for a new connection, the one that was silent longest is closed."""
    monkeypatch.setattr(service_module, "MOST_CONNECTIONS", 8)
    silent = [connected(directory) for _ in range(8)]
    assert hand_over_works(directory)
    assert is_closed(silent[0])
    assert not is_closed(silent[7], 0.05)
    for one in silent:
        one.close()


@pytest.mark.usefixtures("serving")
def test_who_is_silent_for_long_is_closed_unless_it_reads_what_it_has_claimed(
    directory: Path, table: LeaseTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A question that never becomes whole is silence, too."""
    monkeypatch.setattr(service_module, "SILENCE_S", 0.5)
    with connected(directory) as silent, connected(directory) as half, closing(Claims(directory, 5.0)) as own:
        own.ask(1, "p", CLAIM)
        assert next_answers(own, 1) == [(1, OFFER)]
        half.sendall(packed(CLAIM)[:-1])
        assert is_closed(silent)
        assert is_closed(half)
        time.sleep(0.8)
        own.give_back(1, read=True)
        assert next_answers(own, 1) == [(1, GivenBack(held=True))]
    assert table.take_ended() == [("a", LeaseEnd.TAKEN)]


@pytest.mark.usefixtures("serving")
def test_a_connection_that_reads_a_hand_over_is_not_closed_for_another_one(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "MOST_CONNECTIONS", 1)
    with closing(Claims(directory, 5.0)) as own:
        own.ask(1, "p", CLAIM)
        assert next_answers(own, 1) == [(1, OFFER)]
        with connected(directory) as late:
            assert is_closed(late)
        own.give_back(1, read=True)
        assert next_answers(own, 1) == [(1, GivenBack(held=True))]


@pytest.mark.usefixtures("serving")
def test_peers_that_ask_and_never_read_delay_nobody(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them asks until nothing more fits into the socket."""
    monkeypatch.setattr(claims_module, "ANSWER_S", 2.0)
    question = packed(HandOverClaim("unknown", PROMPT, 32, LAYOUT)) * 500
    flooding = [connected(directory) for _ in range(60)]

    def flood() -> None:
        for one in flooding:
            one.setblocking(False)
            with suppress(OSError):
                while True:
                    one.send(question)

    thread = Thread(target=flood)
    thread.start()
    assert hand_over_works(directory)
    thread.join()
    assert all(map(is_closed, flooding)), "who asks more than it waits for is closed"
    for one in flooding:
        one.close()


@pytest.mark.usefixtures("serving")
def test_a_long_answer_waits_for_its_reader_and_no_other_waits_for_it(
    directory: Path, table: LeaseTable
) -> None:
    """It is longer than what a socket holds. The reader gets all of it, and what it asked behind it."""
    long = Offered(1 << 20, (OfferedGroup(0, tuple(range(1 << 20))),))
    table.offer("long", PROMPT, 1 << 20)
    table.ready("long", long)
    with connected(directory) as slow:
        asked = HandOverClaim("long", PROMPT, 1 << 20, LAYOUT)
        slow.sendall(packed(asked) + packed(GiveBack("long", read=True)))
        assert hand_over_works(directory)
        expected = packed(long) + packed(GivenBack(held=True))
        received = bytearray()
        while len(received) < len(expected):
            received += slow.recv(1 << 12)
        assert received == expected


def test_who_does_not_read_a_long_answer_is_closed(
    serving: HandOverService, directory: Path, table: LeaseTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lease is out until then, so its time counts from the end of that."""
    monkeypatch.setattr(service_module, "SILENCE_S", 0.1)
    table.offer("long", PROMPT, 1 << 20)
    table.ready("long", Offered(1 << 20, (OfferedGroup(0, tuple(range(1 << 20))),)))
    with connected(directory) as slow:
        slow.sendall(packed(HandOverClaim("long", PROMPT, 1 << 20, LAYOUT)))
        while not table.has_claimed(1):
            time.sleep(0.001)
        table.revoke("long")
        until = time.monotonic() + 20
        while serving._readers and time.monotonic() < until:
            time.sleep(0.001)
        assert not serving._readers
    assert hand_over_works(directory)


def test_claims_of_silent_engines_take_no_more_connections_than_allowed(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims_module, "MOST_CONNECTIONS", 4)
    with closing(FakePrefillEngine(directory, lambda _: b"")), closing(Claims(directory, 5.0)) as claims:
        for ticket in range(6):
            claims.ask(ticket, "q", CLAIM)
        said = Refused("this engine claims 4 hand-overs already")
        assert next_answers(claims, 2) == [(4, said), (5, said)]
        claims.give_back(0, read=False)
        claims.ask(6, "q", CLAIM)
        assert claims.take_answers() == []


WITHOUT_DESCRIPTORS = """
import os, resource, socket, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_hand_over_peers import CLAIM, LAYOUT, OFFER, PROMPT, hand_over_works
from kvsm.tiers.hand_over.leases import LeaseTable
from kvsm.tiers.hand_over.service import HandOverService

directory, table = Path(sys.argv[1]), LeaseTable(60.0)
table.offer("a", PROMPT, 32)
table.ready("a", OFFER)
service = HandOverService(directory, "p", table, LAYOUT)
limit = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1, limit[1]))
print("ready", flush=True)
sys.stdin.readline()
began = time.process_time()
time.sleep(1.0)
print(time.process_time() - began, flush=True)
resource.setrlimit(resource.RLIMIT_NOFILE, limit)
print(hand_over_works(directory), flush=True)
"""


def test_an_engine_without_descriptors_waits_for_some_and_does_not_spin(directory: Path) -> None:
    """Others cannot connect meanwhile. Afterwards they can."""
    process = subprocess.Popen(
        [sys.executable, "-c", WITHOUT_DESCRIPTORS, str(directory), os.path.dirname(__file__)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        with connected(directory), connected(directory):
            process.stdin.write("go\n")
            process.stdin.flush()
            assert float(process.stdout.readline()) < 0.3
        assert process.stdout.readline() == "True\n"
        process.stdin.close()
