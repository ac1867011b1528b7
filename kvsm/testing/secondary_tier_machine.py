"""Test a secondary tier of vLLM's TieringOffloadingSpec with every order of calls that Hypothesis can find.

    class MyTierMachine(SecondaryTierMachine):
        def make_tier(self, view):
            return MyTier(None, view, "mine")

    TestMyTier = MyTierMachine.TestCase

The machine calls the tier as `TieringOffloadingManager` does. A store copies chunks of the primary tier to
this tier, a load copies them back, and several jobs are in flight. A load follows lookups that hit. Results
are polled, and all jobs are drained. The content of a chunk is computed from its key. The machine tracks
which keys are stored and which jobs are in flight. It checks that:

- a hit was stored (publish after commit, S2); its load delivers the bytes of its key (correct bytes, S15);
- a chunk whose store succeeded hits until it may be evicted, and its load succeeds (stored, so served, S19);
- a load that cannot be carried out is reported as failed, and only chunks with the right bytes as loaded
  (failure is not success, S6);
- each job ends once, and no other job does (one release per hold, S4); a drain ends all of them, lookups are
  answered, no work stays pending, and after the shutdown no thread runs (progress, S9);
- only the slots of loads in flight are written (no reuse in flight, S3), also after a shutdown;
- with `capacity`, never more chunks hit (conservation, S1);
- after a restart a hit is intact (no stale data, S14), and what was stored hits (S19);
- KV events announce the stored chunks (events are state, S10);
- no call raises (every call is legal, S8).

If the tier copies in threads, a failure may depend on timing. Not checked: which chunk is evicted,
statistics, metrics, `serve_external_requests`, and changed bytes in a file (vLLM's tiers keep no checksums).
"""

from __future__ import annotations

import mmap
import os
import resource
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, MultipleResults, multiple
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob

from kvsm.check.worlds.check_counts import count_case
from kvsm.errors import PropertyBroken
from kvsm.properties import Property
from kvsm.testing.machine_base import PropertyMachine, initialize, rule

KEYS = 6
"""The number of different chunks."""

CHUNKS = 8
"""The number of chunks in the primary tier."""

CHUNK_BYTES = mmap.PAGESIZE
"""Bytes of a chunk: whole pages, as vLLM's tiers require for direct IO."""

FREE = 0xEE
"""Every byte of a chunk of the primary tier that belongs to no job."""

MOST_REQUESTS = 4

WAIT_S = 10.0
"""The time within which a tier must answer a lookup, and its threads must end (s)."""

MOST_TOLD = 40
"""A failure lists at most this many calls, the last ones."""

_CALLED = (
    "lookup",
    "submit_store",
    "submit_load",
    "get_finished_jobs",
    "touch",
    "on_new_request",
    "on_request_finished",
    "on_schedule_end",
    "has_pending_work",
    "take_events",
    "drain_jobs",
    "shutdown",
)
"""The methods of `SecondaryTierManager` whose calls are recorded."""


class ChunkKey(bytes):
    """A key whose `repr` is readable."""

    def __repr__(self) -> str:
        return self[:-4].rstrip(b"\0").decode()


_KEYS = [ChunkKey(make_offload_key(f"k{number}".encode().ljust(16, b"\0"), 0)) for number in range(KEYS)]
_CONTENT = {key: number + 1 for number, key in enumerate(_KEYS)}
"""Key -> every byte of its chunk."""


class TierRequest:
    """A request, and whether it has finished."""

    def __init__(self, name: str) -> None:
        self.name, self.context, self.over = name, ReqContext(name), False

    def __repr__(self) -> str:
        return self.name


class TierJob:
    """A job in flight.

    must_succeed: the keys of a load that were known to be stored when it was submitted.
    """

    def __init__(
        self,
        is_load: bool,
        keys: Sequence[ChunkKey],
        slots: Sequence[int],
        must_succeed: Collection[ChunkKey],
    ) -> None:
        self.is_load, self.keys, self.slots, self.must_succeed = is_load, keys, slots, must_succeed

    def __repr__(self) -> str:
        return f"{'load' if self.is_load else 'store'} of {list(self.keys)}"


class SecondaryTierMachine(PropertyMachine):
    """Tests one secondary tier.

    Needs: vLLM, and a subclass with `make_tier(view)`, which returns a `SecondaryTierManager` over this view
    of the primary tier: `CHUNKS` chunks of `CHUNK_BYTES` bytes.

    `capacity`: the most chunks that the tier keeps. If it is set, the tier may evict any chunk at any time.
    `restarts = True`: after a shutdown, a new tier from `make_tier` must find what was stored.
    `path_of(key)`: the file of a chunk. Then the machine truncates and removes files, and fills the disk.
    `publishes_events = True`: the tier has KV events.
    `may_fail = True`: the tier may fail a job that it could carry out.

    Attributes in `make_tier`: `self.directory`, an empty directory of this run, which restarts keep.
    """

    capacity: int | None = None
    """The most chunks that the tier keeps; None: it keeps all."""

    restarts = False
    """Whether a new tier in the same directory finds what was stored."""

    publishes_events = False
    """Whether the tier publishes KV events."""

    may_fail = False
    """Whether the tier may fail a job that it could carry out."""

    polls_forever = False
    """Whether work is always pending, because other engines may ask for chunks at any time."""

    misses_last = False
    """Whether the tier may repeat a miss to other requests until all requests that looked up the key have
    finished."""

    requests: Bundle[TierRequest] = Bundle("requests")

    # For subclasses to override.

    def make_tier(self, view: memoryview) -> Any:
        """Make the `SecondaryTierManager` to test, over this view of the primary tier."""
        raise NotImplementedError(f"{type(self).__name__} must say which tier it is for: make_tier")

    def path_of(self, key: bytes) -> Path | None:  # noqa: ARG002
        """Return the file in which the tier keeps a chunk; None: it keeps no files."""
        return None

    # Rules.

    @initialize(target=requests)
    def open(self) -> MultipleResults[TierRequest]:
        """Make the tier, and let two requests arrive."""
        self._directory = TemporaryDirectory(prefix="kvsm-tier-")
        self.directory = Path(self._directory.name)
        self._memory: Any = np.frombuffer(mmap.mmap(-1, CHUNKS * CHUNK_BYTES), np.uint8)
        self._memory = self._memory.reshape(CHUNKS, CHUNK_BYTES)
        self._memory[:] = FREE
        self._free = list(range(CHUNKS))
        self._jobs: dict[int, TierJob] = {}
        self._submitted = 0
        self._stored: set[ChunkKey] = set()
        """Keys that must hit: their store succeeded, and nothing has damaged them."""
        self._possible: set[ChunkKey] = set()
        """Keys that may hit: a store of them has begun."""
        self._askers: dict[ChunkKey, set[TierRequest]] = {key: set() for key in _KEYS}
        """Key -> the unfinished requests that have looked it up."""
        self._early: dict[ChunkKey, set[TierRequest]] = {}
        """Key -> the unfinished requests that looked it up before its store succeeded."""
        self._announced: set[bytes] = set()
        self._asked: list[TierRequest] = []
        self._restarted = False
        self._make()
        self.started = True
        return multiple(self._arrive(), self._arrive())

    @rule(target=requests)
    def arrive(self) -> MultipleResults[TierRequest]:
        """Let a request arrive."""
        if sum(not request.over for request in self._asked) >= MOST_REQUESTS:
            return multiple()
        return multiple(self._arrive())

    @rule(request=requests, keys=st.lists(st.sampled_from(_KEYS), min_size=1, max_size=3, unique=True))
    def store(self, request: TierRequest, keys: list[ChunkKey]) -> None:
        """Begin to store chunks."""
        if not request.over and len(keys) <= len(self._free):
            self._store(request, keys)

    @rule(request=requests, keys=st.lists(st.sampled_from(_KEYS), min_size=1, max_size=3, unique=True))
    def load(self, request: TierRequest, keys: list[ChunkKey]) -> None:
        """Look chunks up until the tier answers, and begin to load those that hit."""
        if not request.over and len(keys) <= len(self._free):
            self._load(request, [key for key in keys if self._answer(request, key) is LookupResult.HIT])

    @rule(request=requests, key=st.sampled_from(_KEYS))
    def look_up(self, request: TierRequest, key: ChunkKey) -> None:
        """Look a chunk up once."""
        if not request.over:
            self._look_up(request, key)

    @rule(request=requests, keys=st.lists(st.sampled_from(_KEYS), min_size=1, max_size=3, unique=True))
    def touch(self, request: TierRequest, keys: list[ChunkKey]) -> None:
        """Touch chunks, stored or not."""
        if not request.over:
            self.tier.touch(keys, request.context)

    @rule(request=requests)
    def finish(self, request: TierRequest) -> None:
        """Finish a request. Its jobs continue."""
        if not request.over:
            self._finish(request)

    @rule()
    def end_step(self) -> None:
        """End a step, and process the jobs that have ended."""
        self._end_step()

    @rule()
    def drain(self) -> None:
        """Let all jobs end."""
        self._drain()

    @rule(drains=st.booleans())
    def restart(self, drains: bool) -> None:
        """Shut the tier down, and make it again. drains: whether to let all jobs end first."""
        if self.restarts:
            self._restart(drains)

    @rule(key=st.sampled_from(_KEYS), keeps=st.sampled_from([None, 0, CHUNK_BYTES // 2]))
    def damage(self, key: ChunkKey, keeps: int | None) -> None:
        """Remove the file of a chunk, or truncate it to `keeps` bytes, while no job runs."""
        path = self.path_of(key)
        if path is None:
            return
        self._drain()
        if path.exists():
            self._stored.discard(key)
            path.unlink() if keeps is None else os.truncate(path, keeps)

    @rule(request=requests, keys=st.lists(st.sampled_from(_KEYS), min_size=1, max_size=3, unique=True))
    def store_on_a_full_disk(self, request: TierRequest, keys: list[ChunkKey]) -> None:
        """Store chunks while no file can grow beyond half of a chunk."""
        if request.over or self.path_of(keys[0]) is None:
            return
        self._drain()
        with _full_disk():
            self._store(request, keys)
            self._drain()

    # Calls.

    def _make(self) -> None:
        self._threads = set(threading.enumerate())
        self.tier = self.make_tier(memoryview(self._memory))
        self.under_test.watch(self.tier, "secondary tier", _CALLED, self.make_tier)

    def _arrive(self) -> TierRequest:
        request = TierRequest(f"r{len(self._asked) + 1}")
        self._asked.append(request)
        self.tier.on_new_request(request.context)
        return request

    def _finish(self, request: TierRequest) -> None:
        request.over = True
        self.tier.on_request_finished(request.context)
        for requests in (*self._askers.values(), *self._early.values()):
            requests.discard(request)

    def _look_up(self, request: TierRequest, key: ChunkKey) -> LookupResult:
        self._askers[key].add(request)
        answer = self.tier.lookup(key, request.context)
        if not isinstance(answer, LookupResult):
            message = f"your tier answered lookup({key!r}, {request}) with {answer!r}, no LookupResult"
            raise PropertyBroken(Property.LEGAL_CALLS, message)
        if key in self._stored:
            count_case(Property.STORED_SO_SERVED, "lookups of stored chunks")
        if answer is LookupResult.HIT:
            self._hit(key)
        elif answer is LookupResult.MISS:
            self._miss(request, key)
        return answer

    def _hit(self, key: ChunkKey) -> None:
        count_case(Property.PUBLISH_AFTER_COMMIT, "hits")
        if self._restarted:
            count_case(Property.NO_STALE_DATA, "hits after a restart")
        if key not in self._possible:
            raise PropertyBroken(Property.PUBLISH_AFTER_COMMIT, f"{key!r} is a hit, but it was never stored")

    def _miss(self, request: TierRequest, key: ChunkKey) -> None:
        if key not in self._stored:
            return
        early = self._early.get(key, set())
        if request in early or (self.misses_last and early):
            return  # A tier may remember its answer for the request.
        if self.capacity is None:
            asked = f", and {sorted(map(str, early))} had asked before" if early else ""
            raise PropertyBroken(
                Property.STORED_SO_SERVED,
                f"{key!r} is a miss for {request}, but its store has succeeded{asked}",
            )
        self._stored.discard(key)

    def _answer(self, request: TierRequest, key: ChunkKey) -> LookupResult:
        """Look a chunk up once a step until the tier answers HIT or MISS."""
        count_case(Property.PROGRESS, "lookups that waited for an answer")
        answers = list[LookupResult]()

        def is_answered() -> bool:
            answers.append(self._look_up(request, key))
            if answers[-1] not in (LookupResult.RETRY, LookupResult.HIT_PENDING):
                return True
            self._end_step()
            return False

        self._wait(is_answered, f"no lookup of {key!r} by {request} is answered with HIT or MISS")
        return answers[-1]

    def _store(self, request: TierRequest, keys: Sequence[ChunkKey]) -> None:
        slots = [self._free.pop(0) for _ in keys]
        for key, slot in zip(keys, slots):
            self._memory[slot] = _CONTENT[key]
        self._possible.update(keys)
        self._submit(self.tier.submit_store, TierJob(False, keys, slots, ()), request)

    def _load(self, request: TierRequest, keys: Sequence[ChunkKey]) -> None:
        if keys:
            slots = [self._free.pop(0) for _ in keys]
            certain = self._stored if self.capacity is None and not self.may_fail else ()
            job = TierJob(True, keys, slots, [key for key in keys if key in certain])
            self._submit(self.tier.submit_load, job, request)

    def _submit(self, submit: Callable[[TransferJob], None], job: TierJob, request: TierRequest) -> None:
        self._submitted += 1
        self._jobs[self._submitted] = job
        slots = np.array(job.slots, np.int64)
        submit(TransferJob(self._submitted, list(job.keys), slots, job.is_load, request.context))

    def _end_step(self) -> None:
        self.tier.on_schedule_end(ScheduleEndContext((), ()))
        for result in self.tier.get_finished_jobs():
            self._end(result)
        self._take_events()

    def _drain(self) -> None:
        self.tier.drain_jobs()
        count_case(Property.PROGRESS, "drains of jobs in flight", bool(self._jobs))
        self._end_step()
        if self._jobs:
            left = [f"job {number} ({job})" for number, job in self._jobs.items()]
            raise PropertyBroken(Property.PROGRESS, f"after a drain there is no result of {', '.join(left)}")

    def _restart(self, drains: bool) -> None:
        if drains:
            self._drain()
        self._shut_down()
        for job in self._jobs.values():
            self._stored.difference_update(() if job.is_load else job.keys)
            self._release(job)
        self._jobs.clear()
        for requests in (*self._askers.values(), *self._early.values()):
            requests.clear()
        for request in self._asked:
            request.over = True
        self._restarted = True
        self._make()

    def _shut_down(self) -> None:
        self.tier.shutdown()
        new = [thread for thread in threading.enumerate() if thread not in self._threads]
        for thread in new:
            thread.join(WAIT_S)
            if thread.is_alive():
                raise PropertyBroken(Property.PROGRESS, f"thread {thread.name} still runs after the shutdown")

    def _take_events(self) -> None:
        for event in self.tier.take_events() if self.publishes_events else ():
            for key in event.keys:
                (self._announced.discard if event.removed else self._announced.add)(bytes(key))
                if not event.removed and bytes(key) not in self._possible:
                    message = f"an event says that {key!r} is stored, but it was never stored"
                    raise PropertyBroken(Property.EVENTS_ARE_STATE, message)

    # The ends of jobs.

    def _end(self, result: JobResult) -> None:
        job = self._jobs.pop(result.job_id, None)
        if job is None:
            message = f"job {result.job_id} ended, but no such job was in flight"
            raise PropertyBroken(Property.ONE_RELEASE_PER_HOLD, message)
        count_case(Property.ONE_RELEASE_PER_HOLD, "jobs that ended")
        if job.is_load:
            self._end_load(job, result)
        elif result.success:
            for key in job.keys:
                if key not in self._stored:
                    self._stored.add(key)
                    self._early[key] = set(self._askers[key])
        elif not self.may_fail and not _is_disk_full():
            message = f"the {job} could be carried out, but was reported as failed"
            raise PropertyBroken(Property.FAILURE_IS_NOT_SUCCESS, message)
        else:
            count_case(Property.FAILURE_IS_NOT_SUCCESS, "stores that failed")
        self._release(job)

    def _end_load(self, job: TierJob, result: JobResult) -> None:
        loaded = job.keys if result.success else list(result.successful_keys or ())
        if unknown := [key for key in loaded if key not in job.keys]:
            message = f"the result of the {job} says that {unknown} was loaded, which is not in the job"
            raise PropertyBroken(Property.FAILURE_IS_NOT_SUCCESS, message)
        for key, slot in zip(job.keys, job.slots):
            if key in loaded:
                self._must_hold(key, slot, job, result.success)
            elif key in job.must_succeed and key in self._stored and self._is_first_failed(job, loaded, key):
                message = f"the {job} failed for {key!r}, whose store was reported as good"
                raise PropertyBroken(Property.STORED_SO_SERVED, message)
        if not result.success:
            count_case(Property.FAILURE_IS_NOT_SUCCESS, "loads that failed")

    def _is_first_failed(self, job: TierJob, loaded: Collection[bytes], key: ChunkKey) -> bool:
        """Whether no earlier chunk of the load failed: a tier may stop a load at the first bad chunk."""
        return all(before in loaded for before in job.keys[: job.keys.index(key)])

    def _must_hold(self, key: ChunkKey, slot: int, job: TierJob, is_good: bool) -> None:
        count_case(Property.CORRECT_BYTES, "chunks that loads delivered")
        found = sorted({int(byte) for byte in self._memory[slot]})
        if found != [_CONTENT[key]]:
            holds = {content: repr(other) for other, content in _CONTENT.items()}
            seen = [holds.get(byte, "nothing that was stored") for byte in found]
            broken = Property.CORRECT_BYTES if is_good else Property.FAILURE_IS_NOT_SUCCESS
            raise PropertyBroken(broken, f"the {job} delivered {' and '.join(seen)} as {key!r}")

    def _release(self, job: TierJob) -> None:
        self._free += job.slots
        self._memory[list(job.slots)] = FREE

    # What must hold.

    def check(self) -> None:
        """Check that only the slots of loads in flight have changed."""
        right = dict.fromkeys(self._free, FREE)
        for job in self._jobs.values():
            if not job.is_load:
                right.update((slot, _CONTENT[key]) for key, slot in zip(job.keys, job.slots))
        count_case(Property.NO_REUSE_IN_FLIGHT, "comparisons of the primary tier", bool(self._jobs))
        for slot, byte in right.items():
            if (self._memory[slot] != byte).any():
                message = f"chunk {slot} of the primary tier was written, but no load in flight has it"
                raise PropertyBroken(Property.NO_REUSE_IN_FLIGHT, message)

    def wind_down(self) -> None:
        """Let all jobs and requests end, and load all stored chunks. Do so again after a restart."""
        self._rest()
        if self.restarts:
            self._restart(drains=True)
            self._rest()

    def _rest(self) -> None:
        self._drain()
        for request in self._asked:
            if not request.over:
                self._finish(request)
        reader, hits = self._arrive(), 0
        for key in _KEYS:
            if self._answer(reader, key) is LookupResult.HIT:
                hits += 1
                self._load(reader, [key])
                self._drain()
        if self.capacity is not None:
            count_case(Property.CONSERVATION, "tiers whose chunks were counted", bool(hits))
            if hits > self.capacity:
                message = f"{hits} chunks hit, in a tier with room for {self.capacity}"
                raise PropertyBroken(Property.CONSERVATION, message)
        self._finish(reader)
        if self.publishes_events:
            count_case(Property.EVENTS_ARE_STATE, "tiers whose events were compared", bool(self._stored))
            if missing := sorted(map(repr, self._stored - self._announced)):
                message = f"{', '.join(missing)} are stored, but no event says so"
                raise PropertyBroken(Property.EVENTS_ARE_STATE, message)
        if not self.polls_forever:
            self._wait(lambda: not self.tier.has_pending_work(), "work is pending, but no job is in flight")

    def _wait(self, is_done: Callable[[], bool], otherwise: str) -> None:
        end = time.monotonic() + WAIT_S
        while not is_done():
            if time.monotonic() > end:
                raise PropertyBroken(Property.PROGRESS, f"for {WAIT_S:.0f} s {otherwise}")
            time.sleep(0.0005)
            self._end_step()

    def trace(self) -> Iterable[str]:
        """Return the last calls, with their answers."""
        return map(str, self.under_test.calls[-MOST_TOLD:])

    def close(self) -> None:
        """Shut the tier down."""
        try:
            self._shut_down()
        finally:
            self._directory.cleanup()


_FULL = CHUNK_BYTES // 2


@contextmanager
def _full_disk() -> Iterator[None]:
    """Limit the files of this process to half of a chunk inside a `with` block."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (_FULL, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def _is_disk_full() -> bool:
    return resource.getrlimit(resource.RLIMIT_FSIZE)[0] == _FULL
