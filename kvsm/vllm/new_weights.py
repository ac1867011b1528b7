"""Notify kvsm's connector of new weights, when vLLM calls `EngineCore.set_weight_version`.

vLLM calls it when weights are updated in place (`LLM.finish_weight_update`, `/set_weight_version`, or
`EngineCore` itself), but notifies no connector. So the method is wrapped when a scheduler's side is made, in
the process of that side.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

SET_WEIGHTS_VERSION = "set_weights_version"
"""The method of kvsm's connector for new weights. Only the wrapped method calls it, vLLM does not."""

_IS_WRAPPED = "_notifies_kvsm"
"""An attribute that marks the wrapped method."""


def notify_of_new_weights() -> None:
    """Let `EngineCore.set_weight_version` notify the engine's connector, if this vLLM has it. Idempotent."""
    from vllm.v1.engine.core import EngineCore

    vllms_method = getattr(EngineCore, "set_weight_version", None)
    if vllms_method is None or hasattr(vllms_method, _IS_WRAPPED):
        return

    @wraps(vllms_method)
    def set_weight_version(self: Any, weight_version: str) -> None:
        vllms_method(self, weight_version)
        connector = self.scheduler.get_kv_connector()
        # A MultiConnector has several connectors; each of them may be kvsm's.
        for child in getattr(connector, "_connectors", [connector]):
            if hasattr(child, SET_WEIGHTS_VERSION):
                getattr(child, SET_WEIGHTS_VERSION)(weight_version)

    setattr(set_weight_version, _IS_WRAPPED, True)
    EngineCore.set_weight_version = set_weight_version
