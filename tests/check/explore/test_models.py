"""The models that `kvsm check` knows: scopes, bounds, and a broken core that is retold and logged."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvsm.check.explore.checked_model import ExplorationLimits
from kvsm.check.explore.counterexample import render, save_log
from kvsm.check.explore.live_model import WorldScope
from kvsm.check.explore.model import Verdict
from kvsm.check.scopes.models import MODELS
from kvsm.check.worlds.serving_world import Budgets, RequestSpec, ServingOptions
from kvsm.cli import main
from kvsm.core.ledger import transfers
from kvsm.errors import ConfigError


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["check", "--jobs", "1", *arguments])


@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_a_small_and_a_full_scope(name: str) -> None:
    assert {"small", "full"} <= set(MODELS[name].scopes)


@pytest.mark.parametrize("name", MODELS)
def test_every_bound_can_be_changed(name: str) -> None:
    model = MODELS[name]
    scope = next(iter(model.scopes.values()))
    for bound, number in model.bounds(scope).items():
        changed = number - 1 if number > 1 else 1
        bounded = model.bounded(scope, {bound: changed})
        assert model.bounds(bounded) == model.bounds(scope) | {bound: changed}


def test_an_unknown_bound_is_refused() -> None:
    for model in MODELS.values():
        with pytest.raises(ConfigError, match="nonsense is no bound here; there are"):
            model.bounded(next(iter(model.scopes.values())), {"nonsense": 1})


def test_the_protocol_is_checked_by_its_own_explorer() -> None:
    one_of_each = ("keys", "device_blocks", "slots", "live_transfers", "copies", "queued")
    result = run("protocol", *(word for name in one_of_each for word in ("-b", f"{name}=1")))
    assert result.exit_code == 0
    assert "  seen       93 states, 408 transitions, depth 16; " in result.stdout
    assert "    never taken: block ALLOCATE: EVICTED -> ALLOCATED" in result.stdout
    refused = run("protocol", "--depth", "3")
    assert refused.exit_code == 2
    assert "the protocol is explored without a limit of depth" in refused.stderr


def test_the_copies_are_checked_and_have_no_tables() -> None:
    result = run("copies", "-b", "copies=1")
    assert result.exit_code == 0
    assert "  seen       184 states, " in result.stdout
    assert "edges" not in result.stdout


def test_with_changed_bounds_an_unreached_sometimes_is_reported_and_refutes_nothing() -> None:
    """The scope requires a reset under a copy, which bounds without resets exclude."""
    result = run("serving", "-b", "resets=0", "-b", "failures=0")
    assert result.exit_code == 0
    assert "  reached    a hit is loaded, a key waits, waits for a store\n" in result.stdout
    failures, resets = "a load fails, a store is made again", "a reset under a store, a reset under a load"
    unreached = f"  unreached  {failures}, {resets}\n"
    assert (
        f"{unreached}             all states were seen, so they are unreachable; changed bounds"
        in result.stdout
    )


ONE_REQUEST = WorldScope(
    "one request",
    ServingOptions(requests=(RequestSpec((1, 2, 3, 4, 5)),), workers=1, budgets=Budgets(aborts=1)),
)


def test_the_code_is_checked_with_a_small_engine() -> None:
    serving = MODELS["serving"]
    found = serving.explore(ONE_REQUEST, ExplorationLimits())
    assert (found.verdict, found.refutation) == (Verdict.PROVED, None)
    assert "transfer SUBMITTED --REPORT_GOOD--> COMPLETED (the last, and none failed)" in map(
        str, found.edges
    )
    without = serving.explore(ONE_REQUEST, ExplorationLimits(symmetry=False))
    assert without.verdict is Verdict.PROVED
    assert without.states >= found.states


def test_the_requests_of_a_scope_can_be_reduced_but_not_increased() -> None:
    serving = MODELS["serving"]
    assert serving.bounds(serving.bounded(ONE_REQUEST, {"requests": 0}))["requests"] == 0
    with pytest.raises(ConfigError, match="requests is 2; this scope has 1 to take from"):
        serving.bounded(ONE_REQUEST, {"requests": 2})


@pytest.mark.usefixtures("_python_folds")
def test_a_bug_of_the_real_core_is_told_and_leaves_a_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted bug: the end of a copy does not release its lease."""
    monkeypatch.setattr(transfers, "end", transfers.close)
    serving = MODELS["serving"]
    found = serving.explore(ONE_REQUEST, ExplorationLimits())
    assert found.verdict is Verdict.REFUTED
    assert found.refutation is not None
    told = render(serving.retell(ONE_REQUEST, found.refutation)).splitlines()
    assert told[0].startswith("serving: one release per hold (S4) is broken, in ")
    assert told[-1].startswith("because: step ")
    save_log(serving.events(ONE_REQUEST, found.refutation), tmp_path / "log")
    verified = CliRunner().invoke(main, ["verify", str(tmp_path / "log")])
    assert verified.exit_code == 1
    assert "broken: one release per hold (S4)" in verified.output
    shown = CliRunner().invoke(main, ["show", str(tmp_path / "log"), "--block", "0"])
    assert (shown.exit_code, os.linesep in shown.output) == (0, True)
