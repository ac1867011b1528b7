"""Converts and checks the fields of a configuration. Errors name the field."""

from __future__ import annotations

import operator
from enum import Enum
from functools import cache
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec
import numpy as np

from kvsm.errors import ConfigError


def check_types(config: msgspec.Struct) -> None:
    """Convert each field to its declared type. To be called in `__post_init__`, before `check_values`.

    Converted are: objects that Python accepts as an index to int, numpy booleans to bool, and lists to
    tuples. Raises `ConfigError` for any other type.
    """
    for name, kind in _types_of(type(config)).items():
        value = getattr(config, name)
        if type(value) is not kind:
            msgspec.structs.force_setattr(config, name, _converted(name, value, kind))


def says(
    description: str, least: float | None = None, most: float | None = None, choices: tuple[str, ...] = ()
) -> msgspec.Meta:
    """Return the annotation of a field: its description, the range of a number, the choices of a text."""
    return msgspec.Meta(description=description, ge=least, le=most, extra={"choices": choices})


def check_values(config: msgspec.Struct) -> None:
    """Raise `ConfigError` for a number out of its range, or a text that is none of its choices (see `says`).

    None is always accepted.
    """
    for field in msgspec.structs.fields(config):
        value, meta = getattr(config, field.name), kind_of(field.type)[1]
        if value is None:
            continue
        if meta.ge is not None and meta.le is not None and not meta.ge <= value <= meta.le:
            raise ConfigError(f"{field.name} is {value}; it must be from {meta.ge} to {meta.le}")
        if meta.ge is not None and not meta.ge <= value:
            raise ConfigError(f"{field.name} is {value}; it must be {meta.ge} or more")
        choices = choices_of(meta)
        if choices and value not in choices:
            raise ConfigError(f"{field.name} is {value!r}; choose one of {', '.join(choices)}")


def choices_of(meta: msgspec.Meta) -> tuple[str, ...]:
    """Return the allowed texts of a field; empty if any text is allowed."""
    return tuple((meta.extra or {}).get("choices", ()))


def kind_of(hint: Any) -> tuple[Any, msgspec.Meta]:
    """Return the type of a field, without None, and its `msgspec.Meta`."""
    for part in (hint, *get_args(hint)):
        if get_origin(part) is Annotated:
            kind, meta = get_args(part)[:2]
            return next((option for option in get_args(kind) if option is not NoneType), kind), meta
    return hint, msgspec.Meta()


@cache
def _types_of(cls: type[msgspec.Struct]) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {name: hints[name] for name in cls.__struct_fields__}


def _converted(name: str, value: Any, kind: Any) -> Any:
    if get_origin(kind) is tuple:
        if not isinstance(value, tuple | list):
            raise ConfigError(f"{name} is {value!r}; it must be a tuple")
        return tuple([_converted(f"{name}[{n}]", part, get_args(kind)[0]) for n, part in enumerate(value)])
    if issubclass(kind, msgspec.Struct | Enum):
        if isinstance(value, kind):
            return value
    elif kind is bool:
        if isinstance(value, bool | np.bool_):
            return bool(value)
    elif kind is str:
        if isinstance(value, str):
            return str.__str__(value)
    else:
        try:
            return operator.index(value)
        except TypeError:
            pass
    article = "an" if kind.__name__[0] in "aeiouAEIOU" else "a"
    raise ConfigError(f"{name} is {value!r}; it must be {article} {kind.__name__}")
