"""An engine with two ranks, one of which never reports some of its copies. A test starts it as a process."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
from scenes import MAX_TOKENS, PROMPTS, run_session, search_path

from kvsm.vllm.tiny_model import tiny_model
from kvsm.vllm.trial import SHUTDOWN_S, Trial, environment, make_engine

ROUNDS = 3
"""The number of rounds of all prompts after the copies were given up."""

GIVEN_UP_S = 60.0


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """The results of the engine.

    tokens: the answers of each round; copies are lost in the first one.
    reset_at_once: whether the caches could be reset right after the first round.
    reset_after_s: the time until the caches could be reset (s).
    before, after: vLLM's counters and gauges at that time, and at the end. Series with labels are summed.
    """

    tokens: list[list[list[int]]]
    reset_at_once: bool
    reset_after_s: float
    before: dict[str, float]
    after: dict[str, float]


def run(kv_transfer: dict[str, Any], timeout_s: float = 300) -> Told:
    """Run such an engine with this `kv_transfer_config`."""
    trial = Trial(
        rounds=[],
        kv_transfer=kv_transfer,
        engine={"num_gpu_blocks_override": 40, "tensor_parallel_size": 2},
        in_process=False,
    )
    settings = {**environment(in_process=False, ranks=2), "PYTHONPATH": search_path()}
    with TemporaryDirectory(prefix="kvsm-lost-reports-") as directory:
        answer = Path(directory) / "told.json"
        program = f"import lost_reports; lost_reports.main({str(answer)!r})"
        run_session(["-c", program], msgspec.json.encode(trial), settings, timeout_s)
        return msgspec.json.decode(answer.read_bytes(), type=Told)


def main(answer: str) -> None:
    trial = msgspec.json.decode(sys.stdin.buffer.read(), type=Trial)
    with tiny_model(trial.model) as model:
        llm = make_engine(model, trial)
        tokens = [serve(llm), serve(llm)]
        at_once = bool(llm.reset_prefix_cache())
        began = time.monotonic()
        while not llm.reset_prefix_cache():
            assert time.monotonic() < began + GIVEN_UP_S, "the caches can never be reset"
            time.sleep(0.2)
        reset_after_s = time.monotonic() - began
        assert llm.reset_prefix_cache(reset_connector=True)
        before = metrics(llm)
        tokens += [serve(llm) for _ in range(ROUNDS)]
        told = Told(
            tokens=tokens,
            reset_at_once=at_once,
            reset_after_s=reset_after_s,
            before=before,
            after=metrics(llm),
        )
        llm.llm_engine.engine_core.shutdown(timeout=SHUTDOWN_S)
    Path(answer).write_bytes(msgspec.json.encode(told))


def serve(llm: Any) -> list[list[int]]:
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    asked = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    return [list(output.outputs[0].token_ids) for output in llm.generate(asked, greedy, use_tqdm=False)]


def metrics(llm: Any) -> dict[str, float]:
    found: dict[str, float] = {}
    for metric in llm.get_metrics():
        labels = ",".join(value for name, value in sorted(metric.labels.items()) if name == "outcome")
        name = f"{metric.name}{'{' + labels + '}' if labels else ''}"
        found[name] = found.get(name, 0.0) + float(getattr(metric, "value", 0))
    return found
