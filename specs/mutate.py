"""Fast mutation testing: how many small changes of the decision code do the tests detect?

    pip install -e '.[test]' mutmut==3.8.1
    python specs/mutate.py                  # from the root of a checkout; results in mutants/
    python specs/mutate.py --only 'kvsm/core/policies/*' --jobs 2
    python specs/mutate.py --again --examples 300 --seconds 30      # what survived the last run, or is new
    python specs/mutate.py --show           # survivors, and a table by file
    python specs/mutate.py --checks verify --sample 60 --seed 7    # weakened checks: `weaker_checks`

`mutmut` generates the mutants; `[tool.mutmut]` in pyproject.toml names the files and the tests. This program
runs them faster than `mutmut run`: pytest collects the tests once, and each mutant runs in a forked copy of
that process until its first failing test.

1. *Generate.* mutmut writes each file with each of its mutants as a function. mypy checks these files
   once. A mutant with a type error is refused, as in CI, and does not run.
2. *Survey.* Every test runs once under a tracer. Only tests that call a function run on its mutants.
3. *Run.* The child puts the mutant's code into the real function object, so code that imported the function
   earlier runs the mutant too. Tests that killed mutants of the same function come first, then those that
   call the fewest functions. A function that runs while kvsm is imported needs more, because it creates the
   tables: if its mutant survives, a process imports kvsm with the mutant in the source.

A mutant is killed by a failing test, or by a test that takes far more time than without the mutant. A
property test runs few examples (`--examples`), always the same ones. So the score is a lower bound: the suite
runs more examples.
"""

from __future__ import annotations

import argparse
import ast
import copy
import difflib
import fnmatch
import hashlib
import importlib.machinery
import importlib.util
import inspect
import json
import os
import pickle
import re
import resource
import select
import shutil
import signal
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from pathlib import Path
from random import Random
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple

import graphviz  # noqa: F401  (imported once, and not in every child)
import numpy  # noqa: F401
import pytest
import rich.console  # noqa: F401
import transitions.extensions.diagrams  # noqa: F401
from hypothesis import HealthCheck, Phase, settings
from mutmut.configuration import config
from mutmut.mutation.data import LineSpan
from mutmut.mutation.file_mutation import mutate_file_contents
from mutmut.type_checking import run_type_checker
from weaker_checks import AREAS, Definition, weaker

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "mutants"
RESULTS = WORK / "results.json"

IMPORT_TESTS = (
    "tests/states/test_states.py::TestDeclaration",
    "tests/states/test_diagram.py",
    "tests/states/test_states.py",
    "tests/core/offloader/test_offloader.py",
    "tests/core/ledger/test_ledger.py",
)
"""The tests for mutants of code that runs at import. The first ones compare each whole table."""

MEMORY_LIMIT = 6 << 30
"""The limit of a child's address space (bytes), which stops a mutant that allocates without end."""

QUICK: dict[str, Any] = {
    "deadline": None,
    "derandomize": True,
    "database": None,
    "phases": [Phase.explicit, Phase.generate],
    "report_multiple_bugs": False,
    "suppress_health_check": list(HealthCheck),
}
"""Settings of Hypothesis: always the same examples, and no shrinking of failures."""

HOUR = 3600.0
WALL = 600.0
"""The limit of a child's wall time (s), for a child that hangs without using CPU time."""

Function = tuple[str, str]
"""(file relative to the root, qualified name of a function in it)."""


@dataclass(frozen=True)
class Mutant:
    """One change of one function.

    function: the changed function.
    number: its number in mutmut's names, from 1, in the order of the source.
    definition: the definition of the mutant, under the original name; of a module's table, its assignment.
    refused: whether mypy reports a type error in it.
    """

    function: Function
    number: int
    definition: Definition
    refused: bool

    @property
    def name(self) -> str:
        """The name for people and in the results file."""
        return f"{self.function[0]}:{self.function[1]}:{self.number}"


class Verdict(NamedTuple):
    """The outcome of a mutant.

    outcome: `refused`, `killed`, `timeout` or `survived`.
    by: the test that killed it, or how many tests it survived.
    """

    outcome: str
    by: str


# --- Generate ---


def generate(only: list[str]) -> list[Mutant]:
    """Generate the mutants of the files that pyproject.toml and `only` select, with mypy's verdict."""
    shutil.rmtree(WORK / "kvsm", ignore_errors=True)
    shutil.copytree(ROOT / "kvsm", WORK / "kvsm", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "specs", WORK / "specs", dirs_exist_ok=True)
    shutil.copy(ROOT / "pyproject.toml", WORK)
    files = {}
    for name in _files(only):
        if config().should_mutate(name):
            files[name] = mutate_file_contents(name, (ROOT / name).read_text())
            # Without mutmut's own lines, which choose a mutant and hide types.
            (WORK / name).write_text(
                re.sub(r"(?m)^.*(_mutmut_mutated|MutantDict|# mutmut generated).*$", "", files[name].code)
            )
    refused = _refused_by_mypy({name: file.line_span_by_function_name for name, file in files.items()})
    return [
        mutant
        for name, file in files.items()
        for mutant in _mutants(name, ast.parse(file.code), refused.get(name, set()))
    ]


def _mutants(file: str, tree: ast.Module, refused: set[str]) -> Iterator[Mutant]:
    places = [("", tree.body)]
    places += [(node.name + ".", node.body) for node in tree.body if isinstance(node, ast.ClassDef)]
    for prefix, body in places:
        for node in body:
            mangled, _, number = getattr(node, "name", "").partition("__mutmut_")
            if isinstance(node, ast.FunctionDef) and number.isdigit():
                changed_name = node.name
                node.name = mangled[2:] if not prefix else mangled.rpartition("ǁ")[2]
                yield Mutant((file, prefix + node.name), int(number), node, changed_name in refused)


def generate_weaker(files: tuple[str, ...], only: list[str]) -> list[Mutant]:
    """Generate the weaker versions of the checks. Their types are right, so mypy does not check them."""
    mutants = []
    for name in _files(files, only):
        numbers: Counter[str] = Counter()
        for qualname, definition in weaker(parsed(name)):
            numbers[qualname] += 1
            mutants.append(Mutant((name, qualname), numbers[qualname], definition, refused=False))
    return mutants


def _files(*choices: Iterable[str]) -> Iterator[str]:
    """Yield the files of kvsm that a glob of each choice matches."""
    for path in sorted((ROOT / "kvsm").rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if all(any(fnmatch.fnmatch(name, glob) for glob in globs) for globs in choices):
            yield name


def _refused_by_mypy(spans: dict[str, Mapping[str, LineSpan]]) -> dict[str, set[str]]:
    """File -> the names of its mutants with a type error."""
    here = Path.cwd()
    os.chdir(WORK)
    errors = run_type_checker([sys.executable, "-m", *config().type_check_command])
    os.chdir(here)
    refused: dict[str, set[str]] = defaultdict(set)
    for error in errors:
        file = error.file_path.relative_to(WORK).as_posix()
        names = [n for n, span in spans[file].items() if span.start <= error.line_number <= span.end]
        if not names:
            raise SystemExit(f"{file}:{error.line_number} is no mutant, but {error.error_description}")
        refused[file].update(names)
    return refused


# --- Put a mutant in ---


def patch(mutant: Mutant) -> None:
    """Give the imported function the mutant's code and defaults."""
    file, qualname = mutant.function
    module = importlib.import_module(_module_name(file))
    if isinstance(mutant.definition, ast.Assign):
        _patch_table(module, qualname, mutant.definition)
        return
    owner, _, name = qualname.rpartition(".")
    node: ast.stmt = _undecorated(mutant.definition)
    if owner:  # names that begin with __ are mangled with the name of the class
        node = ast.ClassDef(name=owner, bases=[], keywords=[], body=[node], decorator_list=[])
    tree = ast.fix_missing_locations(ast.Module([node], []))
    annotations = importlib.import_module("__future__").annotations.compiler_flag
    scope = dict(vars(module))
    exec(compile(tree, file, "exec", flags=annotations, dont_inherit=True), scope)
    changed: FunctionType = vars(scope[owner])[name] if owner else scope[name]
    real = vars(vars(module)[owner])[name] if owner else vars(module)[name]
    for wrapped in ("__func__", "fget", "func"):
        real = getattr(real, wrapped, real)
    real = inspect.unwrap(real)
    real.__code__ = changed.__code__
    real.__defaults__, real.__kwdefaults__ = changed.__defaults__, changed.__kwdefaults__


def _patch_table(module: ModuleType, name: str, assignment: ast.Assign) -> None:
    """Replace a module's table in all modules that imported it."""
    scope, table = dict(vars(module)), vars(module)[name]
    exec(compile(ast.fix_missing_locations(ast.Module([assignment], [])), name, "exec"), scope)
    for other in list(sys.modules.values()):
        if getattr(other, "__dict__", {}).get(name) is table:
            setattr(other, name, scope[name])


def _undecorated(node: Any) -> Any:
    """A function's definition without its decorators; any other statement as it is."""
    bare = copy.copy(node)
    if isinstance(node, ast.FunctionDef):
        bare.decorator_list = []
    return bare


def _module_name(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


class MutantFinder:
    """A finder that imports the mutant's module with the mutant in its source. It handles no other module."""

    def __init__(self, mutant: Mutant) -> None:
        file, qualname = mutant.function
        owner, _, name = qualname.rpartition(".")
        tree = ast.parse((ROOT / file).read_text())
        body = tree.body
        if owner:
            body = next(n.body for n in body if isinstance(n, ast.ClassDef) and n.name == owner)
        place = next(i for i, n in enumerate(body) if isinstance(n, ast.FunctionDef) and n.name == name)
        real = body[place]
        assert isinstance(real, ast.FunctionDef)
        body[place] = _undecorated(mutant.definition)
        body[place].decorator_list = real.decorator_list  # type: ignore[attr-defined]
        self._module, self._path = _module_name(file), str(ROOT / file)
        self._code = compile(ast.fix_missing_locations(tree), self._path, "exec", dont_inherit=True)

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> Any:
        """The spec of the mutant's module; None for others, as `sys.meta_path` requires."""
        if name != self._module:
            return None
        code = self._code

        class Loader(importlib.machinery.SourceFileLoader):
            def get_code(self, _name: str) -> CodeType:
                return code

        return importlib.util.spec_from_file_location(
            name, self._path, loader=Loader(self._module, self._path)
        )


# --- Tests ---


class Session:
    """A pytest plugin that calls `work` after the collection, instead of running all tests.

    examples: the most examples of a property test.
    work: called with the session; None runs the tests as pytest does.
    """

    def __init__(self, examples: int, work: Callable[[Session], None] | None) -> None:
        self.examples, self.work = examples, work
        self.items: list[pytest.Item] = []
        self.failed = ""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Limit the examples of property tests, and sort these last."""
        settings.load_profile("mutation")
        for item in items:
            test: Any = getattr(item, "function", None)
            if getattr(test, "is_hypothesis_test", False):
                own: Any = getattr(test, "_hypothesis_internal_use_settings", settings.default)
                test._hypothesis_internal_use_settings = settings(
                    own, max_examples=min(own.max_examples, self.examples), **QUICK
                )
        items.sort(key=lambda item: bool(getattr(item.obj, "is_hypothesis_test", False)))  # type: ignore[attr-defined]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record a failed test."""
        if report.failed:
            self.failed = report.nodeid

    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Call `work` instead of pytest's loop, if it is given."""
        if self.work is None:
            return None
        self.items = list(session.items)
        self.work(self)
        return True

    def run(self, item: pytest.Item) -> str:
        """Run one test. Returns its name if it failed, otherwise ""."""
        self.failed = ""
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        return self.failed


def run_pytest(session: Session, arguments: list[str]) -> int:
    """Call pytest in this process."""
    quiet = ["-qq", "-pno:cacheprovider", "-pno:xdist", "--tb=no"]
    return int(pytest.main([*quiet, *arguments], plugins=[session]))


def silence() -> None:
    """Discard standard output, that is the output of pytest."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


@dataclass
class Survey:
    """The cost and the called functions of each test.

    seconds: test -> CPU time.
    calls: test -> the functions that it calls.
    at_import: the functions that run while their modules are imported.
    """

    seconds: dict[str, float]
    calls: dict[str, set[Function]]
    at_import: set[Function]

    def looks_at(self, test: str, mutant: Mutant) -> bool:
        """Whether a test calls the mutant's function; for a table, any function of its file."""
        if isinstance(mutant.definition, ast.Assign):
            return any(file == mutant.function[0] for file, _ in self.calls[test])
        return mutant.function in self.calls[test]


def imports_table(item: pytest.Item, mutant: Mutant) -> bool:
    """Whether a test's module imports the mutant's table. The test may compare it without a call."""
    file, name = mutant.function
    if not isinstance(mutant.definition, ast.Assign):
        return False
    table = vars(importlib.import_module(_module_name(file)))[name]
    return any(value is table for value in vars(getattr(item, "module", None) or object).values())


def survey(tests: list[str], examples: int) -> Survey:
    """Survey the tests in a child, or return the saved survey if no file has changed since."""
    digest = hashlib.blake2b(repr((tests, examples)).encode(), digest_size=8)
    for room in ("kvsm", "tests", "specs"):
        for path in sorted((ROOT / room).rglob("*.py")):
            digest.update(path.read_bytes())
    saved = WORK / f"survey-{digest.hexdigest()}"
    if not saved.exists():
        answer = in_child(lambda: pickle.dumps(_survey(tests, examples)), HOUR)
        if not answer:
            raise SystemExit("the tests cannot be surveyed")
        saved.write_bytes(answer)
    return pickle.loads(saved.read_bytes())  # type: ignore[no-any-return]


def _survey(tests: list[str], examples: int) -> Survey:
    called: set[CodeType] = set()

    def trace(frame: FrameType, _event: str, _argument: object) -> None:
        called.add(frame.f_code)

    def take() -> set[Function]:
        found = {(code.co_filename, code.co_qualname) for code in called}
        called.clear()
        inside = f"{ROOT}/kvsm/"
        return {(str(Path(file).relative_to(ROOT)), name) for file, name in found if file.startswith(inside)}

    result = Survey({}, {}, set())

    def work(session: Session) -> None:
        for item in session.items:
            began = time.process_time()
            sys.settrace(trace)
            failed = session.run(item)
            sys.settrace(None)
            result.seconds[item.nodeid] = time.process_time() - began
            # A test that fails without a mutant, or under the tracer, cannot detect mutants.
            result.calls[item.nodeid] = set() if failed else take()
            if failed:
                print(f"{item.nodeid} fails without a mutant, and is left out", file=sys.stderr)
                called.clear()

    sys.settrace(trace)
    for name in _files(["*"]):
        if config().should_mutate(name):
            importlib.import_module(_module_name(name))
    sys.settrace(None)
    result.at_import = take()
    silence()
    code = run_pytest(Session(examples, work), tests)
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) or not result.calls:
        raise SystemExit(f"the survey ended with pytest's exit code {code}")
    return result


# --- Children ---


def in_child(work: Callable[[], bytes], wall: float) -> bytes:
    """Run `work` in a forked child. Returns its answer; b"" if the child died or took `wall` seconds."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            answer = work()
            with os.fdopen(writing, "wb") as pipe:
                pipe.write(answer)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writing)
    answer, until = b"", time.monotonic() + wall
    while select.select([reading], [], [], max(until - time.monotonic(), 0.0))[0]:
        piece = os.read(reading, 1 << 20)
        if not piece:
            break
        answer += piece
    else:
        os.kill(child, signal.SIGKILL)
    os.close(reading)
    os.waitpid(child, 0)
    return answer


def judge(work: Callable[[], Verdict], wall: float) -> Verdict:
    """Run `work` in a child. Returns its verdict; `timeout` if the child dies before."""

    def verdict() -> bytes:
        try:
            return pickle.dumps(work())
        except BaseException as error:
            return pickle.dumps(Verdict("survived", f"could not be run: {error!r}"))

    answer = in_child(verdict, wall)
    return pickle.loads(answer) if answer else Verdict("timeout", "")


def limit(seconds: float) -> None:
    """Let this process die without a verdict after this much more CPU time, or with too much memory."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))


def run_patched(
    mutant: Mutant, session: Session, tests: list[pytest.Item], known: Survey, budget: float
) -> Verdict:
    """Run tests on a mutant in this process, until one fails or `budget` seconds of CPU time are spent."""
    patch(mutant)
    began = time.process_time()
    for count, item in enumerate(tests):
        if time.process_time() - began > budget:
            return Verdict("survived", f"{count} of {len(tests)} tests")
        limit(3.0 + 10 * known.seconds[item.nodeid])
        if session.run(item):
            return Verdict("killed", item.nodeid)
    return Verdict("survived", f"all {len(tests)} tests")


def run_imported(mutant: Mutant, examples: int) -> Verdict:
    """Import kvsm with the mutant in its source, and run files of tests until one fails."""
    sys.meta_path.insert(0, MutantFinder(mutant))
    limit(60.0)
    try:  # before pytest, whose own finder would come first
        importlib.import_module(_module_name(mutant.function[0]))
    except Exception as error:
        return Verdict("killed", f"its import: {type(error).__name__}")
    for file in IMPORT_TESTS:
        limit(60.0)
        session = Session(examples, None)
        if run_pytest(session, [file, "-x", "-pno:kvsm"]):
            return Verdict("killed", session.failed or file)
    return Verdict("survived", "all tests of the import")


def run_share(mutants: list[Mutant], known: Survey, options: argparse.Namespace, pipe: int) -> None:
    """Judge the mutants of one process. Writes a line for each verdict to `pipe`."""

    def write_verdict(mutant: Mutant, verdict: Verdict) -> None:
        os.write(pipe, json.dumps([mutant.name, *verdict]).encode() + b"\n")

    def run_collected(session: Session) -> None:
        kills: dict[Function, Counter[str]] = defaultdict(Counter)
        for mutant in mutants:
            function = mutant.function
            tests = sorted(
                (
                    item
                    for item in session.items
                    if known.looks_at(item.nodeid, mutant) or imports_table(item, mutant)
                ),
                key=lambda item: (
                    -kills[function][item.nodeid],
                    len(known.calls[item.nodeid]),
                    known.seconds[item.nodeid],
                ),
            )
            verdict = judge(partial(run_patched, mutant, session, tests, known, options.seconds), WALL)
            kills[function][verdict.by] += verdict.outcome == "killed"
            if verdict.outcome == "survived" and function in known.at_import:
                left.append(mutant.name)
            else:
                write_verdict(mutant, verdict)

    def run_all_collected() -> bytes:
        code = run_pytest(Session(options.examples, run_collected), options.tests)
        if code:
            raise SystemExit(f"a process of the run ended with pytest's exit code {code}")
        return pickle.dumps(left)

    # In a child, because pytest imports kvsm, and `run_imported` must import it first.
    left: list[str] = []
    left = pickle.loads(in_child(run_all_collected, HOUR))
    for mutant in mutants:
        if mutant.name in left:
            write_verdict(mutant, judge(partial(run_imported, mutant, options.examples), WALL))


def run(mutants: list[Mutant], known: Survey, options: argparse.Namespace) -> Iterator[tuple[str, Verdict]]:
    """Judge mutants in several processes. Yields (name, verdict) as they end.

    Each process gets the mutants of every n-th function.
    """
    functions = sorted({mutant.function for mutant in mutants})
    reading, writing = os.pipe()
    for share in range(options.jobs):
        mine = [mutant for mutant in mutants if functions.index(mutant.function) % options.jobs == share]
        if os.fork() == 0:
            try:
                silence()
                run_share(mine, known, options, writing)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        for count, line in enumerate(pipe, start=1):
            name, *verdict = json.loads(line)
            print(f"{count:5} of {len(mutants)}  {verdict[0]:9}{name}", file=sys.stderr)
            yield name, Verdict(*verdict)


# --- Results ---


@cache
def parsed(file: str) -> ast.Module:
    """The syntax tree of the original file."""
    return ast.parse((ROOT / file).read_text())


def change(mutant: Mutant) -> str:
    """The lines that a mutant changes, as a diff."""
    file, qualname = mutant.function
    node: Any = parsed(file)
    for part in qualname.split("."):
        node = next(one for one in node.body if part in _names(one))
    before, after = (ast.unparse(_undecorated(one)).splitlines() for one in (node, mutant.definition))
    lines = [*difflib.unified_diff(before, after, n=0, lineterm="")][2:]
    return "\n".join(line for line in lines if not line.startswith("@@"))


def _names(statement: Any) -> list[str]:
    """The names that a definition or an assignment defines."""
    targets = getattr(statement, "targets", [getattr(statement, "target", statement)])
    return [getattr(target, "name", getattr(target, "id", "")) for target in targets]


def table(results: dict[str, dict[str, str]]) -> str:
    """The results by file, as a Markdown table."""
    rows = ["| file | mutants | refused by mypy | killed | survived | tests alone | with mypy |"]
    rows += ["| --- | --: | --: | --: | --: | --: | --: |"]
    for file in [*sorted({name.split(":")[0] for name in results}), "all"]:
        mine = [one["outcome"] for name, one in results.items() if file in (name.split(":")[0], "all")]
        refused, survived = mine.count("refused"), mine.count("survived")
        killed = len(mine) - refused - survived
        alone = f"{100 * killed / (killed + survived):.1f} %" if killed + survived else "-"
        rows.append(
            f"| {file if file == 'all' else f'`{file}`'} | {len(mine)} | {refused} | {killed} | {survived}"
            f" | {alone} | {100 * (1 - survived / len(mine)):.1f} % |"
        )
    return "\n".join(rows)


def main() -> None:
    """Generate, survey, run, and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", default=["*"], metavar="GLOB", help="files, as 'kvsm/core/policies/*'"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: 1)")
    parser.add_argument(
        "--examples", type=int, default=10, help="the most that a property runs (default: 10)"
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="CPU time for a mutant (default: 5)")
    parser.add_argument("--tests", nargs="+", metavar="TEST", help="instead of those in pyproject.toml")
    parser.add_argument("--again", action="store_true", help="leave out what did not survive the last time")
    parser.add_argument(
        "--checks", choices=AREAS, help="weaken the checks of an area (specs/weaker_checks.py)"
    )
    parser.add_argument("--sample", type=int, metavar="N", help="run N mutants, drawn with --seed")
    parser.add_argument("--seed", type=int, default=1, help="the seed of --sample (default: 1)")
    parser.add_argument("--show", action="store_true", help="run nothing, print the survivors and the table")
    options = parser.parse_args()
    os.chdir(ROOT)
    area = AREAS.get(options.checks)
    chosen = options.tests or (area.tests if area else config().pytest_add_cli_args_test_selection)
    options.tests = [*config().pytest_add_cli_args, *chosen]
    os.environ.pop("CI", None)  # with it tests/conftest.py imports kvsm
    os.environ["KVSM_NATIVE"] = "0"  # mutate_native.py has the mutants of C
    settings.register_profile("mutation", **QUICK)
    WORK.mkdir(exist_ok=True)
    results: dict[str, dict[str, str]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if not options.show:
        mutants = generate_weaker(area.files, options.only) if area else generate(options.only)
        if options.sample is not None:
            mutants = Random(options.seed).sample(mutants, min(options.sample, len(mutants)))
        changes = {mutant.name: change(mutant) for mutant in mutants}
        files = {mutant.function[0] for mutant in mutants}
        kept = {}
        for name, one in results.items():
            dead = options.again and one["outcome"] != "survived" and one["change"] == changes.get(name)
            if dead or name.split(":")[0] not in files:
                kept[name] = one
        results = kept
        refused = [(one.name, Verdict("refused", "mypy")) for one in mutants if one.refused]
        running = [one for one in mutants if not one.refused and one.name not in results]
        known = survey(options.tests, options.examples)
        for count, (name, verdict) in enumerate(chain(refused, run(running, known, options))):
            results[name] = {"outcome": verdict.outcome, "by": verdict.by, "change": changes[name]}
            if count % 20 == 0:
                RESULTS.write_text(json.dumps(results, indent=1))
        RESULTS.write_text(json.dumps(results, indent=1))
    for name, one in sorted(results.items()):
        if one["outcome"] == "survived" and any(fnmatch.fnmatch(name.split(":")[0], g) for g in options.only):
            print(f"{name} ({one['by']})\n{one['change']}\n")
    print(table(results))


if __name__ == "__main__":
    main()
