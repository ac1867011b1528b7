"""What all commands that read a log share: which log is meant, and which request."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_life import Life, random_life, story_life

from examples import examples
from kvsm.cli import main
from kvsm.core.log import LogReader
from kvsm.errors import LogError
from kvsm.explain.story.names import matching, nearest, only_match, requests_in


def kvsm(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(one) for one in arguments])


def begun(log: Path, at_ns: int) -> Path:
    """A log whose writer's clock says `at_ns`."""
    Life(log, {"clock": lambda: at_ns}).close()
    return log


# Which log.


def test_the_newest_log_in_a_directory_is_read(tmp_path: Path) -> None:
    """By what its head says, not by the files: a copied log has new files."""
    begun(tmp_path / "b", 3_000_000_000)
    begun(tmp_path / "a", 2_000_000_000)
    result = kvsm("verify", tmp_path)
    assert result.exit_code == 0
    assert f"reading {tmp_path / 'b'}, the newest of the 2 logs in {tmp_path}; " in result.stderr
    assert "3.000s of a virtual clock" in result.stderr
    assert str(tmp_path / "b") in "".join(result.stdout.split())  # a long path is folded


def test_a_log_whose_head_is_torn_counts_by_the_time_of_its_file(tmp_path: Path) -> None:
    """An engine that was killed at its start leaves the newest log."""
    begun(tmp_path / "a", 2_000_000_000)
    Life(tmp_path / "b", {"clock": lambda: 1_000_000_000}).kill()
    (torn,) = (tmp_path / "b").glob("*.kvsm")
    torn.write_bytes(torn.read_bytes()[:40])
    os.utime(torn, ns=(4_000_000_000, 4_000_000_000))
    result = kvsm("replay", tmp_path)
    assert result.exit_code == 2
    assert f"reading {tmp_path / 'b'}, the newest" in result.stderr
    assert "there is no whole event" in result.stderr


@pytest.mark.parametrize("command", ["replay", "verify", "show --block 0"])
@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("none", "no such directory"),
        ("empty", "no log here (it is empty); a log is a directory of .kvsm segments"),
        ("foreign", "no log here (neither here nor in a directory in it)"),
        ("file", "not a directory"),
        ("stranger", "not the name of a segment"),
    ],
)
def test_a_place_without_a_log_is_one_clear_line(
    tmp_path: Path, command: str, place: str, message: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "foreign" / "inner").mkdir(parents=True)
    (tmp_path / "foreign" / "README").write_text("hello")
    (tmp_path / "file").write_text("hello")
    (tmp_path / "stranger").mkdir()
    (tmp_path / "stranger" / "x.kvsm").write_text("hello")
    verb, *options = command.split()
    result = kvsm(verb, tmp_path / place, *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


# Which request.

NAMES = st.lists(st.sampled_from(["r7", "r7-1a", "r7-2b", "r77", "r77-1a", "r", "r-7"]), unique=True)


@settings(max_examples=examples(40))
@given(st.sampled_from(["r7", "r77", "r", "r7-1a", "x"]), NAMES)
def test_a_name_means_a_request_or_all_that_a_server_made_of_it(asked: str, names: list[str]) -> None:
    """The exact id, or else the ids that begin with it and a hyphen: never a longer name."""
    found = matching(asked, names)
    assert set(found) <= set(names)
    assert found == [asked] if asked in names else all(name.startswith(f"{asked}-") for name in found)
    assert asked in names or {name for name in names if name.startswith(f"{asked}-")} == set(found)


def test_several_matches_are_listed() -> None:
    with pytest.raises(LogError, match=r"log: 2 requests are named r7: r7-1a, r7-2b; give the full id"):
        only_match("r7", ["r7-1a", "r7-2b", "r8"], Path("log"))


@pytest.mark.parametrize(
    ("asked", "hint"),
    [
        ("chatcmpl-8f3x", "did you mean chatcmpl-8f3a"),
        ("chatcmpl-1", "did you mean chatcmpl-1b2c?"),
        ("zzzzzz", "the log names 2, the first is chatcmpl-8f3a"),
    ],
)
def test_a_request_that_does_not_exist_suggests_the_nearest(asked: str, hint: str) -> None:
    with pytest.raises(LogError) as raised:
        only_match(asked, ["chatcmpl-8f3a", "chatcmpl-1b2c"], Path("log"))
    assert f"there is no request {asked}; {hint}" in str(raised.value)


def test_the_nearest_of_many_requests_is_found_soon() -> None:
    """A log names a hundred thousand requests. The ones that begin alike are compared."""
    names = [f"chatcmpl-{number * 7919 % 1_000_003:06}-{'x' * 40}" for number in range(6_000)]
    wanted = names[5_000]
    assert nearest(f"{wanted[:-1]}y", names)[0] == wanted


def test_every_request_of_a_log_is_found(tmp_path: Path) -> None:
    """Whichever event names it first: an arrival, a store's owners, an offer."""
    life = random_life(5, 200, tmp_path / "log")
    life.close()
    named = {name for event in life.events for name in named_by(event)}
    assert set(requests_in(LogReader(tmp_path / "log"))) == named
    story_life(tmp_path / "story")
    assert list(dict.fromkeys(requests_in(LogReader(tmp_path / "story")))) == ["r1", "r2", "r3", "r4"]


def named_by(event: object) -> list[str]:
    pairs = [*getattr(event, "owners", ()), *getattr(event, "offers", ())]
    return [one[0] for one in pairs] + ([event.request] if hasattr(event, "request") else [])
