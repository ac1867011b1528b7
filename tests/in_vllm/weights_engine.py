"""One vLLM engine, its resets and its versions of weights: what is cached of one prompt after each.

    python tests/in_vllm/weights_engine.py DIRECTORY

Prints a line of JSON for each answer: what happened before it, and how many tokens were cached.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from restarted_engine import BLOCK_BYTES, QUIET, answer, engine  # noqa: E402 (the path comes first)

from kvsm.vllm.tiny_model import ENVIRONMENT, LLAMA, tiny_model  # noqa: E402
from kvsm.vllm.trial import connector_config  # noqa: E402


def main(directory: str) -> None:
    """Ask one prompt again and again."""
    os.environ.update({**ENVIRONMENT, **QUIET})
    transfer = connector_config(
        cpu_bytes_to_use=100 * BLOCK_BYTES,
        pool_dir=directory,
        weights_version="v1",
        last_step="flush",
    )
    with tiny_model(LLAMA) as model:
        llm = engine(model, kv_transfer_config=transfer)
        ledger = llm.llm_engine.engine_core.engine_core.scheduler.connector._side._core.offloader.ledger

        def ask(after: str) -> None:
            cached = answer(llm, 0)["cached"]
            print(json.dumps({"after": after, "cached": cached, "weights": ledger.weights}))

        ask("start")
        llm.reset_prefix_cache()
        ask("reset of the device")
        llm.reset_prefix_cache(reset_connector=True)
        ask("reset")
        llm.llm_engine.set_weight_version("v2")
        llm.reset_prefix_cache()
        ask("new weights")
        llm.reset_prefix_cache()
        ask("new weights, again")


if __name__ == "__main__":
    main(sys.argv[1])
