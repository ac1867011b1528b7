"""Import the user's own world or machine by its path, `package.module:name`."""

from __future__ import annotations

import inspect
import os
import sys
from importlib import import_module
from random import Random
from typing import Any

from kvsm.check.worlds.world import World
from kvsm.errors import ConfigError, described
from kvsm.system.annotations import shown

KINDS = "a function that makes a World from a Random, a class of worlds, or a RuleBasedStateMachine"
"""The things that a path may name."""


def is_path(target: str) -> bool:
    """Whether this is an import path rather than the name of a target of kvsm."""
    return ":" in target


def find_own(path: str) -> Any:
    """Import `package.module:name`. Modules of the current directory are found, as with `python -m`.

    Raises `ConfigError`, which says what is missing and where it was searched for.
    """
    module_name, _, name = path.partition(":")
    if not (module_name and name):
        raise ConfigError(f"target {path!r}: give package.module:name, where name is {KINDS}")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"target {path}: importing {module_name} failed: {error}; install it"
            ) from error
        raise ConfigError(
            f"target {path}: there is no module {error.name}; it was looked for in {here} and among the "
            f"installed packages of {sys.executable}. Call kvsm where the module is, or install its package"
        ) from error
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        raise ConfigError(f"target {path}: importing {module_name} raised {described(error)}") from error
    try:
        return getattr(module, name)
    except AttributeError:
        has = [
            one for one in vars(module) if not one.startswith("_") and _may_be(getattr(module, one), module)
        ]
        listed = f"; it has {', '.join(has[:8])}" if has else ""
        raise ConfigError(f"target {path}: {module.__file__} has no {name}{listed}. Name {KINDS}") from None


def _may_be(thing: Any, module: Any) -> bool:
    return callable(thing) and getattr(thing, "__module__", None) == module.__name__


def where(thing: Any) -> tuple[str, int] | None:
    """(file, line) of a class or function; None if it has no source file.

    The file is relative to the current directory if it is below it.
    """
    try:
        file, (_, line) = inspect.getsourcefile(thing), inspect.getsourcelines(thing)
    except (OSError, TypeError):
        return None
    if file is None:
        return None
    return shown(file), max(line, 1)


def make_own_world(path: str, random: Random) -> World:
    """Create a world with the user's code. Raises `ConfigError` if the code fails or creates no world."""
    make = find_own(path)
    if not callable(make):
        raise ConfigError(f"target {path} is {type(make).__name__} {make!r:.60}, not {KINDS}")
    try:
        world = make(random)
    except Exception as error:  # the user's code may raise anything
        raise ConfigError(
            f"target {path} cannot make a world: {path.partition(':')[2]}(random) raised {described(error)}. "
            f"It must be {KINDS}"
        ) from error
    missing = [name for name in _METHODS if not hasattr(world, name)]
    if missing:
        raise ConfigError(
            f"target {path} makes {type(world).__name__}, which is no World: it lacks {', '.join(missing)}; "
            "see kvsm.check.worlds.world.World"
        )
    return world  # type: ignore[no-any-return]


_METHODS = tuple(name for name in vars(World) if not name.startswith("_"))
