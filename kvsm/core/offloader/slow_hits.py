"""Slow hits: expected to take at least as long to load as to compute (`load_only_if_faster`).

The caller measures loads and computation, and notes their times. Decisions read only the noted times and the
loads in flight, so a replay repeats them.
"""

from __future__ import annotations

from kvsm import events as ev
from kvsm.core.ledger.expected_times import LOADED_EVERY, MOST_TIME, expected
from kvsm.core.offloader.arguments import checks_request, integer
from kvsm.core.offloader.emitter import EventEmitter
from kvsm.errors import WrongArgument
from kvsm.states.request import FINISHED
from kvsm.states.words import STATE_MASK


def note_times(core: EventEmitter, start_us: int, block_ns: int, token_ns: int) -> None:
    """Note measured times: of a load without blocks (us), of each device block and of each token (ns).

    `TimesMeasured` defines them. Times that have not changed emit no event.
    """
    given = {"start_us": start_us, "block_ns": block_ns, "token_ns": token_ns}
    start_us, block_ns, token_ns = (_time(argument, value) for argument, value in given.items())
    if (start_us, block_ns, token_ns) != core.ledger.times:
        core.emit(ev.TimesMeasured, start_us, block_ns, token_ns)


def _time(argument: str, value: object) -> int:
    time = integer("note_times", argument, value)
    if not 0 <= time <= MOST_TIME:
        raise WrongArgument("note_times", argument, f"is {time}; it must be from 0 to {MOST_TIME}")
    return time


def is_slow_hit(core: EventEmitter, blocks: int, tokens: int) -> bool:
    """Whether loading `blocks` device blocks is expected to take at least as long as computing the `tokens`
    tokens of the hit. Emits nothing.

    False without `load_only_if_faster`, and before the first `note_times`.
    """
    if not core.config.load_only_if_faster:
        return False
    times = expected(core.ledger, _count("blocks", blocks), _count("tokens", tokens))
    return times is not None and times.is_slow


def _count(argument: str, value: object) -> int:
    count = integer("is_slow_hit", argument, value)
    if not 0 <= count < 1 << 48:
        raise WrongArgument("is_slow_hit", argument, f"is {count}; it must be from 0 to {(1 << 48) - 1}")
    return count


@checks_request
def declines(core: EventEmitter, request: str, blocks: int, tokens: int) -> bool:
    """Decide whether the request computes the tokens of its hit, because it is a slow hit (`is_slow_hit`).

    One in `LOADED_EVERY` slow hits is loaded nevertheless, to measure loads. The decision on a slow hit is an
    event (`SlowHitFound`), so call this once for each hit. If it returns True after a `match`, `release` the
    match.
    """
    entry = core.ledger.requests.get(request)
    if not is_slow_hit(core, blocks, tokens) or (entry is not None and entry.word & STATE_MASK == FINISHED):
        return False
    times = expected(core.ledger, blocks, tokens)
    assert times is not None
    if entry is None:
        core.emit(ev.RequestArrived, request)
    declined = core.ledger.declined_hits < LOADED_EVERY - 1
    core.emit(ev.SlowHitFound, request, blocks, times.blocks_ahead, tokens, *times[1:], declined)
    return declined
