"""Where the bytes of a block are, in the tensors of the device pool and in the host pool.

The device pool is one or more tensors of shape `[num_blocks, block_bytes]`, perhaps strided: for example one
for each layer, or one for each storage that several KV cache groups share. Block b is row b of each tensor.
On the host a block is one row with the parts of all tensors one after another (block-major), so that the
parts that are copied together are contiguous.

    device   tensor 0   | 0:b0 | 0:b1 | 0:b2 | ...        host   | 0:b7 1:b7 | 0:b2 1:b2 | ...
             tensor 1   | 1:b0 | 1:b1 | 1:b2 | ...                  block 0     block 1

With `offsets` the parts have other places in the host row, and the gaps hold the parts of other ranks:

    host     | 0:b7 of rank 0 | 0:b7 of rank 1 | 1:b7 of rank 0 | 1:b7 of rank 1 |

Groups with blocks of different sizes may share a storage: their tensors start at the same byte and have the
same stride. Then only the tensor with the longest rows is copied. A block belongs to one group at a time; if
its row is a shorter one, the bytes behind it are copied but never used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, combinations
from typing import Any, NamedTuple

from kvsm.errors import ConfigError


class MemoryRows(NamedTuple):
    """Rows of memory at even distances. Row b is `row_bytes` bytes from address + b * stride on."""

    address: int
    stride: int
    num_rows: int
    row_bytes: int

    @property
    def end(self) -> int:
        """The address behind the last byte."""
        if not self.num_rows:
            return self.address
        return self.address + (self.num_rows - 1) * self.stride + self.row_bytes


@dataclass(frozen=True)
class MemoryLayout:
    """The two pools of a rank.

    tensors: the device pool.
    host: the host pool.
    offsets: where each tensor's part starts in a row of the host pool.
    """

    tensors: tuple[MemoryRows, ...]
    host: MemoryRows
    offsets: tuple[int, ...]

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Cached, because each copy looks up its plan in caches whose key is the layout."""
        return hash((self.tensors, self.host, self.offsets))

    @property
    def num_device_blocks(self) -> int:
        return self.tensors[0].num_rows

    @property
    def num_host_blocks(self) -> int:
        return self.host.num_rows

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of one block, summed over its parts."""
        return sum(rows.row_bytes for rows in self.tensors)

    @property
    def is_dense(self) -> bool:
        """Whether consecutive blocks are contiguous on both sides. This takes a single tensor: with two, the
        parts of one tensor are not contiguous on the host."""
        return self.tensors[0].stride == self.tensors[0].row_bytes == self.host.stride


def tensors_of(pool: Any | Sequence[Any]) -> list[Any]:
    """Return the tensors of a device pool, given as a sequence of tensors or as one tensor."""
    return list(pool) if isinstance(pool, list | tuple) else [pool]


def rows_of(name: str, pool: Any) -> MemoryRows:
    """Return the rows of a 2-D numpy array or torch tensor. Raises `ConfigError`. name: for the error."""
    if not hasattr(pool, "ndim") or not (hasattr(pool, "data_ptr") or hasattr(pool, "ctypes")):
        raise ConfigError(f"{name} is a {type(pool).__name__}; give a numpy array or a torch tensor")
    if pool.ndim != 2:
        raise ConfigError(f"{name} is {pool.ndim}-D; it must be 2-D, [blocks, block_bytes]")
    item_bytes = int(pool.itemsize)
    if hasattr(pool, "data_ptr"):
        address, strides = int(pool.data_ptr()), [stride * item_bytes for stride in pool.stride()]
    else:
        address, strides = int(pool.ctypes.data), list(pool.strides)
    count, items = map(int, pool.shape)
    if not items:
        raise ConfigError(f"{name} has rows of 0 bytes; they need at least 1")
    row_bytes = items * item_bytes
    if count and items > 1 and strides[1] != item_bytes:
        raise ConfigError(f"{name} has gaps inside its rows; a block must be contiguous")
    if count > 1 and strides[0] < row_bytes:
        raise ConfigError(f"{name} has rows of {row_bytes} bytes, {strides[0]} apart: they overlap")
    return MemoryRows(address, strides[0] if count > 1 else row_bytes, count, row_bytes)


def make_layout(
    tensors: Sequence[Any], host: Any, offsets: Sequence[int] | None = None
) -> tuple[MemoryLayout, tuple[int, ...]]:
    """Return the layout of these pools, and the indices of the tensors in it: a tensor that is part of
    another tensor is left out.

    offsets: where the part of each tensor begins in a row of the host pool (bytes); None: one after another.
    Raises `ConfigError`.
    """
    rows, places = _device_rows(tensors)
    kept = tuple(rows[place] for place in places)
    host_rows = rows_of("host pool", host)
    if offsets is not None:
        chosen = tuple(offsets[place] for place in places)
        _check_offsets(kept, chosen, host_rows.row_bytes)
        return MemoryLayout(kept, host_rows, chosen), places
    *following, block_bytes = accumulate((one.row_bytes for one in kept), initial=0)
    if host_rows.row_bytes != block_bytes:
        raise ConfigError(
            f"a block has {block_bytes} bytes in the device pool and {host_rows.row_bytes} in the host "
            "pool; they must be equal"
        )
    return MemoryLayout(kept, host_rows, tuple(following)), places


def _check_offsets(rows: Sequence[MemoryRows], offsets: Sequence[int], row_bytes: int) -> None:
    """Refuse parts that overlap, or that exceed a row of the host pool."""
    end = 0
    for offset, length in sorted((offset, one.row_bytes) for offset, one in zip(offsets, rows)):
        if offset < end or offset + length > row_bytes:
            raise ConfigError(
                f"a part of {length} bytes at {offset} of a row of the host pool, which has {row_bytes}, "
                "shares bytes with another part or leaves the row; give each part its own place"
            )
        end = offset + length


def block_bytes_of(tensors: Sequence[Any]) -> int:
    """Return how many bytes a row of the host pool needs for these tensors. Raises `ConfigError`."""
    rows, places = _device_rows(tensors)
    return sum(rows[place].row_bytes for place in places)


def _device_rows(tensors: Sequence[Any]) -> tuple[list[MemoryRows], tuple[int, ...]]:
    """Return the rows of each tensor, and the indices of the tensors that are not part of another tensor."""
    if not tensors:
        raise ConfigError("the device pool has no tensors; register at least one")
    rows = [rows_of(f"device tensor {place}", tensor) for place, tensor in enumerate(tensors)]
    for place, found in enumerate(rows):
        if found.num_rows != rows[0].num_rows:
            raise ConfigError(
                f"device tensor {place} has {found.num_rows} blocks, tensor 0 has {rows[0].num_rows}; "
                "a block is one row of each of them"
            )
    return rows, _distinct(rows)


def _distinct(rows: Sequence[MemoryRows]) -> tuple[int, ...]:
    """Return the indices of tensors that are not part of another tensor, in the given order. Raises
    `ConfigError` for tensors that overlap in any other way."""
    # Longest rows first: a tensor can only be part of a tensor that comes earlier.
    kept: list[int] = []
    for place in sorted(range(len(rows)), key=lambda place: (-rows[place].row_bytes, place)):
        if not any(_is_part(rows[place], rows[other]) for other in kept):
            kept.append(place)
    for first, second in combinations(sorted(kept), 2):
        if _overlap(rows[first], rows[second]):
            raise ConfigError(
                f"device tensors {first} and {second} share bytes, and neither's rows are part of the "
                "other's; register what covers both"
            )
    return tuple(sorted(kept))


def _is_part(one: MemoryRows, other: MemoryRows) -> bool:
    """Whether row b of `one` lies in row b of `other`, for every b."""
    start = one.address - other.address
    is_as_far_apart = one.num_rows < 2 or one.stride == other.stride
    return is_as_far_apart and start >= 0 and start + one.row_bytes <= other.row_bytes


def _overlap(one: MemoryRows, other: MemoryRows) -> bool:
    """Whether a row of `one` shares a byte with a row of `other`. True for all rows with different strides
    in the same range of addresses."""
    if one.end <= other.address or other.end <= one.address:
        return False
    if one.stride != other.stride:
        return True
    apart = (other.address - one.address) % one.stride
    return apart < one.row_bytes or apart + other.row_bytes > one.stride
