"""`ManagerMachine` passes vLLM's managers, and finds what is broken.

Each broken manager has one fault. What is found in vLLM's tiering manager is told in docs/findings.md.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test

pytest.importorskip("vllm", reason="vLLM is not installed")

import tested_managers as managers
from tested_managers import tiers, vllms
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager

from kvsm.testing import ManagerMachine, PropertyBroken
from kvsm.vllm.versions import features


class Lru(ManagerMachine):
    def make_manager(self, blocks: int) -> Any:
        return vllms(blocks)


class Arc(ManagerMachine):
    def make_manager(self, blocks: int) -> Any:
        return vllms(blocks, "arc")


class WithoutEvents(ManagerMachine):
    publishes_events = False

    def make_manager(self, blocks: int) -> Any:
        return managers.CPUOffloadingManager(blocks)


class Tiers(ManagerMachine):
    tiers_below = True

    def make_manager(self, blocks: int) -> Any:
        return tiers(blocks)


class TiersWithRoom(Tiers):
    """No block is evicted before the end, and no promotion is in flight when the cache is reset: see the
    findings."""

    pools = st.just(16)
    crowd = fill = reset = None

    @rule()
    def reset_at_rest(self) -> None:
        with self._locked():
            self._let_all_end()
            self._reset()


def run(machine: type[ManagerMachine], examples: int, **options: Any) -> None:
    chosen = settings(
        machine.TestCase.settings,
        max_examples=examples,
        stateful_step_count=20,
        derandomize=True,
        database=None,
        deadline=None,
        **options,
    )
    run_state_machine_as_test(machine, settings=chosen)


@pytest.mark.parametrize("machine", [Lru, Arc, WithoutEvents, TiersWithRoom])
def test_a_good_manager_passes(machine: type[ManagerMachine]) -> None:
    run(machine, 30)


BROKEN = {
    "EvictsUnderALoad": ("no reuse in flight (S3): ",),
    "LeaksOnAFailedStore": ("conservation (S1): at rest",),
    "HitsWhatIsBeingStored": ("publish after commit (S2): ",),
    "TellsAStoreTwice": ("events are state (S10): two events store",),
    "TouchPins": ("conservation (S1): at rest",),
    "BelievesFailedStores": (
        "failure is not success (S6): ",
        "events are state (S10): ",
        "conservation (S1): ",
    ),
    "KeepsWhatIsReset": ("no stale data (S14): ", "events are state (S10): "),
    "LoadsTheNextBlock": ("correct bytes (S15): ",),
    "EvictsSilently": ("conservation (S1): ", "events are state (S10): "),
    "MissesWhatIsTouched": ("stored, so served (S19): ",),
    "MissesTheFourthKey": ("stored, so served (S19): ",),
    "WaitsForever": ("progress (S9): ",),
    "RefusesWhatFailed": ("conservation (S1): at rest request",),
    "AnswersYes": ("every call is legal (S8): your manager answered lookup(",),
    "LosesRequests": ("every call is legal (S8): your manager, called with complete_store(",),
}
"""A fault -> what is said of it. Of some faults Hypothesis may meet another consequence first."""


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_manager_is_found(name: str) -> None:
    class Broken(ManagerMachine):
        def make_manager(self, blocks: int) -> Any:
            return vllms(blocks, kind=getattr(managers, name))

    with pytest.raises(PropertyBroken) as caught:
        # To shrink each failure would take a minute. The example is shrunk.
        run(Broken, 2_000, phases=[Phase.generate])
    assert str(caught.value).startswith(BROKEN[name])
    if "(S8)" in str(caught.value):
        assert "tested_managers.py:" in str(caught.value)


def test_a_hit_that_a_store_of_its_step_evicts_is_found_if_hits_should_hold() -> None:
    """vLLM's own manager does not promise it."""

    class Holds(Lru):
        hits_hold = True
        schedule_end_is_last = True

    with pytest.raises(PropertyBroken, match=r"\(S7\): .* was told in this step"):
        run(Holds, 2_000, phases=[Phase.generate])


# Findings in vLLM's tiering manager (docs/findings.md).


def context(name: str, keys: list[Any]) -> ReqContext:
    made = ReqContext(name)
    for place, key in enumerate(keys):
        made.set_offload_key_position(key, 16 * (place + 1))
    return made


def keys_of(name: str, count: int) -> list[Any]:
    return [make_offload_key(f"{name}{place}".encode(), 0) for place in range(count)]


class Steps:
    """A tiering manager, called by hand."""

    def __init__(self, blocks: int) -> None:
        self.manager = tiers(blocks)

    def arrive(self, name: str, keys: list[Any]) -> ReqContext:
        made = context(name, keys)
        self.manager.on_new_request(made)
        return made

    def end(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def store(self, keys: list[Any], request: ReqContext) -> None:
        output = self.manager.prepare_store(keys, request)
        assert output is not None
        self.manager.complete_store(set(output.keys_to_store), request)
        self.end()
        self.end()

    def looked_up(self, keys: list[Any], request: ReqContext) -> set[LookupResult]:
        """One step: a lookup along the prefix, up to the first miss."""
        found = set()
        for key in keys:
            found.add(answer := self.manager.lookup(key, request))
            if answer is LookupResult.MISS:
                break
        self.end()
        return found


def test_a_hit_below_that_is_longer_than_the_pool_is_never_answered() -> None:
    """Progress (S9): each promotion evicts what an earlier one has brought for the same request."""
    steps, keys = Steps(3), keys_of("a", 4)
    storer = steps.arrive("r1", keys)
    for key in keys:
        steps.store([key], storer)
    waiting = steps.arrive("r2", keys)
    for _ in range(100):
        assert LookupResult.HIT_PENDING in steps.looked_up(keys, waiting)


def test_a_hit_below_that_fits_is_not_answered_by_vllm_0_33() -> None:
    """Progress (S9): in 0.33 all keys of a request have the rank of its first use, so they go before those of
    later requests, which are idle."""
    steps, keys = Steps(100), keys_of("a", 3)
    request = steps.arrive("r1", keys)
    steps.store(keys[:1], request)
    others = keys_of("b", 100)
    steps.store(others, steps.arrive("r2", others))
    steps.store(keys[1:], request)
    answers = [steps.looked_up(keys, request) for _ in range(100)]
    waits = [LookupResult.HIT_PENDING in found for found in answers]
    assert all(waits) if features().schedule_end_is_last else waits == [True] + [False] * 99


def test_a_promotion_that_ends_in_a_reset_is_told_as_stored() -> None:
    """Events are state (S10): the event comes after vLLM has said that the cache is empty."""
    steps, keys = Steps(1), keys_of("a", 2)
    request = steps.arrive("r1", keys)
    steps.store(keys[:1], request)
    steps.store(keys[1:], request)
    steps.looked_up(keys, steps.arrive("r2", keys))
    list(steps.manager.take_events())
    steps.manager.reset_cache()
    told = [(event.keys, event.removed) for event in steps.manager.take_events()]
    assert told == [(keys[:1], False)]
    assert steps.manager.primary_tier.lookup(keys[0], request) is LookupResult.MISS


class Lookups(AsyncLookupManager):  # type: ignore[misc]
    """vLLM's memory of the lookups of a tier that has these keys."""

    def __init__(self) -> None:
        super().__init__("test")
        self.kept: set[bytes] = set()

    def batch_lookup(self, keys: list[Any], req_context: Any) -> list[bool]:  # noqa: ARG002
        return [key in self.kept for key in keys]

    def answer(self, key: bytes, request: ReqContext) -> bool:
        """Ask once a step, until the tier has answered."""
        for _ in range(1_000):
            if (found := self.lookup(key, request)) is not None:
                return bool(found)
            self.flush()
            time.sleep(0.005)
        raise AssertionError("the tier has not answered")


def test_a_miss_is_remembered_after_the_key_is_in_the_tier() -> None:
    """As long as a request lives that has asked, also another one gets the miss. Then the tier is asked."""
    (key,) = keys_of("a", 1)
    first, second, third = (context(name, [key]) for name in ("r1", "r2", "r3"))
    lookups = Lookups()
    assert not lookups.answer(key, first)
    lookups.kept.add(key)
    assert not lookups.answer(key, first)
    assert not lookups.answer(key, second)
    for request in (first, second):
        lookups.cleanup(request.req_id)
    assert lookups.answer(key, third)
    lookups.shutdown()


def test_the_machine_finds_that_a_tiering_manager_makes_a_request_wait() -> None:
    with pytest.raises(PropertyBroken, match=r"progress \(S9\): no copy is in flight"):
        run(Tiers, 1_000, phases=[Phase.generate])
