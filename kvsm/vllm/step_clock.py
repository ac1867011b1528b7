"""`StepClock`: measure how much of an engine's time is spent in its KV connector."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

import msgspec


class StepTimes(msgspec.Struct, frozen=True, kw_only=True):
    """The times that an engine spent in its steps.

    steps: the number of steps.
    step_seconds, connector_seconds: wall time in steps, and in calls of the connector.
    step_cpu_seconds, connector_cpu_seconds: the same in CPU time of the engine's thread, which runs the steps
        and the model.
    process_cpu_seconds: CPU time of all threads of the engine's process, also between the steps.
    """

    steps: int = 0
    step_seconds: float = 0
    connector_seconds: float = 0
    step_cpu_seconds: float = 0
    connector_cpu_seconds: float = 0
    process_cpu_seconds: float = 0

    def __add__(self, other: StepTimes) -> StepTimes:
        return _each(operator.add, self, other)

    def __sub__(self, other: StepTimes) -> StepTimes:
        return _each(operator.sub, self, other)


def _each(operation: Callable[[Any, Any], Any], left: StepTimes, right: StepTimes) -> StepTimes:
    """Apply an operation to each field of two times."""
    names = StepTimes.__struct_fields__
    return StepTimes(**{name: operation(getattr(left, name), getattr(right, name)) for name in names})


class StepClock:
    """Measures an engine: wraps its step, and every method of its connector's two sides.

    A call of the connector to itself counts as part of vLLM's call. The measurement costs about a microsecond
    a call.
    """

    def __init__(self, engine: Any) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

        self._steps = 0
        self._step_seconds = self._step_cpu = self._connector_seconds = self._connector_cpu = 0.0
        self._inside = False
        core = engine.llm_engine.engine_core.engine_core
        core.step_fn = self._timed_step(core.step_fn)
        sides = [core.scheduler.connector] if core.scheduler.connector is not None else []
        if has_kv_transfer_group():
            sides.append(get_kv_transfer_group())
        for side in sides:
            for name in {*dir(KVConnectorBase_V1), *dir(SupportsHMA)}:
                if not name.startswith("_") and callable(getattr(type(side), name, None)):
                    setattr(side, name, self._timed_call(getattr(side, name)))

    def read(self) -> StepTimes:
        """Return the times since this clock was made; CPU time of the process since its start."""
        return StepTimes(
            steps=self._steps,
            step_seconds=self._step_seconds,
            connector_seconds=self._connector_seconds,
            step_cpu_seconds=self._step_cpu,
            connector_cpu_seconds=self._connector_cpu,
            process_cpu_seconds=time.process_time(),
        )

    def _timed_step(self, step: Callable[[], Any]) -> Callable[[], Any]:
        @wraps(step)
        def timed() -> Any:
            began, cpu = time.perf_counter(), time.thread_time()
            result = step()
            self._step_cpu += time.thread_time() - cpu
            self._step_seconds += time.perf_counter() - began
            self._steps += 1
            return result

        return timed

    def _timed_call(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def timed(*arguments: Any, **named: Any) -> Any:
            if self._inside:
                return call(*arguments, **named)
            self._inside, began, cpu = True, time.perf_counter(), time.thread_time()
            try:
                return call(*arguments, **named)
            finally:
                self._connector_cpu += time.thread_time() - cpu
                self._connector_seconds += time.perf_counter() - began
                self._inside = False

        return timed
