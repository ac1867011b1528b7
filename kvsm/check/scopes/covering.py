"""A covering array: few choices of many parameters in which every two values meet, or every three.

Most faults of software need one, two or three particular values, and not a particular choice of all (Kuhn,
Wallace and Gallo, 2004). So a family of scopes in which every two values of two parameters meet sees most of
what all choices would see, and is smaller by many orders of magnitude.

The rows are chosen greedily, as in AETG (Cohen, Dalal, Fredman and Patton, 1997). A row begins with the first
values that met in no row yet. Then each other parameter, in its order, takes the value that adds the most
such meetings. A fixed seed decides between equal values, so the same parameters give the same rows every day.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations, product
from random import Random
from typing import Any

from kvsm.errors import ConfigError

Choice = tuple[int, int]
"""(parameter, value), each by its place in its sequence."""

Choices = tuple[Choice, ...]
"""Values of some parameters, the earlier parameters first."""

Excluded = Callable[[Mapping[str, Any]], bool]
"""Whether two values, each under the name of its parameter, can never be chosen together."""


def covering(
    parameters: Mapping[str, Sequence[Any]], excluded: Excluded, strength: int = 2
) -> list[dict[str, Any]]:
    """Rows that choose one value of each parameter.

    strength: any values of this many parameters meet in some row, unless two of the values are excluded.

    Raises `ConfigError` if values that must meet fit in no row.
    """
    names, sizes = list(parameters), [len(values) for values in parameters.values()]

    def value(choice: Choice) -> Any:
        return parameters[names[choice[0]]][choice[1]]

    allowed = {
        pair
        for pair in _meetings(sizes, 2)
        if not excluded({names[choice[0]]: value(choice) for choice in pair})
    }
    met = (one for one in _meetings(sizes, strength) if allowed.issuperset(combinations(one, 2)))
    left, rows = dict.fromkeys(met), []
    chance = Random(1)
    while left:
        first = next(iter(left))
        row = _completed(dict(first), sizes, allowed, left, strength, chance)
        if row is None:
            described = " and ".join(f"{names[choice[0]]} {value(choice)!r}" for choice in first)
            raise ConfigError(f"no row can have {described}; exclude this pair, or less")
        for covered in combinations(sorted(row.items()), strength):
            left.pop(covered, None)
        rows.append({name: value((number, row[number])) for number, name in enumerate(names)})
    return rows


def _meetings(sizes: Sequence[int], strength: int) -> list[Choices]:
    """Return every choice of values for every `strength` parameters, sorted."""
    numbers = combinations(range(len(sizes)), strength)
    return sorted(one for some in numbers for one in product(*(_choices(n, sizes) for n in some)))


def _choices(number: int, sizes: Sequence[int]) -> Iterable[Choice]:
    return ((number, place) for place in range(sizes[number]))


def _completed(
    row: dict[int, int],
    sizes: Sequence[int],
    allowed: set[Choices],
    left: Mapping[Choices, None],
    strength: int,
    chance: Random,
) -> dict[int, int] | None:
    """The row with a value for every parameter; None if there is none. Backtracks at a dead end."""
    number = next((one for one in range(len(sizes)) if one not in row), None)
    if number is None:
        return row
    gains = []
    for choice in _choices(number, sizes):
        if allowed.issuperset((min(choice, chosen), max(choice, chosen)) for chosen in row.items()):
            some = combinations(sorted(row.items()), strength - 1)
            gain = sum(tuple(sorted((*others, choice))) in left for others in some)
            gains.append((-gain, chance.random(), choice[1]))
    for _, _, place in sorted(gains):
        whole = _completed({**row, number: place}, sizes, allowed, left, strength, chance)
        if whole is not None:
            return whole
    return None
