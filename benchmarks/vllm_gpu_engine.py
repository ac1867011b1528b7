"""One vLLM engine in its own process, for `vllm_gpu.py`.

    with engine_process(EngineSpec(model="/tmp/model", kv_transfer=None)) as engine:
        engine.ready()
        served = engine.serve(prompts, 16)

`kvsm.vllm.trial` runs engines in the same way. This one also measures the time to first token, resets the
prefix cache, profiles, and makes engines while others start.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO, Any

import msgspec

from kvsm.errors import KvsmError
from kvsm.vllm.step_clock import StepClock, StepTimes

Prompt = list[int]

SAID_LINES = 30
"""Lines of an engine's output that an error quotes."""

KVSM_MODULES = ("kvsm.vllm", "vllm_gpu_connectors")
"""The modules of connectors that write a log of events. It goes to a temporary directory."""


class EngineFailed(KvsmError):
    """Raised if an engine fails or does not answer in time. The message ends with its last output."""


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """An engine.

    model: the directory of its model.
    kv_transfer: vLLM's `kv_transfer_config`; None: no offload.
    settings: arguments of vLLM's `LLM`.
    environment: variables of the process, besides its parent's.
    """

    model: str
    kv_transfer: dict[str, Any] | None = None
    settings: dict[str, Any] = {}
    environment: dict[str, str] = {}


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine did with some prompts.

    tokens, cached_tokens, first_token_s: for each prompt, its answer, how many of its tokens were not
        computed, and the time until its first token (s), which includes its time in the queue.
    seconds: wall time in `LLM.generate`.
    preemptions: since the engine's start.
    times: the times of the steps.
    """

    tokens: list[list[int]]
    cached_tokens: list[int]
    first_token_s: list[float]
    seconds: float
    preemptions: int
    times: StepTimes


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """A call of the engine's process. `call` is the name of a method of `_Answers`."""

    call: str
    prompts: list[Prompt] = []
    max_tokens: int = 0
    path: str = ""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a call, as JSON, or the error's text."""

    result: msgspec.Raw = msgspec.Raw(b"null")
    error: str = ""


# In the caller's process.


class EngineProcess:
    """The handle of an engine's process."""

    def __init__(self, connection: Connection, process: subprocess.Popen[bytes], said: IO[bytes]) -> None:
        self._connection, self._process, self._said = connection, process, said
        self.device = ""

    def ready(self, timeout_s: float = 300) -> None:
        """Wait until the engine is ready. `device` is then the platform that vLLM found, such as `cuda`."""
        self.device = msgspec.json.decode(self._receive(timeout_s), type=str)

    def serve(self, prompts: Sequence[Prompt], max_tokens: int, timeout_s: float = 300) -> Served:
        """Serve these prompts together. Each answer has `max_tokens` tokens."""
        question = Question(call="serve", prompts=list(prompts), max_tokens=max_tokens)
        return msgspec.json.decode(self.ask(question, timeout_s), type=Served)

    def reset(self, timeout_s: float = 120) -> int:
        """Reset the prefix cache, on the device and in the connector. Return the number of calls."""
        return msgspec.json.decode(self.ask(Question(call="reset"), timeout_s), type=int)

    def ask(self, question: Question, timeout_s: float) -> msgspec.Raw:
        """Return the answer as JSON. Raises `EngineFailed`."""
        try:
            self._connection.send_bytes(msgspec.json.encode(question))
        except ConnectionError:
            raise self._failure("vLLM ended early") from None
        return self._receive(timeout_s)

    def _receive(self, timeout_s: float) -> msgspec.Raw:
        deadline = time.monotonic() + timeout_s
        try:
            while not self._connection.poll(0.5):
                if self._process.poll() is not None and not self._connection.poll():
                    raise EOFError
                if time.monotonic() > deadline:
                    raise self._failure(f"vLLM has not answered in {timeout_s:.0f} s")
            answer = msgspec.json.decode(self._connection.recv_bytes(), type=Answer)
        except (EOFError, ConnectionError):
            raise self._failure("vLLM ended early") from None
        if answer.error:
            raise self._failure(answer.error)
        return answer.result

    def _failure(self, reason: str) -> EngineFailed:
        self._said.seek(0)
        said = self._said.read().decode(errors="replace").splitlines()[-SAID_LINES:]
        return EngineFailed("\n".join([reason, *said]))

    def end(self, timeout_s: float = 60) -> None:
        """Shut the engine down, or kill it."""
        self._connection.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


@contextmanager
def engine_process(spec: EngineSpec) -> Iterator[EngineProcess]:
    """Start an engine's process. It makes the engine at once; `ready` waits for it."""
    ours, theirs = Pipe()
    variables = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    variables |= {"HF_HUB_OFFLINE": "1", **spec.environment}
    paths = [str(Path(__file__).parent), variables.get("PYTHONPATH", "")]
    variables["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    with ours, TemporaryFile() as said:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                stdout=said,
                stderr=subprocess.STDOUT,
                env=variables,
                pass_fds=[theirs.fileno()],
            )
        engine = EngineProcess(ours, process, said)
        ours.send_bytes(msgspec.json.encode(spec))
        try:
            yield engine
        finally:
            engine.end()


# In the engine's process.


class _Answers:
    """Answers the caller's questions."""

    def __init__(self, spec: EngineSpec) -> None:
        from vllm import LLM

        self._llm = LLM(spec.model, kv_transfer_config=spec.kv_transfer, **spec.settings)
        self._clock = StepClock(self._llm)
        self._steps: list[tuple[float, float]] = []
        """Begin and end of each step (s, `time.perf_counter`)."""
        core = self._llm.llm_engine.engine_core.engine_core
        core.step_fn = self._noted(core.step_fn)

    def _noted(self, step: Any) -> Any:
        def noted() -> Any:
            began = time.perf_counter()
            result = step()
            self._steps.append((began, time.perf_counter()))
            return result

        return noted

    def serve(self, question: Question) -> Served:
        from vllm import SamplingParams

        greedy = SamplingParams(temperature=0, max_tokens=question.max_tokens, ignore_eos=True)
        asked: Any = [{"prompt_token_ids": prompt} for prompt in question.prompts]
        before, began = self._clock.read(), time.perf_counter()
        outputs = self._llm.generate(asked, greedy, use_tqdm=False)
        seconds = time.perf_counter() - began
        metrics: Any = [output.metrics for output in outputs]
        return Served(
            tokens=[list(output.outputs[0].token_ids) for output in outputs],
            cached_tokens=[output.num_cached_tokens or 0 for output in outputs],
            first_token_s=[one.first_token_latency for one in metrics],
            seconds=seconds,
            preemptions=self._preemptions(),
            times=self._clock.read() - before,
        )

    def _preemptions(self) -> int:
        values = (
            getattr(metric, "value", 0) for metric in self._llm.get_metrics() if "preempt" in metric.name
        )
        return int(sum(values))

    def reset(self, question: Question) -> int:
        """kvsm refuses a reset while copies run, and steps of the engine end them."""
        del question
        calls = 1
        while not self._llm.reset_prefix_cache(reset_connector=True):
            self._llm.llm_engine.step()
            calls += 1
        return calls

    def copies(self, question: Question) -> Any:
        del question
        from vllm_gpu_connectors import ObservedEngine

        return ObservedEngine.made.facts

    def trace(self, question: Question) -> Served:
        """Serve under torch's profiler. `path` becomes a Chrome trace with the mark `kvsm clock`.

        A file beside it, `path` and `.kvsm`, has the time of the mark, kvsm's copies and the engine's steps.
        """
        import torch
        from torch.profiler import ProfilerActivity, profile, record_function
        from vllm_gpu_connectors import ObservedEngine

        kinds = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            kinds.append(ProfilerActivity.CUDA)
        timed, steps = len(ObservedEngine.made.timed), len(self._steps)
        with profile(activities=kinds) as profiler:
            clock = time.perf_counter()
            with record_function("kvsm clock"):
                pass
            served = self.serve(question)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        profiler.export_chrome_trace(question.path)
        beside = {
            "clock": clock,
            "copies": ObservedEngine.made.timed[timed:],
            "steps": self._steps[steps:],
        }
        Path(question.path + ".kvsm").write_text(json.dumps(beside))
        return served

    def end(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()


def _live(connection: Connection) -> None:
    """Answer until the caller closes its end."""
    from vllm.platforms import current_platform

    spec = msgspec.json.decode(connection.recv_bytes(), type=EngineSpec)
    with TemporaryDirectory(prefix="kvsm-vllm-gpu-log-") as log:
        if (
            spec.kv_transfer is not None
            and spec.kv_transfer.get("kv_connector_module_path", "") in KVSM_MODULES
        ):
            spec.kv_transfer["kv_connector_extra_config"]["event_log"] = log
        answers = _Answers(spec)
        _send(connection, str(current_platform.device_type))
        with suppress(EOFError):
            while True:
                question = msgspec.json.decode(connection.recv_bytes(), type=Question)
                try:
                    _send(connection, getattr(answers, question.call)(question))
                except EOFError:
                    raise
                except Exception as error:
                    connection.send_bytes(
                        msgspec.json.encode(Answer(error=f"{type(error).__name__}: {error}"))
                    )
        answers.end()


def _send(connection: Connection, result: object) -> None:
    connection.send_bytes(msgspec.json.encode(Answer(result=msgspec.Raw(msgspec.json.encode(result)))))


if __name__ == "__main__":
    _live(Connection(int(sys.argv[1])))
