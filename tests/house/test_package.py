"""The package as people get it: the text on an index, the source distribution, the versions that it names."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys

import pytest
from places import ROOT

from kvsm.testing import profiles

README = (ROOT / "README.md").read_text(encoding="utf-8")
METADATA = ROOT / "PKG-INFO"
"""In an unpacked source distribution: what an index is told."""

RELATIVE_LINK = re.compile(r"\]\((?!https?:|#)[^)]*\)")
CODE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def described() -> str:
    if METADATA.exists():
        return METADATA.read_text(encoding="utf-8").split("\n\n", 1)[1]
    made: str = runpy.run_path(str(ROOT / "setup.py"), run_name="description")["description"](README)
    return made


def test_the_text_on_an_index_has_no_link_that_leads_nowhere() -> None:
    assert RELATIVE_LINK.findall(README), "otherwise this test could not fail"
    assert RELATIVE_LINK.findall(described()) == []


def test_the_text_on_an_index_says_everything_else_that_the_readme_says() -> None:
    text = described()
    assert CODE.findall(text) == CODE.findall(README)
    for target in re.findall(r"\]\(((?!https?:|#)[^)#]*)", README):
        assert target in text
        assert (ROOT / target).exists()
    kept = re.sub(r"[^a-z]", "", RELATIVE_LINK.sub("", README).replace("[", "").lower())
    assert len(re.sub(r"[^a-z]", "", text.lower())) >= len(kept)


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no repository to compare with")
def test_the_source_distribution_has_every_file_of_the_repository() -> None:
    """Without the documents and the specs, 49 files of tests could not even be collected."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    manifest = (ROOT / "MANIFEST.in").read_text(encoding="utf-8")
    grafted = tuple(f"{name}/" for name in re.findall(r"^graft (\S+)$", manifest, re.MULTILINE))
    included = set(re.findall(r"^include (\S+)$", manifest, re.MULTILINE))
    by_itself = {"LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py"}
    left_out = {
        name
        for name in listed.stdout.splitlines()
        if not name.startswith(("kvsm/", *grafted)) and name not in included | by_itself
    }
    assert left_out == {".gitignore"}


def test_every_python_that_the_package_names_is_tried_in_ci() -> None:
    """The lowest one with the lowest versions of everything else. They take turns, a day each."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    named = re.findall(r"Python :: (3\.\d+)", project)
    lowest = re.search(r'requires-python = ">=(.+)"', project)
    assert lowest is not None
    assert [lowest[1]] == re.findall(r"=\$\(find_python (3\S+)", script) == named[:1]
    others = re.search(r"others=\((.+)\)", script)
    assert others is not None
    # The second is the machine's own, with which CI begins.
    assert others[1].split() == ["lowest", *named[2:]]


def test_ci_names_a_profile_that_exists_and_the_seed_of_the_day() -> None:
    """New examples every day: without both, Hypothesis repeats the same ones there."""
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    seed = "seed=${KVSM_SEED:-$(date -u +%Y%m%d)}"
    assert seed in script
    assert set(re.findall(r"--hypothesis-profile=(\S+)", script)) <= set(profiles.PROFILES)
    plain = [line for line in script.splitlines() if "-m pytest" in line and "${" not in line]
    assert [line for line in plain if "test_second_opinions" not in line] == []
    assert re.search(r'kvsm" fuzz .*--seconds 60 --seed "\$seed"', script)


def test_in_ci_the_profiles_are_known_and_examples_are_new() -> None:
    """CI's own profile of Hypothesis would repeat the same hundred examples in every run."""
    for chosen, count in (("", 100), ("kvsm-ci", 300)):
        script = (
            "import conftest\n"
            "from hypothesis import settings\n"
            f"if {chosen!r}: settings.load_profile({chosen!r})\n"
            "print(settings().max_examples, settings().derandomize, settings().deadline)\n"
        )
        run = subprocess.run(
            [sys.executable, "-c", script],
            env={"CI": "true", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}:{ROOT / 'tests/support'}"},
            capture_output=True,
            text=True,
            check=True,
        )
        assert run.stdout == f"{count} False None\n"
