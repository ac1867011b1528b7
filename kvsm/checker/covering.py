"""A covering array: few choices of many parameters in which every pair of values meets.

Most faults of software need one or two particular values, and not a particular choice of all (Kuhn, Wallace
and Gallo, 2004). So a family of scopes in which every two values of two parameters meet sees most of what all
choices would see, and is smaller by many orders of magnitude.

The rows are chosen greedily, as in AETG (Cohen, Dalal, Fredman and Patton, 1997). A row begins with the first
pair that is in no row yet. Then each other parameter, in its order, takes the value that adds the most such
pairs. A fixed seed decides between equal values, so the same parameters give the same rows every day.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations, product
from random import Random
from typing import Any

from kvsm.errors import ConfigError

Choice = tuple[int, int]
"""A value of a parameter: the places of both."""

Pair = tuple[Choice, Choice]
"""Values of two parameters, the earlier parameter first."""

Excluded = Callable[[Mapping[str, Any]], bool]
"""Whether two values, each under the name of its parameter, can never be chosen together."""


def covering(parameters: Mapping[str, Sequence[Any]], excluded: Excluded) -> list[dict[str, Any]]:
    """Rows that choose one value of each parameter. Every pair of values is in a row, unless it is excluded.

    Raises `ConfigError` if a pair can be in no row.
    """
    names, sizes = list(parameters), [len(values) for values in parameters.values()]

    def value(choice: Choice) -> Any:
        return parameters[names[choice[0]]][choice[1]]

    allowed = {
        (one, other)
        for first, second in combinations(range(len(names)), 2)
        for one, other in product(_choices(first, sizes), _choices(second, sizes))
        if not excluded({names[first]: value(one), names[second]: value(other)})
    }
    left, rows = dict.fromkeys(sorted(allowed)), []
    chance = Random(1)
    while left:
        pair = next(iter(left))
        row = _completed(dict(pair), sizes, allowed, left, chance)
        if row is None:
            told = " and ".join(f"{names[one]} {value((one, place))!r}" for one, place in pair)
            raise ConfigError(f"no row can have {told}; exclude this pair, or less")
        for covered in combinations(sorted(row.items()), 2):
            left.pop(covered, None)
        rows.append({name: value((number, row[number])) for number, name in enumerate(names)})
    return rows


def _choices(number: int, sizes: Sequence[int]) -> Iterable[Choice]:
    return ((number, place) for place in range(sizes[number]))


def _completed(
    row: dict[int, int], sizes: Sequence[int], allowed: set[Pair], left: Mapping[Pair, None], chance: Random
) -> dict[int, int] | None:
    """The row with a value for every parameter; None if there is none. It goes back where it is stuck."""
    number = next((one for one in range(len(sizes)) if one not in row), None)
    if number is None:
        return row
    gains = []
    for choice in _choices(number, sizes):
        pairs = [(min(choice, chosen), max(choice, chosen)) for chosen in row.items()]
        if allowed.issuperset(pairs):
            gains.append((-sum(pair in left for pair in pairs), chance.random(), choice[1]))
    for _, _, place in sorted(gains):
        whole = _completed({**row, number: place}, sizes, allowed, left, chance)
        if whole is not None:
            return whole
    return None
