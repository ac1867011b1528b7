"""Compare kvsm's eviction policies with libCacheSim's, on one stream of single keys.

Both get the same keys one by one: a hit is a use, a miss is a store. There are no prefixes, batches, pins or
copies, so only the policies differ. Two rows are short models, written here, of libCacheSim's differences
from the paper and from kvsm:

- `s3fifo, filling main first`: before the first eviction, new blocks enter the main queue as soon as the
  small queue has its share. In the paper they enter the small queue.
- `slru, four segments`: four segments of a quarter each. kvsm has two, as in the paper.

A second table has libCacheSim's best policy beside kvsm's best, and beside `auto`, which may refuse a key. Of
libCacheSim all policies run that know neither the future nor a trained model (`OTHERS`).

libCacheSim is licensed under the GPLv3+, and kvsm never imports it. It runs in a separate Python, on a file
of keys:

    python -m venv ORACLE && ORACLE/bin/pip install libcachesim
    KVSM_TRACE=TRACE.jsonl python benchmarks/policy_oracle.py --oracle ORACLE/bin/python
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path

import click
from page import markdown_table, publish

from kvsm.core.policies import POLICIES, make_policy
from kvsm.serving.traces import multi_turn, read_trace

SIZES = (1_000, 5_000, 20_000, 50_000)

OTHERS = (
    *("Cacheus", "Clock", "Clock2QPlus", "ClockPro", "FIFO", "GDSF", "Hyperbolic", "LFU", "LFUDA", "LHD"),
    *("LIRS", "LRUK", "LeCaR", "MQ", "TwoQ", "WTinyLFU"),
)
"""Further policies of libCacheSim."""

ORACLE = f"""
import json, sys
import libcachesim
keys = [int(line) for line in open(sys.argv[1])]
request = libcachesim.Request()
request.obj_size = 1
found = {{}}
kinds = {{"lru": "LRU", "arc": "ARC", "s3fifo": "S3FIFO", "slru": "SLRU", "sieve": "Sieve"}}
kinds.update((kind, kind) for kind in {OTHERS!r})
for name, kind in kinds.items():
    for size in map(int, sys.argv[2:]):
        cache, hits = getattr(libcachesim, kind)(cache_size=size), 0
        for key in keys:
            request.obj_id = key
            hits += cache.get(request)
        found[f"{{name}} {{size}}"] = hits
print(json.dumps({{"version": libcachesim.__version__, "hits": found}}))
"""
"""The program that the other Python runs."""


def policy_hits(name: str, keys: Sequence[int], size: int) -> int:
    """Hits of one of kvsm's policies."""
    policy = make_policy(name, size)
    where: dict[int, int] = {}
    key_in = [0] * size
    free = list(range(size))
    hits = 0
    for key in keys:
        slot = where.get(key)
        if slot is not None:
            hits += 1
            policy.touched((slot,))
            continue
        named = (b"%d" % key,)
        recalled = policy.recall(named)
        if not free and not policy.admits(named, (1,), 0, frozenset())[0]:
            policy.refused(named)
            continue
        if recalled:
            policy.recalled(recalled)
        if not free:
            choice = policy.choose(1, frozenset())
            assert choice is not None
            victim = int(choice.victims[0])
            policy.evicted(choice, (b"%d" % key_in[victim],))
            del where[key_in[victim]]
            free.append(victim)
        slot = free.pop()
        where[key], key_in[slot] = slot, key
        policy.admitted((slot,), named)
    return hits


def s3fifo_hits(keys: Sequence[int], size: int, *, main_first: bool) -> int:
    """Hits of S3-FIFO, one key at a time.

    main_first: before the first eviction, new keys enter main as soon as small has its share.
    """
    small: OrderedDict[int, int] = OrderedDict()
    main: OrderedDict[int, int] = OrderedDict()
    ghosts: OrderedDict[int, None] = OrderedDict()
    share = max(1, size // 10)
    hits, full = 0, False
    for key in keys:
        queue = small if key in small else main
        if key in queue:
            hits, queue[key] = hits + 1, queue[key] + 1
            continue
        back = key in ghosts
        ghosts.pop(key, None)
        if len(small) + len(main) == size:
            full = True
            _evict(small, main, ghosts, share, size - share)
        fills_main = main_first and not full and len(small) >= share
        (main if back or fills_main else small)[key] = 0
    return hits


def _evict(
    small: OrderedDict[int, int],
    main: OrderedDict[int, int],
    ghosts: OrderedDict[int, None],
    share: int,
    ghosts_most: int,
) -> None:
    """Evict one key. share: the target size of `small`."""
    while len(small) >= share:
        key, uses = small.popitem(last=False)
        if uses > 1:
            main[key] = 0
            continue
        ghosts[key] = None
        if len(ghosts) > ghosts_most:
            ghosts.popitem(last=False)
        return
    while True:
        key, uses = main.popitem(last=False)
        if not uses:
            return
        main[key] = min(uses, 3) - 1


def slru_hits(keys: Sequence[int], size: int, segments: int) -> int:
    """Hits of SLRU with equal segments. A hit moves a key up by one segment.

    While the pool fills, new keys enter the lowest segment that has room.
    """
    queues: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(segments)]
    most, hits = size // segments, 0

    def enter(key: int, level: int) -> None:
        if len(queues[level]) == most:
            demoted, _ = queues[level].popitem(last=False)
            if level:
                enter(demoted, level - 1)
        queues[level][key] = None

    for key in keys:
        level = next((level for level, queue in enumerate(queues) if key in queue), None)
        if level is not None:
            hits += 1
            del queues[level][key]
            enter(key, min(level + 1, segments - 1))
        else:
            roomy = (level for level, queue in enumerate(queues) if len(queue) < most)
            enter(key, next(roomy, 0))
    return hits


def oracle_hits(python: str, keys: Sequence[int], sizes: Sequence[int]) -> tuple[str, dict[str, int]]:
    """libCacheSim's version, and its hits by policy and size."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        # libCacheSim treats the id 0 as missing.
        file.writelines(f"{key + 1}\n" for key in keys)
        file.flush()
        command = [python, "-c", ORACLE, file.name, *map(str, sizes)]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found["version"], found["hits"]


def table(title: str, keys: Sequence[int], sizes: Sequence[int], oracle: str) -> list[str]:
    """A section of the page: each policy of both, and the best of each."""
    version, other = oracle_hits(oracle, keys, sizes)
    ours: dict[str, Callable[[int], int]] = {
        name: (lambda size, name=name: policy_hits(name, keys, size)) for name in POLICIES
    }
    ours["s3fifo, filling main first"] = lambda size: s3fifo_hits(keys, size, main_first=True)
    ours["slru, four segments"] = lambda size: slru_hits(keys, size, 4)
    rows, best = [], []
    for size in sizes:
        hits = {name: hits_of(size) for name, hits_of in ours.items()}
        click.echo(f"  {title}, {size}: {hits}", err=True)
        for name in [name for name in hits if name != "auto"]:  # libCacheSim has no such policy
            theirs = other[f"{name.split(',')[0]} {size}"]
            points = 100 * (hits[name] - theirs) / len(keys)
            share, its = hits[name] / len(keys), theirs / len(keys)
            rows.append([f"{size:,}", name, f"{share:.2%}", f"{its:.2%}", f"{points:+.2f}"])
        best.append(best_row(size, keys, {name: hits[name] for name in POLICIES}, other))
    header = ["slots", "policy", "kvsm", f"libCacheSim {version}", "difference (points)"]
    best_header = ["slots", f"libCacheSim's best of {len(other) // len(sizes)}", "kvsm's best", "kvsm's auto"]
    return [
        *(f"### {title}", "", f"{len(keys):,} keys.", "", *markdown_table(header, rows), ""),
        *(*markdown_table(best_header, best), ""),
    ]


def best_row(size: int, keys: Sequence[int], ours: dict[str, int], other: dict[str, int]) -> list[str]:
    """The best policies of both at a size, and `auto`. other: hits by policy and size, as `oracle_hits`."""
    theirs = {name.rsplit(" ", 1)[0]: hits for name, hits in other.items() if name.endswith(f" {size}")}

    def told(hits: dict[str, int]) -> str:
        name = max(hits, key=lambda one: hits[one])
        return f"{name} {hits[name] / len(keys):.2%}"

    return [f"{size:,}", told(theirs), told(ours), f"{ours['auto'] / len(keys):.2%}"]


@click.command()
@click.option("--oracle", required=True, help="A Python that has libcachesim.")
@click.option(
    "--trace", type=click.Path(path_type=Path), envvar="KVSM_TRACE", help="A Mooncake-format trace."
)
@click.option("--slots", "sizes", type=int, multiple=True, default=SIZES, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="Write the tables here, with the command.")
def main(oracle: str, trace: Path | None, sizes: tuple[int, ...], output: Path | None) -> None:
    """Compare every policy of `POLICIES` with libCacheSim's."""
    lines = []
    if trace is not None:
        keys = list(chain.from_iterable(request.hash_ids for request in read_trace(trace)))
        lines += table(trace.name, keys, sizes, oracle)
    conversations = multi_turn(seed=0, requests=12_000)
    generated = list(chain.from_iterable(request.hash_ids for request in conversations))
    lines += table("Generated conversations", generated, sizes, oracle)
    publish("Eviction policies beside libCacheSim", "single keys, one block is 512 tokens", lines, output)


if __name__ == "__main__":
    main()
