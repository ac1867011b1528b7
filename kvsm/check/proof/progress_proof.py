"""Progress (S9) for any size: winding down ends, and ends at rest.

The rank of a declaration is a sum of sizes of sets. No draining action makes one of these sets larger, and
each makes at least one smaller. So winding down ends. Where the state is not at rest, some draining action
is possible. So it ends at rest.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvsm.check.proof.conditions import Condition, Induction, Step, Taken, variables_read
from kvsm.check.proof.rewriting import conjuncts
from kvsm.check.proof.smt import Given
from kvsm.check.protocol.terms import Add, Exists, ForAll, Not, Param, Term, Total
from kvsm.properties import Property

NAME = str(Property.PROGRESS)
WINDING_DOWN = "winding down"
"""The name in place of a step, in the conditions that some draining action is possible."""

RankedSet = tuple[tuple[Param, ...], Term]
"""(parameters, condition): the set of the values of these parameters that meet the condition."""


def ranked_sets(rank: Term) -> Iterator[RankedSet]:
    """The sets whose sizes make up a rank. Raises `TypeError` if it is no sum of sizes."""
    match rank:
        case Add(terms):
            for one in terms:
                yield from ranked_sets(one)
        case Total(param, body) if isinstance(body, Total):
            for params, counted in ranked_sets(body):
                yield (param, *params), counted
        case Total(param, body):
            yield (param,), body
        case _:
            raise TypeError(f"{rank} is no sum of the sizes of sets")


class ProgressProof:
    """The conditions of progress for one declaration."""

    def __init__(self, induction: Induction) -> None:
        self._induction, self._writer = induction, induction.writer
        self._sets = list(ranked_sets(induction.declared.rank))
        self._draining = [action for action in induction.declared.actions if action.drains]

    def kept(self, step: Step) -> Iterator[Condition]:
        """No set grows by a draining action or a forget, and a draining action makes one smaller."""
        drains = step.name in {action.name for action in self._draining}
        if not (drains or step.forgets):
            return
        taken = self._induction.taken(step)
        changed = [one for one in self._sets if variables_read(one[1]) & set(step.assigned)]
        yield from (self._grows(taken, one) for one in changed)
        if drains:
            yield self._asked(
                step.name, taken.text + "".join(self._not_smaller(taken, one) for one in changed)
            )

    def at_rest(self) -> Iterator[Condition]:
        """Where the state is not at rest, some draining action is possible."""
        earlier = ""
        for part in conjuncts(self._induction.declared.rest):
            yield self._asked(WINDING_DOWN, earlier + self._stuck(part))
            # Assume the earlier parts of rest: an earlier condition covers the states in which they fail.
            earlier += f"(assert {self._writer.say(part)})\n"

    def _stuck(self, part: Term) -> str:
        """Assert that a part of rest fails for some member, which no draining action applies to."""
        lines, given, term = self._induction.some_case(part)
        guards = [action.guard for action in self._draining]
        self._induction.name_words(guards, given, lines)
        for action in self._draining:
            impossible: Term = Not(action.guard)
            for param in action.params:
                if param not in given:
                    impossible = ForAll(param, impossible)
            lines.append(f"(assert {self._writer.say(impossible, given=given)})")
        lines.append(f"(assert (not {self._writer.say(term, given=given)}))")
        return "\n".join(lines) + "\n"

    def _grows(self, taken: Taken, counted: RankedSet) -> Condition:
        """Assert that the set has a member after the step that it did not have before."""
        params, body = counted

        def gained(bound: Given) -> str:
            was, now = self._writer.say(body, given=bound), self._writer.say(body, taken.names, bound)
            return f"(and {now} (not {was}))"

        text = self._writer.over(Exists, list(params), gained)
        return self._asked(taken.step.name, f"{taken.text}(assert {text})\n")

    def _not_smaller(self, taken: Taken, counted: RankedSet) -> str:
        """Assert that the set has after the step every member that it had before."""
        params, body = counted

        def kept(bound: Given) -> str:
            was, now = self._writer.say(body, given=bound), self._writer.say(body, taken.names, bound)
            return f"(or {now} (not {was}))"

        return f"(assert {self._writer.over(ForAll, list(params), kept)})\n"

    def _asked(self, step: str, text: str) -> Condition:
        return self._induction.condition(step, NAME, text)
