"""The whole world: the real scheduler side, the real `DiskTier` and the offload cores of host and disk,
driven by the wider engine.

It has all actions and checks of the wider serving world (`kvsm.check.worlds.wider_serving`), and these:

- all reports are passed on at once ("report_all");
- a rank ends its part of a copy between host and disk, well or badly, in any order ("disk", "disk_fail");
- a report on such a copy is passed on ("disk_report") or repeated ("disk_repeat");
- such a copy is given up ("disk_lose"), and may still be carried out;
- a payload on disk is damaged ("damage");
- the process is killed at any moment ("kill"), or the power is lost ("power"). The next process begins with
  the shipped start (`kvsm.check.worlds.whole_process`), and clients send their unfinished requests again;
- a write or a sync of the log fails ("log_fault").

It also checks:

- stored, so served (S19): each answer is the longest hit that device, host and disk serve
  (`kvsm.check.worlds.whole_answers`); at rest also what the next process serves from the disk
  (`kvsm.check.worlds.whole_served`);
- both ledgers agree about each copy between them, and no place for a copy is leaked: conservation (S1);
- each readable block on disk holds the right bytes on every rank, token by token (correct bytes, S15), and
  none from before a reset (no stale data, S14). Fetched blocks are checked like all host blocks;
- no copy writes a slot that another one touches: no reuse in flight (S3);
- after a failed copy its target lacks the key: failure is not success (S6);
- what was fetched for a waiting request is held until it is loaded: a match holds what it counts (S7);
- from each state the world comes to rest within a bound: progress (S9);
- at rest each idle block of the host is on the disk, with the exceptions of `kvsm.check.worlds.tier_rest`;
- jobs leave, and a reset returns, only when their events are in the log: no stale data (S14);
- the next process takes over exactly the blocks that the log of the killed one names as stored (events are
  state, S10), and each block that was sealed, and flushed if the power was lost (full offload, S16); none is
  from other weights or from before a reset.

After a fault of the log its events may be lost, so the next process is checked only for wrong bytes.

Not covered: the log of the disk's core, the bytes of slot files (see the targets `disk` and `eras`), clocks
that go wrong (see the target `clocks`), hand-overs (see the target `fleet`).
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from functools import cache
from hashlib import blake2b
from random import Random
from typing import Any

from kvsm.check.worlds.check_counts import count_case
from kvsm.check.worlds.describing import describe_ledger
from kvsm.check.worlds.serving_world import _BUDGET_OF, Budgets
from kvsm.check.worlds.small_request import SmallRequest
from kvsm.check.worlds.whole_answers import check_own_blocks
from kvsm.check.worlds.whole_disk import WholeDiskOptions
from kvsm.check.worlds.whole_engine import WholeEngine
from kvsm.check.worlds.whole_process import MirroredLog, SurvivingState, kept_by_log
from kvsm.check.worlds.whole_served import check_served_from_disk
from kvsm.check.worlds.wider_serving import WiderOptions, WiderServing
from kvsm.check.worlds.world import Action
from kvsm.check.worlds.world_files import suppressed_warnings
from kvsm.core.ledger.invariants import check_ledger
from kvsm.core.plan import WorkerReport
from kvsm.core.scheduler import StoreMode
from kvsm.errors import LogWriteFailed, PropertyBroken
from kvsm.properties import Property
from kvsm.states.lease import LeaseState
from kvsm.states.words import STATE_MASK
from kvsm.tiers import disagreements

_MOST_WINDING = 4_000
"""More actions than any run needs to come to rest."""
_TRIES = 16
"""The number of draws after which any action is taken, because the run must continue."""
_USUAL = 0.85
"""The share of actions that are no disturbance."""
_MOST_CHOICES = 64
"""How many of the states that a kill may leave are offered to a walk that asks for all actions."""
_KILLS = ((1, 0), (1, 0), (1, 0), (0, 0), (0, 0), (1, 1))
"""(whether the host pools outlive the process, whether the next one has other weights)."""


class WholeBudgets(Budgets, frozen=True, kw_only=True):
    """`Budgets` with the disturbances of the disk."""

    disk_failures: int = 0
    disk_repeats: int = 0
    disk_losses: int = 0
    damages: int = 0
    """How many payloads on disk may be damaged."""
    kills: int = 0
    """The process is killed, and another one takes over, perhaps with other weights."""
    power_losses: int = 0
    log_faults: int = 0
    """A write or a sync of the log fails."""


class TroubleLevel(Enum):
    """How much goes wrong in a run."""

    CALM = "calm"
    """No fault: only what engines do anyway."""
    ROUGH = "rough"
    """Some kinds of faults, a few of each."""
    STORM = "storm"
    """Three times as many."""


class WholeOptions(WiderOptions, frozen=True, kw_only=True):
    """`WiderOptions` with a disk. trouble: the level by which the budgets were drawn, for people."""

    trouble: TroubleLevel = TroubleLevel.ROUGH
    disk: WholeDiskOptions = WholeDiskOptions()
    budgets: WholeBudgets = WholeBudgets()


class WholeWorld(WiderServing):
    """A `World` of a `WholeEngine`."""

    engine_class: type[WholeEngine] = WholeEngine
    budget_of = _BUDGET_OF | {
        "disk_fail": "disk_failures",
        "disk_repeat": "disk_repeats",
        "disk_lose": "disk_losses",
        "damage": "damages",
        "kill": "kills",
        "power": "power_losses",
        "log_fault": "log_faults",
    }
    options: WholeOptions
    engine: WholeEngine

    def __init__(self, options: WholeOptions, *, keep_events: bool = True) -> None:
        self._disk_over: WorkerReport | None = None
        self._winding = 0
        """The number of calls of `wind_down` since the last drawn action."""
        self._history = blake2b(digest_size=16)
        self._shares: Callable[[str], float] = lambda _: 1.0
        budgets = options.budgets
        logs = budgets.kills + budgets.power_losses + budgets.log_faults > 0
        self._surviving = SurvivingState(options.workers, logs=logs, fails=budgets.log_faults > 0)
        with self._surviving.attached():
            super().__init__(options, keep_events=keep_events)

    def _more_arguments(self) -> dict[str, Any]:
        return {"disk_options": self.options.disk, "surviving": self._surviving}

    def next_engine(self) -> WholeEngine:
        """The engine of a process after a kill now, without the host pool. Its requests may wait long."""
        disk, options = self.engine.disk, self.options
        return WholeEngine(
            options.groups,
            options.device_blocks,
            options.slots,
            options.workers,
            core={"blocks_per_chunk": options.blocks_per_chunk, "defer_ticks": 1 << 10},
            disk_options=options.disk,
            surviving=self._surviving.after_kill(disk.era, disk.after_kill(-1)),
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
        if len(self.engine.reports) > 1:
            actions.append(("report_all",))
        if left["disk_repeats"]:
            actions += [("disk_repeat", place) for place in range(len(self._disk_repeatable()))]
        if left["disk_losses"]:
            actions += [("disk_lose", place) for place in range(len(self._losable()))]
        if left["damages"]:
            actions += [("damage", slot) for slot in disk.damageable()]
        if left["kills"]:
            waits = sum(len(copy.left) for copy in disk.copies.values())
            begun = range(min(1 << waits, _MOST_CHOICES))
            actions += [("kill", pool, weights, one) for pool, weights in _KILLS for one in begun]
        if left["log_faults"]:
            actions += [("log_fault", sync, which) for sync in range(2) for which in range(4)]
        if left["power_losses"]:
            actions.append(("flush",))
            unflushed = sum(rank.unflushed() for rank in disk.ranks)
            actions += [("power", chosen) for chosen in range(min(3**unflushed, _MOST_CHOICES))]
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
        """The copies between host and disk that are in flight and were not given up."""
        return [transfer for transfer in self.engine.disk.copies if transfer in self.engine.disk.tier.copies]

    def wind_down(self) -> Action | None:
        self._winding += 1
        if self._winding > _MOST_WINDING:
            message = f"after {_MOST_WINDING} actions towards rest it is not at rest"
            raise PropertyBroken(Property.PROGRESS, message)
        disk = self.engine.disk
        for copy in disk.copies.values():
            return ("disk", 0, min(copy.left))
        return ("disk_report", 0) if disk.reports else super().wind_down()

    def draw(self, random: Random) -> Action:
        """Draw an action: mostly of engine and copies, sometimes a disturbance, each kind equally often.

        Raises `IndexError`, which ends a run, when nothing is left to do.
        """
        self._winding = 0
        usual: list[Action] = []
        rare: dict[str, list[Action]] = {}
        for action in self.actions():
            kind = str(action[0])
            (rare.setdefault(kind, []) if kind in self.budget_of else usual).append(action)
        for _ in range(_TRIES):
            among = usual
            if rare and (not usual or random.random() >= _USUAL):
                among = rare[random.choice(list(rare))]
            action = random.choice(among)
            if random.random() < self._shares(str(action[0])):
                break
        return action

    def favour(self, share: Callable[[str], float]) -> None:
        """Draw each kind of action less often, by the share that it has in this run."""
        self._shares = cache(share)

    # What happens.

    def do(self, action: Action) -> bool:
        with self._surviving.attached():
            try:
                done = super().do(action)
            except LogWriteFailed:
                if not self._surviving.has_failed:
                    raise
                # The log can neither be written nor be marked as broken, so the process ends.
                done = self._do_kill(1, 0, -1)
        if done:
            self._history.update(repr(action).encode())
            self._check_disk()
        return done

    def _do_report_all(self) -> bool:
        """Pass on all reports at once, as an engine does after a step."""
        if len(self.engine.reports) < 2:
            return False
        self.engine.hand_on()
        self.owes_step |= self.options.store is StoreMode.LAZY
        return True

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
        with suppressed_warnings():
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
        with suppressed_warnings():
            self.engine.disk.lose(losable[place])
        return True

    def _do_damage(self, slot: int) -> bool:
        if slot not in self.engine.disk.damageable():
            return False
        self.engine.disk.damage(slot)
        return True

    def _do_flush(self) -> bool:
        for rank in self.engine.disk.ranks:
            rank.flush()
        return bool(self.left["power_losses"])

    def _do_kill(self, keeps_pool: int, new_weights: int, begun: int) -> bool:
        """Kill the process.

        keeps_pool: whether its host pools outlive it. new_weights: whether the next one has other weights.
        begun: as in `WholeDisk.after_kill`.
        """
        disk = self.engine.disk
        promised = set() if new_weights else disk.promised(power_loss=False)
        self._surviving.left = disk.after_kill(begun)
        self._begin_process(promised, keeps_pool=bool(keeps_pool), new_weights=bool(new_weights))
        return True

    def _do_power(self, chosen: int) -> bool:
        """The power is lost. chosen: as in `WholeDisk.after_power_loss`."""
        disk = self.engine.disk
        promised = disk.promised(power_loss=True)
        self._surviving.left = disk.after_power_loss(chosen)
        self._begin_process(promised, keeps_pool=False, new_weights=False, power_loss=chosen)
        return True

    def _do_log_fault(self, sync: int, which: int) -> bool:
        """Let the next write of the log fail, or its next sync. which: draws how."""
        if self._surviving.log_disk is None:
            return False
        self._surviving.log_disk.arm("sync" if sync else "write", which)
        return True

    def _begin_process(
        self,
        promised: set[bytes],
        *,
        keeps_pool: bool,
        new_weights: bool,
        power_loss: int | None = None,
    ) -> None:
        """Let the next process take over. Clients send their unfinished requests again.

        promised: the keys that it must find on disk.
        """
        old, surviving = self.engine, self._surviving
        assert isinstance(old.log, MirroredLog)
        self.contents.update(self._expected())
        kept = self._kept(old) if keeps_pool and not new_weights else {}
        surviving.kill()
        if power_loss is not None:
            surviving.lose_power(power_loss)
        if not keeps_pool:
            surviving.lose_pools()
        if new_weights:
            surviving.weights, surviving.epoch = surviving.weights + 1, surviving.epoch + 1
            self.contents.clear()
        made = self._make_engine(None)
        assert isinstance(made, WholeEngine)
        self.engine = engine = made
        self._check_taken_over(kept, promised)
        if keeps_pool:
            engine.host = old.host
            self.check_bytes()
        is_warm = engine.core.ledger.life > 1 and keeps_pool and not new_weights
        assert isinstance(engine.log, MirroredLog)
        self.keep_events = self.keep_events and engine.log.is_whole and kept is not None
        last = old.log.flushed if is_warm else 0
        engine.notes.crash(old.notes, last)
        self.first_news = sum(event.seq <= last for event in engine.log)
        if not self.keep_events:
            # Some events are lost: from here on only those of the last action are kept.
            engine.log.clear()
            self.first_news = 0
        self._take_requests(old)
        self.owes_step, self.over, self._disk_over = True, None, None

    def _kept(self, old: WholeEngine) -> dict[bytes, int] | None:
        """The blocks that the next process must take over; None if the log may have lost some events."""
        assert isinstance(old.log, MirroredLog)
        if self._surviving.has_failed or not old.log.is_whole:
            return None
        return kept_by_log(old.core.config, old.log)

    def _take_requests(self, old: WholeEngine) -> None:
        for place, request in enumerate(old.requests.values()):
            if request.finished:
                self.engine.requests[request.request_id] = request
            else:
                self.engine.arrive(self._sent_again(place, request))

    def _sent_again(self, place: int, request: SmallRequest) -> SmallRequest:  # noqa: ARG002
        """The request that a client sends again after a kill. place: the position at which it has arrived."""
        return self._request(place)

    def _check_taken_over(self, kept: dict[bytes, int] | None, promised: set[bytes]) -> None:
        """Check what the next process finds.

        kept: key -> slot on the host; None if it is unknown. promised: keys on disk.
        """
        found, below = self.engine.core.ledger.index, self.engine.disk.core.ledger.index
        count_case(Property.EVENTS_ARE_STATE, "blocks on the host that a next process finds", len(found))
        if kept is not None and dict(found.items()) != kept:
            message = f"the log has {len(kept)} stored blocks, but the next process finds {len(found)}"
            raise PropertyBroken(Property.EVENTS_ARE_STATE, message)
        if not promised <= below.keys():
            lost = min(promised - below.keys())
            message = f"{lost.hex()} is sealed on every rank, but recovery does not find it"
            raise PropertyBroken(Property.FULL_OFFLOAD, message)
        count_case(Property.NO_STALE_DATA, "blocks on disk that a next process finds", len(below))
        for key in below:
            self.engine.disk.check_slot(key, below[key], self.contents.get(key))

    # What must hold.

    def _check_disk(self) -> None:
        disk = self.engine.disk
        differing = disagreements(disk.tier)
        if differing:
            raise PropertyBroken(Property.CONSERVATION, differing[0])
        disk.check_places()
        check_own_blocks(self.engine.scheduler, disk.tier, self.engine.waiting)

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
            lost = self.engine.disk.promised(power_loss=False) - after.disk.core.ledger.index.keys()
            if lost:
                message = f"{min(lost).hex()} is sealed on every rank, but recovery does not find it"
                raise PropertyBroken(Property.FULL_OFFLOAD, message)
            check_served_from_disk(after, self.engine.requests.values())
        return rests

    def describe(self) -> dict[str, str]:
        of_disk = describe_ledger(self.engine.disk.core.ledger)
        return super().describe() | {f"disk: {thing}": text for thing, text in of_disk.items()}

    def fingerprint(self, *, renamed: bool = True) -> bytes:  # noqa: ARG002
        """A hash of all actions so far: this world is walked, and not explored."""
        return self._history.digest()
