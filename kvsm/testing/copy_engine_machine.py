"""Test a copy engine with every order of calls that Hypothesis can find, while compute runs.

    class TestMyEngine(CopyEngineMachine):
        def make_engine(self, device, host):
            return MyCopyEngine(device, host)

    TestMyEngine = TestMyEngine.TestCase

The machine plans transfers and models their effect. Like the ledger it never lets live transfers and compute
use the same bytes. It launches compute that writes and reads device blocks. A reference model has the
expected content of every block. In the model a transfer is done when it is submitted, because an engine's
order of copies promises the same result (`kvsm.copies.copy_engine` lists all promises). Checked:

- each transfer ends once (progress, S9), with the right result, and an impossible job as bad (failure is not
  success, S6);
- the engine refuses a live transfer id, and every job after its close (every call is legal, S8);
- compute finds the bytes that it wrote or that were loaded, after a report as well as after `hold_compute`
  (order of copies, S12; correct bytes, S15);
- at the end all memory has the content that the model expects (correct bytes, S15). Targets of bad transfers,
  and copies from there, are excluded: their content is unknown.

Not checked: pools of several tensors, and calls from several threads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import Bundle

from kvsm.check.worlds.check_counts import count_case
from kvsm.copies.copy_engine import CopyEngine
from kvsm.core.plan import TransferJob
from kvsm.errors import PropertyBroken, TransferFailed
from kvsm.events import Direction
from kvsm.ids import pack, to_list
from kvsm.properties import Property
from kvsm.testing.block_history import Block, BlockHistory, BlockStory
from kvsm.testing.machine_base import PropertyMachine, initialize, rule
from kvsm.testing.strategies import block_pairs

BLOCKS = 6
"""Number of blocks in each of the two pools."""

UNKNOWN = -1

_CALLED = ("submit", "hold_compute", "poll", "wait", "drain", "close")
"""The methods that the machine calls."""

_BLOCK = st.integers(0, BLOCKS - 1)


class CopyEngineMachine(PropertyMachine):
    """Tests one copy engine.

    Needs: a subclass with `make_engine(device, host)`, which returns an engine between these two pools with
    `submit`, `hold_compute`, `poll`, `wait`, `drain`, `close` (`kvsm.copies.CopyEngine`). A pool is an array
    of bytes, [6, `block_bytes`]. The engine must use these pools themselves, not copies of them: while
    transfers are in flight, the machine writes and reads the pools, as a model's compute would.

    An engine on a device also needs `make_pools` (tensors in place of arrays), `compute` (queues the compute,
    which the host runs at once) and `synchronize` (waits for it). `may_fail = True` is for an engine that may
    end a possible transfer as bad.

    Attributes in `make_engine`: `self.device` and `self.host`, the pools; `self.seed`, for an engine that
    draws random numbers.
    """

    block_bytes = 2
    """Bytes of a block. Override it for engines that need larger or aligned blocks."""

    may_fail = False
    """Whether the engine may fail a transfer that is possible."""

    transfers: Bundle[int] = Bundle("transfers")

    # For subclasses to override.

    def make_engine(self, device: Any, host: Any) -> CopyEngine:
        """Make the engine to test, between these pools."""
        raise NotImplementedError(f"{type(self).__name__} must say which engine it is for: make_engine")

    def make_pools(self) -> tuple[Any, Any]:
        """Make (device pool, host pool): numpy arrays or torch tensors of bytes, [BLOCKS, block_bytes]."""
        shape = BLOCKS, self.block_bytes
        return np.zeros(shape, np.uint8), np.zeros(shape, np.uint8)

    def compute(self, action: Callable[[], None], reads: Sequence[int], writes: Sequence[int]) -> None:  # noqa: ARG002
        """Queue compute that reads and writes these device blocks. By default it runs at once on the host."""
        action()

    def synchronize(self) -> None:
        """Wait until all queued compute has run."""

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
        """Live transfers that compute waits for: compute may use their blocks, other transfers may not."""
        self._impossible: set[int] = set()
        self._submitted = 0
        self._read: list[tuple[int, Any, int, BlockStory]] = []
        """(device block, content found, content expected, its history then) of each read by compute."""
        self._history = BlockHistory(self.under_test)
        self.engine = self.make_engine(self.device, self.host)
        self.under_test.watch(self.engine, "copy engine", _CALLED, self.make_engine)
        self.started = True

    @rule(block=_BLOCK, value=st.integers(0, 255))
    def compute_writes(self, block: int, value: int) -> None:
        """Let compute write a device block that no copy uses."""
        if block in self._busy("device", self._held):
            return

        def action() -> None:
            self.device[block] = value

        self._history.wrote(Block("device block", block), f"compute writes {value}")
        self.compute(action, reads=(), writes=(block,))
        self._expected["device"][block] = value

    @rule(block=_BLOCK)
    def compute_reads(self, block: int) -> None:
        """Let compute read a device block, which must have the content that was written last."""
        right = self._expected["device"][block]
        if block in self._busy("device", self._held) or right == UNKNOWN:
            return

        story = self._history.told(Block("device block", block))
        if self._live:
            count_case(Property.COPY_ORDER, "reads by compute during a copy")

        def action() -> None:
            row = self.device[block]
            self._read.append((block, row.clone() if hasattr(row, "clone") else row.copy(), right, story))

        self.compute(action, reads=(block,), writes=())

    @rule(
        target=transfers,
        direction=st.sampled_from(Direction),
        pairs=block_pairs(BLOCKS, BLOCKS),
        hold=st.booleans(),
    )
    def submit(self, direction: Direction, pairs: list[tuple[int, int]], hold: bool) -> int:
        """Submit a transfer of the pairs whose blocks no live transfer touches.

        pairs: (device block, host block).
        hold: whether to hold compute until the transfer is done, so that compute may use its blocks. Ignored
            if the transfer may fail, because its bytes are unknown then.
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
        """Submit a job that names a block outside of its pool. It must end as bad, and copy nothing."""
        self._submit(direction, [(block, block), (BLOCKS, block)])
        self._impossible.add(self._submitted)

    @rule(transfer=transfers)
    def submit_again(self, transfer: int) -> None:
        """Submit a live transfer id again. The engine must refuse it."""
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
            count_case(Property.PROGRESS, "transfers that ended")
            if transfer in self._impossible:
                count_case(Property.FAILURE_IS_NOT_SUCCESS, "impossible jobs")
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
        """Wait for some transfers. Then they must have results."""
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
            raise PropertyBroken(Property.PROGRESS, "the end of a transfer was reported twice")
        self._must_refuse(self._submitted + 1)
        self._check_memory()

    def close(self) -> None:
        self.engine.close()

    # The model.

    def _busy(self, side: str, waited_for: Collection[int] = ()) -> set[int]:
        """Blocks of this side that belong to live transfers, so that nothing else may touch them.

        waited_for: transfers to leave out, because the caller waits for them before it touches a block.
        """
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
        self._note(job)

    def _note(self, job: TransferJob) -> None:
        """Note which blocks a job touches, if the job is valid."""
        if any(block >= BLOCKS for block in (*to_list(job.device_blocks), *to_list(job.host_blocks))):
            return
        source, target = _ends(job.direction)
        for pair in zip(to_list(job.device_blocks), to_list(job.host_blocks)):
            at = {side: Block(f"{side} block", block) for side, block in zip(("device", "host"), pair)}
            what = f"{job.direction.name.lower()} {job.transfer} from {at[source]} to {at[target]}"
            self._history.wrote(at[target], what, at[source], self._history.latest_call())

    def _must_refuse(self, transfer: int) -> None:
        count_case(Property.LEGAL_CALLS, "live ids, and jobs after the close, that must be refused")
        try:
            self.engine.submit(TransferJob(transfer, Direction.STORE, (), ()))
        except TransferFailed:
            return
        raise PropertyBroken(
            Property.LEGAL_CALLS, f"transfer {transfer} was accepted: its id is live, or the engine closed"
        )

    def _forget(self, job: TransferJob) -> None:
        """Mark the targets of a bad transfer as unknown: it may have written anything there."""
        _, target = _ends(job.direction)
        for block in job.pairs()[target == "host"]:
            self._expected[target][int(block)] = UNKNOWN

    def _must_have_ended(self, left: Collection[int], after: str) -> None:
        if left:
            raise PropertyBroken(Property.PROGRESS, f"transfers {sorted(left)} have no result after {after}")

    def _check_memory(self) -> None:
        for block, found, right, story in self._read:
            self._must_hold(f"compute read device block {block}, which", found, right, story)
        for side, pool in (("device", self.device), ("host", self.host)):
            for block, right in enumerate(self._expected[side]):
                if right != UNKNOWN:
                    story = self._history.told(Block(f"{side} block", block))
                    self._must_hold(f"at the end {side} block {block}", pool[block], right, story)

    def _must_hold(self, what: str, row: Any, right: int, story: BlockStory) -> None:
        count_case(Property.CORRECT_BYTES, "blocks compared with the expected bytes")
        found = np.asarray(row.cpu() if hasattr(row, "cpu") else row)
        if (found != right).any():
            self.under_test.suspect = story.suspect
            message = f"{what} holds {found.tolist()}; it must hold {right} in every byte{story.text}"
            raise PropertyBroken(Property.CORRECT_BYTES, message)


def _ends(direction: Direction) -> tuple[str, str]:
    """(source, target)."""
    return ("device", "host") if direction is Direction.STORE else ("host", "device")
