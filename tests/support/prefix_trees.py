"""A small correct prefix tree with a host tier, and variants with one fault each.

Copies are done within the call that requests them, so none is ever in flight; a step runs when `finish` is
called.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from kvsm.testing import PrefixMatch, TreeEvent

Prefix = tuple[int, ...]


@dataclass
class Entry:
    """One block of the tree: its places, the number of requests that hold it, and its last use."""

    device: int | None = None
    host: int | None = None
    locks: int = 0
    used: int = 0


class SmallTree:
    """Blocks by their prefix. A block that the device evicts goes to the host, if the host has room."""

    def __init__(self, device_slots: int, host_slots: int) -> None:
        self.words = [0] * device_slots
        self.host_words = [0] * host_slots
        self.free_device, self.free_host = [*range(device_slots)], [*range(host_slots)]
        self.entries: dict[Prefix, Entry] = {}
        self.events: list[TreeEvent] = []
        self.clock = 0
        self.steps: list[Callable[[], None]] = []

    def match(self, blocks: Prefix) -> PrefixMatch:
        path = [blocks[: end + 1] for end in range(len(blocks))]
        here = [one for one in path if one in self.entries]
        here = here[: next((end for end, one in enumerate(path) if one not in self.entries), len(path))]
        slots = [slot for one in here if (slot := self.entries[one].device) is not None]
        for one in here:
            self.clock += 1
            self.entries[one].used = self.clock
        return PrefixMatch(slots, len(here) - len(slots), here)

    def lock(self, match: PrefixMatch) -> list[Prefix]:
        for one in match.node:
            self.entries[one].locks += 1
        return list(match.node)

    def unlock(self, lock: list[Prefix]) -> None:
        for one in lock:
            self.entries[one].locks -= 1

    def load_back(self, match: PrefixMatch) -> PrefixMatch:
        slots = self.allocate(match.host_blocks)
        if slots is None:
            return match
        for one, slot in zip(match.node[len(match.slots) :], slots):
            self.load(self.entries[one], slot)
            self.tell("stored", one)
        return self.match(match.node[-1])

    def load(self, entry: Entry, slot: int) -> None:
        assert entry.host is not None
        entry.device, self.words[slot] = slot, self.host_words[entry.host]

    def allocatable(self) -> int:
        return len(self.free_device) + sum(
            one.device is not None and not one.locks for one in self.entries.values()
        )

    def allocate(self, count: int) -> Sequence[int] | None:
        while len(self.free_device) < count and self.evict():
            pass
        if len(self.free_device) < count:
            return None
        taken, self.free_device = self.free_device[:count], self.free_device[count:]
        return taken

    def free(self, slots: Sequence[int]) -> None:
        self.free_device += slots

    def victims(self) -> list[Prefix]:
        """Return device blocks that no request holds, and that have no child on the device."""
        on_device = {one for one, entry in self.entries.items() if entry.device is not None}
        inner = {one[:-1] for one in on_device}
        return [one for one in on_device if one not in inner and not self.entries[one].locks]

    def evict(self) -> bool:
        if not (victims := self.victims()):
            return False
        victim = min(victims, key=lambda one: self.entries[one].used)
        entry = self.entries[victim]
        assert entry.device is not None
        if entry.host is None and (slot := self.host_slot()) is not None:
            entry.host, self.host_words[slot] = slot, self.words[entry.device]
            self.tell("stored", victim, on_host=True)
        self.free_device.append(entry.device)
        entry.device = None
        self.tell("removed", victim)
        if entry.host is None:
            for one in [one for one in self.entries if one[: len(victim)] == victim]:
                self.drop(one)
        return True

    def host_slot(self) -> int | None:
        """Return a free host slot; drop a block for it if necessary and possible."""
        if not self.free_host:
            inner = {one[:-1] for one in self.entries}
            spare = [
                one
                for one, entry in self.entries.items()
                if entry.host is not None
                and not entry.locks
                and (entry.device is not None or one not in inner)
            ]
            if not spare:
                return None
            self.drop(min(spare, key=lambda one: self.entries[one].used))
        return self.free_host.pop()

    def drop(self, prefix: Prefix) -> None:
        """Forget a block on the host."""
        entry = self.entries[prefix]
        if entry.host is not None:
            self.free_host.append(entry.host)
            self.tell("removed", prefix, on_host=True)
        entry.host = None
        if entry.device is None:
            del self.entries[prefix]

    def insert(self, blocks: Prefix, slots: Sequence[int], held: int) -> PrefixMatch:
        for place in range(held, len(blocks)):
            entry = self.entries.setdefault(blocks[: place + 1], Entry())
            if entry.device is None:
                entry.device = slots[place]
                self.tell("stored", blocks[: place + 1])
            else:
                self.give_back_double(slots[place])
        return self.match(blocks)

    def give_back_double(self, slot: int) -> None:
        self.free_device.append(slot)

    def launch(self, compute: Callable[[], None]) -> object:
        self.steps.append(compute)
        return compute

    def finish(self, step: object) -> None:
        while step in self.steps:
            self.steps.pop(0)()

    def poll(self) -> None:
        pass

    def copy_next(self, to_host: bool) -> bool:  # noqa: ARG002 (no copy is ever in flight)
        return False

    def reset(self) -> None:
        self.entries.clear()
        self.free_device, self.free_host = [*range(len(self.words))], [*range(len(self.host_words))]
        self.events.append(TreeEvent("cleared"))

    def free_slots(self) -> tuple[Collection[int], Collection[int]]:
        return self.free_device, self.free_host

    def tree_slots(self) -> tuple[Collection[int], Collection[int]]:
        entries = self.entries.values()
        device = [one.device for one in entries if one.device is not None]
        return device, [one.host for one in entries if one.host is not None]

    def read(self, slot: int) -> int:
        return self.words[slot]

    def write(self, slot: int, word: int) -> None:
        self.words[slot] = word

    def take_events(self) -> Iterable[TreeEvent]:
        events, self.events = self.events, []
        return events

    def tell(self, kind: str, prefix: Prefix, on_host: bool = False) -> None:
        assert kind in ("stored", "removed")
        self.events.append(TreeEvent("stored" if kind == "stored" else "removed", on_host, prefix))


# One fault each.


class EvictsWhatIsLocked(SmallTree):
    def victims(self) -> list[Prefix]:
        return super().victims() or [one for one, entry in self.entries.items() if entry.device is not None]


class LeaksDoubles(SmallTree):
    def give_back_double(self, slot: int) -> None:
        pass


class FreesDoublesTwice(SmallTree):
    def give_back_double(self, slot: int) -> None:
        self.free_device += [slot, slot]


class NeverUnlocksLoads(SmallTree):
    def load_back(self, match: PrefixMatch) -> PrefixMatch:
        loaded = super().load_back(match)
        if loaded is not match:
            self.lock(loaded)
        return loaded


class LoadsTooLate(SmallTree):
    """Loads bytes only after the step that needs them."""

    def load(self, entry: Entry, slot: int) -> None:
        assert entry.host is not None
        word = self.host_words[entry.host]
        entry.device, self.words[slot] = slot, 0
        self.late = slot, word

    def poll(self) -> None:
        if late := vars(self).pop("late", None):
            self.words[late[0]] = late[1]


class BacksUpTheNextBlock(SmallTree):
    """Reads a device slot after its reuse: copies another block's word."""

    def evict(self) -> bool:
        words, self.words = self.words, self.words[1:] + self.words[:1]
        evicted = super().evict()
        self.words = words
        return evicted


class KeepsTheHostAtReset(SmallTree):
    def reset(self) -> None:
        kept = {one: Entry(host=entry.host) for one, entry in self.entries.items() if entry.host is not None}
        while gaps := [one for one in kept if len(one) > 1 and one[:-1] not in kept]:
            for one in gaps:
                del kept[one]
        super().reset()
        self.entries = kept
        self.free_host = [slot for slot in self.free_host if slot not in {one.host for one in kept.values()}]


class CountsWhatIsLocked(SmallTree):
    def allocatable(self) -> int:
        return len(self.free_device) + sum(one.device is not None for one in self.entries.values())


class TellsNoLoad(SmallTree):
    def load_back(self, match: PrefixMatch) -> PrefixMatch:
        told = list(self.events)
        loaded = super().load_back(match)
        self.events = told + [one for one in self.events[len(told) :] if one.kind != "stored" or one.on_host]
        return loaded


class MatchesTooMuch(SmallTree):
    def match(self, blocks: Prefix) -> PrefixMatch:
        found = super().match(blocks)
        last = blocks[: len(found.node) + 1]
        if not found.node or len(last) == len(found.node) or found.host_blocks:
            return found
        twin = (*last[:-1], 1 - last[-1]) if last[-1] in (0, 1) else last
        entry = self.entries.get(twin)
        if entry is None or entry.device is None:
            return found
        return PrefixMatch([*found.slots, entry.device], 0, [*found.node, twin])


class MatchesTooLittle(SmallTree):
    """Leaves the last block of a match out if the prompt goes on."""

    def match(self, blocks: Prefix) -> PrefixMatch:
        found = super().match(blocks)
        is_short = 1 < len(found.node) < len(blocks)
        return super().match(blocks[: len(found.node) - 1]) if is_short else found


class FindsNoLongPrompt(SmallTree):
    """Never finds a block behind the third again."""

    is_inserting = False

    def insert(self, blocks: Prefix, slots: Sequence[int], held: int) -> PrefixMatch:
        self.is_inserting = True
        match = super().insert(blocks, slots, held)
        self.is_inserting = False
        return match

    def match(self, blocks: Prefix) -> PrefixMatch:
        return super().match(blocks if self.is_inserting else blocks[:3])


class ForgetsCopies(SmallTree):
    """Reports a copy in flight after each poll."""

    is_copying = False

    def poll(self) -> None:
        self.is_copying = True

    def copy_next(self, to_host: bool) -> bool:  # noqa: ARG002 (it is in both directions)
        was_copying, self.is_copying = self.is_copying, False
        return was_copying


class Raises(SmallTree):
    def drop(self, prefix: Prefix) -> None:
        raise KeyError(prefix)
