"""Hand-over between two engines: leases, the socket, claims, and the copies of a rank.

The promise: a reader that is told "held all along" has read blocks that nobody else could write, whatever
came between: the end of its time, a reset, another reader, the death of either side.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from kvsm.copies import HostCopyEngine, HostPool, VerifyingCopyEngine
from kvsm.core.plan import ImportJob, TransferJob
from kvsm.errors import ConfigError
from kvsm.events import Direction
from kvsm.tiers.hand_over import service
from kvsm.tiers.hand_over.claiming import Claims
from kvsm.tiers.hand_over.imports import PoolImports
from kvsm.tiers.hand_over.leases import LeaseEnd, LeaseTable
from kvsm.tiers.hand_over.peer_messages import (
    MOST_QUESTION_BYTES,
    Answer,
    GivenBack,
    HandOverClaim,
    Inbox,
    Offered,
    OfferedGroup,
    Pending,
    Refused,
    hand_over_directory,
    packed,
    pool_path,
    socket_path,
    why_not_alike,
)
from kvsm.tiers.hand_over.service import HandOverService

PROMPT, LAYOUT = b"digest of a prompt", {"dtype": "bfloat16", "ranks": "1"}
OFFER = Offered(32, (OfferedGroup(0, (4, 7)),))


def claim(name: str = "a", prompt: bytes = PROMPT, tokens: int = 32) -> HandOverClaim:
    return HandOverClaim(name, prompt, tokens, LAYOUT)


# The table.


class LeaseLife(RuleBasedStateMachine):
    """An engine with a few slots, and readers that look at them: every order of calls.

    `owner` says whose bytes a slot has. The engine gives a slot to somebody else only if the lease that holds
    it has ended. A reader remembers what it saw at its claim, and looks again when it is told "held".
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.table = LeaseTable(10.0, lambda: self.now)
        self.owner = dict.fromkeys(range(4), "")
        self.held: dict[str, int] = {}
        """Lease -> the slot that is pinned for it."""
        self.read: dict[tuple[str, int], str] = {}
        """(lease, reader) -> whose bytes it saw."""
        self.made = 0
        self.ends: dict[str, LeaseEnd] = {}

    numbers, readers = st.integers(0, 1), st.integers(1, 2)

    def name(self, number: int) -> str:
        """One of the last leases."""
        return str(max(self.made - number, 1))

    @rule(slot=st.integers(0, 3), is_stored=st.booleans())
    def offer(self, slot: int, is_stored: bool) -> None:
        if slot in self.held.values():
            return
        self.made += 1
        name = str(self.made)
        self.owner[slot], self.held[name] = name, slot
        self.table.offer(name, PROMPT, 32)
        if is_stored:
            self.ready(0)

    @rule(number=numbers)
    def ready(self, number: int) -> None:
        name = self.name(number)
        if name in self.held:
            self.table.ready(name, Offered(32, (OfferedGroup(0, (self.held[name],)),)))

    @rule(number=numbers)
    def the_engine_loses_the_block(self, number: int) -> None:
        """A reset: the slot may be written again at once."""
        name = self.name(number)
        if name in self.held:
            self.table.revoke(name)
            self.owner[self.held[name]] = "somebody else"

    @rule(number=numbers)
    def newer_ones_need_the_room(self, number: int) -> None:
        """The engine hears of the end before it uses the slot."""
        self.table.crowd_out(self.name(number))

    @rule(seconds=st.sampled_from([1.0, 9.0, 10.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(expire=st.booleans())
    def engine_steps(self, expire: bool) -> None:
        if expire:
            self.table.expire()
        for name, end in self.table.take_ended():
            assert name not in self.ends, "a lease ends once"
            self.ends[name] = end
            self.owner[self.held.pop(name)] = "somebody else"

    @rule(number=numbers, reader=readers)
    def claims(self, number: int, reader: int) -> None:
        name = self.name(number)
        answer = self.table.claim(claim(name), reader)
        if isinstance(answer, Offered):
            assert not any(lease == name for lease, _ in self.read), "a lease has one reader"
            self.read[name, reader] = self.owner[answer.groups[0].slots[0]]
            assert self.read[name, reader] == name

    @rule(number=numbers, reader=readers, read=st.booleans())
    def gives_back(self, number: int, reader: int, read: bool) -> None:
        name = self.name(number)
        slot = self.held.get(name)
        if self.table.give_back(name, reader, read=read).held:
            assert slot is not None
            assert (name, reader) in self.read, "only the reader gives it back"
            assert self.owner[slot] == name, "the slot was used again under its reader"

    @rule(reader=readers)
    def leaves(self, reader: int) -> None:
        self.table.leave(reader)

    @rule(number=numbers, knows=st.booleans())
    def declines(self, number: int, knows: bool) -> None:
        self.table.decline(claim(self.name(number), PROMPT if knows else b"guessed"))

    @invariant()
    def every_lease_ends_in_time(self) -> None:
        """Nothing stays pinned: after twice the time every lease has ended, whoever reads."""
        if not self.held:
            assert not self.table.has_ended()

    def teardown(self) -> None:
        self.now += 20.0
        self.table.expire()
        self.engine_steps(expire=True)
        assert not self.held


def test_a_confirmed_reader_has_read_blocks_that_nobody_else_could_write() -> None:
    """Claims, ends of time, resets, aborts and confirmations in every order."""
    run_state_machine_as_test(
        LeaseLife, settings=settings(max_examples=15, stateful_step_count=25, deadline=None)
    )


@pytest.mark.slow
def test_a_confirmed_reader_has_read_blocks_that_nobody_else_could_write_long() -> None:
    run_state_machine_as_test(
        LeaseLife, settings=settings(max_examples=400, stateful_step_count=50, deadline=None)
    )


class OneLease:
    """One lease and two readers, to try all orders of calls.

    written: whether somebody else may have written the slot.
    saw: the readers that were offered it.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.table = LeaseTable(10.0, lambda: self.now)
        self.table.offer("a", PROMPT, 32)
        self.written, self.is_known = False, True
        self.saw: set[int] = set()

    def ready(self) -> None:
        if self.is_known:
            self.table.ready("a", OFFER)

    def lose(self) -> None:
        if self.is_known:
            self.table.revoke("a")
            self.written = True

    def crowd_out(self) -> None:
        lease = self.table._leases.get("a")
        is_read = lease is not None and lease.reader != 0
        assert self.table.crowd_out("a") is not is_read, "a reader is not disturbed for newer hand-overs"

    def wait(self) -> None:
        self.now = min(self.now + 5.0, 30.0)

    def step(self) -> None:
        self.table.expire()
        if self.table.take_ended():
            assert self.is_known, "a lease ends once"
            self.is_known, self.written = False, True

    def claim(self, reader: int) -> None:
        if isinstance(self.table.claim(claim("a"), reader), Offered):
            assert not self.written
            assert not self.saw, "a lease has one reader"
            self.saw.add(reader)

    def give_back(self, reader: int, read: bool) -> None:
        if self.table.give_back("a", reader, read=read).held:
            assert reader in self.saw, "only its reader gives it back"
            assert not self.written, "the slot was used again under its reader"

    def state(self) -> object:
        lease = self.table._leases.get("a")
        left = None if lease is None else (lease.state, lease.offer, lease.reader, lease.until - self.now)
        return left, tuple(self.table._ended), self.written, self.is_known, frozenset(self.saw)


CALLS: dict[str, Callable[[OneLease], None]] = {
    "ready": OneLease.ready,
    "lose": OneLease.lose,
    "wait": OneLease.wait,
    "step": OneLease.step,
    "decline": lambda one: one.table.decline(claim("a")),
    "crowd out": OneLease.crowd_out,
    **{f"claim {n}": lambda one, n=n: one.claim(n) for n in (1, 2)},  # type: ignore[misc]
    **{f"read {n}": lambda one, n=n: one.give_back(n, True) for n in (1, 2)},  # type: ignore[misc]
    **{f"drop {n}": lambda one, n=n: one.give_back(n, False) for n in (1, 2)},  # type: ignore[misc]
    **{f"leave {n}": lambda one, n=n: one.table.leave(n) for n in (1, 2)},  # type: ignore[misc]
}


def after(calls: Sequence[str]) -> OneLease:
    one = OneLease()
    for call in calls:
        CALLS[call](one)
    return one


def test_every_order_of_calls_of_one_lease() -> None:
    """All states of a lease with two readers, and every call in each of them."""
    known, paths = {OneLease().state()}, [()]  # type: ignore[var-annotated]
    for path in paths:
        for call in CALLS:
            longer = (*path, call)
            state = after(longer).state()
            if state not in known:
                known.add(state)
                paths.append(longer)
        at_last = after([*path, "wait", "wait", "wait", "wait", "step"])
        assert not at_last.is_known, f"the lease never ends after {path}"
    assert len(known) > 40


@pytest.fixture
def table() -> LeaseTable:
    leases = LeaseTable(10.0)
    leases.offer("a", PROMPT, 32)
    return leases


def test_a_lease_is_claimed_once_by_who_knows_the_prompt(table: LeaseTable) -> None:
    """A client that sends the name with another prompt would be served other people's KV cache."""
    another = Refused("it is of another prompt, adapter, image, salt or version of the weights")
    assert table.claim(claim(prompt=b"another"), 1) == another
    assert table.claim(claim(tokens=16), 1) == another
    assert table.claim(claim(), 1) == Pending()
    table.ready("a", OFFER)
    assert table.claim(claim(), 1) == OFFER
    assert table.claim(claim(), 2) == Refused("another engine reads it already")
    assert table.give_back("a", 2, read=True) == GivenBack(held=False)
    assert [table.has_claimed(reader) for reader in (1, 2)] == [True, False]
    assert table.give_back("a", 1, read=True) == GivenBack(held=True)
    assert not table.has_claimed(1)
    assert table.take_ended() == [("a", LeaseEnd.TAKEN)]


# The two threads.


@pytest.fixture
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = hand_over_directory(str(tmp_path_factory.mktemp("h") / "m"))
    assert found is not None
    return found


def answers(claims: Claims, count: int = 1) -> list[Answer]:
    """The next answers, as they come."""
    found: list[Answer] = []
    until = time.monotonic() + 20
    while len(found) < count and time.monotonic() < until:
        found += [answer for _, answer in claims.take_answers()]
        time.sleep(0.001)
    return found


@pytest.fixture
def pair(directory: Path, table: LeaseTable) -> Iterator[tuple[HandOverService, Claims]]:
    with (
        closing(HandOverService(directory, "p", table, LAYOUT)) as serving,
        closing(Claims(directory, 5.0)) as claims,
    ):
        yield serving, claims


def until_ended(table: LeaseTable) -> list[tuple[str, LeaseEnd]]:
    until = time.monotonic() + 20
    while not table.has_ended() and time.monotonic() < until:
        time.sleep(0.001)
    return table.take_ended()


def test_a_claim_waits_for_the_last_store_and_is_confirmed_after_the_copy(
    pair: tuple[HandOverService, Claims], table: LeaseTable
) -> None:
    _, claims = pair
    claims.ask(1, "p", claim())
    time.sleep(0.02)
    assert claims.take_answers() == []
    table.ready("a", OFFER)
    assert answers(claims) == [OFFER]
    claims.give_back(1, read=True)
    assert answers(claims) == [GivenBack(held=True)]
    assert table.take_ended() == [("a", LeaseEnd.TAKEN)]


def test_a_lease_that_was_revoked_under_its_reader_was_not_held(
    pair: tuple[HandOverService, Claims], table: LeaseTable
) -> None:
    """A reset of the prefill engine while the decode engine copies."""
    table.ready("a", OFFER)
    pair[1].ask(1, "p", claim())
    assert answers(pair[1]) == [OFFER]
    table.revoke("a")
    pair[1].give_back(1, read=True)
    assert answers(pair[1]) == [GivenBack(held=False)]


@pytest.mark.parametrize(("had", "end"), [(True, LeaseEnd.NOT_NEEDED), (False, LeaseEnd.GIVEN_UP)])
def test_a_decode_engine_says_whether_it_had_what_it_gives_back(
    pair: tuple[HandOverService, Claims], table: LeaseTable, had: bool, end: LeaseEnd
) -> None:
    """A prompt that the decode engine has already is no failure of the hand-over."""
    table.ready("a", OFFER)
    pair[1].ask(1, "p", claim())
    assert answers(pair[1]) == [OFFER]
    pair[1].give_back(1, read=False, had=had)
    assert until_ended(table) == [("a", end)]


@pytest.mark.parametrize("is_ready", [True, False])
def test_what_the_decode_engine_wants_no_more_is_given_up_at_once(
    pair: tuple[HandOverService, Claims], table: LeaseTable, is_ready: bool
) -> None:
    """An aborted request must not keep blocks pinned until their time is up."""
    if is_ready:
        table.ready("a", OFFER)
    pair[1].ask(1, "p", claim())
    pair[1].give_back(1, read=False)
    assert until_ended(table) == [("a", LeaseEnd.GIVEN_UP)]
    assert [one for one in pair[1].take_answers() if one[1] != OFFER] == []


def test_engines_whose_blocks_differ_are_told_how(
    pair: tuple[HandOverService, Claims], table: LeaseTable
) -> None:
    pair[1].ask(1, "p", HandOverClaim("a", PROMPT, 32, {**LAYOUT, "ranks": "2"}))
    [answer] = answers(pair[1])
    assert answer == Refused("its blocks differ from the decode engine's: ranks is '1', and '2' there")
    assert until_ended(table) == [("a", LeaseEnd.GIVEN_UP)]
    assert why_not_alike(LAYOUT, dict(LAYOUT)) is None


def test_a_prefill_engine_that_is_not_there_is_a_refusal(directory: Path) -> None:
    with closing(Claims(directory, 5.0)) as claims:
        claims.ask(1, "../../etc/passwd", claim())
        [answer] = answers(claims)
        assert isinstance(answer, Refused)
        assert answer.reason.startswith("it is not there: FileNotFoundError")
    claims.ask(2, "p", claim())
    claims.give_back(2, read=True)
    assert answers(claims, 2) == [Refused("this engine claims nothing any more"), GivenBack(held=False)]


@pytest.mark.parametrize("when", ["before the offer", "after the offer"])
def test_a_prefill_engine_that_stops_is_a_refusal_and_nothing_was_held(
    directory: Path, table: LeaseTable, when: str
) -> None:
    """The connection is closed: by its shutdown, or by the kernel after kill -9."""
    serving = HandOverService(directory, "p", table, LAYOUT)
    with closing(Claims(directory, 5.0)) as claims:
        if when == "after the offer":
            table.ready("a", OFFER)
        claims.ask(1, "p", claim())
        if when == "after the offer":
            assert answers(claims) == [OFFER]
        serving.close()
        assert not socket_path(directory, "p").exists()
        claims.give_back(1, read=True)
        [last] = answers(claims)[-1:]
        assert last == GivenBack(held=False) or isinstance(last, Refused)


READER = """
import sys, time
from pathlib import Path
from kvsm.tiers.hand_over.claiming import Claims
from kvsm.tiers.hand_over.peer_messages import HandOverClaim
claims = Claims(Path(sys.argv[1]), 5.0)
claims.ask(1, "p", HandOverClaim("a", b"digest of a prompt", 32, {"dtype": "bfloat16", "ranks": "1"}))
while not claims.take_answers():
    time.sleep(0.001)
print("claimed", flush=True)
time.sleep(60)
"""


@pytest.mark.usefixtures("pair")
def test_a_killed_decode_engine_gives_up_what_it_claimed(directory: Path, table: LeaseTable) -> None:
    """kill -9: the kernel closes its connection."""
    table.ready("a", OFFER)
    process = subprocess.Popen(
        [sys.executable, "-c", READER, str(directory)], stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "claimed\n"
        assert not table.has_ended()
        process.send_signal(signal.SIGKILL)
    assert until_ended(table) == [("a", LeaseEnd.GIVEN_UP)]


def speak(directory: Path, content: bytes) -> bytes:
    """Say something to the prefill engine, and hear the rest."""
    with socket.socket(socket.AF_UNIX) as one:
        one.settimeout(20)
        one.connect(str(socket_path(directory, "p")))
        if content:
            one.sendall(content)
        return one.recv(100)


@pytest.mark.parametrize("content", [b"\xff" * 8, b"\0\0\0\1\xc1", b"\0\0\0\4\x81\xa1a\1"])
def test_nonsense_closes_its_own_connection_and_no_other(
    pair: tuple[HandOverService, Claims], directory: Path, table: LeaseTable, content: bytes
) -> None:
    table.ready("a", OFFER)
    assert speak(directory, content) == b""
    pair[1].ask(1, "p", claim())
    assert answers(pair[1]) == [OFFER]


def test_a_message_may_come_in_pieces() -> None:
    inbox, content = Inbox(MOST_QUESTION_BYTES), packed(claim()) + packed(claim("b"))
    found = []
    for place in range(len(content)):
        inbox.add(content[place : place + 1])
        if (question := inbox.question()) is not None:
            found.append(question)
    assert found == [claim(), claim("b")]


@pytest.mark.usefixtures("pair")
def test_another_user_is_not_answered(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel says whose process connects; the directory and the mode keep others away before that."""
    assert (directory.stat().st_mode & 0o777, socket_path(directory, "p").stat().st_mode & 0o777) == (
        0o700,
        0o600,
    )
    monkeypatch.setattr(service, "_user_of", lambda _: os.geteuid() + 1)
    assert speak(directory, b"") == b""


def test_one_engine_has_a_name_and_a_dead_one_leaves_it_to_the_next(
    directory: Path, table: LeaseTable
) -> None:
    with (
        closing(HandOverService(directory, "p", table, LAYOUT)),
        pytest.raises(ConfigError, match="another engine with this engine_id listens there"),
    ):
        HandOverService(directory, "p", table, LAYOUT)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(socket_path(directory, "p")))
    HandOverService(directory, "p", table, LAYOUT).close()


def test_a_directory_that_is_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give a shorter hand_over_directory"):
        socket_path(tmp_path / ("x" * 100), "p")


# The copies of a rank.


@pytest.fixture
def partner(directory: Path) -> Iterator[HostPool]:
    with HostPool(6, 64, path=pool_path(directory, "p", 1)) as pool:
        pool.blocks[:] = np.arange(6, dtype=np.uint8)[:, None] + 1
        yield pool


def until_reported(imports: PoolImports) -> Any:
    until = time.monotonic() + 20
    while not (reports := imports.poll()) and time.monotonic() < until:
        time.sleep(0.001)
    return reports


@pytest.mark.usefixtures("partner")
def test_a_rank_copies_its_share_and_unmaps_the_pool(directory: Path) -> None:
    """The memory of an engine that has ended would stay taken while anybody maps it."""
    own, arrived = np.zeros((5, 64), np.uint8), []
    imports = PoolImports(1, directory, own, arrived.extend)
    imports.start([ImportJob(9, "p", (4, 2), (0, 3))])
    [report] = until_reported(imports)
    assert (report.transfer, report.worker, report.good) == (9, 1, True)
    assert own[:, 0].tolist() == [5, 0, 0, 3, 0]
    assert arrived == [0, 3]
    mapped = Path("/proc/self/maps").read_text().count(str(pool_path(directory, "p", 1)))
    assert mapped == 1  # by its owner, which is this process too


@pytest.mark.usefixtures("partner")
@pytest.mark.parametrize(
    ("engine", "source", "host", "said"),
    [
        ("q", (0,), 64, "cannot be opened for a host pool: No such file"),
        ("p", (0,), 32, "is a host pool of 6 blocks for 1 ranks, 64 bytes each"),
        ("p", (6,), 64, "6"),
    ],
)
def test_a_copy_that_cannot_be_is_reported_as_bad(
    directory: Path, engine: str, source: tuple[int, ...], host: int, said: str
) -> None:
    """Failure is not success (S6): the request is computed instead."""
    imports = PoolImports(1, directory, np.zeros((5, host), np.uint8))
    imports.start([ImportJob(9, engine, source, (0,))])
    [report] = until_reported(imports)
    assert not report.good
    assert said in report.error
    imports.close()


@pytest.mark.usefixtures("partner")
def test_imported_blocks_get_the_checksums_that_their_loads_compare(directory: Path) -> None:
    """Data integrity (S15), also in a slot that had another block's checksum before."""
    device, own = np.zeros((2, 64), np.uint8), np.zeros((5, 64), np.uint8)
    with closing(VerifyingCopyEngine(HostCopyEngine(device, own), own, device)) as engine:
        imports = PoolImports(1, directory, own, engine.took_over)

        def ended(job: TransferJob) -> bool:
            engine.submit(job)
            engine.drain()
            return engine.poll()[0].good

        assert ended(TransferJob(1, Direction.STORE, (0,), (3,)))
        imports.start([ImportJob(2, "p", (2,), (3,))])
        assert until_reported(imports)[0].good
        assert ended(TransferJob(3, Direction.LOAD, (1,), (3,)))
        own[3] ^= 1
        assert not ended(TransferJob(4, Direction.LOAD, (1,), (3,)))
