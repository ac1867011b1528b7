"""Translate a path through the offload protocol to the events of a core, for `kvsm show` to read.

It is the other direction of `offload_steps.py`. A plan of several blocks is one event, emitted with its last
block. A load of several blocks belongs to one request, so its matches are one event, emitted with the last
match. In the protocol a bad load may void a block of a plan before the plan gets its last block. A core plans
in one step and refuses the events of such a path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvsm import events as ev
from kvsm.check.protocol.plain import Move, ProtocolModel, State
from kvsm.events import OffloadConfig, OffloadingEvent


def events_of_path(model: ProtocolModel, path: Sequence[Move]) -> list[OffloadingEvent]:
    """The events of a core that takes this path. A crash ends its log.

    The core may refuse some of these events, because the path may break the protocol.
    """
    told = _PathTelling(model, _matches_by_load(path), _plan_sizes(path))
    (state,) = model.initial()
    for move in path:
        if move[0] == "crash":
            break
        after = model.next(state, move)
        if after is None:
            raise ValueError(f"the path takes {move}, which is not possible there")
        name, *members = move
        TOLD[str(name)](told, state, *map(int, members))
        state = after
    return told.events


def _matches_by_load(path: Sequence[Move]) -> dict[int, list[int]]:
    """For each match, by its place among all: the matches of the same load, in the order of the load."""
    together: dict[int, list[int]] = {}
    open_matches: dict[int, int] = {}
    loads: dict[int, list[int]] = {}
    count = 0
    for name, *members in path:
        if name == "match":
            open_matches[int(members[1])] = count
            together[count] = [count]
            count += 1
        elif name in ("plan_load", "load_more"):
            transfer, *_, match = map(int, members)
            if name == "plan_load":
                loads[transfer] = []
            loads[transfer].append(open_matches[match])
            together[open_matches[match]] = loads[transfer]
    return together


def _plan_sizes(path: Sequence[Move]) -> list[int]:
    """How many blocks each plan gets, in the order of their first blocks."""
    sizes: list[int] = []
    plan_of: dict[int, int] = {}
    for name, *members in path:
        if name in ("plan_store", "plan_load"):
            plan_of[int(members[0])] = len(sizes)
            sizes.append(1)
        elif name in ("store_more", "load_more"):
            sizes[plan_of[int(members[0])]] += 1
    return sizes


@dataclass(eq=False)
class _ToldPlan:
    """A transfer that is planned.

    size: how many blocks it will have.
    id: the number of its event; 0 before that event is added.
    """

    size: int
    slots: list[int] = field(default_factory=list)
    device_blocks: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    id: int = 0


class _PathTelling:
    """The events so far.

    together: the matches of the same load, for each match by its place among all.
    sizes: how many blocks each plan gets, in their order.
    """

    def __init__(self, model: ProtocolModel, together: dict[int, list[int]], sizes: list[int]) -> None:
        members = {one.name: one.size for one in model.declared.index_sets}
        config = OffloadConfig(
            host_blocks=members["slot"], device_blocks=members["device block"], workers=members["worker"]
        )
        self.events: list[OffloadingEvent] = [ev.LogOpened(1, 0, 0, config, "")]
        self._layout, self._key = model.layout, model.declared.variable("key")
        self._together, self._sizes = together, iter(sizes)
        self._slots: list[int] = []
        """The slot of each match."""
        self._requests: dict[int, str] = {}
        """The request of each match whose event was added."""
        self._open: dict[int, int] = {}
        self._plans: dict[int, _ToldPlan] = {}
        self._epoch = 0

    def tell(self, kind: Callable[..., OffloadingEvent], *facts: object) -> int:
        """Add an event. Returns its number."""
        number = len(self.events) + 1
        self.events.append(kind(number, 0, 0, *facts))
        return number

    def match(self, _: State, slot: int, match: int) -> None:
        """Add the hit at the last match of a load, or at a match without a load."""
        place = self._open[match] = len(self._slots)
        self._slots.append(slot)
        together = self._together[place]
        if place == max(together):
            request = f"r{place}"
            self._requests.update(dict.fromkeys(together, request))
            self.tell(ev.HitMatched, request, tuple(self._slots[one] for one in together))

    def release(self, _: State, _slot: int, match: int) -> None:
        """A hit is given back."""
        self.tell(ev.HitReleased, self._requests[self._open[match]])

    def evict(self, _: State, slot: int) -> None:
        """A victim."""
        self.tell(ev.BlocksEvicted, (slot,), (), len(self.events) + 2)

    def store(self, state: State, transfer: int, _copy: int, device_block: int, slot: int) -> None:
        """Note one more block of a store; add the plan at its last block."""
        plan = self._plan_with(transfer, device_block, slot)
        key = state[self._layout.place(self._key, (device_block,))]
        plan.keys.append(f"key {key}".encode())
        if len(plan.slots) == plan.size:
            plan.id = self.tell(
                ev.StorePlanned, (), tuple(plan.keys), tuple(plan.slots), tuple(plan.device_blocks)
            )

    def load(self, _: State, transfer: int, _copy: int, device_block: int, slot: int, match: int) -> None:
        """Note one more block of a load; add the plan at its last block."""
        plan = self._plan_with(transfer, device_block, slot)
        if len(plan.slots) == plan.size:
            request = self._requests[self._open[match]]
            plan.id = self.tell(ev.LoadPlanned, request, tuple(plan.slots), tuple(plan.device_blocks))

    def submit(self, _: State, transfer: int) -> None:
        """The plan leaves."""
        self.tell(ev.TransfersSubmitted, (self._plans[transfer].id,))

    def cancel(self, _: State, transfer: int) -> None:
        """The plan is taken back."""
        self.tell(ev.TransferCancelled, self._plans.pop(transfer).id)

    def lose(self, _: State, transfer: int) -> None:
        """A worker will never report."""
        self.tell(ev.TransferLost, self._plans.pop(transfer).id)

    def report(self, transfer: int, worker: int, good: bool, ends: bool) -> None:
        """A worker's report."""
        self.tell(ev.WorkerReported, self._plans[transfer].id, worker, good)
        if ends:
            del self._plans[transfer]

    def reset(self, _: State) -> None:
        """Everything is voided."""
        self._epoch += 1
        self.tell(ev.CacheReset, self._epoch)

    def _plan_with(self, transfer: int, device_block: int, slot: int) -> _ToldPlan:
        """Add this block to the plan of a transfer, and return the plan."""
        if transfer not in self._plans:
            self._plans[transfer] = _ToldPlan(next(self._sizes))
        plan = self._plans[transfer]
        plan.slots.append(slot)
        plan.device_blocks.append(device_block)
        return plan


def _untold(_: _PathTelling, __: State, *_members: int) -> None:
    """Add no event: the core does not observe the action."""


TOLD: dict[str, Callable[..., None]] = {
    **dict.fromkeys(("compute", "attend", "run", "free", "start"), _untold),
    **dict.fromkeys(("read_device", "read_slot", "write_slot", "write_device"), _untold),
    **dict.fromkeys(("stray_slot_write", "stray_device_write", "write_log"), _untold),
    "match": _PathTelling.match,
    "release": _PathTelling.release,
    "evict": _PathTelling.evict,
    "plan_store": _PathTelling.store,
    "store_more": _PathTelling.store,
    "plan_load": _PathTelling.load,
    "load_more": _PathTelling.load,
    "submit": _PathTelling.submit,
    "cancel": _PathTelling.cancel,
    "lose": _PathTelling.lose,
    "report_good": lambda told, _, transfer, worker: told.report(transfer, worker, good=True, ends=False),
    "report_bad": lambda told, _, transfer, worker: told.report(transfer, worker, good=False, ends=False),
    "end_good": lambda told, _, transfer, worker: told.report(transfer, worker, good=True, ends=True),
    "end_bad": lambda told, _, transfer, worker: told.report(transfer, worker, good=False, ends=True),
    "reset": _PathTelling.reset,
}
"""Every action of the protocol that changes something, except the crash, which ends the log."""
