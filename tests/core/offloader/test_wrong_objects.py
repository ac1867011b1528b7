"""Objects of users that answer wrongly, answer nothing, lack methods or raise: the machines of `kvsm.testing`
name a property and the user's line, and never an error from inside kvsm.

Managers of vLLM are in `tests/in_vllm/test_manager_machine.py`.
"""

# ruff: noqa: ARG002, ARG005 (what is wrong does not look at its arguments)

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from examples import examples
from kvsm.copies import CopyEngine, HostCopyEngine
from kvsm.core.policies.lru import LRUPolicy
from kvsm.core.scheduler import LoadEnded, OffloadScheduler
from kvsm.errors import PropertyBroken
from kvsm.serving import ServingBlockPool
from kvsm.testing import CopyEngineMachine, OffloadMachine, configurations
from kvsm.testing.machine_base import PropertyMachine


class Fault:
    """What the wrong objects below do: `method` gives `answer` in place of its own."""

    method = ""
    answer: Callable[[Any], Any] = staticmethod(lambda right: right)


def wrong(name: str, base: type, *methods: str) -> type:
    """A subclass of `base` with this name, in which `Fault` holds for these methods."""

    def made(method: str) -> Callable[..., Any]:
        def call(self: Any, *arguments: Any, **named: Any) -> Any:
            right = getattr(base, method)(self, *arguments, **named)
            return Fault.answer(right) if Fault.method == method else right

        return call

    body = {method: made(method) for method in methods}
    return type(name, (base,), {**body, "__module__": __name__})


ENGINE = ("submit", "hold_compute", "poll", "wait", "drain", "close")
POLICY = ("admitted", "busy", "idle", "evicted", "choose", "recall", "snapshot", "__len__", "__contains__")
POOL = (
    "touch",
    "free_blocks",
    "key_of",
    "cached_block",
    "free_queue",
    "get_new_blocks",
    "reset_prefix_cache",
)
CONNECTOR = (
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "reset_cache",
    "has_pending_work",
)

WrongEngine = wrong("WrongEngine", HostCopyEngine, *ENGINE)
WrongPool = wrong("WrongPool", ServingBlockPool, *POOL)
WrongConnector = wrong("WrongConnector", OffloadScheduler, *CONNECTOR)
WrongPolicy = wrong("WrongPolicy", LRUPolicy, *POLICY)


class EngineUnderTest(CopyEngineMachine):
    def make_engine(self, device: Any, host: Any) -> CopyEngine:
        return WrongEngine(device, host, threads=1)  # type: ignore[no-any-return]


class PoolUnderTest(OffloadMachine):
    configurations = configurations(prefix_cache=True)

    def make_pool(self, blocks: int) -> Any:
        return WrongPool(self.core.ledger.leases)


class ConnectorUnderTest(OffloadMachine):
    def make_scheduler(self, offloader: Any, config: Any) -> Any:
        return WrongConnector(offloader, config)


class PolicyUnderTest(OffloadMachine):
    policy = WrongPolicy


def boom(_: Any) -> Any:
    return {}["r1"]


ANSWERS: dict[str, Callable[[Any], Any]] = {
    "raises": boom,
    "None": lambda right: None,
    "an int": lambda right: 10_000,
    "text": lambda right: "r1",
    "unknown ids": lambda right: [10_000, -1],
    "an empty list": lambda right: [],
    "an object": lambda right: object(),
    "a pair": lambda right: ("r1", "r1"),
}

KINDS: dict[type[PropertyMachine], tuple[str, ...]] = {
    EngineUnderTest: ENGINE,
    PoolUnderTest: POOL,
    ConnectorUnderTest: CONNECTOR,
    PolicyUnderTest: POLICY,
}


def said_of(machine: type[PropertyMachine], examples: int = 25) -> str | None:
    """What the machine says; None: nothing is wrong. Any error but `PropertyBroken` gets out."""
    chosen = settings(
        machine.TestCase.settings,
        max_examples=examples,
        stateful_step_count=10,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
    )
    try:
        run_state_machine_as_test(machine, settings=chosen)
    except PropertyBroken as broken:
        return str(broken)
    return None


NAMED = re.compile(r"^[a-z ]+ \(S\d+\): ")


def said_with(
    monkeypatch: pytest.MonkeyPatch,
    machine: type[PropertyMachine],
    method: str,
    answer: str,
    examples: int = 25,
) -> str | None:
    monkeypatch.setattr(Fault, "method", method)
    monkeypatch.setattr(Fault, "answer", staticmethod(ANSWERS[answer]))
    return said_of(machine, examples)


@settings(
    max_examples=examples(8, least=4), deadline=None, suppress_health_check=list(HealthCheck), database=None
)
@given(
    st.sampled_from([(machine, method) for machine, methods in KINDS.items() for method in methods]),
    st.sampled_from(sorted(ANSWERS)),
)
def test_no_wrong_answer_shows_an_error_from_inside_kvsm(
    wrong: tuple[type[PropertyMachine], str], answer: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        said = said_with(patch, *wrong, answer, examples(25))
    assert said is None or NAMED.match(said), said


@pytest.mark.slow
@pytest.mark.parametrize("machine", KINDS, ids=lambda machine: machine.__name__)
def test_no_wrong_answer_of_any_method_does(
    machine: type[PropertyMachine], monkeypatch: pytest.MonkeyPatch
) -> None:
    for method in KINDS[machine]:
        for answer in ANSWERS:
            said = said_with(monkeypatch, machine, method, answer)
            assert said is None or NAMED.match(said), (method, answer, said)


HERE = r"tests/core/offloader/test_wrong_objects\.py:\d+"


@pytest.mark.parametrize(
    ("machine", "method"),
    [
        (EngineUnderTest, "poll"),
        (PoolUnderTest, "get_new_blocks"),
        (ConnectorUnderTest, "update_connector_output"),
        (PolicyUnderTest, "choose"),
    ],
    ids=["engine", "pool", "connector", "policy"],
)
def test_an_error_names_the_call_and_the_line(
    machine: type[PropertyMachine], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = said_with(monkeypatch, machine, method, "raises")
    assert said is not None
    expected = (
        rf"every call is legal \(S8\): your [a-z ]+, called with {method}\(.*\), raised KeyError: 'r1', at "
    )
    assert re.search(expected + rf".*{HERE}: return", said), said


@pytest.mark.parametrize(
    ("machine", "method"),
    [
        (EngineUnderTest, "poll"),
        (PoolUnderTest, "free_queue"),
        (ConnectorUnderTest, "update_connector_output"),
    ],
    ids=["engine", "pool", "connector"],
)
def test_a_wrong_answer_names_the_answer_and_the_method(
    machine: type[PropertyMachine], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = said_with(monkeypatch, machine, method, "None")
    assert said is not None
    assert re.search(rf"called with {method}\(.*\), answered None, and kvsm cannot go on: .*{HERE}$", said), (
        said
    )


class LacksPoll(CopyEngineMachine):
    def make_engine(self, device: Any, host: Any) -> Any:
        return object()


class MakesNone(OffloadMachine):
    def make_scheduler(self, offloader: Any, config: Any) -> Any:
        return None


@pytest.mark.parametrize(("machine", "lacks"), [(LacksPoll, "poll()"), (MakesNone, "build_connector_meta()")])
def test_a_missing_method_is_named(machine: type[PropertyMachine], lacks: str) -> None:
    said = said_of(machine)
    assert said is not None
    assert said.startswith("every call is legal (S8): your ")
    assert lacks in said
    assert re.search(HERE, said)


class ReportsStrangers(OffloadScheduler):
    """Says that a request has loaded which the engine does not know."""

    def update_connector_output(self, reports: Any) -> Any:
        results = super().update_connector_output(reports)
        return type(results)(
            (*results.loads, LoadEnded("r99", True, 0)), results.finished_sending, results.drained
        )


class StrangersUnderTest(OffloadMachine):
    def make_scheduler(self, offloader: Any, config: Any) -> Any:
        return ReportsStrangers(offloader, config)


def test_an_answer_about_an_unknown_request_is_no_key_error() -> None:
    """It was a `KeyError` of the small engine, which named neither the call nor a property."""
    said = said_of(StrangersUnderTest)
    assert said is not None
    assert NAMED.match(said)
    assert "update_connector_output(" in said
    assert re.search(HERE, said)
