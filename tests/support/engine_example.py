"""Random workloads for the engine of `examples/engine`, and the tokens that it must produce."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

from hypothesis import strategies as st
from places import ROOT

from kvsm import HostCopyEngine, HostPool, OffloadConfig, Offloader, Worker
from kvsm.copies import FailingCopyEngine
from kvsm.core.plan import TransferPlan, WorkerReport
from kvsm.core.scheduler import CheckedScheduler, SchedulerConfig, StepResults

sys.path.insert(0, str(ROOT / "examples"))
engine_module: Any = importlib.import_module("engine.engine")
pool_module: Any = importlib.import_module("engine.block_pool")
model_module: Any = importlib.import_module("engine.model")
sys.path.remove(str(ROOT / "examples"))

DEVICE_BLOCKS, HOST_BLOCKS, LONGEST = 24, 40, 88
"""A request of `LONGEST` tokens fits the device. Three do not, so requests are preempted."""

_RANDOM = Random(1)
PROMPTS = [[_RANDOM.randrange(model_module.VOCABULARY) for _ in range(80)] for _ in range(3)]

ACTIONS = st.one_of(
    st.tuples(st.just("add"), st.sampled_from(PROMPTS), st.integers(1, 80), st.integers(1, 8)),
    st.tuples(st.just("add"), st.sampled_from(PROMPTS), st.integers(1, 80), st.integers(1, 8)),
    st.tuples(st.just("step"), st.integers(1, 20)),
    st.tuples(st.just("abort"), st.integers(0, 9)),
    st.tuples(st.just("weights")),
)


class NoOffload:
    """Has the calls of `OffloadScheduler`, but offloads nothing."""

    def nothing(self, *_: Any, **__: Any) -> None: ...

    bind_gpu_block_pool = add_request = request_finished = update_state_after_alloc = reset_cache = nothing

    def get_num_new_matched_tokens(self, *_: Any) -> tuple[int, bool]:
        return 0, False

    def build_connector_meta(self, _: Any) -> TransferPlan:
        return TransferPlan()

    def update_connector_output(self, _: Any) -> StepResults:
        return StepResults()

    def has_pending_work(self) -> bool:
        return False


class LateWorker(Worker):
    """Reports each copy up to three polls after its end, so that a run does not depend on threads."""

    def __init__(self, engine: Any, seed: int) -> None:
        super().__init__(0, engine)
        self._seed, self._polls = seed, 0
        self._late: list[tuple[int, WorkerReport]] = []

    def poll(self) -> list[WorkerReport]:
        self.wait(self.unreported())
        self._polls += 1
        for report in super().poll():
            late = Random(f"late {self._seed} {report.transfer}").randrange(4)
            self._late.append((self._polls + late, report))
        due = [report for poll, report in self._late if poll <= self._polls]
        self._late = [one for one in self._late if one[0] > self._polls]
        return sorted(due, key=lambda report: report.transfer)


class Serving:
    """A running engine. `requests` holds all requests that arrived; `versions` the version of the weights
    that computed each output token of each request."""

    def __init__(self, engine: Any, module: Any = engine_module) -> None:
        self.engine, self._module = engine, module
        self.requests: list[Any] = []
        self.versions: dict[str, list[str]] = {}

    def act(self, action: Sequence[Any]) -> None:
        kind, *arguments = action
        left = list(self.engine.requests.values())
        if kind == "add":
            prompt, length, output = arguments
            name = f"r{len(self.requests)}"
            request = self._module.Request(name, list(prompt[:length]), length + output)
            self.requests.append(request)
            self.versions[name] = []
            self.engine.add(request)
        elif kind == "step":
            for _ in range(arguments[0]):
                self.step()
        elif kind == "abort" and left:
            self.engine.end(left[arguments[0] % len(left)], aborted=True)
        elif kind == "weights":
            self.engine.update_weights(f"{self.engine.model.version}'")

    def step(self) -> None:
        self.engine.step()
        for request in self.requests:
            versions = self.versions[request.request_id]
            computed = request.num_tokens - request.num_prompt_tokens
            versions += [self.engine.model.version] * (computed - len(versions))

    def serve(self, actions: Sequence[Sequence[Any]]) -> None:
        """Carry out these actions, and then step until all requests have ended."""
        for action in actions:
            self.act(action)
        for _ in range(5_000):
            if not self.engine.requests:
                return
            self.step()
        raise AssertionError(f"never ended: {list(self.engine.requests)}")

    def wrong(self) -> list[str]:
        """Return the requests whose tokens differ from those of the model without any cache."""
        return [
            request.request_id
            for request in self.requests
            if request.tokens
            != expected(request.tokens[: request.num_prompt_tokens], self.versions[request.request_id])
        ]


def with_mistake(line: str, wrong: str) -> Any:
    """Return the module of the engine with this line changed."""
    text = Path(engine_module.__file__).read_text(encoding="utf-8")
    assert text.count(line) == 1, line
    module = ModuleType("engine.with_mistake")
    sys.modules[module.__name__] = module  # dataclasses look for it
    exec(compile(text.replace(line, wrong), "engine.py, changed", "exec"), vars(module))
    return module


@cache
def _model(version: str) -> Any:
    return model_module.Model(version, 2 * (LONGEST // model_module.BLOCK + 1))


def expected(prompt: list[int], versions: Sequence[str]) -> list[int]:
    """The prompt and its output, with one weights version for each output token; no block is shared."""
    tokens, last = list(prompt), ""
    for version in versions:
        start = len(tokens) - 1 if version == last else 0
        half = LONGEST // model_module.BLOCK + 1
        tables = list(range(half)), list(range(half, 2 * half))
        tokens.append(_model(version).forward(tokens[start:], start, tables))
        last = version
    return tokens


@contextmanager
def serving(
    log: Path, fail_rate: float = 0.0, seed: int = 0, module: Any = engine_module
) -> Iterator[Serving]:
    """Make the engine with kvsm. Some copies fail. At the end it is closed, and so is its log."""
    model = model_module.Model("w", DEVICE_BLOCKS)
    kv_cache = [*model.keys, *model.values]
    host = HostPool(HOST_BLOCKS, sum(tensor[0].nbytes for tensor in kv_cache))
    worker = LateWorker(FailingCopyEngine(HostCopyEngine(kv_cache, host), seed, fail_rate), seed)
    config = OffloadConfig(host_blocks=HOST_BLOCKS, device_blocks=DEVICE_BLOCKS)
    with Offloader.open(config, log, weights=model.version, durability="none") as core:
        scheduler = CheckedScheduler(core, SchedulerConfig(groups=model_module.GROUPS))
        served = Serving(module.Engine(model, DEVICE_BLOCKS, scheduler, worker), module)
        yield served
        served.engine.close()


def serving_without() -> Serving:
    """Make the same engine without kvsm."""
    model = model_module.Model("w", DEVICE_BLOCKS)
    host = HostPool(1, sum(tensor[0].nbytes for tensor in (*model.keys, *model.values)))
    worker = Worker(0, HostCopyEngine([*model.keys, *model.values], host))
    return Serving(engine_module.Engine(model, DEVICE_BLOCKS, NoOffload(), worker))
