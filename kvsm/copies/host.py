"""The copy engine whose threads copy between two pools in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvsm.copies.rank_memory import NumpyPools
from kvsm.copies.threaded import ThreadedCopyEngine
from kvsm.events import Direction
from kvsm.ids import IdArray


class HostCopyEngine(ThreadedCopyEngine):
    """A `CopyEngine` between two pools in host memory.

    device, host, offsets: as in `NumpyPools`.
    threads: number of copying threads.

    Raises `ConfigError`.
    """

    def __init__(
        self,
        device: Any | Sequence[Any],
        host: Any,
        threads: int = 2,
        offsets: Sequence[int] | None = None,
    ) -> None:
        self._pools = NumpyPools(device, host, offsets)
        super().__init__(self._pools.layout, threads)

    def copy_blocks(self, direction: Direction, device_blocks: IdArray, host_blocks: IdArray) -> None:
        self._pools.copy(direction, device_blocks, host_blocks)
