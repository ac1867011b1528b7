"""Compare the interface of the installed vLLM with the one that kvsm was written for.

The tables `interface_table` and `vllm_options` list vLLM's classes, records and options. Most additions of a
new vLLM have a default, so kvsm starts with them, and the missing part would go unnoticed. This comparison
finds it: `kvsm vllm-check` prints it, and a test fails.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Iterable, Iterator
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from types import FunctionType
from typing import Any

from kvsm.vllm.interface_table import INTERFACES, PROPERTY, RECORDS, Interface
from kvsm.vllm.versions import installed
from kvsm.vllm.vllm_options import OPTION_READERS, OPTIONS


def changes() -> list[str]:
    """Return a line for each difference between the installed vLLM and the tables."""
    import vllm
    from vllm.v1.kv_offload.base import OffloadingManager

    from kvsm.vllm.recording_manager import NOT_RECORDED, RECORDED

    version = installed()
    found: list[str] = []
    for name, interface in INTERFACES.items():
        theirs = getattr(import_module(interface.module), name, object)
        found += changed_methods(name, interface, theirs, version)
    managers_methods = methods_of(OffloadingManager).keys() - {"__init__"}
    for name in sorted(managers_methods - RECORDED.keys() - NOT_RECORDED):
        found.append(
            f"vLLM has a new method of OffloadingManager, which RecordingSpec does not record: {name}"
        )
    for record in RECORDS:
        module, _, name = record.name.rpartition(".")
        expected = {field for field in record.fields if has_since(version, record.later.get(field, ""))}
        theirs = getattr(import_module(module), name, object)
        found += _compared(f"field of {name}", expected, fields_of(theirs))
    expected = {option.name for option in OPTIONS if has_since(version, option.since)}
    root = Path(vllm.__path__[0])
    read = options_read(path for reader in OPTION_READERS for path in _files(root / reader))
    return found + _compared("option in kv_connector_extra_config", expected, read)


def changed_methods(name: str, interface: Interface, theirs: type, version: str) -> list[str]:
    """Return the differences between a class of this version of vLLM and its table."""
    expected = {row.name: row.parameters for row in interface.methods if has_since(version, row.since)}
    there = methods_of(theirs)
    found = _compared(f"method of {name}", expected.keys(), there.keys())
    for method in sorted(expected.keys() & there.keys()):
        was, now = expected[method], there[method]
        if was != now:
            found.append(f"vLLM has changed {name}.{method}: it was ({was}), and is ({now})")
    return found


def _compared(what: str, expected: Iterable[str], there: Iterable[str]) -> list[str]:
    known, found = set(expected), set(there)
    added = [f"vLLM has a new {what}, which kvsm does not know: {one}" for one in sorted(found - known)]
    return added + [f"vLLM has no {what} any more: {one}" for one in sorted(known - found)]


def methods_of(theirs: type) -> dict[str, str]:
    """Return the constructor and the public methods of a class, with parameters in the form of `Method`."""
    found = {}
    for name, member in vars(theirs).items():
        if name.startswith("_") and name != "__init__":
            continue
        if isinstance(member, property):
            found[name] = PROPERTY
        elif isinstance(member, (classmethod, staticmethod, FunctionType)):
            found[name] = _written(member)
    return found


def _written(member: Any) -> str:
    is_static = isinstance(member, staticmethod)
    function = member if isinstance(member, FunctionType) else member.__func__
    parameters = [*inspect.signature(function).parameters.values()][not is_static :]
    return ", ".join(
        str(one.replace(annotation=one.empty, default=one.empty))
        + ("" if one.default is one.empty else f"={one.default!r}")
        for one in parameters
    )


def fields_of(theirs: Any) -> list[str]:
    """Return the names of the public fields of a record."""
    if dataclasses.is_dataclass(theirs):
        names = [field.name for field in dataclasses.fields(theirs)]
    else:
        names = list(getattr(theirs, "_fields", ()))
    return [name for name in names if not name.startswith("_")]


def options_read(files: Iterable[Path]) -> set[str]:
    """Return the option names that these files read from `kv_connector_extra_config` or a copy of it.

    A copy is recognized by its name, which ends with `extra_config`.
    """
    return {name for path in files for name in _read_in(ast.parse(path.read_text(encoding="utf-8")))}


def _read_in(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        source: ast.expr | None = None
        key: ast.expr | None = None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            source, key = node.func.value, node.args[0]
            if node.func.attr == "get_from_extra_config":
                source = ast.Name("extra_config")
        elif isinstance(node, ast.Subscript):
            source, key = node.value, node.slice
        elif isinstance(node, ast.Compare):
            source, key = node.comparators[0], node.left
        if isinstance(key, ast.Constant) and isinstance(key.value, str) and _is_extra_config(source):
            yield key.value


def _is_extra_config(source: ast.expr | None) -> bool:
    if isinstance(source, ast.BoolOp):
        return any(map(_is_extra_config, source.values))
    name = source.attr if isinstance(source, ast.Attribute) else getattr(source, "id", "")
    return str(name).endswith("extra_config")


def _files(place: Path) -> list[Path]:
    return [place] if place.suffix else sorted(place.rglob("*.py"))


def has_since(version: str, since: str) -> bool:
    """Whether `version` is at least `since`. An empty `since` means every tested version."""
    return not since or _numbers(version) >= _numbers(since)


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version. 0.33.0+cpu and 0.33.0rc1 count as 0.33.0."""
    return tuple(int("".join(takewhile(str.isdigit, part)) or 0) for part in version.split("+")[0].split("."))
