"""What a user may say in `kv_connector_extra_config`. An unknown name is an error, with the known ones."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any, Literal, TypeVar

import msgspec

from kvsm.errors import ConfigError
from kvsm.log import Durability, OnFailure

Store = Literal["eager", "lazy"]


class CommonOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Of every part of kvsm that vLLM can be told to use.

    cpu_bytes_to_use: host memory for KV cache, of all ranks of one engine together. policy: of eviction: a
    name in `kvsm.policies.POLICIES`, or `package.module:Class`. store_threshold: a block is stored when it is
    offered for the n-th time. verify_copies: a checksum for each block stored, compared when it is loaded; a
    load that brings other bytes fails. event_log: a directory for event logs, made if absent; every start of
    an engine makes one in it. log_on_failure: what a log that cannot be written does: `continue` without it,
    or `stop` the engine. log_durability: when it is synced to the disk. log_max_bytes: how large it may grow;
    then its oldest segments go.
    """

    cpu_bytes_to_use: int
    policy: str = "lru"
    store_threshold: int = 1
    verify_copies: bool = False
    event_log: str | None = None
    log_on_failure: OnFailure = "continue"
    log_durability: Durability = "interval"
    log_max_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.cpu_bytes_to_use < 1:
            raise ConfigError(
                f"cpu_bytes_to_use is {self.cpu_bytes_to_use}; give the bytes of host memory to use"
            )


class ConnectorOptions(CommonOptions, frozen=True, kw_only=True):
    """Of `KvsmConnector`.

    store: `eager`, as soon as a block is computed; `lazy`, only when it is about to be evicted. prompt_only:
    what was generated is not stored. lazy_target_blocks: how many of the next device blocks to go are kept
    stored; 0: twice what one step can take. blocks_per_chunk: device blocks that are stored and found
    together, under one key. self_describing_kv_events: KV events say which tokens a block holds.
    """

    store: Store = "eager"
    prompt_only: bool = False
    lazy_target_blocks: int = 0
    blocks_per_chunk: int = 1
    self_describing_kv_events: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lazy_target_blocks and self.store != "lazy":
            raise ConfigError('lazy_target_blocks is for a lazy store; give "store": "lazy", or leave it out')
        if self.store == "lazy" and self.store_threshold > 1:
            raise ConfigError("store_threshold counts offers, and a lazy store has none; leave one out")
        if self.store == "lazy" and self.blocks_per_chunk > 1:
            raise ConfigError("blocks_per_chunk is for an eager store: a lazy one takes single blocks")


class SpecOptions(CommonOptions, frozen=True, kw_only=True):
    """Of `KvsmSpec`, beside what vLLM's specs know themselves."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.verify_copies:
            raise ConfigError(
                "verify_copies: vLLM's OffloadingConnector cannot be told that a load brought other bytes; "
                "use KvsmConnector for it, or leave it out"
            )


Options = TypeVar("Options", bound=CommonOptions)


def parse(kind: type[Options], given: Mapping[str, Any], others: Collection[str] = ()) -> Options:
    """What was given, as options of this kind. others: names that are somebody else's.

    Raises `ConfigError`.
    """
    known = kind.__struct_fields__
    ours = {name: value for name, value in given.items() if name not in others}
    for name in ours:
        if name not in known:
            near = get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(
                f"kv_connector_extra_config has {name!r}, which kvsm does not know{hint} It knows: "
                + ", ".join(known)
            )
    if "cpu_bytes_to_use" not in ours:
        raise ConfigError("kv_connector_extra_config lacks cpu_bytes_to_use, the bytes of host memory to use")
    try:
        return msgspec.convert(ours, kind, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"kv_connector_extra_config: {error}") from error
