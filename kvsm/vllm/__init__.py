"""kvsm in vLLM. Thin: what is here translates, and the offload core decides.

Named in vLLM's `--kv-transfer-config`, and imported by vLLM itself:

=================  =========================================================================================
`KvsmConnector`    a `KVConnectorBase_V1`: the whole scheduler of kvsm, its workers and its log
`KvsmSpec`         an `OffloadingSpec` for vLLM's own OffloadingConnector: kvsm's core and copies behind it
`RecordingSpec`    vLLM's own `CPUOffloadingManager`, unchanged, with kvsm's event log of what it does
=================  =========================================================================================

A file a noun: `versions` (which vLLM), `options` (what a user may say), `kv_cache` (groups and tensors of the
model), `copies` (host memory and copy engine of a rank), `core` (the offload core and its log), `block_pool`,
`kv_events`, `stats`; then `connector` with its sides `scheduler_side`, `worker_side` and what goes between
them, `messages`; `spec` with `manager`, `spec_worker` and `spec_stats`; `recording` with `recorder`. To try
it: `tiny` (a model), `trial` (one engine in a process of its own), `check` and `bench` (the commands).
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from kvsm.errors import ConfigError
from kvsm.vllm.versions import TESTED, installed

_ROOMS = {
    "KvsmConnector": "connector",
    "KvsmSpec": "spec",
    "RecordingSpec": "recording",
}

__all__ = ["KvsmConnector", "KvsmSpec", "RecordingSpec"]


def __getattr__(name: str) -> Any:
    """Each when it is asked for: a connector needs nothing of what a spec needs, and vLLM's interface of one
    may change without the other's. Raises `ConfigError` where vLLM is missing, or lacks what it needs."""
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{_ROOMS[name]}"), name)
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "vllm":
            raise
        raise ConfigError(
            f"{name} needs something that vLLM {installed()} does not have ({error}); kvsm was tested with "
            f"{', '.join(TESTED)}, and `kvsm vllm-check` says all that is missing"
        ) from error
