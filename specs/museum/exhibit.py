"""A bug of kvsm's code that is put in for a while: an exhibit is one of another system, brought back.

`specs/mutants` has bugs of another kind.

The change edits a function's source text. During a `with` block the function is replaced by the compiled
result. So an exhibit can be shown as a diff, and it fails by itself if the line that it edits is gone.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from difflib import unified_diff
from inspect import unwrap
from pathlib import Path
from pkgutil import resolve_name
from textwrap import dedent, indent
from typing import Any
from unittest.mock import patch

import msgspec

from kvsm.core import native
from kvsm.properties import Property
from kvsm.states import block
from kvsm.states.machine import Machine

PROJECT = Path(__file__).resolve().parents[2]
BLOCK_ROWS = "kvsm.states.block:_rows"
"""The one table that exhibits edit. Its machine is rebuilt from the edited rows."""
HAVE_TWO_BODIES = (
    "kvsm.core.ledger.key_index",
    "kvsm.core.ledger.",
    "kvsm.core.offloader.emitter",
    "kvsm.core.offloader.matching",
    "kvsm.core.offloader.offloader",
    "kvsm.core.offloader.transferring",
    "kvsm.core.policies.",
    "kvsm.explain.verify.book",
    "kvsm.explain.verify.witness",
    "kvsm.core.scheduler.hits:_first_missing",
    "kvsm.core.scheduler.tracked:TrackedRequest.make_keys",
    "kvsm.states.",
)
"""Rooms and functions that the native body has, too. A bug in their text needs the body that runs it."""


class Edit(msgspec.Struct, frozen=True):
    """Lines of a function and their replacement.

    target: the function, as "kvsm.core.ledger.requests:hit_matched".
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


class Bug(msgspec.Struct, frozen=True, kw_only=True):
    """One bug.

    breaks: the property that it breaks.
    edits: what puts it into the code.
    stop: if kvsm refuses what the bug does, a part of its message.
    without_stop: edits that remove this guard as well, to show what it prevents.
    """

    id: str
    title: str
    story: str
    breaks: Property
    edits: tuple[Edit, ...]
    stop: str = ""
    without_stop: tuple[Edit, ...] = ()

    @property
    def origin(self) -> str:
        """Where the bug comes from, for people."""
        raise NotImplementedError

    @property
    def needs_vllm(self) -> bool:
        """Whether it is in a module that imports vLLM, and can be put in only where vLLM is."""
        return any(edit.target.startswith("kvsm.vllm.") for edit in self.edits)

    def put_back(self, *, without_stop: bool = False) -> ExitStack:
        """The bug, until the end of a `with` block."""
        stack, edits = ExitStack(), self.edits + (self.without_stop if without_stop else ())
        if any(edit.target.startswith(HAVE_TWO_BODIES) for edit in edits):
            stack.enter_context(native.without())
        try:
            for change in changes(edits):
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


class Exhibit(Bug, frozen=True, kw_only=True):
    """A bug that another system had.

    source: the issue, pull request or commit.
    """

    source: str

    @property
    def origin(self) -> str:
        return self.source


class FunctionChange(msgspec.Struct, frozen=True):
    """All edits of one function."""

    target: str
    edits: tuple[Edit, ...]

    def made(self) -> Any:
        owner, name = self._place()
        function = getattr(owner, name)
        made: dict[str, Any] = {}
        _, _, edited = self._in_source()
        text = dedent("".join(edited))
        # A method that calls `super()` has a variable of the scope around it, `__class__`.
        outer = _plain(function).__code__.co_freevars
        within = f"def within({', '.join(outer)}):\n{indent(text, '    ')}\n    return {name}\n"
        text = f"from __future__ import annotations\n{within}"
        exec(compile(text, f"<{self.target}, edited>", "exec"), function.__globals__, made)
        other = made["within"](*outer)
        if self.target == BLOCK_ROWS:
            return rows_replaced(block.BLOCK, other())
        return code_replaced(_plain(function), _plain(other))

    def diff(self) -> str:
        """As `git diff` would show it. The module need not be importable: vLLM may not be there."""
        path, (first, last), edited = self._in_source()
        whole = path.read_text(encoding="utf-8").splitlines(keepends=True)
        changed = [*whole[:first], *edited, *whole[last:]]
        named = path.relative_to(PROJECT).as_posix()
        return "".join(unified_diff(whole, changed, f"a/{named}", f"b/{named}"))

    def _place(self) -> tuple[Any, str]:
        module, _, path = self.target.partition(":")
        *owners, name = path.split(".")
        return resolve_name(":".join([module, ".".join(owners)]) if owners else module), name

    def _in_source(self) -> tuple[Path, tuple[int, int], list[str]]:
        """(file of the function, its first line and the one behind it, its lines after the edits)."""
        module, _, name = self.target.partition(":")
        path = PROJECT.joinpath(*module.split(".")).with_suffix(".py")
        text = path.read_text(encoding="utf-8")
        node: Any = ast.parse(text)
        for part in name.split("."):
            node = next((one for one in node.body if getattr(one, "name", "") == part), None)
            if node is None:
                raise ValueError(f"{self.target}: there is no {part} (was the source changed since?)")
        first = min([node.lineno, *(one.lineno for one in node.decorator_list)]) - 1
        lines = text.splitlines(keepends=True)[first : node.end_lineno]
        for edit in self.edits:
            lines = edit.applied_to(lines, self.target)
        ast.parse(dedent("".join(lines)))
        return path, (first, node.end_lineno), lines


def diff_of(edits: tuple[Edit, ...]) -> str:
    return "".join(change.diff() for change in changes(edits))


def changes(edits: tuple[Edit, ...]) -> list[FunctionChange]:
    """The edits grouped by function, in the order in which functions first appear."""
    targets = dict.fromkeys(edit.target for edit in edits)
    return [FunctionChange(one, tuple(edit for edit in edits if edit.target == one)) for one in targets]


def _plain(function: Any) -> Any:
    """The function itself, if this is a class method or decorated."""
    return unwrap(getattr(function, "__func__", function))


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
