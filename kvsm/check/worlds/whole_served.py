"""Stored, so served (S19): blocks that the whole world has copied to its disk can be fetched again.

A process that begins with an empty host, after a kill at rest, is asked for prompts of the requests so far.
Each is served as far as the disk has it.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvsm.check.worlds.check_counts import count_case
from kvsm.check.worlds.longest_hit import Prompt
from kvsm.check.worlds.small_request import SmallRequest
from kvsm.check.worlds.whole_engine import WholeEngine
from kvsm.core.scheduler import StepOutput
from kvsm.errors import PropertyBroken
from kvsm.properties import Property

_MOST_PROMPTS = 4
"""The most prompts to ask for at one rest. Each takes as long as several actions."""

_MOST_STEPS = 50


def check_served_from_disk(engine: WholeEngine, requests: Iterable[SmallRequest]) -> None:
    """Check the engine of a next process. requests: whose prompts to ask for. Raises `PropertyBroken`.

    Excepted are hits with a damaged block, whose copies fail, and hits that the host has no room for.
    """
    asked = set[bytes]()
    for request in requests:
        end = _servable(engine, request)
        if end and request.cells[end - 1] not in asked and len(asked) < _MOST_PROMPTS:
            asked.add(request.cells[end - 1])
            count_case(Property.STORED_SO_SERVED, "prompts that the disk has after a kill")
            _check_served(engine, request, end)


def _servable(engine: WholeEngine, request: SmallRequest) -> int:
    """The end of the longest hit of this prompt that the disk has (tokens); 0 if there is none."""
    index, chunk = engine.disk.core.ledger.index, engine.core.config.blocks_per_chunk
    prompt = Prompt(engine.config.groups, request.cells, chunk)
    end = prompt.longest_hit(0, len(request.cells), index.__contains__)
    keys = {key for key in prompt.keys_read(0, end) if key is not None}
    fits = 0 < len(keys) <= engine.core.config.host_blocks
    return end if fits and not any(map(engine.disk.is_damaged, keys)) else 0


def _check_served(engine: WholeEngine, request: SmallRequest, end: int) -> None:
    asking = SmallRequest(
        f"after {request.request_id}",
        request.all_token_ids,
        parameters={"max_load_tokens": end},
        extras=request.extras,
    )
    found = engine.ask(asking)
    for _ in range(_MOST_STEPS):
        if found is not None:
            break
        engine.disk.plan()
        for transfer, copy in list(engine.disk.copies.items()):
            for rank in sorted(copy.left):
                engine.disk.carry_out(transfer, rank)
        while engine.disk.reports:
            engine.hand_on_disk(0)
        engine.scheduler.build_connector_meta(StepOutput())
        found = engine.ask(asking)
    engine.scheduler.request_finished(asking, [])
    if found != end:
        message = f"the disk has {end} tokens of a prompt after a kill, but {found} are served"
        raise PropertyBroken(Property.STORED_SO_SERVED, message)
