"""Compressed events: a frame may refer to those before it in its segment, and to no other."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from log_life import CONFIG, Life, event, names, read
from log_openings import slow_openings

from kvsm.core.log import LogReader, LogWriter, WholeState
from kvsm.core.log.event_stream import EventCompressor, EventDecompressor
from kvsm.core.log.frames import segment_path
from kvsm.events import OffersCounted

KEPT, LOST, RESTARTED = range(3)
FRAMES = st.lists(
    st.tuples(
        st.binary(min_size=1, max_size=300) | st.just(b"what comes again and again " * 5),
        st.sampled_from([KEPT, KEPT, LOST, RESTARTED]),
    ),
    max_size=12,
)


@given(FRAMES)
def test_what_is_kept_is_read_whatever_was_lost(frames: list[tuple[bytes, int]]) -> None:
    """A frame whose making was interrupted is made again. A reader never sees the first one."""
    writer, reader = EventCompressor(), EventDecompressor()
    for content, fate in frames:
        if fate == RESTARTED:
            writer.restart()
        packed, is_fresh = writer.compress(content)
        if fate == LOST:
            continue
        writer.keep()
        assert reader.decompress(packed, is_fresh, len(content)) == content


def key_events(first: int, keys: list[bytes], count: int) -> list[OffersCounted]:
    """Events that name these keys, a few each."""
    size = len(keys) // count
    return [
        OffersCounted(first + place, 0, 0, tuple(keys[place * size : (place + 1) * size]))
        for place in range(count)
    ]


def test_a_key_that_comes_back_within_a_segment_takes_few_bytes(tmp_path: Path) -> None:
    """A prompt that was evicted is stored again, long after."""
    random = Random(1)
    prompt, others = ([random.randbytes(32) for _ in range(count)] for count in (400, 40_000))
    sizes, seq = [], 1
    with LogWriter(tmp_path, config=CONFIG, snapshot=WholeState, durability="none", compress=True) as writer:
        for keys in (prompt, others, prompt):
            before = writer.bytes_written
            for one in key_events(seq, keys, 20):
                writer.append(one)
            writer.flush()
            seq += 20
            sizes.append(writer.bytes_written - before)
    assert sizes[0] > 400 * 32
    assert sizes[2] < 400 * 6
    assert [key for one in LogReader(tmp_path).events() for key in one.keys] == [*prompt, *others, *prompt]


@pytest.mark.parametrize("slow", [False, True])
def test_each_segment_is_read_without_the_ones_before(tmp_path: Path, slow: bool) -> None:
    """Events that came while a segment opened stand in it, and refer to none that does not."""
    with slow_openings(slow):
        life = Life(tmp_path, segment_bytes=400, compress=True)
        for _ in range(80):
            life.append(6)
        life.writer.close()
    assert len(names(tmp_path)) > 3
    for first, following in zip(names(tmp_path), names(tmp_path)[1:], strict=False):
        segment_path(tmp_path, first).unlink()
        assert read(tmp_path)[:2] == ([event(seq) for seq in range(following, life.seq + 1)], None)


def test_an_interrupt_between_making_a_frame_and_noting_it_harms_no_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The frame is made a second time, and the stream has seen its events twice."""
    life = Life(tmp_path, compress=True)
    life.append(6)
    with monkeypatch.context() as patch:
        patch.setattr("kvsm.core.log.writer._NextFrame", interrupted)
        with pytest.raises(KeyboardInterrupt):
            life.append(6)
    for _ in range(3):
        life.append(6)
    life.writer.close()
    assert read(tmp_path) == ([event(seq) for seq in range(1, life.seq + 1)], None, None)


def interrupted(*_: object) -> None:
    """Ctrl-C."""
    raise KeyboardInterrupt
