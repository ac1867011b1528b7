"""kvsm inside vLLM on a GPU: are the tokens and the bytes right, and what does it cost and gain?

    python benchmarks/vllm_gpu.py --output benchmarks/results/vllm_gpu.md

`vllm_gpu_pack.py` packs what a GPU machine without a network lacks. The model is a random Llama of some
layers. A round is 24 conversations of several turns; the device cache holds a quarter of their blocks, and
the host pool has room for all. The steps:

- `tokens`: the answers with kvsm are those without offload.
- `bytes`: both ends of each copy are equal, bit by bit, and each load has the bytes of its store.
- `reset`: after a reset of all caches nothing is found, and the answers stay the same.
- `preempt`: requests outgrow the device cache while they run. The answers stay the same.
- `failed-copy`: a quarter of the transfers copy a part of their blocks and fail. The answers stay the same.
- `speed`: requests per second, time to first token and the time of the engine's thread, of kvsm, vLLM's own
  connectors and no offload, in rotating order.
- `trace`: a picture of compute and copies, from torch's profiler.

Results are written after each step. When the time of `--budget-s` is over no further step runs, and the page
says so. With `--dry-run` the same code runs on a CPU with a smaller model; vLLM's own connectors then copy
with kvsm's copy engine. With `--interpret` too, vLLM needs none of its compiled operations: it computes
attention and samples with the Triton kernels of a GPU, which Triton interprets. That is slow, so the
workload is tiny.
"""

from __future__ import annotations

import os
import platform
import random
import shlex
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import click
import msgspec
from page import markdown_table
from vllm_gpu_connectors import CopyFacts
from vllm_gpu_engine import EngineFailed, EngineProcess, EngineSpec, Prompt, Question, Served, engine_process
from vllm_gpu_picture import draw

from kvsm.vllm.bench import PEERS
from kvsm.vllm.tiny_model import LLAMA, tiny_model
from kvsm.vllm.trial import PASSIVE_WAITING, connector_config

PLAIN, KVSM = "no offload", "KvsmConnector"

PEER_NAMES = ("SimpleCPUOffloadConnector", "OffloadingConnector")

STEPS = ("tokens", "bytes", "reset", "preempt", "failed-copy", "speed", "trace")

NEEDS: Mapping[str, tuple[str, ...]] = {
    "tokens": ("plain", "comparing"),
    "bytes": ("comparing",),
    "reset": ("comparing",),
    "preempt": ("plain", "scarce"),
    "failed-copy": ("plain", "failing"),
    "speed": (PLAIN, KVSM, *PEER_NAMES),
    "trace": ("observed",),
}
"""The step -> the engines that it needs."""

OBSERVED = {
    "comparing": "ComparingConnector",
    "scarce": "ComparingConnector",
    "failing": "FailingConnector",
    "observed": "ObservedConnector",
}
"""The engine -> its connector in `vllm_gpu_connectors`."""

DRY_PLATFORM = "kvsm_dry_platform"
"""The entry point of the platform in `vllm_gpu_dry`."""

DRY_NOTE = ("A dry run: it shows that the script works. Its times say nothing about kvsm or vLLM.", "")

RESERVE_S = 20.0
"""Time to shut the engines down (s)."""


class Size(NamedTuple):
    """The model and the workload of a round."""

    model: dict[str, Any]
    dtype: str
    turn_tokens: int
    answer_tokens: int
    conversations: int = 24
    turns: int = 4
    running: int = 8
    block_tokens: int = 16

    @property
    def conversation_blocks(self) -> int:
        """Blocks of a conversation after its last turn."""
        return -(-self.turns * (self.turn_tokens + self.answer_tokens) // self.block_tokens)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of all layers."""
        heads, width = self.model["num_key_value_heads"], self.model["head_dim"]
        bytes_of = {"float32": 4, "bfloat16": 2}[self.dtype]
        return 2 * self.model["num_hidden_layers"] * heads * width * self.block_tokens * bytes_of

    @property
    def device_blocks(self) -> int:
        """Blocks for a quarter of all conversations, and vLLM's null block."""
        return max(self.conversations // 4, 1) * self.conversation_blocks + 1

    @property
    def scarce_blocks(self) -> int:
        """Blocks for the prompts of all running requests, but not for answers of `scarce_answer` tokens."""
        return self.running * (-(-self.turn_tokens // self.block_tokens) + 1) + 1

    @property
    def scarce_answer(self) -> int:
        """Tokens of the answers in the step `preempt`: four blocks."""
        return 4 * self.block_tokens

    @property
    def host_bytes(self) -> int:
        """One and a half times what all conversations need."""
        return self.conversations * self.conversation_blocks * self.block_bytes * 3 // 2


def llama(
    layers: int, width: int, inner: int, heads: int, kv_heads: int, head: int, words: int
) -> dict[str, Any]:
    """Return the configuration of a Llama. head: the width of a head. words: the size of the vocabulary."""
    shape = {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": inner,
        "vocab_size": words,
    }
    shape |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head}
    return {**LLAMA, **shape, "max_position_embeddings": 16384}


ON_GPU = Size(llama(8, 2048, 5632, 16, 8, 128, 8192), "bfloat16", turn_tokens=2048, answer_tokens=32)
DRY = Size(llama(2, 64, 128, 4, 2, 32, 1024), "float32", 48, 8, block_tokens=32)
INTERPRETED = Size(
    llama(1, 32, 64, 2, 1, 32, 128), "float32", 20, 3, conversations=4, turns=2, running=2, block_tokens=16
)


class StepResult(msgspec.Struct, kw_only=True):
    """The outcome of a step.

    state: `passed`, `failed` or `not run`. why: the reason, unless it passed. facts: name -> value.
    """

    name: str
    state: str
    why: str = ""
    seconds: float = 0.0
    facts: dict[str, Any] = {}


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """One round of one engine. It sums over turns; first_token_s is the median of its requests."""

    seconds: float
    requests: int
    first_token_s: float
    cached_share: float
    other_answers: int
    steps: int
    step_cpu_s: float
    connector_cpu_s: float


class Page(msgspec.Struct, kw_only=True):
    """Everything that a run found."""

    command: str
    date: str
    machine: dict[str, str]
    notes: list[str] = []
    steps: list[StepResult] = []
    speed: dict[str, list[Round]] = {}


class StepFailed(Exception):
    """A step found something wrong."""


def require(holds: bool, text: str) -> None:
    """Raise `StepFailed` with this text unless it holds."""
    if not holds:
        raise StepFailed(text)


def different(one: Sequence[Served], other: Sequence[Served]) -> int:
    """Return the number of answers that differ."""
    pairs = zip(one, other, strict=True)
    return sum(
        mine != its for left, right in pairs for mine, its in zip(left.tokens, right.tokens, strict=True)
    )


def cached_share(served: Sequence[Served], prompts: Sequence[Sequence[Prompt]]) -> float:
    """Return the share of the prompts' tokens that were not computed."""
    total = sum(len(prompt) for turn in prompts for prompt in turn)
    return sum(sum(turn.cached_tokens) for turn in served) / total


class Conversations(NamedTuple):
    """A served round: the prompts of each turn, and what the engine did."""

    prompts: list[list[Prompt]]
    served: list[Served]


def converse(engine: EngineProcess, size: Size, seed: int) -> Conversations:
    """Serve all turns of new conversations, which follow from the seed and the answers."""
    drawn = random.Random(seed)
    histories: list[Prompt] = [[] for _ in range(size.conversations)]
    round_ = Conversations([], [])
    for _ in range(size.turns):
        for history in histories:
            history += [drawn.randrange(3, size.model["vocab_size"]) for _ in range(size.turn_tokens)]
        round_.prompts.append([list(history) for history in histories])
        round_.served.append(engine.serve(round_.prompts[-1], size.answer_tokens))
        for history, answer in zip(histories, round_.served[-1].tokens):
            history += answer
    return round_


class Harness:
    """Runs steps, and keeps the engines that several of them use.

    size: the workload. dry: whether a CPU stands for the GPU. rounds: rounds of `speed`, after a first one.
    """

    def __init__(
        self, size: Size, model: str, dry: bool, rounds: int, environment: Mapping[str, str]
    ) -> None:
        self.size, self.dry, self.rounds = size, dry, rounds
        self.notes: list[str] = []
        self.speed: dict[str, list[Round]] = {}
        self.invariant = not dry
        self._model, self._environment = model, dict(environment)
        self._stack = ExitStack()
        self._engines: dict[str, EngineProcess] = {}
        self._rounds: dict[str, Conversations] = {}

    def close(self) -> None:
        """Shut all engines down."""
        self._engines.clear()
        self._rounds.clear()
        self._stack.close()

    # Engines.

    def spec(self, name: str) -> EngineSpec:
        """Return the engine with this name."""
        size, blocks = self.size, self.size.device_blocks
        longest = size.turns * (size.turn_tokens + size.answer_tokens)
        if name == "scarce":
            blocks = size.scarce_blocks
            longest = size.turn_tokens + size.scarce_answer
        settings: dict[str, Any] = {
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "compilation_config": {"custom_ops": ["none"]},
            "block_size": size.block_tokens,
            "max_model_len": longest,
            "max_num_seqs": size.running,
            "dtype": size.dtype,
            "num_gpu_blocks_override": blocks,
            # Twice what the blocks take: vLLM checks first whether this holds a request, with margins.
            "kv_cache_memory_bytes": 2 * blocks * size.block_bytes,
            "gpu_memory_utilization": 0.1,
            "disable_log_stats": False,
        }
        if not self.dry or "TRITON_INTERPRET" in self._environment:
            settings["attention_backend"] = "TRITON_ATTN"
        environment = dict(self._environment)
        if self.invariant and name not in NEEDS["speed"]:
            environment["VLLM_BATCH_INVARIANT"] = "1"
        return EngineSpec(
            model=self._model, kv_transfer=self.kv_transfer(name), settings=settings, environment=environment
        )

    def kv_transfer(self, name: str) -> dict[str, Any] | None:
        """Return vLLM's `kv_transfer_config` of the engine with this name."""
        host_bytes = self.size.host_bytes
        if name in (PLAIN, "plain"):
            return None
        if name in PEER_NAMES and self.dry:
            return PEERS[name](cpu_bytes_to_use=host_bytes)
        if name in PEER_NAMES:
            extra = {"cpu_bytes_to_use": host_bytes}
            return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}
        transfer = connector_config(cpu_bytes_to_use=host_bytes)
        if name in OBSERVED:
            transfer |= {"kv_connector": OBSERVED[name], "kv_connector_module_path": "vllm_gpu_connectors"}
        return transfer

    def start(self, names: Sequence[str]) -> None:
        """Start engines, side by side. If one cannot start with batch invariance, all start without it."""
        missing = [name for name in dict.fromkeys(names) if name not in self._engines]
        for name in missing:
            self._engines[name] = self._stack.enter_context(engine_process(self.spec(name)))
        try:
            for name in missing:
                self._engines[name].ready()
        except EngineFailed as error:
            again = list(self._engines)
            self.close()
            if not self.invariant:
                raise
            self.invariant = False
            self.notes.append(f"Without batch invariance, because an engine did not start with it: {error}")
            self.start(again)

    def round_of(self, name: str) -> Conversations:
        """Return the round with seed 0 of an engine, which serves it once."""
        if name not in self._rounds:
            self._rounds[name] = converse(self._engines[name], self.size, 0)
        return self._rounds[name]

    def copies(self, name: str) -> CopyFacts:
        """Return what the copies of an observed engine did so far."""
        return msgspec.json.decode(self._engines[name].ask(Question(call="copies"), 60), type=CopyFacts)

    # Steps. Each returns facts, and raises `StepFailed`.

    def tokens(self) -> dict[str, Any]:
        plain, kvsm = self.round_of("plain"), self.round_of("comparing")
        facts = {
            "answers": sum(len(turn.tokens) for turn in plain.served),
            "answers that differ": different(plain.served, kvsm.served),
            "prompt tokens from a cache, without": cached_share(plain.served, plain.prompts),
            "prompt tokens from a cache, with kvsm": cached_share(kvsm.served, kvsm.prompts),
        }
        require(facts["answers that differ"] == 0, f"answers differ: {facts}")
        with_kvsm, without = (
            facts[f"prompt tokens from a cache, {name}"] for name in ("with kvsm", "without")
        )
        require(with_kvsm > without, f"kvsm found no more than the device alone: {facts}")
        return facts

    def bytes(self) -> dict[str, Any]:
        self.round_of("comparing")
        facts = self.copies("comparing")
        require(not facts.wrong, f"{len(facts.wrong)} wrong blocks, first {facts.wrong[:3]}")
        require(facts.stored > 0 and facts.loaded > 0 and facts.moved > 0, f"too few copies: {facts}")
        return {
            "blocks stored and compared": facts.stored,
            "blocks evicted, loaded and compared": facts.loaded,
            "of these into another device block": facts.moved,
            "bytes of a block": self.size.block_bytes,
            "blocks that differ": len(facts.wrong),
        }

    def reset(self) -> dict[str, Any]:
        round_, engine = self.round_of("comparing"), self._engines["comparing"]
        prompts, expected = round_.prompts[-1], round_.served[-1]
        before = engine.serve(prompts, self.size.answer_tokens)
        calls = engine.reset()
        after = engine.serve(prompts, self.size.answer_tokens)
        again = engine.serve(prompts, self.size.answer_tokens)
        found = [sum(served.cached_tokens) for served in (before, after, again)]
        facts = {
            "calls until the reset was done": calls,
            "tokens found before": found[0],
            "tokens found after": found[1],
            "tokens found later": found[2],
            "answers that differ": sum(different([expected], [one]) for one in (before, after, again)),
        }
        require(
            found[0] > 0 == found[1] and found[2] > 0, f"the reset left blocks, or nothing came back: {facts}"
        )
        require(facts["answers that differ"] == 0, f"answers differ: {facts}")
        return facts

    def preempt(self) -> dict[str, Any]:
        size, drawn = self.size, random.Random("preempt")
        words = size.model["vocab_size"]
        prompts = [[drawn.randrange(3, words) for _ in range(size.turn_tokens)] for _ in range(size.running)]
        plain, scarce = (self._engines[name].serve(prompts, size.scarce_answer) for name in NEEDS["preempt"])
        copies = self.copies("scarce")
        facts = {
            "requests": len(prompts),
            "preemptions": scarce.preemptions,
            "blocks loaded": copies.loaded,
            "blocks that differ": len(copies.wrong),
            "answers that differ": different([plain], [scarce]),
        }
        require(facts["preemptions"] > 0, f"no request was preempted: {facts}")
        require(
            facts["answers that differ"] == facts["blocks that differ"] == 0,
            f"wrong: {facts}, {copies.wrong[:3]}",
        )
        return facts

    def failed_copy(self) -> dict[str, Any]:
        plain, failing = self.round_of("plain"), self.round_of("failing")
        copies = self.copies("failing")
        facts = {
            "failed stores": copies.failed.get("STORE", 0),
            "failed loads": copies.failed.get("LOAD", 0),
            "answers that differ": different(plain.served, failing.served),
        }
        require(facts["failed loads"] > 0 and facts["failed stores"] > 0, f"too few copies failed: {facts}")
        require(facts["answers that differ"] == 0, f"answers differ: {facts}")
        return facts

    def measure(self, until: float) -> dict[str, Any]:
        """The step `speed`: fill `speed`. until: when the last round must have ended (`time.monotonic`)."""
        names, longest = list(NEEDS["speed"]), 0.0
        for number in range(self.rounds + 1):
            began, first = time.monotonic(), number % len(names)
            if began + longest > until and number > 1:
                self.notes.append(
                    f"Only {number - 1} of {self.rounds} rounds of speed fitted into the budget."
                )
                break
            order = names[first:] + names[:first]
            done = {name: converse(self._engines[name], self.size, number) for name in order}
            longest = max(longest, time.monotonic() - began)
            for name in names if number else ():  # Round 0 warms up and does not count.
                self.speed.setdefault(name, []).append(round_of(done[name], done[PLAIN]))
        differing = {name: sum(one.other_answers for one in rounds) for name, rounds in self.speed.items()}
        return {"rounds": len(self.speed.get(PLAIN, [])), "answers that differ": differing}

    def trace(self, picture: Path) -> dict[str, Any]:
        """Write the picture, and return its facts. The turn that is traced loads and stores."""
        engine, size = self._engines["observed"], self.size
        round_ = converse(engine, size, 0)
        prompts = [prompt + answer for prompt, answer in zip(round_.prompts[-2], round_.served[-2].tokens)]
        drawn = random.Random("trace")
        for prompt in prompts:
            prompt += [drawn.randrange(3, size.model["vocab_size"]) for _ in range(size.turn_tokens)]
        with TemporaryDirectory(prefix="kvsm-vllm-gpu-trace-") as directory:
            trace = Path(directory) / "trace.json"
            question = Question(call="trace", prompts=prompts, max_tokens=size.answer_tokens, path=str(trace))
            engine.ask(question, 300)
            facts = draw(trace, picture)
        require(facts["overlap"] is not None, "the trace has no copy")
        return {"picture": picture.name, **facts}


def round_of(done: Conversations, plain: Conversations) -> Round:
    """Sum a round up. plain: the same round without offload."""
    turns = done.served
    return Round(
        seconds=sum(turn.seconds for turn in turns),
        requests=sum(len(turn.tokens) for turn in turns),
        first_token_s=median(one for turn in turns for one in turn.first_token_s),
        cached_share=cached_share(turns, done.prompts),
        other_answers=different(turns, plain.served),
        steps=sum(turn.times.steps for turn in turns),
        step_cpu_s=sum(turn.times.step_cpu_seconds for turn in turns),
        connector_cpu_s=sum(turn.times.connector_cpu_seconds for turn in turns),
    )


def run_steps(
    harness: Harness, steps: Sequence[str], budget_s: float, picture: Path, done: Callable[[StepResult], None]
) -> None:
    """Run the steps one after another, until the budget ends. done: called with each result."""
    until = time.monotonic() + budget_s - RESERVE_S
    work: dict[str, Callable[[], dict[str, Any]]] = {
        "tokens": harness.tokens,
        "bytes": harness.bytes,
        "reset": harness.reset,
        "preempt": harness.preempt,
        "failed-copy": harness.failed_copy,
        "speed": lambda: harness.measure(until),
        "trace": lambda: harness.trace(picture),
    }
    for step in steps:
        began = time.monotonic()
        if began > until:
            done(StepResult(name=step, state="not run", why="the time budget had ended"))
            continue
        result = StepResult(name=step, state="passed")
        try:
            harness.start(NEEDS[step])
            result.facts = work[step]()
        except (StepFailed, EngineFailed) as error:
            result.state, result.why = "failed", str(error)
        except Exception:  # A broken step must not cost the others their time on the device.
            result.state, result.why = "failed", traceback.format_exc(limit=-4)
        result.seconds = time.monotonic() - began
        done(result)


# For people.


def machine_facts(dry: bool) -> dict[str, str]:
    """Return what the machine is, and the versions of what ran."""
    facts = {"machine": platform.machine(), "Python": platform.python_version(), "cores": str(os.cpu_count())}
    installed = {one.metadata["Name"]: one.version for one in metadata.distributions()}
    for package in ("vllm", "torch", "triton", "transformers", "cuda-bindings"):
        facts[package] = installed.get(package, "not installed")
    if dry:
        return {"device": "CPU", **facts}
    asked = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        said = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        said = f"unknown: {error}"
    return {"device": said, **facts}


def spread(values: Sequence[float], digits: int = 1, unit: str = "") -> str:
    """Format as median (least .. most)."""
    middle, least, most = (f"{value:,.{digits}f}" for value in (median(values), min(values), max(values)))
    return f"{middle}{unit} ({least} .. {most})"


def speed_table(speed: Mapping[str, Sequence[Round]]) -> list[str]:
    """Format the rounds of all engines."""
    header = ["engine", "requests/s", "times no offload", "first token, ms", "prompt tokens from a cache"]
    header += ["engine's thread, us CPU a step", "in the connector, us CPU a step", "answers that differ"]
    rows = []
    for name, rounds in speed.items():
        ratios = [its.seconds / mine.seconds for its, mine in zip(speed[PLAIN], rounds)]
        rows.append(
            [
                name,
                spread([one.requests / one.seconds for one in rounds]),
                spread(ratios, 2),
                spread([1e3 * one.first_token_s for one in rounds]),
                spread([100 * one.cached_share for one in rounds], 0, "%"),
                spread([1e6 * one.step_cpu_s / one.steps for one in rounds], 0),
                spread([1e6 * one.connector_cpu_s / one.steps for one in rounds], 0),
                str(sum(one.other_answers for one in rounds)),
            ]
        )
    return markdown_table(header, rows)


def fact_text(value: Any) -> str:
    """Format a fact of a step."""
    if isinstance(value, float):
        return f"{value:.2f}"
    if isinstance(value, dict):
        return ", ".join(f"{name}: {fact_text(inner)}" for name, inner in value.items())
    return str(value)


def page_of(found: Page, size: Size) -> str:
    """Format everything as Markdown."""
    lines = [
        f"# kvsm in vLLM on {found.machine['device']}",
        "",
        f"    {found.command}",
        "",
        f"{found.date}; {', '.join(f'{name} {value}' for name, value in found.machine.items())}.",
        f"A random Llama of {size.model['num_hidden_layers']} layers, {size.model['hidden_size']} wide, "
        f"{size.dtype}. {size.conversations} conversations of {size.turns} turns; the device cache has "
        f"{size.device_blocks} blocks of {size.block_tokens} tokens, and a conversation needs "
        f"{size.conversation_blocks}.",
        "",
        *(DRY_NOTE if found.machine["device"] == "CPU" else ()),
        *found.notes,
        *markdown_table(
            ["step", "result", "s", "what was found"],
            [
                [
                    one.name,
                    one.state,
                    f"{one.seconds:.0f}",
                    "; ".join(f"{name}: {fact_text(value)}" for name, value in one.facts.items())
                    or one.why.partition("\n")[0].replace("|", "\\|"),
                ]
                for one in found.steps
            ],
        ),
    ]
    if found.speed:
        lines += [
            "",
            "Median (least .. most) of the rounds. The time to first token includes waiting in the queue.",
        ]
        lines += ["", *speed_table(found.speed)]
    for one in found.steps:
        if one.state == "failed":
            lines += ["", f"`{one.name}` failed:", "", *(f"    {line}" for line in one.why.splitlines())]
    return "\n".join(lines).rstrip() + "\n"


def dry_environment(site: Path | None) -> dict[str, str]:
    """Return the environment of engines on a CPU.

    site: an empty directory, in which the platform that interprets Triton's kernels is declared; None: vLLM's
        own CPU platform.
    """
    environment = {**PASSIVE_WAITING, "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    if site is not None:
        about = site / f"{DRY_PLATFORM}-0.0.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {DRY_PLATFORM}\nVersion: 0.0.0\n")
        point = f"{DRY_PLATFORM} = vllm_gpu_dry:chosen_platform"
        (about / "entry_points.txt").write_text(f"[vllm.platform_plugins]\n{point}\n")
        # vLLM uses Triton without a GPU if this variable of CUDA is set and empty.
        environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "VLLM_PLUGINS": DRY_PLATFORM}
        environment["PYTHONPATH"] = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    return environment


def chosen_steps(_context: click.Context, _parameter: click.Parameter, value: str) -> list[str]:
    """Split the steps at commas. They run in the order of `STEPS`."""
    asked = value.split(",")
    if unknown := set(asked) - set(STEPS):
        raise click.BadParameter(f"no step {', '.join(sorted(unknown))}; there are {', '.join(STEPS)}")
    return [step for step in STEPS if step in asked]


@click.command(help=__doc__)
@click.option("--steps", default=",".join(STEPS), callback=chosen_steps, help="Steps, separated by commas.")
@click.option("--budget-s", default=540.0, show_default=True, help="Time limit of the run (s).")
@click.option("--rounds", default=3, show_default=True, help="Rounds of each engine in the step speed.")
@click.option("--output", type=click.Path(path_type=Path), required=True, help="A page; JSON goes beside it.")
@click.option("--dry-run", "dry", is_flag=True, help="Run on a CPU with a small model.")
@click.option("--interpret", is_flag=True, help="With --dry-run: let Triton interpret the kernels of a GPU.")
def main(steps: list[str], budget_s: float, rounds: int, output: Path, dry: bool, interpret: bool) -> None:
    if interpret and not dry:
        raise click.UsageError("--interpret needs --dry-run")
    size = INTERPRETED if interpret else DRY if dry else ON_GPU
    began = time.monotonic()
    now = time.strftime("%Y-%m-%d", time.gmtime())
    found = Page(command=f"python {shlex.join(sys.argv)}", date=now, machine=machine_facts(dry))
    output.parent.mkdir(parents=True, exist_ok=True)

    def write(result: StepResult) -> None:
        found.steps.append(result)
        found.notes, found.speed = harness.notes, harness.speed
        output.with_suffix(".json").write_bytes(msgspec.json.format(msgspec.json.encode(found)))
        output.write_text(page_of(found, size))
        click.echo(f"{result.name}: {result.state} in {result.seconds:.0f} s {result.why or result.facts}")

    with (
        tiny_model({**size.model, "torch_dtype": size.dtype}) as model,
        TemporaryDirectory(prefix="kvsm-vllm-gpu-site-") as site,
    ):
        environment = dry_environment(Path(site) if interpret else None) if dry else {}
        harness = Harness(size, model, dry, rounds, environment)
        try:
            left_s = budget_s - (time.monotonic() - began)
            run_steps(harness, steps, left_s, output.with_suffix(".svg"), write)
        finally:
            harness.close()
    if any(result.state == "failed" for result in found.steps):
        sys.exit(1)


if __name__ == "__main__":
    main()
