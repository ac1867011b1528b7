"""The conditions of a proof by induction: each claim holds at first, and each action keeps each claim."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from kvsm.checker.induction.speak import (
    Speaker,
    domain_sort,
    label_name,
    none_name,
    sort_name,
    state_name,
    words_sort,
)
from kvsm.checker.protocol.terms import (
    Action,
    Assign,
    Claim,
    Declaration,
    Each,
    Effect,
    ForAll,
    Labels,
    OneOf,
    Param,
    Read,
    Term,
    Variable,
    Words,
)


@dataclass(frozen=True)
class Condition:
    """One question to a solver. It holds if the text cannot be satisfied."""

    action: str
    claim: str
    text: str


def assigns(effects: tuple[Effect, ...], bound: tuple[Param, ...] = ()) -> Iterator[tuple[tuple[Param, ...], Assign]]:
    for effect in effects:
        if isinstance(effect, Each):
            yield from assigns(effect.effects, (*bound, effect.param))
        else:
            yield bound, effect


class Induction:
    def __init__(self, declared: Declaration, claims: tuple[Claim, ...]) -> None:
        self.declared, self.claims = declared, claims
        self.speaker = Speaker(declared)
        self.now = {variable.name: variable.name for variable in declared.variables}

    @cached_property
    def prelude(self) -> str:
        declared, lines = self.declared, []
        for members in declared.index_sets:
            sort, none = sort_name(members), none_name(members)
            lines += [f"(declare-sort {sort} 0)", f"(declare-const {none} {sort})"]
        kinds: dict[str, tuple[str, ...]] = {}
        for variable in declared.variables:
            domain = variable.domain
            if isinstance(domain, Labels):
                kinds[domain_sort(domain)] = tuple(label_name(domain, n) for n in range(domain.size))
            if isinstance(domain, Words):
                states = [state_name(domain, state) for state in domain.machine.states]
                kinds[words_sort(domain)] = (*states, state_name(domain, None))
        for name, values in kinds.items():
            lines.append(f"(declare-datatypes (({name} 0)) (({' '.join(f'({one})' for one in values)})))")
        for variable in declared.variables:
            sorts = " ".join(sort_name(one) for one in variable.indices)
            lines.append(f"(declare-fun {variable.name} ({sorts}) {domain_sort(variable.domain)})")
        return "\n".join(lines) + "\n"

    @cached_property
    def invariant(self) -> str:
        return "".join(f"(assert {self.said(claim.term)}) ; {claim.name}\n" for claim in self.claims)

    def said(self, term: Term, names: Mapping[str, str] | None = None) -> str:
        return self.speaker.say(term, names or self.now, {})

    def conditions(self) -> Iterator[Condition]:
        yield from self.initial()
        for action in self.declared.actions:
            yield from self.kept(action.name, action.params, action.guard, action.effects)
        for number, forget in enumerate(self.declared.forgets):
            from kvsm.checker.protocol.terms import Const
            domain = forget.cell.variable.domain
            effect = Assign(forget.cell, Const(domain, domain.initial))
            yield from self.kept(f"forget {forget.cell.variable.name}", forget.params, forget.when, (effect,))

    def initial(self) -> Iterator[Condition]:
        lines = []
        for variable in self.declared.variables:
            from kvsm.checker.protocol.terms import Const
            formals = " ".join(f"(i{n} {sort_name(one)})" for n, one in enumerate(variable.indices))
            args = " ".join(f"i{n}" for n in range(len(variable.indices)))
            value = self.speaker.say(Const(variable.domain, variable.domain.initial), self.now, {})
            lines.append(f"(assert (forall ({formals}) (= ({variable.name} {args}) {value})))")
        start = self.prelude + "\n".join(lines)
        for claim in self.claims:
            yield Condition("at first", str(claim.name), f"{start}\n(assert (not {self.said(claim.term)}))\n")

    def kept(self, name: str, params: tuple[Param, ...], guard: Term, effects: tuple[Effect, ...]) -> Iterator[Condition]:
        given = {param: f"{param.name}_taken" for param in params}
        lines = []
        for param, said in given.items():
            lines.append(f"(declare-const {said} {sort_name(param.members)})")
            lines.append(f"(assert (not (= {said} {none_name(param.members)})))")
        lines.append(f"(assert {self.speaker.say(guard, self.now, given)})")
        changed: dict[str, list[tuple[tuple[Param, ...], Assign]]] = {}
        for bound, assign in assigns(effects):
            changed.setdefault(assign.cell.variable.name, []).append((bound, assign))
        after = dict(self.now)
        for variable, all_of_it in changed.items():
            lines.append(self.define_after(all_of_it, given))
            after[variable] = f"{variable}!after"
        common = self.prelude + self.invariant + "\n".join(lines) + "\n"
        for claim in self.claims:
            if reads(claim.term) & set(changed):
                yield Condition(name, str(claim.name), f"{common}(assert (not {self.said(claim.term, after)}))\n")

    def define_after(self, changes: list[tuple[tuple[Param, ...], Assign]], given: Mapping[Param, str]) -> str:
        variable = changes[0][1].cell.variable
        formals = [f"i{n}" for n in range(len(variable.indices))]
        body = f"({variable.name} {' '.join(formals)})"
        for bound, assign in reversed(changes):
            names, conditions = dict(given), []
            for formal, index in zip(formals, assign.cell.indices):
                assert isinstance(index, Param)
                if index in bound:
                    names[index] = formal
                else:
                    conditions.append(f"(= {formal} {given[index]})")
            # Nothing is said of "none".
            value = self.speaker.say(assign.value, self.now, names)
            body = f"(ite (and {' '.join(conditions)}) {value} {body})" if conditions else value
        sorts = " ".join(f"({formal} {sort_name(one)})" for formal, one in zip(formals, variable.indices))
        return f"(define-fun {variable.name}!after ({sorts}) {domain_sort(variable.domain)} {body})"


def reads(term: Term) -> set[str]:
    found = {term.variable.name} if isinstance(term, Read) else set()
    for part in term.parts():
        found |= reads(part)
    return found
