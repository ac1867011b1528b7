"""Copy engines under every order of calls that Hypothesis can find, beside compute.

`kvsm.testing.CopyEngineMachine` makes the checks; this module has the engines. On the simulated device,
compute runs there, and its race detector must stay silent (S12). Compute on a GPU is delayed, so that an
engine that does not wait for it is detected.
"""

# ruff: noqa: ARG002 (most devices do not want to know what compute touches)

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory
from typing import Any

import pytest
from copy_rigs import disk_engine, kept_engine
from cuda_rig import has_gpu, usable_fake
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from examples import examples
from kvsm.check.worlds.world_files import IN_MEMORY
from kvsm.copies import (
    CopyEngine,
    FailingCopyEngine,
    FileCopyEngine,
    HostCopyEngine,
    SimulatedCopyEngine,
    VerifyingCopyEngine,
    threaded,
)
from kvsm.copies.simulated import SimulatedDevice
from kvsm.cuda_io import CudaCopyEngine
from kvsm.cuda_io.paths import PathTable
from kvsm.events import Direction
from kvsm.testing import CopyEngineMachine
from kvsm.tiers.disk import FlushPolicy


class Threads(CopyEngineMachine):
    """A threaded engine with pieces of one block, so that threads share even small transfers."""

    def make_engine(self, device: Any, host: Any) -> CopyEngine:
        return HostCopyEngine(device, host)


class File(CopyEngineMachine):
    """An engine whose host pool is a file, from which the machine reads `host`."""

    def make_engine(self, device: Any, host: Any) -> CopyEngine:
        self.file = NamedTemporaryFile(prefix="kvsm-test-")  # noqa: SIM115 (closed in `close`)
        self.file.write(host.tobytes())
        self.file.flush()
        engine = FileCopyEngine(device, self.file.name, len(host))
        self.host = engine.blocks
        return engine

    def close(self) -> None:
        super().close()
        self.file.close()


class Disk(CopyEngineMachine):
    """A disk engine: its host pool is the slots of a file, each with a header."""

    def make_engine(self, device: Any, host: Any) -> CopyEngine:
        self.directory = TemporaryDirectory(prefix="kvsm-test-", dir=IN_MEMORY)
        path = Path(self.directory.name, "tier")
        engine: Any
        engine, self.host = disk_engine([device], host, path, 2, FlushPolicy.EVERY)
        return engine  # type: ignore[no-any-return]

    def close(self) -> None:
        super().close()
        self.directory.cleanup()


class Simulated(CopyEngineMachine):
    simulated: SimulatedDevice

    def make_engine(self, device: Any, host: Any) -> CopyEngine:
        engine = SimulatedCopyEngine(device, host, self.seed)
        self.simulated = engine.simulated
        return engine

    def compute(self, action: Callable[[], None], reads: Sequence[int], writes: Sequence[int]) -> None:
        self.simulated.launch("compute", reads=reads, writes=writes, action=action)

    def synchronize(self) -> None:
        if self.started:
            self.simulated.synchronize()


class VerifiedThreads(Threads):
    def make_engine(self, device: Any, host: Any) -> CopyEngine:
        return VerifyingCopyEngine(super().make_engine(device, host), host, device, threads=1)


class VerifiedSimulated(Simulated):
    def make_engine(self, device: Any, host: Any) -> CopyEngine:
        return VerifyingCopyEngine(super().make_engine(device, host), host, device, threads=0)


class KeptThreads(Threads):
    """A threaded engine whose blocks come from an earlier process; each is verified before its first load."""

    def make_engine(self, device: Any, host: Any) -> CopyEngine:
        return kept_engine(super().make_engine(device, host), host, threads=1)


class KeptSimulated(Simulated):
    """A verifying engine on the simulated device; the wrapped engine gets each mark late, and holds compute
    itself (S12)."""

    def make_engine(self, device: Any, host: Any) -> CopyEngine:
        return kept_engine(super().make_engine(device, host), host, threads=0)


class FailingThreads(Threads):
    may_fail = True

    def make_engine(self, device: Any, host: Any) -> CopyEngine:
        return FailingCopyEngine(super().make_engine(device, host), self.seed, 0.3)


class FailingSimulated(Simulated):
    may_fail = True

    def make_engine(self, device: Any, host: Any) -> CopyEngine:
        return FailingCopyEngine(super().make_engine(device, host), self.seed, 0.3)


class FakeDevice(CopyEngineMachine):
    """The CUDA engine on the fake driver. Compute runs when its stream has reached it."""

    def make_engine(self, device: Any, host: Any) -> CopyEngine:
        self.fake = usable_fake()
        self.fake.page_lock(host)
        # Without a table it measures the fake driver for 15 s, and keeps the result in the user's cache.
        return CudaCopyEngine(device, host, compute=lambda: 0, path_table=PathTable.default())

    def compute(self, action: Callable[[], None], reads: Sequence[int], writes: Sequence[int]) -> None:
        self.fake.run(0)
        action()


class Gpu(CopyEngineMachine):
    """Compute is delayed, so that a copy that does not wait for it comes first."""

    block_bytes = 64

    def make_pools(self) -> tuple[Any, Any]:
        import torch

        device, host = super().make_pools()
        return torch.from_numpy(device).cuda(), torch.from_numpy(host).pin_memory()

    def make_engine(self, device: Any, host: Any) -> CopyEngine:
        return CudaCopyEngine(device, host)

    def compute(self, action: Callable[[], None], reads: Sequence[int], writes: Sequence[int]) -> None:
        import torch

        torch.cuda._sleep(100_000)
        action()

    def synchronize(self) -> None:
        import torch

        torch.cuda.synchronize()


ENGINES = (
    Simulated,
    Threads,
    File,
    Disk,
    VerifiedSimulated,
    VerifiedThreads,
    KeptSimulated,
    KeptThreads,
    FailingSimulated,
    FailingThreads,
    FakeDevice,
    pytest.param(Gpu, marks=[pytest.mark.gpu, pytest.mark.skipif(not has_gpu(), reason="there is no GPU")]),
)


def run_machine(machine: type[CopyEngineMachine], examples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threaded, "PIECE_BYTES", 2)
    chosen = settings(machine.TestCase.settings, max_examples=examples, stateful_step_count=40)
    run_state_machine_as_test(machine, settings=chosen)


@pytest.mark.parametrize("machine", ENGINES)
def test_engines_keep_their_promises(
    machine: type[CopyEngineMachine], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_machine(machine, examples(20, least=4), monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("machine", ENGINES)
def test_engines_keep_their_promises_long(
    machine: type[CopyEngineMachine], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_machine(machine, 150, monkeypatch)


def test_what_a_held_transfer_touches_is_for_compute_and_for_no_transfer() -> None:
    """Live transfers must not share blocks, held or not.

    A CUDA load may read its slot at submission, without waiting for the store that fills it.
    """
    machine = FakeDevice()
    machine.start(seed=0)
    machine.submit(Direction.STORE, pairs=[(0, 0)], hold=True)
    machine.submit(Direction.LOAD, pairs=[(0, 0)], hold=False)
    machine.compute_writes(0, 7)
    machine.teardown()
    assert machine.device[0].tolist() == [7, 7]
