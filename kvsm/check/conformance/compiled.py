"""Actions of a declaration as Python functions, generated from their terms.

An action's guard and effects become the source of one function, which is compiled once. It writes only the
cells that the action changes: a bound parameter takes the members that a demand on it leaves. `slot_key[s] =
key[d]` leaves the places of one key, and "a copy of t is at s" the slots of t's copies. So a step costs as
much as it changes, whatever the sizes of the index sets.

Of a guard, only the demands on tracked variables are checked. Of the effects, only those on tracked variables
are taken. Their values must be known: an effect that reads another variable is refused when the
action is compiled, and not when an event arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from kvsm.check.conformance.cells import Member, ProtocolCells
from kvsm.check.conformance.expressions import ExpressionWriter, named
from kvsm.check.conformance.formulas import (
    assigned,
    cells_bound,
    cells_read,
    demands,
    indices_of,
    simplified,
    substituted,
    variables_read,
)
from kvsm.check.protocol.terms import (
    FALSE,
    TRUE,
    Action,
    Assign,
    Const,
    Declaration,
    Forget,
    If,
    Or,
    Param,
    Read,
    Term,
)

Row = tuple[Member, ...]
"""The values of an action's parameters."""

Refused = tuple[Row, int]
"""The parameters with which an action may not be taken, and the place of the demand that does not hold."""


@dataclass(frozen=True)
class CompiledAction:
    """An action that can be taken.

    demands: what its guard demands of tracked variables.
    untold: its demands on untracked variables, which are not checked.
    writes: the variables that it may write, by name.
    take: takes the action for each row in turn. Returns the first row that the guard refuses, or None.
    source: the text of `take`.
    """

    action: Action
    demands: tuple[Term, ...]
    untold: tuple[Term, ...]
    writes: frozenset[str]
    take: Callable[[Iterable[Row]], Refused | None]
    source: str


@dataclass(frozen=True)
class _Change:
    """Cells of a variable that a function writes.

    loops: the `for` lines around the write.
    local: the name of the new value, where it is known.
    value: the new value, if it is a parameter or a constant.
    """

    read: Read
    loops: tuple[str, ...] = ()
    local: str = ""
    value: Term | None = None


def compile_action(
    declared: Declaration,
    action: Action,
    cells: Mapping[str, ProtocolCells],
    members: Mapping[str, Sequence[Member]],
) -> CompiledAction:
    """The action as a function on cells.

    cells: the tracked variables, by name.
    members: the members of the index sets that have a bound, by the set's name.

    Raises `TypeError` if it cannot be compiled: an effect needs a variable that is not tracked, or members of
    a set without a bound that nothing leads to.
    """
    return _ActionWriter(declared, action, cells, members).compiled()


def index_cells(
    declared: Declaration,
    actions: Sequence[Action],
    cells: Mapping[str, ProtocolCells],
    members: Mapping[str, Sequence[Member]],
) -> None:
    """Index the variables that these actions search by value. Writes to the others stay cheap."""
    for action in actions:
        _ActionWriter(declared, action, cells, members).written()


class _ActionWriter(ExpressionWriter):
    """Writes the function of one action."""

    def __init__(
        self,
        declared: Declaration,
        action: Action,
        cells: Mapping[str, ProtocolCells],
        members: Mapping[str, Sequence[Member]],
    ) -> None:
        super().__init__(cells, members)
        self._declared, self._action = declared, action
        every = demands(action.guard)
        self._checked = tuple(one for one in every if self._is_told(one))
        self._untold = tuple(one for one in every if not self._is_told(one))
        self._written: set[str] = set()

    def compiled(self) -> CompiledAction:
        """The function, with what it checks."""
        source = self.written()
        exec(compile(source, f"<{self._action.name} of the {self._declared.name}>", "exec"), self.namespace)
        take = self.namespace["take"]
        written = frozenset(self._written)
        return CompiledAction(self._action, self._checked, self._untold, written, take, source)

    def written(self) -> str:
        """The text of the function."""
        params = "".join(f"{named(one)}, " for one in self._action.params)
        self.emit("def take(rows):")
        with self.indented():
            self.emit("for row in rows:")
            with self.indented():
                if params:
                    self.emit(f"{params} = row")
                for place, demand in enumerate(self._checked):
                    text = self.said(demand)
                    self.emit(f"if not {text}: return row, {place}")
                self._forget(self._write(self._changes()))
        return "\n".join(self.lines) + "\n"

    def _is_told(self, term: Term) -> bool:
        return variables_read(term) <= self.cells.keys()

    def _changes(self) -> list[_Change]:
        """Emit the computation of all new values, from the state before the action."""
        found = []
        for bound, assign in assigned(self._action.effects):
            if assign.cell.variable.name in self.cells:
                if not self._is_told(assign.value):
                    raise TypeError(f"{self._action.name} writes {assign.cell} by what is not told")
                if bound:
                    found.append(self._several(bound, assign))
                    continue
                fixed = assign.value if isinstance(assign.value, Const | Param) else None
                local = self.said(assign.value)
                if fixed is None and local not in self.known.values():
                    local, text = self.fresh(), local
                    self.emit(f"{local} = {text}")
                found.append(_Change(assign.cell, (), local, fixed))
        return found

    def _several(self, bound: tuple[Param, ...], assign: Assign) -> _Change:
        """Emit a list of (member, new value)."""
        (param,), local = bound, self.fresh()
        if param in self._action.params:
            raise TypeError(f"{self._action.name} binds its own parameter {param.name}")
        wanted: tuple[Term, ...] = ()
        value = assign.value
        conditions = _changes_where(value, assign.cell)
        if len(conditions) == 1 and isinstance(value, If):
            wanted, value = demands(conditions[0]), value.then
        elif conditions:
            wanted = (Or(tuple(conditions)),)
        outside = [self.said(one) for one in wanted if param not in one.free_params]
        inside = [one for one in wanted if param in one.free_params]
        first = self.cells[assign.cell.variable.name].variable.domain.initial
        if not inside and isinstance(value, Const) and value.value == first:
            # Other cells have the initial value already.
            inside = [~assign.cell.equals(value)]
        domain, left = self.source(param, inside)
        with self.binding(param):
            pair = f"({named(param)}, {self.said(value)})"
            listed = f"[{pair} for {named(param)} in {domain}{self.filters(left)}]"
        self.emit(
            f"{local} = {listed} if {' and '.join(outside)} else ()" if outside else f"{local} = {listed}"
        )
        fixed = value if isinstance(value, Const) else None
        return _Change(assign.cell, (f"for {named(param)}, value in {local}:",), "value", fixed)

    def _write(self, changes: list[_Change]) -> list[_Change]:
        """Emit the writes. What was read before no longer counts."""
        for change in changes:
            with self._looping(change.loops):
                self._put(change.read, change.local, change.value)
        self.known = {}
        return changes

    def _put(self, cell: Read, value: str, fixed: Term | None = None) -> None:
        """Emit one write. fixed: the value, if it is a parameter or a constant."""
        name, key = cell.variable.name, self.key(cell)
        self._written.add(name)
        if self.cells[name].is_indexed:
            self.emit(f"{self.part(name, 'put')}({key}, {value})")
            return
        values, first = self.part(name, "values"), self.part(name, "initial")
        if isinstance(fixed, Const) and fixed.value == cell.variable.domain.initial:
            value = first
        if value != first and fixed is not None:
            self.emit(f"{values}[{key}] = {value}")
        elif value != first:
            self.emit(f"if {value} != {first}: {values}[{key}] = {value}")
            self.emit(f"else: {values}.pop({key}, None)")
        else:
            self.emit(f"{values}.pop({key}, None)")
        self.namespace[f"{name}_touch"] = self.cells[name].touched.append
        self.emit(f"{name}_touch({key})")

    def _forget(self, changes: list[_Change]) -> None:
        """Emit the declaration's `Forget`s, in order, where a change may have made one apply."""
        for forget in self._declared.forgets:
            name = forget.cell.variable.name
            if name not in self.cells:
                continue
            if not self._is_told(forget.when):
                raise TypeError(f"{name} is forgotten by what is not told")
            emitted: dict[tuple[Term, tuple[str, ...]], _Change] = {}
            reads = [forget.cell, *cells_read(forget.when)]
            bound = {one.variable.name for one in cells_bound(forget.when)}
            for change in changes:
                for given in _meeting(reads, bound, change):
                    self._forget_where(forget, change, given, emitted, changes)
            if emitted:
                # What this wrote may be met by the next ones. Earlier values of the variable no longer count.
                changes = [
                    replace(one, local="", value=None) if one.read.variable.name == name else one
                    for one in changes
                ]
                changes += emitted.values()

    def _forget_where(
        self,
        forget: Forget,
        change: _Change,
        given: Mapping[Param, Param],
        emitted: dict[tuple[Term, tuple[str, ...]], _Change],
        changes: Sequence[_Change],
    ) -> None:
        """Emit one `Forget`, which is a change of its own, unless it cannot apply or is emitted already.

        given: the change's parameters in place of the forget's. Any other one takes all members.
        """
        every = {one: Param(f"{one.name}_every", one.members) for one in forget.params if one not in given}
        renamed = {**given, **every}
        cell, when = substituted(forget.cell, renamed), substituted(forget.when, renamed)
        assert isinstance(cell, Read)
        near = [one for one in changes if one is change or not one.loops]
        when = simplified(when, {one.read: one.value for one in near if one.value is not None})
        loops = change.loops
        for param in every.values():
            loops += (f"for {named(param)} in {self.source(param, [])[0]}:",)
        if when == FALSE or (cell, loops) in emitted:
            return
        emitted[cell, loops] = _Change(cell, loops)
        with self._looping(loops):
            self.known = {one.read: one.local for one in near if one.local}
            if when == TRUE:
                self._put(cell, self.part(cell.variable.name, "initial"))
            else:
                self.emit(f"if {self.said(when)}:")
                with self.indented():
                    self._put(cell, self.part(cell.variable.name, "initial"))

    @contextmanager
    def _looping(self, loops: tuple[str, ...]) -> Iterator[None]:
        """Inside these loops."""
        depth = self.depth
        for line in loops:
            self.emit(line)
            self.depth += 1
        yield
        self.depth = depth


def _changes_where(value: Term, cell: Read) -> list[Term]:
    """One of these conditions must hold for a value to differ from its cell. Empty: it always may."""
    found = []
    while isinstance(value, If):
        found.append(value.condition)
        if value.otherwise == cell:
            return found
        value = value.otherwise
    return []


def _meeting(reads: Sequence[Read], bound: set[str], change: _Change) -> list[dict[Param, Param]]:
    """A change's parameters in place of a forget's, for each way in which the forget may meet the change.

    reads: the cells that the forget is about.
    bound: the variables whose cells it may ask for.
    """
    found: list[dict[Param, Param]] = []
    indices = indices_of(change.read)
    for read in reads:
        if read.variable is change.read.variable:
            given = dict(zip(indices_of(read), indices))
            if given not in found:
                found.append(given)
    if change.read.variable.name in bound:
        found.append({})
    return found
