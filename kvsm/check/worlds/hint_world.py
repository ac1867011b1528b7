"""The hint world: an engine with its real core, whose requests end with hints about their sessions.

The core and `SessionLeases` are real. Each of these is an action: a prompt is computed, a rank carries out
its share of a copy, a request ends with a hint of any kind, time passes until none, some or all leases have
expired, a store is lost, the cache is reset. So blocks are evicted whenever the real engine could evict them.

The books (`_Kept`) say what each session is promised, as sets of keys. They share no code with the leases:
they try each number of tokens to find what a hint may get, and count sets to find which lease is crowded out.

Checked after each action:

- each hint gets the answer of the books;
- the leases are those of the books, and each pins its promised blocks and no others;
- no promised block was evicted (a match holds what it counts, S7);
- all leases together hold at most their share, and one session half of it;
- no lease is left after its time (one release per hold, S4);
- each served block has its own bytes (publish after commit, S2).

`check` adds the ledger's own properties. At rest no lease is left, each lease has ended exactly once, nothing
is left in the ledger (progress, S9), and the log folds to the present state (events are state, S10).

Not covered: the scheduler's offers, and the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from hashlib import blake2b
from math import ceil, floor
from random import Random
from typing import Any

import msgspec

from kvsm.check.worlds.describing import describe_ledger
from kvsm.check.worlds.hand_over_parts import NotThere, SmallHost, at
from kvsm.check.worlds.hint_options import HintWorldOptions
from kvsm.check.worlds.small_request import HASH_TOKENS, SmallRequest
from kvsm.check.worlds.world import Action
from kvsm.core.ledger.invariants import check_rest
from kvsm.core.scheduler.groups import KeyLayout
from kvsm.core.scheduler.request_params import AgentHint
from kvsm.core.scheduler.session_leases import ENDS_IN_A_LOOK, SessionLeases
from kvsm.core.scheduler.tracked import TrackedRequest
from kvsm.errors import PropertyBroken
from kvsm.events import BlocksEvicted, HintAnswered, HintOutcome, OffloadingEvent
from kvsm.ids import to_list, unpack
from kvsm.properties import Property

_SHORT_S, _LONG_S = 10.0, 100.0

_HINTS: Sequence[Mapping[str, Any]] = (
    {"cache_control": {"type": "ephemeral", "ttl": _SHORT_S}},
    {"cache_control": {"ttl": _LONG_S}},
    {"context_management": {"edits": [{"type": "evict"}]}},
    {"context_management": {"edits": [{"type": "prefetch"}]}},
    {},
    {},
)
"""What a hint may say, besides the name of its session. The first two ask for a lease. The last but one
becomes `_WRONG`; the last one asks for nothing."""
_WRONG, _MOVES = len(_HINTS) - 2, len(_HINTS) - 3

_WEIGHTS: dict[str | int, int] = {"compute": 4, "store": 6, "hint": 3, "loaded": 3}
"""The weight of a kind of action in `draw`; 1 if it is not listed."""

_BUDGETS = ("computes", "hints", "looks", "waits", "resets", "failures", "losses", "loads")


class _Kept(msgspec.Struct):
    """What the books say of a lease: the keys that are promised, and until when."""

    keys: set[bytes]
    until: float


class HintWorld:
    """A `World` of one engine. host: its core and its host pool."""

    def __init__(self, options: HintWorldOptions | None = None) -> None:
        self.options = options = options or HintWorldOptions()
        self._config = options.scheduler_config()
        self.host = SmallHost(options.core_config())
        self._now, self._names = 0.0, 0
        self.leases = SessionLeases(
            self.host.core, self._config, options.share, lambda: self._now, self._new_name
        )
        self.kept: dict[str, _Kept] = {}
        """Session -> what it is promised, oldest first."""
        self._left = {name: int(getattr(options, name)) for name in _BUDGETS}
        self._most = min(floor(options.share * options.slots), options.slots - 1)
        self._keys = [self._tracked("own", prompt).all_keys()[0] for prompt in range(options.prompts)]
        """The keys of each prompt in the first KV cache group."""
        self._seen = 0
        """The number of events that have been checked."""
        self._promised = set[bytes]()
        """The keys that were promised after the last action."""

    def _new_name(self) -> str:
        self._names += 1
        return f"{self._names:08}"

    @property
    def events(self) -> Sequence[OffloadingEvent]:
        """The log so far."""
        return self.host.log

    # What may happen.

    def actions(self) -> list[Action]:
        options, found = self.options, self._others()
        if self._left["hints"]:
            found += [
                ("hint", session, prompt, kind)
                for session in range(options.sessions)
                for prompt in range(options.prompts)
                for kind in range(len(_HINTS))
            ]
        return found

    def _others(self) -> list[Action]:
        """All actions except hints; there are hundreds of different hints."""
        left, found, options = self._left, list[Action](), self.options
        ends = (1, 0) if left["failures"] else (1,)
        if left["computes"]:
            found += [("compute", prompt) for prompt in range(options.prompts)]
        for place, copy in enumerate(self.host.stores):
            found += [("store", place, worker, good) for worker in copy.waiting for good in ends]
            if left["losses"]:
                found.append(("lose", place))
        if self.host.load is not None:
            found += [("loaded", worker, good) for worker in self.host.load.waiting for good in ends]
        elif left["loads"]:
            found += [("load", prompt) for prompt, keys in enumerate(self._keys) if self.host.serves(keys[0])]
        found += [(name,) for name in ("look", "reset") if left[f"{name}s"]]
        if self.kept and (left["waits"] or self._next_to_quiet() is None):
            found += [("wait", place) for place in range(len(self._ends()))]
        return found

    def draw(self, random: Random) -> Action:
        """Draw first a kind of action, then an action of it. Most hints ask for a lease, and most waits end
        one lease or none, so that many are open at once. Raises `IndexError` if there is no action."""
        kinds: dict[str | int, list[Action]] = {"hint": []} if self._left["hints"] else {}
        for action in self._others():
            kinds.setdefault(action[0], []).append(action)
        drawn = random.choices(list(kinds), [_WEIGHTS.get(kind, 1) for kind in kinds])[0]
        if drawn == "hint":
            kind = random.randrange(2 if random.random() < 0.8 else len(_HINTS))
            options = self.options
            return ("hint", random.randrange(options.sessions), random.randrange(options.prompts), kind)
        if drawn == "wait":
            return ("wait", random.choice((0, 0, len(self._ends()))) if self._left["waits"] else 0)
        return random.choice(kinds[drawn])

    def do(self, action: Action) -> bool:
        move: Callable[..., bool] | None = getattr(self, f"_do_{action[0]}", None)
        try:
            if move is None or not move(*action[1:]):
                return False
        except NotThere:
            return False
        self._look()
        self._check_evictions()
        self._check_leases()
        self.host.check_bytes("hinted")
        return True

    def _spend(self, budget: str) -> None:
        self._left[budget] = max(0, self._left[budget] - 1)

    def _do_compute(self, prompt: int) -> bool:
        """A prompt is computed, and the chunks that the host lacks are stored."""
        if prompt >= self.options.prompts:
            return False
        self._spend("computes")
        keys = [key for group in self._tracked("own", prompt).all_keys() for key in group]
        first = prompt * len(keys) * self.options.blocks_per_chunk
        blocks = range(first, first + len(keys) * self.options.blocks_per_chunk)
        self.host.begin_store("own", keys, blocks)
        return True

    def _do_store(self, place: int, worker: int, good: int) -> bool:
        """A rank ends its share of a store."""
        if worker not in at(self.host.stores, place).waiting:
            return False
        if not good:
            self._spend("failures")
        self.host.end_store(place, worker, bool(good))
        return True

    def _do_lose(self, place: int) -> bool:
        """A store is given up, because a rank will never report it."""
        copy = at(self.host.stores, place)
        self._spend("losses")
        self.host.stores.remove(copy)
        self.host.core.lose(copy.transfer)
        return True

    def _do_load(self, prompt: int) -> bool:
        """A request loads what the host has of a prompt."""
        keys = at(self._keys, prompt)
        if self.host.load is not None or not self.host.serves(keys[0]):
            return False
        self._spend("loads")
        blocks = self.options.length * self.options.blocks_per_chunk
        self.host.begin_load(keys, self.host.core.config.device_blocks - blocks)
        return True

    def _do_loaded(self, worker: int, good: int) -> bool:
        """A rank ends its share of the load. After a bad copy the blocks are void."""
        if self.host.load is None or worker not in self.host.load.waiting:
            return False
        if not good:
            self._spend("failures")
        self.host.end_load(worker, bool(good))
        return True

    def _do_look(self) -> bool:
        """The engine takes a step."""
        self._spend("looks")
        return True

    def _do_reset(self) -> bool:
        """The cache is reset."""
        self._spend("resets")
        self.leases.reset()
        self.host.core.reset()
        self.kept.clear()
        return True

    def _do_wait(self, place: int) -> bool:
        """Let time pass until the leases up to this place expire. After the last place, none expires."""
        ends = self._ends()
        if not self.kept or not 0 <= place <= len(ends):
            return False
        self._spend("waits")
        self._now = ends[place] if place < len(ends) else (self._now + ends[0]) / 2
        return True

    def _ends(self) -> list[float]:
        return sorted({kept.until for kept in self.kept.values()})

    # Hints.

    def _do_hint(self, session: int, prompt: int, kind: int) -> bool:
        """A request with this prompt ends, and brings a hint."""
        if prompt >= self.options.prompts or session >= self.options.sessions or kind >= len(_HINTS):
            return False
        self._spend("hints")
        name = f"s{session}"
        hint = {"session_id": name, **_HINTS[kind]}
        tracked = self._tracked(f"r{prompt}", prompt, hint)
        if kind == _WRONG:  # A hint that cannot be read; its parser would log a warning.
            tracked.agent_hint = AgentHint(name, wrong="it is wrong")
        self._look()
        expected = self._expect(name, kind, tracked.all_keys())
        answer = self.leases.take(tracked, tracked.request)
        told = None if answer is None else answer["agent_hint"]
        figures = ("outcome", "why", "asked_blocks", "leased_blocks")
        found = None if told is None else tuple([told.get(figure) for figure in figures])
        if found != expected:
            message = f"the hint {hint} of {tracked.name} is answered {found}, and the books say {expected}"
            raise PropertyBroken(Property.MATCH_HOLDS, message)
        return True

    def _expect(
        self, session: str, kind: int, keys: Sequence[Sequence[bytes]]
    ) -> tuple[str, str, int | None, int | None] | None:
        """Enter a hint into the books. Returns its answer: (outcome, why, blocks asked for, leased)."""
        if not _HINTS[kind]:
            return ("refused", "it is wrong", None, None) if kind == _WRONG else None
        if "context_management" in _HINTS[kind]:
            if kind == _MOVES:
                return ("refused", "kvsm does not offload or prefetch by a hint", None, None)
            released = self.kept.pop(session, None)
            had = ("accepted", "", None, None)
            return ("refused", "the session has no lease", None, None) if released is None else had
        if not self._most:
            return ("refused", "leases have no share of this host", 0, 0)
        whole = range(HASH_TOKENS, len(self.options.tokens(0)), HASH_TOKENS)
        needs = {tokens: self._needed(keys, tokens) for tokens in whole}
        index = self.host.core.ledger.index
        here = [tokens for tokens in whole if all(key in index for key in needs[tokens])]
        fitting = [tokens for tokens in here if len(needs[tokens]) <= ceil(self._most / 2)]
        asked = len(needs[whole[-1]])
        if not here:
            return ("refused", "none of its blocks is on the host", asked, 0)
        why = "the other blocks are not on the host" if here[-1] < whole[-1] else ""
        if fitting != here:
            why = "one session may hold no more"
        if not fitting:
            return ("refused", why, asked, 0)
        got = needs[fitting[-1]]
        self.kept.pop(session, None)
        while len(self._all_kept() | got) > self._most:
            self.kept.pop(next(iter(self.kept)))
        self.kept[session] = _Kept(set(got), self._now + (_SHORT_S, _LONG_S)[kind])
        return ("clipped" if why else "accepted", why, asked, len(got))

    def _needed(self, keys: Sequence[Sequence[bytes]], tokens: int) -> Set[bytes]:
        """The keys of the chunks with a token that a hit of this many tokens reads."""
        size = self.options.blocks_per_chunk * HASH_TOKENS
        needed = {keys[0][token // size] for token in range(tokens)}
        if self.options.window:
            needed |= {keys[1][token // size] for token in range(tokens - HASH_TOKENS + 1, tokens)}
        return needed

    def _all_kept(self) -> set[bytes]:
        return {key for kept in self.kept.values() for key in kept.keys}

    def _tracked(self, name: str, prompt: int, hint: Mapping[str, Any] | None = None) -> TrackedRequest:
        parameters = None if hint is None else {"agent_hint": hint}
        request = SmallRequest(name, self.options.tokens(prompt), parameters=parameters)
        layout = KeyLayout.of(self._config, self.options.blocks_per_chunk)
        return TrackedRequest(request, self._config, layout)

    # Checks.

    def _look(self) -> None:
        """Let the engine look at its leases often enough for all due ones to expire, and update the books."""
        for _ in range(ceil(self.options.sessions / ENDS_IN_A_LOOK)):
            self.leases.look()
        index = self.host.core.ledger.index
        for session, kept in list(self.kept.items()):
            kept.keys.intersection_update(index)
            if not kept.keys or kept.until <= self._now:
                del self.kept[session]

    def _check_evictions(self) -> None:
        """Check that no promised block was evicted since the last action."""
        for event in self.host.log[self._seen :]:
            if isinstance(event, BlocksEvicted):
                evicted = {self._key_before(event.seq, slot) for slot in to_list(unpack(event.slots))}
                lost = evicted & self._promised
                if lost:
                    message = f"event {event.seq} evicts {len(lost)} blocks that a session is promised"
                    raise PropertyBroken(Property.MATCH_HOLDS, message)
        self._seen = len(self.host.log)
        self._promised = self._all_kept()

    def _key_before(self, seq: int, slot: int) -> bytes:
        """The key that a slot had before this event."""
        for event in reversed(self.host.log[: seq - 1]):
            slots = getattr(event, "slots", ())
            if event.kind == "StorePlanned" and slot in to_list(unpack(slots)):
                return bytes(event.keys[to_list(unpack(slots)).index(slot)])  # type: ignore[attr-defined]
        raise AssertionError(f"slot {slot} had no key before event {seq}")

    def _check_leases(self) -> None:
        """Compare the leases with the books."""
        ledger = self.host.core.ledger
        if list(self.leases.leases) != list(self.kept):
            message = f"sessions {list(self.leases.leases)} have leases, and the books say {list(self.kept)}"
            raise PropertyBroken(Property.ONE_RELEASE_PER_HOLD, message)
        pinned = dict[str, set[bytes]]()
        for name, entry in ledger.requests.items():
            if name.startswith("lease-"):
                pinned[name] = {ledger.key_of[slot] for slot in to_list(ledger.live_pins(entry))}
        if pinned.keys() != {lease.name for lease in self.leases.leases.values()}:
            raise PropertyBroken(Property.ONE_RELEASE_PER_HOLD, f"{list(pinned)} hold blocks")
        for session, kept in self.kept.items():
            wanted = {key for key in kept.keys if ledger.readable(ledger.index[key])}
            held = pinned[self.leases.leases[session].name]
            if held != wanted:
                message = f"session {session} holds {len(held)} blocks, and is promised {len(wanted)} others"
                raise PropertyBroken(Property.MATCH_HOLDS, message)
            if len(kept.keys) > ceil(self._most / 2):
                raise PropertyBroken(Property.PROGRESS, f"session {session} holds {len(kept.keys)} blocks")
        held_by_all = len(self._all_kept())
        if held_by_all > self._most or self.leases.held != held_by_all:
            message = (
                f"leases hold {held_by_all} slots, count {self.leases.held}, and their share is {self._most}"
            )
            raise PropertyBroken(Property.PROGRESS, message)

    def _next_to_quiet(self) -> Action | None:
        if self.host.stores:
            return ("store", 0, self.host.stores[0].waiting[0], 1)
        if self.host.load is not None:
            return ("loaded", self.host.load.waiting[0], 1)
        return None

    def wind_down(self) -> Action | None:
        """The next action on the way to rest. Leases run out only when no other action is left."""
        action = self._next_to_quiet()
        return ("wait", len(self._ends()) - 1) if action is None and self.kept else action

    def check(self) -> None:
        self.host.check()
        if self._next_to_quiet() is not None or self.kept:
            return
        for violation in check_rest(self.host.core.ledger):
            raise PropertyBroken(violation.property, violation.message)
        self.host.check_fold("hinted")
        answers = [event for event in self.host.log if isinstance(event, HintAnswered) and event.lease]
        begun = (HintOutcome.ACCEPTED, HintOutcome.CLIPPED)
        began = sorted(event.lease for event in answers if event.outcome in begun)
        ended = sorted(event.lease for event in answers if event.outcome not in begun)
        if began != ended or len(set(began)) != len(began):
            message = f"the log says that {began} began, and that {ended} ended"
            raise PropertyBroken(Property.EVENTS_ARE_STATE, message)

    # For people, and to compare.

    def describe(self) -> dict[str, str]:
        seen = describe_ledger(self.host.core.ledger)
        for session, kept in self.kept.items():
            seen[f"session {session}"] = f"{len(kept.keys)} blocks, {kept.until - self._now:g} s left"
        return seen

    def fingerprint(self) -> bytes:
        """16 bytes: equal for worlds with the same future behaviour. Slots keep their numbers."""
        leases = list(self.leases.leases.values())
        kept = [(name, sorted(one.keys), one.until - self._now) for name, one in self.kept.items()]
        form = self.host.form([lease.name for lease in leases])
        waits = [(lease.keys, lease.slots, lease.waits) for lease in leases]
        return blake2b(repr((form, kept, waits, self._left)).encode(), digest_size=16).digest()
