"""Run the proofs: contracts are confirmed, compiled tables equal their rows, contracts with seeded bugs are
refuted.

CrossHair's command line exits 0 for "not confirmed" and for a precondition that no argument meets. Here only
CONFIRMED over all paths counts as a proof, and only a counterexample as a refutation, not a crash.

    PYTHONPATH=specs python -m contracts.prove
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import import_module
from inspect import getmembers, isfunction
from time import perf_counter
from typing import Any

import crosshair.core_and_libs  # noqa: F401  (teaches CrossHair the standard library)
from crosshair.core import AnalysisMessage, MessageType, analyze_function, run_checkables
from crosshair.diff_behavior import diff_behavior
from crosshair.fnutil import FunctionInfo
from crosshair.options import DEFAULT_OPTIONS, AnalysisOptionSet

from contracts.bugs import BUGS
from contracts.tables import PAIRS

Function = Callable[..., Any]
MODULES = ("block", "transfer", "lease", "request", "tables", "words", "runs", "paths", "tokens", "matching")
SECONDS = 120.0
"""The time limit of one condition (s): many times what is needed, because a timeout proves nothing."""


def contracts() -> dict[str, Function]:
    """All functions with a postcondition, as `module.function`."""
    return {
        f"{name}.{function}": value
        for name in MODULES
        for function, value in getmembers(import_module(f"contracts.{name}"), isfunction)
        if value.__module__ == f"contracts.{name}" and "post:" in (value.__doc__ or "")
    }


def answers(contract: Function) -> Iterator[AnalysisMessage]:
    """CrossHair's answers to each postcondition, in order."""
    options = AnalysisOptionSet(report_all=True, per_condition_timeout=SECONDS, per_path_timeout=SECONDS / 4)
    for condition in analyze_function(contract, options):
        yield from run_checkables([condition])


def doubts(contract: Function) -> list[str]:
    """CrossHair's answers other than CONFIRMED; empty if the contract is proved."""
    wanted = (contract.__doc__ or "").count("post:")
    given = list(answers(contract))
    doubts = [f"{one.state.value}: {one.message}" for one in given if one.state is not MessageType.CONFIRMED]
    if len(given) != wanted:
        doubts.append(f"{len(given)} answers to {wanted} postconditions")
    return doubts


def counterexample(contract: Function) -> str | None:
    """Arguments for which a postcondition is false; None if none was found, or if the code crashed."""
    for one in answers(contract):
        if one.state is not MessageType.CONFIRMED:
            return one.message if one.state is MessageType.POST_FAIL else None
    return None


def differences(first: Function, second: Function) -> list[str] | None:
    """The arguments for which two functions differ.

    Empty if they agree on all paths through both, taken from either side. None if there was no time for all
    paths.
    """
    taken: Counter[str] = Counter()
    options = DEFAULT_OPTIONS.overlay(
        AnalysisOptionSet(per_condition_timeout=2 * SECONDS, per_path_timeout=SECONDS / 4, stats=taken)
    )
    found = diff_behavior(FunctionInfo.from_fn(first), FunctionInfo.from_fn(second), options)
    if isinstance(found, str):
        raise RuntimeError(found)
    if found:
        return [str(one.args) for one in found]
    return [] if taken["exhaustion"] == 2 else None


def main() -> int:
    """Print a line for each proof. Returns 0 if all succeed."""
    wrong = 0

    def report(name: str, holds: bool, word: str, since: float) -> None:
        nonlocal wrong
        wrong += not holds
        print(f"{word if holds else 'NOT ' + word:14} {perf_counter() - since:6.2f} s  {name}", flush=True)

    for name, contract in contracts().items():
        since = perf_counter()
        report(name, not doubts(contract), "confirmed", since)
    for first, second in PAIRS:
        since = perf_counter()
        report(f"{first.__name__} and {second.__name__}", differences(first, second) == [], "equal", since)
    for bug in BUGS:
        since = perf_counter()
        with bug.planted():
            found = counterexample(contracts()[bug.contract])
        report(f"{bug.contract}: {bug.what}", found is not None, "refuted", since)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
