"""`benchmarks/vllm_gpu.py --dry-run`: real engines on a CPU, small; and what its steps refuse.

Not run here, because each takes minutes: the steps `speed` and `trace`, and `--interpret`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import numpy as np
import torch

from kvsm.copies import HostCopyEngine, HostPool
from kvsm.core.plan import TransferJob
from kvsm.events import Direction
from kvsm.ids import pack
from kvsm.vllm.step_clock import StepTimes
from kvsm.vllm.trial import environment

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
MOST_SECONDS = 900
"""Other work on the machine must not fail a test."""


@pytest.fixture(scope="module")
def scripts() -> Iterator[Any]:
    """Import the scripts, which are outside the package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        names = ("vllm_gpu", "vllm_gpu_connectors", "vllm_gpu_engine")
        yield SimpleNamespace(**{name.rpartition("_")[2]: import_module(name) for name in names})


def test_a_dry_run_passes_with_real_engines(tmp_path: Path) -> None:
    """Tokens, bytes, a reset and failed copies: each step found what it looked for."""
    steps, page = ["tokens", "bytes", "reset", "failed-copy"], tmp_path / "page.md"
    command = [
        BENCHMARKS / "vllm_gpu.py",
        "--dry-run",
        "--budget-s",
        str(MOST_SECONDS),
        "--steps",
        ",".join(steps),
    ]
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, *map(str, command), "--output", str(page)],
        capture_output=True,
        text=True,
        timeout=MOST_SECONDS,
        env={**environment(), "VLLM_LOGGING_LEVEL": "ERROR", "PYTHONPATH": os.pathsep.join(paths)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(page.with_suffix(".json").read_text())
    assert [(one["name"], one["state"]) for one in found["steps"]] == [(step, "passed") for step in steps]
    facts = {one["name"]: one["facts"] for one in found["steps"]}
    assert facts["tokens"]["answers"] == 24 * 4
    assert facts["bytes"]["of these into another device block"] > 24
    assert found["machine"]["device"] == "CPU"
    assert "| failed-copy | passed |" in page.read_text()


# What the steps refuse.


class Rig:
    """The observed copy engine over pools in host memory: two layers, eight blocks."""

    def __init__(self, connectors: Any) -> None:
        drawn = np.random.default_rng(0)
        self.layers = [torch.from_numpy(drawn.integers(0, 127, (8, 64), np.int8)) for _ in range(2)]
        self.host = HostPool(8, 128)
        engine = HostCopyEngine(self.layers, self.host.blocks)
        self.engine = connectors.ObservedEngine(engine, self.layers, self.host.blocks)

    def copy(self, transfer: int, direction: Direction, device: Sequence[int], host: Sequence[int]) -> None:
        """Copy, and look at the result."""
        self.engine.submit(TransferJob(transfer, direction, pack(list(device)), pack(list(host))))
        self.engine.wait([transfer])
        self.engine.poll()


@pytest.fixture
def rig(scripts: Any) -> Iterator[Rig]:
    rig = Rig(scripts.connectors)
    yield rig
    rig.engine.close()
    rig.host.close()


def test_right_copies_are_counted(rig: Rig) -> None:
    rig.copy(1, Direction.STORE, [0, 1], [5, 6])
    rig.copy(2, Direction.LOAD, [0, 3], [5, 6])
    facts = rig.engine.facts
    assert (facts.stored, facts.loaded, facts.moved, facts.wrong, facts.failed) == (2, 2, 1, [], {})
    assert [(one.direction, one.copied_bytes) for one in rig.engine.timed] == [("STORE", 256), ("LOAD", 256)]


def test_a_bit_that_flips_on_the_host_is_found(rig: Rig) -> None:
    rig.copy(1, Direction.STORE, [0, 1], [5, 6])
    rig.host.blocks[6, 100] ^= 1
    rig.copy(2, Direction.LOAD, [2, 3], [5, 6])
    assert rig.engine.facts.wrong == ["host block 6 changed after it was stored"]


def test_a_copy_of_other_bytes_is_found(rig: Rig) -> None:
    """The device changes between the end of the copy and the comparison."""
    rig.engine.submit(TransferJob(1, Direction.STORE, pack([0]), pack([5])))
    rig.engine.wait([1])
    rig.layers[1][0, 7] ^= 1
    rig.engine.poll()
    assert rig.engine.facts.wrong == ["STORE 1: device block 0 and host block 5 differ in 1 bytes"]


def test_a_bad_transfer_is_counted_and_not_compared(rig: Rig) -> None:
    rig.copy(1, Direction.LOAD, [9], [5])
    assert (rig.engine.facts.failed, rig.engine.facts.loaded) == ({"LOAD": 1}, 0)


class FakeEngine:
    """Answers of one token for each prompt."""

    def __init__(self, scripts: Any, token: int, cached: int, wrong: Sequence[str] = ()) -> None:
        self._scripts, self._token, self._cached, self._wrong = scripts, token, cached, wrong

    def serve(self, prompts: Sequence[Any], max_tokens: int) -> Any:
        del max_tokens
        count = len(prompts)
        return self._scripts.engine.Served(
            tokens=[[self._token]] * count,
            cached_tokens=[self._cached] * count,
            first_token_s=[0.1] * count,
            seconds=0.5,
            preemptions=0,
            times=StepTimes(steps=2),
        )

    def reset(self) -> int:
        """Forget nothing."""
        return 1

    def ask(self, question: Any, timeout_s: float) -> bytes:
        del question, timeout_s
        return json.dumps({"stored": 1, "loaded": 1, "moved": 1, "wrong": list(self._wrong)}).encode()


def results_of(scripts: Any, engines: dict[str, Any], steps: Sequence[str], budget_s: float = 1e6) -> Any:
    """Run steps with these engines: step -> (state, why)."""
    harness = scripts.gpu.Harness(scripts.gpu.DRY, "", dry=True, rounds=1, environment={})
    harness._engines.update(engines)
    found: list[Any] = []
    scripts.gpu.run_steps(harness, steps, budget_s, Path("picture.svg"), found.append)
    return {one.name: (one.state, one.why) for one in found}


@pytest.mark.parametrize(
    ("step", "token", "cached", "wrong", "why"),
    [
        ("tokens", 5, 9, (), "answers differ"),
        ("tokens", 4, 0, (), "kvsm found no more than the device alone"),
        ("bytes", 4, 9, ("host block 6 changed",), "1 wrong blocks"),
        ("reset", 4, 9, (), "the reset left blocks"),
        ("preempt", 4, 9, (), "no request was preempted"),
        ("failed-copy", 4, 9, (), "too few copies failed"),
    ],
)
def test_a_step_fails_if_something_is_wrong(
    scripts: Any, step: str, token: int, cached: int, wrong: Sequence[str], why: str
) -> None:
    kvsm = FakeEngine(scripts, token, cached, wrong)
    engines = dict.fromkeys(scripts.gpu.OBSERVED, kvsm) | {"plain": FakeEngine(scripts, 4, 0)}
    state, said = results_of(scripts, engines, [step])[step]
    assert state == "failed"
    assert said.startswith(why)


def test_a_broken_step_leaves_the_others_and_the_budget_ends_them(scripts: Any) -> None:
    plain, kvsm = FakeEngine(scripts, 4, 0), FakeEngine(scripts, 4, 9)
    engines = {"plain": plain, "comparing": kvsm, "failing": object()}
    found = results_of(scripts, engines, ["failed-copy", "tokens"])
    assert found["failed-copy"][0] == "failed"
    assert "AttributeError" in found["failed-copy"][1]
    assert found["tokens"] == ("passed", "")
    spent = results_of(scripts, engines, ["tokens"], budget_s=0)
    assert spent["tokens"] == ("not run", "the time budget had ended")


def test_rounds_of_speed_end_with_the_budget(scripts: Any) -> None:
    """The first round warms up, the second one counts in any case."""
    harness = scripts.gpu.Harness(scripts.gpu.DRY, "", dry=True, rounds=5, environment={})
    names = scripts.gpu.NEEDS["speed"]
    harness._engines.update({name: FakeEngine(scripts, 4, 0) for name in names})
    facts = harness.measure(time.monotonic() - 1)
    assert facts["rounds"] == 1
    assert harness.notes == ["Only 1 of 5 rounds of speed fitted into the budget."]
    table = scripts.gpu.speed_table(harness.speed)
    assert [row.split(" | ")[0].strip("| ") for row in table[2:]] == list(names)


@contextmanager
def starting(scripts: Any, spec: Any, started: list[Any]) -> Iterator[Any]:
    """An engine's process that starts only without batch invariance."""
    started.append(spec)
    engine = FakeEngine(scripts, 4, 0)

    def ready() -> None:
        if "VLLM_BATCH_INVARIANT" in spec.environment:
            raise scripts.engine.EngineFailed("no kernel")

    engine.ready = ready  # type: ignore[attr-defined]
    yield engine


def test_engines_start_without_batch_invariance_if_one_cannot(
    scripts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them, so that their answers can be compared; and the page says so."""
    started: list[Any] = []
    monkeypatch.setattr(scripts.gpu, "engine_process", lambda spec: starting(scripts, spec, started))
    harness = scripts.gpu.Harness(scripts.gpu.ON_GPU, "/model", dry=False, rounds=1, environment={})
    harness.start(["plain", "comparing"])
    assert ["VLLM_BATCH_INVARIANT" in spec.environment for spec in started] == [True, True, False, False]
    (note,) = harness.notes
    assert note.startswith("Without batch invariance, because an engine did not start with it: no kernel")
    harness.close()


def test_on_a_gpu_every_engine_computes_with_triton_and_the_peers_are_vllms_own(scripts: Any) -> None:
    """The settings that need a GPU, which no dry run takes."""
    harness = scripts.gpu.Harness(scripts.gpu.ON_GPU, "/model", dry=False, rounds=3, environment={})
    for name in {name for names in scripts.gpu.NEEDS.values() for name in names}:
        spec = harness.spec(name)
        assert spec.settings["attention_backend"] == "TRITON_ATTN"
        assert spec.settings["compilation_config"] == {"custom_ops": ["none"]}
        invariant = spec.environment.get("VLLM_BATCH_INVARIANT") == "1"
        assert invariant == (name not in scripts.gpu.NEEDS["speed"])
    for peer in scripts.gpu.PEER_NAMES:
        transfer = harness.kv_transfer(peer)
        assert transfer is not None
        assert "kv_connector_module_path" not in transfer
        assert transfer["kv_connector_extra_config"] == {"cpu_bytes_to_use": scripts.gpu.ON_GPU.host_bytes}
