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

    device: the tensors of the KV cache, or a single tensor: numpy arrays, or torch CPU tensors, which are
        viewed without copying. The first dimension of each is the blocks; the others may be any, with any
        strides, for example one tensor for K and one for V of each layer. For other tensors pass a view, such
        as `tensor.movedim(1, 0)`.
    host: a `HostPool`, or a 2-D array or tensor, `[host blocks, bytes of one block in all tensors]`.
    offsets: where the part of each tensor begins in a row of the host pool (bytes); None: one after another.
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
