"""examples/smallest_program.py, which docs/embedding.md shows: what a developer copies first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from places import ROOT

PROGRAM = (ROOT / "examples" / "smallest_program.py").read_text(encoding="utf-8")


def test_it_runs_and_its_log_verifies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvsm.cli import main

    monkeypatch.chdir(tmp_path)
    exec(compile(PROGRAM, "smallest_program.py", "exec"), {})
    assert CliRunner().invoke(main, ["verify", "kv-log"]).exit_code == 0


@pytest.mark.slow
def test_it_and_the_engine_pass_a_strict_type_checker(tmp_path: Path) -> None:
    """Both can be copied unchanged into a project that checks types."""
    (tmp_path / "program.py").write_text(PROGRAM)
    engine = sorted(map(str, (ROOT / "examples" / "engine").glob("*.py")))
    options = ["--strict", "--config-file=", "--cache-dir=cache", "--explicit-package-bases"]
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", *options, "program.py", *engine],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": os.pathsep.join(map(str, (ROOT, ROOT / "examples", tmp_path)))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_it_imports_from_one_place() -> None:
    """All of a first program is in `kvsm`."""
    lines = [line for line in PROGRAM.splitlines() if line.startswith(("from", "import"))]
    assert [line for line in lines if "kvsm" in line and not line.startswith("from kvsm import")] == []


def test_it_is_short() -> None:
    lines = [line for line in PROGRAM.splitlines() if line.strip()]
    assert len([line for line in lines if not line.startswith(("from", "import", '"""'))]) <= 22
