"""The whole world: the real scheduler side, the real `DiskTier` and the offload cores of host and disk,
driven by the wider engine.

It has all actions and checks of the wider serving world (`kvsm.check.worlds.wider_serving`). Further actions:
a rank ends its part of a copy between host and disk, well or badly, in any order ("disk", "disk_fail"); a
report on such a copy is passed on ("disk_report") or repeated ("disk_repeat"); a copy is given up
("disk_lose"), and may still be carried out; a payload on disk is damaged ("damage").

Checked besides:

- stored, so served (S19): each answer is the longest hit that device, host and disk serve
  (`kvsm.check.worlds.whole_answers`); at rest also what the next process serves from the disk
  (`kvsm.check.worlds.whole_served`);
- both ledgers agree about each copy between them, and no place for a copy is leaked: conservation (S1);
- each readable block on disk holds the right bytes on every rank, token by token (correct bytes, S15), and
  none from before a reset (no stale data, S14). What comes up from the disk is checked as all host blocks;
- no copy writes a slot that another one touches: no reuse in flight (S3);
- after a failed copy its target lacks the key: failure is not success (S6);
- what was fetched for a waiting request is held until it loads it: a match holds what it counts (S7);
- at rest each idle block of the host is on the disk, with the exceptions of `kvsm.check.worlds.tier_rest`.

It does not have: processes that end, a log on a disk, clocks that go wrong, hand-overs.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

from kvsm.check.worlds.describing import describe_ledger
from kvsm.check.worlds.serving_world import _BUDGET_OF, Budgets
from kvsm.check.worlds.whole_disk import WholeDiskOptions
from kvsm.check.worlds.whole_engine import WholeEngine
from kvsm.check.worlds.whole_served import check_comes_up
from kvsm.check.worlds.wider_serving import WiderOptions, WiderServing
from kvsm.check.worlds.world import Action
from kvsm.check.worlds.world_files import silent
from kvsm.core.ledger import readable_keys
from kvsm.core.ledger.invariants import check_ledger
from kvsm.core.plan import WorkerReport
from kvsm.errors import PropertyBroken
from kvsm.properties import Property
from kvsm.states.lease import LeaseState
from kvsm.states.words import STATE_MASK
from kvsm.tiers import disagreements


class WholeBudgets(Budgets, frozen=True, kw_only=True):
    """`Budgets` with the disturbances of the disk."""

    disk_failures: int = 0
    disk_repeats: int = 0
    disk_losses: int = 0
    damages: int = 0
    """How many payloads on disk may be damaged."""


class WholeOptions(WiderOptions, frozen=True, kw_only=True):
    """`WiderOptions` with a disk."""

    disk: WholeDiskOptions = WholeDiskOptions()
    budgets: WholeBudgets = WholeBudgets()


class WholeWorld(WiderServing):
    """A `World` of a `WholeEngine`."""

    engine_class = WholeEngine
    budget_of = _BUDGET_OF | {
        "disk_fail": "disk_failures",
        "disk_repeat": "disk_repeats",
        "disk_lose": "disk_losses",
        "damage": "damages",
    }
    options: WholeOptions
    engine: WholeEngine

    def __init__(self, options: WholeOptions, *, keep_events: bool = True) -> None:
        self._disk_over: WorkerReport | None = None
        self._history = blake2b(digest_size=16)
        super().__init__(options, keep_events=keep_events)

    def _more_arguments(self) -> dict[str, Any]:
        return {"disk_options": self.options.disk}

    def next_engine(self) -> WholeEngine:
        """The engine of a process after a kill now, without the host pool. Its requests may wait long."""
        engine, options = self.engine, self.options
        return WholeEngine(
            options.groups,
            options.device_blocks,
            options.slots,
            options.workers,
            core={"blocks_per_chunk": options.blocks_per_chunk, "defer_ticks": 1 << 10},
            disk_options=options.disk,
            left=engine.disk.left(),
        )

    # What may happen.

    def actions(self) -> list[Action]:
        disk, left = self.engine.disk, self.left
        actions = super().actions()
        for place, copy in enumerate(disk.copies.values()):
            actions += [("disk", place, rank) for rank in sorted(copy.left)]
            if left["disk_failures"]:
                actions += [("disk_fail", place, rank) for rank in sorted(copy.left)]
        actions += [("disk_report", place) for place in range(len(disk.reports))]
        if left["disk_repeats"]:
            actions += [("disk_repeat", place) for place in range(len(self._disk_repeatable()))]
        if left["disk_losses"]:
            actions += [("disk_lose", place) for place in range(len(self._losable()))]
        if left["damages"]:
            actions += [("damage", slot) for slot in range(disk.options.slots)]
        return actions

    def may_step(self) -> bool:
        """Whether the engine steps again: also while the disk has work."""
        return super().may_step() or self.engine.disk.tier.has_work()

    def _has_lost_memory(self) -> bool:
        leases = self.engine.core.ledger.leases.words[: self.options.device_blocks]
        return self._may_lose() and any(word & STATE_MASK == LeaseState.RETIRED for word in leases)

    def _repeatable(self) -> list[WorkerReport]:
        of_disk = {copy.host for copy in self.engine.disk.tier.copies.values()}
        return [report for report in super()._repeatable() if report.transfer not in of_disk]

    def _disk_repeatable(self) -> list[WorkerReport]:
        reports = [
            WorkerReport(one.id, rank, True)
            for one in self.engine.disk.core.ledger.transfers.values()
            for rank in range(self.engine.workers)
            if one.reported >> rank & 1
        ]
        return reports if self._disk_over is None else [*reports, self._disk_over]

    def _losable(self) -> list[int]:
        """The copies of the disk that are at work and were not given up yet."""
        return [transfer for transfer in self.engine.disk.copies if transfer in self.engine.disk.tier.copies]

    def wind_down(self) -> Action | None:
        disk = self.engine.disk
        for copy in disk.copies.values():
            return ("disk", 0, min(copy.left))
        return ("disk_report", 0) if disk.reports else super().wind_down()

    # What happens.

    def do(self, action: Action) -> bool:
        done = super().do(action)
        if done:
            self._history.update(repr(action).encode())
            self._check_disk()
        return done

    def _do_disk(self, place: int, rank: int, good: bool = True) -> bool:
        copies = self.engine.disk.copies
        transfers = list(copies)
        if place >= len(transfers) or rank not in copies[transfers[place]].left:
            return False
        self.engine.disk.carry_out(transfers[place], rank, good=good)
        return True

    def _do_disk_fail(self, place: int, rank: int) -> bool:
        return self._do_disk(place, rank, good=False)

    def _do_disk_report(self, place: int) -> bool:
        disk = self.engine.disk
        if place >= len(disk.reports):
            return False
        report, was_live = disk.reports[place], disk.reports[place].transfer in disk.core.ledger.transfers
        with silent():
            self.engine.hand_on_disk(place)
        if was_live and report.transfer not in disk.core.ledger.transfers:
            self._disk_over = report
        return True

    def _do_disk_repeat(self, place: int) -> bool:
        """Pass on a report a second time. A stale report must change nothing (S5)."""
        repeatable, disk = self._disk_repeatable(), self.engine.disk
        if place >= len(repeatable):
            return False
        before = self.engine.core.ledger.seq, len(disk.core.ledger.index), len(disk.copies)
        disk.tier.report(repeatable[place])
        if before != (self.engine.core.ledger.seq, len(disk.core.ledger.index), len(disk.copies)):
            message = f"a repeated report of copy {repeatable[place].transfer} of the disk changes the state"
            raise PropertyBroken(Property.STALE_REPORTS, message)
        return True

    def _do_disk_lose(self, place: int) -> bool:
        losable = self._losable()
        if place >= len(losable):
            return False
        with silent():
            self.engine.disk.lose(losable[place])
        return True

    def _do_damage(self, slot: int) -> bool:
        return self.engine.disk.damage(slot)

    # What must hold.

    def _check_disk(self) -> None:
        disk = self.engine.disk
        differing = disagreements(disk.tier)
        if differing:
            raise PropertyBroken(Property.CONSERVATION, differing[0])
        disk.check_places()

    def check_ledger(self) -> None:
        super().check_ledger()
        for violation in check_ledger(self.engine.disk.core.ledger):
            raise PropertyBroken(violation.property, f"on disk: {violation.message}")

    def check_bytes(self) -> None:
        super().check_bytes()
        disk = self.engine.disk
        index, readable = disk.core.ledger.index, disk.core.ledger.readable
        if not index.keys() <= self.contents.keys():
            self.contents.update(self._expected())
        for key, slot in index.items():
            if readable(slot):
                disk.check_slot(key, slot, self.contents[key])

    def is_at_rest(self) -> bool:
        rests = super().is_at_rest()
        if rests:
            self.engine.disk.rest.check()
            after = self.next_engine()
            lost = set(readable_keys(self.engine.disk.core.ledger)) - after.disk.core.ledger.index.keys()
            if lost:
                message = f"{min(lost).hex()} is sealed on every rank, and recovery does not find it"
                raise PropertyBroken(Property.FULL_OFFLOAD, message)
            check_comes_up(after, self.engine.requests.values())
        return rests

    def describe(self) -> dict[str, str]:
        of_disk = describe_ledger(self.engine.disk.core.ledger)
        return super().describe() | {f"disk: {thing}": text for thing, text in of_disk.items()}

    def fingerprint(self, *, renamed: bool = True) -> bytes:  # noqa: ARG002
        """A hash of all actions so far: this world is walked, and not explored."""
        return self._history.digest()
