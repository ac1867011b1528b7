"""The first look at a large log: its counts are right for the whole log, and it finds the part that stands
out."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from incidents import INCIDENTS, Copying, Outcome, Rig, chats, usual

from kvsm.cli import main
from kvsm.core.log.frames import segment_paths
from kvsm.core.log.log_directory import INDEX_NAME
from kvsm.core.log.reader import LogReader, Segment
from kvsm.errors import LogDamaged
from kvsm.explain.report import first_look as module
from kvsm.explain.report.first_look import first_look
from kvsm.explain.report.log_report import make_report
from kvsm.explain.story.mentions import NotSearchable, mentions
from kvsm.explain.story.window import Window
from kvsm.explain.tables.opened import open as open_log


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A rank fails each second copy between 60 s and 90 s. The log has several segments."""

    def script(copying: Copying) -> Outcome:
        bad = copying.rank == 1 and 60_000 < copying.now_ms < 90_000 and copying.random.random() < 0.5
        return Outcome(copying.usual_ms, "lost link" if bad else "")

    options: dict[str, Any] = {"device_blocks": 800, "writer": {"segment_bytes": 1 << 16}}
    directory = tmp_path_factory.mktemp("look") / "log"
    return Rig(directory, 1, chats(350, 1), script=script, **options).serve().close()


@pytest.mark.parametrize("incident", ["fails", "preempts"])
def test_its_counts_are_those_of_the_tables(incident: str, failing: Path, tmp_path: Path) -> None:
    preempts = incident == "preempts"
    directory = INCIDENTS["preemption_storm"](tmp_path / "log") if preempts else failing
    look = first_look(directory).whole
    with open_log(directory) as log:
        found = make_report(log, verify=False)
    assert (look.arrived, look.finished, look.aborted) == (
        found.requests.requests,
        found.requests.finished,
        found.requests.aborted,
    )
    assert look.preempted == found.requests.preemptions
    hits = found.hits
    assert (look.lookups, look.asked, look.on_device, look.on_host) == (
        hits.lookups,
        hits.asked,
        hits.on_device,
        hits.on_host,
    )
    assert look.evicted == found.evictions.evicted
    assert look.reports == sum(rank.reported for rank in found.copies.ranks)
    assert look.failed == sum(rank.failed for rank in found.copies.ranks)


def test_heads_alone_give_the_same_as_all_events(failing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    look = first_look(failing)
    monkeypatch.setattr(module, "counts_before", lambda *_: None)
    monkeypatch.setattr(module, "cpu_count", lambda: 1)
    assert first_look(failing) == look


def test_only_the_last_segment_is_read(failing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    usual_count = module._count_events

    def noted(segment: Segment) -> Any:
        read.append(segment.head.seq + 1)
        return usual_count(segment)

    monkeypatch.setattr(module, "_count_events", noted)
    first_look(failing)
    assert read == [max(int(path.stem) for path in failing.glob("*.kvsm"))]


def test_it_looks_at_the_part_that_stands_out(failing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvsm.explain.tables.log_parts.PART_EVENTS", 2000)
    closer = first_look(failing).closer
    assert "of the copies failed" in closer.why
    assert closer.last - closer.first < 2000
    with open_log(failing, window=Window(closer.first, closer.last)) as part:
        assert [one.name for one in make_report(part).troubles[:1]] == ["rank fails"]


def test_without_a_part_that_stands_out_it_looks_at_the_end(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "log", 1, chats(200, 1), script=usual, device_blocks=800)
    look = first_look(rig.serve().close())
    assert look.closer.last == look.last
    assert "the end of the log" in look.closer.why


# The tables of a part.


def test_the_tables_of_a_part_are_those_of_the_whole_log(failing: Path) -> None:
    """They are equal in all columns that do not depend on events before the part."""
    queries = (
        "SELECT * FROM events WHERE event BETWEEN {} AND {} ORDER BY event",
        "SELECT event, request, asked, on_device, on_host FROM lookups"
        " WHERE event BETWEEN {} AND {} ORDER BY 1",
        "SELECT transfer, worker, reported, good, error FROM copies"
        " WHERE transfer BETWEEN {} AND {} AND reported < {} ORDER BY 1, 2",
    )
    with open_log(failing) as whole:
        first, last = whole.last // 3, 2 * whole.last // 3
        wanted = [whole.sql(query.format(first, last, last)).fetchall() for query in queries]
    with open_log(failing, window=Window(first, last)) as part:
        assert (part.first, part.last) == (first, last)
        assert [part.sql(query.format(first, last, last)).fetchall() for query in queries] == wanted
        assert part.log_began_ns < part.began_ns


def test_a_part_ends_within_a_frame(failing: Path) -> None:
    """Wherever its last event stands among the events that were written together."""
    for last in range(501, 509):
        with open_log(failing, window=Window(480, last)) as part:
            assert (part.first, part.last) == (480, last)


# The command.


@pytest.fixture
def large(failing: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A log that counts as large."""
    monkeypatch.setattr("kvsm.explain.tables.log_parts.LARGE_BYTES", 1000)
    monkeypatch.setattr("kvsm.explain.tables.table_index.SMALL_LOG", 1000)
    return Path(shutil.copytree(failing, tmp_path / "log", ignore=shutil.ignore_patterns("index*")))


def kvsm(*arguments: object) -> str:
    result = CliRunner().invoke(main, [str(one) for one in arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_large_log_is_looked_at_first_and_gets_no_index(large: Path) -> None:
    told = kvsm("report", large)
    assert "counted by the minute" in told
    assert "of the copies failed" in told
    assert "1. Rank 1 fails" in told
    assert not (large / INDEX_NAME).exists()


def test_json_has_the_first_look_too(large: Path) -> None:
    found = json.loads(kvsm("report", large, "--json"))
    assert found["first_look"]["whole"]["failed"] > 0
    assert found["first_look"]["closer"]["first"] == found["first"]
    assert not found["whole"]


def test_a_chosen_part_is_reported_without_an_index(large: Path) -> None:
    told = kvsm("report", large, "--since", "+70s", "--until", "+80s")
    assert "counted by the minute" not in told
    assert "(a part of the log)" in told
    assert not (large / INDEX_NAME).exists()


def test_the_whole_log_is_indexed_on_demand_and_then_used(large: Path) -> None:
    told = kvsm("report", large, "--whole")
    assert "counted by the minute" not in told
    assert (large / INDEX_NAME).exists()
    assert kvsm("report", large) == told


# `kvsm why` of a large log.


def test_why_reads_only_the_part_that_names_a_request(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvsm.explain.tables.log_parts.PART_EVENTS", 500)
    answer = CliRunner().invoke(main, ["why", str(large), "r120"])
    told = answer.stdout
    assert "request r120" in told
    assert "--whole reads the whole log" in answer.stderr
    assert not (large / INDEX_NAME).exists()
    assert "no event before" in told
    whole = kvsm("why", large, "r120", "--whole")
    assert told.splitlines()[1].partition(": key")[0] == whole.splitlines()[1].partition(": key")[0]


def test_why_of_a_transfer_needs_no_index(large: Path) -> None:
    with open_log(large, window=Window(1, 400)) as part:
        transfer = next(part.transfers()).transfer
    assert f"store {transfer}" in kvsm("why", large, "--transfer", transfer)
    assert not (large / INDEX_NAME).exists()


def test_a_request_that_no_event_names_is_refused_without_an_index(large: Path) -> None:
    result = CliRunner().invoke(main, ["why", str(large), "nobody"])
    assert result.exit_code == 2
    assert "no event names the request nobody" in result.output
    assert not (large / INDEX_NAME).exists()


@pytest.mark.parametrize("compress", [False, True])
def test_the_part_that_names_a_request_has_all_of_its_events(compress: bool, tmp_path: Path) -> None:
    writer = {"segment_bytes": 1 << 15, "compress": compress}
    rig = Rig(tmp_path / "log", 2, chats(60, 2), device_blocks=800, writer=writer)
    directory = rig.serve().close()
    with open_log(directory) as log:
        named = log.sql("SELECT request, arrived, finished FROM requests").fetchall()
    if compress:
        with pytest.raises(NotSearchable):
            mentions(directory, "r1")
        return
    for request, arrived, finished in named:
        window = mentions(directory, request)
        assert window is not None
        assert arrived in window
        assert finished in window


def cut_in_the_head(last: Path) -> None:
    last.write_bytes(b"")


def torn(last: Path) -> None:
    last.write_bytes(last.read_bytes()[:-3000])


def with_bytes_of_no_frame(last: Path) -> None:
    last.write_bytes(last.read_bytes()[:-3000] + b"\x81r20" * 1000)


@pytest.mark.parametrize("damage", [cut_in_the_head, torn, with_bytes_of_no_frame])
def test_why_of_a_log_without_a_whole_end_reads_what_is_whole(large: Path, damage: Any) -> None:
    damage(max(large.glob("*.kvsm")))
    assert mentions(large, "r20") is not None
    answer = CliRunner().invoke(main, ["why", str(large), "r20"])
    assert "request r20" in answer.stdout, answer.output


def test_a_segment_that_retention_deletes_meanwhile_is_passed_over(
    large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = segment_paths(large)
    listed[0].unlink()
    monkeypatch.setattr("kvsm.explain.story.mentions.segment_paths", lambda _: listed)
    monkeypatch.setattr(module, "segment_paths", lambda _: listed)
    assert mentions(large, "r300") is not None
    assert first_look(large).first == int(listed[1].stem)


@pytest.mark.parametrize("arguments", [["\udcff"], ["--transfer", str(1 << 63)], ["--transfer", "1000000"]])
@pytest.mark.parametrize("is_large", [False, True])
def test_why_of_what_no_log_can_have_is_refused(
    large: Path, arguments: list[str], is_large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_large:
        monkeypatch.setattr("kvsm.explain.tables.log_parts.LARGE_BYTES", 1 << 30)
    result = CliRunner().invoke(main, ["why", str(large), *arguments])
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    assert "no whole event in this log" not in result.output


def report_of_damaged(directory: Path, last: int) -> str:
    """The report of a log whose events up to `last` are whole. It says what is wrong, and is not as for a
    good log."""
    result = CliRunner().invoke(main, ["report", str(directory)])
    assert result.exit_code == 1, result.output
    assert f"events 1 to {last:,}, " in result.stdout
    return result.output


def last_before_damage(directory: Path) -> int:
    last = 0
    with suppress(LogDamaged):
        for event in LogReader(directory).events():
            last = event.seq
    return last


def flip_a_bit(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_a_damaged_head_leaves_the_segments_before_it(large: Path) -> None:
    segments = sorted(large.glob("*.kvsm"))
    flip_a_bit(segments[-1], 200)
    assert "damaged at byte" in report_of_damaged(large, int(segments[-1].stem) - 1)


def test_damage_in_the_last_segment_leaves_its_events_before_it(large: Path) -> None:
    last = max(large.glob("*.kvsm"))
    flip_a_bit(last, last.stat().st_size - 2000)
    whole = last_before_damage(large)
    assert whole > int(last.stem)
    assert "damaged at byte" in report_of_damaged(large, whole)


def test_a_missing_segment_ends_the_look(large: Path) -> None:
    sorted(large.glob("*.kvsm"))[2].unlink()
    assert "its last event is" in report_of_damaged(large, last_before_damage(large))


def test_missing_last_segments_are_reported(large: Path) -> None:
    last = max(large.glob("*.kvsm"))
    last.unlink()
    assert "the last segments are missing" in report_of_damaged(large, int(last.stem) - 1)


def test_missing_first_segments_are_reported(large: Path) -> None:
    min(large.glob("*.kvsm")).unlink()
    result = CliRunner().invoke(main, ["report", str(large)])
    assert result.exit_code == 1
    assert "the first segments are missing" in result.output


def test_commands_to_paste_name_a_log_that_begins_with_a_hyphen(
    large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(large.parent)
    large.rename("-log")
    told = kvsm("why", "./-log", "r120")
    [command, *_] = [line.split() for line in told.splitlines() if line.startswith("    kvsm show ")]
    assert "r120" in kvsm(*command[1:])
