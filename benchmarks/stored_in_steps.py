"""Measure how hit rates depend on storing prompts over several steps, as with chunked prefill and decoding.

Eight requests of a workload run at once; a new one begins when another one ends. A request is matched once,
matched blocks are loaded, and then it takes a step for each of its other blocks. It stores them in pieces:
all blocks in its first step, four in each fourth step, or one in each step. So requests begin and end alike
in all columns. All copies of a step end before the next step. *Hits* are the leading blocks of a prompt that
its match finds. A block is 512 tokens (one hash id of the trace).

A piece of a prompt is useless without the pieces before it. A policy that evicts in the order of the steps
evicts the beginning first, so with smaller pieces it gets fewer hits.

No order of eviction helps a request that asks for blocks which a running request has yet to store. With
smaller pieces this happens more often. A column "late" shows how many more blocks a match would have found if
the running requests had stored all of their blocks when they began.

With `--agents`, recorded sessions of coding agents run 8 and 24 at once (`workload.agent_turns`). The pool is
half of the live context, that is of the blocks of the last prompts of all running agents, on average. An
agent sends its next request when the previous one is stored. For whole prompts, one request after the other,
two more rows are given: LRU that evicts the beginning first, and the offline optimum.

If vLLM is installed, its own manager gets the same calls (`vllm_manager`).

    KVSM_TRACE=TRACE.jsonl KVSM_AGENTS=SESSIONS.jsonl.gz python benchmarks/stored_in_steps.py \
        --output benchmarks/results/stored_in_steps.md
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice, takewhile
from pathlib import Path
from typing import NamedTuple, Protocol

import click
from control_plane import lives
from page import markdown_table, publish
from policies import optimal_hits
from vllm_manager import VLLM_POLICIES, VllmRequest, make_manager, which_vllm
from workload import TRACE_BLOCK_TOKENS, Requests, agent_turns, expanded

from kvsm.core.offloader import Offloader
from kvsm.core.policies import POLICIES
from kvsm.events import OffloadConfig

HOST_BLOCKS = (1_000, 3_000)
AT_ONCE = 8
AGENTS_AT_ONCE = (8, 24)
PIECES = (1 << 20, 4, 1)
DEVICE_BLOCKS = 1 << 14


class Host(Protocol):
    """A host pool under test."""

    def match(self, request: str, keys: Sequence[bytes]) -> int:
        """Load the leading keys that the host has. Returns their number."""

    def store(self, request: str, keys: Sequence[bytes], parent: bytes) -> None:
        """Store the next piece of a prompt. parent: the key before the piece; b"" for the first one."""

    def finish(self, request: str) -> None:
        """Finish a request."""

    def has(self, key: bytes) -> bool:
        """Whether the host has this block."""


class KvsmHost(Host):
    """kvsm's core, with a policy."""

    def __init__(self, policy: str, host_blocks: int) -> None:
        self._core = Offloader(
            OffloadConfig(host_blocks=host_blocks, device_blocks=DEVICE_BLOCKS, policy=policy)
        )

    def match(self, request: str, keys: Sequence[bytes]) -> int:
        core = self._core
        hits = core.match(request, keys).hits
        job = core.prepare_load(request, range(hits)) if hits else None
        if job is not None:
            core.submit([job.transfer])
            core.complete_load(job.transfer)
        return hits

    def store(self, request: str, keys: Sequence[bytes], parent: bytes) -> None:
        job = self._core.prepare_store(request, keys, range(len(keys)), parent).job
        if job is not None:
            self._core.submit([job.transfer])
            self._core.complete_store(job.transfer)

    def finish(self, request: str) -> None:
        self._core.finish(request)

    def has(self, key: bytes) -> bool:
        return key in self._core.ledger.index


class VllmHost(Host):
    """vLLM's manager, with one of its policies."""

    def __init__(self, policy: str, host_blocks: int) -> None:
        self._manager = make_manager(policy, host_blocks)
        self._requests: dict[str, VllmRequest] = {}

    def match(self, request: str, keys: Sequence[bytes]) -> int:
        running = self._requests[request] = VllmRequest(self._manager, request, keys)
        hits = running.plan_load()
        running.end_copies()
        return hits

    def store(self, request: str, keys: Sequence[bytes], parent: bytes) -> None:  # noqa: ARG002
        self._requests[request].plan_store(keys)
        self._requests[request].end_copies()

    def finish(self, request: str) -> None:
        self._requests.pop(request).finish()

    def has(self, key: bytes) -> bool:
        from vllm.v1.kv_offload.base import LookupResult, ReqContext

        return self._manager.lookup(key, ReqContext(req_id="")) is LookupResult.HIT


class Counted(NamedTuple):
    """The number of hits, and of blocks that were stored too late for a hit (see above)."""

    hits: int
    late: int


def count_hits(
    host: Host, requests: Iterable[tuple[int, Sequence[bytes]]], at_once: int, piece: int
) -> Counted:
    """Serve the requests, `at_once` of them at a time. Each stores `piece` blocks at a time.

    requests: (agent, keys) of each. An agent has one request at a time.
    """
    hits, late, running = 0, 0, dict[int, Running]()
    for number, (agent, keys) in enumerate(requests):
        while len(running) >= at_once or agent in running:
            _step(host, running, piece)
        found = host.match(str(number), keys)
        hits += found
        if found < len(keys) and running:
            to_store = (islice(other.keys, other.stored, None) for other in running.values())
            coming = set(chain.from_iterable(to_store))
            comes = (key in coming or host.has(key) for key in islice(keys, found, None))
            late += sum(1 for _ in takewhile(bool, comes))
        running[agent] = Running(str(number), keys, found, found)
    return Counted(hits, late)


@dataclass
class Running:
    """A running request.

    computed, stored: how many of its blocks are computed, and stored.
    """

    name: str
    keys: Sequence[bytes]
    computed: int
    stored: int


def _step(host: Host, running: dict[int, Running], piece: int) -> None:
    for agent, request in list(running.items()):
        if request.computed == request.stored < len(request.keys):
            parent = request.keys[request.stored - 1] if request.stored else b""
            host.store(request.name, request.keys[request.stored : request.stored + piece], parent)
            request.stored += piece
        request.computed += 1
        if request.computed >= len(request.keys):
            host.finish(request.name)
            del running[agent]


def hosts() -> dict[str, Callable[[int], Host]]:
    """Contestant -> the function that creates its host pool of a given size."""

    def kvsm(policy: str) -> Callable[[int], Host]:
        return lambda host_blocks: KvsmHost(policy, host_blocks)

    def vllm(policy: str) -> Callable[[int], Host]:
        return lambda host_blocks: VllmHost(policy, host_blocks)

    found = {policy: kvsm(policy) for policy in POLICIES}
    return found | {f"vLLM's {policy}": vllm(policy) for policy in VLLM_POLICIES}


HEADER = [
    "host slots",
    "policy",
    "whole prompts",
    "late",
    "4 blocks a step",
    "late",
    "1 block a step",
    "late",
]


def rows_of(
    title: str, requests: Sequence[tuple[int, Sequence[bytes]]], host_blocks: int, at_once: int
) -> list[list[str]]:
    """Measure each contestant. Returns a row for each."""
    total, rows = sum(len(keys) for _, keys in requests), []
    for name, make in hosts().items():
        counted = [count_hits(make(host_blocks), requests, at_once, piece) for piece in PIECES]
        cells = [f"{blocks / total:.1%}" for one in counted for blocks in one]
        rows.append([f"{host_blocks:,}", name, *cells])
        click.echo(f"  {title}, {' '.join(rows[-1])}", err=True)
    return rows


def table(title: str, requests: Requests, sizes: Sequence[int]) -> list[str]:
    """A section of the page, with a row for each contestant and size."""
    turns = list(enumerate(requests))
    rows = [row for host_blocks in sizes for row in rows_of(title, turns, host_blocks, AT_ONCE)]
    about = f"{len(requests):,} requests, {lives(requests):,} blocks."
    return [f"### {title}", "", about, "", *markdown_table(HEADER, rows), ""]


def agents_table(sessions: Path, at_once: int, limit: int | None) -> list[str]:
    """A section of the page: recorded sessions, `at_once` of them at a time."""
    turns = list(agent_turns(sessions, at_once, limit))
    total, prompts = sum(len(turn.keys) for turn in turns), [turn.keys for turn in turns]
    host_blocks = sum(turn.live_blocks for turn in turns) // len(turns) // 2
    title = f"Sessions of coding agents, {at_once} at once"
    rows = [
        [f"{host_blocks:,}", name, f"{hits / total:.1%}", *[""] * 5]
        for name, hits in (
            ("LRU, the beginning first", heads_first_hits(prompts, host_blocks)),
            ("optimum", optimal_hits(prompts, host_blocks)),
        )
    ]
    rows += rows_of(title, [(turn.agent, turn.keys) for turn in turns], host_blocks, at_once)
    about = f"{len(turns):,} requests, {total:,} blocks."
    return [f"### {title}", "", about, "", *markdown_table(HEADER, rows), ""]


def heads_first_hits(requests: Iterable[Sequence[bytes]], host_blocks: int) -> int:
    """The hits of an LRU pool that evicts the beginning of a prompt before its end."""
    pool: OrderedDict[bytes, None] = OrderedDict()
    hits = 0
    for keys in requests:
        hits += sum(1 for _ in takewhile(pool.__contains__, keys))
        for key in keys:
            pool[key] = None
            pool.move_to_end(key)
        while len(pool) > host_blocks:
            pool.popitem(last=False)
    return hits


@click.command()
@click.option(
    "--trace", type=click.Path(path_type=Path), envvar="KVSM_TRACE", help="A Mooncake-format trace."
)
@click.option(
    "--agents", type=click.Path(path_type=Path), envvar="KVSM_AGENTS", help="Recorded sessions, in gzip."
)
@click.option(
    "--requests", "limit", type=int, default=2_000, show_default=True, help="Most requests of each workload."
)
@click.option("--sessions", type=int, help="Most sessions of the agents.")
@click.option("--host-blocks", type=int, multiple=True, default=HOST_BLOCKS, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="Write the tables here, with the command.")
def main(
    trace: Path | None,
    agents: Path | None,
    limit: int,
    sessions: int | None,
    host_blocks: tuple[int, ...],
    output: Path | None,
) -> None:
    """Measure the hits of prompts that are stored over several steps, with every policy."""
    lines = []
    if trace is not None:
        lines += table(trace.name, expanded(trace, TRACE_BLOCK_TOKENS, limit), host_blocks)
    lines += table("Generated conversations", expanded(None, TRACE_BLOCK_TOKENS, limit), host_blocks)
    if agents is not None:
        for at_once in AGENTS_AT_ONCE:
            lines += agents_table(agents, at_once, sessions)
    publish("Prompts stored over several steps", f"one block is 512 tokens; {which_vllm()}", lines, output)


if __name__ == "__main__":
    main()
