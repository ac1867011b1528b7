"""The kinds of incidents that authors of detectors do not look at. The other half is in `visible_kinds.py`.

Each docstring gives the least strength: from there on an engineer on call would speak of an incident.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from incidents import KEPT, SILENT, Copying, Outcome, Rig, chats, documents, prompt
from planted_bugs import plant

from generated_incidents.kinds import Kind, kind
from generated_incidents.scenes import Process, Scene, slower
from generated_incidents.visible_kinds import leak
from kvsm.core.ledger.transfers import worker_reported
from kvsm.core.log.frames import segment_paths
from kvsm.events import Direction
from kvsm.identity import KeptPools
from kvsm.ids import count
from kvsm.serving.serving_engine import STEP_MS
from kvsm.serving.serving_request import ServingRequest
from kvsm.serving.traces import TraceRequest

HIDDEN: dict[str, Kind] = {}

hidden = partial(kind, HIDDEN)


# The log, and how the engine ends.


@hidden("property broken", subject="end", needs="loads, one process, host, device", spoils="device")
def failed_load_keeps_its_keys(scene: Scene) -> None:
    """A bug in the core: the blocks of a failed load stay readable. Late in the log loads fail."""
    scene.give_device(0.6, 0.9)
    at_ms, rate = 1000 * scene.moment(0.8, 0.85), scene.random.uniform(0.1, 0.3)

    def bug(monkeypatch: pytest.MonkeyPatch) -> None:
        plant(monkeypatch, worker_reported, "index.invalidate(ledger, transfer.slots, seq)", "pass")

    def fails(copying: Copying, outcome: Outcome) -> Outcome:
        late = copying.now_ms > at_ms and copying.job.direction is Direction.LOAD
        return outcome._replace(error="copy failed") if late and copying.random.random() < rate else outcome

    scene.bugs.append(bug)
    scene.copies.append(fails)


@hidden("log damaged", subject="end", needs="one process, host")
def medium_flips_bits(scene: Scene) -> None:
    """The medium flips a bit near the end of the log."""
    place = scene.random.uniform(0.85, 0.97)

    def flip(directory: Path) -> None:
        path = segment_paths(directory)[-1]
        data = bytearray(path.read_bytes())
        data[int(len(data) * place)] ^= 1 << scene.random.randrange(8)
        path.write_bytes(data)

    scene.after.append(flip)


@hidden("engine stopped", subject="end", needs="one process, host")
def engine_raises(scene: Scene) -> None:
    """The engine ends with an error, late in the log."""
    error = scene.random.choice(
        ("CUDA out of memory: tried to allocate 2.00 GiB", "NCCL error: unhandled system error")
    )
    scene.processes = [Process(scene.moment(0.85, 0.97), "error", error)]


@hidden("processes killed", subject="processes", needs="chats, one process, host", spoils="one process")
def crash_loop(scene: Scene) -> None:
    """The process is killed two to four times, and the next one continues with its pool."""
    times = scene.random.randrange(2, 5)
    scene.processes = [
        Process(scene.seconds * (number + scene.random.uniform(0.6, 0.9)) / (times + 1), "kill")
        for number in range(times)
    ] + [Process()]


@hidden("cold start", subject="processes", needs="loads, chats, one process, no resets", spoils="one process")
def pool_resized(scene: Scene) -> None:
    """The next process has a host pool of another size, so the blocks of the former one are lost."""
    size = scene.options.get("host_blocks", 16384)
    another = KeptPools(KEPT.identity, (b"another pool of 0", b"its checksums...."))
    options = {"host_blocks": int(size * scene.random.choice((0.75, 1.25, 1.5)))}
    scene.processes = [Process(scene.moment(0.35, 0.6)), Process(pools=another, options=options)]


# Ranks.


@hidden("rank silent", subject="ranks", needs="one process, host")
def reports_lost(scene: Scene) -> None:
    """A rank never reports at least 2 % of its copies. They are given up after 10 s of steps."""
    rank = scene.random.randrange(scene.options.setdefault("workers", 2))
    rate = scene.random.uniform(0.02, 0.08)
    scene.core["transfer_ticks"] = 400

    def lost(copying: Copying, outcome: Outcome) -> Outcome:
        gone = copying.rank == rank and copying.random.random() < rate
        return outcome._replace(ms=SILENT) if gone else outcome

    scene.copies.append(lost)


@hidden("rank fails", subject="ranks", needs="one process")
def rank_begins_to_fail(scene: Scene) -> None:
    """From some time on a rank fails at least a tenth of its copies."""
    rank = scene.random.randrange(scene.options.setdefault("workers", 2))
    at_ms, rate = 1000 * scene.moment(0.2, 0.6), scene.random.uniform(0.1, 0.6)

    def fails(copying: Copying, outcome: Outcome) -> Outcome:
        bad = copying.rank == rank and copying.now_ms > at_ms and copying.random.random() < rate
        return outcome._replace(error="CUDA error: uncorrectable ECC error encountered") if bad else outcome

    scene.copies.append(fails)


@hidden("reports rejected", subject="ranks")
def reports_doubled(scene: Scene) -> None:
    """A rank reports at least a tenth of its copies more than once."""
    rank = scene.random.randrange(scene.options.setdefault("workers", 2))
    rate, times = scene.random.uniform(0.1, 1), scene.random.randrange(2, 4)

    def doubled(copying: Copying, outcome: Outcome) -> Outcome:
        again = copying.rank == rank and copying.random.random() < rate
        return outcome._replace(reports=times) if again else outcome

    scene.copies.append(doubled)


@hidden("rank slow", subject="copies", needs="one process")
def rank_throttled(scene: Scene) -> None:
    """One rank of several is at least 15 times as slow as the others, from the first third of the time on."""
    ranks = scene.options["workers"] = max(2, scene.options.get("workers", 2))
    rank, times = scene.random.randrange(ranks), scene.random.uniform(15, 40)
    at_ms = 1000 * scene.moment(0, 0.3)

    def throttled(copying: Copying, outcome: Outcome) -> Outcome:
        slow = copying.rank == rank and copying.now_ms > at_ms
        return slower(outcome, times) if slow else outcome

    scene.copies.append(throttled)


@hidden("rank tail", subject="copies", needs="loads")
def rank_stalls(scene: Scene) -> None:
    """One rank of several stalls for 1 s or longer, every 15 s or more. Its median copy is as usual."""
    ranks = scene.options["workers"] = max(2, scene.options.get("workers", 2))
    rank, every_ms = scene.random.randrange(ranks), 1000 * scene.random.uniform(15, 30)
    stall_ms = scene.random.uniform(1000, min(3000, every_ms / 10))

    def stalls(copying: Copying, outcome: Outcome) -> Outcome:
        since_ms = copying.now_ms % every_ms
        if copying.rank != rank or outcome.ms is None or since_ms > stall_ms:
            return outcome
        return outcome._replace(ms=outcome.ms + stall_ms - since_ms)

    scene.copies.append(stalls)


# Copies.


@hidden(
    "loads slower than computing",
    "loads slow",
    subject="copies",
    needs="chats, loads, one process, host, device",
    spoils="device",
)
def small_model(scene: Scene) -> None:
    """A small model computes a block in 0.26 ms, and a load takes three times as long or more."""
    scene.give_device(0.6, 0.9)
    times = scene.random.uniform(2, 3)

    def faster(rig: Rig) -> None:
        pass_time = rig.engine._let_time_pass

        def less(step_ms: float) -> None:
            pass_time(STEP_MS / 5 + (step_ms - STEP_MS) / 20)

        rig.engine._let_time_pass = less  # type: ignore[method-assign]

    def slow(copying: Copying, outcome: Outcome) -> Outcome:
        load = copying.job.direction is Direction.LOAD
        return slower(outcome, times) if load else outcome

    scene.prepare.append(faster)
    scene.copies.append(slow)


@hidden("disk slower than computing", subject="copies", needs="disk")
def disk_throttled(scene: Scene) -> None:
    """From some time on, reads from the disk take at least twice as long as computing the tokens."""
    at_ms, times = 1000 * scene.moment(0.1, 0.4), scene.random.uniform(7, 30)

    def throttled(copying: Copying, outcome: Outcome) -> Outcome:
        return slower(outcome, times) if copying.now_ms > at_ms else outcome

    scene.disk_copies.append(throttled)


@hidden("blocks skipped", subject="pool", needs="one process, host")
def too_few_transfers(scene: Scene) -> None:
    """Stores take half a second or longer, and few may be in flight: most blocks are offered and skipped."""
    scene.core["max_live_transfers"] = scene.random.randrange(2, 5)
    times = scene.random.uniform(80, 200)

    def slow(copying: Copying, outcome: Outcome) -> Outcome:
        store = copying.job.direction is Direction.STORE
        return slower(outcome, times) if store else outcome

    scene.copies.append(slow)


@hidden("waits", subject="copies", needs="chats, one process, no resets, host, device", spoils="device")
def herd_behind_one_store(scene: Scene) -> None:
    """One store takes 5 s or longer on a rank, and at least 60 requests with its prefix wait for it.

    The engine has no prefix cache on the device.
    """
    ranks = scene.options["workers"] = max(2, scene.options.get("workers", 2))
    at_ms, rank = 1000 * scene.moment(0.3, 0.7), scene.random.randrange(ranks)
    shared = range(1 << 35, (1 << 35) + scene.random.randrange(20, 28))
    herd = scene.random.randrange(60, 120)
    took_ms = scene.random.uniform(5000, 8000)
    same = [prompt(at_ms + 800 + 4000 / herd * number, shared) for number in range(herd)]
    scene.add([prompt(at_ms, shared)], same)
    scene.options["device_blocks"] = scene.largest + 40 * herd
    scene.core["defer_ticks"] = 4000
    scene.options["store"] = "eager"

    def slow(copying: Copying, outcome: Outcome) -> Outcome:
        large = copying.job.direction is Direction.STORE and count(copying.job.device_blocks) >= 15
        if copying.rank == rank and large and at_ms < copying.now_ms < at_ms + 800:
            return outcome._replace(ms=took_ms)
        return outcome

    def without_cache(rig: Rig) -> None:
        rig.engine.scheduler.block_tables.longest_hit = lambda _request: 0  # type: ignore[method-assign]

    scene.copies.append(slow)
    scene.prepare.append(without_cache)


# The pools and the workload.


@hidden(
    "pool too small",
    subject="pool",
    needs="chats, loads, one process, no resets, host, device",
    spoils="device",
)
def users_outgrow_the_pool(scene: Scene) -> None:
    """The host pool holds all conversations until their number triples."""
    scene.options["host_blocks"] = int(scene.reused * scene.random.uniform(0.2, 0.35))
    at_ms = 1000 * scene.moment(0.2, 0.4)
    for number in range(1, 3):
        more = chats(len(scene.trace) // 2, scene.random.randrange(1 << 30))
        scene.add(
            [
                TraceRequest(
                    at_ms + one.arrival_ms,
                    one.input_length,
                    one.output_length,
                    tuple([block + (number << 30) for block in one.hash_ids]),
                )
                for one in more
            ]
        )
    scene.give_device(0.6, 0.9)
    scene.options["host_blocks"] = max(scene.options["host_blocks"], scene.largest + 20)


@hidden(
    "tenant floods",
    subject="pool",
    needs="chats, loads, one process, no resets, host, device",
    spoils="device",
)
def one_family_of_prompts(scene: Scene) -> None:
    """An evaluation sends prompts with one beginning and long ends, for at least 60 % of the time.

    They fill the host pool every 6 to 15 s, which is less than users take between two turns.
    """
    scene.options["host_blocks"] = pool = int(0.8 * scene.blocks)
    share, random = scene.random.uniform(0.6, 1), scene.random
    begin_ms = 1000 * scene.seconds * (1 - share) * random.random()
    head = range(1 << 38, (1 << 38) + random.randrange(2, 7))
    blocks = random.randrange(18, 36)
    every_ms = 1000 * random.uniform(6, 15) / pool * blocks
    number = int(1000 * scene.seconds * share / every_ms)
    texts = documents(number, every_ms, blocks, begin_ms=begin_ms, first_id=1 << 42)
    scene.add([prompt(one.arrival_ms, (*head, *one.hash_ids[:-1]), output=40) for one in texts])
    scene.give_device(0.8, 1.5)


@hidden(
    "eviction burst",
    subject="pool",
    needs="chats, loads, one process, no resets, host, device",
    spoils="device",
)
def scan_of_documents(scene: Scene) -> None:
    """A scan reads half as much again as the host pool holds, in at most an eighth of the time."""
    scene.options["host_blocks"] = pool = int(scene.random.uniform(0.75, 0.9) * scene.blocks)
    lasts_ms = 1000 * scene.seconds * scene.random.uniform(0.07, 0.12)
    blocks = scene.random.randrange(20, 40)
    number = int(pool * scene.random.uniform(1.5, 2) / blocks)
    scene.add(documents(number, lasts_ms / number, blocks, begin_ms=1000 * scene.moment(0.4, 0.6)))
    scene.give_device(0.8, 1.2)


@hidden(
    "group floods",
    subject="pool",
    needs="chats, loads, one process, no resets, host, device",
    spoils="device",
)
def window_thrash(scene: Scene) -> None:
    """A sliding window with small blocks has most blocks of the host pool, which no request reads again."""
    window = scene.random.choice((512, 1024))
    scene.options["groups"] = f"full/512,sliding:{window}/64"
    scene.options["device_blocks"] = 4000
    scene.options["host_blocks"] = int(scene.blocks * scene.random.uniform(1.3, 2.2))
    scene.options["store"] = "eager"


@hidden("reset storm", subject="pool", needs="reuse, one process, no resets, host", spoils="no resets")
def resets_by_a_script(scene: Scene) -> None:
    """A script resets the caches at random times, at least every six seconds on average."""
    next_ms, mean_ms = [5000.0], 1000 * scene.random.uniform(3, 6)

    def each(rig: Rig) -> None:
        if rig.clock.now_ms >= next_ms[0]:
            next_ms[0] += scene.random.expovariate(1 / mean_ms)
            rig.engine.reset_cache()

    scene.each.append(each)


@hidden(
    "stores behind",
    "blocks skipped",
    subject="pool",
    needs="chats, loads, one process, no resets, host, device",
    spoils="device",
)
def store_threshold_too_high(scene: Scene) -> None:
    """A block is stored when it is offered for the fourth time or later."""
    scene.give_device(0.4, 0.6)
    scene.options["store"] = "eager"
    scene.core["store_threshold"] = scene.random.randrange(4, 9)


@hidden("hits fell", subject="pool", needs="chats, reuse, one process, no resets, host")
def history_rewritten(scene: Scene) -> None:
    """From some time on an agent rewrites the history at each turn: only the first block or two stay."""
    at_ms, kept = 1000 * scene.moment(0.3, 0.6), scene.random.randrange(1, 3)

    def rewritten(one: TraceRequest) -> TraceRequest:
        if one.arrival_ms < at_ms:
            return one
        own = [hash((one.arrival_ms, block)) & (1 << 60) - 1 for block in one.hash_ids[kept:]]
        ids = (*one.hash_ids[:kept], *own)
        return TraceRequest(one.arrival_ms, one.input_length, one.output_length, ids)

    scene.trace = [rewritten(one) for one in scene.trace]


# The engine.


@hidden("requests unfinished", subject="requests", needs="one process, host")
def finish_forgotten(scene: Scene) -> None:
    """The engine forgets to tell the connector that requests finished, at least 4 % of them."""
    rate = scene.random.uniform(0.04, 0.15)

    def forgetful(rig: Rig) -> None:
        finished = rig.connector.request_finished

        def forgets(request: ServingRequest, blocks: Any, *, aborted: bool = False) -> Any:
            if scene.random.random() < rate:
                return False, None
            return finished(request, blocks, aborted=aborted)

        rig.connector.request_finished = forgets  # type: ignore[method-assign]

    scene.prepare.append(forgetful)


@hidden("requests aborted", subject="requests", needs="chats, one process")
def gateway_times_out(scene: Scene) -> None:
    """From some time on, a gateway aborts every request after 1 to 2 s; this affects at least a third of all
    requests."""
    at_ms, patience_ms = 1000 * scene.moment(0.1, 0.4), scene.random.uniform(1000, 2000)
    arrivals: dict[str, float] = {}

    def each(rig: Rig) -> None:
        now_ms = rig.clock.now_ms
        if not arrivals:
            arrivals.update({f"r{number}": one.arrival_ms for number, one in enumerate(scene.trace, 1)})
        if now_ms > at_ms:
            for name in [*rig.engine.scheduler.running]:
                if now_ms - arrivals[name] > patience_ms:
                    rig.engine.abort(name)

    scene.each.append(each)


@hidden("preemptions", subject="device", needs="chats, one process, host, device", spoils="device")
def long_answers(scene: Scene) -> None:
    """Half of the outputs become at least three times as long, up to 3,000 tokens, so the device is too
    small."""
    times = scene.random.uniform(3, 6)

    def longer(one: TraceRequest) -> TraceRequest:
        longer = scene.random.random() < 0.5
        output = min(3000, int(one.output_length * times)) if longer else one.output_length
        return TraceRequest(one.arrival_ms, one.input_length, output, one.hash_ids)

    scene.trace = [longer(one) for one in scene.trace]
    scene.options["device_blocks"] = scene.largest + int(scene.random.uniform(0.4, 0.55) * scene.running)


@hidden("device blocks leak", subject="device", needs="chats, one process, host, device", spoils="device")
def aborted_requests_leak(scene: Scene) -> None:
    """Aborted requests keep their blocks until half of the device is lost and admission stops often."""
    scene.options["abort_rate"] = max(0.15, scene.options.get("abort_rate", 0))
    left = scene.largest + scene.random.randrange(10, 60)
    scene.options["device_blocks"] = max(2 * left + 100, scene.options["device_blocks"] // 2)
    leaking = scene.random.uniform(0.4, 0.7) * len(scene.trace) * scene.options["abort_rate"] * 0.7
    per_request = (scene.options["device_blocks"] - left) / leaking
    leak(scene, per_request, left, lambda request: not request.is_done)


@hidden("clock jumped", subject="clock", needs="one process")
def clock_set_forward(scene: Scene) -> None:
    """The system's clock is set forward by at least five minutes."""
    by_ms = 60_000 * scene.random.choice((5, 30, 180)) * scene.random.uniform(1, 2)
    scene.jumps.append((1000 * scene.moment(0.2, 0.8), by_ms))
