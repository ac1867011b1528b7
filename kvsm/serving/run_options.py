"""The options of a run, as one value that is checked before anything is made."""

from __future__ import annotations

import re
from math import gcd

import msgspec
from msgspec.structs import replace

from kvsm.core.policies import make_policy
from kvsm.core.scheduler import GroupKind, KVCacheGroup, LastStep, SchedulerConfig, StoreMode
from kvsm.errors import ConfigError
from kvsm.events import OffloadConfig
from kvsm.serving.block_tables import peak_blocks
from kvsm.serving.ranks import COPIES
from kvsm.serving.traces import BLOCK_TOKENS, TraceRequest
from kvsm.tiers import DEFER_TICKS, WritePolicy, host_config
from kvsm.tiers.disk import FlushPolicy

STORES = tuple(mode.value for mode in StoreMode)
LAST_STEPS = tuple(one.value.replace(" ", "-") for one in LastStep)
DISK_WRITES = tuple(one.value for one in WritePolicy)
DISK_FLUSHES = tuple(one.value for one in FlushPolicy)

BUDGET_BLOCKS = 16
"""How many blocks of tokens a step computes at most."""

_GROUP = re.compile(r"(full|mamba|sliding:(?P<window>[0-9]+))(/(?P<tokens>[0-9]+))?")
_GROUP_KINDS = {"f": GroupKind.FULL, "m": GroupKind.MAMBA, "s": GroupKind.SLIDING_WINDOW}


class RunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to run. Raises `ConfigError` for a value that cannot work.

    trace: path of a trace; None generates a multi-turn workload.
    requests: how many of the trace (None: all), or how many to generate (None: 4,000).
    block_tokens: tokens of a hash id of the trace, and of a block in a group that has no size of its own.
    groups: KV cache groups, as `parse_groups` reads them.
    device_blocks: blocks of each worker's device pool, for all groups.
    host_blocks: slots of each worker's host pool.
    block_bytes: bytes of a device block on one worker.
    blocks_per_chunk: device blocks that a slot holds.
    disk_blocks: slots of each worker's file below its host pool; 0: there is no disk tier.
    disk_dir: directory of these files. A later run with the same sizes and groups finds what is stored there.
    disk_write: when a block that the host has stored is stored on the disk, a `WritePolicy`.
    disk_flush: when stores to the disk are flushed, a `FlushPolicy`.
    policy: eviction policy of host and disk, a name in `kvsm.core.policies.POLICIES` or
    `package.module:Class`.
    workers: ranks.
    store: a `StoreMode`.
    store_threshold: as in `OffloadConfig`.
    defer_ticks: as in `OffloadConfig`; None: its default, or `kvsm.tiers.DEFER_TICKS` with a disk tier.
    last_step: a `LastStep`; None: flush, or keep stepping with a disk tier.
    remote_decode: share of the requests that are for remote decode.
    abort_rate: share of the requests whose client leaves.
    preempt_rate: share of the steps that preempt a request without need.
    failure_rate: share of the copies that fail.
    reset_every: steps from one reset of the cache to the next; 0: none.
    seed: of the generator, of simulated copies, and of what goes wrong.
    copies: what copies, a name in `ranks.COPIES`; with `simulated` the log has virtual times.
    verify_copies: whether the bytes of each loaded block are checked.
    log: directory in which the event log is kept; None: it is not kept.
    time_scale: real seconds for each second of the workload; 0: as fast as possible.
    """

    trace: str | None = None
    requests: int | None = None
    block_tokens: int = BLOCK_TOKENS
    groups: str = "full"
    device_blocks: int = 2048
    host_blocks: int = 16384
    block_bytes: int = 4096
    blocks_per_chunk: int = 1
    disk_blocks: int = 0
    disk_dir: str | None = None
    disk_write: str = WritePolicy.THROUGH.value
    disk_flush: str = FlushPolicy.INTERVAL.value
    policy: str = "lru"
    workers: int = 2
    store: str = StoreMode.EAGER.value
    store_threshold: int = 1
    defer_ticks: int | None = None
    last_step: str | None = None
    remote_decode: float = 0.0
    abort_rate: float = 0.0
    preempt_rate: float = 0.0
    failure_rate: float = 0.0
    reset_every: int = 0
    seed: int = 0
    copies: str = "host"
    verify_copies: bool = False
    log: str | None = None
    time_scale: float = 0.0

    def __post_init__(self) -> None:
        for name, least, most in (
            ("requests", 1, 1 << 31),
            ("block_tokens", 1, 1 << 20),
            ("block_bytes", 1, 1 << 40),
            ("disk_blocks", 0, 1 << 31),
            ("time_scale", 0, 1 << 31),
            ("remote_decode", 0, 1),
            ("abort_rate", 0, 1),
            ("failure_rate", 0, 1),
            ("reset_every", 0, 1 << 31),
        ):
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise ConfigError(f"{name} is {value}; it must be from {least} to {most}")
        if not 0 <= self.preempt_rate <= 0.9:
            # If every step preempts, nothing need ever end.
            raise ConfigError(f"preempt_rate is {self.preempt_rate}; it must be from 0 to 0.9")
        for name, choices in (
            ("copies", COPIES),
            ("store", STORES),
            ("last_step", LAST_STEPS),
            ("disk_write", DISK_WRITES),
            ("disk_flush", DISK_FLUSHES),
        ):
            value = getattr(self, name)
            if value is not None and value not in choices:
                raise ConfigError(f"{name} is {value!r}; choose one of {', '.join(choices)}")
        self._check_disk()
        core = self.offload_config()
        self.scheduler_config().check(core)
        make_policy(core.policy, core.host_blocks)

    def _check_disk(self) -> None:
        if self.disk_dir is None and self.disk_blocks:
            raise ConfigError(f"disk_blocks is {self.disk_blocks}, and disk_dir is missing; give both")
        if self.disk_dir is None:
            return
        if not self.disk_blocks:
            raise ConfigError(f"disk_dir is {self.disk_dir}, and disk_blocks is 0; give both")
        if not COPIES[self.copies].host_in_memory:
            raise ConfigError(
                f"copies is {self.copies!r}; a disk tier needs a host pool in memory, so choose other copies "
                "or omit disk_dir"
            )

    @property
    def token_budget(self) -> int:
        """How many tokens a step computes at most."""
        return BUDGET_BLOCKS * self.block_tokens

    @property
    def host_places(self) -> int:
        """How many device blocks the host pool of one worker holds."""
        return self.host_blocks * self.blocks_per_chunk

    def offload_config(self) -> OffloadConfig:
        """The configuration of the offload core. With a disk tier it has places that stand for the disk."""
        config = OffloadConfig(
            host_blocks=self.host_blocks,
            device_blocks=self.device_blocks,
            block_bytes=self.block_bytes,
            workers=self.workers,
            blocks_per_chunk=self.blocks_per_chunk,
            policy=self.policy,
            store_threshold=self.store_threshold,
            block_tokens=self.scheduler_config().alignment,
        )
        if self.disk_dir is not None:
            config = host_config(replace(config, defer_ticks=DEFER_TICKS))
        return config if self.defer_ticks is None else replace(config, defer_ticks=self.defer_ticks)

    def scheduler_config(self) -> SchedulerConfig:
        """The configuration of the offload scheduler.

        A lazy store keeps a quarter of the device pool ready: free blocks whose content the host has.
        """
        groups = parse_groups(self.groups, self.block_tokens)
        last_step = self.last_step or LAST_STEPS[self.disk_dir is not None]
        return SchedulerConfig(
            groups=groups,
            hash_tokens=gcd(self.block_tokens, *[group.block_tokens for group in groups]),
            store=StoreMode(self.store),
            last_step=LastStep(last_step.replace("-", " ")),
            lazy_target_blocks=max(1, self.device_blocks // 4),
            check_computed_tokens=True,
        )

    def least_pools(self, tokens: int) -> dict[str, int]:
        """The least pools for a request of `tokens` tokens, output included, by the names of options."""
        peaks = [peak_blocks(group, tokens, self.token_budget) for group in self.scheduler_config().groups]
        slots = [-(-blocks // self.blocks_per_chunk) for blocks in peaks]
        least = {"device_blocks": sum(peaks), "host_blocks": sum(slots)}
        return least if self.disk_dir is None else {**least, "disk_blocks": sum(slots)}

    def check_size(self, number: int, request: TraceRequest) -> None:
        """Raises `ConfigError` if request `number` of the workload does not fit into an empty pool."""
        for name, needed in self.least_pools(request.input_length + request.output_length).items():
            if getattr(self, name) < needed:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}; request {number} of the workload alone needs {needed} "
                    f"({request.input_length} + {request.output_length} tokens)"
                )


def parse_groups(spec: str, block_tokens: int) -> tuple[KVCacheGroup, ...]:
    """KV cache groups from text, as in `full,sliding:4096/1024,mamba`. Raises `ConfigError`.

    A group is `full`, `sliding:WINDOW` or `mamba`. `/TOKENS` gives its block size; without it `block_tokens`.
    """
    return tuple([_parse_group(part.strip(), spec, block_tokens) for part in spec.split(",")])


def _parse_group(part: str, spec: str, block_tokens: int) -> KVCacheGroup:
    found = _GROUP.fullmatch(part)
    if found is None:
        raise ConfigError(
            f"groups is {spec!r}: {part!r} is no group; write full, sliding:WINDOW or mamba, with /TOKENS "
            f"for blocks of another size than {block_tokens} tokens, as in full,sliding:4096/1024,mamba"
        )
    tokens = int(found["tokens"] or block_tokens)
    if tokens < 1 or (tokens % block_tokens and block_tokens % tokens):
        raise ConfigError(
            f"groups is {spec!r}: {part!r} has blocks of {tokens} tokens; they must divide {block_tokens}, "
            f"the tokens of a hash id, or be a multiple of it"
        )
    window = int(found["window"] or 0)
    if part[0] == "s" and window < 1:
        raise ConfigError(f"groups is {spec!r}: {part!r} has a window of {window} tokens; at least 1")
    return KVCacheGroup(tokens, _GROUP_KINDS[part[0]], window)
