"""Short words for tests that drive the core by hand."""

from __future__ import annotations

from kvsm.events import OffloadConfig, OffloadingEvent
from kvsm.ledger import Ledger
from kvsm.offloader import Offloader


class Recorder(list[OffloadingEvent]):
    """A log in memory."""

    def flush(self) -> None:
        """Nothing to write."""

    def kinds(self, since: int = 0) -> list[str]:
        """Names of the events after the first `since` ones."""
        return [event.kind for event in self[since:]]


def keys(count: int, prompt: str = "p", group: int = 0) -> list[bytes]:
    """The first `count` keys of a prompt, in vLLM's layout: a hash and four bytes of group index."""
    return [f"{prompt}-{place:04}".encode() + group.to_bytes(4, "big") for place in range(count)]


def new_core(
    host_blocks: int = 8,
    device_blocks: int = 16,
    workers: int = 1,
    publish: bool = False,
    **options: object,
) -> tuple[Offloader, Recorder]:
    """A core and its log."""
    log = Recorder()
    config = OffloadConfig(
        host_blocks=host_blocks,
        device_blocks=device_blocks,
        workers=workers,
        **options,  # type: ignore[arg-type]
    )
    return Offloader(config, log, publish=publish, clock_ns=lambda: 0), log


def store(core: Offloader, request: str, names: list[bytes], first_block: int = 0) -> int:
    """Store these keys from device blocks first_block, first_block + 1, ...; returns the transfer."""
    plan = core.prepare_store(request, names, range(first_block, first_block + len(names))).plan
    assert plan is not None
    core.submit([plan.transfer])
    for worker in range(core.config.workers):
        core.complete_store(plan.transfer, worker)
    return plan.transfer


def load(core: Offloader, request: str, names: list[bytes], first_block: int = 0) -> int:
    """Match these keys and begin to load all of them; returns the submitted transfer."""
    hits = core.match(request, names).hits
    assert hits == len(names)
    plan = core.prepare_load(request, range(first_block, first_block + hits))
    assert plan is not None
    core.submit([plan.transfer])
    return plan.transfer


def fold(log: list[OffloadingEvent], config: OffloadConfig) -> Ledger:
    """A ledger made of nothing but these events."""
    ledger = Ledger(config)
    for event in log:
        ledger.apply(event)
    return ledger
