"""Worlds of `KvsmConnector` for the museum's checkers. Making one needs vLLM; importing this module does not.

`adapted` makes the engines of `kvsm vllm-fuzz`, with the faults that `KvsmConnector` must survive; `lived`
and `troubled` make the engines of `adapter_lives.py`.
"""

from __future__ import annotations

import logging
import os
from functools import cache
from importlib.util import find_spec
from random import Random

import msgspec

from kvsm.check.vllm_fuzz.shape import draw_options, draw_shape
from kvsm.check.walks.targets import case_of
from kvsm.check.worlds.world import World

VLLM_IS_THERE = find_spec("vllm") is not None


def adapted(random: Random) -> World:
    """Return a vLLM engine with `KvsmConnector`, of any shape; half of the engines have faults."""
    shape = draw_options(draw_shape(random, _faults(), mamba=True, drafters=True), random)
    return case_of("vllm", msgspec.to_builtins(shape)).make()


def lived(random: Random) -> World:
    """Return a vLLM engine with new weights, restarts, disks, hanging loads or host cache resets."""
    _quiet()
    from museum import adapter_lives

    return adapter_lives.lived(random)


def troubled(random: Random) -> World:
    """Return a vLLM engine with hanging loads, or with resets of the host cache alone."""
    _quiet()
    from museum import adapter_lives

    return adapter_lives.troubled(random)


@cache
def _quiet() -> None:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # Python prints the warnings of a logger that has no handler.
    logging.getLogger("kvsm").addHandler(logging.NullHandler())


@cache
def _faults() -> tuple[str, ...]:
    """The kinds of faults that `KvsmConnector` must survive."""
    _quiet()
    from kvsm.check.vllm_fuzz.connectors import faults_of

    return faults_of("KvsmConnector", {})
