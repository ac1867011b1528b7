"""Terms compiled for numpy: parameters given, quantifiers written out, equal parts shared.

What is left of a term is a node that works on columns: arrays with one entry for each of many states. A chain
of steps and comparisons that depends on one column becomes one table of that column's values (`TableNode`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsm.check.protocol.cell_layout import Binding, CellLayout
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
    Or,
    Param,
    Read,
    Term,
    Total,
    Words,
    domain_of,
    words_of,
)
from kvsm.errors import ConfigError

MOST = 255
"""Values are bytes: a larger one would wrap around to 0 and change what a guard or a claim means."""
Columns = NDArray[np.uint8]
"""One row for each cell, one column for each state."""
Values = NDArray[Any]
"""One entry for each state: bool for a truth value, otherwise uint8."""


class StateBatch:
    """Columns of some states, and the nodes' values computed from them so far."""

    __slots__ = ("columns", "known")

    def __init__(self, columns: Columns) -> None:
        self.columns = columns
        self.known: dict[ArrayNode, Values] = {}


class ArrayNode:
    """A term with its parameters given. A `NodeFactory` makes equal nodes only once.

    columns: the columns that it depends on.
    limit: its largest value.
    truth: whether it is a truth value.
    """

    __slots__ = ("columns", "limit", "truth")

    def __init__(self, columns: frozenset[int], limit: int, truth: bool) -> None:
        self.columns, self.limit, self.truth = columns, limit, truth
        if limit > MOST:
            raise ConfigError(
                f"a number in this protocol may become {limit}, and at most {MOST} can be explored: choose "
                "smaller bounds"
            )

    def of(self, batch: StateBatch) -> Values:
        """The values in these states."""
        known = batch.known.get(self)
        if known is None:
            known = batch.known[self] = self._compute(batch)
        return known

    def _compute(self, batch: StateBatch) -> Values:
        raise NotImplementedError


class FixedNode(ArrayNode):
    """A constant."""

    __slots__ = ("value",)

    def __init__(self, value: int) -> None:
        super().__init__(frozenset(), value, False)
        self.value = value

    def _compute(self, batch: StateBatch) -> Values:
        return np.broadcast_to(np.uint8(self.value), batch.columns.shape[1])


class TableNode(ArrayNode):
    """A table of one column's values."""

    __slots__ = ("_is_column", "_values", "column", "table")

    def __init__(self, column: int, table: tuple[int, ...], truth: bool) -> None:
        super().__init__(frozenset((column,)), max(table), truth)
        self.column, self.table = column, table
        self._is_column = not truth and table == tuple(range(len(table)))
        self._values = np.array(table, dtype=np.bool_ if truth else np.uint8)

    def _compute(self, batch: StateBatch) -> Values:
        column: Columns = batch.columns[self.column]
        # No value lies outside the table. "clip" spares numpy the check, which costs more than the look-up.
        return column if self._is_column else self._values.take(column, mode="clip")


class OperationNode(ArrayNode):
    """A numpy function of other nodes' values."""

    __slots__ = ("function", "name", "parts")

    def __init__(
        self,
        name: str,
        function: Callable[..., Values],
        parts: tuple[ArrayNode, ...],
        limit: int,
        truth: bool,
    ) -> None:
        super().__init__(frozenset().union(*(part.columns for part in parts)), limit, truth)
        self.name, self.function, self.parts = name, function, parts

    def _compute(self, batch: StateBatch) -> Values:
        return self.function(*(part.of(batch) for part in self.parts))


def _every(*parts: Values) -> Values:
    found = parts[0] & parts[1]
    for part in parts[2:]:
        found &= part
    return found


def _some(*parts: Values) -> Values:
    found = parts[0] | parts[1]
    for part in parts[2:]:
        found |= part
    return found


def _sum(*parts: Values) -> Values:
    total = parts[0].astype(np.uint8)
    for part in parts[1:]:
        total += part.view(np.uint8)
    return total


def _chosen(condition: Values, then: Values, otherwise: Values) -> Values:
    return np.where(condition, then, otherwise)


class NodeFactory:
    """Turns terms into nodes: quantifiers written out, constants folded, equal nodes shared."""

    def __init__(self, layout: CellLayout) -> None:
        self._layout = layout
        self._made: dict[tuple[Any, ...], ArrayNode] = {}

    def of(self, term: Term, binding: Binding) -> ArrayNode:
        """The node of a term. Every parameter must be in `binding`, or bound by the term."""
        match term:
            case Const(_, value):
                return FixedNode(value)
            case Param():
                return FixedNode(binding[term])
            case Read():
                domain = domain_of(term)
                room = len(domain.words) if isinstance(domain, Words) else domain.size
                return self._lookup(self._layout.place_of(term, binding), range(room), truth=False)
            case Not(inner):
                return self._not(self.of(inner, binding))
            case And(terms):
                return self._every(self.of(one, binding) for one in terms)
            case Or(terms):
                return self._some(self.of(one, binding) for one in terms)
            case ForAll(param, body):
                return self._every(self._over(param, body, binding))
            case Exists(param, body):
                return self._some(self._over(param, body, binding))
            case Total(param, body):
                return self._sum(self._over(param, body, binding))
            case Add(terms):
                return self._sum(self.of(one, binding) for one in terms)
        return self._of_several(term, binding)

    def _of_several(self, term: Term, binding: Binding) -> ArrayNode:
        match term:
            case If(condition, then, otherwise):
                return self._if(*(self.of(one, binding) for one in (condition, then, otherwise)))
            case Equal(left, right):
                return self._compared("equal", np.equal, self.of(left, binding), self.of(right, binding))
            case Less(left, right):
                return self._compared("less", np.less, self.of(left, binding), self.of(right, binding))
            case Minus(left, right):
                less = self.of(right, binding)
                if not isinstance(less, FixedNode):
                    raise TypeError(f"{right} is no constant: only a constant can be subtracted")
                return self._mapped(self.of(left, binding), lambda value: max(value - less.value, 0))
        return self._of_word(term, binding)

    def _of_word(self, term: Term, binding: Binding) -> ArrayNode:
        match term:
            case After(trigger, word):
                following = words_of(word).next[trigger]
                return self._mapped(self.of(word, binding), lambda value: following[value])
            case InState(word, states):
                words = words_of(word).words
                among = [found is not None and found[0] in states for found in words]
                return self._mapped(self.of(word, binding), lambda value: among[value], truth=True)
            case CounterOf(word, name):
                kind = words_of(word)
                place = [counter.name for counter in kind.machine.counters].index(name)
                counts = [0 if found is None else found[1][place] for found in kind.words]
                return self._mapped(self.of(word, binding), lambda value: counts[value])
        raise TypeError(f"{term} is no term")

    def _over(self, param: Param, body: Term, binding: Binding) -> list[ArrayNode]:
        return [self.of(body, {**binding, param: member}) for member in range(param.members.size)]

    def _lookup(self, column: int, table: Iterable[int], truth: bool) -> ArrayNode:
        values = tuple(map(int, table))
        if len(set(values)) == 1:
            return FixedNode(values[0])
        return self._once(("lookup", column, values, truth), lambda: TableNode(column, values, truth))

    def _once(self, key: tuple[Any, ...], make: Callable[[], ArrayNode]) -> ArrayNode:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def _operation(
        self, name: str, function: Callable[..., Values], parts: Sequence[ArrayNode], limit: int, truth: bool
    ) -> ArrayNode:
        key = (name, *(part.value if isinstance(part, FixedNode) else part for part in parts))
        return self._once(key, lambda: OperationNode(name, function, tuple(parts), limit, truth))

    def _mapped(self, node: ArrayNode, function: Callable[[int], int], truth: bool = False) -> ArrayNode:
        """A function of one node's value."""
        if isinstance(node, FixedNode):
            return FixedNode(int(function(node.value)))
        if isinstance(node, TableNode):
            return self._lookup(node.column, map(function, node.table), truth)
        table = tuple(int(function(value)) for value in range(node.limit + 1))
        array = np.array(table, dtype=np.bool_ if truth else np.uint8)
        key = f"table {table} {truth}"
        return self._operation(key, lambda values: array[values.view(np.uint8)], (node,), max(table), truth)

    def _truth(self, node: ArrayNode) -> ArrayNode:
        return node if node.truth or isinstance(node, FixedNode) else self._mapped(node, bool, truth=True)

    def _not(self, node: ArrayNode) -> ArrayNode:
        if isinstance(node, FixedNode | TableNode):
            return self._mapped(node, lambda value: not value, truth=True)
        return self._operation("not", np.logical_not, (self._truth(node),), 1, truth=True)

    def _joined(self, name: str, nodes: Iterable[ArrayNode], ends_it: bool) -> ArrayNode:
        """A conjunction (ends_it is False) or a disjunction (ends_it is True)."""
        parts: dict[ArrayNode, None] = {}
        for node in map(self._truth, nodes):
            if isinstance(node, OperationNode) and node.name == name:
                parts.update(dict.fromkeys(node.parts))
            elif not isinstance(node, FixedNode):
                parts[node] = None
            elif bool(node.value) == ends_it:
                return FixedNode(int(ends_it))
        if not parts:
            return FixedNode(int(not ends_it))
        if len(parts) == 1:
            return next(iter(parts))
        return self._operation(name, _some if ends_it else _every, tuple(parts), 1, truth=True)

    def _every(self, nodes: Iterable[ArrayNode]) -> ArrayNode:
        return self._joined("every", nodes, False)

    def _some(self, nodes: Iterable[ArrayNode]) -> ArrayNode:
        return self._joined("some", nodes, True)

    def _sum(self, nodes: Iterable[ArrayNode]) -> ArrayNode:
        parts = list(nodes)
        constant = sum(node.value for node in parts if isinstance(node, FixedNode))
        parts = [node for node in parts if not isinstance(node, FixedNode)]
        if not parts:
            return FixedNode(constant)
        total = parts[0]
        if len(parts) > 1:
            total = self._operation("sum", _sum, parts, sum(node.limit for node in parts), truth=False)
        return self._mapped(total, lambda value: value + constant) if constant or total.truth else total

    def _if(self, condition: ArrayNode, then: ArrayNode, otherwise: ArrayNode) -> ArrayNode:
        if isinstance(condition, FixedNode):
            return then if condition.value else otherwise
        if then.truth or otherwise.truth:
            both = self._every((condition, then)), self._every((self._not(condition), otherwise))
            return self._some(both)
        if then is otherwise:
            return then
        limit = max(then.limit, otherwise.limit)
        return self._operation("if", _chosen, (self._truth(condition), then, otherwise), limit, truth=False)

    def _compared(
        self, name: str, function: Callable[..., Values], left: ArrayNode, right: ArrayNode
    ) -> ArrayNode:
        if isinstance(right, FixedNode):
            value = right.value
            return self._mapped(left, lambda one: bool(function(one, value)), truth=True)
        if isinstance(left, FixedNode):
            value = left.value
            return self._mapped(right, lambda one: bool(function(value, one)), truth=True)
        return self._operation(name, function, (left, right), 1, truth=True)
