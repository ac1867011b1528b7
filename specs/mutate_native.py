"""Mutation testing of the native body: how many small changes of the C text are detected?

    pip install -e '.[test]' tree-sitter==0.26.1 tree-sitter-c==0.24.2
    python specs/mutate_native.py --sample 300 --seed 1      # results in build/native_mutants.json
    python specs/mutate_native.py --sample 300 --seed 1 --again      # only those that survived, or are new
    python specs/mutate_native.py --show                    # the survivors, and a table by operator

tree-sitter parses the C text as it is written, macros included. Each mutant changes one place of one
function; `OPERATORS` has the kinds of change. A seed draws the same number of places of each kind, if
there are enough.

1. *Compile.* Only the changed file, as `setup.py` does. A change is no mutant if the compiler refuses it, or
   if the object code stays the same.
2. *Judge.* The judges of `JUDGES` run one by one, the cheapest first, until one fails: tests against the
   Python twin, misuse, walks, and all of them with the address and undefined-behaviour sanitizers.

Each process works in a copy of the checkout of its own. The tests are not copied: edit none while this runs.
Each result is written to the file of results when it is known.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import tree_sitter_c
from native_house import NATIVE, RELEASE, ROOT, SANITIZERS, Bench, BuildError, House, sanitized
from tree_sitter import Language, Node, Parser

RESULTS = ROOT / "build" / "native_mutants.json"
GENERATED = "tables.h"
"""Not mutated: it is generated from the machines' tables, and a test compares it with them."""
HANGS_CPU_S, TESTS_HANG_CPU_S = 25, 90
"""A judge that uses more CPU time hangs, and has found the mutant. Without a mutant, all tests use 20 s, and
each other judge up to 8 s. Wall time would find mutants whenever other programs use the CPUs."""
WAITS_S = 1800.0
"""A judge that takes longer waits for something that does not come."""


# --- Generate ---


@cache
def source_of(file: str) -> bytes:
    """The text of a file when this program began: `edits` reads all files before any process starts."""
    return (ROOT / NATIVE / file).read_bytes()


@dataclass(frozen=True)
class Edit:
    """One change: bytes `begin` to `end` of a file become `new`."""

    file: str
    operator: str
    begin: int
    end: int
    new: bytes

    @property
    def source(self) -> bytes:
        """The file's original text."""
        return source_of(self.file)

    @property
    def name(self) -> str:
        """The name in the results: it stays the same until the lines around it change."""
        line = self.source[: self.begin].count(b"\n") + 1
        column = self.begin - self.source.rfind(b"\n", 0, self.begin)
        return f"{self.file}:{line}:{column} {self.operator}"

    @property
    def change(self) -> str:
        """The change for readers."""
        old = self.source[self.begin : self.end].decode()
        return " ".join(f"{old}  ->  {self.new.decode()}".split())

    def applied(self) -> bytes:
        """The changed text of the file."""
        return self.source[: self.begin] + self.new + self.source[self.end :]


Change = tuple[Node, bytes] | tuple[Node, Node, bytes]
"""A node and its replacement; or the first and the last node of a range, and the replacement."""

_COMPARED = {b"<": b"<=", b"<=": b"<", b">": b">=", b">=": b">", b"==": b"!=", b"!=": b"=="}
_JOINED = {b"&&": b"||", b"||": b"&&"}
_COUNTED = {
    b"+": b"-",
    b"-": b"+",
    b"*": b"+",
    b"/": b"*",
    b"<<": b">>",
    b">>": b"<<",
    b"&": b"|",
    b"|": b"&",
}
_REFERENCES = (b"Py_INCREF", b"Py_XINCREF", b"Py_DECREF", b"Py_XDECREF", b"Py_CLEAR", b"owned")
_LIKE_FAILURE = (b"== NULL", b"< 0", b"!= FOLDED", b"!= 0")


def _text(node: Node) -> bytes:
    assert node.text is not None
    return node.text


def _called(node: Node) -> bytes:
    """The name of the function that an expression calls; empty if it is no call."""
    function = node.child_by_field_name("function") if node.type == "call_expression" else None
    return b"" if function is None else _text(function)


def _operator(node: Node, changed: dict[bytes, bytes]) -> Iterator[Change]:
    operator = node.child_by_field_name("operator") if node.type == "binary_expression" else None
    if operator is not None and _text(operator) in changed:
        yield operator, changed[_text(operator)]


def _constant(node: Node, more: int) -> Iterator[Change]:
    if node.type == "number_literal" and _text(node).isdigit():
        yield node, b"(%d)" % (int(_text(node)) + more)


def _negation(node: Node) -> Iterator[Change]:
    if node.type == "unary_expression" and _text(node).startswith(b"!"):
        yield node, _text(node)[1:]


def _is_reference(node: Node) -> bool:
    inner = node.named_children[0] if node.type == "expression_statement" and node.named_children else None
    return inner is not None and _called(inner) in _REFERENCES


def _dropped_reference(node: Node) -> Iterator[Change]:
    if _is_reference(node):
        yield node, b";"
    if _called(node) == b"owned":
        yield node, _text(node)[len("owned") :]


def _dropped_statement(node: Node) -> Iterator[Change]:
    droppable = ("expression_statement", "break_statement", "continue_statement")
    if node.type in droppable and not _is_reference(node) and not _is_prefetch(node):
        yield node, b";"
    if node.type == "return_statement" and not node.named_children:
        yield node, b";"


def _is_prefetch(node: Node) -> bool:
    """Whether the statement only brings memory into the cache: without it, all is slower and nothing else."""
    return b"prefetch" in _called(node.named_children[0]) if node.named_children else False


def _swapped(node: Node) -> Iterator[Change]:
    following = node.next_named_sibling
    if following is None or any(one.type != "expression_statement" for one in (node, following)):
        return
    if not (_is_release(node) and _is_release(following)) and not _are_independent(node, following):
        yield node, following, _text(following) + b" " + _text(node)


def _is_release(statement: Node) -> bool:
    """Whether the statement releases a thing, or takes a reference: two of these may stand in any order."""
    called = _called(statement.named_children[0]) if statement.named_children else b""
    return called in (*_REFERENCES, b"free", b"batch_clear") or _is_prefetch(statement)


def _are_independent(first: Node, second: Node) -> bool:
    """Whether both are assignments without a call, and neither names what the other one changes."""
    changed = []
    for statement in (first, second):
        inner = statement.named_children[0] if statement.named_children else None
        left = inner.child_by_field_name("left") if inner is not None else None
        if left is None or any(node.type == "call_expression" for node in _below(statement)):
            return False
        names = _names(left)
        changed.append(names[-1] if left.type != "subscript_expression" else names[0])
    return changed[0] not in _names(second) and changed[1] not in _names(first)


def _names(node: Node) -> list[bytes]:
    """The identifiers and fields that the node names, the last one last."""
    return [_text(one) for one in _below(node) if one.type in ("identifier", "field_identifier")]


def _ignored_failure(node: Node) -> Iterator[Change]:
    """Evaluate a check for failure, and continue as if it had found none."""
    fails = node.type == "binary_expression" and _text(node).endswith(_LIKE_FAILURE)
    fails = fails and not any(joint in _text(node) for joint in (b"&&", b"||", b"?"))
    if fails or (node.type == "unary_expression" and _text(node).startswith(b"!") and _has_call(node)):
        yield node, b"((void)(" + _text(node) + b"), 0)"


def _has_call(node: Node) -> bool:
    return any(bool(_called(child)) for child in node.named_children)


OPERATORS: dict[str, Callable[[Node], Iterator[Change]]] = {
    "comparison": partial(_operator, changed=_COMPARED),
    "logic": partial(_operator, changed=_JOINED),
    "arithmetic": partial(_operator, changed=_COUNTED),
    "more": partial(_constant, more=1),
    "less": partial(_constant, more=-1),
    "negation": _negation,
    "reference": _dropped_reference,
    "statement": _dropped_statement,
    "order": _swapped,
    "failure": _ignored_failure,
}


def edits() -> list[Edit]:
    """All changes of all functions."""
    parser = Parser(Language(tree_sitter_c.language()))
    files = sorted(path for path in (ROOT / NATIVE).glob("*.[ch]") if path.name != GENERATED)
    found = [
        edit
        for file in files
        for function in _below(parser.parse(source_of(file.name)).root_node)
        if function.type == "function_definition"
        for node in _below(function)
        for edit in _edits_of(file.name, node)
    ]
    return [*dict.fromkeys(found)]


def _below(node: Node) -> Iterator[Node]:
    yield node
    for child in node.children:
        yield from _below(child)


def _edits_of(file: str, node: Node) -> Iterator[Edit]:
    for name, operator in OPERATORS.items():
        for change in operator(node):
            yield Edit(file, name, change[0].start_byte, change[-2].end_byte, change[-1])


def drawn(everything: list[Edit], count: int, seed: int) -> list[Edit]:
    """Draw `count` changes, equally many of each operator if there are enough."""
    source = random.Random(seed)
    by_operator = [[edit for edit in everything if edit.operator == name] for name in OPERATORS]
    for same in by_operator:
        source.shuffle(same)
    in_turn = [edit for turn in zip_longest(*by_operator) for edit in turn if edit is not None]
    return in_turn[:count]


# --- Judge ---

_QUIET = ("-p", "no:cacheprovider", "-p", "no:randomly", "--no-header", "--tb=no", "-x")
_TWINS = (
    "tests/core/native/test_native.py",
    "tests/core/native/test_native_calls.py",
    "tests/core/native/test_native_hostile.py",
    "tests/core/native/test_native_memory.py",
    "tests/core/native/test_native_offers.py",
    "tests/core/policies/test_slot_queue.py",
    "tests/core/ledger/test_frozen_state.py",
    "tests/check/worlds/test_saving.py",
    "tests/core/ledger/test_ledger.py",
    "tests/copies/test_geometry.py",
    "tests/states/test_events.py",
)
_CLOSEST = {
    "calls.c": "tests/core/native/test_native_calls.py",
    "copy_plans.c": "tests/copies/test_geometry.py",
    "emitter.c": "tests/core/native/test_native_calls.py",
    "frozen.c": "tests/core/ledger/test_frozen_state.py",
    "frozen.h": "tests/core/ledger/test_frozen_state.py",
    "ids.c": "tests/states/test_events.py",
    "keeping.c": "tests/core/ledger/test_frozen_state.py",
    "matching.c": "tests/core/native/test_native_calls.py",
    "msgpack.c": "tests/core/ledger/test_frozen_state.py",
    "offers.c": "tests/core/native/test_native_offers.py",
    "saving.c": "tests/check/worlds/test_saving.py",
    "slot_queue.c": "tests/core/policies/test_slot_queue.py",
    "storing.c": "tests/core/native/test_native_calls.py",
}
"""C file -> cheap tests in which most of its mutants fail: they run before all other judges."""
_NOT = "not tables_are_those and not environment_chooses and not left_to_python_are_those"
"""Tests that look at the text of the sources, or start a process to ask which body it has."""


def _walk(target: str, runs: int) -> tuple[str, ...]:
    options = ("--seed", "1", "--runs", str(runs), "--jobs", "1", "--reduce-seconds", "0")
    return ("-m", "kvsm", "fuzz", "--target", target, *options)


def _tests(*files: str) -> tuple[str, ...]:
    return ("-m", "pytest", *_QUIET, "-k", _NOT, *files)


JUDGES: dict[str, tuple[str, ...]] = {
    "lockstep": ("tests/support/native_lockstep.py", "0", "80"),
    "tests": _tests(*_TWINS),
    "walk of the core": _walk("core", 60),
    "walk of serving": _walk("serving", 25),
    "walk of layers": _walk("layers", 25),
}
SANITIZED_JUDGES: dict[str, tuple[str, ...]] = {
    "lockstep, sanitized": ("tests/support/native_lockstep.py", "1000", "10"),
    "misuse, sanitized": ("tests/support/hostile_native.py", "0", "60"),
    "no memory, sanitized": ("-m", "pytest", *_QUIET, "tests/core/native/test_native_memory.py"),
}


def _judges_of(judges: dict[str, tuple[str, ...]], file: str) -> dict[str, tuple[str, ...]]:
    """These judges, and before them the tests that are closest to the C file."""
    if file not in _CLOSEST or "tests" not in judges:
        return judges
    others = [test for test in _TWINS if test != _CLOSEST[file]]
    return {"tests, closest": _tests(_CLOSEST[file]), **judges, "tests": _tests(*others)}


def failure(house: House, command: tuple[str, ...], environment: dict[str, str]) -> str:
    """How a judge fails; empty if it passes."""
    limit = TESTS_HANG_CPU_S if len(set(_TWINS) & set(command)) > 1 else HANGS_CPU_S
    try:
        done = house.run(*command, seconds=WAITS_S, cpu_seconds=limit, more=environment)
    except subprocess.TimeoutExpired:
        return "it hangs"
    if done.returncode == 0:
        return ""
    if done.returncode == -signal.SIGXCPU:
        return "it hangs"
    if done.returncode < 0:
        return signal.Signals(-done.returncode).name
    told = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR", "=="))]
    return (told[-1] if told else done.stdout.strip().rpartition("\n")[2])[:160]


class Workshop:
    """Judges mutants with the body built as for a release, and then with sanitizers."""

    def __init__(self, place: Path) -> None:
        self.released = Bench(House(place / "released"), *RELEASE)
        counted = House(place / "sanitized")
        counted.count_memory()
        self.sanitized = Bench(counted, *SANITIZERS)
        self.checks = sanitized(self.sanitized.house)

    def look_without_mutant(self) -> None:
        """Each judge must pass without a mutant."""
        for bench, judges, environment in self.rounds():
            for name, command in judges.items():
                if by := failure(bench.house, command, environment):
                    raise SystemExit(f"{name} fails without a mutant: {by}")

    def rounds(self) -> Iterator[tuple[Bench, dict[str, tuple[str, ...]], dict[str, str]]]:
        yield self.released, JUDGES, {}
        if self.checks is not None:
            yield self.sanitized, SANITIZED_JUDGES, self.checks

    def judge(self, edit: Edit) -> tuple[str, str]:
        """The outcome (`refused`, `same`, `killed` or `survived`), and by which judge."""
        try:
            for bench, judges, environment in self.rounds():
                with bench.changed(edit.file, edit.applied()) as is_another:
                    if not is_another:
                        return "same", "object code"
                    for name, command in _judges_of(judges, edit.file).items():
                        if by := failure(bench.house, command, environment):
                            return "killed", f"{name}: {by}"
        except BuildError as error:
            return "refused", str(error).splitlines()[0]
        return "survived", ""


_workshop: Workshop


def _open(place: str) -> None:
    global _workshop
    _workshop = Workshop(Path(tempfile.mkdtemp(dir=place)))


def _judged(edit: Edit) -> tuple[Edit, tuple[str, str]]:
    return edit, _workshop.judge(edit)


# --- Results ---


def table(results: dict[str, dict[str, str]]) -> str:
    """The results by operator, as a Markdown table."""
    rows = [
        "| change | mutants | killed in lockstep | by tests | by walks | by sanitizers | survived | killed |"
    ]
    rows += ["| --- | --: | --: | --: | --: | --: | --: | --: |"]
    for operator in [*OPERATORS, "all"]:
        judged = [one for name, one in results.items() if operator in (name.split()[1], "all")]
        by = [one["by"].split(":")[0] for one in judged if one["outcome"] == "killed"]
        survived = sum(one["outcome"] == "survived" for one in judged)
        total = len(by) + survived
        counts = [by.count("lockstep"), by.count("tests") + by.count("tests, closest")]
        counts += [sum(kind in one for one in by) for kind in ("walk", "sanitized")]
        share = f"{100 * len(by) / total:.1f} %" if total else "-"
        rows.append(f"| {operator} | {total} | {' | '.join(map(str, counts))} | {survived} | {share} |")
    return "\n".join(rows)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sample", type=int, default=300, help="how many changes (default: 300)")
    parser.add_argument("--seed", type=int, default=1, help="which ones (default: 1)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: 1)")
    parser.add_argument("--again", action="store_true", help="run only the last survivors, and new ones")
    parser.add_argument("--show", action="store_true", help="run nothing, print the survivors and the table")
    return parser.parse_args()


def run(chosen: list[Edit], jobs: int) -> Iterator[tuple[Edit, tuple[str, str]]]:
    place = tempfile.mkdtemp(prefix="kvsm-mutants-")
    try:
        first = Workshop(Path(place) / "first")
        first.look_without_mutant()
        if jobs == 1:
            yield from ((edit, first.judge(edit)) for edit in chosen)
            return
        with multiprocessing.Pool(jobs, _open, (place,)) as pool:
            yield from pool.imap_unordered(_judged, chosen)
    finally:
        shutil.rmtree(place)


def main() -> None:
    chosen_options = options()
    results: dict[str, dict[str, str]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if not chosen_options.show:
        chosen = drawn(edits(), chosen_options.sample, chosen_options.seed)
        known = {name: one for name, one in results.items() if chosen_options.again}
        results = {edit.name: known[edit.name] for edit in chosen if _is_settled(edit, known)}
        left = [edit for edit in chosen if edit.name not in results]
        RESULTS.parent.mkdir(exist_ok=True)
        for count, (edit, (outcome, by)) in enumerate(run(left, chosen_options.jobs), start=1):
            results[edit.name] = {"outcome": outcome, "by": by, "change": edit.change}
            shown = f"  {edit.change}" if outcome == "survived" else ""
            print(f"{count:4} of {len(left)}  {outcome:9}{edit.name}  {by}{shown}", flush=True)
            RESULTS.write_text(json.dumps(results, indent=1))
    for name, one in sorted(results.items()):
        if one["outcome"] == "survived":
            print(f"{name}\n    {one['change']}")
    print(table(results))


def _is_settled(edit: Edit, known: dict[str, Any]) -> bool:
    one = known.get(edit.name)
    return one is not None and one["outcome"] != "survived" and one["change"] == edit.change


if __name__ == "__main__":
    main()
