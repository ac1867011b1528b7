"""A bug that is put into kvsm's code for the time of a `with` block.

An exhibit is a bug of another system, re-created in kvsm; `specs/mutants` has other kinds of bugs.

A bug edits the source text of functions, and the compiled result replaces each function's code. So a bug can
be shown as a diff, and putting it in fails if an edited line no longer exists.
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
"""The only state table that bugs edit. Its machine is rebuilt from the edited rows."""
HAVE_TWO_BODIES = (
    "kvsm.core.ledger.key_index",
    "kvsm.core.ledger.",
    "kvsm.core.offloader.emitter",
    "kvsm.core.offloader.matching",
    "kvsm.core.offloader.offloader",
    "kvsm.core.offloader.storing",
    "kvsm.core.offloader.transferring",
    "kvsm.core.policies.",
    "kvsm.explain.verify.book",
    "kvsm.explain.verify.witness",
    "kvsm.core.scheduler.hits:_first_missing",
    "kvsm.core.scheduler.tracked:TrackedRequest.make_keys",
    "kvsm.states.",
)
"""Python modules and functions with a twin in C.

To take effect, a bug in their text needs the Python body. `OfferBatch.collect` and the functions that it
calls have twins, too, but before each use kvsm checks whether they were changed
(`kvsm.core.scheduler.offers`).
"""


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
        """Return the edited lines. Raises `ValueError` unless `old` occurs exactly once."""
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
    edits: the source edits that put it in.
    stop: a part of the message with which a guard of kvsm refuses the bug's action; "" if no guard does.
    without_stop: further edits that remove this guard, to show what it prevents.
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
        """Where the bug comes from, as text for readers."""
        raise NotImplementedError

    @property
    def needs_vllm(self) -> bool:
        """Whether the bug is in a module that imports vLLM, so that putting it in needs vLLM."""
        return any(edit.target.startswith("kvsm.vllm.") for edit in self.edits)

    def put_back(self, *, without_stop: bool = False) -> ExitStack:
        """Put the bug in until the end of a `with` block."""
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
        """Return the edits as a unified diff."""
        return diff_of(self.edits)

    def diff_without_stop(self) -> str:
        """Return the edits that remove the guard, as a unified diff."""
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
        # A method that calls `super()` has the free variable `__class__`.
        outer = _plain(function).__code__.co_freevars
        within = f"def within({', '.join(outer)}):\n{indent(text, '    ')}\n    return {name}\n"
        text = f"from __future__ import annotations\n{within}"
        exec(compile(text, f"<{self.target}, edited>", "exec"), function.__globals__, made)
        other = made["within"](*outer)
        if self.target == BLOCK_ROWS:
            return rows_replaced(block.BLOCK, other())
        return code_replaced(_plain(function), _plain(other))

    def diff(self) -> str:
        """Return the edits as a unified diff. The module need not be importable: vLLM may be missing."""
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
        """Return the function's file, its line range (half-open, 0-based), and its lines after the edits."""
        module, _, name = self.target.partition(":")
        path = PROJECT.joinpath(*module.split(".")).with_suffix(".py")
        text = path.read_text(encoding="utf-8")
        node: Any = ast.parse(text)
        for part in name.split("."):
            node = next((child for child in node.body if getattr(child, "name", "") == part), None)
            if node is None:
                raise ValueError(f"{self.target}: there is no {part} (was the source changed since?)")
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) - 1
        lines = text.splitlines(keepends=True)[first : node.end_lineno]
        for edit in self.edits:
            lines = edit.applied_to(lines, self.target)
        ast.parse(dedent("".join(lines)))
        return path, (first, node.end_lineno), lines


def diff_of(edits: tuple[Edit, ...]) -> str:
    return "".join(change.diff() for change in changes(edits))


def changes(edits: tuple[Edit, ...]) -> list[FunctionChange]:
    """Group the edits by function, in the order in which functions first appear."""
    targets = dict.fromkeys(edit.target for edit in edits)
    return [
        FunctionChange(target, tuple(edit for edit in edits if edit.target == target)) for target in targets
    ]


def _plain(function: Any) -> Any:
    """Return the plain function behind a class method or a decorator."""
    return unwrap(getattr(function, "__func__", function))


@contextmanager
def code_replaced(function: Any, other: Any) -> Iterator[None]:
    """Give `function` the code of `other`, so that holders of the function object run the new code, too."""
    before, function.__code__ = function.__code__, other.__code__
    try:
        yield
    finally:
        function.__code__ = before


@contextmanager
def rows_replaced(machine: Machine, rows: tuple[Any, ...]) -> Iterator[None]:
    """Replace a machine's table in place, and clear the memoised steps of the old table."""
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
