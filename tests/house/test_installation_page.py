"""docs/installation.md lists the extras that pyproject.toml has, and the wheels that are made."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from check_wheels import TAGS
from places import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest installs it there

PAGE = (ROOT / "docs" / "installation.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def rows_of(header: str) -> list[list[str]]:
    """The cells of the table with this header, without the header."""
    table = PAGE[PAGE.index(header) :].split("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def names_of(requirements: list[str]) -> list[str]:
    """The packages that are required, without extras and versions."""
    return [re.split(r"[^\w-]", one)[0] for one in requirements]


def test_every_extra_is_listed_with_what_it_installs() -> None:
    rows = {row[0].strip("`"): row for row in rows_of("| extra |")}
    extras = PROJECT["optional-dependencies"]
    assert set(rows) == set(extras)
    for name, requirements in extras.items():
        assert rows[name][2], name
        if name != "test":  # they are too many to be listed
            assert rows[name][1].split(", ") == names_of(requirements), name


def test_the_dependencies_are_named() -> None:
    for name in names_of(PROJECT["dependencies"]):
        assert re.search(rf"\b{name}\b", PAGE), name


def test_every_wheel_is_listed_with_where_it_ran() -> None:
    rows = {row[0].strip("`"): row for row in rows_of("| file |")}
    assert set(rows) == {*TAGS, "source distribution"}
    assert {name: rows[name][2] for name in TAGS} == {name: "yes" if TAGS[name] else "no" for name in TAGS}


def arguments_of_setup(chosen: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """What setup.py gives to `setup`, if `KVSM_NATIVE` is `chosen`."""
    monkeypatch.chdir(ROOT)
    made: dict[str, object] = runpy.run_path("setup.py", run_name="arguments")["native_body"](chosen)
    return made


def test_the_variable_chooses_whether_the_native_body_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page says so of each value: built if possible, not at all, or built or an error."""
    pytest.importorskip("setuptools")
    optional = {}
    for chosen in ("auto", "1"):
        [body] = arguments_of_setup(chosen, monkeypatch)["ext_modules"]  # type: ignore[misc]
        optional[chosen] = body.optional
    assert optional == {"auto": True, "1": False}
    assert arguments_of_setup("0", monkeypatch) == {}
    with pytest.raises(SystemExit, match="KVSM_NATIVE is 'yes'; it must be 0, 1 or auto"):
        arguments_of_setup("yes", monkeypatch)


def test_a_directory_with_files_is_refused(tmp_path: Path) -> None:
    """An old wheel in it would be uploaded with the new ones."""
    (tmp_path / "kvsm-0.0.1-py3-none-any.whl").touch()
    refused = subprocess.run([ROOT / ".ci" / "wheels", tmp_path], capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert f"{tmp_path} is not empty" in refused.stderr
