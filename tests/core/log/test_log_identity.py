"""A log says which run wrote it and how it ended: what is cut or mixed is refused or told (rule 6)."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from log_life import CONFIG, Life, directory, disk, frame_ends, names, write, write_open
from replay_life import random_life

from examples import examples
from kvsm.check.explore.counterexample import save_log
from kvsm.cli import main
from kvsm.core.log import LogEnd, LogReader, LogWriter, WholeState
from kvsm.core.log.fold import condition_of
from kvsm.core.log.frames import segment_path
from kvsm.core.offloader import Offloader
from kvsm.errors import IllegalTransition, InvalidEvent, LogDamaged, LogError, LogWriteFailed
from kvsm.events import HitMatched, OffloadConfig, OffloadingEvent
from kvsm.explain.story import rebuild, verify_log
from kvsm.serving import RunOptions, run_workload
from kvsm.testing.recording import save

SMALL = OffloadConfig(host_blocks=4, device_blocks=4)
OTHER_RUN = bytes(range(100, 116))
LIFE = [2, 1, 3, 1, 1, 2, 1, 1, 4, 1]


class Account(NamedTuple):
    """What a reader gives of a log: its events, the error that stopped it, and what it tells."""

    events: list[OffloadingEvent]
    error: str | None
    notes: list[str]

    @property
    def sound(self) -> bool:
        """Whether the reader finds nothing wrong."""
        return self.error is None and not self.notes


def account(path: Path) -> Account:
    reader = LogReader(path)
    events: list[OffloadingEvent] = []
    try:
        for segment in reader.segments():
            events += segment.events()
        return Account(events, None, condition_of(reader).notes())
    except LogError as error:
        return Account(events, str(error), [])


Cut = tuple[int, int]
"""A boundary of frames: the number of the file, and how many of its frames stand before the boundary."""


class Pieces(NamedTuple):
    """The files of a log: the first event of each, its opening (preamble and head), and its other frames."""

    files: list[tuple[int, list[bytes]]]

    @classmethod
    def of(cls, path: Path) -> Pieces:
        files = []
        for first in names(path):
            data = segment_path(path, first).read_bytes()
            cuts = [0, *frame_ends(segment_path(path, first))]
            files.append((first, [data[start:end] for start, end in pairwise(cuts)]))
        return cls(files)

    def write(self, path: Path) -> Path:
        if path.exists():
            shutil.rmtree(path)
        path.mkdir()
        for first, frames in self.files:
            segment_path(path, first).write_bytes(b"".join(frames))
        return path

    def cuts(self) -> Iterator[Cut]:
        for number, (_, frames) in enumerate(self.files):
            yield from ((number, count) for count in range(len(frames) + 1))

    def before(self, cut: Cut) -> Pieces:
        """The log up to a boundary. A file of which nothing is left is left out."""
        first, frames = self.files[cut[0]]
        return Pieces([*self.files[: cut[0]], *([(first, frames[: cut[1]])] if cut[1] else [])])

    def then(self, other: Pieces, cut: Cut) -> Pieces:
        """This log, and behind it what another one has after a boundary. A file that both have is joined."""
        first, frames = other.files[cut[0]]
        files = list(self.files)
        if files and files[-1][0] == first:
            files[-1] = (first, files[-1][1] + frames[cut[1] :])
        elif frames[cut[1] :]:
            files.append((first, frames[cut[1] :]))
        return Pieces([*files, *(one for one in other.files[cut[0] + 1 :] if one[0] > files[-1][0])])

    def frames(self) -> int:
        return sum(len(frames) for _, frames in self.files)


@settings(max_examples=examples(30), deadline=None)
@given(
    st.lists(st.integers(1, 5), max_size=12),
    st.integers(1, 400),
    st.none() | st.integers(1300, 2400),
    st.booleans(),
    st.sampled_from(["none", "every"]),
)
def test_nothing_is_told_of_an_untouched_closed_log(
    frames: list[int], segment_bytes: int, more_bytes: int | None, compress: bool, durability: str
) -> None:
    """Rule 6: whatever retention dropped, a note means that something is wrong."""
    with directory() as path:
        max_bytes = None if more_bytes is None else 2 * segment_bytes + more_bytes
        options: dict[str, Any] = {"compress": compress, "durability": durability}
        write(path, frames, segment_bytes=segment_bytes, max_bytes=max_bytes, **options)
        assert account(path).sound


@pytest.mark.parametrize("seed", range(40))
def test_retention_tells_of_all_that_it_deletes(tmp_path: Path, seed: int) -> None:
    """Snapshots that grow and frames larger than planned make it delete more than a head says."""
    chance = random.Random(seed)
    state = [chance.randrange(10, 2000)]

    def grown() -> WholeState:
        state[0] = min(20_000, state[0] * chance.choice([1, 1, 3]))
        return WholeState(bytes(state[0]))

    options: dict[str, Any] = {
        "segment_bytes": chance.randrange(500, 9000),
        "max_bytes": 40_000,
        "durability": "none",
    }
    with LogWriter(tmp_path, config=CONFIG, snapshot=grown, on_failure="continue", **options) as log:
        for seq in range(1, 100):
            log.append(HitMatched(seq, 0, 0, "r", (), bytes(chance.choice([10, 100, 5000]))))
            if chance.random() < 0.5:
                log.flush()
    assert log.dropped or account(tmp_path).sound


@pytest.mark.parametrize("max_bytes", [None, 2500])
def test_every_cut_at_a_frame_boundary_is_refused_or_told(tmp_path: Path, max_bytes: int | None) -> None:
    """Rule 6: whole frames and right checksums do not hide that the end of a closed log is gone."""
    written = write(tmp_path / "log", LIFE, segment_bytes=200, max_bytes=max_bytes)
    whole = Pieces.of(tmp_path / "log")
    assert len(whole.files) > 2
    first = whole.files[0][0]
    for cut in list(whole.cuts())[1:-1]:
        left = whole.before(cut)
        found = account(left.write(tmp_path / "cut"))
        assert found.events == written[first - 1 :][: len(found.events)]
        if left.frames() < whole.frames():
            assert not found.sound, cut


def test_a_log_that_was_not_closed_is_told_wherever_it_is_cut(tmp_path: Path) -> None:
    """A killed engine, a running one and a lost end look alike. All three are told."""
    write_open(tmp_path / "log", LIFE, segment_bytes=200)
    whole = Pieces.of(tmp_path / "log")
    for cut in list(whole.cuts())[1:]:
        assert not account(whole.before(cut).write(tmp_path / "cut")).sound, cut


@pytest.mark.parametrize("max_bytes", [None, 2700, 3000])
def test_every_removed_set_of_segments_is_refused_or_told(tmp_path: Path, max_bytes: int | None) -> None:
    """Rule 6: the first, the last, or any in the middle. Only retention deletes without a word."""
    write(tmp_path / "log", LIFE, segment_bytes=150, max_bytes=max_bytes)
    whole = Pieces.of(tmp_path / "log")
    assert len(whole.files) > 3
    for count in range(1, len(whole.files)):
        for kept in combinations(whole.files, count):
            assert not account(Pieces(list(kept)).write(tmp_path / "left")).sound, [one[0] for one in kept]


def two_runs(tmp_path: Path, **options: Any) -> tuple[Pieces, Pieces]:
    """Two runs with the same events in the same frames. Only the run differs."""
    write(tmp_path / "one", LIFE, segment_bytes=200, **options)
    write(tmp_path / "other", LIFE, segment_bytes=200, run=OTHER_RUN, **options)
    return Pieces.of(tmp_path / "one"), Pieces.of(tmp_path / "other")


def test_every_splice_of_two_runs_is_refused(tmp_path: Path) -> None:
    """Whole segments or frames of another run, with right numbers and checksums, are not believed."""
    one, other = two_runs(tmp_path)
    cuts = list(one.cuts())
    for cut in cuts[1:-1]:
        left = one.before(cut)
        for behind in {cut, cuts[-2], cuts[max(1, cuts.index(cut) - 1)], (len(one.files) - 1, 0)}:
            joined = left.then(other, behind)
            if joined.frames() > left.frames():
                found = account(joined.write(tmp_path / "joined"))
                assert found.error is not None, (cut, behind)


def test_a_frame_of_another_run_is_refused_wherever_it_stands(tmp_path: Path) -> None:
    one, other = two_runs(tmp_path)
    for number, (first, frames) in enumerate(one.files):
        for place in range(1, len(frames)):
            mixed = [*frames[:place], other.files[number][1][place], *frames[place + 1 :]]
            files = [*one.files[:number], (first, mixed), *one.files[number + 1 :]]
            found = account(Pieces(files).write(tmp_path / "mixed"))
            assert found.error is not None
            assert found.error.endswith("a frame of another run or life stands here")


def test_a_run_has_an_id_of_its_own(tmp_path: Path) -> None:
    """Without the option it is random, and all segments of a run share it."""
    for name in ("one", "other"):
        write(tmp_path / name, [1, 1], segment_bytes=1, run=None)
    runs = [
        [segment.head.run for segment in LogReader(tmp_path / name).segments()] for name in ("one", "other")
    ]
    assert [len(set(ids)) for ids in runs] == [1, 1]
    assert runs[0][0] != runs[1][0]


# --------------------------------------------------------------------------------------- how a log ends


def end_of(path: Path) -> tuple[LogEnd, str | None]:
    reader = LogReader(path)
    for segment in reader.segments():
        assert reader.end is LogEnd.NOT_REACHED
        list(segment.batches())
    return reader.end, reader.error


def test_how_a_log_ends_is_told(tmp_path: Path) -> None:
    write(tmp_path / "closed", [1, 1])
    assert end_of(tmp_path / "closed") == (LogEnd.CLOSED, None)
    write_open(tmp_path / "killed", [1, 1])
    assert end_of(tmp_path / "killed") == (LogEnd.OPEN, None)
    write(tmp_path / "cut", [1, 1], segment_bytes=1)
    segment_path(tmp_path / "cut", 3).unlink()
    assert end_of(tmp_path / "cut") == (LogEnd.MISSING, None)
    with disk(1 << 20) as limited:
        life = Life(tmp_path / "broken", on_failure="continue")
        limited.free = 0
        life.append(1)
        life.writer.close()
    assert end_of(tmp_path / "broken") == (LogEnd.BROKEN, None)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("no such block"), "ValueError: no such block"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (LogError("this says all"), "this says all"),
        (ValueError("x" * 10_000), "ValueError: " + "x" * 1988),
        (ValueError("half \ud83d"), "ValueError: half \\ud83d"),
    ],
)
def test_a_log_says_with_which_error_its_run_ended(tmp_path: Path, error: BaseException, text: str) -> None:
    """`with` hands the exception to `close`. All events before it are there."""
    life = Life(tmp_path / "log")
    written = life.append(3)
    with pytest.raises(type(error)), life.writer:
        raise error
    assert end_of(tmp_path / "log") == (LogEnd.STOPPED, text)
    assert account(tmp_path / "log") == Account(written, None, [f"the log was closed after an error: {text}"])


def test_a_writer_that_stopped_writes_why_if_there_is_room_by_then(tmp_path: Path) -> None:
    with disk(1 << 20) as limited:
        life = Life(tmp_path / "log")
        written = life.append(2)
        limited.free = 10
        with pytest.raises(LogWriteFailed):
            life.append(1)
        limited.free = 1000
        with pytest.raises(LogWriteFailed):
            life.writer.close()
    end, error = end_of(tmp_path / "log")
    assert end is LogEnd.STOPPED
    assert error is not None
    assert "event 3 could not be written" in error
    assert account(tmp_path / "log").events == written


def test_a_full_disk_at_the_close_leaves_a_log_that_was_not_closed(tmp_path: Path) -> None:
    """All events are there. With `stop` the caller hears that the end could not be written."""
    for choice in ("stop", "continue"):
        with disk(1 << 20) as limited:
            life = Life(tmp_path / choice, on_failure=choice)
            written = life.append(2)
            limited.free = 10
            if choice == "stop":
                with pytest.raises(LogWriteFailed, match="all events are written, but not how the run ended"):
                    life.writer.close()
            else:
                life.writer.close()
        found = account(tmp_path / choice)
        assert (found.events, found.error) == (written, None)
        assert [note.split(":")[0] for note in found.notes] == ["the log was not closed"]


def test_a_segment_whose_successor_cannot_open_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tail is taken back. The log that comes of it has no fault."""
    life = Life(tmp_path / "log", on_failure="continue", segment_bytes=1)
    with monkeypatch.context() as patch:

        def publish(*_: object) -> None:
            raise OSError(5, "no")

        patch.setattr("kvsm.core.log.writer.SegmentFile.publish", publish)
        written = life.append(1)
        assert names(tmp_path / "log") == [1]
        assert account(tmp_path / "log").notes
        written += life.append(1)
    written += life.append(1)
    life.writer.close()
    assert account(tmp_path / "log") == Account(written, None, [])
    assert life.writer.bytes_written == sum(one.stat().st_size for one in (tmp_path / "log").iterdir())


def test_a_reader_of_a_live_log_goes_on_in_the_segment_that_opened_meanwhile(tmp_path: Path) -> None:
    """A tail that announces a segment is no sign of a missing one if the segment is there by then."""
    life = Life(tmp_path / "log", segment_bytes=60)
    written = life.append(1)
    reader = LogReader(tmp_path / "log")
    seen: list[OffloadingEvent] = []
    for segment in reader.segments():
        if not seen:
            written += life.append(5)
            written += life.append(1)
        seen += segment.events()
    assert len(names(tmp_path / "log")) > 1
    assert seen == written
    assert reader.end is LogEnd.OPEN
    life.writer.close()


def test_names_of_segments_have_ascii_digits(tmp_path: Path) -> None:
    """`int` and some patterns also read other digits, and two names would mean one segment."""
    write(tmp_path / "log", [1])
    name = segment_path(tmp_path / "log", 2)
    (tmp_path / "log" / (name.stem.replace("0", "\u0660") + ".kvsm")).touch()
    with pytest.raises(LogError, match="not the name of a segment"):
        LogReader(tmp_path / "log")


# ------------------------------------------------------------------------------- verify and replay agree


def check_agreement(path: Path) -> bool:
    """`replay` and `verify` say the same about a log. Returns whether they find nothing wrong."""
    found = verify_log(path)
    if found.damage is not None:
        with pytest.raises(LogDamaged) as caught:
            rebuild(path)
        assert str(caught.value) == found.damage
        return False
    if found.violations:
        with pytest.raises((IllegalTransition, InvalidEvent, LogDamaged)):
            rebuild(path)
        return False
    rebuilt = rebuild(path)
    assert rebuilt.condition == found.condition
    return found.good and not found.condition.notes()


def check_two_real_runs(tmp_path: Path, seed: int, stride: int) -> None:
    """Logs of two runs of the same core, cut, and joined at every boundary: none is taken for a whole log."""
    pieces = []
    for name, number in (("one", seed), ("other", seed + 1)):
        random_life(number, 250, tmp_path / name, writer={"segment_bytes": 4000}).close()
        assert check_agreement(tmp_path / name)
        pieces.append(Pieces.of(tmp_path / name))
    one, other = pieces
    for number, cut in enumerate(list(one.cuts())[1:-1:stride]):
        left = one.before(cut)
        if left.frames() < one.frames():
            assert not check_agreement(left.write(tmp_path / "log"))
        behind = list(other.cuts())[1:-1][number % (len(list(other.cuts())) - 2)]
        joined = left.then(other, behind)
        if joined.frames() > left.frames():
            assert not check_agreement(joined.write(tmp_path / "log"))


def test_replay_and_verify_agree_on_cut_and_joined_logs(tmp_path: Path) -> None:
    check_two_real_runs(tmp_path, 0, 9)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(0, 20, 2))
def test_replay_and_verify_agree_on_cut_and_joined_logs_at_length(tmp_path: Path, seed: int) -> None:
    check_two_real_runs(tmp_path, seed, 1)


@pytest.mark.parametrize("command", ["replay", "verify"])
def test_commands_say_that_a_log_was_not_closed_and_exit_0(tmp_path: Path, command: str) -> None:
    random_life(1, 100, tmp_path / "log").kill()
    result = CliRunner().invoke(main, [command, str(tmp_path / "log")])
    assert result.exit_code == 0
    assert "kvsm: the log was not closed: the engine was killed or still runs" in result.stderr


@pytest.mark.parametrize("command", ["replay", "verify"])
def test_commands_say_that_first_segments_are_missing_and_exit_1(tmp_path: Path, command: str) -> None:
    random_life(1, 300, tmp_path / "log", writer={"segment_bytes": 4000}).close()
    first, second, *_ = names(tmp_path / "log")
    segment_path(tmp_path / "log", first).unlink()
    result = CliRunner().invoke(main, [command, str(tmp_path / "log")])
    assert result.exit_code == 1
    assert f"events 1 to {second - 1} are not in the log: the first segments are missing" in result.stderr


# --------------------------------------------------------------------------------- who writes logs in kvsm


def log_of_a_run(path: Path) -> None:
    options = RunOptions(requests=20, device_blocks=64, host_blocks=64, copies="simulated", log=str(path))
    run_workload(options)


def log_of_an_offloader(path: Path) -> None:
    with Offloader.open(SMALL, path) as core:
        core.end_step()


def log_of_a_counterexample(path: Path) -> None:
    save_log(random_life(1, 100).events, path)


def log_of_a_failed_test(path: Path) -> None:
    save(random_life(1, 100).events, path)


@pytest.mark.parametrize(
    "produce", [log_of_a_run, log_of_an_offloader, log_of_a_counterexample, log_of_a_failed_test]
)
def test_whatever_writes_a_log_closes_it(tmp_path: Path, produce: Callable[[Path], None]) -> None:
    """So the note of a log that was not closed means something."""
    produce(tmp_path / "log")
    condition = verify_log(tmp_path / "log").condition
    assert (condition.end, condition.notes()) == (LogEnd.CLOSED, [])


def test_an_offloader_that_fails_says_so_in_its_log(tmp_path: Path) -> None:
    core = Offloader.open(SMALL, tmp_path / "log")
    with pytest.raises(ZeroDivisionError), core:
        raise ZeroDivisionError("no rank left")
    assert end_of(tmp_path / "log") == (LogEnd.STOPPED, "ZeroDivisionError: no rank left")
