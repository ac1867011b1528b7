"""The fleet: several engines of the whole world that hand over the blocks of prompts to each other.

Each engine is a whole world (`kvsm.check.worlds.whole_world`) with its own scheduler, host pool, disk, log
and processes, and has all actions and checks of that world. In an action of the fleet, the second item is the
number of the engine. Each engine both prefills and decodes, and has these actions too:

- a client sends the answer of another engine to this one ("decode"). It may do so late, or twice, or never;
  the process that has given the answer may be gone by then;
- the thread of a prefill engine answers a question of this engine ("serve"), or notices that this engine has
  closed a connection ("leave"), or that a killed engine has ("reap");
- a connection of this engine breaks ("cut");
- time passes, and some or all leases of this engine expire ("expire"; on the way to rest "outlast").

If a process is killed, its leases and claims end with it, and its connections break. Copies from its host
memory continue, and may read what the next process writes there. Clients send its unfinished requests again,
also those that name a hand-over.

It also checks, besides the properties of the whole world in each engine:

- an imported block has the right bytes on every rank, token by token (correct bytes, S15), although the
  engines may have different weights;
- the blocks under a lease do not change, and no copy writes over them, until the lease ends (no reuse in
  flight, S3);
- a hand-over is offered once, and only by the process that has opened it (one release per hold, S4);
- blocks are confirmed only if their process has neither ended nor been reset since the offer (no stale data,
  S14), and has held all of them;
- the checks of `kvsm.check.worlds.hand_over_checks`, and that a decode engine correctly ends an offer that it
  does not use (events are state, S10);
- the jobs of an import leave after their events are in the log (no stale data, S14);
- an offer of an equal engine is refused only while a reset drains (stored, so served, S19);
- no import begins that was claimed before a reset of its engine (no stale data, S14);
- when the only thing left is that leases end, no lease is claimed (one release per hold, S4);
- at rest no lease, claim, import or connection is left, and no request waits: progress (S9).

Not covered: threads and sockets, peers that lie (see the target `hand-over`), engines with different layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import blake2b
from random import Random
from typing import Any

import msgspec

from kvsm.check.worlds.fleet_engine import FleetEngine, FleetNetwork, SentAnswer
from kvsm.check.worlds.hand_over_checks import check_share, check_waits
from kvsm.check.worlds.hand_over_parts import NotThere, at
from kvsm.check.worlds.small_request import SmallRequest
from kvsm.check.worlds.whole_world import WholeBudgets, WholeOptions, WholeWorld
from kvsm.check.worlds.world import Action
from kvsm.errors import ConfigError, PropertyBroken
from kvsm.events import OffloadingEvent
from kvsm.properties import Property
from kvsm.tiers.hand_over.leases import HandOverState

_USEFUL = 0.5
"""The probability to draw an action that leads to an import, if there is one."""


class FleetBudgets(WholeBudgets, frozen=True, kw_only=True):
    """`WholeBudgets` with the disturbances of hand-overs. cuts: how many connections break."""

    cuts: int = 0
    expiries: int = 0
    """How often time passes until leases expire."""


class FleetMemberOptions(WholeOptions, frozen=True, kw_only=True):
    """The options of one engine of a fleet.

    share: the largest share of its host pool that hand-overs may pin.
    readers: how many requests may name one hand-over of another engine.
    """

    share: float = 1.0
    readers: int = 1
    budgets: FleetBudgets = FleetBudgets()


class FleetOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a fleet. members: one for each engine. Raises `ConfigError` if they cannot hand over."""

    members: tuple[FleetMemberOptions, ...] = (FleetMemberOptions(), FleetMemberOptions())

    def __post_init__(self) -> None:
        if not 2 <= len(self.members) <= 4:
            raise ConfigError(f"a fleet has {len(self.members)} members; it must have from 2 to 4")
        alike = {(one.groups, one.workers, one.blocks_per_chunk, one.names) for one in self.members}
        if len(alike) > 1 or self.members[0].names:
            raise ConfigError(
                "the members must have the same groups, workers and blocks_per_chunk, and names 0"
            )
        for one in self.members:
            if not 0 < one.share <= 1:
                raise ConfigError(f"share is {one.share}; it must be above 0 and at most 1")


class FleetMember(WholeWorld):
    """One engine of a fleet, as a world. number: its number. network: what the engines share."""

    engine_class = FleetEngine
    budget_of = WholeWorld.budget_of | {"cut": "cuts", "expire": "expiries"}
    options: FleetMemberOptions
    engine: FleetEngine

    def __init__(self, options: FleetMemberOptions, number: int, network: FleetNetwork) -> None:
        self.number, self.network = number, network
        self._decoding: dict[str, SentAnswer] = {}
        """Request that names a hand-over -> the answer that its client has sent."""
        super().__init__(options)

    def _more_arguments(self) -> dict[str, Any]:
        more = {"number": self.number, "network": self.network, "share": self.options.share}
        return super()._more_arguments() | more

    # What may happen.

    def actions(self) -> list[Action]:
        channel, actions = self.engine.channel, super().actions()
        for place, sent in enumerate(self.network.answered):
            if self._may_decode(sent):
                actions.append(("decode", place))
        for place, connection in enumerate(channel.open):
            if connection.question is not None:
                actions.append(("serve", place))
            if self.left["cuts"]:
                actions.append(("cut", place))
        if channel.left:
            actions.append(("leave",))
        if self.network.orphans:
            actions.append(("reap",))
        if self.left["expiries"]:
            actions += [("expire", place) for place in range(len(self._ends()))]
        return actions

    def draw(self, random: Random) -> Action:
        """Draw an action, more often one that leads to an import: otherwise most hand-overs would expire."""
        useful: list[Action] = [
            ("decode", place)
            for place, sent in enumerate(self.network.answered)
            if self._may_decode(sent) and self.network.is_open(sent)
        ]
        asked = enumerate(self.engine.channel.open)
        useful += [("serve", place) for place, one in asked if one.question is not None]
        if useful and random.random() < _USEFUL:
            return random.choice(useful)
        return super().draw(random)

    def _may_decode(self, sent: SentAnswer) -> bool:
        return sent.source != self.number and sent.readers < self.options.readers

    def may_step(self) -> bool:
        """Whether the engine takes another step: also if a hand-over needs one."""
        return super().may_step() or self.engine.has_hand_over_work()

    def _ends(self) -> list[float]:
        """The times at which leases of this engine expire, in order."""
        leases = self.engine.outgoing.leases._leases.values()
        return sorted({lease.until for lease in leases if lease.until > self.engine.now_s})

    def wind_down(self) -> Action | None:
        """The next action on the way to rest. Leases expire only when nothing else is left."""
        if self.network.orphans:
            return ("reap",)
        if self.engine.channel.left:
            return ("leave",)
        for place, connection in enumerate(self.engine.channel.open):
            lease = connection.leases._leases.get(connection.claim.hand_over)
            waits = lease is not None and lease.state is HandOverState.PREPARING
            if connection.question is not None and not waits:
                return ("serve", place)
        action = super().wind_down()
        return ("outlast",) if action is None and self._ends() else action

    # What happens.

    def do(self, action: Action) -> bool:
        try:
            return super().do(action)
        except NotThere:
            return False

    def check_hand_overs(self) -> None:
        """Check what must hold of the hand-overs of this engine after each action of the fleet."""
        engine = self.engine
        check_share(engine.outgoing, engine.core.ledger, self.options.share)
        check_waits(engine.outgoing, engine.core.ledger)
        engine.check_leased_blocks()

    def _do_decode(self, place: int) -> bool:
        """A client sends the answer of another engine to this one."""
        sent = at(self.network.answered, place)
        if not self._may_decode(sent):
            return False
        name = f"of {sent.source}: {sent.parameters['remote_hand_over']}-{sent.readers}"
        sent.readers += 1
        self._decoding[name] = sent
        self.engine.arrive(self._decode_request(name))
        return True

    def _decode_request(self, name: str) -> SmallRequest:
        request, parameters = self._decoding[name].request, self._decoding[name].parameters
        prompt = request.all_token_ids[: request.num_prompt_tokens]
        return SmallRequest(name, prompt, request.outputs, parameters, extras=request.extras)

    def _sent_again(self, place: int, request: SmallRequest) -> SmallRequest:  # noqa: ARG002
        name = request.request_id
        return self._decode_request(name) if name in self._decoding else self._request(int(name[1:]))

    def _do_serve(self, place: int) -> bool:
        connection = at(self.engine.channel.open, place)
        if connection.question is None:
            return False
        self.engine.serve(connection)
        return True

    def _do_leave(self) -> bool:
        if not self.engine.channel.left:
            return False
        self.engine.channel.notice_close()
        return True

    def _do_reap(self) -> bool:
        if not self.network.orphans:
            return False
        self.network.orphans.popleft().notice_close()
        return True

    def _do_cut(self, place: int) -> bool:
        self.engine.channel.cut(at(self.engine.channel.open, place))
        return True

    def _do_expire(self, place: int) -> bool:
        """Let time pass until the leases of this engine up to this place expire."""
        self.engine.now_s = at(self._ends(), place)
        return True

    def _do_outlast(self) -> bool:
        """Let time pass until all leases of this engine expire."""
        ends = self._ends()
        return bool(ends) and self._do_expire(len(ends) - 1)

    def _do_lose(self, place: int) -> bool:
        done = super()._do_lose(place)
        self.engine.look_at_hand_overs()
        return done

    def _do_disk_lose(self, place: int) -> bool:
        done = super()._do_disk_lose(place)
        self.engine.look_at_hand_overs()
        return done

    def _begin_process(self, promised: set[bytes], **how: Any) -> None:
        self.engine.killed()
        super()._begin_process(promised, **how)

    def is_at_rest(self) -> bool:
        rests = super().is_at_rest()
        if rests:
            self.engine.check_no_hand_over_is_left()
        return rests


class FleetWorld:
    """A `World` of several engines."""

    check_every = WholeWorld.check_every

    def __init__(self, options: FleetOptions) -> None:
        self.network = FleetNetwork()
        self.members = [FleetMember(one, number, self.network) for number, one in enumerate(options.members)]
        self._acted = self._turn = 0
        """The engine of the last action, and the engine that winds down next."""
        self._history = blake2b(digest_size=16)

    @property
    def events(self) -> Sequence[OffloadingEvent]:
        """The log of the engine that has acted last."""
        return self.members[self._acted].events

    def actions(self) -> list[Action]:
        return [
            (action[0], number, *action[1:])
            for number, member in enumerate(self.members)
            for action in member.actions()
        ]

    def draw(self, random: Random) -> Action:
        """Draw an engine, and one of its actions. Raises `IndexError` when nothing is left to do."""
        numbers = list(range(len(self.members)))
        random.shuffle(numbers)
        for number in numbers[:-1]:
            with suppress(IndexError):
                return self._of(number, self.members[number].draw(random))
        return self._of(numbers[-1], self.members[numbers[-1]].draw(random))

    def favour(self, share: Callable[[str], float]) -> None:
        """Draw each kind of action less often, by the share that it has in this run."""
        for member in self.members:
            member.favour(share)

    def do(self, action: Action) -> bool:
        name, number, *rest = action
        if not 0 <= int(number) < len(self.members):
            return False
        self._acted = int(number)
        if not self.members[self._acted].do((name, *rest)):
            return False
        self._history.update(repr(action).encode())
        for member in self.members:
            member.check_hand_overs()
        return True

    def check(self) -> None:
        for member in self.members:
            member.check()

    def wind_down(self) -> Action | None:
        """The next action on the way to rest. Engines take turns, because they may wait for each other."""
        expiry: Action | None = None
        for turn in range(len(self.members)):
            number = (self._turn + turn) % len(self.members)
            action = self.members[number].wind_down()
            if action is None:
                continue
            if action[0] != "outlast":
                self._turn = number + 1
                return self._of(number, action)
            expiry = expiry or self._of(number, action)
        if expiry is not None:
            self._check_none_is_claimed()
        return expiry

    def _check_none_is_claimed(self) -> None:
        """Check that no lease is claimed when only the end of leases is left: no engine reads then."""
        for number, member in enumerate(self.members):
            for name, lease in member.engine.outgoing.leases._leases.items():
                if lease.state is HandOverState.CLAIMED:
                    message = f"no engine reads hand-over {name} of engine {number}, but it is still claimed"
                    raise PropertyBroken(Property.ONE_RELEASE_PER_HOLD, message)

    def describe(self) -> dict[str, str]:
        return {
            f"engine {number}: {thing}": text
            for number, member in enumerate(self.members)
            for thing, text in member.describe().items()
        }

    def fingerprint(self) -> bytes:
        """A hash of all actions so far: this world is walked, and not explored."""
        return self._history.digest()

    @staticmethod
    def _of(number: int, action: Action) -> Action:
        return (action[0], number, *action[1:])
