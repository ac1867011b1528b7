"""The scheduler under every order of steps, copies, reports, aborts, preemptions and resets.

The model engine of `scheduler_life` checks what each request reads (S12, S15), that no block is taken under
a copy (S3) and none released twice (S4). Checked here after every rule: what can be read on the host holds
its own cells on every worker (S2, S15); the ledger's own properties (S1 to S9, S13, S14); at the end, that
everything comes to rest (S9), that every full block of a request with `do_remote_decode` is on the host, in
flight or was skipped with a reason (S16), and that the log folds to the live state (S10).
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from kvsm.invariants import check_ledger, check_rest
from kvsm.ledger import Ledger
from kvsm.scheduler import GroupKind, KVCacheGroup, LastStep, StoreMode
from kvsm.snapshot import digest

sys.path.insert(0, str(Path(__file__).parent.parent))
from scheduler_life import HASH_TOKENS, ModelEngine, ModelRequest

FULL = KVCacheGroup(HASH_TOKENS)
GROUPS = (
    (FULL,),
    (FULL,),
    (KVCacheGroup(HASH_TOKENS, drafter=True),),
    (FULL, KVCacheGroup(HASH_TOKENS, GroupKind.SLIDING_WINDOW, window=6)),
    (KVCacheGroup(2 * HASH_TOKENS), KVCacheGroup(HASH_TOKENS, GroupKind.SLIDING_WINDOW, window=5), FULL),
)
LENGTHS = st.sampled_from([3, 4, 8, 9, 13, 16, 17, 21])
PARAMETERS = st.sampled_from(
    [
        None,
        None,
        None,
        {"do_remote_decode": True},
        {"max_offload_tokens": 9},
        {"max_load_tokens": 5},
        {"offload": False},
    ]
)
PLACES = st.integers(0, 5)
MOSTLY = st.sampled_from([True, True, True, True, False])


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        groups=st.sampled_from(GROUPS),
        store=st.sampled_from([StoreMode.EAGER, StoreMode.EAGER, StoreMode.LAZY]),
        last_step=st.sampled_from(list(LastStep)),
        references=MOSTLY,
        prefix_cache=st.booleans(),
        asynchronous=st.booleans(),
        drafts=st.sampled_from([0, 0, 2]),
        workers=st.sampled_from([1, 1, 2]),
        chunk=st.sampled_from([1, 1, 2]),
        host_blocks=st.sampled_from([5, 9, 24]),
        device_blocks=st.sampled_from([14, 20, 40]),
        threshold=st.sampled_from([1, 1, 1, 2]),
        defer_ticks=st.sampled_from([0, 2, 6]),
        transfer_ticks=st.sampled_from([0, 0, 9]),
    )
    def open(
        self,
        groups: tuple[KVCacheGroup, ...],
        store: StoreMode,
        references: bool,
        chunk: int,
        threshold: int,
        defer_ticks: int,
        transfer_ticks: int,
        device_blocks: int,
        **options: object,
    ) -> None:
        if store is StoreMode.LAZY:
            references, chunk, threshold = True, 1, 1
        if not references:
            # Its blocks are given away after a lost copy, which only references can prevent.
            transfer_ticks = 0
        self.engine = ModelEngine(
            groups,
            # Room for the longest request, and seldom for two.
            device_blocks + 8 * (len(groups) - 1),
            references=references,
            store=store,
            lazy_target_blocks=6,
            chunk_tokens=12,
            core={
                "blocks_per_chunk": chunk,
                "store_threshold": threshold,
                "defer_ticks": defer_ticks,
                "transfer_ticks": transfer_ticks,
                "max_live_transfers": 8,
            },
            **options,  # type: ignore[arg-type]
        )
        self.arrived = 0
        self.chunk = chunk

    # What the engine may do.

    @rule(
        prompt=st.integers(0, 1),
        length=LENGTHS,
        outputs=st.integers(1, 9),
        parameters=PARAMETERS,
        reads=MOSTLY,
    )
    def arrive(
        self, prompt: int, length: int, outputs: int, parameters: dict[str, object] | None, reads: bool
    ) -> None:
        if len(self.engine.waiting) + len(self.engine.running) < 4:
            self.arrived += 1
            tokens = [*range(8), *(100 * prompt + n for n in range(8, length))][:length]
            self.engine.arrive(
                ModelRequest(f"r{self.arrived}", tokens, outputs, parameters, skip_reading=not reads)
            )

    @rule(accept=st.sampled_from([None, None, None, 4, 8, 0]), admit=MOSTLY, times=st.sampled_from([1, 1, 3]))
    def step(self, accept: int | None, admit: bool, times: int) -> None:
        for _ in range(times):
            self.engine.step(accept=accept, admit=admit)

    @rule(place=PLACES, worker=st.sampled_from([None, 0, 1]), good=MOSTLY)
    def carry_out(self, place: int, worker: int | None, good: bool) -> None:
        transfers = list(self.engine.copies)
        if transfers:
            self.engine.carry_out(transfers[place % len(transfers)], worker, good=good)

    @rule()
    def carry_out_all(self) -> None:
        self.engine.carry_out_all()

    @rule(again=st.booleans())
    def hand_on(self, again: bool) -> None:
        reports = list(self.engine.reports)
        self.engine.hand_on()
        if again:
            self.engine.scheduler.update_connector_output(reports[::-1])

    @rule(place=PLACES, aborted=st.booleans(), times=st.integers(1, 2))
    def finish(self, place: int, aborted: bool, times: int) -> None:
        requests = [one for one in self.engine.requests.values() if not one.finished]
        if requests:
            for _ in range(times):
                self.engine.finish(requests[place % len(requests)], aborted=aborted)

    @rule(place=PLACES)
    def preempt(self, place: int) -> None:
        running = list(self.engine.running.values())
        if running:
            self.engine.preempt(running[place % len(running)])

    @rule(really=st.integers(0, 4))
    def reset(self, really: int) -> None:
        if not really:
            self.engine.reset()
            assert not self.engine.core.ledger.index, "S14: a key survived the reset"

    # What must hold.

    def check_invariants(self, *args: object, **kwargs: object) -> None:
        super().check_invariants(*args, **kwargs)  # type: ignore[no-untyped-call]
        if hasattr(self, "engine"):
            self.check()

    def check(self) -> None:
        engine = self.engine
        assert check_ledger(engine.core.ledger) == []
        ledger = engine.core.ledger
        cells: dict[bytes, list[list[bytes]]] = {}
        for request in engine.requests.values():
            for index, group in enumerate(engine.groups):
                tokens = group.block_tokens * self.chunk
                for place in range(len(request.cells) // tokens):
                    expected = request.cells_of(place, tokens)
                    key = expected[-1] + index.to_bytes(4, "big")
                    cells[key] = [
                        expected[n : n + group.block_tokens] for n in range(0, tokens, group.block_tokens)
                    ]
        for key, slot in ledger.index.items():
            if ledger.readable(slot):
                for part, expected in enumerate(cells[key]):
                    for held in engine.host[slot * self.chunk + part]:
                        assert held == expected, "S2/S15: a readable key has other bytes"

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for event in self.engine.log:
            note(str(event))
        engine = self.engine
        engine.run(400)
        self.check()
        ledger = engine.core.ledger
        assert check_rest(ledger) == []
        retired = sum(word != 0 for word in ledger.leases.words)
        assert sum(engine.pool.references) <= retired, "S4: a device block is still held"
        assert not engine.sending
        replayed = Ledger(engine.core.config)
        for event in engine.log:
            replayed.apply(event)
        assert digest(replayed) == digest(ledger), "S10: the log folds to another state"


def test_scheduler_keeps_its_promises() -> None:
    run_state_machine_as_test(SchedulerMachine, settings=settings(max_examples=150, stateful_step_count=50))


@pytest.mark.slow
def test_scheduler_keeps_its_promises_long() -> None:
    run_state_machine_as_test(
        SchedulerMachine, settings=settings(max_examples=10_000, stateful_step_count=60)
    )
