"""Find the target of a name: a world of kvsm, or the user's own world or Hypothesis machine."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any, TypeVar
from unittest import TestCase

import click
from click.shell_completion import CompletionItem

from kvsm.check.walks.failures import FILE, SavedFailure, load
from kvsm.check.walks.fuzz_target import FuzzTarget, WorldTarget
from kvsm.check.walks.option_trust import allowing
from kvsm.check.walks.own_code import KINDS, find_own, is_path, make_own_world
from kvsm.check.walks.targets import PATH_FORM, TARGETS
from kvsm.errors import ConfigError, described

Documented = TypeVar("Documented", bound=Callable[..., Any])
_TARGETS_HERE = re.compile(r"^( *)TARGETS\n", re.MULTILINE)
"""Python 3.13 and later remove the indentation of docstrings."""


def names_targets(command: Documented) -> Documented:
    """Replace the line TARGETS of a command's docstring by the targets and their descriptions."""
    rows = "".join(rf"\g<1>{name:<15}{one.says}\n" for name, one in TARGETS.items())
    command.__doc__ = _TARGETS_HERE.sub(rows, command.__doc__ or "")
    return command


class TargetName(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """The name of a target, or an import path, which is imported later."""

    name = "target"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the name. Fails if it is neither a target nor an import path."""
        try:
            check_name(value)
        except ConfigError as error:
            self.fail(f"{error}.", param, ctx)
        return str(value)

    def shell_complete(
        self,
        ctx: click.Context,  # noqa: ARG002
        param: click.Parameter,  # noqa: ARG002
        incomplete: str,
    ) -> list[CompletionItem]:
        """Complete the name of one of kvsm's own targets."""
        says = {**{name: one.says for name, one in TARGETS.items()}, "all": "all of these"}
        return [CompletionItem(name, help=says[name]) for name in says if name.startswith(incomplete)]


def check_name(name: str) -> None:
    """Raise `ConfigError` for a name that is neither a target of kvsm nor an import path."""
    if name not in (*TARGETS, "all") and not is_path(name):
        raise ConfigError(f"{name!r} is not one of {', '.join(TARGETS)}, all, and no {PATH_FORM}")


def target_of(name: str) -> FuzzTarget:
    """Return the target of this name. Raises `ConfigError` if its code is missing or of the wrong kind."""
    if not is_path(name):
        return WorldTarget(name)
    thing = find_own(name)
    if _is_machine(thing):
        _check_machine(name, thing)
        return _machine_target(name, thing)
    if isinstance(thing, type) and issubclass(thing, TestCase):
        raise ConfigError(f"target {name} is a TestCase; name the machine that it was made from: {KINDS}")
    make_own_world(name, Random(0))
    return WorldTarget(name)


def _is_machine(thing: Any) -> bool:
    """Whether `thing` is a machine of Hypothesis. Compares names, so that Hypothesis is not imported here."""
    base = "hypothesis.stateful", "RuleBasedStateMachine"
    return isinstance(thing, type) and base in [(one.__module__, one.__name__) for one in thing.__mro__]


def _check_machine(name: str, machine: Any) -> None:
    """Raise `ConfigError` if the machine cannot be made: in a run, this would count as a broken property."""
    try:
        made = machine()
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        why = f"target {name} cannot be made: {machine.__name__}() raised {described(error)}"
        if not _takes_no_arguments(machine):
            why += (
                ". Hypothesis makes each machine without arguments: give the parameters of __init__ default "
                "values, or name a subclass whose __init__ passes them"
            )
        raise ConfigError(why) from error
    with suppress(Exception):  # Hypothesis never ends a machine of which no rule has run.
        made.teardown()


def _takes_no_arguments(machine: Any) -> bool:
    """Whether the machine can be called without arguments."""
    try:
        inspect.signature(machine).bind()
    except TypeError:
        return False
    return True


def _machine_target(name: str, machine: Any) -> FuzzTarget:
    from kvsm.testing.machine_target import MachineTarget  # only here: it imports Hypothesis

    return MachineTarget(name, machine)


class ConnectorConfig(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """A connector's options, as a JSON object."""

    name = "json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, Any]:
        """Parse the value. Fails unless it is a JSON object."""
        if isinstance(value, dict):
            return value
        try:
            extra = json.loads(value)
        except json.JSONDecodeError as error:
            self.fail(f"not JSON: {error}", param, ctx)
        if not isinstance(extra, dict):
            self.fail(f'give an object, as {{"store_threshold": 2}}, and not {value}', param, ctx)
        return extra


def saved_target(
    failure: SavedFailure, directory: Path, given: str | None, allowed: Mapping[str, Collection[Any]]
) -> FuzzTarget:
    """Return the target of a saved failure.

    given: import path of the user's own code that may run (`--target`); None if not given.
    allowed: for each kind of option that may name code or paths, the values that the user allows.

    Raises `ConfigError` for anything else: a file must not choose which code runs, or where it writes.
    """
    if not is_path(failure.target):
        if given is not None:
            raise ConfigError(f"{directory / FILE}: is a failure of {failure.target}; leave out --target")
        load(directory, allowed)
        return WorldTarget(failure.target)
    if given != failure.target:
        raise ConfigError(
            f"{directory / FILE}: to repeat it runs the code of {failure.target}; if you trust it, allow "
            f"that: --target {failure.target}"
        )
    return target_of(failure.target)


def replay_command(failure: SavedFailure, directory: str | Path | None) -> str:
    """Return the command that repeats a saved failure, with the options that allow its code."""
    if is_path(failure.target):
        return f"kvsm fuzz --replay {directory} --target {failure.target}"
    return f"kvsm fuzz --replay {directory}{allowing(failure.case().options)}"
