"""An exhibit: a bug of another system, and the smallest change of kvsm's code that brings it back.

The change edits a function's source text. During a `with` block the function is replaced by the compiled
result. So an exhibit can be shown as a diff, and it fails by itself if the line that it edits is gone.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from difflib import unified_diff
from inspect import getsourcefile, getsourcelines
from pathlib import Path
from pkgutil import resolve_name
from textwrap import dedent, indent
from typing import Any
from unittest.mock import patch

import msgspec

from kvsm.properties import Property
from kvsm.states import block
from kvsm.states.machine import Machine

PROJECT = Path(__file__).resolve().parents[2]
BLOCK_ROWS = "kvsm.states.block:_rows"
"""The one table that exhibits edit. Its machine is rebuilt from the edited rows."""


class Edit(msgspec.Struct, frozen=True):
    """Lines of a function and their replacement.

    target: the function, as "kvsm.ledger.requests:hit_matched".
    old: consecutive whole lines that occur once in it. Their indentation does not matter.
    new: what replaces them, indented relative to them.
    """

    target: str
    old: str
    new: str = ""

    def applied_to(self, lines: list[str], where: str) -> list[str]:
        """The edited lines. Raises `ValueError` unless `old` occurs exactly once."""
        old = [line.strip() for line in self.old.strip().splitlines()]
        texts = [line.strip() for line in lines]
        places = [n for n in range(len(texts)) if texts[n : n + len(old)] == old]
        if len(places) != 1:
            found = f"{where} says {len(places)} times, not once: {self.old.strip()}"
            raise ValueError(f"{found}\n(has the source been changed since the exhibit was written?)")
        first = lines[places[0]]
        margin = first[: len(first) - len(first.lstrip())]
        new = indent(dedent(self.new).strip("\n"), margin)
        replaced = [f"{line}\n" for line in new.splitlines()]
        return [*lines[: places[0]], *replaced, *lines[places[0] + len(old) :]]


class Exhibit(msgspec.Struct, frozen=True, kw_only=True):
    """One bug.

    source: the issue, pull request or commit.
    breaks: the property that it breaks.
    edits: what brings it back.
    stop: if kvsm refuses what the bug does, a part of its message.
    without_stop: edits that remove this guard as well, to show what it prevents.
    """

    id: str
    source: str
    title: str
    story: str
    breaks: Property
    edits: tuple[Edit, ...]
    stop: str = ""
    without_stop: tuple[Edit, ...] = ()

    def put_back(self, *, without_stop: bool = False) -> ExitStack:
        """The bug, until the end of a `with` block."""
        stack = ExitStack()
        try:
            for change in changes(self.edits + (self.without_stop if without_stop else ())):
                stack.enter_context(change.made())
        except BaseException:
            stack.close()
            raise
        return stack

    def diff(self) -> str:
        """The edits, as `git diff` would show them."""
        return diff_of(self.edits)

    def diff_without_stop(self) -> str:
        """The edits that remove the guard, as `git diff` would show them."""
        return diff_of(self.without_stop)


class FunctionChange(msgspec.Struct, frozen=True):
    """All edits of one function."""

    target: str
    edits: tuple[Edit, ...]

    def made(self) -> Any:
        owner, name = self._place()
        function = getattr(owner, name)
        made: dict[str, Any] = {}
        text = "from __future__ import annotations\n" + dedent("".join(self._edited(function)))
        exec(compile(text, f"<{self.target}, edited>", "exec"), function.__globals__, made)
        if self.target == BLOCK_ROWS:
            return rows_replaced(block.BLOCK, made[name]())
        return code_replaced(_plain(function), _plain(made[name]))

    def diff(self) -> str:
        owner, name = self._place()
        function = getattr(owner, name)
        path = Path(getsourcefile(function) or "")
        lines, start = getsourcelines(function)
        whole = path.read_text(encoding="utf-8").splitlines(keepends=True)
        changed = [*whole[: start - 1], *self._edited(function), *whole[start - 1 + len(lines) :]]
        named = path.relative_to(PROJECT).as_posix()
        return "".join(unified_diff(whole, changed, f"a/{named}", f"b/{named}"))

    def _place(self) -> tuple[Any, str]:
        module, _, path = self.target.partition(":")
        *owners, name = path.split(".")
        return resolve_name(":".join([module, ".".join(owners)]) if owners else module), name

    def _edited(self, function: Callable[..., Any]) -> list[str]:
        """The lines of the function after the edits, indented as in their file."""
        lines, _ = getsourcelines(function)
        for edit in self.edits:
            lines = edit.applied_to(lines, self.target)
        ast.parse(dedent("".join(lines)))
        return lines


def diff_of(edits: tuple[Edit, ...]) -> str:
    return "".join(change.diff() for change in changes(edits))


def changes(edits: tuple[Edit, ...]) -> list[FunctionChange]:
    """The edits grouped by function, in the order in which functions first appear."""
    targets = dict.fromkeys(edit.target for edit in edits)
    return [FunctionChange(one, tuple(edit for edit in edits if edit.target == one)) for one in targets]


def _plain(function: Any) -> Any:
    """The function itself, if this is a class method."""
    return getattr(function, "__func__", function)


@contextmanager
def code_replaced(function: Any, other: Any) -> Iterator[None]:
    """The code of `other` in `function`: tables and modules that hold the function run it too."""
    before, function.__code__ = function.__code__, other.__code__
    try:
        yield
    finally:
        function.__code__ = before


@contextmanager
def rows_replaced(machine: Machine, rows: tuple[Any, ...]) -> Iterator[None]:
    """Give a machine another table, in place, and forget the memoised steps of the old one."""
    other = Machine(machine.name, machine.states, machine.triggers, machine.counters, rows)
    with patch.multiple(machine, rows=other.rows, dense=other.dense):
        _forget_steps()
        try:
            yield
        finally:
            _forget_steps()


def _forget_steps() -> None:
    for memo in block.BLOCK_WORDS.next:
        memo.clear()
