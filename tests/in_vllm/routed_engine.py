"""An engine that publishes its KV events, and does what it is asked over a pipe.

    python tests/in_vllm/routed_engine.py FILE_DESCRIPTOR

The first message is the `Trial` of the engine. Each later one is a command and its argument.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

from kvsm.vllm.tiny_model import BLOCK_TOKENS, tiny_model  # noqa: E402 (the path comes first)
from kvsm.vllm.trial import Trial, make_engine  # noqa: E402


class RoutedEngine:
    """The commands. Block hashes are integers, as in the events."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._core = llm.llm_engine.engine_core.engine_core

    def serve(self, prompts: Sequence[list[int]]) -> list[int]:
        """Answer prompts one after the other. Return how many tokens of each were cached."""
        from vllm import SamplingParams

        greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        cached = []
        for prompt in prompts:
            [output] = self._llm.generate([{"prompt_token_ids": prompt}], greedy, use_tqdm=False)
            cached.append(output.num_cached_tokens or 0)
        return cached

    def reset(self, with_host: bool) -> bool:
        return bool(self._llm.reset_prefix_cache(reset_connector=with_host))

    def hashes(self, prompt: Sequence[int]) -> list[int]:
        """Return the block hashes of a prompt, as a router computes them."""
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import hash_block_tokens, maybe_convert_block_hash

        hash_function = get_hash_fn_by_name(self._core.vllm_config.cache_config.prefix_caching_hash_algo)
        last, found = None, []
        for end in range(BLOCK_TOKENS, len(prompt) + 1, BLOCK_TOKENS):
            last = hash_block_tokens(hash_function, last, prompt[end - BLOCK_TOKENS : end], None)
            found.append(int(maybe_convert_block_hash(last)))
        return found

    def device(self, _: Any) -> list[int]:
        """Return the block hashes in the prefix cache of the device."""
        from vllm.v1.core.kv_cache_utils import get_block_hash, maybe_convert_block_hash

        pool = self._core.scheduler.kv_cache_manager.block_pool
        keys: Mapping[Any, Any] = pool.cached_block_hash_to_block._cache
        return [int(maybe_convert_block_hash(get_block_hash(key))) for key in keys]


def main(connection: Connection) -> None:
    """Do what is asked until the caller closes its end."""
    trial = msgspec.json.decode(connection.recv_bytes(), type=Trial)
    with tiny_model(trial.model) as model:
        llm = make_engine(model, trial)
        engine = RoutedEngine(llm)
        connection.send_bytes(b"true")
        with suppress(EOFError):
            while True:
                command, argument = json.loads(connection.recv_bytes())
                connection.send_bytes(json.dumps(getattr(engine, command)(argument)).encode())
        llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))
