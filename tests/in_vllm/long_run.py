"""A long run of one vLLM engine under mixed load, with measurements of its resources.

    python tests/in_vllm/long_run.py --minutes 60 --offload KvsmConnector

A few hundred prompts share prefixes, and the device has room for six of them. Requests come, end, are
preempted and are aborted. The caches are reset while copies run. Copies fail, are reported late, and are
never reported (`unreliable`). Every answer is compared with the answer of an engine without offload.
`Gauges` are read all the time; `growth` says what grew.

The engine, its scheduler and its worker share one process, so that the gauges show all of kvsm. The run
reports facts, and a test judges them.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import click
import msgspec

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "support"), str(HERE.parents[1])]

from scenes import run_session, search_path  # noqa: E402 (the path comes first)
from unreliable import FAULTS, TIMEOUT_S, Faults, UnreliableEngine  # noqa: E402
from workloads import Row, make_rounds, make_trial  # noqa: E402

from kvsm.core.ledger import Ledger  # noqa: E402
from kvsm.core.ledger.invariants import check_ledger, check_rest  # noqa: E402
from kvsm.core.ledger.snapshot import digest  # noqa: E402
from kvsm.explain.story import verify_log  # noqa: E402
from kvsm.vllm.tiny_model import LLAMA, tiny_model  # noqa: E402
from kvsm.vllm.trial import (  # noqa: E402
    Trial,
    connector_config,
    environment,
    make_engine,
    run_trial,
)

MOST_LIVE = 20
"""Requests at once. The engine runs sixteen of them, and has device blocks for about ten."""

DEVICE_BLOCKS = 72

HOST_BYTES = 8 << 20
"""Host memory for 256 blocks. The prompts have about five hundred different blocks."""

LOG_BYTES = 1 << 20
"""The `log_max_bytes` of the event log. Ten minutes write more, on a busy machine too."""

SETTLE_S = 60.0

WARM_UP = 0.25
"""This part of the run may still grow: caches fill, and the allocator finds its size."""

NOTHING = "nothing"
"""In place of a way to use kvsm: shows what vLLM alone needs."""

OFFLOADS = ("KvsmConnector", NOTHING)

FEW_SHAPES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16"}
"""For the engine's process. oneDNN keeps a kernel for each of the last 1024 shapes of a batch, so that any
engine grows by 300 MiB in its first hour on a CPU. Growth of kvsm would not be seen beside that."""


class Gauges(msgspec.Struct, frozen=True, kw_only=True):
    """The resources of the process at one time.

    at_s: time since the run began (s).
    rss: memory in use (bytes).
    threads, handles: the numbers of threads and of open file descriptors.
    objects: the number of objects that the garbage collector tracks.
    log: size of all files of the event log (bytes).
    steps: the number of engine steps so far.
    """

    at_s: float
    rss: int
    threads: int
    handles: int
    objects: int
    log: int
    steps: int

    @classmethod
    def read(cls, at_s: float, log: Path | None, steps: int) -> Gauges:
        """The gauges of this process now. log: the directory of its event log, if it has one."""
        gc.collect()
        resident = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(
            at_s=at_s,
            rss=resident * os.sysconf("SC_PAGE_SIZE"),
            threads=len(os.listdir("/proc/self/task")),
            handles=len(os.listdir("/proc/self/fd")),
            objects=len(gc.get_objects()),
            log=sum(file.stat().st_size for file in log.iterdir()) if log is not None else 0,
            steps=steps,
        )


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """The report of a run.

    seconds: the length of the run (s).
    gauges: the gauges in the order of time.
    counts: the number of times that each kind of event happened.
    wrong: answers that differ from the reference.
    left: the resources still held when all requests had ended; empty if there were none.
    digest: the digest of the ledger at the end, if there is one.
    """

    seconds: float
    gauges: list[Gauges]
    counts: dict[str, int]
    wrong: list[str]
    left: list[str]
    digest: str

    def growth(self, name: str) -> float:
        """Return by how much a gauge is larger in the last third than in the first third after the warm-up.

        The medians of both are compared.
        """
        values = [getattr(one, name) for one in self.gauges if one.at_s >= WARM_UP * self.seconds]
        third = max(1, len(values) // 3)
        return median(values[-third:]) - median(values[:third])

    def most(self, name: str) -> int:
        """Return the largest value of a gauge."""
        return max(getattr(one, name) for one in self.gauges)


class Request(msgspec.Struct):
    """A request that has not ended. number: of its prompt."""

    name: str
    number: int


class LongRun:
    """An engine under load."""

    def __init__(
        self, llm: Any, offload: str, log: Path | None, answers: Sequence[Sequence[int]], seed: int
    ) -> None:
        self._engine, self._offload = llm.llm_engine, offload
        self._scheduler = self._engine.engine_core.engine_core.scheduler
        self.ledger = _ledger_of(self._scheduler.connector)
        self._pool = self._scheduler.kv_cache_manager.block_pool
        self._used_at_first = self._used()
        self._log, self._answers = log, answers
        self._prompts = [prompt for prompts in make_rounds() for prompt in prompts]
        self._random = Random(f"long run {seed}")
        self._live: dict[str, Request] = {}
        self._asked = 0
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.gauges: list[Gauges] = []

    def run(self, seconds: float) -> None:
        """Load the engine for this time (s)."""
        began = time.monotonic()
        every = max(0.5, seconds / 240)
        due = every
        while (now := time.monotonic() - began) < seconds:
            self._act()
            self._step()
            if now >= due:
                self.gauges.append(Gauges.read(now, self._log, self.counts["steps"]))
                due = now + every

    def settle(self) -> list[str]:
        """Wait until all requests and copies have ended. Returns the resources that are still held."""
        UnreliableEngine.faults = msgspec.structs.replace(
            UnreliableEngine.faults, failing=0.0, late=0.0, lost={}
        )
        self._finish()
        left = [f"request {name}" for name in self._scheduler.requests]
        if self.ledger is not None:
            broken = check_ledger(self.ledger) + check_rest(self.ledger)
            left += [f"{one.property}: {one.message}" for one in broken]
        held = self._used() - self._used_at_first
        return [*left, f"{held} device blocks are held"] if held else left

    def _used(self) -> int:
        """Device blocks that are not free. The pool counts as smaller by those that a lost load has
        retired."""
        return int(self._pool.num_gpu_blocks - self._pool.get_num_free_blocks())

    def _finish(self) -> None:
        until = time.monotonic() + SETTLE_S
        while self._scheduler.has_requests() and time.monotonic() < until:
            self._step()

    def _act(self) -> None:
        """Do what users and operators may do between two steps."""
        draw = self._random.random()
        if len(self._live) < MOST_LIVE and draw < 0.4:
            for _ in range(self._random.randint(1, 4)):
                number = self._random.randrange(len(self._prompts))
                self._ask(self._prompts[number], number)
        elif draw < 0.42 and self._live:
            gone = self._random.choice(list(self._live))
            del self._live[gone]
            self._engine.abort_request([gone])
            self.counts["aborts"] += 1
        elif draw < 0.423:
            self._reset("resets of the device")
        elif draw < 0.424 and self._offload != NOTHING:
            self._reset("resets of both", reset_connector=True)
        elif draw < 0.426 and self._offload != NOTHING:
            self._reset("resets of running requests", reset_connector=True, reset_running_requests=True)
        elif draw < 0.43:
            self._finish()
            self.counts["idle times"] += 1
            # Nothing holds a block now, so a reset of the device succeeds. What comes next is loaded.
            self._reset("resets of the device")

    def _reset(self, name: str, **how: bool) -> None:
        try:
            done = self._engine.reset_prefix_cache(**how)
        except RuntimeError:
            # vLLM's own error while a copy holds a device block.
            done = False
        self.counts[name if done else f"{name}, refused"] += 1

    def _ask(self, prompt: Sequence[int], number: int) -> None:
        from vllm import SamplingParams

        greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        self._asked += 1
        name = f"{self._asked}"
        self._live[name] = Request(name, number)
        self._engine.add_request(name, {"prompt_token_ids": list(prompt)}, greedy)

    def _step(self) -> None:
        self.counts["steps"] += 1
        for output in self._engine.step():
            if not output.finished:
                continue
            asked = self._live.pop(output.request_id)
            tokens = list(output.outputs[0].token_ids)
            self.counts["answers"] += 1
            self.counts["cached tokens"] += output.num_cached_tokens or 0
            if asked.number >= 0 and tokens != self._answers[asked.number]:
                self.wrong.append(f"prompt {asked.number}: {tokens} instead of {self._answers[asked.number]}")


def _ledger_of(connector: Any) -> Ledger | None:
    if connector is None:
        return None
    if hasattr(connector, "connector_scheduler"):
        found: Ledger = connector.connector_scheduler.manager._core.ledger
        return found
    of_connector: Ledger = connector._side._core.offloader.ledger
    return of_connector


def run(offload: str, minutes: float, directory: Path, seed: int = 0) -> tuple[Told, Path | None]:
    """Run an engine for this time, in a process of its own. Returns (what it reports, its event log)."""
    reference = run_trial(make_trial(dict(LLAMA), Row())).tokens
    (directory / "answers.json").write_bytes(msgspec.json.encode(reference))
    arguments = [str(HERE / "long_run.py"), "--within", str(directory)]
    arguments += ["--offload", offload, "--minutes", str(minutes), "--seed", str(seed)]
    settings = {**environment(), **FEW_SHAPES, "PYTHONPATH": search_path()}
    run_session(arguments, b"", settings, 60 * minutes + 600)
    told = msgspec.json.decode((directory / "told.json").read_bytes(), type=Told)
    return told, _log_in(directory)


def _log_in(directory: Path) -> Path | None:
    """The event log of the engine, if it has one."""
    return next(iter(directory.glob("log/*")), None)


def _run_here(offload: str, minutes: float, directory: Path, seed: int) -> None:
    """In the engine's process."""
    seconds = 60 * minutes
    UnreliableEngine.faults = msgspec.structs.replace(
        Faults() if offload == NOTHING else FAULTS, over_s=seconds
    )
    given = _kv_transfer(offload, str(directory / "log"))
    trial: Trial = make_trial(dict(LLAMA), Row(), DEVICE_BLOCKS, rounds=[[]], kv_transfer=given)
    answers = msgspec.json.decode((directory / "answers.json").read_bytes())
    with tiny_model(trial.model) as model:
        llm = make_engine(model, trial)
        load = LongRun(llm, offload, _log_in(directory), answers, seed)
        load.run(seconds)
        left = load.settle()
        counts = dict(load.counts) | _counted(llm)
        llm.llm_engine.engine_core.shutdown()
    told = Told(
        seconds=seconds,
        gauges=load.gauges,
        counts=counts,
        wrong=load.wrong,
        left=left,
        digest="" if load.ledger is None else digest(load.ledger),
    )
    (directory / "told.json").write_bytes(msgspec.json.encode(told))


def _kv_transfer(offload: str, log: str) -> dict[str, Any] | None:
    if offload == NOTHING:
        return None
    options = {"event_log": log, "log_max_bytes": LOG_BYTES, "transfer_timeout_s": TIMEOUT_S}
    options |= {"cpu_bytes_to_use": HOST_BYTES}
    named = {"kv_connector": "UnreliableConnector", "kv_connector_module_path": "unreliable"}
    return connector_config(**options) | named


def _counted(llm: Any) -> dict[str, int]:
    """What vLLM's metrics count of the run."""
    made = UnreliableEngine.made
    lost = {} if made is None else made.lost
    counts = {f"reports of {direction.name.lower()}s lost": count for direction, count in lost.items()}
    for metric in llm.get_metrics():
        name, value = metric.name.removeprefix("vllm:"), getattr(metric, "value", 0)
        if metric.name.startswith("vllm:kvsm_") or name in ("num_preemptions", "external_prefix_cache_hits"):
            label = metric.labels.get("outcome", "")
            key = f"{name} {label}".strip()
            counts[key] = counts.get(key, 0) + int(value)
    return counts


def page(told: Told, offload: str, log: Path | None) -> str:
    """The run as a table."""
    first = next(one for one in told.gauges if one.at_s >= WARM_UP * told.seconds)
    last = told.gauges[-1]
    lines = [
        f"{offload}: {told.seconds / 60:g} minutes, {told.counts['steps']:,} steps, "
        f"{told.counts['answers']:,} answers, {len(told.wrong)} of them wrong. "
        + ("Nothing is left." if not told.left else f"Left: {told.left}"),
        "There is no log." if log is None else _verified(log, told.digest),
        "",
        "| gauge | after the warm-up | at the end | growth | most |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name in ("rss", "objects", "threads", "handles", "log"):
        values = getattr(first, name), getattr(last, name), int(told.growth(name)), told.most(name)
        lines.append(f"| {name} | " + " | ".join(f"{value:,}" for value in values) + " |")
    lines += ["", "| what happened | times |", "| --- | --- |"]
    return "\n".join([*lines, *(f"| {name} | {count:,} |" for name, count in sorted(told.counts.items()))])


def _verified(log: Path, digest_at_end: str) -> str:
    found = verify_log(log)
    verdict = "verifies" if found.good and found.digest == digest_at_end else "does not verify"
    return f"The log {verdict}: {found.last:,} events, of which it kept {found.events:,}."


@click.command()
@click.option("--offload", type=click.Choice(OFFLOADS), default="KvsmConnector", show_default=True)
@click.option("--minutes", type=float, default=20.0, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True, help="What users and operators do.")
@click.option("--within", type=click.Path(path_type=Path), hidden=True, help="The caller's directory.")
def main(offload: str, minutes: float, seed: int, within: Path | None) -> None:
    """Run one vLLM engine under mixed load, and print what it needed."""
    if within is not None:
        _run_here(offload, minutes, within, seed)
        return
    with TemporaryDirectory(prefix="kvsm-long-run-") as directory:
        told, log = run(offload, minutes, Path(directory), seed)
        click.echo(page(told, offload, log))


if __name__ == "__main__":
    main()
