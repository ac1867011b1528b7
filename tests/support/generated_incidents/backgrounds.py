"""The load of healthy engines, with random parameters. A report should find nothing in any of them."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

from incidents import Copying, Outcome, chats, documents, prompt

from generated_incidents.scenes import Process, Scene, slower
from kvsm.serving.traces import TraceRequest


class Background(NamedTuple):
    """A kind of load. features: the features that a kind of incident may need. `reuse`: prompts share blocks
    with earlier ones. `loads`: the host serves many of these blocks. `chats`: conversations with one KV
    cache group. `one process`; `no resets`; `host`: there is no disk. `device`: see `DEVICE`.
    """

    name: str
    features: frozenset[str]
    make: Callable[[Random], Scene]


BACKGROUNDS: dict[str, Background] = {}
DEVICE = "device"
"""The feature of a scene in which no incident has set the size of the device. Every background has it."""

USUAL = ("one process", "no resets", "host")


def background(*features: str) -> Callable[[Callable[[Random], Scene]], Callable[[Random], Scene]]:
    """Add a function to `BACKGROUNDS`, under its name."""

    def add(make: Callable[[Random], Scene]) -> Callable[[Random], Scene]:
        BACKGROUNDS[make.__name__] = Background(make.__name__, frozenset((*features, DEVICE)), make)
        return make

    return add


def _chats(random: Random, least: int = 250, most: int = 450) -> list[TraceRequest]:
    return chats(random.randrange(least, most), random.randrange(1 << 30))


def _faster(trace: list[TraceRequest], times: float) -> list[TraceRequest]:
    return [
        TraceRequest(int(one.arrival_ms / times), one.input_length, one.output_length, one.hash_ids)
        for one in trace
    ]


def _scene(random: Random, trace: list[TraceRequest], **options: Any) -> Scene:
    """Return a scene with some ranks, and a device that has room for the requests that run at one time."""
    scene = Scene(random, trace, {"workers": random.choice((1, 2, 2, 4, 8)), **options})
    scene.give_device(0.8, 1.8)
    return scene


@background("reuse", "loads", "chats", *USUAL)
def chats_eager(random: Random) -> Scene:
    """Conversations, and a host pool that holds them."""
    return _scene(random, _chats(random))


@background("reuse", "loads", "chats", *USUAL)
def chats_lazy(random: Random) -> Scene:
    """Conversations with a lazy store, which keeps a quarter of the device ahead."""
    return _scene(random, _chats(random), store="lazy")


@background("reuse", "chats", *USUAL)
def chats_heavy(random: Random) -> Scene:
    """Two to three times as many conversations in the same time, on a larger device."""
    trace = _faster(_chats(random, 350, 500), random.uniform(2, 3))
    return _scene(random, trace)


@background("reuse", "loads", "chats", *USUAL)
def chats_light(random: Random) -> Scene:
    """A night: few conversations, with long gaps."""
    trace = _faster(_chats(random, 120, 200), random.uniform(0.2, 0.6))
    return _scene(random, trace)


@background("reuse", "chats", *USUAL)
def chats_ramp(random: Random) -> Scene:
    """The load grows over the time of the log to two or three times its start."""
    trace, grows = _chats(random), random.uniform(1.5, 2.5)
    last_ms = trace[-1].arrival_ms
    ramp = [
        TraceRequest(
            int(last_ms * (one.arrival_ms / last_ms) ** (1 / grows)),
            one.input_length,
            one.output_length,
            one.hash_ids,
        )
        for one in trace
    ]
    return _scene(random, ramp)


@background("reuse", "loads", "chats", *USUAL)
def chats_with_a_full_pool(random: Random) -> Scene:
    """The host pool is full for the last part of the time, and evicts blocks that are not reused."""
    trace = _chats(random, 400, 500)
    scene = _scene(random, trace)
    scene.options["host_blocks"] = int(scene.blocks * random.uniform(0.65, 0.8))
    return scene


@background("reuse", "loads", "chats", *USUAL)
def chats_with_failures(random: Random) -> Scene:
    """A copy in five hundred or fewer fails, and some clients leave."""
    rate = random.uniform(0.0005, 0.002)

    def fails(copying: Copying, outcome: Outcome) -> Outcome:
        failed = copying.random.random() < rate
        return outcome._replace(error="copy failed: cudaErrorLaunchTimeout") if failed else outcome

    scene = _scene(random, _chats(random), abort_rate=random.uniform(0.02, 0.15))
    scene.copies.append(fails)
    return scene


@background("reuse", "loads", "chats", "no resets", "host")
def chats_with_a_restart(random: Random) -> Scene:
    """The engine is stopped and started again with a new version of its software."""
    scene = _scene(random, _chats(random, 300, 450))
    scene.processes = [Process(scene.moment(0.3, 0.7)), Process()]
    return scene


@background("reuse", "chats", "one process", "host")
def chats_with_new_weights(random: Random) -> Scene:
    """The weights are updated once or twice, and the caches are reset then."""
    scene = _scene(random, _chats(random, 300, 450))
    steps = int(scene.seconds * 1000 / 30)
    scene.options["reset_every"] = int(steps * random.uniform(0.35, 0.7))
    return scene


@background("reuse", *USUAL)
def agents(random: Random) -> Scene:
    """Agents: each call of a tool adds to the prompt, and the next call comes within seconds."""
    tools = [range(number << 40, (number << 40) + random.randrange(4, 14)) for number in range(1, 5)]
    trace, fresh, began_ms = [], 1 << 50, 0.0
    for _ in range(random.randrange(18, 32)):
        began_ms += random.expovariate(1 / 4000)
        now_ms, ids = began_ms, list(random.choice(tools))
        for _ in range(random.randrange(5, 18)):
            more = random.randrange(1, 4)
            ids += range(fresh, fresh + more)
            fresh += more
            output = random.randrange(40, 250)
            trace.append(prompt(now_ms, ids, random.randrange(1, 511), output))
            now_ms += output * 27 + random.expovariate(1 / 2500) + 300
    trace.sort(key=lambda one: one.arrival_ms)
    return _scene(random, trace)


@background("reuse", "loads", *USUAL)
def shared_documents(random: Random) -> Scene:
    """Questions about long documents. The device holds some of them, and the host all."""
    names = random.randrange(8, 20)
    texts = [range(n << 32, (n << 32) + random.randrange(18, 40)) for n in range(1, names + 1)]
    exponent, gap_ms = random.uniform(0.2, 0.8), random.uniform(250, 500)
    weights = [1 / (1 + number) ** exponent for number in range(names)]
    trace, now_ms = [], 0.0
    for _ in range(random.randrange(200, 400)):
        now_ms += random.expovariate(1 / gap_ms)
        [text] = random.choices(texts, weights)
        trace.append(prompt(now_ms, text, random.randrange(1, 511), random.randrange(20, 200)))
    scene = _scene(random, trace)
    scene.give_device(0.3, 0.8)
    return scene


@background(*USUAL)
def batch_without_reuse(random: Random) -> Scene:
    """A batch job over documents: each is read once. No block can be reused, which is no trouble."""
    trace = documents(random.randrange(120, 220), random.uniform(300, 700), random.randrange(6, 16))
    return _scene(random, trace)


@background("reuse", *USUAL)
def hybrid(random: Random) -> Scene:
    """A hybrid model with several KV cache groups."""
    groups = random.choice(("full,sliding:1024,mamba", "full,sliding:2048", "full,mamba"))
    options = {"groups": groups, "device_blocks": random.randrange(1200, 2200)}
    return Scene(random, _chats(random, 200, 300), options)


@background("reuse", "chats", "one process", "no resets", "disk")
def chats_with_a_disk(random: Random) -> Scene:
    """A small host pool above a fast disk, from which the blocks of older conversations come back."""
    scene = _scene(random, _chats(random))
    scene.options["host_blocks"] = int(scene.blocks * random.uniform(0.3, 0.5))
    scene.disk_slots = 2 * scene.blocks
    return scene


# Odd but harmless events. Each is added to some scenes, healthy or not.


def clock_corrected(scene: Scene) -> None:
    """NTP sets the clock back by some milliseconds."""
    scene.jumps.append((1000 * scene.moment(0.1, 0.9), -scene.random.uniform(2, 60)))


def idle_for_a_while(scene: Scene) -> None:
    """No request arrives for one to two minutes."""
    at_ms, gap_ms = 1000 * scene.moment(0.2, 0.8), 1000 * scene.random.uniform(60, 120)
    scene.trace = [
        TraceRequest(
            one.arrival_ms + (gap_ms if one.arrival_ms > at_ms else 0),
            one.input_length,
            one.output_length,
            one.hash_ids,
        )
        for one in scene.trace
    ]


def rank_a_little_slower(scene: Scene) -> None:
    """One rank takes up to 1.8 times as long."""
    rank, times = scene.random.randrange(scene.options.get("workers", 2)), scene.random.uniform(1.2, 1.8)

    def change(copying: Copying, outcome: Outcome) -> Outcome:
        return slower(outcome, times) if copying.rank == rank else outcome

    scene.copies.append(change)


def rare_hiccups(scene: Scene) -> None:
    """A copy in 500, on any rank, takes up to a second."""

    def change(copying: Copying, outcome: Outcome) -> Outcome:
        hiccup = outcome.ms is not None and copying.random.random() < 0.002
        return outcome._replace(ms=copying.random.uniform(200, 1000)) if hiccup else outcome

    scene.copies.append(change)


def some_read_once(scene: Scene) -> None:
    """A client sends documents that nobody asks for again. These blocks are few compared with the host
    pool."""
    count = int(len(scene.trace) * scene.random.uniform(0.03, 0.1))
    every_ms = 1000 * scene.seconds / count
    scene.add(documents(count, every_ms, scene.random.randrange(3, 10), first_id=1 << 44))
    scene.options["device_blocks"] += 20
    if "host_blocks" in scene.options:
        scene.options["host_blocks"] += 12 * count


ODDITIES = (clock_corrected, idle_for_a_while, rank_a_little_slower, rare_hiccups, some_read_once)
ODD = 0.15
"""The share of the scenes that each oddity is added to."""
