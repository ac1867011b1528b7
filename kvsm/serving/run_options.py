"""The options of a run, as one value that is checked before the run begins."""

from __future__ import annotations

import re
from math import gcd
from typing import Annotated

import msgspec
from msgspec.structs import replace

from kvsm.core.policies import POLICIES, make_policy
from kvsm.core.scheduler import GroupKind, KVCacheGroup, LastStep, SchedulerConfig, StoreMode
from kvsm.core.scheduler.groups import WINDOWED
from kvsm.errors import ConfigError
from kvsm.events import OffloadConfig
from kvsm.serving.agent_sessions import AT_ONCE
from kvsm.serving.block_tables import peak_blocks
from kvsm.serving.ranks import COPIES
from kvsm.serving.traces import BLOCK_TOKENS, TraceRequest
from kvsm.system.field_types import check_values, says
from kvsm.tiers import DEFER_TICKS, WritePolicy, check_admits_all, host_config
from kvsm.tiers.disk import FlushPolicy

STORES = tuple(mode.value for mode in StoreMode)
LAST_STEPS = tuple(last_step.value.replace(" ", "-") for last_step in LastStep)
DISK_WRITES = tuple(policy.value for policy in WritePolicy)
DISK_FLUSHES = tuple(policy.value for policy in FlushPolicy)

BUDGET_BLOCKS = 16
"""The token budget of a step, in blocks."""

_GROUP = re.compile(r"(?P<kind>full|sliding|chunked|mamba)(:(?P<window>[0-9]+))?(/(?P<tokens>[0-9]+))?")


class RunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a run: each field is an option of `kvsm run`. Raises `ConfigError` for unusable values.

    With `simulated` copies, the event log has virtual times. A later run with the same sizes and groups finds
    the blocks in `disk_dir`.
    """

    trace: Annotated[
        str | None, says("Mooncake trace, or agent sessions. Default: a generated workload.")
    ] = None
    at_once: (
        Annotated[int, says(f"Agent sessions that run at a time.  [default: {AT_ONCE}]", 1, 1 << 20)] | None
    ) = None
    requests: (
        Annotated[int, says("Generate N requests (2000), or take the first N of a trace.", 1, 1 << 31)] | None
    ) = None
    block_tokens: Annotated[
        int, says("Tokens per block, and per hash id of a Mooncake trace.", 1, 1 << 20)
    ] = BLOCK_TOKENS
    groups: Annotated[
        str, says("KV cache groups: full, sliding:WINDOW, chunked:WINDOW, mamba; /TOKENS: block size.")
    ] = "full"
    device_blocks: Annotated[int, says("Blocks of each device pool, for all groups.")] = 2048
    host_blocks: Annotated[int, says("Slots of each host pool.")] = 16384
    disk_blocks: Annotated[int, says("Slots of each rank's file on disk; 0: no disk tier.", 0, 1 << 31)] = 0
    disk_dir: Annotated[
        str | None, says("Directory of the disk tier's files. The next run finds their blocks.")
    ] = None
    disk_write: Annotated[
        str, says("Store on disk at once, or before the host evicts a block.", choices=DISK_WRITES)
    ] = WritePolicy.THROUGH.value
    disk_flush: Annotated[str, says("When stores to the disk are flushed.", choices=DISK_FLUSHES)] = (
        FlushPolicy.INTERVAL.value
    )
    block_bytes: Annotated[int, says("Bytes of a block on one worker.", 1, 1 << 40)] = 4096
    blocks_per_chunk: Annotated[int, says("Device blocks that one host slot holds.")] = 1
    workers: Annotated[int, says("Ranks, each with its own pools.")] = 2
    policy: Annotated[str, says(f"Eviction: {', '.join(POLICIES)}, or package.module:Class.")] = "lru"
    store: Annotated[str, says("Store blocks once computed, or only close to eviction.", choices=STORES)] = (
        StoreMode.EAGER.value
    )
    store_threshold: Annotated[int, says("Store a block when it is offered for the n-th time.")] = 1
    defer_ticks: Annotated[
        int | None,
        says("Steps that a request waits for a block in flight.  [default: 64; 2048 with a disk]"),
    ] = None
    last_step: Annotated[
        str | None,
        says(
            "What happens to copies when no request is left.  [default: flush; keep-stepping with a disk]",
            choices=LAST_STEPS,
        ),
    ] = None
    remote_decode: Annotated[float, says("Share of requests prefilled for remote decode.", 0, 1)] = 0.0
    abort_rate: Annotated[float, says("Share of requests whose client leaves within 1000 steps.", 0, 1)] = 0.0
    # If every step preempted a request, no request might ever end.
    preempt_rate: Annotated[
        float, says("Share of steps that preempt a running request on purpose.", 0, 0.9)
    ] = 0.0
    failure_rate: Annotated[float, says("Share of each worker's copies that fail halfway.", 0, 1)] = 0.0
    reset_every: Annotated[
        int, says("Steps from one reset of the whole cache to the next; 0: none.", 0, 1 << 31)
    ] = 0
    seed: Annotated[int, says("Seed of the workload, of simulated copies and of disturbances.")] = 0
    copies: Annotated[
        str,
        says(
            f"How to copy: {'; '.join(f'{name} ({choice.told})' for name, choice in COPIES.items())}.",
            choices=tuple(COPIES),
        ),
    ] = "host"
    verify_copies: Annotated[bool, says("Check the bytes of every block that is loaded.")] = False
    log: Annotated[
        str | None,
        says(
            "Keep the event log in DIR, which must be empty or absent.  "
            "[default: kvsm-log, or kvsm-log-2, ...]"
        ),
    ] = None
    time_scale: Annotated[float, says("Real seconds for each second of the workload.", 0, 1 << 31)] = 0.0

    def __post_init__(self) -> None:
        check_values(self)
        if self.at_once is not None and self.trace is None:
            raise ConfigError(f"at_once is {self.at_once}, and trace is missing; give both")
        self._check_disk()
        core = self.offload_config()
        self.scheduler_config().check(core)
        policy = make_policy(core.policy, core.host_blocks)
        if self.disk_dir is not None:
            check_admits_all(core.policy, policy)

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
        """The most tokens that a step computes."""
        return BUDGET_BLOCKS * self.block_tokens

    @property
    def host_places(self) -> int:
        """The number of device blocks that the host pool of one worker holds."""
        return self.host_blocks * self.blocks_per_chunk

    def offload_config(self) -> OffloadConfig:
        """Return the configuration of the offload core. With a disk tier, it has more device blocks, which
        stand for the disk."""
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
        """Return the configuration of the offload scheduler.

        A lazy store keeps a quarter of the device pool as free blocks whose content is on the host.
        """
        groups = parse_groups(self.groups, self.block_tokens)
        last_step = self.last_step or LAST_STEPS[self.disk_dir is not None]
        return SchedulerConfig(
            groups=groups,
            hash_tokens=gcd(self.block_tokens, *[group.block_tokens for group in groups]),
            store=StoreMode(self.store),
            last_step=LastStep(last_step.replace("-", " ")),
            lazy_target_blocks=max(1, self.device_blocks // 4),
        )

    def least_pools(self, tokens: int) -> dict[str, int]:
        """Return the smallest pools for a request of `tokens` tokens, with its output, by option name."""
        peaks = [peak_blocks(group, tokens, self.token_budget) for group in self.scheduler_config().groups]
        slots = [-(-blocks // self.blocks_per_chunk) for blocks in peaks]
        least = {"device_blocks": sum(peaks), "host_blocks": sum(slots)}
        return least if self.disk_dir is None else {**least, "disk_blocks": sum(slots)}

    def check_size(self, number: int, request: TraceRequest) -> None:
        """Raise `ConfigError` if request `number` of the workload does not fit into empty pools."""
        for name, needed in self.least_pools(request.input_length + request.output_length).items():
            if getattr(self, name) < needed:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}; request {number} of the workload alone needs {needed} "
                    f"({request.input_length} + {request.output_length} tokens)"
                )


def parse_groups(spec: str, block_tokens: int) -> tuple[KVCacheGroup, ...]:
    """Parse KV cache groups, as in `full,sliding:4096/1024,mamba`. Raises `ConfigError`.

    A group is `full`, `sliding:WINDOW`, `chunked:WINDOW` (chunked local attention) or `mamba`. `/TOKENS` is
    its block size; the default is `block_tokens`.
    """
    return tuple([_parse_group(part.strip(), spec, block_tokens) for part in spec.split(",")])


def _parse_group(part: str, spec: str, block_tokens: int) -> KVCacheGroup:
    found = _GROUP.fullmatch(part)
    if found is None or (GroupKind(found["kind"]) in WINDOWED) != (found["window"] is not None):
        raise ConfigError(
            f"groups is {spec!r}: {part!r} is no group; write full, sliding:WINDOW, chunked:WINDOW or mamba, "
            f"with /TOKENS for blocks of another size than {block_tokens} tokens, as in "
            "full,sliding:4096/1024,mamba"
        )
    tokens = int(found["tokens"] or block_tokens)
    if tokens < 1 or (tokens % block_tokens and block_tokens % tokens):
        raise ConfigError(
            f"groups is {spec!r}: {part!r} has blocks of {tokens} tokens; they must divide {block_tokens}, "
            f"the tokens of a hash id, or be a multiple of it"
        )
    kind, window = GroupKind(found["kind"]), int(found["window"] or 0)
    if kind in WINDOWED and window < 1:
        raise ConfigError(f"groups is {spec!r}: {part!r} has a window of {window} tokens; at least 1")
    return KVCacheGroup(tokens, kind, window)
