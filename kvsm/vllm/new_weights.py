"""How kvsm hears of new weights: vLLM's `set_weight_version` tells the connector of the same engine.

An engine whose weights are updated in place calls it (`LLM.finish_weight_update`, `/set_weight_version`, or
`EngineCore` itself). vLLM tells no connector, so its method is wrapped when a scheduler's side is made, in
its process.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

TOLD = "set_weights_version"
"""The method of a connector that is told of new weights. kvsm calls it; vLLM does not know it."""

_TELLS = "_tells_kvsm"
"""The mark of the method that is wrapped."""


def hear_of_new_weights() -> None:
    """Let `EngineCore.set_weight_version` notify the engine's connector, if this vLLM has it. Idempotent."""
    from vllm.v1.engine.core import EngineCore

    told = getattr(EngineCore, "set_weight_version", None)
    if told is None or hasattr(told, _TELLS):
        return

    @wraps(told)
    def set_weight_version(self: Any, weight_version: str) -> None:
        told(self, weight_version)
        connector = self.scheduler.get_kv_connector()
        # A MultiConnector has several; each of them may be kvsm's.
        for one in getattr(connector, "_connectors", [connector]):
            if hasattr(one, TOLD):
                getattr(one, TOLD)(weight_version)

    setattr(set_weight_version, _TELLS, True)
    EngineCore.set_weight_version = set_weight_version
