"""What release 0.1.0 promises by name is still there: docs/versions.md says what the promise is.

If a test here fails, put back what is gone. `tests/support/promised.py` has made the file.
"""

from __future__ import annotations

import json

import pytest
from places import ROOT
from promised import gone, promised

PROMISED = ROOT / "tests" / "data" / "promised-0.1.0.json"


def test_nothing_that_0_1_0_promises_is_gone() -> None:
    """Python names and parameters, exit codes, JSON fields, metrics, kinds of events, vLLM options, tables,
    commands and their options."""
    kept = json.loads(PROMISED.read_text(encoding="utf-8"))
    assert gone(kept, json.loads(json.dumps(promised()))) == []


@pytest.mark.parametrize(
    ("kept", "now", "found"),
    [
        ({"a": {"b": 1}}, {"a": {"b": 1, "c": 2}, "d": 3}, []),
        ({"a": {"b": 1}}, {"a": {}}, ["/a/b: gone"]),
        ({"exit codes": {"BUG": 70}}, {"exit codes": {"BUG": 71}}, ["/exit codes/BUG: was 70, is 71"]),
        (
            {"schemas": {"kvsm.a/1": ["x", "y"]}},
            {"schemas": {"kvsm.a/1": ["z", "y"]}},
            ["/schemas/kvsm.a/1: x is gone"],
        ),
        ({"parameters": ["a"]}, {"parameters": ["a", "b"]}, []),
        (
            {"parameters": ["a", "b"]},
            {"parameters": ["b", "a"]},
            ["/parameters: were ['a', 'b'], are ['b', 'a']"],
        ),
        ({"fields": ["a"]}, {"fields": ["b", "a"]}, ["/fields: were ['a'], are ['b', 'a']"]),
        ({"needed": ["a"]}, {"needed": ["a", "b"]}, ["/needed: b must be given now"]),
        ({"needed": ["a", "b"]}, {"needed": ["a"]}, []),
    ],
)
def test_additions_break_no_promise(kept: object, now: object, found: list[str]) -> None:
    assert gone(kept, now) == found
