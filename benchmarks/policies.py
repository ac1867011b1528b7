"""How many blocks each eviction policy saves from computation, at several sizes of the host pool.

Every request of the workload goes through a real `Offloader`, one after the other: its blocks are matched,
what matches is loaded, the rest is stored, and all copies end before the next request. A block is one hash id
of the trace (512 prompt tokens). Counted are *hits*: the blocks of a prompt, from its first on, that a match
finds on the host. The hit rate is hits by all blocks of all prompts. There is no device cache in front of the
pool, and output blocks are not stored.

The last columns say how much there is to gain:

- `optimum`: the most that any policy could have hit in a pool of that size (see `optimal_hits`);
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
    """Blocks that matches find, with this policy."""
    core = Offloader(OffloadConfig(host_blocks=host_blocks, device_blocks=DEVICE_BLOCKS, policy=policy))
    return sum(serve_step(core, number, [keys]) for number, keys in enumerate(requests))


def optimal_hits(requests: Requests, host_blocks: int) -> int:
    """The most hits that any choice of evictions gets from a pool of this size, knowing all requests.

    This is Belady's MIN: when the pool is too full, the block goes whose next use is furthest away. It may
    also drop a block that has just been computed, which is to refuse its store; a policy cannot do that. So
    it bounds all of them from above.

    MIN is optimal for blocks that are hit one by one. A hit here counts only behind a hit on the block before
    it. That takes nothing from MIN: a key names a whole prefix, so each use of a block also uses the blocks
    before it; of blocks with the same next use the later one goes first, so a prefix never loses a block
    before its end.
    """
    uses: dict[bytes, list[int]] = {}
    for number in range(len(requests) - 1, -1, -1):
        for key in requests[number]:
            uses.setdefault(key, []).append(number)
    resident: dict[bytes, int] = {}
    """Key -> the request that uses it next."""
    by_next_use: list[tuple[int, int, bytes]] = []
    """A heap: the furthest next use first, of one request the last block first. Entries may be outdated."""
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
