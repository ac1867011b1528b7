"""Each answer of the scheduler is the longest hit that device and host can serve at that time.

The small engine compares each answer (`kvsm.check.worlds.longest_hit`) in all walks. These walks add shapes
that others do not draw: layers of several block sizes, windows over several blocks, states, chunks of three
blocks, requests that load little.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from random import Random
from typing import Any

import pytest
from museum.other_engines import second_thoughts
from scheduler_traffic import FULL, MAMBA, SLIDING, WIDE

from examples import examples
from kvsm import events as ev
from kvsm.check.walks.walk import walk
from kvsm.check.worlds import serving_world
from kvsm.check.worlds.longest_hit import Prompt, check_device_hit, tokens_read, watch_answers
from kvsm.check.worlds.serving_world import Budgets, RequestSpec
from kvsm.check.worlds.small_engine import SmallEngine
from kvsm.check.worlds.small_request import HASH_TOKENS, SmallRequest
from kvsm.check.worlds.wider_serving import WiderOptions, WiderServing
from kvsm.core.offloader import Offloader
from kvsm.core.policies import POLICIES
from kvsm.core.scheduler import GroupKind, KVCacheGroup, LastStep, OffloadScheduler, hits, scheduler
from kvsm.core.scheduler.hits import HitSearch
from kvsm.core.scheduler.tracked import TrackedRequest
from kvsm.errors import PropertyBroken
from kvsm.properties import Property
from kvsm.states.request import RequestState

Drawn = Callable[[Random], WiderServing]
Plant = Callable[[pytest.MonkeyPatch], None]

DRAFTER = KVCacheGroup(HASH_TOKENS, drafter=True)
LONG_WINDOW = KVCacheGroup(HASH_TOKENS, GroupKind.SLIDING_WINDOW, window=3 * HASH_TOKENS + 2)
WIDE_WINDOW = KVCacheGroup(2 * HASH_TOKENS, GroupKind.SLIDING_WINDOW, window=HASH_TOKENS + 1)
ONE_TOKEN = KVCacheGroup(HASH_TOKENS, GroupKind.SLIDING_WINDOW, window=1)
"""Layers that look at no earlier token need nothing for a hit."""
CHUNKED = KVCacheGroup(HASH_TOKENS, GroupKind.CHUNKED_LOCAL, window=3 * HASH_TOKENS)
CROSSED_CHUNKS = KVCacheGroup(HASH_TOKENS, GroupKind.CHUNKED_LOCAL, window=2 * HASH_TOKENS + 1)
"""A chunk of attention begins within a block."""
WIDE_CHUNKED = KVCacheGroup(2 * HASH_TOKENS, GroupKind.CHUNKED_LOCAL, window=HASH_TOKENS)
"""And in the middle of each block."""
ATTENTION = (
    (FULL,),
    (WIDE,),
    (SLIDING,),
    (LONG_WINDOW,),
    (FULL, WIDE),
    (FULL, SLIDING),
    (WIDE, SLIDING, FULL),
    (FULL, WIDE_WINDOW),
    (SLIDING, LONG_WINDOW),
    (FULL, DRAFTER),
    (FULL, ONE_TOKEN),
    (FULL, SLIDING, CHUNKED),
    (FULL, WIDE_CHUNKED),
    (FULL, CHUNKED),
    (WIDE, SLIDING, CROSSED_CHUNKS),
)
STATES = ((MAMBA,), (FULL, MAMBA), (WIDE, MAMBA), (FULL, SLIDING, MAMBA))


def options_of(random: Random, groups: Sequence[KVCacheGroup]) -> dict[str, Any]:
    longest = random.randint(3, 8) * HASH_TOKENS
    drafts = any(group.drafter for group in groups)
    states = any(group.kind is GroupKind.MAMBA for group in groups)
    return {
        "requests": tuple([request_of(random, longest) for _ in range(random.randint(10, 40))]),
        "device_blocks": (longest // HASH_TOKENS + 6) * len(groups) + random.randint(0, 12),
        "slots": random.randint(2, 8 * len(groups)),
        "workers": random.choice((1, 1, 2)),
        "groups": groups,
        "last_step": random.choice(tuple(LastStep)),
        # A state that is handed over is held while it is copied.
        "references": states or random.random() < 0.7,
        "prefix_cache": random.random() < 0.6,
        "asynchronous": not states and random.random() < 0.3,
        "drafts": random.randint(1, HASH_TOKENS) if drafts else 0,
        "chunk_tokens": HASH_TOKENS if states else random.choice((3, HASH_TOKENS, 64)),
        "policy": random.choice(tuple(POLICIES)),
        "blocks_per_chunk": 1 if states else random.choice((1, 1, 2, 3)),
        "store_threshold": random.choice((1, 1, 2)),
        "max_live_transfers": random.randint(2, 8),
        "defer_ticks": random.choice((0, 1, 3)),
        "transfer_ticks": random.choice((0, 0, 6)),
        "budgets": Budgets(
            failures=random.choice((0, 10)),
            preemptions=random.choice((10, 30)),
            aborts=random.choice((0, 10)),
            resets=random.choice((0, 2)),
            partial=random.choice((0, 20)),
            waits=random.choice((0, 20)),
            crashes=random.choice((0, 0, 2)),
            losses=random.choice((0, 0, 3)),
        ),
    }


def request_of(random: Random, longest: int) -> RequestSpec:
    """Return a request with a prefix of one of two prompts, which share some blocks."""
    shared = random.choice((0, 1, 2, 4)) * HASH_TOKENS
    prompt = [*range(shared), *range(100 * random.randint(1, 2), 300)]
    length = random.choice(
        (random.randint(1, longest), random.randint(1, longest // HASH_TOKENS) * HASH_TOKENS)
    )
    parameters: Mapping[str, Any] | None = None
    if random.random() < 0.2:
        parameters = {"max_load_tokens": random.randint(0, longest)}
    return RequestSpec(
        tuple(prompt[:length]), random.randint(1, 9), parameters, skip_reading=random.random() < 0.1
    )


def attention(random: Random) -> WiderServing:
    return WiderServing(WiderOptions(**options_of(random, random.choice(ATTENTION))))


def states(random: Random) -> WiderServing:
    return WiderServing(WiderOptions(**options_of(random, random.choice(STATES))))


DRAWN = attention, states


@pytest.mark.parametrize("drawn", DRAWN, ids=lambda one: one.__name__)
def test_each_answer_is_the_longest(drawn: Drawn) -> None:
    result = walk(drawn, 5, runs=examples(60))
    assert result.failure is None, result.failure


# Defects that serve a shorter hit. No other property detects them.


def last_token_counts_twice(patch: pytest.MonkeyPatch) -> None:
    limit = hits.hit_limit
    patch.setattr(scheduler, "hit_limit", lambda tokens, *more: limit(tokens - 1, *more))


def full_attention_gives_up_a_block_at_a_hole(patch: pytest.MonkeyPatch) -> None:
    missing = hits._first_missing

    def earlier(keys: Sequence[bytes], first: int, last: int, has: hits.Has) -> int:
        found = missing(keys, first, last, has)
        return found if found == last else max(first, found - 1)

    patch.setattr(hits, "_first_missing", earlier)
    patch.setattr(TrackedRequest, "find_prefix", lambda *_: None)


def windows_need_a_block_more(patch: pytest.MonkeyPatch) -> None:
    needed = KVCacheGroup.first_needed_token
    patch.setattr(
        KVCacheGroup,
        "first_needed_token",
        lambda group, end: max(0, needed(group, end) - (group.block_tokens if group.window else 0)),
    )


def groups_that_disagree_serve_nothing(patch: pytest.MonkeyPatch) -> None:
    served = HitSearch._served

    def all_or_nothing(search: HitSearch, index: int, end: int, *more: Any) -> int:
        found = served(search, index, end, *more)
        return found if found == end or not index else search._local

    patch.setattr(HitSearch, "_served", all_or_nothing)


def hits_end_with_a_chunk(patch: pytest.MonkeyPatch) -> None:
    longest = HitSearch.longest_hit

    def whole_chunks(search: HitSearch, limit: int, *more: Any) -> int:
        tokens = search._chunk_tokens[0]
        return longest(search, limit - limit % tokens, *more)

    patch.setattr(HitSearch, "longest_hit", whole_chunks)


def a_state_is_looked_for_at_one_end(patch: pytest.MonkeyPatch) -> None:
    served = HitSearch._served

    def once(search: HitSearch, index: int, end: int, *more: Any) -> int:
        found = served(search, index, end, *more)
        is_state = search._groups[index].kind is GroupKind.MAMBA
        return search._local if is_state and found != end else found

    patch.setattr(HitSearch, "_served", once)


def preempted_requests_compute(patch: pytest.MonkeyPatch) -> None:
    may_load = OffloadScheduler._may_load
    patch.setattr(
        OffloadScheduler,
        "_may_load",
        lambda self, one, limit: not one.admitted and may_load(self, one, limit),
    )


def preempted_requests_do_not_wait_again(patch: pytest.MonkeyPatch) -> None:
    """Restore an old behavior of kvsm while a load of the request's earlier blocks is in flight."""

    def preempt(core: Offloader, name: str) -> None:
        entry = core.ledger.requests.get(name)
        if entry is not None and (
            entry.offered or entry.state not in (RequestState.NEW, RequestState.PREEMPTED)
        ):
            core.emit(ev.RequestPreempted, name)

    patch.setattr(Offloader, "preempt", preempt)


@pytest.mark.parametrize(
    ("plant", "drawn", "seed"),
    [
        (last_token_counts_twice, attention, 2),
        (full_attention_gives_up_a_block_at_a_hole, attention, 5),
        (windows_need_a_block_more, attention, 5),
        (groups_that_disagree_serve_nothing, attention, 5),
        (hits_end_with_a_chunk, attention, 6),
        (a_state_is_looked_for_at_one_end, states, 5),
        (preempted_requests_compute, attention, 5),
        (preempted_requests_do_not_wait_again, second_thoughts, 5),
    ],
    ids=lambda one: getattr(one, "__name__", None),
)
def test_a_shorter_hit_is_seen(
    plant: Plant, drawn: Drawn, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seeds find each defect early."""
    plant(monkeypatch)
    # At rest a next process would be served less, too.
    monkeypatch.setattr(serving_world, "unserved", lambda _: {})
    failure = walk(drawn, seed, runs=60).failure
    assert failure is not None
    assert failure.finding.property is Property.STORED_SO_SERVED
    assert "the longest hit" in failure.finding.message


def test_the_longest_hit_by_hand() -> None:
    """The token at 8 needs tokens 0 to 7 of full attention, 3 to 7 of a window of 6, and 7 of a state."""
    assert tokens_read(FULL, 8) == range(8)
    assert tokens_read(SLIDING, 8) == range(3, 8)
    assert tokens_read(MAMBA, 8) == range(7, 8)
    cells = [b"%d" % token for token in range(13)]
    prompt = Prompt((FULL, SLIDING), cells)
    held = {
        cells[end - 1] + bytes([0, 0, 0, group]) for end, group in ((4, 0), (8, 0), (12, 0), (8, 1), (12, 1))
    }
    assert prompt.longest_hit(0, 100, held.__contains__) == 12
    held.remove(cells[7] + bytes([0, 0, 0, 1]))
    assert prompt.longest_hit(0, 100, held.__contains__) == 0
    assert prompt.longest_hit(8, 100, held.__contains__) == 12
    assert prompt.longest_hit(8, 3, held.__contains__) == 8


def test_a_chunk_that_ends_with_the_prompt_has_a_key() -> None:
    """A hit may end within it."""
    cells = [b"%d" % token for token in range(8)]
    key = cells[7] + bytes([0, 0, 0, 0])
    assert Prompt((FULL,), cells, chunk=2).longest_hit(0, 100, {key}.__contains__) == HASH_TOKENS


def test_the_first_token_after_the_device_hit_is_read() -> None:
    """It is all that a state reads."""
    cells = [b"%d" % token for token in range(9)]
    assert Prompt((MAMBA,), cells).longest_hit(7, 100, lambda _: False) == 7


@pytest.mark.parametrize(
    ("local", "breaks"), [(4, Property.STORED_SO_SERVED), (8, None), (12, Property.MATCH_HOLDS)]
)
def test_a_device_hit_that_is_not_the_longest_is_seen(local: int, breaks: Property | None) -> None:
    engine = SmallEngine((FULL,))
    for name in ("first", "second"):
        engine.arrive(SmallRequest(name, range(9), 1))
        if name == "first":
            engine.run()
    with nullcontext() if breaks is None else pytest.raises(PropertyBroken) as caught:
        check_device_hit(engine, engine.requests["second"], local)
    assert caught is None or caught.value.property is breaks


def test_a_shorter_answer_that_is_watched_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SmallEngine((FULL,), prefix_cache=False)
    engine.arrive(SmallRequest("first", range(5), 1))
    engine.run()
    watch_answers(engine.scheduler)
    monkeypatch.setattr(OffloadScheduler, "_may_load", lambda *_: False)
    with pytest.raises(PropertyBroken) as caught:
        engine.scheduler.get_num_new_matched_tokens(SmallRequest("second", range(5)), 0)
    assert caught.value.property is Property.STORED_SO_SERVED
