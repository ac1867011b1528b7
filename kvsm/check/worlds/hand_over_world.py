"""The hand-over world: a prefill engine and a decode engine with their real cores, and a model of the
network.

Both cores, the lease table, the prefill engine's hand-overs (`OutgoingHandOvers`) and the decode engine's
claims (`IncomingHandOvers`) are real. Each of these is an action: an engine computes a prompt or steps, a
rank carries out its share of one copy, the service answers one question, time passes until none, some or all
leases have run out, either engine is reset, a connection breaks. So the prefill engine can free blocks, and
overwrite them, whenever the real one could, and the decode engine copies whatever bytes are there then.

Neither engine trusts the other: a prefill engine may give a wrong answer (any of `wrong_messages`), and a
stranger may claim a hand-over without knowing its prompt. Only the wrong answer "held all along" is left out:
a decode engine could not detect it.

Checked after each action: each block that an engine serves holds its own bytes on every rank (publish after
commit, S2); hand-overs pin at most their share of the pool, and each hand-over that waits has a block that is
being stored (progress, S9); a stranger changes no hand-over (a match holds what it counts, S7); after the
prefill engine has looked at its hand-overs, no expired lease is left (one release per hold, S4); jobs leave
for the ranks of the decode engine only when its log says so (events are state, S10). `check` adds the
ledgers' own properties. When no request, copy or question is left, a hand-over that has had a reader no
longer pins anything (one release per hold, S4); at rest nothing is left in either engine (progress, S9), and
both logs fold to the present state (events are state, S10).

Left out: threads and sockets, which `ModelChannel` replaces, and the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from logging import getLogger
from random import Random
from typing import Any

from kvsm.check.worlds.describing import describe_ledger
from kvsm.check.worlds.hand_over_checks import (
    check_none_is_overdue,
    check_share,
    check_waits,
    offered_keys,
)
from kvsm.check.worlds.hand_over_options import HandOverWorldOptions
from kvsm.check.worlds.hand_over_parts import (
    Answered,
    DecodeRequest,
    ImportCopies,
    ModelChannel,
    NotThere,
    SmallHost,
    answer_to_bytes,
    at,
)
from kvsm.check.worlds.small_request import SmallRequest
from kvsm.check.worlds.world import Action
from kvsm.check.worlds.wrong_messages import STRANGER, WRONG, lies_about, lies_at_the_end, strays_for
from kvsm.core.ledger.invariants import check_rest
from kvsm.core.plan import WorkerReport
from kvsm.core.scheduler.groups import KeyLayout
from kvsm.core.scheduler.hits import HitSearch
from kvsm.core.scheduler.tracked import TrackedRequest
from kvsm.errors import PropertyBroken
from kvsm.events import OffloadingEvent
from kvsm.ids import to_list
from kvsm.properties import Property
from kvsm.tiers.hand_over.incoming import IncomingHandOvers
from kvsm.tiers.hand_over.leases import LeaseTable
from kvsm.tiers.hand_over.outgoing import OutgoingHandOvers
from kvsm.tiers.hand_over.peer_messages import (
    IDS_END,
    GiveBack,
    GivenBack,
    HandOverClaim,
    Offered,
)

TIMEOUT_S = 10.0
"""The lifetime of a lease, on the world's clock."""

_WEIGHTS: dict[str | int, int] = {
    "store": 4,
    "arrive": 2,
    "serve": 3,
    "look": 4,
    "copy": 3,
    "step": 3,
    "compute": 3,
    "loaded": 3,
    "leave": 3,
}
"""The weight of a kind of action in `draw`; 1 if it is not listed. So most hand-overs are completed."""

_SIDES = ("prefill", "decode")
_BUDGETS = (
    "computes",
    "decodes",
    "hand_overs",
    "waits",
    "resets",
    "failures",
    "cuts",
    "losses",
    "loads",
    "lies",
)
_QUIET = getLogger("kvsm.check.worlds.hand_over_world")
_QUIET.disabled = True


class HandOverWorld:
    """A `World` of two engines.

    prefill, decode: their cores and host pools.
    """

    def __init__(self, options: HandOverWorldOptions | None = None) -> None:
        self.options = options = options or HandOverWorldOptions()
        self._config = config = options.scheduler_config()
        self.prefill, self.decode = (SmallHost(options.core_config(side)) for side in (0, 1))
        self._now, self._names = 0.0, 0
        self.leases = LeaseTable(TIMEOUT_S, lambda: self._now)
        self.channel = ModelChannel(lambda _: self.leases, self.decode.core.ledger)
        self.outgoing = OutgoingHandOvers(
            self.prefill.core, config, "p", self.leases, _digest, _QUIET, options.share, self._new_name
        )
        self.incoming = IncomingHandOvers(self.decode.core, config, self.channel, {}, _digest, _QUIET)
        self._answered: list[Answered] = []
        self._readers: dict[str, DecodeRequest] = {}
        self._imports: list[ImportCopies] = []
        self._left = {name: int(getattr(options, name)) for name in _BUDGETS}
        self._keys = [self._tracked("own", prompt, None).all_keys()[0] for prompt in range(options.prompts)]
        """The keys of each prompt in the first KV cache group."""
        self._drawable: dict[str | int, list[Action]] = {}
        """The actions that `draw` chooses from, by kind. Empty after an action: a walk often draws several
        times before it takes one."""

    def _new_name(self) -> str:
        self._names += 1
        return f"{self._names:08}"

    @property
    def events(self) -> Sequence[OffloadingEvent]:
        """The log of the decode engine so far."""
        return self.decode.log

    # What may happen.

    # There are hundreds of lies and strays: `actions` has only number 0 of them, `draw` chooses among all.
    # `draw` also draws waits during which no lease expires.

    def actions(self) -> list[Action]:
        left, found = self._left, list[Action]()
        ends = (1, 0) if left["failures"] else (1,)
        for side, (host, budget) in enumerate(((self.prefill, "computes"), (self.decode, "decodes"))):
            if left[budget]:
                found += [("compute", side, prompt) for prompt in range(self.options.prompts)]
            found += [
                ("store", side, place, worker, good)
                for place, copy in enumerate(host.stores)
                for worker in copy.waiting
                for good in ends
            ]
            if host.load is not None:
                found += [("loaded", side, worker, good) for worker in host.load.waiting for good in ends]
            elif left["loads"]:
                found += [("load", side, n) for n, keys in enumerate(self._keys) if host.serves(keys[0])]
            if left["resets"]:
                found.append(("reset", side))
        if left["hand_overs"]:
            found += [("offer", prompt) for prompt in range(self.options.prompts)]
        found += [
            ("arrive", place)
            for place, answered in enumerate(self._answered)
            if answered.readers < self.options.readers
        ]
        for place, connection in enumerate(self.channel.open):
            if connection.question is not None:
                found.append(("serve", place))
                if left["lies"]:
                    found.append(("lie", place, 0))
            if left["cuts"]:
                found.append(("cut", place))
        for place, copies in enumerate(self._imports):
            found += [("copy", place, worker, good) for worker in copies.waiting for good in ends]
            if left["losses"]:
                found.append(("lose", place))
        for place, (name, reader) in enumerate(self._readers.items()):
            found.append(("end", place))
            if not reader.matched and not self.incoming.awaits(name):
                found.append(("match", place))
        if left["lies"]:
            found += [("stray", place, 0) for place in range(len(self.leases._leases))]
        if self.channel.left:
            found.append(("leave",))
        if self.channel.answers or self._has_lost():
            found.append(("look",))
        if self.outgoing.has_ended():
            found.append(("step",))
        if self.outgoing._out and (left["waits"] or self._next_to_quiet() is None):
            found += [("wait", place) for place in range(len(self._ends()))]
        return found

    def draw(self, random: Random) -> Action:
        """Draw first a kind of action, then an action of this kind. Raises `IndexError` if there is none."""
        kinds = self._drawable
        if not kinds:
            for action in self.actions():
                kinds.setdefault(action[0], []).append(action)
        weights = [_WEIGHTS.get(kind, 1) for kind in kinds]
        drawn = kinds[random.choices(list(kinds), weights)[0]]
        useful = [action for action in drawn if self._is_useful(action)]
        chosen = random.choice(useful or drawn)
        if chosen[0] == "wait":
            return ("wait", random.randint(0, len(self._ends()) if self._left["waits"] else 0))
        if chosen[0] in WRONG:
            return (*chosen[:2], random.randrange(random.choice(WRONG[chosen[0]])))
        return chosen

    def _is_useful(self, action: Action) -> bool:
        """Whether the action may lead to an import. Without this preference most claims would be refused."""
        name, place = action[0], int(action[1]) if len(action) > 1 else 0
        if name == "offer":
            ours, theirs = self.prefill.core.ledger.index, self.decode.core.ledger.index
            return any(key in ours and key not in theirs for key in self._keys[place])
        if name == "load":
            return any(
                answered.prompt == action[2]
                for answered in self._answered
                if answered.lease in self.leases._leases
            )
        return name != "arrive" or self._answered[place].lease in self.leases._leases

    def do(self, action: Action) -> bool:
        self._drawable.clear()
        move: Callable[..., bool] | None = getattr(self, f"_do_{action[0]}", None)
        try:
            if move is None or not move(*action[1:]):
                return False
        except NotThere:
            return False
        self.prefill.check_bytes("prefill")
        self.decode.check_bytes("decode")
        check_share(self.outgoing, self.prefill.core.ledger, self.options.share)
        check_waits(self.outgoing, self.prefill.core.ledger)
        return True

    def _spend(self, budget: str) -> None:
        self._left[budget] = max(0, self._left[budget] - 1)

    # Either engine.

    def _do_compute(self, side: int, prompt: int) -> bool:
        """An engine computes a prompt. A store of the chunks that its host lacks is submitted at once."""
        if prompt >= self.options.prompts:
            return False
        self._spend(("computes", "decodes")[side])
        host = (self.prefill, self.decode)[side]
        tracked = self._tracked("own", prompt, None)
        keys = [key for group in tracked.all_keys() for key in group]
        chunk = self.options.blocks_per_chunk
        first = prompt * len(keys) * chunk
        host.begin_store("own", keys, range(first, first + len(keys) * chunk))
        if side == 0:
            self._look()
        return True

    def _do_store(self, side: int, place: int, worker: int, good: int) -> bool:
        """A rank ends its share of a store from its device."""
        host = (self.prefill, self.decode)[side]
        if worker not in at(host.stores, place).waiting:
            return False
        if not good:
            self._spend("failures")
        host.end_store(place, worker, bool(good))
        if side == 0:
            self._look()
        return True

    def _do_load(self, side: int, prompt: int) -> bool:
        """A request of the engine's own loads what the host has of a prompt, and the load is submitted."""
        host = (self.prefill, self.decode)[side]
        if prompt >= self.options.prompts or host.load is not None:
            return False
        keys = self._keys[prompt]
        if not host.serves(keys[0]):
            return False
        self._spend("loads")
        blocks = self.options.length * self.options.blocks_per_chunk
        host.begin_load(keys, host.core.config.device_blocks - blocks)
        return True

    def _do_loaded(self, side: int, worker: int, good: int) -> bool:
        """A rank ends its share of the engine's load from its own host."""
        host = (self.prefill, self.decode)[side]
        if host.load is None or worker not in host.load.waiting:
            return False
        if not good:
            self._spend("failures")
        host.end_load(worker, bool(good))
        if side == 0:
            self._look()
        return True

    def _do_reset(self, side: int) -> bool:
        """One engine resets its cache."""
        self._spend("resets")
        if side == 0:
            self.outgoing.reset()
            self.prefill.core.reset()
        else:
            self.incoming.reset()
            self.decode.core.reset()
        return True

    def _tracked(self, name: str, prompt: int, parameters: dict[str, Any] | None) -> TrackedRequest:
        request = SmallRequest(name, self.options.tokens(prompt), parameters=parameters)
        layout = KeyLayout.of(self._config, self.options.blocks_per_chunk)
        return TrackedRequest(request, self._config, layout)

    # The prefill engine.

    def _do_offer(self, prompt: int) -> bool:
        """A request of the prefill engine ends, and hands over its blocks that are stored or being stored."""
        if prompt >= self.options.prompts:
            return False
        self._spend("hand_overs")
        tracked = self._tracked(f"p{prompt}", prompt, {"do_remote_decode": True})
        answer = self.outgoing.offer(tracked, tracked.request)
        if answer is not None:
            self._answered.append(Answered(prompt, answer["remote_hand_over"], answer))
        return True

    def _do_step(self) -> bool:
        """The prefill engine steps: it releases blocks that no reader may claim any more."""
        self._look()
        return True

    def _look(self) -> None:
        """The prefill engine looks at its hand-overs. Afterwards no expired lease may be left."""
        self.outgoing.look()
        check_none_is_overdue(self.leases)

    def _ends(self) -> list[float]:
        """The times at which leases expire, in order."""
        ends = {lease.until for lease in self.leases._leases.values() if lease.until > self._now}
        return sorted(ends) or [self._now + TIMEOUT_S]

    def _do_wait(self, place: int) -> bool:
        """Let time pass until the leases up to this place expire. After the last place, none expires."""
        ends = self._ends()
        if not 0 <= place <= len(ends):
            return False
        self._spend("waits")
        self._now = ends[place] if place < len(ends) else (self._now + ends[0]) / 2
        return True

    def _do_serve(self, place: int) -> bool:
        """The prefill engine's service answers a question."""
        connection = at(self.channel.open, place)
        if connection.question is None:
            return False
        self.channel.serve(connection)
        return True

    def _do_leave(self) -> bool:
        """The service notices that a connection was closed."""
        if not self.channel.left:
            return False
        self.channel.notice_close()
        return True

    def _do_cut(self, place: int) -> bool:
        """A connection breaks."""
        connection = at(self.channel.open, place)
        self._spend("cuts")
        self._may_miss_its_reader(connection.claim)
        self.channel.cut(connection)
        return True

    def _may_miss_its_reader(self, claim: HandOverClaim) -> None:
        for answered in self._answered:
            if answered.lease == claim.hand_over:
                answered.sees_readers = False

    # Peers that cannot be trusted.

    def _do_lie(self, place: int, number: int) -> bool:
        """A prefill engine gives a wrong answer to a question."""
        connection = at(self.channel.open, place)
        if connection.question is None:
            return False
        lies = self._lies(connection.question)
        lie = lies[number % len(lies)]
        self._spend("lies")
        self._may_miss_its_reader(connection.claim)
        self.channel.lied_to.add(connection.ticket)
        self.channel.take(connection, lie)
        return True

    def _lies(self, question: HandOverClaim | GiveBack) -> Sequence[bytes]:
        """The wrong answers to a question."""
        if isinstance(question, GiveBack):
            return lies_at_the_end()
        tracked = self._tracked("liar", 0, None)
        search = HitSearch(self._config, self.options.blocks_per_chunk, tracked.chunk_keys(), 0)
        return lies_about(question.num_tokens, tuple(search.needed(question.num_tokens)))

    def _do_stray(self, place: int, number: int) -> bool:
        """Send a question about a hand-over from a peer that does not know its prompt."""
        name = at(list(self.leases._leases), place)
        strays = strays_for(name)
        question = strays[number % len(strays)]
        self._spend("lies")
        before = dict(self.leases._leases), list(self.leases._ended)
        answer = answer_to_bytes(question, STRANGER, self.leases)
        if isinstance(answer, Offered) or answer == GivenBack(held=True):
            raise PropertyBroken(Property.MATCH_HOLDS, f"a stranger is answered {answer}")
        if (self.leases._leases, self.leases._ended) != before:
            raise PropertyBroken(Property.MATCH_HOLDS, f"a stranger changes hand-over {name}")
        return True

    # The decode engine.

    def _do_arrive(self, place: int) -> bool:
        """A request arrives at the decode engine with the prefill engine's answer."""
        answered = at(self._answered, place)
        if answered.readers >= self.options.readers:
            return False
        name = f"d{place}-{answered.readers}"
        answered.readers += 1
        tracked = self._tracked(name, answered.prompt, answered.parameters)
        self.decode.core.arrive(name)
        self._readers[name] = DecodeRequest(tracked)
        self.incoming.arrived(tracked, tracked.request)
        return True

    def _do_look(self) -> bool:
        """The decode engine steps: it reads the answers, and sends import jobs to its ranks."""
        offered = offered_keys(self.incoming, self.channel, self.decode.core, self._config)
        jobs, reports = self.incoming.look()
        if jobs:
            self.decode.log.check_leaving("decode")
        self.channel.check_given_back(offered)
        for job in jobs:
            if not 0 <= min(to_list(job.source_blocks)) <= max(to_list(job.source_blocks)) < IDS_END:
                raise PropertyBroken(Property.LEGAL_CALLS, f"ranks are to copy from {job.source_blocks!r}")
        workers = range(self.options.workers)
        self._imports += [ImportCopies(job, list(workers)) for job in jobs]
        self._take(reports)
        return True

    def _do_copy(self, place: int, worker: int, good: int) -> bool:
        """A rank copies its share from the offered slots, whatever they hold now, and reports it.

        The copy fails if the prefill engine's pool has no such slots.
        """
        copies = at(self._imports, place)
        if worker not in copies.waiting:
            return False
        if not good:
            self._spend("failures")
        job, ours, theirs = copies.job, self.decode.cells[worker], self.prefill.cells[worker]
        sources, targets = to_list(job.source_blocks), to_list(job.host_blocks)
        good = int(good and max(sources) < len(theirs))
        for source, target in zip(sources, targets):
            ours[target] = theirs[source] if good else None
        copies.waiting.remove(worker)
        if not copies.waiting:
            self._imports.remove(copies)
        self._take([WorkerReport(job.transfer, worker, bool(good), "" if good else "it failed")])
        return True

    def _take(self, reports: Sequence[WorkerReport]) -> None:
        for report in self.incoming.keep_back(reports):
            self.decode.core.report(*report.arguments())

    def _do_lose(self, place: int) -> bool:
        """The decode engine gives up an import at its deadline. Its ranks may still copy later."""
        self._spend("losses")
        self.decode.core.lose(at(self._imports, place).job.transfer)
        return True

    def _has_lost(self) -> bool:
        live = self.decode.core.ledger.transfers
        return any(transfer not in live for transfer in self.incoming._by_transfer)

    def _do_match(self, place: int) -> bool:
        """A request whose import has ended, well or not, matches its blocks."""
        name, reader = at(list(self._readers.items()), place)
        if reader.matched or self.incoming.awaits(name):
            return False
        reader.matched = True
        self.decode.core.match(name, reader.tracked.all_keys()[0])
        return True

    def _do_end(self, place: int) -> bool:
        """A request of the decode engine finishes or is aborted."""
        name = at(list(self._readers), place)
        del self._readers[name]
        self.decode.core.finish(name)
        self.incoming.finished(name)
        return True

    # Rest.

    def _next_to_quiet(self) -> Action | None:
        for side, host in enumerate((self.prefill, self.decode)):
            if host.stores:
                return ("store", side, 0, host.stores[0].waiting[0], 1)
            if host.load is not None:
                return ("loaded", side, host.load.waiting[0], 1)
        if self._imports:
            return ("copy", 0, self._imports[0].waiting[0], 1)
        for place, connection in enumerate(self.channel.open):
            if connection.question is not None:
                return ("serve", place)
        if self.channel.left:
            return ("leave",)
        if self.channel.answers or self._has_lost():
            return ("look",)
        if self._readers:
            return ("end", 0)
        return ("step",) if self.outgoing.has_ended() else None

    def wind_down(self) -> Action | None:
        """The next action on the way to rest. Leases run out only when no other action is left."""
        action = self._next_to_quiet()
        if action is None and self.outgoing._out:
            return ("wait", len(self._ends()) - 1)
        return action

    def check(self) -> None:
        for side, host in zip(_SIDES, (self.prefill, self.decode)):
            host.check()
            host.check_bytes(side)
        if self._next_to_quiet() is not None:
            return
        for answered in self._answered:
            if answered.lease in self.outgoing._out and answered.readers and answered.sees_readers:
                message = f"hand-over {answered.lease} has had its reader, and still pins its blocks"
                raise PropertyBroken(Property.ONE_RELEASE_PER_HOLD, message)
        if self.channel.open or self.incoming._by_ticket:
            message = "the decode engine waits for a hand-over, and nothing is left that could bring it"
            raise PropertyBroken(Property.PROGRESS, message)
        if not self.outgoing._out:
            for side, host in zip(_SIDES, (self.prefill, self.decode)):
                for violation in check_rest(host.core.ledger):
                    raise PropertyBroken(violation.property, f"{side} engine: {violation.message}")
                host.check_fold(side)

    # For people, and to compare.

    def describe(self) -> dict[str, str]:
        seen: dict[str, str] = {}
        for side, host in zip(_SIDES, (self.prefill, self.decode)):
            seen |= {f"{side}: {name}": text for name, text in describe_ledger(host.core.ledger).items()}
        for name, lease in self.leases._leases.items():
            time_left = max(0.0, lease.until - self._now)
            seen[f"hand-over {name}"] = f"{lease.state.value}, {time_left:g} s left"
        for connection in self.channel.open:
            asked = (
                "no question"
                if connection.question is None
                else f"asks: {type(connection.question).__name__}"
            )
            seen[f"connection for hand-over {connection.claim.hand_over}"] = asked
        for incoming in self.incoming._by_request.values():
            seen[f"request {incoming.tracked.name} awaits"] = incoming.state.value
        return seen

    def fingerprint(self) -> bytes:
        """16 bytes: equal for worlds with the same future behaviour. Slots keep their numbers."""
        return blake2b(repr(self._canonical()).encode(), digest_size=16).digest()

    def _canonical(self) -> tuple[object, ...]:
        leases = {name: place for place, name in enumerate(self.leases._leases)}
        tickets = {ticket: place for place, ticket in enumerate(self.incoming._by_ticket)}
        transfers = self.decode.ranks()
        table = [
            (one.state, max(0.0, one.until - self._now), one.offer, tickets.get(one.reader, -1))
            for one in self.leases._leases.values()
        ]
        ends = [(list(self.outgoing._out).index(name), end) for name, end in self.leases._ended]
        kept = self._kept_form(leases)
        asked = [
            (
                one.state,
                transfers.get(one.transfer, -1),
                [(said.worker, said.good) for said in one.reports],
                one.tracked.name in self._readers,
            )
            for one in self.incoming._by_ticket.values()
        ]
        channel = [
            (leases.get(one.claim.hand_over, -1), type(one.question).__name__, tickets.get(one.ticket, -1))
            for one in (*self.channel.open, None, *self.channel.left)
            if one is not None
        ]
        answers = [(tickets.get(ticket, -1), answer) for ticket, answer in self.channel.answers]
        imports = []
        for one in self._imports:
            job = one.job
            imports.append((transfers.get(job.transfer, -1), job.source_blocks, job.host_blocks, one.waiting))
        answered = [
            (one.prompt, leases.get(one.lease, -1), one.readers, one.sees_readers) for one in self._answered
        ]
        readers = [(name, one.matched, self.incoming.awaits(name)) for name, one in self._readers.items()]
        hosts = (
            self.prefill.form([one.name for one in self.outgoing._out.values()]),
            self.decode.form(list(self._readers)),
        )
        counts = len(self.channel.open), self._left
        return hosts, table, ends, kept, asked, channel, answers, imports, answered, readers, counts

    def _kept_form(self, leases: Mapping[str, int]) -> list[object]:
        """The prefill engine's hand-overs. Leases are named by their position.

        The number of the last event that it has seen is omitted: no hand-over waits for a store that has
        ended, and each ready one holds its blocks or has ended.
        """
        out, transfers = self.outgoing, self.prefill.ranks()
        return [
            (
                leases.get(name, -1),
                hand_over.is_ready,
                hand_over.keys,
                hand_over.slots,
                transfers.get(hand_over.awaits, -1),
            )
            for name, hand_over in out._out.items()
        ]


def _digest(request: Any, num_tokens: int) -> bytes:
    """The digest of a prompt's first tokens; both engines compute it alike."""
    return repr(request.all_token_ids[:num_tokens]).encode()
