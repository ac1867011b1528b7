"""The CUDA engine on a GPU: the bytes of every path, and the orders of S12 under stress.

The stress delays compute and poisons blocks. Each order is then taken away to see that its absence is found:
a check that nothing can fail would find nothing when both are there, either.

    compute   sleep, write block A   |                         sleep, read block B   |  read block B
    store                            A -> slot, then poison A                        |
    load                                                                            slot -> B

What is read of B before the load is what B held before; what is read after it is what was written to A.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np
import pytest
from copy_rigs import load, store
from cuda_rig import cuda_rig, has_gpu
from hypothesis import given, settings
from test_cuda_device import pools_and_pairs

from examples import examples
from kvsm.cuda_io import driver
from kvsm.cuda_io.cuda_engine import CudaCopyEngine
from kvsm.cuda_io.paths import CopyPath
from kvsm.events import Direction

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not has_gpu(), reason="there is no NVIDIA GPU, or no PyTorch for it"),
]

LAYERS, BLOCKS, ROW_BYTES = 4, 64, 1024

FORMER, POISON = 201, 222
"""What block B held before its load, and what block A is overwritten with behind its store. Rounds use bytes
below 200."""

every_path = pytest.mark.parametrize("path", list(CopyPath), ids=lambda path: path.value)


@every_path
@settings(max_examples=examples(40), deadline=None)
@given(drawn=pools_and_pairs())
def test_each_path_copies_the_bytes_of_a_plain_loop_both_ways(path: CopyPath, drawn: Any) -> None:
    """Correct bytes (S15), on the real driver and with real memory."""
    device, host, device_blocks, host_blocks = drawn
    back = device_blocks[::-1]
    rig = cuda_rig(device, host, supported(path))
    with closing(rig.engine) as engine:
        for job in (store(1, device_blocks, host_blocks), load(2, back, host_blocks)):
            engine.submit(job)
            engine.drain()
        assert [(result.good, result.error) for result in engine.poll()] == [(True, "")] * 2
        stored, loaded = rig.read_host(), rig.read_device()
    for device_block, host_block, target in zip(device_blocks, host_blocks, back):
        expected = np.concatenate([layer[device_block] for layer in device])
        assert np.array_equal(stored[host_block], expected)
        assert np.array_equal(np.concatenate([layer[target] for layer in loaded]), expected)


def supported(path: CopyPath) -> CopyPath:
    """The path. Skips the test if the driver has no batches."""
    if path is CopyPath.BATCH and driver.CudaContext(0).driver_version < driver.BATCH_VERSION:
        pytest.skip("the driver has no cuMemcpyBatchAsync")
    return path


class Seen(NamedTuple):
    """How many rounds read wrong bytes."""

    former_wrong: int
    loaded_wrong: int


class Stress:
    """Rounds of the picture above, on a compute stream that is always late."""

    def __init__(self, path: CopyPath) -> None:
        import torch

        self.torch = torch
        self.compute = torch.cuda.Stream()
        self.layers = torch.zeros((LAYERS, BLOCKS, ROW_BYTES), dtype=torch.uint8, device="cuda")
        host = torch.zeros((BLOCKS, LAYERS * ROW_BYTES), dtype=torch.uint8, pin_memory=True)
        self.engine = CudaCopyEngine(list(self.layers), host, lambda: self.compute.cuda_stream, path)

    def run(self, rounds: int, sleep_cycles: int, hold: bool = True) -> Seen:
        """hold: whether compute waits for a load before it reads the loaded block."""
        torch, engine, layers = self.torch, self.engine, self.layers
        former = torch.zeros((rounds, LAYERS, ROW_BYTES), dtype=torch.uint8, device="cuda")
        loaded = torch.zeros_like(former)
        torch.cuda.synchronize()
        with torch.cuda.stream(self.compute):
            for number in range(rounds):
                source, target = number % 32, 32 + number % 32
                layers[:, target] = FORMER
                torch.cuda._sleep(sleep_cycles)
                layers[:, source] = number % 200
                engine.submit(store(2 * number, [source], [number % BLOCKS]))
                engine.hold_compute([2 * number])
                layers[:, source] = POISON
                engine.drain()  # a slot is read when its store has been reported
                torch.cuda._sleep(sleep_cycles)
                former[number] = layers[:, target]
                engine.submit(load(2 * number + 1, [target], [number % BLOCKS]))
                if hold:
                    engine.hold_compute([2 * number + 1])
                loaded[number] = layers[:, target]
                assert all(result.good for result in engine.poll())
            engine.drain()
        torch.cuda.synchronize()
        written = torch.arange(rounds, device="cuda").remainder(200).to(torch.uint8)[:, None, None]
        return Seen(
            int((former != FORMER).any(dim=2).any(dim=1).sum()),
            int((loaded != written).any(dim=2).any(dim=1).sum()),
        )


class StreamWithoutWaits:
    """A stream that is told to wait, and does not."""

    def __init__(self, stream: Any) -> None:
        self.handle, self.record = stream.handle, stream.record

    def wait(self, event: Any) -> None:
        pass


@pytest.fixture(params=list(CopyPath), ids=lambda path: path.value)
def stress(request: pytest.FixtureRequest) -> Iterator[Stress]:
    made = Stress(supported(request.param))
    with closing(made.engine):
        yield made


LONG_SLEEP = 2_000_000
"""A millisecond or so: any transfer that does not wait is over by then."""


def test_with_all_orders_nothing_is_ever_wrong(stress: Stress) -> None:
    """Order of copies (S12), for 10,000 rounds."""
    assert stress.run(10_000, sleep_cycles=20_000) == Seen(0, 0)


def test_a_store_that_does_not_wait_for_compute_is_found(stress: Stress) -> None:
    streams = stress.engine._streams
    streams[Direction.STORE] = StreamWithoutWaits(streams[Direction.STORE])
    assert stress.run(50, LONG_SLEEP).loaded_wrong > 0


def test_a_load_that_does_not_wait_for_compute_is_found(stress: Stress) -> None:
    streams = stress.engine._streams
    streams[Direction.LOAD] = StreamWithoutWaits(streams[Direction.LOAD])
    assert stress.run(50, LONG_SLEEP).former_wrong > 0


def test_compute_that_does_not_wait_for_a_load_is_found(stress: Stress) -> None:
    assert stress.run(50, LONG_SLEEP, hold=False).loaded_wrong > 0
