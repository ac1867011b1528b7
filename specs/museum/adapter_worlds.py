"""`KvsmConnector`, for checkers of the museum. vLLM must be there when one of them looks.

`adapted` has the engines of `kvsm vllm-fuzz`, with what `KvsmConnector` must survive; `lived` and `troubled`
those of `adapter_lives.py`.
"""

from __future__ import annotations

import logging
import os
from functools import cache
from importlib.util import find_spec
from random import Random

import msgspec

from kvsm.check.vllm_fuzz.shape import draw_shape
from kvsm.check.walks.targets import case_of
from kvsm.check.worlds.world import World

VLLM_IS_THERE = find_spec("vllm") is not None


def adapted(random: Random) -> World:
    """An engine of vLLM with a connector of kvsm: any shape, and half with faults."""
    shape = msgspec.structs.replace(draw_shape(random, _faults()), connector="KvsmConnector")
    return case_of("vllm", msgspec.to_builtins(shape)).make()


def lived(random: Random) -> World:
    """An engine of vLLM with other weights, restarts, disks or copies that hang."""
    _quiet()
    from museum import adapter_lives

    return adapter_lives.lived(random)


def troubled(random: Random) -> World:
    """An engine of vLLM with loads that hang, or with resets of the host alone."""
    _quiet()
    from museum import adapter_lives

    return adapter_lives.troubled(random)


@cache
def _quiet() -> None:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # Else Python prints each warning of a logger that nobody handles.
    logging.getLogger("kvsm").addHandler(logging.NullHandler())


@cache
def _faults() -> tuple[str, ...]:
    """The kinds of faults that `KvsmConnector` must survive."""
    _quiet()
    from kvsm.check.vllm_fuzz.connectors import faults_of

    return faults_of("KvsmConnector", {})
