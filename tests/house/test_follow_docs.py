"""README.md and each section "Start" can be followed word by word (specs/follow_docs.py).

Those that need vLLM are followed in tests/in_vllm/test_followed_starts.py.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from follow_docs import LEFT_OUT, SECTIONS, Section, follow, replaced, run_block
from places import ROOT


def test_each_section_start_is_followed() -> None:
    pages = [
        path
        for path in sorted((ROOT / "docs").glob("*.md"))
        if re.search("^## Start$", path.read_text(), re.M)
    ]
    assert {f"docs/{path.name}" for path in pages} == {one.page for one in SECTIONS if one.heading == "Start"}


@pytest.mark.parametrize("section", SECTIONS, ids=str)
def test_a_section_has_blocks_that_bash_understands(section: Section, tmp_path: Path) -> None:
    assert section.blocks()
    for block in section.blocks():
        script = replaced(block, tmp_path)
        assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
        assert not re.search(r"\b[A-Z]{3,}\b(?!=|\")", re.sub(r"KVSM_\w+|EXTRA", "", script)), (
            "a placeholder is left"
        )


def test_only_what_is_there_is_left_out() -> None:
    blocks = "".join(block for section in SECTIONS for block in section.blocks())
    assert [part for part in LEFT_OUT if part not in blocks] == []


@pytest.mark.parametrize("script", ["true; false; true", "kvsm no-such-command"])
def test_a_block_that_fails_is_shown(script: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=re.escape(script)):
        run_block(script, tmp_path, {"PATH": "/usr/bin:/bin"})


@pytest.mark.slow
@pytest.mark.parametrize("section", [one for one in SECTIONS if not one.vllm], ids=str)
def test_a_section_can_be_followed_without_vllm(section: Section) -> None:
    """From a fresh environment and a copy of the source."""
    follow(section)
