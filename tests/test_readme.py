"""The README keeps its word."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
EXAMPLE = re.search(r"```python\n(.*?)```", README, re.DOTALL)


def test_embedding_example_runs_and_its_log_verifies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvsm.cli import main

    assert EXAMPLE is not None
    monkeypatch.chdir(tmp_path)
    exec(compile(EXAMPLE.group(1), "README.md", "exec"), {})
    assert CliRunner().invoke(main, ["verify", "kv-log"]).exit_code == 0


def test_embedding_example_is_short() -> None:
    assert EXAMPLE is not None
    lines = [line for line in EXAMPLE.group(1).splitlines() if line.strip()]
    assert len([line for line in lines if not line.startswith(("from", "import"))]) <= 22


@pytest.mark.parametrize("module", ["kvsm", "kvsm.replay", "kvsm.cli", "kvsm.invariants", "kvsm.log"])
def test_core_and_replay_import_without_torch(module: str) -> None:
    """Floor rule: torch is needed only for tensors; an on-call engineer has none."""
    script = f"import sys; sys.modules['torch'] = None; import {module}"
    subprocess.run([sys.executable, "-c", script], check=True)
