"""Helpers for tests that drive the core by hand."""

from __future__ import annotations

from collections.abc import Sequence

from kvsm.core.kv_events import Publisher
from kvsm.core.ledger import Ledger
from kvsm.core.log import MemoryLog
from kvsm.core.offloader import Offloader
from kvsm.events import OffloadConfig, OffloadingEvent


def kinds(events: Sequence[OffloadingEvent]) -> list[str]:
    """Return the class names of these events."""
    return [event.kind for event in events]


def keys(count: int, prompt: str = "p", group: int = 0) -> list[bytes]:
    """Return the first `count` keys of a prompt, in vLLM's layout: a hash and four bytes of group index."""
    return [f"{prompt}-{place:04}".encode() + group.to_bytes(4, "big") for place in range(count)]


def new_core(
    host_blocks: int = 8,
    device_blocks: int = 16,
    workers: int = 1,
    publisher: Publisher | None = None,
    **options: object,
) -> tuple[Offloader, MemoryLog]:
    """Return a core and its log."""
    log = MemoryLog()
    config = OffloadConfig(
        host_blocks=host_blocks,
        device_blocks=device_blocks,
        workers=workers,
        **options,  # type: ignore[arg-type]
    )
    return Offloader(config, log, publisher=publisher, clock_ns=lambda: 0), log


def store(core: Offloader, request: str, names: list[bytes], first_block: int = 0) -> int:
    """Store these keys from device blocks first_block, first_block + 1, ... Returns the transfer."""
    transfer = begin_store(core, request, names, first_block)
    for worker in range(core.config.workers):
        core.complete_store(transfer, worker)
    return transfer


def begin_store(core: Offloader, request: str, names: list[bytes], first_block: int = 0) -> int:
    """Submit a store of these keys without a report. Returns the transfer."""
    blocks = range(first_block, first_block + len(names) * core.config.blocks_per_chunk)
    job = core.prepare_store(request, names, blocks).job
    assert job is not None
    core.submit([job.transfer])
    return job.transfer


def load(core: Offloader, request: str, names: list[bytes], first_block: int = 0) -> int:
    """Match these keys and begin to load all of them. Returns the submitted transfer."""
    hits = core.match(request, names).hits
    assert hits == len(names)
    blocks = range(first_block, first_block + hits * core.config.blocks_per_chunk)
    job = core.prepare_load(request, blocks)
    assert job is not None
    core.submit([job.transfer])
    return job.transfer


def fold(log: list[OffloadingEvent], config: OffloadConfig) -> Ledger:
    """Return a ledger folded from these events alone."""
    ledger = Ledger(config)
    for event in log:
        ledger.apply(event)
    return ledger
