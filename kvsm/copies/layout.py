"""Where the bytes of a block are, in the tensors of the device pool and in the host pool.

The device pool is one or more tensors of shape `[num_blocks, ...]`, with any number of dimensions and any
strides: for example one for each layer, one for K and one for V of each layer, or one for each buffer that
several KV cache groups share. Block b is `tensor[b]` of each tensor; if it is not contiguous, each contiguous
piece of it is a part of its own. On the host a block is one row with the parts of all tensors one after
another (block-major), so that the parts that are copied together are contiguous.

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
from itertools import accumulate, combinations, product
from math import prod
from operator import itemgetter
from typing import Any, NamedTuple

from kvsm.errors import ConfigError

MOST_PIECES = 1024
"""Most contiguous pieces of a block. All pairs of pieces are compared."""


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


def host_array(pool: Any) -> Any:
    """Return the array of a host pool, which is given as an array, a tensor, or a `HostPool`."""
    return getattr(pool, "blocks", pool)


def rows_of(name: str, pool: Any) -> MemoryRows:
    """Return the rows of a 2-D numpy array or torch tensor. Raises `ConfigError`. name: for the error."""
    _address_of(name, pool)
    if pool.ndim != 2:
        raise ConfigError(f"{name} is {pool.ndim}-D; it must be 2-D, [blocks, block_bytes]")
    pieces = pieces_of(name, pool)
    if len(pieces) > 1:
        raise ConfigError(f"{name} has gaps inside its rows; a block must be contiguous")
    return pieces[0]


def pieces_of(name: str, tensor: Any) -> list[MemoryRows]:
    """Return the rows of a numpy array or torch tensor whose first dimension is the blocks: one entry for
    each contiguous piece of a block. Raises `ConfigError`. name: for the error."""
    address, item_bytes = _address_of(name, tensor), int(tensor.itemsize)
    if tensor.ndim == 0:
        raise ConfigError(f"{name} is a single number; its first dimension must be the blocks")
    strides = (
        [stride * item_bytes for stride in tensor.stride()] if hasattr(tensor, "data_ptr") else tensor.strides
    )
    (count, *sizes), (stride, *inner) = map(int, tensor.shape), strides
    if 0 in sizes:
        raise ConfigError(f"{name} has rows of 0 bytes; they need at least 1")
    if not count:  # numpy's strides have no meaning then
        return [MemoryRows(address, prod(sizes) * item_bytes, 0, prod(sizes) * item_bytes)]
    dimensions = [(size, distance) for size, distance in zip(sizes, inner) if size > 1]
    row_bytes, apart = item_bytes, list(dimensions)
    for size, distance in sorted(dimensions, key=itemgetter(1)):
        if distance < 0:
            raise ConfigError(f"{name} is reversed in a dimension; pass the tensor without the reversal")
        if distance == row_bytes:
            row_bytes *= size
            apart.remove((size, distance))
    _check_pieces(name, prod(size for size, _ in apart))
    if count < 2:
        stride = row_bytes
    elif stride < 0:
        raise ConfigError(f"{name} is reversed in a dimension; pass the tensor without the reversal")
    elif stride < row_bytes:
        raise ConfigError(f"{name} has rows of {row_bytes} bytes, {stride} apart: they overlap")
    places = product(*[range(0, size * distance, distance) if distance else [0] for size, distance in apart])
    return [MemoryRows(address + sum(place), stride, count, row_bytes) for place in places]


def _check_pieces(name: str, pieces: int) -> None:
    """Refuse blocks of too many pieces."""
    if pieces > MOST_PIECES:
        raise ConfigError(
            f"a block of {name} lies in {pieces} contiguous pieces, and at most {MOST_PIECES} are copied; "
            "allocate it with the blocks as the first dimension, and compute with a view of that"
        )


def _address_of(name: str, pool: Any) -> int:
    """Return the address of a tensor. Raises `ConfigError` if it is none."""
    if hasattr(pool, "ndim"):
        if hasattr(pool, "data_ptr"):
            try:
                pool.stride()
                return int(pool.data_ptr())
            except RuntimeError as error:  # a sparse or nested tensor
                raise ConfigError(
                    f"{name} has no memory with strides; give a dense tensor: {error}"
                ) from error
        if hasattr(pool, "ctypes"):
            return int(pool.ctypes.data)
    raise ConfigError(f"{name} is a {type(pool).__name__}; give a numpy array or a torch tensor")


def make_layout(
    tensors: Sequence[Any], host: Any, offsets: Sequence[int] | None = None
) -> tuple[MemoryLayout, tuple[int, ...]]:
    """Return the layout of these pools, and for each part the index of its tensor: what is part of another
    tensor is left out.

    host: as for `host_array`.
    offsets: where the pieces of each tensor begin in a row of the host pool (bytes); None: one tensor after
        another.

    Raises `ConfigError`.
    """
    host_rows = rows_of("host pool", host_array(host))
    rows, owners, kept = _device_rows(tensors, host_rows.row_bytes)
    parts, places = tuple(rows[index] for index in kept), tuple(owners[index] for index in kept)
    if offsets is not None:
        chosen = tuple(offsets[owners[index]] + _before(rows, owners, index) for index in kept)
        _check_offsets(parts, chosen, host_rows.row_bytes)
        return MemoryLayout(parts, host_rows, chosen), places
    *following, block_bytes = accumulate((part.row_bytes for part in parts), initial=0)
    if host_rows.row_bytes != block_bytes:
        raise ConfigError(
            f"a block has {block_bytes} bytes in the device pool and {host_rows.row_bytes} in the host "
            f"pool; they must be equal{_views_to_pass(tensors, host_rows.row_bytes)}"
        )
    return MemoryLayout(parts, host_rows, tuple(following)), places


def _before(rows: Sequence[MemoryRows], owners: Sequence[int], index: int) -> int:
    """Return the bytes of the pieces of the same tensor that come before this one."""
    return sum(rows[other].row_bytes for other in range(index) if owners[other] == owners[index])


def _views_to_pass(tensors: Sequence[Any], row_bytes: int) -> str:
    """Return a sentence that names the views whose first dimension is the blocks; empty if there are none.

    row_bytes: bytes of a row of the host pool, from which the number of blocks follows.
    """
    total = sum(prod(map(int, tensor.shape)) * int(tensor.itemsize) for tensor in tensors)
    if total % row_bytes:
        return ""
    blocks, views = total // row_bytes, []
    for place, tensor in enumerate(tensors):
        sizes, is_torch = list(map(int, tensor.shape)), hasattr(tensor, "data_ptr")
        if sizes[0] == blocks:
            continue
        if blocks in sizes:
            moved = "tensor.movedim({}, 0)" if is_torch else "np.moveaxis(tensor, {}, 0)"
            choices = [moved.format(axis) for axis, size in enumerate(sizes) if size == blocks]
        elif blocks and sizes[0] % blocks == 0:
            choices = [f"tensor.reshape({blocks}, -1, *tensor.shape[1:])"]
        else:
            return ""
        views.append(f"device tensor {place} as {' or '.join(choices)}")
    joined = ", ".join(views)
    return f". If there are {blocks} blocks, make them the first dimension: pass {joined}" if views else ""


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
    rows, _, kept = _device_rows(tensors)
    return sum(rows[index].row_bytes for index in kept)


def _device_rows(
    tensors: Sequence[Any], row_bytes: int = 0
) -> tuple[list[MemoryRows], list[int], tuple[int, ...]]:
    """Return the rows of each piece, the index of its tensor, and which pieces are not part of another one.

    row_bytes: of the host pool, for the error; 0: unknown.
    """
    if not tensors:
        raise ConfigError("the device pool has no tensors; register at least one")
    pieces = [pieces_of(f"device tensor {place}", tensor) for place, tensor in enumerate(tensors)]
    for place, (found, *_) in enumerate(pieces):
        if found.num_rows != pieces[0][0].num_rows:
            raise ConfigError(
                f"device tensor {place} has {found.num_rows} blocks, tensor 0 has {pieces[0][0].num_rows}; "
                f"a block is one row of each of them{_views_to_pass(tensors, row_bytes) if row_bytes else ''}"
            )
    rows = [piece for found in pieces for piece in found]
    owners = [place for place, found in enumerate(pieces) for _ in found]
    _check_pieces("the device pool", len(rows))
    return rows, owners, _distinct(rows, owners)


def _distinct(rows: Sequence[MemoryRows], owners: Sequence[int]) -> tuple[int, ...]:
    """Return the indices of pieces that are not part of another piece, in the given order. Raises
    `ConfigError` for pieces that overlap in any other way. owners: the tensor of each piece."""
    # Longest rows first: a piece can only be part of a piece that comes earlier.
    kept: list[int] = []
    for place in sorted(range(len(rows)), key=lambda place: (-rows[place].row_bytes, place)):
        if not any(_is_part(rows[place], rows[other]) for other in kept):
            kept.append(place)
    for first, second in combinations(sorted(kept), 2):
        if _overlap(rows[first], rows[second]):
            raise ConfigError(
                f"device tensors {owners[first]} and {owners[second]} share bytes, and neither's rows are "
                "part of the other's; register what covers both"
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
