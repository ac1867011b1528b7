"""Mutants of the adapters for vLLM, which only the museum's walk with real vLLM can see."""

from __future__ import annotations

import random
from datetime import date

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from museum.checkers import CHECKERS, VLLM_WALK
from museum.search import search
from mutants.found import FOUND

ADAPTERS = [id for id, one in FOUND.items() if one.checker == VLLM_WALK.name]


def test_the_walk_is_among_the_checkers_where_vllm_is() -> None:
    assert VLLM_WALK in CHECKERS


@pytest.mark.slow
def test_one_of_them_that_changes_by_day_is_found_as_pinned() -> None:
    """It takes up to half a minute to reduce what was seen."""
    id = random.Random(date.today().toordinal()).choice(ADAPTERS)
    result = search(id)
    assert result.finding is not None, id
    assert (result.checker, result.finding.property, len(result.trace)) == FOUND[id], id


@pytest.mark.slow
def test_the_right_code_is_clean() -> None:
    assert VLLM_WALK.look() is None
