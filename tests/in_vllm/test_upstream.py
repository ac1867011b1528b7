"""What docs/findings.md says of vLLM: each script shows its defect in this vLLM, its patch mends it, and the
lines that it names are those of vLLM's source."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from upstream_reports import UPSTREAM, Finding, findings

from kvsm.vllm.versions import installed

FINDINGS = findings()
VLLM = installed().split("+")[0]
CITED = "0.33.0"
"""The version of the patches, and of the lines that a finding names. If only 0.32.0 has the defect, its
lines."""


class Ran(NamedTuple):
    code: int
    output: str


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Ran]]:
    """Run a script, optionally with the patched files in a directory."""
    # vLLM keeps what it knows of a model there. Two versions with one directory look again for each script.
    kept = {"VLLM_CACHE_ROOT": str(tmp_path_factory.mktemp("vllm"))}
    environment = {**os.environ, **kept, "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    server = subprocess.Popen(
        [sys.executable, str(Path(__file__).parent / "script_server.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )
    assert server.stdin is not None
    assert server.stdout is not None
    to, answers = server.stdin, server.stdout

    def asked(script: Path, patched: Path | None = None) -> Ran:
        request: dict[str, Any] = {"script": str(script), "patched": str(patched) if patched else None}
        to.write(json.dumps(request) + "\n")
        to.flush()
        return Ran(**json.loads(answers.readline()))

    yield asked
    to.close()
    assert server.wait(60) == 0


def site_packages() -> Path:
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parents[1]


def patched_files(patch: Path, directory: Path) -> None:
    """Copy the files that a patch changes out of vLLM, and change them."""
    site = site_packages()
    for line in patch.read_text().splitlines():
        if line.startswith("--- a/"):
            name = line.removeprefix("--- a/").split("\t")[0]
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(site / name, directory / name)
    subprocess.run(["git", "apply", "--verbose", str(patch)], cwd=directory, check=True, capture_output=True)


def script(finding: Finding) -> Path:
    return UPSTREAM / "scripts" / f"{finding.number}.py"


@pytest.mark.parametrize("finding", FINDINGS, ids=lambda one: one.number)
def test_the_script_shows_the_defect(finding: Finding, run: Callable[..., Ran]) -> None:
    """In the versions that have it. In the others it passes."""
    ran = run(script(finding))
    last = ran.output.splitlines()[-1]
    if VLLM in finding.versions:
        assert ran.code == 1, ran.output
        assert last.startswith("FAILS: ")
    else:
        assert (ran.code, last) == (0, "passes"), ran.output


@pytest.mark.skipif(VLLM != CITED, reason=f"the patches are for vLLM {CITED}, and this is {VLLM}")
@pytest.mark.skipif(not shutil.which("git"), reason="git is not installed, which applies the patches")
@pytest.mark.parametrize("finding", [one for one in FINDINGS if one.patch], ids=lambda one: one.number)
def test_the_patch_mends_the_defect(finding: Finding, run: Callable[..., Ran], tmp_path: Path) -> None:
    patched_files(UPSTREAM / "patches" / f"{finding.patch}.diff", tmp_path)
    ran = run(script(finding), tmp_path)
    assert (ran.code, ran.output.splitlines()[-1]) == (0, "passes"), ran.output


@pytest.mark.parametrize(
    "finding",
    [one for one in FINDINGS if (CITED if CITED in one.versions else one.versions[-1]) == VLLM],
    ids=lambda one: one.number,
)
def test_a_named_line_is_in_the_named_function(finding: Finding) -> None:
    for cited in finding.cited:
        tree = ast.parse((site_packages() / cited.path).read_text(encoding="utf-8"))
        functions = [
            one.name
            for one in ast.walk(tree)
            if isinstance(one, ast.FunctionDef) and one.lineno <= cited.line <= (one.end_lineno or 0)
        ]
        assert cited.function in functions, cited
