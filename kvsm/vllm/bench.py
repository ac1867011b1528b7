"""Measure what kvsm costs and gains in a vLLM engine, against no offload and vLLM's own connectors.

    found = compare(Bench(rounds=3), peers=True)
    print(page(found))

Each contestant is an engine in its own process. All of them live at the same time and serve each round one
after the other, in rotating order, so other load on the machine affects all alike. A round consists of new
conversations. In each turn, every conversation sends one request: its whole history and new tokens. The
device holds a quarter of what all conversations need, so until a conversation's next turn, others have taken
its device blocks.

An engine steps and computes in one thread, on a core of its own. Copies run in other threads, on the other
cores. The connector's own time is the time that the engine's thread spends in calls of its connector, on the
scheduler's side and on the worker's side (`step_clock`). Copies that run in parallel are not part of it.
"""

from __future__ import annotations

import os
import platform
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvsm.errors import ConfigError
from kvsm.system.field_types import check_values
from kvsm.vllm.step_clock import StepTimes
from kvsm.vllm.tiny_model import BLOCK_TOKENS, LLAMA, VOCABULARY
from kvsm.vllm.trial import (
    RunningEngine,
    Trial,
    TrialOutcome,
    connector_config,
    running_engine,
)
from kvsm.vllm.versions import installed

PLAIN, KVSM = "no offload", "KvsmConnector"

SMALL, SMALL_AND_DISK = "KvsmConnector, host tenth", "KvsmConnector, host tenth and disk"
"""Engines whose host pool holds a tenth of what the conversations of a round need. They are compared with
`KVSM`, whose pool has room for all of it."""


CHOOSING: Mapping[str, dict[str, Any]] = {
    "KvsmConnector, auto": {"policy": "auto"},
    "KvsmConnector, load_only_if_faster": {"load_only_if_faster": True},
    "KvsmConnector, both": {"policy": "auto", "load_only_if_faster": True},
}
"""Engines that refuse stores or loads that do not pay -> their options. Otherwise they equal `KVSM`."""


def _peer(**transfer: Any) -> Callable[..., dict[str, Any]]:
    """Return a function that makes the `kv_transfer_config` of a connector of vLLM, with a worker of
    `bench_peers`."""
    extra = transfer.pop("extra", {})

    def config(cpu_bytes_to_use: int) -> dict[str, Any]:
        options = {**extra, "cpu_bytes_to_use": cpu_bytes_to_use}
        return {"kv_role": "kv_both", **transfer, "kv_connector_extra_config": options}

    return config


_PEER_WORKERS = "kvsm.vllm.bench_peers"

PEERS: Mapping[str, Callable[..., dict[str, Any]]] = {
    "OffloadingConnector": _peer(
        kv_connector="OffloadingConnector",
        extra={"spec_name": "HostCopySpec", "spec_module_path": _PEER_WORKERS},
    ),
    "SimpleCPUOffloadConnector": _peer(
        kv_connector="HostCopySimpleConnector", kv_connector_module_path=_PEER_WORKERS
    ),
}
"""vLLM's own connectors -> a function that makes the `kv_transfer_config` of each."""

MODEL: dict[str, Any] = {**LLAMA, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4}
"""Large enough that a prompt takes longer to compute than to look up."""

_BLOCK_BYTES: int = (
    2 * MODEL["num_hidden_layers"] * MODEL["num_key_value_heads"] * MODEL["head_dim"] * 4 * BLOCK_TOKENS
)

_RUNNING = 4
"""The most requests that run at the same time."""


class Bench(msgspec.Struct, frozen=True, kw_only=True):
    """The size of the benchmark. The descriptions are also the help of `kvsm bench vllm`."""

    requests: Annotated[int, Meta(ge=1, description="Requests of a round, all turns together.")] = 96
    turns: Annotated[int, Meta(ge=1, description="Turns of a conversation.")] = 4
    turn_tokens: Annotated[int, Meta(ge=1, description="Tokens that the user adds in each turn.")] = 192
    answer_tokens: Annotated[int, Meta(ge=1, description="Tokens generated in each turn.")] = 16
    rounds: Annotated[int, Meta(ge=1, description="Rounds of each engine, after one to warm up.")] = 5
    host_percent: Annotated[
        int, Meta(ge=1, description="Host memory, in percent of what all conversations of a round need.")
    ] = 150

    def __post_init__(self) -> None:
        check_values(self)
        if self.requests % self.turns:
            raise ConfigError(
                f"requests is {self.requests}, which is not a multiple of the {self.turns} turns of a "
                "conversation"
            )

    @property
    def conversations(self) -> int:
        """Conversations of a round."""
        return self.requests // self.turns

    @property
    def conversation_tokens(self) -> int:
        """The length of a conversation after its last turn."""
        return self.turns * (self.turn_tokens + self.answer_tokens)

    @property
    def conversation_blocks(self) -> int:
        """The blocks of a conversation after its last turn."""
        return -(-self.conversation_tokens // BLOCK_TOKENS)

    @property
    def device_blocks(self) -> int:
        """Device blocks for a quarter of all conversations, and at least for all running ones.

        One more block is vLLM's null block.
        """
        held = max(self.conversations // 4, _RUNNING)
        return held * self.conversation_blocks + 1

    @property
    def needed_bytes(self) -> int:
        """Bytes of KV cache of all conversations of a round."""
        return self.conversations * self.conversation_blocks * _BLOCK_BYTES

    @property
    def host_bytes(self) -> int:
        """Host memory of an engine."""
        return self.needed_bytes * self.host_percent // 100


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine did in one round.

    seconds: wall time in `LLM.generate`.
    other_answers: answers that differ from the answers without offload.
    times: times of all its steps together.
    """

    seconds: float
    other_answers: int = 0
    prompt_tokens: int
    cached_tokens: int
    times: StepTimes


class Contestant(msgspec.Struct, frozen=True, kw_only=True):
    """One engine and its rounds."""

    name: str
    rounds: tuple[Round, ...]


class Comparison(msgspec.Struct, frozen=True, kw_only=True, tag_field="schema", tag="kvsm.bench-vllm/1"):
    """What `kvsm bench vllm --json` prints: the engines side by side, round by round.

    bench: the size of the benchmark.
    vllm: the version of vLLM.
    device: the platform of the engines.
    contestants: the first one has no offload.
    """

    bench: Bench
    vllm: str
    device: str
    contestants: tuple[Contestant, ...]


def compare(
    bench: Bench,
    tell: Callable[[str], None] = lambda _: None,
    *,
    peers: bool = False,
    choosing: bool = False,
    disk: Path | None = None,
) -> Comparison:
    """Run the benchmark.

    tell: called with a line of progress.
    peers: whether vLLM's own connectors take part.
    choosing: whether the engines in `CHOOSING` take part; not together with a disk.
    disk: a directory for disk tiers: engines with a small host pool take part, with and without a disk tier;
        None: they do not.

    Raises `ConfigError` without vLLM or if `choosing` has a disk, and `TrialFailed`.
    """
    if choosing and disk is not None:
        raise ConfigError("--choosing and --disk compare different engines; give one of them")
    version = installed()
    names = [PLAIN, *(PEERS if peers else ()), KVSM, *(CHOOSING if choosing else ())]
    if disk is not None:
        names = [PLAIN, *(PEERS if peers else ()), SMALL, SMALL_AND_DISK, KVSM]
    with ExitStack() as stack:
        engines: list[tuple[str, RunningEngine]] = []
        for name in names:
            tell(f"starting vLLM, {name}")
            log = stack.enter_context(TemporaryDirectory(prefix="kvsm-bench-log-"))
            tier = stack.enter_context(TemporaryDirectory(prefix="kvsm-bench-disk-", dir=disk))
            engines.append((name, stack.enter_context(running_engine(_trial(name, bench, log, tier)))))
        rounds: dict[str, list[Round]] = {name: [] for name in names}
        # Round 0 warms up and does not count.
        for number in range(bench.rounds + 1):
            first = number % len(engines)
            served: dict[str, TrialOutcome] = {}
            for name, engine in engines[first:] + engines[:first]:
                tell(f"round {number} of {bench.rounds}: {name}" if number else f"warming up {name}")
                served[name] = _serve(engine, bench, number)
            for name, outcome in served.items() if number else ():
                rounds[name].append(_round(outcome, served[PLAIN]))
        return Comparison(
            bench=bench,
            vllm=version,
            device=engines[0][1].device,
            contestants=tuple(Contestant(name=name, rounds=tuple(done)) for name, done in rounds.items()),
        )


def _round(served: TrialOutcome, plain: TrialOutcome) -> Round:
    return Round(
        seconds=served.seconds,
        other_answers=sum(mine != its for mine, its in zip(served.tokens, plain.tokens, strict=True)),
        prompt_tokens=served.prompt_tokens,
        cached_tokens=sum(served.cached_tokens),
        times=served.times,
    )


def _trial(name: str, bench: Bench, log: str, tier: str) -> Trial:
    kv_transfer = None
    if name in (SMALL, SMALL_AND_DISK):
        # Twice what a round needs: each slot also has a header.
        disk: dict[str, Any] = (
            {} if name == SMALL else {"disk_dir": tier, "disk_bytes": 2 * bench.needed_bytes}
        )
        kv_transfer = connector_config(cpu_bytes_to_use=bench.needed_bytes // 10, event_log=log, **disk)
    elif name in PEERS:
        kv_transfer = PEERS[name](cpu_bytes_to_use=bench.host_bytes)
    elif name != PLAIN:
        options = CHOOSING.get(name, {})
        kv_transfer = connector_config(cpu_bytes_to_use=bench.host_bytes, event_log=log, **options)
    return Trial(
        max_tokens=bench.answer_tokens,
        kv_transfer=kv_transfer,
        engine={
            "num_gpu_blocks_override": bench.device_blocks,
            "max_num_seqs": _RUNNING,
            "max_model_len": bench.conversation_tokens + BLOCK_TOKENS,
        },
        model=MODEL,
        timed=True,
    )


def _serve(engine: RunningEngine, bench: Bench, number: int) -> TrialOutcome:
    """Serve one round: all turns of new conversations."""
    drawn = random.Random(number)
    conversations: list[list[int]] = [[] for _ in range(bench.conversations)]
    turns = []
    for _ in range(bench.turns):
        for conversation in conversations:
            conversation += [drawn.randrange(3, VOCABULARY) for _ in range(bench.turn_tokens)]
        turns.append(engine.serve(conversations))
        for conversation, answer in zip(conversations, turns[-1].tokens):
            conversation += answer
    return TrialOutcome.of_rounds(turns)


# For people.


def page(found: Comparison) -> str:
    """Format the comparison as Markdown, with the command that made it."""
    bench, names = found.bench, [one.name for one in found.contestants]
    compared, has_disk = PEERS.keys() <= set(names), SMALL_AND_DISK in names
    flags = " --peers" if compared else ""
    if bench.host_percent != Bench().host_percent:
        flags = f" --host-percent {bench.host_percent}{flags}"
    flags += " --choosing" if CHOOSING.keys() <= set(names) else ""
    lines = [
        f"# kvsm in vLLM {found.vllm} on {found.device}",
        "",
        "    kvsm bench vllm "
        f"--requests {bench.requests} --turns {bench.turns} --turn-tokens {bench.turn_tokens} "
        f"--answer-tokens {bench.answer_tokens} --rounds {bench.rounds}{flags}"
        f"{' --disk DIR' if has_disk else ''}",
        "",
        f"{platform.machine()}, Python {platform.python_version()}, {len(os.sched_getaffinity(0))} cores, "
        f"load average {os.getloadavg()[0]:.1f} at the end. "
        f"{bench.conversations} conversations of {bench.turns} turns a round; the device holds "
        f"{bench.device_blocks} blocks of {BLOCK_TOKENS} tokens, and a conversation needs "
        f"{bench.conversation_blocks}. A random Llama of {MODEL['num_hidden_layers']} layers, "
        f"{MODEL['hidden_size']} wide, float32. kvsm writes every event to a log on disk.",
        "",
        *(_PEERS_NOTE if compared else ()),
        *(_DISK_NOTE if has_disk else ()),
        f"Median (least .. most) of {bench.rounds} rounds. Ratios compare the same round; quote these.",
        "",
        *_rates(found),
        "",
        "CPU time of a round (ms): all threads; the engine's thread in its steps, where it also runs the "
        "model; the engine's thread in calls of the connector, and their share of its steps.",
        "",
        *_times(found),
    ]
    return "\n".join(lines) + "\n"


_PEERS_NOTE = (
    "OffloadingConnector and SimpleCPUOffloadConnector are vLLM's own. They run only on GPUs, so here "
    "the benchmark copies for them, with kvsm's copy engine. Their schedulers are unchanged.",
    "",
)

_DISK_NOTE = (
    "A host tenth is a host pool of a tenth of what all conversations of a round need. The disk tier has "
    "room for twice that need, and begins empty. The last engine's host pool has room for all of it.",
    "",
)


def _rates(found: Comparison) -> list[str]:
    """Format a table of requests per second."""
    requests, (first, *_) = found.bench.requests, found.contestants
    # The last of vLLM's connectors, if they took part.
    rival = next((one for one in found.contestants if one.name == list(PEERS)[-1]), None)
    header = ["engine", "requests/s", "times no offload"]
    header += [f"times {rival.name}"] if rival else []
    rows = [[*header, "prompt tokens from a cache", "answers that differ"]]
    rows.append(["---"] * len(rows[0]))
    for one in found.contestants:
        row = [one.name, _spread([requests / done.seconds for done in one.rounds])]
        for other in (first, rival) if rival else (first,):
            pairs = zip(other.rounds, one.rounds)
            row.append(_spread([its.seconds / mine.seconds for its, mine in pairs], 2))
        cached = [100 * done.cached_tokens / done.prompt_tokens for done in one.rounds]
        row.append(_spread(cached, 0, "%"))
        rows.append([*row, str(sum(done.other_answers for done in one.rounds))])
    return [f"| {' | '.join(row)} |" for row in rows]


def _times(found: Comparison) -> list[str]:
    """Format a table of steps and CPU time."""
    lines = [
        "| engine | steps a round | all threads | engine's thread | in the connector | share |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for one in found.contestants:
        times = [done.times for done in one.rounds]
        share = [100 * at.connector_cpu_seconds / at.step_cpu_seconds for at in times]
        lines.append(
            f"| {one.name} | {_spread([float(at.steps) for at in times], 0)} "
            f"| {_spread([1e3 * at.process_cpu_seconds for at in times], 0)} "
            f"| {_spread([1e3 * at.step_cpu_seconds for at in times], 0)} "
            f"| {_spread([1e3 * at.connector_cpu_seconds for at in times], 1)} | {_spread(share, 1, '%')} |"
        )
    return lines


def _spread(values: Sequence[float], digits: int = 1, unit: str = "") -> str:
    middle, least, most = (f"{value:,.{digits}f}" for value in (median(values), min(values), max(values)))
    return f"{middle}{unit} ({least} .. {most})"
