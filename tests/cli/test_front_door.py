"""The front door of the command line: its help, its suggestions, its completion, its exit codes."""

from __future__ import annotations

import ast
import os
import pty
import re
import subprocess
import sys
from inspect import cleandoc
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from replay_life import story_life
from source_trees import nodes_of

from kvsm import cli
from kvsm.cli import COMMANDS, SECTIONS, main
from kvsm.cli.exit_codes import ExitCode
from kvsm.cli.output import Command

FOLDER = Path(cli.__file__).parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
HEAVY = (
    "numpy",
    "msgspec",
    "rich",
    "torch",
    "zstandard",
    "xxhash",
    "kvsm.explain.story",
    "kvsm.events",
    "kvsm.core.log",
)


def kvsm(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


# Help.


@pytest.mark.parametrize("name", COMMANDS)
def test_a_line_of_the_help_is_the_first_sentence_of_the_command(name: str) -> None:
    """The list is static, so that the help imports no command."""
    command = main.get_command(click.Context(main), name)
    assert command is not None
    told = " ".join(cleandoc(command.help or "").split("\n\n")[0].split())
    assert f"{told} ".startswith(f"{COMMANDS[name].says} ")
    assert COMMANDS[name].says.endswith(".")


def test_the_help_fits_a_terminal_of_80_columns() -> None:
    lines = [line.split(maxsplit=1) for line in kvsm("--help").stdout.splitlines()]
    for name, one in COMMANDS.items():
        assert [name, one.says] in lines


def test_every_command_is_listed_by_its_purpose() -> None:
    text = kvsm("-h").stdout
    assert {one.section for one in COMMANDS.values()} == {*SECTIONS}
    assert [line for line in text.splitlines() if line in SECTIONS] == [*SECTIONS]


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["shwo"]],
    ids=str,
)
def test_the_front_door_imports_nothing_heavy(arguments: list[str]) -> None:
    """Python and click take 0.15 s of CPU; each of these modules would add a large part of that."""
    code = (
        "import sys\nfrom kvsm.cli import main\n"
        "try: main(sys.argv[1:], prog_name='kvsm')\n"
        "finally: print([name for name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=ENVIRONMENT, check=False
    )
    loaded = ast.literal_eval(done.stderr.splitlines()[-1])
    assert "kvsm.cli" in loaded
    assert [name for name in HEAVY if name in loaded] == []
    rooms = [name.removeprefix("kvsm.cli.") for name in loaded if name.startswith("kvsm.cli.")]
    assert rooms == ["exit_codes", "toned", "output"]


def test_importing_kvsm_imports_nothing_else() -> None:
    """Pytest imports this package wherever kvsm is installed: it must not wait for a dependency."""
    code = "import sys; had = {*sys.modules}; import kvsm; print(*sorted({*sys.modules} - had))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT, check=True
    )
    loaded = done.stdout.split()
    assert [name for name in loaded if name.partition(".")[0] not in sys.stdlib_module_names] == ["kvsm"]


def test_a_command_imports_what_is_slow_only_when_it_works() -> None:
    """Each help would wait: a twentieth of a second for rich, a quarter for the scopes of all models.

    `plain_console` is imported when a table is printed.
    """
    slow = re.compile("(from|import) (rich|kvsm.cli.plain_console|kvsm.check.scopes.models)")
    found = {
        path.name
        for path in FOLDER.glob("*.py")
        for statement in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(statement, ast.Import | ast.ImportFrom) and slow.match(ast.unparse(statement))
    }
    assert found == {"plain_console.py"}


# Names that are misspelt.


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["shwo", "log"], "There is no command 'shwo'. Did you mean show? See kvsm --help."),
        (["verfy"], "There is no command 'verfy'. Did you mean verify or query? See kvsm --help."),
        (["bench", "vlm"], "There is no command 'vlm'. Did you mean vllm? See kvsm bench --help."),
        (["xyz"], "There is no command 'xyz'. See kvsm --help."),
    ],
    ids=str,
)
def test_a_misspelt_command_is_one_line_with_a_suggestion(arguments: list[str], told: str) -> None:
    result = kvsm(*arguments)
    assert (result.exit_code, result.stdout, result.stderr) == (ExitCode.UNUSABLE, "", f"kvsm: {told}\n")


# Completion.


def completed(words: str, *command: str) -> list[str]:
    """Return the completions that bash offers after these words."""
    asked = {"_KVSM_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    done = subprocess.run(
        [sys.executable, *command], env={**ENVIRONMENT, **asked}, capture_output=True, text=True, check=False
    )
    return done.stdout.split()


def test_completion_offers_commands_without_importing_them() -> None:
    """Click completes for bash, zsh and fish. A key press must not wait for the import of numpy."""
    code = (
        "import sys\nfrom kvsm.cli import main\n"
        "try: main(prog_name='kvsm')\nfinally: print('numpy' in sys.modules)"
    )
    assert completed("kvsm ver", "-c", code) == ["plain,verify", "False"]


def test_completion_offers_the_options_of_a_command() -> None:
    assert completed("kvsm show --bl", "-m", "kvsm") == ["plain,--block"]


# Colours.


def seen_on_a_terminal(code: str, **environment: str) -> str:
    """Return what a program prints on a terminal."""
    ours, theirs = pty.openpty()
    clean = {name: value for name, value in ENVIRONMENT.items() if name != "NO_COLOR"}
    subprocess.run(
        [sys.executable, "-c", code], stdout=theirs, check=True, env={**clean, "TERM": "xterm", **environment}
    )
    os.close(theirs)
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        return terminal.read(100_000).decode()


COLOURED = (
    "from rich.table import Table\nfrom kvsm.cli.output import *\nfrom kvsm.cli.toned import *\n"
    "table = Table(box=None, show_header=False); table.add_row(in_red('broken\\x1b[0m'))\n"
    "say_table(table); say(in_green('no violation \\x1b[31m'), 'plain')"
)


def test_a_verdict_has_its_colour_on_a_terminal_and_no_other_escape() -> None:
    """The text of a verdict is made printable like any text: escapes from a log are shown, not executed."""
    shown = seen_on_a_terminal(COLOURED)
    assert "\x1b[32mno violation \\x1b[31m\x1b[0m\r\nplain\r\n" in shown
    assert "\x1b[31mbroken\\x1b[0m\x1b[0m" in shown


def test_no_color_is_honoured() -> None:
    """https://no-color.org: with NO_COLOR in the environment, no verdict has a colour."""
    assert "\x1b[3" not in seen_on_a_terminal(COLOURED, NO_COLOR="1")


def test_a_verdict_has_no_colour_in_a_file(tmp_path: Path) -> None:
    story_life(tmp_path / "log")
    result = kvsm("verify", str(tmp_path / "log"))
    assert "no violation" in result.stdout
    assert "\x1b" not in result.stdout


# Exit codes.


def test_each_exit_code_has_one_meaning() -> None:
    """Commands use the names of exit codes: their code contains no number for one."""
    for path in FOLDER.glob("*.py"):
        for node in nodes_of(path):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("SystemExit", "exit")):
                assert not any(isinstance(one, ast.Constant) for one in node.args), (path, node.lineno)


@pytest.fixture
def _bug(monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command(cls=Command)
    def broken() -> None:
        raise ZeroDivisionError("by \x1b[2Jzero")

    monkeypatch.setattr("kvsm.cli.diagram.diagram", broken)


@pytest.mark.usefixtures("_bug")
def test_a_bug_of_kvsm_is_no_verdict() -> None:
    """Exit code 1 would mean a broken property. The traceback is made printable like any text."""
    result = kvsm("diagram")
    assert result.exit_code == ExitCode.BUG
    assert result.stderr.splitlines()[0] == "kvsm: Traceback (most recent call last):"
    assert result.stderr.splitlines()[-1] == "kvsm: ZeroDivisionError: by \\x1b[2Jzero"


# Systems.


@pytest.mark.parametrize(
    ("system", "code", "told"),
    [
        ("win32", ExitCode.UNUSABLE, "kvsm: kvsm does not run on Windows; it supports Linux (WSL, too)\n"),
        (
            "darwin",
            ExitCode.GOOD,
            "kvsm: kvsm supports Linux, and is not tested on darwin; commands that read a log may work\n",
        ),
    ],
)
def test_another_system_is_told_in_a_line(
    system: str, code: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvsm.cli.sys", type("Elsewhere", (), {"platform": system}))
    result = kvsm("diagram", "lease")
    assert (result.exit_code, result.stderr) == (code, told)
