"""Directed scenarios of the copy engine: a store and a load between kernels, on the simulated device."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import numpy as np

from kvsm.copies.simulated import SimulatedDevice
from kvsm.copies.streams import StreamCopyEngine
from kvsm.core.plan import TransferJob
from kvsm.errors import PropertyBroken
from kvsm.events import Direction
from kvsm.properties import Property


def device_and_engine() -> tuple[SimulatedDevice, StreamCopyEngine]:
    pools = np.ones((2, 2), np.uint8), np.zeros((2, 2), np.uint8)
    device = SimulatedDevice(*pools, Random(1).randrange, 3)
    return device, StreamCopyEngine(device)


def store_and_load_between_kernels() -> None:
    """Submit a store after the step that writes its block, a load after the step that reads its target."""
    device, engine = device_and_engine()
    device.launch("step 1", writes=[0], action=lambda: None)
    engine.submit(TransferJob(1, Direction.STORE, (0,), (0,)))
    device.launch("step 2", reads=[1], action=lambda: None)
    engine.submit(TransferJob(2, Direction.LOAD, (1,), (1,)))
    engine.drain()
    device.synchronize()
    for race in device.races:
        raise PropertyBroken(Property.COPY_ORDER, str(race))


def copy_is_refused() -> None:
    _, engine = device_and_engine()
    engine.submit(TransferJob(1, Direction.STORE, (8,), (0,)))
    engine.submit(TransferJob(2, Direction.STORE, (1,), (1,)))
    engine.close()
    ends = {result.transfer: result.good for result in engine.poll()}
    if ends != {1: False, 2: True}:
        raise PropertyBroken(Property.PROGRESS, f"of two submitted transfers only these have ended: {ends}")


COPY_SCENARIOS: dict[str, Callable[[], None]] = {
    "B03": store_and_load_between_kernels,
    "B25": copy_is_refused,
    "B37": store_and_load_between_kernels,
}
