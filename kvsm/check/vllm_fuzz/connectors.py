"""vLLM's configuration of the connectors that a shape names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import SupportsHMA

from kvsm.check.vllm_fuzz.faults import survived_by
from kvsm.check.vllm_fuzz.shape import EngineShape
from kvsm.check.vllm_fuzz.stand_ins import host_bytes
from kvsm.errors import ConfigError, described

_CHILDREN = "connectors"
"""The option of vLLM's MultiConnector with the configurations of its children."""


def transfer_config(shape: EngineShape) -> Any:
    """vLLM's configuration of the connector, and of its children if it is a MultiConnector.

    Each gets host memory for `host_blocks`, unless its options set the size. Raises `ConfigError` for an
    unknown connector.
    """
    given = {"kv_connector": shape.connector, "kv_connector_extra_config": shape.extra}
    return KVTransferConfig(**_completed(given, shape), kv_load_failure_policy="recompute")


def classes_of(transfer: Any) -> list[type]:
    """The class of the connector, or the classes of its children if it is a MultiConnector."""
    children = transfer.kv_connector_extra_config.get(_CHILDREN)
    if not children:
        return [KVConnectorFactory.get_connector_class(transfer)]
    return [KVConnectorFactory.get_connector_class(KVTransferConfig(**child)) for child in children]


def faults_of(connector: str, extra: Mapping[str, Any]) -> tuple[str, ...]:
    """The faults that this connector must survive. Raises `ConfigError` for an unknown connector."""
    transfer = transfer_config(EngineShape(connector=connector, extra=dict(extra)))
    options = transfer.kv_connector_extra_config
    children = [child.get("kv_connector_extra_config") or {} for child in options.get(_CHILDREN) or ()]
    return survived_by(classes_of(transfer), children or [options])


def serves_mamba(connector: str, extra: Mapping[str, Any]) -> bool:
    """Whether vLLM runs models with mamba layers with this connector: it must support several KV cache
    groups.

    Raises `ConfigError` for an unknown connector.
    """
    transfer = transfer_config(EngineShape(connector=connector, extra=dict(extra)))
    return all(issubclass(cls, SupportsHMA) for cls in classes_of(transfer))


def _completed(given: Mapping[str, Any], shape: EngineShape) -> dict[str, Any]:
    """A connector's configuration, with defaults for absent fields."""
    name, extra = str(given.get("kv_connector")), dict(given.get("kv_connector_extra_config") or {})
    module = given.get("kv_connector_module_path")
    if name == "KvsmConnector":
        module = "kvsm.vllm"
    elif ":" in name:
        module, name = name.split(":", 1)
    configuration = {
        "kv_role": "kv_both",
        **given,
        "kv_connector": name,
        "kv_connector_module_path": module,
        "kv_connector_extra_config": extra,
    }
    try:
        connector = KVConnectorFactory.get_connector_class(KVTransferConfig(**configuration))
    except (TypeError, ValueError, ImportError, AttributeError) as error:
        raise ConfigError(
            f"connector {given.get('kv_connector')}: {described(error)}. Give a name that vLLM knows, or "
            "package.module:Class"
        ) from error
    if isinstance(extra.get(_CHILDREN), list):
        extra[_CHILDREN] = [_completed(child, shape) for child in extra[_CHILDREN]]
    else:
        extra.setdefault("cpu_bytes_to_use", host_bytes(connector, shape, extra))
    return configuration
