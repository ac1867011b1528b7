"""vLLM's own manager under the recorder: its answers are unchanged, the log verifies, and faults are
found."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from scenes import spec_config
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingManager,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from workloads import TIGHT, Row, make_trial

import kvsm.core.offloader
from kvsm.core.ledger.snapshot import digest, snapshot
from kvsm.core.log import LogReader, LogWriter, WholeState
from kvsm.errors import ConfigError
from kvsm.events import HitMatched, OffloadConfig
from kvsm.explain.story import rebuild, verify_log
from kvsm.properties import Property
from kvsm.vllm import recording_manager
from kvsm.vllm.extra_config import RecordingOptions, parse
from kvsm.vllm.manager_recorder import FINDINGS, STORES_PER_SLOT, ManagerRecorder
from kvsm.vllm.recording_manager import NOT_RECORDED, RECORDED, RecordingManager
from kvsm.vllm.tiny_model import LLAMA
from kvsm.vllm.trial import run_trial
from kvsm.vllm.versions import features

CHUNKS = 5


def key(family: int, place: int) -> bytes:
    return make_offload_key(bytes([family, place] * 8), 0)


def recorded(manager: Any, directory: Path, chunks: int = CHUNKS) -> RecordingManager:
    device_blocks = STORES_PER_SLOT * chunks + 64
    config = OffloadConfig(host_blocks=chunks, device_blocks=device_blocks, defer_ticks=0, transfer_ticks=0)
    writer = LogWriter(
        directory,
        config=config,
        snapshot=lambda: WholeState(snapshot(recorder.ledger)),
        durability="none",
        segment_bytes=2000,
    )
    recorder = ManagerRecorder(config, writer, announces=manager.events is not None)
    return RecordingManager(manager, recorder)


class Job:
    """A transfer of vLLM's connector: what its completion will name."""

    def __init__(self, request: str, keys: list[bytes], store: bool) -> None:
        self.request, self.keys, self.store = request, set(keys), store


class Traffic(RuleBasedStateMachine):
    """Random calls of vLLM's offloading connector, to a manager and to its recorded twin.

    The connector's promises hold. A request loads only without other jobs, and stores only without a load. It
    loads what it just looked up. After a reset a step ends before anything is stored.
    """

    def __init__(self) -> None:
        super().__init__()
        self.directory = TemporaryDirectory()
        self.requests: dict[str, list[bytes]] = {}
        self.over: set[str] = set()
        self.contexts: dict[str, tuple[ReqContext, ReqContext]] = {}
        self.jobs: list[Job] = []
        self.begun = 0
        self.is_reset = False

    @initialize(policy=st.sampled_from(["lru", "arc"]), threshold=st.sampled_from([0, 2]))
    def start(self, policy: str, threshold: int) -> None:
        def make() -> CPUOffloadingManager:
            return CPUOffloadingManager(
                CHUNKS, cache_policy=policy, enable_events=True, store_threshold=threshold
            )

        self.plain = make()
        self.twin = recorded(make(), Path(self.directory.name) / "log")

    def ask(self, name: str, *arguments: Any, request: str = "") -> Any:
        """Ask both managers. Their answers must be equal; returns the plain one's."""
        contexts = self.contexts[request] if request else ()
        plain = getattr(self.plain, name)(*arguments, *contexts[:1])
        twin = getattr(self.twin, name)(*arguments, *contexts[1:])
        assert told(plain) == told(twin)
        return plain

    def alive(self) -> list[str]:
        return [name for name in self.requests if name not in self.over]

    def of(self, request: str) -> list[Job]:
        return [job for job in self.jobs if job.request == request]

    @rule(family=st.integers(0, 2), length=st.integers(1, CHUNKS))
    def arrive(self, family: int, length: int) -> None:
        self.begun += 1
        name = f"r{self.begun}"
        self.requests[name] = [key(family, place) for place in range(length)]
        self.contexts[name] = ReqContext(name), ReqContext(name)
        self.ask("on_new_request", request=name)

    @precondition(lambda self: self.alive())
    @rule(data=st.data())
    def look_up(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.alive()))
        hits: list[bytes] = []
        for one in self.requests[name]:
            answer = self.ask("lookup", one, request=name)
            if answer is not LookupResult.HIT:
                break
            hits.append(one)
        loading = set().union(*[job.keys for job in self.jobs if not job.store])
        is_pending = len(hits) < len(self.requests[name]) and answer is LookupResult.HIT_PENDING
        shares = data.draw(st.booleans()) or loading.isdisjoint(hits)
        if hits and not is_pending and shares and not self.of(name):
            self.ask("prepare_load", hits, request=name)
            self.jobs.append(Job(name, hits, store=False))

    @precondition(lambda self: self.alive() and not self.is_reset)
    @rule(data=st.data())
    def store(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.alive()))
        first = data.draw(st.integers(0, len(self.requests[name]) - 1))
        if all(job.store for job in self.of(name)):
            answer = self.ask("prepare_store", self.requests[name][first:], request=name)
            if answer is not None and answer.keys_to_store:
                self.jobs.append(Job(name, answer.keys_to_store, store=True))

    @precondition(lambda self: self.alive())
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.alive()))
        self.ask("touch", self.requests[name], request=name)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), good=st.sampled_from([True, True, True, False]))
    def complete(self, data: st.DataObject, good: bool) -> None:
        job = self.jobs.pop(data.draw(st.integers(0, len(self.jobs) - 1)))
        if job.store:
            contexts = self.contexts[job.request]
            self.plain.complete_store(job.keys, contexts[0], good)
            self.twin.complete_store(job.keys, contexts[1], success=good)
        else:
            self.ask("complete_load", job.keys, request=job.request)

    @precondition(lambda self: self.alive())
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(self.alive())))

    def end(self, name: str) -> None:
        self.over.add(name)
        self.ask("on_request_finished", request=name)

    @rule(data=st.data())
    def end_step(self, data: st.DataObject) -> None:
        running = [name for name in self.alive() if all(job.store for job in self.of(name))]
        preempted = data.draw(st.sets(st.sampled_from(running), max_size=1)) if running else set()
        self.ask("on_schedule_end", ScheduleEndContext((), preempted))
        self.is_reset = False

    @rule()
    def publish(self) -> None:
        self.ask("take_events")
        self.ask("get_stats")
        assert self.twin.has_pending_work() is self.plain.has_pending_work()

    @rule()
    def reset(self) -> None:
        self.publish()
        self.ask("reset_cache")
        self.jobs.clear()
        self.is_reset = True

    def teardown(self) -> None:
        """There are no findings, and the log folds to the recorder's state."""
        if not hasattr(self, "twin"):
            return
        while self.jobs:
            job = self.jobs.pop()
            self.ask("complete_store" if job.store else "complete_load", job.keys, request=job.request)
        for name in self.alive():
            self.end(name)
        self.ask("on_schedule_end", ScheduleEndContext((), ()))
        self.publish()
        recorder = self.twin.recorder
        assert recorder.findings == []
        assert recorder.stopped is None
        assert recorder.ledger.transfers == {}
        assert recorder.ledger.requests == {}
        self.ask("shutdown")
        log = Path(self.directory.name) / "log"
        verified = verify_log(log, every=50)
        assert verified.good, verified
        assert digest(rebuild(log).ledger) == digest(recorder.ledger) == verified.digest
        self.directory.cleanup()


TestTraffic = Traffic.TestCase
"""The recorder changes no answer, and its log is legal and folds to its own state."""
TestTraffic.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


def told(answer: Any) -> Any:
    """An answer of a manager in a form that can be compared."""
    if hasattr(answer, "block_ids"):
        return answer.block_ids.tolist()
    if hasattr(answer, "keys_to_store"):
        return answer.keys_to_store, told(answer.store_spec), answer.evicted_keys
    if hasattr(answer, "reduce"):
        return answer.reduce()
    return list(answer) if isinstance(answer, Iterator) else answer


def test_a_real_engine_is_recorded_and_says_the_same(engines: Any, tmp_path: Path) -> None:
    """vLLM's manager stores, evicts and loads in a real engine. No token changes, and there are no
    findings."""
    offload = spec_config("RecordingSpec", cpu_bytes_to_use=TIGHT, event_log=str(tmp_path))
    events = {"kv_events_config": {"enable_kv_cache_events": True}}
    outcome = run_trial(make_trial(LLAMA, Row(host_bytes=TIGHT), kv_transfer=offload, engine=events))
    assert outcome.tokens == engines.reference(LLAMA).tokens
    (log,) = tmp_path.iterdir()
    assert not (log / FINDINGS).exists(), (log / FINDINGS).read_text()
    verified = verify_log(log)
    assert verified.good
    assert verified.digest == digest(rebuild(log).ledger)
    kinds = Counter(event.kind for batch in LogReader(log).batches() for event in batch)
    for kind in ("StorePlanned", "BlocksEvicted", "LoadPlanned", "WorkerReported", "RequestFinished"):
        assert kinds[kind] > 20, kinds


def test_a_directory_for_the_log_must_be_given() -> None:
    """Otherwise a missing recording would be noticed only after the incident."""
    with pytest.raises(ConfigError, match="missing required field `event_log`"):
        parse(RecordingOptions, {})


# Managers with one fault each.


class ForgetsReaders(CPUOffloadingManager):
    """A slot that is being read may be evicted."""

    def prepare_store(self, keys: Any, req_context: Any) -> Any:
        for one, chunk in self._policy.chunks.items():
            if chunk.ref_cnt > 0:
                chunk.ref_cnt = 0
                self._num_evictable_cache_chunks += 1
                self._policy.mark_evictable(one)
        return super().prepare_store(keys, req_context)


class CompletesAnother(CPUOffloadingManager):
    """With two stores in flight, the completion of one ends the other."""

    def complete_store(self, keys: Any, req_context: Any, success: bool = True) -> None:
        others = {one for one, chunk in self._policy.chunks.items() if not chunk.is_ready} - keys
        super().complete_store(others or keys, req_context, success)


class ForgetsAnEviction(CPUOffloadingManager):
    def prepare_store(self, keys: Any, req_context: Any) -> Any:
        answer = super().prepare_store(keys, req_context)
        if answer is not None:
            answer.evicted_keys = []
        return answer


class StoresAgain(CPUOffloadingManager):
    """A key that is offered again is stored again, in another slot."""

    def prepare_store(self, keys: Any, req_context: Any) -> Any:
        for one in keys:
            if one in self._policy.chunks:
                self._policy.remove(one)
        return super().prepare_store(keys, req_context)


class KeepsWhatFailed(CPUOffloadingManager):
    def complete_store(self, keys: Any, req_context: Any, success: bool = True) -> None:  # noqa: ARG002
        super().complete_store(keys, req_context, True)


class KeepsReaders(CPUOffloadingManager):
    def complete_load(self, keys: Any, req_context: Any) -> None:
        pass


class SwapsSlots(CPUOffloadingManager):
    def prepare_load(self, keys: Any, req_context: Any) -> Any:
        answer = super().prepare_load(keys, req_context)
        answer.block_ids = answer.block_ids[::-1].copy()
        return answer


class KeepsThroughReset(CPUOffloadingManager):
    def reset_cache(self) -> None:
        pass


class FindsNothing(CPUOffloadingManager):
    def lookup(self, key: Any, req_context: Any) -> LookupResult:  # noqa: ARG002
        return LookupResult.MISS


class AnnouncesNoEviction(CPUOffloadingManager):
    def take_events(self) -> Any:
        return [event for event in super().take_events() if not event.removed]


A0, A1, B0, C0, C1, D0 = (key(*one) for one in ((0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (3, 0)))


def a_day(manager: Any) -> None:
    """Four slots: two stores at once, a load, an eviction during it, a store that fails, and a reset."""
    r1, r2, r3 = (ReqContext(name) for name in ("r1", "r2", "r3"))

    def look() -> None:
        for one in (A0, A1, B0, C0, C1, D0):
            manager.lookup(one, r2)
        list(manager.take_events())
        manager.get_stats()

    for context in (r1, r2, r3):
        manager.on_new_request(context)
    look()
    manager.on_schedule_end(ScheduleEndContext((), ()))
    manager.prepare_store([A0, A1], r1)
    manager.prepare_store([B0], r2)
    manager.complete_store({A0, A1}, r1)
    look()
    manager.complete_store({B0}, r2)
    look()
    manager.prepare_load([A0, A1], r3)
    manager.on_schedule_end(ScheduleEndContext((), ()))
    manager.prepare_store([B0], r2)
    manager.prepare_store([C0, C1], r2)
    look()
    manager.complete_load({A0, A1}, r3)
    manager.complete_store({C0, C1}, r2)
    look()
    manager.prepare_store([D0], r2)
    manager.complete_store({D0}, r2, False)
    look()
    for context in (r1, r2, r3):
        manager.on_request_finished(context)
    manager.reset_cache()
    look()
    manager.on_schedule_end(ScheduleEndContext((), ()))


WRONG: list[tuple[type[CPUOffloadingManager], set[Property], Property | None]] = [
    (ForgetsReaders, {Property.NO_REUSE_IN_FLIGHT}, Property.NO_REUSE_IN_FLIGHT),
    (
        CompletesAnother,
        {Property.PUBLISH_AFTER_COMMIT, Property.ONE_RELEASE_PER_HOLD, Property.EVENTS_ARE_STATE},
        None,
    ),
    (ForgetsAnEviction, {Property.CONSERVATION}, Property.CONSERVATION),
    (StoresAgain, {Property.STORED_ONCE}, Property.STORED_ONCE),
    (KeepsWhatFailed, {Property.FAILURE_IS_NOT_SUCCESS, Property.EVENTS_ARE_STATE}, None),
    (KeepsReaders, {Property.ONE_RELEASE_PER_HOLD}, None),
    (SwapsSlots, {Property.CORRECT_BYTES}, None),
    (KeepsThroughReset, {Property.NO_STALE_DATA}, None),
    (FindsNothing, {Property.EVENTS_ARE_STATE}, None),
    (AnnouncesNoEviction, {Property.EVENTS_ARE_STATE}, None),
]
"""A manager, the properties that it breaks, and the one that `kvsm verify` reports if no legal event says
what happened."""


def test_a_manager_that_is_right_breaks_nothing_in_a_day(tmp_path: Path) -> None:
    """The day that exposes faulty managers finds nothing wrong with vLLM's."""
    manager = recorded(CPUOffloadingManager(4, enable_events=True), tmp_path / "log", 4)
    a_day(manager)
    manager.shutdown()
    assert manager.recorder.findings == []
    assert not (tmp_path / "log" / FINDINGS).exists()
    assert verify_log(tmp_path / "log").good


@pytest.mark.parametrize(("kind", "broken", "verified"), WRONG)
def test_what_is_wrong_with_a_manager_is_told_by_its_property(
    kind: Any, broken: set[Property], verified: Property | None, tmp_path: Path
) -> None:
    """The broken property is found, and no other. `kvsm verify` stops where the recorder did."""
    manager = recorded(kind(4, enable_events=True), tmp_path / "log", 4)
    with suppress(AssertionError):  # Some managers notice later that they are wrong.
        a_day(manager)
    recorder = manager.recorder
    assert set(recorder.found) == broken, recorder.findings
    lines = (tmp_path / "log" / FINDINGS).read_text().splitlines()
    assert [line.partition(",")[0] for line in lines] == [str(one.property) for one in recorder.findings]
    last = recorder.ledger.seq
    assert recorder.stopped == (f"event {last + 1} is illegal" if verified else None)
    manager.shutdown()
    found = verify_log(tmp_path / "log")
    assert [one.property for one in found.violations] == [verified] * (verified is not None)
    assert found.last == last + bool(verified)


def test_a_completion_that_comes_twice_is_told_and_the_log_stays_legal(tmp_path: Path) -> None:
    """Stale reports change nothing (S5): the second completion names no transfer. vLLM's manager and the log
    ignore it."""
    manager = recorded(CPUOffloadingManager(4), tmp_path / "log", 4)
    request = ReqContext("r1")
    manager.prepare_store([A0, A1], request)
    manager.complete_store({A0}, request)
    assert manager.recorder.found == {Property.STALE_REPORTS: 1}, "half of a store is not the store"
    manager.complete_store({A0, A1}, request)
    assert manager.recorder.found == {Property.STALE_REPORTS: 1}
    manager.complete_store({A0, A1}, request)
    assert manager.recorder.found == {Property.STALE_REPORTS: 2}
    manager.prepare_load([A0, A1], request)
    manager.complete_load({A0}, request)
    assert manager.recorder.found == {Property.STALE_REPORTS: 3}
    manager.shutdown()
    assert verify_log(tmp_path / "log").good


def test_a_copy_that_has_ended_leaves_room_for_others(tmp_path: Path) -> None:
    """Placeholders are used again; otherwise a long run would run out of them."""
    manager = recorded(CPUOffloadingManager(4), tmp_path / "log", 4)
    request = ReqContext("r1")
    for number in range(100):
        keys = [key(number, 0), key(number, 1)]
        manager.prepare_store(keys, request)
        manager.complete_store(set(keys), request)
        manager.prepare_load(keys, request)
        manager.complete_load(set(keys), request)
    assert manager.recorder.stopped is None
    assert manager.recorder.findings == []


def test_a_completion_of_before_a_reset_is_told(tmp_path: Path) -> None:
    """Stale reports change nothing (S5): vLLM's connector drops these completions. One that arrives must not
    end a later load.
    """
    manager = recorded(CPUOffloadingManager(4), tmp_path / "log", 4)
    request = ReqContext("r1")
    manager.prepare_store([A0], request)
    manager.complete_store({A0}, request)
    manager.prepare_load([A0], request)
    manager.reset_cache()
    with pytest.raises(AssertionError, match="not found"):
        manager.complete_load({A0}, request)
    assert manager.recorder.found == {Property.STALE_REPORTS: 1}


def test_a_slot_is_in_use_from_a_reset_to_the_next_step(tmp_path: Path) -> None:
    """No reuse in flight (S3): vLLM's connector flushes jobs in flight with the next step. No store may come
    before. Where vLLM plans the stores of a step before `on_schedule_end`, a store belongs to the next step.
    """
    manager = recorded(CPUOffloadingManager(4), tmp_path / "log", 4)
    request = ReqContext("r1")
    manager.prepare_store([A0], request)
    manager.reset_cache()
    manager.prepare_store([B0], request)
    early = not features().schedule_end_is_last
    assert manager.recorder.found == ({Property.NO_REUSE_IN_FLIGHT: 1} if early else {})
    assert (manager.recorder.stopped is not None) == early


def test_a_call_that_raises_raises_and_the_log_on_disk_has_all_before(tmp_path: Path) -> None:
    """An exception of the manager ends the engine, and the log is what is left."""
    manager = recorded(CPUOffloadingManager(4), tmp_path / "log", 4)
    manager.prepare_store([A0], ReqContext("r1"))
    manager.complete_store({A0}, ReqContext("r1"))
    manager.on_new_request(ReqContext("r2"))
    with pytest.raises(AssertionError, match="not found in cache"):
        manager.prepare_load([B0], ReqContext("r2"))
    assert rebuild(tmp_path / "log").ledger.seq == manager.recorder.ledger.seq


def test_a_recorder_that_fails_is_told_once_and_vllm_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No fault of the recorder can hurt an engine, and what it wrote before is readable."""
    manager = recorded(CPUOffloadingManager(4), tmp_path / "log", 4)
    told_of: list[str] = []
    monkeypatch.setattr(recording_manager.log, "exception", lambda message: told_of.append(message))
    a_day(manager)

    def fails(*_: object) -> None:
        raise OSError("no memory for that")

    monkeypatch.setattr(manager.recorder, "looked_up", fails)
    for _ in range(2):
        assert manager.lookup(A0, ReqContext("r9")) is LookupResult.MISS
    a_day(manager)
    assert len(told_of) == 1
    assert manager.recorder.stopped == "OSError: no memory for that"
    assert verify_log(tmp_path / "log").good


def test_every_method_of_a_manager_is_recorded_or_named_as_not_recorded() -> None:
    """A method that a new vLLM adds must be put into one of the two."""
    methods = {name for name in vars(OffloadingManager) if not name.startswith("_")}
    assert RECORDED.keys() | NOT_RECORDED >= methods
    assert not RECORDED.keys() & NOT_RECORDED


def test_the_recorder_knows_every_answer_of_a_lookup() -> None:
    """The recorder compares an answer with what the recorded calls add up to. RETRY promises nothing."""
    ours = {member.name for member in kvsm.core.offloader.LookupResult}
    assert {member.name for member in LookupResult} == ours | {"RETRY"}


def test_what_a_recorder_does_not_know_goes_to_the_manager(tmp_path: Path) -> None:
    """Methods of a later version are the manager's own, and vLLM may check the type of a manager."""

    class Later(CPUOffloadingManager):
        def on_reset_flushed(self, generation: int) -> str:
            return f"flushed {generation}"

    manager: Any = recorded(Later(4), tmp_path / "log", 4)
    assert manager.on_reset_flushed(3) == "flushed 3"
    assert isinstance(manager, OffloadingManager)
    assert not manager.has_pending_work()


def test_a_miss_and_a_preemption_are_in_the_log(tmp_path: Path) -> None:
    """So `kvsm show` can explain why a request had no hit: by the missed key, once if it stays the same."""
    manager = recorded(CPUOffloadingManager(4), tmp_path / "log", 4)
    request = ReqContext("r1")
    manager.on_new_request(request)
    for _ in range(3):
        manager.lookup(A0, request)
        manager.lookup(A1, request)
        manager.on_schedule_end(ScheduleEndContext((), ()))
    manager.on_schedule_end(ScheduleEndContext((), {"r1"}))
    manager.shutdown()
    events = [event for batch in LogReader(tmp_path / "log").batches() for event in batch]
    assert [event.missed for event in events if isinstance(event, HitMatched)] == [A0]
    assert events[-2].kind == "RequestPreempted"
