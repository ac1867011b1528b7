"""Eviction policies. `make_policy` turns a name, or an import path, into one."""

from __future__ import annotations

from importlib import import_module

from kvsm.errors import ConfigError
from kvsm.policies.arc import ARCPolicy
from kvsm.policies.base import Choice, EvictionPolicy
from kvsm.policies.lru import LRUPolicy
from kvsm.policies.s3fifo import S3FIFOPolicy
from kvsm.policies.slot_queue import SlotQueue
from kvsm.policies.slru import SLRUPolicy

POLICIES: dict[str, type[EvictionPolicy]] = {
    "lru": LRUPolicy,
    "arc": ARCPolicy,
    "s3fifo": S3FIFOPolicy,
    "slru": SLRUPolicy,
}


def make_policy(name: str, capacity: int) -> EvictionPolicy:
    """A new policy of `capacity` slots: a built-in one by name, another as `package.module:Class`.

    Raises `ConfigError` if there is none of that name, or if what the path names is not a policy.
    """
    if name in POLICIES:
        return POLICIES[name](capacity)
    module_name, _, class_name = name.partition(":")
    if not class_name:
        raise ConfigError(f"policy {name!r}: choose one of {', '.join(POLICIES)}, or package.module:Class")
    try:
        policy = getattr(import_module(module_name), class_name)(capacity)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"policy {name!r} cannot be made: {error}") from error
    missing = [method for method in _METHODS if not callable(getattr(policy, method, None))]
    if missing:
        raise ConfigError(f"policy {name!r} lacks {', '.join(missing)}; see kvsm.policies.EvictionPolicy")
    return policy  # type: ignore[no-any-return]


_METHODS = ["__len__", "__contains__", *(name for name in vars(EvictionPolicy) if not name.startswith("_"))]

__all__ = [
    "POLICIES",
    "ARCPolicy",
    "Choice",
    "EvictionPolicy",
    "LRUPolicy",
    "S3FIFOPolicy",
    "SLRUPolicy",
    "SlotQueue",
    "make_policy",
]
