"""Weaker versions of kvsm's own checks, one change at a time, for `specs/mutate.py --checks AREA`.

mutmut's changes suit code that decides. A check is weakened in other ways:

- it does not object: a `raise` or `yield` is removed, or the call of another check;
- a comparison always passes, or its limit moves by one;
- one of several conditions is dropped;
- a loop skips its first iteration;
- a field is not compared: an entry is dropped from a table, or from both sides of a comparison of tuples.

Each change keeps the types, so a mutant is killed because an objection is missing or wrong, and seldom by a
TypeError.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple, cast


class Area(NamedTuple):
    """Checks that have the same tests. files: globs. tests: files or directories of tests; walks through
    the worlds are among them."""

    files: tuple[str, ...]
    tests: tuple[str, ...]


AREAS = {
    "invariants": Area(
        ("kvsm/core/ledger/invariants.py",),
        ("tests/core/ledger/test_invariants.py", "tests/museum/test_museum_worlds.py"),
    ),
    "verify": Area(
        (
            "kvsm/explain/verify/[ablw]*",  # not `reproduction.py` and `unavoidable.py`
            "kvsm/tiers/agreement.py",
        ),
        ("tests/explain/verify", "tests/tiers/test_agreement.py", "tests/museum/test_museum_worlds.py"),
    ),
    "conformance": Area(("kvsm/check/conformance/*",), ("tests/check/conformance",)),
    "worlds": Area(
        (
            "kvsm/check/worlds/*books.py",
            "kvsm/check/worlds/audited.py",
            "kvsm/check/worlds/core_*.py",
            "kvsm/check/worlds/failed_copies.py",
            "kvsm/check/worlds/hand_over_*.py",
            "kvsm/check/worlds/log_ahead.py",
            "kvsm/check/worlds/longest_hit.py",
            "kvsm/check/worlds/lost_stores.py",
            "kvsm/check/worlds/offered_chunks.py",
            "kvsm/check/worlds/run_figures.py",
            "kvsm/check/worlds/served_again.py",
            "kvsm/check/worlds/tier_*.py",
        ),
        ("tests/check/worlds", "tests/museum/test_museum_worlds.py"),
    ),
    "fleets": Area(("kvsm/check/worlds/fleet_*.py",), ("tests/check/worlds/test_fleet_world.py",)),
    "hints": Area(("kvsm/check/worlds/hint_*.py",), ("tests/check/worlds/test_hint_world.py",)),
    "clocks": Area(("kvsm/check/worlds/clock_*.py",), ("tests/check/worlds/test_clock_world.py",)),
    "second counts": Area(
        (
            "kvsm/check/worlds/*_oracles.py",
            "kvsm/check/worlds/past_*.py",
            "kvsm/check/worlds/declined_hits.py",
            "kvsm/check/worlds/fair_service.py",
        ),
        (
            "tests/check/worlds/test_fair_service.py",
            "tests/check/worlds/test_metric_oracles.py",
            "tests/check/worlds/test_report_oracles.py",
            "tests/check/worlds/test_table_oracles.py",
            "tests/check/worlds/test_tier_served.py",
            "tests/check/worlds/test_timed_serving.py",
            "tests/core/scheduler/test_declined_hits.py",
        ),
    ),
    "vllm": Area(
        (
            # These three need no vLLM. Without it, give `--only` with them.
            "kvsm/check/vllm_fuzz/known_blocks.py",
            "kvsm/check/vllm_fuzz/lost_copies.py",
            "kvsm/check/vllm_fuzz/stored_bytes.py",
            "kvsm/check/vllm_fuzz/ending.py",
            "kvsm/check/vllm_fuzz/host_probe.py",
            "kvsm/check/vllm_fuzz/kv_event_check.py",
            "kvsm/check/vllm_fuzz/longest_hits.py",
            "kvsm/check/vllm_fuzz/served_prompts.py",
            "kvsm/check/vllm_fuzz/twin_asks.py",
        ),
        ("tests/check/vllm_fuzz", "tests/in_vllm"),
    ),
    "testing": Area(
        ("kvsm/testing/*_books.py", "kvsm/testing/assertions.py"),
        # The other tests start processes, which have no mutant, or compile.
        (
            "tests/testing/test_assertions.py",
            "tests/testing/test_testing.py",
            "tests/testing/test_manager_books.py",
            "tests/testing/test_prefix_tree_books.py",
            "tests/testing/test_prefix_tree_machine.py",
            "tests/testing/test_blame.py",
            "tests/stateful/test_core.py",
            "tests/stateful/test_scheduler.py",
        ),
    ),
}
"""The name of an area, for `--checks` -> its files and tests."""

_CHECKS = re.compile(r"(check|compare|expect|must|refuse|require|break|_breaks|object|assert)")
"""The names of functions whose call is a check."""

_NO_CHECKS = ("expect_misuse",)
"""Functions with such names that check nothing: it silences warnings."""

_BOUNDARY: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
}
_SATISFIED: dict[type[ast.cmpop], ast.operator] = {
    ast.Eq: ast.BitOr(),
    ast.In: ast.BitOr(),
    ast.NotEq: ast.BitAnd(),
    ast.NotIn: ast.BitAnd(),
}
"""A comparison -> the operator that fixes its outcome. `(a != b) & False` keeps the type of an array."""

_Edit = Callable[[ast.AST], None]


Definition = ast.FunctionDef | ast.Assign
"""The definition of a function, or of a table of a module."""


def weaker(tree: ast.Module) -> Iterator[tuple[str, Definition]]:
    """Yield (qualified name, definition) of each weaker version of what a module defines: its functions, its
    methods, and its tables, each without one entry."""
    used = _used_at_import(tree)
    for statement in tree.body:
        if isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is not None:
            target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
            is_table = isinstance(target, ast.Name) and target.id not in used
            for less in _shorter(statement.value) if is_table else ():
                yield ast.unparse(target), cast("ast.Assign", _parsed(ast.Assign([target], less)))
    for prefix, body in [
        ("", tree.body),
        *[(f"{node.name}.", node.body) for node in tree.body if isinstance(node, ast.ClassDef)],
    ]:
        for node in body:
            if isinstance(node, ast.FunctionDef) and not _is_overload(node):
                for changed in _versions(node):
                    yield prefix + node.name, changed


def _used_at_import(tree: ast.Module) -> set[str]:
    """The names that a module reads while it is imported. A later change of such a table has no effect."""
    defined = (ast.FunctionDef, ast.ClassDef)
    return {
        node.id
        for statement in tree.body
        if not isinstance(statement, defined)
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }


def _shorter(table: ast.expr) -> Iterator[ast.expr]:
    """Yield a table without each of its entries."""
    if isinstance(table, ast.Tuple) and len(table.elts) > 1:
        for number in range(len(table.elts)):
            yield ast.Tuple(table.elts[:number] + table.elts[number + 1 :], ast.Load())
    elif isinstance(table, ast.Dict) and len(table.keys) > 1:
        for number in range(len(table.keys)):
            yield ast.Dict(
                table.keys[:number] + table.keys[number + 1 :],
                table.values[:number] + table.values[number + 1 :],
            )


def _is_overload(function: ast.FunctionDef) -> bool:
    return any(
        "setter" in ast.unparse(one) or "overload" in ast.unparse(one) for one in function.decorator_list
    )


def _versions(function: ast.FunctionDef) -> Iterator[ast.FunctionDef]:
    said = {ast.unparse(function)}
    for place, node in enumerate(ast.walk(function)):
        for edit in _edits(node):
            changed = copy.deepcopy(function)
            edit(next(one for at, one in enumerate(ast.walk(changed)) if at == place))
            again = _parsed(changed)
            if ast.unparse(again) not in said:
                said.add(ast.unparse(again))
                yield cast("ast.FunctionDef", again)


def _parsed(changed: ast.stmt) -> ast.stmt:
    """Parse the changed statement again. That gives it line numbers, and removes an `and` of one part."""
    return ast.parse(ast.unparse(ast.fix_missing_locations(changed))).body[0]


def _edits(node: ast.AST) -> Iterator[_Edit]:
    """Yield the changes of this node; each takes the same node of a copy."""
    for field, value in ast.iter_fields(node):
        if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
            for number, statement in enumerate(value):
                if _objects(statement):
                    yield _put(field, number, ast.parse(_silent(statement)).body[0])
        elif isinstance(value, ast.Compare):
            for other in _compared(value):
                yield _put(field, None, other)
        elif isinstance(value, list):
            for number, part in enumerate(value):
                if isinstance(part, ast.Compare):
                    for other in _compared(part):
                        yield _put(field, number, other)
    if isinstance(node, ast.BoolOp):
        for number, condition in enumerate(node.values):
            if not _is_guard(condition):
                yield _drop("values", number)
    elif isinstance(node, (ast.For, ast.comprehension)):
        yield _skip_first
    elif isinstance(node, ast.Dict) and len(node.keys) > 1:
        for number in range(len(node.keys)):
            yield _drop_item(number)
    elif isinstance(node, (ast.Tuple, ast.List)) and _is_table(node):
        for number in range(len(node.elts)):
            yield _drop("elts", number)


def _is_table(node: ast.Tuple | ast.List) -> bool:
    """Whether it is a list of tuples: one row for each thing that is compared."""
    return len(node.elts) > 1 and all(isinstance(row, ast.Tuple) for row in node.elts)


def _objects(statement: ast.stmt) -> bool:
    """Whether this statement objects, or lets another check do so."""
    if isinstance(statement, ast.Raise):
        return statement.exc is not None and ast.unparse(statement.exc) != "NotImplementedError"
    if not isinstance(statement, ast.Expr):
        return isinstance(statement, ast.Assert) and not _is_guard(statement.test)
    value = statement.value
    if isinstance(value, (ast.Yield, ast.YieldFrom)):
        return True
    if not isinstance(value, ast.Call) or "super()" in ast.unparse(value):
        return False
    name = ast.unparse(value.func).rpartition(".")[2]
    return name not in _NO_CHECKS and bool(_CHECKS.search(name))


def _silent(statement: ast.stmt) -> str:
    is_yield = isinstance(statement, ast.Expr) and isinstance(statement.value, (ast.Yield, ast.YieldFrom))
    return "yield from ()" if is_yield else "pass"


def _is_guard(condition: ast.expr) -> bool:
    """Whether a condition only protects later conditions from None or another type, or binds a name."""
    text = ast.unparse(condition)
    return "is None" in text or "is not None" in text or "isinstance" in text or ":=" in text


def _compared(compare: ast.Compare) -> Iterator[ast.expr]:
    """Yield the weaker versions of a comparison."""
    if len(compare.ops) != 1 or ":=" in ast.unparse(compare):
        return
    operator = type(compare.ops[0])
    left, right = compare.left, compare.comparators[0]
    if operator in _BOUNDARY:
        yield ast.Compare(left, [_BOUNDARY[operator]()], [right])
    elif operator in _SATISFIED:
        fixed = _SATISFIED[operator]
        yield ast.BinOp(compare, fixed, ast.Constant(isinstance(fixed, ast.BitOr)))
    if isinstance(left, ast.Tuple) and isinstance(right, ast.Tuple) and len(left.elts) == len(right.elts):
        for number in range(len(left.elts)):
            less = [
                ast.Tuple(one.elts[:number] + one.elts[number + 1 :], ast.Load()) for one in (left, right)
            ]
            yield ast.Compare(less[0], compare.ops, [less[1]])


def _put(field: str, number: int | None, value: ast.AST) -> _Edit:
    def edit(node: ast.AST) -> None:
        if number is None:
            setattr(node, field, value)
        else:
            getattr(node, field)[number] = value

    return edit


def _drop(field: str, number: int) -> _Edit:
    def edit(node: ast.AST) -> None:
        del getattr(node, field)[number]

    return edit


def _drop_item(number: int) -> _Edit:
    def edit(node: ast.AST) -> None:
        table = cast("ast.Dict", node)
        del table.keys[number], table.values[number]

    return edit


def _skip_first(node: ast.AST) -> None:
    loop = cast("ast.For | ast.comprehension", node)
    skip = ast.parse("__import__('itertools').islice(0, 1, None)", mode="eval").body
    cast("ast.Call", skip).args[0] = loop.iter
    loop.iter = skip
