"""A second family of small scopes, generated so that any three values of timing parameters meet.

    kvsm check serving --scope triples         all of them
    kvsm check serving --scope triples-017     one of them

Some faults need more than two values at once: a request is preempted, its prompt is computed in chunks, and
no request waits for a copy. These faults depend on timing: when a block is stored, when it is requested, and
whether device and host have room. So this family has only the parameters that decide about timing.
`TRIPLES` is a covering array of strength three (`kvsm.check.scopes.covering`).

Their values are those of `kvsm.check.scopes.serving_pairs`, without what makes a scope large: a third
request, layers of several kinds, a second worker. `OTHERWISE` has one value for each parameter that is left
out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvsm.check.explore.live_model import WorldScope
from kvsm.check.scopes.covering import covering
from kvsm.check.scopes.serving_pairs import BLOCK, LONG_OUTPUT, PARAMETERS, options_of, told
from kvsm.core.scheduler import LastStep, StoreMode

TIMING: Mapping[str, tuple[Any, ...]] = {
    "disturbance": (*PARAMETERS["disturbance"], "mistakes"),
    "defer_ticks": (0, 1),
    "outputs": PARAMETERS["outputs"],
    "prompt_end": PARAMETERS["prompt_end"],
    "second": ("the same", "shares a chunk", "next turn"),
    "chunk_tokens": (64, BLOCK),
    "references": PARAMETERS["references"],
    "device": PARAMETERS["device"],
    "slots": ("two", "enough"),
}
"""Parameter -> its values, as in `kvsm.check.scopes.serving_pairs`. The disturbance may happen once.

`mistakes` is in this family alone: the engine gives a load a block that a copy touches
(`kvsm.check.worlds.mistakes`).
"""

OTHERWISE: Mapping[str, Any] = {
    "groups": "full",
    "second_end": 0,
    "third": "none",
    "workers": 1,
    "store": StoreMode.EAGER,
    "blocks_per_chunk": 1,
    "prefix_cache": False,
    "asynchronous": False,
    "last_step": LastStep.KEEP_STEPPING,
    "router": False,
    "store_threshold": 1,
    "max_live_transfers": 8,
    "wish": "none",
    "lazy_target_blocks": 1,
}
"""Parameter -> its only value in this family."""


def excluded(pair: Mapping[str, Any]) -> bool:
    """Whether to leave out this pair of values: it makes a scope large, as in `serving_pairs`."""
    return pair.get("outputs") == LONG_OUTPUT and pair.get("second") == "next turn"


TRIPLES: Mapping[str, WorldScope] = {
    name: WorldScope(name, options_of({**OTHERWISE, **row, "another": row["disturbance"]}), says=told(row))
    for name, row in (
        (f"triples-{n:03}", row) for n, row in enumerate(covering(TIMING, excluded, strength=3), 1)
    )
}
