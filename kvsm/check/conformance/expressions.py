"""Terms as Python expressions on cells."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from kvsm.check.conformance.cells import Member, ProtocolCells
from kvsm.check.conformance.formulas import demands
from kvsm.check.protocol.terms import (
    Add,
    After,
    And,
    Const,
    CounterOf,
    Equal,
    Exists,
    ForAll,
    If,
    InState,
    Less,
    Minus,
    Not,
    OneOf,
    Or,
    Param,
    Read,
    Term,
    Total,
    Words,
    domain_of,
    words_of,
)


def named(param: Param) -> str:
    """The Python name of a parameter."""
    return f"p_{param.name}"


class ExpressionWriter:
    """Writes expressions, and before them the lines that compute what several of them share.

    lines: the lines so far.
    depth: how far the next line is indented.
    known: terms whose values are in a local variable.
    namespace: the names that the lines use.
    """

    def __init__(self, cells: Mapping[str, ProtocolCells], members: Mapping[str, Sequence[Member]]) -> None:
        self.cells, self.members = cells, members
        self.lines: list[str] = []
        self.depth = 0
        self.known: dict[Term, str] = {}
        self.namespace: dict[str, Any] = {}
        self._bound: frozenset[Param] = frozenset()
        """The parameters that the expression around binds."""
        self._locals = 0

    # Lines.

    def emit(self, line: str) -> None:
        """Add a line."""
        self.lines.append("    " * self.depth + line)

    @contextmanager
    def indented(self) -> Iterator[None]:
        """One level deeper."""
        self.depth += 1
        yield
        self.depth -= 1

    @contextmanager
    def binding(self, *params: Param) -> Iterator[None]:
        """Inside an expression that binds these parameters."""
        before = self._bound
        self._bound = before | set(params)
        yield
        self._bound = before

    def fresh(self) -> str:
        """A new local name."""
        self._locals += 1
        return f"v{self._locals}"

    def part(self, variable: str, what: str) -> str:
        """The name of a part of a variable's cells: a method, or its initial value."""
        name = f"{variable}_{what}"
        cells = self.cells[variable]
        # A look-up in the dict itself is the quickest way to a value.
        self.namespace[name] = cells.values.get if what == "get" else getattr(cells, what)
        return name

    def key(self, read: Read) -> str:
        """The cell that is read."""
        said = [self.said(one) for one in read.indices]
        return said[0] if len(said) == 1 else f"({', '.join(said)})"

    def filters(self, conditions: Sequence[Term]) -> str:
        """` if a and b`, for a comprehension."""
        return "".join(f" if {self.said(one)}" for one in conditions)

    # Expressions.

    def said(self, term: Term) -> str:
        """The term as an expression. What is asked twice, or before a loop, has a line of its own."""
        free = not self._bound.isdisjoint(term.free_params)
        if free or isinstance(term, Const | Param):
            return self._said(term)
        if isinstance(term, Read | After) or self._bound:
            if term not in self.known:
                with self._unbound():
                    text = self._said(term)
                local = self.fresh()
                self.emit(f"{local} = {text}")
                self.known[term] = local
            return self.known[term]
        return self._said(term)

    @contextmanager
    def _unbound(self) -> Iterator[None]:
        before, self._bound = self._bound, frozenset()
        yield
        self._bound = before

    def _said(self, term: Term) -> str:
        match term:
            case Const():
                return self._constant(term)
            case Param():
                return named(term)
            case Read(variable, _):
                get, first = self.part(variable.name, "get"), self.part(variable.name, "initial")
                return f"{get}({self.key(term)}, {first})"
            case Not(inner):
                return f"(not {self.said(inner)})"
            case And(terms):
                return f"({' and '.join(map(self.said, terms))})" if terms else "True"
            case Or(terms):
                return f"({' or '.join(map(self.said, terms))})" if terms else "False"
            case If(condition, then, otherwise):
                return f"({self.said(then)} if {self.said(condition)} else {self.said(otherwise)})"
            case Equal(left, right):
                return self._equal(left, right)
            case ForAll(param, body):
                return f"(not {self._exists(param, Not(body))})"
            case Exists(param, body):
                return self._exists(param, body)
        return self._said_of_number(term)

    def _said_of_number(self, term: Term) -> str:
        match term:
            case Less(left, right):
                return f"({self.said(left)} < {self.said(right)})"
            case Add(terms):
                return f"({' + '.join(map(self.said, terms))})"
            case Minus(left, right):
                return f"({self.said(left)} - {self.said(right)})"
            case Total(param, body):
                domain, _ = self.source(param, [])
                with self.binding(param):
                    return f"sum(int({self.said(body)}) for {named(param)} in {domain})"
            case After(trigger, word):
                step = f"{self._words(word)}_after_{trigger.name}"
                self.namespace[step] = self._table(word).after[trigger]
                return f"{step}[{self.said(word)}]"
            case InState(word, states):
                numbers = sorted(int(one) for one in states)
                asked = f"== {numbers[0]}" if len(numbers) == 1 else f"in {tuple(numbers)}"
                return f"({self.said(word)}.state {asked})"
            case CounterOf(word, name):
                names = [counter.name for counter in words_of(word).machine.counters]
                return f"{self.said(word)}.counts[{names.index(name)}]"
        raise TypeError(f"{term} is no term")

    def _equal(self, left: Term, right: Term) -> str:
        if isinstance(domain_of(left), Words):
            return f"({self.said(left)} is {self.said(right)})"
        return f"({self.said(left)} == {self.said(right)})"

    def _table(self, word: Term) -> Any:
        """The words of a word's machine."""
        domain = words_of(word)
        return next(one.words for one in self.cells.values() if one.variable.domain is domain)

    def _words(self, word: Term) -> str:
        return words_of(word).machine.name

    def _constant(self, term: Const) -> str:
        domain = term.domain
        if isinstance(domain, OneOf):
            if term.value != domain.members.size:
                raise TypeError(f"{term} names a member; a formula is about any member")
            return "None"
        if not isinstance(domain, Words):
            return str(term.value)
        table = next(one.words for one in self.cells.values() if one.variable.domain is domain)
        assert table is not None
        word = domain.words[term.value]
        name = f"{domain.machine.name}_word_{term.value}"
        self.namespace[name] = table.illegal if word is None else table.word(*word)
        return name

    # Where the members of a bound parameter come from.

    def _exists(self, param: Param, body: Term) -> str:
        wanted = demands(body)
        places = [self._places(param, one) for one in wanted]
        if len(wanted) == 2 and all(places):
            # Both sets are at hand, and the smaller one is searched.
            first, second = places
            return f"(not {first}.isdisjoint({second}))"
        domain, left = self.source(param, [one for one in wanted if param in one.free_params])
        outside = [one for one in wanted if param not in one.free_params]
        with self.binding(param):
            conditions = [self.said(one) for one in left]
            inner = f"any({' and '.join(conditions) or 'True'} for {named(param)} in {domain})"
        outer = [self.said(one) for one in outside]
        return f"({' and '.join([*outer, inner])})"

    def source(self, param: Param, wanted: Sequence[Term]) -> tuple[str, list[Term]]:
        """(the members for which all of `wanted` may hold, the terms that remain to be asked of each).

        No member comes twice. Raises `TypeError` if nothing leads to the members.
        """
        for lead in (self._itself, self._places, self._through, self._changed):
            for one in wanted:
                found = lead(param, one)
                if found is not None:
                    return found, [other for other in wanted if other is not one]
        for one in wanted:
            either = self._either(param, one)
            if either is not None:
                return either, list(wanted)
        if param.members.name in self.members:
            name = "every_" + param.members.name.replace(" ", "_")
            self.namespace[name] = self.members[param.members.name]
            return name, list(wanted)
        for one in wanted:
            support = self._supporting(param, one)
            if support is not None:
                return support, list(wanted)
        raise TypeError(
            f"nothing leads to the members of {param.name}, and {param.members.name} has no bound"
        )

    def _itself(self, param: Param, wanted: Term) -> str | None:
        """`s = term`."""
        if isinstance(wanted, Equal):
            for one, other in ((wanted.left, wanted.right), (wanted.right, wanted.left)):
                if one == param and param not in other.free_params:
                    self.namespace["one_member"] = _one_member
                    return f"one_member({self.said(other)})"
        return None

    def _places(self, param: Param, wanted: Term) -> str | None:
        """`variable[s] = term`."""
        if isinstance(wanted, Equal):
            for one, other in ((wanted.left, wanted.right), (wanted.right, wanted.left)):
                if (
                    isinstance(one, Read)
                    and one.indices == (param,)
                    and isinstance(one.variable.domain, OneOf)
                    and param not in other.free_params
                ):
                    name = one.variable.name
                    self.cells[name].index()
                    return f"{self.part(name, 'where')}({self.said(other)})"
        return None

    def _changed(self, param: Param, wanted: Term) -> str | None:
        """`variable[s] ≠ its initial value`."""
        match wanted:
            case Not(Equal(Read(variable, indices), Const(_, value))):
                if indices == (param,) and value == variable.domain.initial:
                    return self.part(variable.name, "values")
        return None

    def _supporting(self, param: Param, wanted: Term) -> str | None:
        """A demand that does not hold of a cell's initial value."""
        match wanted:
            case Equal(Read(variable, indices), Const(_, value)):
                if indices == (param,) and value != variable.domain.initial:
                    return self.part(variable.name, "values")
            case InState(Read(variable, indices), states):
                if indices == (param,) and self.cells[variable.name].initial.state not in states:
                    return self.part(variable.name, "values")
        return None

    def _either(self, param: Param, wanted: Term) -> str | None:
        """A demand that one of several terms holds. Each of them leads to members."""
        if not isinstance(wanted, Or):
            return None
        try:
            sources = [self.source(param, demands(one))[0] for one in wanted.terms]
        except TypeError:
            return None
        return f"{{{', '.join(f'*{one}' for one in sources)}}}"

    def _through(self, param: Param, wanted: Term) -> str | None:
        """A demand that there is some other member from which this one follows."""
        if not isinstance(wanted, Exists):
            return None
        inner = demands(wanted.body)
        before = [one for one in inner if param not in one.free_params]
        after = [one for one in inner if param in one.free_params]
        try:
            domain, left = self.source(wanted.param, before)
            with self.binding(wanted.param):
                reached, remaining = self.source(param, after)
                with self.binding(param):
                    first, then = self.filters(left), self.filters(remaining)
        except TypeError:
            return None
        return (
            f"{{{named(param)} for {named(wanted.param)} in {domain}{first} "
            f"for {named(param)} in {reached}{then}}}"
        )


def _one_member(value: Any) -> tuple[Any, ...]:
    """The member, or nothing for "none"."""
    return () if value is None else (value,)
