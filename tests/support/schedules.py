"""Run a small scenario once for each possible sequence of choices."""

from __future__ import annotations

from collections.abc import Callable

Choose = Callable[[int], int]


def every_schedule(run: Callable[[Choose], None]) -> int:
    """Run all schedules depth first, each from the start. Returns their number."""
    path: list[list[int]] = []
    """For each choice so far: the chosen option, and the number of options."""
    schedules = 0
    while True:
        place = 0

        def choose(options: int) -> int:
            nonlocal place
            if place == len(path):
                path.append([0, options])
            assert path[place][1] == options, "the same choices did not lead to the same place"
            place += 1
            return path[place - 1][0]

        run(choose)
        assert place == len(path), "the same choices did not lead to the same place"
        schedules += 1
        while path and path[-1][0] + 1 == path[-1][1]:
            path.pop()
        if not path:
            return schedules
        path[-1][0] += 1
