"""kvsm's plugin for vLLM, which vLLM loads in each of its processes (entry point `vllm.general_plugins`).

- It registers kvsm's names with vLLM, so that `"kv_connector": "KvsmConnector"` needs no module path.
- With `KVSM_OFFLOAD=1`, `--kv-offloading-size` uses `KvsmConnector`. Otherwise vLLM uses its own
  OffloadingConnector, or SimpleCPUOffloadConnector with `VLLM_USE_SIMPLE_KV_OFFLOAD=1`. The variable's name
  does not begin with `VLLM_`, because vLLM warns of unknown names with this prefix, or refuses to start.

vLLM has no hook for this choice. So the plugin wraps the one method in which vLLM makes it, and only if the
variable is set. If the installed vLLM does not have this method, a line in vLLM's log says so.

Without the variable the plugin imports nothing of vLLM: that would be hundreds of modules in processes that
need none of them. The names are registered when vLLM itself imports its factories.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache, wraps
from importlib.machinery import ModuleSpec
from importlib.metadata import entry_points
from typing import Any, cast

SWITCH = "KVSM_OFFLOAD"

_CHOICE = "_post_init_kv_transfer_config"
"""The method of vLLM's `VllmConfig` that turns `--kv-offloading-size` into a connector."""

_CONNECTOR, _SPEC = "KvsmConnector", "RecordingSpec"


def _register_connector(module: Any) -> None:
    factory = module.KVConnectorFactory
    if _CONNECTOR not in factory._registry:
        factory.register_connector(_CONNECTOR, "kvsm.vllm", _CONNECTOR)


def _register_spec(module: Any) -> None:
    factory = module.OffloadingSpecFactory
    if _SPEC not in factory._registry:
        factory.register_spec(_SPEC, "kvsm.vllm", _SPEC)


_REGISTRARS: dict[str, Callable[[Any], None]] = {
    "vllm.distributed.kv_transfer.kv_connector.factory": _register_connector,
    "vllm.v1.kv_offload.factory": _register_spec,
}
"""vLLM's modules with a factory -> the function that registers kvsm's name there."""


def load() -> None:
    """Register kvsm with vLLM. vLLM calls this, perhaps several times in a process. After any error, vLLM
    continues without the plugin."""
    _guarded(_register_names)
    if _is_on():
        _guarded(_choose_kvsm)


def _guarded(act: Callable[..., None], *arguments: Any) -> None:
    try:
        act(*arguments)
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
    """Register in the factories that are imported, and in the others once they are."""
    later = {}
    for name, register in _REGISTRARS.items():
        if name in sys.modules:
            register(sys.modules[name])
        else:
            later[name] = register
    if later and not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport(later))


class _AfterImport:
    """A finder in `sys.meta_path` that finds nothing of its own: it calls a function after a module's first
    import, and is gone after the last one. A search for a module's spec is no import.

    waiting: module -> its function.
    """

    def __init__(self, waiting: dict[str, Callable[[Any], None]]) -> None:
        self._waiting = waiting

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the spec that the other finders give, with the call after its import."""
        register = self._waiting.get(name)
        if register is None:
            return None
        spec = self._found_by_others(name, path, target)
        loader: Any = None if spec is None else spec.loader
        if loader is None:
            return spec
        run = loader.exec_module

        def run_and_register(module: Any) -> None:
            with suppress(AttributeError):  # a loader that was returned twice has two of these calls
                del loader.exec_module
            run(module)
            self._forget(name)
            _guarded(register, module)

        _guarded(setattr, loader, "exec_module", run_and_register)
        return spec

    def _found_by_others(self, name: str, path: Any, target: Any) -> ModuleSpec | None:
        for finder in list(sys.meta_path):
            find: Any = None if finder is self else getattr(finder, "find_spec", None)
            if find is not None and (spec := find(name, path, target)) is not None:
                return cast("ModuleSpec", spec)
        return None

    def _forget(self, name: str) -> None:
        """Wait for this module no longer, and leave `sys.meta_path` if it was the last one."""
        self._waiting.pop(name, None)
        if not self._waiting:
            with suppress(ValueError):  # another module may be imported in another thread
                sys.meta_path.remove(self)


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
