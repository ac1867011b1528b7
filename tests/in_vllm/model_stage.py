"""Engines of the models of `model_zoo`: their answers, and the contents of their blocks.

They run one after the other in one process, because Python and vLLM take longer to start than an engine. A
model is served in three ways:

- without kvsm, and without any hit;
- without kvsm, with hits of vLLM's own prefix cache;
- with kvsm. The device forgets everything after each request, so every hit is loaded from the host.

The second and the third way compute the same tokens in the same steps. So every computed bit must be equal.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, TimeoutError
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext
from multiprocessing import get_context
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any, NamedTuple
from unittest.mock import patch

from block_contents import Contents, Distances, equal_bits
from model_zoo import TinyModel

from kvsm.vllm.tiny_model import SETTINGS, VOCABULARY
from kvsm.vllm.trial import connector_config, environment

MAX_TOKENS = 8
MOST_SECONDS = 200
"""The time limit for the requests of one call, which take less than a second. Steps are no measure: an engine
that waits for a copy runs a thousand steps a second."""
HOST_BYTES = 1 << 26
ENGINE: Mapping[str, Any] = {
    "num_gpu_blocks_override": 160,
    "max_num_batched_tokens": 128,
    "max_num_seqs": 8,
    "max_model_len": 384,
    "enable_prefix_caching": True,
}
"""Without kvsm, the device must keep every block that is ever computed."""

TIMEOUT_S = 900
"""The time limit for all engines of one model. They take about 15 s, but other work may slow them."""


def conversations() -> list[list[int]]:
    """Return the prompts of two conversations in turn. Each prompt extends the last; the end is repeated."""
    random = Random("conversations")
    prompts = []
    for lengths in ((100, 183, 258, 258), (131, 205, 300, 300)):
        tokens = [random.randrange(6, VOCABULARY) for _ in range(max(lengths))]
        prompts.append([tokens[:length] for length in lengths])
    return [prompt for turn in zip(*prompts) for prompt in turn]


class Answer(NamedTuple):
    """The answer to a request. cached: tokens of its prompt that were not computed."""

    tokens: list[int]
    logprobs: list[float]
    cached: int


class ModelOutcome(NamedTuple):
    """The results of the engines of a model.

    without_hits, device_hits: the answers without kvsm.
    host_hits: the answers with kvsm.
    crowd: the answers with kvsm to all prompts at once, on a device that has blocks for two of them.
    groups: the kinds of the KV cache groups.
    log: the event log of the engine with kvsm.
    compared: the number of blocks whose key was in both engines, with kvsm and without.
    strange: the keys of compared blocks whose bits were not equal.
    distances: distances of the states of mamba layers, without kvsm.
    """

    without_hits: list[Answer]
    device_hits: list[Answer]
    host_hits: list[Answer]
    crowd: list[Answer]
    groups: list[str]
    log: Path
    compared: int
    strange: list[str]
    distances: Distances


# In the caller's process.


class Stage:
    """A process in which engines run. If it dies, the next scene gets a new one."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None

    def play(self, scene: Callable[..., Any], *given: Any) -> Any:
        """Return the function's result in the process. Raises its exception, or `BrokenProcessPool`."""
        if self._pool is None:
            self._pool = ProcessPoolExecutor(1, get_context("spawn"))
            # Keys must be equal in all engines, so the first hash of a prefix may not be random.
            with patch.dict(os.environ, {**environment(), "PYTHONHASHSEED": "0"}):
                self._pool.submit(int).result(TIMEOUT_S)
        try:
            return self._pool.submit(scene, *given).result(TIMEOUT_S)
        except (BrokenProcessPool, TimeoutError):
            self.close()
            raise

    def close(self) -> None:
        """End the process, whatever it does."""
        pool, self._pool = self._pool, None
        if pool is not None:
            for process in [*(pool._processes or {}).values()]:
                process.terminate()
            pool.shutdown(cancel_futures=True)


# In the process of the engines.


@contextmanager
def engine_of(
    model: TinyModel, kv_transfer: Mapping[str, Any] | None, directory: str | None = None, **engine: Any
) -> Iterator[Any]:
    """Yield vLLM's `LLM` with this model, during the `with` block.

    directory: the directory of the model's files; its configuration is written there.
    """
    from random_weights import RANDOM_WEIGHTS
    from vllm import LLM
    from vllm.distributed import destroy_model_parallel
    from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_shutdown
    from vllm.model_executor.models.registry import ModelRegistry

    (architecture,) = model.config["architectures"]
    # vLLM looks at a model that is not imported in a process of its own, which takes 10 s.
    ModelRegistry.register_model(architecture, ModelRegistry.models[architecture].load_model_cls())
    settings = {
        **SETTINGS,
        **ENGINE,
        "dtype": model.dtype,
        "load_format": RANDOM_WEIGHTS,
        **model.engine,
        **engine,
    }
    with TemporaryDirectory(prefix="kvsm-model-") as made:
        path = Path(directory or made)
        (path / "config.json").write_text(json.dumps({**model.config, "torch_dtype": model.dtype}))
        try:
            with _ban_lifted() if model.lifts_ban else nullcontext():
                llm = LLM(str(path), kv_transfer_config=kv_transfer, **settings)
            yield llm
            llm.llm_engine.engine_core.shutdown()
        finally:
            llm = None
            gc.collect()
            # vLLM makes the groups of ranks once in a process, and a model with experts needs one more.
            destroy_model_parallel()
            # An engine that did not start leaves its worker's connector, which the next one would take.
            ensure_kv_transfer_shutdown()


@contextmanager
def _ban_lifted() -> Iterator[None]:
    """vLLM's CPU platform leaves prefix cache and chunks as they are configured, even for MLA."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    check = platform.check_and_update_config

    def kept(_: type, config: Any) -> None:
        scheduler, cache = config.scheduler_config, config.cache_config
        before = (
            scheduler.enable_chunked_prefill,
            cache.enable_prefix_caching,
            scheduler.max_num_batched_tokens,
        )
        check(config)
        scheduler.enable_chunked_prefill, cache.enable_prefix_caching, scheduler.max_num_batched_tokens = (
            before
        )

    with patch.object(platform, "check_and_update_config", classmethod(kept)):
        yield


class Server:
    """Serves prompts with an engine, step by step.

    contents: reads the contents of the engine's blocks; None: they are not read.
    """

    def __init__(self, llm: Any, contents: Contents | None = None) -> None:
        self.engine = llm.llm_engine
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.contents = contents
        self._asked = 0

    def ask(self, prompts: Sequence[Any], lora: Any = None) -> list[Answer]:
        """Serve these prompts together, and return the answers when no copy is in flight any more."""
        from vllm import SamplingParams

        greedy = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=0)
        names = []
        for prompt in prompts:
            names.append(str(self._asked))
            self._asked += 1
            given = {"prompt_token_ids": prompt} if isinstance(prompt, list) else prompt
            self.engine.add_request(names[-1], given, greedy, lora_request=lora)
        answers: dict[str, Answer] = {}
        deadline = monotonic() + MOST_SECONDS
        while monotonic() < deadline:
            if not self.scheduler.has_requests():
                return [answers[name] for name in names]
            for output in self.engine.step():
                if output.finished:
                    answers[output.request_id] = _answer(output)
            if self.contents is not None:
                self.contents.look()
        raise AssertionError(f"after {MOST_SECONDS} s there is still work: {self.scheduler.requests}")

    def converse(self, forget: bool) -> list[Answer]:
        """Return the answers to all turns, one by one. forget: empty the device's cache after each turn."""
        answers = []
        for prompt in conversations():
            answers += self.ask([prompt])
            if forget:
                self.forget()
        return answers

    def forget(self) -> None:
        """Empty vLLM's own prefix cache."""
        assert self.engine.reset_prefix_cache(), "blocks are held, although nothing is in flight"


def _answer(output: Any) -> Answer:
    (ended,) = output.outputs
    chosen = [found[token].logprob for token, found in zip(ended.token_ids, ended.logprobs)]
    return Answer(list(ended.token_ids), chosen, output.num_cached_tokens or 0)


def serve_model(model: TinyModel, directory: Path) -> ModelOutcome:
    """Serve this model in all ways. directory: the directory of its event log."""
    with engine_of(model, None) as llm:
        server = Server(llm, fresh := Contents(llm, computes_again=True))
        without_hits = server.converse(forget=True)
        server.contents = kept = Contents(llm)
        device_hits = server.converse(forget=False)
        groups = [type(group.kv_cache_spec).__name__ for group in kept.groups]
    few = sum(2 + 512 // group.kv_cache_spec.block_size for group in kept.groups)
    transfer = connector_config(cpu_bytes_to_use=HOST_BYTES, event_log=str(directory / "logs"))
    with engine_of(model, transfer, num_gpu_blocks_override=few) as llm:
        server = Server(llm, loaded := Contents(llm))
        host_hits = server.converse(forget=True)
        server.contents = None
        crowd = server.ask(conversations())
    both = [(key, found) for key, found in loaded.of.items() if key in kept.of]
    (log,) = (directory / "logs").iterdir()
    return ModelOutcome(
        without_hits,
        device_hits,
        host_hits,
        crowd,
        groups,
        log,
        len(both),
        [key.hex() for key, found in both if not equal_bits(found, kept.of[key])],
        kept.distances(fresh),
    )


def refusal(model: TinyModel) -> str:
    """Return the error of an engine with this model and kvsm if it does not start; empty if it starts."""
    try:
        with engine_of(model, connector_config(cpu_bytes_to_use=HOST_BYTES)):
            return ""
    except Exception as error:
        return f"{type(error).__name__}: {error}"
