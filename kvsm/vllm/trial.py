"""One vLLM engine in a process of its own: it serves prompts, and tells what came out.

    outcome = run_trial(Trial(rounds=[prompts], kv_transfer=connector_config(cpu_bytes_to_use=1 << 26)))

Two engines in one process would share what vLLM keeps for a process; and one that dies would take the caller
with it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from kvsm.errors import KvsmError
from kvsm.vllm.tiny_model import ENVIRONMENT, LLAMA, SETTINGS, tiny_model

Prompt = list[int]


SHUTDOWN_S = 60.0


class TrialFailed(KvsmError):
    """An engine that did not come to its end; the message ends with the last lines that it said.

    Attributes: `said` (all of it: of several processes, the last lines may be anybody's).
    """

    def __init__(self, reason: str, said: str = "") -> None:
        self.said = said
        super().__init__("\n".join([reason, *said.splitlines()[-40:]]))


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """rounds: prompts that are served together, round after round. kv_transfer: vLLM's `kv_transfer_config`;
    None: no offload. engine: more arguments of vLLM's `LLM`. in_process: whether engine and caller of `LLM`
    are one process; not so, the engine steps on when no request is left."""

    rounds: list[list[Prompt]]
    max_tokens: int = 8
    kv_transfer: dict[str, Any] | None = None
    engine: dict[str, Any] = {}
    model: dict[str, Any] = msgspec.field(default_factory=lambda: dict(LLAMA))
    in_process: bool = True


class TrialOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """tokens: of each request, in the order of the prompts. cached_tokens: of each, how many were not
    computed. seconds: of each round. metrics: vLLM's counters and gauges that are not 0, with their labels in
    braces."""

    tokens: list[list[int]]
    cached_tokens: list[int]
    prompt_tokens: int
    seconds: list[float]
    metrics: dict[str, float]

    def metric(self, name: str, label: str = "") -> float:
        """Sum of all series of this name, or of those with this label value."""
        return sum(
            value
            for series, value in self.metrics.items()
            if series.partition("{")[0] == name and label in series
        )


def connector_config(load_failure: str = "recompute", **options: Any) -> dict[str, Any]:
    """vLLM's configuration for `KvsmConnector` with these options."""
    return {
        "kv_connector": "KvsmConnector",
        "kv_connector_module_path": "kvsm.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": load_failure,
        "kv_connector_extra_config": options,
    }


def spec_config(name: str = "KvsmSpec", **options: Any) -> dict[str, Any]:
    """vLLM's configuration for its OffloadingConnector with a spec of kvsm."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"spec_name": name, "spec_module_path": "kvsm.vllm", **options},
    }


def run_trial(trial: Trial, timeout_s: float = 300) -> TrialOutcome:
    """Raises `TrialFailed`."""
    with TemporaryDirectory(prefix="kvsm-trial-") as directory:
        answer = Path(directory) / "outcome.json"
        try:
            done = run_session(
                [sys.executable, "-m", "kvsm.vllm.trial", str(answer)],
                msgspec.json.encode(trial),
                environment(trial.in_process, int(trial.engine.get("tensor_parallel_size", 1))),
                timeout_s,
            )
        except subprocess.TimeoutExpired as late:
            said = (late.stdout or b"") + (late.stderr or b"")
            raise TrialFailed(
                f"vLLM has not ended in {timeout_s} s:", said.decode(errors="replace")
            ) from None
        if done.returncode or not answer.exists():
            said = done.stdout + done.stderr
            raise TrialFailed(f"vLLM ended with exit code {done.returncode}:", said.decode(errors="replace"))
        return msgspec.json.decode(answer.read_bytes(), type=TrialOutcome)


def run_session(
    command: Sequence[str], given: bytes, settings: Mapping[str, str], timeout_s: float
) -> subprocess.CompletedProcess[bytes]:
    """As `subprocess.run`. What has not ended in time is killed with all that it has started: vLLM's engines
    outlive a caller that was killed."""
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=settings,
        start_new_session=True,
    ) as process:
        try:
            stdout, stderr = process.communicate(given, timeout_s)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def environment(in_process: bool = True, ranks: int = 1) -> dict[str, str]:
    """What vLLM is to find in its environment; what is set already stays. Each rank has a core of its own."""
    cores = sorted(os.sched_getaffinity(0))
    if ranks > len(cores):
        cores = list(range(os.cpu_count() or 1))
    binding = "|".join(str(cores[rank % len(cores)]) for rank in range(ranks))
    return {
        **ENVIRONMENT,
        "VLLM_CPU_OMP_THREADS_BIND": binding,
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(not in_process)),
        **os.environ,
    }


def make_engine(model: str, trial: Trial) -> Any:
    """vLLM's `LLM` as the trial wants it."""
    from vllm import LLM

    settings: Mapping[str, Any] = {**SETTINGS, "disable_log_stats": False, **trial.engine}
    return LLM(model, kv_transfer_config=trial.kv_transfer, **settings)


def metrics_of(engine: Any) -> dict[str, float]:
    """vLLM's counters and gauges that are not 0."""
    found = {}
    for metric in engine.get_metrics():
        value = getattr(metric, "value", 0)
        labels = ",".join(
            f"{name}={label}" for name, label in sorted(metric.labels.items()) if name != "engine"
        )
        if value:
            found[f"{metric.name}{{{labels}}}"] = float(value)
    return found


def _serve(trial: Trial) -> TrialOutcome:
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=trial.max_tokens, ignore_eos=True)
    outputs: list[Any] = []
    seconds = []
    with tiny_model(trial.model) as model:
        engine = make_engine(model, trial)
        for prompts in trial.rounds:
            began = time.perf_counter()
            asked = [{"prompt_token_ids": prompt} for prompt in prompts]
            outputs += engine.generate(asked, greedy, use_tqdm=False)
            seconds.append(time.perf_counter() - began)
        metrics = metrics_of(engine)
        # In its own time: an engine that is killed, after 5 seconds by default, has not closed its log.
        engine.llm_engine.engine_core.shutdown(timeout=SHUTDOWN_S)
    return TrialOutcome(
        tokens=[list(output.outputs[0].token_ids) for output in outputs],
        cached_tokens=[output.num_cached_tokens or 0 for output in outputs],
        prompt_tokens=sum(len(prompt) for prompts in trial.rounds for prompt in prompts),
        seconds=seconds,
        metrics=metrics,
    )


def _main(arguments: Sequence[str]) -> None:
    trial = msgspec.json.decode(sys.stdin.buffer.read(), type=Trial)
    Path(arguments[0]).write_bytes(msgspec.json.encode(_serve(trial)))


if __name__ == "__main__":
    _main(sys.argv[1:])
