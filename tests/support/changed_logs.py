"""Real logs as plain values, which tests of hostile logs change and write again with right checksums."""

from __future__ import annotations

import random
import resource
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from click.testing import Result
from log_life import raw_frame
from replay_life import Life, key, random_life

from kvsm.core.ledger.snapshot import snapshot
from kvsm.core.log import LogReader
from kvsm.core.log.frames import (
    CLOSED,
    HEAD,
    MARK,
    MARK_OFFSET,
    TAIL,
    encode_mark,
    encode_preamble,
    segment_path,
)
from kvsm.core.policies import POLICIES
from kvsm.errors import KvsmError
from kvsm.events import KINDS
from kvsm.explain.story import rebuild, verify_log

EVENT_FIELDS = ("tag", "seq", "step", "wall_ns")
HUGE = (2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1)
NAMES = ("", "r0", "nobody", "[red]r1[/red]", "a\nkvsm: no violation", "\x1b[31m", "\u202e")


class PlainSegment(NamedTuple):
    """A segment as plain values: its head, the events of each frame, and its tail (empty if it has none)."""

    head: list[Any]
    frames: list[list[list[Any]]]
    tail: list[Any]


PlainLog = list[PlainSegment]


def plain(value: object) -> Any:
    """Return the value as a log encodes it, without classes."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value))


def read_plain(directory: Path) -> PlainLog:
    """Read a whole log as plain values."""
    log = []
    for segment in LogReader(directory).segments():
        frames = [plain(batch) for batch in segment.batches()]
        log.append(PlainSegment(plain(segment.head), frames, plain(segment.tail) or []))
    return log


def write_plain(directory: Path, log: PlainLog) -> Path:
    """Write plain values as a log whose checksums are right, whatever the values are."""
    directory.mkdir(parents=True, exist_ok=True)
    for number, (head, frames, tail) in enumerate(log):
        seq, run = head[3], head[5] if isinstance(head[5], bytes) else b""
        first = seq + 1 if isinstance(seq, int) and 0 <= seq < 2**63 else number + 1
        data = raw_frame(head, 0, first, HEAD, run)
        following = first
        for events in frames:
            data += raw_frame(events, min(len(events), 2**16 - 1), following, run=run)
            following += len(events)
        closed = bool(tail) and number == len(log) - 1
        if tail:
            data += raw_frame(tail, 0, following, TAIL, run)
        start = encode_preamble()[:MARK_OFFSET] + (encode_mark(CLOSED) if closed else bytes(MARK.size))
        segment_path(directory, first).write_bytes(start + data)
    return directory


def copied(log: PlainLog) -> PlainLog:
    """Return a copy that can be changed."""
    return [PlainSegment(*plain(segment)) for segment in log]


def changed(log: PlainLog, rng: random.Random) -> PlainLog:
    """Return the log with one to three changes."""
    log = copied(log)
    for _ in range(rng.choice((1, 1, 2, 3))):
        rng.choice(CHANGES)(log, rng)
    return log


# What is changed.


def _frames(log: PlainLog) -> list[list[list[Any]]]:
    return [frame for segment in log for frame in segment.frames if frame]


def change_field(log: PlainLog, rng: random.Random) -> None:
    """Change a field of an event, sometimes its number or its kind."""
    event = rng.choice(rng.choice(_frames(log)))
    own = range(len(EVENT_FIELDS), len(event))
    place = rng.choice(own) if own and rng.random() < 0.9 else rng.randrange(len(event))
    event[place] = other_value(event[place], rng)


def change_kind(log: PlainLog, rng: random.Random) -> None:
    """Give an event another kind, with the same fields, or with more or fewer."""
    event = rng.choice(rng.choice(_frames(log)))
    event[0] = rng.randint(0, len(KINDS) + 2)
    if rng.random() < 0.3:
        del event[rng.randrange(1, len(event)) :]
    elif rng.random() < 0.3:
        event.append(other_value(0, rng))


def reorder(log: PlainLog, rng: random.Random) -> None:
    """Drop, double or exchange events. Their numbers mostly stay in order."""
    frame = rng.choice(_frames(log))
    place = rng.randrange(len(frame))
    how = rng.randrange(4)
    if how == 0 and len(frame) > 1:
        del frame[place]
    elif how == 1:
        frame.insert(rng.randrange(len(frame) + 1), plain(frame[place]))
    elif how == 2:
        frame.insert(rng.randrange(len(frame) + 1), plain(rng.choice(rng.choice(_frames(log)))))
    else:
        other = rng.randrange(len(frame))
        frame[place], frame[other] = frame[other], frame[place]
    if rng.random() < 0.9:
        renumber(log)


def renumber(log: PlainLog) -> None:
    """Number all events, beginning with the first head's number."""
    seq = log[0].head[3] if isinstance(log[0].head[3], int) and 0 <= log[0].head[3] < 2**63 else 0
    for segment in log:
        segment.head[3] = seq
        for frame in segment.frames:
            for event in frame:
                seq += 1
                if len(event) > 1:
                    event[1] = seq


def change_config(log: PlainLog, rng: random.Random) -> None:
    """Change the configuration: in a head, in the first event, or in all places."""
    heads = [segment.head for segment in log]
    opened = log[0].frames[0][0] if log[0].frames and log[0].frames[0] else None
    places = [head[2] for head in heads]
    if opened is not None and len(opened) > 4:
        places.append(opened[4])
    places = [one for one in places if isinstance(one, dict)]
    if not places:
        return
    if rng.random() < 0.3:
        places = [rng.choice(places)]
    name = rng.choice(sorted(places[0]))
    value = other_value(places[0][name], rng)
    for place in places:
        place[name] = value


def change_head(log: PlainLog, rng: random.Random) -> None:
    """Change a field of a head."""
    head = rng.choice(log).head
    place = rng.randrange(len(head))
    head[place] = other_value(head[place], rng)


def change_tail(log: PlainLog, rng: random.Random) -> None:
    """Change the tail of a segment."""
    tail = rng.choice(log).tail
    if tail:
        place = rng.randrange(len(tail))
        tail[place] = other_value(tail[place] or "", rng)


def change_snapshot(log: PlainLog, rng: random.Random) -> None:
    """Change something inside the snapshot in a head."""
    heads = [segment.head for segment in log if segment.head[9]]
    if not heads:
        return
    head = rng.choice(heads)
    try:
        state = msgspec.msgpack.decode(head[9])
    except (msgspec.DecodeError, TypeError):
        return
    if isinstance(state, list) and state:
        change_somewhere(state, rng)
        head[9] = msgspec.msgpack.encode(state)


def change_somewhere(state: list[Any], rng: random.Random) -> None:
    """Change nested lists: one of the lists, or one value deep inside."""
    place = rng.randrange(len(state))
    inside = state[place]
    if isinstance(inside, list) and inside and rng.random() < 0.8:
        change_somewhere(inside, rng)
    else:
        state[place] = other_value(inside, rng)


CHANGES: Sequence[Callable[[PlainLog, random.Random], None]] = (
    *[change_field] * 6,
    *[reorder] * 3,
    change_kind,
    change_config,
    change_head,
    change_tail,
    *[change_snapshot] * 3,
)


# Other values.


def other_value(value: Any, rng: random.Random) -> Any:
    """Return a value near this one, or of its type, or of any type."""
    if rng.random() < 0.08:
        return rng.choice((None, 0, -1, True, 1.5, "x", b"x", [], {}, [[]], 2**64 - 1))
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return max(
            -(2**63), min(2**64 - 1, rng.choice((0, 1, -1, value + 1, value - 1, 2 * value, 7, 20, *HUGE)))
        )
    if isinstance(value, str):
        return rng.choice((*NAMES, f"r{rng.randrange(8)}", value + "x", value[:-1]))
    if isinstance(value, bytes):
        return other_bytes(value, rng)
    if isinstance(value, list):
        return other_list(value, rng)
    if isinstance(value, dict):
        return {key: other_value(one, rng) if rng.random() < 0.2 else one for key, one in value.items()}
    return rng.choice((b"", b"k", [], 0))


def other_bytes(value: bytes, rng: random.Random) -> bytes:
    """Return the bytes cut, extended or with one byte changed, or quite different bytes."""
    place = rng.randrange(len(value)) if value else 0
    return rng.choice(
        (
            b"",
            value[:place],
            value + b"\x00",
            value + value,
            value[:place] + bytes([rng.randrange(256)]) + value[place + 1 :],
            b"\x02" + bytes(2 * rng.choice((0, 5, 17, 40))),
            b"\x03" + bytes(range(60)),
            b"\x04" + b"\xff" * 80,
            rng.randbytes(rng.randrange(30)),
        )
    )


def other_list(value: list[Any], rng: random.Random) -> Any:
    """Return the list with an element dropped, doubled or changed, with many more, or packed ids instead."""
    value = list(value)
    how = rng.randrange(7)
    place = rng.randrange(len(value)) if value else 0
    if how == 0 and value:
        del value[place]
    elif how == 1 and value:
        value.append(value[place])
    elif how == 2:
        value.append(rng.choice((0, 1, 5, 9, *HUGE)))
    elif how == 3 and value:
        value[place] = other_value(value[place], rng)
    elif how == 4:
        value.reverse()
    elif how == 5:
        return rng.choice(([], list(range(20)), [0, 1, 2], b"\x02" + bytes(34), b"\x03\x00", b"\x00\x00"))
    elif value:
        value[place] = other_value(value[place], rng)
        rng.shuffle(value)
    return value


def long_life(log: Path) -> Life:
    """Run a core with batches that the log packs: stores, loads and evictions of twenty blocks."""
    life = Life(log, {"segment_bytes": 3000}, host_blocks=45, device_blocks=60, defer_ticks=0)
    for number in range(3):
        keys = [key(100 * number + place) for place in range(20)]
        life.stored(f"r{number}", keys, range(20))
        life.core.match("r0", keys)
        life.ended(life.core.prepare_load("r0", range(20, 40)))
        life.core.finish("r0")
        life.core.rewrite(range(20, 40))
        life.core.end_step()
    life.close()
    return life


def lives(directory: Path) -> list[PlainLog]:
    """Return logs of all policies and kinds of configuration, some in several segments."""
    logs = []
    for number, policy in enumerate(POLICIES):
        config = ({}, {"blocks_per_chunk": 2}, {"store_threshold": 2})[number % 3]
        writer = {"segment_bytes": 1500 if number % 2 else 1 << 30}
        random_life(number, 40, directory / policy, writer=writer, policy=policy, **config).close()
        logs.append(read_plain(directory / policy))
    long_life(directory / "long")
    return [*logs, read_plain(directory / "long")]


SECONDS = 10
"""Time limit per log (s). Most take milliseconds."""


@contextmanager
def bounded(what: str) -> Iterator[None]:
    """Fail a test that takes too long for one log."""

    def too_long(*_: object) -> None:
        raise AssertionError(f"{what} takes more than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def ended_well(result: Result, what: str) -> int:
    """Return a command's exit code, after checks that it ended normally and its lines are printable."""
    assert result.exception is None or isinstance(result.exception, SystemExit), what
    assert result.exit_code in (0, 1, 2), what
    for line in (*result.stdout.splitlines(), *result.stderr.splitlines()):
        assert line.isprintable(), what
    assert result.exit_code == 0 or result.stderr or result.stdout, f"{what}: no reason is given"
    return result.exit_code


def folded(log: Path) -> bool:
    try:
        snapshot(rebuild(log).ledger)
    except KvsmError:
        return False
    return True


def verified_good(log: Path) -> bool:
    try:
        found = verify_log(log)
    except KvsmError:
        return False
    return not found.violations and found.damage is None
