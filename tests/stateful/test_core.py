"""The core world under every order of calls and reports that Hypothesis can find.

`CoreWorld` makes each call on the real `Offloader` and compares the answer with its reference books; the
random walk drives the same world. Hypothesis adds what a walk lacks: it shrinks a failure to the shortest
program. After every rule the world checks everything (S1 to S10, S13 to S17), and a
run ends at rest (S9), where the log must fold to the live state (S10).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule, run_state_machine_as_test

from examples import examples
from kvsm.check.worlds.core_options import CoreOptions, action_kinds
from kvsm.check.worlds.core_world import CoreWorld
from kvsm.core.ledger.snapshot import digest, restore, snapshot
from kvsm.core.policies import POLICIES
from kvsm.testing.machine_base import PropertyMachine
from kvsm.testing.recording import event_lines

SMALLEST = CoreOptions(host_blocks=5, chunks=7, max_live_transfers=6, length=4)
PLACES = st.integers(0, 5)
"""Names one of the live, ended or lost copies by its place, so that a shrunk program stays valid."""

OPTIONS = st.builds(
    CoreOptions,
    host_blocks=st.just(SMALLEST.host_blocks),
    chunks=st.just(SMALLEST.chunks),
    max_live_transfers=st.just(SMALLEST.max_live_transfers),
    length=st.just(SMALLEST.length),
    policy=st.sampled_from(sorted(POLICIES)),
    blocks_per_chunk=st.sampled_from([1, 2]),
    defer_ticks=st.sampled_from([0, 2]),
    transfer_ticks=st.sampled_from([0, 2]),
    store_threshold=st.sampled_from([1, 1, 2]),
)


class CoreMachine(PropertyMachine):
    """A machine with one rule per kind of action of the world, and a few programs of several actions."""

    @initialize(options=OPTIONS)
    def open(self, options: CoreOptions) -> None:
        self.world = CoreWorld(options)
        self.started = True

    # Most orders worth testing start from full pools, so these let copies end as if no time had passed.

    @rule(request=st.integers(0, 1), prompt=st.integers(0, 1), on=st.integers(0, 6), size=st.integers(0, 3))
    def store_whole(self, request: int, prompt: int, on: int, size: int) -> None:
        live = set(self.world.books.copies)
        self.world.do(("store", request, prompt, 0, size, on, 0, 1))
        self._end_all_but(live)

    @rule(
        request=st.integers(0, 1), prompt=st.integers(0, 1), pattern=st.integers(0, 2), submit=st.booleans()
    )
    def match_and_load(self, request: int, prompt: int, pattern: int, submit: bool) -> None:
        self.world.do(("match", request, prompt, 0, SMALLEST.length))
        matching = [name for name, book in self.world.books.requests.items() if book.matched]
        for place in range(len(matching)):
            self.world.do(("load", place, SMALLEST.length, pattern))
        if submit:
            self.world.do(("submit_all",))

    @rule(
        request=st.integers(0, 1),
        prompt=st.integers(0, 1),
        pattern=st.integers(0, 2),
        ending=st.sampled_from(["report", "report", "fail"]),
        reset=st.booleans(),
    )
    def round_trip(self, request: int, prompt: int, pattern: int, ending: str, reset: bool) -> None:
        """Store, load, and offer the loaded blocks.

        A failed load voids the blocks that it read (S6). A reset in between makes the loaded data stale
        (S14).
        """
        live = set(self.world.books.copies)
        self.store_whole(request, prompt, 0, 1)
        self.match_and_load(request, prompt, pattern, True)
        self._end_all_but(live, ending)
        if reset:
            self.world.do(("reset",))
        self.world.do(("store", request, prompt, 0, SMALLEST.length, 0, 3, 0))

    @rule(ticks=st.sampled_from([2, 4, 15]))
    def let_time_pass(self, ticks: int) -> None:
        """Tick long enough that every wait reaches its limit (S9)."""
        for _ in range(ticks):
            self.world.do(("tick",))

    def _end_all_but(self, live: set[int], ending: str = "report") -> None:
        world = self.world
        world.do(("submit_all",))
        for transfer in [id for id in world.books.copies if id not in live]:
            for worker in range(world.options.workers):
                submitted = [id for id, copy in world.books.copies.items() if copy.submitted]
                if transfer in submitted:
                    world.do((ending, submitted.index(transfer), worker))

    def act(self, name: str, numbers: tuple[int, ...]) -> None:
        """Do one action, if possible. A rejected report changes only the event numbers (S5)."""
        ledger = self.world.core.ledger
        before = _state(snapshot(ledger)) if name in _REJECTED else None
        self.world.do((name, *numbers))
        if before is not None:
            assert _state(snapshot(ledger)) == before, f"{name} changed the state"

    def check(self) -> None:
        self.world.check()

    def wind_down(self) -> None:
        ledger = self.world.core.ledger
        assert digest(restore(snapshot(ledger))) == digest(ledger), "S10: a busy ledger restores to another"
        while (action := self.world.wind_down()) is not None:
            assert self.world.do(action)
        self.world.check()

    def trace(self) -> Iterable[str]:
        return event_lines(self.world.events)


_REJECTED = ("report_early", "report_late", "report_stray", "misuse")


def _state(saved: bytes) -> str:
    """Return the saved state without its event numbers: a rejected report adds one event and nothing else."""
    ledger = restore(saved)
    ledger.seq = ledger.step = 0
    return digest(ledger)


def _rule_for(name: str, sizes: tuple[int, ...]) -> Any:
    numbers = st.tuples(*(st.integers(0, size - 1) if size > 0 else PLACES for size in sizes))

    def act(self: CoreMachine, numbers: tuple[int, ...]) -> None:
        self.act(name, numbers)

    act.__name__ = name
    return rule(numbers=numbers)(act)


for _name, (_, _sizes) in action_kinds(SMALLEST).items():
    setattr(CoreMachine, f"do_{_name}", _rule_for(_name, _sizes))


def test_core_keeps_its_promises() -> None:
    chosen = settings(max_examples=examples(60), stateful_step_count=60)
    run_state_machine_as_test(CoreMachine, settings=chosen)


@pytest.mark.slow
def test_core_keeps_its_promises_long() -> None:
    run_state_machine_as_test(CoreMachine, settings=settings(max_examples=250, stateful_step_count=60))
