"""Standard output that cannot be written is reported on standard error, with a separate exit code.

A full disk is not a broken property: a script that calls `kvsm verify` must be able to distinguish them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from replay_life import after_reset, scene, story_life, written

from kvsm.cli import output
from kvsm.cli.exit_codes import ExitCode
from kvsm.cli.progress import counting

OUTPUT_LOST = int(ExitCode.OUTPUT_LOST)
KVSM = [sys.executable, "-m", "kvsm"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": ""}
"""With buffers, as users have it: what cannot be written stays in them until the interpreter's exit."""

# Runs each command in two forks, whose standard output is a full device and closed. Prints the exit codes.
FORKS = """
import json, os, sys
import kvsm.cli.replay
from kvsm.cli import main
for command in json.loads(sys.argv[1]):
    for place in ("full", "closed"):
        child = os.fork()
        if not child:
            os.close(1)
            sys.stdout = None
            if place == "full":
                os.open("/dev/full", os.O_WRONLY)
                sys.stdout = open(1, "w")
            main(command, prog_name="kvsm")
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def printing(directory: Path) -> list[list[str]]:
    """Commands that print: for people, for scripts, their help, and about a log that breaks a property."""
    story_life(directory / "log")
    life = scene()
    broken = written(directory / "broken", life, [*life.events, *after_reset(life)])
    log = str(directory / "log")
    return [
        ["verify", log],
        ["verify", str(broken)],
        ["show", log, "--block", "0", "--json"],
        ["replay", log],
        ["verify", "--help"],
    ]


def test_output_that_is_lost_has_its_own_exit_code(tmp_path: Path) -> None:
    """Each command that prints, on a full device and on a closed output, ends with one line and code 74."""
    commands = printing(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", FORKS, json.dumps(commands)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == [str(OUTPUT_LOST)] * 2 * len(commands), done.stderr
    reasons = ("No space left on device", "it is closed") * len(commands)
    assert done.stderr.splitlines() == [
        f"kvsm: standard output cannot be written: {reason}; the printed result is incomplete"
        for reason in reasons
    ]


def test_every_command_tells_that_its_output_is_lost() -> None:
    """Each is a `Command` or a `CommandGroup` of kvsm: click's own classes do not handle a full device."""
    for path in Path(output.__file__).parent.glob("*.py"):
        for line in path.read_text().splitlines():
            if line.startswith(("@click.command(", "@click.group(", "@bench.command(")):
                assert "cls=" in line, (path, line)


@pytest.mark.slow
def test_the_same_in_processes_of_their_own(tmp_path: Path) -> None:
    """On a full device, closed, open for reading only, with standard error lost, too, or without a reader."""
    other = ("check --list", "museum --list", "diagram block", "fuzz --runs 1", "--version")
    for command in (printing(tmp_path)[1], *map(str.split, other)):
        for shell, code in (
            ('"$@" > /dev/full', OUTPUT_LOST),
            ('"$@" >&-', OUTPUT_LOST),
            ('"$@" 1< /dev/null', OUTPUT_LOST),
            ('"$@" > /dev/full 2> /dev/full', OUTPUT_LOST),
            ('"$@" >&- 2>&-', OUTPUT_LOST),
            ('"$@" | true; exit ${PIPESTATUS[0]}', None),
        ):
            done = subprocess.run(
                ["bash", "-c", shell, "bash", *KVSM, *command],
                env=ENVIRONMENT,
                capture_output=True,
                check=False,
            )
            # Who leaves may have left after a short output was written: then there is a verdict.
            assert done.returncode == code or (code is None and done.returncode in (0, 1)), (command, shell)
            assert b"Traceback" not in done.stderr
            assert b"Exception ignored" not in done.stderr


def test_a_reader_that_leaves_ends_a_command_with_0(tmp_path: Path) -> None:
    """`kvsm show ... | head`: the output goes into a pipe whose reader has ended."""
    story_life(tmp_path / "log")
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [*KVSM, "show", str(tmp_path / "log"), "--block", "0"],
        env=ENVIRONMENT,
        stdout=writing,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_long_command_counts_on_a_terminal_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The log of a CI run has no lines of progress, and standard output never has any."""
    with counting("verified", "events") as progress:
        assert progress is None
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    with counting("verified", "events") as progress:
        assert progress is not None
        progress(1200)
    out, err = capsys.readouterr()
    assert (out, "verified 1,200 events" in err) == ("", True)
