"""`kvsm vllm-fuzz` compares what kvsm has on the host with its keys, also if nobody reads it."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvsm.check.vllm_fuzz.shape import EngineShape
from kvsm.check.vllm_fuzz.stored_bytes import cores_of
from kvsm.check.vllm_fuzz.vllm_world import VllmWorld
from kvsm.core.ledger import readable_keys
from kvsm.errors import PropertyBroken
from kvsm.properties import Property


def test_a_wrong_byte_on_the_host_is_found_although_nobody_reads_it() -> None:
    """Correct bytes (S15), in the second of two groups."""
    world = VllmWorld(EngineShape(connector="KvsmConnector", windows=True))
    assert world.do(("arrive", 0, 8, 1, 2, 0))
    for _ in range(8):
        world.do(("settle",))
    world.check()
    (core,) = cores_of(world.scheduler.connector)
    of_windows = [key for key in readable_keys(core.ledger) if key.endswith(b"\1")]
    words = world.ranks[0].host_words(core.ledger.index[of_windows[0]])
    words[1] += 1
    with pytest.raises(PropertyBroken, match="and does not hold block 0 of request r0 in group 1") as caught:
        world.check()
    assert caught.value.property is Property.CORRECT_BYTES
