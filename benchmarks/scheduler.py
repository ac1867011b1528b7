"""Measure the cost of offloading in the engine's scheduler: kvsm's `SchedulerSide` and vLLM's own two
schedulers.

One small engine drives all contestants in turns, with the same requests, device blocks and step outputs. Only
the calls of the connector are measured. They get vLLM's own `Request`, `BlockPool` and `SchedulerOutput`.
kvsm is the connector as it is shipped: deadlines of copies are on, and each step asks for statistics, as vLLM
does. Copies end in the step that has planned them. KV events are off.

    python benchmarks/scheduler.py --output benchmarks/results/scheduler.md
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import click
from page import markdown_table, publish
from scheduler_world import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    DEVICE_BLOCKS,
    HOST_BLOCKS,
    LAZY_TARGET,
    STEP_TOKENS,
    VllmPool,
    VllmWorld,
)

from kvsm.core.plan import WorkerReport
from kvsm.vllm.trial import connector_config

CLOCK_NS = min(-time.thread_time_ns() + time.thread_time_ns() for _ in range(10_000))
"""The time between two readings of the clock (ns), which is subtracted."""

# The contestants.


class Contestant:
    """A scheduler under test.

    While `measuring` is set, the time of its calls (ns) is added to `spent`. It is CPU time of this thread,
    because other processes share the cores.
    """

    scheduler: Any

    def __init__(self) -> None:
        self.measuring = False
        self.spent: Counter[str] = Counter()
        self.moved: Counter[str] = Counter()
        """Blocks stored and loaded while measuring. Equal numbers show that contestants did the same work."""

    def timed(self, part: str, call: Callable[..., Any], *arguments: Any) -> Any:
        started = time.thread_time_ns()
        result = call(*arguments)
        if self.measuring:
            self.spent[part] += time.thread_time_ns() - started - CLOCK_NS
        return result

    def moves(self, stored: int, loaded: int) -> None:
        if self.measuring:
            self.moved["stored"] += stored
            self.moved["loaded"] += loaded

    def add(self, request: Any) -> None:
        """Announce a request to the scheduler, if it has such a call."""

    def match(self, request: Any) -> int:
        tokens, _ = self.timed("admit", self.scheduler.get_num_new_matched_tokens, request, 0)
        assert tokens is not None
        return int(tokens)

    def close(self) -> None:
        """Free the contestant's resources."""


class VllmContestant(Contestant):
    """Base of the contestants, which all take vLLM's types."""

    pool: Any

    def allocated(self, request: Any, table: list[int], hit: int) -> None:
        from vllm.v1.core.kv_cache_manager import KVCacheBlocks

        blocks = KVCacheBlocks(([self.pool.blocks[block] for block in table],))
        self.timed("admit", self.scheduler.update_state_after_alloc, request, blocks, hit)

    def report(self, worker_meta: Any, loaded: set[str]) -> None:
        from vllm.v1.outputs import KVConnectorOutput

        output = KVConnectorOutput(finished_recving=loaded, kv_connector_worker_meta=worker_meta)
        self.timed("complete", self.scheduler.update_connector_output, output)


class Kvsm(VllmContestant):
    def __init__(self, world: VllmWorld, pool: VllmPool, host_blocks: int, *, lazy: bool, log: bool) -> None:
        from vllm.config import KVTransferConfig
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

        from kvsm.vllm.connector import KvsmConnector

        super().__init__()
        self.pool = pool.pool
        self._directory = tempfile.TemporaryDirectory()
        options: dict[str, Any] = {"cpu_bytes_to_use": host_blocks * BLOCK_BYTES}
        if lazy:
            options |= {"store": "lazy", "lazy_target_blocks": LAZY_TARGET}
        if log:
            options["event_log"] = str(Path(self._directory.name) / "log")
        transfer = KVTransferConfig(**connector_config(**options))
        config = world.config_with(transfer, DEVICE_BLOCKS)
        self.scheduler = KvsmConnector(config, KVConnectorRole.SCHEDULER, world.kv_cache_config)
        self.scheduler.bind_gpu_block_pool(self.pool)

    def add(self, request: Any) -> None:
        self.timed("admit", self.scheduler.on_new_request, request)

    def step(self, output: Any) -> None:
        from kvsm.vllm.step_messages import StepReports

        plan = self.timed("plan", self.scheduler.build_connector_meta, output).plan
        reports = tuple([WorkerReport(job.transfer, 0, True) for job in plan.loads + plan.stores])
        self.report(StepReports(reports) if reports else None, set())
        self.timed("statistics", self.scheduler.get_kv_connector_stats)
        self.moves(*[sum(len(job.pairs()[0]) for job in jobs) for jobs in (plan.stores, plan.loads)])

    def finish(self, request: Any, table: list[int]) -> None:
        self.timed("finish", self.scheduler.request_finished_all_groups, request, (table,))

    def close(self) -> None:
        self.scheduler.shutdown()
        self._directory.cleanup()


class Simple(VllmContestant):
    def __init__(self, world: VllmWorld, pool: VllmPool, host_blocks: int, *, lazy: bool) -> None:
        from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler

        super().__init__()
        self.pool = pool.pool
        capacity = host_blocks * BLOCK_BYTES
        self.scheduler = SimpleCPUOffloadScheduler(
            world.config, world.kv_cache_config, capacity, BLOCK_TOKENS, BLOCK_TOKENS, lazy_offload=lazy
        )
        assert not lazy or self.scheduler._target_free == LAZY_TARGET
        self.scheduler.bind_gpu_block_pool(self.pool)

    def step(self, output: Any) -> None:
        from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadWorkerMetadata

        meta = self.timed("plan", self.scheduler.build_connector_meta, output)
        stored = {meta.store_event: 1} if meta.store_event >= 0 else {}
        loaded = set(meta.load_event_to_reqs[meta.load_event]) if meta.load_event >= 0 else set()
        self.report(SimpleCPUOffloadWorkerMetadata(stored), loaded)
        self.moves(len(meta.store_gpu_blocks), len(meta.load_gpu_blocks))

    def finish(self, request: Any, table: list[int]) -> None:
        self.timed("finish", self.scheduler.request_finished_all_groups, request, (table,))


class Offloading(VllmContestant):
    def __init__(self, world: VllmWorld, pool: VllmPool, host_blocks: int) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
            OffloadingConnectorScheduler,
        )
        from vllm.v1.kv_offload.factory import OffloadingSpecFactory

        super().__init__()
        self.pool = pool.pool
        extra = world.config.kv_transfer_config.kv_connector_extra_config
        extra["cpu_bytes_to_use"] = host_blocks * BLOCK_BYTES
        spec = OffloadingSpecFactory.create_spec(build_offloading_config(world.config, world.kv_cache_config))
        assert spec.num_chunks == host_blocks
        self.scheduler = OffloadingConnectorScheduler(spec, world.config, world.kv_cache_config)

    def add(self, request: Any) -> None:
        self.timed("admit", self.scheduler.on_new_request, request)

    def step(self, output: Any) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata

        meta = self.timed("plan", self.scheduler.build_connector_meta, output)
        jobs = dict.fromkeys([*meta.load_jobs, *meta.store_jobs], 1)
        self.report(OffloadingWorkerMetadata(jobs), {job.req_id for job in meta.load_jobs.values()})
        self.moves(
            sum(len(job.src_spec.block_ids) for job in meta.store_jobs.values()),
            sum(len(job.dst_spec.block_ids) for job in meta.load_jobs.values()),
        )

    def finish(self, request: Any, _: list[int]) -> None:
        self.timed("finish", self.scheduler.request_finished, request)


# The engine.


class Engine:
    """A small engine with continuous batching, which makes the calls of a connector."""

    def __init__(self, world: VllmWorld, pool: Any, contestant: Any) -> None:
        self._world, self.pool, self.contestant = world, pool, contestant
        self.running: dict[str, Any] = {}
        self._tables: dict[str, list[int]] = {}
        self._new: set[str] = set()
        self._finished: set[str] = set()

    def request(self, name: str, prompt: Sequence[int]) -> Any:
        return self._world.request(name, prompt)

    def admit(self, request: Any) -> int:
        """Add a request, match it, and allocate blocks for the matched tokens. Returns their number."""
        name = request.request_id
        self.contestant.add(request)
        hit: int = self.contestant.match(request)
        self._tables[name] = []
        if hit:
            self._allocate(request, hit)
            self.contestant.allocated(request, self._tables[name], hit)
        self.running[name] = request
        self._new.add(name)
        return hit

    def loaded(self, request: Any, hit: int) -> None:
        """Continue a request after its load."""
        request.num_computed_tokens = hit
        self.pool.cache(request, self._tables[request.request_id], 0, hit // BLOCK_TOKENS)

    def step(self, scheduled: dict[str, int] | None = None) -> None:
        """Make one step. scheduled: request -> tokens; by default one token of every running request."""
        tokens = dict.fromkeys(self.running, 1) if scheduled is None else scheduled
        new, cached = [], []
        for name, count in tokens.items():
            request = self.running[name]
            end = request.num_computed_tokens + count
            fresh = self._allocate(request, end)
            if name in self._new:
                self.contestant.allocated(request, self._tables[name], 0)
                new.append((request, list(self._tables[name])))
                self._new.discard(name)
            else:
                cached.append((request, fresh))
            first = request.num_computed_tokens // BLOCK_TOKENS
            self.pool.cache(request, self._tables[name], first, end // BLOCK_TOKENS)
        finished, self._finished = self._finished, set()
        self.contestant.step(self._world.output(new, cached, tokens, finished))
        for name, count in tokens.items():
            request = self.running[name]
            request.num_computed_tokens += count
            if request.num_computed_tokens == request.num_tokens:
                request.append_output_token_ids([7])

    def prefill(self, budget: int) -> None:
        """Compute all prompts in steps of `budget` tokens, one request after the other."""
        while True:
            scheduled: dict[str, int] = {}
            left = budget
            for name, request in self.running.items():
                count = min(left, request.num_prompt_tokens - request.num_computed_tokens)
                if count > 0:
                    scheduled[name] = count
                    left -= count
            if not scheduled:
                return
            self.step(scheduled)

    def finish(self, request: Any) -> None:
        name = request.request_id
        del self.running[name]
        table = self._tables.pop(name)
        self._world.end(request)
        self.contestant.finish(request, table)
        self.pool.free_blocks(table[::-1])
        self._finished.add(name)

    def finish_all(self) -> None:
        for request in list(self.running.values()):
            self.finish(request)
        self.step()

    def _allocate(self, request: Any, tokens: int) -> list[int]:
        table = self._tables[request.request_id]
        fresh: list[int] = self.pool.take(-(-tokens // BLOCK_TOKENS) - len(table))
        table += fresh
        return fresh


def prompt_of(number: int, tokens: int) -> list[int]:
    """A prompt that shares no block with the prompts of other numbers. tokens: its length."""
    return [number, *range(tokens - 1)]


# The scenarios: each drives an engine, and returns the cost of a unit of work.

Figures = dict[str, float]


def measure(engine: Engine, work: Callable[[], object]) -> Counter[str]:
    """Run `work` and measure it. Returns the time of each part (us).

    Garbage collection is off, because it is random which call would start it.
    """
    contestant = engine.contestant
    contestant.spent.clear()
    gc.collect()
    gc.disable()
    contestant.measuring = True
    work()
    contestant.measuring = False
    gc.enable()
    return Counter({part: spent / 1000 for part, spent in contestant.spent.items()})


def statistics(spent: Counter[str], count: int, unit: str) -> Figures:
    """The cost of the statistics, if the contestant has any. count: number of units."""
    if "statistics" not in spent:
        return {}
    return {f"get_kv_connector_stats, us a {unit}": spent["statistics"] / count}


def alone(engine: Engine, *, blocks: int = 32) -> Figures:
    """Requests that miss, one after the other: the engine is empty between two of them."""
    count, tokens = 64, blocks * BLOCK_TOKENS + 8

    def serve(first: int) -> None:
        for number in range(first, first + count):
            engine.admit(engine.request(f"r{number}", prompt_of(number, tokens)))
            engine.prefill(1 << 30)
            engine.step()
            engine.finish_all()

    serve(0)
    spent = measure(engine, lambda: serve(count))
    return {
        **statistics(spent, count, "request"),
        "all, us a request": sum(spent.values()) / count,
    }


def idle_decode(engine: Engine) -> Figures:
    """256 requests decode; in the measured steps no request completes a block."""
    count, cycles = 256, 12
    for number in range(count):
        engine.admit(engine.request(f"r{number}", prompt_of(number, 512)))
    engine.prefill(1 << 30)

    def decode() -> None:
        for place in range(cycles * BLOCK_TOKENS):
            engine.contestant.measuring = 1 <= place % BLOCK_TOKENS <= BLOCK_TOKENS - 2
            engine.step()

    spent = measure(engine, decode)
    steps = cycles * (BLOCK_TOKENS - 2)
    return {
        "build_connector_meta, us a request and step": spent["plan"] / steps / count,
        "update_connector_output, us a step": spent["complete"] / steps,
        **statistics(spent, steps, "step"),
    }


def busy_decode(engine: Engine) -> Figures:
    """256 requests decode; in every step sixteen requests complete a block."""
    count, steps = 256, 12 * BLOCK_TOKENS
    for number in range(count):
        engine.admit(engine.request(f"r{number}", prompt_of(number, 512 + number % BLOCK_TOKENS)))
    engine.prefill(1 << 30)
    for _ in range(BLOCK_TOKENS):
        engine.step()

    def decode() -> None:
        for _ in range(steps):
            engine.step()

    spent = measure(engine, decode)
    return {
        "build_connector_meta, us a request and step": spent["plan"] / steps / count,
        "update_connector_output, us a step": spent["complete"] / steps,
        **statistics(spent, steps, "step"),
    }


def prefill(engine: Engine, *, budget: int, waves_before: int = 0) -> Figures:
    """Waves of 32 new requests of 64 to 512 blocks: prefill, one decode step of all, the end of all."""
    sizes = [64 + 448 * number // 31 for number in range(32)]

    def wave(number: int) -> None:
        for place, size in enumerate(sizes):
            prompt = prompt_of(number * 32 + place, size * BLOCK_TOKENS)
            engine.admit(engine.request(f"w{number}-{place}", prompt))
        engine.prefill(budget)
        engine.step()
        engine.finish_all()

    for number in range(waves_before + 1):
        wave(number)
    waves = range(waves_before + 1, waves_before + 4)
    spent = measure(engine, lambda: [wave(number) for number in waves])
    blocks = len(waves) * sum(sizes)
    return {
        "build_connector_meta, us a block": spent["plan"] / blocks,
        "update_connector_output, us a block": spent["complete"] / blocks,
        "match and allocation, us a block": spent["admit"] / blocks,
        "request_finished, us a request": spent["finish"] / len(waves) / len(sizes),
    }


def matching(engine: Engine) -> Figures:
    """Requests whose first 128 blocks are on the host, one after the other: they are matched, loaded,
    computed and finished."""
    blocks, prompts, rounds = 128, 32, 3
    tokens = blocks * BLOCK_TOKENS + 8
    for number in range(prompts):
        engine.admit(engine.request(f"first-{number}", prompt_of(number, tokens)))
    engine.prefill(1 << 30)
    engine.step()
    engine.finish_all()
    names = [f"{again}-{number}" for again in range(rounds) for number in range(prompts)]
    requests = [engine.request(name, prompt_of(int(name.split("-")[1]), tokens)) for name in names]

    def serve() -> None:
        for request in requests:
            hit = engine.admit(request)
            assert hit == blocks * BLOCK_TOKENS, hit
            engine.step({})
            engine.loaded(request, hit)
            engine.step({request.request_id: 8})
            engine.step()
            engine.finish_all()

    spent = measure(engine, serve)
    hits = len(requests) * blocks
    return {
        "match and allocation, us a block": spent["admit"] / hits,
        "build_connector_meta (4 steps), us a block": spent["plan"] / hits,
        "update_connector_output, us a block": spent["complete"] / hits,
        "all, us a request": sum(spent.values()) / len(requests),
    }


def lazy(engine: Engine) -> Figures:
    """A device pool full of cached blocks; each step allocates 128 blocks and frees 128."""
    size, before, steps = 128, 3 * DEVICE_BLOCKS // 128, 128
    requests = [
        engine.request(f"r{number}", prompt_of(number, size * BLOCK_TOKENS))
        for number in range(before + steps)
    ]

    def serve(these: Sequence[Any]) -> None:
        for request in these:
            engine.admit(request)
            engine.prefill(1 << 30)
            engine.finish(request)

    serve(requests[:-steps])
    spent = measure(engine, lambda: serve(requests[-steps:]))
    engine.admit(engine.request("last", prompt_of(len(requests), 512)))
    engine.prefill(1 << 30)
    engine.step()
    idle = measure(engine, lambda: [engine.step() for _ in range(BLOCK_TOKENS - 2)])
    return {
        "build_connector_meta, us a step that takes 128 blocks": spent["plan"] / steps,
        "update_connector_output, us a step": spent["complete"] / steps,
        "build_connector_meta, us an idle step": idle["plan"] / (BLOCK_TOKENS - 2),
    }


@dataclass(frozen=True)
class Scenario:
    title: str
    drive: Callable[[Engine], Figures]
    host_blocks: int = HOST_BLOCKS
    lazy: bool = False
    alone: bool = False
    """Whether only kvsm is measured, because vLLM's schedulers create an object for each host block."""


SCENARIOS = {
    "idle": Scenario("Decode of 256 requests, nothing to store", idle_decode),
    "decode": Scenario("Decode of 256 requests, of which 16 complete a block in each step", busy_decode),
    "prefill": Scenario(
        "Prefill of 32 requests with 64 to 512 blocks, in one step",
        lambda engine: prefill(engine, budget=1 << 30),
    ),
    "chunked": Scenario(
        f"The same in steps of {STEP_TOKENS} tokens",
        lambda engine: prefill(engine, budget=STEP_TOKENS),
    ),
    "evicting": Scenario(
        "The same in one step, into a host pool that is full",
        lambda engine: prefill(engine, budget=1 << 30, waves_before=1),
        host_blocks=1 << 14,
    ),
    "match": Scenario("A hit of 128 blocks, from the match to the end of the request", matching),
    "miss": Scenario(
        "A prompt of one block that misses, from the match to the end of the request, one at a time",
        lambda engine: alone(engine, blocks=1),
    ),
    **{
        f"alone-{slots}": Scenario(
            f"Requests of 32 blocks, one at a time, into {slots:,} slots",
            alone,
            host_blocks=slots,
            alone=True,
        )
        for slots in (10**4, 10**5, 10**6)
    },
    "lazy": Scenario(f"Lazy store, target {LAZY_TARGET} blocks", lazy, lazy=True),
}


def contestants(world: VllmWorld, scenario: Scenario) -> dict[str, Callable[[Any], Any]]:
    host, lazily = scenario.host_blocks, scenario.lazy
    found: dict[str, Callable[[Any], Any]] = {
        "kvsm, log on disk": lambda pool: Kvsm(world, pool, host, lazy=lazily, log=True),
        "kvsm, no log": lambda pool: Kvsm(world, pool, host, lazy=lazily, log=False),
    }
    if scenario.alone:
        return found
    found["vLLM SimpleCPUOffloadScheduler"] = lambda pool: Simple(world, pool, host, lazy=lazily)
    if not lazily:
        found["vLLM OffloadingConnectorScheduler"] = lambda pool: Offloading(world, pool, host)
    return found


@dataclass
class Results:
    """The figures of one contestant in each round, and the blocks that it moved."""

    figures: dict[str, list[float]] = field(default_factory=dict)
    moved: Counter[str] = field(default_factory=Counter)


def by_turns(world: VllmWorld, scenario: Scenario, rounds: int) -> dict[str, Results]:
    results: dict[str, Results] = {}
    for number in range(rounds):
        for name, make in contestants(world, scenario).items():
            pool = world.pool()
            contestant = make(pool)
            figures = scenario.drive(Engine(world, pool, contestant))
            contestant.close()
            entry = results.setdefault(name, Results())
            entry.moved = contestant.moved
            for figure, value in figures.items():
                entry.figures.setdefault(figure, []).append(value)
            click.echo(f"  round {number + 1}: {name}: {figures}", err=True)
    return results


def table(scenario: Scenario, results: dict[str, Results]) -> list[str]:
    best = results["kvsm, log on disk"].figures
    rows = []
    for name, entry in results.items():
        cells = []
        for figure in best:
            values = entry.figures.get(figure)
            if values is None:
                cells.append("")
                continue
            ratio = median(values) / median(best[figure])
            cells.append(f"{median(values):.2f} ({min(values):.2f} .. {max(values):.2f}), {ratio:.2f}")
        rows.append([name, *cells, f"{entry.moved['stored']:,} / {entry.moved['loaded']:,}"])
    header = ["contestant", *best, "blocks stored / loaded"]
    return [f"### {scenario.title}", "", *markdown_table(header, rows), ""]


@click.command()
@click.option("--only", type=click.Choice(list(SCENARIOS)), multiple=True, help="Only these scenarios.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="Write the tables here, with the command.")
def main(only: tuple[str, ...], rounds: int, output: Path | None) -> None:
    """Measure what a connector's scheduler side costs the engine."""
    with tempfile.TemporaryDirectory() as model:
        world = VllmWorld(Path(model))
        lines = [f"CPU time; median (least .. most) of {rounds} rounds, times kvsm with its log on disk.", ""]
        for name, scenario in SCENARIOS.items():
            if not only or name in only:
                lines += table(scenario, by_turns(world, scenario, rounds))
    publish("Scheduler", f"vLLM {world.version}", lines, output)


if __name__ == "__main__":
    main()
