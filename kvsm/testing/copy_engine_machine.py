"""Tests a copy engine with every order of calls that Hypothesis can find, beside compute.

    class TestMyEngine(CopyEngineMachine):
        def make_engine(self, device, host):
            return MyCopyEngine(device, host)

    TestMyEngine = TestMyEngine.TestCase

The machine is planner and model at once. Like the ledger it keeps live transfers and compute off each other's
bytes. It launches compute that writes and reads device blocks. A plain reference knows what every block
must hold. In it a transfer is done when it is submitted, because that is what an engine's order promises
(`kvsm.copies.copy_engine` lists all promises). Checked:

- each transfer ends once (progress, S9), good or bad as it must, and an impossible job as bad (failure is not
  success, S6);
- the engine refuses a live transfer id, and anything after its close (every call is legal, S8);
- compute finds what it wrote or what was loaded, after a report as after `hold_compute` (order of copies,
S12;
  correct bytes, S15);
- at the end all memory holds what the reference says (correct bytes, S15). Nothing is known about the
targets of
  bad transfers, and about copies from there.

Not checked: pools of several tensors, and calls from several threads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import Bundle

from kvsm.copies.copy_engine import CopyEngine
from kvsm.core.plan import TransferJob
from kvsm.errors import PropertyBroken, TransferFailed
from kvsm.events import Direction
from kvsm.ids import pack
from kvsm.properties import Property
from kvsm.testing.machine_base import PropertyMachine, initialize, rule
from kvsm.testing.strategies import block_pairs

BLOCKS = 6
"""Size of either pool."""

UNKNOWN = -1

_CALLED = ("submit", "hold_compute", "poll", "wait", "drain", "close")
"""The methods that the machine calls."""

_BLOCK = st.integers(0, BLOCKS - 1)


class CopyEngineMachine(PropertyMachine):
    """Subclass it and give `make_engine`. For an engine on a device give `make_pools`, `compute` and
    `synchronize` too.

    Attributes: `device` and `host`, the pools; `engine`; `seed`, for an engine that draws random numbers.
    """

    block_bytes = 2
    """Bytes of a block. Override it for engines that need larger or aligned blocks."""

    may_fail = False
    """Whether the engine may fail a transfer that could be carried out."""

    transfers: Bundle[int] = Bundle("transfers")

    # What a subclass gives.

    def make_engine(self, device: Any, host: Any) -> CopyEngine:
        """A new engine between these pools."""
        raise NotImplementedError(f"{type(self).__name__} must say which engine it is for: make_engine")

    def make_pools(self) -> tuple[Any, Any]:
        """(device pool, host pool), `[BLOCKS, block_bytes]` of bytes each: numpy arrays or torch tensors."""
        shape = BLOCKS, self.block_bytes
        return np.zeros(shape, np.uint8), np.zeros(shape, np.uint8)

    def compute(self, action: Callable[[], None], reads: Sequence[int], writes: Sequence[int]) -> None:  # noqa: ARG002
        """Queue compute that touches these device blocks. On a host it runs now."""
        action()

    def synchronize(self) -> None:
        """Wait until all compute is over."""

    # Rules.

    @initialize(seed=st.integers(0, 2**16))
    def start(self, seed: int) -> None:
        self.seed = seed
        self.device, self.host = self.make_pools()
        self._expected = {"device": list(range(BLOCKS)), "host": list(range(100, 100 + BLOCKS))}
        for block in range(BLOCKS):
            self.device[block], self.host[block] = block, 100 + block
        self.synchronize()
        self._live: dict[int, TransferJob] = {}
        self._held: set[int] = set()
        """Live transfers that compute waits for. Compute may use what they touch; other transfers may not."""
        self._impossible: set[int] = set()
        self._submitted = 0
        self._read: list[tuple[int, Any, int]] = []
        """What compute has read: which block, what it found, what it must find."""
        self.engine = self.make_engine(self.device, self.host)
        self.under_test.watch(self.engine, "copy engine", _CALLED, self.make_engine)
        self.started = True

    @rule(block=_BLOCK, value=st.integers(0, 255))
    def compute_writes(self, block: int, value: int) -> None:
        """Compute writes a device block that no copy uses."""
        if block in self._busy("device", self._held):
            return

        def action() -> None:
            self.device[block] = value

        self.compute(action, reads=(), writes=(block,))
        self._expected["device"][block] = value

    @rule(block=_BLOCK)
    def compute_reads(self, block: int) -> None:
        """Compute reads a device block, which must hold what was written last."""
        right = self._expected["device"][block]
        if block in self._busy("device", self._held) or right == UNKNOWN:
            return

        def action() -> None:
            row = self.device[block]
            self._read.append((block, row.clone() if hasattr(row, "clone") else row.copy(), right))

        self.compute(action, reads=(block,), writes=())

    @rule(
        target=transfers,
        direction=st.sampled_from(Direction),
        pairs=block_pairs(BLOCKS, BLOCKS),
        hold=st.booleans(),
    )
    def submit(self, direction: Direction, pairs: list[tuple[int, int]], hold: bool) -> int:
        """Submit a transfer of the pairs that no live transfer touches.

        pairs: (device block, host block).
        hold: hold compute, which may then use what the transfer touches. It does not if the transfer may be
        bad, because its bytes are unknown.
        """
        devices, hosts = self._busy("device"), self._busy("host")
        pairs = [(device, host) for device, host in pairs if device not in devices and host not in hosts]
        self._submit(direction, pairs)
        source, target = _ends(direction)
        for pair in pairs:
            at = dict(zip(("device", "host"), pair))
            self._expected[target][at[target]] = self._expected[source][at[source]]
        if hold and not self.may_fail:
            self.engine.hold_compute([self._submitted])
            self._held.add(self._submitted)
        return self._submitted

    @rule(direction=st.sampled_from(Direction), block=_BLOCK)
    def submit_what_cannot_be(self, direction: Direction, block: int) -> None:
        """A job that names a block outside of its pool ends as bad, and nothing of it runs."""
        self._submit(direction, [(block, block), (BLOCKS, block)])
        self._impossible.add(self._submitted)

    @rule(transfer=transfers)
    def submit_again(self, transfer: int) -> None:
        """A live transfer id must be refused."""
        if transfer in self._live:
            self._must_refuse(transfer)

    @rule()
    def poll(self) -> None:
        for result in self.engine.poll():
            transfer, error = result.transfer, result.error
            if transfer not in self._live:
                raise PropertyBroken(
                    Property.PROGRESS, f"transfer {transfer} ended, and no such transfer was live"
                )
            job = self._live.pop(transfer)
            self._held.discard(transfer)
            wrong = ""
            if result.good == bool(error):
                wrong = f"is {'good' if result.good else 'bad'}, error {error!r}"
            elif result.good and transfer in self._impossible:
                wrong = "is good, and names no block of its pool"
            elif not (result.good or self.may_fail or transfer in self._impossible):
                wrong = f"could be carried out, and failed: {error}"
            if wrong:
                raise PropertyBroken(Property.FAILURE_IS_NOT_SUCCESS, f"transfer {transfer} {wrong}")
            if not result.good and transfer not in self._impossible:
                self._forget(job)

    @rule(named=st.lists(transfers, max_size=3))
    def wait(self, named: list[int]) -> None:
        """An awaited transfer has a result."""
        self.engine.wait(named)
        self.poll()
        self._must_have_ended(self._live.keys() & set(named), "a wait for them")

    @rule()
    def drain(self) -> None:
        self.engine.drain()
        self.poll()
        self._must_have_ended(self._live, "a drain")

    # The end.

    def wind_down(self) -> None:
        self.synchronize()
        self.engine.close()
        self.poll()
        self._must_have_ended(self._live, "the close")
        if self.engine.poll():
            raise PropertyBroken(Property.PROGRESS, "an end was told twice")
        self._must_refuse(self._submitted + 1)
        self._check_memory()

    def close(self) -> None:
        self.engine.close()

    # The reference.

    def _busy(self, side: str, waited_for: Collection[int] = ()) -> set[int]:
        """Blocks of this side that only their transfer may touch now. waited_for: transfers that the caller
        waits for before it touches anything."""
        jobs = [
            job
            for transfer, job in self._live.items()
            if transfer not in waited_for and transfer not in self._impossible
        ]
        return {int(block) for job in jobs for block in job.pairs()[side == "host"]}

    def _submit(self, direction: Direction, pairs: Sequence[tuple[int, int]]) -> None:
        self._submitted += 1
        devices, hosts = [device for device, _ in pairs], [host for _, host in pairs]
        job = TransferJob(self._submitted, direction, pack(devices), pack(hosts))
        self.engine.submit(job)
        self._live[job.transfer] = job

    def _must_refuse(self, transfer: int) -> None:
        try:
            self.engine.submit(TransferJob(transfer, Direction.STORE, (), ()))
        except TransferFailed:
            return
        raise PropertyBroken(
            Property.LEGAL_CALLS, f"transfer {transfer} was accepted: its id is live, or the engine closed"
        )

    def _forget(self, job: TransferJob) -> None:
        """A bad transfer may have written anything to its targets."""
        _, target = _ends(job.direction)
        for block in job.pairs()[target == "host"]:
            self._expected[target][int(block)] = UNKNOWN

    def _must_have_ended(self, left: Collection[int], after: str) -> None:
        if left:
            raise PropertyBroken(Property.PROGRESS, f"transfers {sorted(left)} have no result after {after}")

    def _check_memory(self) -> None:
        for block, found, right in self._read:
            self._must_hold(f"compute read device block {block}, which", found, right)
        for side, pool in (("device", self.device), ("host", self.host)):
            for block, right in enumerate(self._expected[side]):
                if right != UNKNOWN:
                    self._must_hold(f"{side} block {block}", pool[block], right)

    def _must_hold(self, what: str, row: Any, right: int) -> None:
        found = np.asarray(row.cpu() if hasattr(row, "cpu") else row)
        if (found != right).any():
            raise PropertyBroken(
                Property.CORRECT_BYTES, f"{what} holds {found.tolist()}; it must hold {right} in every byte"
            )


def _ends(direction: Direction) -> tuple[str, str]:
    """(source, target)."""
    return ("device", "host") if direction is Direction.STORE else ("host", "device")
