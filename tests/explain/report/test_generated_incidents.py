"""The generator of incidents: its logs are possible, they are the same for a seed, and kinds have detectors."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest
from generated_incidents import BACKGROUNDS, KINDS, Made, generate, loads, make, together

from kvsm.core.log import LogReader
from kvsm.explain.story import verify_log


def verified(made: Made) -> bool:
    """Whether a log breaks no property. A log with a bug in the core must break one."""
    found = verify_log(made.directory)
    return not found.violations and found.damage is None


def test_a_seed_gives_the_same_log_again(tmp_path: Path) -> None:
    logs = [generate(3, tmp_path / name) for name in ("one", "two")]
    one, two = [[str(event) for event in LogReader(log.directory).events()][1:] for log in logs]
    assert one == two
    assert logs[0].kinds == logs[1].kinds


def test_each_kind_has_a_background_and_goes_with_others() -> None:
    for kind in KINDS.values():
        assert loads(kind), kind.name
        assert any(together((kind, other)) and loads(kind, other) for other in KINDS.values()), kind.name


def test_kinds_of_one_subject_never_meet() -> None:
    for one, other in combinations(KINDS.values(), 2):
        if one.subject == other.subject:
            assert not together((one, other))


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_an_incident_breaks_no_property_unless_it_is_a_bug(name: str, tmp_path: Path) -> None:
    made = make(5, tmp_path / "log", KINDS[name])
    assert verified(made) == ("property broken" not in KINDS[name].causes)


@pytest.mark.slow
@pytest.mark.parametrize("name", BACKGROUNDS)
def test_a_background_breaks_no_property(name: str, tmp_path: Path) -> None:
    assert verified(make(5, tmp_path / "log", background=name))
