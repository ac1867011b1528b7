"""Text of logs, paths and saved failures is shown on terminals, and does nothing there.

Names may hold escape sequences, line breaks, marks that turn the direction of writing, or markup. Each
command prints them as escapes: as many lines as for harmless names, and nothing that a terminal acts on.
"""

from __future__ import annotations

import ast
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from changed_logs import PlainLog, read_plain, write_plain
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from replay_life import Life, key
from source_trees import nodes_of

from kvsm import events as ev
from kvsm.cli import main, output
from kvsm.cli.output import say
from kvsm.system.printable import printable

HARMLESS = "name"
HOSTILE = (
    "\x1b[31mred\x1b[0m",
    "\x1b]8;;http://evil\x1b\\link\x1b]8;;\x1b\\",
    "\x9b2J\x9d0;title\x9c",
    "a\rkvsm: no violation",
    "a\nverdict     no violation\n\n",
    "\a\b\b\b\x7f\x00",
    "\u202egnihtemos\u2066",
    "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg",
    "[red]loud[/red] [/] [link=x]",
    "{name} %s :warning:",
)
ALL = "".join(HOSTILE)


def life_of(log: Path, name: str, broken: bool) -> PlainLog:
    """A life whose requests have this name, that ends with an error of this text. broken: it breaks S14."""
    life = Life(log, host_blocks=2, device_blocks=8, workers=1, defer_ticks=0)
    core = life.core
    core.arrive(name)
    life.stored(name, [key(1), key(2)], [0, 1])
    core.match(f"{name}-2", [key(1), key(7)])
    core.prepare_load(f"{name}-2", [3])
    core.advance([(name, (1,), (2,))])
    core.finish(name)
    if broken:
        seq = core.ledger.seq
        life.append(ev.CacheReset(seq + 1, 0, 9, 1))
        life.append(ev.HitMatched(seq + 2, 0, 9, name, (1,)))
    life.writer.close(RuntimeError(name))
    return read_plain(log)


def kvsm(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(one) for one in arguments], env={"COLUMNS": "5000"})


def commands(place: Path, name: str) -> Iterator[tuple[object, ...]]:
    """Each reading command, in each form, on logs and files that hold this name wherever they can."""
    place.mkdir(parents=True)
    for broken in (False, True):
        log = place / f"log-{broken}"
        life_of(log, name, broken)
        for form in ((), ("--json",)):
            yield ("replay", log, *form)
            yield ("verify", log, *form)
            yield ("report", log, *form)
            yield ("show", log, "--request", name, *form)
            yield ("show", log, "--block", 0, *form)
            yield ("show", log, "--key", "0", *form)
            yield ("show", log, "--transfer", 2, *form)
    yield ("show", log, "--request", f"nobody {name}")
    yield ("show", log, "--key", name)
    yield ("replay", log, "--at", 999)
    yield ("replay", place / name.replace("/", "-").replace("\0", ""))
    yield ("verify", log, f"--{name}")
    yield ("verify", log, name)
    foreign = read_plain(place / "log-False")
    foreign[0].head[1] = name
    yield ("replay", write_plain(place / "machines", foreign))
    foreign[0].head[2]["policy"] = name
    yield ("verify", write_plain(place / "policy", foreign))
    (segment,) = (place / "log-True").iterdir()
    segment.write_bytes(segment.read_bytes()[:-40] + b"x" * 40)
    yield ("replay", place / "log-True")
    yield ("verify", place / "log-True")
    for number, failure in enumerate(failures(name)):
        directory = place / f"failure{number}"
        directory.mkdir()
        (directory / "actions.json").write_text(json.dumps(failure))
        yield ("fuzz", "--replay", directory)
        yield ("fuzz", "--replay", directory, "--json")
    (place / "walk.json").write_text(json.dumps({"target": name, "seed": 1}))
    yield ("fuzz", "--resume", place / "walk.json", "--runs", 1, "--jobs", 1)


def failures(name: str) -> Iterator[dict[str, Any]]:
    """Saved failures that hold this name as target, as action, in an option and as message."""
    good: dict[str, Any] = {"target": "core", "options": {}, "actions": [["reset"]], "property_id": "S1"}
    good |= {"message": name, "seed": 0, "run": 0, "found": 0, "reruns": 0}
    yield good
    yield {**good, "target": name}
    yield {**good, "actions": [[name, 1], ["match", name, 0, 0, 0]]}
    yield {**good, "options": {"policy": name}}
    yield {**good, "property_id": name}


def harmless_lines(result: Result) -> list[str]:
    lines = (result.stdout + result.stderr).split("\n")
    assert not [line for line in lines if not line.isprintable()], result.output
    return lines


def test_hostile_text_prints_as_many_lines_as_harmless_text(tmp_path: Path) -> None:
    """Every command in every form, with all hostile strings at once, also as names of directories."""
    place = tmp_path / ALL.replace("/", "-").replace("\0", "")
    for wanted, command in zip(commands(tmp_path / "harmless", HARMLESS), commands(place, ALL), strict=True):
        expected, found = kvsm(*wanted), kvsm(*command)
        assert expected.exception is None or isinstance(expected.exception, SystemExit), wanted
        assert found.exit_code == expected.exit_code, (command, found.output)
        assert len(harmless_lines(found)) == len(harmless_lines(expected)), (command, found.output)
        assert "\x1b" not in found.output
        if "--json" in command and found.exit_code in (0, 1):
            for line in found.stdout.splitlines():
                assert isinstance(json.loads(line), dict)


def test_json_gives_names_back_unchanged(tmp_path: Path) -> None:
    """JSON escapes what is not ASCII. What reads it gets the name of the log."""
    life_of(tmp_path / "log", ALL, broken=False)
    result = kvsm("show", tmp_path / "log", "--request", ALL, "--json")
    assert result.stdout.isascii()
    assert any(ALL in json.loads(line)["text"] for line in result.stdout.splitlines())
    assert json.loads(kvsm("verify", tmp_path / "log", "--json").stdout)["condition"]["error"].endswith(ALL)


def test_a_directory_whose_name_is_not_utf8_is_told(tmp_path: Path) -> None:
    """Linux allows any bytes. Python has lone surrogates for them, which no stream encodes."""
    log = Path(os.fsdecode(os.fsencode(tmp_path) + b"/log-\xff\x9b\x1b[2J"))
    life_of(log, "r", broken=False)
    for form in ((), ("--json",)):
        for command in ("replay", "verify"):
            result = kvsm(command, log, *form)
            assert result.exit_code == 0, result.output
            assert result.output.encode("utf-8", "strict").isascii()
    assert json.loads(kvsm("verify", log, "--json").stdout)["log"] == str(log)


@given(st.text(st.characters(exclude_categories=())))
def test_printable_text_is_one_line_that_does_nothing(text: str) -> None:
    """Also surrogates, and characters that Python does not know yet. What is harmless stays as it is."""
    shown = printable(text)
    assert all(one.isprintable() or one == "\xa0" for one in shown)
    assert shown.splitlines() in ([], [shown])
    if text.isprintable():
        assert shown == text
    shown.encode()


def test_text_that_the_stream_cannot_encode_is_shown_as_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal of an older encoding ends no command with an error."""
    with open(os.devnull, "w", encoding="ascii") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        say("löad \ud800 \U0001f600")


def test_commands_print_through_one_file() -> None:
    """No file of the command line prints by itself, so nothing is printed that was not made printable."""
    for path in Path(output.__file__).parent.glob("*.py"):
        if path.name == "output.py":
            continue
        called = [ast.unparse(one.func) for one in nodes_of(path) if isinstance(one, ast.Call)]
        assert not [
            one for one in called if one in ("print", "click.echo", "click.secho", "console.print")
        ], path
        assert not [one for one in called if one.startswith(("sys.stdout", "sys.stderr.w"))], path
