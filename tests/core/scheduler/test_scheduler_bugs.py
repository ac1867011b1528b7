"""Real bugs of public KV offload systems, put back one by one: the scenario of each finds it, and how.

The exhibits, with their stories, are in `specs/museum/`. A scenario is a short script that passes on the code
as it is. With the bug it fails: on the property that it breaks, or because a machine or the fold refuses what
the bug wants, which is better; then the guard that refused is taken away too, to see what it prevents.
What finds the bugs without being told where they are is in `test_museum.py`.
"""

from __future__ import annotations

import pytest
from museum import EXHIBITS, Exhibit
from museum.search import scenario_of

from kvsm.check.worlds.world import Finding, finding_of
from kvsm.properties import Property

REFUSED = Property.LEGAL_CALLS
"""What a refusal is reported as: a legal call that failed."""

SEEN_AS = {
    "B27": Property.CORRECT_BYTES,
    "B28": Property.CORRECT_BYTES,
    "B57": Property.CONSERVATION,
}
"""A failure that is taken for a success is seen by what is read then (B27, B28), and a copy into other slots
by the ledgers of the two tiers, before it is made (B57)."""

SEEN_WITHOUT_STOP = {
    "B01": Property.STORED_ONCE,
    "B10": Property.ONE_RELEASE_PER_HOLD,
    "B11": Property.STORED_ONCE,
    "B35": Property.NO_REUSE_IN_FLIGHT,
    "B36": Property.CONSERVATION,
}
"""With the guard taken away, too. One key in two slots breaks S13 before it loses a slot (B11), and two
blocks in one slot are one too few for the index (B36)."""


def finding_in(exhibit: Exhibit, *, without_stop: bool = False) -> Finding:
    with exhibit.put_back(without_stop=without_stop), pytest.raises(Exception) as caught:  # noqa: PT011
        scenario_of(exhibit.id)()
    return finding_of(caught.value)


@pytest.mark.parametrize("id", EXHIBITS)
def test_scenario_passes_without_its_bug(id: str) -> None:
    scenario_of(id)()


@pytest.mark.parametrize("exhibit", EXHIBITS.values(), ids=lambda one: f"{one.id}-{one.breaks}")
def test_bug_that_is_put_back_is_found(exhibit: Exhibit) -> None:
    found = finding_in(exhibit)
    expected = REFUSED if exhibit.stop else SEEN_AS.get(exhibit.id, exhibit.breaks)
    assert found.property == expected
    assert exhibit.stop in found.message


@pytest.mark.parametrize("id", [one.id for one in EXHIBITS.values() if one.without_stop])
def test_without_the_guard_that_stops_it_a_bug_breaks_its_property(id: str) -> None:
    assert finding_in(EXHIBITS[id], without_stop=True).property == SEEN_WITHOUT_STOP[id]
