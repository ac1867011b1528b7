"""The recipe of docs/extending.md for a new event, carried out on a copy of the tree."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

import pytest
from places import ROOT

from examples import TODAY

MOST_FILES = 7
"""Files of the package that a new kind of event may touch."""


class Step(NamedTuple):
    """A step of the recipe: a file, what is changed in it, and what a test says until then."""

    path: str
    diffs: list[str]
    until_then: str


def recipe() -> tuple[list[Step], str]:
    """The steps, and the command that proves the whole."""
    text = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    section = text.split("\n## An event\n")[1].split("\n## ")[0]
    steps = []
    for one in re.split(r"^\d+\. ", section, flags=re.MULTILINE)[1:]:
        one = one.split("\nNo other file")[0]
        path, says = re.match(r"\[?`(.+?)`", one), re.search(r"Until then:\s+`(.+?)`", one)
        assert path is not None
        diffs = [dedent(diff) for diff in re.findall(r"```diff\n(.*?)\n +```", one, re.DOTALL)]
        steps.append(Step(path[1], diffs, "" if says is None else says[1]))
    return steps, section.split("    pytest ")[1].strip()


def applied(diff: str, path: Path) -> str:
    """The text of a file, changed as a diff says. The diff's old lines must stand there once."""
    lines = diff.splitlines()
    before = "\n".join([line[1:] for line in lines if line[0] != "+"])
    after = "\n".join([line[1:] for line in lines if line[0] != "-"])
    text = path.read_text(encoding="utf-8")
    assert text.count(f"\n{before}") == 1, f"{path.name} has not once:\n{before}"
    return text.replace(f"\n{before}", f"\n{after}")


def test_a_new_event_touches_few_files() -> None:
    steps, _ = recipe()
    assert len({step.path for step in steps}) == len(steps) <= MOST_FILES


def test_each_diff_of_the_recipe_fits_the_tree() -> None:
    for step in recipe()[0]:
        for diff in step.diffs:
            assert applied(diff, ROOT / step.path)


@pytest.mark.slow
def test_the_recipe_of_a_new_event_is_right(tmp_path: Path) -> None:
    """After each step a test names the next one, and in the end the proof passes."""
    left_out = shutil.ignore_patterns("__pycache__", "*.so", "in_vllm")
    for part in ("kvsm", "specs", "tests"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=left_out)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    steps, proof = recipe()
    for step in steps:
        if step.until_then:
            said = tried(tmp_path, "-x", "tests/states/test_event_consumers.py", "-k", "not it_concerns")
            assert said.returncode != 0
            assert step.until_then in said.stdout, said.stdout
        for diff in step.diffs:
            path = tmp_path / step.path
            path.write_text(applied(diff, path), encoding="utf-8")
        if not step.diffs:
            python(tmp_path, "specs/native_tables.py").check_returncode()
    said = tried(tmp_path, *proof.split())
    assert said.returncode == 0, said.stdout


def tried(tree: Path, *tests: str) -> subprocess.CompletedProcess[str]:
    options = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--hypothesis-seed={TODAY}")
    return python(tree, "-m", "pytest", *options, *tests)


def python(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python on the copy, with the Python body of the fold."""
    environment = {**os.environ, "PYTHONPATH": f"{tree}{os.pathsep}{tree / 'specs'}", "KVSM_NATIVE": "0"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=tree, env=environment, capture_output=True, text=True, check=False
    )
