"""A report simulates each remedy before it proposes it: larger pools, other policies, refused stores of a
tenant."""

from __future__ import annotations

import shlex
import shutil
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from incidents import Rig, chats, tenant_floods

from kvsm.cli import main
from kvsm.cli.exit_codes import ExitCode
from kvsm.core.log import LogReader
from kvsm.core.log.trust import Trust
from kvsm.explain.report import remedies
from kvsm.explain.report.figures import RemedyFigures
from kvsm.explain.report.log_report import Report, make_report
from kvsm.explain.report.remedies import name_stem
from kvsm.explain.story.window import Window
from kvsm.explain.tables.opened import open as open_log
from kvsm.explain.whatif.demand import Demand, Finished, Lookup, Offers, read_demand, without_stores
from kvsm.explain.whatif.simulate import Scenario, counted_lookups, simulate


def reported(log: Path) -> Report:
    with open_log(log) as opened:
        return make_report(opened, verify=False)


def tried(log: Path) -> RemedyFigures:
    found = reported(log).remedies
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("request_name", "stem"),
    [
        ("r17", "r"),
        ("tenant-b-0012", "tenant-b"),
        ("tenant-7-0012", "tenant-7"),
        ("team/user_12", "team/user"),
        ("cmpl-550e8400-e29b-41d4-a716-446655440000-0", "cmpl"),
        ("chatcmpl-9f8a7b6c5d4e3f2a1b0c9f8a7b6c5d4e", "chatcmpl"),
        ("tenant-7-0012-9f8a7b6c", "tenant-7"),
        ("17", ""),
    ],
)
def test_the_names_of_one_tenant_have_one_stem(request_name: str, stem: str) -> None:
    """Ids in hex and a number at the end identify a request, not a tenant."""
    assert name_stem(request_name) == stem


@given(st.text(alphabet="ab0-_/", max_size=12), st.integers(0, 10**6), st.integers(0, 10**6))
def test_a_number_at_the_end_makes_no_other_tenant(name: str, one: int, other: int) -> None:
    assert name_stem(f"{name}-{one}") == name_stem(f"{name}-{other}")


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations, and a host pool that is too small for them."""
    rig = Rig(tmp_path_factory.mktemp("small") / "log", 1, chats(120, 1), device_blocks=300, host_blocks=100)
    return rig.serve().close()


@pytest.fixture(scope="module")
def demand(log: Path) -> Demand:
    return read_demand(LogReader(log), Trust())


def test_prompts_are_grouped_where_they_part(demand: Demand) -> None:
    """Nine in ten prompts share their first block, so they are grouped by the second one."""
    prompts = [*[(0, 1, n + 10) for n in range(12)], *[(0, 2, 3)] * 5, (0, 4), (0, 5, 6), (9, 8)]
    chains = [array("i", prompt) for prompt in prompts]
    names = [f"r{number}" for number in range(len(prompts))]
    groups = remedies._by_prefix(msgspec.structs.replace(demand, chains=chains, requests=names))
    assert {group.who: list(group.lives) for group in groups} == {
        "whose prompts begin like that of r0": list(range(12)),
        "whose prompts begin like that of r12": list(range(12, 17)),
        "whose prompts begin like no other": [17, 18, 19],
    }


def test_requests_are_grouped_by_their_names(demand: Demand) -> None:
    """If all names have one stem, they tell no tenant from another."""
    names = ["a-1", "b-1", "a-2", "b-2", "b-3"]
    groups = remedies._by_name(msgspec.structs.replace(demand, requests=names))
    assert {group.who: list(group.lives) for group in groups} == {
        "named a..": [0, 2],
        "named b..": [1, 3, 4],
    }
    assert remedies._by_name(demand) == []


@pytest.mark.slow
def test_a_flood_is_told_by_the_first_block(tmp_path: Path) -> None:
    """Only the tenant's prompts begin with this block. The report says that refusing their stores would gain
    hits."""
    found = reported(tenant_floods(tmp_path / "log"))
    [one] = found.troubles
    assert one.name == "tenant floods"
    assert one.text.startswith("Requests whose prompts begin like no other flood the host pool: ")
    assert found.remedies is not None
    flood = found.remedies.flood
    assert flood is not None
    assert flood.gain > flood.error > 0
    assert flood.stored > 40 * 0.9 * 200 > flood.all_stored / 2
    assert flood.read < 0.02 * flood.stored
    for command in one.commands:
        result = CliRunner().invoke(main, shlex.split(command)[1:])
        assert (result.exit_code, bool(result.stdout)) == (ExitCode.GOOD, True)


def test_what_the_others_gain_is_counted_by_their_lookups(
    demand: Demand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lookups of the flood, which find nothing either way, would dilute it."""
    lives, counted = {*range(0, len(demand.chains), 2)}, []
    trials = object.__new__(remedies._Trials)
    trials._demand, trials._own = demand, Scenario.of(demand.config)
    trials.lookups, trials._by_request, trials._stored, trials._read = counted_lookups(demand), {}, 0, 0

    def noted(*arguments: Any) -> Any:
        counted.append({lookup.life for lookup in arguments[2]})
        return simulate(*arguments)

    monkeypatch.setattr(remedies, "simulate", noted)
    trials._without(remedies._Group("who", sorted(lives)))
    assert counted
    assert not any(lives & one for one in counted)


def test_refused_stores_are_not_offered(demand: Demand) -> None:
    """The rest of the demand is unchanged. Refusing all stores leaves an empty pool."""
    refused = {*range(0, len(demand.chains), 2)}
    left = without_stores(demand, refused)
    for kind in (Lookup, Finished):
        before, after = [[one for one in each.operations if isinstance(one, kind)] for each in (demand, left)]
        assert [one[:3] for one in before] == [one[:3] for one in after]
    offered = {life for one in left.operations if isinstance(one, Offers) for life, _ in one.offers}
    assert offered
    assert not offered & refused
    lookups = counted_lookups(demand)
    everything = without_stores(demand, {*range(len(demand.chains))})
    assert simulate(everything, Scenario.of(demand.config), lookups).stored == 0


def test_a_larger_pool_is_tried_until_one_gains(log: Path) -> None:
    found = tried(log)
    sizes = [trial.host_blocks for trial in found.trials]
    assert sizes == [200, 400, 800][: len(sizes)]
    assert [trial.gains for trial in found.trials] == [False] * (len(sizes) - 1) + [True]
    assert (found.why_not, found.flood) == (None, None)


def test_a_log_that_cannot_be_simulated_is_told_so(tmp_path: Path) -> None:
    """With a lazy store the log does not say which requests own the stored blocks."""
    options = {"device_blocks": 300, "host_blocks": 100, "store": "lazy"}
    found = tried(Rig(tmp_path / "log", 1, chats(120, 1), **options).serve().close())
    assert found.why_not is not None
    assert found.why_not.startswith("it is of a lazy store")


def test_of_a_long_log_a_part_is_tried(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the part with most lookups that stop at an evicted block, and begins with the pool's content at
    that event."""
    whole = tried(log)
    monkeypatch.setattr(remedies, "SAMPLE_EVENTS", 700)
    part = tried(log)
    assert part.last - part.first == 699
    assert whole.first < part.first
    assert 0 < part.lookups < whole.lookups
    demand = read_demand(LogReader(log), Trust(), window=Window(part.first, part.last))
    assert (demand.first, demand.last) == (part.first, part.last)
    assert len(demand.initial) > 60, "the pool was full"
    assert all(part.first <= one.seq <= part.last for one in demand.operations)


def test_a_second_report_tries_nothing(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulated remedies are cached with the figures."""
    monkeypatch.setattr("kvsm.explain.tables.table_index.SMALL_LOG", 0)
    shutil.copytree(log, tmp_path / "log")
    first = reported(tmp_path / "log")
    monkeypatch.setattr(remedies, "simulate", lambda *_: pytest.fail("it simulates again"))
    assert reported(tmp_path / "log") == first
