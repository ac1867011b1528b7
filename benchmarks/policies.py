"""Measure the hit rate of each eviction policy, at several sizes of the host pool.

The requests of the workload are served by a real `Offloader`, one after the other: the blocks of a request
are matched, matched blocks are loaded, the other ones are stored, and all copies end before the next request.
A block is one hash id of the trace (512 prompt tokens). *Hits* are the leading blocks of a prompt that a
match finds on the host. The hit rate is hits divided by all blocks of all prompts. There is no device cache,
and output blocks are not stored.

The last columns show the possible gain:

- `optimum`: the most hits that any policy could get in a pool of this size (see `optimal_hits`);
- `no limit`: hits in a pool that never evicts.

    KVSM_TRACE=TRACE.jsonl python benchmarks/policies.py --output benchmarks/results/policies.md
"""

from __future__ import annotations

import time
from heapq import heappop, heappush
from itertools import takewhile
from pathlib import Path

import click
from control_plane import lives, serve_step
from page import markdown_table, publish
from workload import TRACE_BLOCK_TOKENS, Requests, expanded

from kvsm.core.offloader import Offloader
from kvsm.core.policies import POLICIES
from kvsm.events import OffloadConfig

HOST_BLOCKS = (1_000, 2_000, 5_000, 10_000, 20_000, 50_000)
DEVICE_BLOCKS = 1 << 14


def hits_of(policy: str, requests: Requests, host_blocks: int) -> int:
    """The number of hits with this policy."""
    core = Offloader(OffloadConfig(host_blocks=host_blocks, device_blocks=DEVICE_BLOCKS, policy=policy))
    return sum(serve_step(core, number, [keys]) for number, keys in enumerate(requests))


def optimal_hits(requests: Requests, host_blocks: int) -> int:
    """The most hits that any choice of evictions can get in a pool of this size, knowing all requests.

    This is Belady's MIN: evict the block whose next use is furthest in the future. Unlike a policy it may
    also evict a block that has just been computed, that is, refuse its store. So it is an upper bound for all
    policies.

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


def table(title: str, requests: Requests, sizes: tuple[int, ...]) -> list[str]:
    """A section of the page, with a row for each size of the pool."""
    total, distinct = lives(requests), len({key for keys in requests for key in keys})
    no_limit = optimal_hits(requests, total)
    rows = []
    for host_blocks in sizes:
        started = time.process_time()
        hits = [hits_of(policy, requests, host_blocks) for policy in POLICIES]
        cells = [f"**{one / total:.1%}**" if one == max(hits) else f"{one / total:.1%}" for one in hits]
        bounds = [f"{one / total:.1%}" for one in (optimal_hits(requests, host_blocks), no_limit)]
        rows.append([f"{host_blocks:,}", f"{host_blocks * TRACE_BLOCK_TOKENS / 1e6:.1f} M", *cells, *bounds])
        click.echo(f"  {title}, {host_blocks} slots: {time.process_time() - started:.0f} s", err=True)
    return [
        f"### {title}",
        "",
        f"{len(requests):,} requests, {total:,} blocks, {distinct:,} of them distinct.",
        "",
        *markdown_table(["host slots", "tokens", *POLICIES, "optimum", "no limit"], rows),
        "",
    ]


@click.command()
@click.option(
    "--trace", type=click.Path(path_type=Path), envvar="KVSM_TRACE", help="A Mooncake-format trace."
)
@click.option("--requests", "limit", type=int, help="Of each workload, at most this many.")
@click.option("--host-blocks", type=int, multiple=True, default=HOST_BLOCKS, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="Write the tables here, with the command.")
def main(trace: Path | None, limit: int | None, host_blocks: tuple[int, ...], output: Path | None) -> None:
    """Measure the hit rate of every policy in `POLICIES`, on the trace and on generated conversations."""
    lines = []
    if trace is not None:
        lines += table(trace.name, expanded(trace, TRACE_BLOCK_TOKENS, limit), host_blocks)
    lines += table("Generated conversations", expanded(None, TRACE_BLOCK_TOKENS, limit), host_blocks)
    publish("Eviction policies", "one block is 512 tokens", lines, output)


if __name__ == "__main__":
    main()
