"""The sections of README.md and docs/ that start vLLM, followed word by word (specs/follow_docs.py)."""

from __future__ import annotations

import sys

import pytest

from examples import of_today

pytest.importorskip("vllm", reason="vLLM is not installed")

from follow_docs import SECTIONS, Section, follow

README, *PAGES = [section for section in SECTIONS if section.vllm]


@pytest.mark.parametrize("section", [README, *of_today(PAGES, len(PAGES))], ids=str)
def test_a_section_can_be_followed(section: Section) -> None:
    """The README's each day, and one of the others, in turn: with a real `vllm serve`."""
    follow(section, sys.executable)
