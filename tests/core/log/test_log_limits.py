"""A small hostile log takes no more memory or time than its files hold: a reader believes no claim."""

from __future__ import annotations

import os
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec
import pytest
import zstandard
from click.testing import CliRunner
from log_life import CONFIG, RUN, Life, names, raw_frame, read, write, write_open

from kvsm.cli import main
from kvsm.core.log import LogReader, LogWriter, WholeState
from kvsm.core.log.frames import COMPRESSED, END, FRESH, HEADER, TAIL, content_limit, run_mark, segment_path
from kvsm.errors import LogDamaged, LogError
from kvsm.events import StepEnded

MiB = 1 << 20


@contextmanager
def at_most(memory_bytes: int, seconds: float = 2.0) -> Iterator[None]:
    """What runs inside allocates and takes no more than this."""
    began = time.process_time()
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak <= memory_bytes
    assert time.process_time() - began <= seconds


def frame_of(payload: bytes, flags: int = 0, length: int | None = None) -> bytes:
    """A frame of one event, number 2, with any payload, and any length in its header; the CRCs are right."""
    length = len(payload) if length is None else length
    covered = HEADER.pack(run_mark(RUN), length, flags, 1, 2, 0, crc32(payload), 0)[:-4]
    return covered + crc32(covered).to_bytes(4, "little") + payload


def log_with(path: Path, more: bytes) -> Path:
    """A log of one event that was not closed, with more bytes behind it. Returns the segment."""
    write_open(path, [1])
    with segment_path(path, 1).open("ab") as file:
        file.write(more)
    return segment_path(path, 1)


def check_refused(path: Path, frame: bytes, reason: str) -> None:
    """Behind one event, such a frame is damage, and nothing is allocated for it."""
    log_with(path, frame)
    with at_most(MiB // 2):
        events, error, _ = read(path)
    assert len(events) == 1
    assert isinstance(error, LogDamaged)
    assert reason in str(error)


# -------------------------------------------------------------------------------------- what is no file


@pytest.mark.parametrize("command", ["replay", "verify"])
def test_a_pipe_in_the_place_of_a_segment_is_refused_at_once(tmp_path: Path, command: str) -> None:
    """To open a pipe would wait for somebody who writes to it."""
    (tmp_path / "log").mkdir()
    os.mkfifo(segment_path(tmp_path / "log", 1))
    result = CliRunner().invoke(main, [command, str(tmp_path / "log")])
    assert result.exit_code == 2
    assert "0001.kvsm: not a regular file; move it away" in result.stderr


@pytest.mark.parametrize("kind", ["pipe", "device", "directory"])
def test_only_regular_files_are_read(tmp_path: Path, kind: str) -> None:
    (tmp_path / "log").mkdir()
    name = segment_path(tmp_path / "log", 1)
    if kind == "pipe":
        os.mkfifo(name)
    elif kind == "device":
        name.symlink_to("/dev/zero")
    else:
        name.mkdir()
    with at_most(MiB), pytest.raises(LogError, match="not a regular file"):
        list(LogReader(tmp_path / "log").events())


def test_links_to_logs_and_to_segments_are_followed(tmp_path: Path) -> None:
    """People keep old segments on another disk."""
    written = write(tmp_path / "log", [1, 1], segment_bytes=1)
    first = segment_path(tmp_path / "log", 1)
    first.rename(tmp_path / "archived")
    first.symlink_to(tmp_path / "archived")
    (tmp_path / "link").symlink_to(tmp_path / "log")
    assert read(tmp_path / "link") == (written, None, None)


# ------------------------------------------------------------------------------------------ what it claims


@pytest.mark.parametrize("length", [1 << 20, (1 << 32) - 1])
def test_a_length_that_the_file_does_not_hold_is_not_allocated(tmp_path: Path, length: int) -> None:
    log_with(tmp_path / "log", frame_of(b"x", length=length))
    with at_most(MiB // 2):
        events, error, torn = read(tmp_path / "log")
    assert (len(events), error) == (1, None)
    assert torn is not None


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (
            zstandard.compress(bytes(64 * MiB)),
            "it claims 67108864 bytes, and 2067 bytes may stand for 1114720",
        ),
        (zstandard.ZstdCompressor(write_content_size=False).compress(bytes(64 * MiB)), "an unknown size"),
        (zstandard.compress(b"\x90") + b"more", "unused data"),
        (zstandard.compress(b"\x90" * 100)[:-3], "cannot be decompressed"),
        (b"", "cannot be decompressed"),
    ],
)
def test_a_small_frame_does_not_decompress_to_a_large_one(
    tmp_path: Path, payload: bytes, reason: str
) -> None:
    check_refused(tmp_path / "log", frame_of(payload + END, COMPRESSED | TAIL), reason)


def stream_of(content: bytes, claim: int | None = None, window_log: int = 20) -> bytes:
    """The payload of a frame of events that begins a stream."""
    parameters = zstandard.ZstdCompressionParameters(window_log=window_log)
    stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    packed = stream.compress(content) + stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
    return (len(content) if claim is None else claim).to_bytes(4, "little") + packed


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (stream_of(bytes(64 * MiB)), "it claims 67108864 bytes, and 2067 bytes may stand for 1114720"),
        (stream_of(bytes(64 * MiB), claim=1000), "no record that this kvsm knows"),
        (stream_of(bytes(900), claim=1000), "it stands for other than the 1000 bytes that it claims"),
        (stream_of(bytes(900), window_log=30), "cannot be decompressed"),
        (b"\x09\x00\x00\x00 no stream", "cannot be decompressed"),
        (b"\x09\x00", "it stands for other than the 9 bytes that it claims"),
    ],
)
def test_events_do_not_decompress_to_more_than_they_claim(
    tmp_path: Path, payload: bytes, reason: str
) -> None:
    check_refused(tmp_path / "log", frame_of(payload + END, COMPRESSED | FRESH), reason)


def test_a_frame_that_goes_on_where_no_stream_was_begun_is_refused(tmp_path: Path) -> None:
    frame = frame_of(stream_of(b"\x90") + END, COMPRESSED)
    check_refused(tmp_path / "log", frame, "it goes on where no stream was begun")


def test_what_shrinks_too_much_is_stored_as_it_is(tmp_path: Path) -> None:
    """So a reader may refuse what a writer never makes."""
    state = bytes(5 * MiB)
    options: dict[str, Any] = {"compress": True, "segment_bytes": 1, "durability": "none"}
    with LogWriter(tmp_path / "log", config=CONFIG, snapshot=lambda: WholeState(state), **options) as writer:
        for seq in (1, 2):
            writer.append(StepEnded(seq, seq, 1))
            while len(names(tmp_path / "log")) == seq:
                writer.flush()
    assert [segment.head.snapshot for segment in LogReader(tmp_path / "log").segments()] == [
        b"",
        state,
        state,
    ]
    assert len(zstandard.compress(state)) < 1000 < content_limit(1000) < len(state)


WORST = {
    "events": [[21, 2, 0, 0]] * 60_000,
    "owners": [[10, 2, 0, 0, [["", 0]] * 100_000, [], [], []]],
    "keys": [[10, 2, 0, 0, [], [b"ab"] * 75_000, [], []]],
    "offers": [[23, 2, 0, 0, [["", [], []]] * 75_000]],
    "ids": [[5, 2, 0, 0, "r", [300] * 100_000]],
}
"""Frames of 300 kB that become as many Python objects as possible."""


@pytest.mark.parametrize("shape", WORST)
def test_python_objects_of_a_frame_take_at_most_30_times_its_size(tmp_path: Path, shape: str) -> None:
    """This bounds what a log takes, because a reader holds one frame."""
    payload = msgspec.msgpack.encode(WORST[shape]) + END
    log_with(tmp_path / "log", frame_of(payload))
    with at_most(30 * len(payload) + MiB // 2):
        read(tmp_path / "log")


def test_deep_records_are_damage(tmp_path: Path) -> None:
    """A decoder that calls itself for each level must not end the reader."""
    log_with(tmp_path / "log", frame_of(b"\x91\x9f\x15\x02\x00\x00" + b"\x91" * 100_000 + END))
    _, error, _ = read(tmp_path / "log")
    assert isinstance(error, LogDamaged)
    assert "no record that this kvsm knows" in str(error)


# ------------------------------------------------------------------------------------------------- holes


@pytest.mark.parametrize("place", ["alone", "last", "first"])
def test_a_huge_file_of_holes_is_judged_at_once(tmp_path: Path, place: str) -> None:
    """It takes no room on the disk, and a search through its zeros would take hours."""
    if place == "alone":
        (tmp_path / "log").mkdir()
        segment_path(tmp_path / "log", 1).touch()
    else:
        write_open(tmp_path / "log", [1, 1], segment_bytes=1)
    segments = names(tmp_path / "log")
    name = segment_path(tmp_path / "log", segments[0 if place == "first" else -1])
    os.truncate(name, 1 << 40)
    with at_most(4 * MiB):
        events, error, torn = read(tmp_path / "log")
    if place == "first":
        assert (len(events), error, torn) == (2, None, None)  # The next segment begins before the hole.
    else:
        assert len(events) == (0 if place == "alone" else 2)
        assert torn is not None
        assert torn.offset + torn.bytes_cut == 1 << 40


def test_a_payload_of_holes_is_not_read(tmp_path: Path) -> None:
    name = log_with(tmp_path / "log", frame_of(b"", length=3 << 30))
    os.truncate(name, 4 << 30)
    with at_most(MiB):
        _, error, _ = read(tmp_path / "log")
    assert isinstance(error, LogDamaged)
    assert "most of a frame of 3221225472 bytes is a hole" in str(error)


def test_the_search_behind_damage_is_linear(tmp_path: Path) -> None:
    """Bytes that look like the begin of a frame at each place take no second a MiB."""
    log_with(tmp_path / "log", run_mark(RUN).to_bytes(4, "little") * (MiB // 4))
    began = time.process_time()
    events, error, torn = read(tmp_path / "log")
    assert time.process_time() - began < 1
    assert (len(events), error) == (1, None)
    assert torn is not None


def test_a_frame_of_another_run_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    life = Life(tmp_path / "log")
    life.append(1)
    life.kill()
    with segment_path(tmp_path / "log", 1).open("ab") as file:
        file.write(raw_frame([[21, 2, 0, 0]], 1, 2, run=bytes(16)))
    _, error, _ = read(tmp_path / "log")
    assert isinstance(error, LogDamaged)
    assert error.reason == "a frame of another run or life stands here"
