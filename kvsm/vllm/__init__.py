"""kvsm in vLLM. This package translates vLLM's calls; the offload core decides.

A user names one of these classes in vLLM's `--kv-transfer-config`, and vLLM imports it:

=========================  =================================================================================
`KvsmConnector`            a `KVConnectorBase_V1`: all of kvsm, with its scheduler, workers and log
`RecordingSpec`            vLLM's own `CPUOffloadingManager`, unchanged, with an event log of what it does
=========================  =================================================================================

`vllm_plugin` registers these names with vLLM, if kvsm is installed, and `KVSM_OFFLOAD=1` chooses the
connector.

Shared by both: `versions` (the installed vLLM), `interface` with `interface_table/` and `vllm_options` (what
vLLM calls and reads, and what kvsm does with it), `extra_config` (a user's options), `engine_offloader`
(the offload core of an engine with its log), `log_watch` (warns if the log cannot be written), `rank_copies`
(host memory and copy engine of a rank), `copy_cores` (the cores for copies on a CPU).

- `connector` has two sides, `scheduler_side` and `worker_side`, which exchange `step_messages`. They use
  `kv_cache_config`, `vllm_block_pool`, `vllm_kv_events`, `connector_stats`,
  `own_process`, `startup_checks` and `deadlines` (copies that are never reported). Between engines they use
  `hand_overs` (the threads that talk to other engines) and `prompt_layout` (what two engines compare).
- `recording_spec` consists of `recording_manager`, `manager_recorder` and `log_stats`. On a CPU its copies
  are `host_copy_worker`'s.
- To try kvsm: `tiny_model`, `trial` (one engine in its own process), `installation_check` (for the command
  `kvsm vllm-check`), `bench`, `bench_peers` and `step_clock` (for `kvsm bench vllm`).
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from kvsm.errors import ConfigError
from kvsm.vllm.versions import TESTED, installed

_ROOMS = {
    "KvsmConnector": "connector",
    "RecordingSpec": "recording_spec",
}

__all__ = ["KvsmConnector", "RecordingSpec"]


def __getattr__(name: str) -> Any:
    """Import a class on first use, so that a changed interface of vLLM breaks only the class that uses it.

    Raises `ConfigError` if vLLM is missing or lacks what the class needs.
    """
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{_ROOMS[name]}"), name)
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "vllm":
            raise
        raise ConfigError(
            f"{name} needs something that vLLM {installed()} does not have ({error}); kvsm was tested with "
            f"{', '.join(TESTED)}; `kvsm vllm-check` lists all that is missing"
        ) from error
