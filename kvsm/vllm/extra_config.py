"""The options that kvsm reads from vLLM's `kv_connector_extra_config`.

An unknown name is an error that lists the known ones. The table in docs/vllm.md repeats these descriptions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from inspect import cleandoc
from itertools import takewhile
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from kvsm.core.log import Durability, OnFailure
from kvsm.core.policies import make_policy
from kvsm.errors import ConfigError
from kvsm.tiers import check_admits_all, check_loads_all
from kvsm.vllm.vllm_options import OPTIONS

Bytes = Annotated[int, msgspec.Meta(ge=1)]


class LogOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How `KvsmConnector` and `RecordingSpec` write an event log.

    log_durability: when the log is synced to disk: `none`, `interval`, or `every` frame before its copies
        start.
    log_max_bytes: the largest total size of all files of a log (bytes). The oldest segments are deleted.
    past_logs_max_bytes: the largest total size of the logs of earlier starts in their directory (bytes). The
        oldest are deleted at a start. `null`: 1 GiB beside a kept pool, and no limit elsewhere.
    """

    log_durability: Durability = "interval"
    log_max_bytes: int | None = None
    past_logs_max_bytes: Annotated[int, msgspec.Meta(ge=0)] | None = None


class ConnectorOptions(LogOptions, frozen=True, kw_only=True):
    """The options of `KvsmConnector`.

    cpu_bytes_to_use: host memory for KV cache, for all ranks of one engine together (bytes). Give this, or
        `cpu_bytes_to_use_per_rank`.
    cpu_bytes_to_use_per_rank: host memory for KV cache, for each rank (bytes).
    policy: the eviction policy: a name in `kvsm.core.policies.POLICIES`, or `package.module:Class`.
    store_threshold: how often a block must be offered before it is stored.
    load_only_if_faster: whether a hit on the host is declined if the times measured so far say that its
        tokens are computed at least as fast as they are loaded. One such hit in sixteen is loaded, to measure
        loads.
    verify_copies: whether each stored block gets a checksum, which every load compares. A load of wrong bytes
        fails.
    event_log: a directory for event logs. Each start of an engine creates its own directory in it.
    log_on_failure: what happens if the log cannot be written: `continue` without it, or `stop` the engine.
    transfer_timeout_s: how long a copy may stay unreported while no earlier copy of its direction ends
        (seconds). Then it is given up, and the memory that it may touch is not used again. 0: never.
    last_step: what happens to copies in flight when no request is left. With `keep_stepping` the engine takes
        empty steps until all are reported. With `flush` one last step waits for all of them. With a disk
        tier, further steps wait for copies to the disk, which begin when their blocks are on the host.
    file_group: a group (gid) whose members share all files of this engine: pools, disk tier and logs. It lets
        an engine use the files of another user id, as for pods with random ids. `null`: only this user can.
    store: `eager` stores a block once it is computed, `lazy` when it is about to be evicted from the device.
    prompt_only: whether only blocks of prompts are stored, and none of generated tokens.
    lazy_target_blocks: how many blocks at the head of the device's free queue a lazy store keeps stored; 0
        means twice the number that one step can take to compute its tokens.
    blocks_per_chunk: device blocks that are stored and found together, under one key.
    hand_over_directory: a directory in which this engine hands the blocks of prompts to other engines of this
        machine, or gets them (disaggregated prefill). All these engines name the same directory. Each keeps
        its host memory in a file there, so it should be on tmpfs, below /dev/shm.
    hand_over_timeout_s: how long blocks are kept until another engine claims them, and how long it may then
        read them (seconds).
    hand_over_share: the largest share of host memory that blocks for other engines may hold, above 0 and at
        most 1. When it is reached, the oldest hand-overs are given up for new ones.
    agent_hint_share: the largest share of host memory that the leases of agents' sessions may hold
        (`agent_hint`), from 0 to 1. One session gets at most half of it. Nothing is reserved. With 0 no hint
        gets a lease.
    canonical_layout: whether a block has the same bytes on the host for every number of ranks. All ranks then
        share one host pool.
    pool_dir: a directory for a host pool that outlives its process: the next engine with this directory
        serves the blocks that the last one stored, also after a kill -9. The log is there too, unless
        `event_log` names another place. It should be on tmpfs, below /dev/shm. Each engine needs its own.
    weights_version: the name of the model's weights. `null`: it follows from the files of the model.
    disk_dir: a directory for a disk tier below host memory: stored blocks are also written there, and are
        found there after host memory has evicted them, also by a later process. Each engine needs its own. If
        it cannot be used, the engine serves without it and warns.
    disk_bytes: the size of the disk tier, for all ranks of one engine together (bytes). It is allocated at
        the first start.
    disk_write: when a block goes to the disk: `through`, as soon as host memory has it; or `back`, before
        host memory evicts it, or when it is used again.
    disk_flush: when stores to the disk are flushed: `none`, `interval` (each second), or `every` store before
        it counts. What was flushed survives a power loss.
    """

    cpu_bytes_to_use: Bytes | None = None
    cpu_bytes_to_use_per_rank: Bytes | None = None
    policy: str = "lru"
    store_threshold: int = 1
    load_only_if_faster: bool = False
    verify_copies: bool = False
    event_log: str | None = None
    log_on_failure: OnFailure = "continue"
    transfer_timeout_s: Annotated[float, msgspec.Meta(ge=0)] = 60.0
    last_step: Literal["flush", "keep_stepping"] = "keep_stepping"
    file_group: Annotated[int, msgspec.Meta(ge=0)] | None = None
    store: Literal["eager", "lazy"] = "eager"
    prompt_only: bool = False
    lazy_target_blocks: int = 0
    blocks_per_chunk: int = 1
    hand_over_directory: str | None = None
    hand_over_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 60.0
    hand_over_share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.5
    agent_hint_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.25
    canonical_layout: bool = False
    pool_dir: str | None = None
    weights_version: str | None = None
    disk_dir: str | None = None
    disk_bytes: Bytes | None = None
    disk_write: Literal["through", "back"] = "through"
    disk_flush: Literal["none", "interval", "every"] = "interval"

    def __post_init__(self) -> None:
        if (self.cpu_bytes_to_use is None) == (self.cpu_bytes_to_use_per_rank is None):
            raise ConfigError(
                "give the size of host memory: cpu_bytes_to_use for all ranks together, or "
                "cpu_bytes_to_use_per_rank for each, and not both"
            )
        if self.lazy_target_blocks and self.store != "lazy":
            raise ConfigError('lazy_target_blocks is for a lazy store; set "store": "lazy", or omit it')
        if self.store == "lazy" and self.store_threshold > 1:
            raise ConfigError("store_threshold counts offers, and a lazy store has none; omit one of them")
        if self.store == "lazy" and self.blocks_per_chunk > 1:
            raise ConfigError("blocks_per_chunk is for an eager store; a lazy store takes single blocks")
        if self.canonical_layout and self.hand_over_directory is not None:
            raise ConfigError(
                "canonical_layout: all ranks share one host pool, but with hand_over_directory each rank "
                "hands over a pool of its own; omit one of them"
            )
        if (self.disk_dir is None) != (self.disk_bytes is None):
            raise ConfigError("a disk tier needs a directory and a size: give both disk_dir and disk_bytes")
        if self.disk_dir is not None:
            check_admits_all(self.policy, make_policy(self.policy, 1))
            check_loads_all(self.load_only_if_faster)
        if self.pool_dir is not None and self.hand_over_directory is not None:
            raise ConfigError(
                "pool_dir: a pool that is handed over to other engines ends with its process; "
                "omit pool_dir or hand_over_directory"
            )

    def host_bytes(self, ranks: int) -> int:
        """Host memory of all ranks of an engine together (bytes)."""
        return self.cpu_bytes_to_use or (self.cpu_bytes_to_use_per_rank or 0) * ranks


class RecordingOptions(LogOptions, frozen=True, kw_only=True):
    """The options of `RecordingSpec`, in addition to vLLM's `CPUOffloadingSpec` options.

    event_log: a directory for event logs. Each start of an engine creates its own directory in it.
    """

    event_log: str


Options = TypeVar("Options", bound=LogOptions)


def parse(kind: type[Options], given: Mapping[str, Any], others: Collection[str] = ()) -> Options:
    """Convert the given values to options of this kind. Raises `ConfigError`.

    others: names that vLLM reads; they are ignored here.
    """
    known = kind.__struct_fields__
    ours = {name: value for name, value in given.items() if name not in others}
    for name in ours:
        if name not in known:
            raise ConfigError(f"kv_connector_extra_config has {name!r}, {_problem(name, known)}")
    try:
        return msgspec.convert(ours, kind, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"kv_connector_extra_config: {error}") from error


def described(name: str) -> str:
    """Return the description of an option of `KvsmConnector` from the docstrings of the option classes."""
    for kind in ConnectorOptions.__mro__:
        lines = cleandoc(kind.__doc__ or "").splitlines()  # Python 3.13 and later remove the indentation
        begins = [number for number, line in enumerate(lines) if line.startswith(f"{name}: ")]
        for begin in begins:
            more = takewhile(lambda line: line.startswith("    "), lines[begin + 1 :])
            text = " ".join([lines[begin].partition(": ")[2], *map(str.strip, more)])
            return text.replace("`", "")
    return ""


def _problem(name: str, known: Collection[str]) -> str:
    """Return what is wrong with an unknown option, and what to use instead."""
    for option in OPTIONS:
        if option.name == name:
            ours = [f"KvsmConnector has {other!r}: {described(other)}" for other in option.instead]
            return " ".join(["an option of vLLM's own offload; omit it.", *ours, option.why]).rstrip()
    near = get_close_matches(name, known, 1)
    hint = f"; did you mean {near[0]}?" if near else "."
    return f"which kvsm does not know{hint} It knows: {', '.join(known)}"
