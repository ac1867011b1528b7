"""The pytest plugin in a project that does not use kvsm: nothing but its name in a list changes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import json, sys
import pytest

class Odd(Exception):
    exceptions = None
    property, place = "theirs", "file.py:1"

class Circle(Exception):
    @property
    def exceptions(self):
        return (self,)

def test_passes(): pass
def test_fails(): assert 1 == 2
def test_fails_oddly(): raise Odd("odd")
def test_fails_in_a_circle(): raise Circle("circle")
@pytest.fixture
def broken(): raise ValueError("broken")
def test_has_a_broken_fixture(broken): pass
def test_is_skipped(): pytest.skip("why not")
@pytest.mark.parametrize("one", [1, 2])
def test_prints(one, capsys): print(one)

def test_last():
    with open("modules.json", "w") as file:
        json.dump(sorted(sys.modules), file)
"""

ARGUMENTS = ("-p", "no:cacheprovider", "-p", "no:randomly", "-n", "0", "-rA")


def run(directory: Path, *arguments: str, **variables: str) -> tuple[str, set[str], list[str]]:
    """Run pytest as a user does. Returns its output without times, the imported modules, and new files."""
    directory.mkdir()
    (directory / "test_theirs.py").write_text(TESTS)
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **variables}
    environment.pop("PYTEST_DISABLE_PLUGIN_AUTOLOAD", None)
    command = [sys.executable, "-m", "pytest", "-p", "no:hypothesispytest", *ARGUMENTS, *arguments]
    ran = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    modules = set(json.loads((directory / "modules.json").read_text()))
    files = sorted(path.name for path in directory.iterdir())
    return re.sub(r"in [0-9.]+s", "in a moment", ran.stdout + ran.stderr), modules, files


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, set[str], list[str]]]:
    """Runs with the plugin and without it, in directories of one length; on GitHub, where it prints most."""
    home = tmp_path_factory.mktemp("theirs")
    with_it = run(home / "a", GITHUB_ACTIONS="true")
    return [with_it, run(home / "b", "-p", "no:kvsm", GITHUB_ACTIONS="true")]


def without_plugins(output: str, directory: str) -> list[str]:
    lines = output.replace(f"/{directory}\n", "/here\n").splitlines()
    return [line for line in lines if not line.startswith("plugins: ")]


def test_the_plugin_is_there_by_normal_discovery(runs: list[tuple[str, set[str], list[str]]]) -> None:
    """Otherwise the other tests would prove nothing."""
    (with_it, modules, _), (without, no_modules, _) = runs
    assert re.search("^plugins: .*kvsm-", with_it, re.MULTILINE)
    assert "kvsm.testing.pytest_plugin" in modules
    assert not {name for name in no_modules if name.startswith("kvsm")}, without


def test_the_output_is_the_same(runs: list[tuple[str, set[str], list[str]]]) -> None:
    """Also for errors with attributes of the names that kvsm's errors have."""
    (with_it, _, files), (without, _, other_files) = runs
    assert "3 failed, 4 passed, 1 skipped, 1 error" in without
    assert without_plugins(with_it, "a") == without_plugins(without, "b")
    assert files == other_files


def test_three_small_modules_are_imported(runs: list[tuple[str, set[str], list[str]]]) -> None:
    """No msgspec, numpy, Hypothesis or click: the plugin costs what three files cost."""
    (_, with_it, _), (_, without, _) = runs
    assert with_it - without == {"kvsm", "kvsm.testing", "kvsm.testing.pytest_plugin"}
