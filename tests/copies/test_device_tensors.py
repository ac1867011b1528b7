"""The tensors that engines have: any number of dimensions, any strides, the blocks in any dimension."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np
import pytest
from copy_rigs import finish, load, store
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from kvsm.copies import HostCopyEngine, HostPool, VerifyingCopyEngine
from kvsm.copies.layout import block_bytes_of
from kvsm.errors import ConfigError

torch = pytest.importorskip("torch")

NUM_BLOCKS = 5


class Tensor(NamedTuple):
    """A tensor of an engine, as a view of some memory.

    memory: a numpy array or a torch tensor.
    order: the dimensions of the view in their order in memory.
    window: what the view has of each dimension in memory.
    axis: the dimension of the view that numbers the blocks.
    """

    memory: Any
    order: tuple[int, ...]
    window: tuple[slice, ...]
    axis: int

    def copy(self) -> np.ndarray[Any, Any]:
        return np.array(self.memory.numpy() if torch.is_tensor(self.memory) else self.memory)

    def view(self, memory: Any) -> Any:
        shown = memory[self.window]
        back = [self.order.index(dimension) for dimension in range(len(self.order))]
        return shown.permute(back) if torch.is_tensor(shown) else shown.transpose(back)


@st.composite
def tensors(draw: Any) -> Tensor:
    """Draw a tensor with the block as any dimension, dimensions in any order in memory, and perhaps with
    gaps. No other dimension is as long as that of the blocks."""
    sizes = draw(st.lists(st.integers(1, NUM_BLOCKS - 1), max_size=3))
    axis = draw(st.integers(0, len(sizes)))
    sizes.insert(axis, NUM_BLOCKS)
    order = tuple(draw(st.permutations(range(len(sizes)))))
    gaps = [draw(st.integers(0, 1)) for _ in sizes]
    shape = [sizes[dimension] + gaps[dimension] for dimension in order]
    item_type = draw(st.sampled_from((np.uint8, np.int16, np.float32)))
    memory: Any = np.arange(math.prod(shape)).astype(item_type).reshape(shape)
    if draw(st.booleans()):
        memory = torch.from_numpy(memory)
    window = tuple(slice(gaps[dimension], None) for dimension in order)
    return Tensor(memory, order, window, axis)


def blocks_first(view: Any, axis: int) -> Any:
    return view.movedim(axis, 0) if torch.is_tensor(view) else np.moveaxis(view, axis, 0)


def named_views(message: str, given_tensors: Sequence[Any]) -> list[Any]:
    """Return the view that the message says to pass."""
    passed = list(given_tensors)
    [advice] = re.findall(r"make them the first dimension: pass (.*)$", message)
    for one in advice.split(", device "):
        place, expression = re.fullmatch(r"(?:device )?tensor (\d+) as (.*)", one).groups()  # type: ignore[union-attr]
        passed[int(place)] = eval(expression, {"tensor": passed[int(place)], "np": np})
    return passed


def assert_copied_right(passed: Sequence[Any], all_of: Sequence[Tensor], pool: HostPool) -> None:
    """Blocks 0, 2 and 4 go to the host and come back as blocks 3, 4 and 0; no other byte is written."""
    expected = [tensor.copy() for tensor in all_of]
    for tensor, after in zip(all_of, expected):
        blocks = blocks_first(tensor.view(after), tensor.axis)
        blocks[[3, 4, 0]] = blocks[[0, 2, 4]]
    with closing(HostCopyEngine(list(passed), pool)) as engine:
        for job in (store(1, [0, 2, 4], [6, 1, 3]), load(2, [3, 4, 0], [6, 1, 3])):
            engine.submit(job)
            assert [result.error for result in finish(engine, [job.transfer])] == [""]
    for tensor, after in zip(all_of, expected):
        assert np.array_equal(tensor.copy(), after)


@settings(max_examples=examples(400), deadline=None)
@given(all_of=st.lists(tensors(), min_size=1, max_size=3))
def test_any_layout_is_copied_right_or_the_error_names_the_view(all_of: list[Tensor]) -> None:
    """This also holds if the pool has other tensors with another dtype, library and order of dimensions."""
    passed = [tensor.view(tensor.memory) for tensor in all_of]
    right = [blocks_first(view, tensor.axis) for view, tensor in zip(passed, all_of)]
    with closing(HostPool(8, block_bytes_of(right))) as pool:
        if all(len(view) == NUM_BLOCKS for view in passed):
            assert_copied_right(passed, all_of, pool)
            return
        with pytest.raises(ConfigError) as refused:
            HostCopyEngine(passed, pool)
        assert_copied_right(named_views(str(refused.value), passed), all_of, pool)


def test_a_pool_of_tokens_is_split_into_blocks() -> None:
    """Some engines have one row for each token, and no dimension for blocks."""
    tokens = torch.arange(60).reshape(20, 3)
    with closing(HostPool(8, 4 * 3 * 8)) as pool:
        with pytest.raises(ConfigError, match=r"pass device tensor 0 as tensor\.reshape\(5, -1, "):
            HostCopyEngine(tokens, pool)
        with closing(HostCopyEngine(tokens.reshape(5, -1, *tokens.shape[1:]), pool)) as engine:
            engine.submit(store(1, [4], [7]))
            assert finish(engine, [1])[0].good
        assert pool.blocks[7].view(np.int64).tolist() == list(range(48, 60))


def test_pieces_of_a_tensor_have_places_of_their_own_between_other_ranks() -> None:
    """`offsets` says where a tensor begins; its pieces follow one another."""
    keys = np.arange(2 * 5 * 3, dtype=np.uint8).reshape(2, 5, 3)
    host = np.zeros((4, 10), np.uint8)
    with closing(HostCopyEngine(np.moveaxis(keys, 1, 0), host, offsets=[2])) as engine:
        engine.submit(store(1, [3], [1]))
        assert finish(engine, [1])[0].good
    assert host[1].tolist() == [0, 0, *keys[0, 3], *keys[1, 3], 0, 0]


def test_checksums_see_wrong_bytes_of_any_layout() -> None:
    """The verifying engine takes the same tensors and the same pool."""
    keys, values = torch.arange(40).reshape(2, 5, 4), torch.arange(10).reshape(5, 2)
    device = [keys.movedim(1, 0), values]
    with closing(HostPool(8, sum(tensor[0].nbytes for tensor in device))) as pool:
        with closing(VerifyingCopyEngine(HostCopyEngine(device, pool), pool, device)) as engine:
            engine.submit(store(1, [0, 4], [6, 1]))
            assert finish(engine, [1])[0].good
            pool.blocks[1, -1] ^= 1
            engine.submit(load(2, [2, 3], [6, 1]))
            [result] = finish(engine, [2])
        assert (result.good, "host block 1" in result.error) == (False, True)
        assert torch.equal(keys[:, 2], keys[:, 0])


REFUSED = {
    "sparse": (lambda: torch.zeros(4, 8).to_sparse(), "dense tensor"),
    "nested": (lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]), "dense tensor"),
    "reversed blocks": (lambda: np.zeros((4, 8))[::-1], "reversed"),
}


@pytest.mark.parametrize(("make", "problem"), REFUSED.values(), ids=REFUSED.keys())
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_tensor_without_rows_of_memory_is_refused(make: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        HostCopyEngine(make(), np.zeros((6, 32), np.uint8))


@pytest.mark.parametrize("offsets", [(), (0, 16)])
def test_each_tensor_needs_one_offset(offsets: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"offsets for 1 device tensors?; give one each"):
        HostCopyEngine(np.zeros((4, 16), np.uint8), np.zeros((6, 32), np.uint8), offsets=offsets)
