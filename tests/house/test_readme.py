"""The README keeps its word."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from places import ROOT

import kvsm

README = (ROOT / "README.md").read_text()
EXAMPLE = re.search(r"```python\n(.*?)```", README, re.DOTALL)


def test_embedding_example_runs_and_its_log_verifies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvsm.cli import main

    assert EXAMPLE is not None
    monkeypatch.chdir(tmp_path)
    exec(compile(EXAMPLE.group(1), "README.md", "exec"), {})
    assert CliRunner().invoke(main, ["verify", "kv-log"]).exit_code == 0


@pytest.mark.slow
def test_embedding_examples_pass_a_strict_type_checker(tmp_path: Path) -> None:
    """The examples of the README and the engine can be copied unchanged into a project that checks types."""
    assert EXAMPLE is not None
    (tmp_path / "program.py").write_text(EXAMPLE.group(1))
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


def test_embedding_example_imports_from_one_place() -> None:
    """All of a first program is in `kvsm`."""
    assert EXAMPLE is not None
    lines = [line for line in EXAMPLE.group(1).splitlines() if line.startswith(("from", "import"))]
    assert [line for line in lines if "kvsm" in line and not line.startswith("from kvsm import")] == []


def test_every_public_name_can_be_imported() -> None:
    assert [name for name in kvsm.__all__ if getattr(kvsm, name, None) is None] == []


def test_embedding_example_is_short() -> None:
    assert EXAMPLE is not None
    lines = [line for line in EXAMPLE.group(1).splitlines() if line.strip()]
    assert len([line for line in lines if not line.startswith(("from", "import"))]) <= 22


@pytest.mark.parametrize(
    "module", ["kvsm", "kvsm.explain.story", "kvsm.cli", "kvsm.core.ledger.invariants", "kvsm.core.log"]
)
def test_core_and_replay_import_without_torch(module: str) -> None:
    """Torch is needed only for tensors; an on-call engineer has none."""
    script = f"import sys; sys.modules['torch'] = None; import {module}"
    subprocess.run([sys.executable, "-c", script], check=True)
