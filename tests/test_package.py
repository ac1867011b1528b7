"""The package as people get it: the text on an index, the source distribution, the versions that it names."""

from __future__ import annotations

import re
import runpy
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
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
    grafted = tuple(f"{name}/" for name in re.findall(r"^graft (\w+)$", manifest, re.MULTILINE))
    included = set(re.findall(r"^include (\S+)$", manifest, re.MULTILINE))
    by_itself = {"LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py"}
    left_out = {
        name
        for name in listed.stdout.splitlines()
        if not name.startswith(("kvsm/", *grafted)) and name not in included | by_itself
    }
    assert left_out == {".gitignore"}
