"""The types of a configuration's fields: converted, or refused by name."""

from __future__ import annotations

import operator
from enum import Enum
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import numpy as np

from kvsm.errors import ConfigError


def check_types(config: msgspec.Struct) -> None:
    """Give each field the type that its class declares. For `__post_init__`, before the values are checked.

    An integer may be anything that Python takes as an index, and a flag may be a boolean of numpy: both are
    converted. So is a list where a tuple is declared. Raises `ConfigError`.
    """
    for name, kind in _types_of(type(config)).items():
        value = getattr(config, name)
        if type(value) is not kind:
            msgspec.structs.force_setattr(config, name, _converted(name, value, kind))


@cache
def _types_of(cls: type[msgspec.Struct]) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {name: hints[name] for name in cls.__struct_fields__}


def _converted(name: str, value: Any, kind: Any) -> Any:
    if get_origin(kind) is tuple:
        if not isinstance(value, tuple | list):
            raise ConfigError(f"{name} is {value!r}; it must be a tuple")
        return tuple([_converted(f"{name}[{n}]", one, get_args(kind)[0]) for n, one in enumerate(value)])
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
