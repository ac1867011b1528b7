"""`kvsm.testing` finds each fault, shows it in few steps with a clear message, and passes correct code.

Each test of a machine plants one fault. `tests/stateful` runs the machines on kvsm's own code.
"""

# ruff: noqa: ARG002 (what is broken does not look at its arguments)

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from typing import Any

import msgspec
import pytest
from hypothesis import Phase, find, given, settings
from hypothesis.stateful import run_state_machine_as_test
from plain_engine import PlainCopyEngine

import kvsm.testing
from kvsm import OffloadConfig, Offloader
from kvsm.check.worlds.small_pool import SmallPool
from kvsm.copies import CopyEngine, HostCopyEngine
from kvsm.core.plan import TransferJob
from kvsm.core.policies.lru import LRUPolicy
from kvsm.core.policies.policy_copies import PlainCopy, PolicyCopy
from kvsm.core.scheduler import LastStep, OffloadScheduler, StoreMode
from kvsm.errors import ConfigError
from kvsm.events import WorkerReported
from kvsm.testing import (
    Arrival,
    Configuration,
    CopyEngineMachine,
    OffloadMachine,
    PropertyBroken,
    Recorder,
    arrivals,
    assert_at_rest,
    assert_replays,
    assert_sound,
    assert_verifies,
    block_pairs,
    configurations,
    lengths,
    report_orders,
    workloads,
)
from kvsm.testing.machine_base import PropertyMachine
from kvsm.testing.pool import WatchedPool
from kvsm.testing.profiles import PROFILES, for_machines
from kvsm.testing.restored import RestoredCopy

KEYS = [b"first" + bytes(4), b"second" + bytes(4)]


def new_core(policy: str = "lru", workers: int = 1) -> tuple[Offloader, Recorder]:
    log = Recorder()
    config = OffloadConfig(host_blocks=4, device_blocks=8, workers=workers, policy=policy)
    return Offloader(config, log, clock_ns=lambda: 0), log


def store(core: Offloader) -> TransferJob:
    job = core.prepare_store("r1", KEYS, [0, 1]).job
    assert job is not None
    core.submit([job.transfer])
    return job


def caught(machine: type[PropertyMachine]) -> tuple[str, list[str]]:
    """The message of a machine that finds a fault, and the steps that show it."""
    chosen = settings(
        machine.TestCase.settings,
        # What Hypothesis tries depends on what was imported. It ends at the first failure.
        max_examples=1_000,
        stateful_step_count=10,
        derandomize=True,
        database=None,
    )
    with pytest.raises(PropertyBroken) as found:
        run_state_machine_as_test(machine, settings=chosen)
    lines = "\n".join(found.value.__notes__).splitlines()
    steps = [line for line in lines if "state." in line][1:-1]
    return str(found.value), steps


# Assertions.


def test_assertions_pass_what_is_good() -> None:
    core, log = new_core()
    job = store(core)
    assert_sound(core.ledger)
    core.report(job.transfer, 0, True)
    core.finish("r1")
    assert_at_rest(core.ledger)
    assert_replays(log, core.ledger)
    assert_verifies(log)


def test_at_rest_names_what_is_left() -> None:
    core, _ = new_core()
    store(core)
    core.arrive("r1")
    with pytest.raises(
        PropertyBroken, match=r"^progress \(S9\): after event 4: .*1 requests.*1 transfers.*2 held slots"
    ):
        assert_at_rest(core.ledger)


def test_replay_names_what_differs() -> None:
    """S10: a forged log, in which a good report is bad, gives another state."""
    core, log = new_core()
    core.report(store(core).transfer, 0, True)
    forged = [
        msgspec.structs.replace(event, good=False) if isinstance(event, WorkerReported) else event
        for event in log
    ]
    said = r"^events are state \(S10\): the log gives .*slot 0 EV.* live STORED.*keys \[\], live \[b'first"
    with pytest.raises(PropertyBroken, match=said):
        assert_replays(forged, core.ledger)


def test_replay_names_the_event_that_does_not_fold() -> None:
    core, log = new_core()
    core.report(store(core).transfer, 0, True)
    with pytest.raises(PropertyBroken, match=r"events are state \(S10\): the log does not fold: event 4"):
        assert_replays([*log[:2], *log[3:]], core.ledger)


def test_verifying_names_the_event_and_what_led_there() -> None:
    core, log = new_core()
    core.report(store(core).transfer, 0, True)
    with pytest.raises(PropertyBroken, match=r"(?s)by event 4: .*what led there:.*event 2: StorePlanned"):
        assert_verifies([*log[:2], *log[3:]])


def test_verifying_wants_a_log_from_its_beginning() -> None:
    with pytest.raises(ConfigError, match="LogOpened"):
        assert_verifies([])


class ChoosesTooFew(LRUPolicy):
    def choose(self, count: int, protected: Any) -> Any:
        choice = super().choose(count, protected)
        return choice and choice._replace(victims=choice.victims[1:])


class ChoosesWhatIsNotIdle(LRUPolicy):
    def choose(self, count: int, protected: Any) -> Any:
        choice = super().choose(count, protected)
        return choice and choice._replace(victims=tuple(3 - slot for slot in choice.victims))


class ChangesWhenItIsAsked(LRUPolicy):
    def choose(self, count: int, protected: Any) -> Any:
        choice = super().choose(count, protected)
        if choice:
            self.touched(choice.victims)
        return choice


class CopiesAnotherState(LRUPolicy):
    def freeze(self) -> PolicyCopy:
        return PlainCopy(self.snapshot()[4:])


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (
            ChoosesTooFew,
            r"conservation \(S1\): .*was asked for 1 of its 2 idle blocks, slots .0, 1., and chose slots ..",
        ),
        (ChoosesWhatIsNotIdle, r"no reuse in flight \(S3\): .*not all of them are idle"),
        (ChangesWhenItIsAsked, r"events are state \(S10\): .*and changed: `choose` is pure"),
        (CopiesAnotherState, r"events are state \(S10\): .*`freeze` is not `snapshot` of its moment"),
    ],
)
def test_policy_that_breaks_its_word_is_not_sound(policy: type[LRUPolicy], said: str) -> None:
    core, _ = new_core(f"{__name__}:{policy.__name__}")
    core.report(store(core).transfer, 0, True)
    with pytest.raises(PropertyBroken, match=said):
        assert_sound(core.ledger)


# A ledger and its restored copy.


class NewestFirstInTheEnd(LRUPolicy):
    """After three blocks have returned from use, evicts the newest first. The snapshot lacks the count."""

    uses = 0

    def idle(self, slots: Any) -> None:
        super().idle(slots)
        self.uses += len(slots)

    def choose(self, count: int, protected: Any) -> Any:
        choice = super().choose(len(self), protected)
        if self.uses < 3 or choice is None:
            return super().choose(count, protected)
        return choice._replace(victims=choice.victims[::-1][:count])


class RestoresNothing(LRUPolicy):
    def restore(self, state: bytes) -> None:
        pass


class CannotGoOn(LRUPolicy):
    def restore(self, state: bytes) -> None:
        super().restore(state)
        self.idle = None  # type: ignore[method-assign, assignment]


def use_again(core: Offloader) -> None:
    core.match("r2", KEYS[:1])
    core.release("r2")


def restored(policy: type[LRUPolicy]) -> tuple[Offloader, RestoredCopy]:
    """A core with two blocks, one of them used, and a restored copy of it."""
    core, log = new_core(f"{policy.__module__}:{policy.__name__}")
    core.report(store(core).transfer, 0, True)
    use_again(core)
    return core, RestoredCopy(core.ledger, log)


def test_a_policy_that_is_saved_whole_passes() -> None:
    core, copy = restored(LRUPolicy)
    use_again(core)
    copy.check()


def test_a_state_that_is_not_saved_is_caught_when_it_matters() -> None:
    """S10: right after the restart both make the same choices; two uses later they do not."""
    core, copy = restored(NewestFirstInTheEnd)
    use_again(core)
    copy.check()
    use_again(core)
    with pytest.raises(PropertyBroken, match=r"S10.: .*NewestFirstInTheEnd, restored .* answers choose"):
        copy.check()


def test_a_policy_that_restores_nothing_is_caught_at_once() -> None:
    with pytest.raises(PropertyBroken, match="answers len with 0; the live one with 2"):
        restored(RestoresNothing)


def test_a_restored_policy_that_fails_is_caught() -> None:
    core, copy = restored(CannotGoOn)
    use_again(core)
    with pytest.raises(PropertyBroken, match=r"restored from its snapshot, cannot fold event .*: TypeError"):
        copy.check()


# Pools.


class UsersPool(SmallPool):
    """A pool under the names of `BlockPool`."""

    def get_new_blocks(self, count: int) -> list[int]:
        return self.take(count)

    def cache_full_blocks(self, blocks: Iterable[int], keys: Iterable[bytes]) -> None:
        for block, key in zip(blocks, keys):
            self.cache(block, key)

    def reset_prefix_cache(self) -> None:
        self.forget()


class TakesHeld(UsersPool):
    def take(self, count: int) -> list[int]:
        return [0] * count if count == 1 else super().take(count)


class GivesTooMany(UsersPool):
    def take(self, count: int) -> list[int]:
        return [0, 0, 1]


class LosesBlocks(UsersPool):
    def free_blocks(self, blocks: Iterable[int]) -> None:
        pass


class FindsOtherContent(UsersPool):
    def cached_block(self, key: bytes) -> int | None:
        return 1


class KeepsKeysOfHeldBlocks(UsersPool):
    def forget(self) -> None:
        held = {block: key for block, key in self.caches.items() if self.references[block]}
        super().forget()
        self.caches |= held


class FindsHeldBlocksAfterAReset(UsersPool):
    def forget(self) -> None:
        held = {key: block for key, block in self.cached.items() if self.references[block]}
        super().forget()
        self.cached |= held


def take_twice(pool: WatchedPool) -> None:
    pool.take(2)
    pool.take(1)


def release_twice(pool: WatchedPool) -> None:
    pool.free_blocks(pool.take(2))
    pool.free_blocks([0])


class FindsOtherKeysOfMany(UsersPool):
    def keys_of(self, blocks: Sequence[int]) -> list[bytes | None]:
        return [None for _ in blocks]


def cache_first(pool: WatchedPool) -> None:
    pool.cache(pool.take(2)[0], KEYS[0])


@pytest.mark.parametrize(
    ("pool", "use", "said"),
    [
        (TakesHeld, take_twice, r"no reuse in flight \(S3\): device block 0 is handed out, and 1 hold it"),
        (
            GivesTooMany,
            take_twice,
            r"no reuse in flight \(S3\): get_new_blocks.2. gave .0, 0, 1.: not 2 different blocks",
        ),
        (
            LosesBlocks,
            release_twice,
            r"conservation \(S1\): after free_blocks.* the free queue has device blocks",
        ),
        (
            TakesHeld,
            release_twice,
            r"one release per hold \(S4\): device block 0 is released, and nobody holds it",
        ),
        (
            FindsOtherKeysOfMany,
            cache_first,
            r"correct bytes \(S15\): .* keys_of returns other keys than key_of",
        ),
        (FindsOtherContent, cache_first, r"correct bytes \(S15\): .* device block 1 should hold key"),
        (
            KeepsKeysOfHeldBlocks,
            WatchedPool.try_reset,
            r"S14.: after reset_prefix_cache.. key_of\(0\) returns a key",
        ),
        (FindsHeldBlocksAfterAReset, WatchedPool.try_reset, r"S14.: after reset_prefix_cache.. cached_block"),
    ],
)
def test_watched_pool_refuses(pool: type[UsersPool], use: Callable[[WatchedPool], None], said: str) -> None:
    with pytest.raises(PropertyBroken, match=said):
        use(WatchedPool(pool(4), 4))


def test_machine_resets_a_pool_while_blocks_are_held() -> None:
    """The machine checks this (S14) at the end of every example, so one example is enough."""

    class Machine(OffloadMachine):
        def make_pool(self, blocks: int) -> KeepsKeysOfHeldBlocks:
            return KeepsKeysOfHeldBlocks(blocks)

    chosen = settings(Machine.TestCase.settings, max_examples=1, stateful_step_count=1, database=None)
    with pytest.raises(PropertyBroken, match=r"no stale data \(S14\): after reset_prefix_cache"):
        run_state_machine_as_test(Machine, settings=chosen)


# The machine over scheduler and core, driven by hand. `test_examples.py` has what Hypothesis makes of it.


def opened(machine: OffloadMachine, **configuration: Any) -> OffloadMachine:
    """A machine with a request that has computed two blocks, whose store is in flight."""
    configuration.setdefault("last_step", LastStep.KEEP_STEPPING)
    machine.open(Configuration(**configuration), Arrival(length=9, outputs=4))
    machine.step(None, True, 3)
    return machine


def test_machine_passes_what_is_good() -> None:
    machine = opened(OffloadMachine(), workers=2)
    [share, other] = [(transfer, worker) for transfer in machine.engine.copies for worker in (0, 1)]
    machine.carry_out(share, True)
    [report] = machine.engine.reports
    machine.report_again(report)
    machine.call_wrongly(-1)
    machine.carry_out(other, False)
    machine.preempt(0)
    machine.let_all_end()
    machine.reset(True)
    assert_at_rest(machine.core.ledger)


def test_a_report_from_nowhere_loses_no_answer() -> None:
    """One release per hold (S4): the answer to it may name a finished request whose blocks may go."""
    machine = OffloadMachine()
    (first,) = machine.open(configuration=Configuration(references=False), first=Arrival(length=3)).values
    machine.take_another_turn(before=first, further=1)
    machine.step(accept=None, admit=True, times=1)
    machine.reset(really=True)
    assert machine.engine.sending
    machine.call_wrongly(block=-1)
    assert not machine.engine.sending
    machine.teardown()


class TooFewMachine(OffloadMachine):
    policy = ChoosesTooFew


def test_policy_that_chooses_too_few_is_caught() -> None:
    machine = opened(TooFewMachine())
    with pytest.raises(
        PropertyBroken,
        match=r"conservation \(S1\): .*policy test_testing:ChoosesTooFew was asked for 1 of its 2",
    ):
        machine.let_all_end()


class ForgetsToHold(OffloadScheduler):
    def _add_to_plan(self, job: TransferJob) -> None:
        self.state.planned.append(job)


class ForgetsToHoldMachine(OffloadMachine):
    def make_scheduler(self, offloader: Offloader, config: Any) -> Any:
        return ForgetsToHold(offloader, config)


def test_connector_that_holds_no_blocks_under_copies_is_caught() -> None:
    machine = opened(ForgetsToHoldMachine())
    with pytest.raises(
        PropertyBroken, match=r"one release per hold \(S4\): device block . is released, and nobody holds it"
    ):
        machine.let_all_end()


def test_late_report_that_changes_something_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    report = Offloader.report

    def careless(self: Offloader, transfer: int, *rest: Any) -> Any:
        if transfer not in self.ledger.transfers:
            self.preempt("r1")
        return report(self, transfer, *rest)

    monkeypatch.setattr(Offloader, "report", careless)  # Before a core is made: a native one has its own.
    machine = opened(OffloadMachine())
    with pytest.raises(
        PropertyBroken,
        match=r"stale reports change nothing \(S5\): a report from nowhere changed .*: was requests .*'r1'",
    ):
        machine.call_wrongly(-1)


def test_engine_that_is_not_told_of_pending_work_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OffloadScheduler, "has_pending_work", lambda _: False)
    machine = opened(OffloadMachine())
    machine.finish(next(iter(machine.engine.requests.values())), True)
    with pytest.raises(PropertyBroken, match=r"flush at last step \(S17\): transfers .* are under way"):
        machine.check()


def test_other_bytes_on_the_host_are_caught() -> None:
    machine = opened(OffloadMachine(), workers=2)
    machine.engine.carry_out_all()
    machine.hand_on()
    machine.engine.host[0][1] = [b"other"]
    with pytest.raises(
        PropertyBroken,
        match=r"publish after commit \(S2\): slot 0 can be read, and holds other bytes on worker 1",
    ):
        machine.check()


def test_reset_that_leaves_a_key_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = opened(OffloadMachine())
    monkeypatch.setattr(OffloadScheduler, "reset_cache", lambda _: True)
    with pytest.raises(PropertyBroken, match=r"no stale data \(S14\): 2 keys match after a reset"):
        machine.reset(True)


def test_core_that_stores_what_is_not_there_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = opened(OffloadMachine())
    monkeypatch.setattr(machine.core, "prepare_store", lambda *_: None)
    with pytest.raises(
        PropertyBroken, match=r"every call is legal \(S8\): device block -1 is not there, and was stored"
    ):
        machine.call_wrongly(-1)


def test_block_that_is_held_at_rest_is_caught() -> None:
    machine = opened(OffloadMachine())
    machine.let_all_end()
    [block] = machine.engine.pool.take(1)
    with pytest.raises(
        PropertyBroken, match=rf"one release per hold \(S4\): at rest device blocks \[{block}\] are held"
    ):
        machine.wind_down()


def test_what_a_run_that_failed_did_is_noted() -> None:
    """In the words of `kvsm show`, from the first event on."""
    lines = list(opened(OffloadMachine()).trace())
    assert lines[0].startswith(
        "event 1 step 0: LogOpened 4 host blocks, 14 device blocks, 1 workers, policy lru"
    )
    assert any(line.startswith("event 7 step 1: ") for line in lines)


# The machine over copy engines.


class CopiesAtOnce(HostCopyEngine):
    """Each copy has ended when `submit` returns: what the engines below break must not depend on whether
    their thread has run before the next poll."""

    def submit(self, job: TransferJob, after: Any = None) -> None:
        super().submit(job, after)
        self.drain()


class AcceptsLive(CopiesAtOnce):
    def submit(self, job: TransferJob, after: Any = None) -> None:
        if job.transfer not in self._live:
            super().submit(job, after)


class EndsTwice(CopiesAtOnce):
    def poll(self) -> list[Any]:
        return 2 * super().poll()


class HidesErrors(CopiesAtOnce):
    def poll(self) -> list[Any]:
        return [msgspec.structs.replace(one, good=True, error="") for one in super().poll()]


class FailsForNothing(CopiesAtOnce):
    def poll(self) -> list[Any]:
        return [msgspec.structs.replace(one, good=False, error="why not") for one in super().poll()]


class WritesTheFirstBlockOnly(CopiesAtOnce):
    def copy_blocks(self, direction: Any, devices: Any, hosts: Any) -> None:
        super().copy_blocks(direction, devices[:1], hosts[:1])


class KeepsResults(CopiesAtOnce):
    def poll(self) -> list[Any]:
        return []


@pytest.mark.parametrize(
    ("engine", "said", "most"),
    [
        (AcceptsLive, "every call is legal (S8): transfer 1 was accepted", 2),
        (EndsTwice, "progress (S9): transfer 1 ended, and no such transfer was live", 2),
        (HidesErrors, "failure is not success (S6): transfer 1 is good, and names no block of its pool", 2),
        (
            FailsForNothing,
            "failure is not success (S6): transfer 1 could be carried out, and failed: why not",
            2,
        ),
        (WritesTheFirstBlockOnly, "correct bytes (S15): ", 1),
        (KeepsResults, "progress (S9): transfers [1] have no result after", 2),
    ],
)
def test_copy_engine_that_breaks_a_promise_is_caught(
    engine: type[HostCopyEngine], said: str, most: int
) -> None:
    class Machine(CopyEngineMachine):
        def make_engine(self, device: Any, host: Any) -> HostCopyEngine:
            return engine(device, host, threads=1)

    found, steps = caught(Machine)
    assert found.startswith(said)
    assert len(steps) <= most


@pytest.mark.slow
def test_engine_that_does_not_hold_compute_is_caught() -> None:
    """S12: the engine copies when it is polled, although compute may be running."""

    class Machine(CopyEngineMachine):
        def make_engine(self, device: Any, host: Any) -> CopyEngine:
            return PlainCopyEngine(device, host)

    found, steps = caught(Machine)
    assert found.startswith("correct bytes (S15): ")
    assert len(steps) <= 3


def test_machine_without_an_engine_says_what_it_needs() -> None:
    chosen = settings(CopyEngineMachine.TestCase.settings, max_examples=1, database=None)
    with pytest.raises(NotImplementedError, match="make_engine"):
        run_state_machine_as_test(CopyEngineMachine, settings=chosen)


# Strategies.


def test_lengths_stand_around_the_ends_of_blocks() -> None:
    seen = {
        find(lengths(16, 2), lambda one, wanted=wanted: one == wanted) for wanted in (15, 16, 17, 31, 32, 33)
    }
    assert len(seen) == 6


@given(workloads())
def test_prompts_of_a_workload_begin_alike(workload: list[Arrival]) -> None:
    for first in workload:
        for second in workload:
            alike = min(first.length, second.length, 8 if first.conversation != second.conversation else 99)
            assert first.tokens()[:alike] == second.tokens()[:alike]


def test_prompts_of_two_conversations_part() -> None:
    assert Arrival(conversation=0, length=9).tokens()[8] != Arrival(conversation=1, length=9).tokens()[8]


def test_plainest_request_is_short_and_wishes_nothing() -> None:
    assert find(arrivals(), lambda _: True) == Arrival(length=3)


@given(report_orders([5, 9], workers=2))
def test_every_worker_reports_every_transfer(reports: list[Any]) -> None:
    shares = {(report.transfer, report.worker) for report in reports[:4]}
    assert shares == {(5, 0), (5, 1), (9, 0), (9, 1)}
    assert set(reports[4:]) <= set(reports[:4])


@given(block_pairs(3, 5))
def test_a_transfer_names_each_block_once(pairs: list[tuple[int, int]]) -> None:
    for side in (0, 1):
        assert len({pair[side] for pair in pairs}) == len(pairs)


@given(configurations(workers=2, store=StoreMode.LAZY))
def test_configurations_hold_what_is_fixed_and_can_work(configuration: Any) -> None:
    assert (configuration.workers, configuration.store) == (2, StoreMode.LAZY)
    assert configuration.references
    assert configuration.blocks_per_chunk == configuration.store_threshold == 1


# Profiles.


def test_ci_profile_has_new_examples_and_says_how_to_have_them_again() -> None:
    """Under CI, too, where Hypothesis would repeat the same examples."""
    script = (
        "from hypothesis import settings\nimport kvsm.testing.profiles\n"
        "assert settings().derandomize\n"
        "settings.load_profile('kvsm-ci')\n"
        "one = settings()\nassert (one.derandomize, one.print_blob, one.deadline) == (False, True, None), one"
    )
    subprocess.run([sys.executable, "-c", script], check=True, env={"CI": "1"})


def test_only_long_runs_aim_and_none_explains() -> None:
    assert Phase.target not in for_machines(PROFILES["kvsm"]).phases
    assert Phase.target in for_machines(PROFILES["kvsm-long"]).phases
    assert all(Phase.explain not in for_machines(one).phases for one in PROFILES.values())


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_a_machine_that_needs_vllm_says_so() -> None:
    with pytest.raises(ImportError, match="ManagerMachine needs vLLM: pip install vllm"):
        kvsm.testing.ManagerMachine  # noqa: B018


def test_every_public_name_is_there() -> None:
    assert [name for name in kvsm.testing.__all__ if not hasattr(kvsm.testing, name)] == []
