"""What it costs a host pool that prompts are stored over several steps: prefill in chunks, then decode.

The requests of a workload run eight at once, and a new one begins when another one is over. A request is
matched once, what matches is loaded, and then it stores a piece of its other blocks in each step: all of
them, four, or one. All copies of a step end before the next one. Counted are *hits*: the blocks of a prompt,
from its first on, that its match finds. A block is one hash id of the trace (512 tokens).

A piece of a prompt is worth nothing without the pieces before it. A policy that evicts in the order of the
steps loses the beginning first, so it hits less the smaller the pieces are.

Where vLLM is installed, its own manager gets the same calls (`CPUOffloadingManager`).

    KVSM_TRACE=TRACE.jsonl python benchmarks/stored_in_steps.py --output benchmarks/results/stored_in_steps.md
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import click
from control_plane import lives
from page import markdown_table, publish
from workload import TRACE_BLOCK_TOKENS, Requests, expanded

from kvsm.events import OffloadConfig
from kvsm.offloader import Offloader
from kvsm.policies import POLICIES

HOST_BLOCKS = (1_000, 3_000)
AT_ONCE = 8
PIECES = (1 << 20, 4, 1)
DEVICE_BLOCKS = 1 << 14


class Host(Protocol):
    """A host pool, as one engine step after the other calls it."""

    def match(self, request: str, keys: Sequence[bytes]) -> int:
        """Load what the host has of these keys, from the first on. Returns how many it has."""

    def store(self, request: str, keys: Sequence[bytes], parent: bytes) -> None:
        """Store the next piece of a prompt. parent: the key before it; b"": it is the first one."""

    def finish(self, request: str) -> None:
        """The request is over."""


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


class VllmHost(Host):
    """vLLM's manager, with a policy of its own."""

    def __init__(self, policy: str, host_blocks: int) -> None:
        from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

        self._manager = CPUOffloadingManager(host_blocks, cache_policy=policy)
        self._contexts: dict[str, Any] = {}

    def match(self, request: str, keys: Sequence[bytes]) -> int:
        from vllm.v1.kv_offload.base import LookupResult, ReqContext

        manager, context = self._manager, ReqContext(req_id=request)
        self._contexts[request] = context
        manager.on_new_request(context)
        for place, key in enumerate(keys):
            context.set_offload_key_position(key, place + 1)
        hits = 0
        while hits < len(keys) and manager.lookup(keys[hits], context) is LookupResult.HIT:
            hits += 1
        if hits:
            manager.touch(keys[:hits], context)
            manager.prepare_load(keys[:hits], context)
            manager.complete_load(keys[:hits], context)
        return hits

    def store(self, request: str, keys: Sequence[bytes], parent: bytes) -> None:  # noqa: ARG002
        output = self._manager.prepare_store(keys, self._contexts[request])
        if output is not None and output.keys_to_store:
            self._manager.complete_store(output.keys_to_store, self._contexts[request])

    def finish(self, request: str) -> None:
        self._manager.on_request_finished(self._contexts.pop(request))


def hits_of(host: Host, requests: Requests, piece: int) -> int:
    """The hits of all requests, if each stores this number of blocks in a step."""
    hits, running = 0, dict[str, tuple[Sequence[bytes], int]]()
    for number, keys in enumerate(requests):
        while len(running) >= AT_ONCE:
            _step(host, running, piece)
        found = host.match(str(number), keys)
        hits += found
        running[str(number)] = keys, found
    return hits


def _step(host: Host, running: dict[str, tuple[Sequence[bytes], int]], piece: int) -> None:
    """running: request -> its keys, and how many of them are stored."""
    for request, (keys, done) in list(running.items()):
        if done < len(keys):
            host.store(request, keys[done : done + piece], keys[done - 1] if done else b"")
            running[request] = keys, done + piece
        else:
            host.finish(request)
            del running[request]


def hosts() -> dict[str, Callable[[int], Host]]:
    """The contestants by name: each makes a host pool of a size."""

    def kvsm(policy: str) -> Callable[[int], Host]:
        return lambda host_blocks: KvsmHost(policy, host_blocks)

    def vllm(policy: str) -> Callable[[int], Host]:
        return lambda host_blocks: VllmHost(policy, host_blocks)

    found = {policy: kvsm(policy) for policy in POLICIES}
    if find_spec("vllm") is not None:
        found |= {f"vLLM's {policy}": vllm(policy) for policy in ("lru", "arc")}
    return found


def table(title: str, requests: Requests, sizes: Sequence[int]) -> list[str]:
    """A section of the page, with a row for each contestant and size."""
    total, rows = lives(requests), []
    for host_blocks in sizes:
        for name, make in hosts().items():
            rates = [hits_of(make(host_blocks), requests, piece) / total for piece in PIECES]
            rows.append([f"{host_blocks:,}", name, *(f"{rate:.1%}" for rate in rates)])
            click.echo(f"  {title}, {' '.join(rows[-1])}", err=True)
    return [
        f"### {title}",
        "",
        f"{len(requests):,} requests, {total:,} blocks.",
        "",
        *markdown_table(["host slots", "policy", "whole prompts", "4 blocks a step", "1 block a step"], rows),
        "",
    ]


@click.command()
@click.option(
    "--trace", type=click.Path(path_type=Path), envvar="KVSM_TRACE", help="A Mooncake-format trace."
)
@click.option("--requests", "limit", type=int, default=2_000, show_default=True, help="Of each workload.")
@click.option("--host-blocks", type=int, multiple=True, default=HOST_BLOCKS, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="Write the tables here, with the command.")
def main(trace: Path | None, limit: int, host_blocks: tuple[int, ...], output: Path | None) -> None:
    """Measure what prompts hit that are stored over several steps, under every policy."""
    lines = []
    if trace is not None:
        lines += table(trace.name, expanded(trace, TRACE_BLOCK_TOKENS, limit), host_blocks)
    lines += table("Generated conversations", expanded(None, TRACE_BLOCK_TOKENS, limit), host_blocks)
    publish("Prompts stored over several steps", "one block is 512 tokens", lines, output)


if __name__ == "__main__":
    main()
