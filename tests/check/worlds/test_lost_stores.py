"""The check for lost stores: which refusals and which requests excuse a block that is not on the host."""

from __future__ import annotations

from kvsm.check.worlds.lost_stores import check_kept, refused_without_owner
from kvsm.check.worlds.small_engine import SmallEngine
from kvsm.check.worlds.small_request import SmallRequest
from kvsm.events import SkipReason, StoreSkipped
from kvsm.properties import Property


def skip(key: bytes, reason: SkipReason, owner: str = "") -> StoreSkipped:
    owners = ((owner, 1),) if owner else ()
    return StoreSkipped(1, 0, 0, owners, (key,), reason)


def test_each_key_that_a_policy_refused_in_a_lazy_store_is_excused() -> None:
    log = [
        skip(b"first", SkipReason.NOT_ADMITTED),
        skip(b"of a request", SkipReason.NOT_ADMITTED, "r"),
        skip(b"no room", SkipReason.POOL_FULL),
        skip(b"last", SkipReason.NOT_ADMITTED),
    ]
    assert refused_without_owner(log) == {b"first", b"last"}


def test_a_request_that_has_no_blocks_any_more_keeps_none() -> None:
    """It was preempted, and the engine still counts its tokens."""
    engine = SmallEngine()
    request = SmallRequest("r", range(8))
    request.num_computed_tokens = 8
    check_kept(engine, request, frozenset(), (), Property.STORED_ONCE)
