"""Books for testing a prefix tree: the inserted blocks, the word in each slot, and the announced blocks.

They are sets and dicts, and share no code with any tree. An int represents a block of tokens, and a word the
content of a slot. A prefix is a tuple of blocks, so two requests share a prefix if their tuples begin alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from kvsm.check.worlds.check_counts import count_case
from kvsm.errors import PropertyBroken
from kvsm.properties import Property
from kvsm.testing.block_history import Block, BlockHistory

Prefix = tuple[int, ...]


class PrefixMatch(NamedTuple):
    """The longest prefix of a prompt that a tree has.

    slots: the device slot of each block that the device has, from the first block of the prompt on.
    host_blocks: number of blocks after these that only the host has.
    node: any object that the tree needs to lock this prefix, or to load it back.
    """

    slots: Sequence[int]
    host_blocks: int = 0
    node: Any = None


class TreeEvent(NamedTuple):
    """A KV event of a tree: the last block of `prefix` is stored on a tier, or removed from it.

    kind: "cleared" removes all blocks from both tiers; its prefix is empty.
    on_host: whether the tier is the host; False: the device.
    """

    kind: Literal["stored", "removed", "cleared"]
    on_host: bool = False
    prefix: Prefix = ()


def slot_named(slot: int) -> Block:
    """Return the name of a device slot in its history."""
    return Block("device slot", slot)


class TreeBooks:
    """The books of one tree. device_slots, host_slots: the sizes of its pools."""

    def __init__(self, device_slots: int, host_slots: int) -> None:
        self.sizes = {"device": device_slots, "host": host_slots}
        self.inserted: set[Prefix] = set()
        """All prefixes that were inserted since the last reset."""
        self.before_reset: set[Prefix] = set()
        """All prefixes that were inserted before the last reset."""
        self._words: dict[Prefix, int] = {}
        self._last_word = 0
        self._told: dict[bool, set[Prefix]] = {False: set(), True: set()}
        """Whether on the host -> the prefixes whose last block is there according to the events."""

    # Words.

    def word(self, prefix: Prefix) -> int:
        """The word that a step writes for the last block of this prefix; another one after each reset."""
        if prefix not in self._words:
            self._last_word += 1
            self._words[prefix] = self._last_word
        return self._words[prefix]

    def read(self, request: Any, prefix: Prefix, slot: int, word: int, history: BlockHistory) -> None:
        """Check the word that a step reads for the last block of a prefix. history: the record of the
        slots."""
        count_case(Property.CORRECT_BYTES, "blocks that steps read")
        if prefix in self.before_reset:
            count_case(Property.NO_STALE_DATA, "reads of blocks that a reset removed before")
        if word == self._words.get(prefix):
            return
        whose = [other for other, theirs in self._words.items() if theirs == word]
        broken = Property.CORRECT_BYTES
        if whose:
            what = f"what was computed for {whose[0]}"
        elif word:
            broken, what = Property.NO_STALE_DATA, "what was computed before a reset"
        else:
            what = "nothing that was computed"
        story = history.blame(slot_named(slot))
        _fail(broken, f"{request} reads device slot {slot} for {prefix}, and finds {what}{story}")

    # Matches.

    def insert(self, prefix: Prefix) -> None:
        """Record that all blocks of this prefix were inserted."""
        self.inserted.update(prefix[: end + 1] for end in range(len(prefix)))

    def matched(self, prompt: Prefix, match: PrefixMatch) -> None:
        """Check the tree's answer to a match."""
        found = len(match.slots) + match.host_blocks
        if match.host_blocks < 0 or found > len(prompt):
            _fail(Property.LEGAL_CALLS, f"a prompt of {len(prompt)} blocks has a match of {found}: {match}")
        prefix = prompt[:found]
        count_case(Property.PUBLISH_AFTER_COMMIT, "hits", bool(prefix))
        if prefix not in self.inserted:
            count_case(
                Property.NO_STALE_DATA, "matches of prompts from before a reset", prompt in self.before_reset
            )
        if prefix and prefix not in self.inserted:
            if prefix in self.before_reset:
                _fail(Property.NO_STALE_DATA, f"{prefix} is a hit, but it is from before a reset")
            _fail(Property.PUBLISH_AFTER_COMMIT, f"{prefix} is a hit, but it was never inserted")

    def compare_matches(self, matches: Mapping[Prefix, PrefixMatch], tree: Collection[int]) -> None:
        """Check that all that the tree has is matched, while no copy is in flight.

        matches: the match of each prefix that was inserted.
        tree: the device slots that the tree has.
        """
        count_case(Property.STORED_SO_SERVED, "prompts whose matches were compared", len(matches))
        for prefix, match in matches.items():
            found = len(match.slots) + match.host_blocks
            for end in range(found + 1, len(prefix)):
                shorter = matches[prefix[:end]]
                if len(shorter.slots) + shorter.host_blocks == end:
                    message = (
                        f"{prefix} has a match of {found} blocks, and its prefix {prefix[:end]} of {end}"
                    )
                    _fail(Property.STORED_SO_SERVED, message)
        matched = {slot for match in matches.values() for slot in match.slots}
        if missing := sorted(set(tree) - matched):
            message = f"device slots {missing} are in the tree, and no prompt that was inserted is matched to"
            _fail(Property.STORED_SO_SERVED, f"{message} them")

    def loaded(self, before: PrefixMatch, after: PrefixMatch) -> None:
        """Check that a load back may change the match `before` to `after`."""
        most = len(before.slots) + before.host_blocks
        if list(after.slots[: len(before.slots)]) != list(before.slots) or len(after.slots) > most:
            _fail(Property.LEGAL_CALLS, f"a load back of {before} answered {after}")

    # Slots.

    def compare_slots(
        self,
        tier: str,
        free: Collection[int],
        tree: Collection[int],
        private: Mapping[int, Any],
        held: Mapping[int, Any],
    ) -> None:
        """Check that each slot of a tier is exactly one of: free, in the tree, or allocated to a request.

        private: slot -> the request to which it is allocated.
        held: slot -> a request that has locked it in the tree.
        """
        count_case(Property.CONSERVATION, f"comparisons of all {tier} slots with the lists")
        count_case(Property.ONE_RELEASE_PER_HOLD, f"comparisons of the free {tier} slots", bool(free))
        count_case(Property.MATCH_HOLDS, "locked slots that were looked at", len(held))
        for slot, request in held.items():
            if slot not in tree:
                where = "is free" if slot in free else f"is {private.get(slot, 'nowhere')}'s"
                message = f"{request} has locked {tier} slot {slot}, which is evicted: it {where}"
                _fail(Property.MATCH_HOLDS, message)
        counted = Counter([*free, *tree, *private])
        for slot in sorted(counted.keys() | set(range(self.sizes[tier]))):
            if counted[slot] == 1 and 0 <= slot < self.sizes[tier]:
                continue
            places = ["free"] * list(free).count(slot) + ["in the tree"] * list(tree).count(slot)
            if slot in private:
                places.append(f"{private[slot]}'s own")
            message = f"{tier} slot {slot} is {' and '.join(places) or 'lost'}"
            twice = places.count("free") > 1
            broken = Property.ONE_RELEASE_PER_HOLD if twice else Property.CONSERVATION
            _fail(broken, f"{message}: it must be in one place of its {self.sizes[tier]}")

    # KV events, and resets.

    def take(self, events: Iterable[TreeEvent]) -> None:
        """Record KV events that the tree has published."""
        for event in events:
            if event.kind == "cleared":
                self._told[False].clear()
                self._told[True].clear()
            elif event.kind == "stored":
                self._told[event.on_host].add(event.prefix)
            else:
                self._told[event.on_host].discard(event.prefix)

    def prefixes_to_compare(self) -> list[Prefix]:
        """All prefixes that were inserted, or that are stored according to the events."""
        return sorted(
            {*self.inserted, *self._told[False], *self._told[True]},
            key=lambda prefix: (len(prefix), prefix),
        )

    def compare_events(self, prefix: Prefix, match: PrefixMatch) -> None:
        """Check that the events announce what a match of this prefix finds, while no copy is in flight."""
        count_case(Property.EVENTS_ARE_STATE, "prefixes compared with the events")
        on_device = len(match.slots) == len(prefix)
        on_host = not on_device and len(match.slots) + match.host_blocks == len(prefix)
        if on_device != (prefix in self._told[False]):
            there, told = ("is", "no event says so") if on_device else ("is not", "the events say it is")
            _fail(Property.EVENTS_ARE_STATE, f"{prefix} {there} on the device, and {told}")
        if on_host and prefix not in self._told[True]:
            _fail(Property.EVENTS_ARE_STATE, f"{prefix} is on the host, and no event says so")
        if prefix in self._told[True] and not on_host and not on_device:
            _fail(
                Property.EVENTS_ARE_STATE, f"the events say that {prefix} is on the host, and it is nowhere"
            )

    def reset(self) -> None:
        """Record a reset of the tree."""
        self.before_reset |= self.inserted
        self.inserted.clear()
        self._words.clear()


def _fail(broken: Property, message: str) -> Any:
    __tracebackhide__ = True
    raise PropertyBroken(broken, message)
