"""The solvers: z3 and cvc5 get the same texts.

A solver may find that a text cannot be satisfied (the condition holds), that it can (it fails), or nothing
within its limits. Each condition has several attempts: fewer or all hypotheses, and other ways to choose what
is instantiated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from importlib.util import find_spec

from kvsm.check.proof.conditions import Condition
from kvsm.errors import ConfigError


class Answer(Enum):
    """A solver's answer for a condition."""

    HOLDS = "holds"
    FAILS = "fails"
    """There is a model: a state that keeps all hypotheses, and a step that breaks the claim."""
    OPEN = "open"
    """The solver found neither a proof nor a model within its limits."""


@dataclass(frozen=True)
class Attempt:
    """One attempt to prove a condition.

    text: the place of the text among the condition's texts; the last one has all hypotheses.
    options: options of the solver.
    effort: the limit in the solver's own units of work, so that a busy machine changes no answer.
    """

    text: int
    options: Mapping[str, str | float | bool]
    effort: int


Ask = Callable[[str, Attempt], Answer]


@dataclass(frozen=True)
class Solver:
    """A solver. package: the module that must be installed."""

    name: str
    package: str
    ask: Ask
    attempts: tuple[Attempt, ...]

    def answer(self, condition: Condition) -> Answer:
        """Try the attempts in order until one decides. Only a text with all hypotheses can fail."""
        for attempt in self.attempts:
            found = self.ask(condition.texts[attempt.text], attempt)
            if found is Answer.HOLDS:
                return found
            if found is Answer.FAILS and condition.texts[attempt.text] == condition.texts[-1]:
                return found
        return Answer.OPEN


def _ask_z3(text: str, attempt: Attempt) -> Answer:
    import z3

    # A new context for each question: the answer must not depend on earlier ones.
    solver = z3.Solver(ctx=z3.Context())
    solver.set("rlimit", attempt.effort)
    for name, value in attempt.options.items():
        solver.set(name, value)
    solver.from_string(text)
    found = solver.check()
    return Answer.HOLDS if found == z3.unsat else Answer.FAILS if found == z3.sat else Answer.OPEN


def _ask_cvc5(text: str, attempt: Attempt) -> Answer:
    import cvc5

    terms = cvc5.TermManager()
    solver = cvc5.Solver(terms)
    solver.setLogic("ALL")
    solver.setOption("rlimit-per", str(attempt.effort))
    for name, value in attempt.options.items():
        solver.setOption(name, str(value).lower())
    parser = cvc5.InputParser(solver)
    parser.setStringInput(cvc5.InputLanguage.SMT_LIB_2_6, text, "condition")
    symbols = parser.getSymbolManager()
    while not (command := parser.nextCommand()).isNull():
        command.invoke(solver, symbols)
    found = solver.checkSat()
    return Answer.HOLDS if found.isUnsat() else Answer.FAILS if found.isSat() else Answer.OPEN


# By default z3 may instantiate witnesses of witnesses endlessly. With these options it stops early, at times
# too early.
_STOPS_EARLY = {"auto_config": False, "smt.mbqi": False, "smt.qi.eager_threshold": 3.0}
SOLVERS = {
    "z3": Solver(
        "z3",
        "z3",
        _ask_z3,
        (
            Attempt(0, _STOPS_EARLY, 8_000_000),
            Attempt(-1, _STOPS_EARLY, 12_000_000),
            Attempt(0, {}, 20_000_000),
            Attempt(-1, {}, 20_000_000),
        ),
    ),
    "cvc5": Solver(
        "cvc5",
        "cvc5",
        _ask_cvc5,
        (Attempt(-1, {"enum-inst": True}, 1_000_000), Attempt(0, {"enum-inst": True}, 1_000_000)),
    ),
}
"""A proof needs at most 3,000,000 of z3's units at present, a second; and 30,000 of cvc5's, a tenth."""


def chosen_solvers(name: str) -> tuple[Solver, ...]:
    """The solver of this name, or both. Raises `ConfigError` if it is not installed."""
    chosen = tuple(SOLVERS.values()) if name == "both" else (SOLVERS[name],)
    for solver in chosen:
        if find_spec(solver.package) is None:
            raise ConfigError(
                f"{solver.name} is not installed: pip install 'kvsm[proof]', or choose another --solver"
            )
    return chosen
