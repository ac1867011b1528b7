"""What a release promises by name: docs/versions.md says what the promise is.

    PYTHONPATH=tests/support python -m promised tests/data/promised-0.1.0.json

The file is written at the release that it is named after, and stays. Before that release it is written again
after each addition. `tests/house/test_promised.py` fails if something in it is gone.
"""

from __future__ import annotations

import enum
import json
import sys
from collections.abc import Iterator
from inspect import Parameter, isclass, isfunction, signature
from pathlib import Path
from types import FunctionType
from typing import Any

import click
import msgspec

import kvsm
from kvsm.cli import main as kvsm_main
from kvsm.cli.exit_codes import ExitCode
from kvsm.cli.schemas import SCHEMAS
from kvsm.events import KINDS
from kvsm.explain.metric_table import EXPORTED
from kvsm.explain.tables.row_kinds import TABLES
from kvsm.vllm.extra_config import ConnectorOptions, RecordingOptions

Promise = dict[str, Any]
"""Names, each with what is promised of it. A list of names has no order, except `parameters`."""


def promised() -> Promise:
    """Return everything that this kvsm promises."""
    return {
        "python": {name: _python(getattr(kvsm, name)) for name in sorted(kvsm.__all__)},
        "exit codes": {code.name: int(code) for code in ExitCode},
        "schemas": {name: _schema(kind) for name, kind in sorted(SCHEMAS.items())},
        "metrics": {
            name: {"kind": metric.kind, "labels": sorted(metric.labels)}
            for name, metric in sorted(EXPORTED.items())
        },
        "events": {
            kind.__name__: {"tag": kind.__struct_config__.tag, "fields": list(kind.__struct_fields__)}
            for kind in KINDS
        },
        "vLLM options": {
            "KvsmConnector": sorted(ConnectorOptions.__struct_fields__),
            "RecordingSpec": sorted(RecordingOptions.__struct_fields__),
        },
        "tables": {name: sorted(row.__struct_fields__) for name, row in sorted(TABLES.items())},
        "commands": {name: _options(command) for name, command in sorted(_commands(kvsm_main))},
    }


# Python.


def _python(value: Any) -> Promise:
    if not isclass(value):
        return _call(value) if callable(value) else {}
    promise: Promise = {
        "bases": [base.__name__ for base in value.__mro__[1:] if base.__name__ in kvsm.__all__]
    }
    if issubclass(value, enum.Enum):
        return {**promise, "members": {member.name: member.value for member in value}}
    if issubclass(value, msgspec.Struct):
        promise["fields"] = list(value.__struct_fields__)
    elif hasattr(value, "_fields"):
        promise["fields"] = list(value._fields)
    made = _function(value, "__init__")
    if made is not None:
        promise["made with"] = _call(made, method=True)
    promise["attributes"] = {
        name: {} if function is None else _call(function, method=True)
        for name, function in sorted(_attributes(value).items())
    }
    return promise


def _attributes(kind: type) -> dict[str, FunctionType | None]:
    """Public methods and properties that kvsm's own code defines."""
    names = {
        name
        for base in kind.__mro__
        if base.__module__.startswith("kvsm")
        for name, value in vars(base).items()
        if not name.startswith("_") and (callable(value) or isinstance(value, (property, classmethod)))
    }
    return {name: _function(kind, name) for name in names}


def _function(kind: type, name: str) -> FunctionType | None:
    """The Python function behind a method: some have a native body beside it."""
    for base in kind.__mro__:
        found = vars(base).get(name)
        found = getattr(found, "__func__", found)
        if isfunction(found):
            return found
    return None


def _call(function: Any, method: bool = False) -> Promise:
    """The parameters by position, those that are named only, and those that a caller must give."""
    parameters = [*signature(function).parameters.values()][method:]
    named = [one.name for one in parameters if one.kind is Parameter.KEYWORD_ONLY]
    places = [
        one for one in parameters if one.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    ]
    needed = [
        one.name for one in parameters if one.default is Parameter.empty and one.kind < Parameter.VAR_KEYWORD
    ]
    return {
        "parameters": [one.name for one in places],
        "named": sorted(named),
        "needed": sorted(
            set(needed) - {one.name for one in parameters if one.kind is Parameter.VAR_POSITIONAL}
        ),
    }


# JSON and commands.


def _schema(kind: type) -> list[str]:
    """The path of each field in the JSON of a schema. All are printed, whether or not they have a default."""
    schema = msgspec.json.schema(kind)
    return sorted(set(_paths(schema, schema["$defs"], "", ())))


def _paths(part: Promise, structs: Promise, path: str, inside: tuple[str, ...]) -> Iterator[str]:
    """The paths below a part of a schema. inside: the structs around it, which it may repeat."""
    name = part.get("$ref", "").removeprefix("#/$defs/")
    if name and name not in inside:
        yield from _paths(structs[name], structs, path, (*inside, name))
    for field, one in part.get("properties", {}).items():
        yield f"{path}.{field}".removeprefix(".")
        yield from _paths(one, structs, f"{path}.{field}", inside)
    for one in (*part.get("anyOf", ()), *part.get("prefixItems", ())):
        yield from _paths(one, structs, path, inside)
    for items, mark in (("items", "[]"), ("additionalProperties", "{}")):
        if isinstance(part.get(items), dict):
            yield from _paths(part[items], structs, path + mark, inside)


def _commands(group: click.Group, before: str = "") -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from _commands(command, f"{before}{name} ")
        else:
            yield f"{before}{name}", command


def _options(command: click.Command) -> list[str]:
    """The arguments and options, by the names that a script writes."""
    names: list[str] = []
    for parameter in command.params:
        argument = isinstance(parameter, click.Argument)
        names += [str(parameter.name).upper()] if argument else [*parameter.opts, *parameter.secondary_opts]
    return sorted(names)


# The comparison.


def gone(kept: Any, now: Any, place: str = "") -> list[str]:
    """Return what was promised and no longer holds. More names are fine, if nothing more must be given."""
    if isinstance(kept, dict) and isinstance(now, dict):
        lines = [f"{place}/{name}: gone" for name in kept if name not in now]
        for name in kept:
            if name in now:
                lines += gone(kept[name], now[name], f"{place}/{name}")
        return lines
    if not (isinstance(kept, list) and isinstance(now, list)):
        return [] if kept == now else [f"{place}: was {kept!r}, is {now!r}"]
    if place.endswith("/needed"):
        return [f"{place}: {name} must be given now" for name in now if name not in kept]
    if place.endswith(("/parameters", "/fields")):
        return [] if now[: len(kept)] == kept else [f"{place}: were {kept}, are {now}"]
    return [f"{place}: {name} is gone" for name in kept if name not in now]


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(promised(), indent=1) + "\n", encoding="utf-8")
