"""Declares, field by field, how decision state is saved and compared.

An explorer treats two states as one if no later behaviour can differ. A proof is only as good as that
comparison, so each field of decision state declares, beside its type, how it is compared:

    @declared
    class WalkState(msgspec.Struct):
        store_budget: Annotated[int, KEPT]
        walked_at: Annotated[int, Dropped("an event number; `walk_due_in` has its effect")]

A class with an undeclared field is refused when the class is made. `declare` declares the fields of
a class from outside. `kvsm.check.worlds.fingerprint` compares by these declarations, and
`kvsm.check.worlds.saving` saves and restores by them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import get_annotations
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from kvsm.errors import ConfigError

if TYPE_CHECKING:
    from kvsm.core.ledger import Ledger

NOBODY = -1
"""The new name of an id that names nothing, or no live object."""

Class = TypeVar("Class", bound=type)


class Names:
    """The new names of ids in the canonical form of one world.

    Decisions only compare ids. So each id is replaced by its place in an order.
    """

    __slots__ = ("blocks", "keep_workers", "ledger", "requests", "slots", "transfers", "workers")

    def __init__(
        self,
        ledger: Ledger,
        requests: Mapping[str, int],
        transfers: Mapping[int, int],
        slots: Mapping[int, int],
        blocks: Mapping[int, int],
        workers: Sequence[int] = (),
    ) -> None:
        self.ledger, self.requests, self.transfers = ledger, requests, transfers
        self.slots, self.blocks = slots, blocks
        self.workers = workers or range(ledger.config.workers)
        """The workers in the order of their names."""
        self.keep_workers = not workers
        """Whether the workers keep their names."""

    def tables(self, tables: Iterable[Sequence[int]]) -> list[list[int]]:
        """Rename lists of device blocks. The null block becomes `NOBODY`."""
        get = self.blocks.get
        return [[get(block, NOBODY) for block in table] for table in tables]

    def of_each_worker(self, bits: int) -> int:
        """Rename a set of workers, given as bits."""
        if self.keep_workers:
            return bits
        return sum((bits >> worker & 1) << place for place, worker in enumerate(self.workers))


class Kept(NamedTuple):
    """Saved, and compared as it is."""


class Seen(NamedTuple):
    """Saved, and compared as `by(owner, names)`: renamed, or reduced to what decisions depend on."""

    by: Callable[[Any, Names], Any]
    is_filled: bool = False
    """Whether `by` is called only for a field that is not empty; an empty field counts as an empty list. Most
    are empty in most states."""


class Dropped(NamedTuple):
    """Saved, and not compared."""

    why: str


class Fixed(NamedTuple):
    """Neither saved nor compared: the same in all worlds of the same options."""

    why: str = "configuration"


class Part(NamedTuple):
    """Another object of the world, which declares its own fields, or None."""


class Remade(NamedTuple):
    """Neither saved nor compared: `by(owner)` makes it when the owner is restored."""

    by: Callable[[Any], Any]
    why: str


Rule = Kept | Seen | Dropped | Fixed | Part | Remade
KEPT, FIXED, PART = Kept(), Fixed(), Part()


def filled(by: Callable[[Any, Names], Any]) -> Seen:
    """Make the rule for a container for which `by` is not called while it is empty."""
    return Seen(by, is_filled=True)


STATE = Seen(lambda one, names: compared(one.state, names))
"""The rule for a field `state`, a struct that declares its own fields."""

_RULES: dict[type, Mapping[str, Rule]] = {}
_COMPARE: dict[type, Callable[[Any, Names], Any]] = {type(None): lambda _, __: None}


def declared(cls: Class) -> Class:
    """Read the declarations of a class from its annotations. Raises `ConfigError` for a field without one."""
    hints: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        hints |= get_annotations(base, eval_str=True)
    rules: dict[str, Rule] = {}
    for name, hint in hints.items():
        found = [one for one in getattr(hint, "__metadata__", ()) if isinstance(one, Rule)]
        if len(found) != 1:
            raise ConfigError(f"{cls.__name__}.{name} does not declare how it is saved and compared")
        rules[name] = found[0]
    declare(cls, **rules)
    return cls


def declare(cls: type, **rules: Rule) -> None:
    """Declare the fields of a class from outside. Raises `ConfigError` unless these are its fields."""
    fields = getattr(cls, "__struct_fields__", None) or getattr(cls, "__slots__", None)
    if fields:
        _refuse_other(cls, set(fields), set(rules))
    _RULES[cls] = rules
    # Compiled from text, as dataclasses compile their methods: it runs at every transition of a search.
    values = [_as_text(name, rule) for name, rule in rules.items() if isinstance(rule, Kept | Seen)]
    functions = {name: rule.by for name, rule in rules.items() if isinstance(rule, Seen)}
    _COMPARE[cls] = eval(f"lambda one, names: [{', '.join(values)}]", functions)


def _as_text(name: str, rule: Kept | Seen) -> str:
    if isinstance(rule, Kept):
        return f"one.{name}"
    return f"({name}(one, names) if one.{name} else ())" if rule.is_filled else f"{name}(one, names)"


def declare_alike(cls: type, base: type, **rules: Rule) -> None:
    """Declare the fields of a class that adds none to its base.

    rules: for fields that are saved in another way. All fields are compared as in the base.
    """
    _RULES[cls], _COMPARE[cls] = {**_RULES[base], **rules}, _COMPARE[base]


def compared(one: Any, names: Names) -> Any:
    """Return the canonical form of an object whose class has declared its fields; None for None."""
    return _COMPARE[type(one)](one, names)


def each_compared(objects: Iterable[object], names: Names) -> list[Any]:
    """Return `compared` of each object."""
    return [_COMPARE[type(one)](one, names) for one in objects]


def rules_of(one: object) -> Mapping[str, Rule]:
    """Return the rules of an object's fields. Raises `ConfigError` if its class has not declared just
    these."""
    cls = type(one)
    if cls not in _RULES:
        raise ConfigError(f"{cls.__name__} does not declare how its fields are saved and compared")
    if hasattr(one, "__dict__"):
        _refuse_other(cls, set(vars(one)), set(_RULES[cls]))
    return _RULES[cls]


def _refuse_other(cls: type, has: set[str], declares: set[str]) -> None:
    if has != declares:
        differing = sorted(has ^ declares)
        raise ConfigError(f"{cls.__name__}: fields and declarations differ: {', '.join(differing)}")
