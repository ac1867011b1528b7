"""Mutants of the adapters for vLLM, which only the museum's checkers with real vLLM can see."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from museum.checkers import ADAPTER_CHECKERS, CHECKERS, VLLM_LIVES, VLLM_TROUBLES
from mutants import MUTANTS
from mutants.found import FOUND

from examples import TODAY

ADAPTERS = {one.name: one for one in ADAPTER_CHECKERS}


def test_these_checkers_look_where_vllm_is() -> None:
    assert set(ADAPTER_CHECKERS) <= set(CHECKERS)


@pytest.mark.slow
def test_one_of_them_that_changes_by_day_is_found_as_pinned() -> None:
    """It takes up to half a minute to reduce what was seen."""
    found = [id for id, one in FOUND.items() if one.checker in ADAPTERS]
    id = random.Random(TODAY).choice(found)
    pinned = FOUND[id]
    with MUTANTS[id].put_back():
        sighting = ADAPTERS[pinned.checker].look()
    assert sighting is not None, id
    assert (sighting.finding.property, len(sighting.trace)) == (pinned.property, pinned.steps), id


@pytest.mark.slow
@pytest.mark.parametrize("checker", [VLLM_LIVES, VLLM_TROUBLES], ids=lambda one: one.name)
def test_the_right_code_is_clean(checker: object) -> None:
    """Of these; the other walk has the engines of `kvsm vllm-fuzz`, which has tests of its own."""
    assert checker.look() is None  # type: ignore[attr-defined]
