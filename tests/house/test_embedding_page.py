"""docs/embedding.md as a reader follows it: its code blocks make the engine, and its commands succeed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

PAGE = (ROOT / "docs" / "embedding.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```", re.DOTALL | re.MULTILINE)
ENGINE = PAGE[: PAGE.index("\n## Without steps")]
"""All but the smallest program, which is no part of the engine."""


def programs() -> dict[str, str]:
    """Return path -> text, if each code block of the page goes into the file that the page named last."""
    written: dict[str, str] = {}
    for block in BLOCK.finditer(ENGINE):
        if block[1] == "python":
            path = re.findall(r"`(engine/\w+\.py)`", PAGE[: block.start()])[-1]
            written[path] = f"{written[path]}\n{block[2]}" if path in written else block[2]
    return written


def test_the_blocks_of_the_page_are_the_whole_example() -> None:
    """The page shows the complete engine."""
    files = sorted((ROOT / "examples" / "engine").glob("*.py"))
    assert programs() == {f"engine/{path.name}": path.read_text(encoding="utf-8") for path in files}


@pytest.mark.slow
def test_a_reader_gets_an_engine_and_a_finished_log(tmp_path: Path) -> None:
    """The reader starts in an empty directory and needs only the page."""
    pytest.importorskip("torch")
    (tmp_path / "engine").mkdir()
    for path, text in programs().items():
        (tmp_path / path).write_text(text, encoding="utf-8")
    [commands] = [block[2] for block in BLOCK.finditer(PAGE) if block[1] == "sh"]
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    outputs = []
    for command in commands.splitlines():
        ended = subprocess.run(
            command.split(),
            cwd=tmp_path,
            env={**os.environ, "PATH": search},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, (command, ended.stdout, ended.stderr)
        outputs.append(ended.stdout)
    found = {what: int(count) for count, what in re.findall(r"(\d+) ([a-z ]+)", outputs[0])}
    assert min(found["computed"], found["on device"], found["on host"]) > 0
    assert "no violation" in outputs[1]
