"""Nothing is stored in vain (S19): at rest, a next process serves each block that it takes over."""

from __future__ import annotations

import pytest

from kvsm.check.walks.targets import draw_case
from kvsm.check.walks.walk import walk
from kvsm.check.worlds.check_counts import taken_counts
from kvsm.check.worlds.served_again import unserved
from kvsm.check.worlds.small_engine import SmallEngine
from kvsm.check.worlds.small_request import HASH_TOKENS, SmallRequest
from kvsm.core.scheduler import GroupKind, KVCacheGroup, OffloadScheduler
from kvsm.errors import PropertyBroken
from kvsm.properties import Property

FULL = KVCacheGroup(HASH_TOKENS)
SLIDING = KVCacheGroup(HASH_TOKENS, GroupKind.SLIDING_WINDOW, window=HASH_TOKENS + 1)


def at_rest(*groups: KVCacheGroup, tokens: int = 13) -> SmallEngine:
    engine = SmallEngine(groups)
    engine.arrive(SmallRequest("stored", range(tokens)))
    engine.run()
    return engine


def test_a_next_process_serves_all_that_is_stored() -> None:
    assert unserved(at_rest(FULL)) == {}


def test_a_block_that_no_prompt_reads_is_named_with_the_reason() -> None:
    """The host has lost the first block of full attention, so it serves no prompt."""
    engine = at_rest(FULL, tokens=9)
    first, second = engine.core.ledger.index
    engine.core.ledger.index.pop(first)
    assert unserved(engine) == {second: "1 other chunks of a prompt are not stored"}


def no_request_loads_after_a_restart(patch: pytest.MonkeyPatch) -> None:
    may_load = OffloadScheduler._may_load
    patch.setattr(
        OffloadScheduler,
        "_may_load",
        lambda self, one, limit: self.offloader.ledger.life < 2 and may_load(self, one, limit),
    )


@pytest.mark.parametrize("tokens", [5, 13])
@pytest.mark.parametrize("groups", [(FULL,), (FULL, SLIDING)])
def test_what_a_next_process_does_not_serve_is_found(
    groups: tuple[KVCacheGroup, ...], tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a prompt of a single block."""
    engine = at_rest(*groups, tokens=tokens)
    unserved(engine)
    no_request_loads_after_a_restart(monkeypatch)
    with pytest.raises(PropertyBroken, match="a next process serves 0 tokens") as broken:
        unserved(engine)
    assert broken.value.property is Property.STORED_SO_SERVED


@pytest.mark.parametrize("target", ["serving", "layers"])
def test_the_walks_ask_next_processes(target: str) -> None:
    taken_counts()
    assert walk(lambda random: draw_case(target, random).make(), 1, runs=8).failure is None
    assert taken_counts()[Property.STORED_SO_SERVED, "blocks that a next process serves"] > 8
