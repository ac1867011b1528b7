"""Measure the hit rate of each eviction policy, at several sizes of the host pool.

The requests of a workload are served by a real `Offloader`, one after the other: the blocks of a request
are matched, matched blocks are loaded, the other ones are stored, and all copies end before the next request.
A block of a trace is one of its hash ids (512 prompt tokens). *Hits* are the leading blocks of a prompt that
a match finds on the host. The hit rate is hits divided by all blocks of all prompts. There is no device
cache, and output blocks are not stored.

The first table of a workload has the hit rates:

- `vLLM lru`, `vLLM arc`: vLLM's `CPUOffloadingManager` with its own policies, in the same order of calls
  (`vllm_manager`). It stores all new blocks of a prompt, or none if they do not all find room;
- `optimum`: the most hits that any policy could get in a pool of this size (see `optimal_hits`);
- `no limit`: hits in a pool that never evicts;
- `auto - best`: the hit rate of `auto` minus that of the best other policy of kvsm, in points;
- `gap closed`: the share of the gap between `lru` and the optimum that `auto` closes.

The second table has what each policy costs:

- `stores per hit`: the blocks that are copied to the host for each block that is hit;
- `GiB to the host`, `GiB from the host`: the bytes that are copied, over all orders if a workload has
  several. All hits are loaded. A token has 128 KiB, as in a model with 32 layers and 8 KV heads of 128
  numbers of 16 bits;
- `us a block`: CPU time of all calls of the `Offloader` or of vLLM's manager, and of the loop around them,
  divided by all blocks of all prompts. There is no event log. It is measured once, so other load on the
  machine shows.

The workloads:

- `--trace`: a trace;
- generated conversations (`kvsm.serving.traces.multi_turn`);
- `--agents`: recorded sessions of coding agents, with blocks of 1,024 tokens. They are served in the order of
  their recorded times, in lock step, and with memoryless think times. The pool is a share of the *live
  context*: the blocks of the last prompts of all running agents, on average;
- loops, scans, floods and moving working sets (`synthetic`).

    KVSM_TRACE=TRACE.jsonl KVSM_AGENTS=SESSIONS.jsonl.gz python benchmarks/policies.py \
        --output benchmarks/results/policies.md

Without vLLM, its columns and rows are missing.

`results/policies_unseen.md` has the workloads of data that was not read while the policies were written:
the synthetic trace of Mooncake's FAST '25 release, and a folder with those traces of kv-cache-tester that
are not among the recorded sessions above.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import islice, takewhile
from pathlib import Path
from typing import NamedTuple

import click
from control_plane import lives, serve_step
from page import markdown_table, publish
from synthetic import REQUESTS, flood_beside_conversations, loop, moving_set, scans_beside_prefixes
from vllm_manager import VLLM_POLICIES, VllmRequest, make_manager, which_vllm
from workload import (
    TRACE_BLOCK_TOKENS,
    Requests,
    Turn,
    agent_turns,
    agents_at_random,
    agents_in_lock_step,
    expanded,
)

from kvsm.core.offloader import Offloader, PreparedStore
from kvsm.core.policies import POLICIES
from kvsm.events import OffloadConfig

HOST_BLOCKS = (1_000, 2_000, 5_000, 10_000, 20_000, 50_000)
DEVICE_BLOCKS = 1 << 14

SESSIONS, AGENT_BLOCK_TOKENS = 80, 1024
SEEDS = 3
"""How many orders of random think times are averaged."""
VLLM = "vLLM "
CONTESTANTS = (*POLICIES, *(VLLM + policy for policy in VLLM_POLICIES))
"""Policies of kvsm, and of vLLM if it is installed."""
LOOP_BLOCKS = 1_600
LOOP_TIMES = (1.6, 2.0, 3.0, 4.0)
"""The length of the loop, divided by the size of the pool."""

BASE, TESTED = "lru", "auto"
"""`TESTED` is compared with all others of `POLICIES`. `BASE` is where the gap to the optimum begins."""
TOKEN_BYTES, GIB = 1 << 17, 1 << 30
WORSE_POINTS = 0.5
"""The first table lists the rows where `TESTED` is behind the best other policy by more than this."""


@dataclass(frozen=True)
class Workload:
    """Requests, and the pools that serve them.

    variants: the same workload with several seeds, whose results are averaged; most have only one.
    sizes: of the pool, each with its label.
    block_tokens: the number of tokens in a block.
    """

    title: str
    variants: Sequence[Requests]
    sizes: Sequence[tuple[str, int]]
    note: str = ""
    block_tokens: int = TRACE_BLOCK_TOKENS


class Served(NamedTuple):
    """The result of one policy.

    stores: the number of blocks copied to the host.
    cpu_s: CPU time of the calls of the core or of the manager.
    """

    hits: int
    stores: int
    cpu_s: float

    def __add__(self, other: Served) -> Served:  # type: ignore[override]
        return Served(self.hits + other.hits, self.stores + other.stores, self.cpu_s + other.cpu_s)


class _CountingOffloader(Offloader):
    """Counts the blocks that are stored."""

    stores = 0

    def prepare_store(
        self, request: str, keys: Sequence[bytes], device_blocks: Sequence[int], parent: bytes | None = None
    ) -> PreparedStore:
        prepared = super().prepare_store(request, keys, device_blocks, parent)
        self.stores += len(prepared.keys)
        return prepared


def serve_all(policy: str, requests: Requests, host_blocks: int) -> Served:
    """Serve all requests with a policy of kvsm, or with one of vLLM ("vLLM lru")."""
    name = policy.removeprefix(VLLM)
    return serve_vllm(name, requests, host_blocks) if name != policy else serve(policy, requests, host_blocks)


def serve_vllm(policy: str, requests: Requests, host_blocks: int) -> Served:
    """Serve all requests with vLLM's manager and one of its policies, in the order of calls of `serve`."""
    manager = make_manager(policy, host_blocks)
    hits = stores = 0
    started = time.process_time()
    for number, keys in enumerate(requests):
        request = VllmRequest(manager, str(number), keys)
        found = request.plan_load()
        if found < len(keys):
            stores += request.plan_store(keys[found:])
        request.end_copies()
        request.finish()
        hits += found
    return Served(hits, stores, time.process_time() - started)


def serve(policy: str, requests: Requests, host_blocks: int) -> Served:
    """Serve all requests with this policy of kvsm."""
    config = OffloadConfig(host_blocks=host_blocks, device_blocks=DEVICE_BLOCKS, policy=policy)
    core = _CountingOffloader(config)
    started = time.process_time()
    hits = sum(serve_step(core, number, [keys]) for number, keys in enumerate(requests))
    return Served(hits, core.stores, time.process_time() - started)


def optimal_hits(requests: Requests, host_blocks: int) -> int:
    """The most hits that any choice of evictions can get in a pool of this size, knowing all requests.

    This is Belady's MIN: evict the block whose next use is furthest in the future. It may also evict a block
    that has just been computed, that is, refuse its store, which most policies cannot. So it is an upper
    bound for all policies.

    MIN is optimal if blocks are hit one by one. Here a block is hit only if the block before it is hit, too.
    MIN stays optimal: a key names a whole prefix, so each use of a block also uses all blocks before it; and
    among blocks with the same next use the later one is evicted first, so a prefix never loses a block before
    its end.
    """
    uses: dict[bytes, list[int]] = {}
    for number in range(len(requests) - 1, -1, -1):
        for key in requests[number]:
            uses.setdefault(key, []).append(number)
    resident: dict[bytes, int] = {}
    """Key -> the number of the request that uses it next."""
    by_next_use: list[tuple[int, int, bytes]] = []
    """A heap, sorted by the furthest next use, then by the last block of a request.

    Entries may be outdated.
    """
    hits = 0
    for keys in requests:
        hits += sum(1 for _ in takewhile(resident.__contains__, keys))
        for place, key in enumerate(keys):
            uses[key].pop()
            resident.pop(key, None)
            if uses[key]:
                resident[key] = uses[key][-1]
                heappush(by_next_use, (-resident[key], -place, key))
        while len(resident) > host_blocks:
            next_use, _, key = heappop(by_next_use)
            if resident.get(key) == -next_use:
                del resident[key]
    return hits


class Row(NamedTuple):
    """What is measured of a workload at one size of the pool. served: by policy."""

    workload: str
    size: str
    total: int
    served: dict[str, Served]
    optimum: int
    no_limit: int

    def rate(self, policy: str) -> float:
        """Return the hit rate of a policy."""
        return self.served[policy].hits / self.total

    def best_other(self) -> str:
        """Return the best policy of kvsm apart from `TESTED`."""
        others = (policy for policy in self.served if policy in POLICIES and policy != TESTED)
        return max(others, key=self.rate)

    def ahead(self) -> float:
        """Return the points by which `TESTED` is better than the best other policy of kvsm."""
        return 100 * (self.rate(TESTED) - self.rate(self.best_other()))

    def closed(self) -> str:
        """Return the share of the gap between `BASE` and the optimum that `TESTED` closes."""
        gap = self.optimum - self.served[BASE].hits
        return f"{(self.served[TESTED].hits - self.served[BASE].hits) / gap:.0%}" if gap else "no gap"

    def hit_cells(self) -> list[str]:
        """Return the row of the workload's hit rates."""
        best = max(served.hits for served in self.served.values())
        marks = {policy: "**" if served.hits == best else "" for policy, served in self.served.items()}
        rates = [f"{mark}{self.rate(policy):.1%}{mark}" for policy, mark in marks.items()]
        bounds = [f"{hits / self.total:.1%}" for hits in (self.optimum, self.no_limit)]
        return [self.size, *rates, *bounds, f"{self.ahead():+.1f}", self.closed()]

    def cost_rows(self, block_tokens: int) -> list[list[str]]:
        """Return the rows of the workload's costs, one for each policy."""
        return [
            [
                self.size,
                policy,
                f"{served.hits / self.total:.1%}",
                f"{served.stores / served.hits:.2f}" if served.hits else "no hits",
                *(f"{n * block_tokens * TOKEN_BYTES / GIB:,.0f}" for n in (served.stores, served.hits)),
                f"{1e6 * served.cpu_s / self.total:.1f}",
            ]
            for policy, served in self.served.items()
        ]


HIT_HEADER = ["host slots", *CONTESTANTS, "optimum", "no limit", f"{TESTED} - best", "gap closed"]
COST_HEADER = [
    *("host slots", "policy", "hit rate", "stores per hit", "GiB to the host", "GiB from the host"),
    "us a block",
]


def measure(workload: Workload) -> Iterator[Row]:
    """Measure a row for each size of the pool."""
    variants = workload.variants
    total = sum(map(lives, variants))
    no_limit = sum(optimal_hits(requests, lives(requests)) for requests in variants)
    gc.collect()
    gc.freeze()  # The collector shall not scan the workload.
    for label, host_blocks in workload.sizes:
        served = {
            policy: sum(
                (serve_all(policy, requests, host_blocks) for requests in variants), start=Served(0, 0, 0.0)
            )
            for policy in CONTESTANTS
        }
        optimum = sum(optimal_hits(requests, host_blocks) for requests in variants)
        row = Row(workload.title, label, total, served, optimum, no_limit)
        click.echo(f"  {workload.title}: {' | '.join(row.hit_cells())}", err=True)
        yield row


def section(workload: Workload, rows: Sequence[Row]) -> list[str]:
    """A section of the page, with a row for each size of the pool."""
    first = workload.variants[0]
    several = f"the first of {len(workload.variants)} orders: " if len(workload.variants) > 1 else ""
    size = f"{several}{len(first):,} requests, {lives(first):,} blocks, "
    about = f"{size}{len({key for keys in first for key in keys}):,} of them distinct. {workload.note}"
    about = about[0].upper() + about[1:].rstrip()
    costs = [cells for row in rows for cells in row.cost_rows(workload.block_tokens)]
    return [
        f"### {workload.title}",
        "",
        about,
        "",
        *markdown_table(HIT_HEADER, [row.hit_cells() for row in rows]),
        "",
        *markdown_table(COST_HEADER, costs),
        "",
    ]


def summary(rows: Sequence[Row]) -> list[str]:
    """A section of the page: how `TESTED` compares with the best other policy of each row."""
    behind = sorted((row for row in rows if row.ahead() < -WORSE_POINTS), key=Row.ahead)
    ahead = sum(row.ahead() > WORSE_POINTS for row in rows)
    lines = [
        f"### `{TESTED}` beside the best other policy of each row",
        "",
        f"Of {len(rows)} rows, `{TESTED}` is ahead by more than {WORSE_POINTS} points in {ahead}, and behind "
        f"by more than {WORSE_POINTS} points in {len(behind)}:",
        "",
    ]
    header = ["workload", "host slots", "best other", "its hit rate", TESTED, "points"]
    table = [
        [
            row.workload,
            row.size,
            row.best_other(),
            f"{row.rate(row.best_other()):.1%}",
            f"{row.rate(TESTED):.1%}",
            f"{row.ahead():+.1f}",
        ]
        for row in behind
    ]
    return [*lines, *markdown_table(header, table), ""]


def plain_sizes(sizes: Sequence[int]) -> list[tuple[str, int]]:
    """Label each size with its number."""
    return [(f"{size:,}", size) for size in sizes]


def synthetic_workloads(limit: int | None) -> Iterator[Workload]:
    """The workloads that need no data, apart from the conversations."""
    requests = min(limit or REQUESTS, REQUESTS)
    pools = [(times, round(LOOP_BLOCKS / times)) for times in LOOP_TIMES]
    sizes = [(f"{pool:,} (1/{times:g} of the loop)", pool) for times, pool in pools]
    yield Workload("A loop", [loop(requests, LOOP_BLOCKS)], sizes, f"The loop has {LOOP_BLOCKS:,} blocks.")
    note = "The prefixes have 600 blocks."
    sizes = plain_sizes((300, 600, 1_200))
    yield Workload("Scans beside hot prefixes", [scans_beside_prefixes(requests, 60)], sizes, note)
    note = "No request hits a block of the flood, which is about half of all blocks."
    sizes = plain_sizes((1_000, 2_000, 5_000))
    title = "A flood of unique prompts beside conversations"
    yield Workload(title, [flood_beside_conversations(requests)], sizes, note)
    note = "The working set has 1,000 blocks."
    for every in (250, 2_000):
        title = f"A working set that moves every {every:,} requests"
        yield Workload(title, [moving_set(requests, 100, every)], plain_sizes((250, 500, 1_000)), note)


def agent_workload(
    title: str, variants: Sequence[Iterator[Turn]], shares: Sequence[tuple[str, float]], limit: int | None
) -> Workload:
    """Make a workload of recorded sessions. shares: of the live context that the pool can hold."""
    turns = [list(islice(variant, limit)) for variant in variants]
    live = sum(turn.live_blocks for variant in turns for turn in variant) / sum(map(len, turns))
    sizes = [(f"{int(live * share):,} ({label})", int(live * share)) for label, share in shares]
    requests = [[turn.keys for turn in variant] for variant in turns]
    note = f"The live context has {live:,.0f} blocks."
    return Workload(title, requests, sizes, note, AGENT_BLOCK_TOKENS)


def agent_workloads(path: Path, limit: int | None) -> Iterator[Workload]:
    """The recorded sessions, in the order of their times and in others."""
    shares = (("1/4", 0.25), ("1/2", 0.5), ("3/4", 0.75))
    for at_once in (24, 14):
        turns = agent_turns(path, at_once, SESSIONS, AGENT_BLOCK_TOKENS)
        yield agent_workload(f"Sessions of coding agents, {at_once} at once", [turns], shares, limit)
    turns = agents_in_lock_step(path, 14, SESSIONS, AGENT_BLOCK_TOKENS)
    yield agent_workload("Sessions of coding agents, 14 in lock step", [turns], shares[:2], limit)
    variants = [agents_at_random(path, 24, SESSIONS, AGENT_BLOCK_TOKENS, seed) for seed in range(SEEDS)]
    title = "Sessions of coding agents, 24 with memoryless think times"
    yield agent_workload(title, variants, shares[:2], limit)


def trace_workload(title: str, trace: Path | None, sizes: Sequence[int], limit: int | None) -> Workload:
    """Make a workload of a trace, or of generated conversations."""
    return Workload(title, [expanded(trace, TRACE_BLOCK_TOKENS, limit)], plain_sizes(sizes))


@click.command()
@click.option(
    "--trace", type=click.Path(path_type=Path), envvar="KVSM_TRACE", help="A Mooncake-format trace."
)
@click.option(
    "--agents", type=click.Path(path_type=Path), envvar="KVSM_AGENTS", help="Recorded sessions, in gzip."
)
@click.option("--data-only", is_flag=True, help="Only the trace and the sessions, no generated workloads.")
@click.option("--requests", "limit", type=int, help="Of each workload, at most this many.")
@click.option(
    "--host-blocks",
    type=int,
    multiple=True,
    default=HOST_BLOCKS,
    show_default=True,
    help="Pool sizes for the trace and the generated conversations.",
)
@click.option("--output", type=click.Path(path_type=Path), help="Write the tables here, with the command.")
def main(
    trace: Path | None,
    agents: Path | None,
    data_only: bool,
    limit: int | None,
    host_blocks: tuple[int, ...],
    output: Path | None,
) -> None:
    """Measure the hits and costs of every policy of kvsm and of vLLM, on traces and generated workloads."""
    sources: list[Callable[[], Iterator[Workload]]] = []
    if trace is not None:
        sources.append(lambda: iter([trace_workload(trace.name, trace, host_blocks, limit)]))
    if not data_only:
        sources.append(lambda: iter([trace_workload("Generated conversations", None, host_blocks, limit)]))
    if agents is not None:
        sources.append(partial(agent_workloads, agents, limit))
    if not data_only:
        sources.append(partial(synthetic_workloads, limit))
    lines, measured = [], list[Row]()
    for source in sources:
        for workload in source():
            rows = list(measure(workload))
            lines += section(workload, rows)
            measured += rows
    note = "a block of a trace or of generated conversations is 512 tokens, of a coding agent 1,024"
    publish("Eviction policies", f"{note}; {which_vllm()}", [*summary(measured), *lines], output)


if __name__ == "__main__":
    main()
