"""The kinds of incidents that authors of detectors may look at. The other half is in `hidden_kinds.py`.

Each docstring gives the least strength: from there on an engineer on call would speak of an incident.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from incidents import KEPT, SILENT, Copying, Outcome, Rig, documents
from log_life import disk
from planted_bugs import plant

from generated_incidents.kinds import Kind, kind
from generated_incidents.scenes import Process, Scene, slower
from kvsm.core.ledger import cache
from kvsm.events import Direction
from kvsm.identity import KeptPools, PoolIdentity
from kvsm.serving.serving_request import ServingRequest
from kvsm.serving.traces import TraceRequest

VISIBLE: dict[str, Kind] = {}

visible = partial(kind, VISIBLE)


@visible("property broken", subject="end", needs="one process, no resets, host", spoils="no resets")
def stale_after_reset(scene: Scene) -> None:
    """A bug in the core: stored blocks stay readable after the reset, late in the log."""

    def bug(monkeypatch: pytest.MonkeyPatch) -> None:
        plant(monkeypatch, cache.cache_reset, "index.invalidate_all(ledger, seq)", "pass")

    scene.bugs.append(bug)
    scene.once(scene.moment(0.85, 0.97), lambda rig: rig.engine.reset_cache())


@visible("events missing", subject="end", needs="one process, host")
def log_disk_full(scene: Scene) -> None:
    """The disk of the log is full before the end of the log, and the engine continues without it."""
    scene.writer |= {"on_failure": "continue"}
    scene.once(scene.moment(0.85, 0.97), lambda _: scene.undo.enter_context(disk(0)))


@visible("engine killed", subject="end", needs="one process, host")
def killed(scene: Scene) -> None:
    """The process is killed, at a time when requests are running."""
    scene.processes = [Process(scene.moment(0.85, 0.97), "kill")]


@visible("rank silent", subject="ranks", needs="one process")
def rank_dies(scene: Scene) -> None:
    """Late in the log a rank stops reporting. The engine steps on for at least 75 s.

    It hangs then, so an earlier death would hide any other incident.
    """
    ranks = scene.options.setdefault("workers", 2)
    rank, at_ms = scene.random.randrange(ranks), 1000 * scene.moment(0.85, 0.95)

    def dies(copying: Copying, outcome: Outcome) -> Outcome:
        dead = copying.rank == rank and copying.now_ms > at_ms
        return outcome._replace(ms=SILENT) if dead else outcome

    scene.copies.append(dies)


@visible("rank fails", subject="ranks")
def rank_has_errors(scene: Scene) -> None:
    """A rank fails at least 3 % of its copies over the whole time."""
    rank, rate = (
        scene.random.randrange(scene.options.setdefault("workers", 2)),
        scene.random.uniform(0.03, 0.3),
    )

    def fails(copying: Copying, outcome: Outcome) -> Outcome:
        bad = copying.rank == rank and copying.random.random() < rate
        return (
            outcome._replace(error="CUDA error: an illegal memory access was encountered") if bad else outcome
        )

    scene.copies.append(fails)


@visible("rank tail", subject="copies", needs="reuse")
def rank_hiccups(scene: Scene) -> None:
    """One rank of several takes 0.8 s or longer for 1.5 % to 3 % of its copies. Its median is as usual."""
    ranks = scene.options["workers"] = max(2, scene.options.get("workers", 2))
    rank, rate, longest = (
        scene.random.randrange(ranks),
        scene.random.uniform(0.015, 0.03),
        scene.random.uniform(1, 3),
    )

    def hiccups(copying: Copying, outcome: Outcome) -> Outcome:
        if copying.rank == rank and outcome.ms is not None and copying.random.random() < rate:
            return outcome._replace(ms=1000 * copying.random.uniform(0.8, longest))
        return outcome

    scene.copies.append(hiccups)


@visible(
    "loads slower than computing",
    "loads slow",
    subject="copies",
    needs="loads, one process, host, device",
    spoils="device",
)
def loads_crawl(scene: Scene) -> None:
    """Loads take at least twice as long as computing their tokens, which takes 5.1 ms a block."""
    times = scene.random.uniform(28, 80)

    def crawls(copying: Copying, outcome: Outcome) -> Outcome:
        load = copying.job.direction is Direction.LOAD
        return slower(outcome, times) if load else outcome

    scene.copies.append(crawls)
    scene.give_device(0.6, 0.9)


@visible("pool not pinned", subject="copies", needs="host, one process")
def pool_too_large_to_pin(scene: Scene) -> None:
    """The host pool has hundreds of gigabytes, and page locking failed: all copies run at 2.5 to 5 GB/s."""
    scene.options["host_blocks"] = scene.random.choice((32, 48, 64)) << 10
    times = scene.random.uniform(4, 8)
    scene.copies.append(lambda _copying, outcome: slower(outcome, times))


@visible("disk slower than computing", subject="copies", needs="disk")
def slow_disk(scene: Scene) -> None:
    """Reads from the disk take at least twice as long as computing the tokens."""
    times = scene.random.uniform(7, 25)
    scene.disk_copies.append(lambda _copying, outcome: slower(outcome, times))


@visible(
    "pool too small",
    subject="pool",
    needs="chats, loads, one process, no resets, host, device",
    spoils="device",
)
def host_too_small(scene: Scene) -> None:
    """The host pool holds at most a sixth of the blocks that conversations reuse, and the device holds
    few."""
    scene.give_device(0.6, 0.9)
    scene.options["host_blocks"] = max(
        scene.largest + 20, int(scene.reused * scene.random.uniform(0.05, 0.17))
    )


@visible(
    "tenant floods",
    subject="pool",
    needs="chats, loads, one process, no resets, host, device",
    spoils="device",
)
def tenant_with_unique_prompts(scene: Scene) -> None:
    """One tenant sends long prompts that no one sends again, for at least 60 % of the time.

    Its blocks fill the host pool every 6 to 15 s, which is less than users take between two turns.
    """
    scene.options["host_blocks"] = pool = int(0.8 * scene.blocks)
    share = scene.random.uniform(0.6, 1)
    begin_ms = 1000 * scene.seconds * (1 - share) * scene.random.random()
    blocks = scene.random.randrange(20, 40)
    every_ms = 1000 * scene.random.uniform(6, 15) / pool * blocks
    count = int(1000 * scene.seconds * share / every_ms)
    scene.add(documents(count, every_ms, blocks, begin_ms=begin_ms))
    scene.give_device(0.8, 1.5)


@visible("reset storm", subject="pool", needs="reuse, one process, no resets, host", spoils="no resets")
def resets_every_few_seconds(scene: Scene) -> None:
    """Something resets the prefix cache at least every ten seconds."""
    scene.options["reset_every"] = scene.random.randrange(100, 330)


@visible(
    "stores behind",
    subject="pool",
    needs="chats, loads, one process, no resets, host, device",
    spoils="device",
)
def lazy_store_too_late(scene: Scene) -> None:
    """A lazy store keeps at most three blocks ahead, fewer than the engine allocates in a step."""
    scene.give_device(0.6, 0.9)
    scene.options["store"] = "lazy"
    scene.scheduler["lazy_target_blocks"] = scene.random.randrange(1, 4)


@visible("hits fell", subject="pool", needs="reuse, one process, no resets, host")
def timestamp_in_the_prompt(scene: Scene) -> None:
    """From some time on, at least 70 % of the prompts begin with the time of day, so they share no block."""
    at_ms, share = 1000 * scene.moment(0.3, 0.65), scene.random.uniform(0.7, 1)

    def stamped(one: TraceRequest) -> TraceRequest:
        if one.arrival_ms < at_ms or scene.random.random() > share:
            return one
        ids = tuple(hash((one.arrival_ms, block)) & (1 << 60) - 1 for block in one.hash_ids)
        return TraceRequest(one.arrival_ms, one.input_length, one.output_length, ids)

    scene.trace = [stamped(one) for one in scene.trace]


@visible("requests aborted", subject="requests")
def clients_give_up(scene: Scene) -> None:
    """At least half of the clients leave before their answer is complete."""
    scene.options["abort_rate"] = scene.random.uniform(0.75, 1)


@visible("clock jumped", subject="clock", needs="one process")
def clock_set_back(scene: Scene) -> None:
    """The system's clock is set back by at least two seconds, once or twice."""
    for _ in range(scene.random.randrange(1, 3)):
        by_ms = -1000 * scene.random.choice((2, 5, 30, 3600)) * scene.random.uniform(1, 2)
        scene.jumps.append((1000 * scene.moment(0.2, 0.8), by_ms))


@visible("device blocks leak", subject="device", needs="chats, one process, host, device", spoils="device")
def finished_requests_leak(scene: Scene) -> None:
    """Finished requests keep blocks until half of the device is lost and admission stops often."""
    left = scene.largest + scene.random.randrange(10, 60)
    scene.options["device_blocks"] = max(2 * left + 100, scene.options["device_blocks"] // 2)
    per_request = (scene.options["device_blocks"] - left) / len(scene.trace) / scene.random.uniform(0.4, 0.7)
    leak(scene, per_request, left, lambda _request: True)


def leak(scene: Scene, per_request: float, left: int, leaks: Callable[[ServingRequest], bool]) -> None:
    """Let requests keep references to this many blocks when they finish, while more than `left` remain."""

    def prepare(rig: Rig) -> None:
        scheduler, lost, due = rig.engine.scheduler, set[int](), [0.0]
        leave = scheduler._leave

        def forgetful(request: ServingRequest) -> None:
            due[0] += per_request * leaks(request)
            held = [block for table in request.tables for block in table if block not in lost]
            room = scheduler.pool.num_blocks - len(lost) - left
            kept = held[: max(0, min(int(due[0]), room))]
            due[0] -= len(kept)
            lost.update(kept)
            scheduler.pool.touch(kept)
            leave(request)

        scheduler._leave = forgetful  # type: ignore[method-assign]

    scene.prepare.append(prepare)


@visible(
    "cold start",
    subject="processes",
    needs="chats, loads, one process, no resets, host",
    spoils="one process",
)
def blocks_of_another_size(scene: Scene) -> None:
    """A deploy changes the size of a block, so the pool of the former process is not taken over.

    It held at least a third of all that conversations reuse.
    """
    times = scene.random.choice((2, 4))
    another = KeptPools(PoolIdentity.of({"model": "m", "bytes of a block": 8 * times << 20}), KEPT.ids)
    options = {"block_bytes": 8 * times << 20}
    scene.processes = [
        Process(scene.moment(0.35, 0.6)),
        Process(pools=another, options=options),
    ]
