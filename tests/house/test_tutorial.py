"""The programs and commands of docs/tutorial.md, in its order, as a reader runs them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner
from places import ROOT

from kvsm.cli import main

PAGE = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(python|sh)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def commands(text: str) -> list[list[str]]:
    """The arguments of each `kvsm ...` in a block."""
    lines = [shlex.split(line, comments=True) for line in text.splitlines()]
    assert all(line[0] == "kvsm" for line in lines)
    return [line[1:] for line in lines]


def test_it_names_only_commands_that_exist() -> None:
    named = set(re.findall(r"(?:^|`)kvsm ([a-z][a-z-]+)", PAGE, re.MULTILINE))
    assert named - {"in"} <= {*main.list_commands(None)}  # type: ignore[arg-type]


@pytest.mark.slow
def test_programs_and_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command ends with 0, in a directory where nothing was before."""
    monkeypatch.chdir(tmp_path)
    for language, text in BLOCKS:
        if language == "python":
            exec(compile(text, "tutorial.md", "exec"), {"__name__": "tutorial"})
            continue
        for arguments in commands(text):
            result = CliRunner().invoke(main, arguments)
            assert result.exit_code == 0, (arguments, result.output)
