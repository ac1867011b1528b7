"""`IncomingHandOvers`: how a decode engine gets the blocks of a prompt that a prefill engine has computed.

========== ===================================================================================================
claiming   a request arrived that names a hand-over; the prefill engine was asked for it (`Claims`)
copying    every rank copies its share from the prefill engine's host pool: a store in this engine's ledger
confirming every rank has reported a good copy; the prefill engine was asked if the blocks were held until now
========== ===================================================================================================

The request waits until the answer. Only then the reports of the ranks are applied to the ledger: as good if
the blocks were held, else as failed. Then the request is matched like any other, and loads the blocks from
the host. If anything fails on the way, the request computes the missing tokens, and one log line says why.

If a request ends early, a claim without a copy is given up. A copy that has begun continues, because other
requests may need the blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from itertools import count
from logging import Logger
from typing import Any, Protocol

import msgspec

from kvsm.core.kv_events import BlockStored
from kvsm.core.offloader import Offloader, PreparedStore
from kvsm.core.plan import ImportJob, WorkerReport
from kvsm.core.scheduler.groups import SchedulerConfig
from kvsm.core.scheduler.hits import HitSearch, Span, hit_limit
from kvsm.core.scheduler.payloads import describe
from kvsm.core.scheduler.tracked import TrackedRequest
from kvsm.ids import pack
from kvsm.system.printable import printable
from kvsm.tiers.hand_over.peer_messages import IDS_END, Answer, GivenBack, HandOverClaim, Offered, Refused

_MOST_SHOWN = 300
"""Most characters of a prefill engine's text that are logged."""

Digest = Callable[[Any, int], bytes]
"""(request, number of tokens) -> a digest of its first tokens, and of all else that decides their KV."""


class ClaimsChannel(Protocol):
    """The connection to prefill engines: `kvsm.tiers.hand_over.claiming.Claims`, or a model of it."""

    def ask(self, ticket: int, engine: str, claim: HandOverClaim) -> None:
        """Claim a hand-over of prefill engine `engine`. The answer is `Offered` or `Refused`."""
        ...

    def give_back(self, ticket: int, *, read: bool, had: bool = False) -> None:
        """End a claim.

        read: whether the blocks were copied. Only then the answer `GivenBack` follows.
        had: whether the claim ends because this engine has the blocks already.
        """
        ...

    def take_answers(self) -> list[tuple[int, Answer]]:
        """Return (ticket, answer) for each answer since the last call."""
        ...

    def close(self) -> None:
        """Give up all claims."""
        ...


class IncomingState(Enum):
    """The state of a hand-over to this engine."""

    CLAIMING = "claiming"
    COPYING = "copying"
    CONFIRMING = "confirming"


class _Incoming(msgspec.Struct):
    """A hand-over to this engine.

    ticket: its number in `ClaimsChannel`.
    engine: the id of the prefill engine.
    num_tokens: the most tokens that it may cover.
    transfer: the store that imports its blocks; 0: not planned yet.
    reports: reports of the ranks, held back until the prefill engine confirms that the blocks were held.
    """

    ticket: int
    tracked: TrackedRequest
    engine: str
    num_tokens: int
    state: IncomingState = IncomingState.CLAIMING
    transfer: int = 0
    reports: list[WorkerReport] = msgspec.field(default_factory=list)


class IncomingHandOvers:
    """The hand-overs to one decode engine.

    claims: the connection to prefill engines. `close` closes it.
    layout: what a block means in this engine.
    digest: computes the digest of a prompt, as the prefill engines do.
    logger: gets a warning for each prompt that was not handed over.
    """

    def __init__(
        self,
        core: Offloader,
        config: SchedulerConfig,
        claims: ClaimsChannel,
        layout: Mapping[str, str],
        digest: Digest,
        logger: Logger,
    ) -> None:
        self._core, self._config, self._layout = core, config, layout
        self._claims, self._digest, self._logger = claims, digest, logger
        self.missed = 0
        """Number of requests that compute their prompt although it should have been handed over."""
        self._tickets = count(1)
        self._by_ticket: dict[int, _Incoming] = {}
        self._by_request: dict[str, _Incoming] = {}
        self._by_transfer: dict[int, _Incoming] = {}

    def arrived(self, tracked: TrackedRequest, request: Any) -> None:
        """Note a new request. If it names a hand-over, claim that."""
        params = tracked.remote_prefill
        if params is None or tracked.name in self._by_request:
            return
        limit = hit_limit(request.num_prompt_tokens, 0, request.num_prompt_tokens)
        if params.num_tokens > limit or getattr(request, "prompt_embeds", None) is not None:
            self._refuse(tracked.name, params.engine, "it is of another prompt")
            return
        one = _Incoming(next(self._tickets), tracked, params.engine, params.num_tokens)
        self._by_ticket[one.ticket] = self._by_request[tracked.name] = one
        digest = self._digest(request, params.num_tokens)
        claim = HandOverClaim(params.hand_over, digest, params.num_tokens, self._layout)
        self._claims.ask(one.ticket, one.engine, claim)

    def awaits(self, request: str) -> bool:
        """Whether this request waits for a hand-over."""
        return request in self._by_request

    def finished(self, request: str) -> None:
        """Note that a request has ended. If its hand-over is only claimed, give the claim up."""
        one = self._by_request.pop(request, None)
        if one is not None and one.state is IncomingState.CLAIMING:
            self._give_up(one)

    def look(self) -> tuple[list[ImportJob], list[WorkerReport]]:
        """Apply the answers of prefill engines. Returns the copies that leave with this step, whose transfers
        are submitted, and the reports that the ledger must get now."""
        jobs: list[ImportJob] = []
        reports: list[WorkerReport] = []
        for ticket, answer in self._claims.take_answers():
            one = self._by_ticket.get(ticket)
            if one is None:
                continue
            if isinstance(answer, Offered):
                jobs += self._begin(one, answer)
            elif isinstance(answer, Refused):
                self._refuse(one.tracked.name, one.engine, answer.reason)
                self._forget(one)
            elif isinstance(answer, GivenBack):
                reports += self._judged(one, answer.held)
        for one in [one for one in self._by_transfer.values() if self._is_lost(one)]:
            self._give_up(one)
        if jobs:
            self._core.submit([job.transfer for job in jobs])
        return jobs, reports

    def _begin(self, one: _Incoming, offer: Offered) -> list[ImportJob]:
        """Plan the copies of the offered blocks that this engine lacks."""
        name, tracked, core = one.tracked.name, one.tracked, self._core
        chunk, all_keys = core.config.blocks_per_chunk, tracked.chunk_keys()
        search = HitSearch(self._config, chunk, all_keys, 0)
        spans = search.needed(offer.num_tokens)
        why = self._why_unfit(one, offer, spans, all_keys)
        if why is None and core.ledger.draining():
            why = "a reset of this engine is under way"
        if why is not None:
            self._refuse(name, one.engine, why)
            self._give_up(one)
            return []
        places = [(g, n) for g, span in enumerate(spans) for n in range(span.first, span.last)]
        keys = [key for span, of_group in zip(spans, all_keys) for key in of_group[span.first : span.last]]
        slots = [slot for group in offer.groups for slot in group.slots]
        parents = search.parents(offer.num_tokens)
        prepared = core.import_blocks(((name, len(keys)),), keys, f"engine {one.engine}", parents)
        job = prepared.job
        if job is None:
            # This engine has all of it, or no room for any of it.
            self._give_up(one, had=all(key in core.ledger.index for key in keys))
            return []
        one.state, one.transfer = IncomingState.COPYING, job.transfer
        self._by_transfer[job.transfer] = one
        self._describe(tracked, prepared, [places[n] for n in prepared.stored])
        sources = [slots[place] * chunk + part for place in prepared.stored for part in range(chunk)]
        return [ImportJob(job.transfer, one.engine, pack(sources), job.host_blocks)]

    def _why_unfit(
        self, one: _Incoming, offer: Offered, spans: Sequence[Span], all_keys: Sequence[Sequence[bytes]]
    ) -> str | None:
        """Return why an offer cannot be copied; None if each of its slots is a chunk of the prompt."""
        if not 0 < offer.num_tokens <= one.num_tokens or len(spans) != len(offer.groups):
            return "its blocks are not those of the prompt"
        for span, group, keys in zip(spans, offer.groups, all_keys):
            # If a group needs no chunk, its span is empty and may begin after the prompt's last full chunk.
            lacks_keys = bool(group.slots) and span.last > len(keys)
            if (span.first, span.last - span.first) != (group.first, len(group.slots)) or lacks_keys:
                return "its blocks are not those of the prompt"
            # A host block is a part of a slot. The size of the pool is checked when the pool is mapped.
            blocks_end = IDS_END // self._core.config.blocks_per_chunk
            if group.slots and not 0 <= min(group.slots) <= max(group.slots) < blocks_end:
                return "it names slots that no pool has"
        return None

    def _describe(
        self, tracked: TrackedRequest, prepared: PreparedStore, places: Sequence[tuple[int, int]]
    ) -> None:
        """Add the content of the stored blocks to the KV events, if KV events are published."""
        publisher, chunk = self._core.publisher, self._core.config.blocks_per_chunk
        if publisher is None or prepared.job is None:
            return
        sizes = [group.block_tokens * chunk for group in self._config.groups]
        stored = [(tracked, group, (place + 1) * sizes[group]) for group, place in places]
        described: list[BlockStored | None] = describe(self._config, chunk, stored)
        publisher.describe(prepared.job.transfer, described)

    def keep_back(self, reports: Sequence[WorkerReport]) -> list[WorkerReport]:
        """Return the reports that the ledger must get now. Good reports of a hand-over are held back until
        the prefill engine has confirmed that the blocks were held."""
        if not self._by_transfer:
            return list(reports)
        counted = [report for report in reports if report.transfer not in self._by_transfer]
        for report in reports:
            one = self._by_transfer.get(report.transfer)
            if one is None:
                continue
            one.reports.append(report)
            if len({each.worker for each in one.reports}) < self._core.config.workers:
                continue
            if all(each.good for each in one.reports):
                if one.state is IncomingState.COPYING:
                    one.state = IncomingState.CONFIRMING
                    self._claims.give_back(one.ticket, read=True)
            else:
                errors = {each.error for each in one.reports if not each.good}
                self._refuse(one.tracked.name, one.engine, f"the copy failed: {'; '.join(sorted(errors))}")
                counted += one.reports
                self._give_up(one)
        return counted

    def _judged(self, one: _Incoming, held: bool) -> list[WorkerReport]:
        """Return the reports that were held back, changed to failed if the prefill engine did not hold the
        blocks until they were copied."""
        reports = one.reports
        if not held:
            why = "the prefill engine did not hold the blocks until they were copied"
            self._refuse(one.tracked.name, one.engine, why)
            reports = [WorkerReport(each.transfer, each.worker, False, why) for each in reports]
        self._forget(one)
        return reports

    def _is_lost(self, one: _Incoming) -> bool:
        return one.transfer not in self._core.ledger.transfers

    def _give_up(self, one: _Incoming, *, had: bool = False) -> None:
        self._claims.give_back(one.ticket, read=False, had=had)
        self._forget(one)

    def _forget(self, one: _Incoming) -> None:
        self._by_ticket.pop(one.ticket, None)
        self._by_transfer.pop(one.transfer, None)
        if self._by_request.get(one.tracked.name) is one:
            del self._by_request[one.tracked.name]

    def _refuse(self, request: str, engine: str, why: str) -> None:
        self.missed += 1
        self._logger.warning(
            "kvsm: request %s computes its prompt: nothing was handed over by engine %s: %s",
            printable(request),
            printable(engine),
            printable(why[:_MOST_SHOWN]),
        )

    def reset(self) -> None:
        """Give up claims without a copy at a reset of the cache, so that no block from before the reset is
        imported afterwards. Copies in flight continue, but no request matches their blocks."""
        for one in list(self._by_ticket.values()):
            if one.state is IncomingState.CLAIMING:
                self._refuse(one.tracked.name, one.engine, "this engine was reset")
                self._give_up(one)

    def close(self) -> None:
        """Give up all claims."""
        self._claims.close()
