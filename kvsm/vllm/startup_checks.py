"""The checks of `KvsmConnector` when an engine starts."""

from __future__ import annotations

from multiprocessing import parent_process
from typing import Any

from vllm.logger import init_logger

from kvsm.errors import ConfigError

log = init_logger("vllm.kvsm")


def refuse_schedulers_of_their_own(parallel_config: Any) -> None:
    """Raise `ConfigError` if each rank has its own scheduler."""
    if parallel_config.distributed_executor_backend == "external_launcher" and parallel_config.world_size > 1:
        raise ConfigError(
            "external_launcher makes a scheduler in each rank, and none gets the reports of other ranks' "
            "copies; use the executor mp or ray"
        )


def refuse_without_prefix_cache(vllm_config: Any) -> None:
    """Raise `ConfigError` if vLLM's prefix cache is off.

    vLLM itself turns it off for models in which a hit would change the tokens: MLA on a CPU, layers that are
    not causal.
    """
    if not vllm_config.cache_config.enable_prefix_caching:
        raise ConfigError(
            "kvsm offloads what the prefix cache holds; enable it (--enable-prefix-caching). If you did, "
            "vLLM has turned it off for this model on this platform, as for MLA on a CPU without AMX"
        )


def warn_of_failing_requests(transfer_config: Any) -> None:
    """Warn if requests end with an error when their load fails, by `kv_load_failure_policy`."""
    if transfer_config.kv_load_failure_policy != "recompute":
        log.warning(
            "kvsm: kv_load_failure_policy is %r, so a request whose load fails ends with an error; "
            "with 'recompute' it is computed instead (in a MultiConnector, only the MultiConnector's "
            "own policy counts)",
            transfer_config.kv_load_failure_policy,
        )


def warn_of_immediate_kill(vllm_config: Any) -> None:
    """Warn if vLLM kills this engine as soon as it is asked to stop, and the kill would lose data.

    vLLM does not kill an engine that runs in its caller's process.
    """
    if getattr(vllm_config, "shutdown_timeout", None) != 0 or parent_process() is None:
        return
    given, lost = vllm_config.kv_transfer_config.kv_connector_extra_config, []
    if given.get("event_log") or given.get("pool_dir"):
        lost.append("its event log is not closed")
    if given.get("disk_write") == "back":
        lost.append('blocks that only host memory has do not reach the disk ("disk_write": "back")')
    if lost:
        log.warning(
            "kvsm: --shutdown-timeout is 0, so a stop (SIGTERM) kills this engine within a second: %s. Give "
            "vLLM --shutdown-timeout 30, and the pod or service a longer time to end than that",
            ", and ".join(lost),
        )
