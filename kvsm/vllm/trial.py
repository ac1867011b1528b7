"""Run one vLLM engine in its own process: it serves prompts, and reports the outcome.

    outcome = run_trial(Trial(rounds=[prompts], kv_transfer=connector_config(cpu_bytes_to_use=1 << 26)))

Two engines in one process would share vLLM's global state, and an engine that dies would take its caller with
it. A `Trial` travels to the process as JSON, over a pipe, and so does the outcome of each round.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from tempfile import TemporaryFile
from threading import Timer, get_native_id
from typing import IO, Any, TypeVar

import msgspec

from kvsm.errors import KvsmError
from kvsm.vllm.step_clock import StepClock, StepTimes
from kvsm.vllm.tiny_model import ENVIRONMENT, LLAMA, SETTINGS, tiny_model

Prompt = list[int]

SHUTDOWN_S = 60.0
"""vLLM kills an engine after 5 s by default; its event log would then not be closed."""

WAKE_S = 2.0
"""The time until vLLM's core is woken, in case it has missed the signal that ends it (s)."""

PASSIVE_WAITING: Mapping[str, str] = {
    "OMP_WAIT_POLICY": "passive",
    "GOMP_SPINCOUNT": "0",
    "KMP_BLOCKTIME": "0",
}
"""Make idle OpenMP threads sleep. GNU's library obeys the first two variables, LLVM's and Intel's the first
and the last."""

_POLL_S = 0.5

_Answer = TypeVar("_Answer")


class TrialFailed(KvsmError):
    """Raised if an engine fails or does not answer in time. The message ends with its last lines of output.

    Attributes: `said` is the whole output of all processes of the engine.
    """

    def __init__(self, reason: str, said: str = "") -> None:
        self.said = said
        super().__init__("\n".join([reason, *said.splitlines()[-40:]]))


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of an engine, and the prompts that it serves.

    rounds: the prompts of each round, which are served together.
    max_tokens: tokens generated for each prompt.
    kv_transfer: vLLM's `kv_transfer_config`; None means no offload.
    engine: further arguments of vLLM's `LLM`.
    environment: variables of the engine's process, in addition to `environment()`.
    model: the configuration of the tiny model.
    in_process: whether `LLM` and the engine core share a process. If not, the core can keep stepping when no
        request is left.
    timed: whether a `StepClock` measures the engine. It implies `in_process`.
    """

    rounds: list[list[Prompt]] = []
    max_tokens: int = 8
    kv_transfer: dict[str, Any] | None = None
    engine: dict[str, Any] = {}
    environment: dict[str, str] = {}
    model: dict[str, Any] = msgspec.field(default_factory=lambda: dict(LLAMA))
    in_process: bool = True
    timed: bool = False


class TrialOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine did, in one round or in several.

    tokens: the answer to each prompt, in order.
    cached_tokens: for each prompt, the number of its tokens that were not computed.
    prompt_tokens: the number of tokens of all prompts together.
    seconds: wall time in `LLM.generate`.
    metrics: vLLM's counters and gauges that are not 0 at the end; the labels follow the name in braces.
    times: times of the steps; zeros if the trial is not timed.
    """

    tokens: list[list[int]]
    cached_tokens: list[int]
    prompt_tokens: int
    seconds: float
    metrics: dict[str, float]
    times: StepTimes = StepTimes()

    def metric(self, name: str, label: str = "") -> float:
        """Return the sum of all series with this name whose text contains `label`."""
        return sum(
            value
            for series, value in self.metrics.items()
            if series.partition("{")[0] == name and label in series
        )

    @classmethod
    def of_rounds(cls, rounds: Sequence[TrialOutcome]) -> TrialOutcome:
        """Combine consecutive rounds of one engine into one outcome."""
        return cls(
            tokens=[tokens for outcome in rounds for tokens in outcome.tokens],
            cached_tokens=[cached for outcome in rounds for cached in outcome.cached_tokens],
            prompt_tokens=sum(outcome.prompt_tokens for outcome in rounds),
            seconds=sum(outcome.seconds for outcome in rounds),
            metrics=rounds[-1].metrics if rounds else {},
            times=sum((outcome.times for outcome in rounds), StepTimes()),
        )


def connector_config(load_failure: str = "recompute", **options: Any) -> dict[str, Any]:
    """Return vLLM's `kv_transfer_config` for `KvsmConnector` with these options."""
    return {
        "kv_connector": "KvsmConnector",
        "kv_connector_module_path": "kvsm.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": load_failure,
        "kv_connector_extra_config": options,
    }


def run_trial(trial: Trial, timeout_s: float = 300) -> TrialOutcome:
    """Serve all rounds of the trial. `timeout_s` limits each of them. Raises `TrialFailed`."""
    with running_engine(trial, timeout_s) as engine:
        return TrialOutcome.of_rounds([engine.serve(prompts) for prompts in trial.rounds])


# In the caller's process.


@contextmanager
def running_engine(trial: Trial, timeout_s: float = 300) -> Iterator[RunningEngine]:
    """Run an engine during the `with` block. On a normal exit it shuts down; after an error it is killed.

    timeout_s: the limit for start-up, for each round and for shutdown (s).
    Raises `TrialFailed`.
    """
    settings = environment(trial.in_process, int(trial.engine.get("tensor_parallel_size", 1)))
    settings |= trial.environment
    if trial.timed:
        settings["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    ours, theirs = Pipe()
    with ours, TemporaryFile() as said:
        with theirs:
            process = begin_process(theirs, said, settings)
        engine = RunningEngine(ours, process, said, timeout_s)
        try:
            engine.start(trial)
            yield engine
            engine.end()
        except BaseException:
            # Kill its whole process group: vLLM's workers outlive a parent that was killed.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise


def begin_process(
    connection: Connection, said: IO[bytes], settings: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start the process of an engine, in its own session. It serves the requests of this end of a pipe.

    said: the file for its output. settings: its environment.
    """
    return subprocess.Popen(
        [sys.executable, "-m", "kvsm.vllm.trial", str(connection.fileno())],
        stdout=said,
        stderr=subprocess.STDOUT,
        env=settings,
        pass_fds=[connection.fileno()],
        start_new_session=True,
    )


@dataclass
class RunningEngine:
    """The caller's handle of an engine's process. device: the platform that vLLM found, such as `cpu`."""

    _connection: Connection
    _process: subprocess.Popen[bytes]
    _said: IO[bytes]
    _timeout_s: float
    device: str = ""

    def start(self, trial: Trial) -> None:
        """Make the engine, and wait until it is ready."""
        self.device = self._ask(trial, str)

    def serve(self, prompts: Sequence[Prompt]) -> TrialOutcome:
        """Serve these prompts together."""
        return self._ask(prompts, TrialOutcome)

    def end(self) -> None:
        """Shut the engine down, and wait until its process has ended."""
        self._connection.close()
        try:
            status = self._process.wait(self._timeout_s)
        except subprocess.TimeoutExpired:
            raise self._failure(f"vLLM has not ended in {self._timeout_s} s:") from None
        if status:
            raise self._failure(f"vLLM ended with exit code {status}:")

    def _ask(self, question: object, kind: type[_Answer]) -> _Answer:
        deadline = time.monotonic() + self._timeout_s
        try:
            self._connection.send_bytes(msgspec.json.encode(question))
            while not self._connection.poll(_POLL_S):
                # Workers of a dead engine may still hold the other end open.
                if self._process.poll() is not None and not self._connection.poll():
                    raise EOFError
                if time.monotonic() > deadline:
                    raise self._failure(f"vLLM has not answered in {self._timeout_s} s:")
            return msgspec.json.decode(self._connection.recv_bytes(), type=kind)
        except (EOFError, ConnectionError):
            self.end()
            raise self._failure("vLLM ended early:") from None

    def _failure(self, reason: str) -> TrialFailed:
        self._said.seek(0)
        return TrialFailed(reason, self._said.read().decode(errors="replace"))


def environment(in_process: bool = True, ranks: int = 1) -> dict[str, str]:
    """Return the environment for a process with an engine. Each rank computes with one thread.

    vLLM binds each rank to its own core. In the caller's process vLLM binds no thread; there
    `OMP_NUM_THREADS` leaves cores free for the copies. Waiting threads do not spin: a spinning thread holds a
    core that a copy or another engine could use.

    Variables that are already set keep their values.
    """
    cores = sorted(os.sched_getaffinity(0))
    if ranks > len(cores):
        cores = list(range(os.cpu_count() or 1))
    binding = "|".join(str(cores[rank % len(cores)]) for rank in range(ranks))
    return {
        **ENVIRONMENT,
        **PASSIVE_WAITING,
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": binding,
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(not in_process)),
        **os.environ,
    }


# In the engine's process.


def make_engine(model: str, trial: Trial) -> Any:
    """Make vLLM's `LLM` for the trial. model: the directory of the model."""
    from vllm import LLM

    settings: Mapping[str, Any] = {**SETTINGS, "disable_log_stats": False, **trial.engine}
    return LLM(model, kv_transfer_config=trial.kv_transfer, **settings)


def _live(connection: Connection) -> None:
    """Serve rounds until the caller closes its end."""
    trial = msgspec.json.decode(connection.recv_bytes(), type=Trial)
    with tiny_model(trial.model) as model:
        engine = make_engine(model, trial)
        clock = StepClock(engine) if trial.timed else None
        if trial.timed:
            _part_the_cores()
        from vllm.platforms import current_platform

        connection.send_bytes(msgspec.json.encode(str(current_platform.device_type)))
        with suppress(EOFError):
            while True:
                prompts = msgspec.json.decode(connection.recv_bytes(), type=list[Prompt])
                served = _serve(engine, clock, prompts, trial.max_tokens)
                connection.send_bytes(msgspec.json.encode(served))
        _shut_down(engine.llm_engine.engine_core)


def _shut_down(core: Any) -> None:
    """Shut down vLLM's core. Raises `RuntimeError` if it has its own process, which ended with an error.

    A signal ends such a core. If the signal comes just before the main thread falls asleep, Python handles it
    only when something wakes the thread. So a message follows that wakes it: the abort of a request that does
    not exist.
    """
    if not hasattr(core, "resources"):
        # It shares this process. The user's environment may have set this, whatever the trial says.
        core.shutdown(timeout=SHUTDOWN_S)
        return
    processes = core.resources.engine_manager.processes
    wake = Timer(WAKE_S, core.abort_requests, [["no request"]])
    wake.start()
    try:
        core.shutdown(timeout=SHUTDOWN_S)
    finally:
        wake.cancel()
    if codes := [process.exitcode for process in processes if process.exitcode]:
        raise RuntimeError(f"vLLM's core ended with exit code {codes[0]}")


def _part_the_cores() -> None:
    """Bind this thread, which runs the steps and the model, to one core, and all other threads to the others.

    So the copies of every connector run in parallel with the model, whatever the operating system would have
    chosen. With a single core, no thread is bound.
    """
    first, *others = sorted(os.sched_getaffinity(0))
    for thread in map(int, os.listdir("/proc/self/task")) if others else ():
        with suppress(ProcessLookupError):  # the thread has ended
            os.sched_setaffinity(thread, [first] if thread == get_native_id() else others)


def _serve(engine: Any, clock: StepClock | None, prompts: list[Prompt], max_tokens: int) -> TrialOutcome:
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    before = clock.read() if clock is not None else StepTimes()
    began = time.perf_counter()
    outputs = engine.generate(asked, greedy, use_tqdm=False)
    seconds = time.perf_counter() - began
    after = clock.read() if clock is not None else before
    return TrialOutcome(
        tokens=[list(output.outputs[0].token_ids) for output in outputs],
        cached_tokens=[output.num_cached_tokens or 0 for output in outputs],
        prompt_tokens=sum(map(len, prompts)),
        seconds=seconds,
        metrics=_metrics_of(engine),
        times=after - before,
    )


def _metrics_of(engine: Any) -> dict[str, float]:
    """Return vLLM's counters and gauges that are not 0."""
    found = {}
    for metric in engine.get_metrics():
        labels = [f"{name}={label}" for name, label in sorted(metric.labels.items()) if name != "engine"]
        if value := getattr(metric, "value", 0):
            found[f"{metric.name}{{{','.join(labels)}}}"] = float(value)
    return found


if __name__ == "__main__":
    _live(Connection(int(sys.argv[1])))
