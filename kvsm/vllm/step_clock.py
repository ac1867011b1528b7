"""`StepClock` measures how much of an engine's time is spent in its KV connector."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import wraps
from typing import Any


class StepClock:
    """Wraps an engine's step, and every method of its connector's two sides.

    A call that a connector makes to itself counts as part of the call that vLLM made. The measurement costs
    less than a microsecond a call.
    """

    def __init__(self, engine: Any) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

        self._steps, self._step_seconds, self._connector_seconds = 0, 0.0, 0.0
        self._inside = False
        core = engine.llm_engine.engine_core.engine_core
        core.step_fn = self._timed_step(core.step_fn)
        sides = [core.scheduler.connector] if core.scheduler.connector is not None else []
        if has_kv_transfer_group():
            sides.append(get_kv_transfer_group())
        for side in sides:
            for name in dir(KVConnectorBase_V1):
                if not name.startswith("_") and callable(getattr(type(side), name)):
                    setattr(side, name, self._timed_call(getattr(side, name)))

    def read(self) -> tuple[int, float, float]:
        """(steps, seconds in steps, seconds in the connector), since the engine began."""
        return self._steps, self._step_seconds, self._connector_seconds

    def _timed_step(self, step: Callable[[], Any]) -> Callable[[], Any]:
        @wraps(step)
        def timed() -> Any:
            began = time.perf_counter()
            result = step()
            self._step_seconds += time.perf_counter() - began
            self._steps += 1
            return result

        return timed

    def _timed_call(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def timed(*arguments: Any, **named: Any) -> Any:
            if self._inside:
                return call(*arguments, **named)
            self._inside, began = True, time.perf_counter()
            try:
                return call(*arguments, **named)
            finally:
                self._connector_seconds += time.perf_counter() - began
                self._inside = False

        return timed
