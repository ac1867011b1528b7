"""A way through the offload protocol as the events of a core: the same story, for `kvsm show` to read.

It is the other direction of `offload_steps.py`. A plan of several blocks is one event. So it is told when it
is complete: as it leaves, or is taken back. A load of several blocks belongs to one request. So its matches
are told together, with the last of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvsm import events as ev
from kvsm.checker.protocol.plain import Move, ProtocolModel, State
from kvsm.events import OffloadConfig, OffloadingEvent


def events_of_path(model: ProtocolModel, path: Sequence[Move]) -> list[OffloadingEvent]:
    """The events of a core that takes this path. A crash ends its log.

    Whether the core would refuse one of them is not asked: the path may break the protocol.
    """
    told = _PathTelling(model, _matches_by_load(path))
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
    told.rest()
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


@dataclass(eq=False)
class _ToldPlan:
    """A transfer that is planned.

    match: one of a load's matches, by its place among all.
    id: the number of its event, once it is told.
    """

    store: bool
    slots: list[int] = field(default_factory=list)
    device_blocks: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    match: int = -1
    id: int = 0


class _PathTelling:
    """The events so far.

    together: the matches of the same load, for each match by its place among all.
    """

    def __init__(self, model: ProtocolModel, together: dict[int, list[int]]) -> None:
        sizes = {members.name: members.size for members in model.declared.index_sets}
        config = OffloadConfig(
            host_blocks=sizes["slot"], device_blocks=sizes["device block"], workers=sizes["worker"]
        )
        self.events: list[OffloadingEvent] = [ev.LogOpened(1, 0, 0, config, "")]
        self._layout, self._key = model.layout, model.declared.variable("key")
        self._together = together
        self._slots: list[int] = []
        """The slot of each match."""
        self._requests: dict[int, str] = {}
        """The request of each match that is told."""
        self._open: dict[int, int] = {}
        self._plans: dict[int, _ToldPlan] = {}
        self._epoch = 0

    def tell(self, kind: Callable[..., OffloadingEvent], *facts: object) -> int:
        """Add an event. Returns its number."""
        number = len(self.events) + 1
        self.events.append(kind(number, 0, 0, *facts))
        return number

    def rest(self) -> None:
        """The plans that never left."""
        for transfer in self._plans:
            self._plan(transfer)

    def match(self, _: State, slot: int, match: int) -> None:
        """A hit, if it is the last match of its load, or of no load."""
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
        """One more block of a store."""
        key = state[self._layout.place(self._key, (device_block,))]
        plan = self._plan_of(transfer, store=True)
        plan.slots.append(slot)
        plan.device_blocks.append(device_block)
        plan.keys.append(f"key {key}".encode())

    def load(self, _: State, transfer: int, _copy: int, device_block: int, slot: int, match: int) -> None:
        """One more block of a load."""
        plan = self._plan_of(transfer, store=False)
        plan.slots.append(slot)
        plan.device_blocks.append(device_block)
        plan.match = self._open[match]

    def submit(self, _: State, transfer: int) -> None:
        """The plan, and that it leaves."""
        self.tell(ev.TransfersSubmitted, (self._plan(transfer),))

    def cancel(self, _: State, transfer: int) -> None:
        """The plan, and that it does not leave."""
        self.tell(ev.TransferCancelled, self._plan(transfer))
        del self._plans[transfer]

    def lose(self, _: State, transfer: int) -> None:
        """A worker will never report."""
        self.tell(ev.TransferLost, self._plan(transfer))
        del self._plans[transfer]

    def report(self, transfer: int, worker: int, good: bool, ends: bool) -> None:
        """A worker's report."""
        self.tell(ev.WorkerReported, self._plan(transfer), worker, good)
        if ends:
            del self._plans[transfer]

    def reset(self, _: State) -> None:
        """Everything is voided."""
        self._epoch += 1
        self.tell(ev.CacheReset, self._epoch)

    def _plan_of(self, transfer: int, store: bool) -> _ToldPlan:
        if transfer not in self._plans:
            self._plans[transfer] = _ToldPlan(store)
        return self._plans[transfer]

    def _plan(self, transfer: int) -> int:
        """The id of a transfer. Its plan is told if it was not."""
        plan = self._plans[transfer]
        if not plan.id:
            slots, blocks = tuple(plan.slots), tuple(plan.device_blocks)
            if plan.store:
                plan.id = self.tell(ev.StorePlanned, (), tuple(plan.keys), slots, blocks)
            else:
                plan.id = self.tell(ev.LoadPlanned, self._requests[plan.match], slots, blocks)
        return plan.id


def _untold(_: _PathTelling, __: State, *_members: int) -> None:
    """No event: the core does not hear of it."""


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
"""Every action of the protocol that changes something, but the crash: it ends the log."""
