"""Options of a command, made from the fields of the msgspec struct that they fill.

    @click.command(cls=Command)
    @struct_options(RunOptions, metavars={"trace": "FILE"})
    def run(**options: Any) -> None: ...

Names, types, defaults and help (`says`) are those of the fields. The struct itself refuses wrong values
(`kvsm.system.field_types.check_values`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click
import msgspec
from msgspec.structs import FieldInfo

from kvsm.system.field_types import choices_of, kind_of

_Command = TypeVar("_Command", bound=Callable[..., Any])
_NONE: Mapping[str, str] = {}


def struct_options(
    struct: type[msgspec.Struct], *, flags: Mapping[str, str] = _NONE, metavars: Mapping[str, str] = _NONE
) -> Callable[[_Command], _Command]:
    """Give a command one option for each field of a struct, in the order of the fields.

    flags: field -> its flag, if that is not the field's name.
    metavars: field -> the name of its value in the help.
    """

    def add(command: _Command) -> _Command:
        for field in reversed(msgspec.structs.fields(struct)):
            flag = flags.get(field.name, f"--{field.name.replace('_', '-')}")
            command = _option(field, flag, metavars.get(field.name))(command)
        return command

    return add


def _option(field: FieldInfo, flag: str, metavar: str | None) -> Callable[[_Command], _Command]:
    kind, meta = kind_of(field.type)
    if kind is bool:
        return click.option(flag, field.name, is_flag=True, help=meta.description)
    return click.option(
        flag,
        field.name,
        type=click.Choice(choices_of(meta)) if choices_of(meta) else kind,
        default=field.default,
        show_default=field.default is not None,
        metavar=metavar,
        help=meta.description,
    )
