"""The options of the core world, and its kinds of action with their weights."""

from __future__ import annotations

from random import Random

import msgspec

from kvsm.check.worlds.drawn_policies import draw_policy
from kvsm.errors import ConfigError
from kvsm.events import OffloadConfig

MOST = 1 << 12
"""The upper limit of each size."""

_BLOCK_BYTES = 3000
"""Bytes of a device block. No decision depends on them; the metrics of bytes do."""

LIVE, OVER, LOST = -1, -2, -3
"""Stand for a size that is the present number of live, ended or lost copies."""


class CoreOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The core's configuration (see `OffloadConfig`) and the requests of a core world.

    chunks: size of the device pool, in chunks of `blocks_per_chunk` blocks.
    requests, prompts: the number of requests, and of different prompts.
    length: the number of keys of a prompt. All prompts share their first half.
    folds_log: whether `check` also folds the log at rest; this takes a third of the run's time.
    """

    host_blocks: int = 4
    chunks: int = 5
    workers: int = 2
    blocks_per_chunk: int = 1
    policy: str = "lru"
    max_live_transfers: int = 5
    defer_ticks: int = 2
    transfer_ticks: int = 4
    store_threshold: int = 1
    requests: int = 2
    prompts: int = 2
    length: int = 3
    folds_log: bool = True

    def __post_init__(self) -> None:
        """Raises `ConfigError` for a size out of range: options of a saved failure are not trusted."""
        for name in ("host_blocks", "chunks", "requests", "prompts", "length"):
            if not 1 <= getattr(self, name) <= MOST:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be from 1 to {MOST}")
        self.config()

    def config(self) -> OffloadConfig:
        """The configuration of the core."""
        return OffloadConfig(
            host_blocks=self.host_blocks,
            device_blocks=self.chunks * self.blocks_per_chunk,
            block_bytes=_BLOCK_BYTES,
            workers=self.workers,
            blocks_per_chunk=self.blocks_per_chunk,
            policy=self.policy,
            max_live_transfers=self.max_live_transfers,
            defer_ticks=self.defer_ticks,
            transfer_ticks=self.transfer_ticks,
            store_threshold=self.store_threshold,
        )

    def keys(self, prompt: int) -> list[bytes]:
        """The keys of the prompt with this number."""
        shared = self.length // 2
        return [
            (b"all" if place < shared else b"own-%d" % prompt) + b"-%d" % place + bytes(4)
            for place in range(self.length)
        ]


def draw_options(random: Random) -> CoreOptions:
    """Draw a small configuration. One in sixteen has batches long enough to be arrays (`kvsm.ids`)."""
    long = random.random() < 1 / 16
    length = random.randint(17, 24) if long else random.randint(2, 4)
    return CoreOptions(
        host_blocks=random.randint(length, 2 * length) if long else random.randint(2, 6),
        chunks=random.randint(2 * length, 3 * length) if long else random.randint(3, 8),
        workers=random.choice((1, 2, 2, 3)),
        blocks_per_chunk=random.choice((1, 1, 2)),
        policy=draw_policy(random),
        max_live_transfers=random.randint(2, 6),
        defer_ticks=random.choice((0, 1, 3)),
        transfer_ticks=random.choice((0, 2, 6)),
        store_threshold=random.choice((1, 1, 1, 2)),
        requests=random.randint(1, 3),
        prompts=random.randint(1, 3),
        length=length,
        folds_log=random.random() < 1 / 8,
    )


def action_kinds(options: CoreOptions) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Action name -> (weight in `draw`, size of the range of each of its numbers, or LIVE, OVER or LOST)."""
    requests, prompts, workers = options.requests, options.prompts, options.workers
    blocks, places = options.chunks * options.blocks_per_chunk, options.length
    return {
        "arrive": (1, (requests,)),
        "match": (18, (requests, prompts, places, places)),
        "ask": (2, (requests,)),
        "release": (1, (requests,)),
        "preempt": (3, (requests,)),
        "finish": (4, (requests, 2)),
        "advance": (1, (requests, 3, 2)),
        "load_nothing": (1, (requests,)),
        "load": (20, (requests, places + 1, 3 if options.blocks_per_chunk > 1 else 1)),
        "store": (14, (requests, prompts, places, places, blocks, 4, 2)),
        "store_two": (2, (prompts, prompts, places, blocks, 2)),
        "compute": (2, (prompts, places, blocks)),
        "import_blocks": (3, (requests, prompts, places, places, 3)),
        "submit": (14, (LIVE,)),
        "submit_all": (8, ()),
        "land": (12, (LIVE, workers)),
        "report": (60, (LIVE, workers)),
        "fail": (4, (LIVE, workers)),
        "report_as": (4, (LIVE, workers, 2, 2)),
        "report_early": (1, (LIVE, workers, 2)),
        "report_late": (2, (OVER, workers, 2)),
        "report_stray": (2, (5, 2)),
        "cancel": (2, (LIVE,)),
        "end_late": (1, (OVER,)),
        "lose": (1, (LIVE,)),
        "lose_overdue": (1, ()),
        "land_lost": (2, (LOST, workers)),
        "flush": (1, ()),
        "flush_one": (1, (LIVE,)),
        "lookup": (4, (prompts, places)),
        "in_flight": (3, (prompts,)),
        "leased": (3, (blocks,)),
        "touch": (2, (prompts, places)),
        "tick": (4, ()),
        "end_step": (4, ()),
        "take_events": (2, ()),
        "misuse": (2, (8,)),
        "reset": (1, ()),
        "restart": (1, ()),
    }
