"""The core under every order of calls and reports that Hypothesis can think of.

Beside the core runs a plain reference that says whose bytes are where: contents of device blocks and
host slots per worker, changed only when a copy is carried out, at any moment between submit and report.
It shares no code with the ledger. Checked after every rule: what can be read holds its own bytes on every
worker (S2, S15); no slot or device block of a live copy is handed out (S3); what a match counted stays
until loaded, or the load is refused (S7); consumers of the KV events hold exactly the readable keys
(S10). At the end: the log folds to the live state (S10), and everything drains to rest (S4, S9).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from kvsm.events import Direction, OffloadConfig, OffloadingEvent
from kvsm.ids import to_list
from kvsm.ledger import Ledger
from kvsm.offloader import LookupResult, Offloader
from kvsm.plan import TransferPlan
from kvsm.snapshot import digest, restore, snapshot
from kvsm.states.block import BlockState

HOST_BLOCKS, DEVICE_BLOCKS, WORKERS = 5, 7, 2
REQUESTS = ("a", "b")
PROMPTS = 2
LENGTH = 4
ANY = st.integers(0, 5)
"""Names one of the copies by its place, so that a shrunk example stays valid."""
STARTS = st.sampled_from([0, 0, 0, 1, 2])
SIZES = st.sampled_from([LENGTH, LENGTH, 2, 1, 0])
PLACES = st.sampled_from([(0, 1), (0, 1, 2, 3), (2, 3), (0,), (1, 1), (3, 0, 3)])
MOSTLY = st.sampled_from([True, True, True, False])


def prompt_keys(prompt: int) -> list[bytes]:
    """Keys of one prompt; all prompts share their first two blocks."""
    return [
        (b"shared" if place < 2 else b"own-%d" % prompt) + b"-%d" % place + bytes(4)
        for place in range(LENGTH)
    ]


class Recorder(list[OffloadingEvent]):
    """A log in memory."""

    def flush(self) -> None:
        """Nothing to write."""


@dataclass
class Copy:
    """A plan as the reference sees it: what it must bring, and which workers did what."""

    plan: TransferPlan
    request: str
    keys: list[bytes]
    submitted: bool = False
    reported_by: set[int] = field(default_factory=set)
    failed: bool = False
    void: bool = False


class CoreMachine(RuleBasedStateMachine):
    @initialize(policy=st.sampled_from(["lru", "arc", "s3fifo", "slru"]), defer_ticks=st.sampled_from([0, 2]))
    def open(self, policy: str, defer_ticks: int) -> None:
        config = OffloadConfig(
            host_blocks=HOST_BLOCKS,
            device_blocks=DEVICE_BLOCKS,
            workers=WORKERS,
            policy=policy,
            max_live_transfers=6,
            defer_ticks=defer_ticks,
        )
        self.log = Recorder()
        self.announced: set[bytes] = set()
        self.core = Offloader(config, self.log, publish=True, clock_ns=lambda: 0)
        self.device: list[list[bytes | None]] = [[None] * WORKERS for _ in range(DEVICE_BLOCKS)]
        self.host: list[list[bytes | None]] = [[None] * WORKERS for _ in range(HOST_BLOCKS)]
        self.live: dict[int, Copy] = {}
        self.ended: list[Copy] = []
        self.matched: dict[str, list[bytes]] = {}

    # What the reference knows.

    def leased(self) -> set[int]:
        return {block for copy in self.live.values() for block in to_list(copy.plan.device_blocks)}

    def idle_blocks(self) -> list[int]:
        retired = {n for n in range(DEVICE_BLOCKS) if self.core.ledger.leases.state(n).name == "RETIRED"}
        return sorted(set(range(DEVICE_BLOCKS)) - self.leased() - retired)

    def pick(self, place: int) -> Copy | None:
        """One of the live copies, if there is any."""
        copies = list(self.live.values())
        return copies[place % len(copies)] if copies else None

    def planned(self, copy: Copy, submit: bool) -> None:
        touched = {slot for one in self.live.values() for slot in to_list(one.plan.slots)}
        if copy.plan.direction is Direction.STORE:
            assert touched.isdisjoint(to_list(copy.plan.slots)), "S3: a slot of a live copy was handed out"
        assert self.leased().isdisjoint(to_list(copy.plan.device_blocks)) or (
            copy.plan.direction is Direction.STORE
        ), "S3: a load targets a device block of a live copy"
        self.live[copy.plan.transfer] = copy
        if submit:
            self.submit_one(copy)

    def submit_one(self, copy: Copy) -> None:
        if not copy.submitted:
            self.core.submit([copy.plan.transfer])
            copy.submitted = True

    def over(self, copy: Copy) -> None:
        self.ended.append(self.live.pop(copy.plan.transfer))

    # The engine's calls.

    @rule(request=st.sampled_from(REQUESTS), prompt=st.integers(0, PROMPTS - 1), start=STARTS, size=SIZES)
    def match(self, request: str, prompt: int, start: int, size: int) -> None:
        keys = prompt_keys(prompt)[start : start + size]
        match = self.core.match(request, keys)
        if match.hits:
            assert all(self.core.lookup(key) is LookupResult.HIT for key in keys[: match.hits])
            self.matched[request] = keys[: match.hits]
        else:
            self.matched.pop(request, None)
        events = len(self.log)
        assert self.core.match(request, keys) == match, "the same question has the same answer"
        assert len(self.log) == events, "and is no event"

    @rule(request=st.sampled_from(REQUESTS))
    def release(self, request: str) -> None:
        self.core.release(request)
        self.matched.pop(request, None)

    @rule(request=st.sampled_from(REQUESTS), accept=SIZES, submit=MOSTLY)
    def load(self, request: str, accept: int, submit: bool) -> None:
        keys = self.matched.get(request, [])[:accept]
        blocks = self.idle_blocks()[: len(keys)]
        if len(blocks) < len(keys) or len(self.core.ledger.transfers) >= 6:
            return
        plan = self.core.prepare_load(request, blocks)
        self.matched.pop(request, None)
        if plan is None:
            return
        for key, slot in zip(keys, to_list(plan.slots), strict=True):
            assert self.host[slot] == [key] * WORKERS, "S7: what the match counted is not there any more"
        self.planned(Copy(plan, request, keys), submit)

    @rule(
        request=st.sampled_from(REQUESTS),
        prompt=st.integers(0, PROMPTS - 1),
        places=PLACES,
        on=st.lists(st.integers(0, DEVICE_BLOCKS - 1), min_size=4, max_size=4),
        submit=MOSTLY,
    )
    def store(self, request: str, prompt: int, places: tuple[int, ...], on: list[int], submit: bool) -> None:
        idle = self.idle_blocks()
        if not idle:
            return
        keys = [prompt_keys(prompt)[place] for place in places]
        blocks = [idle[place % len(idle)] for place, _ in zip(on, keys)]
        content = dict(zip(blocks, keys, strict=True))
        offered = [(key, block) for key, block in zip(keys, blocks, strict=True) if content[block] == key]
        for block, key in content.items():
            self.device[block] = [key] * WORKERS
        outcome = self.core.prepare_store(
            request, [key for key, _ in offered], [block for _, block in offered]
        )
        assert not set(outcome.evicted) & {key for key, _ in offered}, (
            "S7: an offered key was evicted to make room"
        )
        if outcome.plan is None:
            return
        self.planned(Copy(outcome.plan, request, list(outcome.keys)), submit)

    @rule(request=st.sampled_from(REQUESTS), prompt=st.integers(0, PROMPTS - 1), places=PLACES)
    def store_whole(self, request: str, prompt: int, places: tuple[int, ...]) -> None:
        """Store and report, as if no time had passed: most orders worth testing start from a full pool."""
        live = set(self.live)
        self.store(request, prompt, places, [0, 1, 2, 3], True)
        for copy in [copy for id, copy in self.live.items() if id not in live]:
            for worker in range(WORKERS):
                self.carry_out_now(copy, worker)
                self.hear(copy, worker, True)

    @rule(request=st.sampled_from(REQUESTS), prompt=st.integers(0, PROMPTS - 1), submit=MOSTLY)
    def match_and_load(self, request: str, prompt: int, submit: bool) -> None:
        self.match(request, prompt, 0, LENGTH)
        self.load(request, LENGTH, submit)

    @rule(place=ANY)
    def submit(self, place: int) -> None:
        copy = self.pick(place)
        if copy is not None:
            self.submit_one(copy)

    @rule(place=ANY)
    def cancel(self, place: int) -> None:
        copy = self.pick(place)
        if copy is not None:
            ended = self.core.cancel(copy.plan.transfer)
            assert (ended is None) == copy.submitted, "only what was not submitted can be taken back"
            if ended is not None:
                self.over(copy)

    @rule(request=st.sampled_from(REQUESTS))
    def preempt(self, request: str) -> None:
        self.core.preempt(request)
        self.matched.pop(request, None)

    @rule(request=st.sampled_from(REQUESTS), aborted=st.booleans(), times=st.integers(1, 2))
    def finish(self, request: str, aborted: bool, times: int) -> None:
        for _ in range(times):
            self.core.finish(request, aborted=aborted)
        self.matched.pop(request, None)

    @rule(prompt=st.integers(0, PROMPTS - 1))
    def touch(self, prompt: int) -> None:
        self.core.touch(prompt_keys(prompt))

    @rule()
    def tick(self) -> None:
        self.core.tick()

    @rule()
    def end_step(self) -> None:
        self.core.end_step()

    @rule()
    def flush(self) -> None:
        assert set(self.core.flush()) == {id for id, copy in self.live.items() if copy.submitted}

    @rule(really=st.integers(0, 3))
    def reset(self, really: int) -> None:
        if really != 3:
            return
        at_rest = self.core.reset()
        for copy in list(self.live.values()):
            if copy.submitted:
                copy.void = True
            else:
                self.over(copy)
        assert at_rest == (not self.live)
        assert not self.core.ledger.index, "S14: a key survived the reset"

    # The hardware's side.

    @rule(place=ANY, worker=st.integers(0, WORKERS - 1))
    def carry_out(self, place: int, worker: int) -> None:
        copy = self.pick(place)
        if copy is not None and copy.submitted and worker not in copy.reported_by:
            self.carry_out_now(copy, worker)

    @rule(place=ANY, worker=st.integers(0, WORKERS - 1), good=st.booleans())
    def report(self, place: int, worker: int, good: bool) -> None:
        copy = self.pick(place)
        if copy is None or not copy.submitted:
            return
        if good and worker not in copy.reported_by:
            self.carry_out_now(copy, worker)
        self.hear(copy, worker, good)

    @rule(place=ANY, good=MOSTLY)
    def report_all(self, place: int, good: bool) -> None:
        for worker in range(WORKERS):
            self.report(place, worker, good)

    @rule(place=ANY, worker=st.integers(0, WORKERS - 1), good=st.booleans())
    def report_too_late(self, place: int, worker: int, good: bool) -> None:
        if self.ended:
            self.hear(self.ended[place % len(self.ended)], worker, good)

    def hear(self, copy: Copy, worker: int, good: bool) -> None:
        live = copy.plan.transfer in self.live and worker not in copy.reported_by
        before = digest_without_log(self.core.ledger)
        ended = self.core.report(copy.plan.transfer, worker, good)
        if not live:
            assert ended is None
            assert digest_without_log(self.core.ledger) == before, (
                "S5: a stale or doubled report changed something"
            )
            return
        copy.reported_by.add(worker)
        copy.failed |= not good
        if len(copy.reported_by) < WORKERS:
            assert ended is None
            return
        assert ended is not None
        self.over(copy)
        if copy.failed and copy.plan.direction is Direction.LOAD:
            # By slot: its keys may have been stored again meanwhile, from good bytes.
            ledger = self.core.ledger
            assert not any(ledger.readable(slot) for slot in to_list(copy.plan.slots)), (
                "S6: what could not be loaded is still offered"
            )
        assert ended.good == (not copy.failed and not copy.void), "S6: a failure is not a success"
        if copy.plan.direction is Direction.LOAD and ended.good:
            for key, block in zip(copy.keys, to_list(copy.plan.device_blocks), strict=True):
                assert self.device[block] == [key] * WORKERS, "S15: a load brought other bytes"

    @rule(transfer=st.integers(-2, 60), worker=st.integers(-1, WORKERS + 1), good=st.booleans())
    def stray_report(self, transfer: int, worker: int, good: bool) -> None:
        copy = self.live.get(transfer)
        if copy is not None and copy.submitted and 0 <= worker < WORKERS:
            return
        before = digest_without_log(self.core.ledger)
        assert self.core.report(transfer, worker, good) is None
        assert digest_without_log(self.core.ledger) == before, "S5"

    @rule(place=ANY)
    def lose(self, place: int) -> None:
        copy = self.pick(place)
        if (
            copy is None
            or not copy.submitted
            or len(self.core.ledger.free) + len(self.core.ledger.policy) < 3
        ):
            return
        ended = self.core.lose(copy.plan.transfer)
        assert ended is not None
        assert not ended.good
        self.over(copy)

    # What must hold. (Not an @invariant: those print a line a step.)

    def check_invariants(self, *args: object, **kwargs: object) -> None:
        super().check_invariants(*args, **kwargs)  # type: ignore[no-untyped-call]
        if hasattr(self, "core"):
            self.check()

    def check(self) -> None:
        ledger = self.core.ledger
        readable = {key: slot for key, slot in ledger.index.items() if ledger.readable(slot)}
        for key, slot in readable.items():
            assert self.host[slot] == [key] * WORKERS, "S2/S15: a readable key has other bytes"
        for event in self.core.take_events():
            self.announced = (
                self.announced - set(event.keys) if event.removed else self.announced | set(event.keys)
            )
        assert self.announced == set(readable), "S10: the KV events tell another story"
        assert set(ledger.transfers) == set(self.live)

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        for event in self.log:
            note(str(event))
        self.drain()
        ledger = self.core.ledger
        replayed = Ledger(self.core.config)
        for event in self.log:
            replayed.apply(event)
        assert digest(replayed) == digest(ledger), "S10: the log folds to another state"
        assert digest(restore(snapshot(ledger))) == digest(ledger)

    def drain(self) -> None:
        for copy in list(self.live.values()):
            if not copy.submitted:
                self.core.cancel(copy.plan.transfer)
                self.over(copy)
                continue
            for worker in range(WORKERS):
                if worker not in copy.reported_by:
                    self.carry_out_now(copy, worker)
                    self.hear(copy, worker, True)
        for request in REQUESTS:
            assert self.core.finish(request), "S9: a request that nothing holds is not released"
        self.check()
        ledger = self.core.ledger
        assert not ledger.transfers
        assert not ledger.requests
        assert not ledger.deferred
        resting = (BlockState.FREE, BlockState.EVICTED, BlockState.STORED, BlockState.RETIRED)
        assert all(ledger.blocks.state(slot) in resting for slot in range(HOST_BLOCKS)), (
            "S4: something is held"
        )
        lost = sum(ledger.blocks.state(slot) is BlockState.RETIRED for slot in range(HOST_BLOCKS))
        assert len(ledger.free) + len(ledger.policy) + lost == HOST_BLOCKS, "S1: a slot is in no list"

    def carry_out_now(self, copy: Copy, worker: int) -> None:
        for block, slot in zip(to_list(copy.plan.device_blocks), to_list(copy.plan.slots), strict=True):
            if copy.plan.direction is Direction.STORE:
                self.host[slot][worker] = self.device[block][worker]
            else:
                self.device[block][worker] = self.host[slot][worker]


def digest_without_log(ledger: Ledger) -> str:
    """The digest as if no event had been recorded since: a rejected report moves only these two numbers."""
    seq, step = ledger.seq, ledger.step
    ledger.seq = ledger.step = 0
    try:
        return digest(ledger)
    finally:
        ledger.seq, ledger.step = seq, step


def test_core_keeps_its_promises() -> None:
    run_state_machine_as_test(CoreMachine, settings=settings(max_examples=150, stateful_step_count=60))


@pytest.mark.slow
def test_core_keeps_its_promises_long() -> None:
    run_state_machine_as_test(CoreMachine, settings=settings(max_examples=10_000, stateful_step_count=60))
