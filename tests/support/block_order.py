"""Which blocks go before others, computed from the definition."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence


def post_order(
    parent_of: Mapping[int, int | None], victims: Sequence[int], kept: Collection[int]
) -> list[int]:
    """The victims, each after the blocks behind it that may go. By its definition, with recursion."""
    chosen = list[int]()

    def go(slot: int) -> None:
        for child in sorted(child for child, parent in parent_of.items() if parent == slot):
            if child not in kept and child not in chosen:
                go(child)
        if slot not in chosen:
            chosen.append(slot)

    for victim in victims:
        go(victim)
    return chosen[: len(victims)]
