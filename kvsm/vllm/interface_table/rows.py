"""The rows of these tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

PROPERTY = "property"
"""Used instead of parameters for a property."""

_TABLE = "test_interface.py::test_methods_are_implemented_or_inherited_as_the_table_says"


class Method(NamedTuple):
    """A method of a class of vLLM.

    parameters: as in the source, without self, types and results; or `PROPERTY`.
    does: what kvsm's class does, or why the method inherited from vLLM is right for it.
    test: the test that shows it.
    since: the version that added it; empty if every tested version has it.
    inherited: whether kvsm's class inherits vLLM's method.
    """

    name: str
    parameters: str
    does: str
    test: str = _TABLE
    since: str = ""
    inherited: bool = False


def inherited(name: str, parameters: str, does: str, *, since: str = "", test: str = _TABLE) -> Method:
    """Return the row of a method that kvsm's class inherits from vLLM."""
    return Method(name, parameters, does, test, since, inherited=True)


class Interface(NamedTuple):
    """A class of vLLM, and kvsm's subclass or implementation of it. module: the module of vLLM's class."""

    module: str
    ours: tuple[str, str]
    """(module, class)."""
    methods: tuple[Method, ...]


class Record(NamedTuple):
    """A record that crosses the interface. later: a field -> the version that added it."""

    name: str
    fields: tuple[str, ...]
    later: Mapping[str, str] = {}
