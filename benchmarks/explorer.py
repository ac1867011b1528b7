"""Measure the explorer: states per second of its scopes, and microseconds of each piece of its work.

Each piece runs in a loop over states of the scope, so its code is in the caches. In a search the pieces
alternate, and each costs more. A piece is needed once for each action that is taken, or once for each state,
as the table says. For states that differ only in what is left of their budgets, both happen once
(`kvsm.check.explore.budgets`).

    python benchmarks/explorer.py --output benchmarks/results/explorer.md
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import click
from page import markdown_table, publish

from kvsm.check.explore.expansion import collecting_young_objects
from kvsm.check.explore.explorer import explore
from kvsm.check.explore.model import Exploration, Model
from kvsm.check.scopes import serving_scopes as serving
from kvsm.check.scopes import tier_scopes as tiers
from kvsm.check.worlds.requirement import Kind
from kvsm.core import native

SERVING = "small", "losing", "restarts", "lazy", "hybrid", "router"
TIERS = ("small",)
MOST_STATES = 2_000
"""The most states with which the pieces are measured."""
PIECES = "load", "next", "fingerprint", "actions", "check", "save"

AnyModel = Model[Any, Any]


def models() -> list[AnyModel]:
    """The models of the scopes."""
    return [
        *[serving.ServingModel(serving.SCOPES[name]) for name in SERVING],
        *[tiers.TiersModel(tiers.SCOPES[name]) for name in TIERS],
    ]


def states_of(model: AnyModel) -> list[Any]:
    """The first saved states of a search."""
    saved = [model.save(state) for state in model.initial()]
    seen = {model.fingerprint(model.load(before)) for before in saved}
    for before in saved:
        for action in model.actions(model.load(before)):
            after = model.next(model.load(before), action)
            fingerprint = after and model.fingerprint(after)
            if after is not None and fingerprint not in seen and len(seen) < MOST_STATES:
                seen.add(fingerprint)
                saved.append(model.save(after))
    return saved


def seconds_of(work: Callable[[Any], object], items: Iterable[Any]) -> float:
    """CPU seconds of `work` on all items."""
    started = time.process_time()
    for item in items:
        work(item)
    return time.process_time() - started


def pieces_of(model: AnyModel, saved: Sequence[Any]) -> dict[str, float]:
    """Piece -> CPU microseconds."""
    states = [model.load(state) for state in saved]
    moves = [(state, action) for state in saved for action in model.actions(model.load(state))]
    always = [requirement for requirement in model.requirements if requirement.kind is Kind.ALWAYS]
    after = [model.next(model.load(state), action) for state, action in moves]
    found = [state for state in after if state is not None]
    load = seconds_of(model.load, saved) / len(saved)
    seconds = {
        "load": load,
        "next": seconds_of(lambda move: model.next(model.load(move[0]), move[1]), moves) / len(moves) - load,
        "fingerprint": seconds_of(model.fingerprint, found) / len(found),
        "actions": seconds_of(lambda state: (model.actions(state), model.wind_down(state)), states)
        / len(states),
        "check": seconds_of(lambda state: [claim.holds(state) for claim in always], found) / len(found),
        "save": seconds_of(model.save, states) / len(states),
    }
    return {piece: 1e6 * spent for piece, spent in seconds.items()}


def explored(model: AnyModel) -> tuple[Exploration, float]:
    """Explore a model completely. Returns (result, CPU seconds)."""
    started = time.process_time()
    found = explore(model)
    return found, time.process_time() - started


def actions_taken(model: Any) -> int:
    """How many actions a complete exploration takes."""
    taken = 0

    class Counting(type(model)):  # type: ignore[misc]
        def next(self, state: Any, action: Any) -> Any:
            nonlocal taken
            taken += 1
            return super().next(state, action)

    explore(Counting(model.scope))
    return taken


@click.command()
@click.option("--rounds", default=5, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="Write the table here, with the command.")
def main(rounds: int, output: Path | None) -> None:
    """Measure the explorer."""
    rows = []
    for model in models():
        saved = states_of(model)
        searches = [explored(model) for _ in range(rounds)]
        with collecting_young_objects():
            measured = [pieces_of(model, saved) for _ in range(rounds)]
        click.echo(f"  {model.name}", err=True)
        found = searches[0][0]
        cpu, wall = median([one for _, one in searches]), median([one.seconds for one, _ in searches])
        rows.append(
            [
                model.name,
                f"{found.states:,}",
                f"{found.transitions:,}",
                f"{actions_taken(model):,}",
                f"{cpu:.2f}",
                f"{wall:.2f}",
                f"{found.states / cpu:,.0f}",
                f"{1e6 * cpu / found.transitions:.0f}",
                *[f"{median([one[piece] for one in measured]):.1f}" for piece in PIECES],
            ]
        )
    per = dict.fromkeys(PIECES[:3], "an action") | dict.fromkeys(PIECES[3:], "a state")
    header = [
        "scope",
        "states",
        "transitions",
        "actions taken",
        "s of CPU",
        "s of wall time",
        "states/s of CPU",
        "us a transition",
    ]
    header += [f"{piece}, us {per[piece]}" for piece in PIECES]
    note = f"one process; the body is {native.described()}; medians of {rounds} rounds"
    publish("The explorer", note, markdown_table(header, rows), output)


if __name__ == "__main__":
    main()
