"""`OutgoingHandOvers`: what a prefill engine keeps for the engines that decode its requests.

When a request with `do_remote_decode` has finished, its blocks are on the host, or on their way. They are
pinned for a request of their own, so nothing evicts them, and the log tells the whole hand-over in events
that it has anyway:

    hand-over-4f1d..-of-cmpl-42    matched, and pinned     when the blocks are on the host
                                   finished                when a decode engine has taken them, or had them
                                   aborted                 given up, expired, revoked by a reset, or shutdown

The lease table decides who may read. Here its decisions become events, in the engine's thread: `look` is
called when reports were taken, and before a plan leaves. So no plan that could write a slot leaves while its
lease can still be confirmed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from logging import Logger
from secrets import token_hex
from typing import Any

import msgspec

from kvsm.errors import KvsmError, LimitReached
from kvsm.hand_over.leases import LeaseEnd, LeaseTable
from kvsm.hand_over.messages import Offered, OfferedGroup
from kvsm.ids import listed
from kvsm.offloader import Offloader
from kvsm.scheduler.groups import SchedulerConfig
from kvsm.scheduler.hits import HitSearch, Span, hit_limit
from kvsm.scheduler.incoming import Digest
from kvsm.scheduler.request_params import HandOverParams
from kvsm.scheduler.tracked import TrackedRequest


class _Outgoing(msgspec.Struct):
    """A hand-over that is out.

    name: the request that pins its blocks.
    keys: of the prompt's chunks, by group.
    limit: where a hit of the prompt may end at most (tokens).
    """

    name: str
    request: str
    keys: Sequence[Sequence[bytes]]
    limit: int
    is_ready: bool = False


class OutgoingHandOvers:
    """The hand-overs of one prefill engine.

    engine: the id of this engine.
    leases: who may read. Somebody else answers the readers from it.
    digest: of a prompt, as the decode engines make it.
    logger: hears what was given up.
    new_name: makes a name that nobody can guess.
    """

    def __init__(
        self,
        core: Offloader,
        config: SchedulerConfig,
        engine: str,
        leases: LeaseTable,
        digest: Digest,
        logger: Logger,
        new_name: Callable[[], str] = token_hex,
    ) -> None:
        self._core, self._config, self._engine = core, config, engine
        self.leases, self._digest, self._logger, self._new_name = leases, digest, logger, new_name
        self._out: dict[str, _Outgoing] = {}

    def offer(self, tracked: TrackedRequest, request: Any) -> dict[str, Any] | None:
        """Keep the prompt of a finished request. Returns what its client sends to the decode engine; None if
        nothing of the prompt can be handed over."""
        prompt_tokens = request.num_prompt_tokens
        limit = hit_limit(prompt_tokens, 0, prompt_tokens)
        limit -= limit % self._config.alignment
        if not limit or getattr(request, "prompt_embeds", None) is not None:
            return None
        lease = self._new_name()
        name = f"hand-over-{lease[:8]}-of-{tracked.name}"
        out = _Outgoing(name, tracked.name, tracked.all_keys(), limit)
        self._out[lease] = out
        self._core.arrive(out.name)
        self.leases.offer(lease, self._digest(request, limit), limit)
        self.look()
        if lease not in self._out:
            return None
        return HandOverParams(self._engine, tracked.name, lease, limit).as_answer()

    def look(self) -> None:
        """Pin what has come to the host, and release what no reader holds any more."""
        if not self._out:
            return
        for lease, out in self._out.items():
            if out.is_ready:
                # A reset, or bytes that were found bad, may have taken blocks away.
                self._hold_or_revoke(lease, out)
            else:
                self._prepare(lease, out)
        self._release_ended()

    def _prepare(self, lease: str, out: _Outgoing) -> None:
        index, readable = self._core.ledger.index, self._core.ledger.readable
        search = HitSearch(self._config, self._core.config.blocks_per_chunk, out.keys, 0)
        end = search.longest_hit(out.limit, index.__contains__)
        spans = search.needed(end)
        slots = [[index[key] for key in keys[a:b]] for keys, (a, b) in zip(out.keys, spans)] if end else []
        wanted = [slot for group in slots for slot in group]
        here = [slot for slot in wanted if readable(slot)]
        try:
            if here:
                self._core.pin(out.name, here, None, 0, 0, 0)
        except LimitReached:
            self.leases.revoke(lease)
            return
        if not end:
            self._logger.info("kvsm: request %s hands nothing over: none of it is on the host", out.request)
            self.leases.revoke(lease)
        elif len(here) == len(wanted):
            out.is_ready = True
            self.leases.ready(lease, _offered(end, spans, slots))

    def _hold_or_revoke(self, lease: str, out: _Outgoing) -> None:
        entry = self._core.ledger.requests.get(out.name)
        if entry is None or len(self._core.ledger.live_pins(entry)) != len(listed(entry.pins)):
            self.leases.revoke(lease)

    def _release_ended(self) -> None:
        self.leases.expire()
        for lease, end in self.leases.take_ended():
            out = self._out.pop(lease)
            given_up = end not in (LeaseEnd.TAKEN, LeaseEnd.NOT_NEEDED)
            self._core.finish(out.name, aborted=given_up, hand_over=end.value)
            if end is LeaseEnd.EXPIRED:
                self._logger.warning(
                    "kvsm: nobody has taken the blocks of request %s within %g s; they are given up "
                    "(hand_over_timeout_s)",
                    out.request,
                    self.leases.timeout_s,
                )

    def has_ended(self) -> bool:
        """Whether a hand-over is over, and still pins its blocks: a step releases them."""
        return bool(self._out) and self.leases.has_ended()

    def reset(self) -> None:
        """The cache is reset: nothing is handed over, and no reader is told that blocks were held."""
        for lease in self._out:
            self.leases.revoke(lease)
        self._release_ended()

    def close(self) -> None:
        """Release everything. Nobody answers readers any more."""
        with suppress(KvsmError):  # a core that has stopped takes no events
            self.reset()


def _offered(end: int, spans: Sequence[Span], slots: Sequence[Sequence[int]]) -> Offered:
    groups = [OfferedGroup(span.first, tuple(map(int, group))) for span, group in zip(spans, slots)]
    return Offered(end, tuple(groups))
