"""`kvsm timeline`: its output, its refusals, and its notes about a log that is incomplete."""

from __future__ import annotations

import json
import os
import random
import stat
from pathlib import Path

import pytest
from changed_logs import bounded, changed, ended_well, lives, write_plain
from click.testing import CliRunner, Result
from replay_life import gapped, random_life, story_life
from test_timeline import data_of

from examples import seeds_of_today
from kvsm.cli import main
from kvsm.system import private_files


def timeline(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["timeline", *(str(one) for one in arguments)])


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("timeline") / "log"
    random_life(4, 400, directory).close()
    return directory


def test_the_page_has_all_events_and_only_its_user_reads_it(log: Path, tmp_path: Path) -> None:
    """Names of requests are in it, so it is as private as the log."""
    page = tmp_path / "t.html"
    result = timeline(log, "-o", page)
    assert (result.exit_code, result.stderr) == (0, "")
    assert f"page{page}," in "".join(result.stdout.split())  # a long path is folded
    assert stat.S_IMODE(page.stat().st_mode) == 0o600
    data = data_of(page.read_text())
    first, last = data["whole"]
    assert (first, len(data["events"]["text"])) == (1, last)
    assert data["notes"] == []


def test_the_answer_as_json_names_the_files(log: Path, tmp_path: Path) -> None:
    page, trace = tmp_path / "t.html", tmp_path / "t.pftrace"
    found = json.loads(timeline(log, "-o", page, "--perfetto", trace, "--json").stdout)
    assert (found["schema"], found["page"], found["trace"]) == ("kvsm.timeline/1", str(page), str(trace))
    assert (found["first"], found["events"], found["left_out"]) == (1, found["last"], [])
    assert trace.stat().st_size > 10_000


def test_dash_prints_the_page_and_nothing_else(log: Path) -> None:
    result = timeline(log, "-o", "-")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith("<!doctype html>")
    assert result.stdout.endswith("</html>\n")
    assert data_of(result.stdout)["whole"][0] == 1


def test_since_and_until_choose_the_window(log: Path, tmp_path: Path) -> None:
    page = tmp_path / "t.html"
    assert timeline(log, "-o", page, "--since", 50, "--until", 90).exit_code == 0
    data = data_of(page.read_text())
    assert (data["events"]["number"][0], len(data["events"]["number"])) == (50, 41)
    assert data["notes"] == []


def test_a_limit_keeps_the_last_events_and_says_what_is_left_out(log: Path, tmp_path: Path) -> None:
    """An incident is most often at the end."""
    page = tmp_path / "t.html"
    result = timeline(log, "-o", page, "--until", 90, "--events", 30)
    said = (
        "events 1 to 60 are left out: the timeline has the last 30 of the window; --since and --until choose "
        "others, --events takes more"
    )
    assert (result.exit_code, result.stderr) == (0, f"kvsm: {said}\n")
    data = data_of(page.read_text())
    assert (data["events"]["number"][0], len(data["events"]["number"])) == (61, 30)
    assert data["notes"] == [said]


def test_a_file_that_exists_is_kept_unless_force_is_given(log: Path, tmp_path: Path) -> None:
    page = tmp_path / "t.html"
    page.write_text("mine")
    result = timeline(log, "-o", page)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"kvsm: {page}: exists; --force writes over it" in result.stderr
    assert page.read_text() == "mine"
    assert timeline(log, "-o", page, "--force").exit_code == 0
    assert page.read_text().startswith("<!doctype html>")


def test_a_write_that_fails_leaves_what_was_there(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new file replaces the old one only when it is complete."""
    page = tmp_path / "t.html"
    page.write_text("mine")

    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(private_files.os, "replace", full)
    result = timeline(log, "-o", page, "--force")
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"{page}: cannot be written: No space left on device" in result.stderr
    assert [one.name for one in tmp_path.iterdir()] == ["t.html"]
    assert page.read_text() == "mine"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "say where to write: -o FILE.html for a page, --perfetto FILE.pftrace for a trace"),
        (["-o", "-", "--json"], "-o - prints the page, and --json prints an answer"),
        (["-o", "a", "--perfetto", "a"], "a: the page and the trace need two files"),
        (["-o", "absent/t.html"], "absent/t.html: there is no directory absent"),
        (["--perfetto", "."], ".: is a directory; give the name of a file"),
        (["-o", "t.html", "--since", "soon"], "'soon' names no point of a log"),
        (["-o", "t.html", "--since", "99999"], "no event is at or after --since"),
        (["-o", "t.html", "--events", "0"], "0 is not in the range"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_writes_nothing(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = timeline(log, *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["absent", "empty", "foreign"])
def test_a_place_without_a_log_writes_nothing(tmp_path: Path, place: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "notes.txt").write_text("hello")
    result = timeline(tmp_path / place, "-o", tmp_path / "t.html")
    assert (result.exit_code, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "t.html").exists()


def test_a_damaged_log_is_drawn_up_to_the_damage(tmp_path: Path) -> None:
    """An engine that wrote wrong bytes is an incident: what came before is what one wants to see."""
    log, page = tmp_path / "log", tmp_path / "t.html"
    random_life(4, 300, log, writer={"segment_bytes": 4096}).close()
    second = sorted(log.glob("*.kvsm"))[1]
    content = bytearray(second.read_bytes())
    content[len(content) // 2] ^= 1
    second.write_bytes(content)
    result = timeline(log, "-o", page)
    assert result.exit_code == 1
    assert "the log cannot be read further: " in result.stderr
    data = data_of(page.read_text())
    assert len(data["events"]["text"]) == data["whole"][1] >= int(second.stem) - 1
    assert any(note.startswith("the log cannot be read further: ") for note in data["notes"])


def test_a_gap_and_a_killed_engine_are_told_on_the_page(tmp_path: Path) -> None:
    gapped(tmp_path / "gap")
    page = tmp_path / "t.html"
    assert timeline(tmp_path / "gap", "-o", page).exit_code == 1
    assert any("are not in the log" in note for note in data_of(page.read_text())["notes"])
    life = random_life(4, 60, tmp_path / "killed")
    life.kill()
    result = timeline(tmp_path / "killed", "-o", page, "--force")
    assert result.exit_code == 0
    assert any(note.startswith("the log was not closed") for note in data_of(page.read_text())["notes"])


def test_a_directory_of_logs_stands_for_its_newest_log(tmp_path: Path) -> None:
    story_life(tmp_path / "runs" / "a")
    result = timeline(tmp_path / "runs", "-o", tmp_path / "t.html")
    assert result.exit_code == 0
    assert f"reading {tmp_path / 'runs' / 'a'}" in result.stderr


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(range(20), id="fast"),
        pytest.param(seeds_of_today(200), id="slow", marks=pytest.mark.slow),
    ],
)
def test_a_changed_log_ends_in_a_page_or_one_line(seeds: range, tmp_path: Path) -> None:
    """Records with right checksums may say anything. There is never a traceback, and never half a page."""
    originals = lives(tmp_path / "lives")
    drawn = 0
    for seed in seeds:
        log = write_plain(
            tmp_path / f"{seed}", changed(originals[seed % len(originals)], random.Random(seed))
        )
        page = tmp_path / f"{seed}.html"
        with bounded(f"seed {seed}"):
            result = timeline(log, "-o", page, "--perfetto", tmp_path / f"{seed}.pftrace")
        ended_well(result, f"seed {seed}")
        if page.exists():
            drawn += 1
            assert len(data_of(page.read_text())["events"]["text"]) > 0
        else:
            assert len(result.stderr.splitlines()) == 1, result.stderr
    assert drawn > len(seeds) / 4
