"""How kvsm hears of new weights: vLLM's `set_weight_version` tells the connector of the same engine.

An engine whose weights are updated in place calls it (`LLM.finish_weight_update`, `/set_weight_version`, or
`EngineCore` itself). vLLM tells no connector, so its method is wrapped when a scheduler's side is made, in
its process. A vLLM without this method has no versions to tell.
"""

from __future__ import annotations

from functools import wraps
from typing import Any


def hear_of_new_weights() -> None:
    """Let `EngineCore.set_weight_version` tell the engine's connector. Idempotent."""
    from vllm.v1.engine.core import EngineCore

    told = getattr(EngineCore, "set_weight_version", None)
    if told is None or hasattr(told, "__wrapped__"):
        return

    @wraps(told)
    def set_weight_version(self: Any, weight_version: str) -> None:
        told(self, weight_version)
        connector = self.scheduler.get_kv_connector()
        # A MultiConnector has several; each of them may be kvsm's.
        for one in getattr(connector, "_connectors", [connector]):
            if hasattr(one, "set_weights_version"):
                one.set_weights_version(weight_version)

    EngineCore.set_weight_version = set_weight_version
