"""The files of an engine's disk tier: where they are, what they hold, and who writes them.

    disk_dir/engine0-rank0           slots of rank 0, written by its worker
    disk_dir/engine0-rank0.found     what their headers say, by the worker at its start, for the scheduler
    disk_dir/engine0.recovered       which slots serve which keys, by the scheduler at its start, for workers
    disk_dir/engine0.era             what counts of the slots, by the scheduler
    disk_dir/engine0.log             where the scheduler logs what is stored, for the next engine

vLLM makes the workers before the scheduler. So all that workers have found is there when the scheduler
decides. Before its first copy a worker reads what was decided.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from kvsm.disk import DiskEra, DiskGeometry, RankScan, Recovered, TierDirectory, decide, era_at_start
from kvsm.disk.formats import ERA_ID_BYTES
from kvsm.errors import ConfigError
from kvsm.private_files import read_trusted, write_whole
from kvsm.vllm.extra_config import ConnectorOptions
from kvsm.vllm.host_sharing import shares_pool
from kvsm.vllm.kv_cache_config import block_bytes_of

_MOST_BYTES = 8 << 30
"""Of a file that the two sides exchange."""


class Decided(NamedTuple):
    """What an engine finds at its start.

    found: which slots serve which keys.
    era: with which the engine starts.
    made: ranks whose files are new.
    """

    found: Recovered
    era: DiskEra
    made: tuple[int, ...]


class DiskPlace(TierDirectory):
    """The files of one engine's disk tier.

    Raises `ConfigError` if this engine cannot have one.
    """

    def __init__(self, options: ConnectorOptions, vllm_config: Any, kv_cache_config: Any) -> None:
        assert options.disk_dir is not None
        assert options.disk_bytes is not None
        if shares_pool(options, vllm_config, kv_cache_config):
            raise ConfigError(
                'disk_dir: ranks that share a host pool have no disk tier yet; set "shared_pool_directory": '
                "null, or omit disk_dir"
            )
        parallel = vllm_config.parallel_config
        self.ranks = parallel.world_size
        super().__init__(Path(options.disk_dir), f"engine{parallel.data_parallel_index}")
        slot_bytes = block_bytes_of(kv_cache_config) * options.blocks_per_chunk
        one = DiskGeometry(slot_bytes, 1)
        room = options.disk_bytes // self.ranks - one.header_at(0)
        self.num_slots = room // one.slot_bytes
        self._payload_bytes = slot_bytes
        if self.num_slots < 1:
            raise ConfigError(
                f"disk_bytes is {options.disk_bytes:,} for all ranks: on each of {self.ranks} this has no "
                f"room for one block of {slot_bytes:,} bytes; give at least {one.file_bytes * self.ranks:,}"
            )

    def geometry(self, rank: int) -> DiskGeometry:
        """Of a rank's file."""
        return DiskGeometry(self._payload_bytes, self.num_slots, rank, self.ranks)

    # What a worker and the scheduler tell each other.

    def tell_found(self, rank: int, found: RankScan) -> None:
        """The worker of this rank has read its headers. Raises `OSError`."""
        arrays = (found.found.tobytes(), found.lives.tobytes(), found.numbers.tobytes(), found.eras.tobytes())
        parts = (*arrays, found.keys, found.life)
        write_whole(self._found(rank), msgspec.msgpack.encode(parts))

    def decide(self, weights: str) -> Decided:
        """Which slots serve which keys on all ranks, if these weights have computed them. The workers are
        told too.

        Begins an era if the last one cannot go on. Raises `ConfigError`.
        """
        try:
            scans = [self._read_found(rank) for rank in range(self.ranks)]
            era = era_at_start(self.era, weights, max(one.life for one in scans))
            recovered = decide(scans, era.id)
            write_whole(self._recovered, msgspec.msgpack.encode(recovered))
            for rank in range(self.ranks):
                self._found(rank).unlink(missing_ok=True)
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(
                f"disk_dir: what the ranks have found in {self._directory} cannot be read, or nothing can be "
                f"written there: {error}. All ranks must be on this machine; omit disk_dir if they are not"
            ) from error
        return Decided(recovered, era, tuple(rank for rank, one in enumerate(scans) if one.life == 1))

    def read_decided(self) -> Recovered:
        """What the scheduler has decided. Raises `ConfigError` and `OSError`."""
        try:
            return msgspec.msgpack.decode(read_trusted(self._recovered, _MOST_BYTES), type=Recovered)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{self._recovered}: cannot be understood: {error}") from error

    def _found(self, rank: int) -> Path:
        return self._file(f"-rank{rank}.found")

    @property
    def _recovered(self) -> Path:
        return self._file(".recovered")

    def _read_found(self, rank: int) -> RankScan:
        data = read_trusted(self._found(rank), _MOST_BYTES)
        found, lives, numbers, eras, keys, life = msgspec.msgpack.decode(
            data, type=tuple[bytes, bytes, bytes, bytes, list[bytes], int]
        )
        return RankScan(
            np.frombuffer(found, np.bool_).reshape(len(keys), -1),
            np.frombuffer(lives, np.int64),
            np.frombuffer(numbers, np.int64),
            np.frombuffer(eras, f"V{ERA_ID_BYTES}"),
            keys,
            life,
        )


def disk_place(options: ConnectorOptions, vllm_config: Any, kv_cache_config: Any) -> DiskPlace | None:
    """Where this engine keeps its disk tier; None if it has none. Raises `ConfigError`."""
    return None if options.disk_dir is None else DiskPlace(options, vllm_config, kv_cache_config)
