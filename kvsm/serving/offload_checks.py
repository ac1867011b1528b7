"""Check the properties that need the engine's requests and steps, and cannot be checked from the log.

Full offload (S16) is checked when a request finishes, which is earlier than it has to hold. It is checked for
the blocks that are still in the request's tables: the blocks of a sliding window until they are freed, but no
states of a mamba group, which are offered one by one.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvsm.core.ledger.invariants import Violation
from kvsm.core.offloader import EventSink
from kvsm.core.plan import TransferPlan
from kvsm.core.scheduler import GroupKind, LastStep, OffloadScheduler
from kvsm.core.scheduler.groups import WINDOWED, group_suffix
from kvsm.events import OffloadingEvent, StoreSkipped
from kvsm.properties import Property
from kvsm.serving.serving_block_pool import ServingBlockPool
from kvsm.serving.serving_request import ServingRequest

PROPERTIES = (Property.CORRECT_BYTES, Property.FULL_OFFLOAD, Property.LAST_STEP, Property.ONE_TOKEN_LEFT)
"""The properties that the engine checks, in addition to the checks of the log."""


class SkipNotes:
    """Forwards events to a log, and notes which keys of watched requests were skipped."""

    def __init__(self, log: EventSink) -> None:
        self._log = log
        self._skipped: dict[str, set[bytes]] = {}

    def watch(self, request: str) -> None:
        """Note the skipped keys of this request from now on, until `take`."""
        self._skipped[request] = set()

    def take(self, request: str) -> set[bytes]:
        """Return the keys that were skipped so far, each with a reason in the log. Ends the watch."""
        return self._skipped.pop(request)

    def append(self, event: OffloadingEvent) -> None:
        """Forward an event to the log."""
        if self._skipped and type(event) is StoreSkipped:
            first = 0
            for name, count in event.owners:
                if name in self._skipped:
                    self._skipped[name].update(event.keys[first : first + count])
                first += count
        self._log.append(event)

    def flush(self) -> None:
        """Flush the log."""
        self._log.flush()


class OffloadChecks:
    """Checks one engine while it serves.

    Attributes: `violations`; `remote_decode`, the number of finished requests for remote decode;
    `fully_offloaded`, the number of these with every full block on the host or in flight.
    """

    def __init__(self, connector: OffloadScheduler, pool: ServingBlockPool, notes: SkipNotes) -> None:
        self.violations: list[Violation] = []
        self.remote_decode = self.fully_offloaded = 0
        self._connector, self._pool, self._notes = connector, pool, notes
        self._chunk = connector.offloader.config.blocks_per_chunk

    def arrived(self, request: ServingRequest) -> None:
        """Begin to watch a request if it is for remote decode."""
        if _is_for_remote_decode(request):
            self._notes.watch(request.request_id)

    def matched(self, request: ServingRequest, end: int) -> None:
        """Check one token left (S18): a match that ends at `end` leaves a token to compute."""
        if end >= request.num_tokens:
            name = request.request_id
            message = f"request {name} has {request.num_tokens} tokens, and {end} of them are matched"
            self.violations.append(Violation(Property.ONE_TOKEN_LEFT, message, requests=(name,)))

    def request_finished(self, request: ServingRequest) -> None:
        """Check full offload (S16): each full block is resident, in flight, or skipped with a reason."""
        if not _is_for_remote_decode(request):
            return
        name, index = request.request_id, self._connector.offloader.ledger.index
        skipped = self._notes.take(name)
        missing = [key for key in self._full_chunks(request) if key not in index]
        self.remote_decode += 1
        self.fully_offloaded += not missing
        silent = [key for key in missing if key not in skipped]
        if silent:
            message = (
                f"request {name} is for remote decode, and {len(silent)} of its full blocks have no "
                f"store and no reason, first of key {silent[0].hex()}"
            )
            self.violations.append(Violation(Property.FULL_OFFLOAD, message, requests=(name,)))

    def last_step(self, plan: TransferPlan) -> None:
        """Check flush at last step (S17): no request is left, so the plan must flush all transfers."""
        if self._connector.config.last_step is LastStep.FLUSH:
            transfers = self._connector.offloader.ledger.transfers.keys() - set(plan.flush)
            if transfers:
                message = f"no request is left, and {len(transfers)} transfers are not flushed"
                self.violations.append(
                    Violation(Property.LAST_STEP, message, transfers=tuple(sorted(transfers)[:8]))
                )

    def _full_chunks(self, request: ServingRequest) -> Iterator[bytes]:
        """Yield the keys of the computed full chunks whose blocks are still in the request's tables."""
        config = self._connector.config
        for index, (group, table) in enumerate(zip(config.groups, request.tables)):
            tokens = group.block_tokens * self._chunk
            first, full = 0, min(request.num_computed_tokens, request.num_tokens - 1) // tokens
            if group.kind is GroupKind.MAMBA:
                continue
            if group.kind in WINDOWED:
                first = -(-group.first_needed_token(request.num_computed_tokens) // tokens)
            for number in range(first, full):
                key = request.block_hashes[(number + 1) * tokens // config.tokens_per_hash - 1]
                key += group_suffix(index)
                blocks = table[number * self._chunk : (number + 1) * self._chunk]
                named = group.kind is GroupKind.FULL or self._chunk > 1
                if config.null_block not in blocks and (named or self._pool.cached_block(key) is not None):
                    yield key


def _is_for_remote_decode(request: ServingRequest) -> bool:
    return bool((request.kv_transfer_params or {}).get("do_remote_decode"))
