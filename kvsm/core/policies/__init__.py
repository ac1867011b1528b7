"""Eviction policies. `make_policy` makes one from a name or an import path.

docs/policies.md helps to choose one; docs/extending.md says how to add one.
"""

from __future__ import annotations

from collections.abc import Collection
from importlib import import_module
from inspect import signature

from kvsm.core.policies.eviction_policy import Choice, EvictionPolicy
from kvsm.errors import ConfigError, described

POLICIES = {
    "lru": "kvsm.core.policies.lru:LRUPolicy",
    "arc": "kvsm.core.policies.arc:ARCPolicy",
    "s3fifo": "kvsm.core.policies.s3fifo:S3FIFOPolicy",
    "slru": "kvsm.core.policies.slru:SLRUPolicy",
    "sieve": "kvsm.core.policies.sieve:SIEVEPolicy",
    "auto": "kvsm.core.policies.auto:AutoPolicy",
}
"""The built-in policies: name -> import path."""

ADMITTING = tuple(name for name in POLICIES if name != "auto")
"""The built-in policies that admit every block."""

WITHHELD = "kvsm.core.policies.withheld:WithheldPolicy"
"""The policy that a redacted log names in place of one of another package."""


def make_policy(name: str, capacity: int) -> EvictionPolicy:
    """Make a new policy over `capacity` slots.

    name: a key of `POLICIES`, or the import path of any other policy, `package.module:Class`.

    Raises `ConfigError` if there is no such policy, or if the path does not name a policy.
    """
    module_name, _, class_name = POLICIES.get(name, name).partition(":")
    if not class_name:
        raise ConfigError(f"policy {name!r}: choose one of {', '.join(POLICIES)}, or package.module:Class")
    try:
        policy = getattr(import_module(module_name), class_name)(capacity)
    except (Exception, SystemExit) as error:  # A policy of another package may raise anything.
        raise ConfigError(f"policy {name!r} cannot be made: {described(error)}") from error
    missing = [method for method in _METHODS if not callable(getattr(policy, method, None))]
    if missing:
        raise ConfigError(
            f"policy {name!r} lacks {', '.join(missing)}; see kvsm.core.policies.EvictionPolicy"
        )
    for method, others in (("admitted", 2), ("touched", 1)):
        _check_takes_parent(name, policy, method, others)
    return policy  # type: ignore[no-any-return]


def _check_takes_parent(name: str, policy: object, method: str, others: int) -> None:
    """Raise `ConfigError` if this method takes no `parent` after its `others` positional arguments."""
    try:
        signature(getattr(policy, method)).bind(*[None] * others, parent=None)
    except TypeError as error:
        message = f"policy {name!r}: {method} does not take a parent ({error}); see EvictionPolicy"
        raise ConfigError(message) from error


def refuse_foreign(name: str, allowed: Collection[str]) -> None:
    """Raise `ConfigError` unless a policy that a file names is built in, or in `allowed`.

    Making a policy of another package runs its code, and the file may come from anyone.
    """
    if name in POLICIES or name == WITHHELD or name in allowed:
        return
    shown = repr(name if len(name) <= _LONGEST_SHOWN else name[:_LONGEST_SHOWN] + "..")
    raise ConfigError(
        f"it names the policy {shown}, which is not one of {', '.join(POLICIES)}, and to read it would run "
        f"code of that name; if you trust it, allow that: --allow-policy {shown}"
    )


_LONGEST_SHOWN = 100

_METHODS = ["__len__", "__contains__", *(name for name in vars(EvictionPolicy) if not name.startswith("_"))]

__all__ = ["ADMITTING", "POLICIES", "WITHHELD", "Choice", "EvictionPolicy", "make_policy", "refuse_foreign"]
