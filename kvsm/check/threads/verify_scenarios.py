"""Scenarios of the engine that verifies: loads from kept pools, which a thread proves before they begin."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvsm.check.threads.control import control
from kvsm.check.threads.copy_scenarios import Ends, WatchedCopies, content, job, names
from kvsm.check.threads.scenario import ThreadScenario
from kvsm.copies.checksums import BlockChecksums
from kvsm.copies.verifying import VerifyingCopyEngine
from kvsm.errors import PropertyBroken
from kvsm.events import Direction
from kvsm.properties import Property

_VERIFYING = "kvsm.copies.verifying"


class KeptLoads(ThreadScenario):
    """A block of an earlier life is loaded, of which some bytes may be damaged, and computed with."""

    says = "an engine that verifies loads from a kept pool, in which a block may be damaged, and stores"
    sizes: Mapping[str, int] = {"loads": 2, "checking_threads": 1, "threads": 1}
    modules = (_VERIFYING, "kvsm.copies.threaded", "kvsm.copies.host")
    line_modules = (_VERIFYING,)
    notable = ("a damaged block is refused", "a load is proved while its caller goes on", "compute is held")

    def body(self) -> None:
        run, loads = control(), self.size["loads"]
        below = WatchedCopies(loads + 1, self.size["threads"])
        for block in range(loads):
            below.host[block] = content(block)
        below.device[loads] = content(loads)
        kept = BlockChecksums(below.host, kept=True)
        kept.keep(range(loads), names(range(loads)))
        is_damaged = bool(run.choose("whether a block is damaged", 2))
        if is_damaged:
            below.host[0, 0] ^= 1
        holds = bool(run.choose("whether compute is held", 2))
        engine = VerifyingCopyEngine(
            below,
            below.host,
            threads=self.size["checking_threads"],
            table=kept._table.view(np.uint8).reshape(loads + 1, -1),
            kept=True,
            every_load=not holds,
        )
        ends = Ends(engine, below)
        for number in range(loads):
            engine.submit(job(1 + number, Direction.LOAD, [number]))
        engine.submit(job(1 + loads, Direction.STORE, [loads]))
        ends.poll()
        if not ends.results:
            run.note_reached("a load is proved while its caller goes on")
        if holds:
            engine.hold_compute([1])
            run.note_reached("compute is held")
        else:
            engine.wait([1])
        # Compute begins, with what the load brought.
        has_bytes = np.array_equal(below.device[0], content(0))
        ends.poll()
        if 1 not in ends.results or (ends.results[1].good and not has_bytes):
            raise PropertyBroken(
                Property.COPY_ORDER, "compute begins before the load that it waited for has ended"
            )
        if is_damaged and below.device[0].any():
            raise PropertyBroken(Property.CORRECT_BYTES, "bytes of a damaged block reached the device")
        engine.drain()
        ends.poll()
        ends.expect(*range(1, loads + 2))
        engine.close()
        for number in range(loads):
            ends.expect_bytes(1 + number, below.device, [number])
        ends.expect_bytes(1 + loads, below.host, [loads])
        if ends.results[1].good is is_damaged:
            raise PropertyBroken(
                Property.FAILURE_IS_NOT_SUCCESS, f"the load is told wrongly: {ends.results[1]}"
            )
        if is_damaged:
            run.note_reached("a damaged block is refused")
