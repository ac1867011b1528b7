"""Copy engines under every order of calls that Hypothesis can think of, beside compute.

The machine is planner and model at once: it keeps live transfers, and compute, off each other's bytes, as the
ledger does, and launches compute that writes and reads device blocks. A plain reference knows what every
block must hold; a transfer counts in it as done when it is submitted, for that is what the order of an
engine promises. Checked:

- each transfer ends once, good or bad as it must, and a job that cannot be right as bad (S9, S6);
- compute finds what it wrote or what was loaded, whether it waited for the report or for `hold_compute`; the
  simulated engine's race detector is silent (S12);
- at the end all memory holds what the reference says (S15); of bad transfers, and what was copied from
  where they wrote, nothing is known.

What it does not check: engines on a GPU, whose compute this machine could not delay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from copy_rigs import load, random_pools, store
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)

from kvsm.cuda_io import (
    CopyEngine,
    FailingCopyEngine,
    HostCopyEngine,
    SimulatedCopyEngine,
    VerifyingCopyEngine,
)
from kvsm.cuda_io import host as host_module
from kvsm.events import Direction
from kvsm.plan import TransferJob

BLOCKS = 6
UNKNOWN = -1

Pool = np.ndarray[Any, Any]
Launch = Callable[..., None]
MakeEngine = Callable[[Pool, Pool, int], tuple[CopyEngine, Launch, Callable[[], None]]]
"""Pools and a seed give: the engine, what launches compute, and what waits until all compute is done."""


def simulated(device: Pool, host: Pool, seed: int) -> tuple[CopyEngine, Launch, Callable[[], None]]:
    engine = SimulatedCopyEngine(device, host, seed)
    return engine, engine.simulated.launch, engine.simulated.synchronize


def threads(device: Pool, host: Pool, _seed: int) -> tuple[CopyEngine, Launch, Callable[[], None]]:
    """Pieces are of one block, so that threads share even small transfers."""
    engine = HostCopyEngine(device, host)

    def launch(_name: str, *, action: Callable[[], None], **_accesses: Any) -> None:
        action()

    return engine, launch, lambda: None


def verified(make: MakeEngine) -> MakeEngine:
    def make_verified(device: Pool, host: Pool, seed: int) -> Any:
        engine, launch, synchronize = make(device, host, seed)
        return VerifyingCopyEngine(engine, host, device, threads=int(make is threads)), launch, synchronize

    return make_verified


def failing(make: MakeEngine) -> MakeEngine:
    def make_failing(device: Pool, host: Pool, seed: int) -> Any:
        engine, launch, synchronize = make(device, host, seed)
        return FailingCopyEngine(engine, seed, 0.3), launch, synchronize

    return make_failing


class CopyMachine(RuleBasedStateMachine):
    make: MakeEngine
    may_fail = False

    @initialize(seed=st.integers(0, 2**16))
    def start(self, seed: int) -> None:
        [self.device], self.host = random_pools(BLOCKS, 2)
        self.engine, self.launch, self.synchronize = type(self).make(self.device, self.host, seed)
        self.expected = {
            "device": self.device[:, 0].astype(int).tolist(),
            "host": self.host[:, 0].astype(int).tolist(),
        }
        self.device[:, 1], self.host[:, 1] = self.device[:, 0], self.host[:, 0]
        self.live: dict[int, TransferJob] = {}
        self.held: set[int] = set()
        self.impossible: set[int] = set()
        self.transfers = 0
        self.found: list[tuple[str, int, int]] = []
        """What compute has read: when, what it found, what it must find."""

    def busy(self, side: str) -> set[int]:
        """Blocks of this side that only their transfer may touch now."""
        jobs = [job for number, job in self.live.items() if number not in self.held | self.impossible]
        return {block for job in jobs for block in job.pairs()[side == "host"]}

    @rule(block=st.integers(0, BLOCKS - 1), value=st.integers(0, 255))
    def compute_writes(self, block: int, value: int) -> None:
        if block not in self.busy("device"):

            def action() -> None:
                self.device[block] = value

            self.launch("write", writes=[block], action=action)
            self.expected["device"][block] = value

    @rule(block=st.integers(0, BLOCKS - 1))
    def compute_reads(self, block: int) -> None:
        right = self.expected["device"][block]
        if block not in self.busy("device") and right != UNKNOWN:

            def action() -> None:
                self.found += [("compute", int(one), right) for one in self.device[block]]

            self.launch("read", reads=[block], action=action)

    @rule(
        direction=st.sampled_from(Direction),
        pairs=st.lists(
            st.tuples(st.integers(0, BLOCKS - 1), st.integers(0, BLOCKS - 1)),
            max_size=4,
            unique_by=(lambda pair: pair[0], lambda pair: pair[1]),
        ),
        hold=st.booleans(),
    )
    def submit(self, direction: Direction, pairs: list[tuple[int, int]], hold: bool) -> None:
        devices, hosts = self.busy("device"), self.busy("host")
        pairs = [(device, host) for device, host in pairs if device not in devices and host not in hosts]
        make = store if direction is Direction.STORE else load
        job = make(self.transfers, [device for device, _ in pairs], [host for _, host in pairs])
        self.engine.submit(job)
        self.transfers += 1
        self.live[job.transfer] = job
        sides = ("device", "host") if direction is Direction.STORE else ("host", "device")
        for pair in pairs:
            source, target = pair if direction is Direction.STORE else pair[::-1]
            self.expected[sides[1]][target] = self.expected[sides[0]][source]
        if hold and not self.may_fail:
            self.engine.hold_compute([job.transfer])
            self.held.add(job.transfer)

    @rule(direction=st.sampled_from(Direction), block=st.integers(0, BLOCKS - 1))
    def submit_what_cannot_be(self, direction: Direction, block: int) -> None:
        make = store if direction is Direction.STORE else load
        self.engine.submit(make(self.transfers, [block, BLOCKS], [block, block]))
        self.impossible.add(self.transfers)
        self.live[self.transfers] = make(self.transfers, [], [])
        self.transfers += 1

    @rule()
    def poll(self) -> None:
        for result in self.engine.poll():
            job = self.live.pop(result.transfer)  # a KeyError here is an end that came twice
            assert result.good is not bool(result.error)
            assert not (result.good and result.transfer in self.impossible), "S6"
            assert result.good or self.may_fail or result.transfer in self.impossible, result.error
            if not result.good:
                self.forget(job)
            self.held.discard(result.transfer)

    def forget(self, job: TransferJob) -> None:
        """Nothing is known of what a bad transfer wrote."""
        side = "host" if job.direction is Direction.STORE else "device"
        for block in job.pairs()[side == "host"]:
            self.expected[side][block] = UNKNOWN

    @rule(ages=st.sets(st.integers(1, 6)))
    def wait(self, ages: set[int]) -> None:
        # Counted from the newest, live or not: which are live is the threads' doing, and Hypothesis calls
        # flaky what draws otherwise for that.
        named = {self.transfers - age for age in ages}
        self.engine.wait(named)
        self.poll()
        assert not named & set(self.live), "S9: what was waited for has no result"

    @rule()
    def drain(self) -> None:
        self.engine.drain()
        self.poll()
        assert not self.live, "S9: something is left after a drain"

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.synchronize()
        self.engine.close()
        self.poll()
        assert not self.live, "S9: something is left after the close"
        assert self.engine.poll() == []
        assert [one for one in self.found if one[1] != one[2]] == [], "S15"
        for side, pool in (("device", self.device), ("host", self.host)):
            for block, right in enumerate(self.expected[side]):
                assert right == UNKNOWN or (pool[block] == right).all(), f"S15: {side} block {block}"


ENGINES: dict[str, tuple[MakeEngine, bool]] = {
    "simulated": (simulated, False),
    "threads": (threads, False),
    "verified simulated": (verified(simulated), False),
    "verified threads": (verified(threads), False),
    "failing simulated": (failing(simulated), True),
    "failing threads": (failing(threads), True),
}


def run_machine(engine: str, examples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module, "PIECE_BYTES", 2)
    make, fails = ENGINES[engine]
    machine = type("Machine", (CopyMachine,), {"make": staticmethod(make), "may_fail": fails})
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=40))


@pytest.mark.parametrize("engine", ENGINES)
def test_engines_keep_their_promises(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run_machine(engine, 60, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_engines_keep_their_promises_long(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run_machine(engine, 500, monkeypatch)
