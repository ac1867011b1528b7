"""Damaged logs: cut, zeroed or flipped anywhere, a log gives its valid prefix and says where it ends."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from log_life import Life, frame_ends, names, raw_frame, read, write, write_open

from examples import some
from kvsm.core.log import LogReader
from kvsm.core.log.frames import HEAD, MARK_OFFSET, PREAMBLE_BYTES, encode_preamble, segment_path
from kvsm.errors import LogDamaged
from kvsm.events import OffloadingEvent


def check_torn(path: Path, name: Path, ends: list[int], written: list[OffloadingEvent], kept: int) -> None:
    """The last segment has `kept` intact bytes: its whole frames are read, and the rest is reported.

    ends: of the head, and of each frame.
    """
    events, error, torn = read(path)
    whole = max((index for index, end in enumerate(ends) if end <= kept), default=0)
    assert error is None
    assert events == written[: len(written) - (len(ends) - 1 - whole)]  # One event a frame in this segment.
    if kept in ends and kept == name.stat().st_size:
        assert torn is None
    else:
        assert torn is not None
        assert torn.path == str(name)
        assert torn.seq == len(events) + 1
        assert torn.offset in ([ends[whole]] if kept >= ends[0] else [0, PREAMBLE_BYTES])
        assert torn.offset + torn.bytes_cut == name.stat().st_size


def write_two_segments(path: Path, close: bool, **options: Any) -> list[OffloadingEvent]:
    """Events 1 to 3 in the first segment, 4 and 5 in the second, one a frame."""
    life = Life(path, **{"segment_bytes": 120, **options})
    written = [one for _ in range(5) for one in life.append(1)]
    if close:
        life.writer.close()
    else:
        life.kill()
    assert names(path) == [1, 4]
    return written


@pytest.fixture
def two_segments(tmp_path: Path) -> tuple[Path, list[OffloadingEvent]]:
    """A log of two segments that was closed."""
    return tmp_path / "log", write_two_segments(tmp_path / "log", close=True)


@pytest.fixture
def open_segments(tmp_path: Path) -> tuple[Path, list[OffloadingEvent]]:
    """The same, and its writer was killed."""
    return tmp_path / "log", write_two_segments(tmp_path / "log", close=False)


def test_every_truncation_gives_the_valid_prefix(open_segments: tuple[Path, list[OffloadingEvent]]) -> None:
    """Rule 6: a log that is cut in its last segment reads up to its last whole frame, and says so."""
    path, written = open_segments
    name = sorted(path.iterdir())[-1]
    data, ends = name.read_bytes(), frame_ends(name)
    for kept in range(len(data) + 1):
        name.write_bytes(data[:kept])
        check_torn(path, name, ends, written, kept)


@pytest.mark.parametrize("zeros", [1, 7, 200, 5000])
def test_every_zero_filled_tail_gives_the_valid_prefix(
    open_segments: tuple[Path, list[OffloadingEvent]], zeros: int
) -> None:
    """Rule 6: bytes that a file system reserved and never wrote are a torn end, wherever they begin."""
    path, written = open_segments
    name = sorted(path.iterdir())[-1]
    data, ends = name.read_bytes(), frame_ends(name)
    for kept in range(len(data) + 1):
        name.write_bytes(data[:kept] + bytes(zeros))
        check_torn(
            path, name, ends, written, kept + (len(data[kept:]) and _leading_zeros(data[kept:], zeros))
        )


def _leading_zeros(lost: bytes, zeros: int) -> int:
    """How many of the lost bytes were zeros before, and so are intact."""
    lost = lost[:zeros]
    return len(lost) - len(lost.lstrip(b"\0"))


def test_every_truncation_of_a_closed_log_is_damage(
    two_segments: tuple[Path, list[OffloadingEvent]],
) -> None:
    """Whoever closed the log wrote all of it. A segment without its preamble cannot tell that: it is torn."""
    path, written = two_segments
    name = sorted(path.iterdir())[-1]
    data, ends = name.read_bytes(), frame_ends(name)
    for kept in range(len(data)):
        name.write_bytes(data[:kept])
        events, error, torn = read(path)
        assert events == written[: 3 + sum(end <= kept for end in ends[1:-1])]
        if kept < PREAMBLE_BYTES:
            assert torn is not None
        else:
            assert isinstance(error, LogDamaged)
            assert (error.path, error.seq) == (str(name), len(events) + 1)


def test_every_truncation_of_an_earlier_segment_is_damage(
    two_segments: tuple[Path, list[OffloadingEvent]],
) -> None:
    """A segment is complete before the next one opens: what is missing there was lost later."""
    path, written = two_segments
    name = sorted(path.iterdir())[0]
    data = name.read_bytes()
    for kept in range(len(data)):
        name.write_bytes(data[:kept])
        events, error, _ = read(path)
        assert isinstance(error, LogDamaged)
        assert (error.path, error.seq) == (str(name), len(events) + 1)
        assert error.offset <= kept
        assert events == written[: len(events)]


@pytest.mark.parametrize("bits", [(1,), pytest.param(range(8), marks=pytest.mark.slow)], ids=["one", "each"])
def test_a_flipped_bit_of_any_byte_is_reported_with_its_place(
    two_segments: tuple[Path, list[OffloadingEvent]], bits: Sequence[int]
) -> None:
    """A flipped bit gives no other events, and no fewer in silence. It is never taken for a torn end."""
    path, written = two_segments
    for name in sorted(path.iterdir()):
        data = name.read_bytes()
        for offset in range(len(data)):
            for bit in bits:
                name.write_bytes(data[:offset] + bytes([data[offset] ^ 1 << bit]) + data[offset + 1 :])
                events, error, _ = read(path)
                assert isinstance(error, LogDamaged), (name, offset, bit)
                assert error.path == str(name)
                assert error.offset <= offset
                assert str(error).startswith(f"{name}: damaged at byte {error.offset}, event {error.seq}: ")
                assert events == written[: len(events)]
                assert error.seq == len(events) + 1 or error.offset == MARK_OFFSET
        name.write_bytes(data)


@pytest.mark.parametrize("durability", ["none", "every"])
def test_every_flipped_byte_of_an_open_log_is_told(tmp_path: Path, durability: str) -> None:
    """What is not proven to have been synced may be a torn end, but it is never passed over in silence."""
    path = tmp_path / "log"
    written = write_two_segments(path, close=False, durability=durability)
    for name in sorted(path.iterdir()):
        data, ends = name.read_bytes(), frame_ends(name)
        for offset in some(range(len(data))):
            name.write_bytes(data[:offset] + bytes([data[offset] ^ 0x55]) + data[offset + 1 :])
            events, error, torn = read(path)
            assert events == written[: len(events)]
            assert (error is None) != (torn is None)
            if torn is not None:
                assert (name.name, torn.path) == (segment_path(path, 4).name, str(name))
                assert torn.offset <= offset
                # With `every` the next frame proves that this one was on the disk.
                assert durability == "none" or offset >= ends[-2]
        name.write_bytes(data)


@pytest.mark.parametrize("value", [0x00, 0xFF, 0xC1])
def test_every_overwritten_byte_is_reported(
    two_segments: tuple[Path, list[OffloadingEvent]], value: int
) -> None:
    """The same for whole bytes: all bytes of a closed log were written."""
    path, written = two_segments
    for name in sorted(path.iterdir()):
        data = name.read_bytes()
        for offset in some([offset for offset in range(len(data)) if data[offset] != value]):
            name.write_bytes(data[:offset] + bytes([value]) + data[offset + 1 :])
            events, error, _ = read(path)
            assert events == written[: len(events)]
            assert isinstance(error, LogDamaged)
            assert (error.path, error.offset <= offset) == (str(name), True)
        name.write_bytes(data)


def test_a_damaged_length_is_not_taken_for_a_tear(tmp_path: Path) -> None:
    """The header's own checksum tells a length that points past the file's end."""
    write(tmp_path / "log", [2])
    name = segment_path(tmp_path / "log", 1)
    data = bytearray(name.read_bytes())
    data[frame_ends(name)[0] + 6] = 0xFF
    name.write_bytes(data)
    _, error, _ = read(tmp_path / "log")
    assert isinstance(error, LogDamaged)
    assert "header" in error.reason


def test_zeros_in_the_middle_are_damage(tmp_path: Path) -> None:
    """All bytes of a closed log were written."""
    write(tmp_path / "log", [1, 1, 1])
    name = segment_path(tmp_path / "log", 1)
    data, ends = name.read_bytes(), frame_ends(name)
    name.write_bytes(data[: ends[1]] + bytes(ends[2] - ends[1]) + data[ends[2] :])
    events, error, torn = read(tmp_path / "log")
    assert (len(events), torn) == (1, None)
    assert isinstance(error, LogDamaged)
    assert (error.offset, error.seq) == (ends[1], 2)


@pytest.mark.parametrize(
    ("frame", "newer"),
    [
        (raw_frame([[99, 2, 0, 0]], 1, 2), True),  # a kind
        (raw_frame([[21, 2, 0, 0], [99, 3, 0, 0]], 2, 2), True),
        (raw_frame([[16, 2, 0, 0, 1, 0, True, "struck by lightning"]], 1, 2), True),  # a reason
        (raw_frame([[21, 2, -1, 0]], 1, 2), False),
        (raw_frame([[0, 2, 0, 0]], 1, 2), False),
        (raw_frame([["21", 2, 0, 0]], 1, 2), False),
        (raw_frame([[5, 2, 0, 0, "r", list(range(17))]], 1, 2), False),
        (raw_frame([[2, 2, 0, 0]], 1, 2), False),
        (raw_frame([], 1, 2), False),
        (raw_frame({"a": 1}, 1, 2), False),
        (raw_frame(7, 1, 2), False),
    ],
)
def test_a_newer_kvsm_is_suspected_only_for_what_this_one_does_not_know(
    tmp_path: Path, frame: bytes, newer: bool
) -> None:
    """For a value that no kvsm writes, the advice to use a newer kvsm would mislead."""
    write_open(tmp_path / "log", [1])
    with segment_path(tmp_path / "log", 1).open("ab") as file:
        file.write(frame)
    _, error, _ = read(tmp_path / "log")
    assert isinstance(error, LogDamaged)
    assert ("a newer kvsm may have written it" in str(error)) == newer


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (raw_frame([[21, 3, 0, 0]], 1, 3), "starts with event 3"),
        (raw_frame([[21, 2, 0, 0], [21, 4, 0, 0]], 2, 2), "gap"),
        (raw_frame([[21, 2, 0, 0]], 2, 2), "do not match its header"),
        (raw_frame([[99, 2, 0, 0]], 1, 2), "a newer kvsm may have written it"),
        (raw_frame([[21, 2, -1, 0]], 1, 2), "no record that this kvsm knows"),
        (raw_frame([1, "", {}, 1, 0, b""], 0, 2, HEAD), "second head"),
        (raw_frame([[21, 2, 0, 0]], 1, 2, flags=2), "cannot be decompressed"),
    ],
)
def test_a_whole_frame_that_does_not_belong_is_damage(tmp_path: Path, frame: bytes, reason: str) -> None:
    """Right checksums are not enough: numbers, kinds and fields are checked too."""
    write_open(tmp_path / "log", [1])
    name = segment_path(tmp_path / "log", 1)
    end = name.stat().st_size
    with name.open("ab") as file:
        file.write(frame)
    events, error, _ = read(tmp_path / "log")
    assert len(events) == 1
    assert isinstance(error, LogDamaged)
    assert (error.offset, error.seq) == (end, 2)
    assert reason in str(error)


SMALL = {"host_blocks": 1, "device_blocks": 1}


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (raw_frame([3, "", SMALL, 5, 0], 0, 1, HEAD), "after event 5"),
        (raw_frame([3, "", SMALL, 0, 0, b"x"], 0, 1, HEAD), "another run"),
        (raw_frame([2, "", SMALL, 0, 0], 0, 1, HEAD), "version 2 of the format, and the preamble version 3"),
        (raw_frame([[21, 1, 0, 0]], 1, 1), "does not open with its head"),
    ],
)
def test_a_segment_that_opens_with_another_head_is_damage(tmp_path: Path, first: bytes, reason: str) -> None:
    segment_path(tmp_path, 1).write_bytes(encode_preamble() + first)
    with pytest.raises(LogDamaged, match=reason):
        _ = LogReader(tmp_path).head


def test_more_bytes_behind_the_end_of_a_log_are_damage(
    two_segments: tuple[Path, list[OffloadingEvent]],
) -> None:
    """No event is missing, but the writer did not write them."""
    path, written = two_segments
    last = names(path)[-1]
    with segment_path(path, last).open("ab") as file:
        file.write(bytes(3))
    events, error, _ = read(path)
    assert events == written
    assert isinstance(error, LogDamaged)
    assert error.path == str(segment_path(path, last))


def test_what_a_segment_has_behind_the_begin_of_the_next_one_is_not_read(
    two_segments: tuple[Path, list[OffloadingEvent]],
) -> None:
    """A segment that is being made takes the events over. A power loss may leave any bytes of them there."""
    path, written = two_segments
    with segment_path(path, 1).open("ab") as file:
        file.write(bytes(3))
    assert read(path) == (written, None, None)


def test_a_missing_segment_is_damage(tmp_path: Path) -> None:
    """The writer marks every gap that it makes."""
    write(tmp_path / "log", [1, 1, 1], segment_bytes=1)
    segment_path(tmp_path / "log", 2).unlink()
    events, error, _ = read(tmp_path / "log")
    assert len(events) == 1
    assert isinstance(error, LogDamaged)
    assert "its last event is 1, and it should be 2" in str(error)


def test_a_renamed_segment_is_damage(tmp_path: Path) -> None:
    write(tmp_path / "log", [1])
    segment_path(tmp_path / "log", 1).rename(segment_path(tmp_path / "log", 2))
    _, error, _ = read(tmp_path / "log")
    assert isinstance(error, LogDamaged)
