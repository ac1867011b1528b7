"""kvsm's plugin for vLLM, which vLLM loads in each of its processes (entry point `vllm.general_plugins`).

- It registers kvsm's names with vLLM, so that `"kv_connector": "KvsmConnector"` needs no module path.
- With `KVSM_OFFLOAD=1`, `--kv-offloading-size` uses `KvsmConnector`. Otherwise vLLM uses its own
  OffloadingConnector, or SimpleCPUOffloadConnector with `VLLM_USE_SIMPLE_KV_OFFLOAD=1`. The variable's name
  does not begin with `VLLM_`, because vLLM warns of unknown names with this prefix, or refuses to start.

vLLM has no hook for this choice. So the plugin wraps the one method in which vLLM makes it, and only if the
variable is set. If the installed vLLM does not have this method, a line in vLLM's log says so.
"""

from __future__ import annotations

import os
from functools import cache, wraps
from importlib.metadata import entry_points
from typing import Any

SWITCH = "KVSM_OFFLOAD"

_CHOICE = "_post_init_kv_transfer_config"
"""The method of vLLM's `VllmConfig` that turns `--kv-offloading-size` into a connector."""

_CONNECTOR, _SPEC = "KvsmConnector", "RecordingSpec"


def load() -> None:
    """Register kvsm with vLLM. vLLM calls this, perhaps several times in a process. After any error, vLLM
    continues without the plugin."""
    try:
        _register_names()
        if _is_on():
            _choose_kvsm()
    except Exception as error:  # else vLLM would not start, even for users who do not use kvsm
        _log().warning("kvsm: vLLM and kvsm's plugin do not fit together, so it does nothing: %s", error)


def why_not_loaded() -> str:
    """Return why vLLM does not load this plugin here; empty if it does."""
    plugins = {point.value for point in entry_points(group="vllm.general_plugins")}
    if "kvsm.vllm.vllm_plugin:load" not in plugins:
        return "vLLM does not find kvsm's plugin: install kvsm with pip in the environment of vLLM"
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "kvsm" not in allowed.split(","):
        return f"VLLM_PLUGINS is {allowed!r}, and does not name kvsm"
    return ""


def _register_names() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory

    if _CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(_CONNECTOR, "kvsm.vllm", _CONNECTOR)
    if _SPEC not in OffloadingSpecFactory._registry:
        OffloadingSpecFactory.register_spec(_SPEC, "kvsm.vllm", _SPEC)


def _is_on() -> bool:
    value = os.environ.get(SWITCH, "0")
    if value not in ("0", "1", ""):
        _log().warning("kvsm: %s is %r, which is neither 1 nor 0; it is ignored", SWITCH, value)
    return value == "1"


def _choose_kvsm() -> None:
    """Make `--kv-offloading-size` mean `KvsmConnector`, in all configurations made from now on."""
    from vllm.config import CacheConfig, VllmConfig

    from kvsm.vllm.versions import must_have

    must_have(VllmConfig, (_CHOICE,))
    must_have(CacheConfig, ("kv_offloading_size", "kv_offloading_backend"))
    vllms_choice = getattr(VllmConfig, _CHOICE)
    if hasattr(vllms_choice, "__wrapped__"):
        return

    @wraps(vllms_choice)
    def choose(config: Any) -> None:
        has_transfer = config.kv_transfer_config is not None
        vllms_choice(config)
        _change(config, has_transfer)

    setattr(VllmConfig, _CHOICE, choose)


def _change(config: Any, has_transfer: bool) -> None:
    """Replace vLLM's choice of a connector in this configuration.

    has_transfer: whether the user has given a `kv_transfer_config`. Its `kv_load_failure_policy` is kept.
    """
    cache_config, transfer = config.cache_config, config.kv_transfer_config
    size = cache_config.kv_offloading_size
    if size is None:
        if transfer is None:
            _warn_without_size()
        return
    if cache_config.kv_offloading_backend != "native":
        return
    host_bytes = int(size * (1 << 30))
    transfer.kv_connector, transfer.kv_connector_module_path = _CONNECTOR, "kvsm.vllm"
    transfer.kv_connector_extra_config["cpu_bytes_to_use"] = host_bytes
    if not has_transfer:
        transfer.kv_load_failure_policy = "recompute"
    _log_choice(host_bytes, transfer.kv_load_failure_policy)


@cache
def _warn_without_size() -> None:
    _log().warning("kvsm: %s is 1, but without --kv-offloading-size nothing is offloaded", SWITCH)


@cache
def _log_choice(host_bytes: int, load_failure: str) -> None:
    _log().info(
        "kvsm: KvsmConnector offloads to %d bytes of host memory (--kv-offloading-size, %s=1); "
        "kv_load_failure_policy is %r",
        host_bytes,
        SWITCH,
        load_failure,
    )


def _log() -> Any:
    from vllm.logger import init_logger

    return init_logger("vllm.kvsm")
