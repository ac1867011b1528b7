"""A reader of a log that is being written reads all of it up to some moment, and takes nothing for damage."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given
from hypothesis import strategies as st
from log_life import Life

from kvsm.core.log import LogEnd, LogReader

MOST_EVENTS = 12
CLOSE = 0


class Pauses:
    """What the writer does whenever the reader pauses.

    acts: for each pause the number of events that the writer appends; `CLOSE`: it closes the log.
    """

    def __init__(self, life: Life, acts: list[int | None]) -> None:
        self._life, self._acts, self.is_closed = life, acts, False

    def next(self) -> None:
        act = self._acts.pop(0) if self._acts else None
        if act is None or self.is_closed:
            return
        if act == CLOSE:
            self._life.writer.close()
            self.is_closed = True
        elif self._life.seq + act <= MOST_EVENTS:
            self._life.append(act)


@given(
    segment_bytes=st.sampled_from([1, 150, 1 << 20]),
    acts=st.lists(st.sampled_from([None, 1, 2, CLOSE]), max_size=2 * MOST_EVENTS),
)
def test_all_events_up_to_some_moment_are_read(segment_bytes: int, acts: list[int | None]) -> None:
    """The writer appends, begins segments and closes at any place where the reader can pause."""
    with TemporaryDirectory() as directory:
        life, seen = Life(Path(directory) / "log", segment_bytes=segment_bytes), []
        life.append(2)
        pauses, reader = Pauses(life, acts), LogReader(Path(directory) / "log")
        for segment in reader.segments():
            for batch in segment.batches():
                seen += [one.seq for one in batch]
                pauses.next()
            pauses.next()
        assert len(seen) >= 2
        assert seen == list(range(1, len(seen) + 1))
        assert reader.end in (LogEnd.OPEN, LogEnd.CLOSED)
        assert reader.end is LogEnd.OPEN or (pauses.is_closed and seen[-1] == life.seq)
        if not pauses.is_closed:
            life.writer.close()
