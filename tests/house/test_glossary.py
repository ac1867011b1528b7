"""The glossary gives each word once, and knows the words that the machines and the log use."""

from __future__ import annotations

import re

from places import ROOT

from kvsm.states import BlockState, TransferState

PAGE = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
WORDS = re.findall(r"^\| ([a-z][a-z ]*) \|", PAGE, re.MULTILINE)[1:]


def test_each_word_stands_once_in_order() -> None:
    """One meaning each, where a reader looks for it."""
    assert sorted(set(WORDS)) == WORDS


def test_it_explains_the_states_that_are_no_plain_english() -> None:
    plain = {"free", "allocated", "storing", "loading", "planned", "submitted", "completed", "failed"}
    states = {state.name.lower() for state in (*BlockState, *TransferState)}
    assert states - plain <= {*WORDS}
