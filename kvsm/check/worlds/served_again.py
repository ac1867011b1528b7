"""Nothing is stored in vain: at rest, the next process serves each block that it takes over (S19).

The ledger of a serving world at rest is restored for another process, which is asked for prompts of the
requests so far. If the host has every key that the layers read up to an end, a prompt that may load that much
is served up to that end. A block that no such prompt reads is named with the reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvsm.check.worlds.check_counts import count_case
from kvsm.check.worlds.longest_hit import Prompt
from kvsm.check.worlds.small_request import SmallRequest
from kvsm.core.ledger.snapshot import restore, snapshot
from kvsm.core.log import MemoryLog
from kvsm.core.offloader import Offloader
from kvsm.core.scheduler import OffloadScheduler
from kvsm.errors import PropertyBroken
from kvsm.ids import render_key
from kvsm.properties import Property
from kvsm.tiers.warm_restart import KILLED

if TYPE_CHECKING:
    from kvsm.check.worlds.small_engine import SmallEngine

_LAST_TOKEN = 1
"""The token that is left to compute, after the tokens that can be served."""


def unserved(engine: SmallEngine) -> dict[bytes, str]:
    """Check an engine at rest. Return each block that no prompt is served: its key -> the reason.

    The engine is not changed. Raises `PropertyBroken`.
    """
    ledger, groups = engine.core.ledger, engine.config.groups
    there = {key for key, slot in ledger.index.items() if ledger.readable(slot)}
    scheduler = _next_process(engine)
    served, lacks, asked = set[bytes](), dict[bytes, str](), set[bytes]()
    for request in engine.requests.values():
        prompt = Prompt(groups, request.cells, engine.core.config.blocks_per_chunk)
        for end in range(engine.config.alignment, request.num_tokens + 1, engine.config.alignment):
            read = set(prompt.keys_read(0, end))
            if not read or request.cells[end - 1] in asked:
                continue
            full = {key for key in read if key is not None}
            lacking = len(read) - len(full & there)
            if lacking:
                lacks |= dict.fromkeys(full & there, f"{lacking} other chunks of a prompt are not stored")
            else:
                _ask(scheduler, request, end)
                asked.add(request.cells[end - 1])
                served |= full
    count_case(Property.STORED_SO_SERVED, "blocks that a next process serves", len(served))
    return {key: lacks.get(key, "no request has its tokens") for key in there - served}


def _next_process(engine: SmallEngine) -> OffloadScheduler:
    ledger = restore(snapshot(engine.core.ledger))
    core = Offloader.restarted(ledger, engine.core.config, MemoryLog(), ended=KILLED, clock_ns=lambda: 0)
    return OffloadScheduler(core, engine.config)


def _ask(scheduler: OffloadScheduler, request: SmallRequest, end: int) -> None:
    name, tokens = f"after {request.request_id} {end}", [*request.all_token_ids, _LAST_TOKEN]
    asking = SmallRequest(name, tokens, parameters={"max_load_tokens": end}, extras=request.extras)
    found, _ = scheduler.get_num_new_matched_tokens(asking, 0)
    scheduler.request_finished(asking, [])
    if found != end:
        last = render_key(request.cells[end - 1])
        message = f"a next process serves {found} tokens of a prompt, and has all {end} up to {last}"
        raise PropertyBroken(Property.STORED_SO_SERVED, message)
