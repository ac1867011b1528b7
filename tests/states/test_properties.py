"""What kvsm promises, each said in one place."""

from __future__ import annotations

import json
import pickle
import re

import msgspec
import pytest

from kvsm.core.ledger import invariants
from kvsm.core.ledger.invariants import PROPERTIES, Violation
from kvsm.properties import Property, json_with_titles


def test_properties_are_numbered_in_their_order() -> None:
    """An id is stable, and nothing else tells them apart in a log of old results."""
    assert [one.id for one in Property] == [f"S{number}" for number in range(1, 20)]
    assert [one.number for one in Property] == [*range(1, 20)]


@pytest.mark.parametrize("property", Property)
def test_a_property_has_a_title_and_one_sentence(property: Property) -> None:
    assert str(property) == f"{property.title} ({property.id})"
    assert re.fullmatch(r"[a-z, ]+", property.title)
    assert re.fullmatch(r"[A-Z][^.]+\.", property.sentence)


def test_titles_tell_properties_apart() -> None:
    assert len({one.title for one in Property}) == len(Property)


@pytest.mark.parametrize("property", Property)
def test_a_violation_comes_back_from_other_processes_and_from_files(property: Property) -> None:
    violation = Violation(property, "slot 3", (3,))
    assert pickle.loads(pickle.dumps(violation)) == violation
    assert msgspec.json.decode(msgspec.json.encode(violation), type=Violation) == violation


def test_json_has_the_id_and_the_title() -> None:
    found = json.loads(json_with_titles({"found": [Violation(Property.NO_REUSE_IN_FLIGHT, "slot 3", (3,))]}))
    (violation,) = found["found"]
    assert (violation["property_id"], violation["property"]) == ("S3", "no reuse in flight")


def test_what_a_ledger_and_its_log_show_is_listed_in_order() -> None:
    """They are the rows of the table in the module's docstring."""
    assert invariants.__doc__ is not None
    assert [one.id for one in PROPERTIES] == re.findall(r"(?m)^(S\d+) ", invariants.__doc__)
