"""An engine of a fleet: the engine of the whole world, with the real `OutgoingHandOvers` and
`IncomingHandOvers`.

It calls them in the order of `kvsm.vllm.scheduler_side`: a step first reads the answers of prefill engines,
and looks at its own hand-overs after all plans of the step are made. A report goes first to the incoming
hand-overs, which may hold it back. A reset revokes hand-overs and gives up claims before it resets the
caches.

Each copy from another engine is an ordinary copy of the workers: it may fail on any rank, be given up, or end
with the process. A rank copies what the other engine's host memory holds at that moment. That memory may
belong to a process that was killed since, or to its successor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence, Sized
from itertools import count
from logging import getLogger
from typing import Any, NamedTuple

import msgspec

from kvsm.check.worlds.check_counts import count_case
from kvsm.check.worlds.hand_over_checks import check_none_is_overdue, offered_keys
from kvsm.check.worlds.hand_over_parts import ModelChannel, ModelClaim
from kvsm.check.worlds.small_request import Cell, SmallRequest
from kvsm.check.worlds.small_workers import TORN, SmallCopy
from kvsm.check.worlds.whole_engine import WholeEngine
from kvsm.core.plan import ImportJob, TransferJob, TransferPlan, WorkerReport
from kvsm.core.scheduler import StepOutput, StepResults
from kvsm.errors import PropertyBroken
from kvsm.events import Direction
from kvsm.ids import NO_IDS, listed, to_list, unpack
from kvsm.properties import Property
from kvsm.tiers.hand_over.incoming import IncomingHandOvers
from kvsm.tiers.hand_over.leases import LeaseTable
from kvsm.tiers.hand_over.outgoing import OutgoingHandOvers
from kvsm.tiers.hand_over.peer_messages import GivenBack, Offered, Refused

TIMEOUT_S = 10.0
"""The lifetime of a lease, on the clock of its engine (s)."""

_TICKETS_OF_A_PROCESS = 1 << 20
_QUIET = getLogger("kvsm.check.worlds.fleet_engine")
_QUIET.disabled = True


class SentAnswer(msgspec.Struct):
    """The answer to a request of a prefill engine. Its client sends it to decode engines.

    source: the number of the prefill engine.
    request: the finished request.
    parameters: the `kv_transfer_params` of the answer.
    readers: how many requests have named the hand-over.
    """

    source: int
    request: SmallRequest
    parameters: dict[str, Any]
    readers: int = 0


class OfferedBlocks(NamedTuple):
    """The blocks of an offer, as the prefill engine's ledger had them. The lease forbids that they change.

    process: the engine object; after a kill there is a new one.
    epoch: the epoch of its ledger.
    blocks: (slot, key, store that wrote it) for each block.
    """

    process: FleetEngine
    epoch: int
    blocks: tuple[tuple[int, Any, int], ...]


class FleetNetwork:
    """What the engines of a fleet share.

    processes: number of an engine -> its present process.
    answered: the answers that clients hold and will send to decode engines.
    orphans: connections of killed decode engines whose end the prefill engines have yet to notice.
    """

    def __init__(self) -> None:
        self.processes: dict[int, FleetEngine] = {}
        self.answered: list[SentAnswer] = []
        self.orphans: deque[ModelClaim] = deque()
        self._names, self._begun = count(1), count()
        self._origins: dict[str, FleetEngine] = {}
        """Lease -> the process that has opened it."""
        self._granted: set[str] = set()
        """The leases that were offered to a reader."""

    def begin(self) -> int:
        """Note that a process begins. Returns the reader numbers that were given out before it."""
        return next(self._begun) * _TICKETS_OF_A_PROCESS

    def new_name(self) -> str:
        """Return a name that no other lease of any process has."""
        return f"{next(self._names):08}"

    def leases_of(self, engine: str) -> LeaseTable | None:
        """The lease table of the present process of this engine."""
        process = self.processes.get(int(engine))
        return None if process is None else process.outgoing.leases

    def is_open(self, sent: SentAnswer) -> bool:
        """Whether a reader may still claim the hand-over of this answer."""
        return sent.parameters["remote_hand_over"] in self.processes[sent.source].outgoing._out

    def opened(self, lease: str, process: FleetEngine) -> None:
        """Note which process has opened a hand-over."""
        self._origins[lease] = process

    def check_grant(self, lease: str, process: FleetEngine) -> None:
        """Check that this process may offer a hand-over to a reader (one release per hold, S4)."""
        if self._origins.get(lease) is not process:
            message = f"hand-over {lease} is offered by a process that has not opened it"
            raise PropertyBroken(Property.ONE_RELEASE_PER_HOLD, message)
        if lease in self._granted:
            message = f"hand-over {lease} is offered to a second reader"
            raise PropertyBroken(Property.ONE_RELEASE_PER_HOLD, message)
        self._granted.add(lease)


class FleetEngine(WholeEngine):
    """A `WholeEngine` that hands over to other engines, and gets hand-overs. It takes the same arguments.

    number: its number in the fleet, which is its engine id.
    network: what the engines share.
    share: as in `OutgoingHandOvers`.
    now_s: the clock of its leases (s).
    """

    def __init__(self, *options: Any, number: int, network: FleetNetwork, share: float, **more: Any) -> None:
        super().__init__(*options, **more)
        self.number, self.network, self.now_s = number, network, 0.0
        self._imports: list[ImportJob] = []
        """Copies from other engines that leave with the next step."""
        self._sources: dict[int, tuple[list[list[list[Cell]]], list[int]]] = {}
        """Copy from another engine in flight -> the host memory that it reads, and the blocks in it."""
        self._offered: dict[str, OfferedBlocks] = {}
        """Own lease with an offer -> the offered blocks."""
        self._read: dict[int, OfferedBlocks] = {}
        """Ticket of an offer that this engine was given -> the offered blocks."""
        self._claimed_in: dict[int, int] = {}
        """Ticket of a claim -> the number of resets and changes of the weights before it."""
        leases = LeaseTable(TIMEOUT_S, lambda: self.now_s)
        self.outgoing = OutgoingHandOvers(
            self.core, self.config, str(number), leases, self._digest, _QUIET, share, network.new_name
        )
        self.channel = ModelChannel(network.leases_of, self.core.ledger, network.begin())
        self.incoming = IncomingHandOvers(self.core, self.config, self.channel, {}, self._digest, _QUIET)
        network.processes[number] = self

    def _digest(self, request: Any, num_tokens: int) -> bytes:
        """The digest of a prompt's first tokens and of all else that decides their KV, as in vLLM."""
        content = request.all_token_ids[:num_tokens], request.extras, self.core.ledger.weights
        return repr(content).encode()

    def killed(self) -> None:
        """End the process: its connections break, and so do the connections to it."""
        self.network.orphans += self.channel.killed()
        for process in self.network.processes.values():
            for connection in [one for one in process.channel.open if one.leases is self.outgoing.leases]:
                process.channel.cut(connection)

    # Requests.

    def arrive(self, request: SmallRequest) -> SmallRequest:
        """Let a request arrive, and claim the hand-over that it names, if any."""
        super().arrive(request)
        self.incoming.arrived(self.scheduler.state.tracked[request.request_id], request)
        for ticket in self.incoming._by_ticket:
            self._claimed_in.setdefault(ticket, self.surviving.epoch)
        return request

    def finish(self, request: SmallRequest, *, aborted: bool = False) -> None:
        """Finish a request, and open a hand-over if it is for another engine."""
        tracked, was_finished = self.scheduler.state.tracked.get(request.request_id), request.finished
        super().finish(request, aborted=aborted)
        if was_finished:
            return
        self.incoming.finished(request.request_id)
        if tracked is None or not tracked.remote_decode or aborted:
            return
        answer = self.outgoing.offer(tracked, request)
        if answer is not None:
            self.network.opened(answer["remote_hand_over"], self)
            self.network.answered.append(SentAnswer(self.number, request, answer))

    def _ask(self, request: SmallRequest, local: int) -> int | None:
        if self.incoming.awaits(request.request_id):
            self.take_hand_overs()
            if self.incoming.awaits(request.request_id):
                self.service.note_wait_for_another_engine()
                return None
        return super()._ask(request, local)

    # Steps and reports.

    def has_hand_over_work(self) -> bool:
        """Whether a hand-over needs another step of this engine."""
        return bool(self.incoming._by_transfer) or bool(self._imports) or self.outgoing.has_ended()

    def take_hand_overs(self) -> None:
        """Read the answers of prefill engines."""
        offered = offered_keys(self.incoming, self.channel, self.core, self.config)
        missed = self.incoming.missed + self._failing()
        jobs, reports = self.incoming.look()
        if self.incoming.missed > missed and not self.core.ledger.draining():
            message = "a hand-over between equal engines is refused, although its blocks are offered"
            raise PropertyBroken(Property.STORED_SO_SERVED, message)
        self.channel.check_given_back(offered)
        count_case(Property.STORED_SO_SERVED, "hand-overs that are copied", len(jobs))
        for job in jobs:
            self._check_claimed_since_reset(job.transfer)
        self._imports += jobs
        if reports:
            self.take_reports(reports)

    def _failing(self) -> int:
        """The number of unread answers after which a request gets no hand-over."""
        return sum(
            isinstance(answer, Refused) or (isinstance(answer, GivenBack) and not answer.held)
            for ticket, answer in self.channel.answers
            if ticket in self.incoming._by_ticket
        )

    def _check_claimed_since_reset(self, transfer: int) -> None:
        """Check that an import that begins was claimed after the last reset of this engine."""
        if self._claimed_in[self.incoming._by_transfer[transfer].ticket] != self.surviving.epoch:
            message = f"transfer {transfer} imports blocks that were claimed before a reset of this engine"
            raise PropertyBroken(Property.NO_STALE_DATA, message)

    def take_reports(self, reports: list[WorkerReport]) -> StepResults:
        """Give these reports to the scheduler, except those that a hand-over holds back."""
        counted = self.incoming.keep_back(reports)
        results = super().take_reports(counted)
        if counted or results.loads:
            self.look_at_hand_overs()
        return results

    def hand_on_disk(self, place: int) -> None:
        super().hand_on_disk(place)
        self.look_at_hand_overs()

    def look_at_hand_overs(self) -> None:
        """Pin blocks whose stores have ended, and release the blocks of ended hand-overs."""
        self.outgoing.look()
        check_none_is_overdue(self.outgoing.leases)

    def _plan(self, output: StepOutput) -> TransferPlan:
        self.take_hand_overs()
        return super()._plan(output)

    def _start(self) -> None:
        # Check the plan before this: it was made without the blocks that are released here.
        self.look_at_hand_overs()
        super()._start()
        imports, self._imports = self._imports, []
        for job in imports:
            self._check_logged(job.transfer)
            self._begin_import(job)

    def _begin_import(self, job: ImportJob) -> None:
        targets, process = listed(unpack(job.host_blocks)), self.network.processes[int(job.engine)]
        self._sources[job.transfer] = process.host, to_list(job.source_blocks)
        for place in targets:
            self.host[place] = [[TORN] for _ in range(self.workers)]
        local = TransferJob(job.transfer, Direction.STORE, NO_IDS, job.host_blocks)
        self.copies[job.transfer] = SmallCopy(local, set(range(self.workers)))
        self.notes.leave(job, self.workers)

    def _copied_blocks(self, job: TransferJob) -> list[tuple[list[list[Cell]], list[list[Cell]]]]:
        if job.transfer not in self._sources:
            return super()._copied_blocks(job)
        theirs, sources = self._sources[job.transfer]
        return [
            (theirs[source], self.host[place]) for source, place in zip(sources, to_list(job.host_blocks))
        ]

    def reset(self) -> bool:
        """Revoke hand-overs and give up claims, then reset the caches."""
        self.outgoing.reset()
        self.incoming.reset()
        return super().reset()

    # What must hold.

    def _check_disk_job(self, job: TransferJob) -> None:
        super()._check_disk_job(job)
        if job.direction is Direction.LOAD:
            self._check_free_of_leases(set(listed(job.pairs()[0])))

    def _check_targets(self, plan: TransferPlan) -> None:
        """Check that no copy into the host writes a slot that another copy touches, or that is leased."""
        super()._check_targets(plan)
        chunk = self.core.config.blocks_per_chunk
        stored = {place // chunk for job in plan.stores for place in to_list(job.host_blocks)}
        imported = {place // chunk for job in self._imports for place in to_list(job.host_blocks)}
        self._check_free_of_leases(stored | imported)
        touched = {place // chunk for copy in self.copies.values() for place in to_list(copy.job.host_blocks)}
        on_disk = {slot for _, slots, _ in self.disk.touched() for slot in slots}
        both = (stored & (touched | imported)) | (imported & (touched | on_disk))
        if both:
            message = f"a store or an import writes host slots {sorted(both)}, which another copy touches"
            raise PropertyBroken(Property.NO_REUSE_IN_FLIGHT, message)

    def _check_free_of_leases(self, slots: set[int]) -> None:
        """Check that none of these slots, which a copy writes now, belongs to a lease that has not ended."""
        for name, lease in self.outgoing.leases._leases.items():
            leased = slots.intersection(_slots(lease.offer)) if slots and lease.offer else ()
            if leased:
                message = f"a copy writes host slots {sorted(leased)}, which hand-over {name} protects"
                raise PropertyBroken(Property.NO_REUSE_IN_FLIGHT, message)

    def check_leased_blocks(self) -> None:
        """Check that the blocks under each lease are those of its offer (no reuse in flight, S3)."""
        leases = self.outgoing.leases._leases
        self._offered = {name: blocks for name, blocks in self._offered.items() if name in leases}
        for name, lease in leases.items():
            if lease.offer is not None:
                self._check_unchanged(name, self._offered.setdefault(name, self.offered_blocks(lease.offer)))

    def offered_blocks(self, offer: Offered) -> OfferedBlocks:
        """What this engine's ledger says about the blocks of an offer."""
        ledger = self.core.ledger
        blocks = [
            (slot, ledger.key_of[slot] if ledger.readable(slot) else None, ledger.generation[slot])
            for slot in _slots(offer)
        ]
        return OfferedBlocks(self, ledger.epoch, tuple(blocks))

    def _check_unchanged(self, name: str, before: OfferedBlocks) -> None:
        ledger = self.core.ledger
        for slot, key, store in before.blocks:
            if key is None or ledger.index.get(key) != slot or ledger.generation[slot] != store:
                message = f"hand-over {name} protects host slot {slot}, which has lost the offered block"
                raise PropertyBroken(Property.NO_REUSE_IN_FLIGHT, message)

    def serve(self, connection: ModelClaim) -> None:
        """Let the prefill engine answer the question of a connection, and check its answer."""
        known = len(self.channel.answers)
        process = next(
            one for one in self.network.processes.values() if one.outgoing.leases is connection.leases
        )
        self.channel.serve(connection)
        for ticket, answer in list(self.channel.answers)[known:]:
            lease = connection.claim.hand_over
            if isinstance(answer, Offered):
                self.network.check_grant(lease, process)
                self._read[ticket] = process.offered_blocks(answer)
            elif isinstance(answer, GivenBack) and answer.held:
                count_case(Property.CORRECT_BYTES, "hand-overs that are confirmed")
                _check_held(lease, process, self._read[ticket])

    def check_no_hand_over_is_left(self) -> None:
        """Check at rest that no lease, claim, import or connection is left (progress, S9)."""
        incoming, outgoing = self.incoming, self.outgoing
        left: dict[str, Sized] = {
            "leases": outgoing.leases._leases,
            "hand-overs": outgoing._out,
            "stores that hand-overs wait for": outgoing._awaiting,
            "pinned slots": listed(outgoing._holders.nonzero()[0]),
            "claims": incoming._by_ticket,
            "requests with a claim": incoming._by_request,
            "imports": incoming._by_transfer,
            "connections": self.channel.open,
        }
        for what, things in left.items():
            if len(things):
                raise PropertyBroken(Property.PROGRESS, f"at rest, {len(things)} {what} are left")


def _slots(offer: Offered) -> Sequence[int]:
    return [slot for group in offer.groups for slot in group.slots]


def _check_held(lease: str, process: FleetEngine, offered: OfferedBlocks) -> None:
    """Check a confirmation: the process that has offered the blocks has held all of them since.

    Raises `PropertyBroken` (no stale data, S14).
    """
    if process is not offered.process or process.core.ledger.epoch != offered.epoch:
        message = f"hand-over {lease} is confirmed, but its engine was killed or reset since the offer"
        raise PropertyBroken(Property.NO_STALE_DATA, message)
    process._check_unchanged(lease, offered)
