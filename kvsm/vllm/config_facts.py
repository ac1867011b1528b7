"""vLLM's configuration as facts: each field that is not at its default and not in `config_exceptions`.

A fact has the name of its field: `parallel_config.tensor_parallel_size`. A default needs no fact, because the
version of vLLM is a separate fact. So an identity stays small, and lists only what the user chose.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from functools import partial
from hashlib import blake2b
from typing import Any

from kvsm.vllm.config_exceptions import EXCEPTIONS

MOST_CHARACTERS = 96
"""The longest value that is shown in full. A longer value is shown as its beginning and a digest."""

_DRAFTS_ONLY = ("ngram", "[ngram]", "ngram_gpu", "suffix")
"""Speculative methods without a draft model: they have no KV cache."""


def config_facts(vllm_config: Any, exceptions: Collection[str] = ()) -> dict[str, str]:
    """Return the facts of vLLM's configuration, by name.

    exceptions: fields that do not count, besides `EXCEPTIONS`.
    """
    excepted = {*EXCEPTIONS, *exceptions}
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method in _DRAFTS_ONLY:
        excepted.add("VllmConfig.speculative_config")
    return dict(_facts_of(vllm_config, "", excepted))


def short(value: object) -> str:
    """Return `plain(value)`; a text above `MOST_CHARACTERS` is cut, and a digest of all of it appended."""
    text = plain(value)
    if len(text) <= MOST_CHARACTERS:
        return text
    digest = blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest()
    return f"{text[: MOST_CHARACTERS - 32]}... ({digest})"


def plain(value: Any, inside: tuple[int, ...] = ()) -> str:
    """Return a value as text: equal for equal values, in every process.

    inside: the ids of the objects that contain it. An object that contains itself is shown once.
    """
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, str | bytes | bytearray):
        return repr(value)
    if id(value) in inside:
        return "..."
    inside += (id(value),)
    if isinstance(value, partial):
        return plain({"call": value.func, "args": value.args, **value.keywords}, inside)
    if isinstance(value, Mapping):
        entries = [f"{plain(key, inside)}: {plain(one, inside)}" for key, one in value.items()]
        return "{" + ", ".join(sorted(entries)) + "}"
    if isinstance(value, Set):
        return "{" + ", ".join(sorted(plain(one, inside) for one in value)) + "}"
    if isinstance(value, Sequence):
        return "[" + ", ".join(plain(one, inside) for one in value) + "]"
    return _plain_object(value, inside)


def _plain_object(value: Any, inside: tuple[int, ...]) -> str:
    """Return an object as text: by its own dictionary or hash, its attributes, or a repr without address."""
    made_by: Any = type(value)
    kind = made_by.__qualname__
    if callable(getattr(value, "to_dict", None)):
        return f"{kind} {plain(value.to_dict(), inside)}"
    if callable(getattr(value, "compute_hash", None)) and not is_dataclass(value):
        return f"{kind} {value.compute_hash()}"
    if made_by.__repr__ is object.__repr__ or is_dataclass(value):
        return f"{kind} {plain(getattr(value, '__dict__', {}), inside)}"
    return repr(value)


def _facts_of(config: Any, path: str, excepted: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield the facts of a configuration and its sub-configurations.

    path: the prefix of the facts' names: the configuration's name and a dot; empty for `VllmConfig` itself.
    """
    for field in fields(config):
        if f"{type(config).__name__}.{field.name}" in excepted:
            continue
        name, value = path + field.name, getattr(config, field.name)
        if is_config(value):
            if default_of(field) is None:
                yield name, type(value).__name__
            yield from _facts_of(value, f"{name}.", excepted)
        elif plain(value) != plain(default_of(field)):
            yield name, short(value)


def is_config(value: object) -> bool:
    """Whether this is a configuration class of vLLM, whose fields become separate facts."""
    return is_dataclass(value) and type(value).__module__.startswith("vllm.config")


def default_of(field: Field[Any]) -> object:
    """Return the default of a field; `MISSING` if there is none."""
    if field.default_factory is not MISSING:
        return field.default_factory()
    default = field.default
    # vLLM's configurations are pydantic classes, and the default may be a `Field` of pydantic.
    given = getattr(default, "get_default", None)
    return default if given is None else given(call_default_factory=True)
