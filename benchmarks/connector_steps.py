"""Measure the connector's own time in each step of vLLM's real scheduler: kvsm's connector and vLLM's two.

Each engine has vLLM's scheduler, block pool and prefix cache, both sides of a connector, and a mock model
runner (`connector_world.py`). 256 requests with prompts of 8,192 tokens go through these phases:

=========  ===================================================================================================
prefill    all prompts arrive, and are computed in chunks decode     each step computes a token of every
request; about sixteen requests complete a block preempted  all requests are preempted and the device's prefix
cache is dropped; blocks are loaded from the host ending     some requests end in each step hits       the
device's prefix cache is dropped; the same prompts arrive again, some in each step alone      it is dropped
again; the same prompts arrive one at a time, and the engine is empty in between =========
===================================================================================================

The time is CPU time of the engine's thread inside the calls of the connector.

    python benchmarks/connector_steps.py --output benchmarks/results/connector_steps.md
"""

from __future__ import annotations

import gc
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import click
from connector_world import Engine, StepCost
from page import markdown_table, publish
from scheduler_world import BLOCK_BYTES, BLOCK_TOKENS, VllmWorld

from kvsm.events import Direction
from kvsm.vllm.bench import PEERS
from kvsm.vllm.trial import connector_config

OURS, NOTHING = "KvsmConnector", "no connector"
RIVALS = tuple(PEERS)
"""vLLM's own connectors."""


@dataclass(frozen=True)
class Traffic:
    """The workload of an engine.

    requests: how many requests run at once.
    prompt_tokens: tokens of each prompt.
    decode_steps: steps of the phase "decode".
    each_step: how many requests end or arrive in each step of the phases "ending" and "hits".
    """

    requests: int = 256
    prompt_tokens: int = 8192
    decode_steps: int = 64
    each_step: int = 4

    @property
    def blocks(self) -> int:
        """The device blocks that all requests need, with their answers."""
        answers = self.requests + self.requests + 2 * self.decode_steps + self.requests // self.each_step
        return self.requests * (-(-(self.prompt_tokens + answers) // BLOCK_TOKENS) + 1) + 1

    def prompts(self) -> list[list[int]]:
        """The prompts, which share no block."""
        rest = [5] * (self.prompt_tokens - 1)
        return [[8 + number, *rest] for number in range(self.requests)]


Phases = dict[str, list[StepCost]]


class Life:
    """Drives one engine through all phases."""

    def __init__(self, world: VllmWorld, engine: Engine, traffic: Traffic) -> None:
        self._world, self._engine, self._traffic = world, engine, traffic
        self._prompts = traffic.prompts()
        self.phases: Phases = {}

    def run(self) -> Phases:
        """Run all phases. Returns phase -> the cost of each step."""
        count = self._traffic.requests
        names, again, alone = ([f"{part}{number}" for number in range(count)] for part in "abc")
        self._phase("prefill", lambda: self._serve(names, count))
        self._phase("decode", self._decode)
        self._engine.forget_device_cache(preempt=True)
        self._phase("preempted", self._until_all_decode)
        self._phase("ending", lambda: self._end(names))
        self._engine.forget_device_cache(preempt=False)
        self._phase("hits", lambda: self._serve(again, self._traffic.each_step))
        self._end(again)
        self._engine.forget_device_cache(preempt=False)
        self._phase("alone", lambda: self._serve_alone(alone))
        return self.phases

    def _phase(self, name: str, drive: Callable[[], None]) -> None:
        # vLLM's engine freezes long-lived objects, too.
        gc.collect()
        gc.freeze()
        before = len(self._engine.costs)
        drive()
        gc.unfreeze()
        self.phases[name] = self._engine.costs[before:]

    def _serve(self, names: Sequence[str], each_step: int) -> None:
        """Let these requests arrive, `each_step` of them in each step, and step until all decode."""
        requests = [self._world.request(name, prompt) for name, prompt in zip(names, self._prompts)]
        for first in range(0, len(requests), each_step):
            for request in requests[first : first + each_step]:
                self._engine.arrive(request)
            self._engine.step()
        self._until_all_decode()

    def _serve_alone(self, names: Sequence[str]) -> None:
        """Let each request arrive after the previous one has ended."""
        for name, prompt in zip(names, self._prompts):
            self._engine.arrive(self._world.request(name, prompt))
            self._until_all_decode()
            self._end([name])

    def _until_all_decode(self) -> None:
        scheduler, most = self._engine.scheduler, 8 * self._traffic.requests
        for _ in range(most):
            running = scheduler.running
            if len(running) == len(scheduler.requests) and all(
                request.num_output_tokens and not request.is_prefill_chunk for request in running
            ):
                return
            self._engine.step()
        raise AssertionError(f"after {most} steps some requests do not decode")

    def _decode(self) -> None:
        for _ in range(self._traffic.decode_steps):
            self._engine.step()

    def _end(self, names: Sequence[str]) -> None:
        for first in range(0, len(names), self._traffic.each_step):
            self._engine.step(frozenset(names[first : first + self._traffic.each_step]))
        while self._engine.step():
            pass


# Figures.


def at_share(values: Sequence[float], share: float) -> float:
    """The smallest of the values that at least this share of them does not exceed (a quantile)."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


@dataclass(frozen=True)
class PhaseFigures:
    """The figures of one phase of one engine.

    Times of a step are in us, totals in ms; `calls`: totals by call.
    """

    steps: int
    middle: float
    p99: float
    longest: float
    total: float
    worker_middle: float
    worker_total: float
    scheduler_total: float
    calls: Mapping[str, float]


def figures(costs: Sequence[StepCost]) -> PhaseFigures:
    """The figures of these steps."""
    own = [sum(cost.scheduler.values()) / 1e3 for cost in costs]
    worker = [sum(cost.worker.values()) / 1e3 for cost in costs]
    calls: Counter[str] = Counter()
    for cost in costs:
        calls.update(cost.scheduler)
    return PhaseFigures(
        steps=len(costs),
        middle=median(own),
        p99=at_share(own, 0.99),
        longest=max(own),
        total=sum(own) / 1e3,
        worker_middle=median(worker),
        worker_total=sum(worker) / 1e3,
        scheduler_total=sum(cost.step for cost in costs) / 1e6,
        calls={name: spent / 1e6 for name, spent in calls.items()},
    )


@dataclass
class Rounds:
    """The figures of one contestant in all rounds, and the blocks that it moved in the last one."""

    phases: dict[str, list[PhaseFigures]] = field(default_factory=dict)
    moved: Counter[Direction] = field(default_factory=Counter)

    def of(self, phase: str, figure: str) -> float:
        """The median of a figure over the rounds."""
        return median(getattr(one, figure) for one in self.phases[phase])

    def call(self, phase: str, name: str) -> float:
        """The total of one call (ms), the median over the rounds."""
        return median(one.calls.get(name, 0.0) for one in self.phases[phase])


def phase_table(phase: str, found: Mapping[str, Rounds]) -> list[str]:
    """The table of a phase, with all contestants. Ratios are relative to `OURS`."""
    ours, rows = found[OURS], []
    for name, rounds in found.items():
        row = [name, f"{rounds.of(phase, 'steps'):.0f}"]
        if name == NOTHING:
            row += [""] * 6
        else:
            for figure in ("middle", "p99", "longest", "total"):
                value = rounds.of(phase, figure)
                row.append(f"{value:,.1f}, {value / ours.of(phase, figure):.2f}")
            row += [f"{rounds.of(phase, 'worker_middle'):,.1f}", f"{rounds.of(phase, 'worker_total'):,.1f}"]
        rows.append([*row, f"{rounds.of(phase, 'scheduler_total'):,.0f}"])
    header = ["contestant", "steps", "median, us", "p99, us", "longest, us", "all steps, ms"]
    header += ["worker: median, us", "worker: all steps, ms", "scheduler and connector, ms"]
    return [f"### {phase}", "", *markdown_table(header, rows), ""]


def calls_table(found: Mapping[str, Rounds]) -> list[str]:
    """The table of the time in each call of the scheduler sides."""
    names = {name: rounds for name, rounds in found.items() if name != NOTHING}
    rows = []
    for phase in found[OURS].phases:
        calls = {call for rounds in names.values() for one in rounds.phases[phase] for call in one.calls}
        for call in sorted(calls, key=lambda one: -found[OURS].call(phase, one)):
            cells = [rounds.call(phase, call) for rounds in names.values()]
            if max(cells) >= 0.05:
                rows.append([phase, call, *(f"{cell:,.2f}" for cell in cells)])
    return ["### By call, ms", "", *markdown_table(["phase", "call", *names], rows), ""]


def verdict_table(found: Mapping[str, Rounds]) -> list[str]:
    """The table that compares `OURS` with the better of vLLM's connectors, in each phase.

    Single steps are compared only with a rival that takes as many steps. A rival that waits for its loads
    takes more steps, most of them empty.
    """
    rows = []
    for phase in found[OURS].phases:
        steps, row = found[OURS].of(phase, "steps"), [phase]
        alike = [name for name in RIVALS if found[name].of(phase, "steps") == steps]
        for figure, rivals in (("middle", alike), ("total", RIVALS)):
            ours = found[OURS].of(phase, figure)
            values = {name: found[name].of(phase, figure) for name in rivals}
            best = min(values, key=lambda name: values[name], default=None)
            row.append("" if best is None else f"{ours / values[best]:.2f} ({best})")
        rows.append(row)
    return [
        f"### {OURS}, times the better of vLLM's two",
        "",
        *markdown_table(["phase", "median of a step", "all steps"], rows),
        "",
    ]


# The contestants.


def contestants(host_blocks: int, log: Path) -> dict[str, dict[str, Any] | None]:
    """Contestant -> its `kv_transfer_config`. log: a directory for event logs."""
    size = host_blocks * BLOCK_BYTES
    return {
        OURS: connector_config(cpu_bytes_to_use=size, event_log=str(log)),
        "KvsmConnector, no log": connector_config(cpu_bytes_to_use=size),
        **{name: config(cpu_bytes_to_use=size) for name, config in PEERS.items()},
        NOTHING: None,
    }


def measure(world: VllmWorld, config: dict[str, Any] | None, traffic: Traffic, copy_steps: int) -> Rounds:
    """Measure one round of one contestant."""
    from vllm.config import KVTransferConfig

    engine = Engine(world, config and KVTransferConfig(**config), traffic.blocks, copy_steps)
    phases = Life(world, engine, traffic).run()
    moved = engine.moved
    engine.close()
    return Rounds({name: [figures(costs)] for name, costs in phases.items()}, moved)


def by_turns(
    world: VllmWorld, names: Sequence[str], traffic: Traffic, rounds: int, copy_steps: int
) -> dict[str, Rounds]:
    """Measure all contestants, one after the other, in each round. Round 0 is small, for warming up."""
    found: dict[str, Rounds] = {}
    for number in range(rounds + 1):
        served = traffic if number else Traffic(8, 512)
        with tempfile.TemporaryDirectory() as log:
            configs = contestants(2 * served.blocks, Path(log))
            for name in names or configs:
                one = measure(world, configs[name], served, copy_steps)
                if not number:
                    continue
                entry = found.setdefault(name, Rounds())
                entry.moved = one.moved
                for phase, figures_of in one.phases.items():
                    entry.phases.setdefault(phase, []).extend(figures_of)
                totals = {phase: f"{one.of(phase, 'total'):.1f} ms" for phase in one.phases}
                click.echo(f"  round {number}: {name}: {totals}", err=True)
                gc.collect()
    return found


def moved_table(found: Mapping[str, Rounds]) -> list[str]:
    """The table of the blocks that each contestant has moved."""
    rows = [
        [name, f"{one.moved[Direction.STORE]:,}", f"{one.moved[Direction.LOAD]:,}"]
        for name, one in found.items()
    ]
    return ["### Blocks", "", *markdown_table(["contestant", "stored", "loaded"], rows), ""]


@click.command()
@click.option(
    "--only", multiple=True, help="Only these contestants; KvsmConnector and vLLM's two for tables."
)
@click.option("--rounds", default=3, show_default=True)
@click.option("--requests", default=256, show_default=True)
@click.option("--prompt-tokens", default=8192, show_default=True)
@click.option("--copy-steps", default=0, show_default=True, help="After how many steps a copy ends.")
@click.option("--output", type=click.Path(path_type=Path), help="Write the tables here, with the command.")
def main(
    only: tuple[str, ...],
    rounds: int,
    requests: int,
    prompt_tokens: int,
    copy_steps: int,
    output: Path | None,
) -> None:
    """Measure the own time of connectors in each step of vLLM's scheduler."""
    with tempfile.TemporaryDirectory() as model:
        world = VllmWorld(Path(model))
        traffic = Traffic(requests, prompt_tokens)
        found = by_turns(world, only, traffic, rounds, copy_steps)
    lines = [
        f"{requests} requests with prompts of {prompt_tokens:,} tokens. "
        f"Median of {rounds} rounds; behind the comma: times {OURS}, whose log is on disk. "
        f"A copy ends {copy_steps} steps after it began.",
        "",
    ]
    if {OURS, *RIVALS} <= set(found):
        lines += verdict_table(found)
    for phase in found[OURS].phases if OURS in found else ():
        lines += phase_table(phase, found)
    if OURS in found:
        lines += calls_table(found) + moved_table(found)
    publish("Connectors in vLLM's scheduler, step by step", f"vLLM {world.version}", lines, output)


if __name__ == "__main__":
    main()
