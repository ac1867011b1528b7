"""What a row of these tables says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

PROPERTY = "property"
"""Stands for the parameters of a property."""

_TABLE = "test_interface.py::test_methods_are_implemented_or_inherited_as_the_table_says"


class Method(NamedTuple):
    """A method of a class of vLLM.

    parameters: as they are written, without self, types and results; or `PROPERTY`.
    does: what kvsm's class does, or why vLLM's own method is right for it.
    test: the test that shows it.
    since: the version that added it; empty if every tested version has it.
    inherited: whether kvsm's class has vLLM's own method.
    """

    name: str
    parameters: str
    does: str
    test: str = _TABLE
    since: str = ""
    inherited: bool = False


def inherited(name: str, parameters: str, does: str, *, since: str = "", test: str = _TABLE) -> Method:
    """A method that kvsm's class has from vLLM."""
    return Method(name, parameters, does, test, since, inherited=True)


class Interface(NamedTuple):
    """A class of vLLM and the class of kvsm that is one. module: where vLLM has it."""

    module: str
    ours: tuple[str, str]
    """(module, class)."""
    methods: tuple[Method, ...]


class Record(NamedTuple):
    """A record that crosses the interface. later: a field -> the version that added it."""

    name: str
    fields: tuple[str, ...]
    later: Mapping[str, str] = {}
