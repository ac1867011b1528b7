"""The small engine of `kvsm.worlds`, under the names that the scheduler's tests have for it."""

from __future__ import annotations

from kvsm.worlds.engine import Recorder
from kvsm.worlds.engine import SmallEngine as ModelEngine
from kvsm.worlds.pool import SmallPool as ModelPool
from kvsm.worlds.request import HASH_TOKENS, NULL, chain
from kvsm.worlds.request import SmallRequest as ModelRequest

__all__ = ["HASH_TOKENS", "NULL", "ModelEngine", "ModelPool", "ModelRequest", "Recorder", "chain"]
