"""What kvsm costs and brings in a vLLM engine: requests per second without offload, by spec and by connector.

    found = compare(Bench(rounds=3))
    print(page(found))

Every contestant is an engine in a process of its own; all of them live at the same time, and serve one round
after the other, in an order that turns: what else the machine does meets all alike. A round is conversations
that nobody has seen before. In each turn all of them ask, one after the other; so when one comes back, others
have taken its device blocks, a quarter of what all need. What a turn asks ends in what was answered before.

The connector's own time is what vLLM waits for in calls of its connector, of the scheduler's side and of the
worker's; copies that run beside the step are not in it. It is measured in all rounds, where vLLM makes those
calls: that costs each call less than a microsecond.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from kvsm.errors import ConfigError
from kvsm.vllm.installation_check import kv_transfer_of
from kvsm.vllm.tiny_model import BLOCK_TOKENS, LLAMA, VOCABULARY, tiny_model
from kvsm.vllm.trial import Trial, TrialFailed, environment, make_engine
from kvsm.vllm.versions import installed

PLAIN = "no offload"
CONTESTANTS = (PLAIN, "KvsmSpec", "KvsmConnector")

MODEL: dict[str, Any] = {**LLAMA, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4}
"""Large enough that a prompt takes longer to compute than to look up."""

_BLOCK_BYTES: int = (
    2 * MODEL["num_hidden_layers"] * MODEL["num_key_value_heads"] * MODEL["head_dim"] * 4 * BLOCK_TOKENS
)

_RUNNING = 4
"""Most requests that are served at the same time."""


class Bench(msgspec.Struct, frozen=True, kw_only=True):
    """requests: of one round, all turns of all its conversations. turn_tokens: what a user adds.
    answer_tokens: what is generated."""

    requests: int = 96
    turns: int = 4
    turn_tokens: int = 192
    answer_tokens: int = 16
    rounds: int = 5

    def __post_init__(self) -> None:
        if self.requests % self.turns:
            raise ConfigError(
                f"requests is {self.requests}, which {self.turns} turns do not divide: give a multiple, so "
                "that no conversation lacks a turn"
            )

    @property
    def conversations(self) -> int:
        return self.requests // self.turns

    @property
    def conversation_tokens(self) -> int:
        """When its last turn is over."""
        return self.turns * (self.turn_tokens + self.answer_tokens)

    @property
    def conversation_blocks(self) -> int:
        return -(-self.conversation_tokens // BLOCK_TOKENS)

    @property
    def device_blocks(self) -> int:
        """A quarter of what all need in the end, and never so few that those that run preempt each other. One
        block is vLLM's own."""
        held = max(self.conversations // 4, _RUNNING)
        return held * self.conversation_blocks + 1

    @property
    def host_bytes(self) -> int:
        """Room for all conversations of a round, and half as much again."""
        return self.conversations * self.conversation_blocks * _BLOCK_BYTES * 3 // 2


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine did in one round. step_seconds, connector_seconds: of all steps together."""

    seconds: float
    prompt_tokens: int
    cached_tokens: int
    steps: int
    step_seconds: float
    connector_seconds: float


class Contestant(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    rounds: tuple[Round, ...]


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """device: what vLLM's engine runs on. contestants: the first is that without offload."""

    bench: Bench
    vllm: str
    device: str
    contestants: tuple[Contestant, ...]


def compare(bench: Bench, tell: Callable[[str], None] = lambda _: None) -> Comparison:
    """tell: hears what is going on now. Raises `ConfigError` without vLLM, and `TrialFailed`."""
    version = installed()
    with ExitStack() as stack:
        engines = []
        for name in CONTESTANTS:
            tell(f"starting vLLM, {name}")
            engines.append(stack.enter_context(_engine(name, bench)))
        rounds: dict[str, list[Round]] = {engine.name: [] for engine in engines}
        # Round 0 warms up, and is not counted.
        for number in range(bench.rounds + 1):
            turn = number % len(engines)
            for engine in engines[turn:] + engines[:turn]:
                tell(
                    f"round {number} of {bench.rounds}: {engine.name}"
                    if number
                    else f"warming up {engine.name}"
                )
                done = engine.serve(number)
                if number:
                    rounds[engine.name].append(done)
        return Comparison(
            bench=bench,
            vllm=version,
            device=engines[0].device,
            contestants=tuple(Contestant(name=name, rounds=tuple(done)) for name, done in rounds.items()),
        )


# An engine's process.


class _Engine:
    """Its caller's end."""

    def __init__(self, name: str, pipe: Any, said: Path) -> None:
        self.name, self._pipe, self._said = name, pipe, said
        self.device: str = self._receive()

    def serve(self, number: int) -> Round:
        self._pipe.send(number)
        done: Round = self._receive()
        return done

    def _receive(self) -> Any:
        try:
            return self._pipe.recv()
        except EOFError:
            said = self._said.read_text(errors="replace")
            raise TrialFailed(f"vLLM ended ({self.name}):", said) from None


@contextmanager
def _engine(name: str, bench: Bench) -> Iterator[_Engine]:
    spawn = multiprocessing.get_context("spawn")
    ours, its = spawn.Pipe()
    with TemporaryDirectory(prefix="kvsm-bench-") as directory:
        said = Path(directory) / "said"
        process = spawn.Process(target=_live, args=(its, name, bench, str(said)), daemon=True)
        process.start()
        its.close()
        try:
            yield _Engine(name, ours, said)
        finally:
            ours.close()
            process.join(30)
            process.kill()
            process.join()


def _live(pipe: Any, name: str, bench: Bench, said: str) -> None:
    """In its own process: serve rounds until nobody asks for one."""
    with open(said, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    # The clock must be in the process of the engine's core.
    os.environ.update(environment(), VLLM_ENABLE_V1_MULTIPROCESSING="0")
    with tiny_model(MODEL) as model, TemporaryDirectory(prefix="kvsm-bench-log-") as log:
        engine = make_engine(model, _trial(name, bench, log))
        clock = _Clock(engine)
        from vllm.platforms import current_platform

        pipe.send(str(current_platform.device_type))
        while True:
            try:
                number = pipe.recv()
            except EOFError:
                break
            pipe.send(_serve(engine, clock, bench, number))
        engine.llm_engine.engine_core.shutdown()


def _trial(name: str, bench: Bench, log: str) -> Trial:
    kv_transfer = None
    if name != PLAIN:
        kv_transfer = kv_transfer_of(name, cpu_bytes_to_use=bench.host_bytes, event_log=log)
    return Trial(
        rounds=[],
        kv_transfer=kv_transfer,
        engine={
            "num_gpu_blocks_override": bench.device_blocks,
            "max_num_seqs": _RUNNING,
            "max_model_len": bench.conversation_tokens + BLOCK_TOKENS,
        },
    )


def _serve(engine: Any, clock: _Clock, bench: Bench, number: int) -> Round:
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=bench.answer_tokens, ignore_eos=True)
    drawn = random.Random(number)
    said: list[list[int]] = [[] for _ in range(bench.conversations)]
    prompt_tokens = cached_tokens = 0
    seconds, before = 0.0, clock.read()
    for _ in range(bench.turns):
        for one in said:
            one += [drawn.randrange(3, VOCABULARY) for _ in range(bench.turn_tokens)]
        asked = [{"prompt_token_ids": one} for one in said]
        began = time.perf_counter()
        outputs = engine.generate(asked, greedy, use_tqdm=False)
        seconds += time.perf_counter() - began
        prompt_tokens += sum(len(one) for one in said)
        cached_tokens += sum(output.num_cached_tokens or 0 for output in outputs)
        for one, output in zip(said, outputs):
            one += output.outputs[0].token_ids
    steps, step_seconds, connector_seconds = (now - then for now, then in zip(clock.read(), before))
    return Round(
        seconds=seconds,
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        steps=int(steps),
        step_seconds=step_seconds,
        connector_seconds=connector_seconds,
    )


class _Clock:
    """Stands before an engine's step, and before every method of its connectors, on both sides. A call that
    a connector makes to itself is part of the call that vLLM made."""

    def __init__(self, engine: Any) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

        self._steps, self._step_seconds, self._connector_seconds = 0, 0.0, 0.0
        self._inside = False
        core = engine.llm_engine.engine_core.engine_core
        core.step_fn = self._timed_step(core.step_fn)
        sides = [core.scheduler.connector] if core.scheduler.connector is not None else []
        if has_kv_transfer_group():
            sides.append(get_kv_transfer_group())
        for side in sides:
            for name in dir(KVConnectorBase_V1):
                if not name.startswith("_") and callable(getattr(type(side), name)):
                    setattr(side, name, self._timed_call(getattr(side, name)))

    def read(self) -> tuple[float, float, float]:
        """(steps, seconds of steps, seconds in the connector), since the engine began."""
        return self._steps, self._step_seconds, self._connector_seconds

    def _timed_step(self, step: Callable[[], Any]) -> Callable[[], Any]:
        @wraps(step)
        def timed() -> Any:
            began = time.perf_counter()
            result = step()
            self._step_seconds += time.perf_counter() - began
            self._steps += 1
            return result

        return timed

    def _timed_call(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def timed(*arguments: Any, **named: Any) -> Any:
            if self._inside:
                return call(*arguments, **named)
            self._inside, began = True, time.perf_counter()
            try:
                return call(*arguments, **named)
            finally:
                self._connector_seconds += time.perf_counter() - began
                self._inside = False

        return timed


# For people.


def page(found: Comparison) -> str:
    """The comparison as Markdown, with the command that made it."""
    bench, first = found.bench, found.contestants[0]
    lines = [
        f"# kvsm in vLLM {found.vllm} on {found.device}",
        "",
        "    kvsm bench vllm "
        f"--requests {bench.requests} --turns {bench.turns} --turn-tokens {bench.turn_tokens} "
        f"--answer-tokens {bench.answer_tokens} --rounds {bench.rounds}",
        "",
        f"{platform.machine()}, Python {platform.python_version()}, {len(os.sched_getaffinity(0))} cores, "
        f"load average {os.getloadavg()[0]:.1f} at the end. "
        f"{bench.conversations} conversations of {bench.turns} turns a round; the device holds "
        f"{bench.device_blocks} blocks of {BLOCK_TOKENS} tokens, and a conversation comes to "
        f"{bench.conversation_blocks}. A random Llama of {MODEL['num_hidden_layers']} layers, "
        f"{MODEL['hidden_size']} wide, float32. Every event is written to a log on disk.",
        "",
        f"Median (least .. most) of {bench.rounds} rounds. Ratios are of the same round; quote these.",
        "",
        "| engine | requests/s | times no offload | prompt tokens from a cache |",
        "| --- | --- | --- | --- |",
    ]
    for one in found.contestants:
        rates = [bench.requests / done.seconds for done in one.rounds]
        ratios = [plain.seconds / done.seconds for plain, done in zip(first.rounds, one.rounds)]
        cached = [100 * done.cached_tokens / done.prompt_tokens for done in one.rounds]
        lines.append(f"| {one.name} | {_spread(rates)} | {_spread(ratios, 2)} | {_spread(cached, 0, '%')} |")
    lines += [
        "",
        "| engine | steps a round | step, ms | connector's own time, ms a step | of the step |",
        "| --- | --- | --- | --- | --- |",
    ]
    for one in found.contestants:
        steps = [float(done.steps) for done in one.rounds]
        step = [1e3 * done.step_seconds / done.steps for done in one.rounds]
        own = [1e3 * done.connector_seconds / done.steps for done in one.rounds]
        share = [100 * done.connector_seconds / done.step_seconds for done in one.rounds]
        lines.append(
            f"| {one.name} | {_spread(steps, 0)} | {_spread(step, 2)} | {_spread(own, 3)} "
            f"| {_spread(share, 1, '%')} |"
        )
    return "\n".join(lines) + "\n"


def _spread(values: Sequence[float], digits: int = 1, unit: str = "") -> str:
    middle, least, most = (f"{value:,.{digits}f}" for value in (median(values), min(values), max(values)))
    return f"{middle}{unit} ({least} .. {most})"
