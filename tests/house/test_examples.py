"""The examples keep their word: the good ones pass, the broken ones are caught, and told in few steps."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import hypothesis
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test
from places import ROOT

from kvsm.errors import PropertyBroken
from kvsm.testing import strategies
from kvsm.testing.machine_base import PropertyMachine

EXAMPLES = ROOT / "examples"
GOOD = sorted(EXAMPLES.glob("test_*.py"))
BROKEN = sorted((EXAMPLES / "broken").glob("test_*.py"))


def load(path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example as a module of its own name: a policy is found by the name of its module."""
    name = f"{path.parent.name}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def is_machine(one: object, module: ModuleType) -> bool:
    return isinstance(one, type) and issubclass(one, PropertyMachine) and one.__module__ == module.__name__


def run(module: ModuleType, examples: int) -> None:
    [machine] = [one for one in vars(module).values() if is_machine(one, module)]
    chosen = settings(
        machine.TestCase.settings,
        max_examples=examples,
        # Long runs find more, and take longer to shrink.
        stateful_step_count=10,
        derandomize=True,
        database=None,
        deadline=None,
    )
    run_state_machine_as_test(machine, settings=chosen)


def steps(error: BaseException) -> list[str]:
    """The program that Hypothesis prints, without its first and last line, which open and end every one."""
    lines = "\n".join(error.__notes__).splitlines()
    return [line for line in lines if "state." in line][1:-1]


def code_lines(path: Path) -> list[str]:
    """What a user writes: no imports, docstrings or blank lines."""
    tree = ast.parse(path.read_text())
    hidden: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) or (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        ):
            hidden.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(path.read_text().splitlines(), 1)
    return [line for number, line in lines if line.strip() and number not in hidden]


@pytest.mark.parametrize("path", [*GOOD, *BROKEN], ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_example_is_less_than_twenty_lines(path: Path) -> None:
    assert len(code_lines(path)) < 20


def test_there_is_a_broken_one_for_each() -> None:
    assert [path.name for path in GOOD] == [path.name for path in BROKEN]


@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.stem)
def test_good_example_passes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(load(path, monkeypatch), 12)


@pytest.mark.slow
@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.stem)
def test_good_example_passes_long(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(load(path, monkeypatch), 100)


CAUGHT = {
    "test_block_pool": ("conservation (S1): after touch", 4),
    "test_connector": ("progress (S9): after 100 steps", 8),
    "test_copy_engine": ("correct bytes (S15): ", 2),
    "test_manager": ("conservation (S1): at rest", 3),
    "test_policy": ("conservation (S1): after event", 4),
    "test_policy_state": ("events are state (S10): policy", 3),
}
"""How the broken examples are caught: the property, and most steps of the program that shows it."""


@functools.cache
def failure_of(path: Path) -> PropertyBroken:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(PropertyBroken) as caught:
        run(load(path, patch), 300)
    return caught.value


# The state of a policy is caught as a policy is, a block pool breaks the same property, and `test_testing.py`
# has another broken connector.
SLOW = ("test_block_pool", "test_connector", "test_policy", "test_policy_state")


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.slow] if path.stem in SLOW else [])
        for path in BROKEN
    ],
)
def test_broken_example_is_caught_in_few_steps(path: Path) -> None:
    said, most = CAUGHT[path.stem]
    assert str(failure_of(path)).startswith(said)
    assert len(steps(failure_of(path))) <= most


DOCUMENT = (EXAMPLES.parent / "docs" / "testing.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_documented_example_runs(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it defines runs, too: machines and tests."""
    module = ModuleType(f"documented_{number}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(BLOCKS[number], "docs/testing.md", "exec"), vars(module))
    if any(is_machine(one, module) for one in vars(module).values()):
        run(module, 10)
    for name, one in vars(module).items():
        if name.startswith("test_"):
            one()


def documented_program() -> tuple[str, list[str]]:
    """Return the failure that the page shows, and its program."""
    [shown] = re.findall(r"^(conservation .*?)^event 1 ", DOCUMENT, re.DOTALL | re.MULTILINE)
    said, program = shown.split("Failing test case: <state machine>\n")
    return said, program.splitlines()


def test_documented_failure_is_what_its_program_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    said, program = documented_program()
    names = {**vars(strategies), **vars(load(EXAMPLES / "broken" / "test_policy.py", monkeypatch))}

    @settings(max_examples=1)
    @given(st.just("\n".join(program)))
    def run_program(text: str) -> None:  # in a test of Hypothesis, as a machine needs it
        exec(text, names)

    with pytest.raises(PropertyBroken, match=re.escape(said)):
        run_program()


@pytest.mark.slow
@pytest.mark.skipif(
    hypothesis.__version_info__ < (6, 170), reason="older versions find the same bug, by a longer program"
)
def test_documented_failure_is_the_one_that_is_found() -> None:
    assert steps(failure_of(EXAMPLES / "broken" / "test_policy.py")) == documented_program()[1][2:-1]
