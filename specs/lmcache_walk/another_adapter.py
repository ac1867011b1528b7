"""Show that LMCache's multi-process connector serves KV of one LoRA adapter to a request for another adapter.

    PYTHONPATH=.:specs python -m lmcache_walk.another_adapter

A request with a prompt of 23 tokens is served, and the device's cache is reset. Then a second request arrives
whose first 20 tokens are the same. Each printed line says how the requests differ, how many tokens LMCache
delivers, and whether they are right.
"""

from __future__ import annotations

import atexit
import os

from kvsm.check.vllm_fuzz.shape import EngineShape
from kvsm.check.vllm_fuzz.vllm_world import VllmWorld
from kvsm.check.worlds.check_counts import taken_counts
from kvsm.errors import PropertyBroken
from kvsm.properties import Property

STEPS = 30
"""Steps that each of the two requests may take, so that LMCache's server has time to answer."""


def delivered(first: tuple[int, int], second: tuple[int, int]) -> str:
    """Serve two requests, each given as (salt, adapter), and return what the second one gets."""
    connector = "lmcache_walk.connector:Pickled"
    world = VllmWorld(EngineShape(connector=connector, host_blocks=40, adapters=2))
    taken_counts()
    try:
        for salt, adapter in (first, second):
            world.do(("reset", 0, 0))
            world.do(("arrive", 0, 20, 3, 2, salt, 0, adapter))
            for _ in range(STEPS):
                world.do(("settle",))
        world.check()
        verdict = "right"
    except PropertyBroken as broken:
        verdict = f"wrong: {broken.property}"
    tokens = sum(times for (tried, _), times in taken_counts().items() if tried is Property.CORRECT_BYTES)
    return f"{tokens} tokens, {verdict}"


def main() -> None:
    """Print a line for each pair of requests."""
    print("the same adapter:", delivered((0, 1), (0, 1)))
    print("another adapter:", delivered((0, 1), (0, 2)))
    print("an adapter, then none:", delivered((0, 1), (0, 0)))
    print("another salt:", delivered((1, 0), (0, 0)), flush=True)
    atexit._run_exitfuncs()  # end the server
    os._exit(0)  # threads of LMCache would keep the process alive


if __name__ == "__main__":
    main()
