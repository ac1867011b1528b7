"""kvsm's connectors under vLLM's real scheduler, for a walk of the museum. vLLM must be there.

These are the engines of `kvsm vllm-fuzz`, with what both connectors must survive.
"""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from random import Random

import msgspec

from kvsm.checker.targets import case_of
from kvsm.vllm_fuzz.shape import draw_shape
from kvsm.worlds.world import World

VLLM_IS_THERE = find_spec("vllm") is not None

_CONNECTORS = ("KvsmConnector", "KvsmOffloadingConnector")


def adapted(random: Random) -> World:
    """An engine of vLLM with a connector of kvsm: any shape, and half with faults."""
    connector = random.choice(_CONNECTORS)
    shape = draw_shape(random, _faults_of(connector))
    shape = msgspec.structs.replace(shape, connector=connector)
    return case_of("vllm", msgspec.to_builtins(shape)).make()


@cache
def _faults_of(connector: str) -> tuple[str, ...]:
    """The kinds of faults that this connector must survive."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from kvsm.vllm_fuzz.connectors import faults_of

    return faults_of(connector, {})
